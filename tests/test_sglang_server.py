"""Capture from a real SGLang server on a CPU, started by `eyas serve`: SmolLM2, float32, chunked prompts, small quota.

Run by `make test-sglang`, which sets the server's environment up; skipped where that is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from eyas.capture.requests import Batch
from eyas.config import EngineConfig, TargetConfig
from eyas.engine import staged
from eyas.engine.base import CaptureAnswer, CaptureRequest
from eyas.engine.hf import HfEngine
from eyas.records import Sample
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.values import as_float32
from fake_data import make_table_of
from real_server import (
    SGLANG_ENVIRONMENT,
    SGLANG_PYTHON,
    TARGET,
    TOLERANCE,
    Fields,
    assert_answers_keep_their_ids,
    assert_same_states,
    await_record,
    capture,
    left_in_staging,
    serving,
    sglang_extra,
    values,
    wait_ready,
    worst_errors,
)

PORT = 30500
URL = f"http://127.0.0.1:{PORT}"
LAYERS = (0, 2, 15, 30)
CHUNK = 64
QUOTA = 6_000_000
"""Bytes: two or three of the longer samples."""

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="needs .venv-sglang: make test-sglang"),
    pytest.mark.skipif(not TARGET.exists(), reason="needs demo/target: make test-sglang"),
]


def make_samples() -> list[Sample]:
    """64 samples of 1 to 190 tokens: shorter and longer than a chunk, at its edge, with shared beginnings."""
    rng = np.random.default_rng(5)
    shared = rng.integers(100, 40_000, 80).astype(np.int32)
    lengths = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 2]
    lengths += [int(n) for n in rng.integers(4, 100, 47)]
    prompts = [rng.integers(100, 40_000, n) for n in lengths]
    prompts += [np.concatenate([shared, rng.integers(100, 40_000, n)]) for n in range(1, 9)]
    return [Sample(ids.astype(np.int32), ((len(ids) - 1, len(ids)),)) for ids in prompts]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sglang")
    make_table_of(path / "samples.parquet", make_samples())
    (path / "run.toml").write_text(f"""
