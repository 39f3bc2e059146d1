"""The trunk of a transformers model: hooks that keep what leaves its decoder layers, and a look at whether they may.

Letters: `B` batch, `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from eyas.errors import EngineError
from eyas.target.structure import Structure

ENGINE = "hf"


class Taps:
    """Hooks on the decoder layers: in `with taps as hidden`, `hidden[k]` becomes the residual stream `[B, T, H]`."""

    def __init__(self, structure: Structure, layers: Sequence[int]) -> None:
        self.changed_in_place = False
        """Whether a later layer writes into a tensor that we keep, so that a copy is needed."""
        self._hidden: dict[int, torch.Tensor] | None = None
        for k in layers:
            if k == 0:
                structure.blocks[0].register_forward_pre_hook(self._enters, with_kwargs=True)
            else:
                structure.blocks[k - 1].register_forward_hook(self._leaves(k))

    def __enter__(self) -> dict[int, torch.Tensor]:
        self._hidden = {}
        return self._hidden

    def __exit__(self, *_: object) -> None:
        self._hidden = None

    def _enters(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(0, _entering(args, kwargs))

    def _leaves(self, k: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._keep(k, _leaving(output))

        return hook

    def _keep(self, k: int, states: torch.Tensor) -> None:
        if self._hidden is not None:
            self._hidden[k] = states.clone() if self.changed_in_place else states


def examine(structure: Structure, device: torch.device) -> bool:
    """Run four tokens and look whether the layers are connected as the hooks assume; EngineError when they are not.

    Returns whether any layer's output is written into later on.
    """
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    around_norm: list[torch.Tensor] = []

    def remember(states: torch.Tensor) -> None:
        kept.append(states)
        copies.append(states.clone())

    handles = [
        structure.blocks[0].register_forward_pre_hook(lambda _, a, kw: remember(_entering(a, kw)), with_kwargs=True)
    ]
    handles += [b.register_forward_hook(lambda _, __, out: remember(_leaving(out))) for b in structure.blocks]
    handles.append(
        structure.norm.register_forward_pre_hook(
            lambda _, a, kw: around_norm.append(_entering(a, kw).clone()), with_kwargs=True
        )
    )
    handles.append(structure.norm.register_forward_hook(lambda _, __, out: around_norm.append(out)))
    try:
        # Ids from the middle of the vocabulary: the first and last ones may be padding, whose embedding is all zeros.
        ids = torch.arange(1, 5, device=device) * structure.vocab_size // 6  # [4]
        last = structure.trunk(input_ids=ids[None], use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    what = type(structure.causal).__name__
    wanted = (1, 4, structure.hidden_size)
    shapes = {tuple(states.shape) for states in copies}
    if len(copies) != structure.num_layers + 1 or shapes != {wanted}:
        raise EngineError(
            f"{what}: {structure.num_layers} decoder layers gave {len(copies) - 1} outputs of shapes {sorted(shapes)} "
            f"for {list(wanted)}: not one residual stream through '{structure.blocks_name}'",
            engine=ENGINE,
        )
    if len(around_norm) != 2 or not torch.equal(around_norm[0].to(copies[-1].device), copies[-1]):
        raise EngineError(
            f"{what}: '{structure.norm_name}' does not take the last decoder layer's output", engine=ENGINE
        )
    if not torch.equal(around_norm[1].to(last.device), last):
        raise EngineError(f"{what}: the last hidden state is not the output of '{structure.norm_name}'", engine=ENGINE)
    return any(not torch.equal(states, copy) for states, copy in zip(kept, copies, strict=True))


def input_device(structure: Structure) -> torch.device:
    device: torch.device = structure.embeddings.weight.device  # type: ignore[assignment]
    return device


def _entering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    states: torch.Tensor = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
    return states


def _leaving(output: Any) -> torch.Tensor:
    states: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return states
