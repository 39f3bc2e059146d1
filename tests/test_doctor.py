"""The doctor names the broken link: each fault is injected, and no other link is blamed for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import doctor_data
import tiny_models
from doctor_data import changed, diagnose, diagnose_stored, remasked, reweighted
from eyas import cli
from eyas.data.inspect import select
from eyas.data.table import SampleTable
from eyas.doctor.findings import LINKS, Report
from eyas.errors import ConfigError
from eyas.model.checkpoint import CONFIG, LAYER_IDS
from eyas.model.vocab_map import VocabMap
from eyas.records import Sample, spans_of
from eyas.train.drafts import find_draft

TENSORS = dict[str, torch.Tensor]
NAMED = (1, 2)
"""Hidden-state indices of the data set."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return doctor_data.base_in(tmp_path_factory.getbasetemp())


def blamed(report: Report) -> list[str]:
    return [f.link for f in report.findings if f.state == "broken"]


def text_of(report: Report, link: str) -> str:
    return next(f.text for f in report.findings if f.link == link)


def layer_keys(ids: tuple[int, ...]) -> dict[str, Any]:
    return {LAYER_IDS: list(ids), "eagle_config": {LAYER_IDS: [k - 1 for k in ids], "use_aux_hidden_state": True}}


# -- nothing is broken -------------------------------------------------------------------------------------------------


def test_a_healthy_drafter_is_called_healthy_though_it_is_weak(base: Path) -> None:
    """Over-fitted, no better than guessing on samples that it has not seen: told, and no fault."""
    report = diagnose(base)
    assert [f.link for f in report.findings if f.state == "ok"] == list(LINKS)[: list(LINKS).index("engine")]
    assert report.cause is None and "no broken link" in report.verdict()
    assert "over-fitted" in report.verdict()


def test_an_untrained_drafter_is_weak_and_not_broken(base: Path, tmp_path: Path) -> None:
    def forget(tensors: TENSORS) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if name.startswith("midlayer") and tensor.dim() == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)

    report = diagnose(base, draft=reweighted(base, tmp_path / "draft", forget, eyas=None))
    assert not blamed(report), report.verdict()
    assert "no better than a bigram" in report.verdict() or "not clearly better" in report.verdict()


def test_a_foreign_checkpoint_without_any_record_is_judged_by_behaviour(base: Path, tmp_path: Path) -> None:
    report = diagnose(base, draft=changed(base, tmp_path / "draft", eyas=None))
    assert not blamed(report), report.verdict()
    assert "clearly worse" in text_of(report, "layers")


# -- the data set ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [-1, 1])
def test_a_data_set_whose_layers_are_shifted_is_named_with_its_direction(base: Path, tmp_path: Path, by: int) -> None:
    """Also to a drafter that was trained on it, and works on its states."""
    states = tmp_path / "states"
    doctor_data.capture_with(base, states, doctor_data.shifted_engine(base / "target", by))
    report = diagnose(base, f"capture.out={states}")
    assert blamed(report) == ["states"]
    assert (
        f"shifted by {by:+d}" in text_of(report, "states")
        and f"hidden.1 holds hidden state {1 + by}" in report.findings[1].text
    )


def test_a_last_state_before_the_norm_that_is_said_to_be_behind_it(base: Path, tmp_path: Path) -> None:
    states = tmp_path / "states"
    doctor_data.capture_with(base, states, doctor_data.unnormed_engine(base / "target"))
    for overrides in ([], ["engine.check_layers=off"]):
        report = diagnose(base, f"capture.out={states}", *overrides)
        assert blamed(report) == ["norm"]
        assert "says post, its values are pre-norm" in text_of(report, "norm")


