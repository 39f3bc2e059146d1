"""What the drafter does with one link mended: its vocabulary, its embedding, its positions; and how good it is.

Letters: `V` target vocabulary, `D` draft vocabulary, `H` hidden size, `S` steps, `n` rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from eyas.doctor.bench import Bench, Drafts, Gain, Outcome, gain, interval, with_embedding
from eyas.doctor.findings import Finding, broken, ok, unknown
from eyas.model.eagle3 import Eagle3Draft, rotary
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.target.head import TargetHead
from eyas.train.baseline import Baseline, Score

HEAD_ROWS = 96
"""Rows of lm_head that are looked for among the target's."""
LIKE = 0.5
"""Cosine from which a row of lm_head surely comes from a row of the target's head."""
PERMUTED = 0.5
"""Share of the rows that must belong to other tokens before the map counts as another one."""
MIN_ALIKE = 8
LOW_COVERAGE = 0.75
SPARE_COVERAGE = 0.1
"""A map counts as too small when it holds so little, and another one of its size would hold so much more."""
FEW_RIGHT = 0.9
"""The recorded accuracy must be missed by a tenth, beyond both intervals."""
OVERFIT = 2.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A drafter on the bench, and what it drafted as it is."""

    bench: Bench
    draft: Eagle3Draft
    vocab_map: VocabMap
    drafts: Drafts

    def outcome(self) -> Outcome:
        return self.bench.judge(self.drafts, self.vocab_map)

    def gain(self, draft: Eagle3Draft | None = None, *, offset: int = 0) -> Gain:
        """Of another drafter, or of other positions."""
        drafts = self.bench.run(draft or self.draft, offset=offset)
        return gain(self.outcome(), self.bench.judge(drafts, self.vocab_map))


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Whose rows lm_head has, among the target's."""

    looked_at: int
    """Rows that are alike to just one of the target's."""
    elsewhere: int
    """Of them, rows of another token than the map says."""
    example: str


def find_head_rows(lm_head: torch.Tensor, target_ids: torch.Tensor, head: TargetHead) -> HeadRows | None:
    """Rows of lm_head start from the target's; None where the sizes differ. `lm_head [D, H]`, `target_ids [D]`."""
    if lm_head.shape[1] != head.hidden_size:
        return None
    at = torch.from_numpy(np.unique(np.linspace(0, len(lm_head) - 1, HEAD_ROWS).astype(np.int64)))
    mine = F.normalize(lm_head[at].float(), dim=1)
    best = torch.full((len(at),), -1.0)
    best_id = torch.zeros(len(at), dtype=torch.int64)
    own = torch.zeros(len(at))
    rows = head.rows(torch.arange(head.vocab_size))
    for start in range(0, head.vocab_size, 16384):
        theirs = F.normalize(rows[start : start + 16384].float(), dim=1)
        likeness = mine @ theirs.T
        top, top_id = likeness.max(1)
        better = top > best
        best, best_id = torch.where(better, top, best), torch.where(better, top_id + start, best_id)
        wanted = target_ids[at] - start
        here = (wanted >= 0) & (wanted < len(theirs))
        own = torch.where(here, likeness.gather(1, wanted.clamp(0, len(theirs) - 1)[:, None])[:, 0], own)
    alike = best > LIKE
    # Rows of tokens that were never trained are all alike: the own one counts where it is as good.
    elsewhere = alike & (own < best - 0.1)
    example = ""
    if bool(elsewhere.any()):
        i = int(torch.nonzero(elsewhere)[0, 0])
        example = (
            f"draft id {int(at[i])} is mapped to token {int(target_ids[at[i]])} (cosine {float(own[i]):.2f}), its row "
            f"is that of token {int(best_id[i])} ({float(best[i]):.2f})"
        )
    return HeadRows(int(alike.sum()), int(elsewhere.sum()), example)


