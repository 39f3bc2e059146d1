"""A drafter from nothing but its target: the sizes that fit, and the weights from which training starts.

Letters: `H` the drafter's hidden size, `V` target vocabulary, `D` draft vocabulary, `A` auxiliary layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eyas.errors import ConfigError
from eyas.model.eagle3 import Eagle3Draft, rotary
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.records import CaptureSpec, digest_bytes
from eyas.target.head import TargetHead

MLA_HEAD_DIM = 128
MLA_KV_HEADS = 8
"""Heads of a drafter whose target compresses keys and values (MLA): its own sizes have no meaning without that."""

BRANCH_SCALE = 0.1
"""Deviation of `o_proj` and `down_proj` as a share of the ordinary one: the layer starts near the identity."""


_ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
)
_CHUNK_ROWS = 8192
"""Rows of a `[V, H]` matrix that are held in a wider dtype at one time."""


def draft_shape(
    config: Mapping[str, Any],
    spec: CaptureSpec,
    *,
    draft_vocab_size: int | None = None,
    num_layers: int = 1,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    norm_aux: bool = False,
    carry_normed: bool = False,
) -> DraftShape:
    """The drafter's shape for the target of `config` (its config.json) and the states of `spec`.

    What is None comes from the target, from the text part where it is multimodal; `draft_vocab_size` None is the whole
    vocabulary. With another hidden size the head size stays, and heads and MLP shrink or grow along. Where the target
    compresses its keys and values (MLA) heads are of 128, eight of them for keys and values. ConfigError, one line,
    when something cannot be known or does not fit together.
    """
    text = _text_config(config)
    target_hidden = _size(text, "hidden_size")
    vocab_size = _size(text, "vocab_size")
    for what, there, here in (
        ("hidden_size", target_hidden, spec.hidden_size),
        ("vocab_size", vocab_size, spec.vocab_size),
        ("num_hidden_layers", _size(text, "num_hidden_layers"), spec.num_layers),
    ):
        if there != here:
            raise ConfigError(f"the target's {what} is {there}, its captured states say {here}: not the same target")

    hidden = hidden_size or target_hidden
    if getattr(text, "kv_lora_rank", None):
        d = head_dim or math.gcd(MLA_HEAD_DIM, hidden)
        heads = num_heads or hidden // d
        kv_heads = num_kv_heads or (MLA_KV_HEADS if heads % MLA_KV_HEADS == 0 else heads)
    else:
        target_heads = _size(text, "num_attention_heads")
        d = head_dim or getattr(text, "head_dim", None) or target_hidden // target_heads
        heads = num_heads or (target_heads if hidden == target_hidden else max(1, hidden // d))
        target_kv_heads = getattr(text, "num_key_value_heads", None) or target_heads
        kv_heads = num_kv_heads or (target_kv_heads if heads % target_kv_heads == 0 else heads)
    if intermediate_size is None:
        # The same proportion to the hidden size, to the next multiple of eight.
        intermediate_size = _size(text, "intermediate_size")
        if hidden != target_hidden:
            intermediate_size = -(-intermediate_size * hidden // (8 * target_hidden)) * 8
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    eps = next((float(value) for name in names if (value := getattr(text, name, None))), 1e-5)
    try:
        shape = DraftShape(
            target_hidden_size=target_hidden,
            vocab_size=vocab_size,
            aux_layers=spec.aux_layers,
            hidden_size=hidden,
            draft_vocab_size=draft_vocab_size or vocab_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=d,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
            rms_norm_eps=eps,
            max_position_embeddings=_size(text, "max_position_embeddings"),
            rope=plain_rope(_rope_of(text)),
            norm_aux=norm_aux,
            carry_normed=carry_normed,
        )
        rotary(shape)
    except (ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise ConfigError(f"no drafter fits: {_one_line(error)}") from None
    return shape


def plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a target's rope parameters that a Llama layer understands everywhere.

    Left out, so that training and every engine compute the same: `mscale` and `mscale_all_dim` of MLA targets, which
    transformers would turn into another attention factor than engines do for a Llama drafter; sections of positions in
    images, which text does not have; a share of rotated channels: the drafter rotates all of its own.
    """
    plain = {key: rope[key] for key in _ROPE_KEYS if rope.get(key) is not None}
    if plain.get("rope_type") == "mrope":
        plain["rope_type"] = "default"
    return plain


