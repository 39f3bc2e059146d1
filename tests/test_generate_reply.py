"""What a body means: the same table for servers, gateways and whatever stands between."""

from __future__ import annotations

import email.utils
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.generate.reply import Answer, Fault, FaultKind, Halt, Refusal, classify, retry_after_s

JSON = {"content-type": "application/json"}


def completion(message: Any = None, finish_reason: Any = "stop", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "yes"} if message is None else message
    return {"id": "g", "model": "m", "choices": [{"message": message, "finish_reason": finish_reason}], **more}


def classified(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return classify(status, headers or JSON, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (200, JSON, {"error": {"message": "upstream", "code": 502}}, FaultKind.ERROR_BODY),
        (200, JSON, {"object": "error", "message": "out of memory", "code": 500}, FaultKind.ERROR_BODY),
        (200, JSON, {"error": {"message": "slow", "code": 429}}, FaultKind.RATE_LIMIT),
        (200, JSON, {"choices": [{"error": {"message": "x"}, "finish_reason": "stop"}]}, FaultKind.ERROR_BODY),
        (200, JSON, {"choices": []}, FaultKind.NO_CHOICES),
        (200, JSON, {}, FaultKind.NO_CHOICES),
        (200, JSON, completion(finish_reason="error"), FaultKind.ERROR_FINISH),
        (200, JSON, completion(finish_reason="abort"), FaultKind.ERROR_FINISH),
        (200, JSON, completion(finish_reason=None), FaultKind.ERROR_FINISH),
        (200, JSON, {"choices": [{"finish_reason": "stop"}]}, FaultKind.NO_MESSAGE),
        (200, JSON, completion({"role": "assistant", "content": 7}), FaultKind.NO_MESSAGE),
        (200, {"content-type": "text/html"}, b"<html>", FaultKind.WRONG_TYPE),
        (200, {"content-type": "text/event-stream"}, b"data: {}", FaultKind.WRONG_TYPE),
        (200, JSON, b"", FaultKind.NOT_JSON),
        (200, JSON, b'{"choices": [{"mess', FaultKind.NOT_JSON),
        (200, JSON, b"\xff\xfe", FaultKind.NOT_JSON),
        (200, JSON, b"[]", FaultKind.NOT_JSON),
        (200, JSON, b"null", FaultKind.NOT_JSON),
        (429, JSON, {"error": {"message": "slow"}}, FaultKind.RATE_LIMIT),
        (503, JSON, b"", FaultKind.OVERLOADED),
        (529, JSON, b"", FaultKind.OVERLOADED),
        (500, JSON, b"x", FaultKind.SERVER_ERROR),
        (502, {"content-type": "text/html"}, b"<html>", FaultKind.SERVER_ERROR),
        (408, JSON, b"", FaultKind.SERVER_ERROR),
        (409, JSON, b"", FaultKind.SERVER_ERROR),
        (425, JSON, b"", FaultKind.SERVER_ERROR),
        (400, JSON, {"error": {"message": "Unrecognized request argument: return_token_ids"}}, FaultKind.UNKNOWN_FIELD),
        (422, JSON, {"detail": [{"loc": ["body", "return_token_ids"], "msg": "extra"}]}, FaultKind.UNKNOWN_FIELD),
    ],
)
def test_worth_another_try(status: int, headers: dict[str, str], body: Any, kind: FaultKind) -> None:
    outcome = classified(body, status, headers)
    assert isinstance(outcome, Fault) and outcome.kind is kind, outcome
    assert "\n" not in outcome.detail and len(outcome.detail) < 450


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, {"error": {"message": "This model's maximum context length is 40960 tokens."}}, "too_long"),
        (400, {"object": "error", "message": "Requested token count exceeds the model's maximum context length"},
         "too_long"),
        (400, {"error": {"message": "bad", "code": "context_length_exceeded"}}, "too_long"),
        (413, b"", "too_long"),
        (200, {"error": {"message": "maximum context length is 8", "code": 400}}, "too_long"),
        (400, {"error": {"message": "unknown role"}}, "refused"),
        (422, {"detail": "messages must not be empty"}, "refused"),
        (403, {"error": {"message": "flagged", "metadata": {"reasons": ["violence"], "flagged_input": "x"}}},
         "filtered"),
    ],
)  # fmt: skip
def test_never_answered(status: int, body: Any, reason: str) -> None:
    outcome = classified(body, status)
    assert isinstance(outcome, Refusal) and outcome.reason == reason, outcome


