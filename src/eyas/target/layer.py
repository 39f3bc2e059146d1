"""One decoder layer of a target, run by itself: what does it make of a given hidden state?

For targets too large to be run whole: of a captured pair of hidden states `k-1` and `k`, layer `k-1` (0-based) must
turn the one into the other. Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from eyas.errors import ConfigError
from eyas.target.files import open_target, tensor_entries
from eyas.target.head import read_tensor, trunk_prefix
from eyas.target.structure import find, load_config, skeleton, swapped


class TargetLayers:
    """The decoder layers of a target, read one at a time and run in float32 on the CPU."""

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        """ConfigError or EngineError, one line, when the target cannot be read."""
        self._files = open_target(path)
        self._config = load_config(self._files, trust_remote_code=trust_remote_code)
        model = skeleton(self._config, trust_remote_code=trust_remote_code, dtype=torch.float32)
        self._structure = find(model)
        self._entries = tensor_entries(self._files)
        self._prefix = trunk_prefix(self._structure, self._entries, self._files)

    def layer_bytes(self, k: int) -> int:
        """Bytes of the stored weights of the layer that gives hidden state `k`."""
        return sum(e.end - e.start for name, e in self._entries.items() if name.startswith(self._stored(k)))

    @torch.inference_mode()
    def hidden_after(self, k: int, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Hidden state `k` `[T, H]` of a sequence whose hidden state `k-1` is `states` `[T, H]`; `1 <= k <= L`.

        Raises ConfigError when it cannot be run so: its weights are not stored as the layer has them (quantised, or
        renamed), or the trunk needs more than its layers.
        """
        s = self._structure
        block = self._load(k)
        found: list[torch.Tensor] = []
        given = torch.from_numpy(np.ascontiguousarray(states, dtype=np.float32))[None]

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            # Whatever the trunk did to its embeddings: this layer gets the captured state.
            return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple | list) else output)

        handles = [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave),
        ]
        try:
            with self._alone(k):
                s.trunk(inputs_embeds=given, use_cache=False)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"target {self._files.path}: decoder layer {k - 1} cannot be run by itself: {text[0]}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            block.to_empty(device="meta")
        return found[0][0].float().numpy()

    def _stored(self, k: int) -> str:
        at = len(self._structure.trunk_name) + 1 if self._structure.trunk_name else 0
        return f"{self._prefix}{self._structure.blocks_name[at:]}.{k - 1}."

    def _load(self, k: int) -> nn.Module:
        """Give the layer its weights."""
        block = self._structure.blocks[k - 1]
        stored = self._stored(k)
        wanted = {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}
        held = {name.removeprefix(stored): e for name, e in self._entries.items() if name.startswith(stored)}
        wrong = [name for name in wanted if name not in held or held[name].shape != wanted[name]]
        if wrong or any(name not in wanted for name in held):
            raise ConfigError(
                f"target {self._files.path}: decoder layer {k - 1} cannot be run by itself: its weights are not stored "
                f"as the layer has them ({(wrong or sorted(set(held) - set(wanted)))[0]})"
            )
        block.to_empty(device="cpu")
        for name in wanted:
            owner = block.get_submodule(name.rpartition(".")[0])
            value = read_tensor(self._entries, stored + name)
            leaf = name.rpartition(".")[2]
            if leaf in owner._buffers:
                owner._buffers[leaf] = value
            else:
                owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        return block

    @contextmanager
    def _alone(self, k: int) -> Iterator[None]:
        """The trunk with every other decoder layer passing on what it gets, real rotary tables, and no final norm."""
        s = self._structure
        with ExitStack() as stack:
            at = len(s.trunk_name) + 1 if s.trunk_name else 0
            owner: Any = s.trunk.get_submodule(s.blocks_name[at:])
            for j, block in enumerate(s.blocks):
                if j != k - 1:
                    stack.enter_context(swapped(owner, str(j), _PassOn(block)))
            norm_at, _, norm_name = s.norm_name[at:].rpartition(".")
            stack.enter_context(swapped(s.trunk.get_submodule(norm_at), norm_name, nn.Identity()))
            for name, child in list(s.trunk.named_children()):
                if "rotary" in name:
                    config = self._config.get_text_config()
                    stack.enter_context(swapped(s.trunk, name, type(child)(config=config)))
            yield


class _PassOn(nn.Module):
    """Stands for a decoder layer: what enters leaves unchanged."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # In a list, so that the layer does not become a submodule.
        self._block = [block]

    def __getattr__(self, name: str) -> Any:
        # Trunks read constants from their layers, such as the kind of attention.
        return getattr(self.__dict__["_block"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]
