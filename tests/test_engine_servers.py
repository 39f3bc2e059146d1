"""One capture from several servers: stand-ins that are fast, slow, wrong, killed and back again."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.capture.run import Receipt
from eyas.capture.status import status
from eyas.cli import parity, states
from eyas.config import Config, EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.engine import asking, servers
from eyas.engine.base import CaptureFailure, CaptureRequest
from eyas.engine.dealing import Dealing, Member
from eyas.engine.hf import HfEngine
from eyas.engine.servers import Servers, open_servers
from eyas.engine.sglang.client import SglangEngine
from eyas.engine.vllm.client import VllmEngine
from eyas.errors import CaptureMismatch, ConfigError, EngineError, EngineGone, EngineUnavailable, EyasError
from eyas.store.layout import Layout
from eyas.target.head import TargetHead
from server_world import (
    LENGTHS,
    TOKEN_BYTES,
    Script,
    World,
    cfg,
    events,
    make_table,
    rejects,
    require_sound,
    require_values,
)
from stand_in_server import Act, Asked, right
from stand_in_vllm import StandInVllm

MANY = [3 + (7 * i) % 23 for i in range(40)]
PROBED = 8
"""Requests of a server's probe: four samples, each in company and alone."""


@pytest.fixture(scope="module")
def own(target: Path) -> HfEngine:
    return HfEngine(TargetConfig(path=target), EngineConfig(dtype="float32", device="cpu"), (1, 2, 3))


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    return make_table(tmp_path / "samples.parquet", MANY)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "STAGED_PATIENCE_S", 0.3)
    monkeypatch.setattr(asking, "QUIET_PATIENCE_S", 0.05)
    monkeypatch.setattr(servers, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(servers, "MAX_PAUSE_S", 0.1)


class Fleet(World):
    """Servers on ports of their own, each with its own staging directory unless it is told."""

    def __init__(self, target: Path, tmp_path: Path, head: TargetHead) -> None:
        super().__init__(target, tmp_path, head)
        self._tmp_path = tmp_path

    def add(self, script: Script = right, *, port: int = 0, staging: Path | None = None, **options: Any) -> Any:
        if staging is None:
            staging = self._tmp_path / f"staging{len(self.servers)}"
        staging.mkdir(exist_ok=True)
        self.servers.append(self.make_server(self.target, staging, port=port, script=script, **options))
        return self.servers[-1]

    def again(self, server: Any, script: Script = right, **options: Any) -> Any:
        """A new server at the place of one that was killed."""
        return self.add(script, port=server.port, staging=server.staging, **options)

    def together(self, *asked: Any, **options: Any) -> Any:
        """One engine of these servers, or of all."""
        urls = tuple(server.url for server in asked or self.servers)
        base: dict[str, Any] = {"kind": self.kind, "urls": urls, "reconnect_s": 20.0, "check_layers": "off"}
        engine = open_servers(self.make_engine, TargetConfig(path=self.target), EngineConfig(**(base | options)), None)
        self.engines.append(engine)  # type: ignore[arg-type]
        return engine

    def left(self) -> list[str]:
        return [path.name for server in self.servers for path in server.staging.iterdir()]


class VllmFleet(Fleet):
    kind = "vllm"
    make_server = StandInVllm
    make_engine = VllmEngine


@pytest.fixture
def fleet(target: Path, tmp_path: Path, head: TargetHead) -> Iterator[Fleet]:
    found = Fleet(target, tmp_path, head)
    yield found
    found.close()


def samples_of(server: Any) -> list[Asked]:
    """What a server was asked for by the run itself."""
    return server.asked[PROBED:]  # type: ignore[no-any-return]


def after_probe(script: Script) -> Script:
    """A script that begins with the run itself."""
    seen = iter(range(1, 1_000_000))
    return lambda asked: script(asked) if next(seen) > PROBED else None


def on_request(nth: int, act: Callable[[], Act | None]) -> Script:
    """A script that acts at the nth request behind the probe, once."""
    seen = iter(range(1, 1_000_000))
    lock = threading.Lock()

    def script(asked: Asked) -> Act | None:
        with lock:
            hit = next(seen) == PROBED + nth
        return act() if hit else None

    return script


def slow(seconds: float) -> Script:
    """Each request after the probe takes so long."""
    return after_probe(lambda asked: Act(before=lambda: time.sleep(seconds)))


# --- dealing


@pytest.mark.parametrize("world", [Fleet, VllmFleet])
def test_shards_are_those_of_one_server_whoever_answers(
    world: type[Fleet], target: Path, tmp_path: Path, head: TargetHead, own: HfEngine
) -> None:
    # No more than a stand-in's cache of vLLM has clear blocks for.
    lengths = MANY if world is Fleet else LENGTHS * 3
    table, num_samples = make_table(tmp_path / "samples.parquet", lengths), len(lengths)
    fleet = world(target, tmp_path, head)
    try:
        for _ in range(3):
            fleet.add()
        settings = {"shard_tokens": 100, "in_flight_bytes": 60 * TOKEN_BYTES, "check_fraction": 0.2}
        one = fleet.capture(table, cfg(tmp_path / "one", **settings), fleet.together(fleet.servers[0]))
        assert one.samples_by_server == {fleet.servers[0].url: num_samples}
        several = fleet.capture(table, cfg(tmp_path / "several", **settings), fleet.together())
        assert several.committed == sum(several.samples_by_server.values()) == num_samples
        assert set(several.samples_by_server) == {server.url for server in fleet.servers}
        assert several.data_digest == one.data_digest and several.fingerprint == one.fingerprint
        payloads = [sorted(p.name for p in (tmp_path / d / "shards").iterdir()) for d in ("one", "several")]
        assert payloads[0] == payloads[1] and len(payloads[0]) > 2
        require_sound(tmp_path / "several")
        if world is Fleet:
            require_values(tmp_path / "several", table, own)
        assert fleet.left() == []
    finally:
        fleet.close()


def test_a_faster_server_does_more_and_everybody_sees_it(fleet: Fleet, out: Path, table: SampleTable) -> None:
    enough = threading.Event()
    fast = fleet.add(on_request(25, lambda: Act(before=enough.set)), max_prefill_tokens=16)
    waits = after_probe(lambda asked: Act(before=lambda: enough.wait(20)))
    lame = fleet.add(waits, max_prefill_tokens=16)
    receipt = fleet.capture(table, cfg(out, in_flight_bytes=10_000_000, shard_tokens=200), fleet.together())
    by_server = receipt.samples_by_server
    assert enough.is_set() and by_server[fast.url] >= 25 and by_server[lame.url] > 0
    assert len(samples_of(fast)) == by_server[fast.url] and len(samples_of(lame)) == by_server[lame.url]
    commits = events(out, "commit")
    assert sum(n for row in commits for n in row["servers"].values()) == len(MANY)
    assert all(sum(row["servers"].values()) == row["samples"] for row in commits)
    (told,) = events(out, "servers")
    assert [(share["url"], share["samples"]) for share in told["answered"]] == list(by_server_in_order(fleet, receipt))
    beat = json.loads((out / "heartbeat.json").read_bytes())
    assert beat["servers"] == told["answered"] and all(share["gone"] == "" for share in beat["servers"])
    lines = "\n".join(status(out).lines())
    assert f"asked    {fast.url} · {by_server[fast.url]} samples answered" in lines
    assert {row["server"] for row in events(out, "probe")} == {fast.url, lame.url}


def by_server_in_order(fleet: Fleet, receipt: Receipt) -> Iterator[tuple[str, int]]:
    return ((server.url, receipt.samples_by_server[server.url]) for server in fleet.servers)


def test_a_sample_too_large_for_one_servers_room_goes_to_another(fleet: Fleet, out: Path, table: SampleTable) -> None:
    small, large = fleet.add(staged_bytes=14 * TOKEN_BYTES), fleet.add()
    receipt = fleet.capture(table, cfg(out), fleet.together())
    assert (receipt.committed, receipt.rejected) == (len(MANY), 0)
    assert max(len(asked.ids) for asked in samples_of(small)) <= 14 < max(len(a.ids) for a in samples_of(large))


# --- before the run


def test_one_address_is_the_engine_of_one_server(fleet: Fleet) -> None:
    server = fleet.add()
    assert type(fleet.together(server)) is SglangEngine
    assert type(open_servers(SglangEngine, TargetConfig(), EngineConfig(kind="sglang"), None)) is SglangEngine
    assert isinstance(fleet.together(server, fleet.add()), Servers)
    assert Config.model_validate({"engine": {"urls": ["http://a:1", "http://b:2"]}}).engine.urls[1] == "http://b:2"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"layers": (0, 2, 3)}, ConfigError, r"aux_layers: \[0, 2, 3\] there, \[1, 2, 3\] here|aux_layers"),
        ({"sglang": "9"}, EngineError, r"version 0\.0\.stand-in -> 9"),
        ({"model_path": "/elsewhere"}, EngineError, "model .* -> /elsewhere"),
        ({"hidden_size": 64}, ConfigError, "serves 64"),
        ({"plugin": False}, EngineError, "without the capture plugin"),
    ],
)
def test_a_server_that_contradicts_the_others_is_refused_by_its_address(
    fleet: Fleet, out: Path, table: SampleTable, options: dict[str, Any], error: type[EyasError], text: str
) -> None:
    fleet.add()
    other = fleet.add(**options)
    with pytest.raises(error, match=text) as caught:
        fleet.capture(table, cfg(out), fleet.together())
    assert other.url in str(caught.value) and "\n" not in str(caught.value) and not out.exists()


