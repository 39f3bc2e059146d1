"""A file system that stops the world: the process dies at the n-th call, and the power may go with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from eyas.store.files import Files
from eyas.store.layout import Layout

Mode = Literal["before", "after", "data_lost", "names_lost", "both_lost"]


class Crash(BaseException):
    """The process is dead."""


class CrashFiles(Files):
    """Dies at call number `at` (from 1), in the way that `mode` says; a dead process makes no further call.

    `before`: the call does not happen. `after`: it does, and nobody hears of it. The others are power cuts right after
    the call: what was written and not fsynced is lost (half a file of zeros is left of it), names that were made,
    moved or removed since their directory was last synced go back to what they were, or both. Calls exclude each other,
    so that the state in which the world stops is that of one moment.
    """

    def __init__(self, root: Path, at: int, mode: Mode, vault: Path) -> None:
        self.calls = 0
        self.dead = False
        self._at, self._mode, self._vault = at, mode, vault
        layout = Layout(root)
        self._directories = (root, layout.shards, layout.records, layout.plan)
        self._unsynced: set[int] = set()
        self._lock = threading.RLock()
        vault.mkdir(exist_ok=True)
        self._durable = {directory: self._keep(directory) for directory in self._directories}

    # --- the calls

    def create(self, path: Path) -> int:
        return self._call(lambda: self._written(Files.create(self, path)))

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        def act() -> int:
            written = Files.write(self, fd, parts, offset)
            self._written(fd)
            return written

        return self._call(act)

    def start_writeback(self, fd: int, offset: int, num_bytes: int) -> None:
        self._call(lambda: Files.start_writeback(self, fd, offset, num_bytes))

    def fsync(self, fd: int) -> None:
        # Memory of a test is all that has to hold the data: no need to wait for a real disk.
        self._call(lambda: self._unsynced.discard(os.fstat(fd).st_ino))

    def close(self, fd: int) -> None:
        self._call(lambda: Files.close(self, fd))

    def rename(self, old: Path, new: Path) -> None:
        self._call(lambda: Files.rename(self, old, new))

    def link(self, old: Path, new: Path) -> None:
        self._call(lambda: Files.link(self, old, new))

    def unlink(self, path: Path) -> None:
        self._call(lambda: Files.unlink(self, path))

    def sync_directory(self, path: Path) -> None:
        def act() -> None:
            if path in self._durable:
                self._durable[path] = self._keep(path)

        self._call(act)

    # --- the end

    def _call(self, act: Callable[[], Any]) -> Any:
        with self._lock:
            if self.dead:
                raise Crash
            self.calls += 1
            if self.calls != self._at:
                return act()
            self.dead = True
            if self._mode != "before":
                act()
            if self._mode in ("data_lost", "both_lost"):
                self._lose_data()
            if self._mode in ("names_lost", "both_lost"):
                self._lose_names()
            raise Crash

    def _written(self, fd: int) -> int:
        self._unsynced.add(os.fstat(fd).st_ino)
        return fd

    def _ours(self, directory: Path) -> Iterator[Path]:
        """The files that matter: not the lock, the log and other things that any run makes anew."""
        if directory.is_dir():
            for path in directory.iterdir():
                if path.is_file() and (directory != self._directories[0] or "eyas.json" in path.name):
                    yield path

    def _keep(self, directory: Path) -> dict[str, Path]:
        """The names that a directory holds now, each with a second link that brings it back."""
        kept = {}
        for path in self._ours(directory):
            kept[path.name] = self._vault / f"{path.stat().st_ino}-{path.name}"
            if not kept[path.name].exists():
                kept[path.name].hardlink_to(path)
        return kept

    def _lose_data(self) -> None:
        for directory in self._directories:
            for path in self._ours(directory):
                stat = path.stat()
                if stat.st_ino in self._unsynced:
                    path.write_bytes(b"\0" * (stat.st_size // 2))

    def _lose_names(self) -> None:
        for directory in self._directories:
            for path in list(self._ours(directory)):
                path.unlink()
            for name, kept in self._durable[directory].items():
                if directory.is_dir():
                    (directory / name).hardlink_to(kept)
