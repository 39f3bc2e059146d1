"""Which of the target's tokens a drafter can propose, and under which number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.model.vocab_map import VocabMap


def test_offsets_of_a_known_list() -> None:
    found = VocabMap.of(torch.tensor([9, 0, 5]), 12)
    assert found.d2t.tolist() == [0, 4, 7]
    assert found.target_ids.tolist() == [0, 5, 9]
    assert found.draft_ids.tolist() == [0, -1, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1]
    assert (found.draft_vocab_size, found.vocab_size, found.is_full) == (3, 12, False)


def test_the_full_vocabulary_keeps_its_ids() -> None:
    full = VocabMap.full(5)
    assert full.d2t.tolist() == [0] * 5
    assert full.draft_ids.tolist() == full.target_ids.tolist() == [0, 1, 2, 3, 4]
    assert full.is_full


def test_ties_go_to_the_lowest_id_and_unused_ids_fill_up() -> None:
    counts = np.array([0, 3, 0, 5, 3, 3], dtype=np.int64)
    assert VocabMap.from_counts(counts, 3).target_ids.tolist() == [1, 3, 4]
    assert VocabMap.from_counts(counts, 5).target_ids.tolist() == [0, 1, 3, 4, 5]
    assert VocabMap.from_counts(counts, 6).is_full


@pytest.mark.parametrize("size", [0, 7])
def test_a_size_beyond_the_vocabulary_is_a_callers_mistake(size: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        VocabMap.from_counts(np.zeros(6, dtype=np.int64), size)


@pytest.mark.parametrize(("d2t", "t2d"), [([0, 4], [1, 0, 0, 0, 1, 0]), ([1, -1], [1, 1]), ([0], [1, 1])])
def test_tensors_that_disagree_are_refused(d2t: list[int], t2d: list[int]) -> None:
    with pytest.raises(ValueError, match="do not tell the same"):
        VocabMap(torch.tensor(d2t), torch.tensor(t2d, dtype=torch.bool))


def test_coverage_is_the_share_of_counted_tokens() -> None:
    found = VocabMap.of(torch.tensor([1, 2]), 4)
    assert found.coverage(np.array([5, 3, 1, 1], dtype=np.int64)) == 0.4
    assert found.coverage(np.zeros(4, dtype=np.int64)) == 1.0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
def test_any_counts_give_a_map_that_is_its_own_inverse(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    array = np.array(counts, dtype=np.int64)
    found = VocabMap.from_counts(array, size)
    assert torch.equal(found.draft_ids[found.target_ids], torch.arange(size))
    assert torch.equal(torch.nonzero(found.t2d)[:, 0], found.target_ids)
    assert int(array[found.target_ids.numpy()].sum()) == sum(sorted(counts)[-size:])
    again = VocabMap(found.d2t, found.t2d)
    assert torch.equal(again.target_ids, found.target_ids)
