"""The rows of several sources on their way into one file: which are kept, why the others are not, all counted."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eyas.config import MergeConfig, MergeSource
from eyas.data.canonical import Canonical, Form, canonical, with_tags_of
from eyas.data.files import STDIN, RawRow, Rows
from eyas.data.leakage import Benchmarks
from eyas.data.merge_receipt import Example, MergeReceipt, SourceReport, identity, printable
from eyas.data.output import OutputFile
from eyas.data.shuffle import Admit, Entry, Shuffle
from eyas.data.sources import Drop, Reason
from eyas.errors import DataError
from eyas.log import human_bytes, human_time

WEIGHT, LEAKAGE, CAP = "weight", "leakage", "cap"
"""Why a conversation was left out on purpose; other reasons are those of `sources.Reason`."""

BATCH_ROWS = 256
BATCH_BYTES = 1 << 20
MAX_EXAMPLES = 3
_FORM_BITS, _UNANSWERED, _NON_TEXT = 3, 4, 8


class _Cap:
    """The smallest `limit` shares of a source's conversations, at most 32 bytes each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shares = array("Q")
        self.threshold = 2**64 - 1

    def add(self, share: int) -> bool:
        """False where the share is among the smallest no more, and never will be."""
        if share > self.threshold:
            return False
        self._shares.append(share)
        if len(self._shares) >= self._limit + max(self._limit, 1024):
            self.settle()
        return True

    def settle(self) -> None:
        """Let go of all but the smallest: a conversation that comes twice counts once."""
        smallest = np.unique(np.array(self._shares, dtype=np.uint64))[: self._limit]
        self._shares = array("Q", smallest.tobytes())
        if len(smallest) == self._limit:
            self.threshold = int(smallest[-1])


