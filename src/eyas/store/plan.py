"""The plan on disk: an append-only list of segments, each a Parquet file with one row group per shard.

A segment carries the token ids themselves, in plan order, so that capture streams it and needs nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eyas.errors import ShardCorrupt, StoreError
from eyas.records import FORMAT_VERSION, TokenIds, canonical_json, digest_bytes, is_digest, sample_id_of, shard_id_of
from eyas.store.files import Files, link_if_absent, raise_store_error, temporary_name
from eyas.store.layout import Layout

MAX_SHARD_SAMPLES = 4_096
"""Keeps headers and records small when samples are tiny."""

SCHEMA = pa.schema([("sample_id", pa.binary(16)), ("num_tokens", pa.int32()), ("token_ids", pa.large_list(pa.int32()))])
_HEAD = b"eyas.segment"
_SHARDS = b"eyas.shards"
_FORMAT = b"eyas.format"
_DIGEST = b"eyas.digest"
_BROKEN = (
    pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError,
    MemoryError,
)  # fmt: skip
"""What a damaged Parquet file may raise."""


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """Why a segment exists and what it is a function of."""

    number: int
    kind: str
    """`capture`, `retry` or `merge`."""
    attempt: int
    """0, or the how-manieth retry this is: it enters the shard ids, so that a retry never meets an old record."""
    seed: int
    shard_tokens: int
    samples_digest: str
    """Digest of the sample table that it was planned from."""
    selection: dict[str, Any]
    """The subset that was asked for."""
    num_samples: int = 0
    num_new: int = 0
    """Samples that no earlier segment covers."""
    num_tokens: int = 0
    num_new_tokens: int = 0
    max_tokens: int = 0
    """Tokens of the longest sample."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard of a segment: where it stands and how large it is."""

    segment: int
    row_group: int
    shard_id: str
    num_samples: int
    num_tokens: int


def cut(samples: Iterable[tuple[str, TokenIds]], shard_tokens: int) -> Iterator[list[tuple[str, TokenIds]]]:
    """Cut ordered samples into shards: a shard ends before the sample that would take it past `shard_tokens`."""
    shard: list[tuple[str, TokenIds]] = []
    tokens = 0
    for sample in samples:
        if shard and (tokens + len(sample[1]) > shard_tokens or len(shard) >= MAX_SHARD_SAMPLES):
            yield shard
            shard, tokens = [], 0
        shard.append(sample)
        tokens += len(sample[1])
    if shard:
        yield shard


class Segment:
    """One segment, open for reading. Memory is that of its list of shards, not of its samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path, memory_map=False, pre_buffer=False)
            self.head, shards = _parse(self._file.metadata.metadata or {}, path)
            self.shards = [
                ShardPlan(self.head.number, i, shard_id, num_samples, num_tokens)
                for i, (shard_id, num_samples, num_tokens) in enumerate(shards)
            ]
            if len(self.shards) != self._file.metadata.num_row_groups or path.name != f"{self.head.number:05d}.parquet":
                raise ValueError("it has other row groups, or another number, than it says")
        except FileNotFoundError:
            raise StoreError(f"{path}: no such segment of the plan", path=path) from None
        except _BROKEN as error:
            raise ShardCorrupt(
                f"{path}: not a segment of a plan ({error}); restore it from a copy".replace("\n", " "), path=path
            ) from None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self, shard: ShardPlan) -> list[tuple[str, TokenIds]]:
        """`(sample_id, token_ids)` of one shard, in plan order, checked against the shard's id."""
        table = self._rows(shard, ["sample_id", "num_tokens", "token_ids"])
        ids = self._ids(table, shard)
        lists = table["token_ids"].combine_chunks()
        if lists.values.null_count:
            raise ShardCorrupt(f"{self.path}: a token id of shard {shard.shard_id} is missing", path=self.path)
        values = lists.values.to_numpy()
        offsets = lists.offsets.to_numpy()
        samples = [
            (sample_id, np.array(values[a:b], dtype=np.int32))
            for sample_id, a, b in zip(ids, offsets[:-1], offsets[1:], strict=True)
        ]
        for (sample_id, token_ids), num_tokens in zip(samples, table["num_tokens"].to_pylist(), strict=True):
            if len(token_ids) != num_tokens or sample_id_of(token_ids) != sample_id:
                raise ShardCorrupt(f"{self.path}: token ids of sample {sample_id} differ from its id", path=self.path)
        return samples

    def ids_of(self, shard: ShardPlan) -> tuple[list[str], list[int]]:
        """Sample ids and token counts of one shard, in plan order, without the token ids."""
        table = self._rows(shard, ["sample_id", "num_tokens"])
        return self._ids(table, shard), table["num_tokens"].to_pylist()

    def _rows(self, shard: ShardPlan, columns: list[str]) -> pa.Table:
        try:
            table = self._file.read_row_group(shard.row_group, columns=columns, use_threads=False)
            if table.schema != pa.schema([SCHEMA.field(name) for name in columns]):
                raise ValueError(f"its columns are {table.schema.names}")
            table.validate(full=True)
            if any(column.null_count for column in table.columns):
                raise ValueError("a value is missing")
        except _BROKEN as error:
            raise ShardCorrupt(
                f"{self.path}: shard {shard.shard_id} cannot be read ({error}); restore the file from a copy".replace(
                    "\n", " "
                ),
                path=self.path,
            ) from None
        return table

    def _ids(self, table: pa.Table, shard: ShardPlan) -> list[str]:
        ids = [value.hex() for value in table["sample_id"].to_pylist()]
        counts = len(ids), pc.sum(table["num_tokens"]).as_py()
        if shard_id_of(ids, self.head.attempt) != shard.shard_id or counts != (shard.num_samples, shard.num_tokens):
            raise ShardCorrupt(f"{self.path}: samples of shard {shard.shard_id} are not those planned", path=self.path)
        return ids


