"""Stands between `eyas serve` and the server, so that no process of the server outlives it, however it ends.

Run as a script with the server's command line, in a session of its own. Standard input is a socket: the server's pid
is told there, and when its other end closes, which a killed process's ends do, the whole process group is killed.
Needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
SIGNALLED = 128
"""An exit code of this and more names the signal that ended the server."""


def main(argv: list[str]) -> int:
    """Start the server, wait for it, and end as it did."""
    # Handlers, unlike ignored signals, do not pass to the server.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None)
    try:
        server = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: cannot be started: {error.strerror}\n")
        return 127
    os.write(0, f"{server.pid}\n".encode())
    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    code = server.wait()
    return code if code >= 0 else SIGNALLED - code


def _end_with_the_other_side() -> None:
    try:
        while os.read(0, 64):
            pass
    except OSError:
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
