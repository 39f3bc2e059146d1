"""`events.jsonl`: one object per line for each commit, reject, retry and change of state."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path


class EventLog:
    """Appends whole lines; a line torn by a crash is closed when the log is opened again. Thread-safe."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        self._run_id = run_id
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def add(self, event: str, **details: object) -> None:
        """Write `{"t": seconds since 1970, "run": …, "event": event, …details}`.

        A full disk costs the line, not the run: the records say the same, and the next shard will stop it cleanly.
        """
        line = json.dumps({"t": round(time.time(), 3), "run": self._run_id, "event": event, **details})
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
