"""What is to be captured, in which order, in which shards: segments are appended, never changed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from eyas.config import CaptureConfig
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, DataError
from eyas.log import human_bytes
from eyas.records import DIGEST_HEX, CaptureSpec, Provenance, TokenIds
from eyas.store.manifest import ShardEntry
from eyas.store.plan import Segment, SegmentHead, cut, write_segment
from eyas.store.record import FieldEntry, Part, ShardRecord, to_bytes
from eyas.store.writer import DataSetWriter

DEFAULT_SHARD_BYTES = 1 << 30
_BUCKET_ROWS = 16_384
_BUCKET_TOKENS = 4_000_000
_KEY = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """The subset of a sample table that is asked for."""

    limit: int | None
    tags: tuple[str, ...]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, capture: CaptureConfig) -> Selection:
        return cls(capture.limit, tuple(sorted(capture.tags)), tuple(sorted(capture.sources)))


def shard_tokens(capture: CaptureConfig, spec: CaptureSpec) -> int:
    """Tokens in a shard: as configured, else as many as fill 1 GiB."""
    return capture.shard_tokens or max(1, DEFAULT_SHARD_BYTES // spec.bytes_per_token)


def extend(
    writer: DataSetWriter, table: SampleTable, capture: CaptureConfig, tick: Callable[[], None] = lambda: None
) -> SegmentHead | None:
    """Append a segment for whatever of the selection no segment covers yet. None where the plan covers it already.

    `tick` is called often; what it raises ends the planning, and leaves no trace.
    Raises ConfigError when a sample is larger than `capture.in_flight_bytes`, DataError when nothing is selected.
    """
    selection = Selection.of(capture)
    described = dataclasses.asdict(selection) | {"tags": list(selection.tags), "sources": list(selection.sources)}
    segments = writer.segments()
    for segment in segments:
        head = segment.head
        if (head.kind, head.samples_digest, head.selection, head.seed) == (
            "capture", table.digest, described, capture.seed,
        ):  # fmt: skip
            return None
    head = SegmentHead(
        number=len(segments),
        kind="capture",
        attempt=0,
        seed=capture.seed,
        shard_tokens=shard_tokens(capture, writer.spec),
        samples_digest=table.digest,
        selection=described,
    )
    # Samples wait in files while they are sorted, on the disk that is about to receive far more than they need.
    with writer.scratch() as scratch:
        ordered = in_order(table, selection, capture.seed, scratch, covered=_ids(segments), tick=tick)
        fitting = _require_fit(ordered, writer.spec, capture, tick)
        shards = ((shard, [True] * len(shard)) for shard in cut(fitting, head.shard_tokens))
        written = write_segment(writer.files, writer.layout.segment(head.number), head, shards)
    if written is None and not segments:
        raise DataError(f"{table.path}: no sample matches limit, tags and sources of [capture]; nothing to do")
    return written


def extend_retry(writer: DataSetWriter, entries: Sequence[ShardEntry], capture: CaptureConfig) -> SegmentHead | None:
    """Append a segment that tries every rejected sample once more. None where nothing is rejected."""
    segments = writer.segments()
    # What a retry has planned and not yet tried is left to it: no sample may be in two pending shards.
    done = {entry.shard_id for entry in entries}
    rejected = open_rejects(segments, entries)
    for segment in segments:
        if segment.head.attempt:
            for shard in segment.shards:
                if shard.shard_id not in done:
                    rejected.difference_update(segment.ids_of(shard)[0])
    if not rejected:
        return None
    with_rejects = {entry.shard_id for entry in entries if entry.rejects}
    samples: dict[str, TokenIds] = {}
    for segment in segments:
        for shard in segment.shards:
            if shard.shard_id in with_rejects:
                samples |= {s: ids for s, ids in segment.read(shard) if s in rejected}
    attempt = 1 + max(segment.head.attempt for segment in segments)
    head = SegmentHead(
        number=len(segments),
        kind="retry",
        attempt=attempt,
        seed=capture.seed,
        shard_tokens=shard_tokens(capture, writer.spec),
        samples_digest="",
        selection={},
    )
    ordered = sorted(samples.items(), key=lambda item: order_key(item[0], capture.seed))
    shards = ((shard, [False] * len(shard)) for shard in cut(ordered, head.shard_tokens))
    return write_segment(writer.files, writer.layout.segment(head.number), head, shards)


def open_rejects(segments: Sequence[Segment], entries: Sequence[ShardEntry]) -> set[str]:
    """Rejected samples that no later try has captured: the latest outcome of a sample counts."""
    done = {entry.shard_id: entry for entry in entries}
    rejected: set[str] = set()
    if any(entry.rejects for entry in entries):
        for segment in segments:
            for shard in segment.shards:
                entry = done.get(shard.shard_id)
                if entry is not None:
                    if segment.head.attempt:
                        rejected.difference_update(segment.ids_of(shard)[0])
                    rejected.update(sample_id for sample_id, _ in entry.rejects)
    return rejected


def order_key(sample_id: str, seed: int) -> bytes:
    """A sample's place: xxh3-128 of the seed (8 bytes, little-endian) and the sample id (16 bytes)."""
    return xxhash.xxh3_128_digest((seed % 2**64).to_bytes(8, "little") + bytes.fromhex(sample_id))


