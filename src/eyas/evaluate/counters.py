"""A server's own counters, and what a run moved them by: figures of one run are differences, never totals.

vLLM counts at `/metrics` each verification (`drafts`), the tokens that were drafted for it and those that were
accepted, also by position. SGLang counts verifications there (with `--enable-metrics`) and tells the rest with each
answer. Both count requests and generated tokens, which is how the traffic of others is seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

PREFIXES = ("vllm", "sglang")
_REQUESTS = {"vllm": "request_success", "sglang": "num_requests"}
_VERIFICATIONS = {"vllm": "spec_decode_num_drafts", "sglang": "spec_verify_calls"}
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading, or the difference of two; None where the server does not count."""

    requests: float = 0
    """Answers that were finished."""
    generated_tokens: float = 0
    verifications: float | None = None
    drafted_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted: tuple[float, ...] = ()
    """Verifications that accepted more than `s` drafted tokens, for each position `s`."""
    started: float | None = None
    """When the server's process began, in seconds since 1970."""


def read_counters(text: str, engine: str) -> Counters | None:
    """What a server of `engine` (a name of `PREFIXES`) counts, by its Prometheus page; summed over models and ranks.

    None where the page has no counters of that engine. Lines that are no samples are passed over.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _LINE.fullmatch(line)):
            continue
        name, labels, number = match[1].removesuffix("_total"), dict(_LABEL.findall(match[2] or "")), match[3]
        try:
            value = float(number)
        except ValueError:
            continue
        position = labels.get("position", "")
        if name == f"{engine}:spec_decode_num_accepted_tokens_per_pos" and position.isdecimal():
            positions[int(position)] = positions.get(int(position), 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    # A server that has answered nothing yet may not show these counters; others of its names it does show.
    if not any(name.startswith(f"{engine}:") for name in sums):
        return None
    return Counters(
        requests=sums.get(f"{engine}:{_REQUESTS[engine]}", 0.0),
        generated_tokens=sums.get(f"{engine}:generation_tokens", 0.0),
        verifications=sums.get(f"{engine}:{_VERIFICATIONS[engine]}"),
        drafted_tokens=sums.get(f"{engine}:spec_decode_num_draft_tokens"),
        accepted_tokens=sums.get(f"{engine}:spec_decode_num_accepted_tokens"),
        accepted=tuple(positions.get(s, 0.0) for s in range(max(positions, default=-1) + 1)),
        started=sums.get(_STARTED),
    )


def difference(before: Counters, after: Counters) -> Counters | None:
    """What happened between two readings; None where the server was started anew between them."""
    if None not in (before.started, after.started) and before.started != after.started:
        return None
    width = max(len(before.accepted), len(after.accepted))
    pad = [[*c.accepted, *[0.0] * (width - len(c.accepted))] for c in (before, after)]
    accepted = tuple(b - a for a, b in zip(*pad, strict=True))
    moved = Counters(
        requests=after.requests - before.requests,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        verifications=_minus(after.verifications, before.verifications),
        drafted_tokens=_minus(after.drafted_tokens, before.drafted_tokens),
        accepted_tokens=_minus(after.accepted_tokens, before.accepted_tokens),
        accepted=accepted,
        started=after.started,
    )
    counts = (moved.requests, moved.generated_tokens, moved.verifications or 0, moved.accepted_tokens or 0, *accepted)
    return None if min(counts) < 0 else moved


def _minus(after: float | None, before: float | None) -> float | None:
    # A counter shows up with its first event: before that it stands at 0.
    return None if after is None else after - (before or 0.0)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What verifications accepted: of one request, or of several put together."""

    verifications: int
    drafted_tokens: int
    """0 where it is not told."""
    accepted_tokens: int
    """Drafted tokens that the target kept: the bonus token behind them is not among them."""
    accepted: tuple[int, ...] = ()
    """Verifications that accepted more than `s` drafted tokens; empty where it is not told."""

    @property
    def length(self) -> float | None:
        """Tokens per verification, the bonus token included."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else None

    def position_acceptance(self) -> tuple[float, ...]:
        """Share of the verifications that accepted more than `s` drafted tokens."""
        return tuple(n / self.verifications for n in self.accepted) if self.verifications else ()


def pooled(parts: list[Acceptance]) -> Acceptance:
    """All together; positions only where every one that has verifications tells them."""
    told = all(part.accepted or not part.accepted_tokens for part in parts)
    width = max((len(part.accepted) for part in parts), default=0) if told else 0
    return Acceptance(
        sum(part.verifications for part in parts),
        sum(part.drafted_tokens for part in parts),
        sum(part.accepted_tokens for part in parts),
        tuple(sum(part.accepted[s] for part in parts if s < len(part.accepted)) for s in range(width)),
    )


def of_counters(moved: Counters) -> Acceptance | None:
    """What a server's counters say; None where they do not tell what was accepted."""
    if moved.verifications is None or moved.accepted_tokens is None:
        return None
    return Acceptance(
        round(moved.verifications),
        round(moved.drafted_tokens or 0),
        round(moved.accepted_tokens),
        tuple(round(n) for n in moved.accepted),
    )


def of_one_answer(moved: Counters, num_new: int) -> Acceptance | None:
    """What an answer of `num_new` tokens accepted; None where the counters saw anything beside it."""
    counted_it = (round(moved.requests), round(moved.generated_tokens)) == (1, num_new)
    return of_counters(moved) if counted_it else None


def of_vllm(told: Mapping[str, Any]) -> Acceptance | None:
    """What vLLM says with an answer (`--per-request-spec-decode-metrics summary`): `metrics.speculative_decoding`."""
    histogram = told.get("acceptance_histogram")
    if not _is_counts(histogram):
        return None
    return _of_histogram(histogram, int(told.get("num_draft_tokens") or 0))


def of_sglang(meta: Mapping[str, Any], num_new: int) -> Acceptance | None:
    """What SGLang says with an answer (`meta_info`), in the names of its several versions.

    Where it names verifications alone, every one gave its bonus token, and the first token came with the prompt's
    pass: what the answer has beside these was accepted. That misses drafted tokens behind the answer's end.
    """
    verifications = meta.get("spec_verify_ct")
    if not isinstance(verifications, int) or isinstance(verifications, bool) or verifications < 0:
        return None
    accepted = _first(meta, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    drafted = _first(meta, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num") or 0
    if accepted is None:
        accepted = max(0, num_new - 1 - verifications)
    histogram: list[int] = next(
        (meta[k] for k in ("spec_correct_drafts_histogram", "spec_accept_histogram") if _is_counts(meta.get(k))), []
    )
    told = _of_histogram(histogram, drafted)
    if (told.verifications, told.accepted_tokens) == (verifications, accepted):
        return told
    return Acceptance(verifications, drafted, accepted)


def _of_histogram(histogram: list[int], drafted: int) -> Acceptance:
    """Entry `j` is the number of verifications that accepted exactly `j` drafted tokens."""
    accepted = tuple(sum(histogram[s + 1 :]) for s in range(len(histogram) - 1))
    return Acceptance(sum(histogram), drafted, sum(accepted), accepted)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(n) is int and n >= 0 for n in value)


def _first(meta: Mapping[str, Any], *names: str) -> int | None:
    return next((int(meta[n]) for n in names if isinstance(meta.get(n), int | float)), None)
