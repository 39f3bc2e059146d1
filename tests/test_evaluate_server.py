"""A drafter on a running server: figures are those of our answers, by hand; what disturbs them is told."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from counting_server import Act, Asked, CountingServer, answer_of
from eyas import cli
from eyas.config import DataConfig, EvaluateConfig, TargetConfig
from eyas.errors import (
    EXIT_FAILED,
    EXIT_INCOMPLETE,
    ConfigError,
    DataError,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    EyasError,
)
from eyas.evaluate.answers import Answer
from eyas.evaluate.client import About
from eyas.evaluate.counters import Acceptance, Counters, difference, of_sglang, of_vllm, pooled, read_counters
from eyas.evaluate.server import Servers, evaluate
from eyas.evaluate.server_receipt import ServerReceipt
from eyas.evaluate.server_runs import Level, Own, Run
from eyas.generate.key import Key
from eyas.log import Progress

PROMPTS = ([3, 5], [4, 5], [5, 5], [5, 6])
"""Answered with 7, 12, 9 and 16 tokens."""
KEPT = (2, 0, 1)
"""Drafted tokens that verifications keep, in turns. So the four answers take, by hand,

| new tokens | verifications | accepted | more than 0 | more than 1 |
|---|---|---|---|---|
| 1 + 3 + 1 + 2 = 7 | 2 0 1 | 3 | 2 | 1 |
| 12, one more behind its end | 2 0 1 2 0 1 | 6 | 4 | 2 |
| 9, one more behind its end | 2 0 1 2 | 5 | 3 | 2 |
| 16 | 2 0 1 2 0 1 2 | 8 | 5 | 3 |
| 44 | 20 | 22 | 14 | 8 |
"""
POOLED = 1 + 22 / 20
MEAN = 1 + (3 / 3 + 6 / 6 + 5 / 4 + 8 / 7) / 4


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target without a tokeniser: prompts are token ids."""
    path = tmp_path / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "token_ids": ids, "category": "ab"[i % 2]} for i, ids in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measured(
    target: Path,
    prompts: Path | None,
    server: CountingServer,
    baseline: CountingServer | None = None,
    *,
    limit: int | None = None,
    own: Callable[[int | None], Own] | None = None,
    key: str = "",
    **config: Any,
) -> ServerReceipt:
    settings = {"batch_sizes": (1,), "repeats": 1, "max_new_tokens": 64} | config
    return evaluate(
        EvaluateConfig(**settings),
        TargetConfig(path=target),
        DataConfig(),
        servers=Servers(server.url, baseline.url if baseline is not None else None),
        key=Key(key),
        prompts=prompts,
        limit=limit,
        own=own,
        progress=Progress(stream=io.StringIO()),
    )


# -- acceptance --------------------------------------------------------------------------------------------------------

TOLD = {
    "vLLM's answers": {},
    "vLLM's counters": {"by_request": False},
    "vLLM's counters, late": {"by_request": False, "late": 2},
    "vLLM without token ids": {"token_ids": False},
    "SGLang": {"engine": "sglang"},
    "SGLang, events of what is new": {"engine": "sglang", "incremental": True},
    "SGLang without counters": {"engine": "sglang", "counts": False},
}


