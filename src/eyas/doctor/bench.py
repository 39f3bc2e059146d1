"""A drafter on the bench: what it drafts on a few samples, as it is and with one thing changed.

A weak drafter is no broken one. So a link counts as broken by behaviour only where the drafter becomes clearly better
when that link is mended: measured on the same rows, compared sample by sample. Letters: `S` steps, `n` rows at which
a server would draft, `A` auxiliary layers, `H` hidden size, `N` rows of all samples, `F` fields.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from eyas.model.eagle3 import Eagle3Draft
from eyas.model.vocab_map import VocabMap
from eyas.records import TokenIds
from eyas.target.head import HeadTensors
from eyas.train.attention import causal_for
from eyas.train.loader import Batch, batch_of
from eyas.train.loss import argmax_of
from eyas.train.ttt import DraftWeights, Options, plan_rows, ttt

FloatArray = npt.NDArray[np.float64]

STEPS = 3
"""Drafted tokens that are looked at."""
MIN_SAMPLES = 6
"""Fewer samples say nothing about a difference."""
MIN_GAIN = 0.3
"""A mended link must give so many more accepted tokens, as a share: real faults cost half of them and more, while a
weak drafter may read the layer behind its own a little better."""
MIN_GAIN_TOKENS = 0.05
"""And so many a draft."""
NUM_RESAMPLES = 2000
ALPHA = 0.005
"""One-sided: several things are tried on each drafter."""
ROW_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class OneSample:
    """What is known of a sample."""

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    states: torch.Tensor
    """`[F, T, H]`: the auxiliary layers ascending, then the last state."""
    held_out: bool


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a drafter drafted; its map is not in it yet."""

    said: npt.NDArray[np.int64]
    """`[S, n]` draft ids."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What of it the target would accept, by sample."""

    accepted: FloatArray
    """Accepted tokens, summed over a sample's rows; those of chains of `S`."""
    right: FloatArray
    """Right at step 0."""
    rows: FloatArray
    """Rows at which a draft begins."""

    @property
    def length(self) -> float:
        """Acceptance length, pooled, the bonus token included."""
        return 1 + float(self.accepted.sum() / max(1.0, self.rows.sum()))

    @property
    def accuracy(self) -> float:
        """At step 0."""
        return float(self.right.sum() / max(1.0, self.rows.sum()))

    def of(self, chosen: npt.NDArray[np.bool_]) -> Outcome:
        return Outcome(self.accepted[chosen], self.right[chosen], self.rows[chosen])


