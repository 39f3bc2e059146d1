"""Prompts for real decoding: conversations or token ids, one a line, each as the token ids that a server would see.

Sets of several turns (MT-bench, Spec-Bench) are asked turn by turn: what the user says next stands behind the target's
own answer to what was said before, so a turn's prompt is known when the turn before it has been answered.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.config import DataConfig, TargetConfig
from eyas.data.files import broken_json, open_rows
from eyas.data.render import TEMPLATE_ERRORS, Renderer, Tokenizer, with_objects
from eyas.data.sources import ROLES
from eyas.data.tokenizer import load_tokenizer, read_json
from eyas.errors import ConfigError, DataError

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""A small set of everyday tasks, written for this project."""
_TEXT_KEYS = ("prompt", "question", "instruction")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target answers."""

    name: str
    """The row's own id, else its line; behind it the turn's number, from the second on."""
    token_ids: tuple[int, ...]
    category: str = ""
    """The row's own; the slice that it is counted in."""
    messages: tuple[dict[str, Any], ...] = field(default=(), compare=False)
    """What the token ids render; empty where the row has token ids."""
    tools: tuple[Any, ...] = field(default=(), compare=False)
    later: tuple[str, ...] = ()
    """What the user says after the target's answer, turn by turn."""
    turn: int = 1


def read_prompts(
    path: Path | None, target: TargetConfig, data: DataConfig, *, limit: int | None = None
) -> list[Prompt]:
    """See `PromptReader.read`."""
    return PromptReader(target, data).read(path, limit=limit)


class PromptReader:
    """Rows to prompts, in the target's own chat template; its tokeniser is loaded when the first text comes."""

    def __init__(self, target: TargetConfig, data: DataConfig) -> None:
        self._target, self._data = target, data
        self._loaded: tuple[Tokenizer, Renderer] | None = None

    def read(self, path: Path | None, *, limit: int | None = None) -> list[Prompt]:
        """The first `limit` rows of a JSONL file, each one's first prompt; without a file, of the built-in set.

        A row has `input_ids` or `token_ids` (with `loss_mask`: up to the first supervised token), or `messages` or
        `conversations` (up to the last turn, where that is an answer), or `turns` of text, or one text under `prompt`,
        `question` or `instruction`; `category` says its slice. DataError, naming file and line, for a row with none of
        them.
        """
        prompts = []
        for raw in islice(open_rows([path or BUILT_IN], field="--prompts"), limit):
            try:
                row = json.loads(raw.data)
            except (ValueError, RecursionError) as error:
                raise broken_json(raw, error) from None
            if not isinstance(row, dict):
                raise DataError(f"{raw.where}: not a JSON object")
            name = str(row.get("id") or row.get("question_id") or row.get("task_id") or f"line {raw.number}")
            category = str(row.get("category") or "")
            prompts.append(self._prompt(row, name, category, str(raw.where)))
        return prompts

    def next_turn(self, prompt: Prompt, answer: Sequence[int]) -> Prompt | None:
        """What is asked after the target has answered with these token ids; None where the user has said all.

        A turn that the target's template refuses is DataError.
        """
        if not prompt.later:
            return None
        text: str = self.tokenizer.decode(list(answer), skip_special_tokens=True)
        said, *later = prompt.later
        messages = (*prompt.messages, {"role": "assistant", "content": text}, {"role": "user", "content": said})
        turn = prompt.turn + 1
        name = f"{prompt.name.removesuffix(f' turn {prompt.turn}')} turn {turn}"
        ids = self._render(messages, prompt.tools, name)
        return dataclasses.replace(
            prompt, name=name, token_ids=tuple(ids), messages=messages, later=tuple(later), turn=turn
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self._tools()[0]

    def _prompt(self, row: Mapping[str, Any], name: str, category: str, where: str) -> Prompt:
        given = next((row[key] for key in ("input_ids", "token_ids") if row.get(key) is not None), None)
        if given is not None:
            return Prompt(name, tuple(_given(given, row.get("loss_mask"), where)), category)
        messages, later = _messages(row, where)
        tools = tuple(row.get("tools") or ())
        ids = self._render(messages, tools, where)
        return Prompt(name, tuple(ids), category, tuple(messages), tools, tuple(later))

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], where: str) -> list[int]:
        tokenizer, renderer = self._tools()
        try:
            text = renderer.text(with_objects(messages), tools, add_generation_prompt=True)
        except TEMPLATE_ERRORS as error:
            raise DataError(f"{where}: the chat template refuses it: {type(error).__name__}: {error}") from None
        # The template spells special tokens out: adding them would double the first one.
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _tools(self) -> tuple[Tokenizer, Renderer]:
        if self._loaded is None:
            tokenizer = load_tokenizer(self._target)
            if not tokenizer.chat_template:
                raise ConfigError(f"{self._target.path}: its tokeniser has no chat template; give prompts as token ids")
            self._loaded = tokenizer, Renderer(tokenizer, self._data.template_options, self._data.date)
        return self._loaded


def set_name(path: Path | None) -> str:
    """How a receipt calls a set."""
    return str(path) if path is not None else "the built-in set"


def stop_ids(target: Path) -> frozenset[int]:
    """Tokens with which the target ends an answer: what its generation config and its config name."""
    config = read_json(target / "config.json")
    holders = [read_json(target / "generation_config.json"), config, config.get("text_config") or {}]
    found: set[int] = set()
    for holder in holders:
        value = holder.get("eos_token_id")
        found |= {int(i) for i in (value if isinstance(value, list) else [value]) if i is not None}
    return frozenset(found)


def _given(ids: Any, mask: Any, where: str) -> list[int]:
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise DataError(f"{where}: token ids must be a list of whole numbers, 0 or more")
    if mask is None:
        return ids
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise DataError(f"{where}: 'loss_mask' must have an entry for each token id")
    return ids[: mask.index(1)] if 1 in mask else ids


def _messages(row: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation up to where the target is to answer, and what the user says after that."""
    turns = next((row[key] for key in ("messages", "conversations") if row.get(key)), None)
    if turns is None:
        texts: Sequence[Any] = row["turns"] if isinstance(row.get("turns"), list) else [row.get(k) for k in _TEXT_KEYS]
        said = [t for t in texts if t and isinstance(t, str)]
        if not said:
            known = ", ".join(("input_ids", "messages", "conversations", "turns", *_TEXT_KEYS))
            raise DataError(f"{where}: no prompt in it; known keys: {known}")
        # Of `prompt`, `question` and `instruction` one is the prompt; only `turns` follow each other.
        later = said[1:] if isinstance(row.get("turns"), list) else []
        return [{"role": "user", "content": said[0]}], later
    messages = []
    for number, turn in enumerate(turns, 1):
        role = ROLES.get(str(turn.get("role") or turn.get("from")).lower()) if isinstance(turn, dict) else None
        if role is None:
            raise DataError(f"{where}: message {number} has no known role")
        others = {key: value for key, value in turn.items() if key not in ("role", "from", "value")}
        messages.append({"content": turn.get("value"), **others, "role": role})
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{where}: nothing is asked before the answer")
    return messages, []
