"""What a server's answer means: its body is classified, not its status.

An OpenAI-compatible server or gateway may say 200 and mean an error, or break off in mid-body. Four things can come of
a request: an answer, a fault (asked again), a refusal (this conversation will never be answered), and a halt (nobody
will be, until an operator acts). Texts of servers are cut short and end up in details; keys are scrubbed by the caller.
"""

from __future__ import annotations

import datetime
import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from eyas.generate.answers import AnsweredBy, Usage

MAX_DETAIL = 300
"""Characters of a server's text that are worth keeping."""
TOKEN_IDS_FIELD = "return_token_ids"
MAX_PAUSE_S = 3600.0
"""A server that asks for a longer pause is asked again after this one."""

TOO_LONG_WORDS = (
    "context length",
    "context_length",
    "maximum context",
    "context window",
    "max_model_len",
    "maximum model length",
    "too many tokens",
    "longer than the model",
    "string_too_long",
    "max_tokens_exceeded",
    "token_limit_exceeded",
    "prompt is too long",
    "input is too long",
)


class FaultKind(StrEnum):
    """Why a request is sent again."""

    GONE = "gone"
    """Nobody listens."""
    CONNECTION = "connection"
    """The connection broke before an answer began."""
    TIMEOUT = "timeout"
    CUT_BODY = "cut_body"
    """The connection closed in the middle of the answer."""
    RATE_LIMIT = "rate_limit"
    OVERLOADED = "overloaded"
    SERVER_ERROR = "server_error"
    ERROR_BODY = "error_body"
    """Status 200, and an error object."""
    WRONG_TYPE = "wrong_content_type"
    NOT_JSON = "not_json"
    NO_CHOICES = "no_choices"
    ERROR_FINISH = "error_finish"
    """The engine gave up in the middle of the answer."""
    NO_MESSAGE = "no_message"
    UNKNOWN_FIELD = "unknown_field"
    """The server does not know a field of ours and is asked without it from now on."""


OF_THE_ENDPOINT = frozenset({FaultKind.GONE, FaultKind.RATE_LIMIT, FaultKind.OVERLOADED, FaultKind.UNKNOWN_FIELD})
"""Faults that say nothing about the conversation: they do not count as one of its tries."""
CONGESTION = frozenset({FaultKind.RATE_LIMIT, FaultKind.OVERLOADED, FaultKind.TIMEOUT})
"""Faults after which fewer requests are sent at a time."""
MAY_BE_CHARGED = frozenset({FaultKind.TIMEOUT, FaultKind.CUT_BODY})
"""Faults after which an answer may have been written and charged, though it never came."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Worth another try."""

    kind: FaultKind
    detail: str
    retry_after_s: float | None = None
    """What the server asked for."""
    usage: Usage | None = None
    """What was charged for nothing, if the server told."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """This conversation will not be answered, however often it is put."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Nothing will be answered until an operator acts."""

    credits: bool
    """Whether money is what is missing."""
    detail: str


@dataclass(slots=True)
class Answer:
    """One assistant turn as the server gave it."""

    message: dict[str, Any]
    """`role`, `content`, and of `tool_calls`, `reasoning`, … whatever came."""
    finish_reason: str
    usage: Usage
    """`cost` is what the server told, else 0."""
    cost_told: bool
    usage_told: bool
    answered_by: AnsweredBy = ("", "", "", "")
    generation_id: str = ""
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """What the target wrote, with the end-of-turn token if the server gives it."""


Outcome = Answer | Fault | Refusal | Halt

TOO_LONG = "too_long"
REFUSED = "refused"
FILTERED = "filtered"


class _Choice(msgspec.Struct):
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None  # vLLM, SGLang up to 0.5.17
    response_token_ids: list[int] | None = None  # SGLang from 0.5.23 on
    prompt_token_ids: list[int] | None = None  # SGLang
    error: Any = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None
    usage: dict[str, Any] | None = None
    id: Any = ""
    model: Any = ""
    provider: Any = None
    quantization: Any = None
    system_fingerprint: Any = None
    prompt_token_ids: list[int] | None = None  # vLLM
    object: Any = ""
    message: Any = None


