"""GPU kernels, in Triton: what PyTorch would do in many passes over a block of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _row_loss_kernel(
    z_ptr, t_ptr, at_ptr, weight_ptr, loss_ptr, best_ptr, z_stride, t_stride, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(at_ptr + row).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    z_row, t_row = z_ptr + row * z_stride, t_ptr + at * t_stride
    lane = tl.arange(0, BLOCK)
    # Running maxima and sums of exp(z), exp(t) and exp(t)·z, lane by lane: one pass, one reduction at the end.
    z_max = tl.full([BLOCK], -float("inf"), tl.float32)
    t_max = tl.full([BLOCK], -float("inf"), tl.float32)
    z_sum = tl.zeros([BLOCK], tl.float32)
    t_sum = tl.zeros([BLOCK], tl.float32)
    t_dot = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        column = start + lane
        inside = column < width
        z = tl.load(z_row + column, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(t_row + column, mask=inside, other=-float("inf")).to(tl.float32)
        best = tl.where(z > z_max, column, best)
        z_new, t_new = tl.maximum(z_max, z), tl.maximum(t_max, t)
        z_sum = tl.where(inside, z_sum * tl.exp(z_max - z_new) + tl.exp(z - z_new), z_sum)
        shrink, gain = tl.exp(t_max - t_new), tl.exp(t - t_new)
        t_sum = tl.where(inside, t_sum * shrink + gain, t_sum)
        t_dot = tl.where(inside, t_dot * shrink + gain * z, t_dot)
        z_max, t_max = tl.where(inside, z_new, z_max), tl.where(inside, t_new, t_max)
    z_top, t_top = tl.max(z_max, 0), tl.max(t_max, 0)
    z_lse = z_top + tl.log(tl.sum(z_sum * tl.exp(z_max - z_top), 0))
    t_scale = tl.exp(t_max - t_top)
    t_total = tl.sum(t_sum * t_scale, 0)
    t_lse = t_top + tl.log(t_total)
    tl.store(loss_ptr + row, z_lse - tl.sum(t_dot * t_scale, 0) / t_total)
    tl.store(best_ptr + row, tl.min(tl.where(z_max == z_top, best, width), 0).to(tl.int64))
    for start in range(0, width, BLOCK):
        column = start + lane
        inside = column < width
        z = tl.load(z_row + column, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(t_row + column, mask=inside, other=-float("inf")).to(tl.float32)
        grad = (tl.exp(z - z_lse) - tl.exp(t - t_lse)) * weight
        tl.store(z_row + column, grad.to(z_ptr.dtype.element_ty), mask=inside)


def row_loss(
    logits: torch.Tensor, target: torch.Tensor, at: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss `[b]`, likeliest draft id `[b]` and weighted gradient `[b, D]`, which overwrites `logits [b, D]`.

    `target [k, D]`: teachers' logits, `at [b]` which of them is a row's, `weight [b]` float32.
    """
    num_rows, width = logits.shape
    loss = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    block = min(4096, triton.next_power_of_2(width))
    _row_loss_kernel[(num_rows,)](
        logits, target, at, weight, loss, best, logits.stride(0), target.stride(0), width, BLOCK=block, num_warps=8
    )
    return loss, best, logits
