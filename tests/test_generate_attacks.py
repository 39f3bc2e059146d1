"""What servers and run files get wrong on purpose: no answer is touched, nothing loops, fills memory or shows a key."""

from __future__ import annotations

import datetime
import html
import json
import math
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.config import GenerateConfig
from eyas.errors import ConfigError, EyasError
from eyas.generate import endpoint as endpoint_module
from eyas.generate.answers import rejects_path
from eyas.generate.key import Key, read_key
from eyas.generate.models import _model_in
from eyas.generate.receipt import RemoteReceipt
from eyas.generate.remote import generate
from eyas.generate.reply import classify
from eyas.generate.request import check_extra, check_numbers
from eyas.log import Progress
from misbehaving_server import Act, Asked, MisbehavingServer, Script, error, text_of

Serve = Callable[..., MisbehavingServer]
JSON = {"content-type": "application/json"}
SECRET = 'sk-ab/cd"ef-0123456789'


class Setting:
    """Prompts and an output in one directory, and the way to run them."""

    def __init__(self, directory: Path) -> None:
        self.prompts, self.out = directory / "prompts.jsonl", directory / "out.jsonl"
        self.directory = directory
        self.progress = Progress(interval_s=0.2)

    def ask(self, num: int, *, turns: int = 1) -> None:
        rows = []
        for i in range(num):
            messages = []
            for turn in range(turns):
                messages += [
                    {"role": "user", "content": f"question {i}.{turn}"},
                    {"role": "assistant", "content": None},
                ]
            rows.append({"id": f"p{i}", "messages": messages})
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, url: str, **config: Any) -> RemoteReceipt:
        options = {"max_new_tokens": 64, "model": "target", "concurrency": 8, "max_attempts": 2, **config}
        return generate(
            GenerateConfig(prompts=self.prompts, out=self.out, endpoints=(url,), **options),
            self.progress,
            threading.Event(),
        )

    def rows(self, path: Path | None = None) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in map(json.loads, (path or self.out).read_text().splitlines())}

    def rejects(self) -> dict[str, dict[str, Any]]:
        return self.rows(rejects_path(self.out))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[MisbehavingServer] = []

    def start(script: Script = lambda asked: None, **options: Any) -> MisbehavingServer:
        servers.append(MisbehavingServer(script, **options).__enter__())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


# The key


