"""Where things are in a decoder-only model of transformers, found by structure and not by the model's name.

Letters: `B` batch, `T` tokens, `H` hidden size, `V` target vocabulary, `L` decoder layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eyas.errors import ConfigError, EngineError
from eyas.target.files import TargetFiles, check_remote_code


@dataclass(frozen=True, slots=True)
class Structure:
    """The parts of a decoder-only model. Names are relative to the model that was searched, as in `named_modules()`."""

    causal: nn.Module
    """The module that owns the head: its forward is trunk, head and whatever it does to the logits."""
    body_name: str
    """The child of `causal` that its forward calls before the head: the trunk, or a wrapper with a trunk inside."""
    trunk: nn.Module
    """Embeddings, decoder layers and final norm; its forward takes `input_ids` and gives `last_hidden_state`."""
    trunk_name: str
    blocks: tuple[nn.Module, ...]
    """The `L` decoder layers in the order in which they run."""
    blocks_name: str
    norm: nn.Module
    norm_name: str
    embeddings: nn.Module
    embeddings_name: str
    head: nn.Module
    head_name: str
    hidden_size: int
    vocab_size: int
    """`V`: rows of the head."""

    @property
    def num_layers(self) -> int:
        return len(self.blocks)


class LogitMap(NamedTuple):
    """What a target does to the head's output `x`: `softcap * tanh(scale * x / softcap)`, or just `scale * x`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the head's output, elementwise; `x` is overwritten."""
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x


def load_config(files: TargetFiles, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The target's configuration. ConfigError when it needs code that may not run, or that transformers lacks."""
    model_type = str(files.config.get("model_type", ""))
    check_remote_code(files, trust_remote_code=trust_remote_code, shipped=model_type in CONFIG_MAPPING)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            files.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise ConfigError(
            f"target {files.path}: transformers {transformers.__version__} cannot use its config.json "
            f"(model_type '{model_type}'): {_one_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"target {files.path}: '{model_type}' is an encoder-decoder; eyas needs a decoder-only model")
    return config


def model_class(config: PreTrainedConfig) -> Any:
    """The auto class that builds this configuration with a language-model head. ConfigError when there is none."""
    remote = getattr(config, "auto_map", None) or {}
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping or auto.__name__ in remote:
            return auto
    raise ConfigError(
        f"'{config.model_type}' has no decoder-only language model in transformers {transformers.__version__}"
    )


def skeleton(config: PreTrainedConfig, *, trust_remote_code: bool, **options: Any) -> nn.Module:
    """The whole model without its weights (on the meta device): structure, classes and settings, at no cost in memory.

    `options` go to transformers' `from_config` untouched.
    """
    auto = model_class(config)
    try:
        with torch.device("meta"):
            model: nn.Module = auto.from_config(config, trust_remote_code=trust_remote_code, **options)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"'{config.model_type}': its config.json does not build a model: {_one_line(error)}"
        ) from error
    return model.eval()


def find(model: nn.Module) -> Structure:
    """The parts of `model`. EngineError, naming what was looked for, when it is not built as decoders are."""
    what = type(model).__name__
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    num_layers = int(getattr(config, "num_hidden_layers", 0))
    hidden_size = int(config.hidden_size)
    names = {module: name for name, module in model.named_modules()}

    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    if embeddings not in names:
        raise EngineError(f"{what}: no input embeddings found")
    embeddings_name = names[embeddings]

    blocks_name, blocks = _blocks(model, what, num_layers, embeddings_name)
    trunk_name = _parent(blocks_name)
    trunk = model.get_submodule(trunk_name)
    norm_child = _final_norm(trunk, blocks_name.rpartition(".")[2], hidden_size, what)
    norm_name = f"{trunk_name}.{norm_child}" if trunk_name else norm_child

    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        owner = next((m for m in model.modules() if isinstance(getattr(m, "lm_head", None), nn.Module)), None)
        head = owner.lm_head if owner is not None else None
    weight = getattr(head, "weight", None)
    if head is None or weight is None or weight.dim() != 2:
        raise EngineError(f"{what}: no output embeddings (lm_head with a [V, H] weight) found")
    head_name = names[head]
    causal = model.get_submodule(_parent(head_name))
    body_name = next(
        (child for child, module in causal.named_children() if any(m is trunk for m in module.modules())), None
    )
    if body_name is None:
        raise EngineError(f"{what}: '{head_name}' does not stand beside the module that holds '{blocks_name}'")
    return Structure(
        causal=causal,
        body_name=body_name,
        trunk=trunk,
        trunk_name=trunk_name,
        blocks=blocks,
        blocks_name=blocks_name,
        norm=trunk.get_submodule(norm_child),
        norm_name=norm_name,
        embeddings=embeddings,
        embeddings_name=embeddings_name,
        head=head,
        head_name=head_name,
        hidden_size=hidden_size,
        vocab_size=int(weight.shape[0]),
    )


