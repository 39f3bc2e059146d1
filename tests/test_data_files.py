"""Files of rows: every form and compression, told by content; every way in which a file is damaged."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data import files, prepare
from eyas.data.files import RawRow, broken_json, find_files, open_rows
from eyas.data.parts import Facts
from eyas.errors import ConfigError, DataError, EyasError
from eyas.log import Progress

ROWS: list[dict[str, Any]] = [
    {"id": "a", "text": 'say "hi", [or] {not}'},
    {"id": "b", "n": [1, {"x": "\\"}, "]"], "text": "größe 你好"},
    {"id": "c", "text": ""},
]


def as_jsonl(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def as_array(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=2, ensure_ascii=False).encode()


def plain(data: bytes) -> bytes:
    return data


def in_members(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: compress(data[:50]) + compress(data[50:])


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "plain": plain,
    "gzip": gzip.compress,
    "gzip members": in_members(gzip.compress),
    "zstd": zstandard.compress,
    "zstd frames": in_members(zstandard.compress),
}


def read(*paths: Path) -> list[RawRow]:
    return list(open_rows(paths, field="data.sources"))


def values(rows: list[RawRow]) -> list[Any]:
    return [json.loads(row.data) for row in rows]


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.zst", "a"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("form", [as_jsonl, as_array])
def test_form_and_compression_are_told_by_content_whatever_the_name(
    tmp_path: Path, form: Callable[[list[Any]], bytes], compression: str, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(COMPRESSIONS[compression](form(ROWS)))
    rows = open_rows([path], field="data.sources")
    found = list(rows)
    assert values(found) == ROWS
    assert [row.number for row in found] == [1, 2, 3]
    assert rows.consumed_bytes == rows.total_bytes == path.stat().st_size


def test_rows_are_the_files_own_bytes_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1.0, "b":1e5}\r\n\n  \n{"a":\t"\\u00e9\\/"}')
    first, second = read(path)
    assert (first.data.strip(), str(first.where), first.is_last) == (b'{"a": 1.0, "b":1e5}', f"{path}:1", False)
    assert (second.data, second.number, second.is_last) == (b'{"a":\t"\\u00e9\\/"}', 4, True)
    path.write_bytes(b'\n\xef\xbb\xbf {"a":1}\n'.replace(b"\n\xef", b"\xef"))
    assert [row.data.strip() for row in read(path)] == [b'{"a":1}']


def test_elements_of_an_array_are_cut_at_its_commas_whatever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b' \n[ {"a": [1, 2]}, "x,]", 12 ,null,[[],{}], {"b":"\\"}"}\n]\n \n')
    assert [row.data for row in read(path)] == [
        b'{"a": [1, 2]}', b'"x,]"', b"12", b"null", b"[[],{}]", b'{"b":"\\"}"}',
    ]  # fmt: skip


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(JSON, min_size=1, max_size=8), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 40))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_arrays_and_lines_survive_any_cut_into_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], indent: int | None, ascii: bool, chunk: int
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
    array, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    array.write_bytes(json.dumps(rows, indent=indent, ensure_ascii=ascii).encode())
    assert values(read(array)) == rows
    as_objects = [{"row": row} for row in rows]
    lines.write_bytes(b"".join(json.dumps(row, ensure_ascii=ascii).encode() + b"\n" for row in as_objects))
    assert values(read(lines)) == as_objects


def test_parquet_gives_json_values_without_what_arrow_made_up(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi", "n": 1}], "score": 1.5, "meta": {"a": None, "b": [None, "x"]}},
        {"messages": [{"role": "assistant", "content": None, "calls": [{"f": "g"}]}], "score": None, "meta": None},
    ]
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist(rows)
    table = table.append_column("map", pa.array([[("k", {"v": 1, "w": None})], None], pa.map_(
        pa.string(), pa.struct([("v", pa.int64()), ("w", pa.int64())]))))  # fmt: skip
    table = table.append_column("kind", pa.array(["x", "y"]).dictionary_encode())
    table = table.append_column("raw", pa.array([b"\x00\x01", None]))
    pq.write_table(table, path)
    reader = open_rows([path], field="data.sources")
    found = list(reader)
    assert values(found) == [
        {
            "messages": [{"content": "Hi", "n": 1, "role": "user"}],
            "score": 1.5,
            "meta": {"b": [None, "x"]},
            "map": {"k": {"v": 1}},
            "kind": "x",
            "raw": "AAE=",
        },
        {"messages": [{"calls": [{"f": "g"}], "role": "assistant"}], "kind": "y"},
    ]
    assert [row.number for row in found] == [1, 2]
    assert reader.consumed_bytes == reader.total_bytes == path.stat().st_size


def test_patterns_are_sorted_and_name_each_file_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/er/c.jsonl", "d.txt", "[x].jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}\n")
    found = find_files([tmp_path / "a.jsonl", tmp_path / "**" / "*.jsonl", Path("-")], field="x")
    assert [str(path.relative_to(tmp_path)) for path in found[:-1]] == [
        "a.jsonl", "[x].jsonl", "b.jsonl", "deep/er/c.jsonl",
    ]  # fmt: skip
    assert found[-1] == Path("-")
    assert find_files([tmp_path / "[x].jsonl"], field="x") == (tmp_path / "[x].jsonl",)


def test_what_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    errors: list[tuple[Path, type[EyasError], str]] = [
        (tmp_path / "*.jsonl", ConfigError, f"merge.sources: the pattern '{tmp_path}/\\*.jsonl' matches no file"),
        (tmp_path / "no", ConfigError, "^merge.sources: .*No such file or directory"),
        (tmp_path, ConfigError, "^merge.sources: .* is a directory; name its files"),
        (tmp_path / "empty", DataError, "empty file; take it out of merge.sources"),
    ]
    for path, error, words in errors:
        with pytest.raises(error, match=words):
            open_rows([path], field="merge.sources")


@pytest.mark.parametrize("data", [b"\n \r\n", b"[]", b" [ ] ", gzip.compress(b"", mtime=0), b"\xef\xbb\xbf"])
def test_a_file_without_a_row_is_refused(tmp_path: Path, data: bytes) -> None:
    assert "no row in it" in refused(tmp_path / "a", data)


def test_a_parquet_file_without_a_row_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "a")
    with pytest.raises(DataError, match="no row in it"):
        read(tmp_path / "a")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a":1}\n{"a":"\xff"}\n', ":2: invalid UTF-8 at byte 6"),
        (b'[{"a":1},{"a":"\xff"}]', ":2: invalid UTF-8 at byte 6"),
        (b'[{"a":1},{"a":1', ":2: the JSON array has no end"),
        (b'[{"a":"x', ":1: the JSON array has no end"),
        (b'[{"a":1},{"a":1},', ":3: the JSON array has no end"),
        (b"[", ":1: the JSON array has no end"),
        (b"[1,]", ":2: broken JSON: a comma without an element"),
        (b"[,1]", ":1: broken JSON: a comma without an element"),
        (b"[1}", ":1: broken JSON: '}' ends the array"),
        (b"[1] [2]", ":1: something follows the JSON array"),
        (b"[1]" + b" " * (1 << 20) + b"{}", ":1: something follows the JSON array"),
        (gzip.compress(gzip.compress(b"{}\n", mtime=0), mtime=0), "compressed twice"),
        (gzip.compress(b"PAR1aaaa", mtime=0), "Parquet inside gzip"),
        (b"PK\x03\x04....", "a zip archive"),
        (b"BZh91AY&SY", "compressed with bzip2"),
        (b"\xfd7zXZ\x00", "compressed with xz"),
        ('{"a":1}'.encode("utf-16"), "UTF-16; save it as UTF-8"),
        (b"PAR1 and nothing else", "damaged Parquet"),
    ],
)
def test_damage_is_one_line_with_file_and_row(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refused(tmp_path / "a.jsonl", data)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_data_that_is_cut_or_damaged_is_refused(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    data = compress(as_jsonl([{"n": i, "x": os.urandom(40).hex()} for i in range(2000)]))
    for num_bytes in (20, len(data) // 2, len(data) - 1):
        assert "cut off" in refused(tmp_path / "a", data[:num_bytes])
    assert "damaged" in refused(tmp_path / "a", data + b"garbage, not a member")


def test_a_parquet_page_with_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"a": ["x" * 50 + str(i) for i in range(1000)]}), path,
        compression="none", use_dictionary=False, write_page_checksum=True,
    )  # fmt: skip
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    assert "damaged Parquet" in refused(path, bytes(data))


@pytest.mark.parametrize("form", [b"%s\n", b"[%s]"])
def test_a_row_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: bytes) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 100)
    (tmp_path / "a").write_bytes(form % (b'{"a":"%s"}' % (b"x" * 980)))
    assert len(read(tmp_path / "a")) == 1
    assert ":1: longer than" in refused(tmp_path / "a", form % (b'{"a":"%s"}' % (b"x" * 2000)))


def test_a_pipe_is_read_without_a_seek(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(as_jsonl(ROWS))))
    thread.start()
    assert values(read(pipe)) == ROWS
    thread.join()


@pytest.mark.parametrize("data", [as_jsonl(ROWS), gzip.compress(as_array(ROWS), mtime=0)])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    rows = open_rows([Path("-")], field="merge.sources")
    found = list(rows)
    assert values(found) == ROWS
    assert str(found[1].where) == "-:2"
    assert rows.total_bytes == rows.consumed_bytes == 0


def test_parquet_from_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"PAR1....")))
    with pytest.raises(DataError, match="-: Parquet cannot be read from a pipe"):
        read(Path("-"))


def test_broken_json_says_where_and_whether_the_file_may_be_cut() -> None:
    error = ValueError("JSON is malformed: trailing characters (byte 9)")
    row = RawRow(Path("a"), 7, b"{} x")
    assert str(broken_json(row, error)) == "a:7: broken JSON: trailing characters (byte 9); mend or remove it"
    row.is_last = True
    assert "the last line, perhaps cut off" in str(broken_json(row, error))


@pytest.mark.parametrize("form", ["jsonl", "array", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    def peak(num_rows: int) -> int:
        path = tmp_path / "a"
        rows = [{"text": "x" * 2000, "n": i} for i in range(num_rows)]
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500, compression="none")
        else:
            path.write_bytes(as_jsonl(rows) if form == "jsonl" else as_array(rows))
        del rows
        read_all = sum(1 for _ in open_rows([path], field="x"))  # imports happen before memory is watched
        tracemalloc.start()
        assert sum(1 for _ in open_rows([path], field="x")) == read_all == num_rows
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(8000) < peak(2000) + 1_000_000


def test_standard_input_that_is_closed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match=r"^data\.sources: '-' is standard input, which is closed"):
        open_rows([Path("-")], field="data.sources")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_any_amount_of_blank_lines_may_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: bytes) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + b"\n" * 3_000_000 + b'{"a":1}\n')
    started = time.process_time()
    (row,) = read(path)
    assert (row.number, row.data) == (3_000_001, b'{"a":1}')
    # Copied over and over it would take minutes.
    assert time.process_time() - started < 10
    path.write_bytes(mark + b" \n" * 200 + b'[{"a":1}]')
    assert [(row.number, row.data) for row in read(path)] == [(1, b'{"a":1}')]


def test_prepare_shows_what_is_done_instead_of_what_is_read(tmp_path: Path) -> None:
    def shown(read_bytes: int, settled_bytes: int) -> str:
        stream = io.StringIO()
        about = SimpleNamespace(
            progress=Progress(stream=stream),
            _facts=Facts(),
            started=time.monotonic() - 10,
            _rows=SimpleNamespace(total_bytes=1000, consumed_bytes=800),
            _read_bytes=read_bytes,
            _settled_bytes=settled_bytes,
        )
        prepare._Run._show(about)  # type: ignore[arg-type]
        return stream.getvalue()

    assert "%" not in shown(5000, 0)
    assert "40% of 1.00 kB, 15s left" in shown(5000, 2500)
    assert "80% of 1.00 kB" in shown(5000, 5000)


def test_what_size_does_not_tell_is_work_for_every_core(tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    small, packed = tmp_path / "a.jsonl", tmp_path / "a.gz"
    small.write_bytes(as_jsonl(ROWS))
    packed.write_bytes(gzip.compress(as_jsonl(ROWS)))
    assert prepare._default_workers([small], 300) == 1
    assert prepare._default_workers([small, packed], 300) == num_cores
    assert prepare._default_workers([Path("-")], 0) == num_cores
