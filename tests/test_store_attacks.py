"""Damage and forgery: each raises its own error and names the file; nothing passes silently, nothing else escapes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.capture.run import Receipt
from eyas.data.table import SampleTable
from eyas.engine.fake import Fault
from eyas.errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_INCOMPLETE,
    EyasError,
    ShardCorrupt,
    ShardMissing,
    SpecMismatch,
    StoreError,
)
from eyas.records import CaptureSpec, canonical_json, digest_bytes
from eyas.store import manifest, record
from eyas.store.layout import Layout
from eyas.store.merge import without
from eyas.store.plan import Segment
from eyas.store.reader import DataSet
from eyas.store.record import ShardRecord
from eyas.store.shard import payload_digest
from eyas.store.verify import Problem, Report, verify
from eyas.store.writer import HEAD_SEAL, DataSetWriter, read_head
from fake_data import config, contents, make_table, run

LENGTHS = [5, 9, 12, 7, 20, 3, 11, 6, 8]
Body = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SampleTable]:
    """A small data set of several shards, never touched by a test."""
    base = tmp_path_factory.mktemp("whole")
    table = make_table(base / "samples.parquet", LENGTHS)
    run(table, config(base / "out", shard_tokens=20), hidden_size=4)
    return base / "out", table


@pytest.fixture
def root(whole: tuple[Path, SampleTable], tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(whole[0], tmp_path / "out"))


def again(whole: tuple[Path, SampleTable], root: Path) -> Receipt:
    return run(whole[1], config(root, shard_tokens=20), hidden_size=4)


def records_of(root: Path) -> list[Path]:
    return sorted((root / "records").iterdir())


def payload_of(root: Path, path: Path) -> Path:
    name = record.read(path).payload_name
    assert name is not None
    return root / "shards" / name


def read_all(root: Path) -> dict[str, bytes]:
    """Every sample by id, each with its digests compared."""
    data = DataSet(root)
    try:
        return {data.sample_id(i): bytes(data[i].data) for i in range(len(data))}
    finally:
        data.close()


def one_problem(root: Path, kind: type[StoreError], path: Path) -> Problem:
    """What verify says of the only damage: its class, its file, exit code 1."""
    report = verify(root)
    assert [(p.kind, p.path) for p in report.problems] == [(kind.__name__, str(path))], report.problems
    assert str(path) in report.problems[0].message
    assert report.exit_code == EXIT_FAILED
    return report.problems[0]


def raises_naming(kind: type[StoreError], path: Path, do: Callable[[], object]) -> None:
    with pytest.raises(StoreError) as caught:
        do()
    assert type(caught.value) is kind, caught.value
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def reseal(path: Path, change: Callable[[Body], None]) -> None:
    """Forge a record: change it and give it a digest that fits."""
    body = json.loads(path.read_bytes())
    change(body)
    body.pop("record_digest", None)
    path.write_bytes(record.sealed(body, "record_digest"))


def repaired(root: Path, whole: tuple[Path, SampleTable], dropped: list[str]) -> None:
    """Repair drops just these records; capture redoes them; the data set is what it was, byte for byte."""
    report = verify(root, repair=True)
    assert sorted(report.repaired) == sorted(dropped)
    assert report.exit_code == EXIT_INCOMPLETE
    assert verify(root).problems == []
    assert again(whole, root).pending == 0
    assert contents(root) == contents(whole[0])
    assert verify(root).exit_code == EXIT_COMPLETE


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """`data` with one bit of one byte turned, once for each byte; and one with all bits of it turned."""
    for i in range(len(data)):
        for mask in (1 << i % 8, 0xFF):
            yield i, data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :]


# --- the payload ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:4096], lambda b: b""])
def test_payload_of_another_size_is_corrupt(
    root: Path, whole: tuple[Path, SampleTable], change: Callable[[bytes], bytes]
) -> None:
    path = records_of(root)[1]
    payload = payload_of(root, path)
    payload.write_bytes(change(payload.read_bytes()))
    raises_naming(ShardCorrupt, payload, lambda: read_all(root))
    one_problem(root, ShardCorrupt, payload)
    repaired(root, whole, [path.stem])


def test_truncation_after_opening_is_an_error_not_a_short_sample(root: Path) -> None:
    data = DataSet(root, check=False)
    payload = payload_of(root, records_of(root)[0])
    last = max(i for i in range(len(data)) if data.sample_id(i) in record.read(records_of(root)[0]).sample_ids)
    data[last]
    os.truncate(payload, payload.stat().st_size - 1)
    raises_naming(ShardCorrupt, payload, lambda: data[last])


def test_each_region_of_a_payload(root: Path, whole: tuple[Path, SampleTable]) -> None:
    path = records_of(root)[0]
    entry = record.read(path)
    payload = payload_of(root, path)
    good, sound = payload.read_bytes(), read_all(root)
    header_end = len(good[: entry.header_bytes].rstrip(b" "))
    header = [*range(8), *range(8, header_end, 7), header_end - 1]
    header += [header_end, (header_end + entry.header_bytes) // 2, entry.header_bytes - 1]
    values = []
    for f in entry.fields.values():
        for part in f.parts.values():
            for offset, num_bytes in zip(part.offset, part.num_bytes, strict=True):
                values += [offset, offset + num_bytes // 2, offset + num_bytes - 1]
    for position in [*header, *values]:
        # In place, as a disk would: neither size nor name nor record change.
        with payload.open("r+b") as out:
            out.seek(position)
            out.write(bytes([good[position] ^ 1 << position % 8]))
        problem = one_problem(root, ShardCorrupt, payload)
        assert problem.shard_id == path.stem
        if position in values:
            raises_naming(ShardCorrupt, payload, lambda: read_all(root))
        else:
            assert read_all(root) == sound  # the reader takes places from the record; its values are right
        payload.write_bytes(good)
    assert verify(root).exit_code == EXIT_COMPLETE
    with payload.open("r+b") as out:
        out.seek(values[0])
        out.write(bytes([good[values[0]] ^ 0x80]))
    repaired(root, whole, [path.stem])


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 100_000_001, 2**31, 4096])
def test_absurd_header_length(root: Path, length: int) -> None:
    payload = payload_of(root, records_of(root)[0])
    with payload.open("r+b") as out:
        out.write(length.to_bytes(8, "little"))
    one_problem(root, ShardCorrupt, payload)


@pytest.mark.parametrize("header", [b"[" * 3000, b"\xff" * 3000, b'{"a":' * 600, b"null", b"1e999", b'{"a":NaN}'])
def test_nonsense_in_the_header(root: Path, header: bytes) -> None:
    payload = payload_of(root, records_of(root)[0])
    with payload.open("r+b") as out:
        out.seek(8)
        out.write(header)
    one_problem(root, ShardCorrupt, payload)


def test_forged_header_whose_digest_fits(root: Path) -> None:
    """Two fields change names in the header, and every digest is made anew: only the record's own places tell."""
    path = records_of(root)[0]
    payload, entry = payload_of(root, path), record.read(path)
    data = bytearray(payload.read_bytes())
    header = bytes(data[: entry.header_bytes])
    forged = header.replace(b"hidden.2", b"hidden.#").replace(b"hidden.4", b"hidden.2").replace(b"#", b"4")
    assert forged != header and len(forged) == len(header)
    parts = [
        bytes.fromhex(entry.fields[name].parts[""].digest[j])
        for j in range(len(entry.sample_ids))
        for name in entry.fields
    ]
    data[: entry.header_bytes] = forged
    other = payload.with_name(f"{path.stem}.{payload_digest(forged, parts)}.safetensors")
    other.write_bytes(data)
    payload.unlink()

    def rename(body: Body) -> None:
        body["payload"]["digest"], body["payload"]["name"] = payload_digest(forged, parts), other.name

    reseal(path, rename)
    one_problem(root, ShardCorrupt, other)


