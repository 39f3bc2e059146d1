"""Does the data set hold what its plan and records say? One report; `repair` drops what does not, capture redoes it."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_INCOMPLETE,
    ShardCorrupt,
    ShardMissing,
    SpecMismatch,
    StoreError,
)
from eyas.records import CaptureSpec, digest_bytes
from eyas.store import files
from eyas.store import record as records
from eyas.store.layout import Layout
from eyas.store.plan import Segment
from eyas.store.reader import aligned_buffer, pread_into, read_on, require_size
from eyas.store.record import ShardRecord
from eyas.store.shard import header_json, payload_digest, payload_path
from eyas.store.writer import lock, read_head, remove_orphans
from eyas.values import all_finite, first_nonfinite_row

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
    repairable: bool = False
    """Repair may drop the shard's record, since capture then redoes the shard."""


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
        if any(problem.shard_id not in self.repaired for problem in self.problems):
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
    are always checked in full. `repair` removes records of damaged shards and orphans, under the data set's lock; it
    leaves alone what capture could not redo: a damaged plan, sound records that it lacks, records of a newer eyas.
    `tell(shards done, shards, bytes read)` reports progress. The report also goes to `verify.json`.
    """
    if not 0.0 <= sample_fraction <= 1.0:
        raise ValueError(f"sample_fraction {sample_fraction} is not within 0..1")
    start = time.monotonic()
    layout = Layout(root)
    spec = read_head(layout.head)
    report = Report(root=str(root), fingerprint=spec.fingerprint, sample_fraction=sample_fraction)
    lock_fd = lock(layout.lock) if repair else None
    try:
        # Before the plan is read: what a running capture commits from now on may stand in a segment that is new, too.
        shard_ids = sorted(layout.record_ids())
        plan = _Plan(layout, report)
        _check_shards(layout, spec, plan, shard_ids, report, tell)
        if repair:
            _repair(layout, report)
    finally:
        if lock_fd is not None:
            os.close(lock_fd)
    report.pending = report.planned - report.committed - report.rejected
    report.seconds = round(time.monotonic() - start, 3)
    if os.access(root, os.W_OK):
        try:
            files.replace(layout.report, report.to_json().encode())
        except OSError as error:
            files.raise_store_error(error, layout.report, "writing the report")
    return report


@dataclass(slots=True)
class _Outcome:
    """What looking at one shard gave."""

    record: ShardRecord | None = None
    problem: Problem | None = None
    samples_read: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _PlannedShard:
    """The samples that the plan gives a shard, in order."""

    sample_ids: bytes
    """`[n * 16]`, compact: a plan may hold millions."""
    num_tokens: npt.NDArray[np.int32]

    def ids(self) -> list[str]:
        return [self.sample_ids[i : i + 16].hex() for i in range(0, len(self.sample_ids), 16)]


class _Plan:
    """The plan, read in full: every token id against its sample id, every sample id against its shard's."""

    def __init__(self, layout: Layout, report: Report) -> None:
        self.shards: dict[str, _PlannedShard] = {}
        paths = layout.segments()
        missing = [layout.segment(i) for i in range(len(paths)) if layout.segment(i) not in paths]
        problems = [StoreError(f"{path}: missing from the plan; restore it from a copy", path=path) for path in missing]
        for path in paths:
            try:
                with Segment(path) as segment:
                    report.planned += segment.head.num_new
                    for shard in segment.shards:
                        samples = segment.read(shard)
                        self.shards[shard.shard_id] = _PlannedShard(
                            bytes.fromhex("".join(sample_id for sample_id, _ in samples)),
                            np.array([len(token_ids) for _, token_ids in samples], np.int32),
                        )
            except ShardCorrupt as error:
                problems.append(error)
        self.whole = not problems
        report.problems += [_problem(error, Path(error.path), "") for error in problems]

    def require_holds(self, record: ShardRecord, path: Path) -> None:
        """The record's outcomes are those of the plan's samples, all of them, in plan order."""
        planned = self.shards.get(record.shard_id)
        if planned is None:
            if not self.whole:
                return  # whether it is planned cannot be known, and the plan's own damage is reported
            raise StoreError(
                f"{path}: no segment of the plan holds this shard; restore the plan from a copy, or move the record "
                "and its payload away",
                path=path,
            )
        ids = planned.ids()
        outcomes = [*record.sample_ids, *(r.sample_id for r in record.rejects), *record.duplicates]
        if len(outcomes) != len(ids) or set(outcomes) != set(ids):
            raise ShardCorrupt(f"{path}: its samples are not the {len(ids)} that the plan gives this shard", path=path)
        order = {sample_id: i for i, sample_id in enumerate(ids)}
        for sample_id, position, num_tokens in zip(record.sample_ids, record.positions, record.num_tokens, strict=True):
            if order[sample_id] != position or planned.num_tokens[position] != num_tokens:
                raise ShardCorrupt(
                    f"{path}: sample {sample_id} has another place or length than in the plan", path=path
                )

    def duplicates(self, record: ShardRecord) -> dict[int, int]:
        """Position and token count of samples that another shard counts for; their rows may be in the payload."""
        planned = self.shards.get(record.shard_id)
        if planned is None or not record.duplicates:
            return {}
        names = set(record.duplicates)
        return {i: int(planned.num_tokens[i]) for i, sample_id in enumerate(planned.ids()) if sample_id in names}


