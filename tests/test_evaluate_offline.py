"""Offline evaluation and the `evaluate` command: the training's own figures, any checkpoint, clear refusals."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny_models
import train_data
from eyas import cli
from eyas import config as configuration
from eyas.config import DataConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, DataError, OutOfSpace, SpecMismatch
from eyas.evaluate import compare, offline
from eyas.evaluate.compare import DecodeReceipt, Request
from eyas.evaluate.offline import OfflineReceipt
from eyas.evaluate.prompts import Prompt, read_prompts, stop_ids
from eyas.log import Progress
from eyas.model import checkpoint as engine_layout
from eyas.train import drafts
from eyas.train.checkpoint import BEST, CHECKPOINTS, DRAFT
from eyas.train.metrics import Summary


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with captured states, and a drafter trained for a few steps."""
    base = train_data.make(tmp_path_factory.mktemp("evaluate") / "base", num_samples=20)
    train_data.train_in(base, base / "run", "train.epochs=8", "train.log_every=100", "train.eval_every=1000")
    return base


def evaluated(base: Path, *overrides: str, draft: Path | None = None) -> OfflineReceipt:
    tree = configuration.load(base / "run.toml", list(overrides))
    assert tree.data.samples is not None and tree.capture.out is not None
    return offline.evaluate(
        tree.evaluate,
        tree.train,
        tree.target,
        draft=drafts.find_draft(draft, tree.train.out),
        table=SampleTable.open(tree.data.samples),
        states=tree.capture.out,
        progress=Progress(stream=io.StringIO()),
    )


