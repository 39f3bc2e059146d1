"""One conversation being answered, with a tokenizer of letters: what is kept, where it ends, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eyas.generate.dialogue import Dialogue, Ended, Limits, TemplateError
from eyas.generate.prompts import Prompt

EOS, OTHER_EOS = 1, 2
_SPELLED = {EOS: "<end>", OTHER_EOS: "<stop>"}


class LetterChat:
    """One id per character, 100 + its code point; `<end>` is one id."""

    end_of_turn = frozenset({EOS, OTHER_EOS})

    def __init__(self, show: Callable[[dict[str, Any]], str] = lambda m: m["content"]) -> None:
        self._show = show

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        if any(m["content"] == "forbidden" for m in messages):
            raise TemplateError("no such thing")
        return "".join(f"{m['role'][0]}:{self._show(m)}<end>\n" for m in messages) + "a:"

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            spelled = next((i for i, s in _SPELLED.items() if text.startswith(s)), None)
            ids.append(100 + ord(text[0]) if spelled is None else spelled)
            text = text[1 if spelled is None else len(_SPELLED[spelled]) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(_SPELLED.get(i) or chr(i - 100) for i in token_ids)


def dialogue(
    *users: str, chat: LetterChat | None = None, max_new_tokens: int = 8, max_tokens: int | None = None
) -> Any:
    messages: list[dict[str, Any]] = []
    for user in users:
        messages += [{"role": "user", "content": user}, {"role": "assistant"}]
    prompt = Prompt(row_id="r", prompt_id="p", line=1, source="s", tags=(), messages=tuple(messages))
    return Dialogue(prompt, chat or LetterChat(), Limits(max_new_tokens, max_tokens))


def ids(text: str) -> list[int]:
    return LetterChat().encode(text)


def test_token_ids_are_prompt_answer_template_answer() -> None:
    d = dialogue("hi", "more")
    assert d.token_ids == ids("u:hi<end>\na:")
    assert d.num_turns_left == 2
    d.answer(ids("yes<end>"))
    assert d.token_ids == ids("u:hi<end>\na:yes<end>\nu:more<end>\na:")
    d.answer(ids("no<end>"))
    assert d.done
    assert d.ended is None
    assert d.token_ids == ids("u:hi<end>\na:yes<end>\nu:more<end>\na:no<end>")
    written = [i for i, m in zip(d.token_ids, d.loss_mask, strict=True) if m]
    assert written == ids("yes<end>no<end>")
    assert d.finish_reasons == ["stop", "stop"]
    assert [m.get("content") for m in d.messages] == ["hi", "yes", "more", "no"]


def test_what_the_target_wrote_is_not_encoded_again() -> None:
    class Merging(LetterChat):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("he", "\u1234"))

        def decode(self, token_ids: Sequence[int]) -> str:
            return super().decode(token_ids).replace("\u1234", "he")

    d = dialogue("a", "b", chat=Merging())
    d.answer(ids("hey<end>"))
    d.answer(ids("he<end>"))
    assert d.token_ids == ids("u:a<end>\na:hey<end>\nu:b<end>\na:he<end>")


def test_cut_answer_at_the_end_is_kept_without_end_of_turn() -> None:
    d = dialogue("a")
    d.answer(ids("longlong"))
    assert d.done
    assert d.ended is None
    assert d.finish_reasons == ["length"]
    assert d.token_ids == ids("u:a<end>\na:longlong")
    assert sum(d.loss_mask) == 8


def test_conversation_stops_after_a_cut_answer() -> None:
    d = dialogue("a", "b")
    d.answer(ids("longlong"))
    assert (d.done, d.ended) == (True, Ended.CUT_ANSWER)
    assert d.token_ids == ids("u:a<end>\na:longlong")
    assert [m["role"] for m in d.messages] == ["user", "assistant"]


@pytest.mark.parametrize("empty", ["<end>", " \n<end>", "   "])
def test_empty_first_answer_leaves_nothing(empty: str) -> None:
    d = dialogue("a", "b")
    d.answer(ids(empty))
    assert (d.done, d.ended) == (True, Ended.EMPTY_ANSWER)
    assert d.finish_reasons == []
    assert d.token_ids == []
    assert d.loss_mask == []


def test_empty_later_answer_takes_its_question_along() -> None:
    d = dialogue("a", "b")
    d.answer(ids("yes<end>"))
    d.answer(ids("<end>"))
    assert (d.done, d.ended) == (True, Ended.EMPTY_ANSWER)
    assert d.token_ids == ids("u:a<end>\na:yes<end>")
    assert len(d.loss_mask) == len(d.token_ids)
    assert [m["content"] for m in d.messages] == ["a", "yes"]


def test_template_that_rewrites_history_ends_after_the_last_exact_turn() -> None:
    strips = LetterChat(lambda m: m["content"].replace("think", ""))
    d = dialogue("a", "b", "c", chat=strips)
    d.answer(ids("yes<end>"))
    d.answer(ids("thinkno<end>"))
    assert (d.done, d.ended) == (True, Ended.TEMPLATE_REWRITES_HISTORY)
    assert d.token_ids == ids("u:a<end>\na:yes<end>\nu:b<end>\na:thinkno<end>")
    assert d.finish_reasons == ["stop", "stop"]


def test_other_end_of_turn_token_than_the_templates_ends_the_conversation() -> None:
    d = dialogue("a", "b")
    d.answer(ids("yes<stop>"))
    assert (d.done, d.ended) == (True, Ended.OTHER_END_OF_TURN)
    assert d.token_ids == ids("u:a<end>\na:yes<stop>")
    assert d.loss_mask[-1] == 1


def test_template_error_rejects_or_ends() -> None:
    assert dialogue("forbidden").ended is Ended.TEMPLATE_ERROR
    d = dialogue("a", "forbidden")
    d.answer(ids("yes<end>"))
    assert (d.ended, d.detail) == (Ended.TEMPLATE_ERROR, "no such thing")
    assert d.token_ids == ids("u:a<end>\na:yes<end>")


def test_too_long_counts_prompt_and_answer() -> None:
    prompt = len(ids("u:a<end>\na:"))
    assert dialogue("a", max_new_tokens=8, max_tokens=prompt + 8).ended is None
    too_long = dialogue("a", max_new_tokens=8, max_tokens=prompt + 7)
    assert too_long.ended is Ended.TOO_LONG
    assert str(prompt + 7) in too_long.detail
    d = dialogue("a", "b", max_new_tokens=8, max_tokens=prompt + 8)
    d.answer(ids("yes<end>"))
    assert d.ended is Ended.TOO_LONG
    assert d.token_ids == ids("u:a<end>\na:yes<end>")
