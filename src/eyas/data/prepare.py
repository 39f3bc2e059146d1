"""`prepare`: conversations to `samples.parquet`, every row accounted for.

Rows stream through: read, rendered and tokenised some hundred kilobytes at a time, written. Equal samples are found at
the end: 36 bytes per sample stay in memory (its id, where it came from, how its mask was made), so a million samples
cost 36 MB. Without duplicates the file that was written is the result. With them it is read once for the masks of the
samples that occur more than once, which are held in memory, and written anew without the repetitions.
"""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.config import DataConfig, TargetConfig
from eyas.data.sources import DroppedRow, Reason, Row, Where, check_sources, read_rows
from eyas.data.table import SampleTable, TableMetadata, TableWriter, samples_of
from eyas.data.template import (
    Masked,
    Masker,
    MaskMethod,
    Refused,
    load_tokenizer,
    template_digest,
    tokenizer_digest,
)
from eyas.errors import ConfigError, DataError
from eyas.log import Progress, human_bytes, human_time
from eyas.records import Sample, Span, spans_of

BATCH_ROWS = 64
BATCH_BYTES = 512 * 1024
"""Source bytes that are tokenised together; offsets make a token cost some hundred bytes meanwhile."""
MAX_EXAMPLES = 3
"""Dropped rows that are named, per reason."""
MAX_DETAIL_CHARS = 200
SAMPLE_ID_BYTES = 16

_METHODS = tuple(MaskMethod)


@dataclass(frozen=True, slots=True)
class Example:
    """One dropped row."""

    where: str
    """`FILE:LINE`."""
    detail: str


@dataclass(frozen=True, slots=True)
class PrepareReceipt:
    """What `prepare` did. `num_input = num_kept + sum(dropped)`."""

    path: Path
    num_input: int
    num_kept: int
    dropped: Mapping[str, int]
    """Rows by `sources.Reason`; those merged into an equal one are `duplicate`."""
    num_merged: int
    num_tokens: int
    num_supervised: int
    mask_methods: Mapping[str, int]
    """Kept rows by `template.MaskMethod`."""
    num_straddling: int
    """Ends of turns in kept rows that fell inside a token."""
    num_turns_left_out: int
    """Assistant turns of kept rows that are context only."""
    tokenizer_digest: str
    template_digest: str
    table_digest: str
    table_bytes: int
    examples: Mapping[str, tuple[Example, ...]]
    """The first dropped rows of each reason."""
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        """The receipt for people: law 1 first, then sizes, then what was dropped and where."""
        rate = self.num_tokens / self.wall_s if self.wall_s else 0.0
        methods = ", ".join(f"{name} {count:,}" for name, count in self.mask_methods.items())
        lines = [
            f"{self.path}: {self.num_input:,} rows = {self.num_kept:,} kept + {sum(self.dropped.values()):,} dropped",
            f"{self.num_tokens:,} tokens, {self.num_supervised:,} supervised "
            f"({self.num_supervised / self.num_tokens:.1%}), {human_bytes(self.table_bytes)}, "
            f"{human_time(self.wall_s)}, {rate:,.0f} tokens/s",
            f"masks: {methods}",
        ]
        if self.num_turns_left_out:
            lines.append(
                f"{self.num_turns_left_out:,} assistant turns are context only: the template shows them otherwise than "
                "the target wrote them"
            )
        if self.num_straddling:
            lines.append(f"{self.num_straddling:,} ends of turns fall inside a token; that token is not supervised")
        for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"dropped {count:,} {reason}")
            lines += [f"  {example.where}: {example.detail}" for example in self.examples.get(reason, ())]
        lines.append(f"table {self.table_digest}  tokenizer {self.tokenizer_digest}  template {self.template_digest}")
        return lines


