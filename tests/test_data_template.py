"""Loss masks, checked by hand: what is between the quotes is what the target wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import TargetConfig
from eyas.data import beginnings
from eyas.data.render import Renderer
from eyas.data.rules import Rules
from eyas.data.sources import GivenTokens, GivenTurns, Messages, PlainText, Reason, Row, Where
from eyas.data.template import (
    Masked,
    MaskedRow,
    Masker,
    MaskMethod,
    Refused,
)
from eyas.data.tokenizer import load_tokenizer, template_digest, tokenizer_digest
from eyas.errors import ConfigError, DataError
from eyas.records import digest_bytes
from fixtures.data import small

SMOLLM2 = Path(__file__).parent.parent / "demo" / "target"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def robot(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def row(content: Any) -> Row:
    return Row(Where(Path("a.jsonl"), 1), 1, content, "c", "s", ())


def chat(*messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> Row:
    return row(Messages(messages, tools))


def mask_row(tokenizer: Any, one: Row, *, directory: Path = Path("nowhere"), **options: Any) -> MaskedRow:
    (result,) = Masker(tokenizer, directory, **options).mask([one])
    return result


def mask(tokenizer: Any, one: Row, *, directory: Path = Path("nowhere"), **options: Any) -> Masked | Refused:
    """The first, or only, sample of a row."""
    return mask_row(tokenizer, one, directory=directory, **options).samples[0]


def each(tokenizer: Any, result: MaskedRow) -> list[list[str]]:
    return [supervised(tokenizer, sample) for sample in result.samples]


def supervised(tokenizer: Any, result: Masked | Refused) -> list[str]:
    assert isinstance(result, Masked), result
    return [tokenizer.decode(result.token_ids[a:b].tolist(), skip_special_tokens=False) for a, b in result.loss_spans]


def text_of(tokenizer: Any, result: Masked | Refused) -> str:
    assert isinstance(result, Masked), result
    return str(tokenizer.decode(result.token_ids.tolist(), skip_special_tokens=False))


def test_chatml_masks_the_answers_with_their_end_and_nothing_else() -> None:
    tokenizer = small.tokenizer("chatml")
    result = mask(tokenizer, chat(user("Hi"), robot("Yo"), user("So?"), robot("No."), user("Bye")))
    assert supervised(tokenizer, result) == ["Yo<|im_end|>", "No.<|im_end|>"]
    assert text_of(tokenizer, result) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>"
    )
    # One token per byte and special token: counted by hand.
    assert isinstance(result, Masked)
    assert result.loss_spans == ((21, 24), (47, 51))
    assert (result.method, result.num_straddling, result.turn_ends) == (MaskMethod.PREFIX_RENDER, 0, (24, 51))


def test_characters_of_several_bytes_keep_boundaries_right() -> None:
    tokenizer = small.tokenizer("chatml")
    result = mask(tokenizer, chat(user("é👋"), robot("👋é"), user("ü"), robot("ß")))
    assert supervised(tokenizer, result) == ["👋é<|im_end|>", "ß<|im_end|>"]


@pytest.mark.parametrize("template", ["chatml", "tags"])
def test_an_answer_is_supervised_to_its_first_stop_token(template: str) -> None:
    tokenizer = small.tokenizer(template)
    result = mask_row(tokenizer, chat(user("Hi"), robot("write <|im_end|> here"), user("<|im_end|>"), robot("ok")))
    assert each(tokenizer, result) == [["write <|im_end|>", "ok<|im_end|>"]]
    assert (result.counts["num_turns_changed"], result.counts["num_turns_stopped_earlier"]) == (1, 1)


def test_calls_that_the_template_does_not_show_are_context_and_counted() -> None:
    tokenizer = small.tokenizer("chatml")
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Bonn"}'}}
    said = robot("let me get it") | {"tool_calls": [call]}
    tool = {"role": "tool", "content": "9"}
    for asked in (robot("") | {"tool_calls": [call]}, said, robot("x") | {"function_call": call["function"]}):
        result = mask_row(tokenizer, chat(user("Hi"), asked, tool, robot("9 it is")))
        assert each(tokenizer, result) == [["9 it is<|im_end|>"]]
        assert (result.counts["num_turns_left_out"], result.counts["num_turns_without_calls"]) == (1, 1)
        assert result.counts["num_rewritten"] == 0
        alone = mask(tokenizer, chat(user("Hi"), asked))
        assert isinstance(alone, Refused) and alone.reason is Reason.NOT_SHOWN


@pytest.mark.parametrize("shown", ["call.function.name", "call.function.arguments | tojson"])
def test_a_call_without_its_name_or_without_its_arguments_is_not_shown(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = small.tokenizer("chatml")
    content = "message['content']"
    assert tokenizer.chat_template.count(content) == 1
    calls = "(message['content'] if not message.tool_calls else %s)"
    original = tokenizer.chat_template
    one = {"function": {"name": "get", "arguments": {"city": "Bonn"}}}
    conversation = chat(user("Hi"), robot("") | {"tool_calls": [one]}, robot("Yo"))
    results = []
    whole = "(message.tool_calls[0].function.name ~ message.tool_calls[0].function.arguments | tojson)"
    for form in (shown.replace("call.", "message.tool_calls[0]."), whole):
        monkeypatch.setattr(tokenizer, "chat_template", original.replace(content, calls % f"({form})"))
        results.append(each(tokenizer, mask_row(tokenizer, conversation)))
    assert results == [[["Yo<|im_end|>"]], [['get{"city": "Bonn"}<|im_end|>', "Yo<|im_end|>"]]]


def test_a_thought_that_the_template_does_not_show_is_counted() -> None:
    tokenizer = small.tokenizer("chatml")
    result = mask_row(tokenizer, chat(user("Hi"), robot("Yo") | {"reasoning_content": "hm"}))
    assert each(tokenizer, result) == [["Yo<|im_end|>"]]
    assert (result.counts["num_turns_changed"], result.counts["num_thoughts_not_shown"]) == (1, 1)
    alone = mask(tokenizer, chat(user("Hi"), robot("") | {"reasoning_content": "hm"}))
    assert isinstance(alone, Refused) and alone.reason is Reason.NO_ASSISTANT_TURN


def test_an_empty_answer_is_never_supervised() -> None:
    tokenizer = small.tokenizer("chatml")
    result = mask_row(tokenizer, chat(user("Hi"), robot(" \n"), user("So?"), robot("No."), user("?"), robot("")))
    assert each(tokenizer, result) == [["No.<|im_end|>"]]
    assert (result.counts["num_turns_left_out"], result.counts["num_turns_empty"]) == (2, 2)
    alone = mask(tokenizer, chat(user("Hi"), robot("")))
    assert isinstance(alone, Refused) and alone.reason is Reason.NO_ASSISTANT_TURN


def test_system_tool_and_consecutive_answers() -> None:
    tokenizer = small.tokenizer("chatml")
    messages = (
        {"role": "system", "content": "Be kind"},
        user("Hi"),
        robot("a"),
        robot("b"),
        {"role": "tool", "content": "7"},
        robot("c"),
    )
    assert supervised(tokenizer, mask(tokenizer, chat(*messages))) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


def test_generation_tags_say_which_tokens_are_the_answers() -> None:
    tokenizer = small.tokenizer("tags")
    result = mask(tokenizer, chat(user("Hi"), robot("Yo"), user("So?"), robot("No.")))
    assert supervised(tokenizer, result) == ["Yo<|im_end|>", "No.<|im_end|>"]
    assert isinstance(result, Masked)
    assert result.method is MaskMethod.GENERATION_TAGS


def test_tags_and_prefix_rendering_agree() -> None:
    conversation = chat(user("Hi"), robot("Yo\n"), user(" So? "), robot("\nNo."))
    results = [mask(small.tokenizer(name), conversation) for name in ("tags", "chatml")]
    assert all(isinstance(result, Masked) for result in results)
    assert len({result.loss_spans for result in results if isinstance(result, Masked)}) == 1


def test_tags_around_everything_or_nothing_are_never_a_silent_mask() -> None:
    conversation = chat(user("Hi"), robot("Yo"))
    everywhere = mask(small.tokenizer("tags_everywhere"), conversation)
    nowhere = mask(small.tokenizer("tags_nowhere"), conversation)
    assert isinstance(everywhere, Refused) and everywhere.reason is Reason.ALL_SUPERVISED
    assert isinstance(nowhere, Refused) and nowhere.reason is Reason.NO_SUPERVISED_TOKEN


def test_tags_in_a_template_that_strips_thoughts_from_history_give_a_sample_per_turn() -> None:
    tokenizer = small.tokenizer("tags_think")
    result = mask_row(tokenizer, chat(user("Hi"), robot("hm</think>Yo"), user("So?"), robot("er</think>No.")))
    assert each(tokenizer, result) == [["er</think>No.<|im_end|>"], ["hm</think>Yo<|im_end|>"]]
    assert "assistant\nYo<|im_end|>" in text_of(tokenizer, result.samples[0])
    assert (result.counts["num_rewritten"], result.counts["num_turns_left_out"]) == (1, 0)


def test_a_template_that_strips_thoughts_from_history_gives_a_sample_per_turn() -> None:
    tokenizer = small.tokenizer("think")
    result = mask_row(tokenizer, chat(user("Hi"), robot("<think>\nhm\n</think>\n\nYo"), user("So?"), robot("No.")))
    assert each(tokenizer, result) == [
        ["<think>\n\n</think>\n\nNo.<|im_end|>"],
        ["<think>\nhm\n</think>\n\nYo<|im_end|>"],
    ]
    assert "<|im_start|>assistant\nYo<|im_end|>" in text_of(tokenizer, result.samples[0])
    assert (result.counts["num_rewritten"], result.counts["num_turns_left_out"]) == (1, 0)
    # The row has no thought for the last turn, and does not say that there was none.
    assert result.counts["num_turns_without_thought"] == 1


def test_a_message_after_the_last_answer_does_not_strip_its_thought() -> None:
    tokenizer = small.tokenizer("think")
    result = mask_row(tokenizer, chat(user("Hi"), robot("<think>\nhm\n</think>\n\nYo"), user("Thanks")))
    assert each(tokenizer, result) == [["<think>\nhm\n</think>\n\nYo<|im_end|>"]]
    assert result.counts["num_rewritten"] == 0


def test_turns_after_the_last_question_share_a_sample_and_each_turn_is_supervised_once() -> None:
    tokenizer = small.tokenizer("think")
    tool = {"role": "tool", "content": "7"}
    result = mask_row(tokenizer, chat(user("Hi"), robot("a"), user("So?"), robot("b"), tool, robot("c")))
    assert each(tokenizer, result) == [
        ["<think>\n\n</think>\n\nb<|im_end|>", "<think>\n\n</think>\n\nc<|im_end|>"],
        ["<think>\n\n</think>\n\na<|im_end|>"],
    ]


def test_a_prompt_that_opens_a_thought_which_no_rendering_shows_is_composed_with_the_answer() -> None:
    tokenizer = small.tokenizer("think_prompt")
    for content in ("hm</think>Yo", "<think>\nhm</think>Yo"):
        result = mask_row(tokenizer, chat(user("Hi"), robot(content)))
        assert each(tokenizer, result) == [["hm</think>Yo<|im_end|>"]]
        assert text_of(tokenizer, result.samples[0]).endswith("<|im_start|>assistant\n<think>\nhm</think>Yo<|im_end|>")
        assert isinstance(result.samples[0], Masked) and result.samples[0].method is MaskMethod.COMPOSED
        assert result.counts["num_turns_composed"] == 1
    beside = chat(user("Hi"), robot("Yo") | {"reasoning_content": "hm\n"})
    assert each(tokenizer, mask_row(tokenizer, beside)) == [["hm\n</think>\n\nYo<|im_end|>"]]


def test_a_prompt_that_no_rendering_shows_is_a_stated_refusal() -> None:
    result = mask(small.tokenizer("think_prompt"), chat(user("Hi"), robot("Yo")))
    assert isinstance(result, Refused)
    assert result.reason is Reason.TEMPLATE_REWRITES_HISTORY
    assert "assistant message 2" in result.detail


def test_a_turn_that_cannot_be_shown_is_counted_beside_those_that_can() -> None:
    tokenizer = small.tokenizer("think_prompt")
    result = mask_row(tokenizer, chat(user("Hi"), robot("hm</think>Yo"), user("So?"), robot("No.")))
    assert each(tokenizer, result) == [["hm</think>Yo<|im_end|>"]]
    assert result.counts["num_turns_left_out"] == 1


def test_bos_of_the_template_is_the_only_one() -> None:
    tokenizer = small.tokenizer("inst", eos="</s>")
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id, "the tokeniser would add a second one"
    result = mask(tokenizer, chat(user("Hi"), robot("Yo"), user("So?"), robot("No.")))
    assert text_of(tokenizer, result) == "<s>[INST] Hi [/INST] Yo</s>[INST] So? [/INST] No.</s>"
    assert supervised(tokenizer, result) == [" Yo</s>", " No.</s>"]


def test_double_bos_is_refused() -> None:
    result = mask(small.tokenizer("double_bos", eos="</s>"), chat(user("Hi"), robot("Yo")))
    assert isinstance(result, Refused) and result.reason is Reason.DOUBLE_BOS


def test_what_the_template_raises_is_a_reason_with_its_own_words() -> None:
    tokenizer = small.tokenizer("inst", eos="</s>")
    rows = [chat(user("a"), user("b"), robot("c")), chat(user("Hi"), robot("Yo"))]
    results = [result.samples[0] for result in Masker(tokenizer, Path("nowhere")).mask(rows)]
    assert isinstance(results[0], Refused) and results[0].reason is Reason.TEMPLATE_ERROR
    assert "roles must alternate" in results[0].detail
    assert isinstance(results[1], Masked)


def test_an_end_token_that_only_the_template_names_is_found() -> None:
    # Nothing but the template says that <end_of_turn> ends a turn here: eos is another token.
    tokenizer = small.tokenizer("turn", eos="</s>")
    result = mask(tokenizer, chat(user("Hi"), robot(" Yo "), user("So?"), robot("No.")))
    assert supervised(tokenizer, result) == ["Yo<end_of_turn>", "No.<end_of_turn>"]


def test_a_template_without_end_token_supervises_the_words_alone() -> None:
    tokenizer = small.tokenizer("wordy", eos="</s>")
    result = mask(tokenizer, chat(user("Hi"), robot("Yo"), user("So?"), robot("No.")))
    assert supervised(tokenizer, result) == ["Yo", "No."]
    assert text_of(tokenizer, result) == "Human: Hi\nRobot: Yo\nHuman: So?\nRobot: No."
    assert isinstance(result, Masked)
    assert result.num_straddling == 0


def test_a_token_across_the_start_of_an_answer_belongs_to_the_prompt_and_is_counted() -> None:
    tokenizer = small.tokenizer("wordy", merges=True, eos="</s>")
    assert "Ġhello" in tokenizer.tokenize("Robot: hello there")
    result = mask(tokenizer, chat(user("Hi"), robot("hello there")))
    assert supervised(tokenizer, result) == [" there"]
    assert isinstance(result, Masked)
    assert result.num_straddling == 1
    alone = mask(tokenizer, chat(user("Hi"), robot("hello")))
    assert isinstance(alone, Refused) and alone.reason is Reason.NO_SUPERVISED_TOKEN


def test_trimmed_offsets_do_not_hide_a_token_across_the_start() -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = small.tokenizer("wordy", merges=True, eos="</s>")
    copy = Tokenizer.from_str(small.backend(True).to_str())
    copy.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = type(tokenizer)(
        tokenizer_object=copy, bos_token="<s>", eos_token="</s>", chat_template=small.template("wordy")
    )
    result = mask(tokenizer, chat(user("Hi"), robot("hello there")))
    assert supervised(tokenizer, result) == [" there"]
    assert isinstance(result, Masked)
    assert result.num_straddling == 1


def test_ends_that_differ_between_last_and_earlier_turns_and_for_calls(tmp_path: Path) -> None:
    tokenizer = small.tokenizer("channel", eos="<|return|>")
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])})
    )
    two = mask_row(tokenizer, chat(user("Hi"), robot("Yo"), user("So?"), robot("No.")), directory=tmp_path)
    assert each(tokenizer, two) == [["<|message|>No.<|return|>"], ["<|message|>Yo<|return|>"]]
    assert "<|message|>Yo<|end|>" in text_of(tokenizer, two.samples[0])
    call = {"role": "assistant", "content": "", "tool_calls": [1]}
    tool = {"role": "tool", "content": "7"}
    both = mask(tokenizer, chat(user("Hi"), call, tool, robot("No.")), directory=tmp_path)
    assert supervised(tokenizer, both) == ["<|message|>[1]<|call|>", "<|message|>No.<|return|>"]
    unknown = mask(tokenizer, chat(user("Hi"), call))
    assert isinstance(unknown, Refused) and unknown.reason is Reason.NO_TURN_END


def test_an_opening_answer_is_context_because_nothing_asked_for_it() -> None:
    tokenizer = small.tokenizer("chatml")
    result = mask_row(tokenizer, chat(robot("Welcome"), user("Hi"), robot("Yo")))
    assert each(tokenizer, result) == [["Yo<|im_end|>"]]
    assert (result.counts["num_turns_left_out"], result.counts["num_turns_leading"]) == (1, 1)
    alone = mask(tokenizer, chat(robot("Welcome")))
    assert isinstance(alone, Refused) and alone.reason is Reason.NO_ASSISTANT_TURN


def test_tools_reach_the_template() -> None:
    tokenizer = small.tokenizer("chatml")
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + small.template("chatml")
    result = mask(tokenizer, chat(user("Hi"), robot("Yo"), tools=({"name": "f"},)))
    assert text_of(tokenizer, result).startswith('[{"name": "f"}]<|im_start|>user')


def test_named_templates_are_chosen_by_tools_and_digested_together() -> None:
    tokenizer = small.tokenizer("chatml")
    tokenizer.chat_template = {"default": small.template("chatml"), "tool_use": small.template("tags")}
    methods = [
        result.method
        for tools in ((), ({"name": "f"},))
        if isinstance(result := mask(tokenizer, chat(user("Hi"), robot("Yo"), tools=tools)), Masked)
    ]
    assert methods == [MaskMethod.PREFIX_RENDER, MaskMethod.GENERATION_TAGS]
    assert template_digest(tokenizer) not in ("", template_digest(small.tokenizer("chatml")))


def test_without_any_template_a_conversation_is_one_clear_line_and_other_forms_work() -> None:
    tokenizer = small.tokenizer(None)
    assert template_digest(tokenizer) == ""
    assert isinstance(mask(tokenizer, row(PlainText("Once"))), Masked)
    with pytest.raises(DataError, match=r"a\.jsonl:1: nowhere has no chat template") as error:
        mask(tokenizer, chat(user("Hi"), robot("Yo")))
    assert "\n" not in str(error.value)


def test_plain_text_is_supervised_but_for_its_bos() -> None:
    tokenizer = small.tokenizer("chatml")
    result = mask(tokenizer, row(PlainText("Once")))
    assert text_of(tokenizer, result) == "<s>Once"
    assert supervised(tokenizer, result) == ["Once"]
    assert isinstance(result, Masked)
    assert result.method is MaskMethod.TEXT
    assert text_of(tokenizer, mask(tokenizer, row(PlainText("<s>Once")))) == "<s>Once"
    only_bos = mask(tokenizer, row(PlainText("<s>")))
    assert isinstance(only_bos, Refused) and only_bos.reason is Reason.NO_SUPERVISED_TOKEN


def given_tokens(ids: list[int], loss_mask: list[int]) -> Row:
    return row(GivenTokens(np.array(ids, np.int32), np.array(loss_mask, np.bool_)))


def test_given_ids_are_used_as_they_are_and_cut_after_the_last_supervised_one() -> None:
    tokenizer = small.tokenizer("chatml")
    result = mask(tokenizer, given_tokens([0, 0, 9, 8, 7, 6], [0, 0, 1, 0, 1, 0]))
    assert isinstance(result, Masked)
    assert result.token_ids.tolist() == [0, 0, 9, 8, 7]
    assert result.token_ids.dtype == np.int32
    assert (result.loss_spans, result.method) == (((2, 3), (4, 5)), MaskMethod.GIVEN)


def test_given_ids_without_mask_or_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    tokenizer = small.tokenizer("chatml")
    nothing = mask(tokenizer, given_tokens([1, 2], [0, 0]))
    assert isinstance(nothing, Refused) and nothing.reason is Reason.NO_SUPERVISED_TOKEN
    foreign = mask(tokenizer, given_tokens([1, len(tokenizer)], [0, 1]))
    assert isinstance(foreign, Refused) and foreign.reason is Reason.TOKEN_OUT_OF_VOCABULARY
    # The target's own vocabulary counts: it may be padded beyond the tokeniser's.
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": len(tokenizer) + 8}}))
    assert isinstance(mask(tokenizer, given_tokens([1, len(tokenizer)], [0, 1]), directory=tmp_path), Masked)


def given_turns(*turns: tuple[list[int], list[int]]) -> Row:
    return row(GivenTurns(tuple((np.array(a, np.int32), np.array(b, np.int32)) for a, b in turns)))


def test_given_turns_share_a_sample_as_far_as_one_prompt_begins_with_the_other() -> None:
    tokenizer = small.tokenizer("chatml")
    turns = (([20, 21], [22, 23]), ([20, 21, 22, 23, 24], [25]), ([20, 21, 23, 24], [26, 27]))
    result = mask_row(tokenizer, given_turns(*turns))
    samples = [sample for sample in result.samples if isinstance(sample, Masked)]
    assert [sample.token_ids.tolist() for sample in samples] == [
        [20, 21, 23, 24, 26, 27],
        [20, 21, 22, 23, 24, 25],
    ]
    assert [sample.loss_spans for sample in samples] == [((4, 6),), ((2, 4), (5, 6))]
    assert (result.counts["num_rewritten"], samples[1].turn_ends) == (1, (4, 6))
    assert mask_row(tokenizer, given_turns(*turns[:2])).counts["num_rewritten"] == 0
    last = mask_row(tokenizer, given_turns(*turns), rules=Rules(last_turn_only=True))
    assert len(last.samples) == 1 and last.counts["num_turns_skipped"] == 2
    foreign = mask(tokenizer, given_turns(([20], [len(tokenizer)])))
    assert isinstance(foreign, Refused) and foreign.reason is Reason.TOKEN_OUT_OF_VOCABULARY


def test_a_stop_token_that_begins_the_next_message_ends_the_turn(tmp_path: Path) -> None:
    tokenizer = small.tokenizer("chatml", eos="</s>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|start|>' if message.role == 'user' else '<|message|>' }}"
        "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|message|>{% endif %}"
    )
    stops = tokenizer.convert_tokens_to_ids(["</s>", "<|start|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    conversation = chat(user("Hi"), robot("Yo"), user("So?"), robot("No."))
    assert supervised(tokenizer, mask(tokenizer, conversation, directory=tmp_path)) == ["Yo<|start|>", "No."]
    assert supervised(tokenizer, mask(tokenizer, conversation)) == ["Yo", "No."]


def slow_tokenizer(name: str) -> Any:
    """Characters as tokens, special tokens, no fast backend and so no offsets."""
    from transformers import PreTrainedTokenizer

    class Characters(PreTrainedTokenizer):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(bos_token="<s>", eos_token="<|im_end|>", **options)
            self.add_tokens(["<|im_start|>"], special_tokens=True)

        @property
        def vocab_size(self) -> int:
            return 0x3000

        def get_vocab(self) -> dict[str, int]:
            return {chr(i): i for i in range(self.vocab_size)} | self.added_tokens_encoder

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return ord(token) % self.vocab_size

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    return Characters(chat_template=small.template(name))


@pytest.mark.parametrize("name", ["chatml", "tags"])
def test_a_tokeniser_without_offsets_gives_the_same_masks(name: str) -> None:
    tokenizer = slow_tokenizer(name)
    assert not tokenizer.is_fast
    result = mask(tokenizer, chat(user("Hi"), robot("Yo"), user("So?"), robot("No.")))
    assert isinstance(result, Masked)
    assert result.loss_spans == ((21, 24), (47, 51))
    assert supervised(tokenizer, result) == ["Yo<|im_end|>", "No.<|im_end|>"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=4))
def test_any_chatml_conversation_is_masked_exactly(turns: list[tuple[str, str]]) -> None:
    tokenizer = small.tokenizer("chatml", merges=True)
    messages = [message for question, answer in turns for message in (user(question), robot(answer))]
    result = mask(tokenizer, chat(*messages))
    answers = [answer for _, answer in turns if answer.strip()]
    if not answers:
        assert isinstance(result, Refused) and result.reason is Reason.NO_ASSISTANT_TURN
        return
    assert isinstance(result, Masked)
    assert len(result.loss_spans) == len(answers)
    if not result.num_straddling:
        assert supervised(tokenizer, result) == [answer + "<|im_end|>" for answer in answers]


def test_results_keep_the_order_of_the_rows() -> None:
    tokenizer = small.tokenizer("chatml")
    rows = [
        chat(user("Hi"), robot("a")),
        row(PlainText("b")),
        chat(robot("c")),
        chat(user("Hi"), robot("d")),
        given_tokens([9], [1]),
    ]
    results = [result.samples[0] for result in Masker(tokenizer, Path("nowhere")).mask(rows)]
    assert [getattr(result, "method", None) for result in results] == [
        MaskMethod.PREFIX_RENDER,
        MaskMethod.TEXT,
        None,
        MaskMethod.PREFIX_RENDER,
        MaskMethod.GIVEN,
    ]
    assert supervised(tokenizer, results[3]) == ["d<|im_end|>"]


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="the default target is not there; 'make demo' fetches it")
def test_smollm2_masks_by_hand() -> None:
    tokenizer = load_tokenizer(TargetConfig(path=SMOLLM2))
    result = mask(tokenizer, chat(user("Hello"), robot("Hi! 👋"), user("So?"), robot("No.")), directory=SMOLLM2)
    assert supervised(tokenizer, result) == ["Hi! 👋<|im_end|>", "No.<|im_end|>"]
    assert isinstance(result, Masked)
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert result.token_ids[0] == start and result.token_ids[-1] == end
    assert result.num_straddling == 0
    # The whole conversation has the ids that the tokeniser's own rendering has, up to the last supervised one.
    whole = tokenizer.apply_chat_template([user("Hello"), robot("Hi! 👋"), user("So?"), robot("No.")])["input_ids"]
    assert result.token_ids.tolist() == whole[: len(result.token_ids)]
    assert tokenizer.decode(whole[len(result.token_ids) :]) == "\n"


def test_digests_are_of_tokenizer_json_or_of_all_files_without_it(tmp_path: Path) -> None:
    small.target(tmp_path / "t", "chatml")
    whole = (tmp_path / "t" / "tokenizer.json").read_bytes()
    assert tokenizer_digest(tmp_path / "t") == digest_bytes(whole)
    other = tmp_path / "other"
    other.mkdir()
    (other / "vocab.json").write_bytes(b"{}")
    (other / "merges.txt").write_bytes(b"a b")
    (other / "README.md").write_bytes(b"nothing")
    assert tokenizer_digest(other) == digest_bytes(b"merges.txt\0", b"a b", b"vocab.json\0", b"{}")
    assert template_digest(small.tokenizer("chatml")) == digest_bytes(small.template("chatml").encode())


def test_target_without_a_readable_tokeniser_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.path is not set"):
        load_tokenizer(TargetConfig())
    with pytest.raises(ConfigError, match="not a directory"):
        load_tokenizer(TargetConfig(path=tmp_path / "nope"))
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(TargetConfig(path=tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(TargetConfig(path=tmp_path))


class Counted:
    """How many messages a tokeniser was asked to render."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_messages = 0
        real = Renderer.text

        def text(renderer: Renderer, messages: Any, tools: Any, **options: Any) -> str:
            self.num_messages += len(messages)
            return real(renderer, messages, tools, **options)

        monkeypatch.setattr(Renderer, "text", text)


