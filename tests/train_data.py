"""A tiny target with answers of its own, captured: what a training starts from, in a few seconds."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from eyas import config as configuration
from eyas.config import CaptureConfig, EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.engine.hf import HfEngine
from eyas.log import Progress
from eyas.records import Sample
from eyas.target.head import TargetHead
from eyas.train.receipt import TrainReceipt
from eyas.train.run import train
from fake_data import config, make_table_of, run

TOML = """
[target]
path = "target"
[data]
samples = "samples.parquet"
[capture]
out = "states"
[draft]
vocab_size = 200
[train]
out = "run"
ttt_length = 3
pack_tokens = 256
learning_rate = 3e-3
epochs = 2
log_every = 1
checkpoint_every = 1000
device = "cpu"
"""


def answers(model: Any, num_samples: int, *, seed: int = 0) -> list[Sample]:
    """Prompts of random tokens that the model answers greedily, in two turns; each fifth is held out."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(num_samples):
        ids = torch.tensor([rng.integers(3, 301, 6).tolist()])
        spans = []
        for turn in range(2):
            if turn:
                ids = torch.cat([ids, torch.tensor([rng.integers(3, 301, 3).tolist()])], 1)
            start, num_new = ids.shape[1], int(rng.integers(6, 20))
            for _ in range(num_new):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            spans.append((start, ids.shape[1]))
        samples.append(
            Sample(
                ids[0].numpy().astype(np.int32),
                tuple(spans),
                conversation_id=f"c{number}",
                source=("chat", "code")[number % 2],
                split="held_out" if number % 5 == 4 else "train",
            )
        )
    return samples


@torch.no_grad()
def make(
    base: Path,
    *,
    family: str = "llama",
    num_samples: int = 40,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """`base` with `run.toml`, a target of the family, its sample table and its captured states."""
    base.mkdir(parents=True, exist_ok=True)
    model = tiny_models.build(family, **changes)
    model.save_pretrained(base / "target")
    if dtype != "float32":
        # Not by `to`, which would round the rotary frequencies, too.
        model = AutoModelForCausalLM.from_pretrained(base / "target", dtype=getattr(torch, dtype))
    table = make_table_of(base / "samples.parquet", answers(model, num_samples))
    engine = HfEngine(TargetConfig(path=base / "target"), EngineConfig(device="cpu", dtype=dtype), None)
    engine.head = TargetHead.load(base / "target")  # type: ignore[attr-defined]
    receipt = run(table, config(base / "states", shard_tokens=400, in_flight_bytes=10_000_000), engine=engine)
    assert receipt.pending == 0 and receipt.rejected == 0, receipt
    (base / "run.toml").write_text(TOML)
    return base


class StopAfter(threading.Event):
    """A stop that is asked for during optimizer step `step` of this start, the first one being 1."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def is_set(self) -> bool:
        self._left -= 1
        return self._left <= 0


def train_in(
    base: Path, out: Path, *overrides: str, stop: threading.Event | None = None
) -> tuple[TrainReceipt | None, str]:
    """Train in this process with the data of `base`, into `out`: the receipt, and what was said."""
    tree = configuration.load(base / "run.toml", [f"train.out={out}", *overrides])
    assert tree.data.samples is not None and tree.capture.out is not None
    said = io.StringIO()
    receipt = train(
        tree.train,
        tree.draft,
        tree.target,
        table=SampleTable.open(tree.data.samples),
        states=tree.capture.out,
        resolved=configuration.dump(tree),
        progress=Progress(stream=said),
        stop=stop or threading.Event(),
    )
    return receipt, said.getvalue()


__all__ = ["CaptureConfig", "SampleTable", "StopAfter", "make", "train_in"]

if __name__ == "__main__":
    make(Path(sys.argv[1]))
