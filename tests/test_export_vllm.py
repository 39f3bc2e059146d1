"""Exports in a real vLLM server on a CPU: they load, what is drafted is accepted, as often as our own decoding says.

SmolLM2 with drafters that have learned a few of its answers by heart. Run by `make test-vllm`, which sets the server's
environment up; skipped where that is not there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers

from eyas.export.run import Wanted, export
from eyas.records import Sample
from eyas.train.drafts import find_draft
from fake_data import make_table_of
from real_server import TARGET, VLLM_ENVIRONMENT, VLLM_PYTHON

PORT = 30650
URL = f"http://127.0.0.1:{PORT}"
NUM_NEW, NUM_DRAFTED = 40, 3
TEXTS = ("The capital of France is", "Three kinds of tree:", "A letter to a friend.", "def add(a, b):")
AUX_LAYERS = [2, 15, 27]
TOML = f"""
[target]
path = "{TARGET}"
[data]
samples = "samples.parquet"
[engine]
dtype = "float32"
device = "cpu"
[capture]
out = "states"
aux_layers = {AUX_LAYERS}
min_free_bytes = 0
[draft]
vocab_size = 4096
[train]
ttt_length = {NUM_DRAFTED}
pack_tokens = 512
epochs = 60
eval_every = 1000
learning_rate = 2e-3
device = "cpu"
[evaluate]
num_draft_tokens = {NUM_DRAFTED}
max_new_tokens = {NUM_NEW}
"""
DRAFTERS: dict[str, list[str]] = {
    "plain": [],
    "layers_and_norms": ["draft.num_layers=2", "draft.norm_aux=true", "draft.carry_normed=true"],
    "own_size": ["draft.hidden_size=256", "draft.num_heads=4", "draft.num_kv_heads=2"],
}
SERVED = [
    ("plain", "vllm"),
    ("plain", "speculators"),
    ("layers_and_norms", "vllm"),
    ("layers_and_norms", "speculators"),
    ("own_size", "vllm"),
]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs .venv-vllm: make test-vllm"),
    pytest.mark.skipif(not TARGET.exists(), reason="needs demo/target: make test-vllm"),
]


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
def work(tmp_path_factory: pytest.TempPathFactory, answers: list[list[int]]) -> Path:
    """The answers with their hidden states, captured, and the prompts."""
    path = tmp_path_factory.mktemp("export")
    samples = [
        Sample(
            np.array(ids + answer, dtype=np.int32), ((len(ids), len(ids) + len(answer)),), conversation_id=str(number)
        )
        for number, (ids, answer) in enumerate(zip(prompts(), answers, strict=True))
    ]
    make_table_of(path / "samples.parquet", samples)
    (path / "prompts.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts()))
    (path / "run.toml").write_text(TOML)
    eyas(path, "capture", "run.toml")
    return path


def eyas(work: Path, *arguments: str) -> str:
    """What a command of ours prints."""
    done = subprocess.run(
        [sys.executable, "-m", "eyas", *arguments], cwd=work, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def trained(work: Path, drafter: str) -> float:
    """Train it, once; acceptance length of our own decoding of the same prompts."""
    training = f"train.out={drafter}"
    eyas(work, "train", "run.toml", training, *DRAFTERS[drafter])
    told = eyas(work, "evaluate", "run.toml", training, "--decode", "--prompts", "prompts.jsonl", "--json")
    return float(json.loads(told)["acceptance_length_pooled"]["value"])


@contextlib.contextmanager
def served(work: Path, drafter: str, layout: str) -> Iterator[None]:
    """vLLM with an export of the drafter, started by the line that the export tells, ready."""
    name = str(TARGET) if layout == "speculators" else None
    out = work / f"{drafter}-{layout}"
    wanted = Wanted(layout, dtype="float32", num_draft_tokens=NUM_DRAFTED, target_name=name)  # type: ignore[arg-type]
    receipt = export(find_draft(work / drafter, None), out, wanted, target=TARGET)
    more = f"--enforce-eager --max-model-len 1024 --host 127.0.0.1 --port {PORT} --served-model-name target"
    log = work / f"{out.name}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [VLLM_PYTHON.with_name("vllm"), *shlex.split(receipt.launch)[1:], *shlex.split(more)],
            env=os.environ | VLLM_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not _ready():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(1.0)
        yield
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


@pytest.mark.parametrize(("drafter", "layout"), SERVED)
def test_it_loads_and_what_it_drafts_is_accepted_as_our_decoding_says(
    drafter: str, layout: str, work: Path, answers: list[list[int]]
) -> None:
    expected = trained(work, drafter)
    with served(work, drafter, layout):
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
    assert accepted > 0 and expected > 1.5
    assert 1 + accepted / rounds == pytest.approx(expected, rel=0.05)
