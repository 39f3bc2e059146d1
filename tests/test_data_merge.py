"""`data merge`: every row accounted for, nothing changed that it cannot read, the same file whatever the order."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas import config as config_module
from eyas.config import DataConfig, MergeConfig, MergeSource, TargetConfig
from eyas.data import canonical as forms
from eyas.data import mixture, output, shuffle, turns
from eyas.data.canonical import Canonical, canonical
from eyas.data.files import RawRow, lines_of, open_rows
from eyas.data.leakage import Benchmarks, words_of
from eyas.data.merge import merge, report_path
from eyas.data.merge_receipt import MergeReceipt
from eyas.data.prepare import prepare
from eyas.data.sources import Drop, DroppedRow, Row
from eyas.data.sources import rows_of as source_rows
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, DataError, OutOfSpace
from eyas.log import Progress
from fixtures.data import small


def chat(question: str, answer: str = "Yes", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def line(row: Any) -> dict[str, Any]:
    """The canonical line of one row, given as JSON bytes or as a value."""
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    result = canonical(RawRow(Path("a.jsonl"), 1, data), "src", ("t",))
    # Python keeps what it parsed in order: compare as text.
    value: dict[str, Any] = json.loads(result.line)
    assert value["id"] == result.id.hex()
    return value


def write(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def run(out: Path, *sources: MergeSource | Path, stream: io.StringIO | None = None, **more: Any) -> MergeReceipt:
    made = tuple(MergeSource(path=source) if isinstance(source, Path) else source for source in sources)
    receipt = merge(MergeConfig(sources=made, out=out, **more), Progress(stream=stream or io.StringIO()))
    assert receipt.num_input == receipt.num_kept + sum(receipt.dropped.values())
    for report in receipt.sources:
        assert report.num_input == report.num_kept + sum(report.dropped.values())
    assert sum((Counter(report.dropped) for report in receipt.sources), Counter()) == Counter(receipt.dropped)
    assert leftovers(out.parent) == []
    return receipt


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def rows_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return [json.loads(text) for text in data.splitlines()]


# --- the canonical form


def test_the_canonical_line_in_literal_bytes() -> None:
    row = (
        b'{"id": "x", "score" : 1.0, "big":12345678901234567890, "system":"Be kind", "conversations": [ {"from":'
        b'"human","value":"H\\u00e9\\/\\n"}, {"from":"gpt", "value":"", "n": 1e5, "tool_calls":[{"id":"1", "function":'
        b'{"arguments":{"b" : 1.0,"a":"\\u00e9"}, "name":"f"}}]}], "tools":[ {"x" : 1e0, "a":"\\u00e9"} ],'
        b'"tags":["u"], "language":"fr", "meta":{ "k":[1, 2.50]}, "none":null}'
    )
    result = canonical(RawRow(Path("a"), 1, row), "src", ("t",))
    assert result.line.decode() == (
        '{"id":"4a46a0aeeb2b98d560f0a0f78d6385ad","messages":[{"role":"system","content":"Be kind"},{"role":"user",'
        '"content":"Hé/\\n"},{"role":"assistant","content":"","tool_calls":[{"id":"1","function":{"arguments":'
        '"{\\"b\\":1.0,\\"a\\":\\"\\\\u00e9\\"}","name":"f"}}],"n":1e5}],"tools":"[{\\"x\\":1e0,\\"a\\":\\"\\\\u00e9\\"}]",'
        '"source":"src","tags":["u","t"],"language":"fr","extra":"{\\"id\\":\\"x\\",\\"score\\":1.0,'
        '\\"big\\":12345678901234567890,\\"meta\\":{\\"k\\":[1,2.50]},\\"none\\":null}"}\n'
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)


def spelled(value: Any, ascii: bool, blanks: str) -> str:
    return json.dumps(value, ensure_ascii=ascii, separators=("," + blanks, ":" + blanks))


@given(JSON, NUMBERS, st.booleans(), st.sampled_from(["", " ", "\n\t"]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_tools_arguments_and_unknown_fields_keep_their_own_bytes(
    value: Any, number: str, ascii: bool, blanks: str, escaped_slash: bool
) -> None:
    compact = f'{{"v":{spelled(value, ascii, "")},"n":{number}}}'
    loose = f'{{ "v" :{blanks}{spelled(value, ascii, blanks)}, "n": {number}{blanks}}}'
    if escaped_slash:
        compact, loose = compact.replace("/", "\\/"), loose.replace("/", "\\/")
    call = f'{{"function":{{"name":"f","arguments":{loose}}}}}'
    row = (
        f'{{"unknown":{loose},"messages":[{{"role":"user","content":"?","mine":{loose}}},{{"role":"assistant",'
        f'"content":null,"tool_calls":[{call}]}}],"tools":[{loose}]}}'
    )
    found = canonical(RawRow(Path("a"), 1, row.encode()), "s")
    got = json.loads(found.line)
    assert got["extra"] == f'{{"unknown":{compact}}}'
    assert got["tools"] == f"[{compact}]"
    assert got["messages"][1]["tool_calls"][0]["function"]["arguments"] == compact
    assert f'{{"role":"user","content":"?","mine":{compact}}}'.encode() in found.line
    # A canonical line is its own canonical line, and however the row was spelled, its id is the same.
    assert canonical(RawRow(Path("a"), 1, found.line), "other").line == found.line
    other = json.dumps(json.loads(row, parse_float=lambda text: text, parse_int=lambda text: text))
    assert other  # the row is JSON
    tight = row.replace(loose, compact)
    assert canonical(RawRow(Path("a"), 1, tight.encode()), "s").id == found.id


TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "gpt", "tool", "system"])},
    optional={
        "tool_calls": st.sampled_from([None, [], "f()", [{"f": 1}], [{"function": {"arguments": {"a": "é/"}}}],
                                       [{"arguments": ' {"b": [1.0]} '}], [{"function": {"arguments": "x"}}, {}]]),
        "thinking": st.sampled_from(["", "t/é", None]),
        "reasoning_content": st.sampled_from(["", "r\n", None]),
        "name": st.sampled_from(["", "n", None]),
        "tool_call_id": st.sampled_from(["", "1"]),
        "content": st.sampled_from(["", "é/\n\"", None, "x"]),
    },
)  # fmt: skip


@given(st.lists(TURN, min_size=1, max_size=3), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_the_short_way_gives_what_the_long_way_gives(turns_: list[dict[str, Any]], ascii: bool, rng: Any) -> None:
    shuffled = [dict(rng.sample(sorted(turn.items()), len(turn))) for turn in turns_]
    raw = json.dumps(shuffled, ensure_ascii=ascii).replace("é/", "é\\/").encode()
    short = turns.short_conversation(raw, True)
    try:
        long = turns._long_way(turns._turns(raw, "messages"), True)
    except Drop:
        assert short is None
    else:
        assert short in (None, long)
    plain = all(turn.get("content") and turn.keys() <= {"role", "content", "tool_call_id"} for turn in turns_)
    assert short is not None or not plain or any(turn.get("tool_call_id") == "" for turn in turns_)


NAMED = st.fixed_dictionaries(
    {"from": st.sampled_from(["human", "gpt", "me"]), "value": st.sampled_from(["", "é/", "x"])}
)
BESIDE = {
    "id": ["x", 5, None], "score": [1.5, None], "tools": [None, [], [{"a": 1.0}], '[{"a": 1}]', "no", ""],
    "system": [None, "", "Be kind"], "source": ["s", 1], "tags": ["u", [1]], "images": [[], ["i"]],
    "language": ["fr", None], "turns": [[]], "conversation": [None, []], "extra": ["{}"], "retokenized": [True],
    "text": ["t"], "input_ids": [[1]], "loss_mask": [[1]],
}  # fmt: skip


@given(
    st.sampled_from(["messages", "conversations"]),
    st.lists(TURN, max_size=3) | st.lists(NAMED, max_size=3) | st.none(),
    st.lists(st.sampled_from([(key, value) for key, values in BESIDE.items() for value in values]), max_size=3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=400, deadline=None)
def test_the_short_way_of_a_row_gives_what_the_long_way_gives(
    key: str, turns_: Any, beside: list[tuple[str, Any]], ascii: bool, rng: Any
) -> None:
    fields = {key: turns_, **dict(beside)}

    def row_of(fields: dict[str, Any]) -> bytes:
        names = rng.sample(sorted(fields), len(fields))
        return json.dumps({name: fields[name] for name in names}, ensure_ascii=ascii).replace("é/", "é\\/").encode()

    rows = [row_of(fields)]
    if isinstance(found := outcome(rows[0]), Canonical):
        rows += [found.line, row_of({**fields, "id": found.id.hex()})]
    require_one_outcome(rows)


def outcome(row: bytes) -> Canonical | tuple[str, str]:
    try:
        return canonical(RawRow(Path("a"), 1, row), "src", ("t",), with_texts=True)
    except Drop as drop:
        return drop.reason, drop.detail


def require_one_outcome(rows: list[bytes]) -> None:
    found = [outcome(row) for row in rows]
    with mock.patch.object(forms, "_plain", lambda names: None):
        assert [outcome(row) for row in rows] == found


def test_each_field_beside_messages_means_the_same_on_both_ways() -> None:
    require_one_outcome([json.dumps(chat("Why?", **{k: v})).encode() for k, values in BESIDE.items() for v in values])


@pytest.mark.parametrize("beside", [{}, {"id": "x", "score": None}, {"tools": [{"a": 1}]}])
def test_rows_as_nearly_all_are_go_the_short_way(beside: dict[str, Any]) -> None:
    with mock.patch.object(forms, "_long_way", side_effect=AssertionError):
        line(chat("Why?", **beside))
        line({"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}], **beside})


def test_arguments_and_tools_that_are_text_already_stay_as_they_are() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": ' {"a": 1.0} '}}
    found = line(
        {"messages": [chat("q")["messages"][0], {"role": "assistant", "tool_calls": [call]}], "tools": ' [ {"n": 1} ]'}
    )
    assert found["messages"][1] == {"role": "assistant", "tool_calls": [call]}
    assert found["tools"] == ' [ {"n": 1} ]'
    assert line(chat("q", tools='[{"n":1}]'))["id"] == line(chat("q", tools=[{"n": 1}]))["id"] != line(chat("q"))["id"]
    assert line(chat("q"))["id"] == line(chat("q", tools=[]))["id"] == line(chat("q", tools=None))["id"]
    assert line(chat("q", tools=[{"a": 1, "b": 2}]))["id"] != line(chat("q", tools=[{"b": 2, "a": 1}]))["id"]


def test_old_function_calls_and_flat_tool_calls_have_text_arguments_too() -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": {"a": 1}}},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}, {"name": "g", "arguments": None}]},
        {"role": "assistant", "content": "x", "tool_calls": "f()"},
    ]
    messages = line({"messages": turns})["messages"]
    assert messages[1]["function_call"] == {"name": "f", "arguments": '{"a":1}'}
    assert messages[2]["tool_calls"] == [{"name": "f", "arguments": "[1]"}, {"name": "g", "arguments": None}]
    assert messages[3] == turns[3]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "P", "completion": "C"}, ["user P", "assistant C"]),
        ({"prompt": "P", "response": "C"}, ["user P", "assistant C"]),
        ({"prompt": "P", "completion": ""}, ["user P"]),
        ({"prompt": "P"}, ["user P"]),
        ({"instruction": "I", "input": "X", "output": "O"}, ["user I\n\nX", "assistant O"]),
        ({"instruction": "I", "input": "", "output": "O", "text": "formatted"}, ["user I", "assistant O"]),
        ({"prompt": "I", "output": "O", "history": [["a", "b"]]}, ["user a", "assistant b", "user I", "assistant O"]),
        ({"question": "Q", "answer": "A", "system": "S"}, ["system S", "user Q", "assistant A"]),
        (
            {"prompt": [{"role": "user", "content": "P"}], "completion": [{"role": "assistant", "content": "C"}]},
            ["user P", "assistant C"],
        ),
        ({"conversation": chat("P", "C")["messages"], "conversation_id": 7}, ["user P", "assistant C"]),
        ({"messages": chat("P", "C")["messages"], "prompt": "P"}, ["user P", "assistant C"]),
        ({"messages": [{"role": "system", "content": "S"}], "system": "T"}, ["system S"]),
        ({"conversations": [{"from": " Human ", "value": "x"}, {"from": "observation", "value": "7"}]},
         ["user x", "tool 7"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         ["user ab"]),
    ],
)  # fmt: skip
def test_every_form_becomes_messages(row: dict[str, Any], messages: list[str]) -> None:
    assert [f"{m['role']} {m['content']}" for m in line(row)["messages"]] == messages


def test_what_has_no_place_of_its_own_is_kept_aside() -> None:
    found = line(
        {**chat("q"), "prompt": "q", "system": 5, "tags": {"a": 1}, "source": ["x"], "language": 3, "uuid": "u"}
    )
    assert json.loads(found["extra"]) == {
        "prompt": "q", "system": 5, "tags": {"a": 1}, "source": ["x"], "language": 3, "uuid": "u",
    }  # fmt: skip
    assert (found["source"], found["tags"]) == ("src", ["t"])
    found = line({**chat("q"), "source": "mine", "tags": "one", "lang": "de", "retokenized": True})
    assert (found["source"], found["tags"], found["language"], found["retokenized"]) == (
        "mine",
        ["one", "t"],
        "de",
        True,
    )
    assert "extra" not in found


def test_text_and_token_ids_keep_their_form() -> None:
    found = line({"text": "Once\u2028", "score": 1})
    assert (list(found), found["text"]) == (["id", "text", "source", "tags", "extra"], "Once\u2028")
    found = line({"token_ids": [1, 2], "loss_mask": [False, True], **chat("q")})
    assert list(found) == ["id", "messages", "input_ids", "loss_mask", "source", "tags"]
    assert (found["input_ids"], found["loss_mask"]) == ([1, 2], [0, 1])
    assert found["id"] == line({"input_ids": [1, 2], "loss_mask": [0, 1]})["id"]
    assert found["id"] != line({"input_ids": [1, 2], "loss_mask": [1, 1]})["id"]
    unread = {"messages": [{"role": "alien", "content": "x"}], "system": "s"}
    found = line({"input_ids": [1, 2], "loss_mask": [0, 1], **unread})
    assert json.loads(found["extra"]) == unread


def test_one_content_has_one_id_however_it_is_spelled() -> None:
    call = {"function": {"name": "f", "arguments": {"a": "é"}}}
    turns = [{"role": "user", "content": "é/"}, {"role": "assistant", "content": "", "tool_calls": [call], "name": "n"}]
    base = line({"messages": turns})["id"]
    other = [
        {"content": "é/", "role": "user", "weight": None},
        {"name": "n", "tool_calls": [call], "role": "assistant"},
    ]
    named = [{"from": "human", "value": "é/"}, {"from": "gpt", "value": None, "name": "n", "tool_calls": [call]}]
    for row in ({"messages": other}, {"conversations": named}, {"id": 1, "messages": turns, "source": "x"}):
        for ascii in (False, True):
            spelling = json.dumps(row, ensure_ascii=ascii, indent=1).replace("é/", "é\\/").encode()
            assert line(spelling)["id"] == base
    for change in ({"content": "x"}, {"name": "m"}, {"tool_calls": []}):
        assert line({"messages": [turns[0], {**turns[1], **change}]})["id"] != base
    assert line({"messages": turns[:1]})["id"] != base
    # The short way for plain turns and the long way agree.
    assert line(chat("é"))["id"] == line({"messages": [{**m, "x": None} for m in chat("é")["messages"]]})["id"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"[1]", "not_an_object"),
        (b"NaN", "not_an_object"),
        ({"z": 1}, "unknown_form"),
        ({"messages": None, "text": None}, "unknown_form"),
        ({"messages": "x"}, "wrong_type"),
        ({"messages": [1]}, "wrong_type"),
        ({"messages": [{"content": "x"}]}, "wrong_type"),
        ({"messages": [{"role": "user"}]}, "wrong_type"),
        ({"messages": [{"role": "user", "content": 5}]}, "wrong_type"),
        ({"text": 5}, "wrong_type"),
        ({"prompt": 5}, "wrong_type"),
        ({**chat("q"), "tools": "{"}, "wrong_type"),
        ({**chat("q"), "tools": {"a": 1}}, "wrong_type"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "wrong_type"),
        ({"messages": []}, "empty_conversation"),
        ({"prompt": []}, "empty_conversation"),
        ({"input_ids": [], "loss_mask": []}, "empty_conversation"),
        ({"text": ""}, "empty_text"),
        ({"prompt": " "}, "empty_text"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "unknown_role"),
        (b'{"text":"\\ud83d"}', "invalid_text"),
        (b'{"text":"x","y":["\\udc00"]}', "invalid_text"),
        ({"input_ids": [1]}, "no_loss_mask"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "bad_token_ids"),
        ({"input_ids": [-1], "loss_mask": [1]}, "bad_token_ids"),
        ({"input_ids": [1], "loss_mask": [2]}, "bad_loss_mask"),
        ({"input_ids": [1], "loss_mask": "x"}, "bad_loss_mask"),
        ({"input_ids": [1], "loss_mask": [1, 0]}, "bad_loss_mask"),
    ],
)
def test_a_row_of_no_use_has_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(Drop) as caught:
        line(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize("data", [b'{"a":1', b'{"a":01}', b"{} x", b'{"a":NaNa}', b"{'a':1}", b'{"text":"\n"}'])
def test_what_is_not_json_stops_everything(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^a\.jsonl:1: broken JSON: "):
        line(data)


def test_numbers_that_json_does_not_have_become_null_and_are_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [b'{"text":"NaN","a":NaN,"b":[-Infinity,"\\"Infinity"],"c":Infinity}'])
    receipt = run(tmp_path / "out.jsonl", source)
    assert receipt.num_mended == 1
    assert "1 rows held NaN or Infinity, which are not JSON: null now" in receipt.lines()
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert (row["text"], row["extra"]) == ("NaN", '{"a":null,"b":[null,"\\"Infinity"],"c":null}')


# --- the whole way


def test_all_formats_and_compressions_in_one_file(tmp_path: Path) -> None:
    rows = [chat(f"question {i}") for i in range(60)]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", rows[:10])
    (tmp_path / "in" / "b.json").write_text(json.dumps(rows[10:20], indent=1))
    (tmp_path / "in" / "c.jsonl.gz").write_bytes(gzip.compress(write(tmp_path / "x", rows[20:30]).read_bytes()))
    (tmp_path / "in" / "d.json.zst").write_bytes(zstandard.compress(json.dumps(rows[30:40]).encode()))
    pq.write_table(pa.Table.from_pylist(rows[40:50]), tmp_path / "in" / "e.parquet")
    (tmp_path / "in" / "deep").mkdir()
    write(tmp_path / "in" / "deep" / "f.jsonl", rows[50:])
    receipt = run(tmp_path / "out.jsonl", MergeSource(path=tmp_path / "in" / "**" / "*.*", name="mix", tags=("x",)))
    found = rows_of(tmp_path / "out.jsonl")
    assert sorted(row["messages"][0]["content"] for row in found) == sorted(f"question {i}" for i in range(60))
    assert {(row["source"], tuple(row["tags"])) for row in found} == {("mix", ("x",))}
    assert [row["id"] for row in found] != sorted(row["id"] for row in found)
    assert (receipt.num_kept, receipt.sources[0].num_files, receipt.dropped) == (60, 6, {})
    assert receipt.forms == {"messages": 60, "text": 0, "tokens": 0}


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_output_is_compressed_by_its_suffix_private_and_the_same_each_time(tmp_path: Path, suffix: str) -> None:
    source = write(tmp_path / "a.jsonl", [chat(f"q{i}" * 50) for i in range(500)])
    outs = [tmp_path / name / f"out.jsonl{suffix}" for name in ("one", "two")]
    digests = {run(out, source).digest for out in outs}
    assert len(digests) == 1
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert len(rows_of(outs[0])) == 500
    assert outs[0].stat().st_mode & 0o777 == 0o600
    assert run(outs[0].with_name("again.jsonl"), outs[0]).num_kept == 500


@st.composite
def mixes(draw: st.DrawFn) -> list[tuple[list[int], float, int | None]]:
    source = st.tuples(
        st.lists(st.integers(0, 40), min_size=1, max_size=40),
        st.sampled_from([1.0, 0.7, 0.3]),
        st.sampled_from([None, 1, 5, 20]),
    )
    return draw(st.lists(source, min_size=1, max_size=4))


@given(mixes(), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_input_is_kept_and_dropped_and_the_order_of_sources_does_not_matter(
    tmp_path: Path, mix: list[tuple[list[int], float, int | None]], seed: int, rng: random.Random
) -> None:
    def made(order: list[int]) -> list[dict[str, Any]]:
        sources = tuple(
            MergeSource(
                path=write(tmp_path / f"{i}.jsonl", [chat(f"q{n}") if n else {"z": 1} for n in mix[i][0]]),
                weight=mix[i][1],
                cap=mix[i][2],
            )
            for i in order
        )
        try:
            receipt = run(tmp_path / "out.jsonl", *sources, seed=seed)
        except DataError as error:
            assert "no conversation is left" in str(error)
            return []
        for report, i in zip(receipt.sources, order, strict=True):
            assert report.num_input == len(mix[i][0])
            assert mix[i][2] is None or report.num_kept <= mix[i][2]
        found = rows_of(tmp_path / "out.jsonl")
        assert len({row["id"] for row in found}) == len(found) == receipt.num_kept
        return [{key: value for key, value in row.items() if key != "source"} for row in found]

    order = list(range(len(mix)))
    first = made(order)
    rng.shuffle(order)
    assert made(order) == first


def test_the_first_source_has_a_repetition_and_the_receipt_names_both_rows(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [chat("one"), chat("two"), chat("one", id="again")])
    b = write(tmp_path / "b.jsonl", [{"prompt": "two", "completion": "Yes"}, chat("three")])
    receipt = run(tmp_path / "out.jsonl", a, b)
    assert {row["messages"][0]["content"]: row["source"] for row in rows_of(tmp_path / "out.jsonl")} == {
        "one": "a.jsonl", "two": "a.jsonl", "three": "b.jsonl",
    }  # fmt: skip
    assert receipt.dropped == {"duplicate": 2}
    assert [report.dropped for report in receipt.sources] == [{"duplicate": 1}, {"duplicate": 1}]
    assert {(e.where, e.detail) for e in receipt.examples["duplicate"]} == {
        (f"{a}:3", f"same content as {a}:1"),
        (f"{b}:1", f"same content as {a}:2"),
    }


def test_a_larger_weight_or_cap_holds_a_smaller_one_and_growth_moves_nobody(tmp_path: Path) -> None:
    rows = [chat(f"q{i}") for i in range(2000)]
    grown = write(tmp_path / "grown.jsonl", [*rows, *(chat(f"new {i}") for i in range(500))])
    source = write(tmp_path / "a.jsonl", rows + rows[:100])

    def ids(path: Path, **more: Any) -> list[str]:
        run(tmp_path / "out.jsonl", MergeSource(path=path, **more), seed=5)
        return [row["id"] for row in rows_of(tmp_path / "out.jsonl")]

    previous: set[str] = set()
    for weight in (0.1, 0.2, 0.5, 0.9, 1.0):
        found = set(ids(source, weight=weight))
        assert found >= previous
        assert abs(len(found) - 2000 * weight) < 130
        previous = found
    few = set(ids(source, weight=0.2))
    assert few <= set(ids(grown, weight=0.2))
    previous = set()
    for cap in (1, 10, 300, 1999, 2000, 5000):
        found_in_order = ids(source, cap=cap)
        assert len(found_in_order) == min(cap, 2000)
        assert set(found_in_order) >= previous
        previous = set(found_in_order)
    # Of 500 newcomers to 2,000, a cap of 300 lets in about 60, each in the place of one that leaves.
    assert 200 < len(set(ids(source, cap=300)) & set(ids(grown, cap=300))) < 290


def test_another_seed_is_another_order_of_the_same_conversations(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat(f"q{i}") for i in range(200)])
    orders = []
    for seed in (0, 1, -1, 2**64 - 1):
        run(tmp_path / "out.jsonl", MergeSource(path=source, cap=100), seed=seed)
        orders.append([row["id"] for row in rows_of(tmp_path / "out.jsonl")])
    assert orders[0] != orders[1]
    assert orders[2] == orders[3]
    assert len({frozenset(order) for order in orders}) == 1
    assert orders[0] == sorted(orders[0], key=lambda id: shuffle_place(bytes.fromhex(id), 0))


def shuffle_place(id: bytes, seed: int) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest((seed % 2**64).to_bytes(8, "little") + id)


def test_buckets_that_are_too_large_are_split_and_repetitions_do_not_fill_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", [chat(f"q{i}") for i in range(3000)] + [chat("same", "x" * 50)] * 3000)
    run(tmp_path / "whole.jsonl", source)
    monkeypatch.setattr(shuffle, "MAX_BUCKET_BYTES", 1000)
    receipt = run(tmp_path / "split.jsonl", source)
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "split.jsonl").read_bytes()
    assert (receipt.num_kept, receipt.dropped) == (3001, {"duplicate": 2999})


def test_prompts_and_more_than_text_are_kept_and_told(tmp_path: Path) -> None:
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "?"}],
    }
    source = write(
        tmp_path / "a.jsonl", [{"prompt": "P"}, {"messages": [image, {"role": "assistant", "content": "A"}]}]
    )
    receipt = run(tmp_path / "out.jsonl", source)
    assert (receipt.num_kept, receipt.num_unanswered, receipt.num_non_text) == (2, 1, 1)
    assert receipt.next_command == "eyas generate"
    assert image in [row["messages"][0] for row in rows_of(tmp_path / "out.jsonl")]
    dropped = [
        row
        for row in source_rows(lines_of(open_rows([tmp_path / "out.jsonl"], field="f")))
        if isinstance(row, DroppedRow)
    ]
    assert {str(row.reason) for row in dropped} == {"no_assistant_turn", "non_text_content"}


def test_a_merged_file_gives_the_samples_of_its_sources(tmp_path: Path) -> None:
    target = small.target(tmp_path / "target", "chatml")
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": x}} for x in ({"a": 1.0}, '{"b":"é"}')
    ]
    rows = [
        chat("Hi é\n", tools=[{"type": "function", "function": {"name": "f", "n": 1.50}}], system="Be kind"),
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls},
                      {"role": "tool", "content": "7"},
                      {"role": "assistant", "content": "x", "reasoning_content": "r"}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes"}]},
        {"input_ids": [20, 21, 22], "loss_mask": [0, 1, 1]},
        {"text": "Once upon a time"},
    ]  # fmt: skip
    source = write(tmp_path / "a.jsonl", rows)
    run(tmp_path / "out.jsonl", source)

    def samples(path: Path) -> dict[str, Any]:
        data = DataConfig(sources=(path,), samples=tmp_path / "samples.parquet")
        prepare(data, TargetConfig(path=target), Progress(stream=io.StringIO()))
        found = list(SampleTable.open(tmp_path / "samples.parquet").samples())
        return {sample.sample_id: (sample.token_ids.tolist(), sample.loss_spans) for sample in found}

    before, after = samples(source), samples(tmp_path / "out.jsonl")
    assert before == after
    assert len(after) == 5
    ids = {
        row.conversation_id
        for row in source_rows(lines_of(open_rows([tmp_path / "out.jsonl"], field="f")))
        if isinstance(row, Row)
    }
    assert ids == {row["id"] for row in rows_of(tmp_path / "out.jsonl")}


# --- leakage

HAWAII = (
    "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and sights."
)


@pytest.mark.parametrize(
    "prompt",
    [
        {"turns": [HAWAII, "Rewrite it."]},
        {"task_id": "x", "prompt": HAWAII},
        {"question": HAWAII, "answer": "4"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": HAWAII}]},
            ]
        },
        {"conversations": [{"from": "human", "value": HAWAII}]},
        {"text": HAWAII},
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_a_shared_passage_is_found_whatever_the_shape_and_the_turn(tmp_path: Path, prompt: Any, role: str) -> None:
    benchmark = write(tmp_path / "bench.jsonl", [{"text": "nothing"}, prompt])
    said = "Please: COMPOSE an engaging – travel_blog post,\nabout a recent trip to HAWAII; highlighting (more)"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": role, "content": said}]
    source = write(tmp_path / "a.jsonl", [chat("clean"), {"messages": turns}])
    receipt = run(tmp_path / "out.jsonl", source, benchmarks=(benchmark,))
    assert receipt.dropped == {"leakage": 1}
    (report,) = receipt.benchmarks
    assert (report.num_leaked_prompts, report.num_conversations) == (1, 1)
    (example,) = report.examples
    assert (example.where, example.prompt) == (f"{source}:2", f"{benchmark}:2")
    assert example.passage.startswith("COMPOSE an engaging – travel_blog post, about")
    kept = run(tmp_path / "out.jsonl", source, benchmarks=(benchmark,), leakage="report")
    assert (kept.num_kept, kept.dropped, kept.benchmarks[0].num_conversations) == (2, {}, 1)


def leaks(prompts: list[str], texts: list[str], ngram: int = 13) -> bool:
    directory = Path(os.environ["PYTEST_DIRECTORY"])
    found = Benchmarks([write(directory / "b.jsonl", [{"text": prompt} for prompt in prompts])], ngram)
    return bool(found.find([texts], ["w"])[0])


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DIRECTORY", str(tmp_path))


def words(low: int, high: int) -> str:
    return " ".join(f"w{i}" for i in range(low, high))


def test_near_misses_of_a_passage() -> None:
    prompt = words(0, 30)
    assert leaks([prompt], [words(5, 18)])
    assert not leaks([prompt], [words(5, 17)])
    assert not leaks([prompt], [words(5, 11) + " and " + words(11, 18)])
    assert not leaks([prompt], [words(5, 11), words(11, 18)]), "two turns are not one passage"
    assert not leaks([words(0, 7), words(7, 20)[:20]], [words(0, 20)]), "two prompts are not one either"
    assert not leaks([prompt], [words(5, 17) + " w170"])
    assert not leaks([prompt], [words(5, 17) + " w99"]), "first letter and length are those of w17"
    assert leaks([prompt], [words(5, 17)], ngram=12)
    assert not leaks([prompt], [""])


def test_short_prompts_match_as_a_whole() -> None:
    assert leaks([words(0, 9)], ["so " + words(0, 9) + " it is"])
    assert not leaks([words(0, 9)], [words(0, 8)])
    assert leaks(["Go on!"], ["x", "go ON"])
    assert not leaks(["Go on!"], ["please go on"])
    assert not leaks(["Go on!"], ["go", "on"])
    assert not leaks(["Go on!"], ["go on, please"])
    assert not leaks(["..."], ["...", ""])
    assert leaks([words(0, 4)], ["and " + words(0, 4)], ngram=3)


def test_scripts_without_blanks_count_by_character() -> None:
    prompt = "请写一篇关于最近去夏威夷旅行的博客文章"
    assert leaks([prompt], ["好的," + prompt[2:15] + "!"])
    assert not leaks([prompt], [prompt[2:14]])
    assert leaks(["ＡＢＣ ÄÖ " + words(0, 11)], ["abc äö " + words(0, 11)])
    assert [len(words_of(text)) for text in ("a-b_c", "naïve Ωμέγα", "日本語 text", "ไทย", "", "हिन्दी भाषा")] == [
        3, 2, 4, 3, 0, 2,
    ]  # fmt: skip


@given(st.lists(st.text(alphabet="ab 你. ", max_size=30), min_size=1, max_size=6), st.integers(1, 60))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_passages_are_found_as_a_plain_search_finds_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, texts: list[str], block: int
) -> None:
    from eyas.data import leakage

    monkeypatch.setattr(leakage, "BLOCK_CHARS", block)
    prompts = ["a b 你 a", "b b b a a b 你 你 a b", "ab a"]
    n = 5

    def split(text: str) -> list[str]:
        return text.replace("你", " 你 ").replace(".", " ").split()

    def expected(text: str) -> bool:
        said = split(text)
        for prompt in map(split, prompts):
            if len(prompt) < n:
                if said == prompt:
                    return True
            else:
                grams = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
                if any(tuple(said[i : i + n]) in grams for i in range(len(said) - n + 1)):
                    return True
        return False

    benchmarks = Benchmarks([write(tmp_path / "b.jsonl", [{"text": prompt} for prompt in prompts])], n)
    found = benchmarks.find([[text] for text in texts], list(range(len(texts))))
    assert [bool(passage) for passage in found] == [expected(text) for text in texts]


def test_token_ids_cannot_be_compared_and_that_is_said(tmp_path: Path) -> None:
    benchmark = write(tmp_path / "b.jsonl", [{"text": HAWAII}])
    tokens = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    source = write(
        tmp_path / "a.jsonl", [tokens, {"input_ids": [1], "loss_mask": [1], **chat(HAWAII)}, {"text": HAWAII}]
    )
    receipt = run(tmp_path / "out.jsonl", source, benchmarks=(benchmark,))
    assert (receipt.num_kept, receipt.dropped, receipt.num_unchecked) == (1, {"leakage": 2}, 1)


def test_a_benchmark_without_prompts_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q")])
    for row, words in [({"z": 1}, "no prompt in it"), ({"turns": [1]}, "'turns' holds no text"), (b"{", "broken JSON")]:
        benchmark = write(tmp_path / "b.jsonl", [{"text": "x"}, row])
        with pytest.raises(DataError, match=f"b.jsonl:2: {words}"):
            run(tmp_path / "out.jsonl", source, benchmarks=(benchmark,))
        assert leftovers(tmp_path) == []


# --- what an operator meets


def test_made_of_the_same_is_nothing_to_do_and_anything_else_is_done_again(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat(f"q{i}") for i in range(9)])
    out = tmp_path / "out.jsonl"
    first = run(out, source)
    before = out.stat()
    again = run(out, source)
    assert again.unchanged
    assert "nothing to do" in again.lines()[0]
    assert (again.digest, again.num_kept, again.sources) == (first.digest, 9, first.sources)
    assert out.stat().st_mtime_ns == before.st_mtime_ns
    assert not run(out, source, seed=1).unchanged
    assert not run(out, MergeSource(path=source, tags=("x",)), seed=1).unchanged
    out.write_bytes(out.read_bytes().replace(b"q1", b"qq"))
    assert not run(out, MergeSource(path=source, tags=("x",)), seed=1).unchanged
    report_path(out).write_text("{")
    assert not run(out, source).unchanged
    os.utime(source, (1, 1))
    assert not run(out, source).unchanged
    assert run(out, source).unchanged


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sources": ()}, "merge.sources is empty"),
        ({"out": None}, "merge.out is not set"),
        ({"out": Path("x.parquet")}, "is to be JSONL"),
        ({"out": Path("/")}, "is a directory"),
        ({"sources": (MergeSource(path=Path("-")),) * 2}, "can be read only once"),
        ({"benchmarks": (Path("-"),)}, "standard input is no benchmark"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    base: dict[str, Any] = {"sources": (MergeSource(path=tmp_path / "a"),), "out": tmp_path / "o.jsonl"}
    with pytest.raises(ConfigError, match=words):
        merge(MergeConfig(**{**base, **more}), Progress(stream=io.StringIO()))


def test_the_output_is_never_one_of_its_sources(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q")])
    with pytest.raises(ConfigError, match=r"is one of merge\.sources"):
        run(source, tmp_path / "*.jsonl")
    assert rows_of(source) == [chat("q")]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"prompt":"x"}\n{"prompt":', r":2: broken JSON: .*cut off"),
        (gzip.compress(b'{"prompt":"x"}\n' * 99, mtime=0)[:-5], "cut off"),
        (b'[{"prompt":"x"},', r":2: the JSON array has no end"),
        (b'{"prompt":"x"}\n{"prompt":"\xff"}', r":2: invalid UTF-8"),
        (b'{"z":1}\n', "no conversation is left of 1 rows: unknown_form 1"),
    ],
)
def test_a_source_that_is_damaged_leaves_the_old_output_and_nothing_else(
    tmp_path: Path, data: bytes, words: str
) -> None:
    out = tmp_path / "out.jsonl"
    run(out, write(tmp_path / "good.jsonl", [chat("q")]))
    before = out.read_bytes(), report_path(out).read_bytes()
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        run(out, tmp_path / "bad")
    assert "\n" not in str(caught.value)
    assert (out.read_bytes(), report_path(out).read_bytes()) == before
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("where", ["buckets", "output"])
def test_a_full_disk_stops_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, suffix: str) -> None:
    out = tmp_path / f"out.jsonl{suffix}"
    source = write(tmp_path / "a.jsonl", [chat(f"q{i}") for i in range(100)])

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "buckets":
        monkeypatch.setattr(shuffle._Buckets, "add", full)
    else:
        monkeypatch.setattr(output.OutputFile, "_put", full)
    with pytest.raises(OutOfSpace, match="disk full") as caught:
        run(out, source)
    assert caught.value.exit_code == 3
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [source]
    assert run(out, source).num_kept == 100


def test_a_second_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q")])
    out = tmp_path / "out.jsonl"
    with output.scratch_beside(out), pytest.raises(DataError, match="another 'eyas data merge' is writing it"):
        merge(MergeConfig(sources=(MergeSource(path=source),), out=out), Progress(stream=io.StringIO()))
    assert leftovers(tmp_path) == []
    assert run(out, source).num_kept == 1


def test_what_a_kill_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q")])
    left = tmp_path / ".out.jsonl.merge"
    (left / "buckets").mkdir(parents=True)
    (left / "buckets" / "b00").write_bytes(b"half")
    (left / "out").write_bytes(b"half")
    assert run(tmp_path / "out.jsonl", source).num_kept == 1


def eyas(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from eyas.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_in_the_middle_the_old_output_stays(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out.jsonl"
    run(out, write(tmp_path / "good.jsonl", [chat("q")]))
    before = out.read_bytes(), report_path(out).read_bytes()
    process = eyas("data", "merge", str(toml(tmp_path, '[{path = "-"}]')), stdin=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        for i in range(5000):
            process.stdin.write(json.dumps(chat(f"{i} " * 100)).encode() + b"\n")
        process.stdin.flush()
    scratch = tmp_path / ".out.jsonl.merge"
    deadline = time.monotonic() + 60
    while not list(scratch.glob("buckets/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 3), errors
    if number != signal.SIGKILL:
        assert errors.splitlines()[-1] == b"eyas: stopped; nothing was written, the same command starts anew"
    assert (out.read_bytes(), report_path(out).read_bytes()) == before
    assert leftovers(tmp_path) == ([scratch.name] if number == signal.SIGKILL else [])
    assert run(out, tmp_path / "good.jsonl").unchanged


def toml(directory: Path, sources: str) -> Path:
    path = directory / "run.toml"
    path.write_text(f'[merge]\nout = "out.jsonl"\nsources = {sources}\n')
    return path


def test_the_command_reads_standard_input_and_says_what_comes_next(tmp_path: Path) -> None:
    path = toml(tmp_path, '[{path = "-", name = "piped"}, {path = "sub/*.jsonl"}]')
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "a.jsonl", [chat("file")])
    process = eyas("data", "merge", str(path), stdin=subprocess.PIPE, cwd="/")
    stdout, stderr = process.communicate(gzip.compress(json.dumps([chat("one"), {"z": 1}]).encode()), timeout=60)
    assert process.returncode == 0, stderr
    lines = stdout.decode().splitlines()
    assert lines[0] == f"{tmp_path}/out.jsonl: 3 rows = 2 kept + 1 dropped"
    assert lines[1].startswith("  piped: 2 rows = 1 kept + 1 dropped (unknown_form 1)")
    assert "  -:2: keys z; known: messages" in stdout.decode()
    assert lines[-1] == f"next: eyas prepare {path}"
    assert f"merge: {path}, pid" in stderr.decode().splitlines()[0]
    assert {row["source"] for row in rows_of(tmp_path / "out.jsonl")} == {"piped", "a.jsonl"}


def test_errors_of_the_command_are_one_line_and_its_exit_code(tmp_path: Path) -> None:
    for sources, code, words in [
        ('[{path = "*.nothing"}]', 2, "merge.sources[0].path: the pattern"),
        ("[]", 2, "merge.sources is empty"),
    ]:
        process = eyas("data", "merge", str(toml(tmp_path, sources)))
        _, stderr = process.communicate(timeout=60)
        (complaint,) = [text for text in stderr.decode().splitlines() if text.startswith("eyas: ")]
        assert (process.returncode, words in complaint) == (code, True), complaint


def test_paths_of_sources_are_relative_to_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[merge]\nbenchmarks = ["b"]\n[[merge.sources]]\npath = "x/*.gz"\n[[merge.sources]]\npath = "-"\n')
    tree = config_module.load(path)
    assert [source.path for source in tree.merge.sources] == [tmp_path / "x" / "*.gz", Path("-")]
    assert tree.merge.benchmarks == (tmp_path / "b",)
    monkeypatch.chdir("/")
    tree = config_module.load(path, ['merge.sources=[{path="y", weight=0.5}]'])
    assert [(source.path, source.weight) for source in tree.merge.sources] == [(Path("/y"), 0.5)]
    with pytest.raises(ConfigError, match=r"merge\.sources\.0\.path"):
        config_module.load(path, ["merge.sources=[{path=1}]"])


def test_progress_comes_at_once_and_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", [chat(f"q{i}") for i in range(1000)])
    monkeypatch.setattr(mixture, "BATCH_ROWS", 100)
    stream = io.StringIO()
    progress = Progress(stream=stream, interval_s=0.0)
    merge(MergeConfig(sources=(MergeSource(path=source),), out=tmp_path / "o.jsonl"), progress)
    shown = stream.getvalue().splitlines()
    assert any(" merge: 100 rows, 0 dropped, " in text and " read, " in text for text in shown)
    assert any(" merge: writing, " in text and " of 1,000 conversations" in text for text in shown)


def test_the_receipt_survives_its_record(tmp_path: Path) -> None:
    benchmark = write(tmp_path / "b.jsonl", [{"text": HAWAII}])
    source = write(tmp_path / "a.jsonl", [chat("q"), chat(HAWAII), {"z": 1}])
    receipt = run(tmp_path / "out.jsonl", source, benchmarks=(benchmark,))
    assert MergeReceipt.from_json(json.loads(json.dumps(receipt.to_json()))) == receipt
    text = "\n".join(receipt.lines())
    assert f"benchmark {benchmark}: 1 of 1 prompts found in 1 rows" in text
    assert f"{source}:2 has {benchmark}:1: Compose an engaging" in text


def test_files_with_other_types_in_one_field_go_together(tmp_path: Path) -> None:
    values: Iterator[Any] = itertools.chain([1, 1.0, "x", None, [1], {"a": {"b": 1}}, True])
    sources = [
        write(tmp_path / f"{i}.jsonl", [chat(f"q{i}", meta=value, tools=[{"p": value}])])
        for i, value in enumerate(values)
    ]
    run(tmp_path / "out.jsonl", *sources)
    import pyarrow.json

    table = pyarrow.json.read_json(tmp_path / "out.jsonl")
    assert table.num_rows == 7
    assert table.schema.field("extra").type == table.schema.field("tools").type == pa.string()


def test_standard_input_without_a_pipe_is_not_kept_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(chat("q")).encode())))
        assert not run(tmp_path / "out.jsonl", Path("-")).unchanged


def test_the_output_is_never_a_benchmark_nor_a_link_to_what_is_read(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("q")])
    bench = write(tmp_path / "bench.jsonl", [{"prompt": HAWAII}])
    (tmp_path / "hard.jsonl").hardlink_to(bench)
    (tmp_path / "soft.jsonl").symlink_to(source)
    report = write(tmp_path / "out.jsonl.merge.json", [chat("q")])
    before = {path: path.read_bytes() for path in (source, bench, report)}
    for out, more, words in [
        ("bench.jsonl", {"benchmarks": (bench,)}, r"is one of merge\.benchmarks"),
        ("hard.jsonl", {"benchmarks": (bench,)}, r"is one of merge\.benchmarks"),
        ("soft.jsonl", {}, r"is one of merge\.sources"),
        ("out.jsonl", {"benchmarks": (report,)}, r"is the report of merge\.out"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run(tmp_path / out, source, **more)
    assert {path: path.read_bytes() for path in before} == before


def test_a_pattern_does_not_match_what_the_last_run_made_of_it(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [chat("a")])
    out = tmp_path / "out.jsonl"
    assert run(out, tmp_path / "*").num_kept == 1
    assert run(out, tmp_path / "*").unchanged
    write(tmp_path / "b.jsonl", [chat("b")])
    receipt = run(out, tmp_path / "*.jsonl*")
    assert (receipt.num_input, receipt.num_kept, receipt.sources[0].num_files) == (2, 2, 2)
    with pytest.raises(ConfigError, match=r"is one of merge\.sources"):
        run(out, out)


def test_numbers_that_json_does_not_have_are_counted_from_parquet_too(tmp_path: Path) -> None:
    rows = [chat("q", score=1.5), chat("r", score=float("nan")), chat("t", score=None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert run(tmp_path / "out.jsonl", tmp_path / "a.parquet").num_mended == 1
    deep = [chat("s", deep=[{"x": float("-inf")}]), chat("t", deep=[{"x": 1.0}])]
    pq.write_table(pa.Table.from_pylist(deep), tmp_path / "b.parquet")
    assert run(tmp_path / "out.jsonl", tmp_path / "b.parquet").num_mended == 1


# --- token ids by turn


def test_token_ids_by_turn_are_kept_and_are_the_content() -> None:
    turns_ = [{"prompt_ids": [1, 2], "token_ids": [3]}, {"prompt_ids": [1, 4], "token_ids": [5, 6]}]
    one = line(chat("q", turns=turns_, row_id="r"))
    assert list(one) == ["id", "messages", "turns", "source", "tags", "extra"]
    assert one["turns"] == turns_ and one["extra"] == '{"row_id":"r"}'
    other = line(chat("q", turns=[turns_[0], {"prompt_ids": [1, 4], "token_ids": [5, 7]}]))
    assert len({one["id"], other["id"], line(chat("q"))["id"]}) == 3
    assert line(one) == {**one, "tags": ["t"]}
    assert line({"turns": turns_})["id"] == one["id"]
    ids = [line(chat("q", input_ids=[1, n], loss_mask=[0, 1]))["id"] for n in (2, 3)]
    assert ids[0] != ids[1]
    # Other data sets keep other things under this name.
    assert "turns" in line(chat("q", turns=[{"prompt_ids": [1]}]))["extra"]
    for bad in ([-1], [], "x", [[1]]):
        with pytest.raises(Drop) as dropped:
            line(chat("q", turns=[{"prompt_ids": [1], "token_ids": bad}]))
        assert dropped.value.reason == "bad_token_ids"


def test_merged_answers_give_the_samples_of_the_answers(tmp_path: Path) -> None:
    target = small.target(tmp_path / "target", "chatml")
    two = [[{"prompt_ids": [20, 21], "token_ids": [22, last]}, {"prompt_ids": [20, 30], "token_ids": [31]}]
           for last in (23, 24)]  # fmt: skip
    answers = [
        chat("q", "a", id="1", row_id="1", turns=two[0]),
        chat("q", "a", id="2", row_id="2", turns=two[1]),
        chat("q", "a", id="3", row_id="3", input_ids=[40, 41, 42], loss_mask=[0, 1, 1]),
        chat("q", "a", id="4", row_id="4", input_ids=[40, 41, 43], loss_mask=[0, 1, 1]),
        chat("q", "a", id="5", row_id="5", retokenized=True),
    ]
    source = write(tmp_path / "answers.jsonl", answers)
    receipt = run(tmp_path / "out.jsonl", source)
    assert (receipt.num_kept, receipt.forms) == (5, {"messages": 1, "text": 0, "tokens": 4})
    found = []
    for path in (source, tmp_path / "out.jsonl"):
        data = DataConfig(sources=(path,), samples=tmp_path / "samples.parquet")
        table = prepare(data, TargetConfig(path=target), Progress(stream=io.StringIO())).table
        samples = SampleTable.open(tmp_path / "samples.parquet").samples()
        found.append((table.num_retokenized, table.num_kept, sorted(
            (s.sample_id, s.token_ids.tolist(), s.loss_spans, s.split) for s in samples)))  # fmt: skip
    assert found[0] == found[1]
    # The second answers of the first two are one sample.
    assert found[0][:2] == (1, 6)


# --- more than text, and numbers that nobody reads


@pytest.mark.parametrize("key", ["images", "image", "audio", "video", "videos"])
def test_images_beside_the_text_of_a_message_or_of_a_row_are_told(tmp_path: Path, key: str) -> None:
    beside = [{"role": "user", "content": "<image>", key: ["x.png"]}, {"role": "assistant", "content": "a"}]
    nothing = [{"role": "user", "content": "none", key: []}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": beside}, {"messages": nothing}, chat("q", **{key: "x.png"}), chat("r", **{key: []})]
    receipt = run(tmp_path / "out.jsonl", write(tmp_path / "a.jsonl", rows))
    assert (receipt.num_kept, receipt.num_non_text) == (4, 2)
    found = list(source_rows(lines_of(open_rows([tmp_path / "out.jsonl"], field="f"))))
    assert [str(row.reason) for row in found if isinstance(row, DroppedRow)] == ["non_text_content"] * 2
    # A row that is canonical already stays as it is; one without them is another conversation.
    assert run(tmp_path / "again.jsonl", tmp_path / "out.jsonl").digest == receipt.digest
    assert line(chat("q", **{key: "x.png"}))["id"] != line(chat("q"))["id"]


def test_a_number_that_stops_prepare_is_dropped_and_one_in_a_text_is_not(tmp_path: Path) -> None:
    def with_number(question: str, number: str) -> bytes:
        return json.dumps(chat(question)).encode().replace(b'"user"', b'"user","n":' + number.encode())

    long = "7" * 4301
    rows = [with_number("a", long), with_number("b", "-" + long), with_number("c", long[1:]),
            with_number("d", f'"{long}"'), with_number("e", long + ".0"), chat("f", n=0), chat(long),
            json.dumps(chat("g", n=1), separators=(",", ":\t")).encode().replace(b"1", long.encode())]  # fmt: skip
    receipt = run(tmp_path / "out.jsonl", write(tmp_path / "a.jsonl", rows))
    assert receipt.dropped == {"wrong_type": 2}
    assert receipt.examples["wrong_type"][0].detail == "a number of 4,301 digits"
    assert len(rows_of(tmp_path / "out.jsonl")) == 6
    assert not [
        row
        for row in source_rows(lines_of(open_rows([tmp_path / "out.jsonl"], field="f")))
        if isinstance(row, DroppedRow)
    ]


# --- what is compared with benchmarks, and under which name


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "tool", "content": HAWAII},
        {"role": "tool", "content": [{"type": "text", "text": HAWAII}], "x": 1},
        {"role": "assistant", "content": "a", "reasoning_content": HAWAII},
        {"role": "assistant", "content": "a", "reasoning": HAWAII, "x": 1},
        {"role": "assistant", "content": "a", "thinking": HAWAII},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"q": HAWAII}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps([HAWAII.replace(" ", "\n")])}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"arguments": "f(" + HAWAII}], "x": 1},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": json.dumps({"q": HAWAII})}},
    ],
)
def test_tool_turns_thoughts_and_arguments_are_compared_too(tmp_path: Path, turn: dict[str, Any]) -> None:
    source = write(tmp_path / "a.jsonl", [chat("clean"), {"messages": [{"role": "user", "content": "q"}, turn]}])
    bench = write(tmp_path / "bench.jsonl", [{"prompt": HAWAII}])
    assert run(tmp_path / "out.jsonl", source, benchmarks=(bench,)).dropped == {"leakage": 1}


def test_an_instruction_and_its_input_are_one_prompt(tmp_path: Path) -> None:
    row = {"instruction": "Sum up these words of mine now", "input": "seven eight nine ten eleven twelve thirteen"}
    bench = write(tmp_path / "bench.jsonl", [row])
    source = write(tmp_path / "a.jsonl", [{**row, "output": "x"}, {**row, "input": "", "output": "x"}])
    receipt = run(tmp_path / "out.jsonl", source, benchmarks=(bench,))
    assert (receipt.num_kept, receipt.dropped) == (1, {"leakage": 1})


def test_a_link_has_its_own_name_as_label(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    write(tmp_path / "blobs" / "3f2a", [chat("q")])
    (tmp_path / "chats.jsonl").symlink_to(tmp_path / "blobs" / "3f2a")
    path = tmp_path / "run.toml"
    path.write_text(
        '[merge]\nout = "out.jsonl"\nsources = [{path = "blobs/../chats.jsonl"}]\n[data]\nsources = "chats.jsonl"\n'
    )
    tree = config_module.load(path)
    assert tree.data.sources == (tmp_path / "chats.jsonl",)
    assert merge(tree.merge, Progress(stream=io.StringIO())).sources[0].name == "chats.jsonl"
    assert [row["source"] for row in rows_of(tmp_path / "out.jsonl")] == ["chats.jsonl"]
    assert config_module.load(path, [f"data.sources={tmp_path}/chats.jsonl"]).data.sources == tree.data.sources


def test_closed_standard_input_is_one_line(tmp_path: Path) -> None:
    process = eyas("data", "merge", str(toml(tmp_path, '[{path = "-"}]')), preexec_fn=lambda: os.close(0))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert b"Traceback" not in stderr
    assert b"'-' is standard input, which is closed" in stderr.splitlines()[-1]


def test_tags_of_repetitions_are_united(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [chat("Hi", tags=["x"], note={"tags": ["n"]}), chat("So")])
    other = write(tmp_path / "b.jsonl", [chat("Hi", tags=["y", "x"]), chat("Hi", tags=["z"]), chat("So")])
    out = tmp_path / "out.jsonl"
    receipt = run(out, MergeSource(path=one, tags=("one",)), MergeSource(path=other, tags=("one",)))
    rows = {row["messages"][0]["content"]: row for row in rows_of(out)}
    assert rows["Hi"]["tags"] == ["x", "one", "y", "z"] and rows["So"]["tags"] == ["one"]
    assert json.loads(rows["Hi"]["extra"]) == {"note": {"tags": ["n"]}}
    assert receipt.num_retagged == 2 and any("2 duplicates had further tags" in text for text in receipt.lines())
    again = write(tmp_path / "c.jsonl", [line.encode() for line in out.read_text().splitlines()])
    assert run(tmp_path / "again.jsonl", again).num_kept == 2
    assert rows_of(tmp_path / "again.jsonl") == rows_of(out), "the same bytes in the same order"


def test_media_beside_token_ids_stay_where_prepare_drops_them(tmp_path: Path) -> None:
    ids = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    source = write(tmp_path / "a.jsonl", [ids, ids | {"images": ["a.png"]}])
    receipt = run(tmp_path / "out.jsonl", source)
    assert (receipt.num_kept, receipt.num_non_text) == (2, 1)
    found = list(source_rows(lines_of(open_rows([tmp_path / "out.jsonl"], field="f"))))
    assert sorted(type(row).__name__ for row in found) == ["DroppedRow", "Row"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"messages": [], "messages": [{"role": "user", "content": "Hi"}]}', "repeated_key"),
        (b'{"text":"a","text":"b"}', "repeated_key"),
        (b'{ "text" :"a", "n": 1, "n": 1 }', "repeated_key"),
        (b'{"text":"a","n":NaN,"n":1}', "repeated_key"),
        (b'{"text": "a","b":2,"c":3,"d":4,"b":5}', "repeated_key"),  # as long as a row with all its blanks
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "repeated_key"),
        (b'{"messages": [{"role": "user", "content": "a", "c\\u006fntent": "b"}]}', "repeated_key"),
        (b'{"messages": [{"role": "assistant", "content": "a", "role": "user"}]}', "repeated_key"),
        (b'{"messages": [{"role": "user", "content": "a", "name": "b", "name": "c"}]}', "repeated_key"),
        (b'{"messages": [{"role": "user", "content": "a", "x": 1, "x": 2}]}', "repeated_key"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "id": "b"}]}]}', "repeated_key"),
        (b'{"conversations": [{"from": "human", "value": "a", "value": "b"}]}', "repeated_key"),
        (b'{"system": "s", "messages": [{"role": "user", "content": "a", "content": "b"}]}', "repeated_key"),
        (b'{"prompt": [{"role": "user", "content": "a", "content": "b"}]}', "repeated_key"),
        (b'{"messages": [{"role": "user", "content": "\\"content\\": \\u0041"}]}', ""),
        (b'{"messages": [{"role": "user", "content": "content"}]}', ""),
        (b'{"text":"a","n":1}', ""),
        (b'{"text": "a", "n": 1}', ""),
        ('{ "text":"a", "ä": 1, "\\u0061": [1, 2] }'.encode(), ""),
        (b'{"text":"a", "n": 1}\r', ""),
    ],
)
def test_a_field_that_comes_twice_is_a_dropped_row(row: bytes, reason: str) -> None:
    if reason:
        with pytest.raises(Drop, match="comes twice") as caught:
            canonical(RawRow(Path("a"), 1, row), "src")
        assert caught.value.reason == reason
    else:
        canonical(RawRow(Path("a"), 1, row), "src")


@pytest.mark.parametrize(
    ("verb", "setting"), [("data merge", "merge.out"), ("generate", "generate.out"), ("prepare", "data.samples")]
)
def test_an_output_that_is_the_run_file_is_refused(tmp_path: Path, verb: str, setting: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    program = "from eyas.cli import main; main()"
    command = [sys.executable, "-c", program, *verb.split(), str(path), f"{setting}={path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, path.read_text()) == (2, "") and f"{setting}: {path} is the run file" in done.stderr
