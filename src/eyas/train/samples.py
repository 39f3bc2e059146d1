"""What a drafter trains on: the rows of a sample table whose hidden states a data set holds, joined by sample id.

Arrays alone, a few bytes a sample and five a token: a million samples fit. Letters: `N` samples of the data set, `T`
tokens of one sample, `V` target vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eyas.data.table import SampleTable
from eyas.errors import DataError
from eyas.records import TokenIds
from eyas.store.reader import DataSet, Permutation

logger = logging.getLogger(__name__)

Indices = npt.NDArray[np.int64]
Value = TypeVar("Value")
SPLITS = ("train", "held_out")
_SUBSET_SEED = 0
"""A subset does not depend on the seed of a training, so that trainings with other seeds can be compared."""


@dataclass(frozen=True, slots=True)
class JoinCounts:
    """Where every row went: `rows = used + over_limit + not_captured`, each by split."""

    rows: Mapping[str, int]
    used: Mapping[str, int]
    over_limit: Mapping[str, int]
    """Captured, but past the limit on the number of training samples."""
    not_captured: Mapping[str, int]
    """Rejected or still pending: the data set has no states of them."""
    not_in_table: int
    """Samples of the data set that no row of the table names."""
    used_tokens: Mapping[str, int]

    def line(self) -> str:
        """`train: 90 of 100 samples, 9,000 tokens (10 not captured); held_out: …`"""
        parts = []
        for split in SPLITS:
            missing = [
                f"{counts[split]:,} {what}"
                for counts, what in ((self.not_captured, "not captured"), (self.over_limit, "over the limit"))
                if counts[split]
            ]
            parts.append(
                f"{split}: {self.used[split]:,} of {self.rows[split]:,} samples, {self.used_tokens[split]:,} tokens"
                + (f" ({', '.join(missing)})" if missing else "")
            )
        if self.not_in_table:
            parts.append(f"{self.not_in_table:,} captured samples are not in the table")
        return "; ".join(parts)


class TrainingSamples:
    """The captured samples of a table, by their index in the data set."""

    def __init__(self, table: SampleTable, data: DataSet, *, max_train_samples: int | None = None) -> None:
        """Reads the table twice: ids first, then the tokens of the samples that are used, and of no others.

        Of the training samples at most `max_train_samples` are used; a larger limit uses the same ones and more.
        Raises DataError where no row of the table was captured, or where one is not what was captured.
        """
        if not len(data):
            raise DataError(f"{data.layout.root}: holds no captured sample yet; run 'eyas capture' first")
        self.ids = data.ids
        """`[N, 16]` of all samples of the data set."""
        self.token_counts = data.token_counts
        """`[N]` of all samples of the data set."""
        self.train: Indices
        """Indices of the samples to train on, ascending."""
        self.held_out: Indices
        """Indices of the samples to evaluate on, ascending."""
        self.counts: JoinCounts
        self._join(table, data, max_train_samples)
        used = np.sort(np.concatenate([self.train, self.held_out]))
        self._row = np.full(len(data), -1, np.int64)
        self._row[used] = np.arange(len(used))
        self._offset = np.concatenate([[0], np.cumsum(self.token_counts[used], dtype=np.int64)])
        self._token_ids = np.empty(int(self._offset[-1]), np.int32)
        self._edge_bounds = np.zeros((len(used), 2), np.int64)
        """`[rows, 2]`: where a sample's spans begin and end in the flat array of all edges."""
        self._source = np.zeros(len(used), np.int32)
        self._tags = np.zeros(len(used), np.int32)
        self._language = np.zeros(len(used), np.int32)
        self._read(table, data)
        logger.info("%s", self.counts.line())

    def num_tokens(self, index: int) -> int:
        return int(self.token_counts[index])

    def sample_id(self, index: int) -> str:
        return bytes(self.ids[index]).hex()

    def token_ids(self, index: int) -> TokenIds:
        """`[T]` int32, a view."""
        row = self._row_of(index)
        return self._token_ids[self._offset[row] : self._offset[row + 1]]

    def loss_mask(self, index: int) -> npt.NDArray[np.bool_]:
        """`[T]`: true where the token is supervised."""
        row = self._row_of(index)
        mask = np.zeros(self.num_tokens(index), np.bool_)
        start, end = self._edge_bounds[row]
        edges = self._edges[start:end].tolist()
        for first, behind in zip(edges[::2], edges[1::2], strict=True):
            mask[first:behind] = True
        return mask

    def source(self, index: int) -> str:
        return self._source_names[int(self._source[self._row_of(index)])]

    def tags(self, index: int) -> tuple[str, ...]:
        return self._tag_names[int(self._tags[self._row_of(index)])]

    def language(self, index: int) -> str:
        return self._language_names[int(self._language[self._row_of(index)])]

    def supervised_counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """`[V]`: how often each token is supervised in the samples to train on."""
        counts = np.zeros(vocab_size, np.int64)
        # A million tokens at a time: bincount makes an array of the vocabulary's size for each call.
        waiting: list[TokenIds] = []
        num_waiting = 0
        for i, index in enumerate(self.train.tolist(), 1):
            waiting.append(self.token_ids(index)[self.loss_mask(index)])
            num_waiting += len(waiting[-1])
            if num_waiting >= 1 << 20 or i == len(self.train):
                counts += np.bincount(np.concatenate(waiting), minlength=vocab_size)
                waiting, num_waiting = [], 0
        return counts

    def _row_of(self, index: int) -> int:
        row = int(self._row[index])
        if row < 0:
            raise KeyError(f"sample {self.sample_id(index)} is not one of the training samples")
        return row

    def _join(self, table: SampleTable, data: DataSet, limit: int | None) -> None:
        """Split the indices and count every row."""
        rows = dict.fromkeys(SPLITS, 0)
        found: dict[str, list[Indices]] = {split: [] for split in SPLITS}
        for batch in table.batches(["sample_id", "num_tokens", "split"]):
            index = data.indices_of(_ids(batch))
            known = index >= 0
            num_tokens = batch.column("num_tokens").to_numpy()
            differs = np.flatnonzero(known & (num_tokens != self.token_counts[index]))
            if len(differs):
                i = int(differs[0])
                raise DataError(
                    f"{table.path}: sample {data.sample_id(index[i])} has {num_tokens[i]} tokens, in the data set "
                    f"{data.layout.root} it has {self.token_counts[index[i]]}"
                )
            codes, names = _codes(batch.column("split"))
            for code, split in enumerate(names):
                if split not in rows:
                    raise DataError(f"{table.path}: split {split!r} is neither of {', '.join(SPLITS)}")
                here = codes == code
                rows[split] += int(here.sum())
                found[split].append(index[here & known])
        indices = {split: np.sort(np.concatenate([np.zeros(0, np.int64), *found[split]])) for split in SPLITS}
        both = np.sort(np.concatenate(list(indices.values())))
        if not len(both):
            raise DataError(
                f"{table.path}: none of its {sum(rows.values()):,} samples is among the {len(data):,} of "
                f"{data.layout.root}; give the table that was captured"
            )
        twice = np.flatnonzero(both[1:] == both[:-1])
        if len(twice):
            raise DataError(f"{table.path}: sample {data.sample_id(int(both[twice[0]]))} has two rows")
        captured = {split: len(indices[split]) for split in SPLITS}
        if limit is not None and limit < captured["train"]:
            order = Permutation(self.ids[indices["train"]], seed=_SUBSET_SEED).indices()
            indices["train"] = np.sort(indices["train"][order[:limit]])
        self.train, self.held_out = indices["train"], indices["held_out"]
        self.counts = JoinCounts(
            rows=rows,
            used={split: len(indices[split]) for split in SPLITS},
            over_limit={split: captured[split] - len(indices[split]) for split in SPLITS},
            not_captured={split: rows[split] - captured[split] for split in SPLITS},
            not_in_table=len(data) - len(both),
            used_tokens={split: int(self.token_counts[indices[split]].sum(dtype=np.int64)) for split in SPLITS},
        )

    def _read(self, table: SampleTable, data: DataSet) -> None:
        """Fill the arrays with the rows that are used, each at its own place."""
        sources: dict[str, int] = {}
        languages: dict[str, int] = {}
        tags: dict[tuple[str, ...], int] = {}
        edges: list[npt.NDArray[np.int32]] = []
        num_edges = 0
        for batch in table.batches(["sample_id", "token_ids", "loss_spans", "source", "tags", "language"]):
            index = data.indices_of(_ids(batch))
            row = np.where(index >= 0, self._row[index], -1)
            used = np.flatnonzero(row >= 0)
            places = row[used]
            starts, values = _ragged(batch.column("token_ids"))
            if not np.array_equal(np.diff(starts)[used], self.token_counts[index[used]]):
                raise DataError(f"{table.path}: damaged: rows with other tokens than they count; prepare it again")
            for i, place in zip(used.tolist(), places.tolist(), strict=True):
                self._token_ids[self._offset[place] : self._offset[place + 1]] = values[starts[i] : starts[i + 1]]
            starts, values = _ragged(batch.column("loss_spans"))
            lengths = np.diff(starts)
            edges.append(values[starts[0] : starts[-1]][np.repeat(row >= 0, lengths)])
            ends = num_edges + np.cumsum(lengths[used], dtype=np.int64)
            self._edge_bounds[places] = np.stack([ends - lengths[used], ends], axis=1)
            num_edges += len(edges[-1])
            self._source[places] = _coded(batch.column("source"), sources)[used]
            self._language[places] = _coded(batch.column("language"), languages)[used]
            tags_here = batch.column("tags").to_pylist()
            self._tags[places] = [_code(tags, tuple(tags_here[i])) for i in used.tolist()]
        self._edges = np.concatenate(edges)
        self._source_names = list(sources)
        self._tag_names = list(tags)
        self._language_names = list(languages)


def _ids(batch: Any) -> npt.NDArray[np.uint8]:
    """`[n, 16]` sample ids of a record batch."""
    ids = b"".join(batch.column("sample_id").to_pylist())
    return np.frombuffer(ids, np.uint8).reshape(-1, 16)


def _ragged(column: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The offsets of a column of lists, and the values of all of them."""
    return column.offsets.to_numpy(), column.values.to_numpy()


def _codes(column: Any) -> tuple[npt.NDArray[np.int32], list[str]]:
    return column.indices.to_numpy(), column.dictionary.to_pylist()


def _coded(column: Any, known: dict[str, int]) -> npt.NDArray[np.int32]:
    """`[n]`: the values of a column as numbers that are the same in every batch."""
    codes, names = _codes(column)
    return np.array([_code(known, name) for name in names], np.int32)[codes]


def _code(known: dict[Value, int], value: Value) -> int:
    """The number of a value: that of its first coming."""
    return known.setdefault(value, len(known))
