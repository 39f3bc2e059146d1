"""Host memory for copies from a device: a bounded pool whose buffers come back when nobody looks at them any more."""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

ALIGN = 4096
"""Buffers begin on page boundaries, as direct writes want them."""
SLAB_BYTES = 256 * 1024 * 1024


class HostBuffer(NamedTuple):
    """One piece of host memory, seen twice: as the destination of a copy and as what the consumer gets."""

    destination: torch.Tensor
    """`[num_bytes]` uint8; drop it when the copy has ended."""
    array: Bytes
    """`[num_bytes]`; the memory is taken again only after this array and every view of it are gone."""


def pinned_slab(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class HostPool:
    """Page-locked memory in slabs, at most `limit_bytes`, handed out in pieces of any size.

    Allocating page-locked memory is slow and pages of a fresh slab are cold, so slabs live as long as the pool (or a
    view of them). `take` is for one thread; buffers may be dropped in any thread.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        slab_bytes: int = SLAB_BYTES,
        new_slab: Callable[[int], torch.Tensor] = pinned_slab,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._slab_bytes = slab_bytes
        self._new_slab = new_slab
        self._slabs: list[torch.Tensor] = []
        self._free: list[list[tuple[int, int]]] = []
        """Per slab the free ranges `(start, end)`, ascending and never adjacent."""
        # Buffers are dropped wherever the garbage collector happens to run, even in the middle of `take`: finalizers
        # only append here, which is atomic, and `take` puts the ranges back.
        self._returned: deque[tuple[int, int, int]] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs, used or free."""
        return sum(slab.numel() for slab in self._slabs)

    @property
    def free_bytes(self) -> int:
        """Bytes of the slabs that no buffer covers."""
        self._put_back()
        return sum(end - start for ranges in self._free for start, end in ranges)

    def take(self, num_bytes: int) -> HostBuffer | None:
        """A buffer of `num_bytes`, or None when the pool is full: it never waits, so it can never be waited for."""
        self._put_back()
        size = -(-max(num_bytes, 1) // ALIGN) * ALIGN
        found = self._first_fit(size)
        if found is None:
            slab_bytes = max(self._slab_bytes, size)
            if self.held_bytes + slab_bytes > self._limit_bytes:
                self._drop_free_slabs()
            if self.held_bytes + slab_bytes > self._limit_bytes:
                return None
            self._slabs.append(self._new_slab(slab_bytes))
            self._free.append([(0, slab_bytes)])
            found = self._first_fit(size)
            assert found is not None
        index, start = found
        # Through a memoryview of its own: a slice of a NumPy array would refer to the slab and not to this array, and
        # a consumer's view of it would not keep this array alive.
        array: Bytes = np.frombuffer(self._slabs[index].numpy().data[start : start + num_bytes], dtype=np.uint8)
        finalizer = weakref.finalize(array, self._returned.append, (index, start, start + size))
        finalizer.atexit = False
        return HostBuffer(self._slabs[index][start : start + num_bytes], array)

    def _first_fit(self, size: int) -> tuple[int, int] | None:
        for index, ranges in enumerate(self._free):
            for i, (start, end) in enumerate(ranges):
                if end - start >= size:
                    if end - start == size:
                        del ranges[i]
                    else:
                        ranges[i] = (start + size, end)
                    return index, start
        return None

    def _drop_free_slabs(self) -> None:
        """Let go of slabs that no buffer covers: all of them together may be smaller than what is asked for."""
        for index, slab in enumerate(self._slabs):
            if self._free[index] == [(0, slab.numel())]:
                # Its place stays: buffers know their slab by number.
                self._slabs[index] = slab[:0].clone()
                self._free[index] = []

    def _put_back(self) -> None:
        while self._returned:
            index, start, end = self._returned.popleft()
            ranges = self._free[index]
            at = bisect.bisect(ranges, (start, end))
            if at < len(ranges) and ranges[at][0] == end:
                end = ranges.pop(at)[1]
            if at > 0 and ranges[at - 1][1] == start:
                at -= 1
                start = ranges.pop(at)[0]
            ranges.insert(at, (start, end))
