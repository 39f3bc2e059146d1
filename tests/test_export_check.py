"""The audit of an export: each fault is named in one line, and a good one has none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from export_data import Trained, make, random_draft
from eyas import cli
from eyas.errors import ConfigError
from eyas.export.check import CheckReport, check
from eyas.export.engines import ENGINES
from eyas.export.run import Wanted, export
from eyas.model import checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make(tmp_path_factory.mktemp("check"))


@pytest.fixture(scope="module")
def exports(trained: Trained) -> Path:
    """An export for each engine, with the embedding."""
    root = trained.training.parent / "exports"
    for engine in ("sglang", "vllm", "speculators"):
        export(trained.draft, root / engine, Wanted(engine, with_embedding=True), target=trained.target)  # type: ignore[arg-type]
    return root


@pytest.fixture
def out(exports: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the export for vLLM, beside the others: the record's path to the checkpoint leads there, too."""
    path = exports / f"copy-{abs(hash(request.node.name))}"
    shutil.copytree(exports / "vllm", path)
    return path


def audit(out: Path, trained: Trained | None, **options: Any) -> CheckReport:
    return check(out, target=trained.target if trained else None, **options)


def rewrite(out: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")


def configure(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_good_export_has_no_fault(engine: str, exports: Path, trained: Trained) -> None:
    report = audit(exports / engine, trained)
    assert (report.faults, report.notes) == ((), ())
    assert len(report.compared) == 4
    assert report.lines()[0].endswith(f"for {engine}: nothing wrong")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), "'d2t' is missing"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "'midlayer.hidden_norm.weight' is missing"),
        (
            lambda t: t.update({"midlayer.norm.weight": t.pop("midlayer.hidden_norm.weight")}),
            "'midlayer.norm.weight' does not belong there",
        ),
        (
            lambda t: t.update({"layers.0.mlp.up_proj.weight": t.pop("midlayer.mlp.up_proj.weight")}),
            "'layers.0.mlp.up_proj.weight' does not belong there",
        ),
        (lambda t: t.update({"fc.bias": torch.zeros(32)}), "'fc.bias' does not belong there"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].float()}), "'fc.weight' is F32; BF16 wanted"),
        (lambda t: t.update({"d2t": t["d2t"].int()}), "'d2t' is int32; I64 wanted"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:39]}), r"'lm_head.weight' is [39, 32]; [40, 32]"),
        (lambda t: t["d2t"].add_(1), "do not tell the same ascending target ids"),
        (lambda t: t["d2t"].add_(300), "'d2t' leads to tokens"),
        (lambda t: t["norm.weight"].fill_(torch.nan), "'norm.weight' holds values that are not finite numbers"),
        (lambda t: t["embed_tokens.weight"].normal_(), "'embed_tokens.weight' is not the target's, bit by bit"),
        (lambda t: t["embed_tokens.weight"][7, 3].neg_(), "'embed_tokens.weight' is not the target's, bit by bit"),
        (lambda t: t["fc.weight"][0, 0].add_(1), "other values than were exported"),
    ],
    ids=[
        "no_d2t", "no_norm", "renamed", "other_layout", "extra", "dtype", "d2t_dtype", "shape", "d2t_shifted",
        "d2t_beyond", "nan", "random_embedding", "one_sign", "one_value",
    ],
)  # fmt: skip
def test_a_fault_of_a_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, out: Path, trained: Trained
) -> None:
    rewrite(out, change)
    report = audit(out, trained)
    assert any(words in fault for fault in report.faults), report.faults
    assert all("\n" not in fault and fault.startswith("model.safetensors: ") for fault in report.faults)
    assert report.compared == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
            "'eagle_aux_hidden_state_layer_ids' is [0, 1, 2]; [1, 2, 3], hidden-state indices, as vLLM counts, wanted",
        ),
        (
            lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
            "[0, 1, 2], one less than the hidden-state indices, as SGLang counts, wanted",
        ),
        (lambda c: c.pop("eagle_config"), "no 'eagle_config.eagle_aux_hidden_state_layer_ids'"),
        (lambda c: c.pop("rope_theta"), "no 'rope_theta'; 10000.0 wanted"),
        (lambda c: c.update(max_position_embeddings=2048), "'max_position_embeddings' is 2048; 512 wanted"),
        (lambda c: c.update(num_hidden_layers=True), "'num_hidden_layers' is True; 1 wanted"),
        (lambda c: c.update(bos_token_id=7), "'bos_token_id' is 7; 1 wanted"),
        (lambda c: c.update(fc_norm=True), "'fc_norm' does not belong there"),
        (lambda c: c.update(torch_dtype="float32"), "'torch_dtype' is 'float32'; 'bfloat16' wanted"),
        (lambda c: c["eyas"].update(aux_layers=[2, 3, 4]), "'eyas.aux_layers' is [2, 3, 4]; [1, 2, 3] wanted"),
        (lambda c: c["eyas"]["extra"].update(step=99), "changed since the export"),
    ],
    ids=[
        "vllm_ids", "sglang_ids", "no_sglang_ids", "no_rope", "positions", "bool", "token", "switch", "dtype", "own",
        "told",
    ],
)  # fmt: skip
def test_a_fault_of_a_field_is_named(
    change: Callable[[dict[str, Any]], object], words: str, out: Path, trained: Trained
) -> None:
    configure(out, change)
    report = audit(out, trained)
    assert any(words in fault for fault in report.faults), report.faults
    assert all("\n" not in fault and fault.startswith("config.json: ") for fault in report.faults)