@pytest.mark.parametrize(
    ("status", "body", "credits"),
    [
        (402, {"error": {"message": "Insufficient credits"}}, True),
        (200, {"error": {"message": "Insufficient credits", "code": 402}}, True),
        (401, {"error": {"message": "Incorrect API key provided: sk-abc"}}, False),
        (403, b"", False),
        (404, {"error": {"message": "The model `x` does not exist"}}, False),
        (301, b"", False),
    ],
)
def test_until_an_operator_acts(status: int, body: Any, credits: bool) -> None:
    outcome = classified(body, status)
    assert isinstance(outcome, Halt) and outcome.credits is credits
    assert "sk-abc" not in outcome.detail


def test_ids_of_vllm_and_both_spellings_of_sglang() -> None:
    vllm = completion(prompt_token_ids=[1, 2])
    vllm["choices"][0]["token_ids"] = [3, 4]
    old, new = completion(), completion()
    old["choices"][0] |= {"prompt_token_ids": [1, 2], "token_ids": [3, 4]}
    new["choices"][0] |= {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}
    for body in (vllm, old, new):
        answer = classified(body)
        assert isinstance(answer, Answer) and (answer.prompt_ids, answer.token_ids) == ([1, 2], [3, 4])
    only_prompt = completion(prompt_token_ids=[1, 2])
    assert classified(only_prompt).token_ids is None and classified(only_prompt).prompt_ids is None


def test_tool_calls_and_reasoning_stay_as_they_come_and_empty_fields_go() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None}
    answer = classified(completion(message, "tool_calls"))
    assert answer.message == {
        "role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"
    }  # fmt: skip
    assert classified(completion(message, "function_call")).finish_reason == "tool_calls"


def test_who_answered_and_what_it_took() -> None:
    body = completion(provider={"name": "P", "quantization": "fp8"}, system_fingerprint="f",
                      usage={"prompt_tokens": 3, "completion_tokens": 2, "cost": 0.25})  # fmt: skip
    answer = classified(body)
    assert answer.answered_by == ("P", "m", "fp8", "f") and answer.generation_id == "g"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cost) == (3, 2, 0.25)
    assert answer.cost_told and answer.usage_told
    bare = classified(completion())
    assert not bare.cost_told and not bare.usage_told and bare.answered_by == ("", "m", "", "")


def test_leading_blanks_of_a_gateway_that_keeps_the_connection_warm() -> None:
    assert isinstance(classified(b"\n   \n" + json.dumps(completion()).encode()), Answer)


def test_pauses_in_seconds_as_a_date_and_in_a_gateways_body() -> None:
    assert retry_after_s({"retry-after": "7"}) == 7
    assert retry_after_s({"retry-after": "0.5"}) == 0.5
    assert retry_after_s({"retry-after": "-3"}) == 0
    assert retry_after_s({"retry-after": "999999"}) == 3600
    assert retry_after_s({"retry-after": "nan"}) is None
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({}) is None
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    pause = retry_after_s({"retry-after": date})
    assert pause is not None and 28 < pause < 31
    reset = {"metadata": {"headers": {"X-RateLimit-Reset": str(int((time.time() + 20) * 1000))}}}
    pause = retry_after_s({}, reset)
    assert pause is not None and 18 < pause < 21
    assert classified({"error": {"message": "x"}}, 429, JSON | {"retry-after": "3"}).retry_after_s == 3


@given(st.integers(100, 599), st.binary(max_size=80), st.sampled_from(["application/json", "text/html", ""]))
def test_any_bytes_mean_something(status: int, body: bytes, kind: str) -> None:
    assert isinstance(classify(status, {"content-type": kind}, body), (Answer, Fault, Refusal, Halt))


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1000) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["error", "choices", "message", "content", "finish_reason", "usage", "cost", "code", "metadata", "raw",
             "headers", "provider", "token_ids", "prompt_token_ids", "X-RateLimit-Reset", "reasons", "tool_calls"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from([200, 400, 403, 429, 500]), _ANYTHING)
def test_any_json_means_something(status: int, body: Any) -> None:
    assert isinstance(classified(body, status), (Answer, Fault, Refusal, Halt))
