"""The doctor's commands: what is wrong when something is worse than it should be."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas import log
from eyas.cli.app import AsJson, DraftDir, Overrides, RunFile, app
from eyas.cli.edge import first_line, load, need, need_file, result, say, stop_by_exception
from eyas.errors import EXIT_FAILED, Stopped

doctor_app = typer.Typer(help="Finds the broken link between data, drafter and server.", no_args_is_help=True)
app.add_typer(doctor_app, name="doctor")


@doctor_app.callback()
def _doctor() -> None:
    pass


@doctor_app.command()
def acceptance(
    run: RunFile,
    overrides: Overrides = None,
    draft: DraftDir = None,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="An SGLang or vLLM server that serves the drafter.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which link is broken when few drafted tokens are accepted; exit 1 when one is."""
    first_line("doctor", run)
    tree = load(run, overrides or ())
    need(tree.target.path, "target.path")
    states = need(tree.capture.out, "capture.out")
    table_path = need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    stop_by_exception()
    from eyas.data.table import SampleTable
    from eyas.doctor.findings import Finding
    from eyas.doctor.run import Ask, examine
    from eyas.train import drafts

    ask = Ask(drafts.find_draft(draft, tree.train.out), SampleTable.open(table_path), states, server or "")
    progress = log.Progress(interval_s=tree.train.interval_s)

    def tell(finding: Finding) -> None:
        if not as_json:
            progress.close()  # a live line would stand in front of it
            say(finding.line())

    try:
        report = examine(tree, ask, progress, tell)
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was written, the same command starts anew") from None
    progress.close()
    result(report.as_dict(), [f"verdict {report.verdict()}"], as_json=as_json)
    if report.cause is not None:
        raise typer.Exit(EXIT_FAILED)
