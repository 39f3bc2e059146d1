"""What a person sees of a run: progress line, events, heartbeat, and the numbers behind them."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.capture.plan import existing_parent
from eyas.engine.base import EngineInfo
from eyas.errors import EyasError, Stopped
from eyas.log import Progress, human_bytes, human_time
from eyas.observe.events import EventLog
from eyas.observe.heartbeat import Heartbeat
from eyas.store.layout import Layout
from eyas.store.record import ShardRecord

RATE_WINDOW_S = 30.0


@dataclass(slots=True)
class Counts:
    """Where a run stands; written by several threads, one field each, read by progress and heartbeat."""

    state: str = "starting"
    planned_samples: int = 0
    planned_tokens: int = 0
    planned_shards: int = 0
    committed_samples: int = 0
    committed_tokens: int = 0
    committed_shards: int = 0
    committed_bytes: int = 0
    rejected_samples: int = 0
    retries: int = 0
    checked_samples: int = 0
    late_answers: int = 0
    answered_samples: int = 0
    """Answers of this run that passed their checks; they are committed with their shard."""
    answered_tokens: int = 0
    new_tokens: int = 0
    new_bytes: int = 0
    last_commit_at: float | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    samples_by_server: Counter[str] = field(default_factory=Counter)
    """Of the answered samples, by the address of the server that answered."""
    tokens_by_server: Counter[str] = field(default_factory=Counter)


CAPTURING = "capturing"
"""The state in which the progress line tells how far and how fast."""


class Monitor:
    """Counts what happens and tells it to a person, to `events.jsonl` and to the heartbeat. Use as a context."""

    def __init__(self, layout: Layout, info: EngineInfo, progress: Progress, stop: threading.Event) -> None:
        self.counts = Counts()
        self.root = layout.root
        self.run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        self.started = time.monotonic()
        self.in_flight: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Bytes and samples between reservation and writing."""
        self.servers: Callable[[], Mapping[str, str]] = dict
        """Of each of several servers, by its address: why it takes no part; empty while it does."""
        self._by_shard: dict[str, Counter[str]] = {}
        """Answered samples of the shards that are not committed yet, by server."""
        self._rejected: set[str] = set()
        self._bytes_per_token = info.spec.bytes_per_token
        self._progress, self._stop = progress, stop
        self._rates: deque[tuple[float, int]] = deque()
        self._rates_lock = threading.Lock()
        self.events = EventLog(layout.events, run_id=self.run_id)
        self._heartbeat = Heartbeat(layout.heartbeat, self.heartbeat)
        made = info.provenance
        self.events.add("start", engine=made.engine, version=made.version, settings=made.settings)

    def __enter__(self) -> Monitor:
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            resumable = isinstance(error, EyasError) and error.exit_code == Stopped.exit_code
            self.counts.state = "stopped" if resumable else "failed"
            self.events.add(self.counts.state, error=type(error).__name__, message=str(error))
        if self.counts.samples_by_server:
            self.events.add("servers", answered=self.shares())
        self._heartbeat.close()
        self.events.close()

    def state(self, state: str) -> None:
        """Enter a state: it shows in the progress line, the heartbeat and the events."""
        self.counts.state = state
        self.events.add("state", state=state)
        self._progress.show(f"capture: {state}", force=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._progress.say(f"capture: {line}")

    def check_stop(self) -> None:
        """Raise Stopped once a stop was asked for."""
        if self._stop.is_set():
            raise Stopped(f"{self.root}: stopped on request; the same command goes on from here")

    def tick(self) -> None:
        """Call it often: shows progress when it is due and raises Stopped once a stop was asked for."""
        self.check_stop()
        self.show()

    def pause(self, seconds: float, why: object) -> None:
        """Wait before another try, visibly; a stop ends the wait."""
        self.counts.retries += 1
        self.events.add("retry", reason=str(why), after_s=seconds)
        self.say(f"{why}; next try in {human_time(seconds)}")
        self._stop.wait(seconds)
        self.check_stop()

    def heartbeat(self) -> dict[str, Any]:
        """What the heartbeat file says beside the process' identity."""
        counts, tokens_per_s = self.counts, self.tokens_per_s()
        in_flight_bytes, in_flight_samples = self.in_flight()
        return {
            "run": self.run_id,
            "state": counts.state,
            "planned": counts.planned_samples,
            "committed": counts.committed_samples,
            "rejected": counts.rejected_samples,
            "pending": counts.planned_samples - counts.committed_samples - counts.rejected_samples,
            "planned_shards": counts.planned_shards,
            "committed_shards": counts.committed_shards,
            "planned_tokens": counts.planned_tokens,
            "committed_tokens": counts.committed_tokens,
            "tokens_per_s": round(tokens_per_s, 1),
            "bytes_per_s": round(tokens_per_s * self._bytes_per_token, 1),
            "eta_s": self.eta_s(tokens_per_s),
            "in_flight_bytes": in_flight_bytes,
            "in_flight_samples": in_flight_samples,
            "retries": counts.retries,
            "checked_samples": counts.checked_samples,
            "rejects_by_reason": dict(counts.reasons),
            "last_commit_at": counts.last_commit_at,
            "free_bytes": free_bytes(self.root),
            "servers": self.shares(),
            "uptime_s": round(time.monotonic() - self.started, 1),
        }

    def shares(self) -> list[dict[str, Any]]:
        """What each server answered in this run, and why it takes no part, where that is so."""
        samples, tokens, gone = self.counts.samples_by_server, self.counts.tokens_by_server, self.servers()
        return [
            {"url": url, "samples": samples[url], "tokens": tokens[url], "gone": gone.get(url, "")}
            for url in dict.fromkeys([*gone, *samples.copy()])
        ]

    def on_answer(self, server: str, shard_id: str, num_tokens: int) -> None:
        """For each sample that a server answered rightly."""
        self.counts.samples_by_server[server] += 1
        self.counts.tokens_by_server[server] += num_tokens
        self._by_shard.setdefault(shard_id, Counter())[server] += 1

    def set_rejected(self, sample_ids: Iterable[str]) -> None:
        """The samples that stand as rejected now."""
        self._rejected = set(sample_ids)
        self.counts.rejected_samples = len(self._rejected)

    def on_reject(self, sample_id: str) -> None:
        """For each sample rejected; one that was rejected before counts once."""
        self._rejected.add(sample_id)
        self.counts.rejected_samples = len(self._rejected)

    def on_commit(self, record: ShardRecord) -> None:
        """For each shard whose record stands."""
        counts, num_samples = self.counts, len(record.sample_ids)
        counts.committed_samples += num_samples
        counts.committed_tokens += record.total_tokens
        counts.committed_bytes += record.payload_bytes
        counts.committed_shards += 1
        counts.new_tokens += record.total_tokens
        counts.new_bytes += record.payload_bytes
        counts.last_commit_at = record.committed_at
        # A retry may have captured what was counted as rejected.
        self._rejected.difference_update(record.sample_ids)
        counts.rejected_samples = len(self._rejected)
        self.events.add(
            "commit",
            shard=record.shard_id,
            samples=num_samples,
            rejects=len(record.rejects),
            tokens=record.total_tokens,
            bytes=record.payload_bytes,
            servers=dict(self._by_shard.pop(record.shard_id, {})),
        )

    def tokens_per_s(self) -> float:
        """Tokens answered per second over the last half minute."""
        with self._rates_lock:
            now = time.monotonic()
            self._rates.append((now, self.counts.answered_tokens))
            while len(self._rates) > 2 and now - self._rates[0][0] > RATE_WINDOW_S:
                self._rates.popleft()
            (start, first), (_, last) = self._rates[0], self._rates[-1]
            return (last - first) / (now - start) if now - start > 0.1 else 0.0

    def eta_s(self, tokens_per_s: float) -> float | None:
        """Seconds until everything planned is captured, at this rate; None while there is no rate."""
        left = self.counts.planned_tokens - self.counts.committed_tokens
        return round(left / tokens_per_s, 1) if tokens_per_s > 0 else None

    def show(self, *, force: bool = False) -> None:
        """The progress line, when it is due."""
        if not (force or self._progress.due()):
            return
        c, tokens_per_s = self.counts, self.tokens_per_s()
        eta = self.eta_s(tokens_per_s)
        parts = [
            f"{c.committed_shards}/{c.planned_shards} shards",
            f"{c.committed_samples}/{c.planned_samples} samples committed, {c.answered_samples} answered",
            f"{tokens_per_s:,.0f} tokens/s",
            f"{tokens_per_s * self._bytes_per_token / 1e9:.3f} GB/s",
            f"{human_bytes(self.in_flight()[0])} in flight",
            f"{c.rejected_samples} rejects",
            f"{c.retries} retries",
            f"{human_bytes(free_bytes(self.root))} disk left",
            f"ETA {human_time(eta) if eta is not None else '?'}",
        ]
        shares = self.shares()
        if len(shares) > 1:
            parts.insert(-1, f"servers {shares_line(shares)}")
        if c.state != CAPTURING:
            parts = [c.state, f"{human_time(time.monotonic() - self.started)} so far"]
        self._progress.show("capture: " + " · ".join(parts), force=force)


def shares_line(shares: Sequence[Mapping[str, Any]]) -> str:
    """Each server's part of the answered tokens, in the order in which they were named: `31%/36%/33%/gone`."""
    total = max(1, sum(share["tokens"] for share in shares))
    return "/".join("gone" if share["gone"] else f"{share['tokens'] / total:.0%}" for share in shares)


def free_bytes(root: Path) -> int:
    """Bytes that a user may still write to the file system of `root`."""
    return shutil.disk_usage(existing_parent(root)).free
