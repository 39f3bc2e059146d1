"""Is supervised what the target wrote? By the generation prompt, by the conversations themselves, by the target's word.

Letters: `T` tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eyas.doctor.findings import Finding, broken, ok, unknown
from eyas.records import Span, TokenIds

SHIFTS = (0, 1, -1, 2, -2)
MOST = 0.9
"""Share of the spans that must agree before a pattern counts."""
FEW_SPANS = 6
GREEDY = 0.9
"""Where the target's likeliest tokens make up so much of the inside of the spans, their edges must be so, too."""
EDGE = 0.5
MOSTLY_WRONG = 0.1
"""Share of re-derived masks that may differ: rows may have been merged, settings refined."""
FEW_ROWS = 0.5
"""A drafter that may not draft in so large a share of the samples learns from the rest alone."""


@dataclass(frozen=True, slots=True)
class Masked:
    """A sample as the table has it."""

    token_ids: TokenIds
    spans: tuple[Span, ...]
    likeliest: npt.NDArray[np.int64] | None = None
    """`[T]`: what the target finds likeliest behind each token; None where no states are there."""


@dataclass(slots=True)
class Edges:
    """How often the target agrees with the text around the edges of spans."""

    seen: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, agrees: bool) -> None:
        self.seen[name] += 1
        self.hits[name] += agrees

    def share(self, name: str) -> float | None:
        return self.hits[name] / self.seen[name] if self.seen[name] else None

    def number(self, name: str) -> int:
        return self.seen[name]


def agreement(samples: Sequence[Masked]) -> Edges:
    """By place: `before` and `first` at a span's start, `inside`, `last` and `after` at the end of one that is not the
    sample's end."""
    edges = Edges()
    for sample in samples:
        if sample.likeliest is None:
            continue
        ids = sample.token_ids
        hits = np.zeros(len(ids), np.bool_)
        hits[1:] = sample.likeliest[:-1] == ids[1:]
        for start, end in sample.spans:
            places = [("before", start - 1), ("first", start)]
            if end < len(ids):
                # A sample ends with its last supervised token: a late span there lost its end, and shows nothing.
                places += [("last", end - 1), ("after", end)]
            places += [("inside", t) for t in range(start + 2, end - 2)]
            for name, t in places:
                if 1 <= t < len(ids):
                    edges.add(name, bool(hits[t]))
    return edges


def judge_empty(samples: Sequence[Masked], num_supervised: int) -> Finding | None:
    """Broken where nothing, or hardly anything, is drafted; else None."""
    count = len(samples)
    supervised = sum(end - start for one in samples for start, end in one.spans)
    tokens = sum(len(one.token_ids) for one in samples)
    # A draft needs two tokens in a row: the one that is known, and the one that is drafted.
    without = sum(not any(end - max(start, 1) >= 2 for start, end in one.spans) for one in samples)
    numbers = {"samples": count, "supervised_tokens": supervised, "without_a_draft": without}
    if not supervised:
        return broken(
            "mask",
            f"no token of {count:,} samples ({tokens:,} tokens) is supervised; the table counts {num_supervised:,}",
            "run 'eyas prepare' again, then look at 'eyas inspect'",
            **numbers,
        )
    if without > FEW_ROWS * count:
        return broken(
            "mask",
            f"{without:,} of {count:,} samples have no two supervised tokens in a row: nothing is drafted there",
            "look at 'eyas inspect': are the masks those of the answers?",
            **numbers,
        )
    return None


def shift_by_prompt(samples: Sequence[Masked], prompt: Sequence[int]) -> tuple[int | None, dict[int, int], int]:
    """By how much spans are late behind the tokens that open an answer; None where these are not found.

    Also how many spans fit each shift, and how many there are. A shift of +1: the first token written is left out.
    """
    wanted = list(prompt)
    spans = [(one.token_ids, start) for one in samples for start, _ in one.spans]
    fits = dict.fromkeys(SHIFTS, 0)
    for ids, start in spans:
        for shift in SHIFTS:
            end = start - shift
            if len(wanted) <= end <= len(ids) and ids[end - len(wanted) : end].tolist() == wanted:
                fits[shift] += 1
                break
    found = next((shift for shift, n in fits.items() if n >= MOST * len(spans)), None)
    return found if len(spans) >= FEW_SPANS else None, fits, len(spans)


def shift_by_target(edges: Edges) -> int | None:
    """By how much spans are late, from the target's agreement alone; None where it cannot tell.

    Only text that the target would write itself can tell: then all of a span is likeliest, and a span that lost its
    first token has it in front, and somebody else's word at its end.
    """
    inside = edges.share("inside")
    if inside is None or inside < GREEDY or min(edges.number("first"), edges.number("last")) < FEW_SPANS:
        return None
    shares = {name: edges.share(name) for name in ("before", "first", "last", "after")}
    before, first, last, after = (shares[name] for name in ("before", "first", "last", "after"))
    assert first is not None and last is not None
    if before is not None and before >= GREEDY and last < EDGE:
        return 1
    if after is not None and after >= GREEDY and first < EDGE:
        return -1
    return 0 if first >= GREEDY and last >= EDGE else None


