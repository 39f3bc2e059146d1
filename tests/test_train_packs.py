"""Packs: every sample once an epoch, never over the budget, the same for any number of ranks and after any resume."""

from __future__ import annotations

import itertools
import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import ConfigError, DataError
from eyas.records import sample_id_of
from eyas.store.reader import Permutation
from eyas.train.packs import Pack, Schedule, evaluation_packs, form_packs

PACK_TOKENS = 50
lengths_lists = st.lists(st.integers(1, PACK_TOKENS), min_size=1, max_size=120)


def ids_of(num_samples: int) -> npt.NDArray[np.uint8]:
    digests = b"".join(bytes.fromhex(sample_id_of([i])) for i in range(num_samples))
    return np.frombuffer(digests, np.uint8).reshape(-1, 16)


def schedule_of(
    lengths: list[int],
    train: npt.NDArray[np.int64] | None = None,
    *,
    step_packs: int = 2,
    seed: int = 0,
    window: int = 8,
) -> Schedule:
    indices = np.arange(len(lengths)) if train is None else train
    return Schedule(
        ids_of(len(lengths)),
        np.array(lengths, np.int32),
        indices,
        pack_tokens=PACK_TOKENS,
        step_packs=step_packs,
        seed=seed,
        window=window,
    )


def flat(packs: list[Pack]) -> list[int]:
    return list(itertools.chain.from_iterable(packs))


@given(lengths_lists, st.integers(1, 5), st.integers(0, 2**64 - 1), st.integers(1, 70), st.data())
@settings(deadline=None)
def test_each_epoch_takes_every_train_sample_once_in_packs_within_the_budget(
    lengths: list[int], step_packs: int, seed: int, window: int, data: st.DataObject
) -> None:
    train = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))), np.int64)
    schedule = schedule_of(lengths, train, step_packs=step_packs, seed=seed, window=window)
    for epoch in range(3):
        first, behind = schedule.num_steps(epoch), schedule.num_steps(epoch + 1)
        assert first < behind
        steps = [schedule.step(g) for g in range(first, behind)]
        assert {e for e, _ in steps} == {epoch}
        assert all(len(packs) == step_packs for _, packs in steps[:-1]) and 1 <= len(steps[-1][1]) <= step_packs
        packs = [pack for _, packs in steps for pack in packs]
        assert sorted(flat(packs)) == train.tolist()
        assert all(0 < sum(lengths[i] for i in pack) <= PACK_TOKENS for pack in packs)
    assert schedule.num_steps_per_epoch == schedule.num_steps(1)


