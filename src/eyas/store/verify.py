"""Does the data set hold what its plan and records say? One report; `repair` drops what does not, capture redoes it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_INCOMPLETE,
    ShardCorrupt,
    ShardMissing,
    SpecMismatch,
    StoreError,
)
from eyas.records import SAFETENSORS_DTYPE, CaptureSpec, digest_bytes
from eyas.store import codec, files
from eyas.store import record as records
from eyas.store.layout import Layout
from eyas.store.plan import Segment, ShardPlan
from eyas.store.reader import pread_into
from eyas.store.record import ShardRecord
from eyas.store.shard import payload_digest, payload_path
from eyas.store.values import all_finite, first_nonfinite_row
from eyas.store.writer import lock, read_head, remove_orphans

MAX_HEADER_BYTES = 100_000_000
"""Upper limit of the safetensors format itself."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be."""

    kind: str
    """Name of the error class."""
    path: str
    message: str
    shard_id: str = ""


@dataclass(slots=True)
class Report:
    """What verify looked at and what it found. `planned = committed + rejected + pending`, in samples."""

    root: str
    fingerprint: str = ""
    planned: int = 0
    committed: int = 0
    rejected: int = 0
    pending: int = 0
    shards: int = 0
    shards_released: int = 0
    samples_read: int = 0
    bytes_read: int = 0
    sample_fraction: float = 1.0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)
    orphans: int = 0
    repaired: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 complete and sound, 1 damaged, 3 sound but incomplete (also after a repair)."""
        if self.problems and not self.repaired:
            return EXIT_FAILED
        return EXIT_INCOMPLETE if self.pending else EXIT_COMPLETE

    def to_json(self) -> str:
        body: dict[str, Any] = asdict(self)
        body["ok"] = self.exit_code == EXIT_COMPLETE
        return json.dumps(body, indent=1)


def verify(
    root: Path,
    *,
    repair: bool = False,
    sample_fraction: float = 1.0,
    tell: Callable[[int, int, int], None] = lambda shards, of, num_bytes: None,
) -> Report:
    """Check every record against the plan and its payload: sizes, header, digests, finite values, coverage.

    `sample_fraction` reads the values of that share of the samples (chosen by id); names, sizes, headers and coverage
    are always checked in full. `repair` removes records of damaged shards, unplanned records and orphans, under the
    data set's lock. `tell(shards done, shards, bytes read)` reports progress. The report also goes to `verify.json`.
    """
    start = time.monotonic()
    layout = Layout(root)
    spec = read_head(layout.head)
    report = Report(root=str(root), fingerprint=spec.fingerprint, sample_fraction=sample_fraction)
    lock_fd = lock(layout.lock) if repair else None
    try:
        planned = _plan(layout, report)
        _check_shards(layout, spec, planned, report, sample_fraction, tell)
        if repair:
            _repair(layout, report)
    finally:
        if lock_fd is not None:
            os.close(lock_fd)
    report.pending = report.planned - report.committed - report.rejected
    report.seconds = round(time.monotonic() - start, 3)
    if os.access(root, os.W_OK):
        files.replace(layout.report, report.to_json().encode())
    return report


@dataclass(slots=True)
class _Outcome:
    """What looking at one shard gave."""

    record: ShardRecord | None = None
    problem: Problem | None = None
    samples_read: int = 0
    bytes_read: int = 0


def _plan(layout: Layout, report: Report) -> dict[str, tuple[Path, ShardPlan]]:
    """Where each planned shard is planned, and the number of planned samples."""
    planned: dict[str, tuple[Path, ShardPlan]] = {}
    for path in layout.segments():
        try:
            with Segment(path) as segment:
                report.planned += segment.head.num_new
                planned |= {shard.shard_id: (path, shard) for shard in segment.shards}
        except ShardCorrupt as error:
            report.problems.append(_problem(error, path, ""))
    return planned


def _check_shards(
    layout: Layout,
    spec: CaptureSpec,
    planned: dict[str, tuple[Path, ShardPlan]],
    report: Report,
    sample_fraction: float,
    tell: Callable[[int, int, int], None],
) -> None:
    committed: set[bytes] = set()
    rejected: set[bytes] = set()
    shard_ids = sorted(layout.record_ids())
    report.shards = len(shard_ids)
    report.orphans = len(layout.temporaries()) + sum(len(p) for s, p in layout.payloads().items() if s not in shard_ids)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        looks = pool.map(lambda s: _look(layout, spec, planned.get(s), s, sample_fraction), shard_ids)
        for i, outcome in enumerate(looks):
            report.bytes_read += outcome.bytes_read
            report.samples_read += outcome.samples_read
            if outcome.problem is not None:
                report.problems.append(outcome.problem)
            elif outcome.record is not None:
                _count(outcome.record, committed, rejected, layout, report)
            tell(i + 1, len(shard_ids), report.bytes_read)
    report.committed = len(committed)
    report.rejected = len(rejected - committed)


def _count(record: ShardRecord, committed: set[bytes], rejected: set[bytes], layout: Layout, report: Report) -> None:
    ids = [bytes.fromhex(s) for s in record.sample_ids]
    twice = committed.intersection(ids)
    if twice:
        path = layout.record(record.shard_id)
        message = f"{path}: {len(twice)} samples are committed by another shard too, the first {min(twice).hex()}"
        report.problems.append(_problem(ShardCorrupt(message, path=path), path, record.shard_id))
        return
    committed.update(ids)
    rejected.update(bytes.fromhex(r.sample_id) for r in record.rejects)
    report.shards_released += record.released


def _look(
    layout: Layout, spec: CaptureSpec, planned: tuple[Path, ShardPlan] | None, shard_id: str, sample_fraction: float
) -> _Outcome:
    path = layout.record(shard_id)
    outcome = _Outcome()
    try:
        record = records.read(path)
        records.require_spec(record, spec, path)
        _require_planned(record, planned, path)
        if record.payload_digest is not None and not record.released:
            check_payload(layout, record, sample_fraction, outcome)
        outcome.record = record
    except (ShardCorrupt, ShardMissing, SpecMismatch) as error:
        outcome.problem = _problem(error, path, shard_id)
    return outcome


def _require_planned(record: ShardRecord, planned: tuple[Path, ShardPlan] | None, path: Path) -> None:
    """The record's outcomes are those of the plan's samples, all of them, in plan order."""
    if planned is None:
        raise ShardCorrupt(f"{path}: no segment of the plan holds this shard; repair drops it", path=path)
    segment_path, shard = planned
    with Segment(segment_path) as segment:
        ids, counts = segment.ids_of(shard)
    order = {sample_id: i for i, sample_id in enumerate(ids)}
    outcomes = [*record.sample_ids, *(r.sample_id for r in record.rejects), *record.duplicates]
    if len(outcomes) != len(ids) or set(outcomes) != set(ids):
        raise ShardCorrupt(f"{path}: its samples are not the {len(ids)} that the plan gives this shard", path=path)
    for sample_id, position, num_tokens in zip(record.sample_ids, record.positions, record.num_tokens, strict=True):
        if order[sample_id] != position or counts[position] != num_tokens:
            raise ShardCorrupt(f"{path}: sample {sample_id} has another place or length than in the plan", path=path)


def check_payload(layout: Layout, record: ShardRecord, sample_fraction: float, outcome: _Outcome) -> None:
    """Compare a payload with its record: name, size, header, then the values. Raises ShardMissing or ShardCorrupt."""
    path = payload_path(layout, record)
    hint = f"run 'eyas verify --repair {layout.root}'"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ShardMissing(f"{path}: payload is gone; {hint}", path=path) from None
    with os.fdopen(fd, "rb", buffering=0) as payload:
        size = os.fstat(payload.fileno()).st_size
        if size != record.payload_bytes:
            raise ShardCorrupt(f"{path}: {size} bytes, its record says {record.payload_bytes}; {hint}", path=path)
        header = payload.read(min(record.header_bytes, MAX_HEADER_BYTES))
        _check_header(header, record, path, hint)
        for sample in _chosen(record, sample_fraction):
            _check_sample(payload.fileno(), record, sample, path, hint, outcome)


def _check_header(header: bytes, record: ShardRecord, path: Path, hint: str) -> None:
    length = int.from_bytes(header[:8], "little")
    if length + 8 != record.header_bytes or length > MAX_HEADER_BYTES:
        raise ShardCorrupt(
            f"{path}: header of {length} bytes, its record leaves {record.header_bytes - 8}; {hint}", path=path
        )
    try:
        tensors = json.loads(header[8:])
        tensors.pop("__metadata__", None)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ShardCorrupt(f"{path}: header is not JSON ({error}); {hint}", path=path) from None
    expected = {
        name: {
            "dtype": SAFETENSORS_DTYPE[dtype],
            "shape": [rows, record.fields[_field_of(name)].width],
            "data_offsets": [offset - record.header_bytes, offset - record.header_bytes + num_bytes],
        }
        for name, dtype, rows, offset, num_bytes in record.tensors()
    }
    omitted = {f"{record_position}." for record_position in _unnamed_positions(tensors, record)}
    named = {k: v for k, v in tensors.items() if not any(k.startswith(p) for p in omitted)}
    if named != expected:
        raise ShardCorrupt(f"{path}: header names other tensors than its record; {hint}", path=path)
    part_digests = [
        bytes.fromhex(part.digest[j])
        for j in range(len(record.sample_ids))
        for entry in record.fields.values()
        for part in entry.parts.values()
    ]
    if not record.duplicates and payload_digest(header, part_digests) != record.payload_digest:
        raise ShardCorrupt(f"{path}: header or digests differ from the digest in its name; {hint}", path=path)


def _field_of(tensor: str) -> str:
    return tensor.split(".", 1)[1]


def _unnamed_positions(tensors: dict[str, Any], record: ShardRecord) -> set[str]:
    """Positions in the header of samples that another shard counts for (after a merge)."""
    if not record.duplicates:
        return set()
    return {name.split(".", 1)[0] for name in tensors} - {str(p) for p in record.positions}


def _chosen(record: ShardRecord, fraction: float) -> Iterator[int]:
    threshold = int(fraction * 2**32)
    for j, sample_id in enumerate(record.sample_ids):
        if int(sample_id[:8], 16) < threshold or fraction >= 1.0:
            yield j


def _check_sample(fd: int, record: ShardRecord, j: int, path: Path, hint: str, outcome: _Outcome) -> None:
    sample_id = record.sample_ids[j]
    for name, entry in record.fields.items():
        codec.require(entry.codec, path)
        for part in entry.parts.values():
            data = memoryview(bytearray(part.num_bytes[j]))
            outcome.bytes_read += pread_into(fd, data, part.offset[j])
            if digest_bytes(data) != part.digest[j]:
                raise ShardCorrupt(f"{path}: {name} of sample {sample_id} differs from its digest; {hint}", path=path)
            if not all_finite(data, entry.dtype):
                row = first_nonfinite_row(data, entry.dtype, entry.width)
                raise ShardCorrupt(
                    f"{path}: {name} of sample {sample_id} is not finite in row {row}; {hint}", path=path
                )
    outcome.samples_read += 1


def _repair(layout: Layout, report: Report) -> None:
    system = files.Files()
    for problem in report.problems:
        if problem.shard_id:
            layout.record(problem.shard_id).unlink(missing_ok=True)
            report.repaired.append(problem.shard_id)
    unrepaired = [p for p in report.problems if not p.shard_id]
    if unrepaired:
        report.repaired.clear()
    system.sync_directory(layout.records)
    remove_orphans(system, layout)
    layout.manifest.unlink(missing_ok=True)


def _problem(error: StoreError, path: Path, shard_id: str) -> Problem:
    return Problem(type(error).__name__, error.path or str(path), str(error), shard_id)