def test_header_bytes_beyond_the_format_s_limit(root: Path) -> None:
    path = records_of(root)[0]
    payload, entry = payload_of(root, path), record.read(path)
    more = 100_000_000

    def forge(body: Body) -> None:
        body["payload"]["header_bytes"] += more
        body["payload"]["bytes"] += more
        for field in body["fields"].values():
            field["parts"][""]["offset"] = [at + more for at in field["parts"][""]["offset"]]

    reseal(path, forge)
    os.truncate(payload, entry.payload_bytes + more)
    one_problem(root, ShardCorrupt, payload)


def test_swapped_payloads(root: Path, whole: tuple[Path, SampleTable]) -> None:
    first, second = (payload_of(root, path) for path in records_of(root)[:2])
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(ShardCorrupt):
        read_all(root)
    problems = verify(root).problems
    assert {(p.kind, p.path) for p in problems} == {("ShardCorrupt", str(first)), ("ShardCorrupt", str(second))}
    repaired(root, whole, [p.stem for p in records_of(root)[:2]])


def test_swapped_payloads_of_one_size(tmp_path: Path) -> None:
    table = make_table(tmp_path / "samples.parquet", [10] * 6)
    run(table, config(tmp_path / "out", shard_tokens=20))
    first, second = (payload_of(tmp_path / "out", path) for path in records_of(tmp_path / "out")[:2])
    a, b = first.read_bytes(), second.read_bytes()
    assert len(a) == len(b)
    first.write_bytes(b)
    second.write_bytes(a)
    raises_naming(ShardCorrupt, first, lambda: DataSet(tmp_path / "out")[0])
    assert len(verify(tmp_path / "out", sample_fraction=0.0).problems) == 2  # headers name their shard


def test_record_without_payload(root: Path, whole: tuple[Path, SampleTable]) -> None:
    path = records_of(root)[2]
    payload = payload_of(root, path)
    payload.unlink()
    raises_naming(ShardMissing, payload, lambda: read_all(root))
    one_problem(root, ShardMissing, payload)
    repaired(root, whole, [path.stem])


def test_directory_in_place_of_a_payload(root: Path) -> None:
    payload = payload_of(root, records_of(root)[0])
    payload.unlink()
    payload.mkdir()
    raises_naming(ShardCorrupt, payload, lambda: read_all(root))
    one_problem(root, ShardCorrupt, payload)


def test_payload_that_may_not_be_read_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = payload_of(root, records_of(root)[0])
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(payload):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    raises_naming(StoreError, payload, lambda: read_all(root))
    one_problem(root, StoreError, payload)
    assert verify(root, repair=True).repaired == []
    assert len(records_of(root)) == len({p.stem for p in records_of(root)}) and payload.exists()


def test_payload_without_record_does_not_exist(root: Path, whole: tuple[Path, SampleTable]) -> None:
    path = records_of(root)[0]
    payload, ids = payload_of(root, path), record.read(path).sample_ids
    path.unlink()
    assert not set(read_all(root)) & set(ids)
    report = verify(root)
    assert (report.problems, report.orphans, report.pending) == ([], 1, len(ids))
    assert report.exit_code == EXIT_INCOMPLETE
    assert verify(root, repair=True).repaired == []
    assert not payload.exists()
    repaired(root, whole, [])


def test_second_payload_of_a_shard_is_an_orphan(root: Path, whole: tuple[Path, SampleTable]) -> None:
    payload = payload_of(root, records_of(root)[0])
    other = payload.with_name(f"{payload.name[:32]}.{'0' * 32}.safetensors")
    other.write_bytes(b"left by a run that lost the race")
    assert verify(root).orphans == 1
    verify(root, repair=True)
    assert not other.exists() and payload.exists()
    assert contents(root) == contents(whole[0])


# --- the record ----------------------------------------------------------------------------------------------------


def test_every_byte_of_a_record_counts(root: Path) -> None:
    path = records_of(root)[0]
    good = path.read_bytes()
    for i, bad in flips(good):
        with pytest.raises(ShardCorrupt) as caught:
            record.from_bytes(bad, path)
        assert str(path) in str(caught.value), i
    for bad in (good[:-1], good + b"\n", b" " + good, good.replace(b",", b", ", 1), b"\xef\xbb\xbf" + good):
        raises_naming(ShardCorrupt, path, lambda bad=bad: record.from_bytes(bad, path))  # type: ignore[misc]


