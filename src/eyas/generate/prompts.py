"""Prompts in: conversations whose assistant turns the target is to write, each named by its content."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config import GenerateConfig
from eyas.data.files import RawRow, broken_json, open_rows
from eyas.errors import DataError
from eyas.generate.rows import Known, RowTable
from eyas.records import canonical_json, digest_bytes

ROW_TAG = b"eyas.answer.1\0"

NO_USER_TURN = "no_user_turn"
STARTS_WITH_ASSISTANT = "starts_with_assistant"
BAD_MESSAGE = "bad_message"
DUPLICATE = "duplicate"
NO_MESSAGES = "no_messages"
OF_THE_PROMPT = frozenset({NO_USER_TURN, STARTS_WITH_ASSISTANT, BAD_MESSAGE, DUPLICATE, NO_MESSAGES})
"""Reasons that another try does not change."""
WITHOUT_TURNS = ("text", "input_ids", "token_ids")
"""Keys of rows that are samples already: there is nobody to ask anything."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered. The last message is always an assistant turn."""

    row_id: str
    """Digest of messages, tools, sampling and target: what was asked of whom, never where it stood in the file."""
    prompt_id: str
    line: int
    """Line in the prompts file, from 1."""
    source: str
    tags: tuple[str, ...]
    messages: tuple[dict[str, Any], ...]
    """As given, but what an assistant turn said is gone: the target says it anew."""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def num_turns(self) -> int:
        """Assistant turns, each of which costs one answer."""
        return sum(is_assistant(message) for message in self.messages)


@dataclass(frozen=True, slots=True)
class PromptReject:
    """A prompt that has no answer, and why: a row of the rejects file."""

    row_id: str
    prompt_id: str
    line: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts file as planned work: each of its rows is either answerable or a reject."""

    answerable: tuple[Prompt, ...]
    rejects: tuple[PromptReject, ...]

    @property
    def num_rows(self) -> int:
        return len(self.answerable) + len(self.rejects)

    @property
    def row_ids(self) -> frozenset[str]:
        return frozenset([p.row_id for p in self.answerable] + [r.row_id for r in self.rejects])


def is_assistant(message: Mapping[str, Any]) -> bool:
    """Whether the target writes this message."""
    return bool(message.get("role") == "assistant")


def sampling_of(config: GenerateConfig) -> dict[str, Any]:
    """The settings that decide what the target writes; a greedy answer does not depend on the seed."""
    sampling: dict[str, Any] = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
    if config.temperature > 0:
        sampling["seed"] = config.seed
    return sampling


def read_prompts(
    path: Path, *, sampling: Mapping[str, Any], target: Mapping[str, str], rows: RowTable | None = None
) -> Prompts:
    """Every row of a prompts file, in memory; see `iter_prompts`. In `rows` they are then planned."""
    answerable: list[Prompt] = []
    rejects: list[PromptReject] = []
    rows = RowTable() if rows is None else rows
    for prompt in iter_prompts(path, sampling=sampling, target=target, rows=rows, mark=Known.PLANNED):
        if isinstance(prompt, Prompt):
            answerable.append(prompt)
        else:
            rejects.append(prompt)
    return Prompts(tuple(answerable), tuple(rejects))


def iter_prompts(
    path: Path, *, sampling: Mapping[str, Any], target: Mapping[str, str], rows: RowTable, mark: int
) -> Iterator[Prompt | PromptReject]:
    """Every row of a JSONL file of `{"messages": [{"role", "content"}, …]}`, with `id`, `tags`, `source`, `tools`.

    An assistant message marks a turn that the target writes; its content, if any, is not used. A last turn is added
    where none is asked for. DataError, one line that names file and line, when the file cannot be read, is empty, or
    holds something else than such rows. A row without a turn to answer is a reject. `mark`, a flag that no row of
    `rows` has yet, tells which were met before: a row's second is a reject.
    """
    settings = canonical_json([dict(sampling), dict(target)])
    repeats: Counter[str] = Counter()
    for line, row in _rows(path):
        messages = tuple({"role": "assistant"} if is_assistant(m) else dict(m) for m in row.get("messages") or ())
        tools = tuple(row.get("tools") or ())
        row_id = digest_bytes(ROW_TAG, canonical_json([messages, tools] if messages else row), settings)
        if rows.add(row_id, mark) & mark:
            # The repetition gets a name of its own, so that its reject is a row like any other.
            repeats[row_id] += 1
            repeated = digest_bytes(ROW_TAG, row_id.encode(), str(repeats[row_id] + 1).encode())
            rows.add(repeated, mark)
            detail = "same messages as an earlier row"
            yield PromptReject(repeated, _label(row, repeated), line, DUPLICATE, detail)
            continue
        prompt_id = _label(row, row_id)
        if problem := _problem(messages):
            yield PromptReject(row_id, prompt_id, line, *problem)
            continue
        if not is_assistant(messages[-1]):
            messages = (*messages, {"role": "assistant"})
        tags = row.get("tags") or ()
        yield Prompt(
            row_id=row_id,
            prompt_id=prompt_id,
            line=line,
            source=str(row.get("source") or path.stem),
            tags=(tags,) if isinstance(tags, str) else tuple(str(tag) for tag in tags),
            messages=messages,
            tools=tools,
        )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for raw in open_rows([path], field="generate.prompts"):
        yield raw.number, _row(raw)


def _row(raw: RawRow) -> dict[str, Any]:
    where = str(raw.where)
    try:
        row = json.loads(raw.data)
    except (ValueError, RecursionError) as error:
        raise broken_json(raw, error) from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object; each line is an object with 'messages'")
    messages = row.get("messages")
    if messages is None and any(row.get(key) is not None for key in WITHOUT_TURNS):
        return row
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise DataError(f"{where}: 'messages' must be a list of {{role, content}} objects, not empty")
    if isinstance(row.get("tools"), str):
        # As `data merge` keeps them.
        try:
            row["tools"] = json.loads(row["tools"])
        except ValueError:
            raise DataError(f"{where}: 'tools' is text, but not JSON") from None
    if not isinstance(row.get("tools"), (list, type(None))):
        raise DataError(f"{where}: 'tools' must be a list")
    if not isinstance(row.get("tags"), (list, str, type(None))):
        raise DataError(f"{where}: 'tags' must be a list")
    try:
        if b"\\u" in raw.data:
            canonical_json(row)
    except UnicodeEncodeError:
        raise DataError(f"{where}: half of a surrogate pair (an escape like \\ud83d alone) is no text") from None
    return row


def _problem(messages: tuple[dict[str, Any], ...]) -> tuple[str, str] | None:
    if not messages:
        return NO_MESSAGES, f"a row of {' or '.join(WITHOUT_TURNS)}, which 'eyas prepare' takes as it is"
    roles = [m.get("role") for m in messages]
    for number, message in enumerate(messages, start=1):
        if not isinstance(message.get("role"), str):
            return BAD_MESSAGE, f"message {number} has no role"
        content = message.get("content")
        if not is_assistant(message) and (content is None or (message["role"] == "user" and not content)):
            return BAD_MESSAGE, f"message {number} ({message['role']}) has no content"
    if "user" not in roles:
        return NO_USER_TURN, f"roles: {', '.join(map(str, roles))[:100]}"
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        return STARTS_WITH_ASSISTANT, "the first assistant turn comes before anything was asked"
    return None


def _label(row: Mapping[str, Any], fallback: str) -> str:
    label = row.get("id")
    return fallback if label is None or label == "" else str(label)
