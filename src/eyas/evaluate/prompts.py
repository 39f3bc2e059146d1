"""Prompts for real decoding: conversations or token ids, one a line, each as the token ids that a server would see."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.config import DataConfig, TargetConfig
from eyas.data.files import broken_json, open_rows
from eyas.data.render import TEMPLATE_ERRORS, Renderer, Tokenizer, with_objects
from eyas.data.sources import ROLES
from eyas.data.tokenizer import load_tokenizer, read_json
from eyas.errors import ConfigError, DataError

_TEXT_KEYS = ("prompt", "question", "instruction")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target answers."""

    name: str
    """The row's own id, else its line."""
    token_ids: tuple[int, ...]


def read_prompts(path: Path, target: TargetConfig, data: DataConfig, *, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file; the target's tokeniser is loaded when the first text comes.

    A row has `input_ids` or `token_ids` (with `loss_mask`: up to the first supervised token), or `messages` or
    `conversations` (up to the last turn, where that is an answer), or `turns` of text (the first), or one text under
    `prompt`, `question` or `instruction`. DataError, naming file and line, for a row with none of them.
    """
    reader = _Reader(target, data)
    prompts = []
    for raw in islice(open_rows([path], field="--prompts"), limit):
        try:
            row = json.loads(raw.data)
        except (ValueError, RecursionError) as error:
            raise broken_json(raw, error) from None
        if not isinstance(row, dict):
            raise DataError(f"{raw.where}: not a JSON object")
        ids = reader.token_ids(row, str(raw.where))
        name = str(row.get("id") or row.get("question_id") or row.get("task_id") or f"line {raw.number}")
        prompts.append(Prompt(name, tuple(ids)))
    return prompts


def stop_ids(target: Path) -> frozenset[int]:
    """Tokens with which the target ends an answer: what its generation config and its config name."""
    config = read_json(target / "config.json")
    holders = [read_json(target / "generation_config.json"), config, config.get("text_config") or {}]
    found: set[int] = set()
    for holder in holders:
        value = holder.get("eos_token_id")
        found |= {int(i) for i in (value if isinstance(value, list) else [value]) if i is not None}
    return frozenset(found)


class _Reader:
    def __init__(self, target: TargetConfig, data: DataConfig) -> None:
        self._target, self._data = target, data
        self._loaded: tuple[Tokenizer, Renderer] | None = None

    def token_ids(self, row: Mapping[str, Any], where: str) -> list[int]:
        given = next((row[key] for key in ("input_ids", "token_ids") if row.get(key) is not None), None)
        if given is not None:
            return _given(given, row.get("loss_mask"), where)
        messages = _messages(row, where)
        tokenizer, renderer = self._tools()
        try:
            text = renderer.text(with_objects(messages), row.get("tools") or (), add_generation_prompt=True)
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


def _given(ids: Any, mask: Any, where: str) -> list[int]:
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise DataError(f"{where}: token ids must be a list of whole numbers, 0 or more")
    if mask is None:
        return ids
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise DataError(f"{where}: 'loss_mask' must have an entry for each token id")
    return ids[: mask.index(1)] if 1 in mask else ids


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The conversation up to where the target is to answer."""
    turns = next((row[key] for key in ("messages", "conversations") if row.get(key)), None)
    if turns is None:
        texts: Sequence[Any] = row["turns"] if isinstance(row.get("turns"), list) else [row.get(k) for k in _TEXT_KEYS]
        text = next((t for t in texts if t and isinstance(t, str)), None)
        if text is None:
            known = ", ".join(("input_ids", "messages", "conversations", "turns", *_TEXT_KEYS))
            raise DataError(f"{where}: no prompt in it; known keys: {known}")
        return [{"role": "user", "content": text}]
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
    return messages