@given(lengths_lists, st.integers(1, 7), st.integers(1, 9))
@settings(deadline=None)
def test_any_number_of_ranks_sees_the_same_packs_in_the_same_steps(
    lengths: list[int], step_packs: int, world: int
) -> None:
    schedule = schedule_of(lengths, step_packs=step_packs)
    for g in range(schedule.num_steps(2)):
        dealt = [schedule.mine(g, rank=rank, world=world) for rank in range(world)]
        packs = schedule.step(g)[1]
        assert [dealt[i % world][i // world] for i in range(len(packs))] == packs
        assert sum(map(len, dealt)) == len(packs)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(lengths_lists, st.integers(1, 4), st.integers(0, 300))
@settings(deadline=None)
def test_resumed_at_any_step_it_goes_on_as_if_it_had_not_stopped(
    lengths: list[int], step_packs: int, start: int
) -> None:
    whole = schedule_of(lengths, step_packs=step_packs)
    expected = list(itertools.islice(whole.steps(0, rank=0, world=1), start, start + 5))
    resumed = schedule_of(lengths, step_packs=step_packs)
    assert list(resumed.steps(start, start + 5, rank=0, world=1)) == expected
    # And in any order, as one that looks back does.
    for g in random.Random(start).sample(range(start, start + 5), 5):
        assert resumed.step(g)[1] == expected[g - start]


@given(lengths_lists, st.integers(1, 70))
@settings(deadline=None)
def test_no_sample_is_passed_over_by_more_than_the_window(lengths: list[int], window: int) -> None:
    counts = np.array(lengths, np.int32)
    packs = form_packs(range(len(lengths)), counts, pack_tokens=PACK_TOKENS, window=window)
    seen: set[int] = set()
    for pack in packs:
        # The first of a pack is the oldest that was left, and what fits behind it came soon after.
        assert pack[0] == min(set(range(len(lengths))) - seen)
        for index in pack:
            seen.add(index)
            passed_over = index + 1 - sum(1 for i in seen if i <= index)
            assert passed_over < window
    if window == 1:
        assert flat(packs) == list(range(len(lengths)))


def test_packs_of_literal_lengths() -> None:
    """Pinned: other packs in the middle of a training would be another training."""
    counts = np.array([30, 25, 10, 20, 5, 40, 10], np.int32)
    assert form_packs(range(7), counts, pack_tokens=50, window=1) == [(0,), (1, 2), (3, 4), (5, 6)]
    assert form_packs(range(7), counts, pack_tokens=50, window=3) == [(0, 2, 4), (1, 3), (5, 6)]
    schedule = schedule_of([30, 25, 10, 20, 5, 40, 10], step_packs=2, seed=7)
    assert [schedule.step(g) for g in range(4)] == [
        (0, [(4, 0, 6), (5, 2)]),
        (0, [(1, 3)]),
        (1, [(1, 2, 6, 4), (0, 3)]),
        (1, [(5,)]),
    ]


def test_the_order_is_that_of_the_permutation_among_the_train_samples() -> None:
    """So that it depends on ids, seed and epoch alone: not on which samples are held out."""
    lengths = [1 + i % 9 for i in range(200)]
    train = np.arange(0, 200, 3)
    for epoch in range(2):
        everything = Permutation(ids_of(200), seed=5, epoch=epoch).indices()
        expected = [i for i in everything.tolist() if i % 3 == 0]
        schedule = schedule_of(lengths, train, seed=5, window=1)
        assert flat(schedule.packs(epoch)) == expected
        assert flat(schedule.packs(epoch)) != flat(schedule.packs(epoch + 1))


def test_looking_ahead_fills_packs() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.5, 0.9, 5000).astype(np.int32) + 1, 4096)
    fills = {}
    for window in (1, 64):
        schedule = Schedule(
            ids_of(5000), lengths, np.arange(5000), pack_tokens=8192, step_packs=1, seed=0, window=window
        )
        fills[window] = schedule.fill()
        assert fills[window] == lengths.sum() / (len(schedule.packs(0)) * 8192)
    assert fills[1] < 0.95 < 0.99 < fills[64] <= 1


@given(lengths_lists, st.integers(1, 9), st.data())
@settings(deadline=None)
def test_each_held_out_sample_is_evaluated_once(lengths: list[int], world: int, data: st.DataObject) -> None:
    held_out = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), np.int64)
    counts = np.array(lengths, np.int32)
    packs = evaluation_packs(ids_of(len(lengths)), counts, held_out, pack_tokens=PACK_TOKENS)
    assert packs == evaluation_packs(ids_of(len(lengths)), counts, held_out, pack_tokens=PACK_TOKENS)
    dealt = [index for rank in range(world) for index in flat(packs[rank::world])]
    assert sorted(dealt) == held_out.tolist()
    assert all(sum(lengths[i] for i in pack) <= PACK_TOKENS for pack in packs)


def test_a_sample_longer_than_a_pack_is_named_before_anything_starts() -> None:
    lengths = [3, 51, 60, 4]
    largest = bytes(ids_of(4)[2]).hex()
    with pytest.raises(ConfigError, match=rf"train\.pack_tokens: 50 .* 2 of the 4 samples.*{largest}.* 60"):
        schedule_of(lengths)
    with pytest.raises(ConfigError, match=r"train\.pack_tokens"):
        evaluation_packs(ids_of(4), np.array(lengths, np.int32), np.array([1]), pack_tokens=50)
    # One that is not trained on does not count.
    assert schedule_of(lengths, np.array([0, 3])).num_steps_per_epoch == 1


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(DataError, match="no captured sample"):
        schedule_of([1, 2], np.zeros(0, np.int64))
