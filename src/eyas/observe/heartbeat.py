"""The heartbeat: a small file, replaced as a whole every second, that says which process does what, and how fast."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.log import human_time

STALE_S = 15.0
"""A live process beats every second; an older heartbeat means a machine that hangs or a clock that jumped."""
ENDED = ("stopped", "failed")
"""States that a process which ended before its work was done says itself."""


def process_identity() -> dict[str, Any]:
    """Host, pid and start time of this process: together they are never used twice."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_started": start_ticks(pid)}


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process or no `/proc`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, in parentheses, may hold spaces; fields are counted from behind it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def is_alive(beat: dict[str, Any]) -> bool | None:
    """Whether the process of a heartbeat lives: None where it cannot be known, since it ran on another host."""
    if beat.get("host") != socket.gethostname():
        return None
    ticks = start_ticks(int(beat["pid"]))
    return ticks is not None and ticks == beat.get("pid_started")


def running(state: str, process: str, *, alive: bool | None, age_s: float | None) -> str:
    """What a status says of a process that lives, or is on another host (`alive` None); `age_s`: of its heartbeat."""
    if alive is None:
        return f"{state}, says {process}, another host: look at the age of its heartbeat"
    if age_s is not None and age_s > STALE_S:
        return f"running as {process}, but silent for {human_time(age_s)} while {state}"
    return f"running as {process}: {state}"


def ended(state: str, process: str, *, command: str) -> str:
    """What a status says of a process that is gone with work left; `command`: the stage's, `eyas {command}`."""
    if state == "failed":
        return "failed; the error says what to do"
    how = state if state in ENDED else f"dead: {process} ended while {state}"
    return f"{how}; the same {command} command goes on from here"


class Heartbeat:
    """Writes `contents()` to a file once a second from a thread of its own, so that a long step does not look dead."""

    def __init__(self, path: Path, contents: Callable[[], dict[str, Any]], *, period_s: float = 1.0) -> None:
        self._path, self._contents, self._period_s = path, contents, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._identity = process_identity()

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and write a last time."""
        self._stop.set()
        self._thread.join(timeout=5)
        self.beat()

    def beat(self) -> None:
        """Write now; a full disk or a vanished directory is left to the run itself to report."""
        body = {**self._identity, "time": round(time.time(), 3), **self._contents()}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid():08x}.tmp")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as out:
                out.write(json.dumps(body).encode() + b"\n")
            temporary.rename(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.beat()


def read(path: Path) -> dict[str, Any] | None:
    """The latest heartbeat, or None where there is none that can be read."""
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("host"), str) or type(body.get("pid")) is not int:
        return None
    return body if type(body.get("time")) in (int, float) else None
