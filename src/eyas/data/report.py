"""What the mix is: tokens by split, source, tag and language, and what a draft vocabulary would cover of each.

A draft vocabulary of size `D` is taken to be the `D` token ids that are supervised most often in the training split, as
training takes them (in the whole table where it has no such split), the lower id first among equals; its coverage of a
slice is the share of the slice's supervised tokens that are in it. Two passes over the table, memory by the vocabulary
and the number of slices, not by rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eyas.data.split import TRAIN
from eyas.data.table import SampleTable
from eyas.errors import DataError

MAX_SLICES = 64
"""Slices of one kind that are named: the largest ones; the rest is `other`."""
MAX_NAMES = 1 << 16
"""Names of one kind that are told apart while counting; further ones go straight to `other`."""
SHOWN_SLICES = 8
"""Slices of one kind that a person is shown."""
OTHER = "other"
NO_LANGUAGE = "unknown"
KINDS = ("split", "source", "tag", "language")

_COLUMNS = ("token_ids", "loss_spans", "split", "source", "tags", "language")


@dataclass(frozen=True, slots=True)
class Slice:
    """The samples that have one value of one label."""

    name: str
    num_samples: int
    num_tokens: int
    num_supervised: int
    coverage: tuple[float, ...]
    """Share of the supervised tokens in a draft vocabulary, for each of the report's sizes."""


