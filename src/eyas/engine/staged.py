"""A request's states on their way from a serving engine to capture: one file in memory, whole or not there at all.

Both sides use this module: the plugin inside the server writes, our client reads. It needs NumPy and xxhash and nothing
else of eyas, so that it can be put into a server's own environment.

A staging directory holds one directory for each capturing process, its *run*. The client makes it and holds a lock on
its owner file; when the lock is free, whoever made it is dead, whatever container or user it ran as. The plugin writes
only into a run that exists: what belongs to no run is never written.

A file is safetensors: `token_ids` `[T]` int32 as the engine processed them, then each field `[T, H]`. Its
`__metadata__` names the request, so that a file of another run or another request can never be taken for an answer, and
two digests: of the header itself and of everything behind it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

VERSION = "2"
OWNER = "owner"
TOKEN_IDS = "token_ids"
CODES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_HEADER_BYTES = 1 << 20
"""No header is near this: a larger size is not one of ours."""
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
MAX_PARTS = 512  # below IOV_MAX (1024) on every Linux
DIGEST_APART_BYTES = 1 << 24
"""From this size on a thread of its own for the digest is worth its start."""
_RUN = re.compile(r"[0-9a-f]{16}")
_REMOVED = re.compile(r"\.[0-9a-f]{16}\.(new|gone)")
_NAME = re.compile(r"eyas\.([0-9a-f]{16})\.(0|[1-9][0-9]{0,17})\.([a-z]*)\.([1-9][0-9]{0,9})")
_UNSTATED = "0" * 32
"""Stands for the header's digest while that is computed."""
_NEW_PATIENCE_S = 3600
"""Making a run takes no time: a directory that is still being made after this was left by a killed process."""

HELLO = "h"
"""Flag: tell what you are, stage nothing."""
RANKS = "r"
"""Flag: every tensor-parallel rank stages its own states, for comparison."""
NEIGHBOURS = "n"
"""Flag: also stage the hidden state before each auxiliary one."""

INFO_KEY = "eyas"
"""Where an answer carries what the plugin says of its request."""
FULL = "full"
"""Reason of a failure that passes: the staging directory, its file system or the host pool has no room just now."""
TOO_LARGE = "too_large"
"""Reason of a failure that does not: the request alone is more than there ever is room for."""
NO_DIRECTORY = "no_directory"
ROWS = "rows"


class StagedError(Exception):
    """A staged file is not what it should be; the text says which and why."""


