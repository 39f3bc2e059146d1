"""One conversation while servers answer it: messages grow, token ids are kept as they came, nothing is re-tokenised.

A row of the output, beside what `answers.py` says of it:

| key | meaning |
|---|---|
| `row_id`, `id`, `source`, `tags`, `tools` | as in the prompts file; `row_id` names content and settings |
| `messages` | system, user and tool turns as given, assistant turns as the servers wrote them: `content` (null beside `tool_calls`), `tool_calls`, `reasoning_content` or `reasoning`; `tool_call_id`s follow the new calls |
| `finish_reason` | of each assistant turn: `stop`, `length` (with `generate.keep_cut`), `tool_calls` |
| `input_ids`, `loss_mask` | the whole conversation in token ids `[T]`, as the engine read and wrote them; 1 exactly on tokens that the target wrote, the end of a turn included where the engine gives it |
| `turns` | instead of these, where the template rewrites history and a later prompt does not begin with the ids so far: for each assistant turn `prompt_ids` and `token_ids` |
| `retokenized` | `true` instead of either, where a server gave no ids: whoever tokenises the messages may get other tokens |
| `usage` | `prompt_tokens`, `completion_tokens`, `requests`, `cost`: of all requests that were answered, also those whose answer was of no use |
| `answered_by` | for each assistant turn `[provider, model, quantisation, system fingerprint]` as told, empty where not |
| `generation_ids` | for each assistant turn the server's id of it |
| `ended_early`, `ended_detail` | why turns are missing |
| `sampling`, `target` | settings, the same in every row |
"""  # noqa: E501 - a table

from __future__ import annotations

from enum import StrEnum
from typing import Any

from eyas.generate.answers import Usage, encode_json
from eyas.generate.prompts import Prompt, is_assistant
from eyas.generate.reply import Answer

SENT_BACK = ("role", "content", "tool_calls", "tool_call_id", "name")
"""What servers take of a message that one of them wrote; many refuse its reasoning."""
STOP, LENGTH, TOOL_CALLS, CONTENT_FILTER = "stop", "length", "tool_calls", "content_filter"


class Unusable(StrEnum):
    """Why an answer ends its conversation: what stands before it is kept, if an answer does."""

    CUT_ANSWER = "cut_answer"
    """`max_new_tokens` cut it."""
    EMPTY_ANSWER = "empty_answer"
    REASONING_ONLY = "reasoning_only"
    """It thought, and then said nothing."""
    FILTERED = "filtered"
    NO_TOOL_CALL = "no_tool_call"
    """The prompt goes on with a tool's result, and the target called none."""
    OTHER_TOOL_CALL = "other_tool_call"
    """The results in the prompt are not those of the calls that the target made."""


