"""What a server's answer means: its body is classified, not its status.

An OpenAI-compatible server or gateway may say 200 and mean an error, or break off in mid-body. Four things can come of
a request: an answer, a fault (asked again), a refusal (this conversation will never be answered), and a halt (nobody
will be, until an operator acts). An answer stays as it came. Texts of servers end up in details, without the key and
cut short.
"""

from __future__ import annotations

import datetime
import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from eyas.generate.answers import AnsweredBy, Usage
from eyas.generate.key import Key

MAX_DETAIL = 300
"""Characters of a server's text that are worth keeping."""
TOKEN_IDS_FIELD = "return_token_ids"
MAX_QUOTED = 1 << 16
"""Characters that are looked at for them."""
MAX_TOKENS, MAX_COST = 10**9, 1e6
"""A server that tells more of a single answer is not believed."""
MAX_DEPTH = 64
"""Of what a message holds."""
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
UNKNOWN_WORDS = (
    "unknown", "unrecognized", "unrecognised", "unexpected", "extra", "unsupported", "not supported", "not permitted",
    "not allowed", "additional propert", "no such", "invalid", "does not exist", "not recognized", "forbidden",
)  # fmt: skip
FINISH_REASONS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("tool_calls", "function_call"), "tool_calls"),
    **dict.fromkeys(("length", "max_tokens", "model_length"), "length"),
    **dict.fromkeys(
        ("content_filter", "sensitive", "safety", "image_safety", "refusal", "recitation", "blocklist", "spii",
         "prohibited_content"),
        "content_filter",
    ),
}  # fmt: skip
"""What servers call it, in lower case, and what rows do. Whatever else a server says is no end of an answer."""


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
    TOO_BIG = "too_big"
    """More bytes than any answer to the request can have."""
    UNKNOWN_FIELD = "unknown_field"
    """The server seems not to know a field of ours."""


OF_THE_ENDPOINT = frozenset({FaultKind.GONE, FaultKind.RATE_LIMIT, FaultKind.OVERLOADED, FaultKind.UNKNOWN_FIELD})
"""Faults that say nothing about the conversation: they do not count as one of its tries."""
CONGESTION = frozenset({FaultKind.RATE_LIMIT, FaultKind.OVERLOADED, FaultKind.TIMEOUT})
"""Faults after which fewer requests are sent at a time."""
MAY_BE_CHARGED = frozenset({FaultKind.TIMEOUT, FaultKind.CUT_BODY, FaultKind.TOO_BIG, FaultKind.ERROR_FINISH})
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


_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class _Choice(msgspec.Struct):
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: _TokenIds | None = None  # vLLM, SGLang up to 0.5.17
    response_token_ids: _TokenIds | None = None  # SGLang from 0.5.23 on
    prompt_token_ids: _TokenIds | None = None  # SGLang
    error: Any = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None
    usage: Any = None
    id: Any = ""
    model: Any = ""
    provider: Any = None
    quantization: Any = None
    system_fingerprint: Any = None
    prompt_token_ids: _TokenIds | None = None  # vLLM
    object: Any = ""
    message: Any = None


_decoder = msgspec.json.Decoder(_Completion)
_NOT_READ = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
_NO_KEY = Key()


def classify(status: int, headers: Mapping[str, str], body: bytes, key: Key = _NO_KEY) -> Outcome:
    """What one whole HTTP answer to a chat completion means; the key shows in no detail."""
    if 200 <= status < 300:
        return _success(headers, body, key)
    if 300 <= status < 400:
        return Halt(credits=False, detail=f"answers {status}, a redirection; give the address that it leads to")
    error = _error_of(body)
    return _failure(status, error, retry_after_s(headers, error), text=_text(error, body), key=key)


