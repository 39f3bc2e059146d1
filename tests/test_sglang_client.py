"""The `sglang` engine and the capture stage against a stand-in server: real HTTP and staging, a tiny model's values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tiny_models
from eyas.capture.estimate import probe_tokens_per_s
from eyas.capture.run import Receipt
from eyas.config import EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.engine import asking, client, reference, session, staged
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest
from eyas.engine.hf import HfEngine
from eyas.engine.sglang.client import SglangEngine
from eyas.engine.sglang.server import Sglang
from eyas.engine.staged import RequestName
from eyas.engine.stager import Stager
from eyas.errors import (
    CaptureMismatch,
    ConfigError,
    EngineError,
    EngineGone,
    EngineUnavailable,
    EyasError,
    SpecMismatch,
    Stopped,
)
from eyas.store.layout import Layout
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.target.head import TargetHead
from server_world import (
    LENGTHS,
    TOKEN_BYTES,
    World,
    after_probe,
    cfg,
    events,
    first_times,
    make_table,
    of_length,
    rejects,
    require_sound,
    require_values,
)
from stand_in_server import Act, Asked, right


@pytest.fixture(scope="module")
def own(target: Path) -> HfEngine:
    """The same target in this process."""
    return HfEngine(TargetConfig(path=target), EngineConfig(dtype="float32", device="cpu"), (1, 2, 3))


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    return make_table(tmp_path / "samples.parquet", LENGTHS)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes half a minute with a real server takes half a second here."""
    monkeypatch.setattr(asking, "STAGED_PATIENCE_S", 0.3)
    monkeypatch.setattr(asking, "QUIET_PATIENCE_S", 0.2)


@pytest.fixture
def world(target: Path, staging: Path, head: TargetHead) -> Iterator[World]:
    found = World(target, staging, head)
    yield found
    found.close()


class Sampler:
    """The most bytes that lay in each run's directory, looked at all the time."""

    def __init__(self, staging: Path) -> None:
        self.most: dict[str, int] = {}
        self._staging, self._stop = staging, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.0005):
            for run in staged.runs(self._staging):
                total = 0
                with contextlib.suppress(FileNotFoundError):
                    for path in run.iterdir():
                        total += path.stat().st_size if path.suffix == ".states" else 0
                self.most[run.name] = max(self.most.get(run.name, 0), total)


# --- capturing


def test_many_samples_in_flight_become_what_the_target_itself_gives(
    world: World, out: Path, tmp_path: Path, own: HfEngine
) -> None:
    table = make_table(tmp_path / "many.parquet", [1 + (17 * i) % 97 for i in range(64)])
    server = world.serve()
    settings = cfg(out, shard_tokens=400, check_fraction=0.1, in_flight_bytes=10_000_000)
    receipt = world.capture(table, settings, world.engine(check_layers="auto"))
    assert (receipt.committed, receipt.rejected, receipt.checked_samples > 4) == (64, 0, True)
    assert server.most_in_flight > 8
    require_sound(out)
    require_values(out, table, own)
    assert list(world.staging.iterdir()) == []
    (line,) = [row["found"] for row in events(out, "probe")][:1]
    assert "log-probabilities differ by" in line and "layers by" in line and "alone against batch by" in line
    assert "(1, 2, 3)" in line and "probe of 4 samples is right" in world.said.getvalue()
    # A data set of the engine in this process would be the same one, but for rounding.
    assert own.info().spec.fingerprint == receipt.fingerprint


def test_staged_bytes_stay_within_a_quota_of_a_few_samples(
    world: World, out: Path, tmp_path: Path, target: Path
) -> None:
    table = make_table(tmp_path / "many.parquet", [10 + i % 7 for i in range(40)])
    limit = 5 * 16 * TOKEN_BYTES
    world.serve(staged_bytes=limit)
    with Sampler(world.staging) as sampler:
        receipt = world.capture(table, cfg(out))
    assert receipt.committed == 40 and receipt.retries == 0
    (most,) = sampler.most.values()
    assert 0 < most <= limit * 9 // 10 + 5 * 1024  # headers are not counted
    require_sound(out)


def test_a_sample_larger_than_the_share_passes_alone_and_one_larger_than_all_is_refused(
    world: World, out: Path, table: SampleTable
) -> None:
    world.serve(staged_bytes=14 * TOKEN_BYTES)
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.rejects_by_reason) == (11, {"refused": 1})
    ((_, detail),) = rejects(out).values()
    assert "give the server more staged_bytes" in detail and f"{14 * TOKEN_BYTES} may be staged" in detail
    require_sound(out)


