"""Eight families of chat templates, masks checked by hand: an inner list is a sample, a text what the target wrote.

The templates behave as those of the models do where it matters here; they are written for this test, not copied.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eyas.data.rules import Rules
from eyas.data.sources import Messages, Reason, Row, Where
from eyas.data.template import Masked, MaskedRow, Masker, MaskMethod, Refused

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = [
    *("<s>", "</s>", "<unk>", "<bos>", "<eos>"),
    *("<|im_start|>", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    "[/AVAILABLE_TOOLS]",
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
]
THOUGHTS = ["<think>", "</think>"]
CORPUS = [
    "Yo, the weather is fine.\n\nNo.\n\nOk, so? Why not the weather?",
    '{"name": "get", "arguments": {"city": "Bonn"}}',
] * 20


@cache
def backend(merges: bool) -> Any:
    """Byte-level BPE with the special tokens of all families; thoughts are added tokens that are not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256 + (60 if merges else 0),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THOUGHTS])
    return tokenizer


BOS_EOS: Mapping[str, tuple[str | None, str]] = {
    "chatml": (None, "<|im_end|>"),
    "chatml_tags": (None, "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "mistral": ("<s>", "</s>"),
    "qwen3": (None, "<|im_end|>"),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "harmony": (None, "<|return|>"),
    "kimi_k2": (None, "<|im_end|>"),
}
FAMILIES = list(BOS_EOS)


def tokenizer_of(family: str, *, merges: bool = False) -> Any:
    from transformers import PreTrainedTokenizerFast

    bos, eos = BOS_EOS[family]
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend(merges), bos_token=bos, eos_token=eos, unk_token="<unk>", chat_template=template
    )


