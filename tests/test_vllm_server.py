"""Capture from a real vLLM server on a CPU, started by `eyas serve`: SmolLM2, float32, chunked prompts, small quota.

Run by `make test-vllm`, which sets the server's environment up; skipped where that is not there.
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
import numpy.typing as npt
import pytest
import transformers

from eyas.capture.requests import Batch
from eyas.config import EngineConfig, TargetConfig
from eyas.engine import staged
from eyas.engine.base import CaptureAnswer, CaptureRequest
from eyas.engine.hf import HfEngine
from eyas.engine.vllm.client import VllmEngine
from eyas.records import Sample
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.values import as_float32
from fake_data import make_table_of
from real_server import (
    EYAS,
    ROOT,
    TARGET,
    TOLERANCE,
    VLLM_ENVIRONMENT,
    VLLM_PYTHON,
    assert_answers_keep_their_ids,
    assert_same_states,
    await_record,
    capture,
    left_in_staging,
    serving,
    values,
    wait_ready,
    worst_errors,
)

PORT = 30600
URL = f"http://127.0.0.1:{PORT}"
LAYERS = (0, 2, 15)
CHUNK = 192
LONGEST = 2000
QUOTA = 24_000_000
"""Bytes: the longest sample and little more."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs .venv-vllm: make test-vllm"),
    pytest.mark.skipif(not TARGET.exists(), reason="needs demo/target: make test-vllm"),
]


def make_samples() -> list[Sample]:
    """73 samples of 1 to 2,000 tokens: shorter and longer than a chunk, at its edge, with shared beginnings."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    text = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("[!L]*.md")))
    ids = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    lengths = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 600, LONGEST, *range(4, 60)]
    prompts = [ids[97 * i : 97 * i + n] for i, n in enumerate(lengths)]
    prompts += [np.concatenate([ids[:150], ids[1000 + 10 * n : 1000 + 11 * n]]) for n in range(1, 9)]
    return [Sample(prompt, ((len(prompt) - 1, len(prompt)),)) for prompt in prompts]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm")
    make_table_of(path / "samples.parquet", make_samples())
    (path / "run.toml").write_text(f"""
