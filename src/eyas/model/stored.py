"""A drafter's checkpoint as it lies on disk, ours or another project's: is everything there, and what does it mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import ConfigError
from eyas.model.create import plain_rope, standard_rope
from eyas.model.layout import CONFIG, EMBEDDING, LAYER_IDS, our_name, weight_shapes
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap

Layout = Literal["eyas", "engine", "speculators"]

# Settings of other projects' drafters that change the arithmetic: the values under which it is ours.
_OUR_ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "logit_scale": (1,),
    "partial_rotary_factor": (1,),
    # In ModelOpt's eagle_config.
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
}
OTHER_LAYER_IDS = "aux_hidden_states_layer_ids"
"""AngelSlim's name for the layers: the output of layer `j`, which is hidden-state index `j + 1`."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says beside its weights."""

    layout: Layout
    dtype: str
    """Of its weights: `bfloat16`, `float16` or `float32`."""
    has_embedding: bool
    config: Mapping[str, Any]
    """Its config.json as it stands."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What `save` was given as `extra`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint whose names and shapes have been checked; values are read one by one."""

    directory: Path
    shape: DraftShape
    vocab_map: VocabMap
    info: CheckpointInfo
    tensors: Mapping[str, tuple[Path, str]]
    """By our name: in which file, under which name."""

    def read(self, name: str) -> torch.Tensor:
        file, stored = self.tensors[name]
        tensor = _read(file, stored)
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"draft {self.directory}: '{stored}' holds values that are not finite numbers")
        return tensor


def open_stored(directory: Path, aux_layers: Sequence[int] | None) -> Stored:
    config = _read_config(directory)
    found = _find_tensors(directory)
    dtypes = {dtype for name, (_, _, _, dtype) in found.items() if name not in ("d2t", "t2d")}
    layout, shape = _shape_of(directory, config, found, aux_layers)
    wanted = weight_shapes(shape)

    problems = []
    optional = set() if shape.own_embedding else {EMBEDDING}
    missing = sorted(wanted.keys() - found.keys() - optional)
    unknown = sorted(found[name][1] for name in found.keys() - wanted.keys() - {"d2t", "t2d"})
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unknown:
        problems.append(f"unknown {', '.join(unknown)}")
    for name in sorted(wanted.keys() & found.keys()):
        _, stored, there, _ = found[name]
        if there != wanted[name]:
            problems.append(f"'{stored}' is {list(there)}, config.json wants {list(wanted[name])}")
    if not dtypes <= {"F32", "F16", "BF16"}:
        problems.append(f"weights in {', '.join(sorted(dtypes))}; F32, F16 or BF16 can be read")
    if problems:
        raise ConfigError(f"draft {directory}: its tensors are not those of its config.json: {'; '.join(problems)}")

    extra = _mapping(directory, _mapping(directory, config, "eyas"), "extra")
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[found["fc.weight"][3]]
    info = CheckpointInfo(
        layout=layout,
        dtype=dtype,
        has_embedding=EMBEDDING in found,
        config=config,
        extra=extra,
    )
    vocab_map = _vocab_map(directory, shape, found)
    tensors = {name: (file, stored) for name, (file, stored, _, _) in found.items()}
    return Stored(directory, shape, vocab_map, info, tensors)


_Found = dict[str, tuple[Path, str, tuple[int, ...], str]]
"""By our name: file, name there, shape, dtype as safetensors spells it."""


def _find_tensors(directory: Path) -> _Found:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"draft {directory}: no *.safetensors weights; other formats (.bin, .pt) are not read")
    found: _Found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as f:
                for stored in f.keys():  # noqa: SIM118 - not a mapping
                    name = our_name(stored)
                    if name in found:
                        raise ConfigError(f"draft {directory}: '{stored}' and '{found[name][1]}' are the same weight")
                    part = f.get_slice(stored)
                    found[name] = (file, stored, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"draft {file}: not a complete safetensors file: {error}") from None
    return found


def _read(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as f:
            tensor: torch.Tensor = f.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"draft {file}: {error}") from None
    return tensor


_WHERE_GIVEN = (
    "as hidden-state indices, k = after k decoder layers (--aux-layers, evaluate.aux_layers or "
    "draft.start_from_aux_layers)"
)


