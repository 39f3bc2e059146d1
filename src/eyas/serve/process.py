"""One server's processes: started in a group of their own, their output in the log, and all of them gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas.errors import EngineError
from eyas.serve import keeper

TAIL_BYTES = 65_536
LOG_BYTES = 64 * 1024 * 1024
"""A longer log of a server is put aside."""
HEAD_BYTES = 64 * 1024
"""Of a server's output, what stays at the top of its log: its command and the settings that it tells at the start."""
LINE_CHARS = 300
"""Lines are cut there: SGLang prints all its settings on one."""
KILL_PATIENCE_S = 30.0
"""A process that works on a GPU takes its time to die, even when killed."""


class ServerProcess:
    """A running server. `stop` it, always."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path, header: str) -> None:
        """Start it: `header` and its output are appended to `log`. Raises EngineError."""
        self.log = log
        self.started = time.monotonic()
        self._stopped = False
        with log.open("ab") as out:
            self._header_start = out.tell()
            self._head = b""
            out.write(f"{note(header)} {shlex.join(argv)}\n".encode())
            out.flush()
            self._log_start = out.tell()
            self._socket, other = socket.socketpair()
            with other:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, *argv],
                    stdin=other.fileno(),
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
        try:
            self.pid = self._told_pid()
        except BaseException:
            self.stop(0.0)
            raise

    def exit_code(self) -> int | None:
        """None while it runs. Its process group stays ours until `stop`."""
        # Not reaped yet: so the number of the group cannot become another's.
        ended = os.waitid(os.P_PID, self._keeper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else keeper.SIGNALLED + ended.si_status

    def stop(self, patience_s: float) -> None:
        """Ask all its processes to end, kill those that have not after `patience_s`, and see that none is left."""
        if self._stopped:
            return
        group = self._keeper.pid
        try:
            if patience_s > 0:
                _signal_group(group, signal.SIGTERM)
                _wait_until_gone(group, patience_s)
        finally:
            deadline = time.monotonic() + KILL_PATIENCE_S
            _signal_group(group, signal.SIGKILL)
            while not _wait_until_gone(group, 1.0) and time.monotonic() < deadline:
                _signal_group(group, signal.SIGKILL)
            left = group_members(group)
            self._stopped = True
            self._socket.close()
            if not left:
                self._keeper.wait()
        if left:
            raise EngineError(f"the server's processes {', '.join(map(str, left))} do not end, even when killed")

    def rotate(self) -> None:
        """Put a log that has become long aside, in place of the one put aside before; a new one begins as it did.

        Copied and cut, since the server keeps the file open: a few lines written meanwhile are lost. Where there is no
        room for the copy the log stays as it is.
        """
        temporary = aside(self.log).with_suffix(".tmp")
        try:
            size = self.log.stat().st_size
            if size <= LOG_BYTES:
                return
            with self.log.open("r+b") as log, temporary.open("wb") as out:
                if not self._head:
                    log.seek(self._header_start)
                    self._head = log.read(HEAD_BYTES).rpartition(b"\n")[0] + b"\n"
                    self._head += f"{note('what came between:')} {aside(self.log)}\n".encode()
                log.seek(size - LOG_BYTES)
                shutil.copyfileobj(log, out)
                temporary.rename(aside(self.log))
                # Over what is there, then cut: the server appends at whatever the end is.
                log.seek(0)
                log.write(self._head)
                log.truncate()
            self._log_start = len(self._head)
        except OSError:
            temporary.unlink(missing_ok=True)

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of its output; answers to health checks are left out."""
        return tail(self.log, num_lines, self._log_start)

    def _told_pid(self) -> int:
        self._socket.settimeout(30.0)
        try:
            told = self._socket.recv(64)
        except TimeoutError:
            told = b""
        return int(told) if told else self._keeper.pid


def aside(log: Path) -> Path:
    """Where what was in a log before it was put aside lies."""
    return log.with_name(log.name + ".1")


def note(text: str) -> str:
    """A line of ours in the server's log."""
    return f"--- eyas {time.strftime('%Y-%m-%d %H:%M:%S')} {text}"


def tail(log: Path, num_lines: int, start: int = 0) -> list[str]:
    """The last lines of a log, from the byte `start` on, without answers to health checks."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # A progress bar writes over its own line.
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    told = [line for line in lines if line and "GET /health" not in line][-num_lines:]
    return [line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + "…" for line in told]


def group_members(group: int) -> list[int]:
    """The living processes of a process group."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The command's name, in parentheses, may hold spaces; fields are counted from behind it.
            state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(of_group) == group and state not in ("Z", "X"):
            members.append(int(entry.name))
    return members


def _wait_until_gone(group: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while group_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
