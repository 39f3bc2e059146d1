"""Reading JSONL: every form, every reason to drop a row, every way in which a file is damaged."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.data.files import lines_of, open_rows
from eyas.data.sources import (
    DroppedRow,
    GivenTokens,
    GivenTurns,
    Messages,
    PlainText,
    Row,
    Where,
    rows_of,
)
from eyas.errors import DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(paths: list[Path]) -> Iterator[Row | DroppedRow]:
    return rows_of(lines_of(open_rows(paths, field="data.sources")))


def read(tmp_path: Path, *rows: Any) -> list[Row | DroppedRow]:
    return list(read_rows([write(tmp_path / "a.jsonl", *rows)]))


def one(tmp_path: Path, row: Any) -> Row:
    (result,) = read(tmp_path, row)
    assert isinstance(result, Row), result
    return result


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_messages_keep_every_turn_and_every_field(tmp_path: Path, key: str) -> None:
    turns = [
        {"role": "system", "content": "Be kind"},
        *CHAT,
        {**CHAT[1], "name": "x"},
        {"role": "tool", "content": "7"},
    ]
    content = one(tmp_path, {key: turns, "tools": [{"type": "function"}]}).content
    assert content == Messages(tuple(turns), ({"type": "function"},))


def test_sharegpt_roles_are_mapped_by_name(tmp_path: Path) -> None:
    names = ["system", "human", "gpt", "user", "chatgpt", "observation", "model", "function", "assistant", "Human"]
    content = one(tmp_path, {"conversations": [{"from": name, "value": name} for name in names]}).content
    assert isinstance(content, Messages)
    assert [message["role"] for message in content.messages] == (
        ["system", "user", "assistant", "user", "assistant", "tool", "assistant", "tool", "assistant", "user"]
    )
    assert [message["content"] for message in content.messages] == names


def test_system_text_beside_the_conversation_is_not_lost(tmp_path: Path) -> None:
    content = one(tmp_path, {"system": "Be brief", "messages": CHAT}).content
    assert isinstance(content, Messages)
    assert content.messages[0] == {"role": "system", "content": "Be brief"}


def test_parts_of_text_are_joined_and_a_call_without_words_has_empty_content(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"function": {"name": "f"}}]
    content = one(
        tmp_path,
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}]},
    ).content
    assert isinstance(content, Messages)
    assert content.messages[0]["content"] == "ab"
    assert content.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}


def test_tools_may_be_json_text(tmp_path: Path) -> None:
    content = one(tmp_path, {"messages": CHAT, "tools": '[{"type": "function"}]'}).content
    assert isinstance(content, Messages)
    assert content.tools == ({"type": "function"},)


@pytest.mark.parametrize("key", ["input_ids", "token_ids"])
def test_token_ids_with_mask_win_over_messages(tmp_path: Path, key: str) -> None:
    content = one(tmp_path, {key: [5, 6, 7], "loss_mask": [0, 1, True], "messages": CHAT, "text": "x"}).content
    assert isinstance(content, GivenTokens)
    assert content.token_ids.tolist() == [5, 6, 7]
    assert content.loss_mask.tolist() == [False, True, True]


def test_token_ids_without_mask_leave_it_to_the_messages(tmp_path: Path) -> None:
    assert isinstance(one(tmp_path, {"input_ids": [5, 6], "messages": CHAT}).content, Messages)


def test_text(tmp_path: Path) -> None:
    assert one(tmp_path, {"text": "Once"}).content == PlainText("Once")


def test_labels_and_their_defaults(tmp_path: Path) -> None:
    row = one(tmp_path, {"messages": CHAT, "id": 7, "source": "mine", "tags": ["a", "b", "a"]})
    assert (row.conversation_id, row.source, row.tags) == ("7", "mine", ("a", "b"))
    row = one(tmp_path, {"messages": CHAT, "uuid": "u", "tags": "a"})
    assert (row.conversation_id, row.source, row.tags) == ("u", "a.jsonl", ("a",))
    assert one(tmp_path, {"messages": CHAT, "conversation_id": "c"}).conversation_id == "c"


def test_default_conversation_id_is_by_content_not_by_position(tmp_path: Path) -> None:
    first, second = read(tmp_path, {"text": "a"}, {"text": "b"})
    (moved,) = read(tmp_path, {"text": "b"})
    assert isinstance(first, Row) and isinstance(second, Row) and isinstance(moved, Row)
    assert moved.conversation_id == second.conversation_id != first.conversation_id


DROPS: list[tuple[str, Any]] = [
    ("not_an_object", [1, 2]),
    ("not_an_object", "text"),
    ("not_an_object", None),
    ("unknown_form", {}),
    ("unknown_form", {"prompt": "a", "answer": "b"}),
    ("unknown_form", {"messages": None}),
    ("wrong_type", {"messages": "Hi"}),
    ("wrong_type", {"messages": ["Hi"]}),
    ("wrong_type", {"messages": [{"content": "Hi"}]}),
    ("wrong_type", {"messages": [{"role": 1, "content": "Hi"}]}),
    ("wrong_type", {"messages": [{"role": "user"}]}),
    ("wrong_type", {"messages": [{"role": "user", "content": 5}]}),
    ("wrong_type", {"messages": CHAT, "tags": {"a": 1}}),
    ("wrong_type", {"messages": CHAT, "id": [1]}),
    ("wrong_type", {"messages": CHAT, "source": 1.5}),
    ("wrong_type", {"messages": CHAT, "tools": "{"}),
    ("wrong_type", {"messages": CHAT, "tools": ["f"]}),
    ("wrong_type", {"text": ["a"]}),
    ("invalid_text", {"text": "\ud83d"}),
    ("invalid_text", {"messages": CHAT, "id": "\udc00"}),
    ("unknown_role", {"messages": [*CHAT, {"role": "narrator", "content": "Meanwhile"}]}),
    ("unknown_role", {"conversations": [{"from": "function_call", "value": "f"}]}),
    (
        "non_text_content",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, CHAT[1]]},
    ),
    ("non_text_content", {"messages": [{"role": "user", "content": [5]}, CHAT[1]]}),
    ("empty_conversation", {"messages": []}),
    ("empty_conversation", {"input_ids": [], "loss_mask": []}),
    ("empty_text", {"text": ""}),
    ("no_assistant_turn", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("bad_token_ids", {"input_ids": [1, -2], "loss_mask": [0, 1]}),
    ("bad_token_ids", {"input_ids": [1, 2.5], "loss_mask": [0, 1]}),
    ("bad_token_ids", {"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}),
    ("bad_token_ids", {"input_ids": [1, [2]], "loss_mask": [0, 1]}),
    ("bad_token_ids", {"input_ids": "12", "loss_mask": [0, 1]}),
    ("bad_token_ids", {"input_ids": [1, 2**40], "loss_mask": [0, 1]}),
    ("bad_token_ids", {"input_ids": [1, 10**30], "loss_mask": [0, 1]}),
    ("no_loss_mask", {"input_ids": [1, 2]}),
    ("bad_loss_mask", {"input_ids": [1, 2], "loss_mask": [1]}),
    ("bad_loss_mask", {"input_ids": [1, 2], "loss_mask": [0, 2]}),
    ("bad_loss_mask", {"input_ids": [1, 2], "loss_mask": [0, None]}),
    ("bad_loss_mask", {"input_ids": [1, 2], "loss_mask": "01"}),
]


@pytest.mark.parametrize(("reason", "row"), DROPS)
def test_a_useless_row_is_dropped_with_its_reason_and_place(tmp_path: Path, reason: str, row: Any) -> None:
    good, bad, after = read(tmp_path, {"text": "a"}, row, {"text": "b"})
    assert isinstance(good, Row) and isinstance(after, Row) and isinstance(bad, DroppedRow)
    assert bad.reason == reason
    assert str(bad.where) == f"{tmp_path / 'a.jsonl'}:2"
    assert bad.detail


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "text": "b"}',
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x", "content": "y"}]}',
        '{"text": "a", "meta": {"k": 1, "k": 1}}',
    ],
)
def test_a_key_that_comes_twice_is_a_dropped_row(line: str) -> None:
    (row,) = rows_of([(Where(Path("a"), 1), line.encode())])
    assert isinstance(row, DroppedRow) and row.reason == "repeated_key" and "comes twice" in row.detail


def test_lines_of_any_ending_blank_ones_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n   \n{"text": "b"}')
    assert [(row.where.line, row.content) for row in read_rows([path]) if isinstance(row, Row)] == [
        (1, PlainText("a")),
        (4, PlainText("b")),
    ]


def damage(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(DataError) as error:
        list(read_rows([path]))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_damaged_files_are_one_line_that_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = b'{"text": "a"}\n'
    assert f"{path}:3: broken JSON: Expecting value at character 9" in damage(path, good * 2 + b'{"text": }\n' + good)
    assert "cut off" in damage(path, good + b'{"text": "a')
    assert f"{path}:2: invalid UTF-8 at byte 10" in damage(path, good + b'{"text": "\xff"}\n')
    assert "JSON array has no end" in damage(path, b"[\n" + good)
    assert f"{path}:1: broken JSON" in damage(path, b"1" * 5000)
    assert "no row in it" in damage(path, b"\n \n")
    assert "UTF-16" in damage(path, good.decode().encode("utf-16"))


def test_deep_nesting_is_a_dropped_row_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for depth in (960, 980, 5000):
        path.write_text('{"text": "a\\u00e9", "x": ' + "[" * depth + "]" * depth + "}")
        (row,) = read_rows([path])
        assert isinstance(row, Row) or row.detail == "nested too deeply"
    assert isinstance(row, DroppedRow)


def test_a_pipe_is_a_source_too_and_rows_come_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    seen = threading.Event()

    def feed() -> None:
        with path.open("w", buffering=1) as pipe:
            pipe.write('{"text": "a"}\n')
            assert seen.wait(10)
            pipe.write('{"text": "b"}\n')

    thread = threading.Thread(target=feed)
    thread.start()
    rows = read_rows([path])
    assert next(rows).where.line == 1
    seen.set()
    assert next(rows).where.line == 2
    thread.join()


def test_the_first_question_decides_the_split_also_beside_given_ids(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "Q"}]}, CHAT[1]]
    ids = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    assert one(tmp_path, {"messages": turns}).first_user == "Q"
    assert one(tmp_path, {**ids, "messages": turns}).first_user == "Q"
    assert one(tmp_path, {**ids, "conversations": [{"from": "human", "value": "Q"}]}).first_user == "Q"
    # Messages beside given ids may be of any make: they are not what the sample is made of.
    assert (
        one(tmp_path, {**ids, "messages": [5, {"role": "narrator"}, {"role": "user", "content": "Q"}]}).first_user
        == "Q"
    )
    assert one(tmp_path, {**ids, "messages": "?"}).first_user is None
    assert one(tmp_path, {"text": "Q"}).first_user is None


def test_language_and_re_tokenised_answers(tmp_path: Path) -> None:
    assert one(tmp_path, {"messages": CHAT, "language": " en "}).language == "en"
    assert one(tmp_path, {"messages": CHAT, "lang": "pt"}).language == "pt"
    assert one(tmp_path, {"text": "Привет", "language": 5}).language == "cyrillic"
    assert one(tmp_path, {"text": "Привет", "retokenized": True}).retokenized
    assert not one(tmp_path, {"text": "Привет", "retokenized": "true"}).retokenized


def test_rows_come_from_any_lines() -> None:
    where = Where(Path("archive.zip"), 7)
    (row,) = rows_of([(where, b'{"text": "a"}')])
    assert (row.where, row.num_bytes) == (where, 13)


def test_token_ids_by_turn_win_over_messages_and_other_turns_are_somebody_elses(tmp_path: Path) -> None:
    turns = [{"prompt_ids": [1, 2], "token_ids": [3]}, {"prompt_ids": [1], "token_ids": [4, 5]}]
    row = one(tmp_path, {"messages": CHAT, "turns": turns})
    assert isinstance(row.content, GivenTurns) and row.first_user == "Hi"
    assert [[ids.tolist() for ids in turn] for turn in row.content.turns] == [[[1, 2], [3]], [[1], [4, 5]]]
    for other in (["Hi", "So?"], [], [{"prompt_ids": [1]}], 5):
        assert isinstance(one(tmp_path, {"messages": CHAT, "turns": other}).content, Messages)
    for bad in ({"prompt_ids": [], "token_ids": [1]}, {"prompt_ids": [1], "token_ids": ["x"]}):
        (dropped,) = read(tmp_path, {"messages": CHAT, "turns": [bad]})
        assert isinstance(dropped, DroppedRow) and dropped.reason == "bad_token_ids"


@pytest.mark.parametrize("field", ["image", "images", "audio", "audios", "video", "videos"])
def test_media_beside_the_text_of_a_row_or_a_message_is_no_text(tmp_path: Path, field: str) -> None:
    marked = [CHAT[0] | {field: ["a.png"]}, CHAT[1]]
    empty = [CHAT[0] | {field: None}, CHAT[1]]
    rows = read(
        tmp_path,
        {"messages": CHAT, field: ["a.png"]},
        {"messages": marked},
        {"text": "what is <image>?", field: "a.png"},
        {"messages": CHAT, field: []},
        {"messages": empty},
    )
    reasons = [row.reason if isinstance(row, DroppedRow) else None for row in rows]
    assert reasons == ["non_text_content"] * 3 + [None] * 2


def test_an_unknown_form_that_merge_knows_says_so(tmp_path: Path) -> None:
    forms = [{"instruction": "a", "response": "b"}, {"prompt": "a", "completion": "b"}, {"nothing": 1}]
    hints = []
    for row in read(tmp_path, *forms):
        assert isinstance(row, DroppedRow) and row.reason == "unknown_form"
        hints.append(row.detail.endswith("; 'eyas data merge' reads more forms"))
    assert hints == [True, True, False]