@pytest.mark.parametrize("name", TOLD)
def test_acceptance_is_that_of_the_answers_in_both_definitions(target: Path, prompts: Path, name: str) -> None:
    with CountingServer(accepted=KEPT, **TOLD[name]) as server:
        receipt = measured(target, prompts, server, repeats=2)
    for run in receipt.runs:
        wanted = [None if name == "vLLM without token ids" else tuple(answer_of(ids)) for ids in PROMPTS]
        assert [a.token_ids for a in run.answers] == wanted
        assert [a.num_new_tokens for a in run.answers] == [7, 12, 9, 16]
    total = receipt.acceptance
    assert total is not None
    assert (total.verifications, total.accepted_tokens, total.drafted_tokens) == (2 * 20, 2 * 22, 2 * 60)
    assert total.length == pytest.approx(POOLED)
    assert receipt.acceptance_length_pooled is not None and receipt.acceptance_length_request_mean is not None
    assert receipt.acceptance_length_request_mean.value == pytest.approx(MEAN)
    # An engine that tells a histogram as long as what it saw tells no position that never accepted.
    assert total.accepted[:2] == (28, 16) and sum(total.accepted[2:]) == 0
    value = receipt.as_dict()
    assert value["acceptance"]["position_acceptance"][:2] == [0.7, 0.4]
    assert receipt.slices["a"][0] == 2 and receipt.slices["a"][1].value == pytest.approx(1 + 8 / 7)
    assert receipt.slices["b"][1].value == pytest.approx(1 + 14 / 13)
    text = "\n".join(receipt.lines())
    assert "acceptance length 2.100 [" in text and "2.098 [" in text and "1 bonus token and 1.100 drafted ones" in text
    assert "at position 0…: 0.700 0.400" in text and "conditional: 0.700 0.571" in text
    assert "by category, pooled: a 2.143" in text
    assert not receipt.warnings
    json.dumps(value)


def test_sglang_that_names_verifications_alone_misses_what_stands_behind_an_end(target: Path, prompts: Path) -> None:
    with CountingServer(engine="sglang", accepted=KEPT, by_request=False) as server:
        receipt = measured(target, prompts, server)
    # Of 44 new tokens four came with the prompts' passes, and twenty are bonus tokens.
    assert receipt.acceptance == Acceptance(20, 0, 20)


def test_figures_are_differences_and_not_totals(target: Path, prompts: Path) -> None:
    with CountingServer(accepted=KEPT, by_request=False) as server:
        first = measured(target, prompts, server)
        server.accepted = (0, 0, 1)  # the drafter got worse
        second = measured(target, prompts, server)
    assert first.acceptance is not None and first.acceptance.length == pytest.approx(POOLED)
    # 1 + 2 + 2 + 2 = 7, … by hand: accepted 1, 2, 2, 3 of 5, 9, 6, 12 verifications.
    assert second.acceptance is not None
    assert (second.acceptance.verifications, second.acceptance.accepted_tokens) == (5 + 9 + 6 + 12, 1 + 3 + 2 + 4)


