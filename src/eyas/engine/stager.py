"""The server's side of staging: states leave the device once, wait in bounded host memory, and become files.

Lives inside a serving engine's process, so it needs torch, NumPy, the standard library and xxhash alone, and it never
waits: what does not fit fails that one request, at once, and the client sends it again.

Letters: `T` tokens of a request, `R` rows of a forward (the tokens of all its requests), `H` hidden size.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eyas.engine import staged
from eyas.engine.pinned import HostPool
from eyas.engine.staged import ITEM_BYTES, TOKEN_IDS, RequestName

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

FULL = "full"
"""Reason of a failure that passes: the staging directory, its file system or the host pool has no room just now."""
PARTIAL_PATIENCE = 64
"""Forwards after which the chunks of a request that sent no further one are dropped: it was aborted."""


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """What the plugin may use; all in bytes."""

    staged_bytes: int
    """Files that the client has not taken yet."""
    min_free_bytes: int
    """Left free on the staging file system, and under the container's memory limit, whatever happens."""
    pool_bytes: int
    """Page-locked host memory."""


@dataclass(slots=True)
class _Rows:
    """Some consecutive rows of one request in host memory, or on their way there."""

    token_ids: Bytes
    """`[n * 8]`: int64."""
    fields: dict[str, Bytes]
    event: torch.cuda.Event | None


@dataclass(slots=True)
class _Partial:
    """A request whose prompt comes in chunks."""

    rows: list[_Rows] = field(default_factory=list)
    num_rows: int = 0
    seen_at: int = 0