def _shape_of(
    directory: Path, config: Mapping[str, Any], found: _Found, aux_layers: Sequence[int] | None
) -> tuple[Layout, DraftShape]:
    inner = config.get("transformer_layer_config")
    layout: Layout = "speculators" if "speculators_model_type" in config else "eyas" if "eyas" in config else "engine"
    if layout == "speculators" and not isinstance(inner, Mapping):
        raise ConfigError(f"draft {directory}: {CONFIG} has speculators_model_type but no transformer_layer_config")
    layer: Mapping[str, Any] = inner if isinstance(inner, Mapping) and layout == "speculators" else config
    _check_arithmetic(directory, config, layer, layout)
    aux = _aux_layers(directory, config, aux_layers)

    def size(name: str, default: int | None = None) -> int:
        value = layer.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"draft {directory}: {CONFIG} has {name} = {value!r}, a positive number is wanted")
        return value

    hidden, heads, vocab_size = size("hidden_size"), size("num_attention_heads"), size("vocab_size")
    switches = {**config, **_mapping(directory, config, "eagle_config")}
    told = _mapping(directory, layer, "rope_parameters").get("rope_theta")
    if None not in (told, layer.get("rope_theta")) and told != layer["rope_theta"]:
        raise ConfigError(
            f"draft {directory}: {CONFIG} has rope_theta = {layer['rope_theta']} and {told} in rope_parameters; "
            "engines read one or the other: correct it"
        )
    try:
        rope = plain_rope(standard_rope(layer))
    except ConfigError as error:
        raise ConfigError(f"draft {directory}: {error}") from None
    try:
        shape = DraftShape(
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            vocab_size=vocab_size,
            aux_layers=aux,
            hidden_size=hidden,
            draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers", 1),
            rms_norm_eps=float(layer.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=size("max_position_embeddings", 2048),
            rope=rope,
            norm_aux=bool(switches.get("fc_norm")),
            carry_normed=bool(switches.get("norm_output")),
        )
    except ValueError as error:
        raise ConfigError(f"draft {directory}: {CONFIG} asks for {error}") from None
    return layout, shape


def _check_arithmetic(directory: Path, config: Mapping[str, Any], layer: Mapping[str, Any], layout: Layout) -> None:
    rope = _mapping(directory, layer, "rope_parameters") or _mapping(directory, layer, "rope_scaling")
    settings = {**rope, **layer, **config, **_mapping(directory, config, "eagle_config")}
    unknown = [
        f"{name} = {settings[name]}"
        for name, ours in _OUR_ARITHMETIC.items()
        if settings.get(name) is not None and settings[name] not in ours
    ]
    kinds = set(settings.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        unknown.append(f"layer_types with {', '.join(sorted(kinds))}")
    if layout == "speculators" and config.get("norm_before_residual") is None:
        unknown.append("no norm_before_residual, which vLLM then takes for true and speculators for false")
    if unknown:
        raise ConfigError(f"draft {directory}: computes in a way that is not known here: {', '.join(unknown)}")


def _aux_layers(directory: Path, config: Mapping[str, Any], given: Sequence[int] | None) -> tuple[int, ...]:
    """Hidden-state indices from keys that mark their numbering; where these disagree, or there are none, from `given`.

    What is given must be what one of the keys says, if there are any.
    """
    inner = _mapping(directory, config, "eagle_config").get(LAYER_IDS)
    keys: dict[str, Any] = {
        LAYER_IDS: (config.get(LAYER_IDS), 0),
        f"eagle_config.{LAYER_IDS} + 1": (inner, 1),
        f"{OTHER_LAYER_IDS} + 1": (config.get(OTHER_LAYER_IDS), 1),
    }
    told = {name: [j + shift for j in _ids(directory, name, ids)] for name, (ids, shift) in keys.items() if ids}
    readings = {tuple(ids) for ids in told.values()}
    said = "; ".join(f"{name} {ids}" for name, ids in told.items())
    if given is not None:
        if readings and tuple(given) not in readings:
            raise ConfigError(f"draft {directory}: layers disagree: given {list(given)}; {said}")
        layers = tuple(given)
    elif not readings:
        raise ConfigError(
            f"draft {directory}: {CONFIG} does not say which layers of the target it was trained on; give aux_layers "
            f"{_WHERE_GIVEN}"
        )
    elif len(readings) > 1:
        raise ConfigError(f"draft {directory}: layers disagree: {said}; give aux_layers {_WHERE_GIVEN}")
    else:
        layers = readings.pop()
    if list(layers) != sorted(set(layers)) or min(layers, default=-1) < 0:
        raise ConfigError(f"draft {directory}: layers {list(layers)} are not ascending hidden-state indices")
    return layers


def _mapping(directory: Path, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"draft {directory}: {CONFIG} has {name} = {value!r}, an object is wanted")
    return value


def _ids(directory: Path, name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(j, int) and not isinstance(j, bool) for j in value):
        raise ConfigError(f"draft {directory}: {name.removesuffix(' + 1')} is {value!r}, a list of numbers is wanted")
    return value


def _vocab_map(directory: Path, shape: DraftShape, found: _Found) -> VocabMap:
    if "d2t" not in found:
        if shape.draft_vocab_size != shape.vocab_size:
            raise ConfigError(
                f"draft {directory}: no 'd2t', but a draft vocabulary of {shape.draft_vocab_size} of {shape.vocab_size}"
            )
        return VocabMap.full(shape.vocab_size)
    d2t = _read(found["d2t"][0], "d2t").to(torch.int64)
    ids = d2t + torch.arange(len(d2t))
    if len(d2t) != shape.draft_vocab_size or int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size:
        raise ConfigError(
            f"draft {directory}: 'd2t' holds {len(d2t)} offsets to tokens {int(ids.min())}..{int(ids.max())}; "
            f"{shape.draft_vocab_size} to tokens of 0..{shape.vocab_size - 1} wanted"
        )
    t2d = _read(found["t2d"][0], "t2d") if "t2d" in found else VocabMap.of(ids, shape.vocab_size).t2d
    try:
        if len(t2d) != shape.vocab_size:
            raise ValueError(f"'t2d' holds {len(t2d)} tokens of {shape.vocab_size}")
        return VocabMap(d2t, t2d)
    except ValueError as error:
        raise ConfigError(f"draft {directory}: {error}") from None


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"draft {directory}: no {CONFIG}; is this the directory of a drafter?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft {file}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"draft {file}: holds a JSON {type(value).__name__}, not an object")
    return value
