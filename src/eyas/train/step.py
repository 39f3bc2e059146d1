"""One pass of a pack: from stored states to loss and gradients, in a module so that its weights can be sharded.

Letters: `S` steps of training-time test, `n` rows that some step supervises, `m` teacher rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from eyas.model.eagle3 import Eagle3Draft
from eyas.train.loader import Batch
from eyas.train.loss import Outcome, Teacher, ttt_loss, valid_rows
from eyas.train.metrics import Tally
from eyas.train.teacher import TargetTeacher
from eyas.train.ttt import DraftWeights, MaskRule, Options, Rows, plan_rows, ttt


@dataclass(frozen=True, slots=True)
class Lesson:
    """A pack with everything that its loss needs to know beforehand."""

    batch: Batch
    rows: Rows
    teacher: Teacher
    valid: torch.Tensor
    """`[S, n]`: carries a loss."""
    likeliest: torch.Tensor
    """`[m]`: the target's likeliest tokens."""


def lesson(batch: Batch, teacher: TargetTeacher, *, num_steps: int, rule: MaskRule) -> Lesson:
    """Which rows of a pack learn what, and what the target says there."""
    rows = plan_rows(batch.loss_mask, batch.cu_seqlens.tolist(), num_steps=num_steps, rule=rule)
    taught, likeliest = teacher.teach(batch, rows)
    return Lesson(batch, rows, taught, valid_rows(rows.supervised, rows.teacher, taught.best), likeliest)


def empty_batch(like: torch.Tensor) -> Batch:
    """A pack of nothing, for a rank that has to come along; `like` is any `[F, N, H]` of the data set."""
    none = torch.zeros(2, dtype=torch.int64, device=like.device)
    return Batch(
        indices=(),
        sample_ids=(),
        token_ids=none,
        loss_mask=none.bool(),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        states=like.new_zeros(like.shape[0], 2, like.shape[2]),
    )


def samples_of(taught: Lesson) -> npt.NDArray[np.int64]:
    """`[n]`: the data set's index of the sample that each row belongs to."""
    bounds = np.array(taught.rows.docs.row_bounds)
    return np.repeat(np.array(taught.batch.indices or (0,), dtype=np.int64), np.diff(bounds))


def count(tally: Tally, indices: npt.NDArray[np.int64], taught: Lesson, outcome: Outcome) -> None:
    """Add a pack to `tally`, whose samples are `indices`, ascending."""
    tally.add_rows(
        np.searchsorted(indices, samples_of(taught)),
        supervised=taught.rows.supervised.cpu().numpy(),
        in_vocab=outcome.valid.cpu().numpy(),
        correct=outcome.correct.cpu().numpy(),
        loss=outcome.loss.cpu().numpy(),
    )


class Pass(nn.Module):
    """The unrolled drafter and its loss over one lesson."""

    def __init__(self, draft: Eagle3Draft, options: Options) -> None:
        super().__init__()
        self.draft = draft
        self._options = options

    def forward(self, taught: Lesson, weight: torch.Tensor) -> tuple[torch.Tensor, Outcome]:
        """The weighted loss and what came of every row; `weight [S]` as in `ttt_loss`."""
        batch = taught.batch
        weights = DraftWeights.of(self.draft, self._options.dtype)
        states = ttt(self.draft, weights, taught.rows, batch.token_ids, batch.states[:-1], self._options)
        return ttt_loss(states, weights.lm_head, taught.teacher, taught.rows.teacher, taught.valid, weight)
