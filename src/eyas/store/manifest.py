"""The manifest: one table over all records, so that a store of a million samples opens at once. Only a cache.

Truth is in the records; the manifest remembers each by size and modification time and is rebuilt where they differ,
or where its own digest does not fit.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import ShardCorrupt, ShardMissing, StoreError
from eyas.records import CaptureSpec, digest_bytes
from eyas.store import record as records
from eyas.store.files import temporary_name
from eyas.store.layout import Layout
from eyas.store.record import ShardRecord

_VERSION = 1
_SHARDS = b"eyas.shards"
_DIGEST = b"eyas.digest"
_BROKEN = (OSError, pa.ArrowException, KeyError, IndexError, TypeError, ValueError, RecursionError, MemoryError)
"""What damage to a cache may raise; each of them means that it is rebuilt."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """What a manifest knows of one shard without opening its record."""

    shard_id: str
    record_bytes: int
    record_mtime_ns: int
    payload_digest: str | None
    payload_bytes: int
    num_samples: int
    num_tokens: int
    rejects: tuple[tuple[str, str], ...]
    """`(sample_id, reason)`."""
    committed_at: float
    released: bool
    plain: bool
    """Raw, every row, one part for each field: places follow from the token counts alone."""


@dataclass(slots=True)
class _Rows:
    """Columns of the samples of one shard."""

    ids: npt.NDArray[np.uint8]  # [n, 16]
    num_tokens: npt.NDArray[np.int32]  # [n]
    offset: npt.NDArray[np.int64]  # [n], start of the sample's block in the payload
    digests: npt.NDArray[np.uint8]  # [n, 16 * fields]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All committed samples, ordered by shard id and then by place in the shard."""

    shards: tuple[ShardEntry, ...]
    ids: npt.NDArray[np.uint8]
    """`[N, 16]`"""
    num_tokens: npt.NDArray[np.int32]
    shard: npt.NDArray[np.int32]
    """`[N]` index into `shards`"""
    offset: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint8]
    """`[N, 16 * fields]` digests of the stored bytes, field by field."""


def load(layout: Layout, spec: CaptureSpec) -> Manifest:
    """The manifest of what is committed now; what a cache lacks is read from the records, and the cache renewed.

    Raises as `records.read` does, and ShardCorrupt where two records name the same sample.
    """
    cached = _read_cache(layout.manifest, spec)
    known = {entry.shard_id: i for i, entry in enumerate(cached.shards)} if cached else {}
    current = _stat_records(layout)
    if cached and current == {e.shard_id: (e.record_bytes, e.record_mtime_ns) for e in cached.shards}:
        return cached
    bounds = _bounds(cached) if cached else np.zeros(1, np.int64)
    entries: list[ShardEntry] = []
    rows: list[_Rows] = []
    for shard_id in sorted(current):
        i = known.get(shard_id)
        entry = cached.shards[i] if cached and i is not None else None
        if cached and i is not None and entry and (entry.record_bytes, entry.record_mtime_ns) == current[shard_id]:
            part = slice(bounds[i], bounds[i + 1])
            entries.append(entry)
            rows.append(_Rows(cached.ids[part], cached.num_tokens[part], cached.offset[part], cached.digests[part]))
        else:
            path = layout.record(shard_id)
            record = records.read(path)
            records.require_spec(record, spec, path)
            entries.append(_entry(record, *current[shard_id]))
            rows.append(_rows(record, spec))
    manifest = _assemble(entries, rows, len(spec.fields))
    _require_distinct(manifest, layout)
    _write_cache(layout.manifest, manifest, spec)
    return manifest


def id_keys(ids: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """`[N, 2]`: sample ids as big-endian numbers, which sort as their hex does."""
    return ids.view(">u8").reshape(-1, 2).astype(np.uint64)


def _require_distinct(manifest: Manifest, layout: Layout) -> None:
    keys = id_keys(manifest.ids)
    high = np.sort(keys[:, 0])
    if not (high[1:] == high[:-1]).any():
        return
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    twice = np.flatnonzero((keys[order[1:]] == keys[order[:-1]]).all(axis=1))
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2])
        paths = [layout.record(manifest.shards[manifest.shard[i]].shard_id) for i in (first, second)]
        raise ShardCorrupt(
            f"{paths[1]}: sample {bytes(manifest.ids[first]).hex()} is committed by {paths[0].name} too; "
            f"run 'eyas verify --repair {layout.root}'",
            path=paths[1],
        )


