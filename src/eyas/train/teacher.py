"""What the target says at each row: its head on the device, and its likeliest tokens, found once and kept.

Letters: `N` rows of a pack, `m` teacher rows, `V` and `D` the target's and the draft vocabulary, `H` the target's
hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from eyas.errors import OutOfSpace, TrainError
from eyas.model.vocab_map import VocabMap
from eyas.store.reader import DataSet
from eyas.target.head import HeadTensors
from eyas.train.loader import Batch
from eyas.train.loss import Teacher, argmax_of
from eyas.train.ttt import Rows

UNKNOWN = 0
"""In the file stands the token plus one, so that a hole is a token not looked for yet."""


class Likeliest:
    """The target's likeliest token at each row of a data set, in a file that is no more than a cache.

    Over the whole vocabulary that token costs four times what the teacher costs over a draft vocabulary, and it is the
    same in every epoch. Sparse: 4 bytes for each token of the data set that was looked at. Several processes of one
    host may share it. Deleted, it is made again.
    """

    def __init__(self, path: Path, data: DataSet) -> None:
        counts = data.token_counts.astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        size = 4 * int(self._starts[-1])
        try:
            with path.open("ab") as file:
                if file.tell() != size:
                    file.truncate(0)
                    file.truncate(size)
        except OSError as error:
            raise (OutOfSpace if error.errno == 28 else TrainError)(f"{path}: {error.strerror}") from None
        self._tokens = np.memmap(path, dtype="<i4", mode="r+", shape=(int(self._starts[-1]),))

    def get(self, batch: Batch) -> torch.Tensor:
        """`[N]` int64 on the batch's device: tokens, -1 where none was looked for."""
        rows = [self._tokens[self._starts[i] : self._starts[i + 1]] for i in batch.indices]
        return torch.from_numpy(np.concatenate(rows).astype(np.int64) - 1).to(batch.states.device)

    def put(self, batch: Batch, tokens: torch.Tensor) -> None:
        """Keep `tokens [N]` where they are not -1."""
        found = (tokens + 1).to("cpu", torch.int32).numpy()
        for i, index in enumerate(batch.indices):
            here = found[int(batch.cu_seqlens[i]) : int(batch.cu_seqlens[i + 1])]
            kept = self._tokens[self._starts[index] : self._starts[index + 1]]
            kept[here != UNKNOWN] = here[here != UNKNOWN]


class TargetTeacher:
    """The target's final norm and head, ready to teach."""

    def __init__(
        self, head: HeadTensors, vocab_map: VocabMap, norm: Literal["pre", "post"], likeliest: Likeliest
    ) -> None:
        """`norm`: whether the stored last states are before or after the final norm."""
        self._head, self._norm, self._likeliest = head, norm, likeliest
        device = head.weight.device
        self._draft = head if vocab_map.is_full else head.restricted(vocab_map.target_ids)
        self._draft_ids = vocab_map.draft_ids.to(device)

    @torch.no_grad()
    def teach(self, batch: Batch, rows: Rows) -> tuple[Teacher, torch.Tensor]:
        """The teacher of a pack, and the target's likeliest tokens `[m]` at its teacher rows."""
        states = batch.states[-1][rows.teacher_rows]  # [m, H]
        if self._norm == "pre":
            states = self._head.norm(states)
        states = states.to(self._head.weight.dtype)
        known = self._likeliest.get(batch)
        tokens = known[rows.teacher_rows]
        new = tokens < 0
        if bool(new.any()):
            tokens[new] = argmax_of(states[new], self._head.weight, self._head.bias, self._head.logit_map)
            known[rows.teacher_rows] = tokens
            self._likeliest.put(batch, known)
        teacher = Teacher(states, self._draft.weight, self._draft.bias, self._draft.logit_map, self._draft_ids[tokens])
        return teacher, tokens
