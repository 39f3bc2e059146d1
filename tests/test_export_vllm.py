"""Exports in a real vLLM server on a CPU: they load, what is drafted is accepted, as often as our own decoding says.

SmolLM2 with a drafter that nobody trained: where a text repeats itself, the deepest state that it starts from knows
what comes. Run by `make test-vllm`, which sets the server's environment up; skipped where that is not there.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers

from eyas.export.engines import ENGINES, launch
from eyas.export.run import Wanted, export
from eyas.model import checkpoint
from eyas.model.create import TargetSizes, draft_shape, initialise
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.vocab_map import VocabMap

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm/bin/python"
TARGET = ROOT / "demo/target"
SHIMS = ROOT / "tests/vllm_cpu/shims"
PORT = 30650
URL = f"http://127.0.0.1:{PORT}"
NUM_NEW, NUM_DRAFTED = 40, 3
TEXTS = ("ha ha ha ha ha ha ha ha ha", "one two one two one two one two one two", "The capital of France is")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-vllm: make test-vllm"),
    pytest.mark.skipif(not TARGET.exists(), reason="needs demo/target: make test-vllm"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter as training starts from it, an export for each of vLLM's layouts, and prompts."""
    path = tmp_path_factory.mktemp("export")
    config = json.loads((TARGET / "config.json").read_text())
    sizes = TargetSizes.of(config)
    spec: Any = SimpleNamespace(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        num_layers=sizes.num_hidden_layers,
        aux_layers=(2, 15, 27),
    )
    draft = Eagle3Draft(draft_shape(config, spec, draft_vocab_size=16_384))
    vocab_map = VocabMap.of(torch.arange(16_384), sizes.vocab_size)
    initialise(draft, TARGET, vocab_map, 0)
    checkpoint.save(draft, vocab_map, path / "draft", target_config=config, dtype="float32")
    for engine, name in (("vllm", None), ("speculators", str(TARGET))):
        wanted = Wanted(engine, dtype="float32", num_draft_tokens=NUM_DRAFTED, target_name=name)  # type: ignore[arg-type]
        export(path / "draft", path / engine, wanted, target=TARGET)
    (path / "prompts.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts()))
    (path / "run.toml").write_text(
        f'[target]\npath = "{TARGET}"\n[engine]\ndtype = "float32"\ndevice = "cpu"\n[evaluate]\n'
        f"num_draft_tokens = {NUM_DRAFTED}\nmax_new_tokens = {NUM_NEW}\n"
    )
    return path


def prompts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """The target's own, greedy, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    found = []
    for ids in prompts():
        made = model.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False)  # type: ignore[operator]
        found.append(made[0, len(ids) :].tolist())
    return found


@pytest.fixture(scope="module")
def ours(work: Path) -> float:
    """Acceptance length of our own decoding of the same prompts."""
    command = [sys.executable, "-m", "eyas", "evaluate", "run.toml", "--decode", "--prompts", "prompts.jsonl"]
    done = subprocess.run(
        [*command, "--draft", "draft", "--out", "own.json", "--json"],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout)["acceptance_length_pooled"]["value"])


@pytest.fixture(params=["vllm", "speculators"])
def server(request: pytest.FixtureRequest, work: Path) -> Iterator[str]:
    """vLLM, started by the line that the export tells, ready; yields the layout."""
    layout = request.param
    line = launch(
        ENGINES[layout],
        target=str(TARGET),
        draft=str(work / layout),
        num_draft_tokens=NUM_DRAFTED,
        dtype="float32",
        alone=layout == "speculators",
    )
    more = f"--enforce-eager --max-model-len 1024 --host 127.0.0.1 --port {PORT} --served-model-name target"
    environment = os.environ | {
        "PYTHONPATH": str(SHIMS),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "1",
    }
    log = work / f"{layout}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [PYTHON.with_name("vllm"), *shlex.split(line)[1:], *shlex.split(more)],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not _ready():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(1.0)
        yield layout
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _ready() -> bool:
    try:
        return httpx.get(f"{URL}/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def counters() -> dict[str, float]:
    """vLLM's own: rounds of drafting, tokens accepted in them."""
    lines = httpx.get(f"{URL}/metrics", timeout=30.0).text.splitlines()
    names = {"rounds": "vllm:spec_decode_num_drafts_total", "accepted": "vllm:spec_decode_num_accepted_tokens_total"}
    return {
        short: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
        for short, name in names.items()
    }


def test_it_loads_and_what_it_drafts_is_accepted_as_our_decoding_says(
    server: str, ours: float, answers: list[list[int]]
) -> None:
    before = counters()
    for ids, answer in zip(prompts(), answers, strict=True):
        body = {
            "model": "target",
            "prompt": ids,
            "max_tokens": NUM_NEW,
            "temperature": 0,
            "return_token_ids": True,
        }
        reply = httpx.post(f"{URL}/v1/completions", json=body, timeout=600.0)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["token_ids"] == answer
    after = counters()
    rounds, accepted = (after[name] - before[name] for name in ("rounds", "accepted"))
    assert accepted > 0 and ours > 1.2
    assert 1 + accepted / rounds == pytest.approx(ours, rel=0.05)
