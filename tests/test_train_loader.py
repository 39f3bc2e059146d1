"""From a sample table and a data set to batches: nothing lost in the join, the right bytes in the right rows."""

from __future__ import annotations

import _thread
import dataclasses
import itertools
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.data.table import SampleTable
from eyas.engine.fake import Fault
from eyas.errors import DataError, ShardCorrupt, ShardMissing
from eyas.records import Sample, sample_id_of
from eyas.store.layout import Layout
from eyas.store.reader import DataSet
from eyas.train.loader import Batch, Loader, batch_of
from eyas.train.packs import Pack, Schedule, evaluation_packs
from eyas.train.samples import TrainingSamples
from fake_data import config, make_table_of, run

NUM_SAMPLES = 40
PACK_TOKENS = 64


def made(number: int) -> Sample:
    """A sample that follows from its number: some supervised spans, a source, tags; each fourth is held out."""
    rng = np.random.default_rng(number)
    num_tokens = int(rng.integers(4, 30))
    spans = ((1, 3), (num_tokens - 1, num_tokens)) if number % 2 else ((0, num_tokens),)
    return Sample(
        rng.integers(0, 1000, num_tokens).astype(np.int32),
        spans,
        conversation_id=f"c{number}",
        source=("chat", "code", "maths")[number % 3],
        tags=("long", "short")[: number % 3],
        split="held_out" if number % 4 == 0 else "train",
        language=("Latin", "")[number % 2],
    )


