"""Reading: by index and by id, into any buffer, from any thread or process, in any order, whatever the cache holds."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import io
import os
import pickle
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from eyas.data.table import SampleTable
from eyas.engine.fake import FakeEngine, FakeSettings, Fault, normed, to_block
from eyas.errors import DataError, ShardCorrupt, StoreError
from eyas.records import Provenance
from eyas.store import manifest, reader, record
from eyas.store.layout import Layout
from eyas.store.reader import DataSet, Permutation
from eyas.store.writer import DataSetWriter
from fake_data import config, make_table, run

LENGTHS = [5, 9, 12, 7, 20, 3, 11, 6, 8, 1, 13, 4]
DTYPES = ["bfloat16", "float16", "float32"]


def captured(base: Path, *, dtype: str = "bfloat16", shard_tokens: int = 20, **settings: Any) -> Path:
    table = make_table(base / "samples.parquet", LENGTHS)
    run(table, config(base / "out", shard_tokens=shard_tokens), dtype=dtype, hidden_size=4, **settings)
    return base / "out"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def tokens_of(base: Path) -> dict[str, np.ndarray]:
    return {sample.sample_id: sample.token_ids for sample in SampleTable.open(base / "samples.parquet").samples()}


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_shapes_and_dtypes(tmp_path: Path, dtype: str) -> None:
    """What is read is what the engine computes from the sample's tokens, bit for bit."""
    data = DataSet(captured(tmp_path, dtype=dtype))
    engine = FakeEngine(None, FakeSettings(dtype=dtype, hidden_size=4))  # type: ignore[arg-type]
    tokens = tokens_of(tmp_path)
    assert len(data) == len(LENGTHS) == len(tokens)
    assert data.num_tokens == sum(LENGTHS)
    assert data.fingerprint == engine.info().spec.fingerprint
    for i in range(len(data)):
        sample = data[i]
        ids = tokens[sample.sample_id]
        num_tokens = len(ids)
        assert (sample.sample_id, sample.num_tokens) == (data.sample_id(i), data.token_counts[i]) != ("", 0)
        assert sample.num_tokens == num_tokens and data.sample_bytes(i) == num_tokens * data.spec.bytes_per_token
        aux, last = sample.aux_hidden_states(), sample.last_hidden_state()
        assert aux.shape == (num_tokens, 3, 4) and last.shape == (num_tokens, 4)
        assert aux.dtype == last.dtype == getattr(torch, dtype)
        for a, k in enumerate(data.spec.aux_layers):
            expected = to_block(engine.hidden(ids, k), dtype).data
            assert bytes(sample.field(f"hidden.{k}")) == bytes(expected)
            assert bytes(aux[:, a].contiguous().view(torch.uint8).numpy()) == bytes(expected)
        expected = to_block(normed(engine.hidden(ids, 8)), dtype).data
        assert bytes(last.contiguous().view(torch.uint8).numpy()) == bytes(expected) == bytes(sample.field("last"))
        assert torch.equal(sample.tensors()[:-1].transpose(0, 1), aux)


def test_tensors_are_views_of_the_buffer(whole: Path) -> None:
    data = DataSet(whole)
    buffer = torch.zeros(data.sample_bytes(0), dtype=torch.uint8)
    sample = data.read_into(0, memoryview(buffer.numpy()))
    assert sample.tensors().data_ptr() == buffer.data_ptr()
    assert sample.aux_hidden_states().data_ptr() == buffer.data_ptr()


def test_no_field_of_that_name(whole: Path) -> None:
    with pytest.raises(ValueError, match="not in"):
        DataSet(whole)[0].field("hidden.99")


# --- index and id --------------------------------------------------------------------------------------------------


def test_index_and_sample_id_are_inverse(whole: Path) -> None:
    data = DataSet(whole)
    ids = [data.sample_id(i) for i in range(len(data))]
    assert len(set(ids)) == len(LENGTHS)
    assert [data.index_of(sample_id) for sample_id in ids] == list(range(len(ids)))
    assert bytes(data[-1].data) == bytes(data[len(data) - 1].data)
    assert data[-len(data)].sample_id == ids[0]


def test_indices_follow_shard_ids(whole: Path) -> None:
    data = DataSet(whole)
    expected = [s for p in sorted((whole / "records").iterdir()) for s in record.read(p).sample_ids]
    assert [data.sample_id(i) for i in range(len(data))] == expected


