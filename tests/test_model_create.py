"""A drafter's sizes and first weights come from its target, whatever the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import ConfigError
from eyas.model.create import draft_shape, initialise, num_parameters, principal_directions
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.records import CaptureSpec
from tiny_models import FAMILIES, WRAPPED, build, save, save_wrapped

IDS = torch.tensor([0, 5, 9, 17, 100, 300])


def spec(**changes: Any) -> CaptureSpec:
    values: dict[str, Any] = {
        "target_digest": "unknown",
        "num_layers": 4,
        "hidden_size": 32,
        "vocab_size": 301,
        "aux_layers": (1, 2, 3),
        "last_hidden_norm": "post",
        "dtype": "float32",
    }
    return CaptureSpec(**{**values, **changes})


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def started(path: Path, *, seed: int = 0, **options: Any) -> Eagle3Draft:
    shape = draft_shape(config_of(path), spec(), draft_vocab_size=len(IDS), **options)
    draft = Eagle3Draft(shape)
    initialise(draft, path, VocabMap.of(IDS, 301), seed)
    return draft


WITH_ROPE = sorted(set(FAMILIES) - {"gpt2"})


@pytest.mark.parametrize("family", WITH_ROPE)
def test_every_family_gives_a_drafter_whose_weights_are_all_set(family: str, tmp_path: Path) -> None:
    path = save(family, tmp_path / "t")
    draft = started(path)
    shape, model = draft.shape, build(family)
    assert draft.unset() == []
    assert (shape.hidden_size, shape.target_hidden_size, shape.vocab_size) == (32, 32, 301)
    assert shape.max_position_embeddings == 512
    stored = load_file(path / "model.safetensors")
    embedding = next(t for name, t in stored.items() if name.endswith("embed_tokens.weight"))
    assert torch.equal(draft.embed_tokens.weight, embedding)
    assert not draft.embed_tokens.weight.requires_grad

    # Norm and head of the start read what the target's own norm and head read; a soft-cap apart.
    head = model.get_output_embeddings()
    scale = {"cohere": 0.25, "granite": 0.25}.get(family, 1.0)
    assert torch.equal(draft.lm_head.weight, head.weight[IDS] * scale)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    x -= x.mean(-1, keepdim=True)  # so that a LayerNorm is an RMSNorm
    with torch.no_grad():
        expected = model.model.norm(x)
        wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.rms_norm_eps)
    torch.testing.assert_close(wide * draft.norm.weight, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrapper", sorted(WRAPPED))
def test_a_multimodal_wrapper_gives_what_its_text_model_gives(wrapper: str, tmp_path: Path) -> None:
    inside = started(save(WRAPPED[wrapper], tmp_path / "text"))
    draft = started(save_wrapped(wrapper, tmp_path / "t"))
    assert draft.shape == inside.shape
    for (name, a), b in zip(draft.named_parameters(), inside.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_sizes_of_a_llama(tmp_path: Path) -> None:
    shape = draft_shape(config_of(save("llama", tmp_path / "t")), spec())
    assert shape == DraftShape(
        target_hidden_size=32,
        vocab_size=301,
        aux_layers=(1, 2, 3),
        hidden_size=32,
        draft_vocab_size=301,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )


def test_what_is_given_by_hand_stands() -> None:
    shape = draft_shape(
        {"model_type": "llama", "hidden_size": 32, "vocab_size": 301, "num_hidden_layers": 4},
        spec(),
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=20,
        norm_aux=True,
        carry_normed=True,
    )
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (2, 16, 2, 1)
    assert (shape.head_dim, shape.intermediate_size, shape.norm_aux, shape.carry_normed) == (4, 20, True, True)


KIMI: dict[str, Any] = {
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
}


@pytest.mark.parametrize("known", [True, False])
def test_sizes_of_kimi_k25_with_and_without_transformers_knowing_it(known: bool) -> None:
    config = KIMI if known else {**KIMI, "model_type": "unheard_of"}
    shape = draft_shape(
        config,
        spec(num_layers=61, hidden_size=7168, vocab_size=163840, aux_layers=(3, 31, 59)),
        draft_vocab_size=32000,
    )
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (56, 8, 128, 18432)
    assert (shape.rms_norm_eps, shape.max_position_embeddings) == (1e-5, 262144)
    assert dict(shape.rope) == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    }


def test_rope_of_gemma3_is_that_of_full_attention() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 301, "head_dim": 8, "rope_theta": 1e6}
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = {"model_type": "gemma3", "text_config": {**text, "rope_local_base_freq": 1e4, "rope_scaling": scaling}}
    assert dict(draft_shape(config, spec()).rope) == {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, its captured states say 32"),
        ({"vocab_size": 300}, "vocab_size is 300"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5"),
        ({"model_type": "gpt2"}, "rope"),
        ({"model_type": "unheard_of"}, "num_attention_heads is None"),
    ],
)
def test_what_cannot_be_known_is_one_clear_line(changes: dict[str, Any], words: str) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "vocab_size": 301, "num_hidden_layers": 4}
    with pytest.raises(ConfigError, match=words) as caught:
        draft_shape({**config, **changes}, spec(), intermediate_size=48)
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_fit_are_a_config_error(tmp_path: Path) -> None:
    config = config_of(save("llama", tmp_path / "t"))
    with pytest.raises(ConfigError, match="4 heads cannot share 3"):
        draft_shape(config, spec(), num_kv_heads=3)
    with pytest.raises(ConfigError, match="no drafter fits: ValueError: The hidden size"):
        draft_shape(config, spec(), num_heads=3, num_kv_heads=1)
    with pytest.raises(ConfigError, match="draft vocabulary of 302 of 301"):
        draft_shape(config, spec(), draft_vocab_size=302)


def test_a_start_depends_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    torch.manual_seed(7)
    a = started(path, seed=3)
    torch.manual_seed(8)
    b, c = started(path, seed=3), started(path, seed=4)
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name
    assert not torch.equal(a.layers[0].self_attn.q_proj.weight, c.layers[0].self_attn.q_proj.weight)
    # Pinned: the same on any machine.
    np.testing.assert_array_equal(
        a.fc.weight[0, :3].detach().numpy(), np.float32([-0.17319308, 0.12734346, -0.15783384])
    )


def test_the_start_is_small_and_the_layer_near_the_identity(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    draft = started(path).requires_grad_(False)
    assert 0.9 < float(draft.fc.weight[:, :64].std()) * 96**0.5 < 1.1
    assert torch.equal(draft.fc.weight[:, 64:], torch.eye(32))
    mlp = draft.layers[0].mlp
    assert float(mlp.down_proj.weight.std()) < 0.2 * float(mlp.up_proj.weight.std())


def test_a_smaller_drafter_sees_the_target_along_its_main_directions(tmp_path: Path) -> None:
    # An embedding that only spans eight directions loses nothing in a drafter of eight.
    path = save("llama", tmp_path / "t")
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q[:, :8]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(301, 8, generator=generator) @ basis.T
    tensors["model.norm.weight"] = torch.full((32,), 1.5)
    save_file(tensors, path / "model.safetensors")

    draft = started(path, hidden_size=8)
    assert draft.shape.own_embedding
    assert draft.embed_tokens.weight.requires_grad
    assert (draft.shape.num_heads, draft.shape.intermediate_size) == (1, 16)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    fc = draft.fc.weight[:, 64:]  # [8, 32]
    torch.testing.assert_close(draft.embed_tokens.weight @ fc, embedding, rtol=1e-4, atol=1e-4)
    state = torch.randn(3, 8, generator=generator) @ basis.T
    torch.testing.assert_close(state @ fc.T @ draft.lm_head.weight.T, state @ (1.5 * head[IDS].T), rtol=1e-4, atol=1e-4)


def test_a_wider_drafter_is_padded(tmp_path: Path) -> None:
    draft = started(save("llama", tmp_path / "t"), hidden_size=48)
    assert draft.unset() == []
    assert bool((draft.embed_tokens.weight[:, 32:] == 0).all())


def test_principal_directions_are_orthonormal_ordered_and_signed() -> None:
    matrix = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)
    found = principal_directions(matrix, 5)
    assert (found.shape, found.dtype) == ((12, 5), torch.float64)
    torch.testing.assert_close(found.T @ found, torch.eye(5, dtype=torch.float64))
    sizes = (matrix.double() @ found).norm(dim=0)
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)
    torch.testing.assert_close(sizes, torch.linalg.svdvals(matrix.double())[:5])
    assert bool((found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all())


def test_more_layers_and_both_switches_are_set_too(tmp_path: Path) -> None:
    draft = started(save("llama", tmp_path / "t"), num_layers=3, norm_aux=True, carry_normed=True)
    assert draft.unset() == []


def test_a_target_with_a_hole_cannot_hide(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 3] = torch.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight"):
        started(path)


def test_another_vocabulary_map_is_refused(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    draft = Eagle3Draft(draft_shape(config_of(path), spec(), draft_vocab_size=6))
    with pytest.raises(ConfigError, match="draft vocabulary is 7, the drafter's shape says 6"):
        initialise(draft, path, VocabMap.of(torch.arange(7), 301), 0)


def test_numbers_are_counted_by_group() -> None:
    shape = DraftShape(
        target_hidden_size=4096,
        vocab_size=128256,
        aux_layers=(2, 16, 29),
        hidden_size=4096,
        draft_vocab_size=32000,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
    )
    count = num_parameters(shape)
    attention = 8192 * (4096 + 2 * 1024) + 4096 * 4096
    assert count.frozen == {"embed_tokens": 128256 * 4096}
    assert count.trainable == {
        "fc": 3 * 4096 * 4096,
        "layers": attention + 3 * 4096 * 14336 + 3 * 4096,
        "norm": 4096,
        "lm_head": 32000 * 4096,
    }
