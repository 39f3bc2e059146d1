"""The turns of a conversation, in any form that they come in, as canonical messages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from eyas.data.sources import ROLES, Reason
from eyas.data.spelling import (
    Fields,
    a_list,
    a_text,
    an_object,
    as_text,
    compact,
    encode,
    fields_of,
    joined,
    key_of,
    kind_of,
    objects,
    one_spelling,
    string,
)

PROMPT_KEYS = ("prompt", "instruction", "question", "query")
ANSWER_KEYS = ("completion", "response", "output", "answer")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class Drop(Exception):
    """A row that is readable, but no conversation."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class _Turn(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A turn of nothing but text."""

    role: str
    content: str


class _NamedTurn(msgspec.Struct, forbid_unknown_fields=True, gc=False, rename={"role": "from", "content": "value"}):
    role: str
    content: str


class _FullTurn(_Turn, forbid_unknown_fields=True, gc=False):
    """A turn of text with what else may be said in text; in the order in which the id knows them."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_call_id: str | msgspec.UnsetType = msgspec.UNSET


_FULL_TURN_KEYS = {"name", "reasoning", "reasoning_content", "thinking", "tool_call_id"}
_plain_turns = msgspec.json.Decoder(list[_Turn])
_named_turns = msgspec.json.Decoder(list[_NamedTurn])
_full_turns = msgspec.json.Decoder(list[_FullTurn])
_pairs = msgspec.json.Decoder(list[tuple[str, str]])
_ROLES: dict[bytes, tuple[str, bytes]] = {encode(name): (role, encode(role)) for name, role in ROLES.items()}


@dataclass(slots=True)
class Conversation:
    messages: bytes
    """JSON."""
    digested: bytes
    """The messages as the id knows them: one spelling, other fields sorted, null fields left out."""
    texts: list[str]
    answered: bool = False
    non_text: bool = False


def conversation_of(present: Fields, key: str, used: set[str], with_texts: bool) -> Conversation:
    """The conversation under `key`, with the text of `system` before it; what was read goes to `used`. Raises Drop."""
    raw = present[key]
    if "system" not in present and (short := _short_way(raw, with_texts)) is not None:
        used.add(key)
        return short
    turns = _turns(raw, key)
    if not turns:
        raise Drop(Reason.EMPTY_CONVERSATION, f"'{key}' is empty")
    used_here = _with_system(present, turns)
    result = _long_way(turns, with_texts)
    used |= {key, *used_here}
    return result


def _short_way(raw: bytes, with_texts: bool) -> Conversation | None:
    """What the long way gives, for turns of nothing but text; None where the long way is needed."""
    try:
        if raw.find(b'"from"', 0, 64) < 0:
            turns = _plain_turns.decode(raw)
        else:
            turns = [_Turn(turn.role, turn.content) for turn in _named_turns.decode(raw)]
        return _spoken(turns, with_texts)
    except msgspec.ValidationError:
        pass
    try:
        return _spoken(_full_turns.decode(raw), with_texts)
    except msgspec.ValidationError:
        return None


def _spoken(turns: Sequence[_Turn], with_texts: bool) -> Conversation | None:
    answered = False
    for turn in turns:
        role = ROLES.get(turn.role)
        if role is None:
            return None
        turn.role = role
        speaks = turn.content != ""
        if isinstance(turn, _FullTurn):
            fields = (turn.name, turn.reasoning, turn.reasoning_content, turn.thinking, turn.tool_call_id)
            if "" in fields:
                return None  # the id leaves it out, the message does not
            speaks |= any(text is not msgspec.UNSET for text in fields[1:4])
        answered |= speaks and role == "assistant"
    messages = encode(turns)
    texts = [turn.content for turn in turns if turn.role != "tool"] if with_texts else []
    return Conversation(messages, messages, texts, answered) if turns else None


def _with_system(present: Fields, turns: list[Fields]) -> set[str]:
    """Put the text of `system` in front, unless a system turn is there; the keys that this used."""
    system = present.get("system", b"")
    if system[:1] != b'"' or system == b'""' or _role(turns[0], 1)[0] == "system":
        return set()
    turns.insert(0, {"role": b'"system"', "content": system})
    return {"system"}


def _long_way(turns: list[Fields], with_texts: bool) -> Conversation:
    result = Conversation(b"", b"", [])
    messages: list[bytes] = []
    digested: list[bytes] = []
    for number, turn in enumerate(turns, start=1):
        message, said = _message(result, turn, number, with_texts)
        messages.append(message)
        digested.append(said)
    result.messages = b"[" + b",".join(messages) + b"]"
    result.digested = b"[" + b",".join(digested) + b"]"
    return result


def _turns(raw: bytes, key: str) -> list[Fields]:
    try:
        return [fields_of(turn) for turn in objects.decode(raw)]
    except msgspec.ValidationError:
        if raw[:1] != b"[":
            raise Drop(Reason.WRONG_TYPE, f"'{key}' is {kind_of(raw)}") from None
        for number, item in enumerate(a_list.decode(raw), start=1):
            if bytes(item)[:1] != b"{":
                raise Drop(Reason.WRONG_TYPE, f"message {number} is {kind_of(bytes(item))}") from None
        raise


def one_turn(present: Fields, key: str, used: set[str], with_texts: bool) -> Conversation:
    """A prompt and, if there is one, its answer; either may be a list of messages already. Raises Drop."""
    answer_key = next((name for name in ANSWER_KEYS if present.get(name, b"")[:1] in (b'"', b"[")), None)
    turns: list[Fields] = []
    prompt = present[key]
    if prompt[:1] == b"[":
        turns += _turns(prompt, key)
    elif prompt[:1] == b'"':
        if key == "instruction" and present.get("input", b"")[:1] == b'"':
            used.add("input")
            given = a_text.decode(present["input"])
            prompt = encode(a_text.decode(prompt) + "\n\n" + given) if given.strip() else prompt
        if not a_text.decode(prompt).strip():
            raise Drop(Reason.EMPTY_TEXT, f"'{key}' is empty")
        turns += _history(present, used)
        turns.append({"role": b'"user"', "content": prompt})
    else:
        raise Drop(Reason.WRONG_TYPE, f"'{key}' is {kind_of(prompt)}")
    if answer_key is not None:
        answer = present[answer_key]
        if answer[:1] == b"[":
            turns += _turns(answer, answer_key)
        elif answer != b'""':
            turns.append({"role": b'"assistant"', "content": answer})
        used.add(answer_key)
    if not turns:
        raise Drop(Reason.EMPTY_CONVERSATION, f"'{key}' is empty")
    used |= {key, *_with_system(present, turns)}
    return _long_way(turns, with_texts)


def _history(present: Fields, used: set[str]) -> list[Fields]:
    """Earlier turns as pairs of a question and its answer; anything else stays among the other fields."""
    if "history" not in present:
        return []
    try:
        pairs = _pairs.decode(present["history"])
    except msgspec.ValidationError:
        return []
    used.add("history")
    names = (b'"user"', b'"assistant"')
    return [{"role": role, "content": encode(said)} for pair in pairs for role, said in zip(names, pair, strict=True)]


def _role(turn: Fields, number: int) -> tuple[str, bytes]:
    raw = turn.get("role" if "role" in turn else "from", b"null")
    if (known := _ROLES.get(raw)) is not None:
        return known
    if raw[:1] != b'"':
        raise Drop(Reason.WRONG_TYPE, f"message {number} has no role")
    name = a_text.decode(raw)
    if (role := ROLES.get(name.strip().lower())) is None:
        raise Drop(Reason.UNKNOWN_ROLE, f"message {number}: '{name[:50]}'")
    return role, encode(role)


def _message(result: Conversation, turn: Fields, number: int, with_texts: bool) -> tuple[bytes, bytes]:
    """One message and the message as the id knows it; what is said about the conversation goes to `result`.

    Its role and content come first, then the other fields of a turn of text, then all others as they stand.
    """
    role, role_json = _role(turn, number)
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    content = turn.get(content_key, b"")
    head = b'{"role":' + role_json
    first = content[:1]
    if first == b'"':
        content = string(content)
        if with_texts and role != "tool":
            result.texts.append(a_text.decode(content))
    elif first == b"[":
        content, text, non_text = _parts(content)
        result.non_text |= non_text
        if with_texts and role != "tool":
            result.texts.append(text)
    elif content and content != b"null":
        raise Drop(Reason.WRONG_TYPE, f"message {number}: content is {kind_of(content)}")
    speaks = bool(content) and content not in (b"null", b'""')
    others: list[tuple[bytes, bytes, bytes]] = []
    keys = turn.keys() - {role_key, content_key}
    for key in sorted(keys & _FULL_TURN_KEYS) + [key for key in turn if key in keys - _FULL_TURN_KEYS]:
        raw = turn[key]
        if raw[:1] == b'"':
            value = spelling = string(raw)
            if key not in _FULL_TURN_KEYS:
                value = raw
        else:
            value = compact(raw)
            spelling = one_spelling(value)
        if key == "tool_calls" and raw[:1] == b"[":
            value, spelling = _calls(value)
        elif key == "function_call" and raw[:1] == b"{":
            value, spelling = _call(an_object.decode(value))
        if value not in (b"null", b'""', b"[]"):
            others.append((key_of(key), value, spelling))
            speaks |= key in ("tool_calls", "function_call") or key in REASONING_KEYS
        else:
            others.append((key_of(key), value, b""))
    if first != b'"' and first != b"[" and not speaks and role != "assistant":
        raise Drop(Reason.WRONG_TYPE, f"message {number}: content is {kind_of(content or b'null')}")
    result.answered |= speaks and role == "assistant"
    message = head + b',"content":' + content if content else head
    if not others:
        # An exporter writes an empty content, null or none at all for the same turn.
        return message + b"}", message + b"}" if speaks else head + b',"content":""}'
    said = content if content and content != b"null" else b'""'
    fields = b"".join(b"," + key + b":" + spelled for key, _, spelled in sorted(others) if spelled)
    message += b"".join(b"," + key + b":" + value for key, value, _ in others)
    return message + b"}", head + b',"content":' + said + fields + b"}"


def _parts(raw: bytes) -> tuple[bytes, str, bool]:
    """Content in parts: as JSON, the text in it, whether there is something else in it."""
    texts: list[str] = []
    plain, non_text = True, False
    for item in a_list.decode(raw):
        part = bytes(item)
        fields = fields_of(an_object.decode(part)) if part[:1] == b"{" else {}
        text = fields.get("text", b"")
        if fields.get("type", b'"text"') != b'"text"' or text[:1] != b'"':
            plain, non_text = False, True
            continue
        texts.append(a_text.decode(text))
        plain &= fields.keys() <= {"type", "text"}
    joined = "".join(texts)
    return (encode(joined) if plain else compact(raw)), joined, non_text


def _calls(raw: bytes) -> tuple[bytes, bytes]:
    """Tool calls with their arguments as JSON text, and the same as the id knows them."""
    try:
        calls = [_call(call) for call in objects.decode(raw)]
    except msgspec.ValidationError:
        return raw, one_spelling(raw)
    return b"[" + b",".join(call for call, _ in calls) + b"]", b"[" + b",".join(said for _, said in calls) + b"]"


def _call(call: dict[str, msgspec.Raw]) -> tuple[bytes, bytes]:
    """One tool call, compact already; its arguments may stand in it or in its `function`."""
    fields = fields_of(call)
    said = dict(fields)
    for key, value in fields.items():
        if key == "function" and value[:1] == b"{":
            fields[key], said[key] = _call(an_object.decode(value))
        elif key != "arguments" or value == b"null":
            said[key] = one_spelling(value)
        elif value[:1] != b'"':
            fields[key], said[key] = as_text(value), as_text(one_spelling(value))
        else:
            # Text that holds JSON counts as the JSON, as it does for servers and for `prepare`.
            text = a_text.decode(value)
            said[key] = encode(text)
            with contextlib.suppress(msgspec.DecodeError):
                said[key] = as_text(one_spelling(compact(text.strip().encode())))
    return joined(fields), joined(said)
