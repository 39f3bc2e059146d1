"""The way to the disk: outcomes are put into plan order, written, and committed shard by shard."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from eyas.capture.requests import Requests, Slot
from eyas.records import Provenance, StateBlock
from eyas.store.record import ShardRecord
from eyas.store.shard import Piece, ShardWriter
from eyas.store.writer import DataSetWriter

_COMMITS_WAITING = 2


@dataclass(slots=True)
class Done:
    """A slot's outcome on its way to the writer: fields, or a reject's reason and detail, or none of them.

    None of them: another shard counts for the sample.
    """

    slot: Slot
    fields: Mapping[str, StateBlock] | None
    reason: str = ""
    detail: str = ""


@dataclass(slots=True)
class _Whole:
    """A shard all of whose samples have their place, and the writes that are still under way."""

    shard: ShardWriter
    puts: list[Future[None]]


class Sink:
    """Puts outcomes into plan order, writes them, commits full shards. Its threads hand errors to `check`."""

    def __init__(
        self,
        writer: DataSetWriter,
        provenance: Provenance,
        run_id: str,
        requests: Requests,
        on_commit: Callable[[ShardRecord], None],
    ) -> None:
        self._writer, self._provenance, self._run_id = writer, provenance, run_id
        self._requests, self._on_commit = requests, on_commit
        self._ahead: dict[int, Done] = {}
        self._next_sequence = 0
        self._to_write: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self._to_commit: queue.Queue[_Whole | None] = queue.Queue(_COMMITS_WAITING)
        self._failure: BaseException | None = None
        self._open: ShardWriter | None = None
        self._puts: list[Future[None]] = []
        """Of the open shard's pieces."""
        self._putters = ThreadPoolExecutor(writer.put_threads, "put") if writer.put_threads > 1 else None
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in (("writer", self._write_all), ("committer", self._commit_all))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, done: Done) -> None:
        """An outcome in any order; written as soon as all before it are."""
        self._ahead[done.slot.sequence] = done
        while self._next_sequence in self._ahead:
            self._to_write.put(self._ahead.pop(self._next_sequence))
            self._next_sequence += 1

    def check(self) -> None:
        """Raise what stopped the writer or the committer."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Write and commit everything that was put. Raises what went wrong."""
        self._to_write.put(None)
        for thread in self._threads:
            thread.join()
        self.check()

    def abandon(self) -> None:
        """Commit the shards that are whole, drop the open one; what goes wrong now is in the log already."""
        self._ahead.clear()
        self._to_write.put(None)
        for thread in self._threads:
            thread.join()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._failure = self._failure or error
            self._requests.close()

    def _write_all(self) -> None:
        try:
            while (done := self._to_write.get()) is not None and self._failure is None:
                self._write(done)
                del done
        finally:
            # Whatever happens here, the committer must hear of the end, or it waits for ever and so does the run.
            try:
                if self._open is not None:
                    wait(self._puts)
                    self._open.abandon()
                if self._putters is not None:
                    self._putters.shutdown()
            finally:
                self._to_commit.put(None)

    def _write(self, done: Done) -> None:
        shard = done.slot.shard
        if self._open is None:
            self._open = self._writer.shard_writer(shard.plan, shard.planned)
        assert self._open.shard_id == shard.plan.shard_id
        if done.fields is not None:
            piece = self._open.place(done.fields)
            if self._putters is None:
                self._put(self._open, piece, done.slot)
            else:
                self._puts.append(self._putters.submit(self._guarded_put, self._open, piece, done.slot))
        else:
            if done.reason:
                self._open.reject(done.reason, done.detail)
            else:
                self._open.skip()
            self._requests.release(done.slot)
        if self._open.complete:
            whole, self._open, self._puts = _Whole(self._open, self._puts), None, []
            self._to_commit.put(whole)

    def _put(self, shard: ShardWriter, piece: Piece, slot: Slot) -> None:
        try:
            shard.put(piece)
        finally:
            self._requests.release(slot)

    def _guarded_put(self, shard: ShardWriter, piece: Piece, slot: Slot) -> None:
        """In a putter's thread: a failure ends the run."""
        self._guard(partial(self._put, shard, piece, slot))

    def _commit_all(self) -> None:
        while (whole := self._to_commit.get()) is not None:
            shard = whole.shard
            try:
                wait(whole.puts)
                if shard.written:
                    self._on_commit(shard.commit(self._provenance, run_id=self._run_id, committed_at=time.time()))
                else:
                    shard.abandon()
            except BaseException as error:  # noqa: BLE001 - the writer must not block on a full queue
                self._failure = self._failure or error
                self._requests.close()
