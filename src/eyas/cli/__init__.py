"""The command line: one command per verb. stdout carries results (JSON with --json), stderr carries people.

Nothing heavy is imported before the first line is shown; `eyas --help` does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from typing import Annotated, NoReturn

import typer

from eyas import __version__, log
from eyas.cli import data, doctor, draft, export, standing, states
from eyas.cli.app import app
from eyas.cli.edge import complain, leave, open_closed_streams, say, stop_by_exception
from eyas.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INCOMPLETE, EyasError

__all__ = ["app", "data", "doctor", "draft", "export", "main", "standing", "states"]

TYPER_INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt before we see it."""


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what libraries log, too.")] = False,
) -> None:
    if verbose:
        logging.getLogger().setLevel(logging.INFO)
        log.setup(verbose=True)


@app.command()
def version() -> None:
    """Print the version."""
    say(f"eyas {__version__}")


def main() -> NoReturn:
    """Entry point: every error of ours becomes one line per problem and its exit code."""
    open_closed_streams()
    log.setup()
    try:
        # From here on, not only from when a command is ready for it: what it imports takes seconds.
        stop_by_exception()
        code = app(standalone_mode=False)
        if code == TYPER_INTERRUPTED:
            raise KeyboardInterrupt
    except EyasError as error:
        complain(str(error))
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("stopped on request; the same command goes on from here")
        code = EXIT_INCOMPLETE
    except BrokenPipeError:
        code = 0  # whoever read the output has seen enough of it
    except Exception as error:  # noqa: BLE001 - the command line's edge
        # Typer's own usage errors; it brings them under another name with every few releases.
        if callable(show := getattr(error, "show", None)):
            show()
            leave(EXIT_CONFIG)
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
        complain(f"internal error, please report it with the lines above: {type(error).__name__}: {error}")
        code = EXIT_FAILED
    leave(code if isinstance(code, int) else 0)