def _check_shards(
    layout: Layout,
    spec: CaptureSpec,
    plan: _Plan,
    shard_ids: list[str],
    report: Report,
    tell: Callable[[int, int, int], None],
) -> None:
    committed: set[bytes] = set()
    rejected: set[bytes] = set()
    payloads = layout.payloads()
    known = set(shard_ids)
    report.shards = len(shard_ids)
    report.orphans = len(layout.temporaries()) + sum(len(p) for s, p in payloads.items() if s not in known)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        looks = pool.map(lambda s: _look(layout, spec, plan, s, report.sample_fraction), shard_ids)
        for i, outcome in enumerate(looks):
            report.bytes_read += outcome.bytes_read
            report.samples_read += outcome.samples_read
            if outcome.problem is not None:
                report.problems.append(outcome.problem)
            elif outcome.record is not None:
                _count(outcome.record, committed, rejected, layout, report)
                names = {path.name for path in payloads.get(outcome.record.shard_id, [])}
                report.orphans += len(names - {outcome.record.payload_name})
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


def _look(layout: Layout, spec: CaptureSpec, plan: _Plan, shard_id: str, sample_fraction: float) -> _Outcome:
    path = layout.record(shard_id)
    outcome = _Outcome()
    try:
        record = records.read(path)
        records.require_spec(record, spec, path)
        records.require_plain(record, path)
        plan.require_holds(record, path)
        if record.payload_digest is not None and not record.released:
            _check_payload(layout, spec, record, plan.duplicates(record), sample_fraction, outcome)
        outcome.record = record
    except StoreError as error:
        outcome.problem = _problem(error, path, shard_id)
    return outcome


def _check_payload(
    layout: Layout,
    spec: CaptureSpec,
    record: ShardRecord,
    duplicates: dict[int, int],
    sample_fraction: float,
    outcome: _Outcome,
) -> None:
    """Compare a payload with its record: name, size, header, then the values. Raises ShardMissing or ShardCorrupt."""
    path = payload_path(layout, record)
    hint = f"run 'eyas verify --repair {layout.root}'"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            require_size(fd, record.payload_bytes, path, layout.root)
            read_on(fd)
            header = memoryview(bytearray(min(record.header_bytes, 8 + MAX_HEADER_BYTES)))
            pread_into(fd, header, 0)
            _check_header(bytes(header), spec, record, duplicates, path, hint)
            for sample in _chosen(record, sample_fraction):
                _check_sample(fd, record, sample, path, hint, outcome)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise ShardMissing(f"{path}: payload is gone; {hint}", path=path) from None
    except OSError as error:
        if error.errno == errno.EIO:
            raise ShardCorrupt(f"{path}: the disk cannot read it ({error.strerror}); {hint}", path=path) from None
        files.raise_store_error(error, path, "reading a payload")


def _check_header(
    header: bytes, spec: CaptureSpec, record: ShardRecord, duplicates: dict[int, int], path: Path, hint: str
) -> None:
    """The header is byte for byte the one that follows from the record, and so are the places of the samples."""
    stored = dict(zip(record.positions, record.num_tokens, strict=True))
    if record.duplicates:
        # Rows of samples that another shard counts for are there after a merge, and are not after a repair of one.
        stored |= {i: num_tokens for i, num_tokens in duplicates.items() if _names_position(header, i, spec)}
    length = record.header_bytes - 8
    expected = length.to_bytes(8, "little") + header_json(record.shard_id, spec, sorted(stored.items())).ljust(length)
    if header != expected:
        raise ShardCorrupt(f"{path}: header is not the one that follows from its record; {hint}", path=path)
    first = next(iter(record.fields.values())).parts.values()
    offsets = dict(zip(record.positions, next(iter(first)).offset, strict=True))
    at = record.header_bytes
    for position, num_tokens in sorted(stored.items()):
        if offsets.get(position, at) != at:
            raise ShardCorrupt(
                f"{path}: its record puts sample {position} elsewhere than its header; {hint}", path=path
            )
        at += num_tokens * spec.bytes_per_token
    if at != record.payload_bytes:
        raise ShardCorrupt(f"{path}: {record.payload_bytes} bytes, but its tensors end at {at}; {hint}", path=path)
    if not record.duplicates and payload_digest(header, _part_digests(record)) != record.payload_digest:
        raise ShardCorrupt(f"{path}: header or digests differ from the digest in its name; {hint}", path=path)


def _names_position(header: bytes, position: int, spec: CaptureSpec) -> bool:
    return f'"{position}.{spec.fields[0]}":'.encode() in header


def _part_digests(record: ShardRecord) -> list[bytes]:
    return [
        bytes.fromhex(part.digest[j])
        for j in range(len(record.sample_ids))
        for entry in record.fields.values()
        for part in entry.parts.values()
    ]


def _chosen(record: ShardRecord, fraction: float) -> Iterator[int]:
    threshold = int(fraction * 2**32)
    for j, sample_id in enumerate(record.sample_ids):
        if int(sample_id[:8], 16) < threshold or fraction >= 1.0:
            yield j


def _check_sample(fd: int, record: ShardRecord, j: int, path: Path, hint: str, outcome: _Outcome) -> None:
    sample_id = record.sample_ids[j]
    for name, entry in record.fields.items():
        for part in entry.parts.values():
            data = aligned_buffer(part.num_bytes[j])
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
    for shard_id in dict.fromkeys(problem.shard_id for problem in report.problems if problem.repairable):
        layout.record(shard_id).unlink(missing_ok=True)
        report.repaired.append(shard_id)
    system.sync_directory(layout.records)
    remove_orphans(system, layout)
    layout.manifest.unlink(missing_ok=True)


def _problem(error: StoreError, path: Path, shard_id: str) -> Problem:
    repairable = bool(shard_id) and isinstance(error, (ShardCorrupt, ShardMissing, SpecMismatch))
    return Problem(type(error).__name__, error.path or str(path), str(error), shard_id, repairable)