def test_with_several_in_flight_counters_tell_the_pool_and_the_note_tells_how_to_know_more(
    target: Path, prompts: Path
) -> None:
    with CountingServer(accepted=KEPT, by_request=False) as server:
        receipt = measured(target, prompts, server, batch_sizes=(2,))
    assert receipt.acceptance_length_pooled is not None and receipt.acceptance_length_pooled.value == pytest.approx(2.1)
    assert receipt.acceptance_length_pooled.low is None and receipt.acceptance_length_request_mean is None
    assert any("--per-request-spec-decode-metrics summary" in note for note in receipt.notes)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_batch_sizes_are_kept_in_flight_over_whole_sets(target: Path, prompts: Path) -> None:
    in_flight = {}

    def script(asked: Asked) -> Act | None:
        # Behind the warm-up of four come 4, 8 and 8 answers.
        starts = {5: 1, 9: 3, 17: 4}
        if asked.nth in starts:
            in_flight[asked.nth] = server.most_in_flight
            server.most_in_flight = 1
        return Act(wait_for=max((n for nth, n in starts.items() if asked.nth >= nth), default=0))

    with CountingServer(accepted=KEPT, script=script) as server:
        receipt = measured(target, prompts, server, batch_sizes=(4, 1, 3), timeout_s=20.0)
        # Never more, and, or else it would not have ended, as many.
        assert (in_flight[9], in_flight[17], server.most_in_flight) == (1, 3, 4)
    sizes = [(run.batch_size, len(run.answers)) for run in receipt.runs]
    assert sizes == [(1, 4), (3, 8), (4, 8)]  # at least twice as many as are in flight
    assert [level.acceptance.length for level in receipt.levels if level.acceptance] == pytest.approx([2.1] * 3)
    assert all(run.prompts == tuple(list(range(4)) * (len(run.answers) // 4)) for run in receipt.runs)


def test_both_servers_answer_in_turns_and_who_goes_first_changes(target: Path, prompts: Path) -> None:
    with CountingServer(accepted=KEPT) as server, CountingServer() as baseline:
        receipt = measured(target, prompts, server, baseline, repeats=3)
    assert [(run.repeat, run.with_draft) for run in receipt.runs] == [
        (0, True), (0, False), (1, False), (1, True), (2, True), (2, False),
    ]  # fmt: skip
    assert receipt.identical == (12, 12)
    (level,) = receipt.levels
    assert level.speedup is not None and level.speedup.low is not None and level.speedup.high is not None
    assert level.speedup.low <= level.speedup.value <= level.speedup.high
    assert "12 of 12 answers identical with and without" in "\n".join(receipt.lines())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_requests_say_all_that_decides_an_answer_and_none_hits_a_cache(
    target: Path, prompts: Path, engine: str
) -> None:
    with CountingServer(engine=engine, accepted=KEPT) as server:
        measured(target, prompts, server, repeats=2, max_new_tokens=9, key="a-key-of-ours")
        bodies = [asked.body for asked in server.asked]
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer a-key-of-ours"}
    salts = [body["extra_key" if engine == "sglang" else "cache_salt"] for body in bodies]
    assert len(salts) == len(set(salts)) == 1 + 2 * 4
    sampling = bodies[-1].get("sampling_params", bodies[-1])
    assert sampling["temperature"] == 0 and sampling["stop_token_ids"] == [2]
    assert (sampling["top_p"], sampling["min_p"], sampling["repetition_penalty"]) == (1.0, 0.0, 1.0)
    assert sampling.get("max_new_tokens", sampling.get("max_tokens")) == 9
    assert "seed" not in sampling and "sampling_seed" not in sampling


def test_draws_get_a_seed_of_their_own(target: Path, prompts: Path) -> None:
    with CountingServer(accepted=KEPT) as server:
        receipt = measured(target, prompts, server, temperature=0.7, seed=40)
        assert [asked.body["seed"] for asked in server.asked[-4:]] == [40, 41, 42, 43]
    assert "identical" not in "\n".join(receipt.lines())


# -- what disturbs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_request", [True, False])
def test_other_traffic_is_told(target: Path, prompts: Path, by_request: bool) -> None:
    def script(asked: Asked) -> Act | None:
        return Act(foreign=(2, 100)) if asked.nth == 3 else None  # the second answer behind the warm-up

    with CountingServer(accepted=KEPT, by_request=by_request, script=script) as server:
        receipt = measured(target, prompts, server, repeats=2)
    assert [run.foreign for run in receipt.runs] == [(2, 100), (0, 0)]
    (warning,) = receipt.warnings
    assert "2 requests and 100 tokens that were not ours, in 1 of 2 runs" in warning
    assert ("counters hold them too" in warning) is not by_request
    assert receipt.acceptance is not None and receipt.acceptance.length == pytest.approx(POOLED)
    # Only the answer between whose readings it came is not known for itself.
    assert [None in run.told for run in receipt.runs] == [not by_request, False]


def test_tokens_that_nobody_counts_are_told(target: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.evaluate.client.SETTLE_S", 0.0)
    with CountingServer(accepted=KEPT, late=10**6) as server:
        receipt = measured(target, prompts, server)
    assert receipt.warnings == ["warning: the servers' counters miss 44 tokens of ours: several processes may count"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_was_started_anew_ends_the_evaluation(target: Path, prompts: Path, engine: str) -> None:
    def script(asked: Asked) -> Act | None:
        return Act(restart=asked.nth == 9)  # the last answer of the second run

    with (
        CountingServer(engine=engine, accepted=KEPT, script=script) as server,
        pytest.raises(EngineUnavailable, match="was started anew in the middle") as caught,
    ):
        measured(target, prompts, server, repeats=2)
    assert caught.value.exit_code == EXIT_INCOMPLETE


def test_answers_that_were_cut_are_told(target: Path, prompts: Path) -> None:
    with CountingServer(accepted=KEPT) as server:
        receipt = measured(target, prompts, server, max_new_tokens=9)
    assert receipt.warnings == [
        "warning: 2 of 4 answers were cut by evaluate.max_new_tokens = 9: these figures are of their beginnings"
    ]
    assert [run.num_cut for run in receipt.runs] == [2]


def test_answers_that_differ_are_counted(target: Path, prompts: Path) -> None:
    def script(asked: Asked) -> Act | None:
        return Act(answer=[*answer_of(asked.prompt)[:-2], 99, 2]) if asked.prompt == PROMPTS[2] else None

    for ids in (True, False):
        with CountingServer(accepted=KEPT, token_ids=ids) as server, CountingServer(script=script) as baseline:
            receipt = measured(target, prompts, server, baseline, repeats=2)
        assert receipt.identical == (6, 8)
        assert "6 of 8 answers identical" in "\n".join(receipt.lines())


# -- servers that are not what they must be ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_without_a_drafter_is_named_before_anything_is_asked(target: Path, prompts: Path, engine: str) -> None:
    with (
        CountingServer(engine=engine) as server,
        pytest.raises(EngineError, match=r"drafter is not active.*(EAGLE3|eagle3)") as caught,
    ):
        measured(target, prompts, server)
    assert not server.asked and caught.value.exit_code == EXIT_FAILED


def test_a_drafter_of_which_nothing_is_accepted_is_named(target: Path, prompts: Path) -> None:
    with CountingServer(engine="sglang", accepted=(0,), algorithm="EAGLE") as server:
        receipt = measured(target, prompts, server)
    assert receipt.acceptance is not None and receipt.acceptance.length == 1.0
    (warning,) = receipt.warnings
    assert "not one drafted token was accepted (acceptance length exactly 1.00)" in warning
    assert any("runs EAGLE, not EAGLE3" in note for note in receipt.notes)


def test_a_drafter_that_never_drafts_is_named(target: Path, prompts: Path) -> None:
    with CountingServer(accepted=KEPT, by_request=False) as server:
        server.script = lambda asked: Act(answer=[2])  # ends before the first verification
        receipt = measured(target, prompts, server)
    assert receipt.warnings == ["warning: the drafter is not active: the server verified nothing"]


def test_a_baseline_that_speculates_or_is_the_same_server_is_refused(target: Path, prompts: Path) -> None:
    with CountingServer(accepted=KEPT) as server, CountingServer(accepted=KEPT) as baseline:
        with pytest.raises(EngineError, match="start the baseline without a drafter"):
            measured(target, prompts, server, baseline)
        with pytest.raises(ConfigError, match="is the server with the drafter"):
            measured(target, prompts, server, server)


def test_other_engines_and_servers_without_counters_are_told(target: Path, prompts: Path) -> None:
    with (
        CountingServer(engine="sglang", accepted=KEPT, counts=False, topk=4) as server,
        CountingServer(model_path="another") as baseline,
    ):
        receipt = measured(target, prompts, server, baseline)
    assert any("drafts trees of 4 branches" in note for note in receipt.notes)
    assert "/nowhere/served, EAGLE3, 3 drafted tokens, 4 branches" in receipt.lines()[0]
    assert any("name other models: /nowhere/served and another" in note for note in receipt.notes)
    assert any("not of one engine" in note for note in receipt.notes)
    assert any("traffic of others is not seen" in note for note in receipt.notes)
    with (
        CountingServer(accepted=KEPT, counts=False) as server,
        pytest.raises(EngineError, match="--disable-log-stats"),
    ):
        measured(target, prompts, server)


def chat_target(path: Path) -> Path:
    """A tiny target whose words `w0`, `w1`, … are the tokens of these numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny_models.save("llama", path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(301)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}w1 {{ m.content }} w3 {% else %}w4 {{ m.content }} {% endif %}"
        "{% endfor %}"
    )
    tokenizer.save_pretrained(path)
    return path


def test_another_tokeniser_is_refused_and_other_weights_are_told(tmp_path: Path, prompts: Path) -> None:
    target = chat_target(tmp_path / "chat")
    other = tiny_models.save("llama", tmp_path / "other", seed=5)
    with CountingServer(engine="sglang", accepted=KEPT, tokenize=lambda text: [0] * len(text.split())) as server:
        assert not any("tokeniser" in note for note in measured(target, prompts, server).notes)
        for path, told in ((other, True), (target, False)):
            server.model_path = str(path)
            notes = measured(target, prompts, server).notes
            assert any("which has other weights than" in note for note in notes) is told
        server.tokenize = lambda text: [1, 2, 3]
        with pytest.raises(EngineError, match="makes other tokens of a text"):
            measured(target, prompts, server)
        server.tokenize = lambda text: None
        assert any("tokeniser could not be compared" in note for note in measured(target, prompts, server).notes)


FAULTS: list[tuple[str, Act, type[EyasError], str]] = [
    (
        "refused",
        Act(status=400, text='{"message": "too long"}'),
        EngineRefused,
        r"prompt p1: the server answers 400.*too",
    ),
    ("no key", Act(status=401, text="who are you"), EngineError, r"401.*generate\.api_key_env"),
    ("busy", Act(status=503, text="later"), EngineUnavailable, "answers 503: later"),
    ("many", Act(status=429), EngineUnavailable, "429"),
    ("cut off", Act(cut_events=2), EngineUnavailable, "gone while it answered"),
    ("silent", Act(hang=True), EngineUnavailable, r"no whole answer within evaluate\.timeout_s = 0\.5 s"),
    ("error", Act(event={"error": {"message": "out of memory"}}), EngineError, "breaks off: .*out of memory"),
    ("strange", Act(event={"x": 1}), EngineError, "an event that is not understood"),
    ("list", Act(event=[1]), EngineError, "an event that is no object"),
]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", [name for name, *_ in FAULTS])
def test_a_fault_is_one_line_of_the_right_class(target: Path, prompts: Path, name: str, engine: str) -> None:
    _, act, kind, text = next(fault for fault in FAULTS if fault[0] == name)

    def script(asked: Asked) -> Act | None:
        return act if asked.prompt == PROMPTS[1] else None

    with CountingServer(engine=engine, accepted=KEPT, script=script) as server:
        with pytest.raises(kind, match=text) as caught:
            measured(target, prompts, server, timeout_s=0.5, batch_sizes=(2,))
        assert server.url in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == (EXIT_INCOMPLETE if kind is EngineUnavailable else EXIT_FAILED)


def test_an_answer_to_other_tokens_than_were_sent_is_refused(target: Path, prompts: Path) -> None:
    def script(asked: Asked) -> Act | None:
        asked.prompt.append(7)  # a second first token, say
        return None

    with (
        CountingServer(accepted=KEPT, script=script) as server,
        pytest.raises(EngineError, match="2 tokens were sent, the server read 3"),
    ):
        measured(target, prompts, server)


def test_what_is_no_server_of_these_is_told(target: Path, prompts: Path) -> None:
    with (
        CountingServer(engine="other") as server,
        pytest.raises(EngineError, match="answers as neither SGLang nor vLLM"),
    ):
        measured(target, prompts, server)
    with pytest.raises(EngineUnavailable, match="no server answers there"):
        measured(target, prompts, server)
    for url in ("127.0.0.1:1", "ftp://x", "http://", "http://a:0"):
        server.port = 0
        with pytest.raises(ConfigError, match=r"--server .* is not an address"):
            evaluate(
                EvaluateConfig(), TargetConfig(path=target), DataConfig(), servers=Servers(url), key=Key(),
                prompts=prompts, limit=None, own=None, progress=Progress(stream=io.StringIO()),
            )  # fmt: skip


def test_prompts_that_do_not_fit_are_skipped_and_told(target: Path, prompts: Path) -> None:
    with prompts.open("a") as out:
        out.write(json.dumps({"id": "long", "token_ids": [5] * 40}) + "\n")
    with CountingServer(accepted=KEPT, max_tokens=100) as server:
        receipt = measured(target, prompts, server)
        assert receipt.skipped == {"long": "40 tokens and 64 new ones; the server takes 100"}
        assert len(receipt.prompts) == 4 and "skipped 1 prompts; first: long" in "\n".join(receipt.lines())
        with pytest.raises(DataError, match="none of its 5 prompts can be asked; first: p0: 2 tokens and 99 new ones"):
            measured(target, prompts, server, max_new_tokens=99)


# -- turns, and this process -------------------------------------------------------------------------------------------


def test_a_later_turn_stands_on_the_plain_servers_answer(tmp_path: Path) -> None:
    target = chat_target(tmp_path / "chat")
    path = tmp_path / "turns.jsonl"
    rows = [
        {"question_id": 81, "category": "x", "turns": ["w5 w6", "w7", "w8 w9"]},
        {"question_id": 81, "category": "y", "turns": ["w10"]},  # the same name: still a prompt of its own
        {"question_id": 83, "turns": ["w11", "w12"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with CountingServer(accepted=KEPT) as server, CountingServer() as baseline:
        receipt = measured(target, path, server, baseline, limit=2, max_new_tokens=5)
        first_asked = baseline.asked[0].prompt
    first = [1, 5, 6, 3]
    assert first_asked == first
    second = [*first, 4, *answer_of(first)[:5], 1, 7, 3]
    third = [*second, 4, *answer_of(second)[:5], 1, 8, 9, 3]
    assert [(p.name, list(p.token_ids), p.category) for p in receipt.prompts] == [
        ("81", first, "x"), ("81 turn 2", second, "x"), ("81 turn 3", third, "x"), ("81", [1, 10, 3], "y"),
    ]  # fmt: skip
    assert "4 prompts (2 of them later turns)" in "\n".join(receipt.lines())
    assert set(receipt.slices) == {"x", "y"}


def test_decoding_in_this_process_is_compared(target: Path, prompts: Path) -> None:
    asked = []

    accepted = 21

    def own(num_draft_tokens: int | None) -> Own:
        asked.append(num_draft_tokens)
        answers = {tuple(ids): tuple(answer_of(ids)) for ids in PROMPTS}
        answers[5, 5] = (1, 2)
        return Own("float32", Acceptance(20, 60, accepted, (14, 7, 0)), 1.9, answers)

    with CountingServer(accepted=KEPT) as server:
        receipt = measured(target, prompts, server, own=own)
        accepted = 18
        (warning,) = measured(target, prompts, server, own=own).warnings
    assert "differs by +10.5 % from that of this process" in warning and not receipt.warnings
    assert set(asked) == {3}  # chains as long as the server's
    assert receipt.agreement == pytest.approx(2.1 / 2.05)
    assert receipt.identical_to_own == (3, 4)
    assert (
        "acceptance length 2.050 pooled, 1.900 request mean; the server's differs by +2.4 %; 3 of 4 of its answers"
        in "\n".join(receipt.lines())
    )
    assert receipt.as_dict()["own"]["agreement"] == pytest.approx(2.1 / 2.05)


# -- figures of hand-made runs -----------------------------------------------------------------------------------------


def answer(arrivals: list[tuple[float, int]], seconds: float) -> Answer:
    return Answer((1, 2), "", arrivals[-1][1], tuple(arrivals), seconds, False, None)


def run_of(repeat: int, with_draft: bool, answers: list[Answer], seconds: float) -> Run:
    return Run(8, repeat, with_draft, (0,) * len(answers), tuple(answers), (None,) * len(answers), seconds, None)


def test_latencies_and_speed_ups_by_hand() -> None:
    one = answer([(0.10, 1), (0.20, 3), (0.40, 5)], 0.41)
    other = answer([(0.30, 2)], 0.31)  # all at once: no time per token, no gap
    assert one.first_token_s == 0.1 and one.gaps_s == pytest.approx([0.1, 0.2])
    assert one.token_s == pytest.approx(0.3 / 4) and other.token_s is None and other.gaps_s == []

    runs = [run_of(r, True, [one, other], seconds) for r, seconds in enumerate((0.5, 1.0, 0.7))]
    runs += [run_of(r, False, [one, one], seconds) for r, seconds in enumerate((1.0, 2.5, 1.0))]
    level = Level(8, tuple(runs))
    assert [run.tokens_per_s for run in runs] == pytest.approx([14, 7, 10, 10, 4, 10])
    assert level.tokens_per_s(True) == pytest.approx(10) and level.tokens_per_s(False) == pytest.approx(10)
    # 14 / 10, 7 / 4, 10 / 10
    assert level.speedup is not None
    assert [level.speedup.low, level.speedup.value, level.speedup.high] == pytest.approx([1.0, 1.4, 1.75])
    assert level.token_speedup is not None and level.token_speedup.value == pytest.approx(1)
    assert level.percentiles("first_token_s", True) == pytest.approx([0.2, 0.28, 0.298])
    assert level.percentiles("gap_s", True) == pytest.approx([0.15, 0.19, 0.199])
    assert level.percentiles("total_s", False) == pytest.approx([0.41] * 3)

    about = About("http://x", "vllm", "1", "m", "", None, "eagle", 3, None, True)
    receipt = ServerReceipt(about, about, "set", (), 64, 0.0, 3, tuple(runs), {}, 1.0)
    lines = receipt.lines()
    assert "1.400 [1.000, 1.750]" in next(line for line in lines if line.split()[:1] == ["8"])
    assert any(line.split()[:7] == ["8", "with", "200.0", "/", "280.0", "/", "298.0"] for line in lines)
    assert "acceptance: the server does not tell it" in lines


# -- counters ----------------------------------------------------------------------------------------------------------

PAGE = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 44.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1",model_name="a,\\"b\\""} 16
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0",model_name="m"} 2.8e1
vllm:generation_tokens_total{engine="0"} 88.0 1796066123000
vllm:generation_tokens_total{engine="1"} 2.0
vllm:request_success_total{finished_reason="stop"} 3.0
vllm:request_success_total{finished_reason="length"} 5.0
vllm:cache_config_info{x="}"} 1.0
vllm:other NaN
process_start_time_seconds 1.79606541168e+09
broken line
sglang:generation_tokens_total 7
"""


def test_a_page_of_counters_is_read() -> None:
    found = read_counters(PAGE, "vllm")
    assert found == Counters(8, 90, 40, 120, 44, (28, 16), 1.79606541168e9)
    assert read_counters("", "vllm") is None and read_counters("x 1\n", "sglang") is None
    assert read_counters(PAGE, "sglang") == Counters(0, 7, started=1.79606541168e9)


def test_differences_of_counters() -> None:
    before = Counters(1, 10, 5, 15, 4, (3, 1), 7.0)
    assert difference(before, Counters(3, 30, 9, 27, 6, (4, 2, 0), 7.0)) == Counters(2, 20, 4, 12, 2, (1, 1, 0), 7.0)
    assert difference(before, Counters(3, 30, 9, 27, 6, (4, 2), 8.0)) is None  # another process
    assert difference(before, Counters(3, 30, 4, 27, 6, (4, 2), None)) is None  # it went back
    first = difference(Counters(), Counters(1, 9, 2, 6, 1, (1,)))  # a counter appears with its first event
    assert first == Counters(1, 9, 2, 6, 1, (1,))


def test_what_engines_tell_with_an_answer() -> None:
    assert of_vllm({"acceptance_histogram": [3, 2, 1], "num_draft_tokens": 12}) == Acceptance(6, 12, 4, (3, 1))
    assert of_vllm({}) is None and of_vllm({"acceptance_histogram": ["x"]}) is None
    old = {"spec_verify_ct": 6, "spec_accept_token_num": 4, "spec_draft_token_num": 12}
    assert of_sglang(old, 11) == Acceptance(6, 12, 4)
    assert of_sglang(old | {"spec_accept_histogram": [3, 2, 1]}, 11) == Acceptance(6, 12, 4, (3, 1))
    # A histogram that does not say what the sums say is not believed.
    assert of_sglang(old | {"spec_accept_histogram": [9, 2, 1]}, 11) == Acceptance(6, 12, 4)
    assert of_sglang({}, 5) is None and of_sglang({"spec_verify_ct": 6}, 11) == Acceptance(6, 0, 4)


def test_parts_are_pooled() -> None:
    parts = [Acceptance(6, 12, 4, (3, 1)), Acceptance(2, 4, 0), Acceptance(1, 2, 1, (1,))]
    assert pooled(parts) == Acceptance(9, 18, 5, (4, 1))
    assert pooled([*parts, Acceptance(1, 2, 1)]).accepted == ()
    assert pooled([]).length is None


# -- the command -------------------------------------------------------------------------------------------------------


def eyas(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eyas", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def run_file(tmp_path: Path, target: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[target]\npath = "target"\n[evaluate]\nbatch_sizes = [1, 2]\nrepeats = 1\n')
    return path


def test_the_command_writes_what_it_prints(run_file: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "server.json"
    with CountingServer(accepted=KEPT) as server, CountingServer() as baseline:
        done = eyas(
            "evaluate", run_file, "--server", f"{server.url}/v1", "--baseline-server", baseline.url, "--prompts",
            prompts, "--limit", 3, "--out", out, "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout)
        assert value == json.loads(out.read_text())
        assert value["num_prompts"] == 3 and value["acceptance"]["verifications"] == 13 + 26
        assert [level["batch_size"] for level in value["levels"]] == [1, 2]
        assert value["num_identical"] == value["num_compared"] == 9


def test_options_that_make_no_sense_are_refused(run_file: Path, tmp_path: Path) -> None:
    for options, why in (
        (["--server", "http://127.0.0.1:1"], "--out FILE, or --draft DIR"),
        (["--baseline-server", "http://127.0.0.1:1"], "needs --server URL"),
        (["--limit", "3"], "need --decode or --server URL"),
        (["--server", "127.0.0.1", "--out", str(tmp_path / "x.json")], "is not an address"),
    ):
        with pytest.raises(ConfigError, match=why):
            cli.app(["evaluate", str(run_file), *options], standalone_mode=False)


def test_a_stop_in_the_middle_writes_nothing(run_file: Path, prompts: Path, tmp_path: Path) -> None:
    """The third answer never comes; asked for it, the server sends the signal."""
    out = tmp_path / "server.json"
    process: list[subprocess.Popen[str]] = []

    def script(asked: Asked) -> Act | None:
        if asked.nth < 5:
            return None
        process[0].send_signal(signal.SIGINT)
        return Act(hang=True)

    with CountingServer(accepted=KEPT, script=script) as server:
        command = [sys.executable, "-m", "eyas", "evaluate", str(run_file), "--server", server.url]
        command += ["--prompts", str(prompts), "--out", str(out)]
        process.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        _, told = process[0].communicate(timeout=60)
    assert process[0].returncode == EXIT_INCOMPLETE and "stopped; nothing was written" in told
    assert "Traceback" not in told and not out.exists()