def test_flipped_record_on_disk_fails_open_and_verify(root: Path, whole: tuple[Path, SampleTable]) -> None:
    read_all(root)  # leaves a manifest, which must not hide the damage
    path = records_of(root)[1]
    good = path.read_bytes()
    for i in range(0, len(good), 61):
        path.write_bytes(good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :])
        raises_naming(ShardCorrupt, path, lambda: DataSet(root))
        raises_naming(ShardCorrupt, path, lambda: manifest.summaries(Layout(root), read_head(Layout(root).head)))
        one_problem(root, ShardCorrupt, path)
    repaired(root, whole, [path.stem])


NONSENSE = {
    "empty": b"",
    "blank": b" \n",
    "torn": b'{"format":1,',
    "null": b"null\n",
    "list": b"[]\n",
    "number": b"1\n",
    "binary": bytes(range(256)),
    "utf-16": '{"format":1}'.encode("utf-16"),
    "lone surrogate": b'{"a":"\\ud800"}\n',
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "just deep enough to parse": b'{"a":' + b"[" * 900 + b"]" * 900 + b"}\n",
    "huge int": b'{"format":' + b"9" * 5000 + b"}\n",
    "nan": b'{"format":NaN}\n',
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_in_place_of_a_record(root: Path, whole: tuple[Path, SampleTable], name: str) -> None:
    path = records_of(root)[0]
    path.write_bytes(NONSENSE[name])
    raises_naming(ShardCorrupt, path, lambda: DataSet(root))
    one_problem(root, ShardCorrupt, path)
    if name in ("empty", "deep object"):
        repaired(root, whole, [path.stem])


def test_directory_in_place_of_a_record_is_left_to_a_person(root: Path) -> None:
    path = records_of(root)[0]
    path.unlink()
    path.mkdir()
    raises_naming(StoreError, path, lambda: DataSet(root))
    one_problem(root, StoreError, path)
    report = verify(root, repair=True)
    assert path.is_dir() and report.exit_code == EXIT_FAILED


def _set(*keys: str | int, value: object) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return change


def _drop(*keys: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        del at[keys[-1]]

    return change


def _map(*keys: str, by: Callable[[Any], Any]) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        at: Any = body
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = by(at[keys[-1]])

    return change


def _huge_and_consistent(body: Body) -> None:
    """A sample of 2**31 - 1 tokens that fits the record's own arithmetic, if not the disk."""
    tokens, at = 2**31 - 1, body["payload"]["header_bytes"]
    body["samples"]["num_tokens"] = [tokens] * len(body["samples"]["num_tokens"])
    parts = [field["parts"][""] for field in (body["fields"][name] for name in body["field_order"])]
    for j in range(len(body["samples"]["num_tokens"])):
        for part in parts:
            part["offset"][j], part["bytes"][j] = at, tokens * 8
            at += tokens * 8
    body["payload"]["bytes"] = at


FIELD = ("fields", "hidden.2")
PART = (*FIELD, "parts", "")
FORGED: dict[str, Callable[[Body], None]] = {
    "name with a path": _set("payload", "name", value="../../etc/passwd"),
    "absolute name": _set("payload", "name", value="/etc/passwd"),
    "name with NUL": _map("payload", "name", by=lambda name: name[:-1] + "\0"),
    "digest with a path": _set("payload", "digest", value="../../../../../../etc/passwd0000"),
    "digest in capitals": _map("payload", "digest", by=lambda d: "A" + d[1:]),
    "shard id with a path": _set("shard_id", value="../../etc/passwd"),
    "shard id with NUL": _set("shard_id", value="\0" * 32),
    "shard id a number": _set("shard_id", value=5),
    "shard id null": _set("shard_id", value=None),
    "other shard": _set("shard_id", value="0" * 32),
    "fingerprint a list": _set("fingerprint", value=[]),
    "sample twice": _map("samples", "sample_id", by=lambda ids: [ids[0]] * len(ids)),
    "sample id a number": _set("samples", "sample_id", 0, value=7),
    "sample ids a text": _set("samples", "sample_id", value="0" * 32),
    "sample ids nested": _set("samples", "sample_id", 0, value=[]),
    "sample id non-ascii digits": _set("samples", "sample_id", 0, value="\u0661" * 32),
    "a sample fewer": _map("samples", "sample_id", by=lambda ids: ids[1:]),
    "no samples": _set("samples", value={"sample_id": [], "position": [], "num_tokens": []}),
    "positions reversed": _map("samples", "position", by=lambda p: p[::-1]),
    "position negative": _set("samples", "position", 0, value=-1),
    "position huge": _set("samples", "position", -1, value=2**31),
    "position a float": _set("samples", "position", 0, value=0.0),
    "tokens zero": _set("samples", "num_tokens", 0, value=0),
    "tokens negative": _set("samples", "num_tokens", 0, value=-(2**63)),
    "tokens huge": _set("samples", "num_tokens", 0, value=2**200),
    "tokens a float": _set("samples", "num_tokens", 0, value=1e300),
    "tokens true": _set("samples", "num_tokens", 0, value=True),
    "tokens null": _set("samples", "num_tokens", 0, value=None),
    "tokens a text": _set("samples", "num_tokens", value="555"),
    "payload null": _set("payload", value=None),
    "payload a list": _set("payload", value=["name", "bytes", "header_bytes", "digest"]),
    "payload of more bytes": _map("payload", "bytes", by=lambda n: n + 1),
    "payload negative": _set("payload", "bytes", value=-1),
    "payload bytes infinite": _set("payload", "bytes", value=float("inf")),
    "payload bytes a text": _set("payload", "bytes", value="4096"),
    "header negative": _set("payload", "header_bytes", value=-4096),
    "header zero": _set("payload", "header_bytes", value=0),
    "header 2**63": _set("payload", "header_bytes", value=2**63),
    "offset negative": _set(*PART, "offset", 0, value=-1),
    "offset into the header": _set(*PART, "offset", 0, value=8),
    "offset beyond the end": _set(*PART, "offset", -1, value=2**62),
    "offset a float": _set(*PART, "offset", 0, value=4096.0),
    "bytes of another size": _set(*PART, "bytes", 0, value=1),
    "part digest short": _set(*PART, "digest", 0, value="00"),
    "part digest a number": _set(*PART, "digest", 0, value=0),
    "part digest null": _set(*PART, "digest", 0, value=None),
    "no parts": _set(*FIELD, "parts", value={}),
    "parts a list": _set(*FIELD, "parts", value=[]),
    "another part": _map(*FIELD, "parts", by=lambda parts: {**parts, "scale": parts[""]}),
    "unknown key in a part": _set(*PART, "level", value=3),
    "no such dtype": _set(*FIELD, "dtype", value="int7"),
    "dtype a list": _set(*FIELD, "dtype", value=["bfloat16"]),
    "another dtype": _set(*FIELD, "dtype", value="float32"),
    "shape of three": _set(*FIELD, "shape", value=["T", 4, 4]),
    "shape without T": _set(*FIELD, "shape", value=["B", 4]),
    "width zero": _set(*FIELD, "shape", value=["T", 0]),
    "width negative": _set(*FIELD, "shape", value=["T", -4]),
    "width huge": _set(*FIELD, "shape", value=["T", 2**64]),
    "codec a number": _set(*FIELD, "codec", value=1),
    "codec null": _set(*FIELD, "codec", value=None),
    "logical digest differs": _map(*FIELD, "digest", by=lambda _: ["0" * 32] * 3),
    "rows outside": _map(*FIELD, "rows", by=lambda _: [[[0, 10**9]]]),
    "rows negative": _set(*FIELD, "rows", value=[[[-1, 2]]]),
    "rows of three": _set(*FIELD, "rows", value=[[[0, 1, 2]]]),
    "rows a number": _set(*FIELD, "rows", value=3),
    "field missing": _drop(*FIELD),
    "field order short": _map("field_order", by=lambda order: order[1:]),
    "field order doubled": _map("field_order", by=lambda order: [*order, order[0]]),
    "field order a text": _set("field_order", value="hidden.2"),
    "fields a list": _set("fields", value=[]),
    "fields renamed": _map("field_order", by=lambda order: order[::-1]),
    "reject without a reason": _set("rejects", value=[{"sample_id": "0" * 32}]),
    "reject of a number": _set("rejects", value=[5]),
    "reject with a number for a reason": _set("rejects", value=[{"sample_id": "0" * 32, "reason": 5, "detail": ""}]),
    "reject that is committed": lambda body: body["rejects"].append(
        {"sample_id": body["samples"]["sample_id"][0], "reason": "x", "detail": ""}
    ),
    "duplicate that is committed": lambda body: body["duplicates"].append(body["samples"]["sample_id"][0]),
    "duplicates a text": _set("duplicates", value="abc"),
    "released a number": _set("released", value=0),
    "settings a list": _set("provenance", "settings", value=[["a", "b"]]),
    "settings with a number": _set("provenance", "settings", value={"tp": 8}),
    "engine null": _set("provenance", "engine", value=None),
    "time negative": _set("provenance", "committed_at", value=-1.0),
    "time huge": _set("provenance", "committed_at", value=10**400),
    "time a text": _set("provenance", "committed_at", value="now"),
    "format zero": _set("format", value=0),
    "format true": _set("format", value=True),
    "format a text": _set("format", value="1"),
    "format missing": _drop("format"),
    "requires a number": _set("requires", value=1),
    "requires nested": _set("requires", value=[[]]),
    "requires missing": _drop("requires"),
    "provenance missing": _drop("provenance"),
    "samples missing": _drop("samples"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_record_with_a_digest_that_fits(root: Path, name: str) -> None:
    path = records_of(root)[0]
    reseal(path, FORGED[name])
    raises_naming(ShardCorrupt, path, lambda: DataSet(root))
    one_problem(root, ShardCorrupt, path)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1E400"])
def test_numbers_that_are_none(root: Path, value: str) -> None:
    path = records_of(root)[0]
    for place in ('"committed_at":', '"num_tokens":[', '"bytes":['):
        text = path.read_text()
        at = text.index(place) + len(place)
        end = min(text.index(c, at) for c in ",}]" if c in text[at:])
        text = text[:at] + value + text[end:]
        for forged in (text, resealed_text(text)):
            with pytest.raises(ShardCorrupt) as caught:
                record.from_bytes(forged.encode(), path)
            assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
def test_what_json_cannot_say_is_no_optional_key_either(root: Path, value: str) -> None:
    path = records_of(root)[0]
    forged = resealed_text(path.read_text().replace("}\n", f',"zeitgeist":{value}}}\n'))
    with pytest.raises(ShardCorrupt):
        record.from_bytes(forged.encode(), path)


def resealed_text(text: str) -> str:
    """The text with a digest over its bytes, for what canonical JSON cannot spell."""
    at = text.index('"record_digest":"')
    end = at + len('"record_digest":"') + 34
    digest = digest_bytes(text[:at].encode(), text[end:].rstrip("\n").encode())
    return f'{text[:at]}"record_digest":"{digest}",{text[end:]}'


def test_resealed_text_is_right_where_nothing_was_changed(root: Path) -> None:
    text = records_of(root)[0].read_text()
    assert resealed_text(text) == text


def test_sizes_are_believed_only_when_the_file_has_them(root: Path) -> None:
    path = records_of(root)[0]
    payload = payload_of(root, path)
    reseal(path, _huge_and_consistent)
    data = DataSet(root)  # the record alone is consistent
    raises_naming(ShardCorrupt, payload, lambda: data[0])
    one_problem(root, ShardCorrupt, path)  # the plan knows better


def test_fields_of_an_empty_record_do_no_harm(root: Path) -> None:
    path = records_of(root)[0]

    def empty(body: Body) -> None:
        gone = body["samples"]["sample_id"]
        body["rejects"] = [{"sample_id": s, "reason": "forged", "detail": ""} for s in gone]
        body["samples"] = {"sample_id": [], "position": [], "num_tokens": []}
        body["payload"] = None
        none = {"offset": [], "bytes": [], "digest": []}
        entry = {"codec": "raw", "dtype": "float32", "shape": ["T", 1], "rows": None, "digest": None}
        body["field_order"] = [f"x{i}" for i in range(40)]
        body["fields"] = {name: {**entry, "parts": {"": none}} for name in body["field_order"]}

    reseal(path, empty)
    assert len(DataSet(root)) == len(LENGTHS) - len(record.read(path).rejects)
    report = verify(root)
    assert report.problems == [] and report.orphans == 1 and report.rejected


def test_record_of_another_shard_under_this_name(root: Path, whole: tuple[Path, SampleTable]) -> None:
    first, second = records_of(root)[:2]
    first.write_bytes(second.read_bytes())
    raises_naming(ShardCorrupt, first, lambda: DataSet(root))
    one_problem(root, ShardCorrupt, first)
    repaired(root, whole, [first.stem])


def test_record_of_another_spec(root: Path, whole: tuple[Path, SampleTable], tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(whole[1], config(other, shard_tokens=20), hidden_size=4, dtype="float16")
    path = records_of(root)[0]
    shutil.copy(other / "records" / path.name, path)
    raises_naming(SpecMismatch, path, lambda: DataSet(root))
    one_problem(root, SpecMismatch, path)
    repaired(root, whole, [path.stem])


def test_record_that_the_plan_lacks_is_reported_and_left(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    table = make_table(tmp_path / "other.parquet", [4, 4], seed=9)
    run(table, config(other, shard_tokens=20), hidden_size=4)
    for name in ("records", "shards"):
        for path in (other / name).iterdir():
            shutil.copy(path, root / name)
    (path,) = records_of(other)
    here = root / "records" / path.name
    one_problem(root, StoreError, here)
    assert verify(root, repair=True).repaired == []
    assert here.exists() and payload_of(root, here).exists()


def test_sample_committed_by_two_records(root: Path, tmp_path: Path, whole: tuple[Path, SampleTable]) -> None:
    """Not by name, which `record` refuses, but by two shards that hold the same sample, each sound in itself."""
    other = tmp_path / "other"
    run(whole[1], config(other, shard_tokens=1000), hidden_size=4)
    for name in ("records", "shards"):
        for path in (other / name).iterdir():
            shutil.copy(path, root / name)
    shutil.copy(other / "plan" / "00000.parquet", tmp_path / "second.parquet")
    forge_segment(
        tmp_path / "second.parquet",
        root / "plan" / "00001.parquet",
        number=1,
        kind="merge",
        num_new=0,
        num_new_tokens=0,
    )
    big = records_of(other)[0].name
    twice = [root / "records" / name for name in sorted({big, *(p.name for p in records_of(whole[0]))})]
    with pytest.raises(ShardCorrupt) as caught:
        DataSet(root)
    assert caught.value.path in map(str, twice) and big in str(caught.value)
    report = verify(root)
    assert report.problems and all(p.kind == "ShardCorrupt" and p.repairable for p in report.problems)
    verify(root, repair=True)
    assert verify(root).problems == []
    assert again(whole, root).pending == 0
    assert len(read_all(root)) == len(LENGTHS)
    assert verify(root).exit_code == EXIT_COMPLETE


# --- what a newer eyas may have written ----------------------------------------------------------------------------


NEWER: dict[str, Callable[[Body], None]] = {
    "format": _set("format", value=2),
    "requires": _set("requires", value=["delta"]),
    "codec": _set(*FIELD, "codec", value="zstd"),
    "codec with keys of its own": _map(
        *FIELD, by=lambda field: {"codec": "fp8", "dtype": "bfloat16", "shape": ["T", 4], "level": 9}
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_newer_records_are_refused_and_never_repaired_away(root: Path, name: str) -> None:
    path = records_of(root)[0]
    reseal(path, NEWER[name])
    raises_naming(StoreError, path, lambda: DataSet(root))
    assert "newer" in one_problem(root, StoreError, path).message
    report = verify(root, repair=True)
    assert report.repaired == [] and report.exit_code == EXIT_FAILED and path.exists()


def test_rows_are_declared_and_refused_clearly(root: Path) -> None:
    path = records_of(root)[0]

    def first_rows(body: Body) -> None:
        """Every sample keeps only its first row."""
        at, n = body["payload"]["header_bytes"], len(body["samples"]["sample_id"])
        for name in body["field_order"]:
            body["fields"][name]["rows"] = [[[0, 1]] for _ in range(n)]
            body["fields"][name]["parts"][""]["bytes"] = [8] * n
        for j in range(n):
            for name in body["field_order"]:
                body["fields"][name]["parts"][""]["offset"][j] = at
                at += 8
        body["payload"]["bytes"] = at

    reseal(path, first_rows)
    assert record.read(path).fields["hidden.2"].rows == (((0, 1),),) * len(record.read(path).sample_ids)
    with pytest.raises(StoreError, match="only some rows") as caught:
        DataSet(root)
    assert caught.value.path == str(path)
    assert "only some rows" in one_problem(root, StoreError, path).message
    assert verify(root, repair=True).repaired == [] and path.exists()


def test_unknown_optional_keys_are_kept_when_a_record_is_rewritten(root: Path) -> None:
    path = records_of(root)[0]
    reseal(path, _set("zeitgeist", value={"a": [1, None, {"b": "ü"}]}))
    entry = record.read(path)
    assert read_all(root)
    assert record.from_bytes(record.to_bytes(entry), path) == entry
    shorter = without(entry, {entry.sample_ids[0]})
    again = record.from_bytes(record.to_bytes(shorter), path)
    assert again.extra == {"zeitgeist": {"a": [1, None, {"b": "ü"}]}}
    assert again.duplicates == (entry.sample_ids[0],)


def test_released_counts_as_committed_and_reads_as_missing(root: Path) -> None:
    path = records_of(root)[0]
    payload = payload_of(root, path)
    reseal(path, _set("released", value=True))
    payload.unlink()
    report = verify(root)
    assert (report.problems, report.pending, report.shards_released) == ([], 0, 1)
    raises_naming(ShardMissing, payload, lambda: read_all(root))


# --- the head ------------------------------------------------------------------------------------------------------


def test_every_byte_of_the_head_counts(root: Path) -> None:
    path = Layout(root).head
    good = path.read_bytes()
    for _, bad in flips(good):
        path.write_bytes(bad)
        raises_naming(ShardCorrupt, path, lambda: read_head(path))
    raises_naming(ShardCorrupt, path, lambda: DataSet(root))
    raises_naming(ShardCorrupt, path, lambda: verify(root))


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_in_place_of_the_head(root: Path, name: str) -> None:
    path = Layout(root).head
    path.write_bytes(NONSENSE[name])
    raises_naming(ShardCorrupt, path, lambda: DataSet(root))


HEADS: dict[str, tuple[type[StoreError], Callable[[Body], None]]] = {
    "newer format": (StoreError, _set("format", value=2)),
    "unknown requirement": (StoreError, _set("requires", value=["objects"])),
    "format a float": (ShardCorrupt, _set("format", value=1.5)),
    "requires a text": (ShardCorrupt, _set("requires", value="x")),
    "requires a number": (ShardCorrupt, _set("requires", value=5)),
    "spec missing": (ShardCorrupt, _drop("spec")),
    "spec a list": (ShardCorrupt, _set("spec", value=[])),
    "spec with a key more": (ShardCorrupt, _set("spec", "colour", value="red")),
    "layer out of range": (ShardCorrupt, _set("spec", "aux_layers", value=[99])),
    "layer infinite": (ShardCorrupt, _set("spec", "num_layers", value=2**70)),
    "fingerprint of another spec": (ShardCorrupt, _set("fingerprint", value="0" * 32)),
    "other spec, old fingerprint": (ShardCorrupt, _set("spec", "hidden_size", value=8)),
}


@pytest.mark.parametrize("name", HEADS)
def test_forged_head(root: Path, name: str) -> None:
    kind, change = HEADS[name]
    path = Layout(root).head
    body = json.loads(path.read_bytes())
    change(body)
    del body[HEAD_SEAL]
    path.write_bytes(record.sealed(body, HEAD_SEAL))
    raises_naming(kind, path, lambda: DataSet(root))
    raises_naming(kind, path, lambda: verify(root))


def test_head_missing_or_a_directory(root: Path, tmp_path: Path) -> None:
    path = Layout(root).head
    path.unlink()
    with pytest.raises(StoreError, match=r"not a data set \(no eyas.json\)"):
        DataSet(root)
    path.mkdir()
    raises_naming(StoreError, path, lambda: DataSet(root))
    with pytest.raises(StoreError, match="not a data set"):
        DataSet(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="not a data set"):
        verify(tmp_path / "nowhere")


def test_files_in_place_of_directories(root: Path) -> None:
    shutil.rmtree(root / "records")
    (root / "records").write_bytes(b"")
    raises_naming(StoreError, root / "records", lambda: DataSet(root))
    raises_naming(StoreError, root / "records", lambda: verify(root))


# --- the plan ------------------------------------------------------------------------------------------------------


def segment_rows(path: Path) -> tuple[object, ...]:
    with Segment(path) as segment:
        return segment.head, segment.shards, [
            [(sample_id, ids.tolist()) for sample_id, ids in segment.read(shard)] for shard in segment.shards
        ]  # fmt: skip


def forge_segment(source: Path, path: Path, **head: object) -> None:
    """The segment with another head, and a digest that fits."""
    forge_metadata(source, path, lambda meta: {**meta, b"eyas.segment": changed_head(meta, head)})


def changed_head(meta: dict[bytes, bytes], head: dict[str, object]) -> bytes:
    return canonical_json({**json.loads(meta[b"eyas.segment"]), **head})


def forge_metadata(source: Path, path: Path, change: Callable[[dict[bytes, bytes]], dict[bytes, bytes]]) -> None:
    with pq.ParquetFile(source) as file:
        meta = {k: v for k, v in file.metadata.metadata.items() if k.startswith(b"eyas.")}
        groups = [file.read_row_group(i).replace_schema_metadata(None) for i in range(file.num_row_groups)]
    meta = change(meta)
    meta[b"eyas.digest"] = digest_bytes(meta[b"eyas.format"], meta[b"eyas.segment"], meta[b"eyas.shards"]).encode()
    with pq.ParquetWriter(path, groups[0].schema, compression="zstd", use_dictionary=False) as out:
        for group in groups:
            out.write_table(group)
        out.add_key_value_metadata(meta)


def test_flipped_plan_is_never_taken_for_another(tmp_path: Path) -> None:
    """A flip anywhere in a segment is an error, or leaves head, shards, ids and tokens as they were (unused bytes)."""
    run(make_table(tmp_path / "samples.parquet", [3, 4]), config(tmp_path / "out"), hidden_size=1)
    path = tmp_path / "out" / "plan" / "00000.parquet"
    good, sound = path.read_bytes(), segment_rows(path)
    harmless = 0
    for _, bad in list(flips(good))[::2]:
        path.write_bytes(bad)
        try:
            assert segment_rows(path) == sound
            harmless += 1
        except StoreError as error:
            assert type(error) is ShardCorrupt and str(path) in str(error) and "\n" not in str(error)
    assert harmless < len(good) // 2


def test_damaged_plan_is_reported_and_nothing_is_repaired_away(root: Path, whole: tuple[Path, SampleTable]) -> None:
    path = root / "plan" / "00000.parquet"
    good, records = path.read_bytes(), records_of(root)
    for bad in (good[:-1], b"", good[:4] + bytes(40) + good[44:], good[:-8] + b"\xff\xff\xff\x7f" + good[-4:]):
        path.write_bytes(bad)
        one_problem(root, ShardCorrupt, path)
        report = verify(root, repair=True)
        assert report.repaired == [] and report.exit_code == EXIT_FAILED
        assert records_of(root) == records
        with contextlib.suppress(ShardCorrupt):  # or it never reads what is damaged, since those shards are done
            assert again(whole, root).captured_tokens == 0
    path.write_bytes(good)
    assert contents(root) == contents(whole[0])
    assert verify(root).exit_code == EXIT_COMPLETE


def test_lost_plan_costs_no_shard(root: Path) -> None:
    shutil.rmtree(root / "plan")
    records = records_of(root)
    report = verify(root, repair=True)
    assert {p.kind for p in report.problems} == {"StoreError"} and report.exit_code == EXIT_FAILED
    assert records_of(root) == records


def test_missing_segment_is_noticed(root: Path) -> None:
    plan = root / "plan"
    forge_segment(plan / "00000.parquet", plan / "00001.parquet", number=1)
    (plan / "00000.parquet").unlink()
    one_problem(root, StoreError, plan / "00000.parquet")


def change_listing(by: Callable[[list[Any]], object]) -> Callable[[dict[bytes, bytes]], dict[bytes, bytes]]:
    return lambda meta: {**meta, b"eyas.shards": canonical_json(by(json.loads(meta[b"eyas.shards"])))}


SEGMENTS: dict[str, Callable[[dict[bytes, bytes]], dict[bytes, bytes]]] = {
    "number": lambda m: {**m, b"eyas.segment": changed_head(m, {"number": 3})},
    "attempt of another": lambda m: {**m, b"eyas.segment": changed_head(m, {"attempt": 1})},
    "count a text": lambda m: {**m, b"eyas.segment": changed_head(m, {"num_new": "9"})},
    "seed a float": lambda m: {**m, b"eyas.segment": changed_head(m, {"seed": 0.5})},
    "head a list": lambda m: {**m, b"eyas.segment": b"[]"},
    "head deep": lambda m: {**m, b"eyas.segment": b"[" * 100_000},
    "head without number": lambda m: {**m, b"eyas.segment": b"{}"},
    "format a text": lambda m: {**m, b"eyas.format": b"one"},
    "a shard fewer": change_listing(lambda shards: shards[1:]),
    "shards swapped": change_listing(lambda shards: [shards[1], shards[0], *shards[2:]]),
    "shards an object": change_listing(lambda shards: {}),
    "shard id with a path": change_listing(lambda shards: [["../../etc/passwd", 1, 1], *shards[1:]]),
    "count of samples": change_listing(lambda shards: [[shards[0][0], 99, shards[0][2]], *shards[1:]]),
    "count of tokens": change_listing(lambda shards: [[*shards[0][:2], 2**70], *shards[1:]]),
    "count true": change_listing(lambda shards: [[shards[0][0], True, 1], *shards[1:]]),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_forged_segment_with_a_digest_that_fits(root: Path, whole: tuple[Path, SampleTable], name: str) -> None:
    path = root / "plan" / "00000.parquet"
    forge_metadata(whole[0] / "plan" / "00000.parquet", path, SEGMENTS[name])
    raises_naming(ShardCorrupt, path, lambda: segment_rows(path))
    one_problem(root, ShardCorrupt, path)


def test_token_ids_of_a_done_shard_are_checked_too(root: Path, whole: tuple[Path, SampleTable]) -> None:
    """A later retry, merge or re-check reads them."""
    source, path = whole[0] / "plan" / "00000.parquet", root / "plan" / "00000.parquet"
    with pq.ParquetFile(source) as file:
        meta = {k: v for k, v in file.metadata.metadata.items() if k.startswith(b"eyas.")}
        groups = [file.read_row_group(i).replace_schema_metadata(None) for i in range(file.num_row_groups)]
    tokens = groups[1]["token_ids"].to_pylist()
    tokens[0][0] += 1
    groups[1] = groups[1].set_column(2, groups[1].schema.field(2), pa.array(tokens, pa.large_list(pa.int32())))
    with pq.ParquetWriter(path, groups[0].schema) as out:
        for group in groups:
            out.write_table(group)
        out.add_key_value_metadata(meta)
    one_problem(root, ShardCorrupt, path)
    assert verify(root, repair=True).repaired == []


def test_newer_segment_is_refused(root: Path, whole: tuple[Path, SampleTable]) -> None:
    path = root / "plan" / "00000.parquet"
    forge_metadata(whole[0] / "plan" / "00000.parquet", path, lambda meta: {**meta, b"eyas.format": b"2"})
    raises_naming(StoreError, path, lambda: Segment(path))
    raises_naming(StoreError, path, lambda: verify(root))


def test_parquet_file_that_is_no_segment(root: Path) -> None:
    path = root / "plan" / "00000.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    raises_naming(ShardCorrupt, path, lambda: Segment(path))


def test_segment_with_other_columns(root: Path, whole: tuple[Path, SampleTable]) -> None:
    source, path = whole[0] / "plan" / "00000.parquet", root / "plan" / "00000.parquet"
    with pq.ParquetFile(source) as file:
        meta = {k: v for k, v in file.metadata.metadata.items() if k.startswith(b"eyas.")}
        groups = [file.read_row_group(i).replace_schema_metadata(None) for i in range(file.num_row_groups)]
    changed = [g.set_column(1, "num_tokens", g["num_tokens"].cast(pa.int64())) for g in groups]
    for tables in (changed, [g.drop_columns(["token_ids"]) for g in groups]):
        with pq.ParquetWriter(path, tables[0].schema) as out:
            for table in tables:
                out.write_table(table)
            out.add_key_value_metadata(meta)
        raises_naming(ShardCorrupt, path, lambda: segment_rows(path))


# --- verify --------------------------------------------------------------------------------------------------------


def test_repair_drops_exactly_what_is_damaged(root: Path, whole: tuple[Path, SampleTable]) -> None:
    records = records_of(root)
    flipped, missing, torn = records[:3]
    payload = payload_of(root, flipped)
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    payload_of(root, missing).unlink()
    torn.write_bytes(torn.read_bytes()[:-5])
    foreign = [root / "notes.txt", root / "records" / "README", root / "shards" / "x.safetensors", root / "plan" / "a"]
    foreign += [root / "records" / f"{'A' * 32}.json", root / "shards" / f"{'0' * 32}.safetensors"]
    foreign += [root / "shards" / ".hidden", root / "records" / "deeper"]
    for path in foreign[:-1]:
        path.write_text("mine")
    foreign[-1].mkdir()
    ours = [root / "shards" / f".{'0' * 32}.01234567.tmp", root / "records" / f".{'0' * 32}.json.01234567.tmp"]
    for path in ours:
        path.write_text("half")
    found = verify(root)
    assert (len(found.problems), found.orphans, found.exit_code) == (3, 2, EXIT_FAILED)
    report = verify(root, repair=True)
    assert sorted(report.repaired) == sorted(p.stem for p in (flipped, missing, torn))
    assert all(path.exists() for path in foreign) and not any(path.exists() for path in ours)
    assert set(records_of(root)) & set(records) == set(records[3:])
    assert report.planned == report.committed + report.rejected + report.pending
    assert again(whole, root).captured_tokens < sum(LENGTHS)
    assert all(path.exists() for path in foreign)
    for path in foreign[:-1]:
        assert path.read_text() == "mine"
        path.unlink()
    foreign[-1].rmdir()
    assert contents(root) == contents(whole[0])


def test_exit_codes_and_identity(root: Path, whole: tuple[Path, SampleTable]) -> None:
    report = verify(root)
    assert (report.exit_code, report.samples_read) == (EXIT_COMPLETE, len(LENGTHS))
    assert report.bytes_read == sum(LENGTHS) * read_head(Layout(root).head).bytes_per_token
    assert report.planned == report.committed == len(LENGTHS)
    records_of(root)[0].unlink()
    assert verify(root).exit_code == EXIT_INCOMPLETE
    records_of(root)[0].write_bytes(b"")
    assert verify(root).exit_code == EXIT_FAILED
    written = json.loads((root / "verify.json").read_bytes())
    assert written["ok"] is False and written["problems"][0]["kind"] == "ShardCorrupt"
    assert (root / "verify.json").stat().st_mode & 0o777 == 0o600


def test_sample_fraction_reads_a_share_and_checks_the_rest_of_it(root: Path) -> None:
    path = records_of(root)[0]
    payload, entry = payload_of(root, path), record.read(path)
    report = verify(root, sample_fraction=0.0)
    assert (report.samples_read, report.bytes_read, report.exit_code) == (0, 0, EXIT_COMPLETE)
    some = verify(root, sample_fraction=0.5)
    assert 0 < some.samples_read < len(LENGTHS)
    assert some.samples_read == verify(root, sample_fraction=0.5).samples_read
    # Values of one sample are damaged: found just when its id is among the chosen.
    with payload.open("r+b") as out:
        out.seek(entry.fields["last"].parts[""].offset[0])
        out.write(b"\xff\xff")
    share = int(entry.sample_ids[0][:8], 16) / 2**32
    assert verify(root, sample_fraction=share * 0.999).exit_code == EXIT_COMPLETE
    assert verify(root, sample_fraction=min(1.0, share * 1.001)).exit_code == EXIT_FAILED
    os.truncate(payload, entry.payload_bytes - 1)
    assert verify(root, sample_fraction=0.0).exit_code == EXIT_FAILED
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="sample_fraction"):
            verify(root, sample_fraction=fraction)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    """Written by something that did not check: the digests fit, the values do not."""
    import numpy as np

    from eyas.records import Provenance, StateBlock, sample_id_of
    from eyas.store.plan import SegmentHead, write_segment

    spec = CaptureSpec(
        target_digest="unknown", num_layers=2, hidden_size=4, vocab_size=8, aux_layers=(1,),
        last_hidden_norm="post", dtype="float32",
    )  # fmt: skip
    ids = np.arange(3, dtype=np.int32)
    with DataSetWriter(tmp_path / "out", spec) as writer:
        head = SegmentHead(0, "capture", 0, 0, 100, "", {})
        write_segment(writer.files, writer.layout.segment(0), head, [([(sample_id_of(ids), ids)], [True])])
        with Segment(writer.layout.segment(0)) as segment:
            shard = writer.shard_writer(segment.shards[0], [(sample_id_of(ids), 3)])
        values = np.zeros((3, 4), np.float32)
        values[1, 2] = np.nan
        block = StateBlock("float32", (3, 4), values.reshape(-1).view(np.uint8).data)
        shard.append({"hidden.1": block, "last": block})
        shard.commit(Provenance("x", "1"), run_id="r", committed_at=0.0)
    payload = payload_of(tmp_path / "out", records_of(tmp_path / "out")[0])
    assert "row 1" in one_problem(tmp_path / "out", ShardCorrupt, payload).message


def test_rejects_are_counted_and_no_problem(tmp_path: Path) -> None:
    table = make_table(tmp_path / "samples.parquet", LENGTHS)
    run(table, config(tmp_path / "out"), faults=(Fault(kind="refused", every=2),))
    report = verify(tmp_path / "out")
    assert report.rejected and report.problems == []
    assert report.planned == report.committed + report.rejected and report.exit_code == EXIT_COMPLETE


def test_only_our_errors_escape_whatever_the_bytes(root: Path) -> None:
    """Splices of sound files into each other's places: any outcome but a foreign exception or a wrong value."""
    sound = read_all(root)
    sources = [path.read_bytes() for path in root.rglob("*") if path.is_file() and path.stat().st_size]
    targets = [*records_of(root)[:2], payload_of(root, records_of(root)[0]), root / "plan" / "00000.parquet"]
    targets += [Layout(root).head, Layout(root).manifest]
    for target in targets:
        good = target.read_bytes()
        for data in sources:
            if data == good:
                continue
            half = len(good) // 2
            for bad in (data, good[:half] + data[half:], data[: len(good)].ljust(len(good), b"\0")):
                target.write_bytes(bad)
                for look in (read_all, verify):
                    try:
                        outcome = look(root)
                    except EyasError:
                        continue
                    if isinstance(outcome, Report):
                        assert outcome.problems or target == Layout(root).manifest or bad == good
                    else:
                        assert all(sound[sample_id] == values for sample_id, values in outcome.items())
        target.write_bytes(good)
    assert read_all(root) == sound


def test_record_round_trip_keeps_every_value(root: Path) -> None:
    for path in records_of(root):
        entry = record.read(path)
        assert record.to_bytes(entry) == path.read_bytes()
        assert isinstance(entry, ShardRecord) and io.BytesIO(path.read_bytes()).read(1) == b"{"