@pytest.mark.parametrize("key", ["EMPTY", "token", "1", "content", "0123456789"])
def test_a_key_that_occurs_in_an_answer_changes_nothing_of_it(
    setting: Setting, serve: Serve, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("THE_KEY", key)
    setting.ask(1)
    text = "The list is EMPTY; token 1 of content is 0123456789"

    def edit(right: dict[str, Any]) -> None:
        right["choices"][0]["message"]["content"] = text

    setting.run(serve(lambda asked: Act(edit=edit)).url, api_key_env="THE_KEY")
    row = setting.rows()["p0"]
    assert row["messages"][1]["content"] == text and row["generation_ids"] == ["gen-1"]
    assert row["answered_by"] == [["", "target", "", ""]] and 1 in row["loss_mask"]


@pytest.mark.parametrize(
    "spell", [str, lambda text: text.replace("/", "\\/"), lambda text: text.replace("s", "\\u0073")]
)
@pytest.mark.parametrize("status", [200, 400, 404, 429, 500])
def test_no_detail_shows_the_key_however_json_spells_it(status: int, spell: Callable[[str], str]) -> None:
    told = spell(json.dumps({"message": f"Bearer {SECRET} " + "x" * 270 + SECRET}))
    for body in (f'{{"error": {told}}}', f'{{"choices": [], "x": {told}}}', told, f"{{{told}", json.dumps(told)):
        outcome: Any = classify(status, JSON, body.encode(), Key(SECRET))
        assert SECRET[:9] not in outcome.detail and "ef-0123" not in outcome.detail, outcome
    outcome = classify(status, {"content-type": "text/html"}, told.encode(), Key(SECRET))
    assert "ef-0123" not in outcome.detail


@pytest.mark.parametrize(
    "spell",
    [
        lambda key: urllib.parse.quote(key, safe=""),
        lambda key: urllib.parse.quote(urllib.parse.quote(key, safe="").lower()),
        html.escape,
        lambda key: html.escape(html.escape(key)),
        lambda key: "".join(f"&#{ord(letter)};" for letter in key),
        lambda key: "".join(f"&#x{ord(letter):X};" for letter in key),
        lambda key: "".join(f"\\x{ord(letter):02x}" for letter in key),
    ],
)
def test_no_detail_shows_the_key_as_addresses_and_pages_spell_it(spell: Callable[[str], str]) -> None:
    key = "sk-or/0123+abc\"d&e'f%=<>"
    told = spell(key)
    outcome: Any = classify(502, {"content-type": "text/html"}, f"<p>Bearer {told}, sent".encode(), Key(key))
    assert outcome.detail == "status 502: <p>Bearer ***, sent"
    assert not Key(key).is_in("sk-or%2F0123%2Babd") and Key(key).is_in(told)


def test_names_that_hold_a_whole_key_are_masked_and_those_that_hold_a_short_one_are_not() -> None:
    body = json.dumps({"id": f"g-{SECRET}", "model": "token", "provider": "EMPTY",
                       "choices": [{"message": {"content": SECRET}, "finish_reason": "stop"}]}).encode()  # fmt: skip
    answer: Any = classify(200, JSON, body, Key(SECRET))
    assert answer.generation_id == "g-***" and answer.message["content"] == SECRET
    for key in ("token", "EMPTY", "-"):
        answer = classify(200, JSON, body, Key(key))
        assert answer.answered_by[:2] == ("EMPTY", "token") and answer.generation_id == f"g-{SECRET}"


def test_a_short_key_does_not_hide_what_a_text_means() -> None:
    outcome: Any = classify(400, JSON, error("maximum context length exceeded: too many tokens"), Key("length"))
    assert outcome.reason == "too_long" and "length" not in outcome.detail


@pytest.mark.parametrize("name", ["sk-SECRET123", "sk_secret123", "hf abc", "SECRET=1", "secretkey0123456789"])
def test_a_key_in_place_of_a_variables_name_is_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError, match=r"generate\.api_key_env") as caught:
        read_key(GenerateConfig(api_key_env=name))
    assert name not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["sk-SECRET123", "dir/hf_SECRET1", "0a1b2c3d4e5f6a7b8c9d0e1f", "x" * 300, "sk-a/b+c=="]
)
def test_a_key_in_place_of_a_files_name_is_not_repeated(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"generate\.api_key_file") as caught:
        read_key(GenerateConfig(api_key_file=tmp_path / name))
    assert name not in str(caught.value)


def test_plain_names_of_what_is_missing_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"variable NOT_THERE .* is not set"):
        read_key(GenerateConfig(api_key_env="NOT_THERE"))
    with pytest.raises(ConfigError, match=r"router\.key .*cannot be read"):
        read_key(GenerateConfig(api_key_file=tmp_path / "router.key"))


@pytest.mark.parametrize(
    "extra",
    [
        {"provider": {"api_key": "hunter2"}},
        {"a": [{"b": {"Authorization": "hunter2"}}]},
        {"x": {"openai-api-key": "hunter2"}},
        {"x": {"token": {"value": "hunter2"}}},
        {"x": {"client_secret": "hunter2"}},
        {"x": {"password": "hunter2"}},
        {"headers": {"x": "hunter2"}},
    ],
)
def test_secrets_in_extra_are_refused_at_any_depth(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stand in every row") as caught:
        check_extra(extra, Key())
    assert "hunter2" not in str(caught.value)


def test_extra_may_hold_what_is_no_secret() -> None:
    schema = {"type": "object", "properties": {"token": {"type": "string"}, "n": {"type": "integer"}}}
    check_extra({"response_format": {"schema": schema}, "stop": ["1"], "min_tokens": 3, "top_k": None}, Key("1"))


def test_a_model_named_like_the_key_is_refused() -> None:
    def listed(*names: str) -> bytes:
        return json.dumps({"data": [{"id": name} for name in names]}).encode()

    for body in (listed(SECRET), listed(SECRET, "other")):
        with pytest.raises(ConfigError) as caught:
            _model_in("http://host/v1", 200, body, Key(SECRET))
        assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="lists no models"):
        _model_in("http://host/v1", 200, b"[" * 100_000, Key())