def judge_vocab(trial: Trial, counts: npt.NDArray[np.int64], rows: HeadRows | None, paper: str) -> Finding:
    """The map by what lm_head is made of, by what the drafter says, and by what the supervised tokens need.

    `counts [V]`: supervised tokens of the training samples; `paper`: what the checkpoint says of its map.
    """
    vocab_map = trial.vocab_map
    best = VocabMap.from_counts(counts, vocab_map.draft_vocab_size)
    coverage, possible = vocab_map.coverage(counts), best.coverage(counts)
    recounted = gain(trial.outcome(), trial.bench.judge(trial.drafts, best))
    remake = "export the checkpoint anew from the training, which knows its map (d2t as offsets, t2d)"
    numbers: dict[str, Any] = {
        "coverage": coverage,
        "best_coverage": possible,
        "length": recounted.before,
        "length_recounted": recounted.after,
    }
    # Whose rows lm_head has says more than what a weak drafter drafts.
    told = rows is not None and rows.looked_at >= MIN_ALIKE
    if rows is not None and told:
        numbers |= {"head_rows": rows.looked_at, "head_rows_elsewhere": rows.elsewhere}
        if rows.elsewhere > PERMUTED * rows.looked_at:
            text = (
                f"{rows.elsewhere} of {rows.looked_at} rows of lm_head belong to other tokens than the map says: "
                f"{rows.example}"
            )
            return broken("vocab", text, remake, **numbers)
    elif recounted.clear:
        text = (
            "read through the map that the supervised tokens give, the drafter reaches acceptance length "
            f"{recounted.after:.2f} instead of {recounted.before:.2f}: the map is not the one trained with"
        )
        return broken("vocab", text, remake, **numbers)
    if coverage < LOW_COVERAGE and possible > coverage + SPARE_COVERAGE:
        text = f"the map holds {coverage:.1%} of the supervised tokens, the best one of its size {possible:.1%}"
        do = "train with a draft vocabulary counted on these samples (draft.vocab_size)"
        return broken("vocab", text, do, **numbers)
    text = f"{paper}; it holds {coverage:.1%} of the supervised tokens (the best of its size {possible:.1%})"
    if rows is not None and told:
        text += f"; {rows.looked_at - rows.elsewhere} of {rows.looked_at} rows of lm_head are those of its tokens"
    note = f"the draft vocabulary lacks {1 - coverage:.1%} of the supervised tokens" if coverage < 0.9 else ""
    return ok("vocab", text, note=note, **numbers)


def judge_embedding(draft: Eagle3Draft, target: torch.Tensor, dtype: str, trial: Trial | None) -> Finding:
    """The checkpoint's own embedding against `target [V, H]`, bit by bit in its dtype, then by behaviour."""
    own = draft.embed_tokens.weight.detach().cpu()
    do = "leave embed_tokens out of the checkpoint, so that engines share the target's, or write the target's"
    if own.shape != target.shape:
        return broken("embedding", f"it is {list(own.shape)}, the target's {list(target.shape)}", do)
    wide = target.float()
    same = (own == wide.to(getattr(torch, dtype)).float()).all(1) | (own == wide.to(torch.bfloat16).float()).all(1)
    num_other = int((~same).sum())
    numbers: dict[str, Any] = {"rows_that_differ": num_other, "rows": len(own)}
    if not num_other:
        return ok("embedding", f"equal to the target's in all {len(own):,} rows", **numbers)
    error = float((own - wide).norm() / wide.norm())
    text = f"{num_other:,} of {len(own):,} rows differ from the target's (relative {error:.2g})"
    if trial is None:
        return broken("embedding", text, do, **numbers)
    g = trial.gain(with_embedding(draft, wide))
    numbers |= {"length": g.before, "length_with_the_targets": g.after}
    text += f"; acceptance length {g.before:.2f}, with the target's {g.after:.2f}"
    if g.clear_loss:
        note = "the drafter trained an embedding of its own: vLLM reads it, SGLang the target's in its place"
        return ok("embedding", text, note=note, **numbers)
    return broken("embedding", text, do, **numbers)


@dataclass(frozen=True, slots=True)
class Positions:
    """What a checkpoint says of positions, and what a new drafter for this target would say."""

    rope: Mapping[str, Any]
    max_positions: int | None
    fresh: DraftShape
    longest_sample: int
    """Tokens."""
    recorded: bool
    """Trained by eyas, which takes the target's."""

    def differences(self) -> list[str]:
        mine, theirs = self.rope, self.fresh.rope
        return [
            f"{name} {mine.get(name, 'none')}, the target has {theirs.get(name, 'none')}"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]


def judge_rope(positions: Positions, trial: Trial | None) -> Finding:
    """Rotary parameters and number of positions against the target's; then positions by behaviour, where it can be."""
    fresh, differ = positions.fresh, positions.differences()
    numbers: dict[str, Any] = {
        "rope": dict(positions.rope),
        "target_rope": dict(fresh.rope),
        "positions": positions.max_positions,
        "target_positions": fresh.max_position_embeddings,
        "longest_sample": positions.longest_sample,
    }
    note = ""
    if differ:
        text, better, worse = "; ".join(differ), False, False
        if trial is not None:
            g = trial.gain(_with_rope(trial.draft, fresh))
            text += f": acceptance length {g.before:.2f}, with the target's {g.after:.2f}"
            numbers |= {"length": g.before, "length_with_the_targets": g.after}
            better, worse = g.clear, g.clear_loss
        # Another project's drafter may have been trained with positions of its own.
        if better or (positions.recorded and not worse):
            do = "write the target's rope_parameters and rope_theta into the checkpoint's config.json"
            return broken("rope", text, do, **numbers)
        note = f"positions of its own: {text}"
    if positions.max_positions is not None and positions.max_positions < fresh.max_position_embeddings:
        text = (
            f"max_position_embeddings is {positions.max_positions:,}, the target's {fresh.max_position_embeddings:,}; "
            f"the longest sample has {positions.longest_sample:,} tokens"
        )
        do = f"write max_position_embeddings = {fresh.max_position_embeddings} into config.json"
        return broken("rope", text, do, **numbers)
    text = "rotary parameters of its own" if differ else "the target's rotary parameters"
    text += f", {fresh.max_position_embeddings:,} positions"
    return ok("rope", text, note=note, **numbers) if trial is None else _judge_moves(trial, text, note, numbers)