@pytest.fixture(params=[False, True], ids=["bytes", "merges"])
def merges(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """As the files of gpt-oss: calls end a turn, too."""
    ids = tokenizer_of("harmony").convert_tokens_to_ids(["<|return|>", "<|call|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return tmp_path


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def robot(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def call(arguments: str = '{"city": "Bonn"}', **more: Any) -> dict[str, Any]:
    """A call as canonical files have it: its arguments are text."""
    one = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [one], **more}


RESULT = {"role": "tool", "name": "get", "tool_call_id": "c1", "content": "9"}
TOOLS = ({"type": "function", "function": {"name": "get", "parameters": {}}},)
TWO = (user("Hi"), robot("Yo"), user("So?"), robot("No."))
WITH_SYSTEM = (system("Be kind"), user("Hi"), robot("Yo"))
WITH_CALL = (user("Hi"), call(), RESULT, robot("9 it is"))
THINKING = (user("Hi"), robot("<think>\nhm\n</think>\n\nYo"), user("So?"), robot("<think>\ner\n</think>\n\nNo."))
BESIDE = (user("Hi"), robot("Yo", reasoning_content="hm"), user("So?"), robot("No.", reasoning_content="er"))


def masked(
    family: str,
    *messages: dict[str, Any],
    merges: bool = False,
    tools: Any = (),
    directory: Path = Path("none"),
    **more: Any,
) -> MaskedRow:
    row = Row(Where(Path("a.jsonl"), 1), 1, Messages(messages, tools), "c", "s", ())
    (result,) = Masker(tokenizer_of(family, merges=merges), directory, **more).mask([row])
    return result


def decoded(ids: Any) -> str:
    return str(tokenizer_of("chatml").backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def texts(result: MaskedRow, merges: bool = False) -> list[list[str]]:
    decode = backend(merges).decode
    found = []
    for sample in result.samples:
        assert isinstance(sample, Masked), sample
        ids = sample.token_ids.tolist()
        found.append([decode(ids[a:b], skip_special_tokens=False) for a, b in sample.loss_spans])
    return found


def whole(result: MaskedRow, number: int = 0) -> str:
    sample = result.samples[number]
    assert isinstance(sample, Masked), sample
    return str(backend(False).decode(sample.token_ids.tolist(), skip_special_tokens=False))


CASES: list[tuple[str, str, tuple[dict[str, Any], ...], list[list[str]]]] = [
    ("chatml", "single", TWO[:2], [["Yo<|im_end|>"]]),
    ("chatml", "multi", TWO, [["Yo<|im_end|>", "No.<|im_end|>"]]),
    ("chatml", "system", WITH_SYSTEM, [["Yo<|im_end|>"]]),
    (
        "chatml",
        "call",
        WITH_CALL,
        [['<tool_call>{"name": "get", "arguments": {"city": "Bonn"}}</tool_call><|im_end|>', "9 it is<|im_end|>"]],
    ),
    ("chatml_tags", "multi", TWO, [["Yo<|im_end|>", "No.<|im_end|>"]]),
    (
        "chatml_tags",
        "call",
        WITH_CALL,
        [['<tool_call>{"name": "get", "arguments": {"city": "Bonn"}}</tool_call><|im_end|>', "9 it is<|im_end|>"]],
    ),
    ("llama3", "single", TWO[:2], [["Yo<|eot_id|>"]]),
    ("llama3", "multi", TWO, [["Yo<|eot_id|>", "No.<|eot_id|>"]]),
    ("llama3", "system", WITH_SYSTEM, [["Yo<|eot_id|>"]]),
    (
        "llama3",
        "call",
        WITH_CALL,
        [['{"name": "get", "parameters": {"city": "Bonn"}}<|eot_id|>', "9 it is<|eot_id|>"]],
    ),
    ("gemma", "single", TWO[:2], [["Yo<end_of_turn>"]]),
    ("gemma", "multi", TWO, [["Yo<end_of_turn>", "No.<end_of_turn>"]]),
    ("mistral", "single", TWO[:2], [[" Yo</s>"]]),
    ("mistral", "multi", TWO, [[" Yo</s>", " No.</s>"]]),
    # The system prompt moves to the last question: the first answer was given under another prompt.
    ("mistral", "system", (system("Be kind"), *TWO), [[" No.</s>"], [" Yo</s>"]]),
    (
        "mistral",
        "call",
        WITH_CALL,
        [['[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Bonn"}, "id": "c1"}]</s>', " 9 it is</s>"]],
    ),
    ("qwen3", "single", THINKING[:2], [["<think>\nhm\n</think>\n\nYo<|im_end|>"]]),
    (
        "qwen3",
        "multi",
        THINKING,
        [["<think>\ner\n</think>\n\nNo.<|im_end|>"], ["<think>\nhm\n</think>\n\nYo<|im_end|>"]],
    ),
    (
        "qwen3",
        "beside",
        BESIDE,
        [["<think>\ner\n</think>\n\nNo.<|im_end|>"], ["<think>\nhm\n</think>\n\nYo<|im_end|>"]],
    ),
    (
        "qwen3",
        "call",
        (user("Hi"), call(reasoning_content="hm"), RESULT, robot("9 it is", reasoning_content="ok")),
        [
            [
                '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "get", "arguments": {"city": "Bonn"}}\n</tool_call>'
                "<|im_end|>",
                "<think>\nok\n</think>\n\n9 it is<|im_end|>",
            ]
        ],
    ),
    ("deepseek_r1", "single", THINKING[:2], [["hm\n</think>\n\nYo<｜end▁of▁sentence｜>"]]),
    (
        "deepseek_r1",
        "multi",
        THINKING,
        [["er\n</think>\n\nNo.<｜end▁of▁sentence｜>"], ["hm\n</think>\n\nYo<｜end▁of▁sentence｜>"]],
    ),
    ("deepseek_r1", "beside", BESIDE[:2], [["hm\n</think>\n\nYo<｜end▁of▁sentence｜>"]]),
    ("deepseek_r1", "system", (system("Be kind"), *THINKING[:2]), [["hm\n</think>\n\nYo<｜end▁of▁sentence｜>"]]),
    ("harmony", "single", TWO[:2], [["<|channel|>final<|message|>Yo<|return|>"]]),
    (
        "harmony",
        "multi",
        TWO,
        [["<|channel|>final<|message|>No.<|return|>"], ["<|channel|>final<|message|>Yo<|return|>"]],
    ),
    ("harmony", "system", WITH_SYSTEM, [["<|channel|>final<|message|>Yo<|return|>"]]),
    (
        "harmony",
        "thinking",
        BESIDE,
        [
            ["<|channel|>analysis<|message|>er<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>"],
            ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yo<|return|>"],
        ],
    ),
    (
        "harmony",
        "call",
        (user("Hi"), call(reasoning_content="hm"), RESULT, robot("9 it is")),
        [
            ["<|channel|>final<|message|>9 it is<|return|>"],
            [
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.get<|channel|>commentary json"
                '<|message|>{"city": "Bonn"}<|call|>'
            ],
        ],
    ),
    ("kimi_k2", "single", TWO[:2], [["Yo<|im_end|>"]]),
    ("kimi_k2", "multi", TWO, [["Yo<|im_end|>", "No.<|im_end|>"]]),
    ("kimi_k2", "system", WITH_SYSTEM, [["Yo<|im_end|>"]]),
    (
        "kimi_k2",
        "call",
        WITH_CALL,
        [
            [
                "<|tool_calls_section_begin|><|tool_call_begin|>c1<|tool_call_argument_begin|>"
                '{"city": "Bonn"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
                "9 it is<|im_end|>",
            ]
        ],
    ),
]


@pytest.mark.parametrize(
    ("family", "messages", "expected"),
    [pytest.param(family, messages, expected, id=f"{family}-{name}") for family, name, messages, expected in CASES],
)
def test_what_the_target_wrote_and_nothing_else(
    directory: Path, merges: bool, family: str, messages: tuple[dict[str, Any], ...], expected: list[list[str]]
) -> None:
    tools = TOOLS if any("tool_calls" in message for message in messages) else ()
    where = directory if family == "harmony" else Path("none")
    result = masked(family, *messages, merges=merges, tools=tools, directory=where)
    assert texts(result, merges) == expected
    turns = sum(message["role"] == "assistant" for message in messages)
    # Every turn once.
    assert sum(map(len, expected)) == turns
    assert result.counts["num_turns_left_out"] == 0
    assert result.counts["num_rewritten"] == (len(expected) > 1)
    for sample in result.samples:
        assert isinstance(sample, Masked)
        assert sample.loss_spans[-1][1] == len(sample.token_ids)
        assert len(sample.turn_ends) == len(sample.loss_spans)


def test_every_family_stands_in_the_cases() -> None:
    assert {family for family, *_ in CASES} == set(FAMILIES)


def test_samples_that_rewriting_makes_are_the_prompts_that_a_server_sends() -> None:
    result = masked("qwen3", *THINKING)
    assert whole(result, 0) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n<think>\ner\n</think>\n\nNo.<|im_end|>"
    )
    assert whole(result, 1) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYo<|im_end|>"
    )
    result = masked("deepseek_r1", *THINKING)
    assert whole(result, 0) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>\n\nYo<｜end▁of▁sentence｜>"
        "<｜User｜>So?<｜Assistant｜><think>\ner\n</think>\n\nNo.<｜end▁of▁sentence｜>"
    )
    assert all(isinstance(s, Masked) and s.method is MaskMethod.COMPOSED for s in result.samples)
    assert result.counts["num_turns_composed"] == 2


def test_harmony_shows_history_with_end_and_supervises_return(directory: Path) -> None:
    result = masked("harmony", *TWO, directory=directory)
    assert "<|channel|>final<|message|>Yo<|end|><|start|>user<|message|>So?<|end|>" in whole(result, 0)
    assert whole(result, 0).endswith("<|start|>assistant<|channel|>final<|message|>No.<|return|>")
    assert whole(result, 1).endswith("<|start|>assistant<|channel|>final<|message|>Yo<|return|>")


def test_a_harmony_call_without_its_stop_token_in_the_targets_files_is_refused() -> None:
    result = masked("harmony", user("Hi"), call(), tools=TOOLS)
    assert isinstance(result.samples[0], Refused) and result.samples[0].reason is Reason.NO_TURN_END


def test_without_thinking_the_empty_thought_is_the_prompts_and_not_the_targets() -> None:
    options = {"enable_thinking": False}
    result = masked("qwen3", *TWO, options=options)
    assert texts(result) == [["No.<|im_end|>"], ["Yo<|im_end|>"]]
    assert whole(result, 0).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nNo.<|im_end|>")
    assert result.counts["num_turns_without_thought"] == 0
    # Thinking is on by default: the template then shows an empty thought as the target's, and that is told.
    result = masked("qwen3", *TWO)
    assert texts(result)[0] == ["<think>\n\n</think>\n\nNo.<|im_end|>"]
    assert result.counts["num_turns_without_thought"] == 2


def test_templates_that_trim_show_the_turn_otherwise_and_that_is_counted() -> None:
    for family, expected in (("gemma", "Yo<end_of_turn>"), ("llama3", "Yo<|eot_id|>"), ("mistral", " Yo</s>")):
        result = masked(family, user("Hi"), robot(" Yo \n"))
        assert texts(result) == [[expected]]
        assert result.counts["num_turns_changed"] == 1
        assert masked(family, user("Hi"), robot("Yo")).counts["num_turns_changed"] == 0
    assert masked("chatml", user("Hi"), robot(" Yo \n")).counts["num_turns_changed"] == 0


def test_gemma_and_mistral_refuse_in_their_own_words() -> None:
    result = masked("gemma", *WITH_SYSTEM).samples[0]
    assert isinstance(result, Refused) and result.reason is Reason.TEMPLATE_ERROR
    assert "System role not supported" in result.detail
    result = masked("mistral", user("Hi"), user("Hi?"), robot("Yo")).samples[0]
    assert isinstance(result, Refused) and result.reason is Reason.TEMPLATE_ERROR
    assert "must alternate" in result.detail


def test_no_sample_has_two_bos() -> None:
    for family, bos in (("llama3", "<|begin_of_text|>"), ("gemma", "<bos>"), ("mistral", "<s>")):
        assert whole(masked(family, *TWO)).count(bos) == 1
        assert whole(masked(family, *TWO)).startswith(bos)


def test_the_date_is_the_configured_one_on_any_day() -> None:
    day = datetime.date(2031, 7, 4)
    assert "Today Date: 04 Jul 2031\n" in whole(masked("llama3", *TWO, date=day))
    assert "Current date: 2031-07-04\n" in whole(masked("harmony", *TWO, date=day))
    assert "Today Date: 01 Jan 2026\n" in whole(masked("llama3", *TWO))
    uses = {family for family in FAMILIES if Masker(tokenizer_of(family), Path("none")).uses_date}
    assert uses == {"llama3", "harmony"}


def test_a_date_in_a_format_that_only_the_run_knows_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{% set f = messages[0].content %}{{ strftime_now(f) }}" + tokenizer.chat_template
    row = Row(Where(Path("a.jsonl"), 1), 1, Messages(TWO), "c", "s", ())
    (result,) = Masker(tokenizer, Path("none")).mask([row])
    assert isinstance(result.samples[0], Refused)
    assert "strftime_now of a format that is no literal" in result.samples[0].detail


def test_options_reach_every_rendering() -> None:
    result = masked("harmony", *TWO, options={"reasoning_effort": "high"})
    assert all("Reasoning: high" in whole(result, number) for number in (0, 1))


def test_arguments_that_are_no_object_stay_text() -> None:
    for arguments in ("not json", "[1]", '"x"'):
        result = masked("kimi_k2", user("Hi"), call(arguments), tools=TOOLS)
        assert f"<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" in texts(result)[0][0]


def test_a_template_that_writes_arguments_as_they_are_gets_text() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "({'name': call.function.name, 'arguments': call.function.arguments} | tojson)",
        "call.function.name + call.function.arguments",
    )
    row = Row(Where(Path("a.jsonl"), 1), 1, Messages((user("Hi"), call('{"b":1,"a":2}')), TOOLS), "c", "s", ())
    (result,) = Masker(tokenizer, Path("none")).mask([row])
    assert texts(result) == [['<tool_call>get{"b":1,"a":2}</tool_call><|im_end|>']]


