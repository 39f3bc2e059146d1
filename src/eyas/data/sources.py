"""JSONL conversations in, rows out: one line at a time, every line accounted for.

A row takes one of these forms; where several fit, the first one wins:

| form | keys |
|---|---|
| token ids | `input_ids` or `token_ids`, with `loss_mask`: used as given, no template, no tokeniser |
| token ids by turn | `turns`: for each assistant turn `prompt_ids` and `token_ids`, used as given |
| messages | `messages` or `conversations`: `{role, content, …}` or `{from, value}`; `system` beside it comes first |
| text | `text` |

Beside them: `id`, `conversation_id` or `uuid`; `source`; `tags` (a string or a list); `tools`, handed to the template;
`language` or `lang`; `retokenized`, true when the server that answered gave no token ids.
A line that is not UTF-8 or not JSON means that the file is damaged and stops everything. A line that is readable but
of no use is a `DroppedRow` with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.data.split import MAX_LANGUAGE_CHARS, script_of
from eyas.errors import DataError
from eyas.records import TokenIds, as_token_ids, canonical_json, digest_bytes

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Names in the wild to the names that templates know."""

MERGE_FORMS = ({"instruction", "response"}, {"instruction", "output"}, {"prompt", "completion"}, {"prompt", "response"})
"""Keys of forms that `merge` makes into messages."""
LANGUAGE_KEYS = ("language", "lang")
MEDIA_KEYS = ("images", "image", "audio", "audios", "video", "videos")
"""Where rows and messages keep what is no text, apart from the content that refers to it."""


class Reason(StrEnum):
    """Why a row did not become a sample of its own."""

    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_FORM = "unknown_form"
    """None of the keys that a row can be read from."""
    WRONG_TYPE = "wrong_type"
    INVALID_TEXT = "invalid_text"
    """Half of a surrogate pair: no text in any encoding."""
    UNKNOWN_ROLE = "unknown_role"
    NON_TEXT_CONTENT = "non_text_content"
    """Images, audio and the like."""
    REPEATED_KEY = "repeated_key"
    """An object that has a key twice: which of the two is meant is unknown."""
    EMPTY_CONVERSATION = "empty_conversation"
    EMPTY_TEXT = "empty_text"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    """No turn that the target could have written in answer to something."""
    BAD_TOKEN_IDS = "bad_token_ids"
    NO_LOSS_MASK = "no_loss_mask"
    BAD_LOSS_MASK = "bad_loss_mask"
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"
    TEMPLATE_ERROR = "template_error"
    """The template itself refuses the conversation."""
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    """No rendering shows any assistant turn as the target would have been asked for it and written it."""
    NOT_SHOWN = "not_shown"
    """The template shows nothing of the tool calls that the conversation's answers are."""
    NO_TURN_END = "no_turn_end"
    """Where the target's own words end cannot be told."""
    DOUBLE_BOS = "double_bos"
    ALL_SUPERVISED = "all_supervised"
    """The template's mask covers the prompt too."""
    NO_SUPERVISED_TOKEN = "no_supervised_token"
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"
    """Same token ids as an earlier row; its mask was merged into that one."""


@dataclass(frozen=True, slots=True)
class Where:
    """A line of a source; lines count from 1."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation before any template; roles as in `ROLES`' values, at least one message."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Token ids `[T]` int32 and loss mask `[T]` bool as the row has them."""

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GivenTurns:
    """For each assistant turn the token ids that asked for it and those that the target wrote, int32 each."""

    turns: tuple[tuple[TokenIds, TokenIds], ...]


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without turns."""

    text: str


Content = Messages | GivenTokens | GivenTurns | PlainText


@dataclass(frozen=True, slots=True)
class Row:
    """One line that can be worked with."""

    where: Where
    num_bytes: int
    content: Content
    conversation_id: str
    source: str
    tags: tuple[str, ...]
    first_user: str | None = None
    """Text of the first user turn, also of messages beside given token ids: decides the split."""
    language: str = ""
    """As the row says, else the script of its text; empty where neither is known."""
    retokenized: bool = False
    """The row says that its answers came without token ids."""


@dataclass(frozen=True, slots=True)
class DroppedRow:
    """One line that is readable but cannot become a sample."""

    where: Where
    num_bytes: int
    reason: Reason
    detail: str


def is_unweighted(message: Mapping[str, Any]) -> bool:
    """Whether a message says that nothing is to be learned from it, as fine-tuning files do."""
    weight = message.get("weight")
    return isinstance(weight, int | float) and weight == 0


class Drop(Exception):
    """A row that is readable, but no conversation."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def rows_of(lines: Iterable[tuple[Where, bytes]]) -> Iterator[Row | DroppedRow]:
    """What each line says, wherever the lines come from; DataError for invalid UTF-8 and broken JSON."""
    for where, line in lines:
        try:
            yield _row(where, line)
        except Drop as drop:
            yield DroppedRow(where, len(line), drop.reason, drop.detail)
        except RecursionError:
            yield DroppedRow(where, len(line), Reason.WRONG_TYPE, "nested too deeply")