def test_states_of_another_target_are_named_by_its_digest(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(base / "target", other)
    tiny_models.build("llama", seed=7).save_pretrained(other)
    report = diagnose_stored(base, f"target.path={other}")
    assert blamed(report) == ["target"] and "than the one captured" in text_of(report, "target")
    quantised = json.loads((base / "target" / CONFIG).read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (other / CONFIG).write_text(json.dumps(quantised))
    assert "quantised otherwise" in text_of(diagnose_stored(base, f"target.path={other}"), "target")


def test_a_drafter_of_another_target_is_told_from_a_data_set_of_another(base: Path, tmp_path: Path) -> None:
    config = json.loads((find_draft(None, base / "run") / CONFIG).read_text())
    config["eyas"]["extra"]["target_digest"] = "0" * 32
    report = diagnose_stored(base, draft=changed(base, tmp_path / "draft", eyas=config["eyas"]))
    assert blamed(report) == ["target"] and "the drafter was trained for another" in text_of(report, "target")


# -- template and masks ------------------------------------------------------------------------------------------------


def moved(by: int) -> Callable[[Sample], Sample]:
    """Masks that come `by` tokens late."""

    def change(sample: Sample) -> Sample:
        mask = torch.from_numpy(sample.loss_mask()).roll(by)
        mask[: max(by, 0)] = False
        return Sample(sample.token_ids, spans_of(mask.numpy()), conversation_id=sample.conversation_id,
                      source=sample.source, split=sample.split)  # fmt: skip

    return change


@pytest.mark.parametrize(
    ("evidence", "by"), [("conversations", 1), ("prompt", 1), ("prompt", -1), ("target", 1), ("target", -1)]
)
def test_a_shifted_mask_is_named_by_each_evidence_alone(base: Path, tmp_path: Path, evidence: str, by: int) -> None:
    table = remasked(base, tmp_path / "samples.parquet", moved(by))
    overrides = [f"data.samples={table}"]
    if evidence != "conversations":
        overrides.append("data.sources=[]")
    if evidence == "target":
        bare = tmp_path / "bare"
        shutil.copytree(base / "target", bare, ignore=shutil.ignore_patterns("*token*", "chat_template*"))
        overrides.append(f"target.path={bare}")
    report = diagnose_stored(base, *overrides)
    assert blamed(report) == ["mask"], report.verdict()
    assert f"one token {'late' if by > 0 else 'early'}" in text_of(report, "mask")
    how = {"conversations": "not those of their conversations", "prompt": "opens an answer", "target": "likeliest"}
    assert how[evidence] in text_of(report, "mask")


def test_an_empty_mask_is_named(base: Path, tmp_path: Path) -> None:
    table = doctor_data.emptied(base, tmp_path / "samples.parquet")
    report = diagnose_stored(base, f"data.samples={table}")
    assert blamed(report) == ["mask"] and "no token of" in text_of(report, "mask")


def test_another_template_than_that_of_the_samples(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(base / "target", other)
    doctor_data.save_tokenizer(
        other, doctor_data.TEMPLATE.replace("<3> {{ m.content }} <4>", "<7> {{ m.content }} <4>")
    )
    report = diagnose_stored(base, f"target.path={other}")
    assert blamed(report) == ["template"] and "another chat template" in text_of(report, "template")


def test_prompts_that_are_rendered_otherwise_today(base: Path, tmp_path: Path) -> None:
    """The table's digests are right, its sources were answered under another template."""
    rows = [json.loads(line) for line in (base / "chats.jsonl").read_text().splitlines()]
    for row in rows:
        row["messages"][0]["content"] += " w99"
    sources = tmp_path / "chats.jsonl"
    sources.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = diagnose_stored(base, f"data.sources=[{str(sources)!r}]")
    assert blamed(report) == ["template"] and "rendered to other token ids" in text_of(report, "template")


def test_a_doubled_first_token(base: Path, tmp_path: Path) -> None:
    from eyas.doctor.text import doubled_share

    table = SampleTable.open(base / "samples.parquet")
    ids = [sample.token_ids for sample in select(table, limit=4)]
    assert doubled_share(ids, frozenset({1, 3})) == 0.0
    doubled = [torch.cat([torch.tensor([1, 1]), torch.from_numpy(one)]).numpy() for one in ids]
    assert doubled_share(doubled, frozenset({1})) == 1.0


# -- the checkpoint ----------------------------------------------------------------------------------------------------


def test_shifted_layer_ids_of_our_own_checkpoint(base: Path, tmp_path: Path) -> None:
    draft = changed(base, tmp_path / "draft", **layer_keys((2, 3)))
    report = diagnose_stored(base, draft=draft)
    assert blamed(report) == ["layers"] and "shifted by +1" in text_of(report, "layers")


@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_layer_ids_of_a_foreign_checkpoint_by_behaviour(base: Path, tmp_path: Path, by: int) -> None:
    ids = tuple(k + by for k in NAMED)
    draft = changed(base, tmp_path / "draft", eyas=None, **layer_keys(ids))
    report = diagnose(base, draft=draft)
    assert blamed(report) == ["layers"]
    assert f"all by {by:+d}" in text_of(report, "layers") and "drafts better from [1, 2]" in text_of(report, "layers")


def test_layer_keys_that_disagree_or_are_missing(base: Path, tmp_path: Path) -> None:
    one = changed(base, tmp_path / "one", eyas=None, **{LAYER_IDS: [2, 3]})
    report = diagnose_stored(base, draft=one)
    assert blamed(report) == ["layers"] and "the keys disagree" in text_of(report, "layers")
    none = changed(base, tmp_path / "none", eyas=None, eagle_config=None, **{LAYER_IDS: None})
    report = diagnose_stored(base, draft=none)
    assert blamed(report) == ["layers"] and "fall back to" in text_of(report, "layers")


def test_a_wrong_number_of_layers(base: Path, tmp_path: Path) -> None:
    draft = changed(base, tmp_path / "draft", eyas=None, **layer_keys((1, 2, 3)))
    report = diagnose_stored(base, draft=draft)
    assert blamed(report) == ["aux"] and "fc reads 64 values = 2 x 32" in text_of(report, "aux")


def absolute(tensors: TENSORS) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def unmarked(tensors: TENSORS) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def mapless(tensors: TENSORS) -> None:
    del tensors["d2t"], tensors["t2d"]


def stale(tensors: TENSORS) -> None:
    other = VocabMap.of(torch.arange(len(tensors["d2t"])) + 50, len(tensors["t2d"]))
    tensors["d2t"], tensors["t2d"] = other.d2t, other.t2d


VOCABULARIES = {
    absolute: "not offsets",
    unmarked: "t2d marks",
    mapless: "no d2t",
    stale: "rows of lm_head belong to other",
}


@pytest.mark.parametrize("fault", VOCABULARIES, ids=lambda fault: fault.__name__)
def test_a_wrong_vocabulary_map(base: Path, tmp_path: Path, fault: Callable[[TENSORS], None]) -> None:
    report = diagnose_stored(base, draft=reweighted(base, tmp_path / "draft", fault))
    assert blamed(report) == ["vocab"], report.verdict()
    assert VOCABULARIES[fault] in text_of(report, "vocab")


def test_another_embedding_than_the_targets(base: Path, tmp_path: Path) -> None:
    def add(tensors: TENSORS) -> None:
        tensors["embed_tokens.weight"] = torch.randn(301, 32, generator=torch.Generator().manual_seed(1)) * 0.2

    report = diagnose_stored(base, draft=reweighted(base, tmp_path / "draft", add))
    assert blamed(report) == ["embedding"] and "301 of 301 rows differ" in text_of(report, "embedding")


def test_other_rotary_parameters_and_too_few_positions(base: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 17.0}
    report = diagnose_stored(base, draft=changed(base, tmp_path / "theta", rope_parameters=rope, rope_theta=17.0))
    assert blamed(report) == ["rope"] and "rope_theta 17.0" in text_of(report, "rope")
    report = diagnose_stored(base, draft=changed(base, tmp_path / "short", max_position_embeddings=128))
    assert blamed(report) == ["rope"] and "max_position_embeddings is 128, the target's 512" in text_of(report, "rope")


def test_weights_that_are_not_those_of_the_training(base: Path, tmp_path: Path) -> None:
    """What the training recorded is missed by more than chance."""
    config = json.loads((find_draft(None, base / "run") / CONFIG).read_text())
    config["eyas"]["extra"]["held_out"]["accuracy"][0] = {"value": 0.6, "low": 0.5, "high": 0.7}
    report = diagnose_stored(base, draft=changed(base, tmp_path / "draft", eyas=config["eyas"]))
    assert blamed(report) == ["accuracy"] and "recorded 0.600" in text_of(report, "accuracy")


def test_a_checkpoint_with_a_tensor_missing(base: Path, tmp_path: Path) -> None:
    def lose(tensors: TENSORS) -> None:
        del tensors["norm.weight"]

    report = diagnose_stored(base, draft=reweighted(base, tmp_path / "draft", lose))
    assert blamed(report) == ["files"] and "missing norm.weight" in text_of(report, "files")


def test_of_two_faults_the_upstream_one_is_the_verdict(base: Path, tmp_path: Path) -> None:
    table = remasked(base, tmp_path / "samples.parquet", moved(1))
    draft = reweighted(base, tmp_path / "draft", absolute)
    report = diagnose_stored(base, f"data.samples={table}", draft=draft)
    assert blamed(report) == ["mask", "vocab"]
    assert (
        report.verdict().startswith("the most upstream broken link is 'mask'")
        and "also broken: vocab" in report.verdict()
    )


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_line_a_link_and_its_exit_code_tells(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = reweighted(base, tmp_path / "draft", absolute)
    asked = ["doctor", "acceptance", str(base / "run.toml"), "engine.check_layers=off"]
    assert cli.app([*asked, "--draft", str(draft)], standalone_mode=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14 and lines[-1].startswith("verdict the most upstream broken link is 'vocab'")
    assert sum(line.startswith("BROKEN") for line in lines) == 1
    assert cli.app([*asked, "--json"], standalone_mode=False) in (0, None)
    value = json.loads(capsys.readouterr().out)
    assert value["broken"] is None and [f["link"] for f in value["findings"]] == list(LINKS)[:13]
    with pytest.raises(ConfigError, match="holds no drafter"):
        cli.app([*asked, "--draft", str(tmp_path / "nothing")], standalone_mode=False)
