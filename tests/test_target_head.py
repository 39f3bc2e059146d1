"""The head alone gives what the whole model gives, whatever the family does to norms and logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import ConfigError
from eyas.target import head as head_module
from eyas.target.head import TargetHead
from eyas.target.structure import LogitMap, find, logit_map, logits_of
from tiny_models import FAMILIES, build, save, token_ids

HEADED = sorted(FAMILIES)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks small enough that the tiny vocabularies and samples take several."""
    monkeypatch.setattr(head_module, "WEIGHT_CHUNK_BYTES", 4 * 32 * 64)
    monkeypatch.setattr(head_module, "ROW_CHUNK", 7)


def assert_equals_model(head: TargetHead, model: torch.nn.Module) -> None:
    ids = torch.tensor([token_ids(33)])
    seen: list[torch.Tensor] = []
    hook = find(model).norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(ids).logits[0]
        last = find(model).trunk(ids).last_hidden_state[0]
    hook.remove()
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    for norm, states in (("post", last), ("pre", seen[0][0])):
        logprobs, best = head.next_logprobs(states[:-1].numpy(), ids[0, 1:].numpy(), norm)  # type: ignore[arg-type]
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, expected.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(best, logits[:-1].argmax(-1).numpy())


@pytest.mark.parametrize("family", HEADED)
def test_head_equals_the_model(family: str, tmp_path: Path) -> None:
    path = save(family, tmp_path / family)
    assert_equals_model(TargetHead.load(path), build(family))


def test_sharded_weights(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t", max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    assert_equals_model(TargetHead.load(path), build("llama"))


def test_weights_under_another_prefix(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    tensors = load_file(path / "model.safetensors")
    decoy = {
        "vision.layers.0.x": torch.zeros(2),
        "vision.layers.3.x": torch.zeros(2),
        "vision.norm.weight": torch.zeros(5),
    }
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**renamed, **decoy}, path / "model.safetensors")
    assert_equals_model(TargetHead.load(path), build("llama"))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", LogitMap(1.0, None)),
        ("gemma2", LogitMap(1.0, 3.0)),
        ("gemma3", LogitMap(1.0, 5.0)),
        ("cohere", LogitMap(0.25, None)),
        ("granite", LogitMap(0.25, None)),
    ],
)
def test_what_a_family_does_to_its_logits_is_measured(family: str, expected: LogitMap) -> None:
    assert logit_map(find(build(family))) == expected


@pytest.mark.parametrize("family", ["gemma3", "granite", "qwen3_moe"])
def test_the_forward_around_known_states_gives_the_same_logits(family: str) -> None:
    model = build(family)
    ids = torch.tensor([token_ids(9)])
    with torch.no_grad():
        states = find(model).trunk(ids).last_hidden_state
        torch.testing.assert_close(logits_of(find(model), states), model(ids).logits)


def test_a_head_that_is_missing_is_named(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' of shape \[301, 32\]"):
        TargetHead.load(path)


def test_a_norm_that_is_missing_is_named(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        TargetHead.load(path)


def test_wrong_shapes_and_ids_are_a_callers_mistake(tmp_path: Path) -> None:
    head = TargetHead.load(save("llama", tmp_path / "t"))
    with pytest.raises(ValueError, match="wanted"):
        head.next_logprobs(np.zeros((2, 31), dtype=np.float32), [1, 2], "post")
    with pytest.raises(ValueError, match="token ids"):
        head.next_logprobs(np.zeros((2, 32), dtype=np.float32), [1, 301], "post")
    empty, _ = head.next_logprobs(np.zeros((0, 32), dtype=np.float32), [], "pre")
    assert empty.shape == (0,)


def test_an_encoder_decoder_and_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    for config, words in (
        ({"model_type": "t5"}, "decoder-only"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "no_such_model", "auto_map": {"AutoConfig": "c.C"}}, "trust_remote_code = true"),
    ):
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=words) as caught:
            TargetHead.load(path)
        assert "\n" not in str(caught.value)
