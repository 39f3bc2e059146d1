"""Speculative decoding in this process, one sequence at a time: a chain is drafted, the target judges it in one pass.

Target and drafter each have a key-value cache. Of a sequence `x[0..n]` the target has run rows `0..n-1`; it runs `x[n]`
and the `k` drafted tokens, and takes back what it does not keep. The drafter then reads the kept rows with the tokens
behind them. Letters: `T` tokens of one pass, `A` auxiliary layers, `H` hidden size, `V` target vocabulary, `k` drafted
tokens.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from eyas.engine.trunk import Taps, input_device
from eyas.errors import ConfigError
from eyas.evaluate.choice import Choice
from eyas.evaluate.drafter import Drafter
from eyas.target.structure import Structure, logits_of

_CROPPED = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


class Target:
    """The target with hooks on it, as an engine or a test has it."""

    def __init__(self, structure: Structure, taps: Taps, aux_layers: Sequence[int]) -> None:
        """ConfigError for a target with layers that cannot take back a token (linear attention, say)."""
        config: Any = structure.trunk.config
        kinds = set(getattr(config, "layer_types", None) or ()) - _CROPPED
        if kinds:
            raise ConfigError(
                f"{type(structure.causal).__name__} has layers of {', '.join(sorted(kinds))}, whose state cannot be "
                "taken back by a token: decode with a serving engine instead"
            )
        self.structure, self.taps, self.aux_layers = structure, taps, tuple(aux_layers)
        self.device = input_device(structure)
        positions = getattr(config, "max_position_embeddings", None)
        self.max_tokens = int(positions) if positions else None
        # transformers renames its argument; both names are in use.
        names = inspect.signature(structure.trunk.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def begin(self) -> Session:
        return Session(self)

    def synchronize(self) -> None:
        """Wait until the device has done what it was told: before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Session:
    """The target's side of one sequence."""

    def __init__(self, target: Target) -> None:
        self._target = target
        # Without the configuration every layer keeps everything, a sliding one too: so any token can be taken back.
        self._cache = DynamicCache()
        self.num_forwards = 0

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], num_logits: int, *, aux: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Auxiliary states `[A, T, H]` of the next tokens `[T]`, and the logits `[num_logits, V]` of the last of them.

        Without `aux` the first is empty.
        """
        target = self._target
        ids = torch.tensor([list(token_ids)], device=target.device)
        with target.taps as hidden:
            output: Any = target.structure.trunk(input_ids=ids, use_cache=True, **{target.cache_name: self._cache})
            kept = [hidden[k][0] for k in target.aux_layers] if aux else []
        self.num_forwards += 1
        last = output.last_hidden_state
        logits = logits_of(target.structure, last[:, last.shape[1] - num_logits :])[0]
        return torch.stack([a.to(last.device) for a in kept]) if kept else last.new_empty(0), logits

    def take_back(self, num_tokens: int) -> None:
        """Forget the latest tokens."""
        if num_tokens:
            self._cache.crop(-num_tokens)


@dataclass(frozen=True, slots=True)
class Verification:
    """One pass of the target over a drafted chain."""

    row: int
    """The row `t` at which the chain began; its first token is about position `t + 2`."""
    num_accepted: int
    """Drafted tokens that the target kept."""
    num_written: int
    """Tokens of the answer that it gave, the bonus token included; fewer than kept ones where the answer ends."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer, and how it came to be."""

    token_ids: tuple[int, ...]
    """What was written, up to and with the first stop token."""
    verifications: tuple[Verification, ...]
    num_forwards: int
    """Of the target, the prompt's included."""
    seconds: float
    cut: bool
    """Ended by the limit on new tokens and not by the target."""


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    choice: Choice,
    stop_ids: frozenset[int] = frozenset(),
) -> Decoded:
    """Answer a prompt of at least two tokens with chains of `num_draft_tokens` tokens.

    Greedily, the answer is what the target writes alone, to rounding; drawn, it follows the target's distribution.
    """
    if len(prompt) < 2 or num_draft_tokens < 1 or max_new_tokens < 1:
        raise ValueError(f"a prompt of {len(prompt)}, {num_draft_tokens} drafted and {max_new_tokens} new tokens")
    started = _now(target)
    session = target.begin()
    chain = drafter.begin(len(prompt) + max_new_tokens + num_draft_tokens)
    aux, logits = session.run(prompt, 1, aux=True)
    written = [choice.first(logits[0])]
    following = [*prompt[1:], written[0]]
    verifications: list[Verification] = []
    while len(written) < max_new_tokens and written[-1] not in stop_ids:
        chain.extend(aux.to(drafter.device), torch.tensor(following, device=drafter.device))
        drafted = chain.draft(num_draft_tokens, choice.draft)
        tokens = [drafter.token(one) for one in drafted]
        aux, logits = session.run([written[-1], *tokens], len(tokens) + 1, aux=True)
        kept, behind = choice.judge(logits.to(drafter.device), drafted, drafter.target_ids)
        session.take_back(len(tokens) - kept)
        aux = aux[:, : kept + 1]
        following = [*tokens[:kept], behind]
        new = _until_end(following[: max_new_tokens - len(written)], stop_ids)
        verifications.append(Verification(chain.num_rows - 1, kept, len(new)))
        written += new
    return Decoded(
        token_ids=tuple(written),
        verifications=tuple(verifications),
        num_forwards=session.num_forwards,
        seconds=_now(target) - started,
        cut=written[-1] not in stop_ids,
    )


@torch.inference_mode()
def decode_plainly(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    choice: Choice,
    stop_ids: frozenset[int] = frozenset(),
) -> Decoded:
    """Answer a prompt by the target alone, a token a pass."""
    started = _now(target)
    session = target.begin()
    _, logits = session.run(prompt, 1, aux=False)
    written = [choice.first(logits[0])]
    while len(written) < max_new_tokens and written[-1] not in stop_ids:
        _, logits = session.run(written[-1:], 1, aux=False)
        written.append(choice.first(logits[0]))
    return Decoded(tuple(written), (), session.num_forwards, _now(target) - started, written[-1] not in stop_ids)


def _until_end(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Up to and with the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return list(tokens[: i + 1])
    return list(tokens)


def _now(target: Target) -> float:
    target.synchronize()
    return time.perf_counter()
