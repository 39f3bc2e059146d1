"""The worker's side of the connector: copies a request's states out of vLLM's cache and writes its file.

The cache of hidden states is `[blocks, slots, block size, H]`; a slot is one hidden-state index. Blocks are a request's
own until `done` names it, so nothing is copied twice and nothing waits in a queue of ours: on a CPU the writer's thread
takes rows straight from the cache; from a GPU they are copied on a side stream into page-locked memory, as far as the
pool goes, and what does not fit stays in its blocks until it does.

Rows that vLLM never computed would be another request's, left in the block. So blocks are cleared once they are
written, and a row of zeros is a failure. (Not with prefix caching, where blocks go on being used.)

Needs torch, NumPy and the standard library alone, beside what `room` needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eyas.engine import staged
from eyas.engine.pinned import HostPool
from eyas.engine.room import StagingLimits, put, tell_failure
from eyas.engine.staged import RequestName, StagedError
from eyas.engine.vllm.scheduler import Save

Bytes = npt.NDArray[np.uint8]
LAST = "last"
_WHOLE_NUMBERS: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32}
"""By size."""
LOOKED_AT = 32
"""Values of a row in which a state that was computed is never all zero."""


class Slots:
    """Which slot of the cache holds which field."""

    def __init__(self, layers: Sequence[int], aux_layers: Sequence[int], num_layers: int) -> None:
        """`layers` are the hidden-state indices of the slots, in order; `num_layers` is the last state's."""
        at = {k: slot for slot, k in enumerate(layers)}
        self._own = {f"hidden.{k}": at[k] for k in aux_layers}
        self._neighbours = {f"hidden.{k - 1}": at[k - 1] for k in aux_layers if k > 1 and k - 1 in at}
        self._last = {LAST: at[num_layers]}
        self.has_neighbours = all(k - 1 in at for k in aux_layers if k > 1)

    def of(self, name: RequestName) -> dict[str, int]:
        """Slots by field, in the order in which they are written."""
        more = self._neighbours if staged.NEIGHBOURS in name.flags else {}
        return self._own | {f: slot for f, slot in more.items() if f not in self._own} | self._last


class WorkerSide:
    """Writes what the scheduler's side says; `save` and `done` are for the engine's thread, files come from others."""

    def __init__(
        self,
        cache: torch.Tensor,
        slots: Slots,
        staging: Path,
        limits: StagingLimits,
        *,
        rank: int = 0,
        num_threads: int = 4,
        clear: bool = True,
    ) -> None:
        self._cache, self._slots, self._staging, self._rank, self._clear = cache, slots, staging, rank, clear
        self._dtype = str(cache.dtype).removeprefix("torch.")
        self._width = int(cache.shape[3])
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="eyas-write")
        self._waiting: deque[Save] = deque()
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._pool: HostPool | None = HostPool(limits.pool_bytes) if cache.is_cuda and rank == 0 else None
        self._stream: torch.cuda.Stream | None = None

    def save(self, saves: Sequence[Save]) -> None:
        """Begin to write these, and those that had to wait. Ranks other than the first write what is asked of all."""
        if self._rank:
            for save in saves:
                name = RequestName.parse(save.name)
                if name is not None and staged.RANKS in name.flags:
                    self._write(save, self._copy_now(save, name))
            return
        self._waiting.extend(saves)
        while self._waiting:
            save = self._waiting[0]
            if not self._cache.is_cuda:
                self._writers.submit(self._write, save, None)
            else:
                copied = self._copy_from_device(save)
                if copied is None:
                    return
                self._writers.submit(self._write, save, *copied)
            self._waiting.popleft()

    def done(self) -> set[str]:
        """Requests whose blocks nobody needs any more, each told once."""
        with self._lock:
            done, self._done = self._done, set()
        return done

    def close(self) -> None:
        """Wait until every file is written."""
        self._writers.shutdown(wait=True)

    def _write(self, save: Save, copied: dict[str, Bytes] | None, event: torch.cuda.Event | None = None) -> None:
        """In a writer's thread. A failure becomes a file that says so."""
        name = RequestName.parse(save.name)
        assert name is not None
        path = name.path(self._staging, self._rank)
        try:
            if event is not None:
                event.synchronize()
            fields = copied if copied is not None else self._copy_now(save, name)
            if self._clear and event is None and not self._rank:
                _bits(self._cache)[save.block_ids] = 0
            self._require_computed(fields[LAST])
            ids = np.array(save.token_ids, dtype="<i4")
            layout = dict.fromkeys(fields, (self._dtype, self._width))
            put(name, path, ids, layout, [data.data for data in fields.values()], "pre", self._rank)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must hear of it
            tell_failure(name, path, error)
        finally:
            if not self._rank:  # vLLM counts one word for each request
                with self._lock:
                    self._done.add(save.request_id)

    def _require_computed(self, last: Bytes) -> None:
        size = self._cache.element_size()
        beginnings = last.reshape(-1, self._width * size)[:, : LOOKED_AT * size]
        empty = np.flatnonzero(~beginnings.any(axis=1))
        if self._clear and len(empty):
            # What sees zeros alone, in a model without biases, is zero although it was computed.
            padded = " Or does the sample begin with a token whose embedding is zero, as that of padding may be?"
            hint = "" if empty[0] else padded
            raise StagedError(f"row {empty[0]}, one of {len(empty)}, was never computed: chunked prefill?{hint}")

    def _copy_now(self, save: Save, name: RequestName) -> dict[str, Bytes]:
        """The rows of each field, `[T * H * size]`, in this thread."""
        num_bytes = name.num_tokens * self._width * self._cache.element_size()
        found = {}
        for field, slot in self._slots.of(name).items():
            rows = self._cache[:, slot]
            if rows.is_cuda:
                taken = _bits(rows.index_select(0, torch.tensor(save.block_ids, device=rows.device)).cpu())
            else:
                taken = _bits(rows)[save.block_ids]  # a copy
            found[field] = np.ascontiguousarray(taken).view(np.uint8).reshape(-1)[:num_bytes]
        return found

    def _copy_from_device(self, save: Save) -> tuple[dict[str, Bytes], torch.cuda.Event] | None:
        """The rows on their way into page-locked memory; None where the pool has no room now."""
        name = RequestName.parse(save.name)
        assert name is not None and self._pool is not None
        num_bytes = name.num_tokens * self._width * self._cache.element_size()
        buffers = {}
        for field in self._slots.of(name):
            buffer = self._pool.take(num_bytes)
            if buffer is None:
                return None
            buffers[field] = buffer
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._cache.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            blocks = torch.tensor(save.block_ids).pin_memory().to(self._cache.device, non_blocking=True)
            for field, slot in self._slots.of(name).items():
                rows = self._cache[:, slot].index_select(0, blocks).view(torch.uint8).flatten()[:num_bytes]
                buffers[field].destination.copy_(rows, non_blocking=True)
            if self._clear:
                self._cache.index_fill_(0, blocks, 0)
            # A blocking event: a spinning one would take a core from the engine.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return {field: buffer.array for field, buffer in buffers.items()}, event


def _bits(tensor: torch.Tensor) -> npt.NDArray[np.integer[Any]]:
    """The same memory for NumPy, which has no bfloat16; bits are all that is moved."""
    array: npt.NDArray[np.integer[Any]] = tensor.view(_WHOLE_NUMBERS[tensor.element_size()]).numpy()
    return array
