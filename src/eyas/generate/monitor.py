"""What a person sees of answers from servers: progress line, `OUT.events.jsonl`, `OUT.heartbeat.json`."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.errors import EyasError, Stopped
from eyas.generate.answers import Tally
from eyas.generate.endpoint import Endpoint
from eyas.log import Progress, human_time
from eyas.observe.events import EventLog
from eyas.observe.heartbeat import Heartbeat

RATE_WINDOW_S = 30.0


def events_path(out: Path) -> Path:
    return out.with_name(out.name + ".events.jsonl")


def heartbeat_path(out: Path) -> Path:
    return out.with_name(out.name + ".heartbeat.json")


class Monitor:
    """Counts what happens and tells it to a person, to the events and to the heartbeat. Use as a context."""

    def __init__(self, out: Path, tally: Tally, planned: int, progress: Progress, **settings: Any) -> None:
        self.state_name = "starting"
        self.planned = planned
        self.faults: Counter[str] = Counter()
        self.retries = 0
        self.started = time.monotonic()
        self.endpoints: Sequence[Endpoint] = ()
        self.spent: Callable[[], float] = lambda: 0.0
        """Money, with what unfinished conversations took: the next run begins with it."""
        self.run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        self._tally, self._progress = tally, progress
        self._rates: deque[tuple[float, int, int, int]] = deque()
        self._last_rates = (0.0, 0.0, 0.0)
        self._committed = (tally.num_answered, tally.num_rejected)
        self.events = EventLog(events_path(out), run_id=self.run_id)
        self._heartbeat = Heartbeat(heartbeat_path(out), self.heartbeat)
        self.events.add("start", planned=planned, answered=tally.answered, rejected=self.num_rejected, **settings)

    def __enter__(self) -> Monitor:
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            resumable = isinstance(error, KeyboardInterrupt) or (
                isinstance(error, EyasError) and error.exit_code == Stopped.exit_code
            )
            self.state_name = "stopped" if resumable else "failed"
            self.events.add(self.state_name, error=type(error).__name__, message=str(error), faults=dict(self.faults))
        self._heartbeat.close()
        self.events.close()

    @property
    def num_rejected(self) -> int:
        return self._tally.rejected.total()

    @property
    def pending(self) -> int:
        return self.planned - self._tally.answered - self.num_rejected

    def identity(self) -> str:
        """Law 1, on one line."""
        tally = self._tally
        return (
            f"planned {self.planned:,} = answered {tally.answered:,} + rejected {self.num_rejected:,}"
            f" + pending {self.pending:,}"
        )

    def state(self, state: str, **details: object) -> None:
        """Enter a state: it shows in the progress line, the heartbeat and the events."""
        self.state_name = state
        self.events.add("state", state=state, **details)

    def say(self, line: str) -> None:
        """A line that stays."""
        self._progress.say(f"generate: {line}")

    def on_fault(self, endpoint: Endpoint, kind: str, detail: str, row_id: str, attempt: int) -> None:
        """For each answer that was of no use and will be asked for again."""
        self.faults[kind] += 1
        self.retries += 1
        self.events.add("retry", row_id=row_id, kind=kind, attempt=attempt, endpoint=endpoint.url, reason=detail)

    def on_reject(self, row_id: str, reason: str, detail: str) -> None:
        """For each row that was rejected."""
        self.events.add("reject", row_id=row_id, reason=reason, detail=detail)

    def on_commit(self) -> None:
        """For each time that what was written has reached the disk."""
        now = (self._tally.num_answered, self._tally.num_rejected)
        if now != self._committed:
            answered, rejected = now[0] - self._committed[0], now[1] - self._committed[1]
            self.events.add("commit", answered=answered, rejected=rejected)
            self._committed = now

    def rates(self) -> tuple[float, float, float]:
        """Conversations, requests and tokens per second, over the last half minute."""
        now, usage = time.monotonic(), self._tally.usage
        self._rates.append((now, self._tally.num_done, usage.requests, usage.completion_tokens))
        while len(self._rates) > 2 and now - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()
        (start, *first), (end, *last) = self._rates[0], self._rates[-1]
        if end - start < 0.1:
            return self._last_rates
        done, requests, tokens = ((b - a) / (end - start) for a, b in zip(first, last, strict=True))
        self._last_rates = (done, requests, tokens)
        return self._last_rates

    def heartbeat(self) -> dict[str, Any]:
        """What the heartbeat file says beside the process' identity."""
        tally = self._tally
        per_s = self._last_rates
        return {
            "run": self.run_id,
            "state": self.state_name,
            "planned": self.planned,
            "answered": tally.answered,
            "rejected": self.num_rejected,
            "pending": self.pending,
            "conversations_per_s": round(per_s[0], 2),
            "requests_per_s": round(per_s[1], 2),
            "tokens_per_s": round(per_s[2], 1),
            "eta_s": round(self.pending / per_s[0], 1) if per_s[0] > 0 else None,
            "in_flight": sum(e.in_flight for e in self.endpoints),
            "retries": self.retries,
            "faults": dict(self.faults),
            "rejects_by_reason": dict(tally.rejected),
            "finish_reasons": dict(tally.finish_reasons),
            "prompt_tokens": tally.usage.prompt_tokens,
            "completion_tokens": tally.usage.completion_tokens,
            "cost": round(tally.usage.cost, 6),
            "spent": self.spent(),
            "endpoints": [
                {
                    "url": e.url,
                    "answered": e.answered,
                    "in_flight": e.in_flight,
                    "limit": e.limit,
                    "down": e.down_detail if e.down_since is not None else "",
                }
                for e in self.endpoints
            ],
            "uptime_s": round(time.monotonic() - self.started, 1),
        }

    def show(self, *, force: bool = False) -> None:
        """The progress line, when it is due."""
        if not (force or self._progress.due()):
            return
        tally = self._tally
        per_s, requests_per_s, tokens_per_s = self.rates()
        up = [e for e in self.endpoints if e.down_since is None]
        parts = [
            f"{tally.answered + self.num_rejected}/{self.planned} conversations",
            f"{self.num_rejected} rejects",
            f"{requests_per_s:,.1f} requests/s",
            f"{tokens_per_s:,.0f} tokens/s",
            f"{sum(e.in_flight for e in self.endpoints)}/{sum(e.limit for e in up)} in flight",
            f"{self.retries} retries",
        ]
        if tally.usage.cost:
            parts.append(f"cost {tally.usage.cost:.4g}")
        parts.append(f"ETA {human_time(self.pending / per_s) if per_s > 0 else '?'}")
        for e in self.endpoints:
            if e.down_since is not None:
                parts.append(f"{e.url} is gone ({e.down_detail[:80]}), next try in {human_time(e.paused_s)}")
            elif e.paused_s > 1:
                parts.append(f"{e.url} asks for a pause of {human_time(e.paused_s)}")
        if self.state_name != "answering":
            parts.insert(0, self.state_name)
        self._progress.show("generate: " + " · ".join(parts), force=force)
