"""What the tests with a real SGLang or vLLM server share: `eyas serve` at work, a capture from it, states compared."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers

from eyas.store.reader import DataSet
from eyas.target.head import TargetHead
from eyas.values import as_float32

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "demo/target"
EYAS = Path(sys.executable).with_name("eyas")
SGLANG_PYTHON = ROOT / ".venv-sglang/bin/python"
SGLANG_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "tests/sglang_cpu/shims"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "2",
}
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
VLLM_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "tests/vllm_cpu/shims"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One core, not the first one, where there is a choice: the client needs some of that.
    "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
}
TOLERANCE = 1e-4
"""Relative error of a row in float32."""
Fields = dict[str, npt.NDArray[np.float32]]


def sglang_extra(chunk: int) -> str:
    """`engine.extra` of an SGLang server on a small machine, that computes so many tokens of prompts at once."""
    return f"""attention-backend = "torch_native"
mem-fraction-static = 0.2
max-total-tokens = 8192
chunked-prefill-size = {chunk}
sleep-on-idle = true"""


@contextlib.contextmanager
def serving(work: Path, environment: Mapping[str, str], run: str = "run.toml") -> Iterator[subprocess.Popen[str]]:
    """`eyas serve`, ready; afterwards it ends well and leaves no staging directory."""
    process = subprocess.Popen(
        [EYAS, "serve", run],
        cwd=work,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: list[str] = []
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        threading.Thread(target=said.extend, args=(pipe,), daemon=True).start()
    try:
        wait_ready(work, process, said)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    assert code == 0, said[-20:]
    assert not (work / "staging").exists()


def wait_ready(work: Path, process: subprocess.Popen[str], said: list[str], restarts: int = 0) -> dict[str, Any]:
    """The heartbeat of a server that is ready after so many restarts."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert process.poll() is None, said[-30:]
        try:
            beat: dict[str, Any] = json.loads((work / "states/server/heartbeat.json").read_bytes())
        except (OSError, ValueError):
            beat = {}
        if beat.get("state") == "ready" and beat.get("restarts", 0) >= restarts:
            return beat
        time.sleep(0.5)
    raise AssertionError(said[-30:])


def capture(work: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [EYAS, "capture", "run.toml", *overrides, "--json"]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=900, check=False)


def assert_answers_keep_their_ids(work: Path, url: str) -> None:
    """`eyas generate` from a server, two turns each, gives its token ids, and `prepare` takes them as they are."""
    questions = ["Name a bird of prey.", "What is 2 + 3?", "Say hello in French."]
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant"}, {"role": "user", "content": "Why?"}]}
            for q in questions]  # fmt: skip
    (work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "generate.prompts=prompts.jsonl", "generate.out=answers.jsonl", f"generate.endpoints=['{url}/v1']",
        "generate.max_new_tokens=24", "generate.keep_cut=true", "data.sources=['answers.jsonl']",
        "data.samples=answers.parquet", "data.workers=1",
    ]  # fmt: skip

    def eyas(stage: str) -> dict[str, Any]:
        command = [EYAS, stage, "run.toml", *settings, "--json"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        receipt: dict[str, Any] = json.loads(done.stdout)
        return receipt

    receipt = eyas("generate")
    assert receipt["planned"] == receipt["answered"] == 3 and receipt["retokenized"] == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET)
    for line in (work / "answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        written = [
            i for i, own in zip(row["input_ids"], row["loss_mask"], strict=True) if own and i != tokenizer.eos_token_id
        ]
        said = "".join(m["content"] for m in row["messages"] if m["role"] == "assistant")
        assert tokenizer.decode(written) == said
    assert eyas("prepare")["mask_methods"] == {"given": 3}


def left_in_staging(work: Path) -> list[str]:
    return [str(path) for path in (work / "staging").rglob("*") if path.is_file()]


def await_record(out: Path) -> None:
    """Until a first shard is committed, or five minutes are over."""
    deadline = time.monotonic() + 300
    while not list(out.glob("records/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)


def values(data: DataSet, index: int) -> Fields:
    sample = data[index]
    return {name: as_float32(sample.field(name), "float32", data.spec.hidden_size) for name in data.spec.fields}


def worst_errors(found: Fields, expected: Fields) -> dict[str, float]:
    """The largest relative error of a row, by field."""
    assert found.keys() == expected.keys()
    worst = {}
    for name, states in expected.items():
        assert found[name].shape == states.shape
        worst[name] = float(np.max(np.linalg.norm(found[name] - states, axis=1) / np.linalg.norm(states, axis=1)))
    return worst


def assert_same_states(one: Path, two: Path) -> dict[str, float]:
    """A data set holds the samples of another, and states that differ by rounding alone, norms brought together; the
    largest relative error of a row, by field."""
    a, b = DataSet(one), DataSet(two)
    assert len(a) and a.spec.aux_layers == b.spec.aux_layers
    head = TargetHead.load(TARGET)
    largest: dict[str, float] = {}
    for index in range(len(a)):
        left, right = values(a, index), values(b, b.index_of(a[index].sample_id))
        if a.spec.last_hidden_norm != b.spec.last_hidden_norm:
            side = left if a.spec.last_hidden_norm == "pre" else right
            side["last"] = head.normed(side["last"])
        worst = worst_errors(left, right)
        assert max(worst.values()) < TOLERANCE, (a[index].num_tokens, worst)
        largest = {name: max(error, largest.get(name, 0.0)) for name, error in worst.items()}
    a.close()
    b.close()
    return largest