def summaries(layout: Layout, spec: CaptureSpec) -> list[ShardEntry]:
    """The shards alone, for counting: no memory per sample beyond one record at a time. Writes no cache.

    Raises as `records.read` does, and ShardMissing or ShardCorrupt where a payload is not there in full.
    """
    found, problems = survey(layout, spec)
    if problems:
        raise problems[0]
    return found


def survey(layout: Layout, spec: CaptureSpec) -> tuple[list[ShardEntry], list[StoreError]]:
    """As `summaries`, but what is wrong is listed: a shard whose record cannot be read is left out of the entries."""
    current = _stat_records(layout)
    listing = _read_listing(layout.manifest, spec)
    cached = {entry.shard_id: entry for entry in listing[0]} if listing else {}
    found: list[ShardEntry] = []
    problems: list[StoreError] = []
    for shard_id in sorted(current):
        entry = cached.get(shard_id)
        if entry is None or (entry.record_bytes, entry.record_mtime_ns) != current[shard_id]:
            path = layout.record(shard_id)
            try:
                record = records.read(path)
                records.require_spec(record, spec, path)
            except StoreError as error:
                problems.append(error)
                continue
            entry = _entry(record, *current[shard_id])
        found.append(entry)
    return found, problems + _incomplete_payloads(layout, found)


def _incomplete_payloads(layout: Layout, entries: list[ShardEntry]) -> list[StoreError]:
    """Payloads that are gone or of another size: one look at each name, none at the bytes."""
    problems: list[StoreError] = []
    for entry in entries:
        if entry.payload_digest is None or entry.released:
            continue
        path = layout.payload(entry.shard_id, entry.payload_digest)
        hint = f"run 'eyas verify --repair {layout.root}', then capture again"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            problems.append(ShardMissing(f"{path}: payload is gone; {hint}", path=path))
        else:
            if size != entry.payload_bytes:
                message = f"{path}: {size} bytes, its record says {entry.payload_bytes}; {hint}"
                problems.append(ShardCorrupt(message, path=path))
    return problems


def _stat_records(layout: Layout) -> dict[str, tuple[int, int]]:
    found = {}
    for shard_id in layout.record_ids():
        try:
            stat = layout.record(shard_id).stat()
        except FileNotFoundError:
            continue  # dropped by a repair since the directory was listed
        found[shard_id] = (stat.st_size, stat.st_mtime_ns)
    return found


def _entry(record: ShardRecord, record_bytes: int, record_mtime_ns: int) -> ShardEntry:
    return ShardEntry(
        shard_id=record.shard_id,
        record_bytes=record_bytes,
        record_mtime_ns=record_mtime_ns,
        payload_digest=record.payload_digest,
        payload_bytes=record.payload_bytes,
        num_samples=len(record.sample_ids),
        num_tokens=record.total_tokens,
        rejects=tuple((r.sample_id, r.reason) for r in record.rejects),
        committed_at=record.committed_at,
        released=record.released,
        plain=records.is_plain(record),
    )


def _rows(record: ShardRecord, spec: CaptureSpec) -> _Rows:
    n, num_fields = len(record.sample_ids), len(spec.fields)
    if n == 0:
        return _no_rows(num_fields)
    digests = np.zeros((n, num_fields, 16), np.uint8)
    offset = np.zeros(n, np.int64)
    for f, entry in enumerate(record.fields.values()):
        part = next(iter(entry.parts.values()))
        digests[:, f] = np.frombuffer(bytes.fromhex("".join(part.digest)), np.uint8).reshape(n, 16)
        if f == 0:
            offset = np.array(part.offset, dtype=np.int64)
    ids = np.frombuffer(bytes.fromhex("".join(record.sample_ids)), np.uint8).reshape(n, 16)
    return _Rows(ids, np.array(record.num_tokens, np.int32), offset, digests.reshape(n, -1))


def _no_rows(num_fields: int) -> _Rows:
    return _Rows(
        np.zeros((0, 16), np.uint8),
        np.zeros(0, np.int32),
        np.zeros(0, np.int64),
        np.zeros((0, 16 * num_fields), np.uint8),
    )


