"""The plan: order, subsets that can be widened, shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.capture import plan
from eyas.capture.plan import Selection, in_order, order_key
from eyas.data.table import SampleTable
from eyas.records import sample_id_of
from eyas.store import plan as store_plan
from eyas.store.plan import cut
from fake_data import config, make_table

ALL = Selection(None, (), ())


def naive(table: SampleTable, seed: int = 0) -> list[str]:
    return sorted({s.sample_id for s in table.samples()}, key=lambda sample_id: order_key(sample_id, seed))


def ordered(
    table: SampleTable, scratch: Path, selection: Selection = ALL, seed: int = 0, covered: set[str] = frozenset()
) -> list[str]:
    scratch.mkdir(exist_ok=True)
    found = list(in_order(table, selection, seed, scratch, covered=covered))
    for sample_id, token_ids in found:
        assert sample_id_of(token_ids) == sample_id
    return [sample_id for sample_id, _ in found]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleTable:
    monkeypatch.setattr(plan, "_BUCKET_ROWS", 7)  # so that there are many
    return make_table(tmp_path / "samples.parquet", [1 + i % 9 for i in range(100)], tags=True)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63])
def test_order_equals_a_plain_sort_by_hash(table: SampleTable, tmp_path: Path, seed: int) -> None:
    assert ordered(table, tmp_path / "scratch", seed=seed) == naive(table, seed)


def test_order_is_pinned(tmp_path: Path) -> None:
    """A place is xxh3-128 of seed and id: data sets that exist depend on it."""
    assert order_key("00" * 16, 0).hex() == "10e45c7ce2292320743df94ee4c78a2a"
    assert order_key("0123456789abcdef" * 2, 7) != order_key("0123456789abcdef" * 2, 8)


def test_order_depends_on_the_seed_and_not_on_rows(tmp_path: Path, table: SampleTable) -> None:
    assert ordered(table, tmp_path / "a", seed=0) != ordered(table, tmp_path / "b", seed=1)


@pytest.mark.parametrize("limit", [1, 2, 13, 99, 100, 1000])
def test_a_larger_limit_holds_every_sample_of_a_smaller_one(table: SampleTable, tmp_path: Path, limit: int) -> None:
    assert ordered(table, tmp_path / "s", Selection(limit, (), ())) == naive(table)[:limit]


def test_tags_and_sources_select(table: SampleTable, tmp_path: Path) -> None:
    rows = list(table.samples())
    odd = {s.sample_id for s in rows if "odd" in s.tags}
    b = {s.sample_id for s in rows if s.source == "b"}
    assert set(ordered(table, tmp_path / "s", Selection(None, ("odd",), ()))) == odd
    assert set(ordered(table, tmp_path / "s", Selection(None, (), ("b",)))) == b
    assert ordered(table, tmp_path / "s", Selection(None, ("even",), ("b",))) == []
    assert ordered(table, tmp_path / "s", Selection(3, ("odd",), ())) == [s for s in naive(table) if s in odd][:3]


def test_covered_samples_count_for_the_limit_and_are_left_out(table: SampleTable, tmp_path: Path) -> None:
    whole = naive(table)
    covered = {*whole[:10], whole[50], "ff" * 16}
    found = ordered(table, tmp_path / "s", Selection(60, (), ()), covered=covered)
    assert found == [s for s in whole[:60] if s not in covered]


def test_rows_with_one_id_are_one_sample(tmp_path: Path) -> None:
    table = make_table(tmp_path / "samples.parquet", [1] * 300)
    assert len(naive(table)) < 300
    assert ordered(table, tmp_path / "s") == naive(table)
    assert ordered(table, tmp_path / "s", Selection(200, (), ())) == naive(table)[:200]


def test_scratch_is_empty_when_all_is_read(table: SampleTable, tmp_path: Path) -> None:
    ordered(table, tmp_path / "s")
    assert [p for p in (tmp_path / "s").iterdir() if p.suffix != ".covered"] == []


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=30), shard_tokens=st.integers(1, 50))
def test_shards_are_cut_before_the_sample_that_would_be_too_much(lengths: list[int], shard_tokens: int) -> None:
    samples = [(f"{i:032x}", np.zeros(n, np.int32)) for i, n in enumerate(lengths)]
    shards = list(cut(samples, shard_tokens))
    assert [s for shard in shards for s, _ in shard] == [s for s, _ in samples]
    sizes = [[len(ids) for _, ids in shard] for shard in shards]
    for i, size in enumerate(sizes):
        assert len(size) == 1 or sum(size) <= shard_tokens
        if i + 1 < len(sizes):
            assert sum(size) + sizes[i + 1][0] > shard_tokens


def test_a_shard_has_a_limit_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_plan, "MAX_SHARD_SAMPLES", 3)
    samples = [(f"{i:032x}", np.zeros(1, np.int32)) for i in range(8)]
    assert [len(shard) for shard in cut(samples, 1000)] == [3, 3, 2]


def test_default_shard_tokens_fill_a_gibibyte(tmp_path: Path) -> None:
    from eyas.engine.fake import FakeEngine

    spec = FakeEngine().info().spec
    assert plan.shard_tokens(config(tmp_path, shard_tokens=None), spec) == 2**30 // spec.bytes_per_token
    assert plan.shard_tokens(config(tmp_path, shard_tokens=40), spec) == 40