[target]
path = "{TARGET}"
[data]
samples = "samples.parquet"
[engine]
kind = "vllm"
url = "{URL}"
dtype = "float32"
device = "cpu"
check_layers = "layer"
[engine.extra]
enforce-eager = true
max-model-len = {LONGEST + 1}
[serve]
python = "{VLLM_PYTHON}"
staging = "{path / "staging"}"
staging_bytes = {QUOTA}
min_free_bytes = 1000000
max_prefill_tokens = {CHUNK}
[capture]
out = "states"
aux_layers = {list(LAYERS)}
shard_tokens = 1500
in_flight_bytes = 60000000
min_free_bytes = 0
interval_s = 2.0
""")
    return path


@pytest.fixture(scope="module")
def server(work: Path) -> Iterator[subprocess.Popen[str]]:
    """`eyas serve`, ready."""
    with serving(work, VLLM_ENVIRONMENT) as process:
        yield process


@pytest.fixture(scope="module")
def captured(work: Path, server: subprocess.Popen[str]) -> dict[str, Any]:
    """The first capture, with what a killed run left in the staging directory, other clients and aborted requests."""
    dead = work / "staging" / ("d" * 16)
    dead.mkdir()
    (dead / staged.OWNER).touch()
    (dead / "1.states").write_bytes(b"left behind")
    (work / "staging" / "foreign").write_text("not ours")
    stop = threading.Event()

    def disturb() -> None:
        with httpx.Client(base_url=URL, timeout=60, trust_env=False) as client:
            while not stop.is_set():
                other = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4}).json()
                assert other["kv_transfer_params"] is None and other["usage"]["completion_tokens"] == 4
                # A prompt whose client goes away in the middle.
                with contextlib.suppress(httpx.TimeoutException):
                    body = {"prompt": list(range(100, 700)), "max_tokens": 20}
                    client.post("/v1/completions", json=body, timeout=0.3)
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


def test_every_sample_is_there_and_equals_transformers(work: Path, captured: dict[str, Any]) -> None:
    samples = make_samples()
    assert captured["planned"] == captured["committed"] == len(samples) and captured["rejected"] == 0
    assert captured["checked_samples"] >= 4
    assert verify(work / "states").exit_code == 0
    assert left_in_staging(work) == []
    data = DataSet(work / "states")
    assert data.spec.last_hidden_norm == "pre" and data.spec.aux_layers == LAYERS
    depth = data.spec.num_layers
    engine = HfEngine(TargetConfig(path=TARGET), EngineConfig(dtype="float32", device="cpu"), (*LAYERS, depth))
    worst: dict[int, dict[str, float]] = {}
    for sample in samples:
        states = engine.states(sample.token_ids)
        states["last"] = states.pop(f"hidden.{depth}")  # before the norm
        worst[sample.num_tokens] = worst_errors(values(data, data.index_of(sample.sample_id)), states)
    data.close()
    assert max(max(errors.values()) for errors in worst.values()) < TOLERANCE, worst


def test_a_data_set_of_transformers_is_the_same_one(work: Path, captured: dict[str, Any]) -> None:
    done = capture(work, "engine.kind=hf", "engine.extra={}", "capture.out=own", "capture.limit=24")
    assert done.returncode == 0, done.stderr
    assert_same_states(work / "own", work / "states")


def test_a_second_run_asks_nothing(work: Path, captured: dict[str, Any]) -> None:
    again = json.loads(capture(work).stdout)
    assert again["captured_tokens"] == 0 and again["data_digest"] == captured["data_digest"]


def test_one_prompt_many_times_at_once_gives_the_same_states(work: Path, captured: dict[str, Any]) -> None:
    """32 requests in flight, each its own answer, though all have the same tokens and half of them a longer twin."""
    ids = make_samples()[7].token_ids
    requests = [CaptureRequest(f"{i:032x}", ids[:50] if i % 2 else ids[:90]) for i in range(32)]
    engine = VllmEngine(TargetConfig(path=TARGET), EngineConfig(kind="vllm", url=URL))
    answers = list(engine.capture(Batch(requests)))
    first: dict[int, npt.NDArray[np.float32]] = {}
    for answer in answers:
        assert isinstance(answer, CaptureAnswer)
        last = as_float32(answer.fields["last"].data, "float32", answer.fields["last"].shape[1])
        other = first.setdefault(len(last), last)
        assert float(np.max(np.linalg.norm(last - other, axis=1) / np.linalg.norm(other, axis=1))) < 1e-4
    assert sorted(answer.sample_id for answer in answers) == [request.sample_id for request in requests]
    assert sorted(first) == [50, 90]
    engine.close()
    assert left_in_staging(work) == []


def test_answers_keep_the_token_ids_that_the_server_wrote(work: Path, captured: dict[str, Any]) -> None:
    assert_answers_keep_their_ids(work, URL)


def test_a_full_staging_directory_is_waited_for(work: Path, captured: dict[str, Any]) -> None:
    """The connector refuses what does not fit, retryably; nothing is lost, and capture goes on when there is room."""
    run = staged.Run(work / "staging")
    hoard = []
    results: list[subprocess.CompletedProcess[str]] = []
    try:
        # Files of another run that nobody takes: the server's own count of what is staged.
        with httpx.Client(base_url=URL, timeout=60, trust_env=False) as client:
            for serial in range(1, 60):
                name = staged.RequestName(run.token, serial, 150)
                body = {"prompt": list(range(100, 250)), "max_tokens": 1, "kv_transfer_params": {"eyas": str(name)}}
                said = client.post("/v1/completions", json=body).json()["kv_transfer_params"]["eyas"]
                if "error" in said:
                    assert said["reason"] == "full" and said["retry"] is True
                    break
                hoard.append(name.path(work / "staging"))
            else:
                raise AssertionError("never full")
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


def test_a_client_killed_with_9_goes_on_where_it_was(work: Path, captured: dict[str, Any]) -> None:
    process = subprocess.Popen(
        [EYAS, "capture", "run.toml", "capture.out=killed"], cwd=work, stderr=subprocess.DEVNULL, text=True
    )
    await_record(work / "killed")
    process.kill()
    process.wait()
    done = capture(work, "capture.out=killed")
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout)
    assert receipt["committed"] == receipt["planned"] and receipt["captured_tokens"] < captured["captured_tokens"]
    assert "removed what 1 dead runs had left" in done.stderr
    assert_same_states(work / "states", work / "killed")
    assert left_in_staging(work) == []


def test_the_server_is_killed_in_mid_run_and_the_run_goes_on(
    work: Path, server: subprocess.Popen[str], captured: dict[str, Any]
) -> None:
    results: list[subprocess.CompletedProcess[str]] = []
    thread = threading.Thread(target=lambda: results.append(capture(work, "capture.out=survivor")))
    thread.start()
    await_record(work / "survivor")
    beat = json.loads((work / "states/server/heartbeat.json").read_bytes())
    os.kill(beat["server_pid"], signal.SIGKILL)
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
