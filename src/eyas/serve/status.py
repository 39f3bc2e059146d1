"""How a data set's server is, from any other shell."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from eyas.log import human_time
from eyas.observe import heartbeat
from eyas.serve.command import KINDS, places_of
from eyas.serve.process import tail


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The latest server of a data set."""

    state: str
    """starting, ready, restarting or stopped: what `eyas serve` said last."""
    url: str
    engine: str
    alive: bool | None
    """Whether its `eyas serve` lives; None when it runs on another host."""
    pid: int
    """Of `eyas serve`."""
    server_pid: int | None
    server_alive: bool | None
    restarts: int
    since_s: float
    """How long it has been in this state."""
    error: str
    log: str
    last_log_line: str

    def lines(self) -> list[str]:
        """For people."""
        if self.alive is False and self.state != "stopped":
            state = f"dead: 'eyas serve' (pid {self.pid}) ended while {self.state}"
        elif self.error:
            state = f"{self.state}: {self.error}"
        else:
            state = f"{self.state} for {human_time(self.since_s)}"
        lives = {True: "alive", False: "dead", None: "on another host"}[self.server_alive]
        process = f"pid {self.server_pid} {lives}" if self.server_pid is not None else "no process"
        engine = f"{self.engine} · " if self.engine else ""
        lines = [f"  server   {state} · {self.url} · {engine}{process} · {self.restarts} restarts"]
        if self.last_log_line:
            lines.append(f"  log      {self.last_log_line}")
        return lines


def server_status(out: Path) -> ServerStatus | None:
    """Of the data set `out`; None when no server was started for it."""
    places = places_of(out)
    beat = heartbeat.read(places.heartbeat)
    if beat is None:
        return None
    alive = heartbeat.is_alive(beat)
    server_pid = _whole(beat.get("server_pid"))
    server_alive: bool | None = None
    if server_pid is not None and alive is not None:
        ticks = heartbeat.start_ticks(server_pid)
        server_alive = ticks is not None and ticks == beat.get("server_started")
    version = str(beat.get("engine_version", ""))
    since = beat.get("since")
    return ServerStatus(
        state=str(beat.get("state", "")),
        url=str(beat.get("url", "")),
        engine=f"{_title(beat.get('engine'))} {version}" if version else "",
        alive=alive,
        pid=int(beat["pid"]),
        server_pid=server_pid,
        server_alive=server_alive,
        restarts=_whole(beat.get("restarts")) or 0,
        since_s=round(max(0.0, time.time() - (since if isinstance(since, int | float) else beat["time"])), 1),
        error=str(beat.get("error", "")),
        log=str(places.log),
        last_log_line="".join(tail(places.log, 1)),
    )


def _title(kind: object) -> str:
    """An engine's name as people write it."""
    found = KINDS.get(str(kind))
    return found.dialect.title if found is not None else str(kind)


def _whole(value: object) -> int | None:
    return value if type(value) is int else None