def own_layout(base: Path, out: Path, **changes: Any) -> Path:
    """The best drafter as another project writes it: `layers.0.`, no word of ours; `changes` go to its config.json."""
    best = drafts.find_draft(None, base / "run")
    out.mkdir()
    tensors = load_file(best / engine_layout.WEIGHTS)
    save_file({re.sub("^midlayer", "layers.0", name): t for name, t in tensors.items()}, out / engine_layout.WEIGHTS)
    config = json.loads((best / engine_layout.CONFIG).read_text()) | changes
    del config["eyas"]
    (out / engine_layout.CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return out


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_held_out_figures_are_those_of_the_training_itself(base: Path) -> None:
    _, _, info = engine_layout.load(drafts.find_draft(None, base / "run"))
    wanted = Summary.from_json(info.extra["held_out"])
    found = evaluated(base, "evaluate.ttt_length=3")
    assert found.summary == wanted
    assert found.samples == 4 and found.split == "held_out" and not found.notes
    assert set(found.slices) == {"source:chat", "source:code", "language:unknown"}


def test_chains_of_eight_by_default_and_every_formula_holds(base: Path) -> None:
    one = evaluated(base).summary
    assert one.ttt_length == 8
    for s in range(one.longest_chain):
        length, before = one.acceptance_length_pooled[s], one.acceptance_length_pooled[s - 1]
        cumulative = one.cumulative[s]
        assert length is not None and cumulative is not None
        assert length.value == pytest.approx((1 if s == 0 or before is None else before.value) + cumulative)
    assert one.supervised == tuple(sorted(one.supervised, reverse=True))


def test_splits_are_told_apart_and_packs_make_no_difference(base: Path) -> None:
    held_out, train, everything = (evaluated(base, f"evaluate.split={name}") for name in ("held_out", "train", "all"))
    sums = [a + b for a, b in zip(held_out.summary.supervised, train.summary.supervised, strict=True)]
    assert list(everything.summary.supervised) == sums
    assert everything.tokens == held_out.tokens + train.tokens
    assert "may have been trained on" in train.notes[0]
    small = evaluated(base, "evaluate.split=train", "train.pack_tokens=70").summary
    assert small.supervised == train.summary.supervised and small.cumulative == train.summary.cumulative


def test_an_imported_checkpoint_gives_the_same_figures(base: Path, tmp_path: Path) -> None:
    imported = own_layout(base, tmp_path / "imported")
    assert evaluated(base, draft=imported).summary == evaluated(base).summary


def test_layers_are_found_by_their_index_and_never_guessed(base: Path, tmp_path: Path) -> None:
    silent = own_layout(base, tmp_path / "silent", eagle_config=None, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(ConfigError, match="aux_layers"):
        evaluated(base, draft=silent)
    layers = list(engine_layout.load(drafts.find_draft(None, base / "run"))[0].shape.aux_layers)
    assert evaluated(base, f"evaluate.aux_layers={layers}", draft=silent).summary == evaluated(base).summary
    shifted = [k + 1 for k in layers]
    with pytest.raises(ConfigError, match=r"does not hold \[\d"):
        evaluated(base, f"evaluate.aux_layers={shifted}", draft=silent)


def test_a_drafter_of_fewer_layers_reads_just_its_own(base: Path, tmp_path: Path) -> None:
    """Columns of `fc` that read a layer are cut off, or are zero: the same."""
    best = drafts.find_draft(None, base / "run")
    layers = list(engine_layout.load(best)[0].shape.aux_layers)
    few = own_layout(base, tmp_path / "few", eagle_config=None, eagle_aux_hidden_state_layer_ids=layers[1:])
    zeroed = own_layout(base, tmp_path / "zeroed")
    for path, columns in ((few, slice(32, None)), (zeroed, None)):
        tensors = load_file(path / engine_layout.WEIGHTS)
        fc = tensors["fc.weight"].clone()
        fc[:, :32] = 0
        tensors["fc.weight"] = fc if columns is None else fc[:, columns].contiguous()
        save_file(tensors, path / engine_layout.WEIGHTS)
    one, other = evaluated(base, draft=few).summary, evaluated(base, draft=zeroed).summary
    assert one.cumulative == other.cumulative
    assert one.cumulative != evaluated(base).summary.cumulative


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_another_target_is_refused(base: Path, tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "other", seed=5)
    with pytest.raises(SpecMismatch, match=r"set target\.path"):
        evaluated(base, f"target.path={tmp_path / 'other'}")


def test_drafters_are_found_in_runs_and_checkpoints(base: Path, tmp_path: Path) -> None:
    best = (base / "run" / CHECKPOINTS / BEST / DRAFT).resolve()
    for given in (base / "run", base / "run" / CHECKPOINTS / BEST, best):
        assert drafts.find_draft(given, None) == best
    assert drafts.beside(best, "x") == best.parent / "x"
    assert drafts.beside(tmp_path, "x") == tmp_path / "x"
    with pytest.raises(ConfigError, match="run 'eyas train' first"):
        drafts.find_draft(None, tmp_path)
    with pytest.raises(ConfigError, match=r"train\.out"):
        drafts.find_draft(None, None)


# -- the command -------------------------------------------------------------------------------------------------------


def eyas(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eyas", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_writes_what_it_prints(base: Path, tmp_path: Path) -> None:
    done = eyas("evaluate", base / "run.toml", "--json")
    assert done.returncode == 0, done.stderr
    file = (base / "run" / CHECKPOINTS / BEST).resolve() / offline.FILE
    value = json.loads(file.read_text())
    assert value == json.loads(done.stdout)
    assert value["summary"] == json.loads(json.dumps(evaluated(base).summary.to_json()))
    assert value["formulas"] and value["file"] == str(file)
    assert not list(file.parent.glob(".*.tmp"))

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": tiny_models.token_ids(n)}) + "\n" for n in (5, 6, 7)))
    asked = ["evaluate", base / "run.toml", "--decode", "--prompts", prompts, "evaluate.max_new_tokens=8"]
    done = eyas(*asked, "--limit", 2, "--out", tmp_path / "made" / "here.json")
    assert done.returncode == 0, done.stderr
    value = json.loads((tmp_path / "made" / "here.json").read_text())
    assert len(value["requests"]) == 2 == value["num_identical"]
    assert value["tokens_per_forward"] == pytest.approx(
        sum(r["new_tokens"] for r in value["requests"]) / sum(r["forwards"] for r in value["requests"])
    )
    for line in ("acceptance length", "identical to plain decoding", "warning: ", "speed-up"):
        assert line in done.stdout
    with pytest.raises(ConfigError, match="need --decode"):
        cli.app(["evaluate", str(base / "run.toml"), "--limit", "2"], standalone_mode=False)


def test_a_drafter_whose_logits_are_no_numbers_is_refused(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "draft"
    shutil.copytree(drafts.find_draft(None, base / "run"), copy)
    tensors = load_file(copy / "model.safetensors")
    large = {name: tensors[name] * 1e25 for name in ("norm.weight", "lm_head.weight")}
    save_file({**tensors, **large}, copy / "model.safetensors")
    with pytest.raises(ConfigError, match="its logits are not finite numbers"):
        evaluated(base, draft=copy)


def test_a_file_that_cannot_be_written_is_known_before_and_costs_no_result(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(out: Path) -> None:
        cli.app(["evaluate", str(base / "run.toml"), "--out", str(out)], standalone_mode=False)

    before = (base / "run.toml").read_text()
    with pytest.raises(ConfigError, match="is the run file itself"):
        asked(base / "run.toml")
    with pytest.raises(ConfigError, match="is a directory; name a file in it"):
        asked(tmp_path)
    assert (base / "run.toml").read_text() == before

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eyas.train.drafts.replace", full)
    with pytest.raises(OutOfSpace):
        asked(tmp_path / "out.json")
    assert "held-out samples" in capsys.readouterr().out


# -- prompts and sums --------------------------------------------------------------------------------------------------


def test_prompts_are_ids_up_to_what_the_target_writes(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "input_ids": [5, 6, 7]},
        {"token_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 0, 1, 1]},
        {"question_id": 81, "token_ids": [5], "loss_mask": [0]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, data = TargetConfig(path=base / "target"), DataConfig()
    found = read_prompts(path, target, data)
    assert found == [Prompt("a", (5, 6, 7)), Prompt("line 2", (5, 6, 7)), Prompt("81", (5,))]
    assert read_prompts(path, target, data, limit=1) == found[:1]
    for bad, why in (({"x": 1}, "no prompt in it"), ({"input_ids": [1, -2]}, "whole numbers"), ([1], "JSON object")):
        path.write_text(json.dumps(bad) + "\n")
        with pytest.raises(DataError, match=rf"prompts\.jsonl:1: .*{why}"):
            read_prompts(path, target, data)


def test_conversations_are_put_as_a_server_would_put_them(base: Path, tmp_path: Path) -> None:
    target = chat_target(base, tmp_path / "target")
    path = tmp_path / "prompts.jsonl"
    asked = {"role": "user", "content": "w4 w5"}
    rows: list[dict[str, Any]] = [
        {"messages": [asked]},
        {"messages": [asked, {"role": "assistant", "content": "w6"}]},
        {"conversations": [{"from": "human", "value": "w4 w5"}, {"from": "gpt", "value": "w6"}]},
        {"turns": ["w4 w5", "w7"]},
        {"prompt": "w4 w5"},
        {"messages": [asked, {"role": "assistant", "content": "w6"}, {"role": "user", "content": "w7"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [prompt.token_ids for prompt in read_prompts(path, TargetConfig(path=target), DataConfig())]
    assert found[:5] == [(1, 4, 5, 2)] * 5
    assert found[5] == (1, 4, 5, 2, 6, 1, 7, 2)


def chat_target(base: Path, path: Path) -> Path:
    """The tiny target with a tokeniser of words `w0`, `w1`, … whose ids are their numbers, and a template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(base / "target", path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(301)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}w1 {{ m.content }} w2 {% else %}{{ m.content }} {% endif %}"
        "{% endfor %}"
    )
    tokenizer.save_pretrained(path)
    return path


def test_stop_tokens_are_those_of_both_configurations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3, "text_config": {"eos_token_id": [4]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert stop_ids(tmp_path) == {3, 4, 5, 6}


def test_pooled_and_mean_and_positions_by_hand() -> None:
    """Two requests: 4 verifications that keep 2, 2, 1 and 0 of two tokens, and one that keeps none."""
    one = Request("a", 5, 10, 5, 4, (3, 2), 1.0, 10, 4.0, cut=True, identical=True)
    other = Request("b", 5, 2, 2, 1, (0, 0), 1.0, 2, 2.0, cut=False, identical=False)
    receipt = DecodeReceipt(
        "d", "t", "p", "cpu", "float32", 2, 10, 0.0, 0, (one, other), {"c": "1 tokens"}, seconds=3.0
    )
    pooled, mean = receipt.acceptance_length_pooled, receipt.acceptance_length_request_mean
    assert pooled is not None and pooled.value == 1 + 5 / 5
    assert mean is not None and mean.value == 1 + (5 / 4 + 0) / 2
    assert mean.low is not None and mean.low <= mean.value
    assert receipt.position_acceptance == (3 / 5, 2 / 5)
    assert receipt.conditional_acceptance == (3 / 5, pytest.approx(2 / 3))
    assert receipt.tokens_per_forward == 12 / 7
    assert receipt.speedup == 3.0
    text = "\n".join(receipt.lines())
    assert "1 of 2 answers were cut" in text and "1 of 2 answers identical" in text and "skipped 1 prompts" in text
    nothing = dataclasses.replace(one, verifications=0, accepted=(0, 0))
    assert dataclasses.replace(receipt, requests=(nothing,)).acceptance_length_pooled is None
    assert dataclasses.replace(receipt, requests=(nothing,)).as_dict()["conditional_acceptance"] == []


def test_prompts_that_cannot_be_answered_are_told(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    long = tiny_models.token_ids(510)
    path.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in ([4], [4, 301], long)))
    tree = configuration.load(base / "run.toml", ["evaluate.max_new_tokens=4"])

    def run() -> DecodeReceipt:
        return compare.evaluate(
            tree.evaluate, tree.target, tree.engine, tree.data, draft=drafts.find_draft(None, tree.train.out),
            prompts=path, limit=None, progress=Progress(stream=io.StringIO()),
        )  # fmt: skip

    with pytest.raises(DataError, match="none of its 3 prompts"):
        run()
    path.write_text(path.read_text() + json.dumps({"token_ids": [4, 5]}) + "\n")
    receipt = run()
    assert len(receipt.requests) == 1
    assert [why.split(";")[0] for why in receipt.skipped.values()] == [
        "1 tokens", "token 301 outside of the target's 301", "510 tokens and 8 new ones",
    ]  # fmt: skip
