"""One row of any form to one line of the canonical file, without a change to what it cannot read.

A row takes one of these forms; where several fit, the first one wins:

| form | keys |
|---|---|
| token ids | `input_ids` or `token_ids`, with `loss_mask`; messages beside them are kept |
| token ids by turn | `turns`: for each assistant turn `prompt_ids` and `token_ids`; messages beside them are kept |
| messages | `messages`, `conversations` or `conversation`: `{role, content, …}` or `{from, value}` |
| one turn | `prompt`, `instruction` and `input`, `question`, `query`; `completion`, `response`, `output`, `answer` |
| text | `text` |

`system` beside messages or a turn comes first, `history` (pairs of texts) before the turn.

The canonical line has its keys in this order, those in brackets only where there is something to say:

| key | value |
|---|---|
| `id` | 32 hex digits, xxh3-128: of messages and tools, of the text, of token ids and mask, or of those by turn |
| `messages`, `text`, `input_ids` and `loss_mask`, or `turns` | roles by their names in `sources.ROLES` |
| [`tools`] | JSON text of a list |
| `source`, `tags` | text, and a list of texts |
| [`language`] | text |
| [`retokenized`] | true |
| [`image`, `images`, `audio`, …] | as the row has them |
| [`extra`] | JSON text of an object: every other field of the row, its own id too |

JSON text is the row's own bytes without the blanks between tokens: numbers, escapes and the order of keys stay. So are
tool-call `arguments`, and so are other fields of a message, which stay in their place because templates read them.
Content that is a list of nothing but texts becomes one text; content with images and the like is kept, and marked, and
so is a message or a row with images and the like beside its text.
"""

from __future__ import annotations

import contextlib
import json
import re
from enum import IntEnum
from functools import lru_cache
from typing import Annotated

import msgspec
import xxhash

