"""A tiny target, and a training of a drafter for it that has come as far as one checkpoint: what exports start from."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tiny_models
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.target.files import target_digest
from eyas.train import checkpoint
from eyas.train.metrics import Tally, summarize

SHAPE = DraftShape(
    target_hidden_size=32,
    vocab_size=301,
    aux_layers=(1, 2, 3),
    hidden_size=32,
    draft_vocab_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
)
VOCAB = VocabMap.of(torch.arange(3, 43) * 7, 301)
STEP = 12


@dataclass(frozen=True, slots=True)
class Trained:
    """Where everything lies."""

    target: Path
    run_file: Path
    training: Path
    draft: Path
    """Of the best checkpoint."""


def random_draft(shape: DraftShape = SHAPE, *, seed: int = 0) -> Eagle3Draft:
    """Weights of a size that leaves logits of the order of one."""
    draft = Eagle3Draft(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return draft


def make(
    base: Path, *, vocab_map: VocabMap | None = None, about: dict[str, Any] | None = None, **changes: Any
) -> Trained:
    """`changes` of the drafter's shape; `about` is what its checkpoint says beside what it says anyway."""
    target = tiny_models.save("llama", base / "target")
    shape = replace(SHAPE, **changes)
    tally = Tally(2, 3)
    tally.sums[:] = 8.0
    told = {
        "target_digest": target_digest(target),
        "quantisation": "none",
        "fingerprint": "f" * 32,
        "step": STEP,
        "tokens": 3456,
        "settings": {
            "num_train": 272,
            "samples": "a" * 32,
            "train.ttt_length": 3,
            "draft.start_from": "/home/someone/other",
        },
        "held_out": summarize(tally).to_json(),
    }
    training = base / "train"
    checkpoint.save(
        training,
        random_draft(shape),
        vocab_map or (VOCAB if shape.draft_vocab_size == len(VOCAB.d2t) else VocabMap.full(301)),
        {},
        checkpoint.TrainState(STEP, 3456, 1.5, STEP, {}),
        target_config=json.loads((target / "config.json").read_text()),
        about=told | (about or {}),
    )
    checkpoint.point(training, checkpoint.BEST, STEP)
    text = f'[target]\npath = "{target}"\n[train]\nout = "{training}"\n'
    (training / "run.toml").write_text(text)
    (base / "run.toml").write_text(text)
    return Trained(target, base / "run.toml", training, checkpoint.step_directory(training, STEP) / checkpoint.DRAFT)