def _row(where: Where, line: bytes) -> Row:
    value = _parse(where, line)
    if not isinstance(value, dict):
        raise Drop(Reason.NOT_AN_OBJECT, f"{_kind(value)} instead of an object")
    if b"\\u" in line and not _encodable(value):
        raise Drop(Reason.INVALID_TEXT, "an escape like \\ud83d without its other half")
    content = _content(value)
    first_user, text = _texts(value, content)
    return Row(
        where=where,
        num_bytes=len(line),
        content=content,
        conversation_id=_conversation_id(value),
        source=_label(value, "source") or where.path.name,
        tags=_tags(value.get("tags")),
        first_user=first_user,
        language=_language(value) or script_of(text),
        retokenized=value.get("retokenized") is True,
    )


def _parse(where: Where, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=once_each)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: invalid UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        hint = ""
        if not line.endswith(b"\n"):
            hint = "; the last line, perhaps cut off"
        raise DataError(f"{where}: broken JSON: {error.msg} at character {error.pos}{hint}") from None
    except ValueError as error:
        # A number with thousands of digits: JSON by the letter, no number by any measure.
        raise DataError(f"{where}: broken JSON: {error}") from None


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields; Drop where a key comes twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Drop(Reason.REPEATED_KEY, f"'{twice[:50]}' comes twice in one object")
    return value


def _content(value: dict[str, Any]) -> Content:
    _refuse_media(value, "the row")
    ids_key = next((key for key in ("input_ids", "token_ids") if value.get(key) is not None), None)
    messages_key = next((key for key in ("messages", "conversations") if value.get(key) is not None), None)
    if ids_key is not None and value.get("loss_mask") is not None:
        return _given(value[ids_key], value["loss_mask"])
    if _has_turns(value.get("turns")):
        return GivenTurns(tuple(_given_turn(turn) for turn in value["turns"]))
    if messages_key is not None:
        return _messages(value, messages_key)
    if value.get("text") is not None:
        if not isinstance(value["text"], str):
            raise Drop(Reason.WRONG_TYPE, f"'text' is {_kind(value['text'])}")
        if not value["text"]:
            raise Drop(Reason.EMPTY_TEXT, "'text' is empty")
        return PlainText(value["text"])
    if ids_key is not None:
        raise Drop(Reason.NO_LOSS_MASK, f"'{ids_key}' without 'loss_mask': which tokens the target wrote is unknown")
    known = "messages, conversations, input_ids with loss_mask, text"
    detail = f"keys {', '.join(sorted(map(str, value)))[:200] or 'none'}; known: {known}"
    if any(value.keys() >= form for form in MERGE_FORMS):
        detail += "; 'eyas data merge' reads more forms"
    raise Drop(Reason.UNKNOWN_FORM, detail)


def _refuse_media(value: Mapping[str, Any], what: str) -> None:
    media = next((key for key in MEDIA_KEYS if value.get(key)), None)
    if media is not None:
        raise Drop(Reason.NON_TEXT_CONTENT, f"{what} has '{media}'")


def _has_turns(turns: Any) -> bool:
    # Other data sets keep other things under this name.
    keys = {"prompt_ids", "token_ids"}
    return isinstance(turns, list) and bool(turns) and all(isinstance(t, dict) and keys <= t.keys() for t in turns)


def _given_turn(turn: dict[str, Any]) -> tuple[TokenIds, TokenIds]:
    prompt_ids, token_ids = _token_ids(turn["prompt_ids"]), _token_ids(turn["token_ids"])
    if not len(prompt_ids) or not len(token_ids):
        raise Drop(Reason.BAD_TOKEN_IDS, "a turn without 'prompt_ids' or 'token_ids'")
    return prompt_ids, token_ids


