"""One row of any form to one line of the canonical file, without a change to what it cannot read.

A row takes one of these forms; where several fit, the first one wins:

| form | keys |
|---|---|
| token ids | `input_ids` or `token_ids`, with `loss_mask`; messages beside them are kept |
| messages | `messages`, `conversations` or `conversation`: `{role, content, …}` or `{from, value}` |
| one turn | `prompt`, `instruction` and `input`, `question`, `query`; `completion`, `response`, `output`, `answer` |
| text | `text` |

`system` beside messages or a turn comes first, `history` (pairs of texts) before the turn.

The canonical line has its keys in this order, those in brackets only where there is something to say:

| key | value |
|---|---|
| `id` | 32 hex digits, xxh3-128: of messages and tools, of the text, or of token ids and mask |
| `messages`, `text` or `input_ids` and `loss_mask` | roles by their names in `sources.ROLES` |
| [`tools`] | JSON text of a list |
| `source`, `tags` | text, and a list of texts |
| [`language`] | text |
| [`retokenized`] | true |
| [`extra`] | JSON text of an object: every other field of the row, its own id too |

JSON text is the row's own bytes without the blanks between tokens: numbers, escapes and the order of keys stay. So are
tool-call `arguments`, and so are other fields of a message, which stay in their place because templates read them.
Content that is a list of nothing but texts becomes one text; content with images and the like is kept, and marked.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import xxhash

from eyas.data.files import RawRow, broken_json
from eyas.data.sources import ROLES, Reason

CANONICAL_VERSION = 1
"""Part of what an output is known by: raise it when the same input would give other lines."""

CONVERSATION_TAG = b"eyas.conversation.1\0"
TEXT_TAG = b"eyas.text.1\0"
TOKENS_TAG = b"eyas.tokens.1\0"

IDS_KEYS = ("input_ids", "token_ids")
MESSAGES_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "instruction", "question", "query")
ANSWER_KEYS = ("completion", "response", "output", "answer")
LANGUAGE_KEYS = ("language", "lang")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
KNOWN = "messages, conversations, prompt, instruction, question, text, input_ids with loss_mask"

Fields = dict[str, bytes]

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_str = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[_TokenId])
_mask = msgspec.json.Decoder(list[bool | int])
_encode = msgspec.json.Encoder().encode

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_NO_NUMBER = re.compile(_STRING + rb"|(-?Infinity|NaN)", re.DOTALL)
_ROLES: dict[bytes, tuple[str, bytes]] = {_encode(name): (role, _encode(role)) for name, role in ROLES.items()}


class _Turn(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A turn of nothing but text, as nearly all are."""

    role: str
    content: str


class _NamedTurn(msgspec.Struct, forbid_unknown_fields=True, gc=False, rename={"role": "from", "content": "value"}):
    role: str
    content: str


_turns_of_text = msgspec.json.Decoder(list[_Turn])
_named_turns_of_text = msgspec.json.Decoder(list[_NamedTurn])


class Form(IntEnum):
    """What the target is shown of a row."""

    MESSAGES = 0
    TEXT = 1
    TOKENS = 2