def long_chat(num_turns: int, first: tuple[dict[str, Any], ...] = ()) -> Row:
    turns = [turn for i in range(num_turns) for turn in (user(f"question {i}"), robot(f"answer {i}"))]
    return chat(*first, *turns)


@pytest.mark.parametrize("name", ["chatml", "tags", "wordy"])
def test_work_grows_with_the_turns_and_the_masks_are_those_of_turn_by_turn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = small.tokenizer(name)
    row = long_chat(150, ({"role": "system", "content": "Be kind"},))
    monkeypatch.setattr(beginnings, "MANY_TURNS", 1000)
    turn_by_turn = mask_row(tokenizer, row)
    monkeypatch.undo()
    counted = Counted(monkeypatch)
    found = mask_row(tokenizer, row)
    assert len(found.samples) == len(turn_by_turn.samples) == 1
    one, other = found.samples[0], turn_by_turn.samples[0]
    assert isinstance(one, Masked) and isinstance(other, Masked) and len(one.turn_ends) == 150
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert (one.loss_spans, one.turn_ends, one.method) == (other.loss_spans, other.turn_ends, other.method)
    assert found.counts == turn_by_turn.counts
    # Turn by turn it is 45 thousand; and some ten turns are looked at in the whole.
    assert counted.num_messages < 150 * 40 + 10 * 3 * 300