def test_a_password_among_several_urls_is_refused_and_not_shown(target: Path) -> None:
    urls = ("http://me:s3cret@127.0.0.1:1", "http://me:s3cret@127.0.0.1:1/")
    with pytest.raises(ConfigError, match="a user name or a password") as caught:
        open_servers(SglangEngine, TargetConfig(path=target), EngineConfig(kind="sglang", urls=urls), None)
    assert "s3cret" not in str(caught.value)


def test_one_staging_directory_for_two_servers_is_refused(fleet: Fleet, out: Path, table: SampleTable) -> None:
    first = fleet.add()
    second = fleet.add(staging=first.staging)
    with pytest.raises(ConfigError, match=f"at {first.url} and {second.url} both stage in {first.staging}: give each"):
        fleet.capture(table, cfg(out), fleet.together())
    with pytest.raises(ConfigError, match=rf"engine\.urls names {first.url} twice"):
        fleet.together(first, first)


def test_the_values_of_every_server_are_probed(fleet: Fleet, out: Path, table: SampleTable) -> None:
    fleet.add()
    other = fleet.add(noise=0.5)
    with pytest.raises(CaptureMismatch, match=f"the server at {other.url}: "):
        fleet.capture(table, cfg(out), fleet.together())
    assert Layout(out).record_ids() == set()


