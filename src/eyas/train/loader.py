"""Batches of packed samples, read ahead of the training by threads, within a bound of bytes.

Letters: `N` tokens of a pack, `F` fields (auxiliary layers ascending, then the last state), `A` auxiliary layers,
`T` tokens of one sample, `H` hidden size.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eyas.records import sample_id_of
from eyas.store.reader import DataSet, aligned_buffer
from eyas.train.packs import Pack
from eyas.train.samples import TrainingSamples

_ROUND_TOKENS = 1024
_PACKS_AHEAD = 64
"""Of tiny packs no more are read ahead, however many would fit."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A pack's samples one behind the other, without padding; row `t` of everything is about token `t`."""

    indices: tuple[int, ...]
    """Of the samples, in the data set."""
    sample_ids: tuple[str, ...]
    token_ids: torch.Tensor
    """`[N]` int64"""
    loss_mask: torch.Tensor
    """`[N]` bool"""
    cu_seqlens: torch.Tensor
    """`[samples + 1]` int32, on the CPU: sample `i` has the rows `cu_seqlens[i] .. cu_seqlens[i + 1]`."""
    states: torch.Tensor
    """`[F, N, H]` as stored."""

    @property
    def num_tokens(self) -> int:
        return self.states.shape[1]

    def aux_hidden_states(self) -> torch.Tensor:
        """`[N, A, H]`, a view."""
        return self.states[:-1].transpose(0, 1)

    def last_hidden_state(self) -> torch.Tensor:
        """`[N, H]`, a view; before or after the final norm as the data set's spec says."""
        return self.states[-1]


def batch_of(
    samples: Sequence[tuple[npt.ArrayLike, npt.ArrayLike, torch.Tensor]], device: torch.device | str = "cpu"
) -> Batch:
    """A batch of samples in memory: for each `token_ids [T]`, `loss_mask [T]`, `states [F, T, H]`."""
    token_ids = [np.asarray(ids, np.int32) for ids, _, _ in samples]
    masks = [np.asarray(mask, np.bool_) for _, mask, _ in samples]
    states = torch.cat([states for _, _, states in samples], dim=1).to(device)
    return _batch(tuple(range(len(samples))), tuple(map(sample_id_of, token_ids)), token_ids, masks, states)