@dataclass(frozen=True, slots=True)
class RequestName:
    """What a request is called at the server, and its file in the staging directory. Never used twice."""

    run: str
    """16 hex digits: the capturing process."""
    serial: int
    num_tokens: int
    """All of the prompt's: so the plugin knows when the last chunk is there."""
    flags: str = ""

    def __str__(self) -> str:
        return f"eyas.{self.run}.{self.serial}.{self.flags}.{self.num_tokens}"

    @classmethod
    def parse(cls, text: str) -> RequestName | None:
        """The name of one of our requests; None for a health check or another client's."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        run, serial, flags, num_tokens = match.groups()
        return cls(run, int(serial), int(num_tokens), flags)

    def path(self, staging: Path, rank: int = 0) -> Path:
        """Its file, by tensor-parallel rank."""
        return staging / self.run / (f"{self.serial}.states" if rank == 0 else f"{self.serial}.rank{rank}")


def failed(path: Path) -> Path:
    """Where a staged file that could not be written says why."""
    return path.with_name(path.name + ".failed")


def header(
    name: RequestName,
    fields: Mapping[str, tuple[str, int]],
    last_hidden_norm: str,
    digest: str,
    rank: int = 0,
) -> bytes:
    """The file's beginning. `fields`: dtype and width `H` by field name, in the order in which they follow."""
    tensors: dict[str, Any] = {
        "__metadata__": {
            "eyas.staged": VERSION,
            "request": str(name),
            "run": name.run,
            "rank": str(rank),
            "fields": ",".join(fields),
            "last_hidden_norm": last_hidden_norm,
            "digest": digest,
            "header_digest": _UNSTATED,
        },
        TOKEN_IDS: {"dtype": "I32", "shape": [name.num_tokens], "data_offsets": [0, 4 * name.num_tokens]},
    }
    at = 4 * name.num_tokens
    for field, (dtype, width) in fields.items():
        size = name.num_tokens * width * ITEM_BYTES[dtype]
        tensors[field] = {
            "dtype": CODES[dtype],
            "shape": [name.num_tokens, width],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = text.replace(_UNSTATED.encode(), xxhash.xxh3_128_hexdigest(text).encode(), 1)
    return len(text).to_bytes(8, "little") + text


def digest_of(parts: Sequence[memoryview]) -> str:
    """xxh3-128 of everything behind the header."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Put a file at `path`, whole, readable for whoever owns its directory. Raises OSError; leaves nothing then."""
    with _new(path) as fd:
        _write_all(fd, parts)


def write_states(path: Path, header_of: Callable[[str], bytes], parts: Sequence[memoryview]) -> None:
    """As `write`, of a header that tells the digest of `parts`, which come behind it.

    A large file is digested while it is written, so that its client waits for the longer of the two, not for both.
    """
    if sum(part.nbytes for part in parts) < DIGEST_APART_BYTES:
        write(path, [header_of(digest_of(parts)), *parts])
        return
    with ThreadPoolExecutor(1, "eyas-digest") as apart, _new(path) as fd:
        digest = apart.submit(digest_of, parts)
        os.lseek(fd, len(header_of(_UNSTATED)), os.SEEK_SET)
        _write_all(fd, parts)
        os.lseek(fd, 0, os.SEEK_SET)
        _write_all(fd, [header_of(digest.result())])


@contextlib.contextmanager
def _new(path: Path) -> Iterator[int]:
    """A new file's descriptor; it gets its name at the end, and is gone after an error."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _share_with_owner(fd, path.parent)
            yield fd
        finally:
            os.close(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_failure(path: Path, why: str) -> None:
    """Say beside `path` why it is not there; without a word where the file system has no room for one."""
    try:
        write(failed(path), [why.encode()])
    except OSError:
        os.close(os.open(failed(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


def _share_with_owner(fd: int, directory: Path) -> None:
    """A server often runs as another user, in a container as root: the client must be able to read what it is sent."""
    owner = directory.stat()
    if owner.st_uid != os.geteuid():
        try:
            os.fchown(fd, owner.st_uid, owner.st_gid)
        except OSError:  # not root, or the owner is unknown in this container
            os.fchmod(fd, 0o644)


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    views = [view for view in [memoryview(part) for part in parts] if view.nbytes]
    while views:
        written = os.writev(fd, views[:MAX_PARTS])
        while views and written >= views[0].nbytes:
            written -= views[0].nbytes
            views.pop(0)
        if written:
            views[0] = views[0][written:]


@dataclass(frozen=True, slots=True)
class Staged:
    """What a staged file holds."""

    token_ids: npt.NDArray[np.int32]
    """`[T]`, as the engine processed them."""
    fields: Mapping[str, tuple[str, tuple[int, int], memoryview]]
    """Dtype, shape `[T, H]` and bytes, by field name."""
    last_hidden_norm: str


def read(path: Path, name: RequestName, rank: int = 0, on_release: Callable[[], object] | None = None) -> Staged:
    """Map a file and check that it is this request's and whole; `on_release` is called when its memory is given back.

    Mapped, not read: its pages are in memory already, and a copy into fresh ones costs several times what the digest
    costs. It is complete, and nobody shortens it: the writer has renamed it. The caller may unlink it at once.
    Raises StagedError for anything else, FileNotFoundError, and PermissionError.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise StagedError(f"{path}: empty, not a staged file")
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | _MAP_POPULATE, prot=mmap.PROT_READ)
    found = parse(memoryview(mapped), path, name, rank)
    if on_release is not None:
        weakref.finalize(mapped, on_release).atexit = False
    return found