SAMPLES = [made(number) for number in range(NUM_SAMPLES)]
REFUSED = tuple(SAMPLES[number].sample_id for number in (3, 4, 9))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 40 samples, three of which the engine refused."""
    base = tmp_path_factory.mktemp("base")
    table = make_table_of(base / "samples.parquet", SAMPLES)
    run(table, config(base / "out", shard_tokens=100), hidden_size=4, faults=(Fault(kind="refused", samples=REFUSED),))
    return base


@pytest.fixture(scope="module")
def data(base: Path) -> DataSet:
    return DataSet(base / "out")


@pytest.fixture(scope="module")
def samples(base: Path, data: DataSet) -> TrainingSamples:
    return TrainingSamples(SampleTable.open(base / "samples.parquet"), data)


def schedule_of(samples: TrainingSamples) -> Schedule:
    return Schedule(
        samples.ids, samples.token_counts, samples.train, pack_tokens=PACK_TOKENS, step_packs=3, seed=1, window=8
    )


def same(a: Batch, b: Batch) -> bool:
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Batch))
    return all(torch.equal(x.cpu(), y.cpu()) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def expected(data: DataSet, pack: Pack) -> Batch:
    by_id = {sample.sample_id: sample for sample in SAMPLES}
    parts = [(data[i].tensors(), by_id[data.sample_id(i)]) for i in pack]
    batch = batch_of([(s.token_ids, s.loss_mask(), states) for states, s in parts])
    return dataclasses.replace(batch, indices=pack)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert not loader_threads()
    yield
    assert not loader_threads()


# --- the join ------------------------------------------------------------------------------------------------------


def test_every_row_is_used_or_counted(samples: TrainingSamples) -> None:
    counts = samples.counts
    assert counts.rows == {"train": 30, "held_out": 10}
    assert counts.not_captured == {"train": 2, "held_out": 1}
    assert (
        counts.used == {"train": 28, "held_out": 9} == {"train": len(samples.train), "held_out": len(samples.held_out)}
    )
    assert counts.over_limit == {"train": 0, "held_out": 0} and counts.not_in_table == 0
    tokens = {s.sample_id: s.num_tokens for s in SAMPLES if s.split == "train" and s.sample_id not in REFUSED}
    assert counts.used_tokens["train"] == sum(tokens.values())
    assert counts.line() == (
        f"train: 28 of 30 samples, {sum(tokens.values())} tokens (2 not captured); "
        f"held_out: 9 of 10 samples, {counts.used_tokens['held_out']} tokens (1 not captured)"
    )


def test_what_is_joined_is_what_the_row_says(samples: TrainingSamples, data: DataSet) -> None:
    by_id = {sample.sample_id: sample for sample in SAMPLES}
    for split, indices in (("train", samples.train), ("held_out", samples.held_out)):
        assert indices.tolist() == sorted(set(indices.tolist()))
        for i in indices.tolist():
            sample = by_id[data.sample_id(i)]
            assert sample.split == split and samples.sample_id(i) == sample.sample_id
            assert samples.num_tokens(i) == sample.num_tokens
            assert samples.token_ids(i).dtype == np.int32
            assert sample_id_of(samples.token_ids(i)) == sample.sample_id
            assert np.array_equal(samples.loss_mask(i), sample.loss_mask())
            assert (samples.source(i), samples.tags(i)) == (sample.source, sample.tags)
            assert samples.language(i) == sample.language


def test_supervised_tokens_are_counted_in_the_train_samples_alone(samples: TrainingSamples) -> None:
    counts = np.zeros(1000, np.int64)
    for sample in SAMPLES:
        if sample.split == "train" and sample.sample_id not in REFUSED:
            np.add.at(counts, sample.token_ids[sample.loss_mask()], 1)
    assert np.array_equal(samples.supervised_counts(1000), counts)


def test_a_larger_subset_holds_the_smaller(base: Path, data: DataSet) -> None:
    table = SampleTable.open(base / "samples.parquet")
    before: set[int] = set()
    for limit in (1, 5, 17, 28, 1000):
        samples = TrainingSamples(table, data, max_train_samples=limit)
        used = set(samples.train.tolist())
        assert before < used or (before == used and limit == 1000)
        assert len(used) == min(limit, 28) == samples.counts.used["train"]
        assert samples.counts.over_limit == {"train": 28 - len(used), "held_out": 0}
        assert len(samples.held_out) == 9
        for i in used:
            assert sample_id_of(samples.token_ids(i)) == data.sample_id(i)
        before = used
    few = TrainingSamples(table, data, max_train_samples=5)
    left_out = next(i for i in before if i not in few.train)
    with pytest.raises(KeyError, match="not one of the training samples"):
        few.token_ids(left_out)
    assert "(2 not captured, 23 over the limit)" in few.counts.line()


def test_captured_samples_that_the_table_lacks_are_counted(base: Path, data: DataSet, tmp_path: Path) -> None:
    samples = TrainingSamples(make_table_of(tmp_path / "some.parquet", SAMPLES[:10]), data)
    assert samples.counts.not_in_table == 37 - 7
    assert "30 captured samples are not in the table" in samples.counts.line()
    by_id = {sample.sample_id: sample for sample in SAMPLES}
    for i in samples.train.tolist():
        assert np.array_equal(samples.loss_mask(i), by_id[data.sample_id(i)].loss_mask())


def test_another_table_is_refused(data: DataSet, tmp_path: Path) -> None:
    table = make_table_of(tmp_path / "other.parquet", [made(number) for number in range(100, 110)])
    with pytest.raises(DataError, match=r"other\.parquet: none of its 10 samples is among the 37"):
        TrainingSamples(table, data)
    row = next(s for s in SAMPLES if s.sample_id not in REFUSED)
    longer = dataclasses.replace(row, token_ids=np.append(row.token_ids, np.int32(1)))
    with pytest.raises(DataError, match=rf"sample {row.sample_id} has {row.num_tokens + 1} tokens, in the data set"):
        TrainingSamples(make_table_of(tmp_path / "longer.parquet", [longer]), data)
    with pytest.raises(DataError, match=rf"sample {row.sample_id} has two rows"):
        TrainingSamples(make_table_of(tmp_path / "twice.parquet", [row, row]), data)


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("prefetch_bytes", [0, 5000, 1 << 30])
def test_batches_are_exact_and_in_order(
    data: DataSet, samples: TrainingSamples, num_threads: int, prefetch_bytes: int
) -> None:
    schedule = schedule_of(samples)
    stop = schedule.num_steps(2)
    steps = schedule.steps(0, stop, rank=0, world=1)
    with Loader(data, samples, steps, prefetch_bytes=prefetch_bytes, num_threads=num_threads) as loader:
        found = list(loader)
    assert [[batch.indices for batch in step] for step in found] == [schedule.step(g)[1] for g in range(stop)]
    for batch in itertools.chain.from_iterable(found):
        assert same(batch, expected(data, batch.indices))
    assert loader.read_bytes == 2 * samples.counts.used_tokens["train"] * data.spec.bytes_per_token
    assert 0 < loader.waited_s < 60


def test_a_batch_is_its_samples_one_behind_the_other(data: DataSet, samples: TrainingSamples) -> None:
    packs = evaluation_packs(samples.ids, samples.token_counts, samples.held_out, pack_tokens=PACK_TOKENS)
    with Loader(data, samples, [packs]) as loader:
        (batches,) = loader
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        assert batch.cu_seqlens.dtype == torch.int32 and bounds[-1] == batch.num_tokens <= PACK_TOKENS
        assert batch.token_ids.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
        assert batch.states.dtype == torch.bfloat16 and batch.states.shape == (4, batch.num_tokens, 4)
        assert batch.states.is_contiguous()
        assert batch.sample_ids == tuple(data.sample_id(i) for i in batch.indices)
        for i, (start, end) in zip(batch.indices, itertools.pairwise(bounds), strict=True):
            stored = data[i]
            assert torch.equal(batch.aux_hidden_states()[start:end], stored.aux_hidden_states())
            assert torch.equal(batch.last_hidden_state()[start:end], stored.last_hidden_state())
            assert batch.token_ids[start:end].tolist() == samples.token_ids(i).tolist()
            assert batch.loss_mask[start:end].tolist() == samples.loss_mask(i).tolist()


def test_a_rank_without_a_pack_gets_an_empty_step(data: DataSet, samples: TrainingSamples) -> None:
    steps: list[Sequence[Pack]] = [[], [(0, 1)], [], [], [(2,)], []]
    with Loader(data, samples, steps) as loader:
        assert [[batch.indices for batch in step] for step in loader] == [list(step) for step in steps]


def test_batches_from_memory() -> None:
    states = torch.arange(2 * 5 * 3).view(2, 5, 3)
    batch = batch_of([([7, 8], [0, 1], states[:, :2]), ([1, 2, 3], [True, False, True], states[:, 2:])])
    assert batch.token_ids.tolist() == [7, 8, 1, 2, 3]
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.cu_seqlens.tolist() == [0, 2, 5] and torch.equal(batch.states, states)
    assert batch.sample_ids == (sample_id_of([7, 8]), sample_id_of([1, 2, 3])) and batch.indices == (0, 1)
    with pytest.raises(ValueError, match="samples of"):
        batch_of([([7, 8], [1], states[:, :2])])


# --- bounds, errors, ends ------------------------------------------------------------------------------------------


def endless(samples: TrainingSamples) -> Iterator[Sequence[Pack]]:
    return schedule_of(samples).steps(0, rank=0, world=1)


def test_no_more_is_read_ahead_than_fits(data: DataSet, samples: TrainingSamples) -> None:
    taken: list[int] = []

    def steps() -> Iterator[Sequence[Pack]]:
        for pack in schedule_of(samples).packs(0):
            taken.append(sum(data.sample_bytes(i) for i in pack))
            yield [pack]

    with Loader(data, samples, steps(), prefetch_bytes=5000) as loader:
        for number, _ in enumerate(loader, 1):
            # Two packs of 2 KB fit, of which each step hands over one; the next one to come was looked at.
            ahead = taken[number:-1] if number < len(taken) else []
            assert sum(ahead) <= 5000
        assert number == len(taken) > 5


def test_damage_is_raised_where_its_batch_would_have_come(base: Path, samples: TrainingSamples, tmp_path: Path) -> None:
    root = Path(shutil.copytree(base / "out", tmp_path / "out"))
    payloads = sorted(Layout(root).shards.iterdir())
    damaged = bytearray(payloads[-1].read_bytes())
    damaged[-1] ^= 1
    payloads[-1].write_bytes(damaged)
    data = DataSet(root)
    last = max(set(samples.train.tolist()) | set(samples.held_out.tolist()))
    with Loader(data, samples, [[(0,)], [(1,)], [(2, last)], [(3,)]]) as loader:
        assert [len(next(loader)), len(next(loader))] == [1, 1]
        with pytest.raises(ShardCorrupt, match="differs from its digest"):
            next(loader)
        assert not loader_threads()
        with pytest.raises(StopIteration):
            next(loader)
    payloads[-1].unlink()
    with pytest.raises(ShardMissing), Loader(DataSet(root), samples, [[(last,)]]) as loader:
        next(loader)


def test_no_thread_outlives_a_loader(data: DataSet, samples: TrainingSamples) -> None:
    loader = Loader(data, samples, endless(samples), num_threads=3)
    assert len(loader_threads()) == 3
    next(loader)
    loader.close()
    loader.close()
    assert not loader_threads()
    with pytest.raises(StopIteration):
        next(loader)
    with pytest.raises(RuntimeError, match="mine"), Loader(data, samples, endless(samples)) as loader:
        next(loader)
        raise RuntimeError("mine")
    assert not loader_threads()
    # The end of the steps is an end too.
    assert len(list(Loader(data, samples, [[(0,)]]))) == 1


def test_ctrl_c_while_waiting_ends_the_threads(
    data: DataSet, samples: TrainingSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C raises in the thread that waits, whatever a reading thread is doing."""
    let_go = threading.Event()
    read_into = DataSet.read_into

    def slow(self: DataSet, index: int, buffer: memoryview) -> object:
        _thread.interrupt_main()
        let_go.wait(0.2)
        return read_into(self, index, buffer)

    monkeypatch.setattr(DataSet, "read_into", slow)
    with pytest.raises(KeyboardInterrupt), Loader(data, samples, endless(samples), num_threads=1) as loader:
        next(loader)


