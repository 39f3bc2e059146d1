"""Prompt sets: rows of benchmarks are read as they are, later turns follow, the built-in set holds what it says."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
import train_reference
from eyas.config import DataConfig, EngineConfig, EvaluateConfig, TargetConfig
from eyas.errors import DataError
from eyas.evaluate import compare
from eyas.evaluate.compare import DecodeReceipt
from eyas.evaluate.prompts import BUILT_IN, Prompt, PromptReader, read_prompts
from eyas.log import Progress
from eyas.model import checkpoint as engine_layout
from eyas.model.vocab_map import VocabMap


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    """Words `w0`, `w1`, … are the tokens of these numbers; all other words are 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tiny_models.save("llama", tmp_path_factory.mktemp("prompts") / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(301)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}w1 {{ m.content }} w3 {% else %}w4 {{ m.content }} {% endif %}"
        "{% if m.content == 'w300' %}{{ raise_exception('not that') }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(path)
    return TargetConfig(path=path)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS: dict[str, tuple[dict[str, Any], Prompt]] = {
    "MT-bench": (
        {"question_id": 81, "category": "writing", "turns": ["w5 w6", "w7"], "reference": ["x"]},
        Prompt("81", (1, 5, 6, 3), "writing", later=("w7",)),
    ),
    "Spec-Bench": (
        {"question_id": 161, "category": "translation", "turns": ["w8"], "reference": []},
        Prompt("161", (1, 8, 3), "translation"),
    ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "w9 w10", "entry_point": "f", "canonical_solution": "w11", "test": "w12"},
        Prompt("HumanEval/0", (1, 9, 10, 3)),
    ),
    "GSM8K": ({"question": "w13", "answer": "w14"}, Prompt("line 1", (1, 13, 3))),
    "Alpaca": ({"instruction": "w15", "input": "", "output": "w16"}, Prompt("line 1", (1, 15, 3))),
    "conversation": (
        {"id": "c", "messages": [{"role": "user", "content": "w17"}, {"role": "assistant", "content": "w18"}]},
        Prompt("c", (1, 17, 3)),
    ),
    "token ids": ({"id": "t", "category": "ids", "token_ids": [7, 8]}, Prompt("t", (7, 8), "ids")),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_set_is_read(target: TargetConfig, tmp_path: Path, name: str) -> None:
    row, wanted = ROWS[name]
    assert read_prompts(write(tmp_path / "set.jsonl", row), target, DataConfig()) == [wanted]


def test_turns_follow_the_targets_own_answers(target: TargetConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", {"question_id": 81, "category": "c", "turns": ["w5", "w7", "w8"]})
    reader = PromptReader(target, DataConfig())
    (first,) = reader.read(path)
    second = reader.next_turn(first, [20, 21])
    assert second == Prompt("81 turn 2", (1, 5, 3, 4, 20, 21, 1, 7, 3), "c", later=("w8",), turn=2)
    third = reader.next_turn(second, [22])
    assert third is not None and third.token_ids == (*second.token_ids, 4, 22, 1, 8, 3)
    assert (third.name, third.turn, third.later) == ("81 turn 3", 3, ())
    assert reader.next_turn(third, [23]) is None
    assert reader.next_turn(Prompt("ids", (1, 2)), [3]) is None


def test_a_turn_that_the_template_refuses_is_named(target: TargetConfig, tmp_path: Path) -> None:
    reader = PromptReader(target, DataConfig())
    (first,) = reader.read(write(tmp_path / "set.jsonl", {"id": "x", "turns": ["w5", "w300"]}))
    with pytest.raises(DataError, match=r"x turn 2: the chat template refuses it: .*not that"):
        reader.next_turn(first, [20])


def test_the_limit_counts_rows(target: TargetConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", *({"id": str(i), "turns": ["w5", "w6"]} for i in range(5)))
    assert [p.name for p in read_prompts(path, target, DataConfig(), limit=2)] == ["0", "1"]


def test_the_built_in_set_has_every_category_alike_from_its_beginning(target: TargetConfig) -> None:
    prompts = read_prompts(None, target, DataConfig())
    counts = Counter(p.category for p in prompts)
    assert len(counts) == 9 and set(counts.values()) == {8}
    assert len({p.name for p in prompts}) == len(prompts) == 72
    for start in range(0, 72, 9):
        assert {p.category for p in prompts[start : start + 9]} == set(counts)
    assert sum(bool(p.later) for p in prompts) >= 8
    assert BUILT_IN.is_file()
    for line in BUILT_IN.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert set(row) == {"id", "category", "turns"}
        assert all(20 < len(turn) < 1000 for turn in row["turns"]) and len(row["turns"]) <= 2


# -- decoded in this process -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoded(target: TargetConfig, tmp_path_factory: pytest.TempPathFactory) -> DecodeReceipt:
    """Two conversations, one of two turns, by a drafter that knows nothing."""
    base = tmp_path_factory.mktemp("decoded")
    shape = train_reference.tiny_shape(
        target_hidden_size=32, hidden_size=32, vocab_size=301, draft_vocab_size=100, max_position_embeddings=512
    )
    draft = train_reference.random_draft(shape, dtype=torch.float32)
    engine_layout.save(draft, VocabMap.of(torch.arange(100), 301), base / "draft", target_config={}, dtype="float32")
    rows = [
        {"id": "a", "category": "x", "turns": ["w5", "w7"]},
        {"id": "b", "category": "y", "turns": ["w8"]},
    ]
    return compare.evaluate(
        EvaluateConfig(max_new_tokens=9, num_draft_tokens=2), target, EngineConfig(dtype="float32", device="cpu"),
        DataConfig(), draft=base / "draft", prompts=write(base / "set.jsonl", *rows), limit=None,
        progress=Progress(stream=io.StringIO()),
    )  # fmt: skip


def test_later_turns_are_decoded_behind_the_plain_answer(target: TargetConfig, decoded: DecodeReceipt) -> None:
    first, second, other = decoded.requests
    assert [r.name for r in decoded.requests] == ["a", "a turn 2", "b"]
    assert [r.category for r in decoded.requests] == ["x", "x", "y"]
    assert first.prompt_ids == (1, 5, 3) and other.prompt_ids == (1, 8, 3)
    assert second.prompt_ids == (1, 5, 3, 4, *first.plain_ids, 1, 7, 3)
    assert all(r.identical and len(r.plain_ids) == r.plain_tokens for r in decoded.requests)


def test_categories_are_slices(decoded: DecodeReceipt) -> None:
    assert {name: n for name, (n, _) in decoded.slices.items()} == {"x": 2, "y": 1}
    terms = [(r.num_accepted, r.verifications) for r in decoded.requests[:2]]
    wanted = 1 + sum(a for a, _ in terms) / sum(v for _, v in terms)
    assert decoded.slices["x"][1].value == pytest.approx(wanted)
    assert any(line.startswith("by category, pooled: x ") for line in decoded.lines())


def test_the_file_holds_no_prompt_and_no_answer(decoded: DecodeReceipt) -> None:
    text = json.dumps(decoded.as_dict())
    assert "prompt_ids" not in text and "plain_ids" not in text


def test_a_server_is_compared_with_it(decoded: DecodeReceipt) -> None:
    own = decoded.own()
    assert own.acceptance.verifications == sum(r.verifications for r in decoded.requests)
    assert own.acceptance.accepted_tokens == sum(own.acceptance.accepted)
    assert own.acceptance.length == pytest.approx(decoded.acceptance_length_pooled.value)  # type: ignore[union-attr]
    assert own.answers == {r.prompt_ids: r.plain_ids for r in decoded.requests}
