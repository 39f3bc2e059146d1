"""Why a server ended, as far as its exit code and its last lines tell."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from eyas.serve.keeper import SIGNALLED

LINES = 30
"""Of the log's end; what stands above it is about something that the server survived."""
_CAUSES: tuple[tuple[str, str], ...] = (
    (r"eyas: (cannot capture: .*|.*aux_layers.*|.*capture settings.*)", "the capture plugin refuses: {0}"),
    (
        r"No module named '?((?:sglang|vllm)[\w.]*)",
        "{0} is missing there: serve.python must name the python that has it",
    ),
    (
        r"No package metadata was found for (vllm)",
        "{0} is missing there: serve.python must name the python that has it",
    ),
    (r"(?:^|[\])] )ModuleNotFoundError: No module named '([\w.]+)'", "the server's environment has no {0}"),
    (r"unrecognized arguments: (.*)", "the server does not know {0}: look at engine.extra"),
    (r"error: argument (.*)", "a flag has a value that the server does not take: {0}; look at engine.extra"),
    (r"[Aa]ddress already in use", "another process took the port: choose one in engine.url"),
    (
        r"CUDA out of memory|OutOfMemoryError|Not enough memory",
        "GPU memory is full: another process on it, engine.extra.mem-fraction-static, or serve.tensor_parallel",
    ),
    (r"No space left on device", "a file system is full"),
    (r"no kernel image is available", "this build of the server or of PyTorch does not support this GPU"),
    (r"cannot be started: (.*)", "the interpreter cannot be run: {0}; look at serve.python"),
    (
        r"(\S+) \(pid=\d+\) crashed with exit code -9",
        "{0} was killed from outside: most often by the memory limit of the container or the machine",
    ),
)
_KILLS_ITSELF = re.compile("kill_process_tree called")
"""SGLang's own way to end when one of its processes has failed."""


def how_it_ended(exit_code: int) -> str:
    """`exit code 1`, or the signal's name."""
    if exit_code > SIGNALLED:
        try:
            return signal.Signals(exit_code - SIGNALLED).name
        except ValueError:
            pass
    return f"exit code {exit_code}"


def likely_cause(exit_code: int, lines: Sequence[str], num_lines: int = LINES) -> str | None:
    """One line that says what to look at, by the last `num_lines`; None where nothing is known."""
    last = lines[-num_lines:]
    for pattern, cause in _CAUSES:
        for line in reversed(last):
            match = re.search(pattern, line)
            if match is not None:
                return cause.format(*match.groups())
    if exit_code == SIGNALLED + signal.SIGKILL and not any(map(_KILLS_ITSELF.search, last)):
        return "killed from outside: most often by the memory limit of the container or the machine"
    return None
