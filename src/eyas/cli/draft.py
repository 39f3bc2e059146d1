"""The commands around a drafter: its training, its acceptance, its page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas import config, log
from eyas.cli.app import AsJson, DraftDir, Overrides, RunFile, app
from eyas.cli.edge import (
    first_line,
    load,
    need,
    need_directory,
    need_file,
    not_the_run_file,
    result,
    say,
    stop_by_event,
    stop_by_exception,
)
from eyas.errors import ConfigError, Stopped

if TYPE_CHECKING:
    from eyas.config import Config
    from eyas.evaluate.server_runs import Own


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
    draft: DraftDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="JSON; default: beside the checkpoint.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Decode speculatively, beside plain decoding.")] = False,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="Measure a running SGLang or vLLM with a drafter.")
    ] = None,
    baseline_server: Annotated[
        str | None, typer.Option("--baseline-server", metavar="URL", help="With --server: the same without a drafter.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="JSONL of conversations or ids; default: a built-in set."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of the set at most.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many tokens a drafter gets accepted: from captured states, in real decoding, or on a running server."""
    progress = first_line("evaluate", run)
    tree = load(run, overrides or ())
    need(tree.target.path, "target.path")
    if not (decode or server) and (prompts is not None or limit is not None):
        raise ConfigError("--prompts and --limit need --decode or --server URL")
    if baseline_server is not None and server is None:
        raise ConfigError("--baseline-server needs --server URL, the server with the drafter")
    if out is not None:
        not_the_run_file(run, out, "--out")
        if out.is_dir():
            raise ConfigError(f"--out {out}: is a directory; name a file in it")
    stop_by_exception()
    from eyas.train import drafts

    def found() -> Path:
        return drafts.find_draft(draft, tree.train.out)

    if server is not None and out is None and draft is None and tree.train.out is None:
        raise ConfigError("where is the finding to stand? give --out FILE, or --draft DIR to put it beside the drafter")
    # A server has its drafter already.
    if server is None or out is None or decode:
        found()
    try:
        if server is not None:
            own = found() if decode else None
            name, receipt = _on_servers(tree, (server, baseline_server), own, prompts, limit, progress)
        elif decode:
            name, receipt = _in_process(tree, found(), prompts, limit, progress)
        else:
            name, receipt = _from_states(tree, found(), progress)
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was written, the same command starts anew") from None
    file = out if out is not None else drafts.beside(found(), name)
    receipt = dataclasses.replace(receipt, file=str(file))
    progress.close()
    # First of all it is said: minutes or hours of work do not end with a file that cannot be written.
    result(receipt.as_dict(), receipt.lines(), as_json=as_json)
    drafts.write(file, receipt.as_dict())


def _from_states(tree: Config, draft: Path, progress: log.Progress) -> tuple[str, Any]:
    """The name of the file and the receipt."""
    from eyas.data.table import SampleTable
    from eyas.evaluate import offline

    states = need(tree.capture.out, "capture.out")
    table_path = need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    receipt = offline.evaluate(
        tree.evaluate, tree.train, tree.target, draft=draft, table=SampleTable.open(table_path), states=states,
        progress=progress,
    )  # fmt: skip
    return offline.FILE, receipt


def _in_process(
    tree: Config, draft: Path, prompts: Path | None, limit: int | None, progress: log.Progress
) -> tuple[str, Any]:
    from eyas.evaluate import compare

    receipt = compare.evaluate(
        tree.evaluate, tree.target, tree.engine, tree.data, draft=draft, prompts=prompts, limit=limit,
        progress=progress,
    )  # fmt: skip
    return compare.FILE, receipt


def _on_servers(
    tree: Config,
    urls: tuple[str, str | None],
    draft: Path | None,
    prompts: Path | None,
    limit: int | None,
    progress: log.Progress,
) -> tuple[str, Any]:
    """With `draft`, the prompts are decoded in this process, too, and what comes out is compared."""
    from eyas.evaluate import server, server_receipt
    from eyas.generate.key import read_key

    def own(num_draft_tokens: int | None) -> Own:
        assert draft is not None
        # In chains as long as the server's.
        k = num_draft_tokens or tree.evaluate.num_draft_tokens
        like = tree.model_copy(update={"evaluate": tree.evaluate.model_copy(update={"num_draft_tokens": k})})
        own: Own = _in_process(like, draft, prompts, limit, progress)[1].own()
        return own

    receipt = server.evaluate(
        tree.evaluate, tree.target, tree.data, servers=server.Servers(*urls), key=read_key(tree.generate),
        prompts=prompts, limit=limit, own=own if draft is not None else None, progress=progress,
    )  # fmt: skip
    return server_receipt.FILE, receipt


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
