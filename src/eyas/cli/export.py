"""The command that hands a drafter to serving engines, and looks at one that was handed over."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas import log
from eyas.cli.app import AsJson, app
from eyas.cli.edge import load, need, result, stop_by_exception
from eyas.errors import EXIT_FAILED, ConfigError, Stopped

if TYPE_CHECKING:
    from eyas.config import TargetConfig


DRAFT_TOKENS = 3


class EngineChoice(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"
    SPECULATORS = "speculators"


class DtypeChoice(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@app.command()
def export(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run file, a training, one of its checkpoints, or a drafter's directory."),
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The directory to write; it must not exist.")
    ] = None,
    engine: Annotated[EngineChoice | None, typer.Option("--for", help="Who is to load it.")] = None,
    dtype: Annotated[DtypeChoice | None, typer.Option(help="Of the weights; default: bfloat16.")] = None,
    with_embedding: Annotated[
        bool, typer.Option("--with-embedding", help="Write the target's embedding, too; engines share it otherwise.")
    ] = False,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a chain, in the launch lines; default: 3.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The target; default: that of the run or of the training.")
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What others load the target by; goes into the card.")
    ] = None,
    aux_layers: Annotated[
        str | None,
        typer.Option(metavar="K,K,K", help="Hidden-state indices, for a drafter that does not say which it reads."),
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="OUT", help="Write nothing; audit the export that is there.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --check: the checkpoint that it was made from.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a drafter as SGLang, vLLM or speculators load it, with a card; or check one that was written."""
    progress = log.Progress()
    progress.show(f"export: {check or run}, pid {os.getpid()}", force=True)
    stop_by_exception()
    if check is not None:
        if run is not None or out is not None:
            raise ConfigError("--check OUT writes nothing: give no RUN and no OUT beside it")
        given = {
            "--dtype": dtype, "--with-embedding": with_embedding, "--draft-tokens": draft_tokens,
            "--target-name": target_name, "--aux-layers": aux_layers,
        }  # fmt: skip
        if idle := [name for name, value in given.items() if value]:
            raise ConfigError(f"--check OUT compares with what OUT says of itself: leave {', '.join(idle)} away")
        _check(check, engine, target=target, draft=draft, as_json=as_json)
        return
    if run is None or out is None or engine is None:
        raise ConfigError("give RUN, OUT and --for sglang, vllm or speculators; or --check OUT")
    if draft is not None:
        raise ConfigError("--draft goes with --check; RUN itself may be a checkpoint or a drafter")
    _export(
        run,
        out,
        engine,
        dtype=dtype or DtypeChoice.BFLOAT16,
        with_embedding=with_embedding,
        draft_tokens=draft_tokens or DRAFT_TOKENS,
        target=target,
        target_name=target_name,
        aux_layers=_layers(aux_layers),
        as_json=as_json,
    )


def _export(
    run: Path,
    out: Path,
    engine: EngineChoice,
    *,
    dtype: DtypeChoice,
    with_embedding: bool,
    draft_tokens: int,
    target: Path | None,
    target_name: str | None,
    aux_layers: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    from eyas.export.run import Wanted
    from eyas.export.run import export as stage

    found, of_run = _source(run)
    path = target or (of_run.path if of_run else None)
    if path is None:
        raise ConfigError(f"{run}: does not say which target it is for; give --target DIR")
    wanted = Wanted(
        engine.value,
        dtype.value,
        with_embedding=with_embedding,
        num_draft_tokens=draft_tokens,
        target_name=target_name,
    )
    try:
        receipt = stage(
            found,
            out,
            wanted,
            target=path,
            aux_layers=aux_layers,
            trust_remote_code=bool(of_run and of_run.trust_remote_code),
        )
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was written") from None
    result(receipt.as_dict(), receipt.lines(), as_json=as_json)


def _check(out: Path, engine: EngineChoice | None, *, target: Path | None, draft: Path | None, as_json: bool) -> None:
    from eyas.export.check import check as audit
    from eyas.export.check import source_of
    from eyas.train.drafts import find_draft

    found = None if draft is None else find_draft(draft, None)
    of_run = _target_of(found or source_of(out)) if target is None else None
    report = audit(
        out,
        engine=engine.value if engine else None,
        target=target or (of_run.path if of_run and of_run.path and of_run.path.is_dir() else None),
        draft=found,
        trust_remote_code=bool(of_run and of_run.trust_remote_code),
    )
    result(report.as_dict(), report.lines(), as_json=as_json)
    if report.faults:
        raise typer.Exit(EXIT_FAILED)


def _source(run: Path) -> tuple[Path, TargetConfig | None]:
    """The drafter that is meant, and its target as far as its run file or its training says it."""
    from eyas.train.drafts import find_draft

    if run.is_file():
        tree = load(run, ())
        return find_draft(None, need(tree.train.out, "train.out")), tree.target
    if not run.is_dir():
        raise ConfigError(f"{run}: no such file or directory; give a run file, a training or a drafter's directory")
    found = find_draft(run, None)
    return found, _target_of(found)


def _target_of(draft: Path | None) -> TargetConfig | None:
    """As the training that the drafter lies in was configured."""
    from eyas.train.drafts import training_of

    training = None if draft is None else training_of(draft)
    if training is None or not (training / "run.toml").is_file():
        return None
    return load(training / "run.toml", ()).target


def _layers(given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ConfigError(f"--aux-layers {given}: numbers with commas between them are wanted, like 2,15,27") from None