def in_order(
    table: SampleTable,
    selection: Selection,
    seed: int,
    scratch: Path,
    *,
    covered: Iterable[str] = (),
    tick: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, TokenIds]]:
    """The selected samples in plan order, without those already covered, in memory that does not grow with the table.

    Samples go to bucket files by their place first; each bucket is then sorted by itself. `limit` takes the first ones
    in plan order, so that a larger limit holds every sample of a smaller one.
    """
    num_buckets = 1 + max(table.num_rows // _BUCKET_ROWS, table.num_tokens // _BUCKET_TOKENS)
    buckets = [_Bucket(scratch / f"{b:05d}") for b in range(num_buckets)]
    prefix = (seed % 2**64).to_bytes(8, "little")
    for batch in table.batches(["sample_id", "num_tokens", "token_ids", "source", "tags"]):
        tick()
        chosen = _choose(batch, selection)
        keys = [xxhash.xxh3_128_digest(prefix + s) for s in chosen["sample_id"].to_pylist()]
        places = np.array([int.from_bytes(k[:_KEY], "big") * num_buckets >> (8 * _KEY) for k in keys], dtype=np.int64)
        for b in np.unique(places):
            rows = np.flatnonzero(places == b)
            buckets[b].add(chosen.take(pa.array(rows)), [keys[r] for r in rows])
    for sample_id in covered:
        key = order_key(sample_id, seed)
        buckets[int.from_bytes(key[:_KEY], "big") * num_buckets >> (8 * _KEY)].cover(sample_id)
    left = selection.limit if selection.limit is not None else table.num_rows
    for bucket in buckets:
        for sample_id, token_ids, is_covered in bucket.sorted():
            if left == 0:
                return
            left -= 1
            if not is_covered:
                yield sample_id, token_ids


class _Bucket:
    """Samples whose places lie in one range, in a file until they are sorted."""

    _SCHEMA = pa.schema([("key", pa.binary(16)), ("sample_id", pa.binary(16)), ("token_ids", pa.list_(pa.int32()))])

    def __init__(self, path: Path) -> None:
        self._path = path
        self._covered = path.with_suffix(".covered")
        self._pending = bytearray()
        self._out: pa.ipc.RecordBatchStreamWriter | None = None

    def add(self, rows: pa.RecordBatch, keys: list[bytes]) -> None:
        if self._out is None:
            self._out = pa.ipc.new_stream(str(self._path), self._SCHEMA)
        columns = [pa.array(keys, pa.binary(16)), rows["sample_id"], rows["token_ids"].cast(pa.list_(pa.int32()))]
        self._out.write_batch(pa.record_batch(columns, schema=self._SCHEMA))

    def cover(self, sample_id: str) -> None:
        self._pending += bytes.fromhex(sample_id)
        if len(self._pending) >= 1 << 16:
            self._flush()

    def _flush(self) -> None:
        with self._covered.open("ab") as out:
            out.write(self._pending)
        self._pending.clear()

    def sorted(self) -> Iterator[tuple[str, TokenIds, bool]]:
        """`(sample_id, token_ids, covered)` in plan order; the files are gone afterwards."""
        if self._out is None:
            return
        self._out.close()
        self._flush()
        data = self._covered.read_bytes()
        covered = {data[i : i + 16] for i in range(0, len(data), 16)}
        with pa.OSFile(str(self._path)) as file:
            rows = pa.ipc.open_stream(file).read_all().combine_chunks()
        self._path.unlink()
        ids = rows["sample_id"].to_pylist()
        lists = rows["token_ids"].combine_chunks()
        values, offsets = lists.values.to_numpy(zero_copy_only=False), lists.offsets.to_numpy()
        keys = rows["key"].to_pylist()
        previous = None
        for i in sorted(range(len(ids)), key=keys.__getitem__):
            if ids[i] == previous:
                # Rows with one id are one sample; `prepare` merges them, another maker of tables may not.
                continue
            previous = ids[i]
            yield ids[i].hex(), np.array(values[offsets[i] : offsets[i + 1]], np.int32), ids[i] in covered


def _choose(batch: pa.RecordBatch, selection: Selection) -> pa.RecordBatch:
    if selection.sources:
        batch = batch.filter(pc.is_in(batch["source"].cast(pa.string()), pa.array(selection.sources)))
    if selection.tags:
        wanted = set(selection.tags)
        batch = batch.filter(pa.array([not wanted.isdisjoint(tags) for tags in batch["tags"].to_pylist()], pa.bool_()))
    return batch


def _ids(segments: Sequence[Segment]) -> Iterator[str]:
    for segment in segments:
        for shard in segment.shards:
            yield from segment.ids_of(shard)[0]


def _require_fit(
    samples: Iterator[tuple[str, TokenIds]], spec: CaptureSpec, capture: CaptureConfig, tick: Callable[[], None]
) -> Iterator[tuple[str, TokenIds]]:
    for i, (sample_id, token_ids) in enumerate(samples):
        if i % 1024 == 0:
            tick()
        require_fit(sample_id, len(token_ids), spec, capture)
        yield sample_id, token_ids


def require_fit(sample_id: str, num_tokens: int, spec: CaptureSpec, capture: CaptureConfig) -> None:
    """Raise ConfigError when one sample alone is larger than all that may be in flight."""
    need = num_tokens * spec.bytes_per_token
    if need > capture.in_flight_bytes:
        raise ConfigError(
            f"capture.in_flight_bytes is {human_bytes(capture.in_flight_bytes)}, but sample {sample_id} alone has "
            f"{num_tokens} tokens = {human_bytes(need)}; raise it to {need} or more, or lower data.max_tokens"
        )


def record_size(num_samples: int, num_tokens: int, spec: CaptureSpec, provenance: Provenance) -> int:
    """About the bytes of a record: one without samples, then id, place and digests of each, of mean length."""
    entry = FieldEntry("raw", spec.dtype, spec.hidden_size, {"": Part((), (), ())})
    empty = ShardRecord(
        shard_id="0" * DIGEST_HEX,
        fingerprint=spec.fingerprint,
        sample_ids=(),
        positions=(),
        num_tokens=(),
        fields=dict.fromkeys(spec.fields, entry),
        rejects=(),
        provenance=provenance,
        run_id="0" * 16,
        committed_at=time.time(),
        payload_digest="0" * DIGEST_HEX,
        payload_bytes=num_tokens * spec.bytes_per_token,
        header_bytes=4096,
    )
    if not num_samples:
        return len(to_bytes(empty))
    text, comma = len('"",') + DIGEST_HEX, 1
    mean = num_tokens // num_samples
    number = len(str(num_samples // 2)) + len(str(mean)) + 2 * comma
    offset, size = num_tokens * spec.bytes_per_token * 6 // 10, mean * spec.bytes_per_token // len(spec.fields)
    per_field = text + len(str(offset)) + len(str(size)) + 2 * comma
    return len(to_bytes(empty)) + num_samples * (text + number + len(spec.fields) * per_field)


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def describe(head: SegmentHead) -> dict[str, Any]:
    """A segment for the event log."""
    return {"segment": head.number, "kind": head.kind, "samples": head.num_samples, "tokens": head.num_tokens}