class Drop(Exception):
    """A row that is readable, but no conversation."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Canonical:
    """One row in the canonical form."""

    id: bytes
    """16 bytes."""
    line: bytes
    """JSON with its end of line."""
    form: Form
    texts: list[str]
    """What system, user and assistant turns say, or the text; only where it was asked for."""
    answered: bool
    """Whether anything in it was written by an assistant; text and token ids count as answered."""
    non_text: bool
    """Images, audio and the like in it: `prepare` will drop it."""
    mended: bool
    """It had NaN or Infinity, which are not JSON, and has null instead."""


@dataclass(slots=True)
class _Conversation:
    messages: bytes
    """JSON."""
    digested: bytes
    """The messages as the id knows them: one spelling, other fields sorted, null fields left out."""
    texts: list[str]
    answered: bool = False
    non_text: bool = False


def canonical(row: RawRow, source: str, tags: tuple[str, ...] = (), *, with_texts: bool = False) -> Canonical:
    """The row in the canonical form; its own `source` counts, its own tags come first.

    Raises Drop for a row of no use, DataError for one that is not JSON.
    """
    try:
        fields, mended = _parse(row)
        return _canonical(fields, source, tags, with_texts, mended)
    except RecursionError:
        raise Drop(Reason.WRONG_TYPE, "nested too deeply") from None


def _canonical(fields: Fields, source: str, tags: tuple[str, ...], with_texts: bool, mended: bool) -> Canonical:
    present = {key: raw for key, raw in fields.items() if raw != b"null"} if b"null" in fields.values() else fields
    ids_key = next((key for key in IDS_KEYS if key in present), None)
    messages_key = next((key for key in MESSAGES_KEYS if key in present), None)
    prompt_key = next((key for key in PROMPT_KEYS if key in present), None)
    used: set[str] = set()
    conversation: _Conversation | None = None
    form = Form.MESSAGES
    if ids_key is not None and "loss_mask" in present:
        form = Form.TOKENS
        content, digest = _tokens(present[ids_key], present["loss_mask"])
        used |= {ids_key, "loss_mask"}
        if messages_key is not None:
            # What cannot be read stays among the other fields: it is the token ids that the target is shown.
            with contextlib.suppress(Drop):
                conversation = _messages(present, messages_key, used, with_texts)
    elif messages_key is not None:
        conversation = _messages(present, messages_key, used, with_texts)
    elif prompt_key is not None:
        conversation = _one_turn(present, prompt_key, used, with_texts)
    elif "text" in present:
        form = Form.TEXT
        text = _text(present["text"])
        used.add("text")
        content, digest = [b'"text":', text], xxhash.xxh3_128_digest(TEXT_TAG + text)
    elif ids_key is not None:
        raise Drop(Reason.NO_LOSS_MASK, f"'{ids_key}' without 'loss_mask': which tokens the target wrote is unknown")
    else:
        raise Drop(Reason.UNKNOWN_FORM, f"keys {', '.join(sorted(map(str, fields)))[:200] or 'none'}; known: {KNOWN}")
    tools, tools_digested = _tools(present["tools"]) if "tools" in present else (b"", b"")
    used.add("tools")
    if conversation is not None:
        messages = [b'"messages":', conversation.messages]
        if form is Form.TOKENS:
            content = [*messages, b",", *content]
        else:
            content = messages
            said = xxhash.xxh3_128(CONVERSATION_TAG)
            said.update(conversation.digested)
            said.update(b"\0" + tools_digested)
            digest = said.digest()
    hex_id = digest.hex()
    parts = [b'{"id":"', hex_id.encode(), b'",', *content]
    if tools:
        parts += (b',"tools":', tools)
    parts += _labels(present, source, tags, used)
    if extra := _extra(fields, used, hex_id):
        parts += (b',"extra":', extra)
    parts.append(b"}\n")
    if form is Form.TEXT and with_texts:
        texts = [_str.decode(text)]
    else:
        texts = [] if conversation is None else conversation.texts
    return Canonical(
        id=digest,
        line=b"".join(parts),
        form=form,
        texts=texts,
        answered=form is not Form.MESSAGES or (conversation is not None and conversation.answered),
        non_text=form is Form.MESSAGES and conversation is not None and conversation.non_text,
        mended=mended,
    )


def _parse(row: RawRow) -> tuple[Fields, bool]:
    try:
        return _fields(_object.decode(row.data)), False
    except msgspec.ValidationError:
        raise Drop(Reason.NOT_AN_OBJECT, f"{_kind(row.data.lstrip())} instead of an object") from None
    except msgspec.DecodeError as error:
        problem = error
    # Python's own parser takes more: half of a surrogate pair, and NaN, which Python's own writer writes.
    try:
        json.dumps(json.loads(row.data), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Drop(Reason.INVALID_TEXT, "an escape like \\ud83d without its other half") from None
    except ValueError:
        raise broken_json(row, problem) from None
    mended = _NO_NUMBER.sub(lambda found: b"null" if found[1] else found[0], row.data)
    try:
        return _fields(_object.decode(mended)), True
    except msgspec.ValidationError:
        raise Drop(Reason.NOT_AN_OBJECT, f"{_kind(mended.lstrip())} instead of an object") from None
    except msgspec.DecodeError as error:
        raise broken_json(row, error) from None


def _fields(decoded: dict[str, msgspec.Raw]) -> Fields:
    return {key: bytes(raw) for key, raw in decoded.items()}


def _messages(present: Fields, key: str, used: set[str], with_texts: bool) -> _Conversation:
    raw = present[key]
    if "system" not in present and (plain := _plain_conversation(raw, with_texts)) is not None:
        used.add(key)
        return plain
    turns = _turns(raw, key)
    if not turns:
        raise Drop(Reason.EMPTY_CONVERSATION, f"'{key}' is empty")
    used_here = _with_system(present, turns)
    result = _conversation(turns, with_texts)
    used |= {key, *used_here}
    return result


def _plain_conversation(raw: bytes, with_texts: bool) -> _Conversation | None:
    """The short way, with the same result, for turns of nothing but text; None where the long way is needed."""
    try:
        if raw.find(b'"from"', 0, 64) < 0:
            turns = _turns_of_text.decode(raw)
        else:
            turns = [_Turn(turn.role, turn.content) for turn in _named_turns_of_text.decode(raw)]
    except msgspec.ValidationError:
        return None
    answered = False
    for turn in turns:
        role = ROLES.get(turn.role)
        if role is None:
            return None
        turn.role = role
        answered |= role == "assistant" and turn.content != ""
    messages = _encode(turns)
    texts = [turn.content for turn in turns if turn.role != "tool"] if with_texts else []
    return _Conversation(messages, messages, texts, answered) if turns else None


def _with_system(present: Fields, turns: list[Fields]) -> set[str]:
    """Put the text of `system` in front, unless a system turn is there; the keys that this used."""
    system = present.get("system", b"")
    if system[:1] != b'"' or system == b'""' or _role(turns[0], 1)[0] == "system":
        return set()
    turns.insert(0, {"role": b'"system"', "content": system})
    return {"system"}


def _conversation(turns: list[Fields], with_texts: bool) -> _Conversation:
    result = _Conversation(b"", b"", [])
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
        return [_fields(turn) for turn in _objects.decode(raw)]
    except msgspec.ValidationError:
        if raw[:1] != b"[":
            raise Drop(Reason.WRONG_TYPE, f"'{key}' is {_kind(raw)}") from None
        for number, item in enumerate(_list.decode(raw), start=1):
            if bytes(item)[:1] != b"{":
                raise Drop(Reason.WRONG_TYPE, f"message {number} is {_kind(bytes(item))}") from None
        raise


def _one_turn(present: Fields, key: str, used: set[str], with_texts: bool) -> _Conversation:
    """A prompt and, if there is one, its answer; either may be a list of messages already."""
    answer_key = next((name for name in ANSWER_KEYS if present.get(name, b"")[:1] in (b'"', b"[")), None)
    turns: list[Fields] = []
    prompt = present[key]
    if prompt[:1] == b"[":
        turns += _turns(prompt, key)
    elif prompt[:1] == b'"':
        if key == "instruction" and present.get("input", b"")[:1] == b'"':
            used.add("input")
            given = _str.decode(present["input"])
            prompt = _encode(_str.decode(prompt) + "\n\n" + given) if given.strip() else prompt
        if not _str.decode(prompt).strip():
            raise Drop(Reason.EMPTY_TEXT, f"'{key}' is empty")
        turns += _history(present, used)
        turns.append({"role": b'"user"', "content": prompt})
    else:
        raise Drop(Reason.WRONG_TYPE, f"'{key}' is {_kind(prompt)}")
    if answer_key is not None:
        answer = present[answer_key]
        if answer[:1] == b"[":
            turns += _turns(answer, answer_key)
        elif _str.decode(answer):
            turns.append({"role": b'"assistant"', "content": answer})
        used.add(answer_key)
    if not turns:
        raise Drop(Reason.EMPTY_CONVERSATION, f"'{key}' is empty")
    used |= {key, *_with_system(present, turns)}
    return _conversation(turns, with_texts)


def _history(present: Fields, used: set[str]) -> list[Fields]:
    """Earlier turns as pairs of a question and its answer; anything else stays among the other fields."""
    try:
        pairs = msgspec.json.decode(present.get("history", b"[]"), type=list[tuple[str, str]])
    except msgspec.ValidationError:
        return []
    used.add("history")
    turns: list[Fields] = []
    for question, answer in pairs:
        turns += [
            {"role": b'"user"', "content": _encode(question)},
            {"role": b'"assistant"', "content": _encode(answer)},
        ]
    return turns


def _role(turn: Fields, number: int) -> tuple[str, bytes]:
    raw = turn.get("role" if "role" in turn else "from", b"null")
    if (known := _ROLES.get(raw)) is not None:
        return known
    if raw[:1] != b'"':
        raise Drop(Reason.WRONG_TYPE, f"message {number} has no role")
    name = _str.decode(raw)
    if (role := ROLES.get(name.strip().lower())) is None:
        raise Drop(Reason.UNKNOWN_ROLE, f"message {number}: '{name[:50]}'")
    return role, _encode(role)


def _message(result: _Conversation, turn: Fields, number: int, with_texts: bool) -> tuple[bytes, bytes]:
    """One message and the message as the id knows it; what is said about the conversation goes to `result`.

    Its role and content come first, its other fields after them, as they stand.
    """
    role, role_json = _role(turn, number)
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    content = turn.get(content_key, b"")
    head = b'{"role":' + role_json
    first = content[:1]
    if first == b'"':
        content = _string(content)
        if with_texts and role != "tool":
            result.texts.append(_str.decode(content))
    elif first == b"[":
        content, text, non_text = _parts(content)
        result.non_text |= non_text
        if with_texts and role != "tool":
            result.texts.append(text)
    elif content and content != b"null":
        raise Drop(Reason.WRONG_TYPE, f"message {number}: content is {_kind(content)}")
    speaks = bool(content) and content not in (b"null", b'""')
    others: list[tuple[bytes, bytes, bytes]] = []
    for key, raw in turn.items():
        if key in (role_key, content_key):
            continue
        value = raw if raw[:1] == b'"' else _compact(raw)
        spelling = _one_spelling(value)
        if key == "tool_calls" and raw[:1] == b"[":
            value, spelling = _calls(value), _calls(spelling, one_spelling=True)
        elif key == "function_call" and raw[:1] == b"{":
            value, spelling = _call(value), _call(spelling, one_spelling=True)
        elif key in REASONING_KEYS and value[:1] == b'"':
            value = _string(value)
        if value not in (b"null", b'""', b"[]"):
            others.append((_key(key), value, spelling))
            speaks |= key in ("tool_calls", "function_call") or key in REASONING_KEYS
        else:
            others.append((_key(key), value, b""))
    if first != b'"' and first != b"[" and not speaks and role != "assistant":
        raise Drop(Reason.WRONG_TYPE, f"message {number}: content is {_kind(content or b'null')}")
    result.answered |= speaks and role == "assistant"
    message = head + b',"content":' + content if content else head
    if not others:
        # An exporter writes an empty content, null or none at all for the same turn.
        return message + b"}", message + b"}" if speaks else head + b',"content":""}'
    said = content if content and content != b"null" else b'""'
    fields = b"".join(b"," + key + b":" + spelled for key, _, spelled in sorted(others) if spelled)
    message += b"".join(b"," + key + b":" + value for key, value, _ in others)
    return message + b"}", head + b',"content":' + said + fields + b"}"


def _string(raw: bytes) -> bytes:
    """A JSON string in its one spelling: nothing is escaped that need not be."""
    if b"\\u" in raw or b"\\/" in raw:
        return _encode(_str.decode(raw))
    return raw


def _compact(raw: bytes) -> bytes:
    """The same JSON without blanks between its tokens; numbers, escapes and the order of keys stay."""
    return msgspec.json.format(raw, indent=-1) if raw[:1] in (b"{", b"[") else raw


def _one_spelling(compact: bytes) -> bytes:
    """JSON for digests: each string in its one spelling."""
    if b"\\u" in compact or b"\\/" in compact:
        return _STRINGS.sub(lambda found: _string(found[0]), compact)
    return compact


def _as_text(compact: bytes) -> bytes:
    """JSON as a JSON string that holds it."""
    return _encode(compact.decode())


def _parts(raw: bytes) -> tuple[bytes, str, bool]:
    """Content in parts: as JSON, the text in it, whether there is something else in it."""
    texts: list[str] = []
    plain, non_text = True, False
    for item in _list.decode(raw):
        part = bytes(item)
        fields = _fields(_object.decode(part)) if part[:1] == b"{" else {}
        text = fields.get("text", b"")
        if fields.get("type", b'"text"') != b'"text"' or text[:1] != b'"':
            plain, non_text = False, True
            continue
        texts.append(_str.decode(text))
        plain &= fields.keys() <= {"type", "text"}
    joined = "".join(texts)
    return (_encode(joined) if plain else _compact(raw)), joined, non_text


def _calls(raw: bytes, *, one_spelling: bool = False) -> bytes:
    try:
        calls = _objects.decode(raw)
    except msgspec.ValidationError:
        return raw
    return b"[" + b",".join(_call(call, one_spelling=one_spelling) for call in calls) + b"]"


def _call(raw: bytes | dict[str, msgspec.Raw], *, one_spelling: bool = False) -> bytes:
    """A tool call, compact already, its arguments as JSON text wherever they stand."""
    fields = _fields(_object.decode(raw) if isinstance(raw, bytes) else raw)
    for key, value in fields.items():
        if key == "function" and value[:1] == b"{":
            fields[key] = _call(value, one_spelling=one_spelling)
        elif key == "arguments" and value[:1] != b'"' and value != b"null":
            fields[key] = _as_text(value)
        elif key == "arguments" and one_spelling and value != b"null":
            # Text that holds JSON counts as the JSON, as it does for servers and for `prepare`.
            with contextlib.suppress(msgspec.DecodeError):
                fields[key] = _as_text(_one_spelling(_compact(_str.decode(value).strip().encode())))
    return _join(fields)


def _join(fields: Fields) -> bytes:
    return b"{" + b",".join(_key(key) + b":" + value for key, value in fields.items()) + b"}"


@lru_cache(maxsize=64)
def _tools(raw: bytes) -> tuple[bytes, bytes]:
    """Tools as a JSON string that holds them, and as the id knows them; empty where there are none."""
    given = raw[:1] == b'"'
    text = _str.decode(raw) if given else ""
    if given and not text.strip():
        return b"", b""
    try:
        compact = _compact(text.encode().strip() if given else raw)
        tools = _objects.decode(compact)
    except msgspec.ValidationError:
        raise Drop(Reason.WRONG_TYPE, "'tools' is not a list of objects") from None
    except msgspec.DecodeError:
        raise Drop(Reason.WRONG_TYPE, "'tools' is text, but not JSON") from None
    if not tools:
        return b"", b""
    return (_encode(text) if given else _as_text(compact)), _one_spelling(compact)


def _text(raw: bytes) -> bytes:
    if raw[:1] != b'"':
        raise Drop(Reason.WRONG_TYPE, f"'text' is {_kind(raw)}")
    if raw == b'""':
        raise Drop(Reason.EMPTY_TEXT, "'text' is empty")
    return _string(raw)


def _tokens(ids: bytes, mask: bytes) -> tuple[list[bytes], bytes]:
    try:
        token_ids = _ids.decode(ids)
    except msgspec.ValidationError as error:
        raise Drop(Reason.BAD_TOKEN_IDS, f"token ids must be a flat list of 0..2**31-1: {error}") from None
    if not token_ids:
        raise Drop(Reason.EMPTY_CONVERSATION, "no token ids")
    try:
        loss_mask = _mask.decode(mask)
    except msgspec.ValidationError:
        loss_mask = [2]
    if not all(entry in (0, 1) for entry in loss_mask):
        raise Drop(Reason.BAD_LOSS_MASK, "'loss_mask' must be a flat list of 0 and 1")
    if len(loss_mask) != len(token_ids):
        raise Drop(Reason.BAD_LOSS_MASK, f"{len(loss_mask)} entries in 'loss_mask' for {len(token_ids)} token ids")
    ids, mask = _encode(token_ids), _encode([int(entry) for entry in loss_mask])
    content = [b'"input_ids":', ids, b',"loss_mask":', mask]
    return content, xxhash.xxh3_128_digest(TOKENS_TAG + ids + mask)


@lru_cache(maxsize=1024)
def _key(name: str) -> bytes:
    return _encode(name)


@lru_cache(maxsize=1024)
def _tags(tags: tuple[str, ...]) -> bytes:
    return b',"tags":' + _encode(tuple(dict.fromkeys(tags)))


def _labels(present: Fields, source: str, tags: tuple[str, ...], used: set[str]) -> list[bytes]:
    """`source`, `tags`, `language`, `retokenized`; a label of another type stays among the other fields."""
    own = present.get("source", b'""')
    name = _string(own) if own[:1] == b'"' and own != b'""' else own if own.isdigit() else b""
    if name:
        used.add("source")
        # A number is a label, too.
        name = name if name[:1] == b'"' else b'"' + name + b'"'
    if own := present.get("tags", b""):
        with contextlib.suppress(msgspec.ValidationError):
            mine = [_str.decode(own)] if own[:1] == b'"' else _texts.decode(own)
            tags = (*mine, *tags)
            used.add("tags")
    labels = [b',"source":', name or _key(source), _tags(tags)]
    for key in LANGUAGE_KEYS:
        if (own := present.get(key, b""))[:1] == b'"' and own != b'""':
            labels += (b',"language":', _string(own))
            used.add(key)
            break
    if present.get("retokenized") == b"true":
        labels.append(b',"retokenized":true')
        used.add("retokenized")
    return labels


def _extra(fields: Fields, used: set[str], hex_id: str) -> bytes:
    """All fields that have no place of their own, as a JSON string that holds an object; empty where there are none."""
    rest = {key: raw for key, raw in fields.items() if key not in used}
    if rest.get("id") == b'"' + hex_id.encode() + b'"':
        # A row of a canonical file: what was put aside then is not put aside twice.
        del rest["id"]
        if list(rest) == ["extra"] and rest["extra"][:1] == b'"':
            return rest["extra"]
    if not rest:
        return b""
    return _as_text(_join({key: _compact(raw) for key, raw in rest.items()}))


def _kind(raw: bytes) -> str:
    names: dict[Any, str] = {b"n": "null", b"t": "a boolean", b"f": "a boolean", b'"': "text", b"[": "a list"}
    return names.get(raw[:1], "an object" if raw[:1] == b"{" else "a number")
