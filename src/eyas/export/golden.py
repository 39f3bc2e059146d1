"""What must stand in an export, name by name: the list that an audit holds a directory against.

Letters: `H` the drafter's hidden size, `D` draft vocabulary, `V` target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.model.layout import EMBEDDING, LAYER_IDS, WrittenLayout, stored_name, weight_shapes
from eyas.model.shape import DraftShape

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""As safetensors spells them."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype, as safetensors spells it, and shape, by name."""


def tensors(shape: DraftShape, layout: WrittenLayout, dtype: str, embedding_dtype: str | None) -> Tensors:
    """Every tensor of the weight file. `embedding_dtype`: of the target's embedding, None where it is not written."""
    found: Tensors = {}
    for name, size in weight_shapes(shape).items():
        if name == EMBEDDING and not shape.own_embedding:
            if embedding_dtype is not None:
                found[name] = (embedding_dtype, size)
        else:
            found[stored_name(name, shape, layout)] = (DTYPES[dtype], size)
    if shape.draft_vocab_size < shape.vocab_size:
        found |= {"d2t": ("I64", (shape.draft_vocab_size,)), "t2d": ("BOOL", (shape.vocab_size,))}
    return found


def tensor_faults(found: Tensors, wanted: Tensors) -> list[str]:
    """One line for each tensor that is missing, not wanted, of another shape or another dtype."""
    faults = [f"'{name}' is missing" for name in wanted if name not in found]
    for name, (dtype, size) in found.items():
        if name not in wanted:
            faults.append(f"'{name}' does not belong there")
            continue
        wanted_dtype, wanted_size = wanted[name]
        if size != wanted_size:
            faults.append(f"'{name}' is {list(size)}; {list(wanted_size)} wanted")
        if dtype != wanted_dtype:
            faults.append(f"'{name}' is {dtype}; {wanted_dtype} wanted")
    return faults


def config_faults(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each field that is missing, not wanted or of another value; `eyas` is looked at for layers alone."""
    here, there = dict(_flat(_told(found))), dict(_flat(_told(wanted)))
    faults = [f"no '{name}'; {_shown(name, value)} wanted" for name, value in there.items() if name not in here]
    for name, value in here.items():
        if name not in there:
            faults.append(f"'{name}' does not belong there")
        elif value != there[name] or isinstance(value, bool) != isinstance(there[name], bool):
            faults.append(f"'{name}' is {value!r}; {_shown(name, there[name])} wanted")
    return faults


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    own = config.get("eyas")
    told = {name: value for name, value in config.items() if name != "eyas"}
    return told | ({"eyas": {"aux_layers": own.get("aux_layers")}} if isinstance(own, Mapping) else {})


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in value.items():
        if isinstance(one, Mapping) and one:
            yield from _flat(one, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", one


def _shown(name: str, value: Any) -> str:
    if name == f"eagle_config.{LAYER_IDS}":
        return f"{value!r}, one less than the hidden-state indices, as SGLang counts,"
    if name == LAYER_IDS:
        return f"{value!r}, hidden-state indices, as vLLM counts,"
    return repr(value)
