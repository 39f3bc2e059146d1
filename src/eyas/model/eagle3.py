"""The drafter's weights, named as engines name them, and the pieces of its forward pass that all users share.

One decoder layer (or more) over `concat(RMS(embedding), RMS(feature))`; the residual stream is the feature. Source:
EAGLE-3, arXiv 2503.01840. Letters: `n` rows, `H` hidden size, `A` auxiliary layers, `D` draft vocabulary, `d` head
size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.model.shape import DraftShape

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and signed sine `[n, d]` of rotary positions: the first half of the sines is negated."""


def _empty(*shape: int) -> nn.Parameter:
    """A weight that nobody has set: NaN, so that it cannot hide."""
    return nn.Parameter(torch.full(shape, torch.nan))


class Weight(nn.Module):
    """A module that only owns a weight, so that the checkpoint's names are those that engines expect."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = _empty(*shape)


class Attention(nn.Module):
    def __init__(self, shape: DraftShape, width: int) -> None:
        super().__init__()
        self.q_proj = Weight(shape.q_size, width)
        self.k_proj = Weight(shape.kv_size, width)
        self.v_proj = Weight(shape.kv_size, width)
        self.o_proj = Weight(shape.hidden_size, shape.q_size)


class MLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = Weight(shape.intermediate_size, shape.hidden_size)
        self.up_proj = Weight(shape.intermediate_size, shape.hidden_size)
        self.down_proj = Weight(shape.hidden_size, shape.intermediate_size)


class DecoderLayer(nn.Module):
    """A decoder layer; the first one reads `[n, 2H]`, embedding before feature, and has a norm for each half."""

    def __init__(self, shape: DraftShape, *, first: bool) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size * (2 if first else 1))
        self.input_layernorm = Weight(shape.hidden_size)
        if first:
            self.hidden_norm = Weight(shape.hidden_size)
        self.post_attention_layernorm = Weight(shape.hidden_size)
        self.mlp = MLP(shape)


class Eagle3Draft(nn.Module):
    """An EAGLE-3 drafter without a forward of its own: training and decoding unroll it in different ways."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = Weight(shape.vocab_size, shape.hidden_size)
        if shape.norm_aux:
            self.aux_norms = nn.ModuleList(Weight(shape.target_hidden_size) for _ in shape.aux_layers)
        self.fc = Weight(shape.hidden_size, shape.num_aux * shape.target_hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, first=i == 0) for i in range(shape.num_layers))
        self.norm = Weight(shape.hidden_size)
        self.lm_head = Weight(shape.draft_vocab_size, shape.hidden_size)
        self.rope = rotary(shape)
        self.embed_tokens.weight.requires_grad_(shape.own_embedding)

    def unset(self) -> list[str]:
        """Names of weights that hold a NaN: never loaded, or ruined."""
        return [name for name, p in self.named_parameters() if bool(torch.isnan(p).any())]


def rotary(shape: DraftShape) -> LlamaRotaryEmbedding:
    """The target's rotary embedding, scaling included, as transformers computes it."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=dict(shape.rope),
    )
    return LlamaRotaryEmbedding(config)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, in float32 or better, returned in `x`'s dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.to(wide.dtype)).to(x.dtype)


def rotations(rope: LlamaRotaryEmbedding, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """What `rotate` needs at `positions [n]`, in float32 or better."""
    wide = torch.zeros(1, device=positions.device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    cos, sin = rope(wide, positions[None])
    half = sin.shape[-1] // 2
    return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary embedding of `x` `[n, heads, d]`, halves paired as in Llama."""
    cos, sin = (part[:, None] for part in rotation)
    # The halves change places by a flip, which is a matter of indices forwards and backwards; `cat` would copy twice.
    return (x * cos + x.view(*x.shape[:-1], 2, x.shape[-1] // 2).flip(-2).view(x.shape) * sin).to(x.dtype)


def feed_forward(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))` over `[n, H]`.

    Two products, not one of both weights: what is split forwards is put together backwards, by a slow kernel.
    """
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights in the dtype of the arithmetic, with what is read together laid together."""

    qkv: torch.Tensor
    """`[q + 2 kv, H]`: the columns that read the feature."""
    qkv_embed: torch.Tensor | None
    """`[q + 2 kv, H]`: the columns that read the embedding; the first layer has them."""
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    """Of the feature: `hidden_norm` in the first layer, `input_layernorm` in others."""
    norm_embed: torch.Tensor | None
    norm_mlp: torch.Tensor

    @classmethod
    def of(cls, layer: DecoderLayer, dtype: torch.dtype) -> LayerWeights:
        attn, mlp = layer.self_attn, layer.mlp
        whole = torch.cat([p.weight.to(dtype) for p in (attn.q_proj, attn.k_proj, attn.v_proj)])
        first = hasattr(layer, "hidden_norm")
        width = whole.shape[1] // 2
        return cls(
            qkv=whole[:, width:] if first else whole,
            qkv_embed=whole[:, :width] if first else None,
            o=attn.o_proj.weight.to(dtype),
            gate=mlp.gate_proj.weight.to(dtype),
            up=mlp.up_proj.weight.to(dtype),
            down=mlp.down_proj.weight.to(dtype),
            norm=layer.hidden_norm.weight if first else layer.input_layernorm.weight,
            norm_embed=layer.input_layernorm.weight if first else None,
            norm_mlp=layer.post_attention_layernorm.weight,
        )
