"""The drafter's shape: everything that must be known before it has weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of an EAGLE-3 drafter. Letters: `H` its hidden size, `D` its vocabulary, `A` auxiliary layers."""

    target_hidden_size: int
    vocab_size: int
    """`V`, the target's vocabulary: rows of the embedding."""
    aux_layers: tuple[int, ...]
    """The target's hidden-state indices that make the feature, ascending."""
    hidden_size: int
    """`H`; another one than the target's is allowed."""
    draft_vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    """The target's."""
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """The target's, as transformers' `rope_parameters` spells it."""
    norm_aux: bool = False
    """EAGLE-3.1: each auxiliary state has a norm of its own before `fc`."""
    carry_normed: bool = False
    """EAGLE-3.1: a step hands on its state after the final norm instead of before it."""

    def __post_init__(self) -> None:
        for name in ("target_hidden_size", "vocab_size", "hidden_size", "draft_vocab_size", "num_heads", "num_kv_heads",
                     "head_dim", "intermediate_size", "num_layers", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}, not a positive whole number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"a draft vocabulary of {self.draft_vocab_size} of {self.vocab_size} tokens")
        if not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps = {self.rms_norm_eps}, which makes no norm")
        if not self.aux_layers:
            raise ValueError("an EAGLE-3 drafter needs at least one auxiliary layer")

    @property
    def num_aux(self) -> int:
        return len(self.aux_layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def own_embedding(self) -> bool:
        """Whether the target's embedding does not fit, so that the drafter brings one of its own."""
        return self.hidden_size != self.target_hidden_size
