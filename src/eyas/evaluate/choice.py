"""How tokens are chosen and drafted tokens are judged: greedily, or by exact rejection sampling.

With target distribution `p` and drafter distribution `q`, a drafted token `x` that was drawn from `q` is kept with
probability `min(1, p(x) / q(x))`; the first one that is not kept is replaced by a draw from `max(p - q, 0)`,
normalised; behind a chain that was kept whole comes a draw from `p`. What is written then follows `p`, whatever `q` is.
Sources: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. Letters: `k` drafted tokens, `V` the
target's and `D` the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafted token, and what it was drawn from."""

    draft_id: int
    probabilities: torch.Tensor | None = None
    """`[D]` float64; None where the likeliest was taken."""


class Choice(Protocol):
    """Who chooses."""

    def first(self, logits: torch.Tensor) -> int:
        """A token by the target's logits `[V]`."""

    def draft(self, logits: torch.Tensor) -> Drafted:
        """A token by the drafter's logits `[D]`."""

    def judge(self, logits: torch.Tensor, drafted: Sequence[Drafted], target_ids: torch.Tensor) -> tuple[int, int]:
        """How many of the `k` drafted tokens are kept, and the token behind them.

        `logits [k + 1, V]` are the target's before each drafted token and behind the last; `target_ids [D]`.
        """


class Greedy:
    """The likeliest token, the lowest id of equals."""

    def first(self, logits: torch.Tensor) -> int:
        return int(logits.argmax())

    def draft(self, logits: torch.Tensor) -> Drafted:
        return Drafted(int(logits.argmax()))

    def judge(self, logits: torch.Tensor, drafted: Sequence[Drafted], target_ids: torch.Tensor) -> tuple[int, int]:
        best = logits.argmax(-1).tolist()
        wanted = target_ids[[d.draft_id for d in drafted]].tolist() if drafted else []
        kept = 0
        while kept < len(wanted) and wanted[kept] == best[kept]:
            kept += 1
        return kept, best[kept]


class Sampled:
    """Draws from the softmax at a temperature; the same seed draws the same, one choice after the other."""

    def __init__(self, temperature: float, seed: int) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: draws need one above 0")
        self._temperature = temperature
        self._rng = np.random.default_rng(seed)

    def first(self, logits: torch.Tensor) -> int:
        return self._draw(self._distribution(logits))

    def draft(self, logits: torch.Tensor) -> Drafted:
        q = self._distribution(logits)
        return Drafted(self._draw(q), q)

    def judge(self, logits: torch.Tensor, drafted: Sequence[Drafted], target_ids: torch.Tensor) -> tuple[int, int]:
        p = self._distribution(logits)  # [k + 1, V]
        for i, one in enumerate(drafted):
            assert one.probabilities is not None
            share = float(p[i, target_ids[one.draft_id]]) / float(one.probabilities[one.draft_id])
            if self._rng.random() < share:
                continue
            rest = p[i].clone()
            rest[target_ids] -= one.probabilities
            rest.clamp_(min=0)
            # Nothing is left only where both distributions are one, to rounding.
            return i, self._draw(rest if float(rest.sum()) > 0 else p[i])
        return len(drafted), self._draw(p[-1])

    def _distribution(self, logits: torch.Tensor) -> torch.Tensor:
        # float64: a running sum over a large vocabulary in float32 loses the unlikely tokens.
        return torch.softmax(logits.double() / self._temperature, -1)

    def _draw(self, weights: torch.Tensor) -> int:
        heights = weights.cumsum(-1)
        level = heights[-1:] * float(self._rng.random())
        return min(int(torch.searchsorted(heights, level, right=True)), len(weights) - 1)


def choice_of(temperature: float, seed: int) -> Choice:
    """Greedy at temperature 0."""
    return Sampled(temperature, seed) if temperature > 0 else Greedy()
