"""The attention of training-time test, exact and without a `[T, T]` matrix that outlives a block.

At step `s` a query of row `t` sees, in one softmax, the step-0 keys `j <= t` of its document and one key of each step
`1..s` at its own row. The first part is ordinary causal attention, which gives its log-sum-exp; the second part is `s`
dot products a row. Both are merged by their log-sum-exp. Backwards, the causal kernel is given the *merged* output and
log-sum-exp: its probabilities `exp(q·k - lse)` are then those of the joint softmax, and nothing else changes.

Letters: `N` rows of the pack, `n` query rows, `h` heads, `g` key-value heads, `d` head size, `s` diagonal keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

BLOCK = 256
"""Query rows of one document that the plain backend scores at one time."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Where the documents of a pack begin and end, and which of its rows ask."""

    bounds: tuple[int, ...]
    """Ascending, `0` to `N`: document `i` is `[bounds[i], bounds[i + 1])`."""
    cu_seqlens: torch.Tensor
    """`bounds` as int32 on the device."""
    rows: torch.Tensor | None
    """`[n]` ascending: the rows that ask; None is all of them."""
    row_bounds: tuple[int, ...]
    """`rows[row_bounds[i]:row_bounds[i + 1]]` lie in document `i`."""

    @property
    def longest(self) -> int:
        return max((b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)), default=0)


class Causal(Protocol):
    """Causal attention within documents, and its backward pass for an output that was merged with more keys."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, docs: Documents, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `q [n, h, d]`, `k` and `v [N, g, d]`: output `[n, h, d]` and log-sum-exp `[n, h]` in float32 or better."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        docs: Documents,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of `q`, `k` and `v` where `out` and `lse` are those of the joint softmax."""


class Plain:
    """Any device, any float; a block of scores `[g, h/g, BLOCK, T]` at a time."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, docs: Documents, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_wide(q.dtype))
        for block, keys, seen in _blocks(docs, len(q), q.device):
            scores = _scores(q[block], k[keys], seen, scale)  # [g, h/g, b, T]
            top = scores.logsumexp(-1)
            p = (scores - top[..., None]).exp().to(q.dtype)
            out[block] = _rows_first(p @ v[keys].transpose(0, 1)[:, None])
            lse[block] = top.permute(2, 0, 1).reshape(-1, q.shape[1])
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        docs: Documents,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide, num_kv = _wide(q.dtype), k.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for block, keys, seen in _blocks(docs, len(q), q.device):
            qb, gb = (
                _heads_first(q[block], num_kv).to(wide),
                _heads_first(grad[block], num_kv).to(wide),
            )  # [g, h/g, b, d]
            kb, vb = (part[keys].transpose(0, 1)[:, None].to(wide) for part in (k, v))  # [g, 1, T, d]
            scores = _scores(q[block], k[keys], seen, scale)
            p = (scores - _heads_first(lse[block][..., None], num_kv)).exp()  # [g, h/g, b, T]
            delta = (gb * _heads_first(out[block], num_kv).to(wide)).sum(-1, keepdim=True)
            ds = p * (gb @ vb.transpose(-1, -2) - delta) * scale
            dq[block] = _rows_first(ds @ kb).to(q.dtype)
            dk[keys] += (ds.transpose(-1, -2) @ qb).sum(1).transpose(0, 1)
            dv[keys] += (p.transpose(-1, -2) @ gb).sum(1).transpose(0, 1)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class Flash:
    """FlashAttention-2 as PyTorch ships it: CUDA, bfloat16 or float16.

    Its kernel wants as many queries as keys in a document, so rows that do not ask pass as zeros with no gradient.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, docs: Documents, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cu, longest = docs.cu_seqlens, docs.longest
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _spread(q, len(k), docs), k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale
        )
        lse = lse.transpose(0, 1)  # [N, h]
        return (out, lse) if docs.rows is None else (out[docs.rows], lse[docs.rows])

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        docs: Documents,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cu, longest, num_rows = docs.cu_seqlens, docs.longest, len(k)
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _spread(grad, num_rows, docs),
            _spread(q, num_rows, docs),
            k,
            v,
            _spread(out, num_rows, docs),
            # A query of zeros with lse 0 has finite probabilities, and no gradient to spread with them.
            _spread(lse, num_rows, docs).transpose(0, 1).contiguous(),
            cu,
            cu,
            longest,
            longest,
            0.0,
            True,
            none,
            none[:0],
            scale=scale,
        )
        return (dq if docs.rows is None else dq[docs.rows]), dk, dv


def causal_for(device: torch.device, dtype: torch.dtype) -> Causal:
    """The fastest exact backend for this device and dtype."""
    return Flash() if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else Plain()


