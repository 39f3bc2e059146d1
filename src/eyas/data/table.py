"""The sample table: `samples.parquet`, one row per sample, written in one piece and read as a stream.

Columns, in this order, none of them null:

| column | type | meaning |
|---|---|---|
| `sample_id` | fixed_size_binary(16) | xxh3-128 of the token ids, see `records.sample_id_of` |
| `num_tokens` | int32 | `T` |
| `token_ids` | list<int32> | `[T]` |
| `loss_spans` | list<int32> | supervised tokens as `start, end, start, end, …`: half-open, ascending, disjoint |
| `conversation_id` | string | |
| `source` | dictionary<int32, string> | |
| `tags` | list<string> | |
| `split` | dictionary<int32, string> | `train` or `held_out` |
| `language` | dictionary<int32, string> | as the row says, else the script of its text; empty where neither is known |

Format version 1 has no `split` and `language`: such a table is read as if they were `train` and empty.

The file's key-value metadata holds one JSON value per field of `TableMetadata`, under `eyas.<field>`. Nothing in the
file depends on time, host or path: equal rows give equal bytes. Letters: `T` tokens.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from eyas.errors import DataError, OutOfSpace
from eyas.files import fsync_path
from eyas.records import Sample, Span

TABLE_FORMAT_VERSION = 2
KEY_PREFIX = "eyas."

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.binary(16), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("loss_spans", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("tags", pa.list_(pa.field("element", pa.string(), nullable=False)), nullable=False),
        pa.field("split", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("language", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    ]
)
LATER_COLUMNS: Mapping[str, str] = {"split": "train", "language": ""}
"""Columns that version 1 does not have, and the value that stands for them."""
SCHEMA_1 = pa.schema([column for column in SCHEMA if column.name not in LATER_COLUMNS])

ROW_GROUP_TOKENS = 1 << 20
"""A row group closes at this many tokens (4 MiB): what a reader holds at one time is a small multiple of it."""
ROW_GROUP_ROWS = 1 << 14
BATCH_ROWS = 256
"""Rows per record batch where token ids are read; other columns are small and come in larger batches."""
NARROW_BATCH_ROWS = 8192
HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TableMetadata:
    """What the table says about itself."""

    tokenizer_digest: str = ""
    """xxh3-128 over `tokenizer.json`, or over all tokenizer files where there is none."""
    template_digest: str = ""
    """xxh3-128 over the text of the chat template; empty when the tokenizer has none."""
    max_tokens: int = 0
    """Tokens of the longest sample that was allowed."""
    too_long: str = "drop"
    """What became of longer ones: `drop`, `turn` or `cut`."""
    num_input: int = 0
    """Rows read: `num_input + num_extra = num_kept + sum(dropped)`."""
    num_extra: int = 0
    """Samples beyond the first of each row, made where the template rewrites history."""
    num_kept: int = 0
    """Rows of the table."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Samples that did not become a row of the table, by reason; those merged into an equal one are `duplicate`."""
    num_merged: int = 0
    """Samples merged into an earlier one with the same token ids: `dropped["duplicate"]`."""
    num_tokens: int = 0
    num_supervised: int = 0
    """Supervised tokens of all samples."""
    mask_methods: Mapping[str, int] = field(default_factory=dict)
    """How the loss masks of the kept rows came about; sums to `num_kept`. Names: `data.template.MaskMethod`."""
    num_straddling: int = 0
    """Ends of turns that fell inside a token; that token is not supervised."""
    num_turns_left_out: int = 0
    """Assistant turns that are context only: no rendering shows them as they were asked for and written, or for one of
    the reasons that follow."""
    num_turns_leading: int = 0
    """They begin the conversation and answer nothing."""
    num_turns_empty: int = 0
    num_turns_without_calls: int = 0
    """The template does not show their tool calls."""
    num_turns_unweighted: int = 0
    """Their message says `weight: 0`."""
    num_tools_not_shown: int = 0
    """Conversations with `tools` that make no difference to the prompt."""
    num_tool_results_not_shown: int = 0
    """Messages of tools whose content the template does not show."""
    num_rewritten: int = 0
    """Conversations that needed more than one rendering, because the template rewrites history."""
    num_repeated_tokens: int = 0
    """Unsupervised tokens of the kept extra samples: the price of the rewriting."""
    num_turns_composed: int = 0
    """Turns put together of their prompt and their own words, because no rendering has both."""
    num_turns_changed: int = 0
    """Turns whose text the template changes (trims, say): it is supervised as the template shows it."""
    num_thoughts_not_shown: int = 0
    """Of these, turns that are supervised without their thoughts: the template does not show those."""
    num_turns_stopped_earlier: int = 0
    """Of these, turns that are supervised up to their first stop token: the row has text after it."""
    num_turns_without_thought: int = 0
    """Turns to which the template adds an empty thought, supervised as if the target had written it."""
    last_turn_only: bool = False
    num_turns_skipped: int = 0
    """Assistant turns before the last one, which `last_turn_only` made context."""
    reasoning: bool = True
    num_reasoning_tokens: int = 0
    """Tokens that are context because `reasoning` is off."""
    ignore: tuple[str, ...] = ()
    num_ignored_tokens: int = 0
    """Tokens that are context because they are part of a match of `ignore`."""
    num_cut: int = 0
    """Samples that were shortened to `max_tokens`."""
    num_cut_tokens: int = 0
    """Tokens which they lost."""
    num_retokenized: int = 0
    """Rows that say that their answers were tokenised again: the server gave no token ids."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template was given beside the messages."""
    date: str = ""
    """Today, as the template was told; empty when it does not ask."""
    held_out: float = 0.0
    """Share of the conversations that was to be held out."""
    splits: Mapping[str, int] = field(default_factory=dict)
    """Rows of the table by `split`."""
    input_digest: str = ""
    """xxh3-128 of the sources: names and lines."""
    settings_digest: str = ""
    """xxh3-128 of everything else that decides what the table holds."""
    format_version: int = TABLE_FORMAT_VERSION

    def to_keys(self) -> dict[str, str]:
        """Key-value metadata as the file stores it."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {KEY_PREFIX + name: json.dumps(_plain(value), sort_keys=True) for name, value in values}

    @classmethod
    def from_keys(cls, keys: Mapping[str, str]) -> TableMetadata:
        """Inverse of `to_keys`; keys that are not ours are ignored, fields that came later get their default.

        ValueError when a count that every version has is missing, or a value is not JSON.
        """
        missing = [name for name in ("num_kept", "num_tokens", "num_supervised") if KEY_PREFIX + name not in keys]
        if missing:
            raise ValueError(f"metadata lacks {', '.join(KEY_PREFIX + name for name in missing)}")
        values = {f.name: json.loads(keys[name]) for f in fields(cls) if (name := KEY_PREFIX + f.name) in keys}
        if isinstance(values.get("ignore"), list):
            values["ignore"] = tuple(values["ignore"])
        return cls(**values)


class TableWriter:
    """Writes a table under a temporary name beside `path`; only `publish` makes it visible, in one rename.

    A context manager: left without `publish`, by an error or on purpose, it removes the temporary file and whatever
    was at `path` before stays untouched. After a kill the temporary file remains; the next writer takes it over.
    Memory: one row group. DataError when another process writes the same table, OutOfSpace when the disk is full.
    """

    def __init__(self, path: Path, *, stage: str = "tmp") -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{stage}")
        self.num_rows = 0
        self.num_tokens = 0
        self.num_supervised = 0
        self._samples: list[Sample] = []
        self._pending_tokens = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(_open_exclusive(self.temporary), "wb")
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from None
        self._parquet: pq.ParquetWriter | None = pq.ParquetWriter(
            self._file,
            SCHEMA,
            compression="zstd",
            version="2.6",
            use_dictionary=["source", "tags.list.element", "split", "language"],
            # The high bytes of token ids are nearly all zero: split by byte, zstd leaves a fifth less.
            use_byte_stream_split=["token_ids.list.element"],
            write_statistics=["num_tokens", "source", "split"],
            write_page_checksum=True,
        )

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            # The file goes away: whatever the Parquet footer has to complain about does not matter any more.
            with contextlib.suppress(OSError, pa.ArrowException):
                self._close_parquet()
            self.temporary.unlink(missing_ok=True)
            # Closing drops the lock, so it comes last: nobody else may own the name while we unlink it.
            with contextlib.suppress(OSError):
                self._file.close()

    def append(self, sample: Sample) -> None:
        """Add a row. ValueError for a sample without tokens, without supervised tokens or with impossible spans."""
        _check_spans(sample.loss_spans, sample.num_tokens)
        self._samples.append(sample)
        self._pending_tokens += sample.num_tokens
        self.num_rows += 1
        self.num_tokens += sample.num_tokens
        self.num_supervised += sample.num_supervised
        if self._pending_tokens >= ROW_GROUP_TOKENS or len(self._samples) >= ROW_GROUP_ROWS:
            self._flush()

    def seal(self) -> None:
        """End the rows without making the table visible; `batches` can then read them back."""
        self._flush()
        with _disk_errors(self.path):
            self._close_parquet()
            self._file.flush()

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The sealed rows, streamed, in the order in which they were written."""
        return _stream(self.temporary, columns)

    def publish(self, metadata: TableMetadata) -> None:
        """Write the metadata, flush to disk and rename to `path`. ValueError when the counts are not those of the rows.

        fsync before the rename, and of the directory after it: a name that survives a crash must have its bytes.
        """
        if metadata.num_kept != self.num_rows:
            raise ValueError(f"metadata names {metadata.num_kept} rows, {self.num_rows} were written")
        self._flush()
        with _disk_errors(self.path):
            if self._parquet is None:
                raise ValueError("the rows are sealed")
            self._parquet.add_key_value_metadata(metadata.to_keys())
            self._close_parquet()
            self._file.flush()
            os.fsync(self._file.fileno())
            self.temporary.replace(self.path)
            fsync_path(self.path.parent)
            self._file.close()

    def _flush(self) -> None:
        if not self._samples:
            return
        if self._parquet is None:
            raise ValueError("the rows are sealed")
        with _disk_errors(self.path):
            self._parquet.write_batch(batch_of(self._samples), row_group_size=len(self._samples))
        self._samples = []
        self._pending_tokens = 0

    def _close_parquet(self) -> None:
        parquet, self._parquet = self._parquet, None
        if parquet is not None:
            parquet.close()


