"""A drafter written for engines: names, fields, card and record; what an engine cannot load is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from export_data import SHAPE, VOCAB, Trained, make
from eyas import cli
from eyas.errors import ConfigError, ExportError
from eyas.export.engines import ENGINES, launch, refusals
from eyas.export.record import read_record
from eyas.export.run import ExportReceipt, Wanted, export
from eyas.model.checkpoint import load
from eyas.target.head import TargetHead

LAYER = {
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "input_layernorm.weight": (32,),
    "hidden_norm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
}
REST = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (40, 32), "d2t": (40,), "t2d": (301,)}
GOLDEN = {
    "sglang": {f"midlayer.{name}": size for name, size in LAYER.items()} | REST,
    "vllm": {f"midlayer.{name}": size for name, size in LAYER.items()} | REST,
    "speculators": {f"layers.0.{name}": size for name, size in LAYER.items()} | REST,
}
LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENGINE_CONFIG = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "target_hidden_size": 32,
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
GOLDEN_CONFIG: dict[str, dict[str, Any]] = {
    "sglang": ENGINE_CONFIG,
    "vllm": ENGINE_CONFIG,
    "speculators": {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LLAMA | {"num_aux_hidden_states": 3},
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make(tmp_path_factory.mktemp("export"))


def exported(trained: Trained, out: Path, engine: Any = "vllm", **wanted: Any) -> ExportReceipt:
    return export(trained.draft, out, Wanted(engine, **wanted), target=trained.target)


def config_in(out: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / "config.json").read_text())
    return value


@pytest.mark.parametrize("engine", ENGINES)
def test_names_shapes_dtypes_and_fields_are_those_of_the_golden_list(
    engine: str, trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    exported(trained, out, engine)
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "export.json", "model.safetensors"]
    tensors = load_file(out / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == GOLDEN[engine]
    assert (tensors.pop("d2t").dtype, tensors.pop("t2d").dtype) == (torch.int64, torch.bool)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    config = config_in(out)
    assert config.pop("eyas")["aux_layers"] == [1, 2, 3]
    assert config == GOLDEN_CONFIG[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_it_comes_back_as_the_drafter_that_it_was(engine: str, trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported(trained, out, engine, dtype="float32")
    source, again = load(trained.draft)[0], load(out)[0]
    assert source.shape == again.shape
    for (name, a), (_, b) in zip(source.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b) or name == "embed_tokens.weight"
    assert torch.equal(load(out)[1].target_ids, VOCAB.target_ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_embedding_is_the_targets_bit_by_bit(engine: str, trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    receipt = exported(trained, out, engine, with_embedding=True)
    found = load_file(out / "model.safetensors")["embed_tokens.weight"]
    # In the target's dtype, not in that of the other weights.
    assert torch.equal(found, load_file(trained.target / "model.safetensors")["model.embed_tokens.weight"])
    assert found.dtype == torch.float32
    assert "the embedding, bit by bit the target's" in receipt.report.compared


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_vocabulary_has_no_map(engine: str, tmp_path: Path) -> None:
    trained = make(tmp_path, draft_vocab_size=301)
    exported(trained, tmp_path / "out", engine)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "out/model.safetensors"))


@pytest.mark.parametrize("engine", ENGINES)
def test_switches_of_eagle_3_1(engine: str, tmp_path: Path) -> None:
    trained = make(tmp_path, norm_aux=True, carry_normed=True)
    exported(trained, tmp_path / "out", engine)
    config = config_in(tmp_path / "out")
    assert (config["fc_norm"], config["norm_output"]) == (True, True)
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"} <= names


def test_max_positions_are_the_targets_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    trained = make(tmp_path, max_position_embeddings=128)
    receipt = exported(trained, tmp_path / "out")
    assert config_in(tmp_path / "out")["max_position_embeddings"] == 512
    assert any("max_position_embeddings is the target's 512; the checkpoint says 128" in n for n in receipt.notes)


@pytest.mark.parametrize(
    ("engine", "changes", "words"),
    [
        ("sglang", {"num_layers": 2}, "has 2 layers: SGLang"),
        ("sglang", {"hidden_size": 16}, "hidden size of 16, its target 32: SGLang"),
        ("sglang", {"aux_layers": (2,)}, "SGLang takes such states for the drafter's"),
        ("sglang", {"aux_layers": (1, 2, 4)}, "index 4, the last layer's output: SGLang never"),
        ("speculators", {"hidden_size": 16}, "speculators has one hidden size"),
        ("vllm", {"aux_layers": (1, 2, 5)}, r"\[1, 2, 5\] of a target of 4 layers"),
        ("vllm", {"aux_layers": (0, 2, 3)}, "index 0, the embeddings"),
    ],
    ids=str,
)
def test_what_an_engine_cannot_load_is_refused(engine: str, changes: dict[str, Any], words: str) -> None:
    (found,) = refusals(ENGINES[engine], replace(SHAPE, **changes), 4)
    assert re.search(words, found), found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("vllm", {"num_layers": 2}),
        ("vllm", {"hidden_size": 16}),
        ("vllm", {"aux_layers": (1, 2, 4)}),
        ("vllm", {"aux_layers": (2,)}),
        ("speculators", {"num_layers": 2}),
        ("speculators", {"aux_layers": (2, 3)}),
    ],
    ids=str,
)
def test_what_others_can_load_is_written_and_right(engine: str, changes: dict[str, Any], tmp_path: Path) -> None:
    trained = make(tmp_path, **changes)
    receipt = exported(trained, tmp_path / "out", engine)
    assert any("weights and logits" in line for line in receipt.report.compared)
    assert ("embed_tokens.weight" in load_file(tmp_path / "out/model.safetensors")) == ("hidden_size" in changes)


def test_a_refusal_names_the_drafter_and_writes_nothing(tmp_path: Path) -> None:
    trained = make(tmp_path, num_layers=2, hidden_size=16)
    with pytest.raises(ConfigError) as caught:
        exported(trained, tmp_path / "out", "sglang")
    assert [line.startswith(f"draft {trained.draft}: not for sglang: ") for line in str(caught.value).splitlines()] == [
        True,
        True,
    ]
    assert not (tmp_path / "out").exists()


def test_another_target_is_refused_and_another_quantisation_told(trained: Trained, tmp_path: Path) -> None:
    other = tiny_models.save("llama", tmp_path / "other", seed=5)
    with pytest.raises(ConfigError, match=r"trained on states of target .*, this target is"):
        export(trained.draft, tmp_path / "out", Wanted("vllm"), target=other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    receipt = export(trained.draft, tmp_path / "out", Wanted("vllm"), target=other)
    assert any("quantised otherwise (fp8)" in note for note in receipt.notes)
    wide = tiny_models.save("llama", tmp_path / "wide", hidden_size=64)
    with pytest.raises(ConfigError, match="a target whose hidden size is 32, this target's is 64"):
        export(trained.draft, tmp_path / "out2", Wanted("vllm"), target=wide)


def test_what_is_there_stays(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    with pytest.raises(ExportError, match="exists already"):
        exported(trained, tmp_path / "out")
    assert (tmp_path / "out/mine").read_text() == "x"
    with pytest.raises(ExportError, match="a part of its path is a file"):
        exported(trained, tmp_path / "out/mine/out")


def test_an_embedding_that_is_left_out_is_told(trained: Trained, tmp_path: Path) -> None:
    own, same = tmp_path / "own", tmp_path / "same"
    tensors = load_file(trained.draft / "model.safetensors")
    targets = TargetHead.load(trained.target).embedding().float()
    for directory, moved in ((own, 1), (same, 0)):
        shutil.copytree(trained.draft, directory)
        embedding = targets.clone()
        embedding[:2] += moved
        save_file({**tensors, "embed_tokens.weight": embedding}, directory / "model.safetensors")
    found = export(own, tmp_path / "a", Wanted("vllm"), target=trained.target)
    assert any("differs from the target's in 2 of 301 rows" in note for note in found.notes)
    assert export(same, tmp_path / "b", Wanted("vllm"), target=trained.target).notes == ()


def test_nothing_appears_that_was_not_audited(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def audit(*_: object, **__: object) -> None:
        assert not (tmp_path / "out").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.export.run.check", audit)
    with pytest.raises(KeyboardInterrupt):
        exported(trained, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_card_says_how_it_was_made_and_no_path(trained: Trained, tmp_path: Path) -> None:
    findings = trained.draft.parent / "decoding.json"
    decoded = {
        "requests": [{"accepted": [1]}], "acceptance_length_pooled": {"value": 1.44}, "position_acceptance": [0.4],
        "num_cut": 1, "max_new_tokens": 24, "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    findings.write_text(json.dumps(decoded))
    out = tmp_path / "out"
    exported(trained, out, "vllm", target_name="someone/model")
    named = exported(trained, tmp_path / "named", "vllm", target_name="a b; c")
    findings.unlink()
    assert "--target-name 'a b; c'" in (Path(named.out) / "README.md").read_text()
    page = (out / "README.md").read_text()
    record = read_record(out)
    assert record is not None
    for words in (
        'base_model: "someone/model"',
        f"`{record.target_digest}`",
        "| trained on states of | this target |",
        f"`{'f' * 32}`",
        "| samples trained on | 272 |",
        "| steps | 12 |",
        "| 0 | 1.000",
        "| acceptance length, pooled | 1.440 |",
        "| new tokens of an answer, at most | 24 |",
        "| answers cut by that: figures of their beginnings | 1 of 1 |",
        "vllm serve someone/model --dtype bfloat16 --speculative-config",
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT",
        "eyas export RUN DRAFT --for vllm --dtype bfloat16 --draft-tokens 3 --target-name someone/model",
    ):
        assert words in page, words
    assert str(tmp_path.parent) not in page
    assert (
        str(trained.training.parent) not in page + (out / "config.json").read_text() + (out / "export.json").read_text()
    )
    assert "/home/someone" not in (out / "config.json").read_text()


def test_the_launch_line_says_the_dtype_where_an_engine_would_take_another(trained: Trained, tmp_path: Path) -> None:
    # The target is in float32, which both engines turn into 16 bits by themselves.
    assert " --dtype float32 " in exported(trained, tmp_path / "a", dtype="float32").launch
    config = json.loads((trained.target / "config.json").read_text())
    (trained.target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert "--dtype" not in exported(trained, tmp_path / "b", dtype="bfloat16").launch
    assert " --dtype float16 " in exported(trained, tmp_path / "c", dtype="float16").launch
    (trained.target / "config.json").write_text(json.dumps(config))


def test_launch_lines() -> None:
    both = {"target": "T", "draft": "a b", "num_draft_tokens": 4}
    assert launch(ENGINES["sglang"], **both, dtype=None) == (  # type: ignore[arg-type]
        "python -m sglang.launch_server --model-path T --speculative-algorithm EAGLE3 --speculative-draft-model-path "
        "'a b' --speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    )
    assert launch(ENGINES["vllm"], **both, dtype="float16") == (  # type: ignore[arg-type]
        "vllm serve T --dtype float16 --speculative-config "
        '\'{"method": "eagle3", "model": "a b", "num_speculative_tokens": 4}\''
    )
    assert launch(ENGINES["speculators"], **both, dtype=None, alone=True) == "vllm serve 'a b'"  # type: ignore[arg-type]


def eyas(*arguments: object) -> int:
    return int(cli.app([*map(str, arguments)], standalone_mode=False) or 0)


@pytest.mark.parametrize("name", ["run_file", "training", "draft"])
def test_a_run_file_a_training_or_a_drafter_is_exported(
    name: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--target", trained.target] if name == "draft" else []
    assert eyas("export", getattr(trained, name), tmp_path / "out", "--for", "sglang", *more) == 0
    assert f"--speculative-draft-model-path {tmp_path / 'out'}" in capsys.readouterr().out
    assert eyas("export", "--check", tmp_path / "out", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == [] and report["notes"] == [] and len(report["compared"]) == 3


def test_a_foreign_checkpoint_needs_its_layers_and_its_target(trained: Trained, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    config = config_in(trained.draft)
    for name in ("eyas", "eagle_config", "eagle_aux_hidden_state_layer_ids"):
        del config[name]
    (foreign / "config.json").write_text(json.dumps(config))
    (foreign / "model.safetensors").write_bytes((trained.draft / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="give --target DIR"):
        eyas("export", foreign, tmp_path / "out", "--for", "vllm")
    with pytest.raises(ConfigError, match="give aux_layers"):
        eyas("export", foreign, tmp_path / "out", "--for", "vllm", "--target", trained.target)
    with pytest.raises(ConfigError, match="numbers with commas"):
        eyas("export", foreign, tmp_path / "o", "--for", "vllm", "--target", trained.target, "--aux-layers", "a")
    arguments = ("export", foreign, tmp_path / "out", "--for", "vllm", "--target", trained.target)
    assert eyas(*arguments, "--aux-layers", "1,2,3") == 0
    assert config_in(tmp_path / "out")["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert "| trained on states of | not recorded |" in (tmp_path / "out/README.md").read_text()


def test_what_is_missing_is_said_in_one_line_with_exit_code_2(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from eyas.cli import main; main()",
        "export",
        "--check",
        str(tmp_path / "nowhere"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [
        f"eyas: {tmp_path / 'nowhere'}: no such directory; give the directory of an export"
    ]
    for arguments, words in (
        (("export",), "give RUN, OUT and --for"),
        (("export", "--check", tmp_path, "--dtype", "float32", "--draft-tokens", "2"), "leave --dtype, --draft-tokens"),
        (("export", tmp_path / "a", tmp_path / "b"), "give RUN, OUT and --for"),
        (("export", tmp_path / "a", tmp_path / "b", "--for", "vllm"), "no such file or directory"),
        (("export", tmp_path, tmp_path / "b", "--for", "vllm"), "holds no drafter"),
        (("export", tmp_path, tmp_path / "b", "--for", "vllm", "--draft", tmp_path), "--draft goes with --check"),
    ):
        with pytest.raises(ConfigError, match=words):
            eyas(*arguments)