class Bench:
    """Samples in memory with the target's likeliest tokens, and a place to run drafters."""

    def __init__(
        self, samples: Sequence[OneSample], head: HeadTensors, norm: Literal["pre", "post"], *, steps: int = STEPS
    ) -> None:
        """At least one sample; `norm` is that of the samples' last states."""
        self.samples = tuple(samples)
        self.device = head.weight.device
        self.dtype = head.weight.dtype
        self.batch: Batch = batch_of([(s.token_ids, s.loss_mask, s.states) for s in samples], self.device)
        self.rows = plan_rows(self.batch.loss_mask, self.batch.cu_seqlens.tolist(), num_steps=steps, rule="drafted")
        bounds = np.array(self.rows.docs.row_bounds)
        self.sample = np.repeat(np.arange(len(samples)), np.diff(bounds))
        """`[n]`: whose row it is."""
        self.supervised = self.rows.supervised.cpu().numpy()
        """`[S, n]`"""
        self.held_out = np.array([s.held_out for s in samples], dtype=np.bool_)
        self.position = self.rows.positions[self.rows.rows].cpu().numpy()
        """`[n]` within the sample."""
        self.following = self.batch.token_ids[(self.rows.rows + 1)].cpu().numpy()
        """`[n]`: the last token that is known when a draft begins."""
        with torch.no_grad():
            last = self.batch.states[-1][self.rows.teacher_rows]
            last = (head.norm(last.to(self.dtype)) if norm == "pre" else last).to(self.dtype)
            best = argmax_of(last, head.weight, head.bias, head.logit_map)
        best = best if len(best) else best.new_zeros(1)
        self.truth = best[self.rows.teacher].cpu().numpy()
        """`[S, n]`: the target's likeliest token; only where supervised."""

    @property
    def num_rows(self) -> int:
        return len(self.sample)

    @property
    def num_steps(self) -> int:
        return len(self.supervised)

    @torch.no_grad()
    def run(self, draft: Eagle3Draft, *, aux: torch.Tensor | None = None, offset: int = 0) -> Drafts:
        """What `draft` says; `aux [A, N, H]` instead of the stored states, `offset` added to later steps' positions."""
        draft = draft.to(self.device)
        weights = DraftWeights.of(draft, self.dtype)
        options = Options(self.dtype, causal_for(self.device, self.dtype))
        rows = dataclasses.replace(self.rows, offset=offset)
        given = self.batch.states[:-1] if aux is None else aux.to(self.device)
        states = ttt(draft, weights, rows, self.batch.token_ids, given, options)  # [S, n, H]
        flat = states.flatten(0, 1)
        found = [F.linear(part, weights.lm_head).argmax(-1) for part in torch.split(flat, ROW_BLOCK)]
        return Drafts(torch.cat(found).view(states.shape[:2]).cpu().numpy() if found else np.zeros((1, 0), np.int64))

    def judge(self, drafts: Drafts, vocab_map: VocabMap, rows: npt.NDArray[np.bool_] | None = None) -> Outcome:
        """What the target accepts of `drafts`, read through this map; over some rows `[n]` or all."""
        target_ids = vocab_map.target_ids.numpy()
        hits = (target_ids[drafts.said] == self.truth) & self.supervised
        chain = np.logical_and.accumulate(hits, axis=0)
        return Outcome(*(self.by_sample(one, rows) for one in (chain.sum(axis=0), hits[0], self.supervised[0])))

    def by_sample(self, values: npt.NDArray[Any], rows: npt.NDArray[np.bool_] | None = None) -> FloatArray:
        """The sums of `values [n]` by sample, over some rows or all."""
        chosen = np.ones(len(values), np.bool_) if rows is None else rows
        sums = np.bincount(self.sample[chosen], weights=values[chosen], minlength=len(self.samples))
        return sums.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one outcome is than another, on the same rows."""

    before: float
    """Acceptance length."""
    after: float
    low: float
    """Lower end of the difference, one-sided, over samples."""
    high: float
    samples: int

    @property
    def clear(self) -> bool:
        """Better beyond doubt, and by so much that it matters."""
        needed = max(MIN_GAIN_TOKENS, MIN_GAIN * (self.before - 1))
        return self.samples >= MIN_SAMPLES and self.low > 0 and self.after - self.before >= needed

    @property
    def clear_loss(self) -> bool:
        """Worse beyond doubt: what was changed mattered, and had been right."""
        needed = max(MIN_GAIN_TOKENS, MIN_GAIN * (self.after - 1))
        return self.samples >= MIN_SAMPLES and self.high < 0 and self.before - self.after >= needed


def gain(before: Outcome, after: Outcome, *, seed: int = 0) -> Gain:
    """Paired by sample; bootstrap over the samples that have rows."""
    told = before.rows > 0
    rows = before.rows[told]
    difference = after.accepted[told] - before.accepted[told]
    count = len(rows)
    if count < 2:
        return Gain(before.length, after.length, -np.inf, np.inf, count)
    drawn = np.random.default_rng(seed).integers(count, size=(NUM_RESAMPLES, count))
    values = difference[drawn].sum(axis=1) / rows[drawn].sum(axis=1)
    low, high = np.quantile(values, [ALPHA, 1 - ALPHA])
    return Gain(before.length, after.length, float(low), float(high), count)


def interval(hits: FloatArray, rows: FloatArray, *, seed: int = 0) -> tuple[float, float, float]:
    """`Σ hits / Σ rows` with its 95 % interval over samples; (0, 0, 1) without a row."""
    told = rows > 0
    hits, rows = hits[told], rows[told]
    if not len(rows):
        return 0.0, 0.0, 1.0
    value = float(hits.sum() / rows.sum())
    if len(rows) < 2:
        return value, 0.0, 1.0
    drawn = np.random.default_rng(seed).integers(len(rows), size=(NUM_RESAMPLES, len(rows)))
    low, high = np.quantile(hits[drawn].sum(axis=1) / rows[drawn].sum(axis=1), [0.025, 0.975])
    return value, float(low), float(high)


def with_embedding(draft: Eagle3Draft, embedding: torch.Tensor) -> Eagle3Draft:
    """The drafter with another embedding `[V, H]`."""
    changed = copy.deepcopy(draft)
    with torch.no_grad():
        changed.embed_tokens.weight.copy_(embedding)
    return changed