def _judge_moves(trial: Trial, text: str, note: str, numbers: dict[str, Any]) -> Finding:
    """Would drafted tokens rather stand elsewhere? And is the drafter as good late in a sample as early?"""
    moved = {by: trial.gain(offset=by) for by in (-1, 1)}
    length = trial.outcome().length
    numbers |= {"length": length, "length_moved": {f"{by:+d}": g.after for by, g in moved.items()}}
    for by, g in moved.items():
        if g.clear:
            told = (
                f"drafted tokens want positions moved by {by:+d}: acceptance length {g.after:.2f} instead of "
                f"{g.before:.2f} on {g.samples} samples"
            )
            do = "the training gave later steps other positions than t + s, which engines give: train anew"
            return broken("rope", told, do, **numbers)
    early, late = _halves(trial)
    numbers |= {"early": early, "late": late}
    shown = ", ".join(f"{by:+d}: {g.after:.2f}" for by, g in moved.items())
    text += f"; acceptance length {length:.2f}, moved by {shown}; step-0 accuracy in the early half of positions "
    text += f"{early[0]:.3f}, in the late half {late[0]:.3f}"
    if late[2] < 0.5 * early[1]:
        note = note or "accuracy falls off with the position: longer samples in training"
    return ok("rope", text, note=note, **numbers)


def _with_rope(draft: Eagle3Draft, fresh: DraftShape) -> Eagle3Draft:
    changed = copy.copy(draft)
    changed._modules = dict(draft._modules)
    changed.rope = rotary(fresh)
    return changed


def _halves(trial: Trial) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Step-0 accuracy with its interval, in front of the median position and behind it."""
    bench = trial.bench
    middle = float(np.median(bench.position))

    def of(rows: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
        outcome = bench.judge(trial.drafts, trial.vocab_map, rows)
        return interval(outcome.right, outcome.rows)

    return of(bench.position <= middle), of(bench.position > middle)


def judge_accuracy(bench: Bench, outcome: Outcome, baseline: Baseline, recorded: Mapping[str, Any] | None) -> Finding:
    """Held-out accuracy at step 0, beside what guessing gets, what the training recorded, and the train split."""
    held_out, train = outcome.of(bench.held_out), outcome.of(~bench.held_out)
    value, low, high = interval(held_out.right, held_out.rows)
    seen, seen_low, _ = interval(train.right, train.rows)
    told = bench.held_out[bench.sample] & bench.supervised[0]
    score: Score = baseline.score(bench.following[told], bench.truth[0][told])
    guess = score.to_json()
    bigram, unigram = guess["bigram"] or 0.0, guess["unigram"] or 0.0
    samples = int((held_out.rows > 0).sum())
    numbers: dict[str, Any] = {
        "held_out": [value, low, high],
        "train": seen,
        "bigram": bigram,
        "unigram": unigram,
        "rows": int(held_out.rows.sum()),
        "samples": samples,
        "acceptance_length": held_out.length,
    }
    if not samples:
        return unknown("accuracy", "no captured sample is held out; set data.held_out and prepare again", **numbers)
    text = (
        f"step 0: {value:.3f} [{low:.3f}, {high:.3f}] on {samples} held-out samples ({int(held_out.rows.sum()):,} "
        f"rows), bigram {bigram:.3f}, unigram {unigram:.3f}, train split {seen:.3f}; acceptance length of chains of "
        f"{bench.supervised.shape[0]} {held_out.length:.2f}"
    )
    then = _first(recorded)
    if then is not None:
        numbers["recorded"] = list(then)
        text += f"; the training recorded {then[0]:.3f} [{then[1]:.3f}, {then[2]:.3f}]"
        if high < then[1] and value < FEW_RIGHT * then[0]:
            return broken(
                "accuracy",
                text,
                "weights, data set or sample table are not those of that training: take its own checkpoint, or train "
                "anew",
                **numbers,
            )
    notes = []
    if samples < 30:
        notes.append(f"{samples} samples say little")
    if high <= bigram:
        notes.append("weak: no better than a bigram; train longer, or on more samples")
    elif low <= bigram:
        notes.append("not clearly better than a bigram")
    if seen_low > OVERFIT * high:
        notes.append(f"over-fitted: {seen:.2f} on the train split, {value:.2f} held out; more data, or fewer epochs")
    return ok("accuracy", text, note=", ".join(notes), **numbers)


def _first(recorded: Mapping[str, Any] | None) -> tuple[float, float, float] | None:
    """The recorded accuracy of step 0 with its interval."""
    try:
        one = (recorded or {})["accuracy"][0]
        value = float(one["value"])
        return (
            value,
            float(one["low"] if one["low"] is not None else 0),
            float(one["high"] if one["high"] is not None else 1),
        )
    except (KeyError, IndexError, TypeError, ValueError):
        return None
