"""`prepare`: conversations to `samples.parquet`, every row accounted for.

Three steps. **Parts**: the sources are read in chunks of some megabytes, each rendered, tokenised and masked by one
process, and kept as a file beside the table; a run that was stopped goes on with those that are there. **Join**: equal
samples are found, their masks united, and the table is written in the order of the sources, so that it does not depend
on how many processes worked. **Report**: what the mix is, and what a draft vocabulary would cover of it. A small input
is done in this process, without files beside the table.

A table that was made from the same lines with the same settings is left as it is. Memory: some chunks for each process,
and 25 bytes per sample (its id, and which earlier sample it repeats), some 70 for a moment while equal ones are sought:
a million samples cost 70 MB. Samples that occur more than once are held while their masks are united.

An equal sample in both splits is held out: what evaluation sees must not have been trained on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eyas.config import DataConfig, TargetConfig
from eyas.data.files import Rows, find_files, is_compressed, lines_of
from eyas.data.parts import (
    CHUNK_BYTES,
    MAX_EXAMPLES,
    METHODS,
    AboutTemplate,
    Chunk,
    Example,
    Facts,
    InputDigest,
    Maker,
    PartStore,
    chunks_of,
    key_of,
    printable,
    read_part,
    settings_of,
)
from eyas.data.prepare_receipt import PrepareReceipt
from eyas.data.render import check_options
from eyas.data.report import load_report, make_report, write_report
from eyas.data.rules import patterns
from eyas.data.sources import Reason, Where
from eyas.data.split import HELD_OUT
from eyas.data.table import SampleTable, TableMetadata, TableWriter, samples_of
from eyas.data.tokenizer import check_target, tokenizer_digest, unused_options
from eyas.data.workers import Workers
from eyas.errors import ConfigError, DataError
from eyas.log import Progress, human_bytes, human_time
from eyas.records import Sample, spans_of

SAMPLE_ID_BYTES = 16
FEW_UNSUPERVISED = 10
"""So many rows without a supervised token say nothing about the template."""
CHUNKS_AHEAD = 2
"""Chunks for each process that wait for it or for their turn."""


def prepare(data: DataConfig, target: TargetConfig, progress: Progress) -> PrepareReceipt:
    """Read the sources, tokenise them for the target and write the sample table and its report.

    An existing table stays as it is until the new one is complete. ConfigError when a path is not set or a setting is
    of no use; DataError, one line, when a source is missing, empty or damaged, the target has no tokeniser or no
    template that it needs, a process died, or no sample is left.
    """
    started = time.monotonic()
    if not data.sources:
        raise ConfigError("data.sources is not set; name at least one file of conversations")
    if data.samples is None:
        raise ConfigError("data.samples is not set; name the sample table to be written, samples.parquet say")
    if not data.samples.name or data.samples.is_dir():
        raise ConfigError(f"data.samples: {data.samples} is a directory; name the file to be written in it")
    sources = find_files(data.sources, field="data.sources")
    if data.samples.resolve() in {path.resolve() for path in sources}:
        raise ConfigError(f"data.samples: {data.samples} is one of data.sources")
    patterns(data.ignore)
    check_options(data.template_options)
    check_target(target)
    run = _Run(data, target, progress, sources, started=started)
    found = run.unchanged()
    if found is not None:
        return run.receipt(found)
    with TableWriter(data.samples) as out:
        run.make_parts()
        run.join(out)
    if run.store is not None:
        run.store.remove()
    return run.receipt(SampleTable.open(data.samples))


@dataclass(slots=True)
class _Merged:
    """What the rows of one sample have together."""

    mask: npt.NDArray[np.bool_]
    tags: dict[str, None]
    split: str


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A part that is made, or being made, and waits for its turn."""

    chunk: Chunk
    part: str | bytes
    """Its key, or itself where there is no store."""
    facts: Facts | Future[Facts]