def _token_ids(ids: Any) -> TokenIds:
    try:
        return as_token_ids(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise Drop(Reason.BAD_TOKEN_IDS, str(error).splitlines()[0]) from None


def _given(ids: Any, mask: Any) -> GivenTokens:
    token_ids = _token_ids(ids)
    if not token_ids.size:
        raise Drop(Reason.EMPTY_CONVERSATION, "no token ids")
    if not isinstance(mask, list) or any(entry not in (0, 1) for entry in mask):
        raise Drop(Reason.BAD_LOSS_MASK, "'loss_mask' must be a flat list of 0 and 1")
    if len(mask) != len(token_ids):
        raise Drop(Reason.BAD_LOSS_MASK, f"{len(mask)} entries in 'loss_mask' for {len(token_ids)} token ids")
    return GivenTokens(token_ids, np.array(mask, dtype=np.bool_))


def _messages(value: dict[str, Any], key: str) -> Messages:
    turns = value[key]
    if not isinstance(turns, list):
        raise Drop(Reason.WRONG_TYPE, f"'{key}' is {_kind(turns)}")
    if not turns:
        raise Drop(Reason.EMPTY_CONVERSATION, f"'{key}' is empty")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    system = value.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "assistant" for message in messages):
        raise Drop(Reason.NO_ASSISTANT_TURN, f"roles {', '.join(message['role'] for message in messages)[:200]}")
    return Messages(tuple(messages), _tools(value.get("tools")))


def _message(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Drop(Reason.WRONG_TYPE, f"message {number} is {_kind(turn)}")
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    role = turn.get(role_key)
    if not isinstance(role, str):
        raise Drop(Reason.WRONG_TYPE, f"message {number} has no role")
    known = ROLES.get(role.strip().lower())
    if known is None:
        raise Drop(Reason.UNKNOWN_ROLE, f"message {number}: '{role[:50]}'")
    _refuse_media(turn, f"message {number}")
    others = {key: item for key, item in turn.items() if key not in (role_key, content_key)}
    return {"role": known, "content": _text(turn.get(content_key), others, number), **others}


def _text(content: Any, others: Mapping[str, Any], number: int) -> str:
    if isinstance(content, str):
        return content
    if content is None and any(others.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking")):
        # Templates print a missing content as the word None.
        return ""
    if not isinstance(content, list):
        raise Drop(Reason.WRONG_TYPE, f"message {number}: content is {_kind(content)}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise Drop(Reason.NON_TEXT_CONTENT, f"message {number}: part of type {kind}")
        texts.append(part["text"])
    return "".join(texts)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise Drop(Reason.WRONG_TYPE, "'tools' is text, but not JSON") from None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Drop(Reason.WRONG_TYPE, "'tools' is not a list of objects")
    return tuple(value)


def _conversation_id(value: dict[str, Any]) -> str:
    for key in ("id", "conversation_id", "uuid"):
        if label := _label(value, key):
            return label
    # By content: a row number would name another conversation as soon as a line is added above it.
    return digest_bytes(canonical_json(value))


def _label(value: dict[str, Any], key: str) -> str:
    label = value.get(key)
    if label is None:
        return ""
    if isinstance(label, bool) or not isinstance(label, (str, int)):
        raise Drop(Reason.WRONG_TYPE, f"'{key}' is {_kind(label)}")
    return str(label)


def _language(value: dict[str, Any]) -> str:
    for key in LANGUAGE_KEYS:
        label = value.get(key)
        # Other types are somebody else's field: no reason to drop a row.
        if isinstance(label, str) and label.strip():
            return label.strip()
    return ""


def _texts(value: dict[str, Any], content: Content) -> tuple[str | None, str]:
    """The first user turn, if there is one, and some text to tell the language by."""
    if isinstance(content, PlainText):
        return None, content.text
    if isinstance(content, Messages):
        turns: Iterable[Any] = content.messages
    else:
        # Given token ids count as they are; messages beside them only say which conversation it is.
        turns = next((value[key] for key in ("messages", "conversations") if isinstance(value.get(key), list)), [])
    first_user = None
    texts = []
    missing = MAX_LANGUAGE_CHARS
    for number, turn in enumerate(turns, start=1):
        if first_user is not None and missing <= 0:
            break
        try:
            message = turn if isinstance(content, Messages) else _message(turn, number)
        except Drop:
            continue
        if message["role"] not in ("user", "assistant"):
            continue
        if message["role"] == "user" and first_user is None:
            first_user = message["content"]
        texts.append(message["content"][: max(missing, 0)])
        missing -= len(message["content"])
    return first_user, "\n".join(texts)


def _tags(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    tags = value if isinstance(value, list) else [value]
    if not all(isinstance(tag, (str, int)) for tag in tags):
        raise Drop(Reason.WRONG_TYPE, "'tags' is neither a string nor a list of strings")
    return tuple(dict.fromkeys(map(str, tags)))


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")
