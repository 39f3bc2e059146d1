"""The `vllm` engine and the capture stage against a stand-in server: real HTTP, staging and connector sides."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.config import EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.engine import asking
from eyas.engine.dialect import ask_hello
from eyas.engine.hf import HfEngine
from eyas.engine.vllm.client import VllmEngine
from eyas.engine.vllm.server import VLLM
from eyas.errors import CaptureMismatch, ConfigError, EngineError, EngineUnavailable
from eyas.store.reader import DataSet
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
)
from stand_in_server import Act
from stand_in_vllm import StandInVllm


class VllmWorld(World):
    kind = "vllm"
    make_server = StandInVllm
    make_engine = VllmEngine


@pytest.fixture(scope="module")
def own(target: Path) -> HfEngine:
    """The same target in this process; its last layer's output is the last state before the norm."""
    depth = int(json.loads((target / "config.json").read_text())["num_hidden_layers"])
    return HfEngine(TargetConfig(path=target), EngineConfig(dtype="float32", device="cpu"), (1, 2, 3, depth))


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    return make_table(tmp_path / "samples.parquet", LENGTHS)


@pytest.fixture
def world(target: Path, tmp_path: Path, head: TargetHead, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmWorld]:
    # What takes half a minute with a real server takes half a second here.
    monkeypatch.setattr(asking, "STAGED_PATIENCE_S", 0.3)
    monkeypatch.setattr(asking, "QUIET_PATIENCE_S", 0.2)
    (tmp_path / "staging").mkdir()
    found = VllmWorld(target, tmp_path / "staging", head)
    yield found
    found.close()


def require_values(out: Path, table: SampleTable, own: HfEngine) -> None:
    stored = DataSet(out)
    assert stored.spec.last_hidden_norm == "pre"
    for sample in table.samples():
        found = stored[stored.index_of(sample.sample_id)]
        states = own.states(sample.token_ids)
        states["last"] = states[f"hidden.{stored.spec.num_layers}"]
        for name in stored.spec.fields:
            values = np.frombuffer(found.field(name), dtype="<f4").reshape(-1, 32)
            np.testing.assert_allclose(values, states[name], rtol=1e-5, atol=1e-5)
    stored.close()


@pytest.mark.parametrize("check", ["target", "layer"])
def test_many_samples_in_flight_become_what_the_target_itself_gives(
    world: VllmWorld, out: Path, tmp_path: Path, own: HfEngine, check: str
) -> None:
    table = make_table(tmp_path / "many.parquet", [1 + (17 * i) % 97 for i in range(64)])
    server = world.serve()
    settings = cfg(out, shard_tokens=400, check_fraction=0.1, in_flight_bytes=10_000_000)
    receipt = world.capture(table, settings, world.engine(check_layers=check))
    assert (receipt.committed, receipt.rejected, receipt.checked_samples > 4) == (64, 0, True)
    assert server.most_in_flight > 8
    require_sound(out)
    require_values(out, table, own)
    assert list(world.staging.iterdir()) == []
    (line,) = [row["found"] for row in events(out, "probe")][:1]
    assert "log-probabilities differ by" in line and "layers by" in line and "alone against batch by" in line


def test_blocks_are_held_until_their_states_are_written_and_clear_afterwards(
    world: VllmWorld, out: Path, table: SampleTable
) -> None:
    server = world.serve(num_blocks=12)  # two or three samples
    receipt = world.capture(table, cfg(out))
    assert receipt.committed == len(LENGTHS) and receipt.retries == 0
    require_sound(out)
    server.kill()
    assert sorted(server.free) == list(range(12)) and not server.cache.any()


def test_a_row_that_was_never_computed_is_a_failure_and_not_an_older_requests(
    world: VllmWorld, out: Path, tmp_path: Path
) -> None:
    table = make_table(tmp_path / "few.parquet", [5, 6, 7, 3, 4, 20])
    world.serve(lost_row=15)
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.rejected) == (5, 1)
    ((_, detail),) = rejects(out).values()
    assert "row 15, one of 1, was never computed: chunked prefill?" in detail


def test_staged_bytes_stay_within_a_quota_and_larger_samples_are_refused(
    world: VllmWorld, out: Path, table: SampleTable
) -> None:
    world.serve(staged_bytes=14 * TOKEN_BYTES)
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.rejects_by_reason) == (11, {"refused": 1})
    ((_, detail),) = rejects(out).values()
    assert f"{14 * TOKEN_BYTES} may be staged" in detail
    require_sound(out)


def test_a_server_that_is_killed_and_comes_back_costs_nothing(
    world: VllmWorld, out: Path, table: SampleTable, own: HfEngine
) -> None:
    killed = threading.Event()

    def kill() -> None:
        if not killed.is_set():
            killed.set()
            server.kill()
            world.serve()

    server = world.serve(after_probe(lambda asked: Act(before=kill)))
    receipt = world.capture(table, cfg(out))
    assert killed.is_set() and (receipt.committed, receipt.rejected) == (len(LENGTHS), 0)
    require_values(out, table, own)


