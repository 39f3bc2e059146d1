"""The draft vocabulary: which of the target's tokens the drafter can propose, and under which number.

Letters: `V` target vocabulary, `D` draft vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class VocabMap:
    """`d2t [D]` offsets (target id = draft id + `d2t[draft id]`) and `t2d [V]`; only its methods do the arithmetic."""

    def __init__(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """ValueError unless both tensors tell the same ascending list of target ids."""
        self.d2t = d2t.to(torch.int64)
        self.t2d = t2d.to(torch.bool)
        self.target_ids = self.d2t + torch.arange(len(d2t))
        """`[D]`: the target's id of each draft id, ascending."""
        if not torch.equal(self.target_ids, torch.nonzero(self.t2d)[:, 0]):
            raise ValueError("d2t and t2d do not tell the same ascending target ids")
        self.draft_ids = torch.where(self.t2d, torch.cumsum(self.t2d, 0) - 1, -1)
        """`[V]`: the draft id of each target id, -1 where it has none."""

    @classmethod
    def of(cls, target_ids: torch.Tensor, vocab_size: int) -> VocabMap:
        """The map that holds just these target ids, given in any order."""
        ids = torch.unique(target_ids.to(torch.int64))
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        return cls(ids - torch.arange(len(ids)), t2d)

    @classmethod
    def full(cls, vocab_size: int) -> VocabMap:
        """Every token of the target, under its own id."""
        return cls.of(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_counts(cls, counts: npt.NDArray[np.int64], size: int) -> VocabMap:
        """The `size` most frequent tokens by `counts` `[V]`.

        Ties go to the lowest id; tokens that never occur fill up from the lowest id. The same on any machine.
        """
        if not 1 <= size <= len(counts):
            raise ValueError(f"a draft vocabulary of {size} does not fit a target vocabulary of {len(counts)}")
        order = np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable")
        return cls.of(torch.from_numpy(order[:size].copy()), len(counts))

    @property
    def draft_vocab_size(self) -> int:
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        return len(self.t2d)

    @property
    def is_full(self) -> bool:
        return self.draft_vocab_size == self.vocab_size

    def coverage(self, counts: npt.NDArray[np.int64]) -> float:
        """Share of the counted tokens that the drafter can propose; 1 where nothing was counted."""
        total = int(counts.sum())
        return float(counts[self.t2d.numpy()].sum() / total) if total else 1.0
