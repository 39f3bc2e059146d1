"""What a training will take of a device's memory, said before it starts.

Letters: `S` steps of training-time test, `D` and `V` vocabularies, `H` hidden sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.config import TrainConfig
from eyas.log import human_bytes
from eyas.model.create import num_parameters
from eyas.model.shape import DraftShape
from eyas.records import CaptureSpec
from eyas.train.loss import ARGMAX_BLOCK, BLOCK


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device, by what they are for. Measured peaks were within a tenth of their sum (docs/LOG.md)."""

    weights: int
    """Float32 weights, gradients and two moments, and a copy of weights and gradients in the arithmetic's dtype."""
    target_head: int
    states: int
    """Packs of one step, and those that are read ahead."""
    activations: int
    """What each step keeps for its gradients."""
    loss: int
    """Blocks of logits, states of all steps and their gradients."""

    @property
    def total(self) -> int:
        return self.weights + self.target_head + self.states + self.activations + self.loss

    def line(self) -> str:
        return (
            f"about {human_bytes(self.total)} of device memory: {human_bytes(self.weights)} weights and optimizer, "
            f"{human_bytes(self.target_head)} target head, {human_bytes(self.states)} states, "
            f"{human_bytes(self.activations)} activations, {human_bytes(self.loss)} logits"
        )


def estimate_memory(
    shape: DraftShape,
    spec: CaptureSpec,
    config: TrainConfig,
    *,
    dtype: torch.dtype,
    device_type: str,
    supervised_share: float,
    world: int,
) -> MemoryEstimate:
    """Of a drafter of this shape over packs of which `supervised_share` of the tokens is supervised."""
    b, numbers = dtype.itemsize, num_parameters(shape)
    ranks = world if config.sharded else 1
    rows = int(config.pack_tokens * supervised_share)
    own_packs = -(-config.step_packs // world)
    pack = config.pack_tokens * spec.bytes_per_token
    wide, kv = shape.hidden_size, shape.kv_size
    # A row keeps of a step: residual stream twice, three norms, queries and output, keys and values, gate and up.
    kept = b * (5 * wide + 2 * shape.q_size + 2 * kv + 2 * shape.intermediate_size)
    # Recomputing keeps a step's input and its keys and values, and one step at a time in full.
    per_row = kept + config.ttt_length * b * (wide + 2 * kv) if config.recompute else kept * config.ttt_length
    block = min(BLOCK[device_type], rows * config.ttt_length)
    argmax = min(ARGMAX_BLOCK[device_type], rows) * spec.vocab_size * b
    logits = block * shape.draft_vocab_size * b * (2 if device_type == "cuda" else 5)
    head = shape.draft_vocab_size * shape.hidden_size * 4
    frozen_bytes = 2 if dtype == torch.bfloat16 else 4
    return MemoryEstimate(
        weights=numbers.num_trainable * 16 // ranks + numbers.num_trainable * 2 * b + numbers.num_frozen * frozen_bytes,
        target_head=(spec.vocab_size + shape.draft_vocab_size) * spec.hidden_size * b,
        states=own_packs * pack + (config.prefetch_bytes if device_type == "cuda" else 0) + pack,
        activations=rows * per_row + config.pack_tokens * b * (shape.num_aux * spec.hidden_size + 2 * wide + 4 * kv),
        loss=max(argmax, logits + head + 2 * config.ttt_length * rows * wide * b),
    )