def _success(headers: Mapping[str, str], body: bytes, key: Key) -> Outcome:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and "json" not in kind:
        return Fault(FaultKind.WRONG_TYPE, f"content type {_shown(kind, key)[:60]}: {_brief(body, key)}")
    try:
        completion = _decoder.decode(body)
    except msgspec.ValidationError as error:
        return Fault(FaultKind.NOT_JSON, f"not a chat completion: {_shown(str(error), key)}")
    except _NOT_READ as error:
        return Fault(FaultKind.NOT_JSON, f"{_shown(str(error), key)[:100]}: {_brief(body, key)}")
    usage = _usage_of_fault(completion)
    told = completion.error or (completion.choices[0].error if completion.choices else None)
    if told or completion.object == "error":
        return _error_in_success(told or {"message": completion.message}, headers, usage, key)
    if not completion.choices:
        return Fault(FaultKind.NO_CHOICES, f"no choices: {_brief(body, key)}", usage=usage)
    choice = completion.choices[0]
    finish_reason = FINISH_REASONS.get((choice.finish_reason or "").strip().lower())
    if finish_reason is None:
        word = _shown(str(choice.finish_reason), key)[:60]
        return Fault(FaultKind.ERROR_FINISH, f"finish_reason {word}", usage=usage)
    message = choice.message
    if message is None or not isinstance(message.get("content"), (str, list, type(None))):
        return Fault(FaultKind.NO_MESSAGE, f"a choice without message: {_brief(body, key)}", usage=usage)
    if not _are_calls(message.get("tool_calls")):
        return Fault(FaultKind.NO_MESSAGE, f"tool_calls that are no calls: {_brief(body, key)}", usage=usage)
    if _is_deep(message):
        return Fault(FaultKind.NO_MESSAGE, f"a message of more than {MAX_DEPTH} levels", usage=usage)
    return _answer(completion, choice, message, finish_reason, key)


def _answer(completion: _Completion, choice: _Choice, message: dict[str, Any], finish_reason: str, key: Key) -> Answer:
    token_ids = choice.token_ids if choice.token_ids is not None else choice.response_token_ids
    prompt_ids = completion.prompt_token_ids if completion.prompt_token_ids is not None else choice.prompt_token_ids
    if not token_ids or not prompt_ids:
        token_ids = prompt_ids = None
    provider, quantization = completion.provider, completion.quantization
    if isinstance(provider, dict):
        quantization = quantization or provider.get("quantization")
        provider = provider.get("name") or provider.get("id")
    prompt, new, cost = _told(completion.usage)
    if token_ids is not None and prompt_ids is not None:
        prompt = len(prompt_ids) if prompt is None else prompt
        new = len(token_ids) if new is None else new
    return Answer(
        message=_message(message),
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=prompt or 0, completion_tokens=new or 0, requests=1, cost=cost or 0.0),
        cost_told=cost is not None,
        usage_told=prompt is not None and new is not None,
        answered_by=(
            _word(provider, key),
            _word(completion.model, key),
            _word(quantization, key),
            _word(completion.system_fingerprint, key),
        ),
        generation_id=_word(completion.id, key),
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


def _are_calls(calls: Any) -> bool:
    """Whether a message's `tool_calls` are what they should be, or none."""
    if calls in (None, "", {}):
        return True
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("id"), (str, type(None)))
        and isinstance(call.get("function", {}), dict)
        and isinstance(call.get("function", {}).get("name"), (str, type(None)))
        for call in calls
    )


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _error_in_success(error: Any, headers: Mapping[str, str], usage: Usage | None, key: Key) -> Outcome:
    """Status 200 around an error: the gateway reached somebody, and that one failed. Mostly it is worth another try."""
    text, code = _text(error, b""), _code(error)
    if code in (401, 402, 403, 429, 503):
        return _failure(code, error, retry_after_s(headers, error), text=text, key=key)
    if _says_too_long(text):
        return Refusal(TOO_LONG, _shown(text, key))
    return Fault(FaultKind.ERROR_BODY, f"error in an answer with status 200: {_shown(text, key)}", usage=usage)


def _failure(status: int, error: Any, pause_s: float | None, *, text: str, key: Key) -> Outcome:
    shown = _shown(text, key)
    if status == 402:
        return Halt(credits=True, detail=shown)
    if status == 403 and _flagged(error):
        return Refusal(FILTERED, f"status 403: {shown}")
    if status in (401, 403):
        # Some servers repeat the key, or parts of it: their text is not shown.
        return Halt(credits=False, detail=f"answers {status}: the key is missing, wrong, or may not do this")
    if status in (404, 405):
        return Halt(credits=False, detail=f"answers {status}: no such address or model: {shown}")
    if status == 429:
        return Fault(FaultKind.RATE_LIMIT, f"status 429: {shown}", pause_s)
    if status in (503, 529):
        return Fault(FaultKind.OVERLOADED, f"status {status}: {shown}", pause_s)
    if status in (408, 409, 425) or status >= 500:
        return Fault(FaultKind.SERVER_ERROR, f"status {status}: {shown}", pause_s)
    if _refuses_token_ids(error, text):
        return Fault(FaultKind.UNKNOWN_FIELD, f"status {status}: {shown}")
    if _says_too_long(text) or status == 413:
        return Refusal(TOO_LONG, f"status {status}: {shown}")
    return Refusal(REFUSED, f"status {status}: {shown}")


