"""Runs over a prompt set on a server, and what the runs of one batch size say together.

A *run* sends every prompt once, or several whole times, to one server with so many at a time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.evaluate.answers import Answer
from eyas.evaluate.counters import Acceptance, Counters, of_counters, pooled
from eyas.train.metrics import Estimate

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Own:
    """The same prompts, decoded in this process."""

    dtype: str
    acceptance: Acceptance
    request_mean: float | None
    answers: Mapping[tuple[int, ...], tuple[int, ...]]
    """Plain greedy answers by prompt, in token ids."""


@dataclass(frozen=True)
class Run:
    """One run over the prompts."""

    batch_size: int
    repeat: int
    with_draft: bool
    prompts: tuple[int, ...]
    """Which prompt each answer is to."""
    answers: tuple[Answer, ...]
    told: tuple[Acceptance | None, ...]
    """Of each answer, where the server tells it or was asked between two answers."""
    seconds: float
    moved: Counters | None
    """What its counters moved by; None where it has none."""

    @property
    def num_new_tokens(self) -> int:
        return sum(answer.num_new_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_new_tokens / self.seconds

    @property
    def num_cut(self) -> int:
        return sum(answer.cut for answer in self.answers)

    @property
    def acceptance(self) -> Acceptance | None:
        """Of its answers alone where all of them tell it, else of all that the server did meanwhile."""
        if not self.with_draft:
            return None
        told = [part for part in self.told if part is not None]
        if len(told) == len(self.answers):
            return pooled(told)
        return of_counters(self.moved) if self.moved is not None else None

    @property
    def foreign(self) -> tuple[int, int]:
        """Requests and tokens that the server counted beside ours."""
        if self.moved is None:
            return 0, 0
        requests = round(self.moved.requests) - len(self.answers)
        return max(0, requests), max(0, round(self.moved.generated_tokens) - self.num_new_tokens)

    @property
    def uncounted(self) -> int:
        """Tokens of ours that the server has not counted."""
        return max(0, self.num_new_tokens - round(self.moved.generated_tokens)) if self.moved is not None else 0

    def percentiles(self, of: Callable[[Answer], Sequence[float]]) -> list[float] | None:
        values = [value for answer in self.answers for value in of(answer)]
        return [float(p) for p in np.percentile(values, PERCENTILES)] if values else None

    def as_dict(self) -> dict[str, Any]:
        requests, tokens = self.foreign
        return {
            "batch_size": self.batch_size,
            "repeat": self.repeat,
            "with_draft": self.with_draft,
            "num_requests": len(self.answers),
            "num_new_tokens": self.num_new_tokens,
            "num_cut": self.num_cut,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "acceptance": acceptance_dict(self.acceptance),
            "counters": dataclasses.asdict(self.moved) if self.moved is not None else None,
            "foreign_requests": requests,
            "foreign_tokens": tokens,
        } | {name: self.percentiles(of) for name, of in LATENCIES.items()}


LATENCIES: Mapping[str, Callable[[Answer], Sequence[float]]] = {
    "first_token_s": lambda answer: [answer.first_token_s],
    "token_s": lambda answer: [] if answer.token_s is None else [answer.token_s],
    "gap_s": lambda answer: answer.gaps_s,
    "total_s": lambda answer: [answer.seconds],
}


@dataclass(frozen=True)
class Level:
    """One batch size: the medians of its repeats."""

    batch_size: int
    runs: tuple[Run, ...]

    def side(self, with_draft: bool) -> list[Run]:
        return [run for run in self.runs if run.with_draft == with_draft]

    def tokens_per_s(self, with_draft: bool) -> float | None:
        return _median([run.tokens_per_s for run in self.side(with_draft)])

    def percentiles(self, name: str, with_draft: bool) -> list[float] | None:
        """Of a name of `LATENCIES`: each percentile's median over the repeats."""
        told = [found for run in self.side(with_draft) if (found := run.percentiles(LATENCIES[name])) is not None]
        return [statistics.median(values) for values in zip(*told, strict=True)] if told else None

    def ratio(self, of: Callable[[Run], float | None]) -> Estimate | None:
        """Median of with / without over the repeats, and their lowest and highest."""
        pairs = zip(self.side(True), self.side(False), strict=False)
        found = [a / b for a, b in ((of(x), of(y)) for x, y in pairs) if a is not None and b]
        return Estimate(statistics.median(found), min(found), max(found)) if found else None

    @property
    def speedup(self) -> Estimate | None:
        return self.ratio(lambda run: run.tokens_per_s)

    @property
    def token_speedup(self) -> Estimate | None:
        """The same in time per token of the median request."""
        found = self.ratio(_median_token_s)
        if found is None or found.low is None or found.high is None:
            return None
        return Estimate(1 / found.value, 1 / found.high, 1 / found.low)

    @property
    def acceptance(self) -> Acceptance | None:
        parts = [run.acceptance for run in self.side(True)]
        told = [part for part in parts if part is not None]
        return pooled(told) if told and len(told) == len(parts) else None

    @property
    def identical(self) -> tuple[int, int]:
        """Answers with and without the drafter that are the same, of those that can be compared."""
        return _same(zip(self.side(True), self.side(False), strict=False))

    def as_dict(self) -> dict[str, Any]:
        same, compared = self.identical
        sides = {"with": True, "without": False}
        return {
            "batch_size": self.batch_size,
            "speedup": estimate_dict(self.speedup),
            "token_speedup": estimate_dict(self.token_speedup),
            "acceptance": acceptance_dict(self.acceptance),
            "tokens_per_s": {name: self.tokens_per_s(side) for name, side in sides.items()},
            "num_compared": compared,
            "num_identical": same,
        } | {name: {key: self.percentiles(name, side) for key, side in sides.items()} for name in LATENCIES}


def _same(pairs: Any) -> tuple[int, int]:
    same = compared = 0
    for ours, alone in pairs:
        for a, b in zip(ours.answers, alone.answers, strict=True):
            known = a.token_ids is not None and b.token_ids is not None
            compared += 1
            same += a.token_ids == b.token_ids if known else a.text == b.text
    return same, compared


def _median_token_s(run: Run) -> float | None:
    found = run.percentiles(LATENCIES["token_s"])
    return found[0] if found is not None else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def acceptance_dict(found: Acceptance | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return dataclasses.asdict(found) | {
        "length": found.length,
        "position_acceptance": list(found.position_acceptance()),
    }


def estimate_dict(found: Estimate | None) -> dict[str, Any] | None:
    return dataclasses.asdict(found) if found is not None else None