from eyas.data.files import RawRow, broken_json
from eyas.data.sources import LANGUAGE_KEYS, MEDIA_KEYS, Drop, Reason, once_each
from eyas.data.spelling import (
    STRING,
    Fields,
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
from eyas.data.turns import NOTHING, PROMPT_KEYS, Conversation, conversation_of, one_turn, short_conversation

CANONICAL_VERSION = 4
"""Part of what an output is known by: raise it when the same input would give other lines."""

CONVERSATION_TAG = b"eyas.conversation.1\0"
TEXT_TAG = b"eyas.text.1\0"
TOKENS_TAG = b"eyas.tokens.1\0"
TURNS_TAG = b"eyas.turns.1\0"

IDS_KEYS = ("input_ids", "token_ids")
MESSAGES_KEYS = ("messages", "conversations", "conversation")
_MEANING = {*IDS_KEYS, "turns", "system", "source", "tags", *LANGUAGE_KEYS, "retokenized", *MEDIA_KEYS}
"""Fields beside messages that are not only kept, tools aside."""
KNOWN = "messages, conversations, prompt, instruction, question, text, input_ids with loss_mask, turns with token_ids"
MAX_INTEGER_DIGITS = 4300
"""Python reads no longer ones: such a line would stop whoever reads the output."""
_STRIDE = 200

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[_TokenId])
_mask = msgspec.json.Decoder(list[bool | int])
_STRINGS = re.compile(STRING, re.DOTALL)
_LONG_INTEGER = re.compile(rb"(?<![\d.eE+-])-?\d{%d,}(?![\d.eE])" % (MAX_INTEGER_DIGITS + 1))
_MANY_DIGITS = re.compile(rb"\d{%d}" % (MAX_INTEGER_DIGITS // _STRIDE))
_NO_NUMBER = re.compile(STRING + rb"|(-?Infinity|NaN)", re.DOTALL)


class Form(IntEnum):
    """What the target is shown of a row."""

    MESSAGES = 0
    TEXT = 1
    TOKENS = 2


class Canonical(msgspec.Struct, gc=False):
    """One row in the canonical form."""

    id: bytes
    """16 bytes."""
    line: bytes
    """JSON with its end of line."""
    form: Form
    texts: list[str]
    """What the turns say, think and call tools with, or the text; only where it was asked for."""
    answered: bool
    """Whether anything in it was written by an assistant; text and token ids count as answered."""
    non_text: bool
    """Images, audio and the like in its messages or beside them."""
    mended: bool
    """It had NaN or Infinity, which are not JSON, and has null instead."""


def canonical(row: RawRow, source: str, tags: tuple[str, ...] = (), *, with_texts: bool = False) -> Canonical:
    """The row in the canonical form; its own `source` counts, its own tags come first.

    Raises Drop for a row of no use, DataError for one that is not JSON.
    """
    try:
        fields, mended = _parse(row)
        short = _short_way(fields, source, tags, with_texts, mended or row.mended)
        return short or _long_way(fields, source, tags, with_texts, mended or row.mended)
    except RecursionError:
        raise Drop(Reason.WRONG_TYPE, "nested too deeply") from None


@lru_cache(maxsize=256)
def _plain(names: tuple[str, ...]) -> tuple[str, list[tuple[str, bytes]]] | None:
    """Where the messages are in rows of these fields, and all fields that are kept aside, as names and as JSON with a
    colon; None where others than messages and tools mean something.
    """
    key = next((key for key in MESSAGES_KEYS if key in names), None)
    if key is None or not _MEANING.isdisjoint(names):
        return None
    return key, [(name, key_of(name) + b":") for name in names if name not in (key, "tools")]


def _short_way(fields: Fields, source: str, tags: tuple[str, ...], with_texts: bool, mended: bool) -> Canonical | None:
    """What the long way gives, for rows as nearly all are; None where the long way is needed."""
    if (plain := _plain(tuple(fields))) is None:
        return None
    key, aside = plain
    if (conversation := short_conversation(fields[key], with_texts)) is None:
        return None
    tools = fields.get("tools", b"null")
    tools, tools_digested = _tools(tools) if tools != b"null" else (b"", b"")
    digest = xxhash.xxh3_128_digest(b"".join((CONVERSATION_TAG, conversation.digested, b"\0", tools_digested)))
    hex_id = digest.hex().encode()
    if fields.get("id", b"")[1:-1] == hex_id:
        return None
    parts = [b'{"id":"', hex_id, b'","messages":', conversation.messages]
    if tools:
        parts += (b',"tools":', tools)
    parts.append(_given_labels(source, tags))
    if aside:
        extra = b",".join([name_json + compact(fields[name]) for name, name_json in aside])
        parts += (b',"extra":', as_text(b"{" + extra + b"}"))
    parts.append(b"}\n")
    line = b"".join(parts)
    _require_readable(line)
    return Canonical(digest, line, Form.MESSAGES, conversation.texts, conversation.answered, False, mended)


def _long_way(fields: Fields, source: str, tags: tuple[str, ...], with_texts: bool, mended: bool) -> Canonical:
    present = {key: raw for key, raw in fields.items() if raw != b"null"} if b"null" in fields.values() else fields
    ids_key = _first_of(IDS_KEYS, present)
    messages_key = _first_of(MESSAGES_KEYS, present)
    prompt_key = _first_of(PROMPT_KEYS, present) if messages_key is None else None
    used: set[str] = set()
    conversation: Conversation | None = None
    form = Form.MESSAGES
    if ids_key is not None and "loss_mask" in present:
        form = Form.TOKENS
        content, digest = _tokens(present[ids_key], present["loss_mask"])
        used |= {ids_key, "loss_mask"}
        if messages_key is not None:
            # What cannot be read stays among the other fields: it is the token ids that the target is shown.
            with contextlib.suppress(Drop):
                conversation = conversation_of(present, messages_key, used, with_texts)
    elif (turns := _given_turns(present.get("turns", b""))) is not None:
        form = Form.TOKENS
        content, digest = turns
        used.add("turns")
        if messages_key is not None:
            with contextlib.suppress(Drop):
                conversation = conversation_of(present, messages_key, used, with_texts)
    elif messages_key is not None:
        conversation = conversation_of(present, messages_key, used, with_texts)
    elif prompt_key is not None:
        conversation = one_turn(present, prompt_key, used, with_texts)
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
    media = b""
    # They stay where `prepare` sees them, and a row without them is another one.
    for key in MEDIA_KEYS:
        if present.get(key, b"null") not in NOTHING:
            media += b"," + key_of(key) + b":" + compact(present[key])
            used.add(key)
    if media:
        digest = xxhash.xxh3_128_digest(digest + media)
    hex_id = digest.hex()
    parts = [b'{"id":"', hex_id.encode(), b'",', *content]
    if tools:
        parts += (b',"tools":', tools)
    parts += _labels(present, source, tags, used)
    parts.append(media)
    if extra := _extra(fields, used, hex_id):
        parts += (b',"extra":', extra)
    parts.append(b"}\n")
    line = b"".join(parts)
    _require_readable(line)
    if form is Form.TEXT and with_texts:
        texts = [a_text.decode(text)]
    else:
        texts = [] if conversation is None else conversation.texts
    return Canonical(
        id=digest,
        line=line,
        form=form,
        texts=texts,
        answered=form is not Form.MESSAGES or (conversation is not None and conversation.answered),
        non_text=bool(media) or (form is not Form.TOKENS and conversation is not None and conversation.non_text),
        mended=mended,
    )


def with_tags_of(line: bytes, other: bytes) -> bytes:
    """A canonical line with the tags that another one has beside its own; the same bytes where it has none."""
    fields = fields_of(an_object.decode(line))
    mine = _texts.decode(fields["tags"])
    more = [tag for tag in _texts.decode(an_object.decode(other)["tags"]) if tag not in mine]
    return joined({**fields, "tags": encode([*mine, *more])}) + b"\n" if more else line


def _first_of(keys: tuple[str, ...], present: Fields) -> str | None:
    for key in keys:
        if key in present:
            return key
    return None


def _parse(row: RawRow) -> tuple[Fields, bool]:
    try:
        fields = fields_of(an_object.decode(row.data))
        _require_once_each(row.data, fields)
        return fields, False
    except msgspec.ValidationError:
        raise Drop(Reason.NOT_AN_OBJECT, f"{kind_of(row.data.lstrip())} instead of an object") from None
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
        fields = fields_of(an_object.decode(mended))
        _require_once_each(mended, fields)
        return fields, True
    except msgspec.ValidationError:
        raise Drop(Reason.NOT_AN_OBJECT, f"{kind_of(mended.lstrip())} instead of an object") from None
    except msgspec.DecodeError as error:
        raise broken_json(row, error) from None


def _require_once_each(line: bytes, fields: Fields) -> None:
    """Drop for a row that has a field twice, of which the parser gives the last only."""
    # Braces, quotes, colons and commas without a blank: what is left of such a line holds no further field.
    left = len(line) - sum(map(len, fields)) - sum(map(len, fields.values()))
    if left == 4 * len(fields) + 1:
        return
    # With a blank behind each colon and comma: the length alone could be that of some blanks and a further field.
    if left == 6 * len(fields) and line == b"{" + b", ".join([key_of(k) + b": " + v for k, v in fields.items()]) + b"}":
        return
    pairs: list[tuple[str, object]] = json.loads(line, object_pairs_hook=list, parse_int=str)
    once_each(pairs)


@lru_cache(maxsize=64)
def _tools(raw: bytes) -> tuple[bytes, bytes]:
    """Tools as a JSON string that holds them, and as the id knows them; empty where there are none."""
    given = raw[:1] == b'"'
    text = a_text.decode(raw) if given else ""
    if given and not text.strip():
        return b"", b""
    try:
        found = compact(text.encode().strip() if given else raw)
        tools = objects.decode(found)
    except msgspec.ValidationError:
        raise Drop(Reason.WRONG_TYPE, "'tools' is not a list of objects") from None
    except msgspec.DecodeError:
        raise Drop(Reason.WRONG_TYPE, "'tools' is text, but not JSON") from None
    if not tools:
        return b"", b""
    return (encode(text) if given else as_text(found)), one_spelling(found)


def _text(raw: bytes) -> bytes:
    if raw[:1] != b'"':
        raise Drop(Reason.WRONG_TYPE, f"'text' is {kind_of(raw)}")
    if raw == b'""':
        raise Drop(Reason.EMPTY_TEXT, "'text' is empty")
    return string(raw)


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
    ids, mask = encode(token_ids), encode([int(entry) for entry in loss_mask])
    content = [b'"input_ids":', ids, b',"loss_mask":', mask]
    return content, xxhash.xxh3_128_digest(TOKENS_TAG + ids + mask)


def _given_turns(raw: bytes) -> tuple[list[bytes], bytes] | None:
    """Token ids by turn, with whatever stands beside them, and their digest; None for what else has this name."""
    try:
        turns = [fields_of(turn) for turn in objects.decode(raw)] if raw[:1] == b"[" else []
    except msgspec.ValidationError:
        return None
    if not turns or not all("prompt_ids" in turn and "token_ids" in turn for turn in turns):
        return None
    try:
        ids = [[_ids.decode(turn["prompt_ids"]), _ids.decode(turn["token_ids"])] for turn in turns]
    except msgspec.ValidationError as error:
        raise Drop(Reason.BAD_TOKEN_IDS, f"token ids must be a flat list of 0..2**31-1: {error}") from None
    if not all(prompt_ids and token_ids for prompt_ids, token_ids in ids):
        raise Drop(Reason.BAD_TOKEN_IDS, "a turn without 'prompt_ids' or 'token_ids'")
    return [b'"turns":', compact(raw)], xxhash.xxh3_128_digest(TURNS_TAG + encode(ids))


def _require_readable(line: bytes) -> None:
    """Drop for a number that Python's parser refuses; numbers inside of texts are none."""
    # In so long a number every so many-th byte is a digit: that is quickly seen.
    if len(line) <= MAX_INTEGER_DIGITS or not _MANY_DIGITS.search(line[::_STRIDE]):
        return
    if found := _LONG_INTEGER.search(_STRINGS.sub(b'""', line)):
        raise Drop(Reason.WRONG_TYPE, f"a number of {len(found[0].lstrip(b'-')):,} digits")


@lru_cache(maxsize=1024)
def _tags(tags: tuple[str, ...]) -> bytes:
    return b',"tags":' + encode(tuple(dict.fromkeys(tags)))


@lru_cache(maxsize=1024)
def _given_labels(source: str, tags: tuple[str, ...]) -> bytes:
    return b',"source":' + key_of(source) + _tags(tags)


def _labels(present: Fields, source: str, tags: tuple[str, ...], used: set[str]) -> list[bytes]:
    """`source`, `tags`, `language`, `retokenized`; a label of another type stays among the other fields."""
    own = present.get("source", b'""')
    name = string(own) if own[:1] == b'"' and own != b'""' else own if own.isdigit() else b""
    if name:
        used.add("source")
        # A number is a label, too.
        name = name if name[:1] == b'"' else b'"' + name + b'"'
    if own := present.get("tags", b""):
        with contextlib.suppress(msgspec.ValidationError):
            mine = [a_text.decode(own)] if own[:1] == b'"' else _texts.decode(own)
            tags = (*mine, *tags)
            used.add("tags")
    labels = [b',"source":', name or key_of(source), _tags(tags)]
    for key in LANGUAGE_KEYS:
        if (own := present.get(key, b""))[:1] == b'"' and own != b'""':
            labels += (b',"language":', string(own))
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
    return as_text(joined({key: compact(raw) for key, raw in rest.items()}))
