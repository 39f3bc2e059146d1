"""The command line's edge: signals, streams, and the checks before a stage starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from eyas import config, log
from eyas.errors import ConfigError

if TYPE_CHECKING:
    from eyas.config import Config
    from eyas.engine.servers import Make


def load(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration, with `serve.python` as absolute as its paths are: it is saved beside what it makes."""
    from eyas.serve.command import absolute

    tree = config.load(run, overrides)
    given_here = any(override.partition("=")[0].strip() == "serve.python" for override in overrides)
    python = absolute(tree.serve.python, Path.cwd() if given_here else run.resolve().parent)
    return tree.model_copy(update={"serve": tree.serve.model_copy(update={"python": python})})


def server_engine(kind: str) -> Make:
    """The engine that captures from one server of this `engine.kind`."""
    if kind == "vllm":
        from eyas.engine.vllm.client import VllmEngine

        return VllmEngine
    from eyas.engine.sglang.client import SglangEngine

    return SglangEngine


def need(path: Path | None, name: str) -> Path:
    if path is None:
        raise ConfigError(f"{name} is not set; give it in the run file or as {name}=PATH")
    return path


def need_file(path: Path | None, name: str, how: str) -> Path:
    found = need(path, name)
    if not found.is_file():
        raise ConfigError(f"{name}: {found} is {'a directory' if found.is_dir() else 'not there'}; {how}")
    return found


def not_the_run_file(run: Path, out: Path | None, name: str) -> None:
    if out is not None and out.exists() and out.samefile(run):
        raise ConfigError(f"{name}: {out} is the run file itself; choose another name")


def need_directory(path: Path | None, name: str) -> Path:
    found = need(path, name)
    if found.exists() and not found.is_dir():
        raise ConfigError(f"{name}: {found} is a file; choose another directory")
    return found


def first_line(verb: str, run: Path) -> log.Progress:
    """The first sign of life, before anything slow is imported."""
    progress = log.Progress()
    progress.show(f"{verb}: {run}, pid {os.getpid()}", force=True)
    return progress


def stop_signals() -> Iterable[signal.Signals]:
    """The signals that ask for a stop; one that is ignored (nohup's SIGHUP) stays so."""
    return [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]


def stop_by_event() -> threading.Event:
    """A stop is asked for by the first signal and enforced by the second."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for s in stop_signals():
        signal.signal(s, on_signal)
    return stop


def stop_by_exception() -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for s in stop_signals():
        signal.signal(s, on_signal)


def result(value: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    say(json.dumps(value, default=str) if as_json else "\n".join(lines))


def open_closed_streams() -> None:
    """A daemon or a cron job may start us with stdout or stderr closed: what is said there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open for as long as we run


def say(text: str) -> None:
    """To stdout. What was done is done, also when it cannot be told: the exit code speaks of the work."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        complain(f"the result cannot be printed: {error.strerror}")


def complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in text.splitlines() or [""]:
            sys.stderr.write(f"eyas: {line}\n")
        sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """End the process now: an engine's thread may be in a computation that nobody waits for any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