# Numbers and dates in the run file


@pytest.mark.parametrize(
    "extra",
    [{"a": datetime.date(2026, 1, 1)}, {"a": [{"b": math.nan}]}, {"a": {"b": math.inf}}, {"t": datetime.time(1)}],
)
def test_extra_that_json_cannot_say_is_one_clear_line(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generate\.extra\.[at].*JSON does not know") as caught:
        check_extra(extra, Key())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"temperature": math.inf}, {"price_per_1m": {"prompt": math.nan, "completion": 1.0}},
     {"price_per_1m": {"prompt": 1.0, "completion": math.inf}}],
)  # fmt: skip
def test_numbers_that_are_none_are_one_clear_line(setting: Setting, options: dict[str, Any]) -> None:
    setting.ask(1)
    with pytest.raises(ConfigError, match="finite number"):
        setting.run("http://127.0.0.1:1/v1", **options)
    with pytest.raises(ConfigError, match="timeout_s"):
        check_numbers(GenerateConfig.model_construct(timeout_s=math.nan))


# Our own field


def _echoes(asked: Asked) -> Act | None:
    if "question 3" not in asked.last:
        return None
    detail = [{"type": "value_error", "loc": ["body", "messages"], "msg": "bad", "input": asked.body}]
    return Act(status=422, body=json.dumps({"detail": detail}).encode())


def _repeats(asked: Asked) -> Act | None:
    text = "invalid prompt: what is return_token_ids?"
    return Act(status=400, body=error(text)) if "question 3" in asked.last else None


@pytest.mark.parametrize("script", [_echoes, _repeats])
def test_an_error_that_repeats_the_request_does_not_turn_token_ids_off(
    setting: Setting, serve: Serve, script: Script
) -> None:
    setting.ask(30)
    receipt = setting.run(serve(script).url, concurrency=2)
    assert dict(receipt.rejected) == {"refused": 1} and receipt.answered == 29 and receipt.retokenized == 0


def test_a_repeated_request_is_neither_a_refused_field_nor_shown() -> None:
    asked = {"return_token_ids": True, "messages": [{"content": "private, unknown field"}]}
    body = json.dumps({"detail": [{"loc": ["body", "messages"], "msg": "bad", "input": asked}]}).encode()
    outcome: Any = classify(422, JSON, body)
    assert outcome.reason == "refused" and "private" not in outcome.detail


@pytest.mark.parametrize(
    "told",
    [
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "return_token_ids"], "msg": "Extra inputs"}]},
        {"error": {"message": "bad request", "param": "return_token_ids"}},
        {"error": {"message": "return_token_ids: Extra inputs are not permitted"}},
    ],
)
def test_a_refused_field_is_left_away_once_an_answer_comes_without_it(
    setting: Setting, serve: Serve, told: dict[str, Any]
) -> None:
    def script(asked: Asked) -> Act | None:
        return Act(status=422, body=json.dumps(told).encode()) if "return_token_ids" in asked.body else None

    setting.ask(30)
    server = serve(script, ids=False)
    receipt = setting.run(server.url, concurrency=2)
    assert receipt.answered == receipt.retokenized == 30 and not receipt.faults
    assert sum("return_token_ids" in asked.body for asked in server.asked) <= 2


def test_a_field_that_the_run_file_asks_for_is_refused_without_a_loop(setting: Setting, serve: Serve) -> None:
    setting.ask(10)
    server = serve(lambda asked: Act(status=400, body=error("unknown field return_token_ids")))
    with pytest.raises(EyasError, match="take it out"):
        setting.run(server.url, extra={"return_token_ids": True})
    assert server.num_asked <= 30


def test_a_run_file_may_ask_for_no_token_ids(setting: Setting, serve: Serve) -> None:
    setting.ask(1)
    server = serve()
    assert setting.run(server.url, extra={"return_token_ids": False}).retokenized == 1
    assert server.asked[0].body["return_token_ids"] is False