def test_servers_that_are_not_there_yet_may_come_later(
    fleet: Fleet, out: Path, table: SampleTable, caplog: pytest.LogCaptureFixture
) -> None:
    late = fleet.add()
    late.kill()
    back: list[Any] = []
    first = fleet.add(on_request(3, lambda: Act(before=lambda: back.append(fleet.again(late)))))
    first.script = chained(first.script, slow(0.05))
    receipt = fleet.capture(table, cfg(out, in_flight_bytes=50 * TOKEN_BYTES), fleet.together(late, first))
    assert receipt.committed == len(MANY) and receipt.samples_by_server[late.url] > 0
    assert f"no SGLang server answers at {late.url}" in caplog.text and f"{late.url} is back" in caplog.text
    assert len(back[0].asked) > PROBED  # it was probed before it got work
    require_sound(out)


def test_a_server_that_dies_while_it_is_probed_is_left_out(
    fleet: Fleet, out: Path, table: SampleTable, caplog: pytest.LogCaptureFixture
) -> None:
    dying = fleet.add(on_request(2 - PROBED, lambda: Act(before=fleet.servers[0].kill)))
    other = fleet.add()
    receipt = fleet.capture(table, cfg(out, backoff_s=0.01), fleet.together())
    assert receipt.samples_by_server == {other.url: len(MANY)} and dying.url in caplog.text
    require_sound(out)


def test_commands_take_the_servers_of_the_run_file(fleet: Fleet) -> None:
    urls = [fleet.add().url, fleet.add().url]
    tree = Config.model_validate({"target": {"path": fleet.target}, "engine": {"kind": "sglang", "urls": urls}})
    engine, _ = states._engine(tree)
    assert isinstance(engine, Servers) and list(engine.servers()) == urls
    spec = engine.info().spec
    one = parity._engine(tree, "sglang", None, spec)
    assert isinstance(one, SglangEngine) and one.url == urls[0]
    engine.close()


def chained(*scripts: Script) -> Script:
    return lambda asked: next((act for act in [script(asked) for script in scripts] if act is not None), None)


