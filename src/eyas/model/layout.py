"""How a drafter is written down for those who load it: names of weights, fields of config.json. Nothing is read here.

Two layouts: `engine`, which SGLang and vLLM load alike, and `speculators`, the project's own, which vLLM loads, too.
Letters: `H` the drafter's hidden size, `V` target vocabulary, `D` draft vocabulary, `k` hidden-state index.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch

import eyas
from eyas.errors import ConfigError
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

Dtype = Literal["float32", "bfloat16", "float16"]
WrittenLayout = Literal["engine", "speculators"]

SPECULATORS_VERSION = "0.9.0"
"""Of the project whose layout `speculators_config_of` writes."""


def stored_name(name: str, shape: DraftShape, layout: WrittenLayout = "engine") -> str:
    """A weight's name in a checkpoint, from our module's."""
    if shape.num_layers == 1 and layout == "engine":
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
    return re.sub(r"^aux_norms\.", "fc_norm.", name)


def our_name(stored: str) -> str:
    """Inverse of `stored_name`, for either layout."""
    name = re.sub(r"^midlayer\.", "layers.0.", stored)
    return re.sub(r"^fc_norm\.", "aux_norms.", name)


def weight_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Every weight of a drafter of this shape, by our name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Eagle3Draft(shape).named_parameters()}


def config_of(
    shape: DraftShape, *, target_config: Mapping[str, Any], dtype: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`config.json` of a drafter. Layer ids stand in it twice: `k` for vLLM, `k - 1` for SGLang.

    `norm_aux` and `carry_normed` are called `fc_norm` and `norm_output`, and the norms `fc_norm.{i}`, as in vLLM.
    `extra`, plain JSON, is kept under the key `eyas`. ConfigError for hidden-state index 0, the embeddings, which
    SGLang cannot name.
    """
    if min(shape.aux_layers) < 1:
        raise ConfigError(f"auxiliary layers {list(shape.aux_layers)}: index 0, the embeddings, has no name in SGLang")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": shape.target_hidden_size,
        "draft_vocab_size": shape.draft_vocab_size,
        LAYER_IDS: list(shape.aux_layers),
        "eagle_config": {LAYER_IDS: [k - 1 for k in shape.aux_layers], "use_aux_hidden_state": True},
        **_layer_config(shape, target_config=target_config, dtype=dtype),
        "eyas": _about(shape, extra),
    }
    if shape.norm_aux:
        config["fc_norm"] = True
    if shape.carry_normed:
        config["norm_output"] = True
    return config


def speculators_config_of(
    shape: DraftShape,
    *,
    target_config: Mapping[str, Any],
    dtype: str,
    num_draft_tokens: int,
    target_name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`config.json` in the speculators layout. Layer ids are `k`.

    There is no `model_type`, by whose absence vLLM knows the layout. `target_name`: what the target is loaded by; with
    it vLLM serves the drafter's directory alone. Every switch of the arithmetic stands there, also one that is off:
    vLLM takes an absent `norm_before_residual` for true, speculators for false. vLLM counts the auxiliary states by
    `num_aux_hidden_states` of the layer's configuration, or takes three.
    """
    layer = _layer_config(shape, target_config=target_config, dtype=dtype)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens, "verifier_accept_k": 1}
            ],
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(target_config.get("architectures") or []),
            },
        },
        "transformer_layer_config": layer | {"num_aux_hidden_states": shape.num_aux},
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        LAYER_IDS: list(shape.aux_layers),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": shape.norm_aux,
        "norm_output": shape.carry_normed,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "eyas": _about(shape, extra),
    }


def _layer_config(shape: DraftShape, *, target_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A Llama of the drafter's sizes; its rope in both spellings; begin and end tokens are the target's."""
    rope = dict(shape.rope)
    theta = rope.pop("rope_theta", 10000.0)
    tokens = {**target_config, **(target_config.get("text_config") or {})}
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": dict(shape.rope),
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return config | {name: tokens[name] for name in names if tokens.get(name) is not None}


def _about(shape: DraftShape, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "version": eyas.__version__,
        "aux_layers": list(shape.aux_layers),
        "norm_aux": shape.norm_aux,
        "carry_normed": shape.carry_normed,
        "extra": dict(extra or {}),
    }