def _assemble(entries: list[ShardEntry], rows: list[_Rows], num_fields: int) -> Manifest:
    rows = [_no_rows(num_fields), *rows]
    counts = [entry.num_samples for entry in entries]
    return Manifest(
        shards=tuple(entries),
        ids=np.concatenate([r.ids for r in rows]),
        num_tokens=np.concatenate([r.num_tokens for r in rows]),
        shard=np.repeat(np.arange(len(entries), dtype=np.int32), counts),
        offset=np.concatenate([r.offset for r in rows]),
        digests=np.concatenate([r.digests for r in rows]),
    )


def _bounds(manifest: Manifest) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([e.num_samples for e in manifest.shards], dtype=np.int64)]).astype(np.int64)


def _write_cache(path: Path, manifest: Manifest, spec: CaptureSpec) -> None:
    """Best effort: a reader without the right to write does without."""
    width = manifest.digests.shape[1]
    table = pa.table(
        {
            "sample_id": _fixed(manifest.ids, 16),
            "num_tokens": pa.array(manifest.num_tokens),
            "offset": pa.array(manifest.offset),
            "digests": _fixed(manifest.digests, width),
        }
    )
    body = {
        "version": _VERSION,
        "fingerprint": spec.fingerprint,
        "columns_digest": _columns_digest(manifest),
        "shards": [asdict(entry) for entry in manifest.shards],
    }
    listing = json.dumps(body).encode()
    table = table.replace_schema_metadata({_SHARDS: listing, _DIGEST: digest_bytes(listing)})
    temporary = temporary_name(path)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            pq.write_table(table, out, compression="none", use_dictionary=False, write_statistics=False)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _columns_digest(rows: _Rows | Manifest) -> str:
    columns = (rows.ids, rows.num_tokens, rows.offset, rows.digests)
    return digest_bytes(*(np.ascontiguousarray(column).view(np.uint8).data for column in columns if column.size))


def _fixed(values: npt.NDArray[np.uint8], width: int) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def _read_listing(path: Path, spec: CaptureSpec) -> tuple[list[ShardEntry], str] | None:
    """The shards of a cache and the digest of its columns; None where it is absent, damaged or about another spec."""
    try:
        metadata = pq.read_schema(path).metadata
        if digest_bytes(metadata[_SHARDS]).encode() != metadata[_DIGEST]:
            return None
        body = json.loads(metadata[_SHARDS])
        if (body["version"], body["fingerprint"]) != (_VERSION, spec.fingerprint):
            return None
        entries = [ShardEntry(**{**e, "rejects": tuple((r[0], r[1]) for r in e["rejects"])}) for e in body["shards"]]
        return entries, body["columns_digest"]
    except _BROKEN:
        return None


def _read_cache(path: Path, spec: CaptureSpec) -> Manifest | None:
    listing = _read_listing(path, spec)
    if listing is None:
        return None
    entries, columns_digest = listing
    try:
        table = pq.read_table(path, memory_map=False)
        rows = _Rows(
            _bytes_of(table["sample_id"], 16),
            table["num_tokens"].to_numpy().astype(np.int32, casting="safe", copy=False),
            table["offset"].to_numpy().astype(np.int64, casting="safe", copy=False),
            _bytes_of(table["digests"], 16 * len(spec.fields)),
        )
    except _BROKEN:
        return None
    n = sum(entry.num_samples for entry in entries)
    if not n == len(rows.ids) == len(rows.num_tokens) == len(rows.offset) == len(rows.digests):
        return None
    if _columns_digest(rows) != columns_digest:
        return None
    shard = np.repeat(np.arange(len(entries), dtype=np.int32), [entry.num_samples for entry in entries])
    return Manifest(tuple(entries), rows.ids, rows.num_tokens, shard, rows.offset, rows.digests)


def _bytes_of(column: pa.ChunkedArray, width: int) -> npt.NDArray[np.uint8]:
    """`[N, width]` bytes of a fixed-size column."""
    pieces = [
        np.frombuffer(chunk.buffers()[1], np.uint8)[chunk.offset * width : (chunk.offset + len(chunk)) * width]
        for chunk in column.chunks
        if len(chunk)
    ]
    flat = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
    return flat.reshape(-1, width)