def ttt_attention(
    causal: Causal,
    docs: Documents,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    diagonal: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """`[n, h, d]`: queries `q [n, h, d]` over step-0 keys `k`, `v [N, g, d]` and the `diagonal` pairs `[n, g, d]`.

    Exact: one softmax over both kinds of keys; gradients run to all of them.
    """
    out: torch.Tensor = _TttAttention.apply(causal, docs, scale, q, k, v, *(part for pair in diagonal for part in pair))  # type: ignore[no-untyped-call]
    return out


class _TttAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        causal: Causal,
        docs: Documents,
        scale: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *diagonal: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = causal.forward(q, k, v, docs, scale)
        if diagonal:
            out, lse = _mergers(q)[0](out, lse, q, torch.stack(diagonal[::2]), torch.stack(diagonal[1::2]), scale)
        ctx.causal, ctx.docs, ctx.scale = causal, docs, scale
        ctx.save_for_backward(q, k, v, out, lse, *diagonal)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *diagonal = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = ctx.causal.backward(grad, q, k, v, out, lse, ctx.docs, ctx.scale)
        grads: list[torch.Tensor] = []
        if diagonal:
            keys, values = torch.stack(diagonal[::2]), torch.stack(diagonal[1::2])
            pairs = zip(*_mergers(q)[1](grad, out, lse, q, keys, values, dq, ctx.scale), strict=True)
            grads = [part for pair in pairs for part in pair]
        return None, None, None, dq, dk, dv, *grads


def _mergers(q: torch.Tensor) -> tuple[Any, Any]:
    if not q.is_cuda or q.dtype == torch.float64:
        return merge, merge_backward
    from eyas.train import kernels

    return kernels.merge, kernels.merge_backward


def merge(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[n, h, d]` and log-sum-exp `[n, h]` of a softmax that also sees the keys `k`, `v [s, n, g, d]`."""
    wide, num_kv = lse.dtype, k.shape[2]
    scores = torch.einsum("ngad,sngd->snga", _by_group(q, num_kv).to(wide), k.to(wide)) * scale
    causal = _by_group(lse[..., None], num_kv)[..., 0]  # [n, g, h/g]
    joint = torch.logsumexp(torch.cat([causal[None], scores]), dim=0)
    mixed = _by_group(out, num_kv).to(wide) * (causal - joint).exp()[..., None]
    mixed = mixed + torch.einsum("snga,sngd->ngad", (scores - joint).exp(), v.to(wide))
    return mixed.to(out.dtype).reshape(out.shape), joint.reshape(lse.shape)


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
    wide, num_kv = lse.dtype, k.shape[2]
    gw, qw, kw, vw = _by_group(grad, num_kv).to(wide), _by_group(q, num_kv).to(wide), k.to(wide), v.to(wide)
    joint = _by_group(lse[..., None], num_kv)[..., 0]
    delta = (gw * _by_group(out, num_kv).to(wide)).sum(-1)
    p = (torch.einsum("ngad,sngd->snga", qw, kw) * scale - joint).exp()
    ds = p * (torch.einsum("ngad,sngd->snga", gw, vw) - delta) * scale
    dq += torch.einsum("snga,sngd->ngad", ds, kw).reshape(q.shape).to(q.dtype)
    dk, dv = torch.einsum("snga,ngad->sngd", ds, qw), torch.einsum("snga,ngad->sngd", p, gw)
    return dk.to(k.dtype), dv.to(v.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_group(x: torch.Tensor, num_kv: int) -> torch.Tensor:
    """`[n, h, …]` as `[n, g, h/g, …]`."""
    return x.reshape(len(x), num_kv, x.shape[1] // num_kv, *x.shape[2:])


def _heads_first(x: torch.Tensor, num_kv: int) -> torch.Tensor:
    """`[b, h, …]` as `[g, h/g, b, …]`."""
    return _by_group(x, num_kv).permute(1, 2, 0, 3)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """`[g, h/g, b, d]` as `[b, h, d]`."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _blocks(docs: Documents, num_queries: int, device: torch.device) -> Any:
    """Query rows in blocks, the rows of their document up to the last one that they see, and who sees what."""
    rows = torch.arange(num_queries, device=device) if docs.rows is None else docs.rows
    for i, (start, end) in enumerate(zip(docs.row_bounds, docs.row_bounds[1:], strict=False)):
        for a in range(start, end, BLOCK):
            block = slice(a, min(a + BLOCK, end))
            keys = slice(docs.bounds[i], int(rows[block.stop - 1]) + 1)
            yield block, keys, torch.arange(keys.start, keys.stop, device=device) <= rows[block, None]


def _scores(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    wide = _wide(q.dtype)
    scores = (_heads_first(q, k.shape[1]) @ k.permute(1, 2, 0)[:, None]).to(wide) * scale
    return scores.masked_fill(~seen, -torch.inf)


def _spread(x: torch.Tensor, num_rows: int, docs: Documents) -> torch.Tensor:
    """`x` at its rows of the pack, zeros elsewhere."""
    if docs.rows is None:
        return x
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, docs.rows, x)