def _batch(
    indices: tuple[int, ...],
    sample_ids: tuple[str, ...],
    token_ids: Sequence[npt.NDArray[np.int32]],
    masks: Sequence[npt.NDArray[np.bool_]],
    states: torch.Tensor,
) -> Batch:
    lengths = [len(ids) for ids in token_ids]
    if lengths != [len(mask) for mask in masks] or sum(lengths) != states.shape[1]:
        raise ValueError(f"samples of {lengths} tokens with other masks or {states.shape[1]} rows of states")

    def place(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(states.device)

    return Batch(
        indices=indices,
        sample_ids=sample_ids,
        token_ids=place(np.concatenate(token_ids).astype(np.int64)),
        loss_mask=place(np.concatenate(masks)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        states=states,
    )


class _Reading:
    """A batch whose states are on their way."""

    def __init__(self, batch: Batch, num_bytes: int) -> None:
        self.batch = batch
        self.num_bytes = num_bytes
        self.outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """One for each sample: read, or why not."""

    def wait(self) -> Batch:
        for _ in self.batch.indices:
            error = self.outcomes.get()
            if error is not None:
                raise error
        return self.batch


class Loader:
    """The batches of one rank, a list for each step, in order, however many threads read them.

    A context manager and an iterator, for one thread. What a reading thread meets (ShardCorrupt, ShardMissing) is
    raised where its batch would have come. The end, an error and Ctrl-C end the threads; so does `close`.

    Each thread reads one sample at a time into a buffer of its own and copies it from there to its rows of the batch:
    on a CUDA device from page-locked memory, on a stream beside that of the training.
    """

    def __init__(
        self,
        data: DataSet,
        samples: TrainingSamples,
        steps: Iterable[Sequence[Pack]],
        *,
        device: torch.device | str = "cpu",
        prefetch_bytes: int = 1 << 30,
        num_threads: int = 4,
    ) -> None:
        """`steps`: this rank's packs of each step, as `Schedule.steps` gives them, or any others: `[[pack], …]` for an
        evaluation that holds one batch at a time. They are walked as far as is read ahead, in the caller's thread.

        Batches that are read ahead of the one that is waited for take `prefetch_bytes` on the device at most, but one
        always is. Beside them stand `num_threads` buffers of the largest sample's size.
        """
        self.waited_s = 0.0
        """Seconds which the caller waited for batches."""
        self.read_bytes = 0
        """Bytes of the batches that were handed over."""
        self._data, self._samples = data, samples
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, data.spec.dtype)
        self._prefetch_bytes = prefetch_bytes
        # One walk, taken twice: what is read runs ahead of what is handed over.
        self._steps, ahead = itertools.tee(steps)
        self._packs: Iterator[Pack] = itertools.chain.from_iterable(ahead)
        self._next = next(self._packs, None)
        self._begun: deque[_Reading] = deque()
        self._begun_bytes = 0
        self._jobs: queue.SimpleQueue[tuple[_Reading, int, int, int] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._stream = _copy_stream(self._device) if self._device.type == "cuda" else None
        used = np.concatenate([samples.train, samples.held_out])
        buffer_bytes = int(samples.token_counts[used].max()) * data.spec.bytes_per_token
        buffers = [self._buffer(buffer_bytes) for _ in range(num_threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(buffer,), name="loader", daemon=True) for buffer in buffers
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        try:
            batches = [self._take() for _ in next(self._steps)]
            self._read_ahead()
        except BaseException:
            self.close()
            raise
        finally:
            self.waited_s += time.perf_counter() - start
        return batches

    def close(self) -> None:
        """End the threads, after the samples which they are reading."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._begun.clear()

    def _take(self) -> Batch:
        """The next batch, complete."""
        self._read_ahead()
        reading = self._begun[0]
        batch = reading.wait()
        self._begun.popleft()
        self._begun_bytes -= reading.num_bytes
        self.read_bytes += reading.num_bytes
        if self._stream is not None:
            # The copies have ended; but the memory belongs to their stream, which must not take it back while the
            # caller's stream still works with it.
            for tensor in (batch.token_ids, batch.loss_mask, batch.states):
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return batch

    def _read_ahead(self) -> None:
        """Begin the packs that come next as far as they fit, and one in any case."""
        while self._next is not None:
            num_bytes = sum(self._data.sample_bytes(index) for index in self._next)
            full = self._begun_bytes + num_bytes > self._prefetch_bytes or len(self._begun) == _PACKS_AHEAD
            if self._begun and full:
                break
            self._begin(self._next, num_bytes)
            self._next = next(self._packs, None)

    def _begin(self, pack: Pack, num_bytes: int) -> None:
        with self._on_stream():
            reading = _Reading(
                _batch(
                    pack,
                    tuple(map(self._samples.sample_id, pack)),
                    [self._samples.token_ids(index) for index in pack],
                    [self._samples.loss_mask(index) for index in pack],
                    self._empty(sum(map(self._samples.num_tokens, pack))),
                ),
                num_bytes,
            )
        self._begun.append(reading)
        self._begun_bytes += num_bytes
        bounds = reading.batch.cu_seqlens.tolist()
        for index, (start, end) in zip(pack, itertools.pairwise(bounds), strict=True):
            self._jobs.put((reading, index, start, end))

    def _empty(self, num_tokens: int) -> torch.Tensor:
        """`[F, N, H]`; on a CUDA device in rounded memory, so that the memory of one pack serves for another."""
        spec = self._data.spec
        shape = (len(spec.fields), num_tokens, spec.hidden_size)
        if self._stream is None:
            memory = aligned_buffer(num_tokens * spec.bytes_per_token)
            return torch.frombuffer(memory, dtype=self._dtype).view(shape)
        rounded = -(-num_tokens // _ROUND_TOKENS) * _ROUND_TOKENS
        flat = torch.empty(rounded * shape[0] * shape[2], dtype=self._dtype, device=self._device)
        return flat[: math.prod(shape)].view(shape)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if self._stream is None:
            return torch.frombuffer(aligned_buffer(num_bytes), dtype=torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _work(self, buffer: torch.Tensor) -> None:
        with self._on_stream():
            while (job := self._jobs.get()) is not None and not self._closed.is_set():
                reading, index, start, end = job
                try:
                    self._read(buffer, index, reading.batch.states[:, start:end])
                    outcome: BaseException | None = None
                except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                    outcome = error
                reading.outcomes.put(outcome)
                # A thread that waits for work holds no batch.
                del job, reading, outcome

    def _read(self, buffer: torch.Tensor, index: int, rows: torch.Tensor) -> None:
        """Read one sample to its rows of the batch, `[F, T, H]`; they are complete when this returns."""
        sample = self._data.read_into(index, buffer.numpy().data)
        read = buffer[: sample.data.nbytes]
        if self._stream is None:
            # By numpy, which lets the other threads run, and starts none.
            _bytes_of(rows)[...] = read.numpy().reshape(len(rows), sample.num_tokens, -1)
            return
        for field, source in zip(rows, read.view(self._dtype).view(rows.shape), strict=True):
            field.copy_(source, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        copied.synchronize()


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders: memory that was allocated for one stream serves no other."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _bytes_of(rows: torch.Tensor) -> npt.NDArray[np.uint8]:
    """`[F, T, bytes]`: the memory of `[F, T, H]` on the CPU."""
    return rows.view(torch.uint8).numpy()