def _refuses_token_ids(error: Any, text: str) -> bool:
    """Whether the server itself, and not what it repeats of the request, says that it does not take the field."""
    if isinstance(error, dict):
        if error.get("param") == TOKEN_IDS_FIELD:
            return True
        details = error.get("detail")
        if isinstance(details, list):
            places = [entry.get("loc") for entry in details if isinstance(entry, dict)]
            return any(isinstance(loc, list) and TOKEN_IDS_FIELD in loc for loc in places)
    at = text.find(TOKEN_IDS_FIELD)
    near = text[max(0, at - 120) : at + len(TOKEN_IDS_FIELD) + 120].lower()
    return at >= 0 and any(word in near for word in UNKNOWN_WORDS)


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
            except (ValueError, TypeError, OverflowError):
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
        except (TypeError, ValueError, OverflowError):
            pause = None
    if pause is None or pause != pause:
        return None
    return min(max(pause, 0.0), MAX_PAUSE_S)


def _usage_of_fault(completion: _Completion) -> Usage | None:
    """What was charged for nothing; None where nobody says."""
    prompt, new, cost = _told(completion.usage)
    if cost is None and (prompt is None or new is None):
        return None
    return Usage(prompt_tokens=prompt or 0, completion_tokens=new or 0, requests=1, cost=cost or 0.0)


def _told(usage: Any) -> tuple[int | None, int | None, float | None]:
    """Prompt tokens, completion tokens and cost; None where a server does not say, or says what cannot be."""
    if not isinstance(usage, dict):
        return None, None, None
    prompt, new = (
        int(usage[name]) if _is_number(usage.get(name), MAX_TOKENS) else None
        for name in ("prompt_tokens", "completion_tokens")
    )
    return prompt, new, float(usage["cost"]) if _is_number(usage.get("cost"), MAX_COST) else None


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most


def _word(value: Any, key: Key) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -(2**63) <= value < 2**64:
        value = str(value)
    return key.mask(value[:MAX_QUOTED])[:200] if isinstance(value, str) else ""


def _error_of(body: bytes) -> Any:
    """The error object of a body that should hold one; None where it does not."""
    try:
        whole = msgspec.json.decode(body)
    except _NOT_READ:
        return None
    if not isinstance(whole, dict):
        return None
    return whole.get("error") or whole


def _text(error: Any, body: bytes) -> str:
    """What the server says, on one line."""
    if isinstance(error, dict):
        text = _said(error.get("message") or error.get("detail") or error)
        metadata = error.get("metadata")
        raw = metadata.get("raw") if isinstance(metadata, dict) else None
        if raw:
            text += f": {_said(raw)}"
        for name in ("code", "param", "type"):
            if isinstance(error.get(name), str) and error[name] not in text:
                text += f" ({error[name]})"
    else:
        text = error if isinstance(error, str) else _decoded(body)
    return " ".join(text[:MAX_QUOTED].split())


def _said(value: Any) -> str:
    """A text, or JSON; of a list of what is wrong with a request not the request, which FastAPI repeats."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        value = [
            {name: entry[name] for name in ("loc", "msg", "type") if name in entry}
            if isinstance(entry, dict) and "msg" in entry
            else entry
            for entry in value
        ]
    try:
        return msgspec.json.encode(value).decode()
    except _NOT_READ:
        return "…"


def _shown(text: str, key: Key) -> str:
    """For people: scrubbed before it is cut, or a part of the key would be left."""
    return " ".join(key.scrub(text[:MAX_QUOTED]).split())[:MAX_DETAIL]


def _brief(body: bytes, key: Key) -> str:
    return _shown(_decoded(body), key) or "nothing"


def _decoded(body: bytes) -> str:
    return " ".join(body.lstrip()[:MAX_QUOTED].decode(errors="replace").split())


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
