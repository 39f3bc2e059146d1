"""A request's states on their way from a serving engine to capture: one file in memory, whole or not there at all.

Both sides use this module: the plugin inside the server writes, our client reads. It needs NumPy and xxhash and nothing
else of eyas, so that it can be put into a server's own environment.

A staging directory holds one directory for each capturing process, its *run*. The client makes it and holds a lock on
its owner file; when the lock is free, whoever made it is dead, whatever container or user it ran as. The plugin writes
only into a run that exists: what belongs to no run is never written.

A file is safetensors: `token_ids` `[T]` int32 as the engine processed them, then each field `[T, H]`. Its
`__metadata__` names the request, so that a file of another run or another request can never be taken for an answer, and
the digest of everything behind the header.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

VERSION = "1"
OWNER = "owner"
TOKEN_IDS = "token_ids"
CODES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_HEADER_BYTES = 1 << 20
"""No header is near this: a larger size is not one of ours."""
MAX_PARTS = 512  # below IOV_MAX (1024) on every Linux
_RUN = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"eyas\.([0-9a-f]{16})\.([0-9]{1,18})\.([a-z]*)\.([0-9]{1,10})")

HELLO = "h"
"""Flag: tell what you are, stage nothing."""
RANKS = "r"
"""Flag: every tensor-parallel rank stages its own states, for comparison."""
NEIGHBOURS = "n"
"""Flag: also stage the hidden state before each auxiliary one."""


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
    return len(text).to_bytes(8, "little") + text


def digest_of(parts: Sequence[memoryview]) -> str:
    """xxh3-128 of everything behind the header."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Put a file at `path`, whole, readable for whoever owns its directory. Raises OSError; leaves nothing then."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _share_with_owner(fd, path.parent)
            _write_all(fd, [memoryview(part) for part in parts])
        finally:
            os.close(fd)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _share_with_owner(fd: int, directory: Path) -> None:
    """A server often runs as another user, in a container as root: the client must be able to read what it is sent."""
    owner = directory.stat()
    if owner.st_uid != os.geteuid():
        try:
            os.fchown(fd, owner.st_uid, owner.st_gid)
        except PermissionError:
            os.fchmod(fd, 0o644)


def _write_all(fd: int, views: list[memoryview]) -> None:
    views = [view for view in views if view.nbytes]
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


def read(path: Path, name: RequestName, rank: int = 0) -> Staged:
    """Read a file and check that it is this request's and whole.

    Raises StagedError for anything else, FileNotFoundError, and PermissionError.
    """
    with path.open("rb", buffering=0) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
        view, filled = data.data, 0
        while filled < len(view):
            count = file.readinto(view[filled:])
            if not count:
                raise StagedError(f"{path}: became shorter while it was read")
            filled += count
    return parse(view, path, name, rank)


def parse(view: memoryview, path: Path, name: RequestName, rank: int = 0) -> Staged:
    """The contents of a staged file of request `name`; StagedError where it is not exactly that."""
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or size > min(MAX_HEADER_BYTES, len(view) - 8):
        raise StagedError(f"{path}: {len(view)} bytes with a header of {size}: not a staged file")
    body = view[8 + size :]
    try:
        tensors = json.loads(bytes(view[8 : 8 + size]))
        metadata = tensors.pop("__metadata__")
        shapes = {field: (t["dtype"], tuple(t["shape"]), tuple(t["data_offsets"])) for field, t in tensors.items()}
        names = metadata["fields"].split(",")
        version, request, stated = metadata["eyas.staged"], metadata["request"], metadata["digest"]
        norm, stated_rank = metadata["last_hidden_norm"], metadata["rank"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StagedError(f"{path}: its header cannot be read") from None
    if version != VERSION:
        raise StagedError(f"{path}: staged file version {version}, this is {VERSION}: give server and client one eyas")
    if request != str(name) or stated_rank != str(rank):
        raise StagedError(f"{path}: holds request {request} of rank {stated_rank}, not {name} of rank {rank}")
    fields: dict[str, tuple[str, tuple[int, int], memoryview]] = {}
    dtypes = {code: dtype for dtype, code in CODES.items()}
    at = 4 * name.num_tokens
    if shapes.get(TOKEN_IDS) != ("I32", (name.num_tokens,), (0, at)) or set(shapes) != {TOKEN_IDS, *names}:
        raise StagedError(f"{path}: its header does not fit its fields")
    for field in names:
        code, shape, (start, end) = shapes[field]
        dtype = dtypes.get(code, "")
        if len(shape) != 2 or shape[0] != name.num_tokens or start != at or not dtype:
            raise StagedError(f"{path}: {field} is {code} {list(shape)} at {start}, which cannot be")
        if end - start != shape[0] * shape[1] * ITEM_BYTES[dtype]:
            raise StagedError(f"{path}: {field} has {end - start} bytes, its shape says otherwise")
        fields[field] = (dtype, (int(shape[0]), int(shape[1])), body[start:end])
        at = end
    if at != len(body):
        raise StagedError(f"{path}: {len(body)} bytes behind the header, {at} stated")
    if digest_of([body]) != stated:
        raise StagedError(f"{path}: its bytes are not those that were written")
    ids = np.frombuffer(body[: 4 * name.num_tokens], dtype="<i4")
    return Staged(ids, fields, norm)


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
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def runs(staging: Path) -> list[Path]:
    """The runs of a staging directory; foreign files are not ours to look at."""
    try:
        return sorted(path for path in staging.iterdir() if _RUN.fullmatch(path.name) and (path / OWNER).exists())
    except OSError:
        return []


def is_dead(run: Path) -> bool:
    """Whether nobody holds the run's owner file any more."""
    try:
        fd = os.open(run / OWNER, os.O_RDONLY | os.O_CLOEXEC)
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
            sizes = [path.stat().st_size for path in run.iterdir() if path.is_file()]
            shutil.rmtree(run, ignore_errors=True)
            if not run.exists():
                removed, num_bytes = removed + 1, num_bytes + sum(sizes)
    return removed, num_bytes