def standard_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a config.json, whether it spells them so or as `rope_theta` and `rope_scaling`.

    ConfigError when it has none of these.
    """
    names = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    found = {name: config[name] for name in names if config.get(name) is not None}
    if not found.keys() - {"max_position_embeddings"}:
        raise ConfigError("config.json has neither rope_parameters nor rope_theta: its rotary embedding is not known")
    return dict(LlamaConfig(**found).rope_parameters or {})


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a drafter must fit, of a target's config.json, or of the text part where it is multimodal."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TargetSizes:
        """ConfigError where one of them is not there."""
        text = _text_config(config)
        return cls(*(_size(text, field.name) for field in fields(cls)))


def _text_config(config: Mapping[str, Any]) -> Any:
    """The text part of a config.json with its family's defaults, or as it stands where transformers has no such."""
    model_type = str(config.get("model_type", ""))
    if model_type in CONFIG_MAPPING:
        values = {name: value for name, value in config.items() if name != "model_type"}
        try:
            return AutoConfig.for_model(model_type, **values).get_text_config()
        except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
            raise ConfigError(f"'{model_type}': transformers cannot use its config.json: {_one_line(error)}") from None
    nested = config.get("text_config")
    return _text_config(nested) if isinstance(nested, Mapping) else SimpleNamespace(**config)


def _one_line(error: Exception) -> str:
    """The last line of an error's text, where transformers says what is wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _size(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = getattr(text, "model_type", "config.json")
        raise ConfigError(f"'{what}': the target's {name} is {value!r}, one positive number is wanted")
    return value


def _rope_of(text: Any) -> Mapping[str, Any]:
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        return standard_rope(vars(text))
    if all(isinstance(value, Mapping) for value in rope.values()):
        # Parameters per kind of layer: the drafter attends to everything, as the target's full attention does.
        kinds = list(rope)
        kind = kinds[0] if len(kinds) == 1 else "full_attention"
        if kind not in rope:
            raise ConfigError(
                f"rope parameters for {', '.join(kinds)}, none for full_attention: which is the drafter's?"
            )
        return dict(rope[kind])
    return dict(rope)


@torch.no_grad()
def initialise(
    draft: Eagle3Draft,
    target: Path,
    vocab_map: VocabMap,
    seed: int,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Set every weight of `draft`, in place, from the target and from `seed`; the same on every machine and rank.

    - Embedding: the target's, bit for bit. Head: the target's rows of the draft vocabulary, times its logit scale; a
      bias or a soft-cap is left out. Final norm: what the target's multiplies by. Other norms: 1.
    - Attention and MLP: normal, `1/sqrt(fan in)`, so that each keeps the size of what it reads; the ways back into the
      residual stream a tenth of that. `fc` likewise, but the deepest auxiliary state enters the feature as it is: it
      lies in the basis in which the target's head and embedding mean something. The held-out loss is then a tenth
      lower after the same steps, with SmolLM2's answers (docs/LOG.md).

    With another hidden size `H` everything of the target is seen along the `H` directions in which its embedding varies
    most (`principal_directions`); the final norm's weights go into the head then. ConfigError when the target or the
    vocabulary has other sizes than the draft, or when a weight is not a number in the end.
    """
    shape = draft.shape
    head = TargetHead.load(target, trust_remote_code=trust_remote_code)
    _check_sizes(shape, head, vocab_map)
    embedding = head.embedding()
    rows = head.rows(vocab_map.target_ids)
    if tuple(embedding.shape) != (shape.vocab_size, shape.target_hidden_size):
        raise ConfigError(
            f"target {target}: its embedding is {list(embedding.shape)}, the drafter wants "
            f"{[shape.vocab_size, shape.target_hidden_size]}"
        )
    norm_scale, logit_scale = head.norm_scale(), head.logit_map.scale
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        elif name not in ("embed_tokens.weight", "lm_head.weight"):
            parameter.copy_(_normal(name, parameter, seed))
    if shape.own_embedding:
        basis = principal_directions(embedding, shape.hidden_size).float()
        _copy_times(draft.embed_tokens.weight, embedding, basis)
        _copy_times(draft.lm_head.weight, rows, norm_scale[:, None] * logit_scale * basis)
    else:
        basis = torch.eye(shape.hidden_size)
        draft.embed_tokens.weight.copy_(embedding)
        draft.lm_head.weight.copy_(rows).mul_(logit_scale)
        draft.norm.weight.copy_(norm_scale)
    draft.fc.weight[:, -shape.target_hidden_size :] = basis.T.to(draft.fc.weight)
    check_set(draft, f"target {target}")


