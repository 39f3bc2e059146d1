"""Pieces of `prepare`: a chunk of lines becomes a part, a file named by what it was made from.

A **chunk** is some consecutive lines of one source. Its key is the digest of the lines, the source's name and the
settings, which hold everything else that decides what becomes of them. A **part** is the samples of a chunk with what
there is to be counted: 16 bytes digest (xxh3-128) over the rest, 8 bytes length of the facts (little-endian), the
facts as JSON, an Arrow stream with the columns of the sample table and some of our own. It is renamed into place when
it is whole, so a run that was killed goes on with the parts that are there; a part that is damaged is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from eyas.config import DataConfig, TargetConfig
from eyas.data.length import fit, surely_too_long
from eyas.data.rules import THOUGHT_MARKERS, Rules, patterns
from eyas.data.sources import (
    DroppedRow,
    GivenTokens,
    GivenTurns,
    Messages,
    PlainText,
    Row,
    Where,
    is_unweighted,
    rows_of,
)
from eyas.data.spans import longest_token_bytes
from eyas.data.split import script_of, split_of_ids, split_of_text
from eyas.data.table import SCHEMA, batch_of
from eyas.data.template import Masked, Masker, MaskMethod, Refused
from eyas.data.tokenizer import load_tokenizer, target_text_digest, template_digest
from eyas.errors import DataError, OutOfSpace
from eyas.records import Sample, canonical_json, digest_bytes

CODE_VERSION = 3
"""Rises when equal input gives another table than before."""
CHUNK_BYTES = 4 << 20
CHUNK_ROWS = 8192
BATCH_ROWS = 64
BATCH_BYTES = 512 * 1024
"""Source bytes that are tokenised together; offsets make a token cost some hundred bytes meanwhile."""
MAX_EXAMPLES = 3
"""Dropped rows that are named, per reason."""
MAX_DETAIL_CHARS = 200
LANGUAGE_TOKENS = 512
"""Given token ids that are decoded to tell the language."""

PART_NAME = re.compile(r"[0-9a-f]{32}\.part|\.[0-9a-f]{32}\.part\.(\d+\.)?tmp")
METHODS = tuple(MaskMethod)

_EXTRA_COLUMNS = [
    pa.field("line", pa.uint64(), nullable=False),
    pa.field("method", pa.uint8(), nullable=False),
    pa.field("extra", pa.bool_(), nullable=False),
    pa.field("straddling", pa.uint32(), nullable=False),
]
PART_SCHEMA = pa.schema([*SCHEMA, *_EXTRA_COLUMNS])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines of one source."""

    path: Path
    numbers: list[int]
    lines: list[bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.lines))