def test_two_clients_share_one_server_and_both_end(world: World, tmp_path: Path) -> None:
    tables = [make_table(tmp_path / f"{i}.parquet", [8 + (i + j) % 9 for j in range(30)]) for i in range(2)]
    limit = 12 * 17 * TOKEN_BYTES
    world.serve(staged_bytes=limit)
    engines = [world.engine(), world.engine()]
    for engine in engines:
        engine.info()
        engine._open_run()  # both are there from the beginning
    receipts: list[Receipt] = []

    def run(i: int) -> None:
        receipts.append(world.capture(tables[i], cfg(tmp_path / f"out{i}"), engines[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    with Sampler(world.staging) as sampler:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert [r.committed for r in receipts] == [30, 30]
    assert len(sampler.most) == 2 and max(sampler.most.values()) <= limit * 9 // 10 + 12 * 1024
    assert min(sampler.most.values()) <= limit * 9 // 20 + 6 * 1024
    for i in range(2):
        require_sound(tmp_path / f"out{i}")


KILLED_CLIENT = """
import os, signal, sys
from pathlib import Path
from eyas.engine import asking, client, session, staged
run = staged.Run(Path(sys.argv[1]))
(run.path / "7.states").write_bytes(bytes(5000))
print(run.token, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_client_left_goes_at_the_next_start_and_a_live_one_stays(
    world: World, out: Path, table: SampleTable, caplog: pytest.LogCaptureFixture
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_CLIENT, str(world.staging)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    left = world.staging / done.stdout.strip()
    live = staged.Run(world.staging)
    (live.path / "3.states").write_bytes(b"live")
    assert (left / "7.states").exists()
    world.serve()
    world.capture(table, cfg(out))
    assert list(world.staging.iterdir()) == [live.path] and (live.path / "3.states").read_bytes() == b"live"
    assert "removed what 1 dead runs had left" in caplog.text and "5.00 kB" in caplog.text
    live.close()


def test_a_changed_server_is_compared_with_committed_samples(world: World, out: Path, table: SampleTable) -> None:
    world.serve()
    world.capture(table, cfg(out, limit=6))
    world.serve(sglang="0.0.later")
    world.capture(table, cfg(out, limit=9))
    rows = events(out, "recheck")
    assert 1 <= len(rows) <= 4 and all("sglang 0.0.stand-in -> sglang 0.0.later" in row["changed"] for row in rows)
    world.serve(sglang="0.0.wrong", noise=0.5)
    with pytest.raises(
        SpecMismatch, match=r"0\.0\.later -> sglang 0\.0\.wrong changed since the last commit"
    ) as caught:
        world.capture(table, cfg(out))
    assert caught.value.exit_code == 2
    require_no_more_than(out, 9)


def require_no_more_than(out: Path, num_samples: int) -> None:
    report = verify(out)
    assert report.problems == [] and len(DataSet(out)) == num_samples


def test_memory_of_answers_is_given_back(world: World, out: Path, table: SampleTable) -> None:
    world.serve()
    engine = world.engine()
    held: list[int] = []
    close = engine.close

    def look() -> None:
        if engine._session is None:
            return
        deadline = time.monotonic() + 2
        while engine._session.held_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        held.append(engine._session.held_bytes)
        close()

    engine.close = look  # type: ignore[method-assign]
    world.capture(table, cfg(out, check_fraction=0.5), engine)
    assert held == [0]
    assert str(world.staging) not in Path("/proc/self/maps").read_text()


# --- a server that goes


@pytest.mark.parametrize("how", ["reset", "while_idle"])
def test_a_server_that_is_killed_and_comes_back_costs_nothing(
    world: World, out: Path, table: SampleTable, own: HfEngine, how: str
) -> None:
    killed = threading.Event()

    def kill() -> None:
        if not killed.is_set():
            killed.set()
            world.servers[0].kill()
            threading.Timer(0.3, world.serve).start()

    act = Act(before=kill) if how == "reset" else Act(after=kill)
    world.serve(after_probe(lambda asked: act))
    receipt = world.capture(table, cfg(out, in_flight_bytes=30 * TOKEN_BYTES))
    assert killed.is_set() and (receipt.committed, receipt.rejected) == (len(LENGTHS), 0)
    require_sound(out)
    require_values(out, table, own)
    assert list(world.staging.iterdir()) == []


def test_a_server_is_waited_for_longer_than_for_a_sample_and_the_state_says_so(
    world: World, out: Path, table: SampleTable
) -> None:
    killed = threading.Event()

    def kill() -> None:
        if not killed.is_set():
            killed.set()
            world.servers[0].kill()
            threading.Timer(4.0, world.serve).start()

    world.serve(after_probe(lambda asked: Act(before=kill)))
    impatient = cfg(out, timeout_s=1.0, timeout_s_per_1k_tokens=0.0, backoff_s=0.0, in_flight_bytes=30 * TOKEN_BYTES)
    receipt = world.capture(table, impatient)
    assert (receipt.committed, receipt.rejected) == (len(LENGTHS), 0)
    states = [row["state"] for row in events(out, "state")]
    waiting = f"waiting for the server at {world.servers[0].url}, which is gone"
    assert states[states.index("capturing") :] == ["capturing", waiting, "capturing", "complete"]
    assert waiting in world.said.getvalue()


@pytest.mark.parametrize("reconnect_s", [0.0, 0.6])
def test_a_server_that_stays_away_ends_the_run_resumably(
    world: World, out: Path, table: SampleTable, reconnect_s: float
) -> None:
    server = world.serve(after_probe(lambda asked: Act(before=server_kill) if len(asked.ids) == 9 else None))
    server_kill = server.kill
    start = time.monotonic()
    with pytest.raises(EngineGone, match=r"did not come back within .*engine\.reconnect_s") as caught:
        world.capture(table, cfg(out), world.engine(reconnect_s=reconnect_s))
    assert caught.value.exit_code == 3 and reconnect_s <= time.monotonic() - start < 10
    assert list(world.staging.iterdir()) == []
    world.serve()
    assert world.capture(table, cfg(out)).committed == len(LENGTHS)
    require_sound(out)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"layers": (0, 2, 3)}, ConfigError, r"came back different: aux_layers: \[1, 2, 3\] there, \[0, 2, 3\] here"),
        ({"plugin": False}, EngineError, "it runs without the capture plugin; start it with 'eyas serve'"),
        ({"hidden_size": 64}, ConfigError, "has hidden_size 32, .* serves 64"),
        ({"sglang": "9"}, EngineError, "came back different: version 0.0.stand-in -> 9; run the same command again"),
        ({"model_path": "/b"}, EngineError, "came back different: model .* -> /b"),
    ],
)
def test_a_server_that_comes_back_otherwise_is_named(
    world: World, out: Path, table: SampleTable, options: dict[str, Any], error: type[EyasError], text: str
) -> None:
    def replace() -> None:
        if not world.servers[0].dead:
            world.servers[0].kill()
            world.serve(**options)

    world.serve(after_probe(lambda asked: Act(before=replace)))
    with pytest.raises(error, match=text) as caught:
        world.capture(table, cfg(out, in_flight_bytes=21 * TOKEN_BYTES))
    assert type(caught.value) is error
    assert rejects(out) == {}
    report = verify(out)
    assert report.problems == []


def test_a_server_that_was_replaced_between_two_requests_is_noticed(world: World) -> None:
    world.serve().kill()
    world.serve()
    engine = world.engine()
    assert lengths(list(engine.capture(Batch([request(4)])))) == [4]
    world.servers[-1].kill()
    world.serve(layers=(0, 2, 3))  # nothing was in flight, so nothing broke
    what = r"stages hidden\.0, hidden\.2, hidden\.3, last as float32 of width 32, post-norm: not what it said of itself"
    with pytest.raises(EngineUnavailable, match=what):
        list(engine.capture(Batch([request(5)])))
    with pytest.raises(ConfigError, match=r"came back different: aux_layers: \[1, 2, 3\] there, \[0, 2, 3\] here"):
        list(engine.capture(Batch([request(5)])))


def test_a_server_of_another_directory_or_an_emptied_one_is_followed(
    world: World, out: Path, table: SampleTable, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()

    def replace() -> None:
        if not world.servers[0].dead:
            world.servers[0].kill()
            world.staging = other
            world.serve()

    world.serve(after_probe(lambda asked: Act(before=replace)))
    assert world.capture(table, cfg(out)).committed == len(LENGTHS)
    assert list(other.iterdir()) == []


@pytest.mark.slow
def test_a_server_process_that_is_killed_with_9_is_waited_for(
    world: World, out: Path, table: SampleTable, own: HfEngine
) -> None:
    world.serve()
    port = world.servers[0].port
    world.servers[0].kill()

    program = [sys.executable, str(Path(__file__).with_name("stand_in_server.py")), str(world.target)]
    starter = subprocess.Popen([*program, str(world.staging)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert starter.stdin is not None and starter.stdout is not None
    pids: list[int] = []

    def start() -> None:
        assert starter.stdin is not None and starter.stdout is not None
        starter.stdin.write(f"{port}\n".encode())
        starter.stdin.flush()
        pids.append(int(starter.stdout.readline()))

    def kill() -> None:
        os.kill(pids[-1], signal.SIGKILL)
        while Path(f"/proc/{pids[-1]}").exists():
            time.sleep(0.001)

    start()
    engine = world.engine(reconnect_s=60.0)
    answered = itertools.count()
    inner = engine.capture

    def kill_in_the_middle(source: Any) -> Iterator[CaptureAnswer | CaptureFailure]:
        for outcome in inner(source):
            if next(answered) == 7:
                kill()
                threading.Timer(0.2, start).start()
            yield outcome

    engine.capture = kill_in_the_middle  # type: ignore[method-assign]
    try:
        receipt = world.capture(table, cfg(out, in_flight_bytes=30 * TOKEN_BYTES), engine)
    finally:
        kill()
        starter.kill()
        starter.communicate()
    assert len(pids) == 2 and (receipt.committed, receipt.rejected) == (len(LENGTHS), 0)
    require_sound(out)
    require_values(out, table, own)


def test_what_a_killed_server_was_writing_goes_while_the_run_goes_on(
    world: World, out: Path, table: SampleTable
) -> None:
    left: list[Path] = []
    seen: list[list[bool]] = []

    def leave(asked: Asked) -> None:
        path = asked.name.path(world.staging)
        left.extend(path.with_name(f"{10**6 + i}.{path.suffix[1:]}.tmp") for i in range(2))
        for unfinished in left:
            unfinished.write_bytes(bytes(5000))
        os.utime(left[0], times=(0, time.time() - asking.UNFINISHED_PATIENCE_S - 1))
        # Another client that is killed meanwhile.
        done = subprocess.run([sys.executable, "-c", KILLED_CLIENT, str(world.staging)], stdout=subprocess.PIPE,
                              text=True, check=False)  # fmt: skip
        left.append(world.staging / done.stdout.strip())
        time.sleep(2.5)
        seen.append([path.exists() for path in left])

    world.serve(after_probe(of_length(9, lambda asked: Act(before=lambda: leave(asked)))))
    assert world.capture(table, cfg(out)).committed == len(LENGTHS)
    assert seen == [[False, True, False]]
    assert list(world.staging.iterdir()) == []


# --- a client that goes


CLIENT = """
import io, sys
from pathlib import Path
from eyas.capture.estimate import probe_tokens_per_s
from eyas.capture.run import capture
from eyas.config import CaptureConfig, EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.engine.sglang.client import SglangEngine
from eyas.log import Progress
target, url, table, cfg = sys.argv[1:]
engine = SglangEngine(
    TargetConfig(path=Path(target)), EngineConfig(kind="sglang", url=url, check_layers="off"), None
)
capture(CaptureConfig.model_validate_json(cfg), SampleTable.open(Path(table)), engine, None,
        progress=Progress(stream=io.StringIO()))
"""


def test_a_client_killed_with_9_resumes_to_the_same_data_set(
    world: World, out: Path, table: SampleTable, tmp_path: Path
) -> None:
    world.serve()
    whole = world.capture(table, cfg(tmp_path / "whole"))
    settings = cfg(out, in_flight_bytes=25 * TOKEN_BYTES)
    arguments = [str(world.target), world.servers[0].url, str(tmp_path / "samples.parquet"), settings.model_dump_json()]
    client_process: list[subprocess.Popen[bytes]] = []
    layout = Layout(out)

    def kill_after_a_commit(asked: Asked) -> Act | None:
        if layout.records.is_dir() and layout.record_ids() and client_process:
            client_process[0].kill()
        return None

    world.servers[0].script = kill_after_a_commit
    client_process.append(subprocess.Popen([sys.executable, "-c", CLIENT, *arguments]))
    assert client_process[0].wait(60) == -signal.SIGKILL
    client_process.clear()
    assert 0 < len(layout.record_ids()) < whole.shards
    assert len(staged.runs(world.staging)) == 1
    receipt = world.capture(table, settings)
    assert receipt.data_digest == whole.data_digest and receipt.captured_tokens < whole.tokens
    require_sound(out)
    assert list(world.staging.iterdir()) == []


# --- few descriptors


@pytest.mark.parametrize("spare", [3, 40])
def test_few_descriptors_are_told_in_one_line_or_are_enough(
    world: World, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """No more is opened than there is room for; the limit itself would hit the server in this process too."""
    table = make_table(tmp_path / "many.parquet", [10 + i % 7 for i in range(60)])
    server = world.serve()
    limit = len(list(Path("/proc/self/fd").iterdir())) + spare
    monkeypatch.setattr(client.resource, "getrlimit", lambda _: (limit, limit))
    if spare == 3:
        with pytest.raises(Stopped, match=rf"may have {limit} open files, too few .* 'ulimit -n'") as caught:
            world.capture(table, cfg(out))
        assert caught.value.exit_code == 3 and list(world.staging.iterdir()) == []
        monkeypatch.undo()
    assert world.capture(table, cfg(out)).committed == 60
    assert spare == 3 or 1 < server.most_in_flight <= (spare - client.OTHER_FILES) // 2
    require_sound(out)


# --- no server


def test_a_complete_data_set_needs_no_server(world: World, out: Path, table: SampleTable, tmp_path: Path) -> None:
    server = world.serve()
    settings = cfg(out)
    whole = world.capture(table, settings)
    server.kill()
    run_file = tmp_path / "run.toml"

    def again(*overrides: str) -> subprocess.CompletedProcess[str]:
        run_file.write_text(
            f"""
            [target]
            path = "{world.target}"
            [data]
            samples = "samples.parquet"
            [engine]
            kind = "sglang"
            url = "{server.url}"
            [capture]
            out = "out"
            min_free_bytes = 0
            shard_tokens = {settings.shard_tokens}
            """
        )
        command = [sys.executable, "-c", "from eyas.cli import main; main()", "capture", str(run_file), "--json"]
        return subprocess.run([*command, *overrides], capture_output=True, text=True, check=False, timeout=60)

    done = again()
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout)
    assert (receipt["committed"], receipt["pending"]) == (len(LENGTHS), 0)
    assert receipt["data_digest"] == whole.data_digest
    make_table(tmp_path / "samples.parquet", [*LENGTHS, 17])
    gone = f"eyas: no SGLang server answers at {server.url}"
    for overrides in [], ["capture.aux_layers=[0, 1]"]:
        done = again(*overrides)
        assert done.returncode == 3 and gone in done.stderr and done.stdout == ""
    require_no_more_than(out, len(LENGTHS))
    world.serve()
    assert world.capture(SampleTable.open(tmp_path / "samples.parquet"), settings).committed == len(LENGTHS) + 1


# --- stopping


@pytest.mark.parametrize("where", ["dead_server", "probe", "hang", "loading_the_check"])
def test_a_stop_ends_the_run_within_seconds(
    world: World, out: Path, table: SampleTable, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stop, release, once = threading.Event(), threading.Event(), itertools.count()

    def act(asked: Asked) -> Act | None:
        if where == "dead_server":
            if next(once) == 0:
                world.servers[0].kill()
                threading.Timer(0.7, stop.set).start()
        else:
            stop.set()
            release.wait(20)
        return None

    def load(*_: object) -> None:
        stop.set()
        release.wait(20)

    if where == "loading_the_check":
        monkeypatch.setattr(reference, "layer_check", load)
    world.serve(act if where == "probe" else right if where == "loading_the_check" else after_probe(act))
    monkeypatch.setattr("eyas.capture.loop.STOP_GRACE_S", 0.5)
    start = time.monotonic()
    try:
        with pytest.raises(Stopped, match="the same command goes on"):
            world.capture(table, cfg(out), stop=stop)
        assert time.monotonic() - start < 8
        assert world.engines[0]._session is None and staged.runs(world.staging) == []
    finally:
        release.set()
    if not world.servers[0].dead:
        world.servers[0].kill()
    monkeypatch.undo()
    world.serve()
    assert world.capture(table, cfg(out)).committed == len(LENGTHS)
    names = {thread.name for thread in threading.enumerate()}
    assert "sglang" not in names


# --- time-outs


def test_a_request_that_hangs_is_asked_again_and_its_late_file_goes(
    world: World, out: Path, table: SampleTable
) -> None:
    release = threading.Event()
    counts = itertools.count()
    late: list[Path] = []

    def hang(asked: Asked) -> Act | None:
        first = next(counts) == 0
        if first:
            late.append(asked.name.path(world.staging))
            return Act(before=lambda: release.wait(20))
        # Asked again: now the first is answered too, late, and this one waits until that was seen to.
        release.set()
        deadline = time.monotonic() + 5
        while not late[0].exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.append(late[0].exists())
        while late[0].exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.append(late[0].exists())
        return None

    seen: list[bool] = []
    world.serve(after_probe(of_length(9, hang)))
    receipt = world.capture(table, cfg(out, timeout_s=0.8))
    assert (receipt.committed, receipt.rejected, seen) == (len(LENGTHS), 0, [True, False])
    assert "no answer within 1 s" in events(out, "retry")[0]["reason"]
    require_sound(out)


def test_a_probe_for_the_plan_gives_a_hanging_server_up(world: World, out: Path, table: SampleTable) -> None:
    release = threading.Event()
    world.serve(of_length(20, lambda asked: Act(before=lambda: release.wait(20))))
    engine = world.engine()
    settings = cfg(out, timeout_s=0.5, timeout_s_per_1k_tokens=0.0)
    try:
        with pytest.raises(
            EngineUnavailable, match=r"within .*capture\.timeout_s.* after 11 of the probe's 12 samples"
        ):
            probe_tokens_per_s(table, settings, engine, lambda text: None)
    finally:
        release.set()
    assert probe_tokens_per_s(table, settings, engine, lambda text: None) > 0


@pytest.mark.parametrize("what", ["budget", "share"])
def test_requests_that_hang_do_not_keep_the_others_from_being_asked(
    world: World, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(session, "STALLED_S", 0.2)
    table = make_table(tmp_path / "many.parquet", [20 + i % 5 for i in range(12)])
    release = threading.Event()
    hung: Counter[tuple[int, ...]] = Counter()

    def hang(asked: Asked) -> Act | None:
        hung[tuple(asked.ids)] += 1
        return Act(before=lambda: release.wait(20)) if hung[tuple(asked.ids)] == 1 else None

    options = {"max_prefill_tokens": 30} if what == "budget" else {"staged_bytes": 6 * 25 * TOKEN_BYTES}
    world.serve(after_probe(hang), **options)
    try:
        receipt = world.capture(table, cfg(out, timeout_s=0.5))
    finally:
        release.set()
    assert (receipt.committed, receipt.rejected) == (12, 0) and len(hung) == 12
    require_sound(out)


# --- answers that are not right


def test_refusals_become_rejects_with_the_servers_words(world: World, out: Path, table: SampleTable) -> None:
    def words(num_tokens: int) -> str:
        return f"Input of {num_tokens} tokens is too odd"

    def abort(num_tokens: int, status: int) -> Act:
        reason = {"type": "abort", "status_code": status, "message": words(num_tokens)}
        return Act(meta={"finish_reason": reason}, said=[None])

    acts = {n: Act(status=status, text=words(n)) for n, status in ((5, 400), (9, 413), (12, 422))}
    acts |= {n: abort(n, status) for n, status in ((3, 400), (20, 413), (7, 422))}
    statuses = {5: 400, 9: 413, 12: 422, 3: 400, 20: 413, 7: 422}
    world.serve(lambda asked: acts.get(len(asked.ids)))  # in the probe too
    receipt = world.capture(table, cfg(out))
    assert receipt.rejects_by_reason == {"refused": 6} and receipt.committed == len(LENGTHS) - 6
    found = rejects(out)
    for num_tokens, status in statuses.items():
        sample_id = id_of(table, num_tokens)
        expected = f"sample {sample_id}: the server answers {status}: {words(num_tokens)}"
        assert found[sample_id] == ("refused", expected)
    require_sound(out)


def id_of(table: SampleTable, num_tokens: int) -> str:
    (found,) = [s.sample_id for s in table.samples() if s.num_tokens == num_tokens]
    return found


@pytest.mark.parametrize("status", [302, 401, 403, 404, 405, 501])
def test_a_status_about_the_server_stops_the_run(world: World, out: Path, table: SampleTable, status: int) -> None:
    server = world.serve(after_probe(lambda asked: Act(status=status, text="no key")))
    with pytest.raises(EngineError, match=f"{server.url}: the server answers {status}: no key") as caught:
        world.capture(table, cfg(out))
    assert type(caught.value) is EngineError and caught.value.exit_code == 1 and rejects(out) == {}


def test_a_server_that_has_become_something_else_stops_the_run(
    world: World, out: Path, table: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: Counter[str] = Counter()
    server = world.serve()
    ask, probed = server.ask, after_probe(lambda asked: Act())

    def page(body: dict[str, Any]) -> tuple[Act, dict[str, Any]]:
        name = RequestName.parse(body["rid"])
        assert name is not None
        if answered or (not name.flags and probed(Asked(name, [], False, 1))):
            answered["page"] += 1
            return Act(text="<html>Please log in</html>"), {}
        return ask(body)

    monkeypatch.setattr(server, "ask", page)
    start = time.monotonic()
    with pytest.raises(EngineError, match="does not answer as SGLang does: <html>Please log in</html>") as caught:
        world.capture(table, cfg(out, max_attempts=5))
    assert type(caught.value) is EngineError and caught.value.exit_code == 1
    assert answered["page"] <= 4 * len(LENGTHS) and time.monotonic() - start < 10 and rejects(out) == {}


def test_failing_samples_are_tried_again_and_then_rejected(world: World, out: Path, table: SampleTable) -> None:
    statuses = {9: 429, 12: 500, 3: 503, 5: 408}
    acts = {n: Act(status=status, text="busy") for n, status in statuses.items()}
    server = world.serve(after_probe(lambda asked: acts.get(len(asked.ids))))
    receipt = world.capture(table, cfg(out))
    assert receipt.rejects_by_reason == {"unavailable": 4} and receipt.committed == len(LENGTHS) - 4
    for num_tokens, status in statuses.items():
        expected = f"the server answers {status}: busy (3 tries)"
        assert rejects(out)[id_of(table, num_tokens)][1].endswith(expected)
        assert 3 <= sum(len(asked.ids) == num_tokens for asked in server.asked) <= 5  # two may be the probe's


def write_states(
    asked: Asked, path: Path, fields: dict[str, torch.Tensor], name: RequestName | None = None, rows: int | None = None
) -> None:
    name = name or asked.name
    ids = np.array(asked.ids[:rows], dtype="<i4")
    arrays = [t[:rows].contiguous().numpy() for t in fields.values()]
    parts = [memoryview(a).cast("B") for a in (ids, *arrays)]
    layout = {f: ("float32", t.shape[1]) for f, t in fields.items()}
    of = dataclasses.replace(name, num_tokens=len(ids))
    staged.write(path, [staged.header(of, layout, "post", staged.digest_of(parts)), *parts])


def corrupt(asked: Asked, path: Path, fields: dict[str, torch.Tensor]) -> None:
    scratch = path.with_suffix(".tmp")
    write_states(asked, scratch, fields)
    data = bytearray(scratch.read_bytes())
    data[-5] ^= 1
    scratch.unlink()
    staged.write(path, [bytes(data)])


def of_another(asked: Asked, path: Path, fields: dict[str, torch.Tensor]) -> None:
    write_states(asked, path, fields, dataclasses.replace(asked.name, serial=asked.name.serial + 10**6))


PASSING: dict[str, tuple[Act, str]] = {
    "broken_json": (Act(text='{"meta_info": {"ey'), 'the server\'s answer cannot be read: {"meta_info": {"ey'),
    "no_meta": (Act(text='{"text": ""}'), "the server's answer cannot be read"),
    "null_meta": (Act(text='{"meta_info": null}'), "the server's answer cannot be read"),
    "list": (Act(text="[1]"), "the server's answer cannot be read"),
    "odd_abort": (
        Act(said=[], meta={"finish_reason": {"type": "abort", "status_code": "x"}}),
        "the server's answer cannot be read",
    ),
    "abort": (Act(said=[], meta={"finish_reason": {"type": "abort", "message": "queue is full"}}), "queue is full"),
    "retry": (Act(said=[{"error": "oh dear", "reason": "plugin", "retry": True}]), "oh dear"),
    "missing": (Act(stage=lambda *_: None), "the server says it staged"),
    "failed": (Act(stage=lambda _, path, __: staged.write_failure(path, "OSError: disk")), "staging failed: OSError"),
    "failed_mute": (Act(stage=lambda _, path, __: staged.failed(path).touch()), "the server's log says why"),
    "corrupted": (Act(stage=corrupt), "its bytes are not those that were written"),
    "another": (Act(stage=of_another), "holds request"),
    "short": (Act(stage=lambda a, p, f: write_states(a, p, f, rows=8)), "holds request"),
    "empty": (Act(stage=lambda _, path, __: path.touch()), "empty, not a staged file"),
}


def test_what_goes_wrong_once_is_tried_again(world: World, out: Path, tmp_path: Path, own: HfEngine) -> None:
    acts = dict(zip(range(8, 8 + len(PASSING)), PASSING.values(), strict=True))
    table = make_table(tmp_path / "each.parquet", list(acts))
    counts: Counter[int] = Counter()

    def once(asked: Asked) -> Act | None:
        counts[len(asked.ids)] += 1
        return acts[len(asked.ids)][0] if counts[len(asked.ids)] == 1 else None

    world.serve(after_probe(once))
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.rejected) == (len(acts), 0)
    told = {row["sample_id"]: row["reason"] for row in events(out, "retry")}
    for num_tokens, (_, words) in acts.items():
        assert words in told[id_of(table, num_tokens)]
    require_values(out, table, own)
    assert list(world.staging.iterdir()) == []


def test_what_goes_wrong_always_becomes_a_reject(world: World, out: Path, tmp_path: Path) -> None:
    acts = dict(zip(range(8, 8 + len(PASSING)), PASSING.values(), strict=True))
    table = make_table(tmp_path / "each.parquet", [*acts, *range(40, 48)])
    world.serve(after_probe(lambda asked: acts[len(asked.ids)][0] if len(asked.ids) < 40 else None))
    receipt = world.capture(table, cfg(out))
    assert receipt.rejects_by_reason == {"unavailable": len(acts)} and receipt.committed == 8
    for num_tokens, (_, words) in acts.items():
        detail = rejects(out)[id_of(table, num_tokens)][1]
        assert words in detail and detail.endswith("(3 tries)")
    assert list(world.staging.iterdir()) == []


@pytest.mark.parametrize("times", [1, 1000])
def test_a_sample_whose_connection_breaks_has_its_turn_alone(
    world: World, out: Path, table: SampleTable, times: int
) -> None:
    world.serve(after_probe(of_length(9, first_times(times, Act(reset=True)))))
    receipt = world.capture(table, cfg(out))
    if times == 1:
        assert (receipt.committed, receipt.rejected) == (len(LENGTHS), 0)
    else:
        assert receipt.rejects_by_reason == {"unavailable": 1} and receipt.committed == len(LENGTHS) - 1
        detail = rejects(out)[id_of(table, 9)][1]
        assert "is gone (" in detail and detail.endswith("(3 tries)")


def test_what_the_plugin_refuses_becomes_a_reject(world: World, out: Path, table: SampleTable) -> None:
    prefix = [{"error": "8 of 9 rows come from a prefix cache", "reason": "rows", "retry": False}]
    acts = {9: Act(said=prefix), 12: Act(said=[{"pending": 5}])}
    world.serve(after_probe(lambda asked: acts.get(len(asked.ids))))
    assert world.capture(table, cfg(out)).rejects_by_reason == {"refused": 2}
    assert rejects(out)[id_of(table, 9)][1].endswith("8 of 9 rows come from a prefix cache")
    assert rejects(out)[id_of(table, 12)][1].endswith("its rows are not all there")


def test_other_token_ids_are_a_reject(world: World, out: Path, table: SampleTable) -> None:
    def other(asked: Asked, path: Path, fields: dict[str, torch.Tensor]) -> None:
        write_states(dataclasses.replace(asked, ids=[*asked.ids[:-1], (asked.ids[-1] + 1) % 301]), path, fields)

    world.serve(after_probe(of_length(9, lambda asked: Act(stage=other))))
    assert world.capture(table, cfg(out)).rejects_by_reason == {"token_ids": 1}
    assert "token 8 is" in next(iter(rejects(out).values()))[1]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([], "answers without the capture plugin: was it started anew without it"),
        ({"odd": 1}, "answers without the capture plugin"),
        ([{"error": "the server sees no directory /x", "reason": "no_directory", "retry": False}], "sees no directory"),
    ],
)
def test_what_is_about_the_server_stops_the_run(
    world: World, out: Path, table: SampleTable, said: Any, text: str
) -> None:
    world.serve(after_probe(lambda asked: Act(said=said)))
    with pytest.raises(EngineError, match=text) as caught:
        world.capture(table, cfg(out))
    assert type(caught.value) is EngineError and rejects(out) == {}


FULL = [{"error": "980 of 1000 staged bytes are in use", "reason": "full", "retry": True}]


def test_a_server_without_room_for_a_while_is_asked_again(world: World, out: Path, table: SampleTable) -> None:
    server = world.serve(after_probe(first_times(3, Act(said=FULL))))
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.retries) == (len(LENGTHS), 0)
    names = [str(asked.name) for asked in server.asked]
    assert len(names) == len(set(names))


def test_a_sample_for_which_there_never_is_room_is_a_reject_with_the_servers_words(
    world: World, out: Path, table: SampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "FULL_PATIENCE_S", 0.2)
    world.serve(after_probe(of_length(9, lambda asked: Act(said=FULL))))
    receipt = world.capture(table, cfg(out))
    assert receipt.rejects_by_reason == {"unavailable": 1}
    assert "has had no room for 0 s: 980 of 1000 staged bytes are in use" in next(iter(rejects(out).values()))[1]


def test_a_full_server_does_not_outlast_the_runs_own_time_out(world: World, out: Path, table: SampleTable) -> None:
    server = world.serve(after_probe(of_length(9, lambda asked: Act(said=FULL))))
    receipt = world.capture(table, cfg(out, timeout_s=0.3, max_attempts=2))
    assert receipt.rejects_by_reason == {"unavailable": 1}
    num_asked = len(server.asked)
    time.sleep(0.3)
    assert len(server.asked) == num_asked


# --- the probe


@pytest.mark.parametrize("check", ["target", "layer"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one_are_named(world: World, out: Path, table: SampleTable, check: str, shift: int) -> None:
    world.serve(shift=shift, layers=(2,))
    with pytest.raises(CaptureMismatch) as caught:
        world.capture(table, cfg(out), world.engine(check_layers=check))
    text = str(caught.value)
    assert "hidden.2 differs from the engine's ordinary path" in text
    assert f"it is hidden state {2 + shift} (off by one layer)" in text
    assert Layout(out).record_ids() == set()


@pytest.mark.parametrize("check", ["target", "layer", "off"])
def test_each_check_of_layers_passes_what_is_right(
    world: World, out: Path, table: SampleTable, check: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.serve()
    assert world.capture(table, cfg(out), world.engine(check_layers=check)).committed == len(LENGTHS)
    line = events(out, "probe")[0]["found"]
    assert ("layers by" in line) == (check != "off")
    assert ("engine.check_layers is off" in caplog.text) == (check == "off")
    assert check != "layer" or "(2, 3)" in line


@pytest.mark.parametrize("check", ["target", "layer"])
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_states_without_the_residual_stream_are_named(
    world: World, out: Path, table: SampleTable, tmp_path: Path, check: str, family: str
) -> None:
    world.target = tiny_models.save(family, tmp_path / family)
    world.serve(residual=False, layers=(3,))
    with pytest.raises(CaptureMismatch, match=r"hidden\.3 differs .* times as long .* without the residual stream"):
        world.capture(table, cfg(out), world.engine(check_layers=check))
    assert Layout(out).record_ids() == set()


@pytest.mark.parametrize("check", ["auto", "off"])
def test_a_last_state_before_the_norm_is_named(world: World, out: Path, table: SampleTable, check: str) -> None:
    world.serve(pre_norm=True)
    with pytest.raises(CaptureMismatch, match="the last state is pre-norm, not post-norm as the spec says"):
        world.capture(table, cfg(out), world.engine(check_layers=check))


@pytest.mark.parametrize("told", [None, [[None, 1, None]], [[-1.0]]])
def test_log_probabilities_that_are_missing_are_no_pass(world: World, out: Path, table: SampleTable, told: Any) -> None:
    world.serve(lambda asked: Act(meta={"input_token_logprobs": told}) if asked.logprobs else None)
    with pytest.raises(EngineUnavailable, match="the last hidden state cannot be checked"):
        world.capture(table, cfg(out, max_attempts=1))
    assert Layout(out).record_ids() == set()


def test_the_vocabularys_last_id_is_told_as_0_and_no_other_is() -> None:
    def body(*ids: int) -> dict[str, Any]:
        return {"input_token_logprobs": [[None if not i else -1.0, token, None] for i, token in enumerate(ids)]}

    assert Sglang().logprobs(body(5, 0, 7), [5, 300, 7]) == [-1.0, -1.0]
    assert Sglang().logprobs(body(5, 300, 0), [5, 300, 0]) == [-1.0, -1.0]
    for told in ([5, 0, 0], [0, 0, 7], [5, 0, 300], [0, 300, 7]):
        with pytest.raises(ValueError, match="of 3 tokens, and not of the 3 sent"):
            Sglang().logprobs(body(*told), [5, 300, 7])


def test_a_sample_that_was_not_alone_is_not_taken_for_one_that_was(
    world: World, out: Path, table: SampleTable, caplog: pytest.LogCaptureFixture
) -> None:
    def in_company(asked: Asked) -> Act | None:
        said = {"path": str(asked.name.path(world.staging)), "bytes": 0, "alone": False}
        return Act(meta={"eyas": [said]}) if asked.logprobs else None

    caplog.set_level(logging.INFO, logger="eyas")
    world.serve(in_company)
    world.capture(table, cfg(out))
    assert all("alone against batch" not in row["found"] for row in events(out, "probe"))
    assert caplog.text.count("together with another client's requests") == 4


def test_tensor_parallel_ranks_are_compared(world: World, out: Path, table: SampleTable) -> None:
    world.serve(tp_size=2)
    assert world.capture(table, cfg(out, limit=4)).committed == 4
    assert list(world.staging.iterdir()) == []
    world.serve(tp_size=2, rank_noise=0.5)
    with pytest.raises(EngineError, match=r"tensor-parallel rank 1 differs from rank 0's .* all-reduce fusion"):
        world.capture(table, cfg(out))
    assert list(world.staging.iterdir()) == []


# --- hello


def test_nothing_that_listens_is_unavailable(world: World) -> None:
    server = world.serve()
    server.kill()
    with pytest.raises(EngineUnavailable, match=f"no SGLang server answers at {server.url} .*'eyas serve'") as caught:
        world.engine().info()
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://[::1", "ftp://host", "http://127.0.0.1:0"])
def test_an_address_that_is_none_is_a_matter_of_configuration(target: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.url"):
        SglangEngine(TargetConfig(path=target), EngineConfig(kind="sglang", url=url)).info()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plugin": False}, "cannot be captured from: it runs without the capture plugin; start it with 'eyas serve'"),
        ({"staged_version": "1"}, "has a plugin of another eyas .staged files 1, here 2.; start it anew"),
        ({"vocab_size": 5}, "target.path .* has vocab_size 301, the server at .* serves 5 .*: not the same model"),
        ({"num_layers": 5}, "has num_hidden_layers 4, .* serves 5"),
        ({"layers": (0, 2)}, r"capture.aux_layers is \[1, 2, 3\], the server at .* was started for \[0, 2\]"),
    ],
)
def test_a_server_that_does_not_fit_is_said_before_anything(
    world: World, out: Path, table: SampleTable, options: dict[str, Any], text: str
) -> None:
    world.serve(**options)
    with pytest.raises(EyasError, match=text) as caught:
        world.capture(table, cfg(out), world.engine((1, 2, 3)))
    fits_plugin = "plugin" in text
    assert caught.value.exit_code == (1 if fits_plugin else 2) and not out.exists()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        ((401, "who are you"), "answers 401: it wants a key, and capture sends none; start it without --api-key"),
        ((404, "<html>"), "answers 404 to POST /generate: <html>; is it SGLang"),
        ((200, "<html>"), "does not answer as SGLang does"),
        ((200, "[]"), "does not answer as SGLang does"),
        ((200, '{"meta_info": null}'), "does not answer as SGLang does"),
        ((200, '{"meta_info": {"eyas": [{"error": "boom"}]}}'), "its capture plugin fails: boom"),
        ((200, '{"meta_info": {"eyas": 3}}'), "it runs without the capture plugin"),
        ((200, '{"meta_info": {"eyas": [{"hello": {}}]}}'), "a plugin of another eyas"),
        ((501, "no"), "answers 501 to POST /generate: no; is it SGLang"),
        ((503, "loading"), "answers 503: loading"),
    ],
)
def test_something_else_than_a_capturing_server_is_named(
    world: World, act: tuple[int, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = world.serve()
    monkeypatch.setattr(server, "ask", lambda body: (Act(status=act[0], text=act[1]), {}))
    with pytest.raises(EngineError, match=text) as caught:
        world.engine().info()
    assert isinstance(caught.value, EngineUnavailable) == (act[0] == 503)


def test_a_staging_directory_that_is_not_here_is_named(
    world: World, out: Path, table: SampleTable, tmp_path: Path
) -> None:
    world.serve().about["staging"] = str(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match=r"stages in .*elsewhere, which does not exist here: client and server must"):
        world.capture(table, cfg(out))


def test_a_staging_directory_that_cannot_be_written_is_named(
    world: World, out: Path, table: SampleTable, tmp_path: Path
) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    world.serve()
    world.staging.chmod(0o500)
    with pytest.raises(EngineError, match="cannot write into the server's staging directory"):
        world.capture(table, cfg(out))


def test_two_clients_that_ask_at_once_use_different_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    server = world.serve()
    names: list[str] = []
    ask = server.ask
    monkeypatch.setattr(server, "ask", lambda body: (names.append(body["rid"]), ask(body))[1])
    world.engine().info()
    world.engine().info()
    assert len(set(names)) == 2


# --- calls of one engine, one after the other and at once


class Batch:
    """Gives its requests at once, then nothing; blocks a `take` that waits for ever only as a bug would show."""

    def __init__(self, requests: Sequence[CaptureRequest]) -> None:
        self.left = list(requests)

    def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        taken, self.left = self.left, []
        return taken


def request(num_tokens: int, attempt: int = 1, **options: Any) -> CaptureRequest:
    ids = np.array(tiny_models.token_ids(num_tokens), dtype=np.int32)
    return CaptureRequest(f"{num_tokens:032x}", ids, attempt, **options)


def lengths(outcomes: Sequence[CaptureAnswer | CaptureFailure]) -> list[int]:
    assert all(isinstance(outcome, CaptureAnswer) for outcome in outcomes)
    return sorted(int(outcome.sample_id, 16) for outcome in outcomes)


def test_a_call_that_was_left_gives_nothing_to_the_next_one(world: World) -> None:
    release = threading.Event()
    server = world.serve(of_length(30, lambda asked: Act(before=lambda: release.wait(20))))
    engine = world.engine()
    answers = engine.capture(Batch([request(30), request(5)]))
    assert int(next(answers).sample_id, 16) == 5
    answers.close()
    try:
        assert lengths(list(engine.capture(Batch([request(6), request(7)])))) == [6, 7]
    finally:
        release.set()
    assert [len(asked.ids) for asked in server.asked].count(30) == 1


def test_a_call_that_waits_for_a_hanging_server_does_not_eat_the_answers_of_the_next(world: World) -> None:
    release, hung = threading.Event(), threading.Event()

    def hang(asked: Asked) -> Act:
        hung.set()
        return Act(before=lambda: release.wait(20))

    world.serve(of_length(30, hang))
    engine = world.engine()
    first: list[CaptureAnswer | CaptureFailure] = []
    thread = threading.Thread(target=lambda: first.extend(engine.capture(Batch([request(30)]))))
    thread.start()
    assert hung.wait(5)
    try:
        for _ in range(3):
            assert lengths(list(engine.capture(Batch([request(n) for n in range(2, 12)])))) == [*range(2, 12)]
        thread.join(5)
        assert not thread.is_alive() and first == []
    finally:
        release.set()


def test_close_ends_a_call_that_waits(world: World) -> None:
    release, hung = threading.Event(), threading.Event()

    def hang(asked: Asked) -> Act:
        hung.set()
        return Act(before=lambda: release.wait(20))

    world.serve(hang)
    engine = world.engine()
    thread = threading.Thread(target=lambda: list(engine.capture(Batch([request(30)]))))
    thread.start()
    assert hung.wait(5)
    engine.close()
    thread.join(5)
    release.set()
    assert not thread.is_alive() and list(world.staging.iterdir()) == []


def test_a_call_that_waits_for_a_dead_server_gives_way_to_the_next(world: World) -> None:
    server = world.serve()
    engine = world.engine()
    assert lengths(list(engine.capture(Batch([request(3)])))) == [3]
    server.kill()
    with pytest.raises(EngineUnavailable, match="is gone"):
        list(engine.capture(Batch([request(3)])))
    waiting = threading.Thread(target=lambda: list(engine.capture(Batch([request(4)]))))
    turn = engine._turn
    waiting.start()
    while engine._turn == turn:
        time.sleep(0.001)
    threading.Timer(0.3, world.serve).start()
    assert lengths(list(engine.capture(Batch([request(5)])))) == [5]
    waiting.join(5)
    assert not waiting.is_alive()
    assert [len(asked.ids) for asked in world.servers[-1].asked] == [5]


def test_one_sample_in_two_requests_is_answered_twice_and_once_more_ends_the_earlier(world: World) -> None:
    world.serve()
    engine = world.engine()
    assert lengths(list(engine.capture(Batch([request(5), request(5), request(6)])))) == [5, 5, 6]
    found = list(engine.capture(Batch([request(5), request(5, attempt=2), request(5, attempt=3), request(6)])))
    # The earlier tries are given up, sent or not; one that was answered already may come.
    assert [o.attempt for o in found if int(o.sample_id, 16) == 5][-1:] == [3]
    assert lengths(found).count(6) == 1


def test_references_do_not_wait_for_each_other(world: World) -> None:
    world.serve()
    start = time.monotonic()
    found = list(
        world.engine(check_layers="auto").capture(Batch([request(n, with_reference=True) for n in range(2, 12)]))
    )
    assert lengths(found) == [*range(2, 12)] and time.monotonic() - start < 10
    references = [o.reference for o in found if isinstance(o, CaptureAnswer)]
    checked = [r for r in references if r is not None and r.hidden]
    assert len(checked) == client.REFERENCE_SAMPLES
    assert all(r is not None and set(r.alone) == {"hidden.1", "hidden.2", "hidden.3", "last"} for r in references)


def test_a_failed_answer_keeps_no_memory(world: World) -> None:
    world.serve(lambda asked: Act(status=500, text="no") if asked.logprobs else None)
    engine = world.engine()
    (failure,) = engine.capture(Batch([request(9, with_reference=True)]))
    assert isinstance(failure, CaptureFailure) and engine._session is not None
    assert engine._session.held_bytes == 0


def test_stagers_of_the_stand_in_are_the_real_ones(world: World) -> None:
    assert all(type(stager) is Stager for stager in world.serve().stagers)


@pytest.mark.parametrize("visible", [True, False])
def test_other_weights_behind_the_last_auxiliary_layer_are_named(
    world: World, out: Path, table: SampleTable, tmp_path: Path, visible: bool
) -> None:
    """The server's log-probabilities agree with its own states: only the target tells others apart."""
    model = transformers.AutoModelForCausalLM.from_pretrained(world.target)
    with torch.no_grad():
        for weight in model.model.layers[3].parameters():
            weight.mul_(1.5)
    other = tmp_path / "other"
    model.save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (world.target / name).exists():
            shutil.copy(world.target / name, other)
    mine, world.target = world.target, other
    world.serve()
    world.target = mine
    if not visible:
        other.rename(tmp_path / "elsewhere")
    error, text = (ConfigError, "different weights") if visible else (CaptureMismatch, "serve other weights")
    with pytest.raises(error, match=text):
        world.capture(table, cfg(out), world.engine(check_layers="target"))