class SampleTable:
    """A sample table on disk, read as a stream: memory does not depend on the number of rows."""

    def __init__(self, path: Path, metadata: TableMetadata, identity: tuple[int, ...]) -> None:
        self.path = path
        self.metadata = metadata
        self._identity = identity

    @classmethod
    def open(cls, path: Path) -> SampleTable:
        """Read the footer only. DataError, one line that names the file: missing, empty, not a table, newer version."""
        try:
            identity = _identity(path)
            if path.is_dir():
                raise DataError(f"{path}: is a directory, not a sample table; give the path of samples.parquet")
            if path.stat().st_size == 0:
                raise DataError(f"{path}: empty file; run 'eyas prepare' again")
            with pq.ParquetFile(path, pre_buffer=False) as file:
                return cls(path, _metadata_of(path, file), identity)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; 'eyas prepare' writes it") from None
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: not a readable Parquet file: {_one_line(error)}") from None

    @property
    def num_rows(self) -> int:
        return self.metadata.num_kept

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self.metadata.num_tokens

    @cached_property
    def digest(self) -> str:
        """xxh3-128 over the bytes of the file, 32 hex digits; reads the file once."""
        h = xxhash.xxh3_128()
        try:
            with self.path.open("rb") as file:
                self._check_unchanged()
                while block := file.read(HASH_BLOCK_BYTES):
                    h.update(block)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        return h.hexdigest()

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows in order, as record batches with just the `columns` asked for; DataError where bytes are damaged."""
        self._check_unchanged()
        yield from _stream(self.path, columns)

    def samples(self) -> Iterator[Sample]:
        """All rows in order, as samples that own their memory."""
        for batch in self.batches():
            yield from samples_of(batch)

    def _check_unchanged(self) -> None:
        # The path is opened anew for each pass; a table that was replaced meanwhile has other rows and another digest.
        try:
            unchanged = _identity(self.path) == self._identity
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        if not unchanged:
            raise DataError(f"{self.path}: was replaced while in use; start again")


def samples_of(batch: pa.RecordBatch) -> Iterator[Sample]:
    """The rows of a batch that has all columns, as samples that own their memory."""
    ids = batch.column("sample_id").to_pylist()
    conversation_ids = batch.column("conversation_id").to_pylist()
    sources = batch.column("source").to_pylist()
    tags = batch.column("tags").to_pylist()
    splits = batch.column("split").to_pylist()
    languages = batch.column("language").to_pylist()
    token_ids = _ragged(batch.column("token_ids"))
    loss_spans = _ragged(batch.column("loss_spans"))
    for i, (tokens, spans) in enumerate(zip(token_ids, loss_spans, strict=True)):
        yield Sample(
            # A copy: a view would keep the whole batch alive as long as one of its samples.
            token_ids=tokens.copy(),
            loss_spans=unflatten_spans(spans),
            sample_id=ids[i].hex(),
            conversation_id=conversation_ids[i],
            source=sources[i],
            tags=tuple(tags[i]),
            split=splits[i],
            language=languages[i],
        )


def flatten_spans(spans: Iterable[Span]) -> list[int]:
    """`start, end, start, end, …` as the column `loss_spans` holds them."""
    return [edge for span in spans for edge in span]


def unflatten_spans(edges: npt.NDArray[np.int32]) -> tuple[Span, ...]:
    """Inverse of `flatten_spans`."""
    values = edges.tolist()
    return tuple(zip(values[::2], values[1::2], strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _check_spans(spans: tuple[Span, ...], num_tokens: int) -> None:
    edges = flatten_spans(spans)
    if not edges:
        raise ValueError("a sample without supervised tokens cannot enter the table")
    ascending = all(start < end for start, end in spans) and all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    if not ascending or edges[0] < 0 or edges[-1] > num_tokens:
        raise ValueError(f"loss spans {list(spans)} are not ascending, disjoint and inside 0..{num_tokens}")


def _lists(values: npt.NDArray[np.int32], lengths: Sequence[int], name: str) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=SCHEMA.field(name).type)


def batch_of(samples: Sequence[Sample]) -> pa.RecordBatch:
    """Inverse of `samples_of`; at least one sample."""
    lengths = [sample.num_tokens for sample in samples]
    edges = [flatten_spans(sample.loss_spans) for sample in samples]
    flat_edges = np.array([edge for row in edges for edge in row], dtype=np.int32)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([bytes.fromhex(sample.sample_id) for sample in samples], pa.binary(16)),
            pa.array(lengths, pa.int32()),
            _lists(np.concatenate([sample.token_ids for sample in samples]), lengths, "token_ids"),
            _lists(flat_edges, [len(row) for row in edges], "loss_spans"),
            pa.array([sample.conversation_id for sample in samples], pa.string()),
            pa.array([sample.source for sample in samples], pa.string()).dictionary_encode(),
            pa.array([list(sample.tags) for sample in samples], SCHEMA.field("tags").type),
            pa.array([sample.split for sample in samples], pa.string()).dictionary_encode(),
            pa.array([sample.language for sample in samples], pa.string()).dictionary_encode(),
        ],
        schema=SCHEMA,
    )


def _ragged(column: pa.Array) -> Iterator[npt.NDArray[np.int32]]:
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield values[start:end]


def _stream(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    unknown = [name for name in columns or () if name not in SCHEMA.names]
    if unknown:
        raise ValueError(f"no such column: {', '.join(unknown)}")
    wide = columns is None or "token_ids" in columns
    try:
        # No read-ahead over row groups: pre-buffering holds every column chunk that it has read.
        with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
            stored = [name for name in columns or SCHEMA.names if name in file.schema_arrow.names]
            for batch in file.iter_batches(
                batch_size=BATCH_ROWS if wide else NARROW_BATCH_ROWS,
                # Without any column a batch would not know how many rows it has.
                columns=stored or ["num_tokens"],
                use_threads=False,
            ):
                yield _completed(batch, columns or SCHEMA.names)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: damaged: {_one_line(error)}; run 'eyas prepare' again") from None


def _completed(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The batch with the columns asked for, those that came later filled in."""
    if batch.schema.names == list(names):
        return batch
    columns = []
    for name in names:
        if name in batch.schema.names:
            columns.append(batch.column(name))
        else:
            zeros = pa.array(np.zeros(batch.num_rows, dtype=np.int32))
            columns.append(pa.DictionaryArray.from_arrays(zeros, pa.array([LATER_COLUMNS[name]], pa.string())))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([SCHEMA.field(name) for name in names]))