_decoder = msgspec.json.Decoder(_Completion)


def classify(status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
    """What one whole HTTP answer to a chat completion means."""
    if 200 <= status < 300:
        return _success(headers, body)
    if 300 <= status < 400:
        return Halt(credits=False, detail=f"answers {status}, a redirection; give the address that it leads to")
    error = _error_of(body)
    return _failure(status, error, retry_after_s(headers, error), text=_text(error, body))


def _success(headers: Mapping[str, str], body: bytes) -> Outcome:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and "json" not in kind:
        return Fault(FaultKind.WRONG_TYPE, f"content type {kind[:60]}: {_brief(body)}")
    try:
        completion = _decoder.decode(body)
    except msgspec.ValidationError as error:
        return Fault(FaultKind.NOT_JSON, f"not a chat completion: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Fault(FaultKind.NOT_JSON, f"{str(error)[:100]}: {_brief(body)}")
    usage = _usage(completion.usage)
    told = completion.error or (completion.choices[0].error if completion.choices else None)
    if told or completion.object == "error":
        return _error_in_success(told or {"message": completion.message}, headers, usage)
    if not completion.choices:
        return Fault(FaultKind.NO_CHOICES, f"no choices: {_brief(body)}", usage=usage)
    choice = completion.choices[0]
    if choice.finish_reason in (None, "error", "abort"):
        return Fault(FaultKind.ERROR_FINISH, f"finish_reason {choice.finish_reason}", usage=usage)
    message = choice.message
    if message is None or not isinstance(message.get("content"), (str, list, type(None))):
        return Fault(FaultKind.NO_MESSAGE, f"a choice without message: {_brief(body)}", usage=usage)
    return _answer(completion, choice, message, usage)


def _answer(completion: _Completion, choice: _Choice, message: dict[str, Any], usage: Usage) -> Answer:
    token_ids = choice.token_ids if choice.token_ids is not None else choice.response_token_ids
    prompt_ids = completion.prompt_token_ids if completion.prompt_token_ids is not None else choice.prompt_token_ids
    if not token_ids or not prompt_ids:
        token_ids = prompt_ids = None
    told = completion.usage or {}
    provider, quantization = completion.provider, completion.quantization
    if isinstance(provider, dict):
        quantization = quantization or provider.get("quantization")
        provider = provider.get("name") or provider.get("id")
    if token_ids is not None and "completion_tokens" not in told:
        usage.completion_tokens, usage.prompt_tokens = len(token_ids), len(prompt_ids or ())
    finish_reason = str(choice.finish_reason)
    return Answer(
        message=_message(message),
        finish_reason="tool_calls" if finish_reason == "function_call" else finish_reason,
        usage=usage,
        cost_told=_is_number(told.get("cost")),
        usage_told=_is_number(told.get("completion_tokens")) or token_ids is not None,
        answered_by=(
            _word(provider),
            _word(completion.model),
            _word(quantization),
            _word(completion.system_fingerprint),
        ),
        generation_id=_word(completion.id),
        prompt_ids=prompt_ids,
        token_ids=token_ids,
    )


def _message(told: dict[str, Any]) -> dict[str, Any]:
    """The message as it came, less what is empty: those fields only say that a server knows them."""
    content = told.get("content")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    for name, value in told.items():
        if name not in ("role", "content") and value not in (None, "", [], {}):
            message[name] = value
    return message


def _error_in_success(error: Any, headers: Mapping[str, str], usage: Usage) -> Outcome:
    """Status 200 around an error: the gateway reached somebody, and that one failed. Mostly it is worth another try."""
    text, code = _text(error, b""), _code(error)
    if code == 402:
        return Halt(credits=True, detail=text)
    if code in (429, 503):
        return _failure(code, error, retry_after_s(headers, error), text=text)
    if _says_too_long(text):
        return Refusal(TOO_LONG, text)
    return Fault(FaultKind.ERROR_BODY, f"error in an answer with status 200: {text}", usage=usage)


def _failure(status: int, error: Any, pause_s: float | None, *, text: str) -> Outcome:
    if status == 402:
        return Halt(credits=True, detail=text)
    if status == 403 and _flagged(error):
        return Refusal(FILTERED, f"status 403: {text}")
    if status in (401, 403):
        # Some servers repeat the key, or parts of it: their text is not shown.
        return Halt(credits=False, detail=f"answers {status}: the key is missing, wrong, or may not do this")
    if status in (404, 405):
        return Halt(credits=False, detail=f"answers {status}: no such address or model: {text}")
    if status == 429:
        return Fault(FaultKind.RATE_LIMIT, f"status 429: {text}", pause_s)
    if status in (503, 529):
        return Fault(FaultKind.OVERLOADED, f"status {status}: {text}", pause_s)
    if status in (408, 409, 425) or status >= 500:
        return Fault(FaultKind.SERVER_ERROR, f"status {status}: {text}", pause_s)
    if TOKEN_IDS_FIELD in text:
        return Fault(FaultKind.UNKNOWN_FIELD, f"status {status}: {text}")
    if _says_too_long(text) or status == 413:
        return Refusal(TOO_LONG, f"status {status}: {text}")
    return Refusal(REFUSED, f"status {status}: {text}")


def retry_after_s(headers: Mapping[str, str], error: Any = None) -> float | None:
    """The pause that a server asks for, in seconds from now: `Retry-After` in seconds or as a date, or a gateway's."""
    told = headers.get("retry-after", "").strip()
    pause: float | None = None
    if told:
        try:
            pause = float(told)
        except ValueError:
            try:
                date = email.utils.parsedate_to_datetime(told)
            except ValueError:
                date = None
            if date is not None:
                date = date if date.tzinfo is not None else date.replace(tzinfo=datetime.UTC)
                pause = date.timestamp() - time.time()
    elif isinstance(error, dict) and isinstance(error.get("metadata"), dict):
        # OpenRouter hands the limits' headers on inside the body: milliseconds since 1970.
        limits = error["metadata"].get("headers")
        reset = limits.get("X-RateLimit-Reset") if isinstance(limits, dict) else None
        try:
            pause = float(reset) / 1000 - time.time() if reset is not None else None
        except (TypeError, ValueError):
            pause = None
    if pause is None or pause != pause:
        return None
    return min(max(pause, 0.0), MAX_PAUSE_S)


def _usage(told: dict[str, Any] | None) -> Usage:
    told = told or {}
    return Usage(
        prompt_tokens=_count(told.get("prompt_tokens")),
        completion_tokens=_count(told.get("completion_tokens")),
        requests=1,
        cost=float(told["cost"]) if _is_number(told.get("cost")) else 0.0,
    )


def _count(value: Any) -> int:
    return int(value) if _is_number(value) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _word(value: Any) -> str:
    return str(value)[:200] if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def _error_of(body: bytes) -> Any:
    """The error object of a body that should hold one; None where it does not."""
    try:
        whole = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(whole, dict):
        return None
    return whole.get("error") or whole


def _text(error: Any, body: bytes) -> str:
    """What the server says, on one line."""
    if isinstance(error, dict):
        said = error.get("message") or error.get("detail") or error
        text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
        metadata = error.get("metadata")
        raw = metadata.get("raw") if isinstance(metadata, dict) else None
        if raw:
            text += f": {raw}"
        for key in ("code", "param", "type"):
            if isinstance(error.get(key), str) and error[key] not in text:
                text += f" ({error[key]})"
    else:
        text = error if isinstance(error, str) else _brief(body)
    return " ".join(text.split())[:MAX_DETAIL]


def _brief(body: bytes) -> str:
    return " ".join(body[: 2 * MAX_DETAIL].decode(errors="replace").split())[:MAX_DETAIL] or "nothing"


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code[:6])
    return code if isinstance(code, int) else 0


def _flagged(error: Any) -> bool:
    metadata = error.get("metadata") if isinstance(error, dict) else None
    return isinstance(metadata, dict) and bool(metadata.get("reasons") or metadata.get("flagged_input"))


def _says_too_long(text: str) -> bool:
    low = text.lower()
    return any(words in low for words in TOO_LONG_WORDS)