# Odd bodies


DEEP = b"[" * 100_000


def _edit(**choice: Any) -> Callable[[dict[str, Any]], object]:
    return lambda right: right["choices"][0].update(choice)


def _message(**message: Any) -> Callable[[dict[str, Any]], object]:
    return lambda right: right["choices"][0]["message"].update(message)


def _levels(num: int) -> Any:
    value: Any = 1
    for _ in range(num):
        value = [value]
    return value


@pytest.mark.parametrize(
    "act",
    [
        Act(body=b'{"x": ' + DEEP),
        Act(body=b'{"error": {"message": ' + DEEP),
        Act(status=500, body=DEEP),
        Act(status=500, body=b'{"error": {"message": ' + DEEP),
        Act(status=500, body=json.dumps({"error": {"message": _levels(300)}}).encode()),
        Act(edit=_message(audio=_levels(300))),
        Act(edit=_message(tool_calls=5)),
        Act(edit=_message(tool_calls="abc")),
        Act(edit=_message(tool_calls=["abc"])),
        Act(edit=_message(tool_calls=[{"id": "c", "function": None}])),
        Act(edit=_message(tool_calls=[{"id": 7, "function": {"name": "f"}}])),
        Act(edit=_edit(token_ids=[-1])),
        Act(edit=_edit(token_ids=[2**31])),
        Act(edit=_edit(token_ids=[10**30])),
        Act(edit=lambda right: right.update(prompt_token_ids=[-5])),
        Act(body=b'{"usage": {"cost": ' + b"1" * 5000 + b"}}"),
    ],
)
def test_an_odd_body_costs_its_own_conversation_and_no_other(setting: Setting, serve: Serve, act: Act) -> None:
    setting.ask(5, turns=2)
    receipt = setting.run(serve(lambda asked: act if "question 3" in asked.last else None).url)
    assert receipt.answered == 4 and dict(receipt.rejected) == {"unavailable": 1}
    assert set(setting.rejects()) == {"p3"}


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"cost": 10**400}, None),
        ({"cost": 1e7}, None),
        ({"cost": "0.1"}, None),
        ({"completion_tokens": 10**309}, None),
        ({"completion_tokens": None, "prompt_tokens": None}, None),
        ({"completion_tokens": "12"}, None),
        ({"completion_tokens": -1, "prompt_tokens": 2e9}, None),
    ],
)
def test_usage_that_cannot_be_is_counted_from_the_ids(
    setting: Setting, serve: Serve, usage: dict[str, Any], tokens: None
) -> None:
    setting.ask(1)
    server = serve(lambda asked: Act(edit=lambda right: right["usage"].update(usage)))
    receipt = setting.run(server.url, price_per_1m={"prompt": 0.0, "completion": 1e6})
    row = setting.rows()["p0"]
    assert receipt.usage.completion_tokens == sum(row["loss_mask"])
    assert receipt.usage.prompt_tokens == len(row["loss_mask"]) - sum(row["loss_mask"])
    assert receipt.usage.cost == receipt.usage.completion_tokens


@pytest.mark.parametrize("usage", [None, "abc", {}, {"completion_tokens": None, "prompt_tokens": 3},
                                   {"completion_tokens": 3, "prompt_tokens": None}])  # fmt: skip
def test_usage_that_nobody_tells_is_the_upper_bound(setting: Setting, serve: Serve, usage: Any) -> None:
    setting.ask(1)
    server = serve(lambda asked: Act(edit=lambda right: right.update(usage=usage)), ids=False)
    receipt = setting.run(server.url, price_per_1m={"prompt": 1.0, "completion": 1e6})
    assert receipt.usage.completion_tokens == 64 and receipt.usage.prompt_tokens > 3 and receipt.usage.cost > 64


def test_a_body_without_end_is_a_fault_and_is_never_held(
    setting: Setting, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "MIN_BODY_BYTES", 1 << 16)
    setting.ask(3)
    big = b" " * (32 << 20)
    receipt = setting.run(serve(lambda asked: Act(body=big) if "question 1" in asked.last else None).url)
    assert receipt.answered == 2 and receipt.faults["too_big"] >= 2
    assert "more than" in setting.rejects()["p1"]["detail"]


