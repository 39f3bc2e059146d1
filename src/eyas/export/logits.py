"""What two drafters say to the same input: the proof that one is the other.

Letters: `S` steps, `N` rows, `n` rows that some step computes, `A` auxiliary layers, `D` draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from eyas.model.eagle3 import Eagle3Draft
from eyas.train.attention import Plain
from eyas.train.ttt import DraftWeights, Options, plan_rows, ttt

NUM_ROWS = 48
NUM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """Between the logits of two drafters of the same vocabulary."""

    largest: float
    """Of the absolute differences."""
    other_likeliest: float
    """Share of rows whose likeliest token is another one."""

    @classmethod
    def between(cls, a: torch.Tensor, b: torch.Tensor) -> Difference:
        other = (a.argmax(-1) != b.argmax(-1)).float().mean()
        return cls(float((a - b).abs().max()), float(other))


@torch.no_grad()
def logits(draft: Eagle3Draft, seed: int = 0) -> torch.Tensor:
    """`[S, n, D]` float32: what the drafter makes of random states and tokens, which `seed` and its sizes decide.

    The rows of its embedding that this needs are set to random numbers, unless the embedding is its own: another's is
    compared bit by bit, not by what comes of it.
    """
    shape = draft.shape
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(shape.num_aux, NUM_ROWS, shape.target_hidden_size, generator=generator)  # [A, N, H]
    token_ids = torch.randint(0, shape.vocab_size, (NUM_ROWS,), generator=generator)
    if not shape.own_embedding:
        used = torch.unique(token_ids)
        draft.embed_tokens.weight[used] = torch.randn(len(used), shape.hidden_size, generator=generator)
    rows = plan_rows(torch.ones(NUM_ROWS, dtype=torch.bool), (0, NUM_ROWS), num_steps=NUM_STEPS, rule="drafted")
    options = Options(torch.float32, Plain())
    weights = DraftWeights.of(draft, torch.float32)
    states = ttt(draft, weights, rows, token_ids, aux, options)
    return F.linear(states, weights.lm_head)