def test_what_passes_is_tried_again(world: VllmWorld, out: Path, table: SampleTable, own: HfEngine) -> None:
    statuses = itertools.cycle([408, 429, 500, 503])
    script = after_probe(first_times(1, Act(status=503, text='{"error": {"message": "busy"}}')))
    world.serve(lambda asked: (act := script(asked)) and dataclasses.replace(act, status=next(statuses)))
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.rejected) == (len(LENGTHS), 0) and receipt.retries >= 8
    require_values(out, table, own)


def test_a_bad_request_is_a_reject_at_once(world: VllmWorld, out: Path, table: SampleTable) -> None:
    text = '{"error": {"message": "maximum context length is 8"}}'
    world.serve(of_length(20, lambda asked: Act(status=400, text=text)))
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.rejects_by_reason, receipt.retries) == (11, {"refused": 1}, 0)
    assert "maximum context length is 8" in next(iter(rejects(out).values()))[1]


def test_a_request_that_the_engine_aborted_is_tried_again(world: VllmWorld, out: Path, table: SampleTable) -> None:
    world.serve(after_probe(first_times(1, Act(meta={"finish_reason": "abort"}))))
    receipt = world.capture(table, cfg(out))
    assert (receipt.committed, receipt.rejected) == (len(LENGTHS), 0) and receipt.retries >= 8


def test_a_server_that_asks_for_a_key_stops_the_run(world: VllmWorld, out: Path, table: SampleTable) -> None:
    world.serve(after_probe(lambda asked: Act(status=401, text='{"error": "Unauthorized"}')))
    with pytest.raises(EngineError, match="answers 401"):
        world.capture(table, cfg(out))


@pytest.mark.parametrize("text", ['{"choices": [', '{"text": ""}', "[1]", '{"choices": []}'])
def test_an_answer_that_cannot_be_read_is_tried_again(
    world: VllmWorld, out: Path, table: SampleTable, text: str
) -> None:
    world.serve(after_probe(first_times(1, Act(text=text))))
    assert world.capture(table, cfg(out)).committed == len(LENGTHS)


def test_a_server_without_the_connector_is_named(world: VllmWorld) -> None:
    world.serve(plugin=False)
    with pytest.raises(EngineError, match="it runs without the capture plugin; start it with 'eyas serve'"):
        world.engine().info()


def test_something_else_is_named(world: VllmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    server = world.serve()
    monkeypatch.setattr(server, "ask", lambda body: (Act(text="<html>log in</html>"), {}))
    with pytest.raises(EngineError, match="does not answer as vLLM does: <html>log in</html>"):
        world.engine().info()
    server.kill()
    with pytest.raises(EngineUnavailable, match=f"no vLLM server answers at {server.url}"):
        world.engine().info()


def test_a_key_among_the_options_is_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra\.api-key: capture sends no key"):
        VllmEngine(TargetConfig(path=target), EngineConfig(kind="vllm", extra={"api-key": "s3cret"}))


def test_a_last_state_after_the_norm_is_named(world: VllmWorld, out: Path, table: SampleTable) -> None:
    world.serve(pre_norm=False)
    with pytest.raises(CaptureMismatch, match="the last state is post-norm, not pre-norm as the spec says"):
        world.capture(table, cfg(out))


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one_are_named(world: VllmWorld, out: Path, table: SampleTable, shift: int) -> None:
    world.serve(shift=shift)
    with pytest.raises(CaptureMismatch, match=r"off by one layer"):
        world.capture(table, cfg(out), world.engine(check_layers="target"))


def test_without_neighbours_single_layers_are_not_checked(world: VllmWorld, out: Path, table: SampleTable) -> None:
    world.serve(neighbours=False, layers=(3,))
    assert world.capture(table, cfg(out), world.engine(check_layers="layer")).committed == len(LENGTHS)
    (line,) = [row["found"] for row in events(out, "probe")][:1]
    assert "layers by" not in line


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "that cannot be read, or none"),
        ([], "of 0 tokens, and not of the 3 sent"),
        ([None, {"5": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}], "of other tokens than the 3 sent"),
        ([None, {"5": {"logprob": None}}, {"6": {}}], "that cannot be read, or none"),
        ([None, {"5": None}, {"6": None}], "that cannot be read, or none"),
    ],
)
def test_log_probabilities_that_are_not_the_prompts_are_no_pass(told: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VLLM.logprobs({"prompt_logprobs": told}, [4, 5, 6])


def test_log_probabilities_are_found_by_token() -> None:
    told = [None, {"7": {"logprob": -3.0}, "5": {"logprob": -1.5, "rank": 2}}, {"6": {"logprob": -0.25}}]
    assert VLLM.logprobs({"prompt_logprobs": told}, [4, 5, 6]) == [-1.5, -0.25]
    assert VLLM.logprobs({"prompt_logprobs": [None]}, [4]) == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://a..b:1", "is not an address"),
        ("http://" + "a" * 80 + ":1", "is not an address"),
        ("http://", "names no host"),
        ("http://127.0.0.1:99999", "port 99999 is none"),
        ("http://user:s3cret@127.0.0.1:1", "holds a user name or a password"),
        ("http://user:s3cret@127.0.0.1:x", "holds a user name or a password"),
    ],
)
def test_an_address_that_is_none_is_refused_without_a_traceback(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        ask_hello(VLLM, url)
    assert "s3cret" not in str(caught.value)
