"""The sample table: exact round trip, atomic publication, clear refusals, bounded memory."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data import table as table_module
from eyas.data.table import SCHEMA, SCHEMA_1, SampleTable, TableMetadata, TableWriter, flatten_spans, unflatten_spans
from eyas.errors import DataError, OutOfSpace
from eyas.records import Sample, sample_id_of, spans_of


def sample(seed: int, num_tokens: int = 8) -> Sample:
    ids = np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.int32)
    return Sample(
        ids,
        ((1, num_tokens),),
        conversation_id=f"c{seed}",
        source=f"s{seed % 2}.jsonl",
        tags=("x", "é")[: seed % 3],
        split=("train", "held_out")[seed % 5 == 0],
        language=("latin", "", "ja")[seed % 3],
    )


def write(path: Path, samples: list[Sample], **values: object) -> SampleTable:
    with TableWriter(path) as writer:
        for one in samples:
            writer.append(one)
        writer.publish(replace(metadata_for(samples), **values))  # type: ignore[arg-type]
    return SampleTable.open(path)


def metadata_for(samples: list[Sample]) -> TableMetadata:
    return TableMetadata(
        num_input=len(samples),
        num_kept=len(samples),
        num_tokens=sum(s.num_tokens for s in samples),
        num_supervised=sum(s.num_supervised for s in samples),
    )


def same(a: Sample, b: Sample) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and all(
        getattr(a, name) == getattr(b, name)
        for name in ("loss_spans", "sample_id", "conversation_id", "source", "tags", "split", "language")
    )


def test_schema_is_the_one_that_plan_reads() -> None:
    first = ["sample_id", "num_tokens", "token_ids", "loss_spans", "conversation_id", "source", "tags"]
    assert SCHEMA.names == [*first, "split", "language"]
    assert SCHEMA.field("sample_id").type == pa.binary(16)
    assert SCHEMA.field("num_tokens").type == pa.int32()
    assert SCHEMA.field("token_ids").type.value_type == pa.int32()
    assert SCHEMA.field("source").type == pa.dictionary(pa.int32(), pa.string())


def test_round_trip_is_exact_over_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "ROW_GROUP_TOKENS", 50)
    samples = [sample(i, 3 + i % 20) for i in range(200)]
    table = write(tmp_path / "samples.parquet", samples, tokenizer_digest="ab", dropped={"too_long": 3})
    assert all(same(a, b) for a, b in zip(samples, table.samples(), strict=True))
    assert (table.num_rows, table.num_tokens) == (200, sum(s.num_tokens for s in samples))
    assert table.metadata.tokenizer_digest == "ab"
    assert table.metadata.dropped == {"too_long": 3}
    assert pq.ParquetFile(table.path).metadata.num_row_groups > 10


def test_raw_columns_hold_what_the_header_of_the_module_says(tmp_path: Path) -> None:
    one = Sample(np.array([5, 6, 7, 8], np.int32), ((1, 2), (3, 4)), conversation_id="c", source="s", tags=("a", "b"))
    write(tmp_path / "t.parquet", [one])
    row = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]
    assert row == {
        "sample_id": bytes.fromhex(sample_id_of([5, 6, 7, 8])),
        "num_tokens": 4,
        "token_ids": [5, 6, 7, 8],
        "loss_spans": [1, 2, 3, 4],
        "conversation_id": "c",
        "source": "s",
        "tags": ["a", "b"],
        "split": "train",
        "language": "",
    }
    keys = pq.ParquetFile(tmp_path / "t.parquet").metadata.metadata
    assert json.loads(keys[b"eyas.format_version"]) == 2
    assert json.loads(keys[b"eyas.num_kept"]) == 1


def test_equal_rows_give_equal_bytes_and_the_digest_is_of_the_bytes(tmp_path: Path) -> None:
    samples = [sample(i) for i in range(50)]
    a, b = write(tmp_path / "a.parquet", samples), write(tmp_path / "b.parquet", samples)
    assert a.path.read_bytes() == b.path.read_bytes()
    assert a.digest == xxhash.xxh3_128_hexdigest(a.path.read_bytes())


def test_batches_give_only_the_columns_asked_for(tmp_path: Path) -> None:
    table = write(tmp_path / "t.parquet", [sample(i) for i in range(700)])
    batches = list(table.batches(["sample_id", "num_tokens", "source"]))
    assert all(batch.schema.names == ["sample_id", "num_tokens", "source"] for batch in batches)
    assert sum(batch.num_rows for batch in batches) == 700
    with pytest.raises(ValueError, match="no such column: nope"):
        list(table.batches(["nope"]))


def test_a_sample_does_not_keep_its_batch_alive(tmp_path: Path) -> None:
    first = next(write(tmp_path / "t.parquet", [sample(i) for i in range(3)]).samples())
    assert first.token_ids.base is None


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_spans_survive_flattening(mask: list[bool]) -> None:
    spans = spans_of(mask)
    assert unflatten_spans(np.array(flatten_spans(spans), np.int32)) == spans


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=30))
def test_any_lengths_round_trip(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    samples = [Sample(np.arange(n, dtype=np.int32), ((n - 1, n),), sample_id=f"{n:032x}") for n in lengths]
    table = write(tmp_path_factory.mktemp("t") / "t.parquet", samples)
    assert all(same(a, b) for a, b in zip(samples, table.samples(), strict=True))


@pytest.mark.parametrize("spans", [(), ((2, 2),), ((3, 5), (1, 2)), ((0, 3), (2, 4)), ((0, 9),), ((-1, 2),)])
def test_impossible_spans_are_refused(tmp_path: Path, spans: tuple[tuple[int, int], ...]) -> None:
    with TableWriter(tmp_path / "t.parquet") as writer, pytest.raises(ValueError, match=r"spans|supervised"):
        writer.append(Sample(np.arange(8, dtype=np.int32), spans))


def test_a_writer_that_fails_leaves_the_old_table_and_no_temporary_file(tmp_path: Path) -> None:
    table = write(tmp_path / "t.parquet", [sample(1)])
    before = table.path.read_bytes()
    with pytest.raises(RuntimeError), TableWriter(table.path) as writer:
        writer.append(sample(2))
        raise RuntimeError
    assert table.path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_counts_that_are_not_those_of_the_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names 2 rows, 1"), TableWriter(tmp_path / "t.parquet") as writer:
        writer.append(sample(1))
        writer.publish(TableMetadata(num_kept=2))
    assert list(tmp_path.iterdir()) == []


def test_table_is_private_to_the_user(tmp_path: Path) -> None:
    table = write(tmp_path / "t.parquet", [sample(1)])
    assert stat.S_IMODE(table.path.stat().st_mode) == 0o600


def _write_and_hang(path: Path, ready: object) -> None:
    with TableWriter(path) as writer:
        for i in range(20_000):
            writer.append(sample(i))
        ready.set()  # type: ignore[attr-defined]
        signal.pause()


def test_kill_in_the_middle_leaves_the_old_table_and_the_next_writer_takes_over(tmp_path: Path) -> None:
    table = write(tmp_path / "t.parquet", [sample(1)])
    before = table.path.read_bytes()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=_write_and_hang, args=(table.path, ready))
    child.start()
    assert ready.wait(30)
    with pytest.raises(DataError, match="another 'eyas prepare' is writing"):
        TableWriter(table.path)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert table.path.read_bytes() == before
    assert (tmp_path / ".t.parquet.tmp").exists()
    assert write(table.path, [sample(2), sample(3)]).num_rows == 2
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_full_disk_is_one_clear_line_and_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write(tmp_path / "t.parquet", [sample(1)])
    before = table.path.read_bytes()

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace, match=r"t\.parquet: disk full"):
        write(table.path, [sample(2)])
    assert table.path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_full_device_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "ROW_GROUP_TOKENS", 20_000)
    monkeypatch.setattr(table_module, "_open_exclusive", lambda _path: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(OutOfSpace, match="disk full"), TableWriter(tmp_path / "t.parquet") as writer:
        writer.append(sample(1, 30_000))
        writer.publish(TableMetadata(num_kept=1))


def one_line(error: pytest.ExceptionInfo[DataError], path: Path) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        list(SampleTable.open(path).samples())
    return one_line(error, path)


def test_each_unreadable_table_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    assert "no such file" in refusal(path)
    assert "directory" in refusal(tmp_path)
    path.write_bytes(b"")
    assert "empty file" in refusal(path)
    path.write_bytes(b'{"messages": []}\n' * 10)
    assert "not a readable Parquet file" in refusal(path)
    pq.write_table(pa.table({"a": [1]}), path)
    assert "not a sample table" in refusal(path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(TableMetadata(num_kept=1).to_keys()), path)
    assert "not the columns" in refusal(path)
    with pytest.raises(DataError):
        write(path, [sample(1)], format_version=3)
    assert "format 3, this eyas reads up to 2" in refusal(path)
    pq.write_table(pq.read_table(path, columns=SCHEMA_1.names).replace_schema_metadata(keys_of(1, 2)), path)
    assert "differs in: split, language" in refusal(path)


def keys_of(num_rows: int, version: int) -> dict[str, str]:
    return TableMetadata(num_kept=num_rows, format_version=version).to_keys()


def test_a_table_of_version_1_is_read_as_train_without_language(tmp_path: Path) -> None:
    samples = [sample(i) for i in range(300)]
    new = write(tmp_path / "new.parquet", samples)
    old = pq.read_table(new.path, columns=SCHEMA_1.names).cast(SCHEMA_1).replace_schema_metadata(keys_of(300, 1))
    path = tmp_path / "old.parquet"
    pq.write_table(old, path)
    expected = [replace(one, split="train", language="") for one in samples]
    table = SampleTable.open(path)
    assert all(same(a, b) for a, b in zip(expected, table.samples(), strict=True))
    for columns in (["split"], ["language", "num_tokens"], ["sample_id", "num_tokens", "token_ids", "source", "tags"]):
        batches = list(table.batches(columns))
        assert all(batch.schema == pa.schema([SCHEMA.field(name) for name in columns]) for batch in batches)
        assert sum(batch.num_rows for batch in batches) == 300
    assert {value for batch in table.batches(["split"]) for value in batch.column(0).to_pylist()} == {"train"}


def test_truncated_or_damaged_bytes_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [sample(i, 500) for i in range(40)]).path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "not a readable Parquet file" in refusal(path)
    for position in range(100, 20_000, 1_999):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        assert "damaged" in refusal(path)


def test_a_table_replaced_while_in_use_is_an_error(tmp_path: Path) -> None:
    table = write(tmp_path / "t.parquet", [sample(1)])
    write(table.path, [sample(2)])
    with pytest.raises(DataError, match="replaced while in use"):
        list(table.batches())


def test_sealed_rows_can_be_read_back_before_publication(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "t.parquet", stage="rows") as writer:
        for i in range(3):
            writer.append(sample(i))
        writer.seal()
        assert sum(batch.num_rows for batch in writer.batches(["sample_id"])) == 3
    assert list(tmp_path.iterdir()) == []