class _Run:
    """One `prepare`: parts first, then the table of them."""

    def __init__(
        self, data: DataConfig, target: TargetConfig, progress: Progress, sources: tuple[Path, ...], *, started: float
    ) -> None:
        assert data.samples is not None and target.path is not None
        self.data = data
        self.target = target
        self.path = data.samples
        self.directory = target.path
        self.progress = progress
        self.started = started
        self.settings_digest = settings_of(data, target)
        self._sources = sources
        self._rows = Rows(sources)
        total_bytes = self._rows.total_bytes
        self._all_files = all(path.is_file() for path in sources)
        self.num_workers = data.workers or _default_workers(sources, total_bytes)
        store = PartStore(data.samples)
        big = self.num_workers > 1 or total_bytes > CHUNK_BYTES or not self._all_files
        self.store = store if big or store.directory.exists() else None
        self._facts = Facts()
        self._input = InputDigest()
        self._parts: list[tuple[Path, str | bytes]] = []
        self._num_reused = 0
        self._read_bytes = self._settled_bytes = 0
        self._about: AboutTemplate | None = None

    def unchanged(self) -> SampleTable | None:
        """The table that is there, if it was made from the same lines with the same settings."""
        # What comes through a pipe can be read once only.
        if not self._all_files or not self.path.exists():
            return None
        try:
            table = SampleTable.open(self.path)
        except DataError:
            return None
        if table.metadata.settings_digest != self.settings_digest:
            return None
        found = InputDigest()
        num_bytes = 0
        for chunk in chunks_of(lines_of(Rows(self._sources))):
            found.update(chunk)
            num_bytes += chunk.num_bytes
            if self.progress.due():
                self.progress.show(f"prepare: comparing with {self.path}: {human_bytes(num_bytes)}")
        if table.metadata.input_digest != found.hexdigest():
            return None
        self.num_workers = 0
        return table

    def make_parts(self) -> None:
        """A part for each chunk of the sources, in order."""
        self.progress.show(f"prepare: reading the tokeniser of {self.directory}", force=True)
        maker = None if self.store is not None and self.num_workers > 1 else Maker(self.data, self.target)
        with contextlib.ExitStack() as stack:
            workers: Workers | None = None
            if maker is None:
                workers = stack.enter_context(Workers(self.num_workers, self.data, self.target))
            waiting: deque[_Waiting] = deque()
            for chunk in self._chunks(waiting):
                self._input.update(chunk)
                self._read_bytes += chunk.num_bytes
                key = key_of(chunk, self.settings_digest)
                known = None if self.store is None else self.store.facts(key)
                if known is not None:
                    self._num_reused += 1
                    waiting.append(_Waiting(chunk, key, known))
                elif workers is not None:
                    waiting.append(_Waiting(chunk, key, workers.submit(chunk, key)))
                else:
                    assert maker is not None
                    part, facts = maker.part(chunk)
                    if self.store is not None:
                        self.store.put(key, part)
                    waiting.append(_Waiting(chunk, part if self.store is None else key, facts))
                while len(waiting) > (CHUNKS_AHEAD * self.num_workers if workers else 0):
                    self._settle(waiting.popleft())
            while waiting:
                self._settle(waiting.popleft())
            self._about = workers.about if workers is not None else None
        if self._about is None:
            # Nobody in this process has read the tokeniser yet, where all parts are a former run's.
            self._about = (maker or Maker(self.data, self.target)).about()

    def _chunks(self, waiting: deque[_Waiting]) -> Iterator[Chunk]:
        try:
            yield from chunks_of(lines_of(self._rows))
        except DataError:
            # What is wrong before that place is told first, however many processes there are.
            while waiting:
                self._settle(waiting.popleft())
            raise

    def _settle(self, made: _Waiting) -> None:
        facts = made.facts
        if isinstance(facts, Future):
            while not facts.done():
                wait([facts], timeout=0.2)
                self._show()
            facts = facts.result()
        self._facts.add(facts)
        self._parts.append((made.chunk.path, made.part))
        self._settled_bytes += made.chunk.num_bytes
        self._show()

    def _require_supervised(self, facts: Facts) -> None:
        """A template or settings that fit the rows leave nearly every one something to learn from."""
        unsupervised = facts.dropped.get(Reason.NO_SUPERVISED_TOKEN, 0)
        if unsupervised > max(FEW_UNSUPERVISED, self.data.max_unsupervised * facts.num_input):
            first = facts.examples[Reason.NO_SUPERVISED_TOKEN][0]
            raise DataError(
                f"{unsupervised:,} of {facts.num_input:,} rows have no supervised token (first: {first.where}: "
                f"{first.detail}), more than data.max_unsupervised = {self.data.max_unsupervised} allows: are "
                "template, roles and settings right for them? Raise it to go on all the same"
            )

    def join(self, out: TableWriter) -> None:
        """Put the table in place, repetitions merged into the first sample with their id."""
        facts = self._facts
        if not facts.num_samples:
            if self.store is not None:
                self.store.remove()
            raise DataError(_nothing_left(facts))
        self._require_supervised(facts)
        assert self._about is not None
        first_of = _first_occurrences(self._sample_ids())
        kept = first_of == np.arange(len(first_of))
        num_merged = int(np.count_nonzero(~kept))
        merged: dict[int, _Merged] = {}
        if num_merged:
            facts.dropped[Reason.DUPLICATE] = num_merged
            facts.examples[Reason.DUPLICATE] = self._duplicates(first_of, kept)
            merged = self._merge(first_of, kept)
        methods: Counter[int] = Counter()
        splits: Counter[str] = Counter()
        num_straddling = num_repeated_tokens = number = 0
        for _, batch in self._batches():
            columns = (batch.column(name).to_pylist() for name in ("method", "extra", "straddling"))
            for sample, method, extra, straddling in zip(samples_of(batch), *columns, strict=True):
                if kept[number]:
                    whole = _with(sample, merged.get(number))
                    out.append(whole)
                    methods[method] += 1
                    splits[whole.split] += 1
                    num_straddling += straddling
                    num_repeated_tokens += whole.num_tokens - whole.num_supervised if extra else 0
                number += 1
            self.progress.show(f"prepare: writing the table, sample {number:,} of {len(first_of):,}")
        metadata = TableMetadata(
            **facts.counts,
            tokenizer_digest=tokenizer_digest(self.directory),
            template_digest=self._about.digest,
            num_input=facts.num_input,
            num_kept=out.num_rows,
            dropped=dict(sorted(facts.dropped.items())),
            num_merged=num_merged,
            num_tokens=out.num_tokens,
            num_supervised=out.num_supervised,
            mask_methods={str(name): methods[i] for i, name in enumerate(METHODS) if methods[i]},
            splits=dict(sorted(splits.items())),
            num_straddling=num_straddling,
            num_repeated_tokens=num_repeated_tokens,
            max_tokens=self.data.max_tokens,
            too_long=self.data.too_long,
            last_turn_only=self.data.last_turn_only,
            reasoning=self.data.reasoning,
            ignore=self.data.ignore,
            template_options=self.data.model_dump(mode="json")["template_options"],
            date=self.data.date.isoformat() if self._about.uses_date else "",
            held_out=self.data.held_out,
            input_digest=self._input.hexdigest(),
            settings_digest=self.settings_digest,
        )
        if metadata.num_input + metadata.num_extra != metadata.num_kept + sum(metadata.dropped.values()):
            raise DataError(
                f"{self.path}: {metadata.num_input} rows read + {metadata.num_extra} extra samples, but "
                f"{metadata.num_kept} kept + {sum(metadata.dropped.values())} dropped; nothing was written, please "
                "report this"
            )
        out.publish(metadata)

    def receipt(self, table: SampleTable) -> PrepareReceipt:
        """What was done, with the report, which is made anew where the one that is there is another table's."""
        sizes = self.data.draft_vocab_sizes
        report = load_report(table, sizes)
        if report is None:
            self.progress.show("prepare: counting tokens for the report", force=True)
            report = make_report(table, sizes)
            write_report(table.path, report)
        examples = self._facts.examples
        return PrepareReceipt(
            path=table.path,
            table=table.metadata,
            table_digest=table.digest,
            table_bytes=table.path.stat().st_size,
            examples={reason: tuple(named) for reason, named in examples.items()},
            report=report,
            unused_options=unused_options(self.directory, self.data.template_options),
            num_workers=self.num_workers,
            num_parts_reused=self._num_reused,
            wall_s=time.monotonic() - self.started,
        )

    def _batches(self) -> Iterator[tuple[Path, pa.RecordBatch]]:
        for path, part in self._parts:
            if isinstance(part, bytes):
                yield path, read_part(part)[1]
            else:
                assert self.store is not None
                yield path, self.store.get(part)[1]

    def _sample_ids(self) -> bytearray:
        ids = bytearray()
        for _, batch in self._batches():
            for sample_id in batch.column("sample_id").to_pylist():
                ids += sample_id
        return ids

    def _duplicates(self, first_of: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_]) -> list[Example]:
        """The first repetitions, and what they repeat."""
        numbers = np.flatnonzero(~kept)[:MAX_EXAMPLES].tolist()
        wanted = sorted({*numbers, *(int(first_of[n]) for n in numbers)})
        places: dict[int, str] = {}
        begin = 0
        for path, batch in self._batches():
            for n in wanted:
                if begin <= n < begin + batch.num_rows:
                    places[n] = str(Where(path, batch.column("line")[n - begin].as_py()))
            begin += batch.num_rows
        return [Example(places[n], printable(f"same tokens as {places[int(first_of[n])]}")) for n in numbers]

    def _merge(self, first_of: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_]) -> dict[int, _Merged]:
        """Union of masks and of tags for each sample that occurs more than once, by its first row."""
        repeated = np.zeros(len(first_of), dtype=np.bool_)
        repeated[first_of[~kept]] = True
        merged: dict[int, _Merged] = {}
        number = 0
        for _, batch in self._batches():
            if not repeated[first_of[number : number + batch.num_rows]].any():
                number += batch.num_rows
                continue
            for sample in samples_of(batch):
                first = int(first_of[number])
                number += 1
                if not repeated[first]:
                    continue
                so_far = merged.setdefault(first, _Merged(np.zeros(sample.num_tokens, dtype=np.bool_), {}, ""))
                so_far.mask |= sample.loss_mask()
                so_far.tags.update(dict.fromkeys(sample.tags))
                so_far.split = HELD_OUT if HELD_OUT in (so_far.split, sample.split) else sample.split
            self.progress.show(f"prepare: merging duplicates, sample {number:,} of {len(first_of):,}")
        return merged

    def _show(self) -> None:
        if not self.progress.due():
            return
        facts = self._facts
        elapsed = time.monotonic() - self.started
        rate = facts.num_tokens / elapsed if elapsed else 0.0
        line = (
            f"prepare: {facts.num_input:,} rows, {sum(facts.dropped.values()):,} dropped, "
            f"{facts.num_tokens:,} tokens, {rate:,.0f} tokens/s"
        )
        if self._rows.total_bytes and self._settled_bytes:
            # What is read and waits is not done: reading is far ahead of those who tokenise.
            share = min(self._rows.consumed_bytes / self._rows.total_bytes, 1.0)
            share *= self._settled_bytes / self._read_bytes
            left = human_time(elapsed * (1 - share) / share)
            line += f", {share:.0%} of {human_bytes(self._rows.total_bytes)}, {left} left"
        self.progress.show(line)


def _default_workers(sources: Sequence[Path], total_bytes: int) -> int:
    """One for each core, but none that has less to do than its start costs; what size does not tell counts as large."""
    num_cores = len(os.sched_getaffinity(0))
    if any(not path.is_file() or is_compressed(path) for path in sources):
        return num_cores
    return max(1, min(num_cores, total_bytes // CHUNK_BYTES))


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


def _with(sample: Sample, merged: _Merged | None) -> Sample:
    if merged is None:
        return sample
    return dataclasses.replace(sample, loss_spans=spans_of(merged.mask), tags=tuple(merged.tags), split=merged.split)


def _nothing_left(facts: Facts) -> str:
    reasons = ", ".join(
        f"{reason} {count:,} (first: {facts.examples[reason][0].where}: {facts.examples[reason][0].detail})"
        for reason, count in facts.dropped.most_common(3)
    )
    return f"none of {facts.num_input:,} rows became a sample: {reasons}"