def test_an_error_of_the_steps_is_the_callers(data: DataSet, samples: TrainingSamples) -> None:
    def steps() -> Iterator[Sequence[Pack]]:
        yield [(0,)]
        yield [(1,)]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), Loader(data, samples, steps(), prefetch_bytes=0) as loader:
        list(loader)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_the_device_are_those_of_the_cpu(data: DataSet, samples: TrainingSamples) -> None:
    """Also where memory that was handed over is still in use when the next batches come."""
    schedule = schedule_of(samples)
    steps = schedule.num_steps(20)
    kept: list[tuple[Batch, torch.Tensor]] = []
    with Loader(data, samples, schedule.steps(0, steps, rank=0, world=1), device="cuda") as loader:
        for g, batches in enumerate(loader):
            assert [batch.indices for batch in batches] == schedule.step(g)[1]
            for batch in batches:
                assert batch.states.is_cuda and batch.token_ids.is_cuda and not batch.cu_seqlens.is_cuda
                assert same(batch, expected(data, batch.indices))
                torch.cuda._sleep(1_000_000)
                kept.append((dataclasses.replace(batch, states=batch.states[:0]), batch.states.clone()))
    for batch, states in kept:
        assert torch.equal(states.cpu(), expected(data, batch.indices).states)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_loader_after_the_other_takes_no_more_memory(data: DataSet, samples: TrainingSamples) -> None:
    """An evaluation makes a new one each time."""
    reserved = []
    for _ in range(4):
        with Loader(data, samples, [[pack] for pack in schedule_of(samples).packs(0)], device="cuda") as loader:
            assert sum(len(step) for step in loader) > 5
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[0] == reserved[-1]