def parse(view: memoryview, path: Path, name: RequestName, rank: int = 0) -> Staged:
    """The contents of a staged file of request `name`; StagedError where it is not exactly that."""
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or size > min(MAX_HEADER_BYTES, len(view) - 8):
        raise StagedError(f"{path}: {len(view)} bytes with a header of {size}: not a staged file")
    text, body = bytes(view[8 : 8 + size]), view[8 + size :]
    try:
        tensors = json.loads(text)
        metadata = tensors.pop("__metadata__")
        version, request, stated = metadata["eyas.staged"], metadata["request"], metadata["digest"]
        if version == VERSION:
            names = metadata["fields"].split(",")
            norm, stated_rank, header_digest = (metadata[k] for k in ("last_hidden_norm", "rank", "header_digest"))
            unstated = text.replace(header_digest.encode(), _UNSTATED.encode(), 1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StagedError(f"{path}: its header cannot be read") from None
    if version != VERSION:
        raise StagedError(f"{path}: staged file version {version}, this is {VERSION}: give server and client one eyas")
    if xxhash.xxh3_128_hexdigest(unstated) != header_digest:
        raise StagedError(f"{path}: its header is not the one that was written")
    if request != str(name) or stated_rank != str(rank):
        raise StagedError(f"{path}: holds request {request} of rank {stated_rank}, not {name} of rank {rank}")
    fields: dict[str, tuple[str, tuple[int, int], memoryview]] = {}
    num_rows = name.num_tokens
    at = 4 * num_rows
    of_ids = {"dtype": "I32", "shape": [num_rows], "data_offsets": [0, at]}
    if tensors.get(TOKEN_IDS) != of_ids or tensors.keys() != {TOKEN_IDS, *names}:
        raise StagedError(f"{path}: its header does not fit its fields")
    for field in names:
        entry = tensors[field]
        for dtype, code in CODES.items():
            shape = entry.get("shape") if isinstance(entry, dict) and entry.get("dtype") == code else None
            width = shape[1] if isinstance(shape, list) and len(shape) == 2 else 0
            end = at + num_rows * width * ITEM_BYTES[dtype] if type(width) is int and width > 0 else -1
            if end > at and entry == {"dtype": code, "shape": [num_rows, width], "data_offsets": [at, end]}:
                fields[field] = (dtype, (num_rows, width), body[at:end])
                at = end
                break
        else:
            raise StagedError(f"{path}: {field} is {entry} at byte {at}, which cannot be")
    if at != len(body):
        raise StagedError(f"{path}: {len(body)} bytes behind the header, {at} stated")
    if digest_of([body]) != stated:
        raise StagedError(f"{path}: its bytes are not those that were written")
    # A copy: the ids must not keep the states' memory.
    return Staged(np.frombuffer(body[: 4 * num_rows], dtype="<i4").copy(), fields, norm)


class Run:
    """The client's side of a staging directory: made at the start, gone at the end, whatever was left in it."""

    def __init__(self, staging: Path) -> None:
        """Make the run's directory. Raises OSError."""
        self.staging = staging
        self.token = secrets.token_hex(8)
        self.path = staging / self.token
        new = staging / f".{self.token}.new"
        new.mkdir(mode=0o700)
        try:
            self._fd = os.open(new / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise

    def num_sharing(self) -> int:
        """How many live runs share the staging directory, this one included."""
        return max(1, sum(not is_dead(path) for path in runs(self.staging)))

    def close(self) -> None:
        """Remove the directory: what the server still writes for this run goes nowhere."""
        _remove(self.path)
        os.close(self._fd)


def runs(staging: Path) -> list[Path]:
    """The runs of a staging directory, other users' too; foreign files are not ours to look at."""
    try:
        return sorted(path for path in staging.iterdir() if _RUN.fullmatch(path.name) and _is_run(path))
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode) and stat.S_ISREG((path / OWNER).lstat().st_mode)
    except PermissionError:
        return True  # another user's: nobody else looks into it
    except OSError:
        return False


def is_dead(run: Path) -> bool:
    """Whether nobody holds the run's owner file any more."""
    try:
        fd = os.open(run / OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # just gone, or another user's: not ours to judge
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove_dead_runs(staging: Path) -> tuple[int, int]:
    """Remove what killed runs left: `(runs, bytes)`. Only ours, only dead ones."""
    removed = num_bytes = 0
    for run in runs(staging):
        if is_dead(run):
            size = _size(run)
            if _remove(run):
                removed, num_bytes = removed + 1, num_bytes + size
    # What was killed while it made or removed a run.
    for path in staging.glob(".*"):
        if _REMOVED.fullmatch(path.name) and (path.suffix == ".gone" or age_s(path) > _NEW_PATIENCE_S):
            shutil.rmtree(path, ignore_errors=True)
    return removed, num_bytes


def _remove(run: Path) -> bool:
    """Remove a run's directory, whatever is being written into it; False when somebody else did."""
    # Out of the writers' way first: a file that appears while its directory is emptied would keep that, without an
    # owner file and so for ever.
    gone = run.with_name(f".{run.name}.gone")
    try:
        run.rename(gone)
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return not gone.exists()


def _size(directory: Path) -> int:
    """Bytes of the files in a directory that others may be removing."""
    total = 0
    try:
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += path.lstat().st_size
    except OSError:
        pass
    return total


def age_s(path: Path) -> float:
    """Seconds since a file was written to; 0 where it is not there."""
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0
