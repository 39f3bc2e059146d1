"""Several data sets with one fingerprint become one, by metadata alone: payloads are hard links."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import ConfigError, SpecMismatch, StoreError
from eyas.records import TokenIds
from eyas.store import record as records
from eyas.store.files import put_if_absent
from eyas.store.layout import Layout
from eyas.store.plan import Segment, ShardPlan, write_segment
from eyas.store.record import FieldEntry, Part, ShardRecord, to_bytes
from eyas.store.shard import payload_path
from eyas.store.writer import DataSetWriter, lock, read_head


@dataclass(frozen=True, slots=True)
class MergeReceipt:
    """What a merge made. Samples: `seen = merged + duplicates`, over committed ones."""

    root: str
    sources: tuple[str, ...]
    shards: int
    samples: int
    duplicates: int
    """Samples that an earlier source already had; their rows stay in the payload, unnamed by its record."""


def merge(root: Path, sources: Sequence[Path]) -> MergeReceipt:
    """Make the new data set `root` out of `sources`, earlier ones first where they overlap.

    Raises SpecMismatch when fingerprints differ, ConfigError when `root` exists with contents, StoreError when a source
    is unfinished, being written, or on another file system (a hard link cannot cross it).
    """
    if len({source.resolve() for source in sources}) != len(sources) or not sources:
        raise ConfigError("merge needs at least one data set, and each only once")
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        raise ConfigError(f"{root}: exists and is not empty (left by another merge?); merge makes a new data set")
    specs = [read_head(Layout(source).head) for source in sources]
    for source, spec in zip(sources, specs, strict=True):
        if spec != specs[0]:
            raise SpecMismatch(
                f"{source}: made under another spec than {sources[0]} ({'; '.join(specs[0].differences(spec))})",
                path=source,
            )
    with ExitStack() as stack:
        for source in sources:
            stack.callback(os.close, lock(Layout(source).lock))
        try:
            with DataSetWriter(root, specs[0]) as out:
                layouts = [Layout(source) for source in sources]
                merger = _Merger(out, layouts)
                for layout in layouts:
                    merger.add(layout)
                return merger.receipt(root, sources)
        except BaseException:
            # Nothing was there before, and payloads are only further names of the sources' own files.
            shutil.rmtree(root, ignore_errors=True)
            raise


class _Merger:
    """Adds one source after the other; remembers which samples are planned and committed."""

    def __init__(self, out: DataSetWriter, sources: Sequence[Layout]) -> None:
        self._out = out
        self._planned: set[str] = set()
        self._committed: set[str] = set()
        self._shards: set[str] = set()
        self._number = 0
        self._duplicates = 0
        self._origin: dict[str, Layout] = {}
        """Where each shard comes from: of several records of one shard the one that captured most, then the first."""
        captured: dict[str, tuple[str, ...]] = {}
        for source in sources:
            for shard_id in sorted(source.record_ids()):
                sample_ids = records.read(source.record(shard_id)).sample_ids
                if shard_id not in captured or len(sample_ids) > len(captured[shard_id]):
                    self._origin[shard_id], captured[shard_id] = source, sample_ids
        self._captured = frozenset(sample_id for sample_ids in captured.values() for sample_id in sample_ids)
        """Every sample that some shard has captured: where another one rejected it, that reject counts no more."""

    def add(self, source: Layout) -> None:
        done = source.record_ids()
        for path in source.segments():
            with Segment(path) as segment:
                pending = [shard for shard in segment.shards if shard.shard_id not in done]
                if pending:
                    raise StoreError(
                        f"{source.root}: {len(pending)} of its shards are pending; finish it with 'eyas capture' first",
                        path=source.root,
                    )
                fresh = [shard for shard in segment.shards if shard.shard_id not in self._shards]
                head = dataclasses.replace(segment.head, number=self._number, kind="merge")
                if write_segment(
                    self._out.files, self._out.layout.segment(self._number), head, self._cut(segment, fresh)
                ):
                    self._number += 1
                for shard in fresh:
                    self._link(self._origin[shard.shard_id], shard)

    def _cut(
        self, segment: Segment, shards: list[ShardPlan]
    ) -> Iterator[tuple[list[tuple[str, TokenIds]], list[bool]]]:
        for shard in shards:
            samples = segment.read(shard)
            new = [sample_id not in self._planned for sample_id, _ in samples]
            self._planned.update(sample_id for sample_id, _ in samples)
            yield samples, new

    def _link(self, source: Layout, shard: ShardPlan) -> None:
        path = source.record(shard.shard_id)
        record = records.read(path)
        records.require_spec(record, self._out.spec, path)
        before = len(record.sample_ids)
        record = without(record, self._committed, self._captured)
        self._duplicates += before - len(record.sample_ids)
        if record.payload_digest is not None and not record.released:
            payload = payload_path(source, record)
            try:
                self._out.files.link(payload, self._out.layout.shards / payload.name)
            except OSError as error:
                raise StoreError(
                    f"{payload}: cannot be linked into {self._out.layout.root} ({error.strerror}); "
                    "merge needs sources that are whole and on the same file system",
                    path=payload,
                ) from None
            self._out.files.sync_directory(self._out.layout.shards)
        put_if_absent(self._out.files, self._out.layout.record(shard.shard_id), to_bytes(record))
        self._committed.update(record.sample_ids)
        self._shards.add(shard.shard_id)

    def receipt(self, root: Path, sources: Sequence[Path]) -> MergeReceipt:
        return MergeReceipt(
            str(root), tuple(map(str, sources)), len(self._shards), len(self._committed), self._duplicates
        )


def without(record: ShardRecord, taken: Set[str], captured_elsewhere: Set[str] = frozenset()) -> ShardRecord:
    """The record with samples of `taken`, and rejects of `captured_elsewhere`, moved to `duplicates`.

    The payload is untouched, rows of those samples are no longer named.
    """
    moved = tuple(r.sample_id for r in record.rejects if r.sample_id in captured_elsewhere)
    if moved:
        record = dataclasses.replace(
            record,
            rejects=tuple(r for r in record.rejects if r.sample_id not in captured_elsewhere),
            duplicates=(*record.duplicates, *moved),
        )
    keep = [j for j, sample_id in enumerate(record.sample_ids) if sample_id not in taken]
    if len(keep) == len(record.sample_ids):
        return record
    gone = tuple(s for s in record.sample_ids if s in taken)
    if not keep:
        return dataclasses.replace(
            record,
            sample_ids=(),
            positions=(),
            num_tokens=(),
            fields={},
            duplicates=(*record.duplicates, *gone),
            payload_digest=None,
            payload_bytes=0,
            header_bytes=0,
        )
    return dataclasses.replace(
        record,
        sample_ids=tuple(record.sample_ids[j] for j in keep),
        positions=tuple(record.positions[j] for j in keep),
        num_tokens=tuple(record.num_tokens[j] for j in keep),
        fields={name: _pick(entry, keep) for name, entry in record.fields.items()},
        duplicates=(*record.duplicates, *gone),
    )


def _pick(entry: FieldEntry, keep: list[int]) -> FieldEntry:
    return dataclasses.replace(
        entry,
        parts={
            name: Part(
                tuple(part.offset[j] for j in keep),
                tuple(part.num_bytes[j] for j in keep),
                tuple(part.digest[j] for j in keep),
            )
            for name, part in entry.parts.items()
        },
        rows=None if entry.rows is None else tuple(entry.rows[j] for j in keep),
        digest=None if entry.digest is None else tuple(entry.digest[j] for j in keep),
    )