@dataclass(frozen=True, slots=True)
class Derived:
    """Masks of the conversations, made now, beside those of the table."""

    rows: int
    """Samples that the first conversations of the sources give now."""
    found: int
    """Of them, samples that the table has."""
    differ: int
    """Of those, with supervised tokens that the table lacks, or with others while no row was merged."""
    shift: int | None
    """By how much the table's spans are late, where all that differ agree on it."""


def compare_masks(derived: Mapping[str, tuple[Span, ...]], table: Mapping[str, tuple[Span, ...]]) -> Derived:
    """By sample id; a table's mask may hold more, where equal conversations were merged."""
    found = [sample_id for sample_id in derived if sample_id in table]
    shifts: Counter[int | None] = Counter()
    differ = 0
    for sample_id in found:
        now, then = derived[sample_id], table[sample_id]
        if now == then or _covers(then, now):
            continue
        differ += 1
        shifts[_shift(then, now)] += 1
    most = shifts.most_common(1)
    shift = most[0][0] if most and most[0][1] >= MOST * differ else None
    return Derived(len(derived), len(found), differ, shift)


def judge_mask(
    samples: Sequence[Masked],
    *,
    num_supervised: int,
    edges: Edges,
    prompt: Sequence[int] | None,
    derived: Derived | None,
    why_not: str,
) -> Finding:
    """The strongest evidence first: conversations, then the generation prompt, then the target's own word.

    `prompt`: the tokens with which the template opens an answer. `why_not`: why there are neither these.
    """
    empty = judge_empty(samples, num_supervised)
    if empty is not None:
        return empty
    numbers: dict[str, object] = {
        "agreement": {name: edges.share(name) for name in ("before", "first", "inside", "last", "after")}
    }
    said: list[str] = []
    how = {1: "one token late (the first written token is left out)", -1: "one token early (the prompt's last is in)"}
    do = "run 'eyas prepare' anew and look at 'eyas inspect'; then train again (states need not be captured again)"
    if derived is not None and derived.found:
        numbers["derived"] = {"rows": derived.rows, "found": derived.found, "differ": derived.differ}
        if derived.differ > MOSTLY_WRONG * derived.found:
            late = how.get(
                derived.shift or 0, f"shifted by {derived.shift:+d} tokens" if derived.shift else "other tokens"
            )
            return broken(
                "mask",
                f"{derived.differ} of {derived.found} masks are not those of their conversations: {late}",
                do,
                **numbers,
            )
        said.append(f"{derived.found - derived.differ} of {derived.found} masks derived again are the same")
    if prompt:
        shift, fits, count = shift_by_prompt(samples, prompt)
        numbers["behind_the_prompt"] = {"spans": count, **{str(s): n for s, n in fits.items()}}
        if shift:
            return broken(
                "mask",
                f"{fits[shift]} of {count} spans begin {how.get(shift, f'{shift:+d} tokens off')}, measured at the "
                "tokens with which the template opens an answer",
                do,
                **numbers,
            )
        if fits[0]:
            said.append(f"{fits[0]} of {count} spans begin right behind the template's opening of an answer")
    by_target = shift_by_target(edges)
    inside = edges.share("inside")
    shown = ", ".join(
        f"{name} {share:.0%}"
        for name in ("before", "first", "inside", "last", "after")
        if (share := edges.share(name)) is not None
    )
    if by_target:
        return broken(
            "mask", f"spans are {how[by_target]}: the target's likeliest token is the text's: {shown}", do, **numbers
        )
    if shown:
        said.append(f"the target agrees with the text: {shown}")
    if not said or (by_target is None and len(said) == 1 and said[0].startswith("the target agrees")):
        why = (
            "answers that are not the target's likeliest cannot tell where they begin"
            if inside is not None
            else why_not
        )
        return unknown("mask", "; ".join([why, *said]), **numbers)
    note = ""
    if inside is not None and inside < EDGE:
        note = (
            f"only {inside:.0%} of the supervised tokens are what the target finds likeliest: are the answers its own?"
        )
    return ok("mask", "; ".join(said), note=note, **numbers)


def _covers(wide: tuple[Span, ...], narrow: tuple[Span, ...]) -> bool:
    """Whether every span of `narrow` is one of `wide`: a union of masks holds them whole."""
    return set(narrow) <= set(wide)


def _shift(then: tuple[Span, ...], now: tuple[Span, ...]) -> int | None:
    if len(then) != len(now):
        return None
    starts = {a[0] - b[0] for a, b in zip(then, now, strict=True)}
    return starts.pop() if len(starts) == 1 else None
