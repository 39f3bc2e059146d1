"""Training-time test: which rows learn what, and the unrolled forward pass. The one file that shifts.

Row `t` at step `s` takes its own state of step `s - 1` as feature (at step 0 `fc` of the auxiliary states), reads token
`x[t + 1 + s]` and learns what the target says at row `t + 1 + s`, the distribution of `x[t + 2 + s]`. Source: EAGLE-3,
arXiv 2503.01840, section 3. Letters: `N` rows of a pack, `n` rows that some step supervises, `S` steps, `H` the
drafter's hidden size, `A` auxiliary layers, `m` teacher rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.checkpoint import checkpoint

from eyas.model.eagle3 import Eagle3Draft, LayerWeights, Rotation, feed_forward, rms_norm, rotate, rotations
from eyas.train.attention import Causal, Documents, ttt_attention

MaskRule = Literal["drafted", "usual"]
"""`drafted`: what a server drafts, `x[t+1]` to `x[t+2+s]` all supervised. `usual`: other trainers', `x[t+s]` alone."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What each row of a pack does at each step; everything on the device of the mask."""

    docs: Documents
    """With the rows that some step supervises."""
    positions: torch.Tensor
    """`[N]` within the document."""
    supervised: torch.Tensor
    """`[S, n]` bool."""
    read: torch.Tensor
    """`[S, n]`: the row whose token a step reads, `t + 1 + s`; the document's last row where there is none."""
    teacher_rows: torch.Tensor
    """`[m]` ascending: rows at which the target is asked."""
    teacher: torch.Tensor
    """`[S, n]`: index into `teacher_rows`; only where `supervised`."""
    offset: int = 0
    """Added to the positions of the steps after the first; other than 0 only to find out what a drafter learned."""

    @property
    def rows(self) -> torch.Tensor:
        assert self.docs.rows is not None
        return self.docs.rows