def test_many_turns_of_a_template_that_rewrites_history_come_out_as_turn_by_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = small.tokenizer("think")
    turns = [t for i in range(70) for t in (user(f"question {i}"), robot(f"<think>hm {i}</think>answer {i}"))]
    counted = Counted(monkeypatch)
    found = mask_row(tokenizer, chat(*turns))
    num_messages = counted.num_messages
    monkeypatch.setattr(beginnings, "MANY_TURNS", 1000)
    assert each(tokenizer, found) == each(tokenizer, mask_row(tokenizer, chat(*turns)))
    assert len(found.samples) == 70 and num_messages < 70 * 141 * 3


def test_a_template_that_counts_messages_is_not_taken_for_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small.tokenizer("chatml")
    # What it writes before a message depends on how many there are: no two prefixes begin alike.
    tokenizer.chat_template = "{{ messages | length }}" + small.template("chatml")
    found = mask_row(tokenizer, long_chat(70))
    monkeypatch.setattr(beginnings, "MANY_TURNS", 1000)
    assert each(tokenizer, found) == each(tokenizer, mask_row(tokenizer, long_chat(70)))


def test_tools_and_their_results_that_the_template_does_not_show_are_counted() -> None:
    tools = ({"name": "find"},)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "find", "arguments": {"q": "x"}}]}
    messages = (user("Hi"), call, {"role": "tool", "content": 'a "b"\n c'}, robot("Yo"))
    shows_calls = "{{ messages[1].tool_calls | tojson if messages | length > 1 and messages[1].tool_calls }}"
    template = small.template("chatml")
    names = ("num_tools_not_shown", "num_tool_results_not_shown")
    for tools_text, hide, expected in (
        ("", "", (1, 0)),
        ("{{ tools | tojson if tools }}", "", (0, 0)),
        (
            "{{ tools | tojson if tools }}",
            "{% set messages = messages | rejectattr('role', 'equalto', 'tool') | list %}",
            (0, 1),
        ),
    ):
        tokenizer = small.tokenizer("chatml")
        tokenizer.chat_template = hide + tools_text + shows_calls + template
        counts = mask_row(tokenizer, chat(*messages, tools=tools)).counts
        assert tuple(counts[name] for name in names) == expected, (tools_text, hide)
    assert mask_row(small.tokenizer("chatml"), chat(user("Hi"), robot("Yo"))).counts["num_tools_not_shown"] == 0


def test_a_message_of_weight_0_is_context_and_counted() -> None:
    tokenizer = small.tokenizer("chatml")
    first, second = robot("bad") | {"weight": 0}, robot("good") | {"weight": 1}
    result = mask_row(tokenizer, chat(user("Hi"), first, user("So?"), second))
    assert each(tokenizer, result) == [["good<|im_end|>"]]
    assert "bad" in text_of(tokenizer, result.samples[0])
    assert (result.counts["num_turns_left_out"], result.counts["num_turns_unweighted"]) == (1, 1)
    last = mask_row(tokenizer, chat(user("Hi"), second, user("So?"), first))
    assert each(tokenizer, last) == [["good<|im_end|>"]] and "So?" not in text_of(tokenizer, last.samples[0])
    only_last = mask_row(tokenizer, chat(user("Hi"), second, user("So?"), first), rules=Rules(last_turn_only=True))
    assert each(tokenizer, only_last) == [["good<|im_end|>"]]
    nothing = mask(tokenizer, chat(user("Hi"), first))
    assert isinstance(nothing, Refused) and nothing.reason is Reason.NO_ASSISTANT_TURN and "weight 0" in nothing.detail
