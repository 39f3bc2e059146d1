"""The drafter's checkpoint: what is written, what is read, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eyas.errors import ConfigError, ExportError
from eyas.model.checkpoint import load, save, warm_start
from eyas.model.create import initialise
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.layout import LAYER_IDS, config_of
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from tiny_models import save as save_target

SHAPE = DraftShape(
    target_hidden_size=32,
    vocab_size=301,
    aux_layers=(1, 2, 3),
    hidden_size=32,
    draft_vocab_size=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
)
VOCAB = VocabMap.of(torch.tensor([0, 5, 9]), 301)
TARGET_CONFIG = {"bos_token_id": 1, "eos_token_id": [2, 3], "text": "not copied"}

GOLDEN = {
    "fc.weight": (32, 96),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "norm.weight": (32,),
    "lm_head.weight": (3, 32),
    "d2t": (3,),
    "t2d": (301,),
}


def random_draft(shape: DraftShape = SHAPE, *, seed: int = 0) -> Eagle3Draft:
    draft = Eagle3Draft(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return draft


def written(directory: Path, draft: Eagle3Draft | None = None, vocab_map: VocabMap = VOCAB, **options: Any) -> Path:
    options = {"target_config": TARGET_CONFIG, "dtype": "float32", **options}
    save(draft or random_draft(), vocab_map, directory, **options)
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def reconfigure(directory: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    config = {**json.loads((directory / "config.json").read_text()), **changes}
    kept = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))


def assert_same(a: Eagle3Draft, b: Eagle3Draft, *, but: set[str] | frozenset[str] = frozenset()) -> None:
    others = dict(b.named_parameters())
    for name, parameter in a.named_parameters():
        if name not in but:
            assert torch.equal(parameter, others[name]), name


def test_names_shapes_and_dtypes_are_those_that_engines_load(tmp_path: Path) -> None:
    tensors = load_file(written(tmp_path / "d", dtype="bfloat16") / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == GOLDEN
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [0, 4, 7]
    assert tensors["t2d"].dtype == torch.bool
    assert torch.nonzero(tensors["t2d"])[:, 0].tolist() == [0, 5, 9]
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_whoever_may_read_the_directory_may_read_its_weights(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        directory = written(tmp_path / "draft")
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in directory.iterdir()} == {"0o644"}


@pytest.mark.parametrize(
    ("change", "words"),
    [({"rope_theta": 5.0}, "rope_theta = 5.0 and 10000.0 in rope_parameters"), ({"rms_norm_eps": -1}, "makes no norm")],
)
def test_a_config_that_contradicts_itself_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "draft")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=words):
        load(directory)


def test_config_has_both_spellings(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    path = written(tmp_path / "d", random_draft(replace(SHAPE, rope=rope)), extra={"fingerprint": "f" * 32})
    config = json.loads((path / "config.json").read_text())
    version = config["eyas"].pop("version")
    assert version
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 301,
        "draft_vocab_size": 3,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "eyas": {
            "aux_layers": [1, 2, 3],
            "norm_aux": False,
            "carry_normed": False,
            "extra": {"fingerprint": "f" * 32},
        },
    }
    draft, _, info = load(path)
    assert dict(draft.shape.rope) == rope
    assert info.extra == {"fingerprint": "f" * 32}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("without", [("rope_parameters",), ("rope_theta", "rope_scaling"), ()], ids=str)
def test_rope_is_the_same_in_either_spelling(rope: dict[str, Any], without: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path / "d", random_draft(replace(SHAPE, rope=rope)))
    reconfigure(path, **dict.fromkeys(without))
    assert dict(load(path)[0].shape.rope) == rope
    # And as an engine's transformers reads it.
    assert AutoConfig.from_pretrained(path).rope_parameters == rope


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 2},
        {"norm_aux": True, "carry_normed": True},
        {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1},
        {"draft_vocab_size": 301},
        {"aux_layers": (2,)},
    ],
    ids=str,
)
def test_float32_comes_back_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    draft = random_draft(replace(SHAPE, **changes))
    vocab_map = VocabMap.full(301) if draft.shape.draft_vocab_size == 301 else VOCAB
    path = written(tmp_path / "d", draft, vocab_map, embedding=draft.embed_tokens.weight)
    again, found, info = load(path)
    assert again.shape == draft.shape
    assert_same(draft, again)
    assert torch.equal(found.d2t, vocab_map.d2t)
    assert torch.equal(found.t2d, vocab_map.t2d)
    assert (info.layout, info.dtype, info.has_embedding) == ("eyas", "float32", True)
    assert ("d2t" in load_file(path / "model.safetensors")) == (not vocab_map.is_full)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_are_read_as_they_are(dtype: str, tmp_path: Path) -> None:
    draft = random_draft()
    again, _, info = load(written(tmp_path / "d", draft, dtype=dtype, embedding=draft.embed_tokens.weight))
    assert info.dtype == dtype
    assert torch.equal(again.fc.weight, draft.fc.weight.to(getattr(torch, dtype)).float())


def test_names_of_several_layers_and_of_the_switches(tmp_path: Path) -> None:
    draft = random_draft(replace(SHAPE, num_layers=2, norm_aux=True, carry_normed=True))
    path = written(tmp_path / "d", draft)
    names = set(load_file(path / "model.safetensors"))
    assert {"layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight", "fc_norm.2.weight"} <= names
    assert not [name for name in names if name.startswith("midlayer.")]
    config = json.loads((path / "config.json").read_text())
    assert (config["fc_norm"], config["norm_output"]) == (True, True)


def test_own_embedding_is_always_written(tmp_path: Path) -> None:
    own = random_draft(replace(SHAPE, hidden_size=16))
    assert "embed_tokens.weight" in load_file(written(tmp_path / "own", own) / "model.safetensors")
    assert "embed_tokens.weight" not in load_file(written(tmp_path / "shared") / "model.safetensors")


def test_an_embedding_that_is_not_there_is_the_targets_or_unset(tmp_path: Path) -> None:
    target = save_target("llama", tmp_path / "t")
    path = written(tmp_path / "d")
    draft, _, info = load(path, target=target)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(draft.embed_tokens.weight, embedding)
    assert not info.has_embedding
    without, _, _ = load(path)
    assert without.unset() == ["embed_tokens.weight"]
    with pytest.raises(ConfigError, match=r"embedding of \[299, 32\], wanted \[301, 32\]"):
        load(path, target=save_target("llama", tmp_path / "u", vocab_size=299))


def foreign(directory: Path, layout: str) -> Path:
    """A checkpoint as another project leaves it: bfloat16, other names, other fields."""
    draft = random_draft()
    embedding = None if layout == "sglang" else draft.embed_tokens.weight.bfloat16()
    path = written(directory, draft, dtype="bfloat16", embedding=embedding)
    inner = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 301,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    if layout == "sglang":
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **inner,
            "rope_scaling": None,
            "draft_vocab_size": 3,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
    elif layout == "vllm":
        config = {**inner, "draft_vocab_size": 3, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    else:
        config = {
            "architectures": ["Eagle3DraftModel"],
            "model_type": "speculators",
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "draft_vocab_size": 3,
            "target_hidden_size": None,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "transformer_layer_config": inner,
        }
    (path / "config.json").write_text(json.dumps(config))
    if layout != "sglang":
        tensors = load_file(path / "model.safetensors")
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        save_file(tensors, path / "model.safetensors")
    return path


LAYOUTS = ["sglang", "vllm", "speculators"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_projects_checkpoints_are_read(layout: str, tmp_path: Path) -> None:
    path = foreign(tmp_path / "d", layout)
    draft, vocab_map, info = load(path)
    assert draft.shape == SHAPE
    assert vocab_map.target_ids.tolist() == [0, 5, 9]
    assert (info.layout, info.dtype) == ("speculators" if layout == "speculators" else "engine", "bfloat16")
    assert torch.equal(draft.fc.weight, random_draft().fc.weight.bfloat16().float())
    assert draft.unset() == (["embed_tokens.weight"] if layout == "sglang" else [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_warm_start_finds_head_rows_by_the_targets_token(layout: str, tmp_path: Path) -> None:
    target = save_target("llama", tmp_path / "t")
    source = random_draft()
    vocab_map = VocabMap.of(torch.tensor([3, 5, 9, 200]), 301)
    draft = Eagle3Draft(replace(SHAPE, draft_vocab_size=4))
    initialise(draft, target, vocab_map, 0)
    assert warm_start(draft, vocab_map, foreign(tmp_path / "d", layout)) == 2
    assert draft.unset() == []
    stored = load_file(target / "model.safetensors")
    old, new = source.lm_head.weight.bfloat16().float(), stored["lm_head.weight"]
    assert torch.equal(draft.lm_head.weight, torch.stack([new[3], old[1], old[2], new[200]]))
    # The embedding is the target's, whatever the checkpoint brings.
    assert torch.equal(draft.embed_tokens.weight, stored["model.embed_tokens.weight"])
    for name, parameter in draft.named_parameters():
        if name not in ("lm_head.weight", "embed_tokens.weight"):
            assert torch.equal(parameter, source.get_parameter(name).bfloat16().float()), name


def test_warm_start_of_a_drafter_with_its_own_embedding_takes_it_too(tmp_path: Path) -> None:
    shape = replace(SHAPE, hidden_size=16)
    source, draft = random_draft(shape), random_draft(shape, seed=1)
    assert warm_start(draft, VOCAB, written(tmp_path / "d", source)) == 0
    assert_same(source, draft)


def test_warm_start_names_every_difference(tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    other = random_draft(replace(SHAPE, aux_layers=(1, 2, 4), intermediate_size=40))
    words = r"aux_layers is \(1, 2, 3\) there, \(1, 2, 4\) here; intermediate_size is 48 there, 40 here"
    with pytest.raises(ConfigError, match=words):
        warm_start(other, VOCAB, path)
    with pytest.raises(ConfigError, match="initialise the drafter"):
        warm_start(Eagle3Draft(SHAPE), VOCAB, path)


def test_warm_start_tells_of_another_rope(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "d")
    warm_start(random_draft(replace(SHAPE, rope={"rope_type": "default", "rope_theta": 5e5})), VOCAB, path)
    assert "trained with rope" in caplog.text


def test_layer_ids_are_never_guessed(tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    reconfigure(path, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    with pytest.raises(ConfigError, match="give aux_layers"):
        load(path)
    assert load(path, aux_layers=(1, 2, 3))[0].shape.aux_layers == (1, 2, 3)

    reconfigure(path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    assert load(path)[0].shape.aux_layers == (2, 3, 4)
    with pytest.raises(ConfigError, match=r"layers disagree: given \[1, 2, 3\]"):
        load(path, aux_layers=(1, 2, 3))


def test_keys_that_contradict_each_other_are_settled_by_who_asks(tmp_path: Path) -> None:
    # As found in the wild: SGLang's numbers copied to vLLM's key.
    path = written(tmp_path / "d")
    reconfigure(path, eagle_aux_hidden_state_layer_ids=[1, 2, 3], eagle_config={LAYER_IDS: [1, 2, 3]})
    with pytest.raises(ConfigError, match=r"layers disagree: .*; give aux_layers"):
        load(path)
    assert load(path, aux_layers=(2, 3, 4))[0].shape.aux_layers == (2, 3, 4)
    assert load(path, aux_layers=(1, 2, 3))[0].shape.aux_layers == (1, 2, 3)
    with pytest.raises(ConfigError, match=r"given \[0, 1, 2\]"):
        load(path, aux_layers=(0, 1, 2))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        # SpecForge for Kimi-K2.5 has [2, 30, 58] there and captures the output of these layers.
        ({"eagle_config": {LAYER_IDS: [0, 1, 2], "use_aux_hidden_state": True}}, (1, 2, 3)),
        # ModelOpt writes an empty list where the engine's default is meant.
        (
            {
                "eagle_config": {
                    LAYER_IDS: [],
                    "use_aux_hidden_state": True,
                    "use_input_layernorm_in_first_layer": True,
                    "use_last_layernorm": True,
                    "use_mtp_layernorm": False,
                }
            },
            None,
        ),
        # AngelSlim's own key; and nothing at all, as its configurations and SpecForge's usually have it.
        ({"aux_hidden_states_layer_ids": [0, 1, 2]}, (1, 2, 3)),
        ({}, None),
    ],
    ids=["specforge", "modelopt", "angelslim", "none"],
)
def test_layer_ids_of_other_projects(fields: dict[str, Any], layers: tuple[int, ...] | None, tmp_path: Path) -> None:
    path = foreign(tmp_path / "d", "sglang")
    reconfigure(path, eagle_config=None)
    reconfigure(path, **fields)
    if layers is None:
        with pytest.raises(ConfigError, match="does not say which layers"):
            load(path)
    else:
        assert load(path)[0].shape.aux_layers == layers


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({LAYER_IDS: "1,2,3"}, "a list of numbers is wanted"),
        ({LAYER_IDS: [True, 2, 3]}, "a list of numbers is wanted"),
        ({LAYER_IDS: [3, 2, 1], "eagle_config": None}, "not ascending"),
        ({"eagle_config": [1, 2, 3]}, "an object is wanted"),
        ({"rope_parameters": "default"}, "an object is wanted"),
    ],
    ids=str,
)
def test_fields_of_another_kind_are_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    reconfigure(path, **fields)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_speculators_must_say_what_its_residual_is(tmp_path: Path) -> None:
    path = foreign(tmp_path / "d", "speculators")
    reconfigure(path, norm_before_residual=None)
    with pytest.raises(ConfigError, match="no norm_before_residual, which vLLM then takes for true"):
        load(path)


def test_missing_unknown_and_misshapen_tensors_are_named_together(tmp_path: Path) -> None:
    path = written(tmp_path / "d")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["midlayer.hidden_norm.weight"]
        tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["fc.weight"] = torch.zeros(32, 64)

    rewrite(path, damage)
    with pytest.raises(ConfigError) as caught:
        load(path)
    for words in (
        "missing layers.0.hidden_norm.weight",
        "unknown midlayer.self_attn.q_proj.bias",
        "'fc.weight' is [32, 64], config.json wants [32, 96]",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.zeros(48, 32)}), "are the same weight"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}), "weights in F32, I8"),
        (lambda t: t.pop("d2t"), "no 'd2t'"),
        (lambda t: t["d2t"].add_(300), "'d2t' holds 3 offsets to tokens 300"),
        (lambda t: t["t2d"].fill_(True), "do not tell the same"),
        (lambda t: t.update({"t2d": torch.ones(5, dtype=torch.bool)}), "'t2d' holds 5 tokens of 301"),
        (lambda t: t["midlayer.mlp.up_proj.weight"][3].fill_(torch.nan), "'midlayer.mlp.up_proj.weight' holds values"),
        (lambda t: t["lm_head.weight"][0].fill_(torch.inf), "'lm_head.weight' holds values"),
    ],
    ids=["twice", "int8", "no_d2t", "d2t_beyond", "t2d_other", "t2d_short", "nan", "inf"],
)
def test_damage_is_an_error(change: Callable[[dict[str, torch.Tensor]], object], words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    rewrite(path, change)
    for use in (lambda: load(path), lambda: warm_start(random_draft(), VOCAB, path)):
        with pytest.raises(ConfigError, match=words) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_only_d2t_is_enough(tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    rewrite(path, lambda t: t.pop("t2d"))
    assert torch.equal(load(path)[1].t2d, VOCAB.t2d)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_residual": True},
        {"eagle_config": {"norm_before_fc": True}},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"layer_types": ["sliding_attention"]},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"eagle_config": {"use_last_layernorm": False}},
        {"logit_scale": 0.5},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    ids=str,
)
def test_other_arithmetic_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    reconfigure(path, **changes)
    with pytest.raises(ConfigError, match="not known here"):
        load(path)


@pytest.mark.parametrize("cut", [4, 100, -8])
def test_a_truncated_file_is_an_error(cut: int, tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:cut])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load(path)


def test_a_directory_without_config_or_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is this the directory of a drafter"):
        load(tmp_path)
    path = written(tmp_path / "d")
    (path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)
    path = written(tmp_path / "e")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(path)


def test_unset_weights_and_overflow_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"not all values are finite in bfloat16: fc\.weight"):
        save(Eagle3Draft(SHAPE), VOCAB, tmp_path / "d", target_config={})
    draft = random_draft()
    with torch.no_grad():
        draft.norm.weight.fill_(1e30)
    with pytest.raises(ExportError, match=r"float16: norm\.weight"):
        written(tmp_path / "d", draft, dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_stays_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(ExportError, match="exists already"):
        written(path, random_draft(seed=1))
    assert (path / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty")


def test_a_write_that_stops_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eyas.model.checkpoint.save_file", broken)
    with pytest.raises(Exception, match="no space left") as caught:
        written(tmp_path / "d")
    assert type(caught.value).__name__ == "OutOfSpace"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    left, written_now, other = (tmp_path / name for name in (".d.0123abcd.tmp", ".d.4567abcd.tmp", ".de.0123abcd.tmp"))
    for path in (left, written_now, other):
        path.mkdir()
        (path / "model.safetensors").touch()
    writer = os.open(written_now, os.O_RDONLY)
    fcntl.flock(writer, fcntl.LOCK_EX)
    written(tmp_path / "d")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["d", written_now.name, other.name])
    os.close(writer)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="a map of 4 of 301 tokens"):
        written(tmp_path / "d", vocab_map=VocabMap.of(torch.arange(4), 301))


def test_index_zero_has_no_name_in_sglang() -> None:
    with pytest.raises(ConfigError, match="index 0"):
        config_of(replace(SHAPE, aux_layers=(0, 2)), target_config={}, dtype="float32")


def test_a_started_drafter_comes_back_with_its_targets_embedding(tmp_path: Path) -> None:
    target = save_target("gemma3", tmp_path / "t")
    draft = Eagle3Draft(SHAPE)
    initialise(draft, target, VOCAB, 0)
    again, _, _ = load(written(tmp_path / "d", draft), target=target)
    assert_same(draft, again)
