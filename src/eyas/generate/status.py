"""Where answers from servers stand, from any other shell: the two files say what is done, the heartbeat the rest."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import StoreError
from eyas.generate.answers import LINE_START, RETRIED_END, rejects_path
from eyas.generate.monitor import heartbeat_path
from eyas.log import human_time
from eyas.observe import heartbeat


@dataclass(frozen=True, slots=True)
class AnswersStatus:
    """`planned = answered + rejected + pending`; `planned` and the like are the latest run's words."""

    out: str
    planned: int
    answered: int
    """Rows of the output."""
    rejected: int
    pending: int
    alive: bool | None
    """Whether the process lives; None when it ran on another host, or never."""
    state: str
    process: str
    heartbeat_age_s: float | None
    requests_per_s: float
    tokens_per_s: float
    eta_s: float | None
    in_flight: int
    retries: int
    cost: float
    rejects_by_reason: dict[str, int]
    endpoints: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.out}: {self.headline()}",
            f"  conversations  {self.planned:,} planned = {self.answered:,} answered + {self.rejected:,} rejected"
            f" + {self.pending:,} pending" + (f" · cost {self.cost:.4g}" if self.cost else ""),
        ]
        if self.rejects_by_reason:
            reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.rejects_by_reason.items()))
            lines.append(f"  rejects        {reasons}; 'eyas generate … --retry-rejects' tries them once more")
        if self.alive:
            eta = human_time(self.eta_s) if self.eta_s is not None else "?"
            lines.append(
                f"  speed          {self.requests_per_s:,.1f} requests/s · {self.tokens_per_s:,.0f} tokens/s · "
                f"ETA {eta} · {self.in_flight} in flight · {self.retries} retries"
            )
            for endpoint in self.endpoints:
                gone = f" · gone: {endpoint['down']}" if endpoint.get("down") else ""
                lines.append(
                    f"  endpoint       {endpoint.get('url')} · {endpoint.get('answered')} answers · "
                    f"{endpoint.get('in_flight')}/{endpoint.get('limit')} in flight{gone}"
                )
        return lines

    def headline(self) -> str:
        """What is going on, in a few words."""
        if self.alive:
            return heartbeat.running(self.state, self.process, alive=True, age_s=self.heartbeat_age_s)
        if not self.state:
            return "nobody asks servers for it" if self.answered + self.rejected else "nothing is answered yet"
        if self.state == "complete":
            return "complete"
        return heartbeat.ended(self.state, self.process, command="generate")


def is_answers(path: Path) -> bool:
    """Whether `eyas generate` writes, or wrote, this file."""
    if path.name and heartbeat_path(path).exists():
        return True
    if path.suffix == ".jsonl" and not path.exists():
        return True  # no data set has such a name: answers that are yet to come
    try:
        with path.open("rb") as file:
            return file.read(len(LINE_START)) == LINE_START
    except OSError:
        return False


def status(out: Path) -> AnswersStatus:
    """Where `out` stands now. Raises StoreError when it cannot be read."""
    beat: dict[str, Any] = heartbeat.read(heartbeat_path(out)) or {}
    alive = heartbeat.is_alive(beat) if beat else None
    answered, rejected = _num_rows(out), _num_rows(rejects_path(out))
    planned = int(beat.get("planned", answered + rejected))
    # Rows of prompts that are planned no more stand in the files, too.
    not_planned = max(0, answered + rejected - planned)
    answered -= min(answered, not_planned)
    rejected = min(rejected, planned - answered)
    return AnswersStatus(
        out=str(out),
        planned=planned,
        answered=answered,
        rejected=rejected,
        pending=max(0, planned - answered - rejected),
        alive=alive,
        state=str(beat.get("state", "")),
        process=f"pid {beat['pid']} on {beat['host']}" if beat else "",
        heartbeat_age_s=round(max(0.0, time.time() - beat["time"]), 1) if beat else None,
        requests_per_s=float(beat.get("requests_per_s", 0.0)) if alive else 0.0,
        tokens_per_s=float(beat.get("tokens_per_s", 0.0)) if alive else 0.0,
        eta_s=beat.get("eta_s") if alive else None,
        in_flight=int(beat.get("in_flight", 0)) if alive else 0,
        retries=int(beat.get("retries", 0)),
        cost=float(beat.get("cost", 0.0)),
        rejects_by_reason=dict(beat.get("rejects_by_reason", {})),
        endpoints=list(beat.get("endpoints", [])),
    )


def _num_rows(path: Path) -> int:
    """Rows that are done: no blank line, no reject that is tried again, no line that is still being written."""
    try:
        with path.open("rb") as file:
            return sum(
                line.startswith(LINE_START) and line.endswith(b"\n") and not line.endswith(RETRIED_END) for line in file
            )
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error} while being read", path=path) from None
