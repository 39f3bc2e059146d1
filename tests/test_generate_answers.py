"""The output files: whole lines only, resumed after any cut, one writer, nobody else's file touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eyas.config import GenerateConfig
from eyas.errors import ConfigError, DataError, DataSetLocked
from eyas.generate.answers import AnswerFiles, paths_of, rejects_path
from eyas.generate.rows import Known, RowTable
from eyas.generate.status import status

SETTINGS: dict[str, Any] = {"sampling": {"temperature": 0.0}, "target": {"digest": "d"}}


def row(name: str) -> dict[str, Any]:
    return {"row_id": name, "messages": [], "finish_reason": ["stop"], "input_ids": [1, 2], "loss_mask": [0, 1]}


def reject(name: str) -> dict[str, Any]:
    return {"row_id": name, "id": name, "line": 1, "reason": "empty_answer", "detail": "größer"}


def write(out: Path, answered: list[str], rejected: list[str] | None = None) -> None:
    with AnswerFiles(out, SETTINGS) as files:
        for name in answered:
            if not files.tally.is_done(name):
                files.append_answer(row(name))
        for name in rejected or []:
            if not files.tally.is_done(name):
                files.append_reject(reject(name))
        files.sync()


def test_bytes_of_a_row(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ["a"])
    assert out.read_bytes() == (
        b'{"row_id":"a","messages":[],"finish_reason":["stop"],"input_ids":[1,2],"loss_mask":[0,1],'
        b'"sampling":{"temperature":0.0},"target":{"digest":"d"}}\n'
    )
    assert out.stat().st_mode & 0o777 == 0o600
    assert not rejects_path(out).exists()


@pytest.mark.parametrize("which", ["answers", "rejects"])
def test_resume_after_a_cut_at_every_byte_gives_the_same_rows(tmp_path: Path, which: str) -> None:
    out = tmp_path / "out.jsonl"
    names, refused = ["a", "b", "c"], ["x", "y"]
    write(out, names, refused)
    path = out if which == "answers" else rejects_path(out)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        write(out, names, refused)
        assert path.read_bytes() == whole, cut
    assert not [p for p in tmp_path.iterdir() if p.name not in {"out.jsonl", "out.jsonl.lock", rejects_path(out).name}]


def test_tally_counts_what_the_files_hold(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ["a"], ["x"])
    with AnswerFiles(out, SETTINGS) as files:
        files.append_answer({**row("b"), "finish_reason": ["stop", "length"], "ended_early": "cut_answer"})
        assert [files.tally.is_done(name) for name in "abxc"] == [True, True, True, False]
        assert (files.tally.num_answered, files.tally.num_rejected) == (2, 1)
        assert dict(files.tally.finish_reasons) == {"stop": 2, "length": 1}
        assert dict(files.tally.ended) == {"cut_answer": 1}
        assert files.tally.generated_tokens == 2


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ["a"])
    before = out.read_bytes()
    changed = {"sampling": {"temperature": 0.7, "seed": 1}, "target": {"digest": "d"}}
    with pytest.raises(ConfigError, match=r"out.jsonl:1: made with other settings.*temperature: 0.0 there, 0.7 here.*"):
        AnswerFiles(out, changed).__enter__()
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "foreign",
    [
        b'{"messages": []}\n',
        b"a shopping list",
        b'{"row_id":"a"}\n',
        b"\n",
        b'{"row_id":[]}\n',
        b'{"row_id":"a"}\nmilk',
    ],
)
def test_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, foreign: bytes) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(foreign)
    with pytest.raises(ConfigError, match=r"out.jsonl:\d: not a row of 'eyas generate'; choose another generate.out"):
        AnswerFiles(out, SETTINGS).__enter__()
    assert out.read_bytes() == foreign


def test_damaged_line_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ["a", "b"])
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0][:30] + b"\n" + lines[1])
    with pytest.raises(DataError, match=r"out.jsonl:1: damaged"):
        AnswerFiles(out, SETTINGS).__enter__()


def test_row_that_occurs_twice_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ["a"])
    out.write_bytes(out.read_bytes() * 2)
    with pytest.raises(DataError, match=r"out.jsonl:2: row_id a occurs twice"):
        AnswerFiles(out, SETTINGS).__enter__()


def test_second_writer_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with AnswerFiles(out, SETTINGS) as first:
        with pytest.raises(DataSetLocked, match=rf"another 'eyas generate' \(pid {os.getpid()}\) is writing"):
            AnswerFiles(out, SETTINGS).__enter__()
        first.append_answer(row("a"))
    with AnswerFiles(out, SETTINGS) as later:
        assert later.tally.is_done("a") and later.tally.num_done == 1


def test_interrupted_write_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    real = os.pwrite
    calls = 0

    def half(fd: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(fd, data[: max(1, len(data) // 2)], offset)

    with AnswerFiles(out, SETTINGS) as files:
        monkeypatch.setattr("eyas.generate.answers.os.pwrite", half)
        with pytest.raises(KeyboardInterrupt):
            files.append_answer(row("a"))
        monkeypatch.setattr("eyas.generate.answers.os.pwrite", real)
        files.append_answer(row("b"))
    assert [json.loads(line)["row_id"] for line in out.read_text().splitlines()] == ["b"]


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b" \n"])
def test_blank_lines_of_an_editor_are_no_rows(tmp_path: Path, blank: bytes) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ["a"])
    whole = out.read_bytes()
    out.write_bytes(whole + blank)
    write(out, ["a", "b"])
    assert [line[:13] for line in out.read_bytes().splitlines() if line.strip()] == [b'{"row_id":"a"', b'{"row_id":"b"']
    assert out.read_bytes().count(b"\n\n") == 0
    with AnswerFiles(out, SETTINGS) as files:
        assert files.tally.num_answered == status(out).answered == 2


def planned(*names: str) -> RowTable:
    rows = RowTable()
    for name in names:
        rows.add(name, Known.PLANNED)
    return rows


def test_retried_rejects_are_pending_until_their_next_outcome(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, ["a"], ["x", "y", "gone"])
    with AnswerFiles(out, SETTINGS, planned("a", "x", "y", "z")) as files:
        assert files.tally.is_done("x") and dict(files.tally.rejected) == {"empty_answer": 2}
        files.append_reject(reject("z") | {"reason": "duplicate"})
    with AnswerFiles(out, SETTINGS, planned("a", "x", "y", "z"), retry_rejects=True) as files:
        assert [files.tally.is_done(name) for name in ("a", "x", "y", "z", "gone")] == [True, False, False, True, True]
        assert files.tally.retried == 2 and dict(files.tally.rejected) == {"duplicate": 1}
        files.append_answer(row("x"))
    # Stopped here: without the flag, too, what is to be tried again still is; with it, nothing is marked twice.
    before = rejects_path(out).read_bytes()
    for retry in (False, True):
        with AnswerFiles(out, SETTINGS, planned("a", "x", "y", "z"), retry_rejects=retry) as files:
            tally = files.tally
            assert (tally.is_done("x"), tally.is_done("y")) == (True, False)
            assert (tally.answered, tally.retried, tally.retried_answered) == (2, 2, 1)
    assert rejects_path(out).read_bytes() == before and before.count(b'"retried":true}\n') == 2
    with AnswerFiles(out, SETTINGS, planned("a", "x", "y", "z")) as files:
        files.append_reject(reject("y"))
    with AnswerFiles(out, SETTINGS, planned("a", "x", "y", "z"), retry_rejects=True) as files:
        assert (files.tally.retried, files.tally.is_done("y")) == (3, False)
    assert status(out).rejected == 2, "z, and the one that is planned no more"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_rejects_of_other_settings_are_not_marked(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, [], ["x"])
    before = rejects_path(out).read_bytes()
    with pytest.raises(ConfigError, match="made with other settings"):
        AnswerFiles(out, SETTINGS | {"target": {"digest": "e"}}, planned("x"), retry_rejects=True).__enter__()
    assert rejects_path(out).read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl.lock", "out.jsonl.rejects.jsonl"]


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.zst", "out.parquet"])
def test_an_output_that_is_not_plain_jsonl_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"generate\.out: .* plain JSONL"):
        paths_of(GenerateConfig(prompts=tmp_path / "prompts.jsonl", out=tmp_path / name))
