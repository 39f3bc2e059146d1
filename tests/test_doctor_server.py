"""The doctor before a server: what is served wrongly is told from what was trained wrongly."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import transformers

import doctor_data
import tiny_models
from doctor_data import changed, diagnose
from eyas import config as configuration
from eyas.config import EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.doctor import serving as judge
from eyas.doctor.findings import Finding, Report
from eyas.doctor.live import Live, decode_questions
from eyas.doctor.material import Material, Question
from eyas.doctor.paper import Paper
from eyas.doctor.server import Answer, Served, Server
from eyas.engine.hf import HfEngine
from eyas.errors import ConfigError
from eyas.model import checkpoint as engine_layout
from eyas.records import as_token_ids
from eyas.train.drafts import find_draft


@dataclass
class StandIn:
    """A server that decodes with our own drafter, and misbehaves as its fields say."""

    live: Live
    tokenizer: Any
    about: dict[str, Any]
    kind: str = "sglang"
    keeps: float = 1.0
    """Share of what the drafter would get accepted."""
    extra_token: bool = False
    """A template that doubles the first token."""
    wrong_answers: bool = False
    foreign: int = 0
    """Tokens of other people's requests, for each of ours."""
    counters: dict[str, int] = field(default_factory=lambda: {"drafts": 0, "accepted": 0, "drafted": 0, "tokens": 0})

    def answer(self, ids: list[int], num_new: int) -> tuple[list[int], int, int]:
        """Tokens, verifications, accepted drafted tokens."""
        (ours,) = decode_questions(self.live, [Question(0, as_token_ids(ids), num_new)], chain=3)
        accepted = int(ours.accepted * self.keeps)
        verifications = ours.verifications + ours.accepted - accepted
        tokens = list(ours.token_ids)
        return [t + 1 for t in tokens] if self.wrong_answers else tokens, verifications, accepted

    def reply(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.kind == "sglang" and (method, path) == ("GET", "/server_info"):
            return 200, self.about
        if self.kind == "vllm" and body.get("model", "its name") != "its name":
            return 404, {"error": "no such model"}
        if (method, path) == ("POST", "/tokenize"):
            text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return 200, {"tokens": [ids[0], *ids] if self.extra_token else ids, "count": len(ids)}
        if self.kind == "sglang" and (method, path) == ("POST", "/generate"):
            tokens, verifications, accepted = self.answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            meta = {"completion_tokens": len(tokens)}
            if self.about.get("speculative_algorithm"):
                meta |= {"spec_verify_ct": verifications, "spec_num_correct_drafts": accepted}
            return 200, {"output_ids": tokens, "meta_info": meta}
        if self.kind == "vllm":
            if path == "/version":
                return 200, {"version": "0.0.stand-in"}
            if path == "/v1/models":
                return 200, {"data": [{"id": "its name", "root": self.about["model_path"]}]}
            if path == "/metrics":
                return 200, self.metrics()
            if path == "/v1/completions":
                tokens, verifications, accepted = self.answer(body["prompt"], body["max_tokens"])
                new = {"drafts": verifications, "accepted": accepted, "drafted": 3 * verifications,
                       "tokens": len(tokens) + self.foreign}  # fmt: skip
                self.counters = {name: n + new[name] for name, n in self.counters.items()}
                return 200, {"choices": [{"token_ids": tokens}], "usage": {"completion_tokens": len(tokens)}}
        return 404, {"error": "not here"}

    def metrics(self) -> str:
        names = {"drafts": "spec_decode_num_drafts", "accepted": "spec_decode_num_accepted_tokens",
                 "drafted": "spec_decode_num_draft_tokens", "tokens": "generation_tokens"}  # fmt: skip
        lines = ["# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts."]
        for name, count in self.counters.items():
            lines.append(f'vllm:{names[name]}_total{{engine="0",model_name="target"}} {float(count)}')
        lines.append('vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 1.0')
        return "\n".join(lines)


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, value = stand_in.reply(method, self.path, body)
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return doctor_data.base_in(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def live(base: Path) -> Live:
    engine = HfEngine(TargetConfig(path=base / "target"), EngineConfig(device="cpu", dtype="float32"), (1, 2))
    draft, vocab_map, _ = engine_layout.load(find_draft(None, base / "run"), target=base / "target")
    return Live.load(engine, draft, vocab_map, base / "target")


def stand_in(
    base: Path, live: Live, *, kind: str = "sglang", about: dict[str, Any] | None = None, **how: Any
) -> StandIn:
    told = {
        "version": "0.0.stand-in", "model_path": str(base / "target"), "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(find_draft(None, base / "run")), "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "quantization": None, **(about or {}),
    }  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "target")
    return StandIn(live, tokenizer, told, kind, **how)


def examined(base: Path, server: StandIn) -> Report:
    """The whole chain, as the command runs it."""
    with serving(server) as url:
        return diagnose(base, server=url)


@dataclass
class Heard:
    """The links of the server alone: what it says and answers, and what is found of it."""

    engine: Finding
    served: Finding
    serving: Finding


def heard(base: Path, live: Live, server: StandIn) -> Heard:
    material = Material(
        configuration.load(base / "run.toml", []), SampleTable.open(base / "samples.parquet"), base / "states"
    )
    questions = material.questions()[:5]
    ours = decode_questions(live, questions, chain=3)
    with serving(server) as url, Server(url) as asked:
        answers = [asked.answer(q.prompt.tolist(), q.num_new_tokens) for q in questions]
        about = asked.about
    served = Served(tuple(a for a in answers if isinstance(a, Answer)))
    assert len(served.answers) == len(answers), answers
    paper = Paper.read(find_draft(None, base / "run"))
    return Heard(
        judge.judge_engine(about, served, judge.length_of(ours)),
        judge.judge_served(about, paper, base / "target", material.digest, "none", served, ours),
        judge.judge_serving(about, served, ours, 3),
    )


def blamed(report: Report) -> list[str]:
    return [f.link for f in report.findings if f.state == "broken"]


def text_of(report: Report, link: str) -> str:
    return next(f.text for f in report.findings if f.link == link)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_that_does_what_decoding_here_does(base: Path, live: Live, kind: str) -> None:
    report = examined(base, stand_in(base, live, kind=kind))
    assert {f.state for f in report.findings} == {"ok"}, [f.line() for f in report.findings]
    there, here = (next(f.numbers[name] for f in report.findings if f.link == "serving") for name in ("there", "here"))
    assert there == pytest.approx(here) and there > 1.1


def test_eagle_instead_of_eagle3(base: Path, live: Live) -> None:
    report = examined(base, stand_in(base, live, about={"speculative_algorithm": "EAGLE"}, keeps=0.0))
    assert blamed(report) == ["engine"]
    assert "--speculative-algorithm EAGLE:" in text_of(report, "engine") and "EAGLE3" in report.verdict()


def test_a_good_drafter_that_is_served_wrongly(base: Path, live: Live) -> None:
    report = examined(base, stand_in(base, live, keeps=0.4))
    assert blamed(report) == ["serving"] and "the drafter is served wrongly" in text_of(report, "serving")


def test_a_template_that_doubles_the_first_token(base: Path, live: Live) -> None:
    report = examined(base, stand_in(base, live, extra_token=True))
    assert blamed(report) == ["tokens"] and "a doubled first token" in text_of(report, "tokens")


def test_a_server_without_speculation(base: Path, live: Live) -> None:
    found = heard(base, live, stand_in(base, live, about={"speculative_algorithm": None}))
    assert found.engine.state == "broken" and "without speculative decoding" in found.engine.text


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_acceptance_of_exactly_nothing(base: Path, live: Live, kind: str) -> None:
    """vLLM does not name its method; what it accepts does."""
    found = heard(base, live, stand_in(base, live, kind=kind, keeps=0.0))
    assert found.engine.state == "broken" and "exactly 1.00" in found.engine.text
    assert found.served.state == "ok"


def test_another_drafter_or_target_on_the_server(base: Path, live: Live, tmp_path: Path) -> None:
    other = changed(base, tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[2, 3])
    found = heard(base, live, stand_in(base, live, about={"speculative_draft_model_path": str(other)}))
    assert found.served.state == "broken" and "[2, 3], here [1, 2]" in found.served.text
    shutil.copytree(base / "target", tmp_path / "target")
    tiny_models.build("llama", seed=9).save_pretrained(tmp_path / "target")
    found = heard(base, live, stand_in(base, live, about={"model_path": str(tmp_path / "target")}))
    assert found.served.state == "broken" and "has digest" in found.served.text
    assert found.engine.state == "ok"


def test_answers_of_another_target_where_paths_cannot_be_read(base: Path, live: Live) -> None:
    about = {"model_path": "/elsewhere/target", "speculative_draft_model_path": "/elsewhere/draft"}
    found = heard(base, live, stand_in(base, live, about=about, wrong_answers=True))
    assert found.served.state == "broken" and "0 of 5 answers begin" in found.served.text
    found = heard(base, live, stand_in(base, live, about={**about, "quantization": "fp8"}))
    assert found.served.state == "broken" and "quantises the target (fp8)" in found.served.text


def test_counters_that_saw_other_requests_say_nothing(base: Path, live: Live) -> None:
    found = heard(base, live, stand_in(base, live, kind="vllm", keeps=0.4, foreign=40))
    assert found.serving.state == "unknown" and "tokens of other requests" in found.serving.text


def test_an_address_where_nobody_answers() -> None:
    for url in ("http://127.0.0.1:1", "nonsense"):
        with pytest.raises(ConfigError, match="--server"):
            Server(url)
