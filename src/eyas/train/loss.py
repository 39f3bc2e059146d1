"""The soft cross-entropy of all steps, from states to gradients, a block of rows at a time.

For a row with target distribution `p` (the target's logits over the draft vocabulary, renormalised) and draft logits
`z`: `loss = logsumexp(z) - p·z`, gradient `softmax(z) - p`. Gradients are made with the loss, so that no logits outlive
their block, and the teacher of a block is computed once for all steps. Letters: `e` pairs of row and step that carry a
loss, `m` teacher rows, `S` steps, `n` rows, `H` the drafter's and `Ht` the target's hidden size, `D` and `V` the two
vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

BLOCK = {"cpu": 1024, "cuda": 16384}
"""Pairs whose logits are alive at one time."""
ARGMAX_BLOCK = {"cpu": 512, "cuda": 4096}
"""Teacher rows whose logits over the whole vocabulary are alive at one time."""


class LogitMap(Protocol):
    """What a target does to its head's output: scale and soft-cap; may overwrite its argument."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target at the teacher rows of a pack."""

    states: torch.Tensor
    """`[m, Ht]`: last hidden states after the final norm."""
    weight: torch.Tensor
    """`[D, Ht]`: the head's rows of the draft vocabulary."""
    bias: torch.Tensor | None
    logit_map: LogitMap
    best: torch.Tensor
    """`[m]`: draft id of the target's likeliest token of its whole vocabulary, -1 where the drafter has none."""

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """`[stop - start, D]`."""
        return self.logit_map(F.linear(self.states[start:stop], self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the pass says of every row and step."""

    loss: torch.Tensor
    """`[S, n]` float32: soft cross-entropy; 0 where the row carries none."""
    valid: torch.Tensor
    """`[S, n]` bool: carries a loss, that is supervised and the target's likeliest token is in the draft vocabulary."""
    correct: torch.Tensor
    """`[S, n]` bool: the drafter's likeliest token is the target's."""


def argmax_of(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_map: LogitMap,
) -> torch.Tensor:
    """`[m]`: the target's likeliest token at states `[m, Ht]` with head `[V, Ht]`; the lowest id of equals."""
    block = ARGMAX_BLOCK[states.device.type]
    found = [logit_map(F.linear(part, weight, bias)).argmax(-1) for part in torch.split(states, block)]
    return torch.cat(found) if found else states.new_empty(0, dtype=torch.int64)


def valid_rows(supervised: torch.Tensor, teacher: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """`[S, n]`: where a loss is carried, of `supervised` and `teacher [S, n]` and `best [m]`."""
    if not len(best):
        return torch.zeros_like(supervised)
    return supervised & (best[teacher] >= 0)


def ttt_loss(
    states: torch.Tensor, lm_head: torch.Tensor, teacher: Teacher, index: torch.Tensor, valid: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, Outcome]:  # fmt: skip
    """The weighted sum of the losses where `valid [S, n]`, and what every row and step came to.

    `states [S, n, H]`, `lm_head [D, H]`, `index [S, n]` into the teacher's rows, `weight [S]` what one row of a step
    counts: its step's weight divided by the step's number of valid rows over all ranks and packs.
    """
    loss, rows, correct = _TttLoss.apply(states, lm_head, teacher, index, valid, weight)  # type: ignore[no-untyped-call]
    return loss, Outcome(loss=rows, valid=valid, correct=correct)


class _TttLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        teacher: Teacher,
        index: torch.Tensor,
        valid: torch.Tensor,
        weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_steps, num_rows, width = states.shape
        flat = states.reshape(-1, width)
        # Pairs in the order of their teacher rows, so that a block's teachers stand side by side.
        pairs = torch.nonzero(valid.reshape(-1))[:, 0]  # [e]
        at, order = torch.sort(index.reshape(-1)[pairs], stable=True)
        pairs = pairs[order]
        wide = torch.float64 if states.dtype == torch.float64 else torch.float32
        row_weight = weight.to(wide)[pairs // max(1, num_rows)]
        needs_grad = any(ctx.needs_input_grad[:2])
        grad_states = torch.zeros_like(flat) if needs_grad else None
        grad_head = torch.zeros_like(lm_head, dtype=wide) if needs_grad else None
        losses = torch.zeros(num_steps * num_rows, dtype=wide, device=states.device)
        correct = torch.zeros(num_steps * num_rows, dtype=torch.bool, device=states.device)
        row_of = _row_loss_cuda if states.is_cuda else _row_loss

        block = BLOCK[states.device.type]
        edges = [*range(0, len(pairs), block), len(pairs)]
        firsts = at[edges[:-1]].tolist()
        lasts = at[[e - 1 for e in edges[1:]]].tolist() if len(pairs) else []
        for start, stop, first, last in zip(edges, edges[1:], firsts, lasts, strict=False):
            here, local = pairs[start:stop], at[start:stop] - first
            x = flat[here]
            logits = F.linear(x, lm_head)  # [b, D]
            row_loss, best, grad = row_of(logits, teacher.logits(first, last + 1), local, row_weight[start:stop])
            losses[here] = row_loss
            correct[here] = best == teacher.best[at[start:stop]]
            if needs_grad:
                assert grad_states is not None and grad_head is not None
                grad_states[here] = grad @ lm_head
                grad_head += grad.t() @ x
        total = (losses * weight.to(wide).repeat_interleave(num_rows)).sum()
        if needs_grad:
            assert grad_states is not None and grad_head is not None
            ctx.save_for_backward(grad_states.view_as(states), grad_head.to(lm_head.dtype))
        rows, hits = losses.view(num_steps, num_rows), correct.view(num_steps, num_rows)
        ctx.mark_non_differentiable(rows, hits)
        return total, rows, hits

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_head = ctx.saved_tensors
        return (
            (grad_states * grad).to(grad_states.dtype),
            (grad_head * grad).to(grad_head.dtype),
            None,
            None,
            None,
            None,
        )


def _row_loss(
    logits: torch.Tensor, target: torch.Tensor, at: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss `[b]`, likeliest draft id `[b]` and weighted gradient `[b, D]` of draft logits `[b, D]`.

    `target [k, D]`: the teachers' logits, `at [b]` which of them is a row's.
    """
    wide = weight.dtype
    p = target.to(wide).softmax(-1)[at]
    z = logits.to(wide)
    lse = z.logsumexp(-1, keepdim=True)
    loss = lse[:, 0] - (p * z).sum(-1)
    grad = ((z - lse).exp_() - p).mul_(weight[:, None]).to(logits.dtype)
    return loss, logits.argmax(-1), grad


def _row_loss_cuda(
    logits: torch.Tensor, target: torch.Tensor, at: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_row_loss`, by one kernel that overwrites `logits` with their gradient."""
    from eyas.train.kernels import row_loss

    return row_loss(logits, target, at, weight)