@dataclass(frozen=True, slots=True)
class Report:
    """The mix of one sample table."""

    table_digest: str
    draft_vocab_sizes: tuple[int, ...]
    num_distinct: int
    """Token ids that are supervised at least once in that of which the vocabularies are."""
    total: Slice
    vocabulary_of: str
    """The split whose tokens make the vocabularies: `train`, or `all`."""
    slices: dict[str, tuple[Slice, ...]]
    """By kind: `split`, `source`, `tag` (a sample counts for each of its tags), `language`; the largest first."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Report:
        """Inverse of `to_json`."""
        return cls(
            table_digest=value["table_digest"],
            draft_vocab_sizes=tuple(value["draft_vocab_sizes"]),
            num_distinct=value["num_distinct"],
            total=_slice(value["total"]),
            vocabulary_of=value["vocabulary_of"],
            slices={kind: tuple(map(_slice, slices)) for kind, slices in value["slices"].items()},
        )

    def lines(self) -> list[str]:
        """A compact table for people."""
        head = [f"{'':9}{'':24} {'samples':>10} {'tokens':>14} {'supervised':>14}"]
        head[0] += "".join(f" {f'{size:,}':>8}" for size in self.draft_vocab_sizes)
        where = " in training" * (self.vocabulary_of == TRAIN)
        title = f"the mix; {self.num_distinct:,} different token ids are supervised{where}"
        if self.draft_vocab_sizes:
            most = "the training split" if self.vocabulary_of == TRAIN else "all"
            title += f"; to the right: share of supervised tokens that the so many most frequent ids of {most} cover"
        lines = [title, *head, _line("", "all", self.total)]
        for kind, slices in self.slices.items():
            if len(slices) == 1 and kind in ("source", "language"):
                lines.append(_line(kind, slices[0].name, slices[0]))
                continue
            shown = slices[:SHOWN_SLICES]
            lines += [_line(kind if i == 0 else "", one.name, one) for i, one in enumerate(shown)]
            if len(slices) > len(shown):
                lines.append(f"{'':9}… {len(slices) - len(shown)} more in the report's file")
        return lines


def _line(kind: str, name: str, one: Slice) -> str:
    name = "".join(c if c.isprintable() else " " for c in name)
    name = name if len(name) <= 24 else name[:23] + "…"
    shares = "".join(f" {f'{share:.2%}':>8}" for share in one.coverage)
    return f"{kind:9}{name:24} {one.num_samples:>10,} {one.num_tokens:>14,} {one.num_supervised:>14,}{shares}"


def make_report(table: SampleTable, sizes: Sequence[int]) -> Report:
    """Count the table; DataError where it is damaged."""
    frequencies, vocabulary_of = _frequencies(table)
    ranks = np.full(len(frequencies), np.iinfo(np.int64).max, dtype=np.int64)
    order = np.lexsort((np.arange(len(frequencies)), -frequencies))
    num_distinct = int(np.count_nonzero(frequencies))
    ranks[order[:num_distinct]] = np.arange(num_distinct)
    limits = np.array(sizes, dtype=np.int64)
    kinds: dict[str, dict[str, npt.NDArray[np.int64]]] = {kind: {} for kind in KINDS}
    total = np.zeros(3 + len(limits), dtype=np.int64)
    for batch in table.batches(_COLUMNS):
        counts = _counts(batch, ranks, limits)
        total += counts.sum(axis=0)
        _add(kinds["split"], batch.column("split").to_pylist(), counts)
        _add(kinds["source"], batch.column("source").to_pylist(), counts)
        _add(kinds["language"], (name or NO_LANGUAGE for name in batch.column("language").to_pylist()), counts)
        for number, tags in enumerate(batch.column("tags").to_pylist()):
            for tag in dict.fromkeys(tags):
                _add(kinds["tag"], (tag,), counts[number : number + 1])
    return Report(
        table_digest=table.digest,
        draft_vocab_sizes=tuple(sizes),
        num_distinct=num_distinct,
        total=_named("all", total),
        vocabulary_of=vocabulary_of,
        slices={kind: _largest(found) for kind, found in kinds.items() if found},
    )


def report_path(table: Path) -> Path:
    """Where the report of a table lies."""
    return table.with_name(f"{table.name}.report.json")


def write_report(table: Path, report: Report) -> None:
    """Put the report beside its table, whole or not at all."""
    path = report_path(table)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # As private as the table: names of sources and tags may tell something.
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None


def load_report(table: SampleTable, sizes: Sequence[int]) -> Report | None:
    """The report beside the table, if it is about this table and these sizes."""
    try:
        report = Report.from_json(json.loads(report_path(table.path).read_bytes()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    same = report.table_digest == table.digest and report.draft_vocab_sizes == tuple(sizes)
    return report if same else None


def _supervised(batch: pa.RecordBatch) -> Iterator[npt.NDArray[np.int32]]:
    """The supervised token ids of each row."""
    token_ids, spans = batch.column("token_ids"), batch.column("loss_spans")
    ids, edges = token_ids.values.to_numpy(), spans.values.to_numpy()
    starts, places = token_ids.offsets.to_numpy(), spans.offsets.to_numpy()
    for start, first, last in zip(starts[:-1].tolist(), places[:-1].tolist(), places[1:].tolist(), strict=True):
        pairs = edges[first:last].reshape(-1, 2).tolist()
        yield np.concatenate([ids[start + a : start + b] for a, b in pairs]) if pairs else ids[:0]


def _frequencies(table: SampleTable) -> tuple[npt.NDArray[np.int64], str]:
    """How often each token id is supervised, in the training split where there is one; and which was counted."""
    counts = np.zeros((2, 0), dtype=np.int64)  # training, others
    for batch in table.batches(("token_ids", "loss_spans", "split")):
        ids = list(_supervised(batch))
        others = np.array([split != TRAIN for split in batch.column("split").to_pylist()])
        for kind in (0, 1):
            rows = [row for row, other in zip(ids, others, strict=True) if other == kind]
            found = np.bincount(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64)
            missing = max(0, len(found) - counts.shape[1])
            counts = np.pad(counts, ((0, 0), (0, missing)))
            counts[kind, : len(found)] += found
    return (counts[0], TRAIN) if counts[0].any() else (counts.sum(0), "all")


def _counts(
    batch: pa.RecordBatch, ranks: npt.NDArray[np.int64], limits: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """For each row: 1, tokens, supervised tokens, those covered by each size. `[rows, 3 + sizes]`."""
    counts = np.zeros((batch.num_rows, 3 + len(limits)), dtype=np.int64)
    counts[:, 0] = 1
    counts[:, 1] = np.diff(batch.column("token_ids").offsets.to_numpy())
    for number, ids in enumerate(_supervised(batch)):
        counts[number, 2] = len(ids)
        found = ranks[ids]
        for i, limit in enumerate(limits.tolist()):
            counts[number, 3 + i] = np.count_nonzero(found < limit)
    return counts


def _add(found: dict[str, npt.NDArray[np.int64]], names: Iterable[str], counts: npt.NDArray[np.int64]) -> None:
    for name, row in zip(names, counts, strict=True):
        if name not in found and len(found) >= MAX_NAMES:
            name = OTHER
        if name in found:
            found[name] += row
        else:
            found[name] = row.copy()


def _largest(found: dict[str, npt.NDArray[np.int64]]) -> tuple[Slice, ...]:
    ordered = sorted(found.items(), key=lambda item: (-int(item[1][1]), item[0]))
    named = [_named(name, counts) for name, counts in ordered[:MAX_SLICES]]
    rest = [counts for _, counts in ordered[MAX_SLICES:]]
    if rest:
        named.append(_named(OTHER, np.sum(rest, axis=0)))
    return tuple(named)


def _named(name: str, counts: npt.NDArray[np.int64]) -> Slice:
    num_samples, num_tokens, num_supervised, *covered = counts.tolist()
    coverage = tuple(round(one / num_supervised, 6) if num_supervised else 0.0 for one in covered)
    return Slice(name, num_samples, num_tokens, num_supervised, coverage)


def _slice(value: dict[str, Any]) -> Slice:
    return Slice(**(value | {"coverage": tuple(value["coverage"])}))
