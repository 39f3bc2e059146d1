"""How good a drafter is on held-out samples: loss, accuracy and acceptance length for each step, with intervals.

All of it follows from five sums for each sample and step, so that packs, ranks and slices add up exactly.
Letters: `N` samples, `R` rows, `S` steps of training-time test (`ttt_length`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SUMS = ("supervised", "in_vocab", "correct", "chain", "loss_sum")
NUM_RESAMPLES = 1000
CONFIDENCE = 0.95
MIN_SLICE_SAMPLES = 30
"""A slice of fewer samples is told as small: its interval says little."""
MAX_SLICES = 64
"""Slices of one kind that are named: the largest; the samples of the others are one slice, `kind:other`."""
OTHER = "other"
UNKNOWN = "unknown"
_CHUNK_BYTES = 16 << 20


class Tally:
    """Sums over rows, for each sample and step: `sums` is float64 `[5, N, S]` in the order of `SUMS`.

    `supervised`: rows that the mask rule gives to the step. `in_vocab`: those whose true token, the target's arg-max,
    is in the draft vocabulary. `correct`: those where the drafter's arg-max is the true token. `chain`: those that
    were correct at this step and at all steps before it. `loss_sum`: soft cross-entropy over the rows in vocabulary.

    A sample is known by its index among the held-out samples, the same on every rank: merging is adding, so several
    ranks may also sum `sums` in place. Counts are exact up to 2^53.
    """

    def __init__(self, num_samples: int, ttt_length: int) -> None:
        self.sums: FloatArray = np.zeros((len(SUMS), num_samples, ttt_length))

    @property
    def num_samples(self) -> int:
        return int(self.sums.shape[1])

    @property
    def ttt_length(self) -> int:
        return int(self.sums.shape[2])

    def __getitem__(self, name: str) -> FloatArray:
        """`[N, S]`: the sums of one name."""
        sums: FloatArray = self.sums[SUMS.index(name)]
        return sums

    def add_rows(
        self,
        samples: IntArray,
        *,
        supervised: BoolArray,
        in_vocab: BoolArray,
        correct: BoolArray,
        loss: npt.NDArray[np.floating],
    ) -> None:
        """Count rows: `samples` `[R]` says whose they are, the rest is `[S, R]`.

        What the arrays say of rows that are not supervised does not count, except that `chain` asks for `correct` at
        the earlier steps of a row, supervised there or not.
        """
        hits = correct & in_vocab
        chain = np.logical_and.accumulate(hits, axis=0) & supervised
        in_vocab = in_vocab & supervised
        masses = (supervised, in_vocab, hits & supervised, chain, np.where(in_vocab, loss, 0.0))
        for sums, mass in zip(self.sums, masses, strict=True):
            for step, weights in enumerate(mass):
                sums[:, step] += np.bincount(samples, weights=weights, minlength=self.num_samples)

    def add(self, samples: IntArray, sums: npt.ArrayLike) -> None:
        """Add sums that were made elsewhere: `sums` `[5, n, S]` of the samples `[n]`, which may repeat."""
        for own, more in zip(self.sums, np.asarray(sums, dtype=np.float64), strict=True):
            np.add.at(own, samples, more)

    def merge(self, other: Tally) -> None:
        """Take in what another rank, or another pack, has counted. ValueError unless it is about the same samples."""
        if self.sums.shape != other.sums.shape:
            raise ValueError(f"tallies of {self.sums.shape[1:]} and {other.sums.shape[1:]} samples and steps")
        self.sums += other.sums

    def __add__(self, other: Tally) -> Tally:
        both = Tally(self.num_samples, self.ttt_length)
        both.merge(self)
        both.merge(other)
        return both

    def of(self, samples: Sequence[int] | IntArray) -> Tally:
        """The tally of just these samples."""
        part = Tally(0, self.ttt_length)
        part.sums = self.sums[:, np.asarray(samples, dtype=np.int64)]
        return part

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        counts = {name: self[name].astype(np.int64).tolist() for name in SUMS[:-1]}
        return {
            "num_samples": self.num_samples,
            "ttt_length": self.ttt_length,
            **counts,
            SUMS[-1]: self[SUMS[-1]].tolist(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """Inverse of `to_json`."""
        tally = cls(value["num_samples"], value["ttt_length"])
        for name in SUMS:
            tally[name][:] = np.asarray(value[name], dtype=np.float64).reshape(tally[name].shape)
        return tally


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its bootstrap interval over samples; no interval where there is only one sample."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3f}" if self.low is None else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a tally says. Tuples have one entry for each step, None where no row tells; sums run over all samples.

    With `n` = supervised, `v` = in_vocab, `a` = correct, `c` = chain, each at step `s`:

    | name | formula |
    |---|---|
    | `loss` | Σ loss_sum / Σ v |
    | `accuracy` | Σ a / Σ n: a true token outside the draft vocabulary is a miss |
    | `accuracy_in_vocab` | Σ a / Σ v |
    | `in_vocab` | Σ v / Σ n: no drafter can be more accurate than this |
    | `cumulative` | c_s = Σ c / Σ n |
    | `conditional` | c_s / c_{s-1}, with c_{-1} = 1; rows differ from step to step, so it may pass 1 by a little |
    | `acceptance_length_pooled` | entry `k-1`, for chains of `k` drafted tokens: 1 + Σ_{s<k} c_s |
    | `acceptance_length_sample_mean` | 1 + Σ_{s<k} of the mean of c / n over the samples with n > 0 at step `s` |

    An acceptance length counts tokens per target forward, the bonus token included. Pooled, long conversations weigh
    more, as in a server's own counters; in the mean each conversation weighs the same.
    """

    num_samples: int
    """Samples with at least one supervised row."""
    small: bool
    """Too few samples to conclude from."""
    supervised: tuple[int, ...]
    loss: tuple[float | None, ...]
    accuracy: tuple[Estimate | None, ...]
    accuracy_in_vocab: tuple[float | None, ...]
    in_vocab: tuple[float | None, ...]
    cumulative: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    acceptance_length_pooled: tuple[Estimate | None, ...]
    acceptance_length_sample_mean: tuple[Estimate | None, ...]

    @property
    def ttt_length(self) -> int:
        return len(self.supervised)

    def acceptance_length(self, k: int) -> Estimate | None:
        """Pooled, for chains of `k` drafted tokens, 1 to `ttt_length`; None where no row is supervised so far out."""
        if not 1 <= k <= self.ttt_length:
            raise ValueError(f"chains of 1 to {self.ttt_length} tokens were counted, not of {k}")
        return self.acceptance_length_pooled[k - 1]

    @property
    def longest_chain(self) -> int:
        """The longest chain that held-out rows tell of; 0 where none is supervised."""
        return sum(one is not None for one in self.acceptance_length_pooled)

    @property
    def score(self) -> float | None:
        """By which checkpoints are compared: the pooled acceptance length for `longest_chain`."""
        one = self.acceptance_length_pooled[self.longest_chain - 1] if self.longest_chain else None
        return one.value if one is not None else None

    def to_json(self) -> dict[str, Any]:
        """As JSON values, free of NaN."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Summary:
        """Inverse of `to_json`."""
        estimates = ("accuracy", "acceptance_length_pooled", "acceptance_length_sample_mean")
        known: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            entry = value[field.name]
            if field.name in estimates:
                entry = (Estimate(**one) if one is not None else None for one in entry)
            known[field.name] = entry if isinstance(entry, bool | int) else tuple(entry)
        return cls(**known)

    def lines(self) -> list[str]:
        """A compact table for people."""
        few = ", too few to conclude from" if self.small else ""
        lines = [
            f"{self.num_samples:,} held-out samples{few}; [95 % intervals over samples]; acceptance length: tokens per "
            "target forward, bonus token included",
            f"{'step':>4} {'rows':>11} {'loss':>7} {'accuracy':>20} {'within':>7} {'in vocab':>8} {'cumul.':>7} "
            f"{'cond.':>7} {'length, pooled':>21} {'length, sample mean':>21}",
        ]
        for s in range(self.ttt_length):
            lines.append(
                f"{s:>4} {self.supervised[s]:>11,} {_text(self.loss[s]):>7} {_text(self.accuracy[s]):>20} "
                f"{_text(self.accuracy_in_vocab[s]):>7} {_text(self.in_vocab[s]):>8} {_text(self.cumulative[s]):>7} "
                f"{_text(self.conditional[s]):>7} {_text(self.acceptance_length_pooled[s]):>21} "
                f"{_text(self.acceptance_length_sample_mean[s]):>21}"
            )
        return lines


def summarize(
    tally: Tally, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0, min_samples: int = MIN_SLICE_SAMPLES
) -> Summary:
    """The summary of a tally; the same tally and seed give the same intervals."""
    tally = tally.of(np.flatnonzero(tally["supervised"].sum(axis=1)))
    rows, columns = tally.num_samples, tally.ttt_length
    supervised, chain = tally["supervised"], tally["chain"]
    told = supervised > 0
    own = np.divide(chain, supervised, out=np.zeros_like(chain), where=told)
    # Everything with an interval is a ratio of two sums over samples: [N, 3, 2, S].
    terms = np.stack([tally["correct"], supervised, chain, supervised, own, told.astype(np.float64)], axis=1)
    terms = terms.reshape(rows, 3, 2, columns)
    accuracy, pooled, mean = _estimates(terms, num_resamples=num_resamples, seed=seed)
    total = {name: tally[name].sum(axis=0) for name in SUMS}
    cumulative = _ratio(total["chain"], total["supervised"])
    before = np.concatenate([[1.0], cumulative])[:columns]
    return Summary(
        num_samples=rows,
        small=rows < min_samples,
        supervised=tuple(int(n) for n in total["supervised"]),
        loss=_known(_ratio(total["loss_sum"], total["in_vocab"])),
        accuracy=accuracy,
        accuracy_in_vocab=_known(_ratio(total["correct"], total["in_vocab"])),
        in_vocab=_known(_ratio(total["in_vocab"], total["supervised"])),
        cumulative=_known(cumulative),
        conditional=_known(_ratio(cumulative, before)),
        acceptance_length_pooled=pooled,
        acceptance_length_sample_mean=mean,
    )


def slices(
    tally: Tally,
    labels: Sequence[Collection[str]],
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    min_samples: int = MIN_SLICE_SAMPLES,
) -> dict[str, Summary]:
    """The summary of each label's samples, the largest slice of a kind first.

    `labels[i]` are those of sample `i`, such as `labels_of` gives; a sample counts for each of its labels.
    """
    if len(labels) != tally.num_samples:
        raise ValueError(f"labels of {len(labels)} samples for a tally of {tally.num_samples}")
    members: dict[str, list[int]] = {}
    counted = tally["supervised"].sum(axis=1) > 0
    for i in np.flatnonzero(counted).tolist():
        for label in labels[i]:
            members.setdefault(label, []).append(i)
    kinds: dict[str, list[str]] = {}
    for label in sorted(members, key=lambda label: (-len(members[label]), label)):
        kinds.setdefault(label.partition(":")[0], []).append(label)
    chosen: dict[str, list[int]] = {}
    for kind in sorted(kinds):
        chosen |= {label: members[label] for label in kinds[kind][:MAX_SLICES]}
        if rest := kinds[kind][MAX_SLICES:]:
            chosen[f"{kind}:{OTHER}"] = sorted({i for label in rest for i in members[label]})
    return {
        label: summarize(tally.of(some), num_resamples=num_resamples, seed=seed, min_samples=min_samples)
        for label, some in chosen.items()
    }


def labels_of(source: str, tags: Iterable[str], language: str) -> frozenset[str]:
    """The labels of a sample: `source:…`, one `tag:…` for each tag, `language:…`."""
    return frozenset({f"source:{source}", f"language:{language or UNKNOWN}", *(f"tag:{tag}" for tag in tags)})


def _estimates(terms: FloatArray, *, num_resamples: int, seed: int) -> tuple[tuple[Estimate | None, ...], ...]:
    """Accuracy, pooled and mean acceptance length from `terms` `[N, 3, numerator and denominator, S]`."""
    rows = len(terms)
    values = _statistics(terms.sum(axis=0)[None])[0]
    if rows < 2 or num_resamples < 2:
        return tuple(tuple(None if np.isnan(v) else Estimate(float(v)) for v in line) for line in values)
    drawn = np.concatenate(
        [
            _statistics(sums.reshape(-1, *terms.shape[1:]))
            for sums in _resamples(terms.reshape(rows, -1), num_resamples, seed)
        ]
    )
    tail = (1 - CONFIDENCE) / 2
    result = []
    for i, line in enumerate(values):
        estimates: list[Estimate | None] = []
        for s, value in enumerate(line):
            # A resample without a single row so far out says nothing about the step.
            known = drawn[:, i, s][~np.isnan(drawn[:, i, s])]
            if np.isnan(value):
                estimates.append(None)
            elif len(known) < 2:
                estimates.append(Estimate(float(value)))
            else:
                low, high = np.quantile(known, [tail, 1 - tail])
                estimates.append(Estimate(float(value), float(low), float(high)))
        result.append(tuple(estimates))
    return tuple(result)


def _statistics(sums: FloatArray) -> FloatArray:
    """`[…, 3, S]`: accuracy and the two acceptance lengths, NaN where a denominator is 0, from `[…, 3, 2, S]`."""
    values = _ratio(sums[..., 0, :], sums[..., 1, :])
    values[..., 1:, :] = 1 + np.cumsum(values[..., 1:, :], axis=-1)
    return values


def _resamples(terms: FloatArray, num_resamples: int, seed: int) -> Iterable[FloatArray]:
    """Sums over samples drawn with replacement, `[chunk, K]` at a time from `terms` `[N, K]`.

    A resample is a vector of multinomial weights, so that many of them are one matrix product.
    """
    rng = np.random.default_rng(seed)
    rows = len(terms)
    chunk = max(1, _CHUNK_BYTES // (8 * rows))
    for start in range(0, num_resamples, chunk):
        num = min(chunk, num_resamples - start)
        drawn = rng.integers(rows, size=(num, rows)) + rows * np.arange(num)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=num * rows).reshape(num, rows)
        yield weights.astype(np.float64) @ terms


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    nothing = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=nothing, where=denominator != 0)
    return nothing


def _known(values: FloatArray) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(value) else float(value) for value in values)


def _text(value: float | Estimate | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, Estimate) else f"{value:.3f}"
