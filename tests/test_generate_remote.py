"""Answers over real HTTP from a server that misbehaves on a script: every row once, every reason counted."""

from __future__ import annotations

import email.utils
import io
import itertools
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.config import GenerateConfig
from eyas.errors import ConfigError, DataError, EngineError, EngineUnavailable, EyasError, Stopped
from eyas.generate.answers import rejects_path
from eyas.generate.monitor import events_path, heartbeat_path
from eyas.generate.receipt import RemoteReceipt
from eyas.generate.remote import generate
from eyas.generate.status import is_answers, status
from eyas.log import Progress
from misbehaving_server import END, Act, Asked, MisbehavingServer, Script, error, ids_of, now_and_then, text_of


def asking(*users: str, system: str = "", **more: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for user in users:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": None}]
    return {"messages": messages[:-1], **more}


class Setting:
    """Prompts and an output in one directory, and the way to run them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prompts, self.out = directory / "prompts.jsonl", directory / "out.jsonl"
        self.stream = io.StringIO()
        self.stop = threading.Event()

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ask(self, num: int) -> None:
        self.write([asking(f"question {i}", id=f"p{i}") for i in range(num)])

    def run(self, *urls: str, retry_rejects: bool = False, **config: Any) -> RemoteReceipt:
        options = {"max_new_tokens": 64, "model": "target", "concurrency": 8, **config}
        return generate(
            GenerateConfig(prompts=self.prompts, out=self.out, endpoints=urls, **options),
            Progress(interval_s=0.2, stream=self.stream),
            self.stop,
            retry_rejects=retry_rejects,
        )

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in _lines(self.out)}

    def rejects(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in _lines(rejects_path(self.out))}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in _lines(events_path(self.out)) if event["event"] == kind]

    def everything(self) -> bytes:
        """Every byte that the runs left behind, and what they said."""
        return b"".join(p.read_bytes() for p in self.directory.iterdir()) + self.stream.getvalue().encode()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@pytest.fixture
def serve() -> Iterator[Callable[..., MisbehavingServer]]:
    servers: list[MisbehavingServer] = []

    def start(script: Script = lambda asked: None, **options: Any) -> MisbehavingServer:
        servers.append(MisbehavingServer(script, **options).__enter__())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


Serve = Callable[..., MisbehavingServer]


def once(act: Callable[[], Act]) -> Script:
    """Misbehaves at the first time of asking."""
    return lambda asked: act() if asked.nth == 1 else None


def about(text: str, act: Callable[[Asked], Act | None]) -> Script:
    """Misbehaves where the last message says so."""
    return lambda asked: act(asked) if text in asked.last else None


def says(content: Any, finish_reason: str = "stop", **more: Any) -> Act:
    return Act(
        edit=lambda right: right["choices"][0].update(
            finish_reason=finish_reason, message={"role": "assistant", "content": content, **more}
        )
    )


# What a good server's answers become


def test_whole_conversations_are_answered_on_the_regenerated_history(setting: Setting, serve: Serve) -> None:
    given = asking("a", "b", "c", system="be kind", id="x", tags=["t"], source="s")
    given["messages"][2]["content"] = "somebody else's words"
    setting.write([given])
    server = serve()
    receipt = setting.run(server.url)
    (row,) = setting.rows().values()
    history: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}]
    for user in "abc":
        history.append({"role": "user", "content": user})
        history.append({"role": "assistant", "content": text_of(history)})
    assert row["messages"] == history
    assert [len(asked.body["messages"]) for asked in server.asked] == [2, 4, 6]
    assert server.asked[2].body["messages"] == history[:-1]
    assert (row["id"], row["tags"], row["source"], row["finish_reason"]) == ("x", ["t"], "s", ["stop"] * 3)
    assert (receipt.planned, receipt.answered, dict(receipt.finish_reasons)) == (1, 1, {"stop": 3})


def test_token_ids_are_the_engines_and_the_mask_is_on_what_it_wrote(setting: Setting, serve: Serve) -> None:
    setting.write([asking("a", "b", id="x")])
    receipt = setting.run(serve().url)
    row = setting.rows()["x"]
    whole = ids_of(row["messages"])[:-1]
    assert row["input_ids"] == whole
    written = [(i, m["content"].encode()) for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
    supervised = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert supervised == [*written[0][1], END, *written[1][1], END]
    assert "retokenized" not in row and "turns" not in row
    assert receipt.usage.completion_tokens == len(supervised) and receipt.retokenized == 0


def test_template_that_rewrites_history_keeps_ids_turn_by_turn(setting: Setting, serve: Serve) -> None:
    def forget(asked: Asked) -> Act:
        ids = [1, *ids_of(asked.body["messages"])] if len(asked.body["messages"]) > 1 else [2, 3]
        return Act(edit=lambda right: right.update(prompt_token_ids=ids))

    setting.write([asking("a", "b", id="x")])
    setting.run(serve(forget).url)
    row = setting.rows()["x"]
    assert "input_ids" not in row and "loss_mask" not in row and "retokenized" not in row
    assert [turn["prompt_ids"][0] for turn in row["turns"]] == [2, 1]
    assert [turn["token_ids"] for turn in row["turns"]] == [
        [*m["content"].encode(), END] for m in row["messages"] if m["role"] == "assistant"
    ]


def test_a_server_without_ids_is_told_in_row_and_receipt(setting: Setting, serve: Serve) -> None:
    setting.write([asking("a", "b", id="x")])
    receipt = setting.run(serve(ids=False).url)
    row = setting.rows()["x"]
    assert row["retokenized"] is True
    assert not {"input_ids", "loss_mask", "turns"} & row.keys()
    assert receipt.retokenized == 1 and any("tokenise them anew" in line for line in receipt.lines())


def test_a_server_that_refuses_the_unknown_field_is_asked_without_it(setting: Setting, serve: Serve) -> None:
    def strict(asked: Asked) -> Act | None:
        if "return_token_ids" in asked.body:
            return Act(status=400, body=error("Unrecognized request argument supplied: return_token_ids"))
        return None

    setting.ask(30)
    server = serve(strict, ids=False)
    receipt = setting.run(server.url)
    assert receipt.answered == 30 and not receipt.rejected
    assert sum("return_token_ids" in asked.body for asked in server.asked) <= 16


def test_request_says_what_the_run_file_says(setting: Setting, serve: Serve) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    setting.write([asking("a", id="x", tools=tools), asking("b")])
    server = serve()
    setting.run(server.url, temperature=0.7, top_p=0.9, seed=5, providers=("A", "B"), quantizations=("fp8",),
                extra={"top_k": 20})  # fmt: skip
    first, second = sorted((asked.body for asked in server.asked), key=lambda body: body["messages"][0]["content"])
    assert first["tools"] == tools and "tools" not in second
    assert first["provider"] == {"order": ["A", "B"], "allow_fallbacks": False, "quantizations": ["fp8"]}
    assert (first["temperature"], first["top_p"], first["top_k"], first["max_tokens"]) == (0.7, 0.9, 20, 64)
    assert first["seed"] != second["seed"]
    assert setting.rows()["x"]["sampling"] == {
        "temperature": 0.7, "max_new_tokens": 64, "seed": 5, "top_p": 0.9, "extra": {"top_k": 20}
    }  # fmt: skip


def test_the_only_model_is_asked_for_and_several_are_not_guessed(setting: Setting, serve: Serve) -> None:
    setting.ask(1)
    setting.run(serve(models=["just-this"]).url, model="")
    assert setting.rows()["p0"]["target"] == {"model": "just-this"}
    with pytest.raises(ConfigError, match=r"lists 2 models; set generate\.model, a, b say"):
        setting.run(serve(models=["a", "b"]).url, model="")


def test_numbers_beyond_64_bits_pass_through(setting: Setting, serve: Serve) -> None:
    row = asking("a", id="x")
    row["messages"][0]["serial"] = 10**30
    setting.write([row])
    server = serve()
    setting.run(server.url)
    assert setting.rows()["x"]["messages"][0]["serial"] == 10**30 == server.asked[0].body["messages"][0]["serial"]
    assert setting.run(server.url).new_requests == 0


def test_tool_calls_are_kept_and_results_follow_the_calls_that_were_made(setting: Setting, serve: Serve) -> None:
    call = {"id": "new-1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}

    def script(asked: Asked) -> Act | None:
        return says(None, "tool_calls", tool_calls=[call]) if asked.body["messages"][-1]["role"] == "user" else None

    result = {"role": "tool", "tool_call_id": "old-1", "name": "f", "content": "42"}
    good = asking("a", id="good")
    good["messages"] += [{"role": "assistant", "tool_calls": [{"id": "old-1"}]}, result]
    other = asking("b", id="other")
    other["messages"] += [{"role": "assistant"}, {**result, "name": "g"}]
    setting.write([good, other])
    receipt = setting.run(serve(script).url)
    messages = setting.rows()["good"]["messages"]
    assert messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert messages[2] == {**result, "tool_call_id": "new-1"}
    assert setting.rows()["good"]["finish_reason"] == ["tool_calls", "stop"]
    cut_short = setting.rows()["other"]
    assert (cut_short["ended_early"], len(cut_short["messages"])) == ("other_tool_call", 2)
    assert dict(receipt.ended_early) == {"other_tool_call": 1}


def test_a_tool_result_without_a_call_ends_the_conversation(setting: Setting, serve: Serve) -> None:
    row = asking("a", id="x")
    row["messages"] += [{"role": "assistant"}, {"role": "tool", "tool_call_id": "1", "content": "42"}]
    setting.write([row])
    setting.run(serve().url)
    assert setting.rows()["x"]["ended_early"] == "no_tool_call"


# Answers that are of no use


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (says("half a sent", "length"), "cut_answer"),
        (says(""), "empty_answer"),
        (says(None), "empty_answer"),
        (says(" \n"), "empty_answer"),
        (says("", reasoning_content="hm, hm"), "reasoning_only"),
        (says(None, reasoning="hm, hm"), "reasoning_only"),
        (says("…", "content_filter"), "filtered"),
        (says(None, refusal="I will not"), "filtered"),
        (Act(status=400, body=error("maximum context length is 8 tokens")), "too_long"),
    ],
)
def test_useless_answer_is_a_reject_with_its_reason(setting: Setting, serve: Serve, act: Act, reason: str) -> None:
    setting.write([asking("fine", id="fine"), asking("useless", id="x"), asking("well", "useless", id="later")])
    receipt = setting.run(serve(about("useless", lambda asked: act)).url)
    assert dict(receipt.rejected) == {reason: 1} and receipt.answered == 2
    assert setting.rejects()["x"]["reason"] == reason
    later = setting.rows()["later"]
    assert (later["ended_early"], [m["role"] for m in later["messages"]]) == (reason, ["user", "assistant"])
    assert dict(receipt.ended_early) == {reason: 1}
    if reason != "too_long":
        assert setting.rejects()["x"]["usage"]["completion_tokens"] > 0, "a useless answer is paid for all the same"


def test_cut_answers_are_kept_when_asked_for(setting: Setting, serve: Serve) -> None:
    setting.write([asking("useless", id="x"), asking("useless", "more", id="y")])
    receipt = setting.run(serve(about("useless", lambda a: says("half a sent", "length"))).url, keep_cut=True)
    assert dict(receipt.finish_reasons) == {"length": 2} and not receipt.rejected
    assert setting.rows()["x"]["finish_reason"] == ["length"] and "ended_early" not in setting.rows()["x"]
    assert setting.rows()["y"]["ended_early"] == "cut_answer"


def test_reasoning_beside_content_is_kept(setting: Setting, serve: Serve) -> None:
    setting.write([asking("a", "b", id="x")])
    server = serve(about("a", lambda asked: says("yes", reasoning_content="hm")))
    setting.run(server.url)
    assert setting.rows()["x"]["messages"][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert server.asked[1].body["messages"][1] == {"role": "assistant", "content": "yes"}


# Faults


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda: Act(status=429, headers={"retry-after": "0"}, body=error("slow")), "rate_limit"),
        (lambda: Act(status=500, body=error("fell over")), "server_error"),
        (lambda: Act(status=503, headers={"retry-after": "0"}), "overloaded"),
        (lambda: Act(status=408), "server_error"),
        (lambda: Act(body=error("upstream", 502)), "error_body"),
        (lambda: Act(edit=lambda right: right.update(choices=[])), "no_choices"),
        (lambda: Act(edit=lambda right: right["choices"][0].update(finish_reason="error")), "error_finish"),
        (lambda: Act(cut=0.5), "cut_body"),
        (lambda: Act(reset=True), "connection"),
        (lambda: Act(content_type="text/html", body=b"<html>"), "wrong_content_type"),
        (lambda: Act(body=b'{"choices": [{"mess'), "not_json"),
        (lambda: Act(hang=True), "timeout"),
        (lambda: Act(drip_s=0.2), "timeout"),
    ],
)
def test_a_fault_is_counted_by_kind_and_cured_by_another_try(
    setting: Setting, serve: Serve, act: Callable[[], Act], kind: str
) -> None:
    setting.ask(5)
    script = once(act)
    server = serve(lambda asked: script(asked) if "question 2" in asked.last else None)
    receipt = setting.run(server.url, timeout_s=0.5, timeout_s_per_1k_tokens=0)
    assert receipt.answered == 5 and not receipt.rejected
    assert dict(receipt.faults) == {kind: 1}
    assert server.num_asked == 6
    (event,) = setting.events("retry")
    assert event["kind"] == kind and event["endpoint"] == server.url


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_honoured(setting: Setting, serve: Serve, as_date: bool) -> None:
    told: list[float] = []

    def script(asked: Asked) -> Act | None:
        if asked.nth > 1:
            return None
        told.append(time.time())
        after = email.utils.formatdate(time.time() + 2, usegmt=True) if as_date else "1"
        return Act(status=429, headers={"retry-after": after}, body=error("slow"))

    setting.ask(1)
    setting.run(serve(script).url)
    assert time.time() - told[0] >= 1.0


def test_rate_limits_halve_the_requests_in_flight_and_reject_nobody(setting: Setting, serve: Serve) -> None:
    def script(asked: Asked) -> Act | None:
        if server.in_flight > 4:
            return Act(status=429, headers={"retry-after": "0.05"}, body=error("slow"))
        return Act(delay_s=0.01)

    server = serve(script)
    setting.ask(200)
    receipt = setting.run(server.url, concurrency=64, max_attempts=2)
    assert receipt.answered == 200 and not receipt.rejected
    assert receipt.faults["rate_limit"] > 0
    assert server.num_asked < 400, "it keeps asking too much"


def test_one_that_always_fails_is_rejected_and_the_others_go_on(setting: Setting, serve: Serve) -> None:
    setting.ask(40)
    script = about("question 7", lambda asked: Act(status=500, body=error("poison")) if asked.last[-1] == "7" else None)
    server = serve(lambda asked: script(asked) if asked.last == "question 7" else None)
    receipt = setting.run(server.url, max_attempts=3)
    assert dict(receipt.rejected) == {"unavailable": 1} and receipt.answered == 39
    assert "3 tries failed, the last: status 500: poison" in setting.rejects()["p7"]["detail"]
    assert setting.run(server.url, max_attempts=3).new_requests == 0


def test_refused_for_what_they_say_are_rejects(setting: Setting, serve: Serve) -> None:
    setting.ask(10)
    receipt = setting.run(serve(about("question 3", lambda a: Act(status=422, body=error("bad words")))).url)
    assert dict(receipt.rejected) == {"refused": 1}


def test_a_server_that_refuses_everybody_stops_the_run_and_rejects_nobody(setting: Setting, serve: Serve) -> None:
    setting.ask(100)
    server = serve(lambda asked: Act(status=400, body=error("unknown parameter 'top_q'")))
    with pytest.raises(EngineError, match=r"20 conversations in a row are refused.*unknown parameter 'top_q'"):
        setting.run(server.url, max_reject_burst=20)
    assert not setting.out.exists() and not setting.rejects()
    assert server.num_asked < 60


def test_a_server_that_fails_everybody_is_waited_for_and_then_given_up(setting: Setting, serve: Serve) -> None:
    setting.ask(30)
    server = serve(lambda asked: Act(status=500, body=error("CUDA error")))
    with pytest.raises(EngineUnavailable, match=r"CUDA error.*planned 30 = answered 0 \+ rejected 0 \+ pending 30"):
        setting.run(server.url, reconnect_s=3.0)
    assert not setting.rejects()
    assert server.num_asked < 200


# Several endpoints


def test_endpoints_share_by_what_they_finish(setting: Setting, serve: Serve) -> None:
    setting.ask(300)
    fast, slow = serve(lambda asked: Act(delay_s=0.01)), serve(lambda asked: Act(delay_s=0.2))
    receipt = setting.run(fast.url, slow.url, concurrency=4)
    assert receipt.answered == 300
    assert receipt.endpoints[fast.url] > 3 * receipt.endpoints[slow.url] > 0
    assert fast.most_in_flight <= 4 and slow.most_in_flight <= 4


def test_a_dead_endpoint_is_set_aside_and_taken_back(setting: Setting, serve: Serve) -> None:
    setting.ask(400)
    alive = serve(lambda asked: Act(delay_s=0.05))
    dead = serve()
    port = dead.port
    dead.stop()
    back: list[MisbehavingServer] = []
    timer = threading.Timer(1.2, lambda: back.append(serve(lambda asked: Act(delay_s=0.01), port=port)))
    timer.start()
    receipt = setting.run(alive.url, f"http://127.0.0.1:{port}/v1", concurrency=4)
    timer.join()
    assert receipt.answered == 400 and not receipt.rejected
    assert receipt.endpoints[f"http://127.0.0.1:{port}/v1"] > 0
    assert receipt.faults["gone"] <= 5, "a server that is gone is asked again and again"


def test_all_dead_for_long_is_unavailable_and_goes_on_later(setting: Setting, serve: Serve) -> None:
    setting.ask(50)
    asked_for = itertools.count(1)

    def act(asked: Asked) -> Act | None:
        if next(asked_for) == 20:
            threading.Thread(target=server.stop).start()
        return Act(delay_s=0.02)

    server = serve(act)
    with pytest.raises(EngineUnavailable, match="the same command goes on from here") as caught:
        setting.run(server.url, concurrency=1, reconnect_s=1.0)
    assert caught.value.exit_code == 3
    before = len(setting.rows())
    assert 0 < before < 50
    again = serve(port=server.port)
    receipt = setting.run(again.url)
    assert receipt.answered == 50 and receipt.new_conversations == 50 - before == again.num_asked


def test_conversations_of_several_turns_survive_faults_at_two_servers(setting: Setting, serve: Serve) -> None:
    setting.write([asking(*(f"{i}.{turn}" for turn in range(1 + i % 3)), id=f"p{i}") for i in range(300)])
    servers = [serve(now_and_then(0.15, seed)) for seed in (1, 2)]
    receipt = setting.run(*(server.url for server in servers), max_attempts=20)
    assert receipt.answered == 300 and not receipt.rejected and not receipt.ended_early
    for row in setting.rows().values():
        history: list[dict[str, Any]] = []
        for message in row["messages"]:
            if message["role"] == "assistant":
                assert message == {"role": "assistant", "content": text_of(history)}
            history.append(message)
        assert row["input_ids"] == ids_of(history)[:-1]
    assert all(n > 50 for n in receipt.endpoints.values())


# Providers


def _provider(name: Callable[[Asked], str]) -> Script:
    return lambda asked: Act(edit=lambda right: right.update(provider=name(asked), id=f"gen-{asked.last}"))


def test_who_answered_is_recorded(setting: Setting, serve: Serve) -> None:
    setting.write([asking("a", "b", id="x")])
    receipt = setting.run(serve(_provider(lambda asked: "P")).url)
    row = setting.rows()["x"]
    assert row["answered_by"] == [["P", "target", "", ""]] * 2
    assert row["generation_ids"] == ["gen-a", "gen-b"]
    assert any("answered by: P target (2)" in line for line in receipt.lines())


def test_changed_provider_stops_the_run_and_its_answer_is_not_written(setting: Setting, serve: Serve) -> None:
    setting.ask(20)
    server = serve(_provider(lambda asked: "B" if asked.last == "question 11" else "A"))
    with pytest.raises(ConfigError, match=r"provider: A before, B now.*generate.mixed_providers"):
        setting.run(server.url, concurrency=1)
    assert {row["answered_by"][0][0] for row in setting.rows().values()} == {"A"}
    assert "p11" not in setting.rows()
    other = serve(_provider(lambda asked: "B"))
    with pytest.raises(ConfigError, match="provider: A before, B now"):
        setting.run(other.url)
    receipt = setting.run(other.url, mixed_providers=True)
    assert receipt.answered == 20
    with pytest.raises(ConfigError, match="answers come from different places"):
        setting.run(other.url)


@pytest.mark.parametrize("key", ["quantization", "model", "system_fingerprint"])
def test_changed_quantisation_model_or_fingerprint_counts_as_another_provider(
    setting: Setting, serve: Serve, key: str
) -> None:
    setting.ask(5)
    script: Script = lambda asked: Act(edit=lambda right: right.update({key: str(asked.last == "question 3")}))  # noqa: E731
    with pytest.raises(ConfigError, match=r"(False|True) before, (True|False) now"):
        setting.run(serve(script).url, concurrency=1)


# Money


def _costs(cost: float) -> Script:
    return lambda asked: Act(edit=lambda right: right["usage"].update(cost=cost))


def test_cost_is_what_answers_say_and_adds_up_over_runs(setting: Setting, serve: Serve) -> None:
    setting.ask(10)
    server = serve(_costs(0.25))
    assert setting.run(server.url).usage.cost == 2.5
    setting.ask(14)
    receipt = setting.run(server.url)
    assert (receipt.usage.cost, receipt.usage.requests, receipt.new_requests) == (3.5, 14, 4)


def test_price_table_where_answers_name_no_cost(setting: Setting, serve: Serve) -> None:
    setting.ask(10)
    receipt = setting.run(serve().url, price_per_1m={"prompt": 1e6, "completion": 2e6})
    assert receipt.usage.cost == receipt.usage.prompt_tokens + 2 * receipt.usage.completion_tokens > 0
    with pytest.raises(ConfigError, match=r"price_per_1m\.completion is not set"):
        setting.run(serve().url, price_per_1m={"prompt": 1.0})


@pytest.mark.parametrize("table", [True, False])
def test_max_cost_is_never_passed_and_the_run_goes_on_with_more(setting: Setting, serve: Serve, table: bool) -> None:
    prices = {"prompt": 0.0, "completion": 1e6}
    setting.ask(200)
    server = serve((lambda asked: Act(delay_s=0.01)) if table else _costs(40.0))
    options = {"price_per_1m": prices} if table else {}
    most = 64 * 60.0 if table else 3000.0
    with pytest.raises(Stopped, match=r"generate.max_cost \d+.*is spent.*raise it") as caught:
        setting.run(server.url, max_cost=most, concurrency=16, **options)
    assert caught.value.exit_code == 3
    spent = sum(row["usage"]["cost"] for row in setting.rows().values())
    assert 0.5 * most < spent <= most
    assert server.num_asked == len(setting.rows()), "an answer was paid for and is not there"
    receipt = setting.run(server.url, max_cost=1e9, **options)
    assert receipt.answered == 200 and receipt.usage.cost > most


def test_max_cost_needs_to_know_what_answers_cost(setting: Setting, serve: Serve) -> None:
    setting.ask(50)
    server = serve()
    with pytest.raises(ConfigError, match=r"generate\.price_per_1m is empty"):
        setting.run(server.url, max_cost=1.0)
    assert server.num_asked == 1


def test_multi_turn_conversations_in_progress_are_finished_when_money_ends(setting: Setting, serve: Serve) -> None:
    setting.write([asking("a", "b", f"c{i}", id=f"p{i}") for i in range(60)])
    server = serve(lambda asked: Act(delay_s=0.01))
    with pytest.raises(Stopped, match="max_cost"):
        setting.run(server.url, max_cost=64 * 30.0, price_per_1m={"prompt": 0, "completion": 1e6})
    rows = setting.rows()
    assert rows and all(len(row["finish_reason"]) == 3 for row in rows.values())
    assert server.num_asked == 3 * len(rows)


def test_credits_used_up_is_a_clean_stop(setting: Setting, serve: Serve) -> None:
    setting.ask(30)
    server = serve(about("question 20", lambda asked: Act(status=402, body=error("Insufficient credits", 402))))
    with pytest.raises(Stopped, match=r"credits are used up.*Insufficient credits.*pending") as caught:
        setting.run(server.url, concurrency=2)
    assert caught.value.exit_code == 3
    server.script = lambda asked: None
    assert setting.run(server.url).answered == 30


def test_estimate_is_told_after_the_probe_and_before_the_rest(setting: Setting, serve: Serve) -> None:
    setting.ask(100)
    server = serve(_costs(0.5))
    setting.run(server.url)
    said = setting.stream.getvalue()
    (line,) = [line for line in said.splitlines() if "estimate from 20 prompts" in line]
    assert "80 to come" in line and "cost" in line
    (event,) = [event for event in setting.events("state") if event["state"] == "answering"]
    assert event["estimate"] in line


def test_probe_asks_twenty_and_waits(setting: Setting, serve: Serve) -> None:
    most: list[int] = []

    def script(asked: Asked) -> Act:
        most.append(server.num_asked)
        return Act(delay_s=0.3 if server.num_asked <= 20 else 0.0)

    setting.ask(60)
    server = serve(script)
    setting.run(server.url, concurrency=64)
    assert server.asked[20].last, "asked after the probe"
    probe_lines = [line for line in setting.stream.getvalue().splitlines() if "probing" in line]
    assert probe_lines


def test_no_answer_in_the_probe_stops_before_the_rest_is_paid(setting: Setting, serve: Serve) -> None:
    setting.ask(100)
    server = serve(lambda asked: says("half a", "length"))
    with pytest.raises(DataError, match=r"not one of the first 20 prompts has an answer \(cut_answer 20\)"):
        setting.run(server.url)
    assert server.num_asked == 20


# Refused keys and addresses; keys that are told nowhere

KEY = "sk-very/secret-0123456789"


def _echo(asked: Asked) -> Act | None:
    """Repeats the key wherever a server may."""
    if not asked.last.split()[-1].isdecimal():
        return None  # asked whether it lives
    told = asked.headers["authorization"]
    faults = [
        Act(status=500, body=error(f"bad {told}")),
        Act(status=400, body=error(f"unknown {told}")),
        Act(body=error(f"upstream said {told}")),
        Act(body=f"no json {told}".encode()),
        Act(content_type="text/plain", body=told.encode()),
        Act(edit=lambda right: right.update(provider=told, id=told)),
        Act(body=json.dumps({"error": {"message": told}}).replace("/", "\\/").encode()),
    ]
    choice = (int(asked.last.split()[-1]) + asked.nth) % (len(faults) + 1)
    return faults[choice] if choice < len(faults) else None


@pytest.mark.parametrize("from_file", [True, False])
def test_the_key_is_told_to_the_server_and_to_nobody_else(
    setting: Setting, serve: Serve, monkeypatch: pytest.MonkeyPatch, from_file: bool
) -> None:
    if from_file:
        key_file = setting.directory.parent / "key-outside"
        key_file.write_text(KEY + "\n")
        options: dict[str, Any] = {"api_key_file": key_file}
    else:
        monkeypatch.setenv("THE_KEY", KEY)
        options = {"api_key_env": "THE_KEY"}
    setting.ask(40)
    server = serve(_echo)
    receipt = setting.run(server.url, mixed_providers=True, max_attempts=2, **options)
    assert all(asked.headers["authorization"] == f"Bearer {KEY}" for asked in server.asked)
    everything = setting.everything() + repr(receipt).encode() + "\n".join(receipt.lines()).encode()
    assert receipt.rejected, "nothing went wrong"
    assert b"***" in everything
    assert KEY.encode() not in everything and b"secret" not in everything


@pytest.mark.parametrize("status_code", [401, 403, 404])
def test_a_refused_key_stops_the_run_with_one_clear_line(
    setting: Setting, serve: Serve, monkeypatch: pytest.MonkeyPatch, status_code: int
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    setting.ask(30)
    server = serve(lambda asked: Act(status=status_code, body=error(f"wrong key: {KEY}")))
    with pytest.raises(ConfigError, match=f"answers {status_code}") as caught:
        setting.run(server.url, api_key_env="THE_KEY")
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)
    assert KEY.encode() not in setting.everything()
    assert not setting.rejects()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoints": ("http://me:hunter2@host/v1",)}, "holds a user or a password"),
        ({"endpoints": ("http://host/v1?api-key=hunter2",)}, "goes on behind the path"),
        ({"endpoints": ("host:hunter2/v1",)}, "not an address"),
        ({"endpoints": ("ftp://host/v1",)}, "not an address"),
        ({"endpoints": ("http://host/v1/chat/completions",)}, "one step too far"),
        ({"endpoints": ("http://ho st:80/v1",)}, "not an address"),
        ({"concurrency": 10**9}, "open files"),
        ({"api_key_env": "NOT_THERE"}, "NOT_THERE .* is not set"),
        ({"api_key_env": "BROKEN"}, "is not a key"),
        ({"api_key_env": "BROKEN", "api_key_file": Path("x")}, "both set"),
        ({"api_key_file": Path("/nowhere/key")}, "cannot be read"),
        ({"extra": {"api_key": "hunter2"}}, "extra fields stand in every row"),
        ({"extra": {"user": "hunter2-hunter2"}, "api_key_env": "GOOD"}, "holds the key"),
        ({"extra": {"stream": True}}, "not for the run file to say"),
    ],
)
def test_settings_that_cannot_work_are_refused_without_repeating_a_secret(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("BROKEN", "hunter2\nhunter2")
    monkeypatch.setenv("GOOD", "hunter2-hunter2")
    setting.ask(1)
    urls = options.pop("endpoints", ("http://127.0.0.1:1/v1",))
    with pytest.raises(ConfigError, match=message) as caught:
        setting.run(*urls, **options)
    assert "hunter2" not in str(caught.value) and b"hunter2" not in setting.everything()


# Resume, stops, status


def test_resume_asks_only_for_the_rest_and_a_complete_run_asks_nobody(setting: Setting, serve: Serve) -> None:
    server = serve()
    setting.ask(10)
    setting.run(server.url)
    setting.write([asking(f"question {i}", id=f"p{i}") for i in reversed(range(15))])
    receipt = setting.run(server.url)
    assert (receipt.planned, receipt.answered, receipt.new_requests, server.num_asked) == (15, 15, 5, 15)
    asked = server.num_asked
    again = setting.run(server.url)
    assert server.num_asked == asked and "nothing left to do" in "".join(again.lines())


def test_other_settings_are_refused(setting: Setting, serve: Serve) -> None:
    setting.ask(3)
    server = serve()
    setting.run(server.url)
    with pytest.raises(ConfigError, match="max_new_tokens: 64 there, 65 here"):
        setting.run(server.url, max_new_tokens=65)


def test_stop_keeps_what_is_done_and_the_next_run_does_the_rest(setting: Setting, serve: Serve) -> None:
    setting.ask(200)
    asked_for = itertools.count(1)

    def act(asked: Asked) -> Act:
        if next(asked_for) == 50:
            setting.stop.set()
        return Act(delay_s=0.02)

    server = serve(act)
    start = time.monotonic()
    with pytest.raises(Stopped, match=r"planned 200 = answered \d+ \+ rejected 0 \+ pending \d+") as caught:
        setting.run(server.url)
    assert caught.value.exit_code == 3 and time.monotonic() - start < 6
    before = len(setting.rows())
    assert 0 < before < 200
    found = status(setting.out)
    assert (found.planned, found.answered, found.pending, found.state) == (200, before, 200 - before, "stopped")
    setting.stop.clear()
    assert setting.run(server.url).new_conversations == 200 - before


def test_a_stop_does_not_wait_for_a_server_that_hangs(setting: Setting, serve: Serve) -> None:
    setting.ask(5)
    timer = threading.Timer(0.3, setting.stop.set)
    timer.start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        setting.run(serve(lambda asked: Act(hang=True)).url)
    assert time.monotonic() - start < 8


def test_a_stop_does_not_wait_for_a_server_that_is_asked_for_its_model(setting: Setting) -> None:
    setting.ask(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        timer = threading.Timer(0.3, setting.stop.set)
        timer.start()
        start = time.monotonic()
        with pytest.raises(Stopped, match="nothing was asked"):
            setting.run(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", model="")
        assert time.monotonic() - start < 5


def test_rejects_are_tried_again_when_asked_for_and_both_outcomes_are_counted(setting: Setting, serve: Serve) -> None:
    setting.ask(6)
    setting.write([*_lines(setting.prompts), asking("question 0")])
    empty = serve(lambda asked: says("") if asked.last[-1] in "123" else None)
    first = setting.run(empty.url)
    assert (first.answered, dict(first.rejected), first.retried) == (3, {"duplicate": 1, "empty_answer": 3}, 0)
    server = serve(lambda asked: says("") if asked.last[-1] in "1" else None)
    assert setting.run(server.url).new_requests == 0
    again = setting.run(server.url, retry_rejects=True)
    assert (again.planned, again.answered, dict(again.rejected)) == (7, 5, {"duplicate": 1, "empty_answer": 1})
    assert (again.new_requests, again.retried, again.retried_answered) == (3, 3, 2)
    assert "rejects tried again: 3, 2 of them answered now" in again.lines()
    assert (again.as_dict()["retried"], again.as_dict()["retried_answered"]) == (3, 2)
    assert again.usage.requests == 9, "what the first tries took still counts"
    found = status(setting.out)
    assert (found.planned, found.answered, found.rejected, found.pending) == (7, 5, 2, 0)
    assert setting.run(server.url).new_requests == 0


def test_rejects_of_the_prompts_file_are_counted_with_the_others(setting: Setting, serve: Serve) -> None:
    setting.write(
        [asking("a"), asking("a"), asking("b", id="b"), {"messages": [{"role": "system", "content": "s"}]}, asking("a")]
    )
    receipt = setting.run(serve().url)
    assert (receipt.planned, receipt.answered) == (5, 2)
    assert dict(receipt.rejected) == {"duplicate": 2, "no_user_turn": 1}
    assert setting.run(serve().url).as_dict()["rejected"] == {"duplicate": 2, "no_user_turn": 1}


def test_broken_prompts_are_found_before_a_server_is_asked(setting: Setting, serve: Serve) -> None:
    setting.ask(30)
    with setting.prompts.open("a") as file:
        file.write('{"messages": [\n')
    server = serve()
    with pytest.raises(DataError, match="31: broken JSON"):
        setting.run(server.url)
    assert server.num_asked == 0


def test_progress_events_heartbeat_and_status_say_the_same(setting: Setting, serve: Serve) -> None:
    setting.ask(120)
    server = serve(now_and_then(0.1))
    receipt = setting.run(server.url)
    beat = json.loads(heartbeat_path(setting.out).read_text())
    assert (beat["planned"], beat["answered"], beat["pending"], beat["state"]) == (120, 120, 0, "complete")
    assert beat["faults"] == dict(receipt.faults) and beat["endpoints"][0]["url"] == server.url
    assert _lines(events_path(setting.out))[0]["event"] == "start"
    assert sum(event["answered"] for event in setting.events("commit")) == 120
    assert Counter(event["kind"] for event in setting.events("retry")) == Counter(receipt.faults)
    assert "conversations" in setting.stream.getvalue() and "requests/s" in setting.stream.getvalue()
    found = status(setting.out)
    assert (found.planned, found.answered, found.rejected, found.pending) == (120, 120, 0, 0)
    assert "complete" in found.lines()[0]


def test_other_files_are_not_taken_for_answers(setting: Setting, serve: Serve) -> None:
    setting.ask(1)
    assert not any(map(is_answers, (setting.prompts, setting.directory, Path(), setting.directory / "absent")))
    assert is_answers(setting.out) and "nothing is answered yet" in status(setting.out).lines()[0]
    setting.run(serve().url)
    assert is_answers(setting.out)
    heartbeat_path(setting.out).unlink()
    assert is_answers(setting.out) and status(setting.out).answered == 1


def test_full_disk_stops_the_run(setting: Setting, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    real, calls = os.pwrite, 0

    def full(fd: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    setting.ask(30)
    monkeypatch.setattr("eyas.generate.answers.os.pwrite", full)
    with pytest.raises(EyasError, match="no space left") as caught:
        setting.run(serve().url)
    assert caught.value.exit_code == 3
    monkeypatch.setattr("eyas.generate.answers.os.pwrite", real)
    assert setting.run(serve().url).answered == 30