[target]
path = "{TARGET}"
[data]
samples = "samples.parquet"
[engine]
kind = "sglang"
url = "{URL}"
dtype = "float32"
device = "cpu"
[engine.extra]
{sglang_extra(CHUNK)}
[serve]
python = "{SGLANG_PYTHON}"
staging = "{path / "staging"}"
staging_bytes = {QUOTA}
min_free_bytes = 1000000
[capture]
out = "states"
aux_layers = {list(LAYERS)}
shard_tokens = 1500
in_flight_bytes = 40000000
min_free_bytes = 0
interval_s = 2.0
""")
    return path


@pytest.fixture(scope="module")
def expected() -> dict[str, Fields]:
    """Every field of every sample by transformers, computed while nothing else runs."""
    engine = HfEngine(TargetConfig(path=TARGET), EngineConfig(dtype="float32", device="cpu"), LAYERS)
    requests = [CaptureRequest(sample.sample_id, sample.token_ids) for sample in make_samples()]
    found = {}
    for answer in engine.capture(Batch(requests)):
        assert isinstance(answer, CaptureAnswer)
        found[answer.sample_id] = {
            name: as_float32(block.data, "float32", block.shape[1]) for name, block in answer.fields.items()
        }
    engine.close()
    return found


@pytest.fixture(scope="module")
def server(work: Path, expected: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """`eyas serve`, ready."""
    with serving(work, SGLANG_ENVIRONMENT) as process:
        yield process


def schedulers(server_pid: int) -> list[int]:
    """The scheduler processes among a server's children."""
    children = [pid for path in Path(f"/proc/{server_pid}/task").glob("*/children") for pid in path.read_text().split()]
    found = [int(pid) for pid in children if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert found
    return found


@pytest.fixture(scope="module")
def captured(work: Path, server: subprocess.Popen[str]) -> dict[str, Any]:
    """The first capture, with what a killed run left in the staging directory, health checks and aborted requests."""
    dead = work / "staging" / ("d" * 16)
    dead.mkdir()
    (dead / staged.OWNER).touch()
    (dead / "1.states").write_bytes(b"left behind")
    (work / "staging" / "foreign").write_text("not ours")
    stop = threading.Event()

    def disturb() -> None:
        with httpx.Client(base_url=URL, timeout=60, trust_env=False) as client:
            while not stop.is_set():
                client.get("/health_generate")
                # A prompt whose client goes away in the middle.
                body = {"input_ids": list(range(100, 400)), "sampling_params": {"max_new_tokens": 20}}
                with contextlib.suppress(httpx.TimeoutException):
                    client.post("/generate", json=body, timeout=0.3)
                stop.wait(1.0)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        done = capture(work)
    finally:
        stop.set()
        disturber.join()
    assert done.returncode == 0, done.stderr
    assert "removed what 1 dead runs had left" in done.stderr
    assert not dead.exists() and (work / "staging" / "foreign").exists()
    (work / "staging" / "foreign").unlink()
    receipt: dict[str, Any] = json.loads(done.stdout)
    return receipt


def test_states_equal_those_of_transformers(work: Path, captured: dict[str, Any], expected: dict[str, Fields]) -> None:
    assert captured["planned"] == captured["committed"] == len(expected) and captured["rejected"] == 0
    assert captured["checked_samples"] >= 4
    assert verify(work / "states").exit_code == 0
    assert left_in_staging(work) == []
    data = DataSet(work / "states")
    assert data.spec.last_hidden_norm == "post" and data.spec.aux_layers == LAYERS
    for sample_id, fields in expected.items():
        worst = worst_errors(values(data, data.index_of(sample_id)), fields)
        assert max(worst.values()) < TOLERANCE, worst
    data.close()


def test_a_second_run_asks_nothing(work: Path, captured: dict[str, Any]) -> None:
    again = json.loads(capture(work).stdout)
    assert again["captured_tokens"] == 0 and again["data_digest"] == captured["data_digest"]


def test_answers_keep_the_token_ids_that_the_server_wrote(work: Path, captured: dict[str, Any]) -> None:
    assert_answers_keep_their_ids(work, URL)


def test_two_clients_share_the_quota(work: Path, captured: dict[str, Any]) -> None:
    results: list[subprocess.CompletedProcess[str]] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(capture(work, f"capture.out=twin{n}", "capture.limit=20")))  # type: ignore[misc]
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        sizes = []
        for path in (work / "staging").rglob("*.states"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        most = max(most, sum(sizes))
        time.sleep(0.01)
    assert [done.returncode for done in results] == [0, 0], [done.stderr for done in results]
    assert [json.loads(done.stdout)["committed"] for done in results] == [20, 20]
    assert_same_states(work / "twin0", work / "twin1")
    assert most <= QUOTA and left_in_staging(work) == []


def test_a_full_staging_file_system_is_waited_for(work: Path, captured: dict[str, Any]) -> None:
    """The plugin refuses what does not fit, retryably; nothing is lost, and capture goes on when there is room."""
    run = staged.Run(work / "staging")
    name = staged.RequestName(run.token, 1, 20)
    hoard = []
    try:
        # Files of another run that nobody takes: the server's own count of what is staged.
        with httpx.Client(base_url=URL, timeout=60, trust_env=False) as client:
            for serial in range(1, 60):
                name = staged.RequestName(run.token, serial, 120)
                body = {"rid": str(name), "input_ids": list(range(100, 220)), "sampling_params": {"max_new_tokens": 1}}
                said = client.post("/generate", json=body).json()["meta_info"]["eyas"][0]
                if "error" in said:
                    assert said["reason"] == "full" and said["retry"] is True
                    break
                hoard.append(name.path(work / "staging"))
            else:
                raise AssertionError("never full")
        results: list[subprocess.CompletedProcess[str]] = []
        thread = threading.Thread(
            target=lambda: results.append(capture(work, "capture.out=squeezed", "capture.limit=12"))
        )
        thread.start()
        time.sleep(15)
        assert thread.is_alive() or results[0].returncode == 0
    finally:
        for path in hoard:
            path.unlink(missing_ok=True)
        run.close()
    thread.join()
    assert results[0].returncode == 0, results[0].stderr
    assert json.loads(results[0].stdout)["rejected"] == 0


def test_the_server_is_killed_in_mid_run_and_the_run_goes_on(
    work: Path, server: subprocess.Popen[str], captured: dict[str, Any]
) -> None:
    results: list[subprocess.CompletedProcess[str]] = []
    thread = threading.Thread(target=lambda: results.append(capture(work, "capture.out=survivor")))
    thread.start()
    await_record(work / "survivor")
    beat = json.loads((work / "states/server/heartbeat.json").read_bytes())
    for pid in schedulers(beat["server_pid"]):
        os.kill(pid, signal.SIGKILL)
    thread.join()
    assert results[0].returncode == 0, results[0].stderr
    receipt = json.loads(results[0].stdout)
    assert receipt["committed"] == receipt["planned"] and receipt["rejected"] == 0
    assert "is back" in results[0].stderr
    assert verify(work / "survivor").exit_code == 0
    after = wait_ready(work, server, [], restarts=1)
    assert after["restarts"] == beat.get("restarts", 0) + 1
    assert_same_states(work / "states", work / "survivor")
    assert left_in_staging(work) == []