def _metadata_of(path: Path, file: pq.ParquetFile) -> TableMetadata:
    prefix = KEY_PREFIX.encode()
    stored = (file.metadata.metadata or {}).items()
    keys = {
        key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for key, value in stored
        if key.startswith(prefix)
    }
    if KEY_PREFIX + "format_version" not in keys:
        raise DataError(f"{path}: a Parquet file, but not a sample table; 'eyas prepare' writes one")
    try:
        version = json.loads(keys[KEY_PREFIX + "format_version"])
        if not isinstance(version, int) or version > TABLE_FORMAT_VERSION:
            raise DataError(
                f"{path}: sample table format {version}, this eyas reads up to {TABLE_FORMAT_VERSION}; "
                "update eyas or run 'eyas prepare' again"
            )
        metadata = TableMetadata.from_keys(keys)
    except ValueError as error:
        raise DataError(f"{path}: damaged sample table: {error}") from None
    found = file.schema_arrow.remove_metadata()
    expected = SCHEMA_1 if version == 1 else SCHEMA
    if not found.equals(expected):
        differing = [
            name for name in expected.names if name not in found.names or found.field(name) != expected.field(name)
        ]
        what = ", ".join(differing) if differing else "further columns"
        raise DataError(f"{path}: not the columns of a sample table (differs in: {what}); run 'eyas prepare' again")
    if file.metadata.num_rows != metadata.num_kept:
        raise DataError(f"{path}: {file.metadata.num_rows} rows, its metadata says {metadata.num_kept}")
    return metadata


def _identity(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _open_exclusive(path: Path) -> int:
    """Open `path` for writing, emptied, private to the user and locked; whoever holds the lock owns the name."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(fd, path)
            # Between open and lock its last owner may have renamed or removed this file: then it is not ours to empty.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    os.ftruncate(fd, 0)
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{path}: another 'eyas prepare' is writing this table; wait for it or stop it") from None
    except OSError as error:
        # Some shared file systems have no locks; the rename at the end is atomic there too.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"{path}: disk full; free some space and run the same command again", path=path) from None
        raise DataError(f"{path}: cannot be written: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
