"""The doctor before a server: what is served wrongly is told from what was trained wrongly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import doctor_data
import tiny_models
from counting_server import Act, Asked, CountingServer
from doctor_data import changed, diagnose
from eyas import cli
from eyas import config as configuration
from eyas.config import Config, EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.doctor import serving as judge
from eyas.doctor import text
from eyas.doctor.findings import Finding, Report
from eyas.doctor.live import Live, decode_questions
from eyas.doctor.material import Material, Question
from eyas.doctor.paper import Paper
from eyas.doctor.server import Served, interview
from eyas.doctor.serving import Ours
from eyas.engine.hf import HfEngine
from eyas.errors import ConfigError
from eyas.model import checkpoint as engine_layout
from eyas.train.drafts import find_draft

CHAIN = 3
Script = Callable[[Asked], Act | None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return doctor_data.base_in(tmp_path_factory.getbasetemp())


@dataclass
class Here:
    """What decoding in this process answers, and conversations with their token ids."""

    config: Config
    material: Material
    draft: Path
    questions: list[Question]
    ours: list[Ours]
    asked: tuple[tuple[list[dict[str, Any]], list[int]], ...]

    def act(self, asked: Asked, *, shift: int = 0, **how: Any) -> Act:
        """The answer that was decoded here, every token moved by `shift`."""
        (own,) = (o for q, o in zip(self.questions, self.ours, strict=True) if q.prompt.tolist() == asked.prompt)
        return Act(answer=[t + shift for t in own.token_ids], **how)

    def as_here(self, asked: Asked, *, share: float = 1.0) -> Act:
        """And so much of it accepted, as a share of what is here."""
        act = self.act(asked)
        (own,) = (o for o in self.ours if list(o.token_ids) == act.answer)
        accepted = int(share * own.accepted)
        return Act(answer=act.answer, kept=spread(accepted, own.verifications + own.accepted - accepted))

    def render(self, messages: list[dict[str, Any]]) -> list[int] | None:
        return next((ids for known, ids in self.asked if known == messages), None)

    def server(self, script: Script | None = None, **how: Any) -> CountingServer:
        """With this drafter and target; a vLLM that tells acceptance by its counters alone."""
        told: dict[str, Any] = {"accepted": (1,), "render": self.render, "by_request": False}
        told |= {"model_path": str(self.material.target), "draft_path": str(self.draft)}
        return CountingServer(script=script or self.as_here, **{**told, **how})


def spread(accepted: int, verifications: int) -> list[int]:
    """So many accepted tokens in so many verifications of a chain."""
    full, rest = divmod(accepted, CHAIN)
    return ([CHAIN] * full + [rest] + [0] * verifications)[:verifications]


@pytest.fixture(scope="module")
def here(base: Path) -> Here:
    config = configuration.load(base / "run.toml", [])
    material = Material(config, SampleTable.open(base / "samples.parquet"), base / "states")
    path = find_draft(None, base / "run")
    engine = HfEngine(TargetConfig(path=base / "target"), EngineConfig(device="cpu", dtype="float32"), (1, 2))
    draft, vocab_map, _ = engine_layout.load(path, target=base / "target")
    questions = material.questions()
    ours = decode_questions(Live.load(engine, draft, vocab_map, base / "target"), questions, chain=CHAIN)
    engine.close()
    loaded = text.Text.load(config.target, config.data)
    assert isinstance(loaded, text.Text)
    again = text.rerender(config.data, config.target, loaded)
    assert isinstance(again, text.Rerendered)
    return Here(config, material, path, questions, ours, again.asked[:4])


@dataclass
class Heard:
    """The links of the server alone: what it says and answers, and what is found of it."""

    served: Served
    engine: Finding
    weights: Finding
    tokens: Finding
    serving: Finding

    def blamed(self) -> list[str]:
        return [f.link for f in (self.engine, self.weights, self.tokens, self.serving) if f.state == "broken"]


def heard(here: Here, server: CountingServer) -> Heard:
    with server:
        served = interview(server.url, here.config, here.questions, [messages for messages, _ in here.asked], {2})
    pairs = [(ids, theirs) for (_, ids), theirs in zip(here.asked, served.rendered, strict=False)]
    material = here.material
    return Heard(
        served,
        judge.judge_engine(served, judge.length_of(here.ours)),
        judge.judge_served(served, Paper.read(here.draft), material.target, material.digest, "none", here.ours),
        judge.judge_tokens(pairs, served.not_rendered),
        judge.judge_serving(served, here.ours, CHAIN),
    )


def text_of(report: Report, link: str) -> str:
    return next(f.text for f in report.findings if f.link == link)


# -- the whole chain ---------------------------------------------------------------------------------------------------


def test_a_server_that_does_what_decoding_here_does(base: Path, here: Here) -> None:
    with here.server() as server:
        report = diagnose(base, server=server.url)
    assert {f.state for f in report.findings} == {"ok"}, [f.line() for f in report.findings]
    there, own = (next(f.numbers[name] for f in report.findings if f.link == "serving") for name in ("there", "here"))
    assert there == pytest.approx(own) and there > 1.1


def test_eagle_instead_of_eagle3(base: Path, here: Here) -> None:
    with here.server(here.act, engine="sglang", algorithm="EAGLE", accepted=(0,)) as server:
        report = diagnose(base, server=server.url)
    assert [f.link for f in report.findings if f.state == "broken"] == ["engine"]
    assert "--speculative-algorithm EAGLE:" in text_of(report, "engine") and "EAGLE3" in report.verdict()
    assert "'engine' is broken" in text_of(report, "serving")


# -- the server alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_each_way_of_counting_says_the_same(here: Here, engine: str, by_request: bool) -> None:
    found = heard(here, here.server(engine=engine, by_request=by_request))
    assert not found.blamed() and found.serving.state == "ok", found
    assert found.serving.numbers["there"] == pytest.approx(found.serving.numbers["here"])
    # vLLM does not say where its drafter lies.
    assert ("drafter of the same bytes" in found.weights.text) == (engine == "sglang")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_good_drafter_that_is_served_wrongly(here: Here, engine: str) -> None:
    found = heard(here, here.server(lambda asked: here.as_here(asked, share=0.4), engine=engine))
    assert found.blamed() == ["serving"] and "the drafter is served wrongly" in found.serving.text
    # vLLM does not say which drafter it has.
    assert ("or is another one" in found.serving.text) == (engine == "vllm")


def test_a_template_that_doubles_the_first_token(here: Here) -> None:
    def doubled(messages: list[dict[str, Any]]) -> list[int]:
        ids = here.render(messages)
        assert ids is not None
        return [ids[0], *ids]

    found = heard(here, here.server(render=doubled))
    assert found.blamed() == ["tokens"] and "a doubled first token" in found.tokens.text


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_without_speculation(here: Here, engine: str) -> None:
    found = heard(here, here.server(lambda asked: here.act(asked), engine=engine, accepted=()))
    assert found.blamed() == ["engine"] and "without speculative decoding" in found.engine.text
    assert {"sglang": "--speculative-algorithm EAGLE3", "vllm": "--speculative-config"}[engine] in found.engine.do


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_acceptance_of_exactly_nothing(here: Here, engine: str) -> None:
    """vLLM does not name its method; what it accepts does."""
    found = heard(here, here.server(here.act, engine=engine, accepted=(0,)))
    assert found.engine.state == "broken" and "exactly 1.00" in found.engine.text
    assert found.weights.state == "ok"


def test_another_drafter_or_target_on_the_server(base: Path, here: Here, tmp_path: Path) -> None:
    other = changed(base, tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[2, 3])
    found = heard(here, here.server(engine="sglang", draft_path=str(other)))
    assert found.blamed() == ["served"] and "[2, 3], here [1, 2]" in found.weights.text
    shutil.copytree(base / "target", tmp_path / "target")
    tiny_models.build("llama", seed=9).save_pretrained(tmp_path / "target")
    found = heard(here, here.server(model_path=str(tmp_path / "target")))
    assert found.blamed() == ["served"] and "has digest" in found.weights.text


def test_answers_of_another_target_where_paths_cannot_be_read(here: Here) -> None:
    far: dict[str, Any] = {"model_path": "/elsewhere/target", "draft_path": "/elsewhere/draft", "engine": "sglang"}
    found = heard(here, here.server(lambda asked: here.act(asked, shift=1), **far))
    assert found.weights.state == "broken" and "0 of 8 answers begin" in found.weights.text
    found = heard(here, here.server(**far, quantisation="fp8"))
    assert found.weights.state == "broken" and "quantises the target (fp8)" in found.weights.text


def test_counters_that_saw_other_requests_say_nothing(here: Here) -> None:
    found = heard(here, here.server(lambda asked: here.act(asked, foreign=(1, 40))))
    assert found.serving.state == "unknown" and "320 tokens of other requests" in found.serving.text
    assert not found.blamed()


def test_only_answers_that_were_counted_alone_are_judged(here: Here) -> None:
    def script(asked: Asked) -> Act:
        # A short visit of somebody else, of whom much is accepted.
        return here.act(asked, foreign=(1, 40)) if asked.nth == 2 else here.as_here(asked)

    found = heard(here, here.server(script))
    assert found.serving.state == "ok" and "on the same 7 prompts" in found.serving.text


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (Act(status=500, text="out of memory"), "prompt 2: the server answers 500: out of memory"),
        (Act(restart=True), "was started anew in the middle"),
        (Act(cut_events=1), "gone while it answered"),
    ],
    ids=["error", "restart", "cut"],
)
def test_what_was_answered_before_a_failure_is_still_looked_at(here: Here, act: Act, why: str) -> None:
    found = heard(here, here.server(lambda asked: act if asked.nth == 3 else here.as_here(asked)))
    assert len(found.served.answers) == 2 and why in found.served.failure
    assert found.serving.state == "unknown" and "2 prompts are too few" in found.serving.text
    assert found.tokens.state == "ok" and not found.blamed()


def test_a_server_that_can_answer_nothing_is_no_broken_link(here: Here) -> None:
    found = heard(here, here.server(lambda asked: Act(status=503, text="loading"), render=lambda messages: None))
    assert [f.state for f in (found.engine, found.tokens, found.serving)] == ["unknown"] * 3
    assert "answers 503: loading" in found.engine.text and "it answers 404 to /tokenize" in found.tokens.text


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
def test_an_address_where_nobody_answers_is_told_before_anything_is_computed(
    base: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^--server {url}"):
        cli.app(["doctor", "acceptance", str(base / "run.toml"), "--server", url], standalone_mode=False)
    assert not capsys.readouterr().out


def test_a_server_of_another_kind_is_refused(here: Here) -> None:
    with CountingServer(engine="other") as server, pytest.raises(ConfigError, match="neither SGLang nor vLLM"):
        interview(server.url, here.config)