def check_set(draft: Eagle3Draft, origin: str) -> None:
    """ConfigError, naming `origin` and the weights, when one of them was never set or is not a number."""
    unset = draft.unset()
    if unset:
        raise ConfigError(
            f"{origin}: {len(unset)} weights of the drafter are not set or not numbers: {', '.join(unset)}"
        )


def principal_directions(matrix: torch.Tensor, num_directions: int) -> torch.Tensor:
    """`[columns, num_directions]` float64: orthonormal directions along which the rows of `matrix` are largest.

    Eigenvectors of the Gram matrix (no mean is taken off), the largest first, computed on the CPU in float64, each with
    its largest entry positive; minutes for a width of several thousand. Zero columns follow where more directions are
    asked for than there are columns.
    """
    width = matrix.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64)
    for rows in torch.split(matrix, _CHUNK_ROWS):
        wide = rows.double()
        gram.addmm_(wide.T, wide)
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :num_directions]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return nn.functional.pad(vectors * largest.sign(), (0, max(0, num_directions - width)))


def _copy_times(out: torch.Tensor, rows: torch.Tensor, factor: torch.Tensor) -> None:
    """`out = rows @ factor`, a few rows at a time."""
    for part, stored in zip(torch.split(out, _CHUNK_ROWS), torch.split(rows, _CHUNK_ROWS), strict=True):
        part.copy_(stored.float() @ factor)


def _normal(name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal values for the weight of this name: each weight has a stream of its own, and no thread count matters."""
    std = parameter.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std *= BRANCH_SCALE
    stream = np.random.default_rng([seed, int(digest_bytes(name.encode()), 16)])
    values = stream.standard_normal(tuple(parameter.shape), dtype=np.float32)
    return torch.from_numpy(values).mul_(std)


def _check_sizes(shape: DraftShape, head: TargetHead, vocab_map: VocabMap) -> None:
    for what, there, here in (
        ("vocabulary", head.vocab_size, shape.vocab_size),
        ("hidden size", head.hidden_size, shape.target_hidden_size),
        ("vocabulary in the vocabulary map", vocab_map.vocab_size, shape.vocab_size),
        ("draft vocabulary", vocab_map.draft_vocab_size, shape.draft_vocab_size),
    ):
        if there != here:
            raise ConfigError(f"{what} is {there}, the drafter's shape says {here}")


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of a drafter, or bytes of them, by group: `embed_tokens`, `fc`, `layers`, `lm_head`, norms."""

    trainable: Mapping[str, int]
    frozen: Mapping[str, int]

    @property
    def num_trainable(self) -> int:
        return sum(self.trainable.values())

    @property
    def num_frozen(self) -> int:
        return sum(self.frozen.values())


def num_parameters(shape: DraftShape) -> ParameterCount:
    """How many numbers a drafter of this shape has, counted on a skeleton without memory."""
    with torch.device("meta"):
        draft = Eagle3Draft(shape)
    trainable: dict[str, int] = {}
    frozen: dict[str, int] = {}
    for name, parameter in draft.named_parameters():
        group = trainable if parameter.requires_grad else frozen
        key = name.partition(".")[0]
        group[key] = group.get(key, 0) + parameter.numel()
    return ParameterCount(trainable, frozen)
