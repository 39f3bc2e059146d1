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
from tiny_models import FAMILIES, WRAPPED, build, save, save_wrapped, token_ids

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


@pytest.mark.parametrize("wrapper", sorted(WRAPPED))
def test_a_multimodal_wrapper(wrapper: str, tmp_path: Path) -> None:
    head, model = TargetHead.load(save_wrapped(wrapper, tmp_path / "t")), build(WRAPPED[wrapper])
    assert_equals_model(head, model)
    assert torch.equal(head.embedding(), model.get_input_embeddings().weight)


@pytest.mark.parametrize("family", HEADED)
def test_tensors_on_a_device_give_the_models_logits(family: str, tmp_path: Path) -> None:
    head, model = TargetHead.load(save(family, tmp_path / "t")), build(family)
    ids = torch.tensor([token_ids(11)])
    seen: list[torch.Tensor] = []
    hook = find(model).norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        expected = model(ids).logits[0]
        last = find(model).trunk(ids).last_hidden_state[0]
    hook.remove()
    tensors = head.on("cpu", torch.float32)
    assert (tensors.vocab_size, tuple(tensors.weight.shape)) == (301, (301, 32))
    kept = last.clone()
    torch.testing.assert_close(tensors.logits(last, "post"), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tensors.logits(seen[0][0], "pre"), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(last, kept)  # what is given is not overwritten
    chosen = torch.tensor([300, 4, 7])
    torch.testing.assert_close(
        tensors.restricted(chosen).logits(last, "post"), expected[:, chosen], rtol=1e-5, atol=1e-5
    )
    for parameter in (tensors.weight, *tensors.norm.parameters()):
        assert not parameter.requires_grad


def test_tensors_in_another_dtype_leave_the_head_as_it_was(tmp_path: Path) -> None:
    head = TargetHead.load(save("gemma3", tmp_path / "t"))
    narrow = head.on("cpu", torch.bfloat16)
    assert {t.dtype for t in (narrow.weight, *narrow.norm.parameters())} == {torch.bfloat16}
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert narrow.logits(states.bfloat16(), "pre").dtype == torch.float32
    assert head.on("cpu", torch.float64).logits(states.double(), "pre").dtype == torch.float64
    assert_equals_model(head, build("gemma3"))


def test_logits_carry_no_gradient(tmp_path: Path) -> None:
    head = TargetHead.load(save("gemma2", tmp_path / "t")).on("cpu", torch.float32)
    assert not head.logits(torch.randn(2, 32, requires_grad=True), "post").requires_grad


@pytest.mark.parametrize("family", HEADED)
def test_the_norms_factor_is_measured_exactly(family: str, tmp_path: Path) -> None:
    weight = find(build(family)).norm.weight.detach()
    expected = weight + 1.0 if family.startswith("gemma") else weight
    assert torch.equal(TargetHead.load(save(family, tmp_path / "t")).norm_scale(), expected)


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma3", "cohere", "gpt2"])
def test_embedding_and_rows_come_as_they_are_stored(family: str, shards: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    model = build(family).bfloat16()
    model.save_pretrained(path, max_shard_size=shards)
    head = TargetHead.load(path)
    embedding, rows = head.embedding(), head.rows(torch.tensor([5, 300]))
    assert (embedding.dtype, rows.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(rows, model.get_output_embeddings().weight[[5, 300]])


def test_a_quantised_embedding_is_named(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.int8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'model\.embed_tokens\.weight' is I8"):
        TargetHead.load(path).embedding()
