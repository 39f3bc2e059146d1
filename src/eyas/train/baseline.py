"""What guessing gets: the step-0 accuracy of a unigram and a bigram over the supervised tokens.

A drafter that does not clearly beat them has learned nothing from the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

CHUNK_TOKENS = 1 << 22
"""Pairs that are gathered before they are counted."""
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


class BaselineCounts:
    """Counts supervised tokens, alone and after the token before them, in one pass over the training samples.

    Memory: 16 bytes for each distinct pair, several times that while chunks are merged; not by the number of tokens.
    """

    def __init__(self) -> None:
        self._unigrams: IntArray = np.zeros(0, dtype=np.int64)
        self._pairs: IntArray = np.zeros(0, dtype=np.int64)
        self._counts: IntArray = np.zeros(0, dtype=np.int64)
        self._waiting: list[IntArray] = []
        self._num_waiting = 0

    def add(self, token_ids: npt.ArrayLike, loss_mask: npt.ArrayLike, starts: npt.ArrayLike = 0) -> None:
        """Count one sample, or several one behind the other that begin at `starts`; both arrays are `[T]`."""
        ids = np.asarray(token_ids, dtype=np.int64)
        supervised = np.asarray(loss_mask).astype(bool)
        if ids.shape != supervised.shape or ids.ndim != 1:
            raise ValueError(f"token_ids {ids.shape} and loss_mask {supervised.shape} are not of one length")
        if not len(ids):
            return
        counts = np.bincount(ids[supervised], minlength=len(self._unigrams))
        counts[: len(self._unigrams)] += self._unigrams
        self._unigrams = counts
        paired = supervised.copy()
        paired[np.asarray(starts, dtype=np.int64)] = False
        at = np.flatnonzero(paired)
        self._waiting.append(ids[at - 1] << _ID_BITS | ids[at])
        self._num_waiting += len(at)
        # Merging costs as much as there are pairs already: it has to wait for a fair share of new ones.
        if self._num_waiting >= max(CHUNK_TOKENS, len(self._pairs) // 2):
            self._merge()

    def baseline(self) -> Baseline:
        """The best guesses by what was counted so far."""
        self._merge()
        unigram = int(self._unigrams.argmax()) if self._unigrams.any() else -1
        if not len(self._pairs):
            return Baseline(unigram, self._pairs, self._pairs)
        previous = self._pairs >> _ID_BITS
        known, starts, sizes = np.unique(previous, return_index=True, return_counts=True)
        best = np.repeat(np.maximum.reduceat(self._counts, starts), sizes)
        # Pairs ascend, so the first of the most frequent ones has the lowest id.
        winners = np.flatnonzero(self._counts == best)
        _, first = np.unique(previous[winners], return_index=True)
        return Baseline(unigram, known, self._pairs[winners[first]] & _ID_MASK)

    def _merge(self) -> None:
        if not self._waiting:
            return
        new, num_new = np.unique(np.concatenate(self._waiting), return_counts=True)
        self._waiting, self._num_waiting = [], 0
        pairs, inverse = np.unique(np.concatenate([self._pairs, new]), return_inverse=True)
        counts = np.zeros(len(pairs), dtype=np.int64)
        counts[inverse[: len(self._pairs)]] += self._counts
        counts[inverse[len(self._pairs) :]] += num_new
        self._pairs, self._counts = pairs, counts


@dataclass(frozen=True, slots=True)
class Score:
    """How often the guesses were right over a number of rows."""

    num_rows: int = 0
    unigram_hits: int = 0
    bigram_hits: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.num_rows + other.num_rows,
            self.unigram_hits + other.unigram_hits,
            self.bigram_hits + other.bigram_hits,
        )

    def to_json(self) -> dict[str, Any]:
        """`unigram` and `bigram` are accuracies, None without a row."""
        rows = self.num_rows
        return {
            "rows": rows,
            "unigram": self.unigram_hits / rows if rows else None,
            "bigram": self.bigram_hits / rows if rows else None,
        }


@dataclass(frozen=True, slots=True)
class Baseline:
    """The most frequent supervised token, and the most frequent one after each token; ties go to the lowest id."""

    unigram: int
    """-1 when nothing was supervised."""
    previous: IntArray
    """Tokens that a supervised one was seen after, ascending."""
    following: IntArray
    """The most frequent supervised token after each of them."""

    def guess(self, last_tokens: npt.ArrayLike) -> IntArray:
        """The bigram's guess after each of these tokens; after one that was never seen, the unigram's."""
        tokens = np.asarray(last_tokens, dtype=np.int64)
        if not len(self.previous):
            return np.full(tokens.shape, self.unigram, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.previous, tokens), len(self.previous) - 1)
        return np.where(self.previous[at] == tokens, self.following[at], self.unigram)

    def score(self, last_tokens: npt.ArrayLike, truth: npt.ArrayLike) -> Score:
        """Held-out rows `t` that are supervised at step 0: `last_tokens` is `x_{t+1}`, `truth` the target's arg-max
        at row `t+1`. Guesses come from the whole vocabulary of the target."""
        right = np.asarray(truth, dtype=np.int64)
        return Score(
            num_rows=right.size,
            unigram_hits=int((right == self.unigram).sum()),
            bigram_hits=int((right == self.guess(last_tokens)).sum()),
        )
