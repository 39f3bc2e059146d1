"""How a file of conversations comes into being: in a directory of its own beside its final name, then in one rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import xxhash
import zstandard

from eyas.errors import DataError, OutOfSpace

WRITE_BYTES = 1 << 20
GZIP_LEVEL, ZSTD_LEVEL = 5, 3


class OutputFile:
    """The output under a temporary name: compressed by the suffix of its final one, digested as it is written."""

    def __init__(self, path: Path, suffix: str) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 0)
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self._pending: list[bytes] = []
        self._num_pending = 0
        self._compressor: Any = None
        sink = cast(IO[bytes], _Sink(self._put))
        if suffix == ".gz":
            # No name and no time in the header: equal lines give equal bytes.
            self._compressor = gzip.GzipFile("", "wb", GZIP_LEVEL, sink, mtime=0)
        elif suffix == ".zst":
            self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(sink, closefd=False)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, line: bytes) -> None:
        self._pending.append(line)
        self._num_pending += len(line)
        if self._num_pending >= WRITE_BYTES:
            self._flush()

    def finish(self) -> None:
        """All that was written is on disk when this returns."""
        self._flush()
        if self._compressor is not None:
            self._compressor.close()
        os.fsync(self._file.fileno())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending, self._num_pending = [], 0
        if self._compressor is None:
            self._put(data)
        else:
            self._compressor.write(data)

    def _put(self, data: bytes) -> None:
        if self._file.closed:
            return  # a compressor that nobody finished writes its end when it is collected
        view = memoryview(data)
        self._hash.update(view)
        self.num_bytes += len(view)
        while view:
            view = view[self._file.write(view) :]


class _Sink:
    """Where a compressor writes to."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put

    def write(self, data: bytes) -> int:
        self._put(data)
        return len(data)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """A directory beside the output, empty and locked, gone afterwards; what a kill left in it is removed first."""
    path = out.with_name(f".{out.name}.merge")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fd = _lock(path, out)
        try:
            for left in path.iterdir():
                _remove(left)
            yield path
        finally:
            # Removed before the lock goes: nobody else may own the name while we remove it.
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from None


def _lock(path: Path, out: Path) -> int:
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DataError(f"{out}: another 'eyas data merge' is writing it; wait for it or stop it") from None
        except OSError as error:
            # Some shared file systems have no locks; the rename at the end is atomic there too.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(fd)
                raise
        # Between open and lock its last owner may have removed it: then the name is another directory, or free.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """A full disk becomes OutOfSpace, another trouble with it DataError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{out.parent}: disk full; merging needs about as much as its sources hold; free some, then run the "
                "same command again",
                path=out,
            ) from None
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from None