def test_layers_that_are_shifted_everywhere_are_not_those_of_the_checkpoint(out: Path, trained: Trained) -> None:
    # Both keys, our own and the record agree: what tells is the checkpoint, and the digest of config.json.
    configure(
        out,
        lambda c: c.update(
            eagle_aux_hidden_state_layer_ids=[2, 3, 4],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
            eyas=c["eyas"] | {"aux_layers": [2, 3, 4]},
        ),
    )
    record = json.loads((out / "export.json").read_text())
    record["shape"]["aux_layers"] = [2, 3, 4]
    (out / "export.json").write_text(json.dumps(record))
    report = audit(out, trained)
    assert any("layers disagree: given [2, 3, 4]; " in fault for fault in report.faults), report.faults


@pytest.mark.parametrize("cut", [6, 100, -1])
def test_a_truncated_file_is_named(cut: int, out: Path, trained: Trained) -> None:
    data = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(data[:cut])
    (fault,) = audit(out, trained).faults
    assert fault.startswith("model.safetensors: not a complete safetensors file") and "\n" not in fault


def test_a_missing_a_broken_and_a_second_file_are_named(out: Path, trained: Trained) -> None:
    shutil.copy(out / "model.safetensors", out / "other.safetensors")
    assert "other.safetensors: does not belong there" in audit(out, trained).faults[0]
    (out / "other.safetensors").unlink()
    (out / "model.safetensors").unlink()
    (out / "config.json").write_text("{")
    faults = audit(out, trained).faults
    assert [fault.split(":")[0] for fault in faults] == ["config.json", "model.safetensors"]
    (out / "config.json").unlink()
    assert "config.json: not there" in audit(out, trained).faults


def test_another_target_is_a_fault_and_another_quantisation_a_warning(
    exports: Path, trained: Trained, tmp_path: Path
) -> None:
    other = tiny_models.save("llama", tmp_path / "other", seed=5)
    report = check(exports / "vllm", target=other)
    assert any(f"target {other}: " in fault and "trained on states of" in fault for fault in report.faults)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    report = check(exports / "vllm", target=other)
    assert not any("trained on states" in fault for fault in report.faults)
    assert any("quantised otherwise (fp8)" in note for note in report.notes)
    # Its embedding is another one, too, and that is no matter of quantisation.
    assert report.faults == ("model.safetensors: 'embed_tokens.weight' is not the target's, bit by bit",)