def open_segments(layout: Layout) -> list[Segment]:
    """The plan so far, in order."""
    return [Segment(path) for path in layout.segments()]


def _parse(metadata: dict[bytes, bytes], path: Path) -> tuple[SegmentHead, list[tuple[str, int, int]]]:
    version, head, shards = (metadata[key] for key in (_FORMAT, _HEAD, _SHARDS))
    if digest_bytes(version, head, shards) != metadata[_DIGEST].decode():
        raise ValueError("its own digest does not fit its contents")
    if int(version) > FORMAT_VERSION:
        raise StoreError(f"{path}: made by a newer eyas (format {int(version)}); use that one", path=path)
    known = {field.name: field.type for field in dataclasses.fields(SegmentHead)}
    body = {name: value for name, value in json.loads(head).items() if name in known}
    types = {"int": int, "str": str, "dict[str, Any]": dict}
    if any(type(value) is not types[str(known[name])] for name, value in body.items()):
        raise ValueError("its head mistypes a key")
    listing = [(shard_id, num_samples, num_tokens) for shard_id, num_samples, num_tokens in json.loads(shards)]
    if not all(type(s) is str and is_digest(s) and type(n) is type(t) is int for s, n, t in listing):
        raise ValueError("its list of shards mistypes an entry")
    return SegmentHead(**body), listing


def write_segment(
    files: Files, path: Path, head: SegmentHead, shards: Iterable[tuple[list[tuple[str, TokenIds]], list[bool]]]
) -> SegmentHead | None:
    """Write a segment shard by shard; `(samples, is each new)` for each. None, and no file, when there are no samples.

    Returns the head with its counts. The name appears complete or not at all; an existing one is an error.
    """
    temporary = temporary_name(path)
    try:
        files.close(files.create(temporary))
        full = _write_parquet(temporary, head, shards)
        if not full.num_samples:
            files.unlink(temporary)
            return None
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        files.fsync(fd)
        files.close(fd)
        won = link_if_absent(files, temporary, path)
        files.sync_directory(path.parent)
    except BaseException as error:
        # Planning takes minutes for a large table and may be stopped, or be refused at its last sample.
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        if isinstance(error, OSError):
            raise_store_error(error, path, "planning")
        raise
    if not won:
        raise StoreError(f"{path}: another process planned this segment; run the command again", path=path)
    return full


def _write_parquet(
    path: Path, head: SegmentHead, shards: Iterable[tuple[list[tuple[str, TokenIds]], list[bool]]]
) -> SegmentHead:
    listing: list[tuple[str, int, int]] = []
    num_new = num_new_tokens = max_tokens = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=False) as out:
        for samples, new in shards:
            lengths = [len(token_ids) for _, token_ids in samples]
            out.write_table(_table(samples), row_group_size=len(samples))
            shard_id = shard_id_of((sample_id for sample_id, _ in samples), head.attempt)
            listing.append((shard_id, len(samples), sum(lengths)))
            max_tokens = max(max_tokens, *lengths)
            num_new += sum(new)
            num_new_tokens += sum(n for n, is_new in zip(lengths, new, strict=True) if is_new)
        full = dataclasses.replace(
            head,
            num_samples=sum(n for _, n, _ in listing),
            num_new=num_new,
            num_tokens=sum(n for _, _, n in listing),
            num_new_tokens=num_new_tokens,
            max_tokens=max_tokens,
        )
        version = str(FORMAT_VERSION).encode()
        head_json, listing_json = canonical_json(dataclasses.asdict(full)), canonical_json(listing)
        digest = digest_bytes(version, head_json, listing_json)
        out.add_key_value_metadata({_FORMAT: version, _HEAD: head_json, _SHARDS: listing_json, _DIGEST: digest})
    return full


def _table(samples: list[tuple[str, TokenIds]]) -> pa.Table:
    assert all(is_digest(sample_id) for sample_id, _ in samples)
    lengths = np.array([len(token_ids) for _, token_ids in samples], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.concatenate([token_ids for _, token_ids in samples])
    return pa.table(
        [
            pa.array([bytes.fromhex(sample_id) for sample_id, _ in samples], type=pa.binary(16)),
            pa.array(lengths.astype(np.int32)),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, type=pa.int32())),
        ],
        schema=SCHEMA,
    )
