"""What an engine takes its work from: requests in plan order, each with its bytes reserved before it is sent."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from eyas.engine.base import CaptureRequest
from eyas.records import TokenIds
from eyas.store.plan import ShardPlan
from eyas.store.shard import PlannedSample


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard being captured."""

    plan: ShardPlan
    planned: tuple[PlannedSample, ...]


@dataclass(slots=True)
class Slot:
    """One planned sample on its way: from the reservation of its bytes until it is written or rejected."""

    sequence: int
    """Place in the order of writing."""
    shard: OpenShard
    sample_id: str
    token_ids: TokenIds
    num_bytes: int
    checked: bool
    """Its values are to be compared with the engine's own."""
    attempt: int = 1
    taken_at: float = 0.0
    """Monotonic time at which the engine took the current attempt."""
    alone: bool = False
    """To be handed out by itself, since it may be what ends the engine."""
    unsent: str = ""
    """Why the engine never sees it, where that is known beforehand: `too_long`, or `duplicate` of another shard's."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


TOO_LONG, DUPLICATE = "too_long", "duplicate"
TAKES_IN_FLIGHT = 4
MAX_IN_FLIGHT_SAMPLES = 4096
"""What is kept of a sample beside its states takes some kilobytes: tiny ones would take far more than the quota."""
UNSENT_WAITING = 1024
"""So many samples that the engine never sees may wait for the caller to settle them."""


class Batch:
    """A handful of samples asked for at once, outside the plan: a probe, a re-check."""

    def __init__(self, requests: Sequence[CaptureRequest]) -> None:
        self._requests = list(requests)

    def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        """All of them together, whatever `max_tokens` says, so that they share batches; then nothing."""
        taken, self._requests = self._requests, []
        return taken


@dataclass(slots=True)
class Requests:
    """Hands out slots in plan order while bytes are left, retries first. Thread-safe.

    `slots` is consumed lazily. A slot's bytes stay reserved until `release`. Since bytes are reserved in plan order,
    the sample that must be written next always has its own: no order of answers can lock the run up.
    """

    slots: Iterator[Slot]
    quota_bytes: int
    on_take: Callable[[Slot], None] = lambda slot: None
    in_flight_bytes: int = 0
    in_flight_samples: int = 0
    last_activity: float = field(default_factory=time.monotonic)
    """Monotonic time at which the engine last asked for work."""
    _retries: list[tuple[float, int, Slot]] = field(default_factory=list)
    _unsent: list[Slot] = field(default_factory=list)
    _next: Slot | None = None
    _exhausted: bool = False
    _unsettled: int = 0
    """Requests that the engine has."""
    _lonely: bool = False
    _closed: bool = False
    _ready: threading.Condition = field(default_factory=threading.Condition)

    def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        """As `engine.base.RequestSource.take`."""
        with self._ready:
            while True:
                self.last_activity = time.monotonic()
                taken = self._take_now(max_tokens)
                if taken or not wait or self._done():
                    return taken
                self._ready.wait(self._pause())

    def release(self, slot: Slot) -> None:
        """Give a slot's bytes back: it is written or rejected."""
        with self._ready:
            self.in_flight_bytes -= slot.num_bytes
            self.in_flight_samples -= 1
            self._ready.notify_all()

    def retry(self, slot: Slot, *, after_s: float, alone: bool = False) -> None:
        """Hand a slot out once more, not before `after_s` seconds have passed; its bytes stay reserved."""
        with self._ready:
            slot.alone = alone
            heapq.heappush(self._retries, (time.monotonic() + after_s, slot.sequence, slot))
            self._ready.notify_all()

    def settle(self, num_requests: int = 1) -> None:
        """So many requests are the engine's no more: answered, failed, given up or lost with it."""
        with self._ready:
            self._unsettled -= num_requests
            if self._unsettled == 0:
                self._lonely = False
                self._ready.notify_all()

    def unsent(self) -> list[Slot]:
        """The slots that came up and are not for the engine; each is handed over once, and must be released."""
        with self._ready:
            slots, self._unsent = self._unsent, []
            if slots:
                self._ready.notify_all()
            return slots

    @property
    def waiting_retries(self) -> int:
        """Tokens of the retries that are due to be taken."""
        with self._ready:
            now = time.monotonic()
            return sum(slot.num_tokens for due, _, slot in self._retries if due <= now)

    def close(self) -> None:
        """No more work, whatever is left."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def is_finished(self) -> bool:
        """Everything was handed out and given back."""
        with self._ready:
            return self._done()

    def _done(self) -> bool:
        return self._closed or (self._exhausted and self._next is None and self.in_flight_samples == 0)

    def _pause(self) -> float | None:
        """Until the next retry is due; None = until something happens."""
        return max(0.0, self._retries[0][0] - time.monotonic()) if self._retries else None

    def _take_now(self, max_tokens: int) -> list[CaptureRequest]:
        taken: list[CaptureRequest] = []
        tokens = num_bytes = 0
        now = time.monotonic()
        # A quarter of the quota at a time, and nothing new before a quarter is free: an engine that is handed bytes as
        # they trickle back computes small batches, and one that takes all at once stands still while it is written.
        share = self.quota_bytes // TAKES_IN_FLIGHT
        fresh = self.in_flight_bytes == 0 or self.in_flight_bytes + share <= self.quota_bytes
        fresh &= self.in_flight_samples <= MAX_IN_FLIGHT_SAMPLES - MAX_IN_FLIGHT_SAMPLES // TAKES_IN_FLIGHT
        while not (self._closed or self._lonely):
            slot = self._peek(now, fresh=fresh)
            if slot is None or (
                taken and (tokens + slot.num_tokens > max_tokens or num_bytes + slot.num_bytes > share)
            ):
                break
            if slot.alone and self._unsettled:
                break
            self._lonely = slot.alone
            self._pop(slot)
            self._unsettled += 1
            slot.taken_at = now
            tokens += slot.num_tokens
            num_bytes += slot.num_bytes
            taken.append(CaptureRequest(slot.sample_id, slot.token_ids, slot.attempt, slot.checked))
            self.on_take(slot)
        return taken

    def _peek(self, now: float, *, fresh: bool) -> Slot | None:
        if self._retries and self._retries[0][0] <= now:
            return self._retries[0][2]
        while self._next is None and not self._exhausted and len(self._unsent) < UNSENT_WAITING:
            slot = next(self.slots, None)
            self._exhausted = slot is None
            if slot is not None and slot.unsent:
                self.in_flight_bytes += slot.num_bytes
                self.in_flight_samples += 1
                self._unsent.append(slot)
            else:
                self._next = slot
        if not fresh or self._next is None or self.in_flight_samples >= MAX_IN_FLIGHT_SAMPLES:
            return None
        if self.in_flight_bytes + self._next.num_bytes <= self.quota_bytes:
            return self._next
        return None

    def _pop(self, slot: Slot) -> None:
        if slot is self._next:
            self._next = None
            self.in_flight_bytes += slot.num_bytes
            self.in_flight_samples += 1
        else:
            heapq.heappop(self._retries)
