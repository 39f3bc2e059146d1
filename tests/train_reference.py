"""Training-time test written out row by row from its definition, to compare the fast form with."""

from __future__ import annotations

import numpy as np
import torch

from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.train.ttt import MaskRule

torch.set_num_threads(1)


def tiny_shape(**changes: object) -> DraftShape:
    sizes = {
        "target_hidden_size": 12,
        "vocab_size": 40,
        "aux_layers": (1, 2, 3),
        "hidden_size": 12,
        "draft_vocab_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 20,
        "max_position_embeddings": 64,
    }
    return DraftShape(**{**sizes, **changes})  # type: ignore[arg-type]


def random_draft(shape: DraftShape, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Eagle3Draft:
    """Every weight random and alive, norms too."""
    draft = Eagle3Draft(shape).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values * 0.3 + 1 if parameter.dim() == 1 else values * parameter.shape[-1] ** -0.5)
    return draft


def supervised(mask: np.ndarray, t: int, s: int, rule: MaskRule) -> bool:
    """Whether row `t` of one document learns at step `s`."""
    if rule == "usual":
        return t + 1 + s < len(mask) and bool(mask[t + s])
    return t + 2 + s < len(mask) and bool(mask[t + 1 : t + 3 + s].all())


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _rotated(head: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    # Angles in float32, as every engine has them.
    d = len(head)
    angle = torch.tensor([1.0 / theta ** (2 * i / d) for i in range(d // 2)], dtype=torch.float32) * position
    cos, sin, a, b = angle.cos().double(), angle.sin().double(), head[: d // 2], head[d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def unrolled(
    draft: Eagle3Draft, token_ids: list[int], aux: torch.Tensor, num_steps: int
) -> list[list[torch.Tensor | None]]:
    """`[S][T]`: final-normed states `[H]` of one document, `aux [T, A, Ht]`; None where there is no token to read."""
    shape, num_tokens = draft.shape, len(token_ids)
    d, share = shape.head_dim, shape.num_heads // shape.num_kv_heads
    theta = float(shape.rope["rope_theta"])
    feature: list[torch.Tensor | None] = []
    for t in range(num_tokens):
        parts = [aux[t, k] for k in range(shape.num_aux)]
        if shape.norm_aux:
            parts = [_norm(p, draft.aux_norms[k].weight, shape.rms_norm_eps) for k, p in enumerate(parts)]
        feature.append(draft.fc.weight @ torch.cat(parts))
    step0: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [[] for _ in draft.layers]
    own: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [[[] for _ in range(num_tokens)] for _ in draft.layers]
    steps: list[list[torch.Tensor | None]] = []
    for s in range(num_steps):
        states: list[torch.Tensor | None] = list(feature)
        for i, layer in enumerate(draft.layers):
            q: dict[int, torch.Tensor] = {}
            for t in range(num_tokens):
                x = states[t]
                if x is None or t + 1 + s >= num_tokens:
                    states[t] = None
                    continue
                if i == 0:
                    e = draft.embed_tokens.weight[token_ids[t + 1 + s]]
                    read = torch.cat([
                        _norm(e, layer.input_layernorm.weight, shape.rms_norm_eps),
                        _norm(x, layer.hidden_norm.weight, shape.rms_norm_eps),
                    ])  # fmt: skip
                else:
                    read = _norm(x, layer.input_layernorm.weight, shape.rms_norm_eps)
                attn = layer.self_attn
                q[t] = torch.stack([_rotated(h, t + s, theta) for h in (attn.q_proj.weight @ read).view(-1, d)])
                k = torch.stack([_rotated(h, t + s, theta) for h in (attn.k_proj.weight @ read).view(-1, d)])
                pair = (k, (attn.v_proj.weight @ read).view(-1, d))
                if s == 0:
                    step0[i].append([pair])
                else:
                    own[i][t].append(pair)
            for t, query in q.items():
                seen = [step0[i][j][0] for j in range(t + 1)] + own[i][t]
                heads = []
                for h in range(shape.num_heads):
                    g = h // share
                    scores = torch.stack([query[h] @ k[g] for k, _ in seen]) * d**-0.5
                    p = scores.softmax(0)
                    heads.append(sum((p[j] * v[g] for j, (_, v) in enumerate(seen)), torch.zeros(d).to(p)))
                x = states[t]
                assert x is not None
                x = x + layer.self_attn.o_proj.weight @ torch.cat(heads)
                y = _norm(x, layer.post_attention_layernorm.weight, shape.rms_norm_eps)
                gate = layer.mlp.gate_proj.weight @ y
                x = x + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * (layer.mlp.up_proj.weight @ y))
                states[t] = x
        normed = [None if x is None else _norm(x, draft.norm.weight, shape.rms_norm_eps) for x in states]
        steps.append(normed)
        feature = normed if shape.carry_normed else states
    return steps


def loss(
    draft: Eagle3Draft,
    documents: list[tuple[list[int], np.ndarray, torch.Tensor, torch.Tensor]],
    head: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    num_steps: int,
    rule: MaskRule,
    decay: float = 0.8,
) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Loss of documents `(token_ids, mask, aux [T, A, Ht], last [T, Ht])`, with counts by step."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(num_steps)]
    counts = np.zeros((3, num_steps), dtype=np.int64)
    draft_id = {int(t): i for i, t in enumerate(target_ids)}
    for token_ids, mask, aux, last in documents:
        states = unrolled(draft, token_ids, aux, num_steps)
        for s in range(num_steps):
            for t in range(len(token_ids)):
                if not supervised(mask, t, s, rule):
                    continue
                counts[0, s] += 1
                logits = head @ last[t + 1 + s]
                best = draft_id.get(int(logits.argmax()))
                if best is None:
                    continue
                counts[1, s] += 1
                state = states[s][t]
                assert state is not None
                z = draft.lm_head.weight @ state
                p = logits[target_ids].softmax(0)
                sums[s] = sums[s] - (p * z.log_softmax(0)).sum()
                counts[2, s] += int(z.argmax()) == best
    total = sum((decay**s * sums[s] / max(1, counts[1, s]) for s in range(num_steps)), torch.zeros(()).double())
    return total, counts[0], counts[1], counts[2]