def test_none_that_answers_is_unavailable(fleet: Fleet) -> None:
    urls = [fleet.add().url, fleet.add().url]
    for server in fleet.servers:
        server.kill()
    with pytest.raises(EngineUnavailable, match=f"{urls[0]}.*{urls[1]}") as caught:
        fleet.together().info()
    assert caught.value.exit_code == 3


# --- servers that go


def test_what_a_killed_server_had_is_done_by_the_others_at_once(
    fleet: Fleet, out: Path, table: SampleTable, own: HfEngine, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add()
    dying = fleet.add(on_request(6, lambda: Act(before=fleet.servers[1].kill)))
    receipt = fleet.capture(table, cfg(out, in_flight_bytes=60 * TOKEN_BYTES, backoff_s=30.0), fleet.together())
    assert (receipt.committed, receipt.rejected, receipt.retries) == (len(MANY), 0, 0)
    assert f"the server at {dying.url} is gone" in caplog.text and "go to the others" in caplog.text
    (told,) = events(out, "servers")
    assert f"{dying.url}" in next(s["gone"] for s in told["answered"] if s["url"] == dying.url)
    require_sound(out)
    require_values(out, table, own)
    assert fleet.left() == []


def test_a_server_that_comes_back_is_probed_and_works_again(
    fleet: Fleet, out: Path, table: SampleTable, own: HfEngine, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add(slow(0.05))
    back: list[Any] = []

    def restart() -> None:
        fleet.servers[1].kill()
        back.append(fleet.again(fleet.servers[1]))

    dying = fleet.add(on_request(3, lambda: Act(before=restart)))
    receipt = fleet.capture(table, cfg(out, in_flight_bytes=40 * TOKEN_BYTES), fleet.together())
    assert (receipt.committed, receipt.rejected) == (len(MANY), 0)
    assert [row["server"] for row in events(out, "probe")].count(dying.url) == 8
    assert len(samples_of(back[0])) > 0 and f"{dying.url} is back" in caplog.text
    require_sound(out)
    require_values(out, table, own)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layers": (0, 2, 3)}, "came back different: aux_layers"),
        pytest.param({"sglang": "9"}, "came back different: version", marks=pytest.mark.slow),
        ({"noise": 0.5}, "log-probabilities"),
        pytest.param({"plugin": False}, "without the capture plugin", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_comes_back_as_another_one_stays_out_and_the_capture_goes_on(
    fleet: Fleet, out: Path, table: SampleTable, own: HfEngine, caplog: pytest.LogCaptureFixture,
    options: dict[str, Any], text: str,
) -> None:  # fmt: skip
    back: list[Any] = []
    looked = threading.Event()

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "stays left out" in record.getMessage():
                looked.set()

    def replace() -> None:
        fleet.servers[1].kill()
        back.append(fleet.again(fleet.servers[1], **options))

    # The other server is held until the new one was looked at.
    fleet.add(on_request(8, lambda: Act(before=lambda: looked.wait(10))))
    dying = fleet.add(on_request(1, lambda: Act(before=replace)))
    handler = Look()
    logging.getLogger("eyas.engine.servers").addHandler(handler)
    try:
        receipt = fleet.capture(table, cfg(out, in_flight_bytes=40 * TOKEN_BYTES), fleet.together())
    finally:
        logging.getLogger("eyas.engine.servers").removeHandler(handler)
    assert looked.is_set() and (receipt.committed, receipt.rejected) == (len(MANY), 0)
    line = next(r.getMessage() for r in caplog.records if "stays left out" in r.getMessage())
    assert dying.url in line and text in line
    assert receipt.samples_by_server[dying.url if dying.url in receipt.samples_by_server else fleet.servers[0].url] > 0
    require_sound(out)
    require_values(out, table, own)


def test_a_server_that_takes_and_never_answers_is_given_up(
    fleet: Fleet, out: Path, table: SampleTable, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    fleet.add()
    hung = fleet.add(after_probe(lambda asked: Act(before=lambda: release.wait(20))))
    try:
        settings = cfg(out, in_flight_bytes=60 * TOKEN_BYTES, timeout_s=0.5, timeout_s_per_1k_tokens=0.0, backoff_s=0.0)
        receipt = fleet.capture(table, settings, fleet.together())
    finally:
        release.set()
    assert (receipt.committed, receipt.rejected) == (len(MANY), 0)
    assert f"the server at {hung.url} answered nothing while a sample's time ran out" in caplog.text
    require_sound(out)


def test_all_gone_is_waited_for_and_one_that_is_back_goes_on(fleet: Fleet, out: Path, table: SampleTable) -> None:
    done = threading.Event()

    def kill_all() -> None:
        if not done.is_set():
            done.set()
            for server in list(fleet.servers):
                server.kill()
            threading.Timer(1.0, lambda: fleet.again(fleet.servers[1])).start()

    fleet.add(on_request(4, lambda: Act(before=kill_all)))
    fleet.add(on_request(4, lambda: Act(before=kill_all)))
    receipt = fleet.capture(table, cfg(out, in_flight_bytes=40 * TOKEN_BYTES, backoff_s=0.01), fleet.together())
    assert done.is_set() and (receipt.committed, receipt.rejected) == (len(MANY), 0)
    states = [row["state"] for row in events(out, "state")]
    assert "waiting for the 2 servers, which are all gone" in states and states[-1] == "complete"
    require_sound(out)


def test_all_that_stay_away_end_the_run_resumably(fleet: Fleet, out: Path, table: SampleTable) -> None:
    def kill_all() -> None:
        for server in fleet.servers:
            if not server.dead:
                server.kill()

    fleet.add(on_request(4, lambda: Act(before=kill_all)))
    fleet.add(on_request(4, lambda: Act(before=kill_all)))
    with pytest.raises(EngineGone, match=r"none came back within 0s \(engine\.reconnect_s\)") as caught:
        fleet.capture(table, cfg(out, backoff_s=0.01), fleet.together(reconnect_s=0.3))
    assert caught.value.exit_code == 3 and fleet.left() == []
    first, second = fleet.servers
    again = [fleet.again(first), fleet.again(second)]
    assert fleet.capture(table, cfg(out), fleet.together(*again)).committed == len(MANY)
    require_sound(out)


def test_a_sample_that_kills_servers_is_rejected_and_no_other_one(fleet: Fleet, out: Path, table: SampleTable) -> None:
    poison = max(MANY)
    deaths: list[str] = []
    lock = threading.Lock()

    def script_of(index: int) -> Script:
        return after_probe(lambda asked: Act(before=lambda: die(index)) if len(asked.ids) == poison else None)

    current: dict[int, Any] = {}

    def die(index: int) -> None:
        with lock:
            deaths.append(current[index].url)
            current[index].kill()
            current[index] = fleet.again(current[index], script_of(index))

    for index in range(3):
        current[index] = fleet.add(script_of(index))
    settings = cfg(out, in_flight_bytes=80 * TOKEN_BYTES, max_reject_fraction=1.0, backoff_s=0.01)
    receipt = fleet.capture(table, settings, fleet.together(*[current[i] for i in range(3)]))
    num_poisoned = MANY.count(poison)
    assert receipt.rejects_by_reason == {"unavailable": num_poisoned}
    assert receipt.committed == len(MANY) - num_poisoned and len(rejects(out)) == num_poisoned
    assert len(deaths) <= num_poisoned * 6 + 2
    require_sound(out)


def test_a_stop_leaves_nothing_in_any_staging_directory(fleet: Fleet, out: Path, table: SampleTable) -> None:
    stop = threading.Event()
    fleet.add(on_request(5, lambda: Act(before=stop.set)))
    fleet.add()
    with pytest.raises(EyasError, match="stopped on request"):
        fleet.capture(table, cfg(out, in_flight_bytes=30 * TOKEN_BYTES), fleet.together(), stop)
    assert fleet.left() == []
    assert fleet.capture(table, cfg(out), fleet.together()).committed == len(MANY)
    require_sound(out)


# --- the seam itself


class Batch:
    """A source that is asked by several threads."""

    def __init__(self, requests: list[CaptureRequest]) -> None:
        self.requests = requests

    def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        taken, self.requests = self.requests[:2], self.requests[2:]
        return taken


def test_each_request_is_answered_once_by_whoever_had_it(fleet: Fleet, table: SampleTable) -> None:
    fleet.add()
    fleet.add(on_request(5 - PROBED, lambda: Act(before=fleet.servers[1].kill)))
    requests = [CaptureRequest(sample.sample_id, sample.token_ids) for sample in table.samples()]
    engine = fleet.together()
    found = [outcome.sample_id for outcome in engine.capture(Batch(list(requests)))]
    assert sorted(found) == sorted(request.sample_id for request in requests)
    again = [outcome.sample_id for outcome in engine.capture(Batch(list(requests)))]
    assert sorted(again) == sorted(found)


def test_what_was_with_two_servers_that_died_is_to_be_asked_for_alone(fleet: Fleet, table: SampleTable) -> None:
    samples = list(table.samples())
    poison = samples[1].token_ids.tolist()

    def deadly(index: int) -> Script:
        return lambda asked: Act(before=fleet.servers[index].kill) if asked.ids == poison else None

    for index in range(3):
        fleet.add(deadly(index))
    found = list(fleet.together().capture(Batch([CaptureRequest(s.sample_id, s.token_ids) for s in samples])))
    assert sorted(outcome.sample_id for outcome in found) == sorted(sample.sample_id for sample in samples)
    failures = [outcome for outcome in found if isinstance(outcome, CaptureFailure)]
    assert all(failure.suspect for failure in failures)
    assert samples[1].sample_id in {failure.sample_id for failure in failures}
    assert sum(server.dead for server in fleet.servers) == 2


def test_a_server_that_takes_less_than_before_stays_out(target: Path, tmp_path: Path, head: TargetHead) -> None:
    fleet = VllmFleet(target, tmp_path, head)
    try:
        fleet.add()
        changed = fleet.add()
        engine = fleet.together()
        engine.info()
        changed.kill()
        fleet.again(changed, about={"max_tokens": 100})
        engine.lose(changed.url, EngineUnavailable("gone"))
        deadline = time.monotonic() + 20
        while "takes samples of 100 tokens, the others took 400" not in engine.servers()[changed.url]:
            assert time.monotonic() < deadline, engine.servers()
            time.sleep(0.02)
    finally:
        fleet.close()


class Roomy:
    """All that dealing needs of a server."""

    url = "http://x"
    staging_limit = 1000

    def __init__(self) -> None:
        self.forgotten: list[tuple[str, int]] = []

    def forget(self, sample_id: str, *, below: int) -> None:
        self.forgotten.append((sample_id, below))


def dealing_of(requests: list[CaptureRequest], num_servers: int) -> tuple[Dealing, list[Member]]:
    members = [Member(Roomy()) for _ in range(num_servers)]  # type: ignore[arg-type]
    return Dealing(Batch(requests), members, 1), members


def asked(sample_id: str, attempt: int = 1) -> CaptureRequest:
    return CaptureRequest(sample_id, np.arange(4, dtype=np.int32), attempt)


def test_a_late_answer_about_a_sample_that_another_server_has_does_not_count() -> None:
    dealing, (first, second) = dealing_of([asked("a")], 2)
    dealing.take(first, 100, wait=True)
    (owed,) = dealing.of(first)
    dealing.give_back(owed)
    assert [r.sample_id for r in dealing.take(second, 100, wait=True)] == ["a"]
    answer = CaptureFailure("a", 1, EngineUnavailable("no"))
    assert not dealing.answered(first, answer) and dealing.answered(second, answer) and dealing.is_settled()


def test_one_that_has_nothing_to_do_comes_first_and_work_is_spread() -> None:
    dealing, (first, second) = dealing_of([asked("a"), asked("b")], 2)
    assert len(dealing.take(first, 100, wait=True)) == 1  # its part: the other has nothing to do
    assert len(dealing.take(second, 100, wait=True)) == 1
    (owed,) = dealing.of(second)
    dealing.answered(second, CaptureFailure("b", 1, EngineUnavailable("no")))
    assert owed.request.sample_id == "b" and dealing.take(second, 100, wait=True) == []
    dealing.add([asked("c")])
    assert dealing.take(first, 100, wait=False) == []  # the idle one comes first
    assert [r.sample_id for r in dealing.take(second, 100, wait=True)] == ["c"]


def test_a_sample_asked_for_once_more_elsewhere_is_forgotten_where_it_was() -> None:
    dealing, (first, second) = dealing_of([asked("a")], 2)
    dealing.take(first, 100, wait=True)
    dealing.add([asked("a", attempt=2)])
    assert [r.attempt for r in dealing.take(second, 100, wait=True)] == [2]
    assert first.engine.forgotten == [("a", 2)] and dealing.silent == [first]  # type: ignore[attr-defined]
    assert not dealing.answered(first, CaptureFailure("a", 1, EngineUnavailable("no")))