def test_a_body_that_is_compressed_twice_is_a_fault(setting: Setting, serve: Serve) -> None:
    setting.ask(2)
    act = Act(headers={"content-encoding": "gzip, gzip"}, body=b"x")
    receipt = setting.run(serve(lambda asked: act if "question 1" in asked.last else None).url)
    assert receipt.answered == 1 and receipt.faults["not_json"] >= 2
    assert "compressed more than once" in setting.rejects()["p1"]["detail"]


# Pace


@pytest.mark.parametrize("after", ["0", "-5", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_pause_of_nothing_is_no_less_than_the_growing_one(setting: Setting, serve: Serve, after: str) -> None:
    def script(asked: Asked) -> Act | None:
        late = time.monotonic() - start > 1.4
        return None if late else Act(status=429, headers={"retry-after": after}, body=error("slow"))

    setting.ask(10)
    server = serve(script)
    start = time.monotonic()
    receipt = setting.run(server.url)
    assert receipt.answered == 10 and server.num_asked <= 10 + 8 + 4 + 2


# What an answer says of its end


@pytest.mark.parametrize("word", ["insufficient_system_resource", "network_error", "whatever", "", None])
def test_an_unknown_end_is_no_answer(setting: Setting, serve: Serve, word: str | None) -> None:
    setting.ask(3)
    act = Act(edit=_edit(finish_reason=word))
    receipt = setting.run(serve(lambda asked: act if "question 1" in asked.last else None).url)
    assert receipt.answered == 2 and receipt.faults["error_finish"] >= 2
    assert f"finish_reason {word}" in setting.rejects()["p1"]["detail"] + " "


@pytest.mark.parametrize(
    ("word", "reason"),
    [("MAX_TOKENS", "cut_answer"), ("model_length", "cut_answer"), ("sensitive", "filtered"), ("SAFETY", "filtered")],
)
def test_a_cut_or_filtered_answer_is_one_by_any_name(setting: Setting, serve: Serve, word: str, reason: str) -> None:
    setting.ask(3)
    act = Act(edit=_edit(finish_reason=word))
    receipt = setting.run(serve(lambda asked: act if "question 1" in asked.last else None).url)
    assert receipt.answered == 2 and dict(receipt.rejected) == {reason: 1}


@pytest.mark.parametrize("word", ["STOP", "eos", "end_turn", "stop_sequence"])
def test_a_good_end_is_called_stop(setting: Setting, serve: Serve, word: str) -> None:
    setting.ask(1)
    setting.run(serve(lambda asked: Act(edit=_edit(finish_reason=word))).url)
    assert setting.rows()["p0"]["finish_reason"] == ["stop"]


def test_reasoning_and_unknown_fields_stay_in_the_row_and_are_not_sent_back(setting: Setting, serve: Serve) -> None:
    def script(asked: Asked) -> Act | None:
        sent = {name for message in asked.body["messages"] for name in message}
        if sent - {"role", "content"}:
            return Act(status=400, body=error("reasoning_content is not allowed"))
        return Act(edit=_message(reasoning_content="hm", reasoning="so", annotations=[1]))

    setting.ask(1, turns=3)
    server = serve(script)
    setting.run(server.url)
    answers = setting.rows()["p0"]["messages"][1::2]
    assert len(answers) == 3
    for answer in answers:
        assert (answer["reasoning_content"], answer["reasoning"], answer["annotations"]) == ("hm", "so", [1])
    assert server.asked[2].body["messages"][1] == {
        "role": "assistant",
        "content": text_of([{"content": "question 0.0"}]),
    }


@pytest.mark.parametrize(("code", "kind"), [(401, ConfigError), ("403", ConfigError), (402, EyasError)])
def test_an_error_in_a_200_is_judged_by_its_code(setting: Setting, serve: Serve, code: Any, kind: type) -> None:
    setting.ask(30)
    server = serve(lambda asked: Act(body=error("no", code)))
    with pytest.raises(kind, match=str(code)):
        setting.run(server.url)
    assert server.num_asked <= 16