@pytest.mark.parametrize("sample_id", ["", "0" * 32, "f" * 32, "zz", "0" * 31, "0" * 64, "\0" * 32, "A" * 32])
def test_unknown_ids_are_key_errors(whole: Path, sample_id: str) -> None:
    with pytest.raises(KeyError):
        DataSet(whole).index_of(sample_id)


def test_ids_with_equal_halves_are_told_apart(whole: Path) -> None:
    data = DataSet(whole)
    ids = [data.sample_id(i) for i in range(len(data))]
    for sample_id in ids:
        other = sample_id[:-1] + ("0" if sample_id[-1] != "0" else "1")
        assert other not in ids
        with pytest.raises(KeyError):
            data.index_of(other)


def test_many_ids_are_looked_up_at_once(whole: Path) -> None:
    data = DataSet(whole)
    order = np.random.default_rng(0).permutation(len(data))
    others = data.ids[order].copy()
    others[:, -1] ^= 1  # equal first halves
    assert data.indices_of(np.concatenate([data.ids[order], others])).tolist() == [*order, *[-1] * len(data)]
    assert data.indices_of(np.array([[0] * 16, [255] * 16], np.uint8)).tolist() == [-1, -1]
    assert data.indices_of(np.zeros((0, 16), np.uint8)).tolist() == []


def test_ids_that_begin_alike_are_looked_up_one_by_one(whole: Path) -> None:
    data = DataSet(whole)
    ids = np.random.default_rng(0).integers(0, 256, (len(data), 16), np.uint8)
    ids[:9, :8] = ids[0, :8]
    data._manifest = dataclasses.replace(data._manifest, ids=ids)
    assert data.indices_of(ids[::-1].copy()).tolist() == list(range(len(data)))[::-1]
    other = ids[:1].copy()
    other[0, 15] ^= 1
    assert data.indices_of(other).tolist() == [-1]


def test_indices_out_of_range(whole: Path) -> None:
    data = DataSet(whole)
    for index in (len(data), -len(data) - 1, 10**9):
        with pytest.raises(IndexError):
            data[index]
    assert sum(data[i].num_tokens for i in range(len(data))) == data.num_tokens


def test_an_empty_data_set(tmp_path: Path) -> None:
    spec = FakeEngine(None, FakeSettings(hidden_size=4)).info().spec
    DataSetWriter(tmp_path / "out", spec).close()
    for _ in range(2):
        data = DataSet(tmp_path / "out")
        assert (len(data), data.num_tokens, list(data.permutation(seed=0))) == (0, 0, [])
        with pytest.raises(KeyError):
            data.index_of("0" * 32)
        assert data.indices_of(np.zeros((2, 16), np.uint8)).tolist() == [-1, -1]
        with pytest.raises(IndexError):
            data[0]


def test_rejected_samples_are_not_there(tmp_path: Path) -> None:
    root = captured(tmp_path, faults=(Fault(kind="refused", every=2),))
    rejected = {r.sample_id for p in (root / "records").iterdir() for r in record.read(p).rejects}
    data = DataSet(root)
    assert rejected and len(data) == len(LENGTHS) - len(rejected)
    for sample_id in rejected:
        with pytest.raises(KeyError):
            data.index_of(sample_id)
    assert all(data[i].num_tokens for i in range(len(data)))


def test_shards_without_a_sample(tmp_path: Path) -> None:
    """With one sample a shard, some shards have no payload."""
    root = captured(tmp_path, shard_tokens=1, faults=(Fault(kind="refused", every=2),))
    assert len(list((root / "records").iterdir())) == len(LENGTHS) > len(list((root / "shards").iterdir()))
    for _ in range(2):
        data = DataSet(root)
        assert len(data) == len(list((root / "shards").iterdir()))
        assert {data[i].sample_id for i in range(len(data))} == {data.sample_id(i) for i in range(len(data))}


# --- buffers -------------------------------------------------------------------------------------------------------


def test_read_into_fills_the_front_of_a_buffer_and_nothing_else(whole: Path) -> None:
    data = DataSet(whole)
    for i in range(len(data)):
        size = data.sample_bytes(i)
        buffer = bytearray(b"\xaa" * (size + 64))
        sample = data.read_into(i, memoryview(buffer))
        assert sample.data.nbytes == size
        assert bytes(buffer[:size]) == bytes(data[i].data)
        assert bytes(buffer[size:]) == b"\xaa" * 64


