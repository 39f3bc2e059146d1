"""Data sets with one fingerprint become one, by metadata alone."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from eyas.data.table import SampleTable
from eyas.engine.fake import FakeEngine, FakeSettings, Fault
from eyas.errors import (
    EXIT_COMPLETE,
    EXIT_INCOMPLETE,
    ConfigError,
    DataSetLocked,
    SpecMismatch,
    Stopped,
    StoreError,
)
from eyas.store import record
from eyas.store.files import Files
from eyas.store.layout import Layout
from eyas.store.merge import MergeReceipt, merge
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.store.writer import lock
from fake_data import config, contents, make_table, run

FIRST = [5, 9, 12, 7, 20, 3, 11]
SECOND = [8, 14, 6, 10]


def captured(base: Path, name: str, lengths: list[int], *, seed: int = 0, order: int = 0, **settings: object) -> Path:
    table = make_table(base / f"{name}.parquet", lengths, seed=seed)
    run(table, config(base / name, shard_tokens=30, seed=order), hidden_size=4, **settings)  # type: ignore[arg-type]
    return base / name


def samples(root: Path) -> dict[str, bytes]:
    with_ids = DataSet(root)
    found = {with_ids.sample_id(i): bytes(with_ids[i].data) for i in range(len(with_ids))}
    assert len(found) == len(with_ids)
    with_ids.close()
    return found


def capture_makes_no_call(root: Path, table: SampleTable) -> None:
    engine = FakeEngine(None, FakeSettings(hidden_size=4))
    receipt = run(table, config(root, shard_tokens=30), engine=engine)
    assert (engine.calls, receipt.pending) == (0, 0)


def test_merge_links_payloads_and_keeps_every_sample(tmp_path: Path) -> None:
    a, b = captured(tmp_path, "a", FIRST), captured(tmp_path, "b", SECOND, seed=1)
    receipt = merge(tmp_path / "out", [a, b])
    shards = len(list((a / "records").iterdir())) + len(list((b / "records").iterdir()))
    assert receipt == MergeReceipt(str(tmp_path / "out"), (str(a), str(b)), shards, len(FIRST) + len(SECOND), 0)
    assert samples(tmp_path / "out") == samples(a) | samples(b)
    for source in (a, b):
        for path in (source / "shards").iterdir():
            assert path.stat().st_ino == (tmp_path / "out" / "shards" / path.name).stat().st_ino
        for path in (source / "records").iterdir():
            assert path.read_bytes() == (tmp_path / "out" / "records" / path.name).read_bytes()
    report = verify(tmp_path / "out")
    assert (report.exit_code, report.problems, report.orphans) == (EXIT_COMPLETE, [], 0)


def test_merged_set_is_complete_for_capture(tmp_path: Path) -> None:
    a, b = captured(tmp_path, "a", FIRST), captured(tmp_path, "b", SECOND, seed=1)
    merge(tmp_path / "out", [a, b])
    capture_makes_no_call(tmp_path / "out", SampleTable.open(tmp_path / "a.parquet"))
    capture_makes_no_call(tmp_path / "out", SampleTable.open(tmp_path / "b.parquet"))
    # It grows as any other: new samples get a segment of their own.
    more = make_table(tmp_path / "more.parquet", [4, 4], seed=2)
    assert run(more, config(tmp_path / "out", shard_tokens=30), hidden_size=4).committed == len(FIRST + SECOND) + 2
    assert verify(tmp_path / "out").exit_code == EXIT_COMPLETE


def test_identical_shards_enter_once(tmp_path: Path) -> None:
    a = captured(tmp_path, "a", FIRST)
    (tmp_path / "again").mkdir()
    b = captured(tmp_path / "again", "b", FIRST)
    receipt = merge(tmp_path / "out", [a, b])
    assert (receipt.shards, receipt.samples, receipt.duplicates) == (
        len(list((a / "records").iterdir())),
        len(FIRST),
        0,
    )
    assert samples(tmp_path / "out") == samples(a)
    assert len(list((tmp_path / "out" / "plan").iterdir())) == 1
    assert verify(tmp_path / "out").exit_code == EXIT_COMPLETE


def overlapping(tmp_path: Path) -> tuple[Path, Path]:
    """Two data sets, the second of which holds the samples of the first and more, in other shards."""
    a = captured(tmp_path, "a", FIRST)
    b = captured(tmp_path, "b", FIRST + SECOND, order=1)
    assert set(samples(a)) < set(samples(b))
    assert not {p.name for p in (a / "records").iterdir()} & {p.name for p in (b / "records").iterdir()}
    return a, b


def test_overlapping_samples_count_once(tmp_path: Path) -> None:
    a, b = overlapping(tmp_path)
    receipt = merge(tmp_path / "out", [a, b])
    assert (receipt.samples, receipt.duplicates) == (len(FIRST + SECOND), len(FIRST))
    assert samples(tmp_path / "out") == samples(b)
    report = verify(tmp_path / "out")
    assert (report.exit_code, report.problems, report.orphans) == (EXIT_COMPLETE, [], 0)
    assert (report.planned, report.committed) == (len(FIRST + SECOND),) * 2
    duplicates = [d for p in (tmp_path / "out" / "records").iterdir() for d in record.read(p).duplicates]
    assert sorted(duplicates) == sorted(samples(a))
    capture_makes_no_call(tmp_path / "out", SampleTable.open(tmp_path / "b.parquet"))


def test_damage_beside_unnamed_rows_is_found(tmp_path: Path) -> None:
    """In a payload some of whose samples count elsewhere: header, named values, size; not the rows without a name."""
    a, b = overlapping(tmp_path)
    merge(tmp_path / "out", [a, b])
    path, entry = next(
        (p, r)
        for p in sorted((tmp_path / "out" / "records").iterdir())
        if (r := record.read(p)).duplicates and r.sample_ids
    )
    assert entry.payload_name is not None
    payload = tmp_path / "out" / "shards" / entry.payload_name
    good = payload.read_bytes()
    payload.unlink()  # else the source would change with it
    named = {
        (offset, num_bytes)
        for field in entry.fields.values()
        for part in field.parts.values()
        for offset, num_bytes in zip(part.offset, part.num_bytes, strict=True)
    }
    places = [0, 7, 8, 60, len(good[: entry.header_bytes].rstrip()), entry.header_bytes - 1]
    places += [offset for offset, _ in named] + [offset + num_bytes - 1 for offset, num_bytes in named]
    for place in places:
        payload.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        assert [p.shard_id for p in verify(tmp_path / "out").problems] == [path.stem], place
    for other in (good[:-1], good + b"\0"):
        payload.write_bytes(other)
        assert [p.shard_id for p in verify(tmp_path / "out").problems] == [path.stem]
    payload.write_bytes(good)
    assert verify(tmp_path / "out").exit_code == EXIT_COMPLETE


@pytest.mark.parametrize("which", ["first", "second", "all"])
def test_repair_of_overlapping_shards_captures_no_sample_twice(tmp_path: Path, which: str) -> None:
    a, b = overlapping(tmp_path)
    merge(tmp_path / "out", [a, b])
    sound = samples(tmp_path / "out")
    sources = {"first": [a], "second": [b], "all": [a, b]}[which]
    for source in sources:
        for path in (source / "records").iterdir():
            (tmp_path / "out" / "records" / path.name).write_bytes(b"")
    report = verify(tmp_path / "out", repair=True)
    assert report.exit_code == EXIT_INCOMPLETE
    table = SampleTable.open(tmp_path / "b.parquet")
    assert run(table, config(tmp_path / "out", shard_tokens=30), hidden_size=4).pending == 0
    assert samples(tmp_path / "out") == sound
    report = verify(tmp_path / "out")
    assert (report.exit_code, report.problems) == (EXIT_COMPLETE, [])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("order", ["rejected first", "captured first"])
def test_a_reject_counts_only_where_no_source_has_the_sample(tmp_path: Path, order: str, seed: int) -> None:
    """Shards of the same samples with other outcomes, and other shards with the same samples."""
    a = captured(tmp_path, "a", FIRST, faults=(Fault(kind="refused", every=2),))
    b = captured(tmp_path, "b", FIRST + SECOND, order=seed)
    merge(tmp_path / "out", [a, b] if order == "rejected first" else [b, a])
    report = verify(tmp_path / "out")
    assert (report.exit_code, report.problems) == (EXIT_COMPLETE, [])
    assert (report.planned, report.committed, report.rejected) == (len(FIRST + SECOND), len(FIRST + SECOND), 0)
    assert samples(tmp_path / "out") == samples(b)
    capture_makes_no_call(tmp_path / "out", SampleTable.open(tmp_path / "b.parquet"))


def test_a_reject_of_every_source_stays_one(tmp_path: Path) -> None:
    faults = (Fault(kind="refused", every=2),)
    a = captured(tmp_path, "a", FIRST, faults=faults)
    b = captured(tmp_path, "b", FIRST + SECOND, faults=faults)
    merge(tmp_path / "out", [a, b])
    report, alone = verify(tmp_path / "out"), verify(b)
    assert report.problems == [] and alone.rejected
    assert (report.planned, report.committed, report.rejected) == (alone.planned, alone.committed, alone.rejected)
    capture_makes_no_call(tmp_path / "out", SampleTable.open(tmp_path / "b.parquet"))


def test_merge_of_a_merge(tmp_path: Path) -> None:
    a, b = overlapping(tmp_path)
    c = captured(tmp_path, "c", [6, 6, 6], seed=3)
    merge(tmp_path / "ab", [a, b])
    receipt = merge(tmp_path / "out", [c, tmp_path / "ab", b])
    assert receipt.samples == len(FIRST + SECOND) + 3
    assert samples(tmp_path / "out") == samples(b) | samples(c)
    assert verify(tmp_path / "out").exit_code == EXIT_COMPLETE


def test_other_fingerprint_is_refused_and_names_the_fields(tmp_path: Path) -> None:
    a, b = captured(tmp_path, "a", FIRST), captured(tmp_path, "b", SECOND, seed=1, dtype="float16")
    with pytest.raises(SpecMismatch, match="dtype: float16 there, bfloat16 here") as caught:
        merge(tmp_path / "out", [a, b])
    assert str(b) in str(caught.value) and caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_unfinished_source_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    a, b = captured(tmp_path, "a", FIRST), captured(tmp_path, "b", SECOND, seed=1)
    next((b / "records").iterdir()).unlink()
    with pytest.raises(StoreError, match="1 of its shards are pending") as caught:
        merge(tmp_path / "out", [a, b])
    assert str(b) in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert samples(a)


def test_source_without_a_payload_is_refused(tmp_path: Path) -> None:
    a = captured(tmp_path, "a", FIRST)
    gone = next((a / "shards").iterdir())
    gone.unlink()
    with pytest.raises(StoreError) as caught:
        merge(tmp_path / "out", [a])
    assert caught.value.path == str(gone)


def test_damaged_source_is_refused(tmp_path: Path) -> None:
    a = captured(tmp_path, "a", FIRST)
    path = next((a / "records").iterdir())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError) as caught:
        merge(tmp_path / "out", [a])
    assert caught.value.path == str(path)
    assert not (tmp_path / "out").exists()


def test_other_file_system_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = captured(tmp_path, "a", FIRST)
    real = Files.link

    def link(self: Files, old: Path, new: Path) -> None:
        if old.suffix == ".safetensors":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(self, old, new)

    monkeypatch.setattr(Files, "link", link)
    with pytest.raises(StoreError, match=r"cross-device.*on the same file system"):
        merge(tmp_path / "out", [a])
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_merged_into(tmp_path: Path) -> None:
    a = captured(tmp_path, "a", FIRST)
    with pytest.raises(ConfigError, match="not empty"):
        merge(a, [a])
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        merge(tmp_path / "file", [a])
    with pytest.raises(ConfigError, match="each only once"):
        merge(tmp_path / "out", [a, tmp_path / "." / "a"])
    with pytest.raises(ConfigError, match="at least one"):
        merge(tmp_path / "out", [])
    with pytest.raises(StoreError, match="not a data set"):
        merge(tmp_path / "out", [tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    assert merge(tmp_path / "empty", [a]).samples == len(FIRST)


def test_source_that_is_being_written_is_refused(tmp_path: Path) -> None:
    import os

    a, b = captured(tmp_path, "a", FIRST), captured(tmp_path, "b", SECOND, seed=1)
    fd = lock(Layout(b).lock)
    with pytest.raises(DataSetLocked):
        merge(tmp_path / "out", [a, b])
    os.close(fd)
    merge(tmp_path / "out", [a, b])  # neither lock was left behind


def test_released_shards_stay_committed(tmp_path: Path) -> None:
    a = captured(tmp_path, "a", FIRST)
    path = next((a / "records").iterdir())
    body = json.loads(path.read_bytes())
    (a / "shards" / body["payload"]["name"]).unlink()
    body["released"] = True
    del body["record_digest"]
    path.write_bytes(record.sealed(body, "record_digest"))
    merge(tmp_path / "out", [a])
    assert verify(tmp_path / "out").exit_code == EXIT_COMPLETE
    assert contents(tmp_path / "out")["eyas.json"] == contents(a)["eyas.json"]
    assert Stopped.exit_code == EXIT_INCOMPLETE
