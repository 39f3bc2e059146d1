"""How a server's answer becomes states here: where its file is, when it is whole, how it is read and removed.

`PluginFiles` are those that our plugin stages; a dialect may have its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from eyas.engine import staged
from eyas.engine.staged import RequestName, Staged, StagedError


class RowsError(StagedError):
    """A file that is whole and does not have the rows that it should: another try would not change that."""


class Pickup(Protocol):
    """One run's files at one server. All raise OSError, and StagedError where a file is none of the request's."""

    def path(self, name: RequestName, said: Mapping[str, Any], rank: int) -> Path:
        """Where the file of a request is, or will be."""
        ...

    def missing(self, path: Path) -> str:
        """What is still to come before the file can be read; empty when it can."""
        ...

    def read(self, path: Path, name: RequestName, rank: int, on_release: Callable[[], object]) -> Staged:
        """Its contents; `on_release` is called when their memory is given back. Raises RowsError too."""
        ...

    def remove(self, path: Path) -> None:
        """Whatever lies there of the request; nothing may."""
        ...

    def sweep(self, awaited: Collection[int]) -> None:
        """Remove this run's files of other serials than these: of requests given up, or that a killed server began."""
        ...

    def close(self) -> None:
        """Nobody waits for anything any more."""
        ...


@runtime_checkable
class OwnPickup(Protocol):
    """A dialect whose servers do not stage files as our plugin does."""

    def pickup(self, run: staged.Run) -> Pickup:
        """Of one run."""
        ...


class PluginFiles:
    """See `Pickup`: files of our plugin, in the run's own directory."""

    def __init__(self, run: staged.Run, unfinished_s: float) -> None:
        """What was begun and not written to for `unfinished_s` was left by a killed server."""
        self._run, self._unfinished_s = run, unfinished_s

    def path(self, name: RequestName, said: Mapping[str, Any], rank: int) -> Path:
        return name.path(self._run.staging, rank)

    def missing(self, path: Path) -> str:
        if path.exists():
            return ""
        if staged.failed(path).exists():
            why = staged.failed(path).read_text() or "the server's log says why"
            staged.failed(path).unlink(missing_ok=True)
            raise StagedError(f"staging failed: {why}")
        return f"the server says it staged {path}, which is not here"

    def read(self, path: Path, name: RequestName, rank: int, on_release: Callable[[], object]) -> Staged:
        return staged.read(path, name, rank, on_release)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sweep(self, awaited: Collection[int]) -> None:
        try:
            paths = list(self._run.path.iterdir())
        except OSError:
            return  # it is gone; the server will say so
        for path in paths:
            serial = path.name.partition(".")[0]
            if not serial.isdecimal() or int(serial) in awaited:
                continue
            # What is still being written (.tmp) gets its name first.
            if path.suffix != ".tmp" or staged.age_s(path) > self._unfinished_s:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """The run's directory goes as a whole."""
