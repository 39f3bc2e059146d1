"""One conversation while the target answers it: token ids grow, and those that the target wrote are never redone.

Letters: `T` tokens of the conversation so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from eyas.generate.prompts import Prompt, is_assistant

STOP = "stop"
LENGTH = "length"


class Ended(StrEnum):
    """Why a conversation holds fewer answers than it has assistant turns, or none at all."""

    EMPTY_ANSWER = "empty_answer"
    CUT_ANSWER = "cut_answer"
    """An answer used up `max_new_tokens`: nobody would go on from half a sentence."""
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    """The next prompt does not begin with what was said so far, letter by letter."""
    OTHER_END_OF_TURN = "other_end_of_turn"
    """The target ended its turn with another token than the template does."""
    TEMPLATE_ERROR = "template_error"
    TOO_LONG = "too_long"
    """The next prompt and `max_new_tokens` do not fit the target's positions."""


class TemplateError(Exception):
    """The chat template refuses a conversation."""


class Chat(Protocol):
    """What a dialogue needs of the target's tokenizer."""

    end_of_turn: frozenset[int]
    """Token ids that end an answer."""

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """The text of the conversation, up to where the assistant begins to write. Raises TemplateError."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; nothing is added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an answer may be, and how long a conversation with it."""

    max_new_tokens: int
    max_tokens: int | None
    """The target's positions, if it says how many it has."""


class Dialogue:
    """A prompt and its answers so far. `ended` is set when there is nothing left to answer.

    While it is not, `token_ids` `[T]` is the prompt of the next answer. Afterwards the ids end with the last answer,
    and `loss_mask` is 1 exactly on the tokens that the target wrote, the end of each turn included.
    """

    def __init__(self, prompt: Prompt, chat: Chat, limits: Limits) -> None:
        self.prompt = prompt
        self.messages: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.finish_reasons: list[str] = []
        self.done = False
        self.ended: Ended | None = None
        """Set when turns are missing."""
        self.detail = ""
        self._chat = chat
        self._limits = limits
        self._rendered = ""
        self._ask()

    @property
    def num_turns_left(self) -> int:
        return 0 if self.done else self.prompt.num_turns - len(self.finish_reasons)

    def answer(self, written: Sequence[int]) -> None:
        """Take the target's answer: the ids that it wrote, with the end-of-turn token if there was one."""
        assert written and not self.done
        stopped = written[-1] in self._chat.end_of_turn
        text = self._chat.decode(written[:-1] if stopped else written)
        if not text.strip():
            self._end(Ended.EMPTY_ANSWER, f"turn {len(self.finish_reasons) + 1}: {len(written)} tokens without text")
            return
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reasons.append(STOP if stopped else LENGTH)
        self.token_ids += written
        self.loss_mask += [1] * len(written)
        if len(self.finish_reasons) == self.prompt.num_turns:
            self.done = True
        elif not stopped:
            self._end(Ended.CUT_ANSWER, f"turn {len(self.finish_reasons)}: no end after {len(written)} tokens")
        else:
            self._ask(said=self._rendered + text, end_of_turn=written[-1])

    def _ask(self, said: str = "", end_of_turn: int | None = None) -> None:
        """Append what stands between the last answer and the next: template text, never a token of an answer."""
        following = self._messages_before_next_answer()
        try:
            rendered = self._chat.render([*self.messages, *following], self.prompt.tools)
        except TemplateError as error:
            self._end(Ended.TEMPLATE_ERROR, str(error))
            return
        if not rendered.startswith(said):
            common = next((i for i, (a, b) in enumerate(zip(said, rendered, strict=False)) if a != b), len(rendered))
            self._end(Ended.TEMPLATE_REWRITES_HISTORY, f"the next prompt differs from character {common} on")
            return
        ids = self._chat.encode(rendered[len(said) :])
        if end_of_turn is not None:
            # Encoded together with the end of the turn, so that what follows is split as in the whole text.
            if ids[:1] != [end_of_turn]:
                self._end(Ended.OTHER_END_OF_TURN, f"token {end_of_turn} ended the answer, the template has {ids[:1]}")
                return
            del ids[0]
        num_tokens = len(self.token_ids) + len(ids)
        limit = self._limits.max_tokens
        if limit is not None and num_tokens + self._limits.max_new_tokens > limit:
            asked = f"prompt of {num_tokens} tokens + generate.max_new_tokens {self._limits.max_new_tokens}"
            self._end(Ended.TOO_LONG, f"{asked} > {limit} positions of the target")
            return
        self.messages += following
        self.token_ids += ids
        self.loss_mask += [0] * len(ids)
        self._rendered = rendered

    def _messages_before_next_answer(self) -> list[dict[str, Any]]:
        rest = self.prompt.messages[len(self.messages) :]
        until = next(i for i, message in enumerate(rest) if is_assistant(message))
        return list(rest[:until])

    def _end(self, reason: Ended, detail: str) -> None:
        """Stop early: keep everything up to the last answer, drop a question that has none."""
        self.done, self.ended, self.detail = True, reason, detail
        while self.messages and not is_assistant(self.messages[-1]):
            self.messages.pop()
        while self.loss_mask and not self.loss_mask[-1]:
            self.loss_mask.pop()
        del self.token_ids[len(self.loss_mask) :]