@dataclass(slots=True)
class _Tally:
    """What was seen so far; per written row 36 bytes."""

    num_input: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    files: dict[Path, int] = field(default_factory=dict)
    sample_ids: bytearray = field(default_factory=bytearray)
    methods: array[int] = field(default_factory=lambda: array("B"))
    straddling: array[int] = field(default_factory=lambda: array("H"))
    left_out: array[int] = field(default_factory=lambda: array("H"))
    file_numbers: array[int] = field(default_factory=lambda: array("I"))
    lines: array[int] = field(default_factory=lambda: array("Q"))

    def drop(self, where: Where, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        named = self.examples.setdefault(reason, [])
        if len(named) < MAX_EXAMPLES:
            named.append(Example(str(where), _printable(detail)))

    def write(self, row: Row, sample: Sample, masked: Masked) -> None:
        self.num_tokens += sample.num_tokens
        self.sample_ids += bytes.fromhex(sample.sample_id)
        self.methods.append(_METHODS.index(masked.method))
        self.straddling.append(min(masked.num_straddling, 0xFFFF))
        self.left_out.append(min(masked.num_turns_left_out, 0xFFFF))
        self.file_numbers.append(self.files.setdefault(row.where.path, len(self.files)))
        self.lines.append(row.where.line)

    def where(self, row_number: int) -> Where:
        return Where(list(self.files)[self.file_numbers[row_number]], self.lines[row_number])


def prepare(data: DataConfig, target: TargetConfig, progress: Progress) -> PrepareReceipt:
    """Read the sources, tokenise them for the target and write the sample table.

    An existing table stays as it is until the new one is complete. ConfigError when a path is not set; DataError, one
    line, when a source is missing, empty or damaged, the target has no tokeniser or no template that it needs, or no
    sample is left.
    """
    started = time.monotonic()
    if not data.sources:
        raise ConfigError("data.sources is not set; name at least one JSONL file of conversations")
    if data.samples is None:
        raise ConfigError("data.samples is not set; name the sample table to be written, samples.parquet say")
    if data.samples.resolve() in {path.resolve() for path in data.sources}:
        raise ConfigError(f"data.samples: {data.samples} is one of data.sources")
    if target.path is None:
        raise ConfigError("target.path is not set; name the directory of the target model")
    progress.show(f"prepare: reading the tokeniser of {target.path}", force=True)
    total_bytes = check_sources(data.sources)
    tokenizer = load_tokenizer(target)
    masker = Masker(tokenizer, target.path)
    tally = _Tally()
    with TableWriter(data.samples, stage="rows") as rows:
        for batch in _batches(data, tally):
            for row, result in zip(batch, masker.mask(batch), strict=True):
                _settle(row, result, data.max_tokens, tally, rows)
            if progress.due():
                progress.show(_progress_line(tally, total_bytes, started))
        if not rows.num_rows:
            raise DataError(_nothing_left(tally))
        first_of = _first_occurrences(tally.sample_ids)
        base = TableMetadata(
            tokenizer_digest=tokenizer_digest(target.path),
            template_digest=template_digest(tokenizer),
            max_tokens=data.max_tokens,
        )
        metadata = _publish(data.samples, rows, first_of, tally, base, progress)
    table = SampleTable.open(data.samples)
    return PrepareReceipt(
        path=data.samples,
        num_input=metadata.num_input,
        num_kept=metadata.num_kept,
        dropped=metadata.dropped,
        num_merged=metadata.num_merged,
        num_tokens=metadata.num_tokens,
        num_supervised=metadata.num_supervised,
        mask_methods=metadata.mask_methods,
        num_straddling=metadata.num_straddling,
        num_turns_left_out=metadata.num_turns_left_out,
        tokenizer_digest=metadata.tokenizer_digest,
        template_digest=metadata.template_digest,
        table_digest=table.digest,
        table_bytes=data.samples.stat().st_size,
        examples={reason: tuple(named) for reason, named in tally.examples.items()},
        wall_s=time.monotonic() - started,
    )


def _batches(data: DataConfig, tally: _Tally) -> Iterator[list[Row]]:
    """Usable rows, a bounded number of bytes at a time; the others are counted on the way."""
    batch: list[Row] = []
    num_bytes = 0
    for row in read_rows(data.sources):
        tally.num_input += 1
        tally.num_bytes += row.num_bytes
        if isinstance(row, DroppedRow):
            tally.drop(row.where, row.reason, row.detail)
        else:
            batch.append(row)
        num_bytes += row.num_bytes
        if len(batch) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _settle(row: Row, result: Masked | Refused, max_tokens: int, tally: _Tally, rows: TableWriter) -> None:
    if isinstance(result, Refused):
        tally.drop(row.where, result.reason, result.detail)
        return
    if len(result.token_ids) > max_tokens:
        tally.drop(row.where, Reason.TOO_LONG, f"{len(result.token_ids):,} tokens, data.max_tokens is {max_tokens:,}")
        return
    sample = Sample(
        result.token_ids,
        result.loss_spans,
        conversation_id=row.conversation_id,
        source=row.source,
        tags=row.tags,
    )
    rows.append(sample)
    tally.write(row, sample, result)


def _first_occurrences(sample_ids: bytearray) -> npt.NDArray[np.int64]:
    """For each row the number of the first row with the same id: its own, unless it is a repetition."""
    ids = np.frombuffer(sample_ids, dtype=f"S{SAMPLE_ID_BYTES}")
    order = np.argsort(ids, kind="stable")
    starts_group = np.ones(len(ids), dtype=np.bool_)
    starts_group[1:] = ids[order[1:]] != ids[order[:-1]]
    first_of = np.empty(len(ids), dtype=np.int64)
    # A stable sort keeps the rows of a group in their order, so the group's first entry is its first row.
    first_of[order] = order[starts_group][np.cumsum(starts_group) - 1]
    return first_of


@dataclass(slots=True)
class _Merged:
    """What the rows of one sample have together."""

    mask: npt.NDArray[np.bool_]
    tags: dict[str, None]


def _publish(
    path: Path,
    rows: TableWriter,
    first_of: npt.NDArray[np.int64],
    tally: _Tally,
    base: TableMetadata,
    progress: Progress,
) -> TableMetadata:
    """Put the table in place, repetitions merged into the first row with their sample id; its final metadata."""
    numbers = np.arange(len(first_of))
    kept = first_of == numbers
    num_merged = int(np.count_nonzero(~kept))
    if num_merged:
        for number in np.flatnonzero(~kept)[:MAX_EXAMPLES].tolist():
            tally.drop(tally.where(number), Reason.DUPLICATE, f"same tokens as {tally.where(int(first_of[number]))}")
        tally.dropped[Reason.DUPLICATE] = num_merged
    methods = np.bincount(np.array(tally.methods, dtype=np.int64)[kept], minlength=len(_METHODS))
    metadata = dataclasses.replace(
        base,
        num_input=tally.num_input,
        num_kept=int(np.count_nonzero(kept)),
        dropped=dict(sorted(tally.dropped.items())),
        num_merged=num_merged,
        mask_methods={str(name): int(count) for name, count in zip(_METHODS, methods, strict=True) if count},
        num_straddling=int(np.array(tally.straddling, dtype=np.int64)[kept].sum()),
        num_turns_left_out=int(np.array(tally.left_out, dtype=np.int64)[kept].sum()),
    )
    if metadata.num_input != metadata.num_kept + sum(metadata.dropped.values()):
        raise DataError(
            f"{path}: {metadata.num_input} rows read, but {metadata.num_kept} kept + "
            f"{sum(metadata.dropped.values())} dropped; nothing was written, please report this"
        )
    if not num_merged:
        metadata = dataclasses.replace(metadata, num_tokens=rows.num_tokens, num_supervised=rows.num_supervised)
        rows.publish(metadata)
        return metadata
    rows.seal()
    progress.show(f"prepare: merging {num_merged:,} duplicates", force=True)
    merged = _merge(rows, first_of)
    with TableWriter(path) as result:
        number = 0
        for batch in rows.batches():
            for sample in samples_of(batch):
                if kept[number]:
                    result.append(_with(sample, merged.get(number)))
                number += 1
            if progress.due():
                progress.show(f"prepare: merging {num_merged:,} duplicates, row {number:,} of {rows.num_rows:,}")
        metadata = dataclasses.replace(metadata, num_tokens=result.num_tokens, num_supervised=result.num_supervised)
        result.publish(metadata)
    return metadata


def _merge(rows: TableWriter, first_of: npt.NDArray[np.int64]) -> dict[int, _Merged]:
    """Union of masks and of tags for each sample that occurs more than once, by its first row."""
    repeated = np.zeros(len(first_of), dtype=np.bool_)
    repeated[first_of[first_of != np.arange(len(first_of))]] = True
    merged: dict[int, _Merged] = {}
    number = 0
    for batch in rows.batches():
        for sample in samples_of(batch):
            first = int(first_of[number])
            number += 1
            if not repeated[first]:
                continue
            so_far = merged.setdefault(first, _Merged(np.zeros(sample.num_tokens, dtype=np.bool_), {}))
            so_far.mask |= sample.loss_mask()
            so_far.tags.update(dict.fromkeys(sample.tags))
    return merged


def _with(sample: Sample, merged: _Merged | None) -> Sample:
    if merged is None:
        return sample
    spans: tuple[Span, ...] = spans_of(merged.mask)
    return dataclasses.replace(sample, loss_spans=spans, tags=tuple(merged.tags))


def _progress_line(tally: _Tally, total_bytes: int, started: float) -> str:
    elapsed = time.monotonic() - started
    rate = tally.num_tokens / elapsed if elapsed else 0.0
    line = (
        f"prepare: {tally.num_input:,} rows, {tally.num_input - len(tally.lines):,} dropped, "
        f"{tally.num_tokens:,} tokens, {rate:,.0f} tokens/s"
    )
    if total_bytes and tally.num_bytes:
        share = min(tally.num_bytes / total_bytes, 1.0)
        line += f", {share:.0%} of {human_bytes(total_bytes)}, {human_time(elapsed * (1 - share) / share)} left"
    return line


def _nothing_left(tally: _Tally) -> str:
    top = tally.dropped.most_common(3)
    reasons = ", ".join(
        f"{reason} {count:,} (first: {tally.examples[reason][0].where}: {tally.examples[reason][0].detail})"
        for reason, count in top
    )
    return f"none of {tally.num_input:,} rows became a sample: {reasons}"


def _printable(text: str) -> str:
    """One line without control characters, so that a row cannot write to a terminal what it likes."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= MAX_DETAIL_CHARS else line[: MAX_DETAIL_CHARS - 1] + "…"
