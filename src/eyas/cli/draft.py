"""The commands around a drafter: its training, its acceptance, its page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas import config, log
from eyas.cli.app import AsJson, Overrides, RunFile, app
from eyas.cli.edge import (
    first_line,
    load,
    need,
    need_directory,
    need_file,
    result,
    say,
    stop_by_event,
    stop_by_exception,
)
from eyas.errors import ConfigError, Stopped


@app.command()
def train(run: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Train a drafter from the captured states; started again, it goes on from its latest checkpoint.

    On several GPUs: torchrun --nproc-per-node 8 --no-python eyas train RUN.TOML
    """
    progress = first_line("train", run)
    tree = load(run, overrides or ())
    need_directory(tree.train.out, "train.out")
    need(tree.target.path, "target.path")
    states = need(tree.capture.out, "capture.out")
    table_path = need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    progress = log.Progress(interval_s=tree.train.interval_s)
    stop = stop_by_event()
    from eyas.data.table import SampleTable
    from eyas.train.run import train as stage

    receipt = stage(
        tree.train,
        tree.draft,
        tree.target,
        table=SampleTable.open(table_path),
        states=states,
        resolved=config.dump(tree),
        progress=progress,
        stop=stop,
    )
    progress.close()
    if receipt is not None:
        result(receipt.as_dict(), receipt.lines(), as_json=as_json)


@app.command()
def evaluate(
    run: RunFile,
    overrides: Overrides = None,
    draft: Annotated[
        Path | None, typer.Option("--draft", metavar="DIR", help="A checkpoint; default: the best one of train.out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="JSON; default: beside the checkpoint.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Decode speculatively, beside plain decoding.")] = False,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="With --decode: JSONL of conversations or ids.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="With --decode: prompts at most.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many tokens a drafter gets accepted: from the captured states, or in real speculative decoding."""
    progress = first_line("evaluate", run)
    tree = load(run, overrides or ())
    need(tree.target.path, "target.path")
    if decode != (prompts is not None) or (limit is not None and not decode):
        raise ConfigError("--decode needs --prompts FILE; --prompts and --limit need --decode")
    stop_by_exception()
    from eyas.train import drafts

    found = drafts.find_draft(draft, tree.train.out)
    try:
        if prompts is not None:
            from eyas.evaluate import compare

            name = compare.FILE
            receipt: Any = compare.evaluate(
                tree.evaluate, tree.target, tree.engine, tree.data, draft=found, prompts=prompts, limit=limit,
                progress=progress,
            )  # fmt: skip
        else:
            from eyas.data.table import SampleTable
            from eyas.evaluate import offline

            name = offline.FILE
            states = need(tree.capture.out, "capture.out")
            table_path = need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
            receipt = offline.evaluate(
                tree.evaluate, tree.train, tree.target, draft=found, table=SampleTable.open(table_path), states=states,
                progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was written, the same command starts anew") from None
    receipt = dataclasses.replace(receipt, file=str(out or drafts.beside(found, name)))
    drafts.write(Path(receipt.file), receipt.as_dict())
    progress.close()
    result(receipt.as_dict(), receipt.lines(), as_json=as_json)


@app.command()
def report(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="A training: the directory named by train.out.")],
) -> None:
    """Write a training's page with its curves anew, while it runs or after it ended."""
    from eyas.train.report import plots_missing, write_report

    for path in write_report(root):
        say(str(path))
    if plots_missing():
        say(plots_missing())