class Conversation:
    """A prompt and its answers so far. `done` is set when there is nothing left to ask."""

    __slots__ = (
        "_kept",
        "_loss_mask",
        "_next",
        "_token_ids",
        "_turns",
        "answered_by",
        "attempts",
        "detail",
        "done",
        "ended",
        "finish_reasons",
        "generation_ids",
        "messages",
        "num_timeouts",
        "prompt",
        "set_aside",
        "usage",
    )

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.messages: list[dict[str, Any]] = []
        """As they are sent."""
        self._kept: list[dict[str, Any]] = []
        """The same as the row has them: all that servers wrote."""
        self.finish_reasons: list[str] = []
        self.answered_by: list[tuple[str, ...]] = []
        self.generation_ids: list[str] = []
        self.usage = Usage()
        self.attempts = 0
        """Tries of the next answer that failed."""
        self.num_timeouts = 0
        self.set_aside = 0.0
        """Money kept for its answers to come."""
        self.done = False
        self.ended = ""
        """The reason why turns are missing."""
        self.detail = ""
        self._next = 0
        """The first message of the prompt that is not in `messages`."""
        self._turns: list[tuple[list[int], list[int]]] = []
        self._token_ids: list[int] | None = []
        """None once a prompt did not begin with what was there."""
        self._loss_mask: list[int] = []
        self._go_on([])

    @property
    def num_turns_left(self) -> int:
        return 0 if self.done else self.prompt.num_turns - len(self.finish_reasons)

    @property
    def num_bytes_left(self) -> int:
        """Text that is still to be sent, at most: no tokenizer makes more tokens of it."""
        return len(encode_json([self.messages, self.prompt.messages[self._next :], self.prompt.tools]))

    def take(self, answer: Answer, *, keep_cut: bool) -> None:
        """Take the next answer, or end the conversation with the reason why it is of no use."""
        reason = self._problem_with(answer, keep_cut=keep_cut)
        if reason is not None:
            self.end(reason, f"turn {len(self.finish_reasons) + 1}: {_describe(answer)}")
            return
        self._kept.append(answer.message)
        self.messages.append({name: answer.message[name] for name in SENT_BACK if name in answer.message})
        self.finish_reasons.append(answer.finish_reason)
        self.answered_by.append(answer.answered_by)
        self.generation_ids.append(answer.generation_id)
        self._keep_ids(answer)
        self.attempts = 0
        if len(self.finish_reasons) == self.prompt.num_turns:
            self.done = True
        elif answer.finish_reason == LENGTH:
            self.end(Unusable.CUT_ANSWER, f"turn {len(self.finish_reasons)}: nobody would go on from half a sentence")
        else:
            self._go_on(answer.message.get("tool_calls") or [])

    def end(self, reason: str, detail: str) -> None:
        """Nothing more is asked; a question without an answer is dropped."""
        self.done, self.ended, self.detail = True, str(reason), detail
        while self.messages and not is_assistant(self.messages[-1]):
            self.messages.pop()
            self._kept.pop()

    def row(self) -> dict[str, Any]:
        """The answered conversation as it stands in the output."""
        assert self.done and self.finish_reasons
        prompt = self.prompt
        row: dict[str, Any] = {
            "row_id": prompt.row_id,
            "id": prompt.prompt_id,
            "source": prompt.source,
            "tags": prompt.tags,
            "messages": self._kept,
            "finish_reason": self.finish_reasons,
        }
        if len(self._turns) < len(self.finish_reasons):
            row["retokenized"] = True
        elif self._token_ids is not None:
            row["input_ids"], row["loss_mask"] = self._token_ids, self._loss_mask
        else:
            row["turns"] = [{"prompt_ids": prompt_ids, "token_ids": ids} for prompt_ids, ids in self._turns]
        row["usage"] = self.usage
        row["answered_by"], row["generation_ids"] = self.answered_by, self.generation_ids
        if prompt.tools:
            row["tools"] = prompt.tools
        if self.ended:
            row["ended_early"], row["ended_detail"] = self.ended, self.detail
        return row

    def _problem_with(self, answer: Answer, *, keep_cut: bool) -> Unusable | None:
        if answer.finish_reason == CONTENT_FILTER:
            return Unusable.FILTERED
        message = answer.message
        if message.get("refusal") and not message["content"]:
            return Unusable.FILTERED
        if answer.finish_reason == LENGTH and not keep_cut:
            return Unusable.CUT_ANSWER
        if not message.get("tool_calls") and not _has_text(message["content"]):
            thought = message.get("reasoning_content") or message.get("reasoning") or message.get("reasoning_details")
            return Unusable.REASONING_ONLY if thought else Unusable.EMPTY_ANSWER
        return None

    def _keep_ids(self, answer: Answer) -> None:
        if answer.token_ids is None or answer.prompt_ids is None:
            return
        self._turns.append((answer.prompt_ids, answer.token_ids))
        so_far = self._token_ids
        if so_far is None:
            return
        if answer.prompt_ids[: len(so_far)] != so_far or len(self._turns) != len(self.finish_reasons):
            self._token_ids = None
            return
        self._loss_mask += [0] * (len(answer.prompt_ids) - len(so_far)) + [1] * len(answer.token_ids)
        self._token_ids = answer.prompt_ids + answer.token_ids

    def _go_on(self, calls: list[Any]) -> None:
        """Append what the prompt says up to the next answer; tool results get the ids of the calls that were made."""
        following: list[dict[str, Any]] = []
        while not is_assistant(message := self.prompt.messages[self._next]):
            following.append(message)
            self._next += 1
        self._next += 1
        results = [i for i, message in enumerate(following) if message.get("role") == "tool"]
        if results or calls:
            if not calls and self.messages:
                self.end(Unusable.NO_TOOL_CALL, f"turn {len(self.finish_reasons)}: a tool's result follows a text")
                return
            problem = _mismatch(calls, [following[i] for i in results]) if self.messages else ""
            if problem:
                self.end(Unusable.OTHER_TOOL_CALL, f"turn {len(self.finish_reasons)}: {problem}")
                return
            for i, call in zip(results, calls, strict=False):
                if isinstance(call, dict) and call.get("id") and "tool_call_id" in following[i]:
                    following[i] = {**following[i], "tool_call_id": call["id"]}
        self.messages += following
        self._kept += following


def _mismatch(calls: list[Any], results: list[dict[str, Any]]) -> str:
    """Why results do not belong to calls; empty where they may."""
    if len(calls) != len(results):
        return f"{len(calls)} calls, {len(results)} results in the prompt"
    for call, result in zip(calls, results, strict=True):
        function = call.get("function") if isinstance(call, dict) else None
        called = function.get("name") if isinstance(function, dict) else None
        if result.get("name") and called and result["name"] != called:
            return f"called {str(called)[:60]}, the result in the prompt is of {str(result['name'])[:60]}"
    return ""


def _has_text(content: Any) -> bool:
    if isinstance(content, list):
        return any(isinstance(part, dict) and str(part.get("text") or "").strip() for part in content)
    return isinstance(content, str) and bool(content.strip())


def _describe(answer: Answer) -> str:
    return f"finish_reason {answer.finish_reason} after {answer.usage.completion_tokens} tokens"
