"""The turns of a conversation, in any form that they come in, as canonical messages."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import msgspec

from eyas.data.sources import MEDIA_KEYS, ROLES, Drop, Reason, once_each
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
NOTHING = (b"null", b'""', b"[]", b"{}", b"false")


_NO_CALLS = msgspec.Raw()
_Said = str | msgspec.UnsetType


class _Turn(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A turn as nearly all are; its fields in the order in which messages have them and the id knows them."""

    role: str
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    name: _Said = msgspec.UNSET
    reasoning: _Said = msgspec.UNSET
    reasoning_content: _Said = msgspec.UNSET
    thinking: _Said = msgspec.UNSET
    tool_call_id: _Said = msgspec.UNSET
    tool_calls: msgspec.Raw = _NO_CALLS


class _NamedTurn(msgspec.Struct, forbid_unknown_fields=True, gc=False, rename={"role": "from", "content": "value"}):
    role: str
    content: str


_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
_UNSET = msgspec.UNSET
_KEY = re.compile(rb'"(?:role|content|from|value|name|reasoning|reasoning_content|thinking|tool_call_id|tool_calls)"')
"""A key of a turn. In a text its quotes would be escaped: nothing else is found but a text that is just this word."""
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
"""With such ones a key could be spelled, too. Apart from `_KEY`: one pattern for both is eight times as slow."""
_NO_THOUGHTS = (_UNSET,) * 3
_TEXT_KEYS = {"name", "reasoning", "reasoning_content", "thinking", "tool_call_id"}
_FIRST_KEYS = _TEXT_KEYS | {"tool_calls"}
_turns_of = msgspec.json.Decoder(list[_Turn])
_named_turns_of = msgspec.json.Decoder(list[_NamedTurn])
_pairs = msgspec.json.Decoder(list[tuple[str, str]])
_ROLES: dict[bytes, tuple[str, bytes]] = {encode(name): (role, encode(role)) for name, role in ROLES.items()}


class Conversation(msgspec.Struct, gc=False):
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
    if "system" not in present and (short := short_conversation(raw, with_texts)) is not None:
        used.add(key)
        return short
    turns = _turns(raw, key)
    if not turns:
        raise Drop(Reason.EMPTY_CONVERSATION, f"'{key}' is empty")
    used_here = _with_system(present, turns)
    result = _long_way(turns, with_texts)
    used |= {key, *used_here}
    return result


def short_conversation(raw: bytes, with_texts: bool) -> Conversation | None:
    """What the long way gives, for turns as nearly all are; None where the long way is needed."""
    try:
        if raw.find(b'"from"', 0, 64) >= 0:
            named = _named_turns_of.decode(raw)
            return _of_named(named, with_texts) if _num_keys(raw) == 2 * len(named) else None
        turns = _turns_of.decode(raw)
    except msgspec.ValidationError:
        return None
    num_keys = 2 * len(turns)
    answered = False
    texts: list[str] = []
    said = turns
    for number, turn in enumerate(turns):
        role = ROLES.get(turn.role)
        if role is None:
            return None
        turn.role = role
        if (
            turn.content.__class__ is str
            and turn.tool_calls is _NO_CALLS
            and turn.reasoning_content is turn.reasoning is turn.thinking is turn.name is turn.tool_call_id is _UNSET
        ):
            answered |= role == "assistant" and turn.content != ""
            if with_texts:
                texts.append(turn.content)
            continue
        known = turn
        calls = turn.tool_calls
        thoughts = (turn.reasoning, turn.reasoning_content, turn.thinking)
        others = (*thoughts, turn.name, turn.tool_call_id)
        num_keys += len(others) - others.count(_UNSET) - (turn.content is _UNSET)
        if calls is not _NO_CALLS:
            found = compact(bytes(calls))
            if found == b"[]" or found[:1] != b"[":
                return None
            _require_once_each(found)
            num_keys += 1 + _num_keys(found)
            value, spelling = _calls(found)
            turn.tool_calls = msgspec.Raw(value)
            if spelling != value:
                known = msgspec.structs.replace(turn, tool_calls=msgspec.Raw(spelling))
        if "" in thoughts or turn.name == "" or turn.tool_call_id == "":
            return None  # the message has it, the id has not
        speaks = bool(turn.content) or calls is not _NO_CALLS or thoughts != _NO_THOUGHTS
        if not isinstance(turn.content, str):
            if not speaks and role != "assistant":
                return None
            known = msgspec.structs.replace(known, content="")
        answered |= speaks and role == "assistant"
        if known is not turn:
            if said is turns:
                said = list(turns)
            said[number] = known
        if with_texts:
            told = (turn.content, *thoughts)
            texts += [text for text in told if isinstance(text, str)]
            if calls is not _NO_CALLS:
                texts += _called_with(bytes(turn.tool_calls))
    if not turns or _num_keys(raw) != num_keys:
        return None
    messages = encode(turns)
    return Conversation(messages, messages if said is turns else encode(said), texts, answered)


def _num_keys(raw: bytes) -> int:
    """How many keys turns have, with those that the parser, which tells the last only, leaves out; -1 where unknown."""
    return -1 if _ESCAPED_LETTER.search(raw) else len(_KEY.findall(raw))


def _require_once_each(raw: bytes) -> None:
    """Drop for messages in which an object has a key twice."""
    json.loads(raw, object_pairs_hook=once_each, parse_int=str)


