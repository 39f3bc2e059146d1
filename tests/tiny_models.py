"""Tiny random models of many families, for tests: the shapes of the real ones, a few layers, a few hundred tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

# Models this small gain nothing from threads, and lose a hundredfold where other jobs hold the cores.
torch.set_num_threads(1)

COMMON: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "output_router_logits": True}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "activation_function": "gelu_new"}),
}


WRAPPED = {"kimi_k25": "deepseek_v3", "llava": "llama"}
"""The family of the text model inside of a multimodal wrapper."""


def build(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the family with random float32 weights in which every norm matters; `changes` go to its config."""
    name, own = FAMILIES[family]
    settings = {**COMMON, **own, **changes}
    if family == "gpt2":
        settings = {k: v for k, v in settings.items() if k not in ("hidden_size", "intermediate_size")}
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**settings)
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or transformers.GPT2LMHeadModel
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def save(family: str, path: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """The family's model as a target directory."""
    build(family, **changes).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def save_wrapped(wrapper: str, path: Path) -> Path:
    """A tiny text model inside of a multimodal wrapper, its weights named as that wrapper's checkpoints name them."""
    save(WRAPPED[wrapper], path)
    text = json.loads((path / "config.json").read_text())
    vision: dict[str, dict[str, Any]] = {
        "kimi_k25": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4},
        "llava": {"model_type": "clip_vision_model", "hidden_size": 16, "num_attention_heads": 2},
    }
    config = {
        "model_type": wrapper,
        "text_config": text,
        "vision_config": vision[wrapper],
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))
    renamed = {f"language_model.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file({**renamed, "vision_tower.layers.0.x": torch.zeros(2)}, path / "model.safetensors")
    return path


def token_ids(num_tokens: int, *, seed: int = 0, vocab_size: int = int(COMMON["vocab_size"])) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