@dataclass(slots=True)
class _Tally:
    """One source so far."""

    num_input: int = 0
    num_kept: int = 0
    num_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Mixture:
    """The rows of all sources on their way into one file."""

    def __init__(self, config: MergeConfig, sources: Sequence[Rows], benchmarks: Benchmarks | None) -> None:
        self._config = config
        self._rows = sources
        self._benchmarks = benchmarks
        self._files = [file for rows in sources for file in rows.files]
        self._tallies = [_Tally() for _ in sources]
        self._caps = [_Cap(source.cap) if source.cap is not None else None for source in config.sources]
        self._examples: dict[str, list[Example]] = {}
        self._flags: Counter[int] = Counter()
        self._num_mended = 0
        self._num_retagged = 0
        self._num_unchecked = 0
        self.num_collected = 0

    @property
    def num_kept(self) -> int:
        return sum(tally.num_kept for tally in self._tallies)

    def collect(self, shuffle: Shuffle) -> Iterator[None]:
        """Every row of every source into the shuffle or to the dropped ones; yields now and then."""
        first_file = 0
        for number, (source, rows) in enumerate(zip(self._config.sources, self._rows, strict=True)):
            file_of = {file: (first_file + i, source.name or _name(file)) for i, file in enumerate(rows.files)}
            first_file += len(rows.files)
            for batch in _batches(rows):
                self._collect(number, source, batch, file_of, shuffle)
                yield

    def _collect(
        self,
        number: int,
        source: MergeSource,
        batch: list[RawRow],
        file_of: dict[Path, tuple[int, str]],
        shuffle: Shuffle,
    ) -> None:
        tally = self._tallies[number]
        tally.num_input += len(batch)
        # A share is compared as the 64 bits of the id that it is: 1.0 keeps all.
        below = int(source.weight * 2**64)
        rows: list[RawRow] = []
        found: list[Canonical] = []
        path = None
        for row in batch:
            tally.num_bytes += len(row.data)
            if row.path is not path:
                path = row.path
                name = file_of[path][1]
            try:
                result = canonical(row, name, source.tags, with_texts=self._benchmarks is not None)
            except Drop as drop:
                self._drop(number, str(row.where), drop.reason, drop.detail)
                continue
            self._num_mended += result.mended
            if _share(result.id) >= below:
                self._drop(number, str(row.where), WEIGHT, f"not in the share of {source.weight:g}")
                continue
            rows.append(row)
            found.append(result)
        passages = [""] * len(found)
        if self._benchmarks is not None:
            passages = self._benchmarks.find([result.texts for result in found], [row.where for row in rows])
            self._num_unchecked += sum(result.form is Form.TOKENS and not result.texts for result in found)
        cap = self._caps[number]
        for row, result, passage in zip(rows, found, passages, strict=True):
            if passage and self._config.leakage == "drop":
                self._drop(number, str(row.where), LEAKAGE, passage)
            elif cap is not None and not cap.add(_share(result.id)):
                self._drop_by_cap(number, str(row.where))
            else:
                flags = result.form + _UNANSWERED * (not result.answered) + _NON_TEXT * result.non_text
                shuffle.add(result.id, number, file_of[row.path][0], row.number, flags, result.line)
                self.num_collected += 1

    def admitter(self) -> Admit:
        """Decides on caps and repetitions, once all rows are collected."""
        for cap in self._caps:
            if cap is not None:
                cap.settle()
        thresholds = [None if cap is None else cap.threshold for cap in self._caps]

        def admit(entry: Entry, first: Entry | None) -> bool:
            threshold = thresholds[entry.source]
            if threshold is not None and _share(entry.id) > threshold:
                self._drop_by_cap(entry.source, self._where(entry))
                return False
            if first is not None:
                self._tallies[entry.source].dropped[Reason.DUPLICATE] += 1
                line = with_tags_of(first.line, entry.line)
                self._num_retagged += line != first.line
                first.line = line
                if len(self._examples.get(Reason.DUPLICATE, ())) < MAX_EXAMPLES:
                    self._example(Reason.DUPLICATE, self._where(entry), f"same content as {self._where(first)}")
                return False
            return True

        return admit

    def keep(self, entry: Entry) -> None:
        """Count a row that goes into the output."""
        self._tallies[entry.source].num_kept += 1
        self._flags[entry.flags] += 1

    def _where(self, entry: Entry) -> str:
        return f"{self._files[entry.file]}:{entry.number}"

    def _drop_by_cap(self, number: int, where: str) -> None:
        self._drop(number, where, CAP, f"beyond the first {self._config.sources[number].cap:,} by id")

    def _drop(self, number: int, where: str, reason: str, detail: str) -> None:
        self._tallies[number].dropped[reason] += 1
        self._example(reason, where, detail)

    def _example(self, reason: str, where: str, detail: str) -> None:
        named = self._examples.setdefault(reason, [])
        if len(named) < MAX_EXAMPLES:
            named.append(Example(where, printable(detail)))

    def progress_line(self, started: float) -> str:
        """How far reading has come."""
        elapsed = time.monotonic() - started
        num_input = sum(tally.num_input for tally in self._tallies)
        num_dropped = sum(tally.dropped.total() for tally in self._tallies)
        rate = sum(tally.num_bytes for tally in self._tallies) / elapsed / 1e6 if elapsed else 0.0
        line = f"merge: {num_input:,} rows, {num_dropped:,} dropped, {rate:,.1f} MB/s"
        total = sum(rows.total_bytes for rows in self._rows)
        share = min(sum(rows.consumed_bytes for rows in self._rows) / total, 1.0) if total else 0.0
        if share:
            line += f", {share:.0%} of {human_bytes(total)} read, {human_time(elapsed * (1 - share) / share)} left"
        return line

    def nothing_left(self) -> str:
        dropped = sum((tally.dropped for tally in self._tallies), Counter[str]())
        reasons = ", ".join(
            f"{reason} {count:,} (first: {self._examples[reason][0].where}: {self._examples[reason][0].detail})"
            for reason, count in dropped.most_common(3)
        )
        return f"no conversation is left of {sum(t.num_input for t in self._tallies):,} rows: {reasons}"

    def receipt(self, out: Path, output: OutputFile, wall_s: float) -> MergeReceipt:
        """DataError where the rows do not add up."""
        reports = tuple(
            SourceReport(
                name=source.name or (_name(rows.files[0]) if len(rows.files) == 1 else str(source.path)),
                path=str(source.path),
                num_files=len(rows.files),
                num_input=tally.num_input,
                num_kept=tally.num_kept,
                dropped=_plain(tally.dropped),
                num_bytes=tally.num_bytes,
            )
            for source, rows, tally in zip(self._config.sources, self._rows, self._tallies, strict=True)
        )
        for report in reports:
            if report.num_input != report.num_kept + sum(report.dropped.values()):
                raise DataError(
                    f"{identity(report.name, report.num_input, report.num_kept, report.dropped)} does not add up; "
                    "nothing was written, please report this"
                )

        def flagged(bit: int) -> int:
            return sum(count for flags, count in self._flags.items() if flags & bit)

        forms = {form: sum(n for flags, n in self._flags.items() if flags & _FORM_BITS == form) for form in Form}
        return MergeReceipt(
            path=out,
            num_input=sum(report.num_input for report in reports),
            num_kept=self.num_kept,
            dropped=_plain(sum((tally.dropped for tally in self._tallies), Counter[str]())),
            sources=reports,
            forms={form.name.lower(): count for form, count in forms.items()},
            num_unanswered=flagged(_UNANSWERED),
            num_non_text=flagged(_NON_TEXT),
            num_mended=self._num_mended,
            num_retagged=self._num_retagged,
            benchmarks=tuple(self._benchmarks.reports) if self._benchmarks is not None else (),
            num_unchecked=self._num_unchecked,
            input_bytes=sum(report.num_bytes for report in reports),
            output_bytes=output.num_bytes,
            digest=output.digest,
            examples={str(reason): tuple(named) for reason, named in sorted(self._examples.items())},
            wall_s=wall_s,
        )


def _plain(dropped: Mapping[str, int]) -> dict[str, int]:
    return {str(reason): count for reason, count in sorted(dropped.items()) if count}


def _name(path: Path) -> str:
    return "stdin" if path == STDIN else path.name


def _share(id: bytes) -> int:
    return int.from_bytes(id[:8], "big")


def _batches(rows: Rows) -> Iterator[list[RawRow]]:
    batch: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += len(row.data)
        if len(batch) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
