"""The drafter while it serves: its own key-value cache, and chains of drafted tokens.

Row `t` reads the target's auxiliary states `a_t` and token `x[t+1]`, which must be known: its key and value stay. A
chain begins with the state of the last row `t` and goes on as step `s = 1, 2, …` of training-time test: its own state
as feature, its own token, rotary position `t + s`, and a key of its own that is gone when the chain has been judged.
Letters: `n` new rows, `A` auxiliary layers, `Ht` the target's and `H` the drafter's hidden size, `h` heads, `g`
key-value heads, `d` head size, `D` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from eyas.evaluate.choice import Drafted
from eyas.model.eagle3 import Eagle3Draft, LayerWeights, Rotation, feed_forward, rms_norm, rotate, rotations
from eyas.model.vocab_map import VocabMap
from eyas.train.ttt import DraftWeights


class Drafter:
    """A drafter on a device, in the dtype of its arithmetic; it drafts for one sequence at a time."""

    def __init__(self, draft: Eagle3Draft, vocab_map: VocabMap, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = draft.shape
        if not draft.shape.own_embedding:
            # The target's, which is in that dtype itself.
            draft.embed_tokens.to(dtype)
        draft = draft.to(device)
        with torch.no_grad():
            self._weights = DraftWeights.of(draft, dtype)
        self._rope = draft.rope
        self.dtype, self.device = dtype, device
        self.target_ids = vocab_map.target_ids.to(device)
        """`[D]`"""
        self._target_ids = vocab_map.target_ids.tolist()

    def begin(self, max_tokens: int) -> Chain:
        """A new sequence of at most `max_tokens`, those included that are drafted and not kept."""
        positions = torch.arange(max_tokens, device=self.device)
        return Chain(self, rotations(self._rope, positions, self.dtype), max_tokens)

    def token(self, drafted: Drafted) -> int:
        """The target's id of a drafted token."""
        return int(self._target_ids[drafted.draft_id])


class Chain:
    """The drafter's side of one sequence."""

    def __init__(self, drafter: Drafter, table: Rotation, max_tokens: int) -> None:
        shape = drafter.shape
        self._drafter, self._table = drafter, table
        self._w = drafter._weights
        self.num_rows = 0
        """Rows whose keys and values are kept."""
        self._cache = [
            torch.empty(2, shape.num_kv_heads, max_tokens, shape.head_dim, dtype=drafter.dtype, device=drafter.device)
            for _ in self._w.layers
        ]  # keys and values, [2, g, tokens, d]; behind `num_rows` stand those of a chain
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        """`[1, H]` of the last row, before and after the final norm: where a chain begins."""

    @torch.no_grad()
    def extend(self, aux_hidden_states: torch.Tensor, following: torch.Tensor) -> None:
        """Take in rows whose next token is known for good: `[A, n, Ht]`, and these tokens `[n]`."""
        shape, w = self._drafter.shape, self._w
        aux = aux_hidden_states.to(self._drafter.dtype)
        if w.aux_norms:
            aux = torch.stack([rms_norm(a, norm, shape.rms_norm_eps) for a, norm in zip(aux, w.aux_norms, strict=True)])
        feature = F.linear(aux.transpose(0, 1).flatten(1), w.fc)  # [n, H]
        self._last = self._run(feature, following, self.num_rows)
        self.num_rows += len(following)

    @torch.no_grad()
    def draft(self, num_tokens: int, choose: Callable[[torch.Tensor], Drafted]) -> list[Drafted]:
        """A chain of `num_tokens` tokens behind the last row's; nothing of it stays."""
        assert self._last is not None, "a chain before the first row"
        drafted: list[Drafted] = []
        state, normed = self._last
        for s in range(num_tokens):
            if s > 0:
                token = torch.tensor([self._drafter.token(drafted[-1])], device=self._drafter.device)
                feature = normed if self._drafter.shape.carry_normed else state
                # Its key is the one behind the kept rows' and the chain's so far, and its position says the same.
                state, normed = self._run(feature, token, self.num_rows + s - 1)
            drafted.append(choose(F.linear(normed, self._w.lm_head)[0]))
        return drafted

    def _run(self, feature: torch.Tensor, tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last one's state of rows `[start, start + n)`, in positions of these numbers: `[1, H]` before and after
        the final norm, from features `[n, H]` and tokens `[n]`."""
        shape, w = self._drafter.shape, self._w
        stop = start + len(tokens)
        rotation = (self._table[0][start:stop], self._table[1][start:stop])
        first = w.layers[0]
        assert first.qkv_embed is not None and first.norm_embed is not None
        embedding = F.embedding(tokens, w.embed).to(self._drafter.dtype)
        read: torch.Tensor | None = F.linear(rms_norm(embedding, first.norm_embed, shape.rms_norm_eps), first.qkv_embed)
        for i, layer in enumerate(w.layers):
            last = i == len(w.layers) - 1
            feature = self._layer(layer, i, feature, read, rotation, start, stop, last=last)
            read = None
        return feature, rms_norm(feature, w.norm, shape.rms_norm_eps)

    def _layer(
        self,
        layer: LayerWeights,
        i: int,
        feature: torch.Tensor,
        read: torch.Tensor | None,
        rotation: Rotation,
        start: int,
        stop: int,
        *,
        last: bool,
    ) -> torch.Tensor:
        """A layer's output `[n, H]`; of the last layer just the last row's `[1, H]`, all that is asked for."""
        shape, eps = self._drafter.shape, self._drafter.shape.rms_norm_eps
        h, g, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
        both = F.linear(rms_norm(feature, layer.norm, eps), layer.qkv)
        if read is not None:
            both = both + read
        q, k, v = torch.split(both.view(stop - start, h + 2 * g, d), [h, g, g], dim=1)
        cache = self._cache[i]
        cache[0, :, start:stop] = rotate(k, rotation).transpose(0, 1)
        cache[1, :, start:stop] = v.transpose(0, 1)
        q = rotate(q, rotation)
        if last:
            q, feature = q[-1:], feature[-1:]
        # Row `start + i` sees the rows up to itself; the last row sees all.
        mask = None
        if len(q) > 1:
            mask = torch.ones(len(q), stop, dtype=torch.bool, device=q.device).tril_(start)
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], cache[None, 0, :, :stop], cache[None, 1, :, :stop], mask, enable_gqa=h != g
        )  # [1, h, n, d]
        x = feature + F.linear(attended[0].transpose(0, 1).flatten(1), layer.o)
        return x + feed_forward(rms_norm(x, layer.norm_mlp, eps), layer.gate, layer.up, layer.down)