def plan_rows(loss_mask: torch.Tensor, bounds: Sequence[int], *, num_steps: int, rule: MaskRule) -> Rows:
    """The rows of a pack with documents `[bounds[i], bounds[i + 1])` and supervised tokens `loss_mask [N]`."""
    device, num_rows = loss_mask.device, len(loss_mask)
    cuts = torch.tensor(bounds, device=device)
    lengths = cuts[1:] - cuts[:-1]
    start = torch.repeat_interleave(cuts[:-1], lengths, output_size=num_rows)  # [N]
    end = torch.repeat_interleave(cuts[1:], lengths, output_size=num_rows)
    row = torch.arange(num_rows, device=device)
    # The first row at or behind each row whose token is not supervised, or that another document owns.
    stop = torch.where(loss_mask, end, row)
    stop = torch.cummin(stop.flip(0), 0).values.flip(0)
    run = torch.minimum(stop, end) - row  # supervised tokens in a row, beginning here
    steps = torch.arange(num_steps, device=device)[:, None]
    ahead = torch.minimum(row + 1, end - 1)
    if rule == "drafted":
        whole = (row + 1 < end) & (run[ahead] >= steps + 2)
    else:
        gate = torch.minimum(row + steps, end - 1)
        whole = (row + 1 + steps < end) & loss_mask[gate]
    rows = torch.nonzero(whole.any(0))[:, 0]
    read = torch.minimum(rows + 1 + steps, end[rows] - 1)
    supervised = whole[:, rows]
    teacher_rows = torch.unique(read[supervised])
    return Rows(
        docs=Documents(
            bounds=tuple(bounds),
            cu_seqlens=cuts.to(torch.int32),
            rows=rows,
            row_bounds=tuple(torch.searchsorted(rows, cuts).tolist()),
        ),
        positions=row - start,
        supervised=supervised,
        read=read,
        teacher_rows=teacher_rows,
        teacher=torch.searchsorted(teacher_rows, read).clamp_(max=max(0, len(teacher_rows) - 1)),
    )


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The drafter's weights in the dtype of the arithmetic; gradients run back to its own."""

    fc: torch.Tensor
    aux_norms: tuple[torch.Tensor, ...]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    embed: torch.Tensor

    @classmethod
    def of(cls, draft: Eagle3Draft, dtype: torch.dtype) -> DraftWeights:
        return cls(
            fc=draft.fc.weight.to(dtype),
            aux_norms=tuple(p for n, p in draft.named_parameters() if n.startswith("aux_norms.")),
            layers=tuple(LayerWeights.of(layer, dtype) for layer in draft.layers),  # type: ignore[arg-type]
            norm=draft.norm.weight,
            lm_head=draft.lm_head.weight.to(dtype),
            embed=draft.embed_tokens.weight,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """How a pass is computed; none of it changes what is computed."""

    dtype: torch.dtype
    """Of the arithmetic; norms, softmax and sums are in float32 or better."""
    causal: Causal
    compiled: bool = False
    recompute: bool = False
    """Keep a step's input only and compute the step again backwards: a third more work, a fraction of the memory."""


def ttt(
    draft: Eagle3Draft,
    weights: DraftWeights,
    rows: Rows,
    token_ids: torch.Tensor,
    aux_hidden_states: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """`[S, n, H]`: each step's states after the final norm, ready for `lm_head`.

    `token_ids [N]`, `aux_hidden_states [A, N, target's hidden size]` in any float. Gradients run through all steps.
    """
    shape, docs, positions = draft.shape, rows.docs, rows.positions
    num_steps = len(rows.read)
    pieces = _pieces(options.compiled)
    longest = docs.longest + num_steps + max(0, rows.offset)
    draft.rope.to(token_ids.device)
    table = rotations(draft.rope, torch.arange(longest, device=token_ids.device), options.dtype)

    first = weights.layers[0]
    assert first.qkv_embed is not None and first.norm_embed is not None
    # The embedding's half of q, k and v is the same for a token whichever step reads it: once for all steps.
    embedded = pieces.embed(
        F.embedding(token_ids, weights.embed).to(options.dtype), first.norm_embed, first.qkv_embed, shape.rms_norm_eps
    )  # [N, q + 2 kv]

    feature = F.linear(_features(aux_hidden_states, weights, shape.rms_norm_eps, options.dtype), weights.fc)  # [N, H]
    keys: list[tuple[torch.Tensor, torch.Tensor]] = []
    everyone = torch.minimum(torch.arange(1, len(token_ids) + 1, device=token_ids.device), _last_rows(docs))
    for i, layer in enumerate(weights.layers):
        read = embedded[everyone] if i == 0 else None
        q, k, v = pieces.project(feature, read, layer.qkv, layer.norm, _at(table, positions), _sizes(draft))
        keys.append((k, v))
        last = i == len(weights.layers) - 1
        # Rows that no step supervises give the last layer their key and value, and need nothing more of it.
        asking = docs if last else Documents(docs.bounds, docs.cu_seqlens, None, docs.bounds)
        q, residual = (q[rows.rows], feature[rows.rows]) if last else (q, feature)
        attended = ttt_attention(options.causal, asking, q, k, v, (), shape.head_dim**-0.5)
        feature, normed = pieces.finish(residual, attended, *_rest(layer, weights, last=last), shape.rms_norm_eps)

    states = []
    diagonal: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in weights.layers]
    for s in range(num_steps):
        if s > 0:
            earlier = [tuple(pairs) for pairs in diagonal]
            feature, normed, pairs = _run(options.recompute, _step, feature, embedded[rows.read[s]], rows, s, table,
                                          weights, keys, earlier, options, draft)  # fmt: skip
            for kept, pair in zip(diagonal, pairs, strict=True):
                kept.append(pair)
        assert normed is not None
        states.append(normed)
        feature = normed if shape.carry_normed else feature
    return torch.stack(states)


def _step(
    feature: torch.Tensor,
    embedded: torch.Tensor,
    rows: Rows,
    s: int,
    table: Rotation,
    weights: DraftWeights,
    keys: Sequence[tuple[torch.Tensor, torch.Tensor]],
    diagonal: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    options: Options,
    draft: Eagle3Draft,
) -> tuple[torch.Tensor, torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A step after the first: the rows' states `[n, H]` before and after the final norm, and new diagonal keys."""
    pieces = _pieces(options.compiled)
    rotation = _at(table, rows.positions[rows.rows] + s + rows.offset)
    pairs = []
    for i, layer in enumerate(weights.layers):
        read = embedded if i == 0 else None
        q, k, v = pieces.project(feature, read, layer.qkv, layer.norm, rotation, _sizes(draft))
        pairs.append((k, v))
        attended = ttt_attention(
            options.causal, rows.docs, q, *keys[i], [*diagonal[i], (k, v)], draft.shape.head_dim**-0.5
        )
        last = i == len(weights.layers) - 1
        feature, normed = pieces.finish(feature, attended, *_rest(layer, weights, last=last), draft.shape.rms_norm_eps)
    return feature, normed, pairs


Sizes = tuple[int, int, int, float]


def _sizes(draft: Eagle3Draft) -> Sizes:
    return draft.shape.num_heads, draft.shape.num_kv_heads, draft.shape.head_dim, draft.shape.rms_norm_eps


def _project(
    feature: torch.Tensor,
    embedded: torch.Tensor | None,
    qkv: torch.Tensor,
    norm: torch.Tensor,
    rotation: Rotation,
    sizes: Sizes,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries `[n, h, d]` and keys `[n, g, d]`, and values, of a layer's input `[n, H]`."""
    num_heads, num_kv, head_dim, eps = sizes
    both = F.linear(rms_norm(feature, norm, eps), qkv)
    if embedded is not None:
        both = both + embedded
    q, k, v = torch.split(both.view(len(both), num_heads + 2 * num_kv, head_dim), [num_heads, num_kv, num_kv], dim=1)
    return rotate(q, rotation), rotate(k, rotation), v


def _embed(embedded: torch.Tensor, norm: torch.Tensor, qkv_embed: torch.Tensor, eps: float) -> torch.Tensor:
    """The embedding's share `[N, q + 2 kv]` of the first layer's queries, keys and values."""
    return F.linear(rms_norm(embedded, norm, eps), qkv_embed)


def _rest(layer: LayerWeights, weights: DraftWeights, *, last: bool) -> tuple[torch.Tensor | None, ...]:
    return layer.o, layer.norm_mlp, layer.gate, layer.up, layer.down, weights.norm if last else None


def _finish(
    residual: torch.Tensor,
    attended: torch.Tensor,
    o: torch.Tensor,
    norm_mlp: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is left of a layer after its attention: `[n, H]`, behind the last one also after the final norm."""
    x = residual + F.linear(attended.flatten(1), o)
    x = x + feed_forward(rms_norm(x, norm_mlp, eps), gate, up, down)
    return x, None if norm is None else rms_norm(x, norm, eps)


def _features(aux: torch.Tensor, weights: DraftWeights, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """`[N, A · target's hidden size]`: the auxiliary states side by side, each normed first where the shape says so."""
    if weights.aux_norms:
        aux = torch.stack([rms_norm(a.to(dtype), w, eps) for a, w in zip(aux, weights.aux_norms, strict=True)])
    return aux.to(dtype).transpose(0, 1).flatten(1)


def _at(table: Rotation, positions: torch.Tensor) -> Rotation:
    return table[0][positions], table[1][positions]


def _last_rows(docs: Documents) -> torch.Tensor:
    """`[N]`: the last row of each row's document."""
    cuts = docs.cu_seqlens.long()
    return torch.repeat_interleave(cuts[1:] - 1, cuts[1:] - cuts[:-1], output_size=docs.bounds[-1])


def _run(recompute: bool, f: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(f, *args, use_reentrant=False) if recompute else f(*args)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What lies between two attentions, as it stands or fused."""

    embed: Callable[..., Any]
    project: Callable[..., Any]
    finish: Callable[..., Any]


@cache
def _pieces(compiled: bool) -> _Pieces:
    pieces = (_embed, _project, _finish)
    return _Pieces(*(torch.compile(f, dynamic=True) for f in pieces) if compiled else pieces)
