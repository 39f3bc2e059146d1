"""What a person sees: progress on stderr, one live line on a terminal, one flushed line per interval in a file."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from typing import TextIO

logger = logging.getLogger("eyas")


def setup(verbose: bool = False) -> None:
    """Send eyas' log lines to stderr, flushed one by one; other libraries speak only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)


class Progress:
    """One live line on a terminal; elsewhere the first line at once, then one flushed line per `interval_s` seconds."""

    def __init__(self, *, interval_s: float = 10.0, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty()
        self._interval_s = 0.25 if self._live else interval_s
        self._last = float("-inf")
        self._width = 0

    def due(self) -> bool:
        """Whether a line may be shown now; ask before composing an expensive one."""
        return time.monotonic() - self._last >= self._interval_s

    def show(self, line: str, *, force: bool = False) -> None:
        """Show `line` if it is due (or `force`)."""
        if not (force or self.due()):
            return
        self._last = time.monotonic()
        if self._live:
            line = line[: max(1, shutil.get_terminal_size().columns - 1)]
            self._write("\r" + line + " " * max(0, self._width - len(line)))
            self._width = len(line)
        else:
            self._write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def say(self, line: str) -> None:
        """A line that stays: the live line is cleared first."""
        if self._live:
            self._write("\r" + " " * self._width + "\r" + line + "\n")
            self._width = 0
        else:
            self._write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def close(self) -> None:
        """Leave the live line behind, so that what follows starts on a line of its own."""
        if self._live and self._width:
            self._write("\n")
            self._width = 0

    def _write(self, text: str) -> None:
        # A terminal that is gone, or a full disk behind a log file, must not end a run of days.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def human_bytes(num_bytes: float) -> str:
    """Bytes with a decimal unit: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000 or unit == "TB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    raise AssertionError


def human_time(seconds: float) -> str:
    """Seconds as 12s, 4m10s, 3h05m or 2d04h."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"