class InputDigest:
    """Digest of the sources' names and lines, wherever they lie and however they are cut into chunks."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._path: Path | None = None

    def update(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        if chunk.path != self._path:
            self._path = chunk.path
            self._add(b"source " + os.fsencode(chunk.path.name))
        for line in chunk.lines:
            self._add(line)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _add(self, line: bytes) -> None:
        # The end of a line is no part of what it says, and the last one may lack it.
        line = line.rstrip(b"\r\n")
        self._hash.update(len(line).to_bytes(8, "little") + line)


def chunks_of(lines: Iterable[tuple[Where, bytes]]) -> Iterator[Chunk]:
    """The lines in bounded pieces; a piece ends with its source."""
    chunk: Chunk | None = None
    num_bytes = 0
    for where, line in lines:
        if chunk is not None and (
            where.path != chunk.path or num_bytes + len(line) > CHUNK_BYTES or len(chunk.lines) >= CHUNK_ROWS
        ):
            yield chunk
            chunk = None
        if chunk is None:
            chunk, num_bytes = Chunk(where.path, [], []), 0
        chunk.numbers.append(where.line)
        chunk.lines.append(line)
        num_bytes += len(line)
    if chunk is not None:
        yield chunk


@dataclass(frozen=True, slots=True)
class Example:
    """One dropped row."""

    where: str
    """`FILE:LINE`."""
    detail: str


@dataclass(slots=True)
class Facts:
    """What is to be told about rows; adds up over parts."""

    num_input: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason; `num_input + counts["num_extra"] = num_samples + sum(dropped)`."""
    examples: dict[str, list[Example]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """By the names of `TableMetadata`."""

    def drop(self, where: str, reason: str, detail: str) -> None:
        """Count a row, or one of its samples, that is dropped."""
        self.dropped[reason] += 1
        named = self.examples.setdefault(reason, [])
        if len(named) < MAX_EXAMPLES:
            named.append(Example(where, printable(detail)))

    def add(self, other: Facts) -> None:
        """Add those of a later part."""
        self.num_input += other.num_input
        self.num_samples += other.num_samples
        self.num_tokens += other.num_tokens
        self.dropped.update(other.dropped)
        self.counts.update(other.counts)
        for reason, named in other.examples.items():
            mine = self.examples.setdefault(reason, [])
            mine += named[: MAX_EXAMPLES - len(mine)]

    def to_json(self) -> bytes:
        """As a part holds them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        examples = {reason: [dataclasses.asdict(e) for e in named] for reason, named in self.examples.items()}
        return canonical_json(values | {"examples": examples})

    @classmethod
    def from_json(cls, text: bytes) -> Facts:
        """Inverse of `to_json`."""
        value = json.loads(text)
        value["dropped"], value["counts"] = Counter(value["dropped"]), Counter(value["counts"])
        value["examples"] = {reason: [Example(**e) for e in named] for reason, named in value["examples"].items()}
        return cls(**value)


@dataclass(frozen=True, slots=True)
class AboutTemplate:
    """What the table has to say about the target's chat template."""

    digest: str
    uses_date: bool


class Maker:
    """Makes parts, for one target and one configuration."""

    def __init__(self, data: DataConfig, target: TargetConfig) -> None:
        assert target.path is not None
        self._data = data
        self.tokenizer = load_tokenizer(target)
        self.masker = Masker(
            self.tokenizer,
            target.path,
            rules=Rules(data.last_turn_only, data.reasoning, patterns(data.ignore)),
            options=data.template_options,
            date=data.date,
            drop_above=data.max_tokens if data.too_long == "drop" else 0,
        )
        self._token_bytes = longest_token_bytes(self.tokenizer) if data.too_long == "drop" else 0

    def about(self) -> AboutTemplate:
        """What the table has to say about the target's chat template."""
        return AboutTemplate(template_digest(self.tokenizer), self.masker.uses_date)

    def part(self, chunk: Chunk, reached: Callable[[int], None] = lambda line: None) -> tuple[bytes, Facts]:
        """The part that the chunk becomes, and its facts; DataError for a damaged line.

        `reached` is told the line at which each batch of rows begins, before it is rendered.
        """
        facts = Facts()
        samples: list[Sample] = []
        columns: dict[str, list[Any]] = {column.name: [] for column in _EXTRA_COLUMNS}
        for batch in self._batches(chunk, facts):
            if batch:
                reached(batch[0].where.line)
            for row, masked in zip(batch, self.masker.mask(batch), strict=True):
                facts.counts["num_extra"] += len(masked.samples) - 1
                facts.counts["num_retokenized"] += row.retokenized
                facts.counts.update(masked.counts)
                for number, result in enumerate(masked.samples):
                    fitting = result
                    if isinstance(fitting, Masked):
                        fitting = fit(fitting, self._data.max_tokens, self._data.too_long)
                    if isinstance(fitting, Refused):
                        facts.drop(str(row.where), fitting.reason, fitting.detail)
                        continue
                    assert isinstance(result, Masked)
                    num_cut_tokens = len(result.token_ids) - len(fitting.token_ids)
                    facts.counts["num_cut"] += num_cut_tokens > 0
                    facts.counts["num_cut_tokens"] += num_cut_tokens
                    samples.append(self._sample(row, fitting))
                    columns["line"].append(row.where.line)
                    columns["method"].append(METHODS.index(fitting.method))
                    columns["extra"].append(number > 0)
                    columns["straddling"].append(fitting.num_straddling)
        facts.num_samples = len(samples)
        facts.num_tokens = sum(sample.num_tokens for sample in samples)
        return _packed(facts, samples, columns), facts

    def _batches(self, chunk: Chunk, facts: Facts) -> Iterator[list[Row]]:
        """Usable rows, a bounded number of bytes at a time; the others are counted on the way."""
        batch: list[Row] = []
        num_bytes = 0
        lines = ((Where(chunk.path, n), line) for n, line in zip(chunk.numbers, chunk.lines, strict=True))
        for row in rows_of(lines):
            facts.num_input += 1
            if isinstance(row, DroppedRow):
                facts.drop(str(row.where), row.reason, row.detail)
                continue
            # Rendering and tokenising a long conversation, to drop it then, may take minutes.
            if refused := surely_too_long(_surely_shown(row), self._data.max_tokens, self._token_bytes):
                facts.drop(str(row.where), refused.reason, refused.detail)
                continue
            batch.append(row)
            num_bytes += row.num_bytes
            if len(batch) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
        yield batch

    def _sample(self, row: Row, masked: Masked) -> Sample:
        return Sample(
            masked.token_ids,
            masked.loss_spans,
            conversation_id=row.conversation_id,
            source=row.source,
            tags=row.tags,
            split=_split(row, masked, self._data.held_out),
            language=row.language or self._language(row, masked),
        )

    def _language(self, row: Row, masked: Masked) -> str:
        if not isinstance(row.content, GivenTokens | GivenTurns) or row.first_user is not None:
            return ""
        ids = masked.token_ids[:LANGUAGE_TOKENS].tolist()
        special = self.masker.special_ids
        return script_of(self.masker.decode([token for token in ids if token not in special]))


def _surely_shown(row: Row) -> Iterator[str]:
    """Texts that every rendering of the whole row has: no thoughts, which templates take out of history."""
    match row.content:
        case PlainText(text):
            yield text
        case Messages(messages):
            learned = (i for i, m in enumerate(messages) if m["role"] == "assistant" and not is_unweighted(m))
            last = max(learned, default=0)
            for message in messages[:last]:
                if message["role"] == "user":
                    yield message["content"]
            answer = messages[last]["content"]
            if not any(closing in answer for _, closing in THOUGHT_MARKERS):
                yield answer


def _split(row: Row, masked: Masked, held_out: float) -> str:
    if row.first_user is not None:
        return split_of_text(row.first_user, held_out)
    match row.content:
        case PlainText(text):
            return split_of_text(text, held_out)
        case Messages(messages):
            # What stands before the first answer: the same for all answers to it.
            first = next(i for i, message in enumerate(messages) if i and message["role"] == "assistant")
            return split_of_text("\n".join(message["content"] for message in messages[:first]), held_out)
        case GivenTurns(turns):
            prompt_ids, answer_ids = turns[0]
            ids = np.concatenate((prompt_ids, answer_ids))
            return split_of_ids(ids, ((len(prompt_ids), len(ids)),), held_out)
        case GivenTokens(token_ids, mask):
            first = int(np.argmax(mask))
            return split_of_ids(token_ids, ((first, first + 1),), held_out)


def settings_of(data: DataConfig, target: TargetConfig) -> str:
    """Digest of all that decides, beside the sources, what the table holds."""
    assert target.path is not None
    names = ("max_tokens", "too_long", "last_turn_only", "reasoning", "ignore", "template_options", "held_out")
    values = data.model_dump(mode="json", include={*names, "date"})
    return digest_bytes(canonical_json([CODE_VERSION, target_text_digest(target.path), values]))


def key_of(chunk: Chunk, settings_digest: str) -> str:
    """The name of the part that the chunk becomes."""
    content = InputDigest()
    content.update(chunk)
    # A part names dropped rows by path and line.
    place = os.fsencode(chunk.path) + b"\0" + np.array(chunk.numbers, dtype="<i8").tobytes()
    return digest_bytes(settings_digest.encode(), content.hexdigest().encode(), place)


def read_part(data: bytes | memoryview) -> tuple[Facts, pa.RecordBatch]:
    """Facts and samples of a part; ValueError when it is damaged."""
    view = memoryview(data)
    if len(view) < 24 or xxhash.xxh3_128_digest(view[16:]) != view[:16]:
        raise ValueError("not the bytes that were written")
    length = int.from_bytes(view[16:24], "little")
    facts = Facts.from_json(bytes(view[24 : 24 + length]))
    with pa.ipc.open_stream(pa.py_buffer(view[24 + length :])) as stream:
        table = stream.read_all().combine_chunks()
    batches = table.to_batches()
    return facts, batches[0] if batches else pa.RecordBatch.from_pylist([], schema=PART_SCHEMA)


def _packed(facts: Facts, samples: Sequence[Sample], columns: Mapping[str, list[Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    sink.write(bytes(16))
    text = facts.to_json()
    sink.write(len(text).to_bytes(8, "little"))
    sink.write(text)
    with pa.ipc.new_stream(sink, PART_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        if samples:
            extra = [pa.array(columns[column.name], column.type) for column in _EXTRA_COLUMNS]
            stream.write_batch(pa.RecordBatch.from_arrays([*batch_of(samples).columns, *extra], schema=PART_SCHEMA))
    data = bytearray(sink.getvalue())
    data[:16] = xxhash.xxh3_128_digest(memoryview(data)[16:])
    return bytes(data)


class PartStore:
    """The parts of one table, in a hidden directory beside it."""

    def __init__(self, table: Path) -> None:
        self.directory = table.with_name(f".{table.name}.parts")

    def path(self, key: str) -> Path:
        """Where the part of this key lies."""
        return self.directory / f"{key}.part"

    def facts(self, key: str) -> Facts | None:
        """What the part says, or None where there is none, or a damaged one."""
        try:
            return read_part(self.path(key).read_bytes())[0]
        except (OSError, ValueError, pa.ArrowException, TypeError, KeyError):
            return None

    def put(self, key: str, data: bytes) -> None:
        """Write a part, whole or not at all. It is a cache: its digest tells what a crash has left of it."""
        path = self.path(key)
        # Nobody else's: a worker of a run that was killed may still write.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(
                    f"{path}: disk full; free some space and run the same command again", path=path
                ) from None
            raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None

    def get(self, key: str) -> tuple[Facts, pa.RecordBatch]:
        """A part that was there a moment ago; DataError when it is not any more."""
        try:
            return read_part(self.path(key).read_bytes())
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{self.path(key)}: damaged: {error}; run the same command again") from None

    def remove(self) -> None:
        """Remove the parts, those of former runs too, and nothing else."""
        with contextlib.suppress(OSError):
            for file in self.directory.iterdir():
                if PART_NAME.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            self.directory.rmdir()


def printable(text: str) -> str:
    """One line without control characters, so that a row cannot write to a terminal what it likes."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= MAX_DETAIL_CHARS else line[: MAX_DETAIL_CHARS - 1] + "…"