def _blocks(model: nn.Module, what: str, num_layers: int, embeddings_name: str) -> tuple[str, tuple[nn.Module, ...]]:
    """The one list of `num_layers` modules whose owner also owns the embeddings (towers and experts do not)."""
    found = []
    for name, module in model.named_modules():
        owner = _parent(name)
        beside = embeddings_name.startswith(f"{owner}." if owner else "")
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and num_layers and beside:
            found.append((name.count("."), name, tuple(module)))
    found.sort(key=lambda f: -f[0])
    # A wrapper may own other lists of that length; the decoder's list is the one nearest to the embeddings.
    if not found or (len(found) > 1 and found[0][0] == found[1][0]):
        lists = ", ".join(name for _, name, _ in found) or "none"
        raise EngineError(
            f"{what}: looked for one ModuleList of num_hidden_layers = {num_layers} decoder layers beside the input "
            f"embeddings '{embeddings_name}', found {lists}"
        )
    return found[0][1], found[0][2]


def _final_norm(trunk: nn.Module, blocks_child: str, hidden_size: int, what: str) -> str:
    """The child of the trunk that is a norm over `H` and comes after the decoder layers, else the only one at all."""
    children = dict(trunk.named_children())
    norms = []
    for name, child in children.items():
        weight = getattr(child, "weight", None)
        wide = weight is None or tuple(weight.shape) == (hidden_size,)
        if "norm" in type(child).__name__.lower() and wide:
            norms.append(name)
    order = list(children)
    after = [name for name in norms if order.index(name) > order.index(blocks_child)]
    found = after or norms
    if len(found) != 1:
        have = ", ".join(found) or f"none among {', '.join(children)}"
        raise EngineError(
            f"{what}: looked for one final norm over {hidden_size} values after '{blocks_child}', found {have}"
        )
    return found[0]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


class _StandIn(nn.Module):
    """Answers in the body's place: hidden states that are already known."""

    def __init__(self, body: nn.Module, last_hidden_state: torch.Tensor) -> None:
        super().__init__()
        # In a list, so that the body does not become a submodule.
        self._body = [body]
        self._states = last_hidden_state

    def __getattr__(self, name: str) -> Any:
        # Some forwards read a constant from their body, such as a multiplier of the logits.
        return getattr(self.__dict__["_body"][0], name)

    def forward(self, *_: Any, **__: Any) -> _BodyOutput:
        return _BodyOutput(self._states)


class _BodyOutput:
    """What the head's owner reads from its body: the states; everything else is absent."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


@contextmanager
def swapped(owner: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    # Not setattr: a model may guard its attributes, and a device hook must stay on the real module.
    original = owner._modules[name]
    owner._modules[name] = module
    try:
        yield
    finally:
        owner._modules[name] = original


def logits_of(structure: Structure, last_hidden_state: torch.Tensor) -> torch.Tensor:
    """`[B, T, V]`: the model's own way from the normed last hidden state `[B, T, H]` to logits, without its trunk."""
    stand_in = _StandIn(structure.causal.get_submodule(structure.body_name), last_hidden_state)
    ids = torch.zeros(last_hidden_state.shape[:2], dtype=torch.long, device=last_hidden_state.device)
    with swapped(structure.causal, structure.body_name, stand_in):
        return structure.causal(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


# Head outputs at which a target's treatment is looked at: small ones give the scale, large ones the cap.
_PROBES = (1e-3, -1e-3, 0.1, 1.0, -3.0, 10.0, -30.0, 100.0, 1e4, -1e6)


def logit_map(structure: Structure) -> LogitMap:
    """What the model's forward does to the head's output, measured by running that forward around a one-row head.

    Configurations spell this in contradicting ways (a `logits_scaling` divides in one family and multiplies in
    another), so the code is asked and not the config. Works on a skeleton. EngineError when it is no scale and cap.
    """
    what = type(structure.causal).__name__
    x = torch.tensor(_PROBES, dtype=torch.float32)
    states = torch.zeros(1, len(_PROBES), structure.hidden_size)
    states[0, :, 0] = x
    head = nn.Linear(structure.hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    head.weight.data[0, 0] = 1.0
    head_child = structure.head_name.rpartition(".")[2]
    try:
        with torch.no_grad(), swapped(structure.causal, head_child, head):
            y = logits_of(structure, states)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise EngineError(f"{what}: its forward cannot be run around the head alone: {_one_line(error)}") from error
    if y.device.type == "meta" or y.numel() != len(_PROBES):
        raise EngineError(
            f"{what}: what it does to its logits depends on weights; only a scale and a soft-cap are known"
        )
    y = y.detach().flatten().double()
    scale = float(y[0] / x.double()[0])
    biggest = float(y[-1].abs())
    softcap = None if biggest > abs(scale) * 1e5 else biggest
    found = LogitMap(_tidy(scale), None if softcap is None else _tidy(softcap))
    if not torch.allclose(found(x.double()), y, rtol=1e-4, atol=1e-6):
        raise EngineError(f"{what}: what it does to its logits is neither a scale nor a soft-cap")
    return found


def _tidy(value: float) -> float:
    """`value` without the noise of float32: 30.000001 is 30."""
    return float(f"{value:.6g}")


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
