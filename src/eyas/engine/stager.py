"""The server's side of staging: states leave the device once, wait in bounded host memory, and become files.

Lives inside a serving engine's process, so it needs torch, NumPy, the standard library and xxhash alone, and it never
waits: what does not fit fails that one request, at once, and the client sends it again.

Letters: `T` tokens of a request, `R` rows of a forward (the tokens of all its requests), `H` hidden size.
"""

from __future__ import annotations

import itertools
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
from eyas.engine.room import Room, StagingLimits, full, put, refusal, tell_failure
from eyas.engine.staged import ITEM_BYTES, ROWS, TOKEN_IDS, TOO_LARGE, RequestName

Bytes = npt.NDArray[np.uint8]

PARTIAL_PATIENCE = 64
"""Forwards after which the chunks of a request that sent no further one are dropped: it was aborted."""


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
        self._room = Room(staging, limits, self._partial_bytes)
        self._lock = threading.Lock()
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
        self._room.look_again()
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
        return self._room.told()

    def _why_not(self, name: RequestName, prefix_rows: int, num_bytes: int) -> dict[str, Any] | None:
        """Why a request cannot be begun, as its answer."""
        if prefix_rows:
            return None  # _misfit says it
        why_not = self._room.why_not(name, num_bytes)
        if why_not is not None and why_not["retry"]:
            self._count("full")
        return why_not

    def _no_pool(self, name: RequestName, fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        need = name.num_tokens * (8 + sum(_row_bytes(tensor) for tensor in fields.values()))
        limit = self._limits.pool_bytes
        if need > limit:
            return refusal(f"its states take {need} bytes of host memory, the pool has {limit}", TOO_LARGE)
        self._count("full")
        return full(f"the host pool of {limit} bytes is full")

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
        del self._partials[str(name)]
        self._room.begin(partial.num_bytes)
        try:
            self._writers.submit(self._write, name, path, partial.rows, layout, partial.num_bytes)
        except RuntimeError:  # closed
            self._room.end(partial.num_bytes, None)
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
            parts = [piece.fields[f].data for f in layout for piece in rows]
            put(name, path, ids, layout, parts, self._norm, self._rank)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must hear of it
            self._room.end(num_bytes, None)
            self._count("failed")
            tell_failure(name, path, error)
        else:
            self._room.end(num_bytes, path)
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

    def _partial_bytes(self) -> int:
        return sum(partial.num_bytes for partial in list(self._partials.values()))

    def _drop_aborted(self) -> None:
        for key in [k for k, p in self._partials.items() if self._forwards - p.seen_at > PARTIAL_PATIENCE]:
            del self._partials[key]
            self._count("aborted")


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
        return refusal(
            f"{prefix_rows} of {name.num_tokens} rows come from a prefix cache or were lost, {partial.num_rows} are "
            "here: run the server with its radix cache off",
            ROWS,
        )
    if prefix_rows + num_rows > name.num_tokens:
        return refusal(f"{prefix_rows + num_rows} rows for {name.num_tokens} tokens", ROWS)
    return None


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1]) * ITEM_BYTES[str(tensor.dtype).removeprefix("torch.")]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).flatten()
