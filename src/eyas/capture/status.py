"""Is it alive, how far, how fast, what is wrong: answered from the records and the heartbeat, by any other shell."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.capture.monitor import free_bytes
from eyas.capture.plan import open_rejects
from eyas.log import human_bytes, human_time
from eyas.observe import heartbeat
from eyas.store import manifest
from eyas.store.layout import Layout
from eyas.store.plan import open_segments
from eyas.store.writer import read_head

UNREADABLE = "heartbeat.json cannot be read: whether a capture runs here is not known"


@dataclass(frozen=True, slots=True)
class Status:
    """Where a data set stands. Samples: `planned = committed + rejected + pending`, counted from plan and records."""

    root: str
    fingerprint: str
    planned: int
    committed: int
    rejected: int
    pending: int
    planned_shards: int
    committed_shards: int
    planned_tokens: int
    committed_tokens: int
    payload_bytes: int
    free_bytes: int
    rejects_by_reason: dict[str, int]
    alive: bool | None
    """Whether the capturing process lives; None when it ran on another host, or never."""
    state: str
    """What it is doing now, or how it ended."""
    process: str
    """`pid 123 on host`; empty when no capture has run here."""
    heartbeat_age_s: float | None
    last_commit_age_s: float | None
    tokens_per_s: float
    bytes_per_s: float
    eta_s: float | None
    in_flight_bytes: int
    retries: int
    servers: tuple[dict[str, Any], ...]
    """Of the latest run's servers: `url`, `samples` and `tokens` answered, and why it is `gone`, if it is."""
    problems: tuple[str, ...]
    """What is damaged, as far as names, sizes and records tell; `verify` looks at the bytes."""
    last_error: str
    """The message with which the latest run ended, when it did not complete."""

    def lines(self) -> list[str]:
        """For people."""
        done = self.committed_tokens / self.planned_tokens if self.planned_tokens else 0.0
        lines = [
            f"{self.root}: {self.headline()}",
            f"  samples  {self.planned:,} planned = {self.committed:,} committed + {self.rejected:,} rejected"
            f" + {self.pending:,} pending",
            f"  shards   {self.committed_shards:,} of {self.planned_shards:,} · {done:.1%} of "
            f"{self.planned_tokens:,} tokens · {human_bytes(self.payload_bytes)} written · "
            f"{human_bytes(self.free_bytes)} disk left",
        ]
        if self.alive:
            eta = human_time(self.eta_s) if self.eta_s is not None else "?"
            lines.append(
                f"  speed    {self.tokens_per_s:,.0f} tokens/s · {self.bytes_per_s / 1e9:.3f} GB/s · ETA {eta} · "
                f"{human_bytes(self.in_flight_bytes)} in flight · {self.retries} retries"
            )
        total = max(1, sum(share["samples"] for share in self.servers))
        for share in self.servers if len(self.servers) > 1 else ():
            gone = f" · gone: {share['gone']}" if share["gone"] and self.alive else ""
            answered = f"{share['samples']:,} samples answered, {share['samples'] / total:.0%}"
            lines.append(f"  asked    {share['url']} · {answered}{gone}")
        ages = []
        if self.last_commit_age_s is not None:
            ages.append(f"last commit {human_time(self.last_commit_age_s)} ago")
        if self.heartbeat_age_s is not None:
            ages.append(f"last heartbeat {human_time(self.heartbeat_age_s)} ago")
        if ages:
            lines.append(f"  age      {' · '.join(ages)}")
        if self.rejects_by_reason:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.rejects_by_reason.items()))
            lines.append(f"  rejects  {reasons}; 'eyas capture … --retry-rejects' tries them once more")
        lines += [f"  damage   {problem}" for problem in self.problems[:5]]
        if len(self.problems) > 5:
            lines.append(f"  damage   and {len(self.problems) - 5} more; 'eyas verify {self.root}' lists all")
        if self.last_error:
            lines.append(f"  error    {self.last_error}")
        return lines

    def headline(self) -> str:
        """Alive or not, and what it does or how it ended."""
        if self.problems and not self.alive:
            return f"damaged: {len(self.problems)} problems"
        if not self.process:
            return self.state or "no capture has run here"
        if self.alive is not False:
            return heartbeat.running(self.state, self.process, alive=self.alive, age_s=self.heartbeat_age_s)
        if self.state == "complete" and not self.pending:
            return "complete"
        if self.state == "complete":
            return f"incomplete: {self.pending:,} samples are pending again; the same capture command captures them"
        if self.pending or self.state in heartbeat.ENDED:
            return heartbeat.ended(self.state, self.process, command="capture")
        return "complete"


def status(root: Path) -> Status:
    """Where the data set at `root` stands now. Raises StoreError where there is none."""
    layout = Layout(root)
    spec = read_head(layout.head)
    entries, found = manifest.survey(layout, spec)
    problems = [str(problem) for problem in found]
    segments = open_segments(layout)
    rejected = open_rejects(segments, entries)
    planned = sum(s.head.num_new for s in segments)
    committed = sum(e.num_samples for e in entries)
    if committed + len(rejected) > planned:
        problems.append(
            f"{layout.plan}: {committed + len(rejected):,} samples have records, {planned:,} are planned: segments are "
            "gone; restore them from a copy, or let the same capture command make the plan anew"
        )
    latest_reason = {sample_id: reason for e in entries for sample_id, reason in e.rejects if sample_id in rejected}
    beat: dict[str, Any] = heartbeat.read(layout.heartbeat) or {}
    alive = heartbeat.is_alive(beat) if beat else None
    now = time.time()
    last_commit = max((e.committed_at for e in entries), default=None)
    planned_shards = sum(len(s.shards) for s in segments)
    for segment in segments:
        segment.close()
    return Status(
        root=str(root),
        fingerprint=spec.fingerprint,
        planned=planned,
        committed=committed,
        rejected=len(rejected),
        pending=max(0, planned - committed - len(rejected)),
        planned_shards=planned_shards,
        committed_shards=len(entries),
        planned_tokens=sum(s.head.num_new_tokens for s in segments),
        committed_tokens=sum(e.num_tokens for e in entries),
        payload_bytes=sum(e.payload_bytes for e in entries),
        free_bytes=free_bytes(root),
        rejects_by_reason=dict(Counter(latest_reason.values())),
        alive=alive,
        state=str(beat.get("state", "")) if beat or not layout.heartbeat.exists() else UNREADABLE,
        process=f"pid {beat['pid']} on {beat['host']}" if beat else "",
        heartbeat_age_s=round(max(0.0, now - beat["time"]), 1) if beat else None,
        last_commit_age_s=round(max(0.0, now - last_commit), 1) if last_commit is not None else None,
        tokens_per_s=float(beat.get("tokens_per_s", 0.0)) if alive else 0.0,
        bytes_per_s=float(beat.get("bytes_per_s", 0.0)) if alive else 0.0,
        eta_s=beat.get("eta_s") if alive else None,
        in_flight_bytes=int(beat.get("in_flight_bytes", 0)) if alive else 0,
        retries=int(beat.get("retries", 0)),
        servers=tuple(beat.get("servers", ())),
        problems=tuple(problems),
        last_error="" if alive else _last_error(layout.events, str(beat.get("run", ""))),
    )


def _last_error(path: Path, run_id: str) -> str:
    """The message of the event that ended a run, from the last few kilobytes of the event log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 65_536))
            lines = log.read().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("run") == run_id and event.get("event") in ("failed", "stopped"):
            return str(event.get("message", ""))
    return ""