def test_max_positions_of_a_checkpoint_without_record_are_held_against_the_target(out: Path, trained: Trained) -> None:
    (out / "export.json").unlink()
    configure(out, lambda c: c.update(max_position_embeddings=2048))
    faults = audit(out, trained, engine="vllm").faults
    assert faults == ("config.json: 'max_position_embeddings' is 2048; the target's is 512",)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_record_it_must_be_said_for_whom_it_is(engine: str, exports: Path, trained: Trained) -> None:
    path = exports / f"{engine}-bare"
    shutil.copytree(exports / engine, path)
    (path / "export.json").unlink()
    with pytest.raises(ConfigError, match="it must be said for whom"):
        audit(path, trained)
    report = audit(path, trained, engine=engine)
    assert report.faults == ()
    assert any("nothing says from which checkpoint" in note for note in report.notes)
    assert any(
        "weights and logits" in line for line in audit(path, trained, engine=engine, draft=trained.draft).compared
    )


def test_the_wrong_layout_is_a_fault(exports: Path, trained: Trained) -> None:
    report = audit(exports / "speculators", trained, engine="sglang")
    assert any("'midlayer.hidden_norm.weight' is missing" in fault for fault in report.faults)
    assert any("no 'model_type'" in fault for fault in report.faults)


def test_what_cannot_be_compared_is_told(exports: Path, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere"
    shutil.copytree(exports / "vllm", path)
    report = check(path)
    assert report.faults == ()
    assert [note.split(":")[0] for note in report.notes] == ["note", "note"]
    assert any("is gone: weights and logits not compared" in note for note in report.notes)
    assert any("no target (--target DIR)" in note for note in report.notes)


def test_another_checkpoint_is_not_the_one_that_was_exported(exports: Path, trained: Trained, tmp_path: Path) -> None:
    other = make(tmp_path)
    shutil.rmtree(other.draft)
    _, vocab_map, info = checkpoint.load(trained.draft)
    checkpoint.save(random_draft(seed=1), vocab_map, other.draft, target_config=info.config, dtype="float32")
    (fault,) = audit(exports / "vllm", trained, draft=other.draft).faults
    assert "not the checkpoint that was exported" in fault
    # Without a record the weights themselves tell, or the shape.
    bare = exports / "no-record"
    shutil.copytree(exports / "vllm", bare)
    (bare / "export.json").unlink()
    faults = audit(bare, trained, engine="vllm", draft=other.draft).faults
    assert any("'fc.weight' is not that of" in fault for fault in faults)
    assert any("other logits than" in fault for fault in faults)
    config = json.loads((other.draft / "config.json").read_text())
    (other.draft / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    (fault,) = audit(bare, trained, engine="vllm", draft=other.draft).faults
    assert fault == f"config.json: rms_norm_eps is 1e-06, 1e-05 in {other.draft}"


def test_a_record_that_cannot_be_understood_is_a_configuration_error(out: Path, trained: Trained) -> None:
    for text, words in (
        ("{", "cannot be read"),
        ('{"format_version": 2}', "use a newer one"),
        ("[]", "cannot be read"),
        ('{"format_version": 1}', "cannot be read"),
    ):
        (out / "export.json").write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            audit(out, trained)
        assert "\n" not in str(caught.value)


def test_the_command_finds_target_and_checkpoint_and_ends_with_1(
    out: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not cli.app(["export", "--check", str(out)], standalone_mode=False)
    assert "nothing wrong" in capsys.readouterr().out
    rewrite(out, lambda t: t.pop("d2t"))
    assert cli.app(["export", "--check", str(out)], standalone_mode=False) == 1
    assert "fault    model.safetensors: 'd2t' is missing" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="writes nothing"):
        cli.app(["export", "a", "b", "--check", str(out)], standalone_mode=False)