def test_one_buffer_for_many_samples(whole: Path) -> None:
    """A pool of (page-locked) memory: torch owns it, eyas writes into it."""
    data = DataSet(whole)
    pool = torch.empty(max(data.sample_bytes(i) for i in range(len(data))), dtype=torch.uint8)
    for i in range(len(data)):
        got = data.read_into(i, memoryview(pool.numpy())).tensors().clone()
        assert torch.equal(got.view(torch.int16), data[i].tensors().view(torch.int16))


def test_buffers_of_other_item_types(whole: Path) -> None:
    data = DataSet(whole)
    for dtype in ("u2", "f4", "i8"):
        array = np.zeros(1000, dtype)
        assert bytes(data.read_into(0, array.data).data) == bytes(data[0].data)
    square = np.zeros((100, 100), np.uint8)
    assert bytes(data.read_into(0, square.data).data) == bytes(data[0].data)


def test_buffers_that_cannot_do(whole: Path) -> None:
    data = DataSet(whole)
    size = data.sample_bytes(0)
    with pytest.raises(ValueError, match=f"of {size - 1} bytes for a sample of {size}"):
        data.read_into(0, memoryview(bytearray(size - 1)))
    with pytest.raises(ValueError, match="of 0 bytes"):
        data.read_into(0, memoryview(bytearray()))
    with pytest.raises(ValueError, match="read-only"):
        data.read_into(0, memoryview(bytes(size)))


# --- threads and processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_files", [1, 2, 128])
def test_eight_threads_over_few_open_files(whole: Path, monkeypatch: pytest.MonkeyPatch, open_files: int) -> None:
    monkeypatch.setattr(reader, "_OPEN_FILES", open_files)
    data = DataSet(whole)
    expected = [bytes(DataSet(whole)[i].data) for i in range(len(data))]
    assert len(list((whole / "shards").iterdir())) > 2
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    start = threading.Barrier(8)

    def read(seed: int) -> int:
        start.wait()
        for i in np.random.default_rng(seed).integers(0, len(data), 300):
            assert bytes(data[int(i)].data) == expected[i]
        return len(data._open)

    try:
        with ThreadPoolExecutor(8) as pool:
            open_at_end = list(pool.map(read, range(8)))
    finally:
        sys.setswitchinterval(switch)
    assert max(open_at_end) <= open_files + 8
    assert len(data._open) <= open_files


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_are_given_back(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_OPEN_FILES", 2)
    gc.collect()
    before = descriptors()
    data = DataSet(whole)
    for i in range(len(data)):
        data[i]
        assert descriptors() <= before + 3
    data.close()
    assert descriptors() == before
    assert bytes(data[0].data)  # open again by need
    del data
    gc.collect()
    assert descriptors() == before


def test_pickles_as_its_path(whole: Path) -> None:
    data = DataSet(whole, check=False)
    data[0]
    blob = pickle.dumps(data)
    assert len(blob) < 500
    copy = pickle.loads(blob)
    assert bytes(copy[3].data) == bytes(data[3].data) and copy._check is False


class Values(torch.utils.data.Dataset[torch.Tensor]):
    """What a trainer's loader sees."""

    def __init__(self, data: DataSet) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index].tensors().float()


def test_worker_processes_of_a_loader(whole: Path) -> None:
    data = DataSet(whole)
    data[0]  # one file is open already when the workers start
    loader = torch.utils.data.DataLoader(Values(data), batch_size=None, num_workers=2, shuffle=False)
    got = list(loader)
    assert len(got) == len(data)
    for i, tensor in enumerate(got):
        assert torch.equal(tensor, data[i].tensors().float())


# --- order ---------------------------------------------------------------------------------------------------------


def walk(data: DataSet, count: int, **state: int) -> list[str]:
    permutation = data.permutation(**{"seed": 0, **state})
    return [data.sample_id(next(permutation)) for _ in range(count)]