NO_THOUGHTS = Rules(reasoning=False)


@pytest.mark.parametrize(
    ("family", "messages", "expected", "num_tokens"),
    [
        ("qwen3", THINKING, [["\n\nNo.<|im_end|>"], ["\n\nYo<|im_end|>"]], 2 * 6),
        (
            "deepseek_r1",
            THINKING,
            [["\n\nNo.<｜end▁of▁sentence｜>"], ["\n\nYo<｜end▁of▁sentence｜>"]],
            2 * 4,
        ),
        (
            "harmony",
            BESIDE,
            [
                ["<|start|>assistant<|channel|>final<|message|>No.<|return|>"],
                ["<|start|>assistant<|channel|>final<|message|>Yo<|return|>"],
            ],
            2 * 13,
        ),
        ("chatml", TWO, [["Yo<|im_end|>", "No.<|im_end|>"]], 0),
    ],
)
def test_thoughts_become_context_when_they_are_not_wanted(
    directory: Path, family: str, messages: tuple[dict[str, Any], ...], expected: list[list[str]], num_tokens: int
) -> None:
    where = directory if family == "harmony" else Path("none")
    result = masked(family, *messages, rules=NO_THOUGHTS, directory=where)
    assert texts(result) == expected
    assert result.counts["num_reasoning_tokens"] == num_tokens


def test_last_turn_only_supervises_one_turn_and_needs_no_extra_sample() -> None:
    rules = Rules(last_turn_only=True)
    for family, expected in (("chatml", "No.<|im_end|>"), ("qwen3", "<think>\ner\n</think>\n\nNo.<|im_end|>")):
        result = masked(family, *(THINKING if family == "qwen3" else TWO), rules=rules)
        assert texts(result) == [[expected]]
        assert result.counts["num_turns_skipped"] == 1
        assert result.counts["num_rewritten"] == 0
