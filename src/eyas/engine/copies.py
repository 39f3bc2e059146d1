"""From a device to the host: views on a CPU, copies through page-locked memory on a side stream on CUDA.

Letters: `B` batch, `T` tokens, `H` hidden size.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from eyas.engine.pinned import Bytes, HostPool

logger = logging.getLogger(__name__)

Arrays = dict[str, Bytes]
"""One sample's fields, each `T * H` values as bytes."""


@dataclass(slots=True)
class Copied:
    """Samples' fields on the host, or on their way to it."""

    arrays: deque[Arrays]
    events: list[torch.cuda.Event] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)
    """Sources of the copies: their memory must not be used again before the copies have ended."""

    def wait(self) -> deque[Arrays]:
        for event in self.events:
            event.synchronize()
        self.events.clear()
        self.on_device.clear()
        return self.arrays


class CpuViews:
    """On a CPU nothing is copied: a sample's field is a view of its rows in the layer's own output."""

    overlaps = False

    def start(self, states: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> Copied:
        return Copied(
            deque(
                {name: _as_bytes(tensor[b, :length]).numpy() for name, tensor in states.items()}
                for b, length in enumerate(lengths)
            )
        )

    def close(self) -> None:
        pass


class CudaCopies:
    """Copies to page-locked host memory on a side stream, so that the next batch computes meanwhile."""

    overlaps = True

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._said_full = False

    def start(self, states: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> Copied:
        """Launch the copies of the real rows of `states` (`[B, T, H]`, contiguous); padding stays behind."""
        copied = Copied(deque({} for _ in lengths))
        for name, tensor in states.items():
            stream = self._stream(tensor.device)
            with torch.cuda.stream(stream):
                for arrays, b, length in zip(copied.arrays, range(len(lengths)), lengths, strict=True):
                    source = _as_bytes(tensor[b, :length])
                    destination, arrays[name] = self._buffer(source.numel())
                    destination.copy_(source, non_blocking=True)
            # Held instead of `record_stream`: so it is free as soon as the copies have ended, not some time later.
            copied.on_device.append(tensor)
        for device in {tensor.device for tensor in states.values()}:
            # A blocking event: a spinning one would take a core from the writer.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._streams[device])
            copied.events.append(event)
        return copied

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of `device`, behind everything that was launched there so far."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def _buffer(self, num_bytes: int) -> tuple[torch.Tensor, Bytes]:
        buffer = self._pool.take(num_bytes)
        if buffer is not None:
            return buffer.destination, buffer.array
        if not self._said_full:
            self._said_full = True
            logger.warning(
                "%.1f GB of page-locked memory are in use: copies go on into ordinary memory, more slowly; "
                "raise engine.extra.pinned_bytes above capture.in_flight_bytes", self._pool.held_bytes / 1e9
            )  # fmt: skip
        pageable = torch.empty(num_bytes, dtype=torch.uint8)
        return pageable, pageable.numpy()


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """`[T, H]` contiguous as `[num_bytes]` uint8, the same memory."""
    return rows.view(torch.uint8).flatten()