class Stager:
    """Stages the states of requests; `stage` is for the engine's forward thread, files are written by others."""

    def __init__(
        self,
        staging: Path,
        limits: StagingLimits,
        *,
        rank: int = 0,
        last_hidden_norm: str = "post",
        num_threads: int = 4,
    ) -> None:
        self.staging, self._limits, self._rank = staging, limits, rank
        self._norm = last_hidden_norm
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="eyas-stage")
        self._pool: HostPool | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._partials: dict[str, _Partial] = {}
        self._forwards = 0
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self._writing_bytes = 0
        self.counts: Counter[str] = Counter()

    def stage(
        self,
        names: Sequence[RequestName | None],
        num_rows: Sequence[int],
        prefix_rows: Sequence[int],
        token_ids: torch.Tensor,
        fields: Mapping[str, torch.Tensor],
        neighbours: Collection[str] = (),
    ) -> list[dict[str, Any] | None]:
        """Take the rows of one forward: `token_ids` `[R]` and each of `fields` `[R, H]`, requests one after the other.

        `prefix_rows` of a request were processed by earlier forwards. Those of the fields that are `neighbours` are
        for the requests alone whose flags ask for them. Returns for each request what its answer says:
        None for a request that is not ours, else `path` and `bytes`, or `error`, `reason` and `retry`. Never waits and
        never raises for a request's sake.
        """
        self._forwards += 1
        self._drop_aborted()
        starts = np.concatenate([[0], np.cumsum(num_rows)]).tolist()
        wanted = [i for i, name in enumerate(names) if name is not None]
        answers: list[dict[str, Any] | None] = [None] * len(names)
        copied: _Rows | None = None
        for i in wanted:
            name = names[i]
            assert name is not None
            of_request = {f: t for f, t in fields.items() if f not in neighbours or staged.NEIGHBOURS in name.flags}
            why = self._why_not(name, num_rows[i], prefix_rows[i], of_request)
            if why is None and copied is None:
                copied = self._copy(starts[wanted[0]], starts[wanted[-1] + 1], token_ids, fields)
                if copied is None:
                    why = self._full(f"the host pool of {self._limits.pool_bytes} bytes is full")
            if why is not None or copied is None:
                self._partials.pop(str(name), None)
                self.counts["failed"] += 1
                answers[i] = why or self._full(f"the host pool of {self._limits.pool_bytes} bytes is full")
                continue
            begin = starts[i] - starts[wanted[0]]
            rows = _slice(copied, begin, begin + num_rows[i], of_request)
            answers[i] = self._continue(name, rows, num_rows[i], of_request)
        return answers

    def close(self) -> None:
        """Wait until every file is written."""
        self._writers.shutdown(wait=True)

    def room(self) -> dict[str, int]:
        """Bytes: `staged` now, allowed (`limit`), and `free` on the file system and under the memory limit."""
        self._forget_taken()
        return {
            "staged": self._staged_bytes(),
            "limit": self._limits.staged_bytes,
            "free": free_bytes(self.staging),
            "min_free": self._limits.min_free_bytes,
        }

    def _why_not(
        self, name: RequestName, num_rows: int, prefix_rows: int, fields: Mapping[str, torch.Tensor]
    ) -> dict[str, Any] | None:
        """Why a request's rows cannot be taken, as its answer."""
        partial = self._partials.get(str(name))
        have = partial.num_rows if partial is not None else 0
        if prefix_rows != have:
            return _refusal(
                f"{prefix_rows} of {name.num_tokens} rows come from a prefix cache or were lost, {have} are here: run "
                "the server with its radix cache off",
                "rows",
            )
        if have + num_rows > name.num_tokens:
            return _refusal(f"{have + num_rows} rows for {name.num_tokens} tokens", "rows")
        if have:
            return None
        if not name.path(self.staging).parent.is_dir():
            return _refusal(
                f"the server sees no directory {name.path(self.staging).parent}: it runs on another host or in another "
                "container than the client, or the client is gone",
                "no_directory",
            )
        need = name.num_tokens * (8 + sum(_row_bytes(tensor) for tensor in fields.values()))
        if self._staged_bytes() + need > self._limits.staged_bytes:
            self._forget_taken()
        held = self._staged_bytes()
        if held + need > self._limits.staged_bytes:
            return self._full(f"{held} of {self._limits.staged_bytes} staged bytes are in use, {need} more asked for")
        free = free_bytes(self.staging)
        if need + self._limits.min_free_bytes > free:
            return self._full(
                f"{free} bytes are free in {self.staging}, {need} asked for, {self._limits.min_free_bytes} must stay"
            )
        return None

    def _full(self, why: str) -> dict[str, Any]:
        self.counts["full"] += 1
        return {"error": why, "reason": FULL, "retry": True}

    def _continue(
        self, name: RequestName, rows: _Rows, num_rows: int, fields: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        partial = self._partials.setdefault(str(name), _Partial())
        partial.rows.append(rows)
        partial.num_rows += num_rows
        partial.seen_at = self._forwards
        if partial.num_rows < name.num_tokens:
            return {"pending": partial.num_rows}
        del self._partials[str(name)]
        path = name.path(self.staging, self._rank)
        layout = {f: (str(tensor.dtype).removeprefix("torch."), tensor.shape[1]) for f, tensor in fields.items()}
        num_bytes = name.num_tokens * (4 + sum(_row_bytes(tensor) for tensor in fields.values()))
        with self._lock:
            self._writing_bytes += num_bytes
        self._writers.submit(self._write, name, path, partial.rows, layout, num_bytes)
        return {"path": str(path), "bytes": num_bytes}

    def _write(
        self,
        name: RequestName,
        path: Path,
        rows: list[_Rows],
        layout: Mapping[str, tuple[str, int]],
        num_bytes: int,
    ) -> None:
        """In a writer's thread: wait for the copies, digest, write, rename. A failure becomes a file that says so."""
        try:
            for piece in rows:
                if piece.event is not None:
                    piece.event.synchronize()
            ids = np.concatenate([piece.token_ids.view("<i8") for piece in rows]).astype("<i4")
            parts: list[memoryview] = [ids.data.cast("B")]
            parts += [piece.fields[f].data for f in layout for piece in rows]
            head = staged.header(name, layout, self._norm, staged.digest_of(parts), self._rank)
            staged.write(path, [head, *parts])
            with self._lock:
                self._files[path] = num_bytes
            self.counts["staged"] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must hear of it
            self.counts["failed"] += 1
            logger.error("eyas: %s was not staged: %s: %s", name, type(error).__name__, error)
            try:
                staged.failed(path).write_text(f"{type(error).__name__}: {error}")
            except OSError as second:
                logger.error("eyas: nor could that be told: %s", second)
        finally:
            with self._lock:
                self._writing_bytes -= num_bytes

    def _copy(self, start: int, end: int, token_ids: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> _Rows | None:
        """Rows `start:end` on the host, or on their way; None when the pool has no room."""
        # Ids may lie in a buffer that the next forward fills again: a copy, in the forward's own order.
        ids = token_ids[start:end].to(torch.int64, copy=True)
        sources = {TOKEN_IDS: ids} | {f: t[start:end] for f, t in fields.items()}
        if not token_ids.is_cuda:
            # The host's own memory: nothing writes into a state once it left its layer, so a view will do.
            arrays = {f: _as_bytes(t.contiguous()).numpy() for f, t in sources.items()}
            return _Rows(arrays.pop(TOKEN_IDS), arrays, None)
        if self._pool is None:
            self._pool = HostPool(self._limits.pool_bytes)
        buffers = {}
        for f, tensor in sources.items():
            buffer = self._pool.take(tensor.numel() * tensor.element_size())
            if buffer is None:
                return None
            buffers[f] = buffer
        device = token_ids.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for f, tensor in sources.items():
                flat = _as_bytes(tensor.contiguous())
                buffers[f].destination.copy_(flat, non_blocking=True)
                # The forward goes on and lets go of its tensors: their memory waits until the copy has read it.
                tensor.record_stream(stream)
                flat.record_stream(stream)
            # A blocking event: a spinning one would take a core from the engine.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        arrays = {f: buffer.array for f, buffer in buffers.items()}
        return _Rows(arrays.pop(TOKEN_IDS), arrays, event)

    def _staged_bytes(self) -> int:
        with self._lock:
            return sum(self._files.values()) + self._writing_bytes

    def _forget_taken(self) -> None:
        """Files that the client has taken are not there any more."""
        with self._lock:
            paths = list(self._files)
        gone = [path for path in paths if not path.exists()]
        with self._lock:
            for path in gone:
                del self._files[path]

    def _drop_aborted(self) -> None:
        for key in [k for k, p in self._partials.items() if self._forwards - p.seen_at > PARTIAL_PATIENCE]:
            del self._partials[key]
            self.counts["aborted"] += 1


def free_bytes(staging: Path) -> int:
    """Bytes that may still be put into `staging`: on its file system, and under the memory limit of the container."""
    disk = os.statvfs(staging)
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


def _slice(copied: _Rows, begin: int, end: int, fields: Mapping[str, torch.Tensor]) -> _Rows:
    """Rows `begin:end` of what was copied; views keep its memory."""

    def cut(data: Bytes, row_bytes: int) -> Bytes:
        return data[begin * row_bytes : end * row_bytes]

    return _Rows(
        cut(copied.token_ids, 8),
        {f: cut(copied.fields[f], _row_bytes(tensor)) for f, tensor in fields.items()},
        copied.event,
    )


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1]) * ITEM_BYTES[str(tensor.dtype).removeprefix("torch.")]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).flatten()


def _refusal(why: str, reason: str) -> dict[str, Any]:
    return {"error": why, "reason": reason, "retry": False}
