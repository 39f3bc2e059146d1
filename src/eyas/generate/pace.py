"""How many requests an endpoint gets at a time, and how long one may take: learned from how it answers."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_LIMIT = 16
"""Requests in flight to begin with; doubles with each round of answers until the endpoint complains."""
MAX_PATIENCE = 2.0
"""Time-outs that all answers are given more of, after some; it wears off with each answer that comes."""
SLOWEST = 4.0
"""An answer may take so many times the usual."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 60.0
"""After an endpoint said that it has too much to do, and not how long; doubles while it says so."""


class Pace:
    """Additive increase, multiplicative decrease of the requests in flight, and time-outs that follow what is seen."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._limit = float(min(most, FIRST_LIMIT))
        self._threshold = float(most)
        """Below it the limit grows by one with each answer, above it by one with each round of answers."""
        self._last_cut = float("-inf")
        self._patience = 1.0
        self._usual_s = 0.0
        self._pause_s = 0.0

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return int(self._limit)

    def timeout_s(self, base_s: float) -> float:
        """Time for one answer: the configured one, more after time-outs, and never near what answers usually take."""
        return max(base_s * self._patience, SLOWEST * self._usual_s)

    def answered(self, took_s: float, in_flight: int) -> None:
        """For each answer: room for more, if the room was used."""
        self._usual_s = took_s if not self._usual_s else 0.95 * self._usual_s + 0.05 * took_s
        self._pause_s = 0.0
        self._patience = max(1.0, 0.99 * self._patience)
        if 2 * in_flight >= self._limit:
            self._limit += 1.0 if self._limit < self._threshold else 1.0 / self._limit
            self._limit = min(self._limit, float(self.most))

    def congested(self, sent_at: float) -> float:
        """For each sign of too much: half as many, once for all requests that were on their way. A pause in seconds."""
        if sent_at > self._last_cut:
            self._last_cut = self._clock()
            self._limit = max(1.0, self._limit / 2)
            self._threshold = self._limit
            self._pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        return self._pause_s

    def timed_out(self) -> None:
        """The next answers get more time."""
        self._patience = min(MAX_PATIENCE, 1.25 * self._patience)
