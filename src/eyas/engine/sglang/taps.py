"""Where a server's model hands out its hidden states: SGLang's own setter for auxiliary layers, and forward hooks.

Part of the plugin, so it needs torch and the standard library alone, beside the server itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eyas.engine import staged
from eyas.engine.settings import CaptureSetupError
from eyas.engine.staged import RequestName

WITHOUT_RESIDUAL = frozenset({"Gemma3TextModel"})
"""Models that collect their auxiliary states without the residual stream (seen in 0.5.17 and 0.5.23)."""


class Taps:
    """Which hidden states a model hands out, by our indices: `k` = after `k` decoder layers.

    SGLang's own setter where it can, read back; forward hooks for the embeddings (`0`), for the last layer's output
    (`L`), which the setter silently never captures, and for models without a setter or with one that errs.
    """

    def __init__(self, model: Any, layers: Sequence[int], num_layers: int) -> None:
        self.active: tuple[int, ...] = tuple(layers)
        self._layers = tuple(layers)
        self._num_layers = num_layers
        self._tapped: dict[int, torch.Tensor] = {}
        middle = [k for k in layers if 0 < k < num_layers]
        setter: Any = getattr(model, "set_eagle3_layers_to_capture", None)
        errs = any(type(module).__name__ in WITHOUT_RESIDUAL for module in model.modules())
        self._has_setter = bool(middle) and setter is not None and not errs
        self._inner: Any = None
        if self._has_setter:
            self._inner = set_and_read_back(model, setter, middle)
        elif middle:
            self._inner = _owner(model, num_layers)
            for k in {*middle, *self._neighbours()} - {0}:
                self._tap_before(self._inner.layers[k], k)
        if 0 in layers:
            self._tap_before(decoder_layers(model, num_layers)[0], 0)
        if num_layers in layers:
            self._tap_norm(final_norm(model, num_layers), num_layers)
        self.can_have_neighbours = self._inner is not None
        if self.can_have_neighbours:
            self._inner.register_forward_pre_hook(self._choose, with_kwargs=True)

    def by_setter(self, layers: Sequence[int]) -> list[int]:
        """Those of `layers` that come in the list of auxiliary states, in its order."""
        return [k for k in layers if 0 < k < self._num_layers] if self._has_setter else []

    def read_back(self) -> list[int] | None:
        """What the model itself says that it captures."""
        return _captured_by(self._inner) if self._has_setter else None

    def collect(self) -> dict[int, torch.Tensor]:
        """What the hooks saw in the forward that just ran; forgotten here."""
        tapped, self._tapped = self._tapped, {}
        return tapped

    def _choose(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a forward: with a request that asks for it, capture the state before each auxiliary one too."""
        batch = next((v for v in (*args, *kwargs.values()) if hasattr(v, "rids")), None)
        asked = any(name is not None and staged.NEIGHBOURS in name.flags for name in names_of(batch))
        self.active = tuple(sorted({*self._layers, *self._neighbours()})) if asked else self._layers
        if self._has_setter:
            _capture_in(self._inner, self.by_setter(self.active))

    def _neighbours(self) -> set[int]:
        return {k - 1 for k in self._layers if k > 1}

    def _tap_before(self, layer: Any, k: int) -> None:
        """Keep the residual stream as it enters `layer`."""
        signature = inspect.signature(layer.forward)
        if "hidden_states" not in signature.parameters:
            raise CaptureSetupError(
                f"eyas: {type(layer).__name__} takes no 'hidden_states': hidden state {k} cannot be captured here; "
                "choose other capture.aux_layers"
            )
        if k > 0 and any(name.endswith("_boundary") for name in vars(layer) | layer._modules):
            raise CaptureSetupError(
                f"eyas: {type(layer).__name__} keeps the residual stream outside its layers and the model has no "
                f"set_eagle3_layers_to_capture: hidden state {k} cannot be captured here"
            )

        def hook(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if k not in self.active:
                return
            given = signature.bind_partial(*args, **kwargs).arguments
            states, residual = given["hidden_states"], given.get("residual")
            self._tapped[k] = states.clone() if residual is None else states + residual

        layer.register_forward_pre_hook(hook, with_kwargs=True)

    def _tap_norm(self, norm: Any, k: int) -> None:
        """Keep what enters the final norm: the fused norm answers with (normed, residual stream)."""

        def before(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            if len(given) == 1:
                self._tapped[k] = given[0].clone()

        def after(_: Any, __: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 1:
                self._tapped[k] = output[1].clone()  # a buffer that the server uses again

        norm.register_forward_pre_hook(before, with_kwargs=True)
        norm.register_forward_hook(after)


def set_and_read_back(model: Any, setter: Callable[[list[int]], None], layers: Sequence[int]) -> Any:
    """Make a model capture `layers` (our indices) and return the module that says so.

    Most setters take the layer whose output is wanted and add one; some shift by rules of their own. What counts is
    what stands there afterwards. Raises CaptureSetupError when it never equals `layers`.
    """
    seen = []
    for asked in ([k - 1 for k in layers], list(layers)):
        for module in model.modules():
            _mark(module, ())  # setters add marks, they take none away
        try:
            setter(asked)
        except (IndexError, ValueError, AssertionError) as error:
            seen.append(f"{asked} raised {type(error).__name__}: {error}")
            continue
        inner = next((m for m in model.modules() if _captured_by(m)), None)
        found = _captured_by(inner) if inner is not None else None
        if found == list(layers):
            return inner
        seen.append(f"{asked} became {found}")
    raise CaptureSetupError(
        f"eyas: {type(model).__name__}.set_eagle3_layers_to_capture does not give hidden states {list(layers)}: "
        + "; ".join(seen)
    )


def _captured_by(module: Any) -> list[int] | None:
    """The layers before which a module captures, in either of SGLang's two ways of saying it; marks are what counts."""
    marks = _marks(module)
    if any(mark is not None for mark in marks):
        return [i for i, mark in enumerate(marks) if mark] or None
    listed = getattr(module, "layers_to_capture", None)
    return sorted(int(k) for k in listed) if listed else None


def _capture_in(module: Any, layers: Sequence[int]) -> None:
    """Make a module that was set up capture before `layers`."""
    if hasattr(module, "layers_to_capture"):
        module.layers_to_capture = list(layers)
    _mark(module, layers)


def _marks(module: Any) -> list[bool | None]:
    layers = getattr(module, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return []
    return [getattr(layer, "_is_layer_to_capture", None) for layer in layers]


def _mark(module: Any, layers: Sequence[int]) -> None:
    if any(mark is not None for mark in _marks(module)):
        for i, layer in enumerate(module.layers):
            layer._is_layer_to_capture = i in layers


def layers_of(
    aux: Any,
    layers: Sequence[int],
    hidden_size: int,
    tapped: Mapping[int, torch.Tensor],
    by_setter: Sequence[int],
) -> dict[int, torch.Tensor]:
    """The states `[R, H]` by our index, from SGLang's list (or one packed tensor) and from our hooks."""
    if aux is None:
        given: list[torch.Tensor] = []
    elif isinstance(aux, torch.Tensor):
        given = list(torch.split(aux, hidden_size, dim=-1))
    else:
        given = list(aux)
    if len(given) != len(by_setter):
        raise ValueError(f"the model gave {len(given)} auxiliary states, {len(by_setter)} were asked for")
    states = dict(zip(by_setter, given, strict=True)) | dict(tapped)
    missing = [k for k in layers if k not in states]
    if missing:
        raise ValueError(f"no hidden state {missing} in this forward")
    return states


def decoder_layers(model: Any, num_layers: int) -> Any:
    """The list of decoder layers: the list of modules called `layers` that has so many; not a vision tower's."""
    lists = [
        (name, m) for name, m in model.named_modules() if name.split(".")[-1] == "layers" and hasattr(m, "__len__")
    ]
    fitting = [(name, m) for name, m in lists if len(m) == num_layers]
    if not fitting:
        found = ", ".join(f"{name} has {len(m)}" for name, m in lists) or "none"
        raise CaptureSetupError(f"eyas: no list of {num_layers} decoder layers in {type(model).__name__}: {found}")
    return min(fitting, key=lambda found: any(word in found[0] for word in ("vis", "audio", "encoder")))[1]


def _owner(model: Any, num_layers: int) -> Any:
    """The module that holds the decoder layers, and runs them."""
    layers = decoder_layers(model, num_layers)
    return next(module for module in model.modules() if module._modules.get("layers") is layers)


def final_norm(model: Any, num_layers: int) -> Any:
    """The norm beside the decoder layers."""
    layers = decoder_layers(model, num_layers)
    for module in model.modules():
        if getattr(module, "layers", None) is layers and getattr(module, "norm", None) is not None:
            return module.norm
    raise CaptureSetupError(
        f"eyas: no final norm found in {type(model).__name__}: its last layer's output cannot be captured"
    )


def is_prefill(batch: Any) -> bool:
    """Whether a batch extends sequences, and tells whose."""
    mode = getattr(batch, "forward_mode", None)
    return (
        mode is not None
        and bool(mode.is_extend())
        and bool(getattr(batch, "rids", None))
        and getattr(batch, "extend_seq_lens_cpu", None) is not None
    )


def names_of(batch: Any) -> list[RequestName | None]:
    """The requests of a batch that extends sequences, None for those that are not ours; empty for any other batch."""
    if not is_prefill(batch):
        return []
    return [RequestName.parse(rid) if isinstance(rid, str) else None for rid in batch.rids]
