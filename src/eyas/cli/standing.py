"""The commands that say where something stands: a capture, a server, a training, the answers in a file."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.cli.app import AsJson, DataSetDir, app
from eyas.cli.edge import result, say, stop_by_exception
from eyas.errors import EXIT_FAILED, ConfigError


@app.command()
def status(root: DataSetDir, as_json: AsJson = False) -> None:
    """Say where a capture, a training, or the answers in a file stand: from any shell, also after it was killed."""
    stand = _stand(root)
    result(stand.about, stand.lines, as_json=as_json)
    if stand.damaged:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def watch(root: DataSetDir, interval_s: Annotated[float, typer.Option(min=0.2)] = 2.0) -> None:
    """Show the status again and again, until what runs there ends."""
    stop_by_exception()
    while True:
        stand = _stand(root)
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[2J\x1b[H")
        say("\n".join(stand.lines))
        if not stand.alive:
            return
        time.sleep(interval_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stand:
    """Where a capture, a server without one, or the answers in a file stand."""

    about: dict[str, Any]
    lines: list[str]
    alive: bool | None
    damaged: bool = False


def _stand(root: Path) -> _Stand:
    from eyas.generate import status as answers

    if answers.is_answers(root):
        told = answers.status(root)
        return _Stand(told.as_dict(), told.lines(), told.alive)
    if root.is_file():
        raise ConfigError(f"{root}: a file that 'eyas generate' did not write; name it, or a run's directory")
    from eyas.train import status as training

    if training.is_run(root):
        trained = training.status(root)
        return _Stand(trained.as_dict(), trained.lines(), trained.alive, bool(trained.problems))
    from eyas.capture.status import status as look
    from eyas.serve.status import server_status
    from eyas.store.layout import Layout

    server = server_status(root)
    about_server = {"server": None if server is None else dataclasses.asdict(server)}
    server_lines = [] if server is None else server.lines()
    if server is not None and not Layout(root).head.exists():
        return _Stand(about_server, [f"{root}: nothing is captured yet", *server_lines], server.alive)
    found = look(root)
    return _Stand(
        dataclasses.asdict(found) | about_server, [*found.lines(), *server_lines], found.alive, bool(found.problems)
    )
