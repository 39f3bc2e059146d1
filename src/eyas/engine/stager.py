"""The server's side of staging: states leave the device once, wait in bounded host memory, and become files.

Lives inside a serving engine's process, so it needs torch, NumPy, the standard library and xxhash alone, and it never
waits: what does not fit fails that one request, at once, and the client sends it again.

Letters: `T` tokens of a request, `R` rows of a forward (the tokens of all its requests), `H` hidden size.
"""

from __future__ import annotations

import itertools
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
from eyas.engine.staged import FULL, ITEM_BYTES, NO_DIRECTORY, ROWS, TOKEN_IDS, TOO_LARGE, RequestName

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

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

    num_bytes: int
    """Of its file: reserved from the first chunk on, until it failed."""
    seen_at: int
    why_not: dict[str, Any] | None
    """The answer of a chunk that could not be taken is that of the later ones too: the server tells the last alone."""
    rows: list[_Rows] = field(default_factory=list)
    num_rows: int = 0
    alone: bool = True
    """Whether each of its forwards held nothing else."""
    failed: bool = False


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
        self._free: int | None = None
        """Bytes that are free and promised to nobody, as this forward goes on: asking costs a system call."""
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
        None for a request that is not ours, else `path`, `bytes` and whether it was `alone`, or `error`, `reason` and
        `retry`. Never waits and never raises for a request's sake.
        """
        self._forwards += 1
        self._drop_aborted()
        starts = [0, *itertools.accumulate(num_rows)]
        short = [f for f, tensor in ({TOKEN_IDS: token_ids} | dict(fields)).items() if len(tensor) < starts[-1]]
        if short:
            raise ValueError(f"{', '.join(short)}: fewer rows than the {starts[-1]} of the batch")
        wanted = [i for i, name in enumerate(names) if name is not None]
        answers: list[dict[str, Any] | None] = [None] * len(names)
        copied: _Rows | None = None
        self._free = None
        for i in wanted:
            name = names[i]
            assert name is not None
            of_request = {f: t for f, t in fields.items() if f not in neighbours or staged.NEIGHBOURS in name.flags}
            num_bytes = name.num_tokens * (4 + sum(_row_bytes(tensor) for tensor in of_request.values()))
            partial = self._partials.get(str(name))
            if partial is None or prefix_rows[i] == 0:
                self._partials.pop(str(name), None)  # the server began anew
                why_not = self._why_not(name, prefix_rows[i], num_bytes)
                # From here on its bytes are counted, for the other requests of this forward too.
                partial = _Partial(0 if why_not else num_bytes, self._forwards, why_not)
                self._partials[str(name)] = partial
            partial.alone &= len(names) == 1
            if partial.why_not is None:
                partial.why_not = _misfit(name, partial, num_rows[i], prefix_rows[i])
            if partial.why_not is None and copied is None:
                copied = self._copy(starts[wanted[0]], starts[wanted[-1] + 1], token_ids, fields)
                if copied is None:
                    partial.why_not = self._no_pool(name, of_request)
            if partial.why_not is None:
                assert copied is not None
                begin = starts[i] - starts[wanted[0]]
                rows = _slice(copied, begin, begin + num_rows[i], of_request)
                answers[i] = self._continue(name, partial, rows, num_rows[i], of_request)
            else:
                answers[i] = self._refuse(name, partial, prefix_rows[i] + num_rows[i])
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

    def _why_not(self, name: RequestName, prefix_rows: int, num_bytes: int) -> dict[str, Any] | None:
        """Why a request cannot be begun, as its answer."""
        if prefix_rows:
            return None  # _misfit says it
        directory = name.path(self.staging).parent
        if not directory.is_dir():
            return _refusal(
                f"the server sees no directory {directory}: it runs on another host or in another container than the "
                "client, or the client is gone",
                NO_DIRECTORY,
            )
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            return _refusal(
                f"the server, uid {os.geteuid()}, cannot write into {directory}: run client and server as one user, or "
                "the server as root",
                NO_DIRECTORY,
            )
        limits = self._limits
        if num_bytes > limits.staged_bytes:
            return _refusal(
                f"its states take {num_bytes} bytes, {limits.staged_bytes} may be staged in all: give the server more "
                "staged_bytes, or leave out so long a sample",
                TOO_LARGE,
            )
        if self._staged_bytes() + num_bytes > limits.staged_bytes:
            self._forget_taken()
        held = self._staged_bytes()
        if held + num_bytes > limits.staged_bytes:
            return self._full(f"{held} of {limits.staged_bytes} staged bytes are in use, {num_bytes} more asked for")
        if self._free is None:
            self._free = free_bytes(self.staging) - self._coming_bytes()
        if num_bytes + limits.min_free_bytes > self._free:
            return self._full(
                f"{self._free} bytes are free in {self.staging} and not promised, {num_bytes} asked for, "
                f"{limits.min_free_bytes} must stay"
            )
        # Whether it is written or still on its way when the next request of this forward asks.
        self._free -= num_bytes
        return None

    def _no_pool(self, name: RequestName, fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        need = name.num_tokens * (8 + sum(_row_bytes(tensor) for tensor in fields.values()))
        limit = self._limits.pool_bytes
        if need > limit:
            return _refusal(f"its states take {need} bytes of host memory, the pool has {limit}", TOO_LARGE)
        return self._full(f"the host pool of {limit} bytes is full")

    def _full(self, why: str) -> dict[str, Any]:
        self._count("full")
        return {"error": why, "reason": FULL, "retry": True}

    def _refuse(self, name: RequestName, partial: _Partial, rows_seen: int) -> dict[str, Any]:
        """The answer of a request that failed; its memory is let go, the reason stays until its last chunk."""
        assert partial.why_not is not None
        if not partial.failed:
            self._count("failed")
            partial.failed = True
        partial.rows.clear()
        partial.num_bytes, partial.seen_at = 0, self._forwards
        if rows_seen >= name.num_tokens:
            del self._partials[str(name)]
        return dict(partial.why_not)

    def _continue(
        self,
        name: RequestName,
        partial: _Partial,
        rows: _Rows,
        num_rows: int,
        fields: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        partial.rows.append(rows)
        partial.num_rows += num_rows
        partial.seen_at = self._forwards
        if partial.num_rows < name.num_tokens:
            return {"pending": partial.num_rows}
        path = name.path(self.staging, self._rank)
        layout = {f: (str(tensor.dtype).removeprefix("torch."), tensor.shape[1]) for f, tensor in fields.items()}
        with self._lock:
            del self._partials[str(name)]
            self._writing_bytes += partial.num_bytes
        try:
            self._writers.submit(self._write, name, path, partial.rows, layout, partial.num_bytes)
        except RuntimeError:  # closed
            with self._lock:
                self._writing_bytes -= partial.num_bytes
            self._count("failed")
            return {"error": "the server is shutting down", "reason": "closed", "retry": True}
        return {"path": str(path), "bytes": partial.num_bytes, "alone": partial.alone}

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
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must hear of it
            with self._lock:
                self._writing_bytes -= num_bytes
            self._count("failed")
            if isinstance(error, FileNotFoundError) and not path.parent.exists():
                logger.info("eyas: %s was not staged: its client is gone", name)
                return
            logger.error("eyas: %s was not staged: %s: %s", name, type(error).__name__, error)
            try:
                staged.write_failure(path, f"{type(error).__name__}: {error}")
            except OSError as second:
                logger.error("eyas: nor could that be told: %s", second)
        else:
            with self._lock:
                self._writing_bytes -= num_bytes
                self._files[path] = num_bytes
            self._count("staged")

    def _copy(self, start: int, end: int, token_ids: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> _Rows | None:
        """Rows `start:end` on the host, or on their way; None when the pool has no room."""
        # Ids may lie in a buffer that the next forward fills again: a copy, in the forward's own order.
        ids = token_ids[start:end].to(torch.int64, copy=True)
        sources = {TOKEN_IDS: ids} | {f: t[start:end] for f, t in fields.items()}
        if self._rank or not token_ids.is_cuda:
            # The host's own memory: nothing writes into a state once it left its layer, so a view will do. Ranks other
            # than the first stage a few samples in all, for comparison: no page-locked memory for those.
            arrays = {f: _as_bytes(t.contiguous().cpu()).numpy() for f, t in sources.items()}
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

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _staged_bytes(self) -> int:
        """Of files that are there and of those that are coming."""
        with self._lock:
            return sum(self._files.values()) + self._writing_bytes + self._partial_bytes()

    def _coming_bytes(self) -> int:
        """Promised to requests, and perhaps not yet taken from the file system."""
        with self._lock:
            return self._writing_bytes + self._partial_bytes()

    def _partial_bytes(self) -> int:
        return sum(partial.num_bytes for partial in list(self._partials.values()))

    def _forget_taken(self) -> None:
        """Files that the client has taken are not there any more."""
        with self._lock:
            paths = list(self._files)
        gone = [path for path in paths if not path.exists()]
        with self._lock:
            for path in gone:
                self._files.pop(path, None)

    def _drop_aborted(self) -> None:
        for key in [k for k, p in self._partials.items() if self._forwards - p.seen_at > PARTIAL_PATIENCE]:
            del self._partials[key]
            self._count("aborted")


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


def _slice(copied: _Rows, begin: int, end: int, fields: Mapping[str, torch.Tensor]) -> _Rows:
    """Rows `begin:end` of what was copied; views keep its memory."""

    def cut(data: Bytes, row_bytes: int) -> Bytes:
        return data[begin * row_bytes : end * row_bytes]

    return _Rows(
        cut(copied.token_ids, 8),
        {f: cut(copied.fields[f], _row_bytes(tensor)) for f, tensor in fields.items()},
        copied.event,
    )


def _misfit(name: RequestName, partial: _Partial, num_rows: int, prefix_rows: int) -> dict[str, Any] | None:
    """Why a chunk's rows are not the next ones of its request, as its answer."""
    if prefix_rows != partial.num_rows:
        return _refusal(
            f"{prefix_rows} of {name.num_tokens} rows come from a prefix cache or were lost, {partial.num_rows} are "
            "here: run the server with its radix cache off",
            ROWS,
        )
    if prefix_rows + num_rows > name.num_tokens:
        return _refusal(f"{prefix_rows + num_rows} rows for {name.num_tokens} tokens", ROWS)
    return None


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1]) * ITEM_BYTES[str(tensor.dtype).removeprefix("torch.")]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).flatten()


def _refusal(why: str, reason: str) -> dict[str, Any]:
    return {"error": why, "reason": reason, "retry": False}