def _of_named(named: list[_NamedTurn], with_texts: bool) -> Conversation | None:
    turns = [_Turn(role, turn.content) for turn in named if (role := ROLES.get(turn.role))]
    if not turns or len(turns) != len(named):
        return None
    messages = encode(turns)
    answered = any(turn.content != "" for turn in turns if turn.role == "assistant")
    return Conversation(messages, messages, [turn.content for turn in named] if with_texts else [], answered)


def _called_with(calls: bytes) -> list[str]:
    """The texts in the arguments of tool calls, or of one call: those in their JSON, else as they stand."""
    texts: list[str] = []
    with contextlib.suppress(*_UNREADABLE):
        _arguments(msgspec.json.decode(calls), texts)
    return texts


def _arguments(value: Any, texts: list[str]) -> None:
    if isinstance(value, list):
        for item in value:
            _arguments(item, texts)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "arguments":
                _arguments(item if isinstance(item, dict) else None, texts)
            elif isinstance(item, str):
                try:
                    _leaves(msgspec.json.decode(item), texts)
                except _UNREADABLE:
                    texts.append(item)
            else:
                _leaves(item, texts)


def _leaves(value: Any, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, list):
        for item in value:
            _leaves(item, texts)
    elif isinstance(value, dict):
        for item in value.values():
            _leaves(item, texts)


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
        turns = [fields_of(turn) for turn in objects.decode(raw)]
    except msgspec.ValidationError:
        if raw[:1] != b"[":
            raise Drop(Reason.WRONG_TYPE, f"'{key}' is {kind_of(raw)}") from None
        for number, item in enumerate(a_list.decode(raw), start=1):
            if bytes(item)[:1] != b"{":
                raise Drop(Reason.WRONG_TYPE, f"message {number} is {kind_of(bytes(item))}") from None
        raise
    _require_once_each(raw)
    return turns


def one_turn(present: Fields, key: str, used: set[str], with_texts: bool) -> Conversation:
    """A prompt and, if there is one, its answer; either may be a list of messages already. Raises Drop."""
    answer_key = next((name for name in ANSWER_KEYS if present.get(name, b"")[:1] in (b'"', b"[")), None)
    used |= {key} if answer_key is None else {key, answer_key}
    prompt, answer = present[key], b'""' if answer_key is None else present[answer_key]
    asked = _turns(prompt, key) if prompt[:1] != b'"' else _asked(present, key, used)
    if answer[:1] == b"[":
        asked += _turns(answer, str(answer_key))
    elif answer != b'""':
        asked.append({"role": b'"assistant"', "content": answer})
    if not asked:
        raise Drop(Reason.EMPTY_CONVERSATION, f"'{key}' is empty")
    used |= _with_system(present, asked)
    return _long_way(asked, with_texts)


def _asked(present: Fields, key: str, used: set[str]) -> list[Fields]:
    """The turns up to the prompt: earlier ones as pairs of a question and its answer, then what is asked now."""
    prompt = present[key]
    if key == "instruction" and present.get("input", b"")[:1] == b'"':
        used.add("input")
        if (given := a_text.decode(present["input"])).strip():
            prompt = encode(f"{a_text.decode(prompt)}\n\n{given}")
    if not a_text.decode(prompt).strip():
        raise Drop(Reason.EMPTY_TEXT, f"'{key}' is empty")
    turns: list[Fields] = []
    if "history" in present:
        # Anything but pairs of texts stays among the other fields.
        with contextlib.suppress(msgspec.ValidationError):
            for question, answer in _pairs.decode(present["history"]):
                turns.append({"role": b'"user"', "content": encode(question)})
                turns.append({"role": b'"assistant"', "content": encode(answer)})
            used.add("history")
    return [*turns, {"role": b'"user"', "content": prompt}]


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

    Its role and content come first, then the other fields of `_Turn`, then all others as they stand.
    """
    role, role_json = _role(turn, number)
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    content = turn.get(content_key, b"")
    head = b'{"role":' + role_json
    first = content[:1]
    if first == b'"' and len(turn) == 2 and not with_texts:
        # A turn of nothing but text among others.
        content = string(content)
        result.answered |= role == "assistant" and content != b'""'
        message = head + b',"content":' + content + b"}"
        return message, message
    if first == b'"':
        content = string(content)
        if with_texts:
            result.texts.append(a_text.decode(content))
    elif first == b"[":
        content, text, non_text = _parts(content)
        result.non_text |= non_text
        if with_texts:
            result.texts.append(text)
    elif content and content != b"null":
        raise Drop(Reason.WRONG_TYPE, f"message {number}: content is {kind_of(content)}")
    speaks = bool(content) and content not in (b"null", b'""')
    others: list[tuple[bytes, bytes, bytes]] = []
    keys = turn.keys() - {role_key, content_key}
    for key in sorted(keys & _FIRST_KEYS) + [key for key in turn if key in keys - _FIRST_KEYS]:
        raw = turn[key]
        if raw[:1] == b'"':
            value = spelling = string(raw)
            if key not in _TEXT_KEYS:
                value = raw
        else:
            value = compact(raw)
            spelling = one_spelling(value)
        if key == "tool_calls" and raw[:1] == b"[":
            value, spelling = _calls(value)
        elif key == "function_call" and raw[:1] == b"{":
            value, spelling = _call(an_object.decode(value))
        if with_texts and key in REASONING_KEYS and value[:1] == b'"':
            result.texts.append(a_text.decode(value))
        elif with_texts and key in ("tool_calls", "function_call"):
            result.texts += _called_with(value)
        result.non_text |= key in MEDIA_KEYS and value not in NOTHING
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
