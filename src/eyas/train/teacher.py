"""What the target says at each row: its head on the device, and its likeliest tokens, found once and kept.

Letters: `N` rows of a pack, `m` teacher rows, `V` and `D` the target's and the draft vocabulary, `H` the target's
hidden size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from eyas.model.vocab_map import VocabMap
from eyas.store.files import raise_store_error
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
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Of another size it is about other samples; several processes may come here at one time.
            if os.fstat(self._fd).st_size not in (0, size):
                os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise_store_error(error, path, "making the cache of the target's likeliest tokens")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close

    def get(self, batch: Batch) -> torch.Tensor:
        """`[N]` int64 on the batch's device: tokens, -1 where none was looked for."""
        rows = [np.zeros(0, np.int32), *map(self._read, batch.indices)]
        return torch.from_numpy(np.concatenate(rows).astype(np.int64) - 1).to(batch.states.device)

    def put(self, batch: Batch, tokens: torch.Tensor) -> None:
        """Keep `tokens [N]` where they are not -1."""
        found = (tokens + 1).to("cpu", torch.int32).numpy()
        for i, index in enumerate(batch.indices):
            here = found[int(batch.cu_seqlens[i]) : int(batch.cu_seqlens[i + 1])]
            kept = np.where(here != UNKNOWN, here, self._read(index)).astype("<i4")
            try:
                # Not through a mapped file, where a full disk is a signal and not an error.
                os.pwrite(self._fd, kept.tobytes(), 4 * int(self._starts[index]))
            except OSError as error:
                raise_store_error(error, self._path, "keeping the target's likeliest tokens")

    def _read(self, index: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """A sample's entries; what is not there yet is a hole."""
        start, stop = 4 * int(self._starts[index]), 4 * int(self._starts[index + 1])
        found = np.zeros((stop - start) // 4, dtype="<i4")
        try:
            read = os.pread(self._fd, stop - start, start)
        except OSError as error:
            raise_store_error(error, self._path, "reading the target's likeliest tokens")
        found[: len(read) // 4] = np.frombuffer(read[: len(read) // 4 * 4], dtype="<i4")
        return found


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
