"""The drafter on disk, as serving engines load it: `model.safetensors` and `config.json`. Reads other layouts too.

Letters: `H` the drafter's hidden size, `V` target vocabulary, `D` draft vocabulary, `k` hidden-state index.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import eyas
from eyas.errors import ConfigError, ExportError, OutOfSpace
from eyas.files import fsync_path
from eyas.model.create import check_set, plain_rope, standard_rope
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.target.head import TargetHead

logger = logging.getLogger(__name__)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

Layout = Literal["eyas", "engine", "speculators"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Settings of other projects' drafters that change the arithmetic in a way that ours does not know.
_UNKNOWN_ARITHMETIC = ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias")


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


def save(
    draft: Eagle3Draft,
    vocab_map: VocabMap,
    directory: Path,
    *,
    target_config: Mapping[str, Any],
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    with_embedding: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the drafter as a directory that SGLang and vLLM load; the directory appears complete or not at all.

    The embedding is left out, and the engine shares the target's, unless the drafter has one of its own or
    `with_embedding` asks for it. `target_config` is the target's config.json: begin and end tokens come from it.
    `extra`, plain JSON, is kept under the key `eyas`. ExportError when a weight is not a finite number in `dtype`,
    when the vocabulary does not fit or `directory` holds something; OutOfSpace when the disk is full.
    """
    shape = draft.shape
    if (vocab_map.draft_vocab_size, vocab_map.vocab_size) != (shape.draft_vocab_size, shape.vocab_size):
        raise ExportError(
            f"{directory}: a map of {vocab_map.draft_vocab_size} of {vocab_map.vocab_size} tokens does not fit a "
            f"drafter of {shape.draft_vocab_size} of {shape.vocab_size}"
        )
    tensors = {
        _stored_name(name, shape): parameter.detach().to("cpu", _DTYPES[dtype]).contiguous()
        for name, parameter in draft.named_parameters()
        if name != EMBEDDING or with_embedding or shape.own_embedding
    }
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ExportError(f"{directory}: not written: not all values are finite in {dtype}: {', '.join(bad)}")
    if not vocab_map.is_full:
        tensors |= {"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}
    config = config_of(shape, target_config=target_config, dtype=dtype, extra=extra)
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    _write_directory(directory, tensors, text)


def config_of(
    shape: DraftShape, *, target_config: Mapping[str, Any], dtype: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`config.json` of a drafter. Layer ids stand in it twice: `k` for vLLM, `k - 1` for SGLang.

    `norm_aux` and `carry_normed` are called `fc_norm` and `norm_output`, and the norms `fc_norm.{i}`, as in vLLM.
    ConfigError for hidden-state index 0, the embeddings, which SGLang cannot name.
    """
    if min(shape.aux_layers) < 1:
        raise ConfigError(f"auxiliary layers {list(shape.aux_layers)}: index 0, the embeddings, has no name in SGLang")
    rope = dict(shape.rope)
    theta = rope.pop("rope_theta", 10000.0)
    tokens = {**target_config, **(target_config.get("text_config") or {})}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.target_hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": dict(shape.rope),
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        LAYER_IDS: list(shape.aux_layers),
        "eagle_config": {LAYER_IDS: [k - 1 for k in shape.aux_layers], "use_aux_hidden_state": True},
        "eyas": {
            "version": eyas.__version__,
            "aux_layers": list(shape.aux_layers),
            "norm_aux": shape.norm_aux,
            "carry_normed": shape.carry_normed,
            "extra": dict(extra or {}),
        },
    }
    config |= {name: tokens[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in tokens}
    if shape.norm_aux:
        config["fc_norm"] = True
    if shape.carry_normed:
        config["norm_output"] = True
    return config


def load(
    directory: Path,
    *,
    target: Path | None = None,
    aux_layers: Sequence[int] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Eagle3Draft, VocabMap, CheckpointInfo]:
    """A drafter in float32 on the CPU, its vocabulary and what else its checkpoint says.

    Understood: what `save` writes, what SGLang and vLLM load (`midlayer.` or `layers.0.`), and the speculators layout,
    in float32, bfloat16 or float16. Layer ids are read where their numbering is certain: a top-level key holds `k`,
    one inside `eagle_config` holds `k - 1`; without either, `aux_layers` (`k`) must be given. An embedding that the
    checkpoint lacks comes from `target`, or stays unset without one. ConfigError, naming names, for tensors that are
    missing, unknown or of another shape, for values that are not numbers, for settings that change the arithmetic.
    """
    stored = _open(directory, aux_layers)
    draft = Eagle3Draft(stored.shape)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name in stored.tensors:
                parameter.copy_(stored.read(name))
    if not stored.info.has_embedding:
        if target is None:
            return draft, stored.vocab_map, stored.info
        embedding = TargetHead.load(target, trust_remote_code=trust_remote_code).embedding()
        if embedding.shape != draft.embed_tokens.weight.shape:
            raise ConfigError(
                f"draft {directory}: target {target} has an embedding of {list(embedding.shape)}, wanted "
                f"{list(draft.embed_tokens.weight.shape)}"
            )
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(embedding)
    check_set(draft, f"draft {directory}")
    return draft, stored.vocab_map, stored.info


@torch.no_grad()
def warm_start(
    draft: Eagle3Draft, vocab_map: VocabMap, directory: Path, *, aux_layers: Sequence[int] | None = None
) -> int:
    """Overwrite the weights of an initialised `draft` by those of a checkpoint of the same shape.

    The draft vocabulary may be another one: rows of the head are found by the target's token, and the number of tokens
    that the checkpoint did not have is returned; their rows stay as they were, as does an embedding that is the
    target's. `aux_layers` as in `load`. ConfigError, naming every difference, when the shapes differ.
    """
    check_set(draft, "initialise the drafter before a warm start")
    stored = _open(directory, aux_layers)
    ours, theirs = draft.shape, stored.shape
    sizes = (
        "target_hidden_size vocab_size aux_layers hidden_size num_heads num_kv_heads head_dim intermediate_size "
        "num_layers norm_aux carry_normed"
    )
    differ = [
        f"{name} is {getattr(theirs, name)} there, {getattr(ours, name)} here"
        for name in sizes.split()
        if getattr(theirs, name) != getattr(ours, name)
    ]
    if differ:
        raise ConfigError(f"draft {directory}: cannot warm start a drafter of another shape: {'; '.join(differ)}")
    for name in ("rope", "rms_norm_eps"):
        if getattr(theirs, name) != getattr(ours, name):
            logger.warning(
                "draft %s: trained with %s %s, goes on with %s",
                directory,
                name,
                getattr(theirs, name),
                getattr(ours, name),
            )
    for name, parameter in draft.named_parameters():
        if name == HEAD or (name == EMBEDDING and not ours.own_embedding):
            continue
        parameter.copy_(stored.read(name))
    old_ids = stored.vocab_map.draft_ids[vocab_map.target_ids]  # [D], -1 where the checkpoint has no such token
    known = old_ids >= 0
    head = draft.lm_head.weight
    head[known.to(head.device)] = stored.read(HEAD)[old_ids[known]].to(head.device, head.dtype)
    check_set(draft, f"draft {directory}")
    return int((~known).sum())


@dataclass(frozen=True, slots=True)
class _Stored:
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


def _open(directory: Path, aux_layers: Sequence[int] | None) -> _Stored:
    config = _read_config(directory)
    found = _find_tensors(directory)
    dtypes = {dtype for name, (_, _, _, dtype) in found.items() if name not in ("d2t", "t2d")}
    layout, shape = _shape_of(directory, config, found, aux_layers)
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in Eagle3Draft(shape).named_parameters()}

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

    own = config.get("eyas")
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[found["fc.weight"][3]]
    info = CheckpointInfo(
        layout=layout,
        dtype=dtype,
        has_embedding=EMBEDDING in found,
        config=config,
        extra=own.get("extra", {}) if isinstance(own, dict) else {},
    )
    vocab_map = _vocab_map(directory, shape, found)
    tensors = {name: (file, stored) for name, (file, stored, _, _) in found.items()}
    return _Stored(directory, shape, vocab_map, info, tensors)


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
                    name = _our_name(stored)
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


def _stored_name(name: str, shape: DraftShape) -> str:
    if shape.num_layers == 1:
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
    return re.sub(r"^aux_norms\.", "fc_norm.", name)


def _our_name(stored: str) -> str:
    name = re.sub(r"^midlayer\.", "layers.0.", stored)
    return re.sub(r"^fc_norm\.", "aux_norms.", name)


def _shape_of(
    directory: Path, config: Mapping[str, Any], found: _Found, aux_layers: Sequence[int] | None
) -> tuple[Layout, DraftShape]:
    inner = config.get("transformer_layer_config")
    layout: Layout = "speculators" if "speculators_model_type" in config else "eyas" if "eyas" in config else "engine"
    if layout == "speculators" and not isinstance(inner, Mapping):
        raise ConfigError(f"draft {directory}: {CONFIG} has speculators_model_type but no transformer_layer_config")
    layer: Mapping[str, Any] = inner if isinstance(inner, Mapping) and layout == "speculators" else config
    _check_arithmetic(directory, config, layer)
    aux = _aux_layers(directory, config, aux_layers)

    def size(name: str, default: int | None = None) -> int:
        value = layer.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"draft {directory}: {CONFIG} has {name} = {value!r}, a positive number is wanted")
        return value

    hidden, heads, vocab_size = size("hidden_size"), size("num_attention_heads"), size("vocab_size")
    switches = {**config, **(config.get("eagle_config") or {})}
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


def _check_arithmetic(directory: Path, config: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    settings = {**layer, **config, **(config.get("eagle_config") or {})}
    unknown = [f"{name} = {settings[name]}" for name in _UNKNOWN_ARITHMETIC if settings.get(name)]
    if settings.get("hidden_act", "silu") != "silu":
        unknown.append(f"hidden_act = {settings['hidden_act']}")
    kinds = set(settings.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        unknown.append(f"layer_types with {', '.join(sorted(kinds))}")
    if unknown:
        raise ConfigError(f"draft {directory}: computes in a way that is not known here: {', '.join(unknown)}")


def _aux_layers(directory: Path, config: Mapping[str, Any], given: Sequence[int] | None) -> tuple[int, ...]:
    """Hidden-state indices from keys that mark their numbering, or from the caller; all that there are must agree."""
    inner = (config.get("eagle_config") or {}).get(LAYER_IDS)
    told: dict[str, Any] = {
        "given": given,
        LAYER_IDS: config.get(LAYER_IDS),
        f"eagle_config.{LAYER_IDS} + 1": None if inner is None else [j + 1 for j in inner],
    }
    told = {name: list(ids) for name, ids in told.items() if ids}
    if not told:
        raise ConfigError(
            f"draft {directory}: {CONFIG} does not say which layers of the target it was trained on; give aux_layers "
            "as hidden-state indices (k = after k decoder layers)"
        )
    first = next(iter(told.values()))
    if any(ids != first for ids in told.values()):
        raise ConfigError(
            f"draft {directory}: layers disagree: {'; '.join(f'{name} {ids}' for name, ids in told.items())}"
        )
    if first != sorted(set(first)) or first[0] < 0:
        raise ConfigError(f"draft {directory}: layers {first} are not ascending hidden-state indices")
    return tuple(first)


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


def _write_directory(directory: Path, tensors: Mapping[str, torch.Tensor], config: str) -> None:
    """Both files in a hidden directory beside `directory`, flushed to disk, which is then renamed."""
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        save_file(dict(tensors), temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(config, encoding="utf-8")
        for path in (temporary / WEIGHTS, temporary / CONFIG, temporary):
            fsync_path(path)
        # Over nothing or over an empty directory; anything else is refused by the system call itself.
        temporary.rename(directory)
        fsync_path(directory.parent)
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise OutOfSpace(f"{directory}: no space left while writing the checkpoint", path=directory) from None
        if number in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ExportError(f"{directory}: exists already; give another directory or remove it") from None
        raise ExportError(f"{directory}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
