"""Capture: plan, then re-check and probe, then capture, then report.

Threads: the engine's (computes and yields answers), the writer's (appends in plan order), the committer's (fsync,
rename, record), and the caller's, which checks answers, decides about failures and shows progress. What travels between
them is bounded in bytes by the quota of `Requests`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from eyas.capture.asker import Asker
from eyas.capture.check import Head
from eyas.capture.loop import Loop
from eyas.capture.memory import give_back_memory, share_arena
from eyas.capture.monitor import CAPTURING, Monitor, free_bytes
from eyas.capture.plan import describe, extend, extend_retry, open_rejects, record_size, require_fit
from eyas.capture.probe import PROBE_SAMPLES, RECHECKED_SAMPLES, probe, provenance_changes, recheck
from eyas.capture.requests import DUPLICATE, TOO_LONG, OpenShard, Requests, Slot
from eyas.capture.sink import Sink
from eyas.config import CaptureConfig
from eyas.data.table import SampleTable
from eyas.engine.base import Engine, EngineInfo, ManyServers
from eyas.errors import CaptureMismatch, EngineGone, EngineUnavailable, EyasError, OutOfSpace, SpecMismatch
from eyas.log import Progress, human_bytes
from eyas.records import TokenIds, digest_bytes
from eyas.store import manifest
from eyas.store import record as records
from eyas.store.files import Files, raise_store_error, replace
from eyas.store.manifest import ShardEntry
from eyas.store.plan import Segment, ShardPlan
from eyas.store.reader import DataSet
from eyas.store.record import ShardRecord
from eyas.store.writer import DataSetWriter


@dataclass(frozen=True, slots=True)
class Receipt:
    """What stands on disk after a run. Samples: `planned = committed + rejected + pending`."""

    out: str
    planned: int
    committed: int
    rejected: int
    pending: int
    shards: int
    tokens: int
    payload_bytes: int
    rejects_by_reason: dict[str, int]
    fingerprint: str
    data_digest: str
    """xxh3-128 over shard ids and payload digests, in order of shard id."""
    captured_tokens: int
    """Tokens committed by this run."""
    captured_bytes: int
    seconds: float
    retries: int
    checked_samples: int
    samples_by_server: dict[str, int] = field(default_factory=dict)
    """Samples that each server answered in this run, by its address."""


def capture(
    capture: CaptureConfig,
    table: SampleTable,
    engine: Engine,
    head: Head | None,
    *,
    progress: Progress,
    stop: threading.Event | None = None,
    retry_rejects: bool = False,
    files: Files | None = None,
    resolved_config: str = "",
) -> Receipt:
    """Capture the selected samples of `table` into `capture.out`, going on from whatever is there.

    Raises Stopped when `stop` is set (everything committed stays), OutOfSpace when the disk fills up, SpecMismatch when
    the data set was made otherwise, CaptureMismatch when values are wrong or too many samples are rejected,
    EngineUnavailable when the engine stays away. After each of them the same call goes on where it was.
    """
    assert capture.out is not None
    progress.show("capture: opening the data set", force=True)
    share_arena()
    info = engine.info()
    with DataSetWriter(capture.out, info.spec, files=files) as writer:
        if resolved_config:
            try:
                replace(writer.layout.config, resolved_config.encode())
            except OSError as error:
                raise_store_error(error, writer.layout.config, "writing the resolved configuration")
        with Monitor(writer.layout, info, progress, stop or threading.Event()) as monitor:
            run = _Run(capture, writer, engine, info, monitor)
            run.plan(table, retry_rejects=retry_rejects)
            if run.pending:
                run.require_space()
                run.recheck()
                run.probe(head)
                run.capture(head)
            return run.receipt()


class _Run:
    """One run of `capture`; its methods are the sentences of the stage."""

    def __init__(
        self, config: CaptureConfig, writer: DataSetWriter, engine: Engine, info: EngineInfo, monitor: Monitor
    ) -> None:
        self._config, self._writer, self._engine, self._info, self._monitor = config, writer, engine, info, monitor
        self._asker = Asker(config, engine, info, monitor)
        if isinstance(engine, ManyServers):
            monitor.servers = engine.servers
        self._segments: list[Segment] = []
        self._entries: list[ShardEntry] = []
        self.pending: list[ShardPlan] = []

    def plan(self, table: SampleTable, *, retry_rejects: bool) -> None:
        """Extend the plan if the selection has grown, and count what is done."""
        self._monitor.state("planning")
        had_plan = bool(self._writer.layout.segments())
        segment = extend(self._writer, table, self._config, self._monitor.tick)
        give_back_memory()
        self._entries = manifest.summaries(self._writer.layout, self._writer.spec)
        retry = extend_retry(self._writer, self._entries, self._config) if retry_rejects else None
        for head in (segment, retry):
            if head is not None:
                self._monitor.events.add("segment", **describe(head))
        self._segments = self._writer.segments()
        self._count()
        if self._entries and not had_plan:
            self._monitor.say("the plan was gone and is made anew; records that fit it count")
        if self._config.limit is not None and self._monitor.counts.planned_samples > self._config.limit:
            self._monitor.say(
                f"{self._monitor.counts.planned_samples:,} samples are planned already, more than capture.limit = "
                f"{self._config.limit:,}: the plan only grows"
            )
        done = {entry.shard_id for entry in self._entries}
        shards = [shard for segment in self._segments for shard in segment.shards]
        self.pending = [shard for shard in shards if shard.shard_id not in done]
        self._monitor.counts.planned_shards = len(shards)

    def require_space(self) -> None:
        """Refuse to start what cannot fit: staging for the largest sample, disk for all that is pending."""
        spec, root = self._writer.spec, self._writer.layout.root
        require_fit("the largest", max(s.head.max_tokens for s in self._segments), spec, self._config)
        need = sum(shard.num_tokens for shard in self.pending) * spec.bytes_per_token
        need += sum(record_size(s.num_samples, s.num_tokens, spec, self._info.provenance) for s in self.pending)
        free = free_bytes(root)
        if need + self._config.min_free_bytes > free:
            raise OutOfSpace(
                f"{root}: {human_bytes(need)} are still to be written and {human_bytes(self._config.min_free_bytes)} "
                f"must stay free (capture.min_free_bytes), {human_bytes(free)} are; free some, or lower capture.limit",
                path=root,
            )

    def probe(self, head: Head | None) -> None:
        """Check the values of some pending samples, and of a committed one, before anything is written.

        The committed one is known to be good: where the pending ones are all bad, it says that the engine is not.
        """
        self._monitor.state("probing: loading the engine and checking the values of the first samples")
        pending = [self._answerable(self._read(shard)) for shard in self.pending[:PROBE_SAMPLES]]
        rows = zip_longest(*pending)
        spread = [sample for row in rows for sample in row if sample is not None]
        samples = [*spread[:PROBE_SAMPLES], *self._committed(self._latest())[:1]]
        if isinstance(self._engine, ManyServers):
            once = self._config.model_copy(update={"max_attempts": 1})

            def vet(url: str, server: Engine) -> None:
                probe(Asker(once, server, self._info, self._monitor), samples, head, self._monitor, url)

            self._engine.vet = vet
        self._each(lambda asker, server: probe(asker, samples, head, self._monitor, server))

    def _each(self, check: Callable[[Asker, str], None]) -> None:
        """Check the engine, or each of its servers; one that goes meanwhile is left to come back."""
        if not isinstance(self._engine, ManyServers):
            check(self._asker, "")
            return
        for url, server in self._engine.present().items():
            asker = Asker(self._config, server, self._info, self._monitor)
            try:
                check(asker, url)
            except (CaptureMismatch, SpecMismatch) as error:
                error.args = (f"the server at {url}: {error}",)
                raise
            except (EngineUnavailable, EngineGone) as error:
                self._engine.lose(url, error)
                if not self._engine.present():
                    raise
            self._asker.known_good = self._asker.known_good or asker.known_good

    def recheck(self) -> None:
        """When the engine or its settings changed since the last commit, capture a few committed samples again."""
        latest = self._latest()
        changes = provenance_changes(latest.provenance, self._info.provenance) if latest is not None else ""
        if not changes:
            return
        self._monitor.state(f"re-checking committed samples, since {changes} changed")
        stored = DataSet(self._writer.layout.root)
        samples = self._committed(latest)[:RECHECKED_SAMPLES]
        self._each(lambda asker, _: recheck(asker, samples, stored, changes, self._monitor))
        stored.close()

    def _latest(self) -> ShardRecord | None:
        """The record of the latest commit that holds samples."""
        whole = [entry for entry in self._entries if entry.num_samples and not entry.released]
        if not whole:
            return None
        latest = max(whole, key=lambda entry: entry.committed_at)
        return records.read(self._writer.layout.record(latest.shard_id))

    def _committed(self, record: ShardRecord | None) -> list[tuple[str, TokenIds]]:
        """The samples of a record, with their token ids, that the engine can answer."""
        if record is None:
            return []
        plan = next(s for segment in self._segments for s in segment.shards if s.shard_id == record.shard_id)
        committed = set(record.sample_ids)
        return self._answerable([(s, ids) for s, ids in self._read(plan) if s in committed])

    def _answerable(self, samples: list[tuple[str, TokenIds]]) -> list[tuple[str, TokenIds]]:
        """Those that the engine takes, and that have a next token to be checked by."""
        return [(s, ids) for s, ids in samples if 1 < len(ids) <= self._info.max_tokens]

    def capture(self, head: Head | None) -> None:
        """Capture every pending shard. Raises Stopped, or what went wrong; whole shards are committed anyway."""
        monitor = self._monitor
        monitor.state(CAPTURING)
        requests = Requests(self._slots(), self._config.in_flight_bytes)
        monitor.in_flight = lambda: (requests.in_flight_bytes, requests.in_flight_samples)

        def on_commit(record: ShardRecord) -> None:
            monitor.on_commit(record)
            give_back_memory()

        sink = Sink(self._writer, self._info.provenance, monitor.run_id, requests, on_commit)
        try:
            Loop(self._config, self._engine, self._asker, head, requests, sink, monitor).run()
        except BaseException:
            monitor.counts.state = "stopping"
            requests.close()
            sink.abandon()
            raise
        sink.finish()

    def receipt(self) -> Receipt:
        """What stands on disk now, counted anew from the records."""
        self._entries = manifest.summaries(self._writer.layout, self._writer.spec)
        self._count()
        counts = self._monitor.counts
        receipt = Receipt(
            out=str(self._writer.layout.root),
            planned=counts.planned_samples,
            committed=counts.committed_samples,
            rejected=counts.rejected_samples,
            pending=counts.planned_samples - counts.committed_samples - counts.rejected_samples,
            shards=counts.committed_shards,
            tokens=counts.committed_tokens,
            payload_bytes=counts.committed_bytes,
            rejects_by_reason=dict(counts.reasons),
            fingerprint=self._writer.spec.fingerprint,
            data_digest=data_digest(self._entries),
            captured_tokens=counts.new_tokens,
            captured_bytes=counts.new_bytes,
            seconds=time.monotonic() - self._monitor.started,
            retries=counts.retries,
            checked_samples=counts.checked_samples,
            samples_by_server=dict(counts.samples_by_server),
        )
        if receipt.pending:
            raise EyasError(
                f"{receipt.out}: {receipt.planned} planned are not {receipt.committed} committed + {receipt.rejected} "
                f"rejected; run 'eyas verify {receipt.out}'"
            )
        self._monitor.state("complete")
        return receipt

    def _count(self) -> None:
        """Set the counts to what plan and records say."""
        rejected = open_rejects(self._segments, self._entries)
        counts = self._monitor.counts
        counts.planned_samples = sum(s.head.num_new for s in self._segments)
        counts.planned_tokens = sum(s.head.num_new_tokens for s in self._segments)
        counts.committed_samples = sum(e.num_samples for e in self._entries)
        counts.committed_tokens = sum(e.num_tokens for e in self._entries)
        counts.committed_bytes = sum(e.payload_bytes for e in self._entries)
        counts.committed_shards = len(self._entries)
        counts.last_commit_at = max((e.committed_at for e in self._entries), default=None)
        latest = {sample_id: reason for e in self._entries for sample_id, reason in e.rejects if sample_id in rejected}
        counts.reasons = Counter(latest.values())
        self._monitor.set_rejected(rejected)

    def _read(self, shard: ShardPlan) -> list[tuple[str, TokenIds]]:
        return next(segment for segment in self._segments if segment.head.number == shard.segment).read(shard)

    def _slots(self) -> Iterator[Slot]:
        """The pending samples in plan order; one shard's token ids in memory at a time."""
        spec, threshold = self._info.spec, int(self._config.check_fraction * 2**32)
        tried_again = [
            (segment.head.number, {s for shard in segment.shards for s in segment.ids_of(shard)[0]})
            for segment in self._segments
            if segment.head.attempt
        ]
        taken = self._committed_elsewhere()
        sequence = 0
        for plan in self.pending:
            self._require_room_for(plan)
            samples = self._read(plan)
            shard = OpenShard(plan, tuple((sample_id, len(ids)) for sample_id, ids in samples))
            for sample_id, ids in samples:
                # The end of the id takes no part in the order of samples, so that checks are spread evenly.
                checked = int(sample_id[24:], 16) < threshold and len(ids) > 1
                unsent = TOO_LONG if len(ids) > self._info.max_tokens else ""
                # A shard that is captured once more, after a repair, leaves to a later retry what that one has tried.
                if any(number > plan.segment and sample_id in later for number, later in tried_again):
                    unsent = DUPLICATE
                if taken is not None:
                    # Shards of merged data sets overlap: the first to be committed has the sample.
                    unsent = DUPLICATE if sample_id in taken else unsent
                    taken.add(sample_id)
                num_bytes = 0 if unsent else len(ids) * spec.bytes_per_token
                yield Slot(sequence, shard, sample_id, ids, num_bytes, checked, unsent=unsent)
                sequence += 1

    def _committed_elsewhere(self) -> set[str] | None:
        """Samples that need no capture though a pending shard plans them; None where shards cannot overlap."""
        if not any(segment.head.kind == "merge" for segment in self._segments):
            return None
        ids = manifest.load(self._writer.layout, self._writer.spec).ids
        return {bytes(sample_id).hex() for sample_id in ids}

    def _require_room_for(self, plan: ShardPlan) -> None:
        root = self._writer.layout.root
        need = plan.num_tokens * self._writer.spec.bytes_per_token + self._monitor.in_flight()[0]
        free = free_bytes(root)
        if need + self._config.min_free_bytes > free:
            raise OutOfSpace(
                f"{root}: {human_bytes(free)} free, too little for the next shard beside capture.min_free_bytes "
                f"({human_bytes(self._config.min_free_bytes)}); free some, then run the same command again",
                path=root,
            )


def data_digest(entries: Sequence[ShardEntry]) -> str:
    """One digest of a data set's contents: shard ids and payload digests, in order of shard id."""
    ordered = sorted(entries, key=lambda entry: entry.shard_id)
    return digest_bytes(*(f"{entry.shard_id}{entry.payload_digest or ''}".encode() for entry in ordered))