def test_each_epoch_is_a_bijection_and_a_new_order(whole: Path) -> None:
    data = DataSet(whole)
    n = len(data)
    orders = [tuple(data.permutation(seed=3, epoch=e).indices()) for e in range(20)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(set(orders)) == 20
    assert len({tuple(data.permutation(seed=s).indices()) for s in range(20)}) == 20
    walked = data.permutation(seed=3)
    assert [tuple(next(walked) for _ in range(n)) for _ in range(20)] == orders
    assert walked.state == {"seed": 3, "epoch": 19, "position": n}


def test_every_place_is_about_equally_likely() -> None:
    ids = np.random.default_rng(0).integers(0, 256, (10, 16), dtype=np.uint8)
    counts = np.zeros((10, 10), int)
    for epoch in range(2000):
        counts[np.arange(10), Permutation(ids, seed=1, epoch=epoch).indices()] += 1
    assert counts.min() > 140 and counts.max() < 260  # 200 on average, standard deviation 13


def test_state_resumes_at_any_position(whole: Path) -> None:
    data = DataSet(whole)
    steps = 2 * len(data) + 3
    through = walk(data, steps, seed=5)
    for stop in range(steps):
        first = data.permutation(seed=5)
        done = [data.sample_id(next(first)) for _ in range(stop)]
        resumed = DataSet(data.layout.root).permutation(**first.state)
        assert done + [data.sample_id(next(resumed)) for _ in range(steps - stop)] == through


def test_order_does_not_depend_on_shards(tmp_path: Path, whole: Path) -> None:
    """The same samples in other shards: other indices, the same walk of sample ids."""
    other = DataSet(captured(tmp_path, shard_tokens=1000))
    data = DataSet(whole)
    assert [other.sample_id(i) for i in range(len(other))] != [data.sample_id(i) for i in range(len(data))]
    for state in ({}, {"seed": 9}, {"seed": 9, "epoch": 4}, {"seed": 9, "position": 5}):
        assert walk(other, 30, **state) == walk(data, 30, **state)


def test_states_that_cannot_be() -> None:
    ids = np.zeros((3, 16), np.uint8)
    for state in ({"position": 4}, {"position": -1}, {"epoch": -1}):
        with pytest.raises(ValueError, match="out of range"):
            Permutation(ids, seed=0, **state)
    assert len({int(i) for i in Permutation(ids, seed=-1).indices()}) == 3


# --- the cache -----------------------------------------------------------------------------------------------------


def ids_of(root: Path) -> list[str]:
    data = DataSet(root)
    return [data.sample_id(i) for i in range(len(data))]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Records that were read since."""
    seen: list[Path] = []
    real = record.read

    def read(path: Path) -> record.ShardRecord:
        seen.append(path)
        return real(path)

    monkeypatch.setattr(record, "read", read)
    return seen


def test_a_sound_cache_spares_the_records(root: Path, reads: list[Path]) -> None:
    expected = ids_of(root)
    reads.clear()
    assert ids_of(root) == expected
    assert reads == []
    spec = DataSet(root).spec
    assert [e.shard_id for e in manifest.summaries(Layout(root), spec)] == sorted(
        p.stem for p in (root / "records").iterdir()
    )
    assert reads == []
    assert (root / "manifest.parquet").stat().st_mode & 0o777 == 0o600


def test_a_stale_cache_reads_just_what_changed(root: Path, reads: list[Path]) -> None:
    expected = ids_of(root)
    away = sorted((root / "records").iterdir())[1]
    gone, data = set(record.read(away).sample_ids), away.read_bytes()
    away.unlink()
    reads.clear()
    assert ids_of(root) == [s for s in expected if s not in gone]
    assert reads == []
    away.write_bytes(data)
    assert ids_of(root) == expected
    assert reads == [away]


def test_a_deleted_cache_is_made_again(root: Path) -> None:
    expected = ids_of(root)
    (root / "manifest.parquet").unlink()
    assert ids_of(root) == expected
    assert (root / "manifest.parquet").exists()


def test_a_damaged_cache_is_never_believed(root: Path) -> None:
    expected = ids_of(root)
    path = root / "manifest.parquet"
    good = path.read_bytes()
    values = [bytes(DataSet(root)[i].data) for i in range(len(expected))]
    for i in range(0, len(good), 31):
        path.write_bytes(good[:i] + bytes([good[i] ^ (1 << i % 8)]) + good[i + 1 :])
        data = DataSet(root)
        assert [data.sample_id(j) for j in range(len(data))] == expected, i
        if i % 5 == 0:
            assert [bytes(data[j].data) for j in range(len(data))] == values, i
    for bad in (b"", b"PAR1", good[:-1], good[:100], os.urandom(len(good))):
        path.write_bytes(bad)
        assert ids_of(root) == expected
    assert manifest._read_cache(path, DataSet(root).spec) is not None  # the last one was put right


def test_a_cache_of_another_spec_is_not_taken_over(root: Path, tmp_path: Path) -> None:
    """The same shards, records of the same size and time; only the values differ."""
    (tmp_path / "b").mkdir()
    other = captured(tmp_path / "b", num_layers=9)
    data, foreign = DataSet(root), DataSet(other)
    spec = data.spec
    assert spec != foreign.spec and len(spec.fields) == len(foreign.spec.fields)
    assert [e.shard_id for e in data._manifest.shards] == [e.shard_id for e in foreign._manifest.shards]
    shutil.copy(other / "manifest.parquet", root / "manifest.parquet")
    assert manifest._read_cache(root / "manifest.parquet", spec) is None
    assert [bytes(DataSet(root)[i].data) for i in range(len(data))] == [bytes(data[i].data) for i in range(len(data))]


def test_a_directory_that_cannot_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(root)
    (root / "manifest.parquet").unlink()
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    assert ids_of(root) == expected
    assert not (root / "manifest.parquet").exists()
    assert not [p for p in root.iterdir() if p.name.startswith(".")]
    data = DataSet(root)
    assert [data[i].sample_id for i in range(len(data))] == expected


def test_a_full_disk_costs_the_cache_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(root)
    (root / "manifest.parquet").unlink()

    def full(table: Any, where: io.BufferedWriter, **kwargs: Any) -> None:
        where.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    assert ids_of(root) == expected
    assert not (root / "manifest.parquet").exists()
    assert not [p for p in root.iterdir() if p.name.endswith(".tmp")]


def test_the_payload_is_not_touched_by_opening(root: Path) -> None:
    for path in (root / "shards").iterdir():
        path.unlink()
    assert len(DataSet(root)) == len(LENGTHS)


def test_opening_while_a_writer_commits(tmp_path: Path) -> None:
    """Readers see whole shards, more and more of them, and no error; each of them reads what it sees."""
    table = make_table(tmp_path / "samples.parquet", [4] * 60)
    out = tmp_path / "out"
    settings = {"hidden_size": 4, "seconds_per_1k_tokens": 1.0}
    writing = threading.Thread(target=run, args=(table, config(out, shard_tokens=8)), kwargs=settings)
    writing.start()
    sizes = [0]
    deadline = time.monotonic() + 60
    while writing.is_alive() or (sizes[-1] < 60 and time.monotonic() < deadline):
        try:
            data = DataSet(out)
        except StoreError as error:
            assert "not a data set" in str(error) and sizes == [0]
            continue
        sizes.append(len(data))
        assert sizes[-1] % 2 == 0 and sizes[-1] >= sizes[-2]
        for i in range(0, len(data), 7):
            assert data[i].num_tokens == 4
        data.close()
    writing.join()
    assert len(set(sizes)) > 3 and sizes[-1] == 60


def test_a_data_set_is_what_was_committed_when_it_was_opened(root: Path) -> None:
    data = DataSet(root)
    next((root / "records").iterdir()).unlink()
    assert len(data) == len(LENGTHS) > len(DataSet(root))
    assert all(data[i].num_tokens for i in range(len(data)))


def test_check_can_be_left_to_verify(root: Path) -> None:
    path = sorted((root / "records").iterdir())[0]
    entry = record.read(path)
    assert entry.payload_name is not None
    payload = root / "shards" / entry.payload_name
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    index = DataSet(root).index_of(entry.sample_ids[-1])
    assert bytes(DataSet(root, check=False)[index].data)[-1] == data[-1]
    with pytest.raises(ShardCorrupt, match=rf"last of sample {entry.sample_ids[-1]} differs from its digest"):
        DataSet(root)[index]


# --- many samples --------------------------------------------------------------------------------------------------


def store_open() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "store_open.py"
    spec = importlib.util.spec_from_file_location("store_open", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_many_samples_from_records_and_from_the_cache(tmp_path: Path) -> None:
    """As benchmarks/store_open.py does with a million: no payload is there, and both ways agree."""
    store_open().build(tmp_path / "out", 6000, shard_samples=1000)
    first, again = DataSet(tmp_path / "out"), DataSet(tmp_path / "out")
    assert len(first) == len(again) == 6000
    for name in ("ids", "num_tokens", "shard", "offset", "digests"):
        a, b = getattr(first._manifest, name), getattr(again._manifest, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name
    assert first._manifest.shards == again._manifest.shards
    assert first.num_tokens == sum(e.num_tokens for e in again._manifest.shards)
    for i in (0, 999, 1000, 5999):
        assert again.index_of(first.sample_id(i)) == i
    assert np.array_equal(np.sort(again.permutation(seed=1).indices()), np.arange(6000))
    with pytest.raises(StoreError, match="payload is gone"):
        again[0]


def test_errors_are_of_the_tree() -> None:
    assert issubclass(ShardCorrupt, StoreError) and not issubclass(DataError, StoreError)
    assert Provenance("a", "1").key() == Provenance("a", "1", host="b").key()
