"""What an evaluation on running servers came to: the figures, their formulas, and tables of them by batch size."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from eyas.evaluate.client import About
from eyas.evaluate.counters import Acceptance, pooled
from eyas.evaluate.estimate import length_estimate
from eyas.evaluate.prompts import Prompt
from eyas.evaluate.server_runs import PERCENTILES, Level, Own, Run, acceptance_dict, estimate_dict
from eyas.log import human_time
from eyas.train.metrics import Estimate

FILE = "server.json"
TOLERANCE = 0.05
"""Between the acceptance length of a server and that of this process: more is no rounding."""

FORMULAS = (
    "acceptance length, pooled = 1 + Σ accepted / Σ verifications; the 1 is the bonus token, which the target gives "
    "itself; accepted are drafted tokens, those behind an answer's end included; differences of the server's counters, "
    "or what it says with each answer",
    "acceptance length, request mean: the same of each prompt, averaged over prompts",
    "acceptance at position s = share of verifications that accepted more than s drafted tokens; conditional: of those "
    "that accepted s",
    "tokens/s = new tokens of a run / its seconds, prompts' passes and the run's last answers included; the median of "
    "the repeats",
    "speed-up = median over repeats of (tokens/s with the drafter) / (tokens/s without), both runs one after the "
    "other, who goes first takes turns [lowest, highest]",
    "ms per token = (last arrival - first arrival) / tokens behind the first arrival's; first token and total are from "
    "the request's sending; a gap is between two arrivals, which bring several tokens with a drafter",
)


@dataclass(frozen=True)
class ServerReceipt:
    """What an evaluation on running servers came to."""

    server: About
    baseline: About | None
    prompt_set: str
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    temperature: float
    repeats: int
    runs: tuple[Run, ...]
    skipped: Mapping[str, str]
    seconds: float
    own: Own | None = None
    notes: tuple[str, ...] = ()
    file: str = field(default="")

    @cached_property
    def levels(self) -> list[Level]:
        sizes = dict.fromkeys(run.batch_size for run in self.runs)
        return [Level(size, tuple(run for run in self.runs if run.batch_size == size)) for size in sizes]

    @cached_property
    def acceptance(self) -> Acceptance | None:
        """Over all runs with the drafter."""
        parts = [level.acceptance for level in self.levels]
        told = [part for part in parts if part is not None]
        return pooled(told) if told and len(told) == len(parts) else None

    @cached_property
    def by_prompt(self) -> dict[int, Acceptance]:
        """Of each prompt, over all its answers that tell it."""
        parts: dict[int, list[Acceptance]] = {}
        for run in self.runs:
            for prompt, told in zip(run.prompts, run.told, strict=True):
                if told is not None and told.verifications:
                    parts.setdefault(prompt, []).append(told)
        return {prompt: pooled(parts[prompt]) for prompt in sorted(parts)}

    @property
    def acceptance_length_request_mean(self) -> Estimate | None:
        return _estimate(list(self.by_prompt.values()), pooled_=False)

    @property
    def acceptance_length_pooled(self) -> Estimate | None:
        """Of all that was counted; the interval, over prompts, where the prompts' own shares are known."""
        if self.acceptance is None or self.acceptance.length is None:
            return None
        value, spread = self.acceptance.length, _estimate(list(self.by_prompt.values()), pooled_=True)
        return Estimate(value, spread.low, spread.high) if spread is not None else Estimate(value)

    @property
    def slices(self) -> dict[str, tuple[int, Estimate]]:
        """Prompts and pooled acceptance length of each category; empty where there is just one."""
        groups: dict[str, list[Acceptance]] = {}
        for prompt, told in self.by_prompt.items():
            groups.setdefault(self.prompts[prompt].category, []).append(told)
        found = {name: (len(parts), _estimate(parts, pooled_=True)) for name, parts in sorted(groups.items())}
        return {name: (n, e) for name, (n, e) in found.items() if e is not None} if len(groups) > 1 else {}

    @property
    def identical(self) -> tuple[int, int]:
        parts = [level.identical for level in self.levels]
        return sum(same for same, _ in parts), sum(compared for _, compared in parts)

    @property
    def identical_to_own(self) -> tuple[int, int]:
        """Answers with the drafter that are this process' plain ones."""
        if self.own is None:
            return 0, 0
        same = compared = 0
        for run in self.runs:
            for prompt, answer in zip(run.prompts, run.answers, strict=True):
                wanted = self.own.answers.get(self.prompts[prompt].token_ids)
                if run.with_draft and wanted is not None and answer.token_ids is not None:
                    compared += 1
                    same += answer.token_ids == wanted
        return same, compared

    @property
    def agreement(self) -> float | None:
        """Acceptance length here over that of this process."""
        here = self.acceptance.length if self.acceptance is not None else None
        there = self.own.acceptance.length if self.own is not None else None
        return here / there if here is not None and there is not None else None

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing the figures."""
        lines = []
        disturbed = [run for run in self.runs if any(run.foreign)]
        if disturbed:
            requests, tokens = (sum(run.foreign[i] for run in disturbed) for i in (0, 1))
            inside = "counters hold them too" if any(None in run.told for run in disturbed if run.with_draft) else ""
            lines.append(
                f"warning: other traffic: {requests:,} requests and {tokens:,} tokens that were not ours, in "
                f"{len(disturbed)} of {len(self.runs)} runs: times are disturbed{', and ' + inside if inside else ''}"
            )
        if missed := sum(run.uncounted for run in self.runs):
            lines.append(f"warning: the servers' counters miss {missed:,} tokens of ours: several processes may count")
        total = self.acceptance
        if total is not None and not total.verifications:
            lines.append("warning: the drafter is not active: the server verified nothing")
        elif total is not None and not total.accepted_tokens:
            lines.append(
                "warning: the drafter is not effective: not one drafted token was accepted (acceptance length exactly "
                "1.00); is it of another target, or served as EAGLE instead of EAGLE3?"
            )
        if self.agreement is not None and abs(self.agreement - 1) > TOLERANCE and self.temperature == 0:
            lines.append(
                f"warning: acceptance length differs by {100 * (self.agreement - 1):+.1f} % from that of this process: "
                "the server drafts or judges otherwise; 'eyas doctor acceptance' looks for the reason"
            )
        answers = sum(len(run.answers) for run in self.runs)
        if cut := sum(run.num_cut for run in self.runs):
            lines.append(
                f"warning: {cut:,} of {answers:,} answers were cut by evaluate.max_new_tokens = "
                f"{self.max_new_tokens}: these figures are of their beginnings"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        total = self.acceptance
        same, compared = self.identical
        same_own, compared_own = self.identical_to_own
        return {
            "server": dataclasses.asdict(self.server),
            "baseline": dataclasses.asdict(self.baseline) if self.baseline is not None else None,
            "prompt_set": self.prompt_set,
            "num_prompts": len(self.prompts),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "repeats": self.repeats,
            "acceptance": acceptance_dict(total),
            "acceptance_length_pooled": estimate_dict(self.acceptance_length_pooled),
            "acceptance_length_request_mean": estimate_dict(self.acceptance_length_request_mean),
            "slices": {name: {"prompts": n} | estimate_dict(e) for name, (n, e) in self.slices.items()},  # type: ignore[operator]
            "levels": [level.as_dict() for level in self.levels],
            "runs": [run.as_dict() for run in self.runs],
            "prompts": [
                {"name": p.name, "category": p.category, "prompt_tokens": len(p.token_ids)}
                | {"acceptance": acceptance_dict(self.by_prompt.get(i))}
                for i, p in enumerate(self.prompts)
            ],
            "num_identical": same,
            "num_compared": compared,
            "own": {
                "dtype": self.own.dtype,
                "acceptance": acceptance_dict(self.own.acceptance),
                "acceptance_length_request_mean": self.own.request_mean,
                "agreement": self.agreement,
                "num_identical": same_own,
                "num_compared": compared_own,
            }
            if self.own is not None
            else None,
            "skipped": dict(self.skipped),
            "warnings": self.warnings,
            "notes": list(self.notes),
            "formulas": list(FORMULAS),
            "percentiles": list(PERCENTILES),
            "seconds": self.seconds,
            "file": self.file,
        }

    def lines(self) -> list[str]:
        """For people."""
        later = sum(p.turn > 1 for p in self.prompts)
        turns = f" ({later:,} of them later turns)" if later else ""
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature}"
        repeats = f"{self.repeats} repeat{'s' if self.repeats > 1 else ''}"
        lines = [
            f"server   {_name(self.server)}",
            f"baseline {_name(self.baseline) if self.baseline is not None else 'none: --baseline-server names one'}",
            f"{len(self.prompts):,} prompts{turns} of {self.prompt_set}, at most {self.max_new_tokens:,} new tokens, "
            f"{how}, {repeats} · {human_time(self.seconds)}",
            *self._acceptance_lines(),
            *self._tables(),
            *self._identical_lines(),
            *self.warnings,
        ]
        if self.skipped:
            name, why = next(iter(self.skipped.items()))
            lines.append(f"skipped {len(self.skipped):,} prompts; first: {name}: {why}")
        return [*lines, *FORMULAS, *self.notes, f"file     {self.file}"]

    def _acceptance_lines(self) -> list[str]:
        total = self.acceptance
        if total is None or total.length is None:
            return ["acceptance: the server does not tell it"]
        shares = total.position_acceptance()
        conditional = [b / a if a else None for a, b in itertools.pairwise((1.0, *shares))]
        mean = self.acceptance_length_request_mean
        interval = " [95 % intervals over prompts]" if mean is not None and mean.low is not None else ""
        lines = [
            f"acceptance length {self.acceptance_length_pooled} pooled, {mean or '–'} request mean{interval}: "
            f"1 bonus token and {total.length - 1:.3f} drafted ones accepted, {total.verifications:,} verifications"
        ]
        if shares:
            lines.append(
                f"acceptance at position 0…: {' '.join(f'{a:.3f}' for a in shares)}; conditional: "
                f"{' '.join('–' if c is None else f'{c:.3f}' for c in conditional)}"
            )
        if self.slices:
            lines.append(
                "by category, pooled: " + ", ".join(f"{name or '–'} {e} ({n})" for name, (n, e) in self.slices.items())
            )
        return lines

    def _tables(self) -> list[str]:
        rows = [["batch", "speed-up", "tokens/s", "without", "ms/token", "without", "acceptance"]]
        slow = [["batch", "drafter", "first token ms", "gap ms", "total s", "(p50 / p90 / p99)"]]
        for level in self.levels:
            length = level.acceptance.length if level.acceptance is not None else None
            speeds = [level.tokens_per_s(side) for side in (True, False)]
            tokens = [level.percentiles("token_s", side) for side in (True, False)]
            rows.append(
                [str(level.batch_size), str(level.speedup or "–")]
                + [f"{speed:,.1f}" if speed is not None else "–" for speed in speeds]
                + [f"{1000 * found[0]:.2f}" if found is not None else "–" for found in tokens]
                + [f"{length:.3f}" if length is not None else "–"]
            )
            for side in (True, False):
                if level.side(side):
                    cells = [(name, scale) for name, scale in (("first_token_s", 1e3), ("gap_s", 1e3), ("total_s", 1))]
                    found = [_triple(level.percentiles(name, side), scale) for name, scale in cells]
                    slow.append([str(level.batch_size), "with" if side else "without", *found, ""])
        return [*_aligned(rows), *_aligned(slow)]

    def _identical_lines(self) -> list[str]:
        if self.temperature > 0:
            return []
        lines = []
        same, compared = self.identical
        if compared:
            lines.append(
                f"{same:,} of {compared:,} answers identical with and without the drafter"
                + ("" if same == compared else "; near-ties may fall either way in rounding")
            )
        if self.own is not None and self.agreement is not None:
            same, compared = self.identical_to_own
            mean = f", {self.own.request_mean:.3f} request mean" if self.own.request_mean is not None else ""
            lines.append(
                f"in this process, {self.own.dtype}: acceptance length {self.own.acceptance.length:.3f} pooled{mean}; "
                f"the server's differs by {100 * (self.agreement - 1):+.1f} %; {same:,} of {compared:,} of its answers "
                "identical to plain decoding here"
            )
        return lines


def _name(about: About) -> str:
    how = about.speculation or "no speculation"
    chain = f", {about.num_draft_tokens} drafted tokens" if about.num_draft_tokens else ""
    branches = f", {about.topk} branches" if about.topk and about.topk > 1 else ""
    return f"{about.url}: {about.engine} {about.version}, {about.model}, {how}{chain}{branches}"


def _estimate(parts: Sequence[Acceptance], *, pooled_: bool) -> Estimate | None:
    terms = [(part.accepted_tokens, part.verifications) for part in parts if part.verifications]
    return length_estimate(np.array(terms, dtype=np.float64).reshape(-1, 2), pooled=pooled_)


def _triple(values: list[float] | None, scale: float) -> str:
    return " / ".join(f"{scale * value:.{1 if scale > 1 else 2}f}" for value in values) if values is not None else "–"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
