"""GPU kernels, in Triton: what PyTorch would do in many passes over the same values."""

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


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, new_out_ptr, new_lse_ptr, num_rows, scale,
    STEPS: tl.constexpr, KV: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    SHARE_2: tl.constexpr, D_2: tl.constexpr,
):  # fmt: skip
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, lane = tl.arange(0, SHARE_2), tl.arange(0, D_2)
    inside = (head < SHARE)[:, None] & (lane < D)[None, :]
    at = row * KV + kv
    of_heads = at * SHARE + head
    values = of_heads[:, None] * D + lane[None, :]
    q = tl.load(q_ptr + values, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(out_ptr + values, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(lse_ptr + of_heads, mask=head < SHARE, other=0.0)
    total = tl.full([SHARE_2], 1.0, tl.float32)
    for step in tl.static_range(STEPS):
        one = (step * num_rows * KV + at) * D + lane
        k = tl.load(k_ptr + one, mask=lane < D, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + one, mask=lane < D, other=0.0).to(tl.float32)
        score = tl.sum(q * k[None, :], 1) * scale
        higher = tl.maximum(top, score)
        shrink, gain = tl.exp(top - higher), tl.exp(score - higher)
        mixed = mixed * shrink[:, None] + gain[:, None] * v[None, :]
        total = total * shrink + gain
        top = higher
    tl.store(new_out_ptr + values, (mixed / total[:, None]).to(new_out_ptr.dtype.element_ty), mask=inside)
    tl.store(new_lse_ptr + of_heads, top + tl.log(total), mask=head < SHARE)


@triton.jit
def _merge_backward_kernel(
    grad_ptr, out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, num_rows, scale,
    STEPS: tl.constexpr, KV: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    SHARE_2: tl.constexpr, D_2: tl.constexpr,
):  # fmt: skip
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, lane = tl.arange(0, SHARE_2), tl.arange(0, D_2)
    inside = (head < SHARE)[:, None] & (lane < D)[None, :]
    at = row * KV + kv
    of_heads = at * SHARE + head
    values = of_heads[:, None] * D + lane[None, :]
    q = tl.load(q_ptr + values, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + values, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + values, mask=inside, other=0.0).to(tl.float32)
    dq = tl.load(dq_ptr + values, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + of_heads, mask=head < SHARE, other=0.0)
    delta = tl.sum(grad * out, 1)
    for step in tl.static_range(STEPS):
        one = (step * num_rows * KV + at) * D + lane
        k = tl.load(k_ptr + one, mask=lane < D, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + one, mask=lane < D, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(q * k[None, :], 1) * scale - lse)
        ds = p * (tl.sum(grad * v[None, :], 1) - delta) * scale
        # Heads that only fill up the block have no gradient and zero queries: they add nothing.
        dq += ds[:, None] * k[None, :]
        tl.store(dk_ptr + one, tl.sum(ds[:, None] * q, 0).to(dk_ptr.dtype.element_ty), mask=lane < D)
        tl.store(dv_ptr + one, tl.sum(p[:, None] * grad, 0).to(dv_ptr.dtype.element_ty), mask=lane < D)
    tl.store(dq_ptr + values, dq.to(dq_ptr.dtype.element_ty), mask=inside)


def merge(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[n, h, d]` and log-sum-exp `[n, h]` of a softmax that also sees the keys `k`, `v [s, n, g, d]`."""
    new_out, new_lse = torch.empty_like(out), torch.empty_like(lse)
    grid, sizes = _merge_sizes(q, k)
    _merge_kernel[grid](out, lse, q, k, v, new_out, new_lse, len(q), scale, **sizes, num_warps=1)
    return new_out, new_lse


def merge_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `k` and `v [s, n, g, d]`; what they add to the gradient of `q` is added to `dq [n, h, d]`."""
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    grid, sizes = _merge_sizes(q, k)
    _merge_backward_kernel[grid](grad, out, lse, q, k, v, dq, dk, dv, len(q), scale, **sizes, num_warps=1)
    return dk, dv


def _merge_sizes(q: torch.Tensor, k: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    num_rows, num_heads, width = q.shape
    steps, _, num_kv, _ = k.shape
    share = num_heads // num_kv
    return (num_rows, num_kv), {
        "STEPS": steps,
        "KV": num_kv,
        "SHARE": share,
        "D": width,
        "SHARE_2": triton.next_power_of_2(share),
        "D_2": triton.next_power_of_2(width),
    }
