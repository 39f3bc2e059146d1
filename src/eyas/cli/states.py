"""The commands around a data set of hidden states: its cost, its server, its capture, its soundness."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas import config, log
from eyas.cli.app import AsJson, DataSetDir, Overrides, RunFile, app
from eyas.cli.edge import (
    first_line,
    load,
    need,
    need_directory,
    need_file,
    result,
    say,
    server_engine,
    stop_by_event,
    stop_by_exception,
)
from eyas.errors import EXIT_FAILED, ConfigError, EngineUnavailable

if TYPE_CHECKING:
    from eyas.capture.check import Head
    from eyas.config import Config
    from eyas.engine.base import Engine


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
    progress = first_line("plan", run)
    tree = config.load(run, overrides or ())
    out = need_directory(tree.capture.out, "capture.out")
    table_path = need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
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
    about = dataclasses.asdict(found) | {
        "total_bytes": found.total_bytes,
        "seconds": found.seconds,
        "fingerprint": info.spec.fingerprint,
        "obstacles": obstacles,
        "go": not obstacles,
    }
    result(about, lines, as_json=as_json)
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
    """Start a server that captures and keep it running: `engine.kind` says which, `engine.url` where."""
    progress = first_line("serve", run)
    tree = load(run, overrides or ())
    stop = stop_by_event()
    from eyas.serve.command import KINDS, plan_server
    from eyas.serve.run import prepare, running_server
    from eyas.serve.run import serve as stage

    if plugin is not None:
        kind = KINDS.get(tree.engine.kind)
        if kind is None:
            raise ConfigError(f'engine.kind is \'{tree.engine.kind}\', which needs no plugin; set "sglang" or "vllm"')
        try:
            kind.write_plugin(plugin)
        except OSError as error:
            raise ConfigError(f"--plugin {plugin}: {error.strerror}; give a directory to be made or filled") from None
        progress.close()
        say(
            f"{plugin}: put it first on the server's PYTHONPATH, and mount the staging directory and the settings file "
            f"at the same paths; 'eyas serve {run} --print' shows command and environment, and writes the settings"
        )
        return
    need_directory(tree.capture.out, "capture.out")
    server = plan_server(tree.serve, tree.engine, tree.target, tree.capture)
    running = None if show else running_server(server)
    if running is not None:
        progress.close()
        say(f"{running}\nnext: eyas capture {run}")
        return
    limits = prepare(server, tree.data.samples, config.dump(tree))
    if show:
        progress.close()
        say(server.shell())
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
    progress = first_line("capture", run)
    tree = load(run, overrides or ())
    out = need_directory(tree.capture.out, "capture.out")
    table_path = need_file(tree.data.samples, "data.samples", "run 'eyas prepare'")
    progress = log.Progress(interval_s=tree.capture.interval_s)
    from eyas.capture.absent import AbsentEngine
    from eyas.capture.run import capture as stage
    from eyas.data.table import SampleTable

    table = SampleTable.open(table_path)
    # Until the engine has said what it is, Ctrl-C ends us at once; from then on the run stops in good order.
    stop_by_exception()
    engine, head = _engine(tree)
    try:
        engine.info()
    except EngineUnavailable as error:
        engine = AbsentEngine(out, tree.target, tree.capture.aux_layers, error)
    stop = stop_by_event()
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
        if len(receipt.samples_by_server) > 1:
            new += "; " + ", ".join(f"{url} answered {n:,}" for url, n in sorted(receipt.samples_by_server.items()))
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
    result(dataclasses.asdict(receipt), lines, as_json=as_json)


@app.command()
def verify(
    root: DataSetDir,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop records of damaged shards; capture redoes them.")
    ] = False,
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the samples whose values are read.")] = 1.0,
    parity: Annotated[
        str | None,
        typer.Option(metavar="hf,vllm=URL,…", help="Compare values with these engines instead; 0 where all agree."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a data set against its plan and records: 0 complete and sound, 1 damaged, 3 sound but incomplete."""
    progress = log.Progress()
    progress.show(f"verify: {root}", force=True)
    stop_by_exception()
    if parity is not None:
        if repair:
            raise ConfigError("--parity repairs nothing: give it without --repair")
        from eyas.cli.parity import parity as compare

        raise typer.Exit(compare(root, parity, progress, as_json=as_json))
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
    result(json.loads(report.to_json()), lines, as_json=as_json)
    raise typer.Exit(report.exit_code)


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
    result(dataclasses.asdict(receipt), lines, as_json=as_json)


def _engine(tree: Config) -> tuple[Engine, Head | None]:
    """The engine of the configuration, and the target's head for value checks."""
    if tree.engine.kind == "fake":
        fake = importlib.import_module("eyas.engine.fake")
        engine = fake.FakeEngine(tree.capture.aux_layers, fake.settings_from(tree.engine.extra))
        return engine, engine.head
    from eyas.capture.check import DeferredHead
    from eyas.engine.hf import HfEngine
    from eyas.target.head import TargetHead

    path, trust = need(tree.target.path, "target.path"), tree.target.trust_remote_code
    head = DeferredHead(lambda: TargetHead.load(path, trust_remote_code=trust))
    if tree.engine.kind != "hf":
        from eyas.engine.servers import open_servers

        return open_servers(server_engine(tree.engine.kind), tree.target, tree.engine, tree.capture.aux_layers), head
    pinned_bytes = tree.capture.in_flight_bytes * 5 // 4
    engine = HfEngine(tree.target, tree.engine, tree.capture.aux_layers, pinned_bytes=pinned_bytes)
    return engine, head


def _require_same_spec(out: Path, spec: Any) -> None:
    from eyas.store.layout import Layout
    from eyas.store.writer import require_spec

    if Layout(out).head.exists():
        require_spec(Layout(out).head, spec)
