"""Prompts in: what is refused, what is rejected, what names a row; and the demo's own prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.config import GenerateConfig
from eyas.errors import ConfigError, DataError
from eyas.generate.prompts import Prompts, read_prompts, sampling_of

DEMO = Path(__file__).parent.parent / "examples" / "demo" / "prompts.jsonl"
TARGET = {"digest": "d"}


def read(path: Path, **config: Any) -> Prompts:
    return read_prompts(path, sampling=sampling_of(GenerateConfig(**config)), target=TARGET)


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def asking(*users: str, **more: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for user in users:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": None}]
    return {"messages": messages[:-1], **more}


def test_last_turn_is_added_and_given_answers_are_dropped(tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "somebody else's words"},
        {"role": "user", "content": "b", "name": "kept"},
    ]
    (prompt,) = read(written(tmp_path, {"messages": said, "id": 7, "tags": "x"})).answerable
    assert prompt.messages == (said[0], said[1], {"role": "assistant"}, said[3], {"role": "assistant"})
    assert prompt.num_turns == 2
    assert (prompt.prompt_id, prompt.tags, prompt.source) == ("7", ("x",), "prompts")


def test_row_id_depends_on_content_and_settings_and_not_on_the_place(tmp_path: Path) -> None:
    path = written(tmp_path, asking("a", id="1"), asking("b"))
    first, second = read(path).answerable
    assert read(path, seed=3).answerable[0].row_id == first.row_id, "greedy answers have no seed"
    assert read(path, max_new_tokens=9).answerable[0].row_id != first.row_id
    assert read(path, temperature=1.0).answerable[0].row_id != read(path, temperature=1.0, seed=1).answerable[0].row_id
    other_target = read_prompts(path, sampling=sampling_of(GenerateConfig()), target={"digest": "e"})
    assert other_target.answerable[0].row_id != first.row_id
    with_tools = written(tmp_path, asking("b", tags=["x"]), asking("a", tools=[{"name": "f"}]), asking("a"))
    a, b, c = read(with_tools).answerable
    assert (a.row_id, c.row_id) == (second.row_id, first.row_id)
    assert b.row_id not in {a.row_id, c.row_id}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "empty file"),
        (("\n", "  \n"), "empty file"),
        ((asking("a"), '{"messages": [\n'), ":2: broken JSON"),
        ((asking("a"), "\n", "[1]\n"), ":3: not a JSON object"),
        (({"txt": "a"},), ":1: 'messages' must be"),
        (({"messages": []},), ":1: 'messages' must be"),
        (({"messages": ["a"]},), ":1: 'messages' must be"),
        ((asking("a", tags=7),), ":1: 'tags' must be a list"),
        ((asking("a", tools="f"),), ":1: 'tools' is text, but not JSON"),
        ((asking("a", tools='{"a": 1}'),), ":1: 'tools' must be a list"),
        (('{"messages": [{"role": "user", "content": "\\ud83d"}]}\n',), ":1: half of a surrogate pair"),
        (("[" * 100_000,), ":1: the JSON array has no end"),
        (('{"messages": ' + "9" * 5000 + "}\n",), ":1: broken JSON"),
    ],
)
def test_unreadable_file_is_one_line_that_says_where(tmp_path: Path, rows: tuple[Any, ...], message: str) -> None:
    path = written(tmp_path, *rows)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_bad_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^generate\.prompts: .*: No such file or directory"):
        read(tmp_path / "nowhere.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(DataError, match=r"bytes\.jsonl:1: invalid UTF-8"):
        read(tmp_path / "bytes.jsonl")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "system", "content": "s"}], "no_user_turn"),
        ([{"role": "assistant", "content": "hi"}, {"role": "user", "content": "a"}], "starts_with_assistant"),
        ([{"role": "user", "content": ""}], "bad_message"),
        ([{"role": "user"}], "bad_message"),
        ([{"content": "a"}], "bad_message"),
    ],
)
def test_prompt_without_a_turn_to_answer_is_a_reject(
    tmp_path: Path, messages: list[dict[str, Any]], reason: str
) -> None:
    prompts = read(written(tmp_path, asking("a"), {"messages": messages, "id": "x"}))
    (reject,) = prompts.rejects
    assert (reject.reason, reject.prompt_id, reject.line) == (reason, "x", 2)
    assert prompts.num_rows == 2


def test_repeated_prompt_is_a_reject_with_a_name_of_its_own(tmp_path: Path) -> None:
    prompts = read(written(tmp_path, asking("a"), asking("a"), asking("a", id="again")))
    assert [reject.reason for reject in prompts.rejects] == ["duplicate", "duplicate"]
    assert len(prompts.row_ids) == prompts.num_rows == 3


_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": st.sampled_from([None, "", "a", "b"])},
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(_MESSAGES, min_size=1, max_size=12))
def test_every_row_is_answerable_or_rejected(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    prompts = read(path)
    assert prompts.num_rows == len(prompts.row_ids) == len(rows)
    lines = sorted([p.line for p in prompts.answerable] + [r.line for r in prompts.rejects])
    assert lines == list(range(1, len(rows) + 1))


def test_demo_prompts_are_varied_and_complete() -> None:
    prompts = read(DEMO)
    assert not prompts.rejects
    rows = prompts.answerable
    assert len(rows) >= 72
    assert len({row.prompt_id for row in rows}) == len(rows)
    assert all(row.tags for row in rows)
    tags = {tag for row in rows for tag in row.tags}
    assert tags >= {"chat", "code", "maths", "summary", "extraction", "multi-turn", "system", "short", "long"}
    assert tags >= {"en", "de", "fr", "es", "it", "pt", "da", "ja", "zh"}
    assert tags >= {"python", "rust", "sql", "javascript", "go", "c", "bash"}
    contents = [message["content"] for row in rows for message in row.messages if message["role"] == "user"]
    assert len(set(contents)) == len(contents)
    for row in rows:
        assert ("multi-turn" in row.tags) == (row.num_turns > 1), row.prompt_id
        assert ("system" in row.tags) == (row.messages[0]["role"] == "system"), row.prompt_id
        words = max(len(message["content"].split()) for message in row.messages if message["role"] == "user")
        assert ("long" in row.tags) == (300 <= words <= 600), (row.prompt_id, words)
        assert "long" in row.tags or words < 200, (row.prompt_id, words)
    assert sum(row.num_turns > 1 for row in rows) >= 8
    assert min(len(content.split()) for content in contents if content.isascii()) <= 4


def test_a_merged_file_compressed_and_with_tools_as_text(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1.0, "a": 2}}}]
    plain = written(tmp_path, asking("a", tools=tools), asking("b"))
    merged = tmp_path / "merged.jsonl.gz"
    rows = [asking("a", tools=json.dumps(tools)), asking("b"), {"text": "once"}, {"input_ids": [1], "loss_mask": [1]}]
    merged.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    found = read(merged)
    assert [p.row_id for p in found.answerable] == [p.row_id for p in read(plain).answerable]
    assert found.answerable[0].tools == tuple(tools)
    assert [(r.line, r.reason) for r in found.rejects] == [(3, "no_messages"), (4, "no_messages")]
