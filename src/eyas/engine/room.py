"""How much a staging directory may still take, and putting a request's file there; a server's side of `staged`.

Lives inside a serving engine's process: NumPy, xxhash and the standard library alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.engine import staged
from eyas.engine.staged import FULL, NO_DIRECTORY, TOO_LARGE, RequestName

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """What the plugin may use; all in bytes."""

    staged_bytes: int
    """Files that the client has not taken yet."""
    min_free_bytes: int
    """Left free on the staging file system, and under the container's memory limit, whatever happens."""
    pool_bytes: int
    """Page-locked host memory."""


class Room:
    """What is staged, what is on its way, and whether one more request fits. Any thread may ask."""

    def __init__(self, staging: Path, limits: StagingLimits, partial_bytes: Callable[[], int] = lambda: 0) -> None:
        """`partial_bytes` tells what is promised to requests whose rows are not all there yet."""
        self._staging, self._limits, self._partial_bytes = staging, limits, partial_bytes
        self._free: int | None = None
        """Bytes that are free and promised to nobody, as this forward goes on: asking costs a system call."""
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self._writing_bytes = 0

    def look_again(self) -> None:
        """A new forward: what was free before it may be gone."""
        self._free = None

    def why_not(self, name: RequestName, num_bytes: int) -> dict[str, Any] | None:
        """Why a request of `num_bytes` cannot be begun, as its answer; None promises it the bytes for this forward."""
        directory = name.path(self._staging).parent
        if not directory.is_dir():
            return refusal(
                f"the server sees no directory {directory}: it runs on another host or in another container than the "
                "client, or the client is gone",
                NO_DIRECTORY,
            )
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            return refusal(
                f"the server, uid {os.geteuid()}, cannot write into {directory}: run client and server as one user, or "
                "the server as root",
                NO_DIRECTORY,
            )
        limits = self._limits
        if num_bytes > limits.staged_bytes:
            return refusal(
                f"its states take {num_bytes} bytes, {limits.staged_bytes} may be staged in all: give the server more "
                "staged_bytes, or leave out so long a sample",
                TOO_LARGE,
            )
        if self.staged_bytes() + num_bytes > limits.staged_bytes:
            self._forget_taken()
        held = self.staged_bytes()
        if held + num_bytes > limits.staged_bytes:
            return full(f"{held} of {limits.staged_bytes} staged bytes are in use, {num_bytes} more asked for")
        if self._free is None:
            self._free = free_bytes(self._staging) - self._coming_bytes()
        if num_bytes + limits.min_free_bytes > self._free:
            return full(
                f"{self._free} bytes are free in {self._staging} and not promised, {num_bytes} asked for, "
                f"{limits.min_free_bytes} must stay"
            )
        # Whether it is written or still on its way when the next request of this forward asks.
        self._free -= num_bytes
        return None

    def begin(self, num_bytes: int) -> None:
        """A file of so many bytes is on its way."""
        with self._lock:
            self._writing_bytes += num_bytes

    def end(self, num_bytes: int, path: Path | None) -> None:
        """It is at `path` until the client takes it; None when it could not be written."""
        with self._lock:
            self._writing_bytes -= num_bytes
            if path is not None:
                self._files[path] = num_bytes

    def told(self) -> dict[str, int]:
        """Bytes: `staged` now, allowed (`limit`), and `free` on the file system and under the memory limit."""
        self._forget_taken()
        return {
            "staged": self.staged_bytes(),
            "limit": self._limits.staged_bytes,
            "free": free_bytes(self._staging),
            "min_free": self._limits.min_free_bytes,
        }

    def staged_bytes(self) -> int:
        """Of files that are there and of those that are coming."""
        with self._lock:
            return sum(self._files.values()) + self._writing_bytes + self._partial_bytes()

    def _coming_bytes(self) -> int:
        """Promised to requests, and perhaps not yet taken from the file system."""
        with self._lock:
            return self._writing_bytes + self._partial_bytes()

    def _forget_taken(self) -> None:
        """Files that the client has taken are not there any more."""
        with self._lock:
            paths = list(self._files)
        gone = [path for path in paths if not path.exists()]
        with self._lock:
            for path in gone:
                self._files.pop(path, None)


def put(
    name: RequestName,
    path: Path,
    token_ids: npt.NDArray[np.int32],
    fields: Mapping[str, tuple[str, int]],
    parts: Sequence[memoryview],
    last_hidden_norm: str,
    rank: int = 0,
) -> None:
    """Write a request's file: its ids `[T]`, then `parts`, the bytes of `fields`, dtype and width by name.

    Raises OSError.
    """
    every = [np.ascontiguousarray(token_ids, dtype="<i4").data.cast("B"), *parts]
    staged.write_states(path, lambda digest: staged.header(name, fields, last_hidden_norm, digest, rank), every)


def tell_failure(name: RequestName, path: Path, error: Exception) -> None:
    """Put why a file could not be written beside it, for the client, and into the server's log."""
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        logger.info("eyas: %s was not staged: its client is gone", name)
        return
    logger.error("eyas: %s was not staged: %s: %s", name, type(error).__name__, error)
    try:
        staged.write_failure(path, f"{type(error).__name__}: {error}")
    except OSError as second:
        logger.error("eyas: nor could that be told: %s", second)


def refusal(why: str, reason: str) -> dict[str, Any]:
    """The answer of a request that will never be staged."""
    return {"error": why, "reason": reason, "retry": False}


def full(why: str) -> dict[str, Any]:
    """The answer of a request for which there is no room just now."""
    return {"error": why, "reason": FULL, "retry": True}


def free_bytes(staging: Path) -> int:
    """Bytes that may still be put into `staging`: on its file system, and under the memory limit of the container."""
    try:
        disk = os.statvfs(staging)
    except OSError:
        return 0  # it is not there
    free = disk.f_bavail * disk.f_frsize
    # Files in shared memory count against the container's limit, and going over it kills, it does not fail.
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            statistics = dict(
                line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines() if line
            )
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            # Clean pages of files are given back before anything is killed.
            used -= int(statistics.get("inactive_file", 0))
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        pass
    return max(0, free)
