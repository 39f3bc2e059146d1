"""The store's system calls, each in one place, so that a test can stop the world between any two of them."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from eyas.errors import OutOfSpace, StoreError
from eyas.files import fsync_path

_SYNC_FILE_RANGE_WRITE = 2
_MAX_PARTS = 512  # below IOV_MAX (1024) on every Linux


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


_sync_file_range = _find_sync_file_range()


def raise_store_error(error: OSError, path: Path, doing: str) -> NoReturn:
    """Turn an operating system's error into ours; a full disk or quota stops the run in a state that resumes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise OutOfSpace(
            f"{path}: no space left while {doing}; free some, then run the same command again", path=path
        ) from None
    raise StoreError(f"{path}: {error.strerror or error} while {doing}", path=path) from error


class Files:
    """What the store asks of a file system. Files are private to the user; a name appears only complete."""

    def create(self, path: Path) -> int:
        """A new file, open for writing; an existing one is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        """Write the parts one after the other at `offset`; returns the number of bytes, always all of them."""
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        start = offset
        while views:
            written = os.pwritev(fd, views[:_MAX_PARTS], offset)
            offset += written
            while views and written >= views[0].nbytes:
                written -= views[0].nbytes
                views.pop(0)
            if written:
                views[0] = views[0][written:]
        return offset - start

    def start_writeback(self, fd: int, offset: int, num_bytes: int) -> None:
        """Ask the kernel to begin writing this range, so that the fsync to come has little left to do."""
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name; FileExistsError when the name is taken, whoever took it."""
        new.hardlink_to(old)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Make names in a directory last through a power cut."""
        fsync_path(path)


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that nobody else uses; what is left of it after a crash is an orphan."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def put_if_absent(files: Files, path: Path, data: bytes) -> bool:
    """Create `path` with `data`, durable and all at once; False when the name exists, which is left as it is.

    fsync before the link: a file system may show the name before the bytes.
    """
    temporary = temporary_name(path)
    fd = files.create(temporary)
    try:
        files.write(fd, [data], 0)
        files.fsync(fd)
    except OSError:
        files.close(fd)
        files.unlink(temporary)
        raise
    files.close(fd)
    won = link_if_absent(files, temporary, path)
    files.sync_directory(path.parent)
    return won


def link_if_absent(files: Files, temporary: Path, path: Path) -> bool:
    """Move a finished temporary file to `path` unless that name exists; says whether it was free."""
    try:
        files.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        files.unlink(temporary)
    return True


def replace(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Put `data` at `path` all at once, over what was there. For caches and heartbeats, not for commits."""
    temporary = temporary_name(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            if durable:
                out.flush()
                os.fsync(out.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
