"""Tallies, summaries and baselines against counts made by hand or by the slow and obvious way."""

from __future__ import annotations

import json
import time
from collections import Counter

import numpy as np
import pytest

from eyas.train.baseline import Baseline, BaselineCounts, Score
from eyas.train.metrics import MAX_SLICES, Summary, Tally, labels_of, slices, summarize


def random_rows(seed: int, rows: int = 300, samples: int = 10, steps: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    reach = rng.integers(0, steps + 1, rows)  # supervised at step s means supervised at all earlier steps
    return {
        "samples": rng.integers(0, samples, rows),
        "supervised": np.arange(steps)[:, None] < reach,
        "in_vocab": rng.random((steps, rows)) < 0.9,
        "correct": rng.random((steps, rows)) < 0.6,
        "loss": rng.random((steps, rows)),
    }


def tally_of(rows: dict[str, np.ndarray], samples: int = 10) -> Tally:
    tally = Tally(samples, len(rows["loss"]))
    tally.add_rows(rows["samples"], **{name: rows[name] for name in rows if name != "samples"})
    return tally


def test_rows_by_hand() -> None:
    """Two samples, four rows, two steps."""
    tally = Tally(2, 2)
    tally.add_rows(
        np.array([0, 0, 0, 1]),
        supervised=np.array([[1, 1, 1, 1], [1, 1, 0, 1]], dtype=bool),
        in_vocab=np.array([[1, 1, 0, 1], [1, 1, 1, 1]], dtype=bool),
        correct=np.array([[1, 0, 1, 1], [1, 1, 1, 0]], dtype=bool),
        loss=np.array([[0.5, 2.0, np.nan, 1.0], [1.0, 1.5, 9.0, 4.0]]),
    )
    assert tally["supervised"].tolist() == [[3, 2], [1, 1]]
    assert tally["in_vocab"].tolist() == [[2, 2], [1, 1]]
    assert tally["correct"].tolist() == [[1, 2], [1, 0]]  # row 2 is right by accident only: its truth is no draft token
    assert tally["chain"].tolist() == [[1, 1], [1, 0]]
    assert tally["loss_sum"].tolist() == [[2.5, 2.5], [1.0, 4.0]]
    summary = summarize(tally)
    assert summary.supervised == (4, 3)
    assert summary.loss == pytest.approx((3.5 / 3, 6.5 / 3))
    assert [one.value for one in summary.accuracy if one] == pytest.approx([2 / 4, 2 / 3])
    assert summary.accuracy_in_vocab == pytest.approx((2 / 3, 2 / 3))
    assert summary.in_vocab == pytest.approx((3 / 4, 1))
    assert summary.cumulative == pytest.approx((2 / 4, 1 / 3))
    assert summary.conditional == pytest.approx((2 / 4, (1 / 3) / (2 / 4)))
    pooled = [one.value for one in summary.acceptance_length_pooled if one]
    assert pooled == pytest.approx([1.5, 1.5 + 1 / 3])
    mean = [one.value for one in summary.acceptance_length_sample_mean if one]
    assert mean == pytest.approx([1 + (1 / 3 + 1) / 2, 1 + (1 / 3 + 1) / 2 + (1 / 2 + 0) / 2])
    assert summary.acceptance_length(2) == summary.acceptance_length_pooled[1]
    assert summary.score == pytest.approx(1.5 + 1 / 3)
    with pytest.raises(ValueError, match="1 to 2"):
        summary.acceptance_length(3)


def test_packs_and_ranks_in_any_order_make_the_same_tally() -> None:
    rows = random_rows(0)
    whole, first, second = tally_of(rows), Tally(10, 4), Tally(10, 4)
    for part, at in ((first, slice(200, 300)), (second, slice(0, 200))):
        part.add_rows(rows["samples"][at], **{name: rows[name][:, at] for name in rows if name != "samples"})
    np.testing.assert_allclose((first + second).sums, whole.sums)
    again = Tally(10, 4)
    again.add(np.array([3, 1, 3]), np.stack([whole.sums[:, 0], whole.sums[:, 1], whole.sums[:, 2]], axis=1))
    np.testing.assert_allclose(again.sums[:, 3], whole.sums[:, 0] + whole.sums[:, 2])
    with pytest.raises(ValueError, match="tallies of"):
        whole.merge(Tally(9, 4))


def test_the_chain_is_counted_row_by_row() -> None:
    rows = random_rows(1)
    expected = np.zeros((10, 4))
    for r, sample in enumerate(rows["samples"]):
        for s in range(4):
            hits = rows["correct"][: s + 1, r] & rows["in_vocab"][: s + 1, r]
            expected[sample, s] += rows["supervised"][s, r] and hits.all()
    assert tally_of(rows)["chain"].tolist() == expected.tolist()


def test_json_there_and_back_has_no_nan() -> None:
    tally = tally_of(random_rows(2))
    tally.sums[:, :, 3] = 0  # nothing is told about the last step
    there = json.loads(json.dumps(tally.to_json(), allow_nan=False))
    assert Tally.from_json(there).sums.tolist() == tally.sums.tolist()
    summary = summarize(tally)
    assert summary.loss[3] is None and summary.acceptance_length(4) is None
    assert summary.score == summary.acceptance_length_pooled[2].value  # type: ignore[union-attr]
    assert Summary.from_json(json.loads(json.dumps(summary.to_json(), allow_nan=False))) == summary


@pytest.mark.parametrize("samples", [0, 1])
def test_nothing_and_a_single_sample_have_no_interval(samples: int) -> None:
    tally = Tally(3, 2)
    tally.sums[:, :samples] = 2
    summary = summarize(tally)
    assert summary.num_samples == samples and summary.small
    assert [one and one.low for one in summary.accuracy] == [None, None]
    assert len(summary.lines()) == 4


def test_the_interval_is_that_of_the_mean_and_of_a_seed() -> None:
    """With one row for each sample the pooled value is a plain mean, whose deviation is known."""
    rng = np.random.default_rng(3)
    tally = Tally(2000, 1)
    hits = (rng.random(2000) < 0.4).astype(float)
    tally.sums[:] = np.stack([np.ones(2000), np.ones(2000), hits, hits, hits])[:, :, None]
    found = summarize(tally).accuracy[0]
    assert found is not None and found.low is not None and found.high is not None
    deviation = 1.96 * float(np.sqrt(hits.mean() * (1 - hits.mean()) / 2000))
    assert found.value - found.low == pytest.approx(deviation, rel=0.15)
    assert found.high - found.value == pytest.approx(deviation, rel=0.15)
    assert summarize(tally) == summarize(tally)
    assert summarize(tally, seed=1).accuracy != summarize(tally).accuracy


def test_a_thousand_resamples_of_twenty_thousand_samples_take_two_seconds() -> None:
    rng = np.random.default_rng(4)
    tally = Tally(20_000, 7)
    tally.sums[:] = rng.integers(1, 100, tally.sums.shape)
    start = time.process_time()
    summarize(tally)
    assert time.process_time() - start < 2


def test_slices_by_label_largest_first_small_ones_told() -> None:
    tally = tally_of(random_rows(5, rows=4000, samples=100), samples=100)
    tally.sums[:, 99] = 0
    labels = [labels_of("a" if i < 60 else "b", ["code"] if i < 5 else (), "en" if i % 2 else "") for i in range(100)]
    found = slices(tally, labels, num_resamples=10)
    assert list(found) == ["language:unknown", "language:en", "source:a", "source:b", "tag:code"]
    assert [found[label].num_samples for label in ("source:a", "source:b", "tag:code")] == [60, 39, 5]
    assert [found[label].small for label in ("source:a", "source:b", "tag:code")] == [False, False, True]
    assert found["source:a"] == summarize(tally.of(range(60)), num_resamples=10)
    with pytest.raises(ValueError, match="labels of 99"):
        slices(tally, labels[1:])


def test_many_labels_share_one_slice() -> None:
    tally = Tally(MAX_SLICES + 6, 1)
    tally.sums[:] = 1
    found = slices(tally, [{f"tag:{i:03}", f"tag:{i + 1:03}"} for i in range(MAX_SLICES + 6)], num_resamples=2)
    assert len(found) == MAX_SLICES + 1
    assert found["tag:other"].num_samples == 7


def obvious_baseline(samples: list[tuple[list[int], list[int]]]) -> tuple[int, dict[int, int]]:
    alone: Counter[int] = Counter()
    after: dict[int, Counter[int]] = {}
    for ids, mask in samples:
        for j, token in enumerate(ids):
            if mask[j]:
                alone[token] += 1
                if j:
                    after.setdefault(ids[j - 1], Counter())[token] += 1
    first = lambda counts: min(counts, key=lambda token: (-counts[token], token))  # noqa: E731
    return first(alone), {previous: first(counts) for previous, counts in after.items()}


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_baselines_are_those_of_the_obvious_count(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.train.baseline.CHUNK_TOKENS", chunk)
    rng = np.random.default_rng(6)
    samples = [(rng.integers(0, 12, n).tolist(), rng.integers(0, 2, n).tolist()) for n in rng.integers(0, 30, 40)]
    unigram, bigram = obvious_baseline(samples)
    one_by_one, flat = BaselineCounts(), BaselineCounts()
    for ids, mask in samples:
        one_by_one.add(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))
    full = [sample for sample in samples if sample[0]]
    starts = np.cumsum([0, *(len(ids) for ids, _ in full[:-1])])
    flat.add(np.concatenate([ids for ids, _ in full]), np.concatenate([mask for _, mask in full]), starts)
    for counts in (one_by_one, flat):
        found = counts.baseline()
        assert found.unigram == unigram
        assert dict(zip(found.previous.tolist(), found.following.tolist(), strict=True)) == bigram


def test_ties_go_to_the_lowest_id_and_the_unseen_to_the_unigram() -> None:
    counts = BaselineCounts()
    counts.add([1, 200_000, 1, 5, 1, 9, 9], [0, 1, 0, 1, 0, 1, 1])
    found = counts.baseline()
    assert found.unigram == 9
    assert found.guess([1, 9, 77, 200_000]).tolist() == [5, 9, 9, 9]
    score = found.score(last_tokens=[1, 77, 1], truth=[5, 9, 9])
    assert score + Score() == Score(num_rows=3, unigram_hits=2, bigram_hits=2)
    assert score.to_json() == {"rows": 3, "unigram": 2 / 3, "bigram": 2 / 3}


def test_a_baseline_of_nothing_is_never_right() -> None:
    found = BaselineCounts().baseline()
    assert isinstance(found, Baseline)
    assert found.score([1, 2], [0, 3]) == Score(2, 0, 0)
    assert Score().to_json() == {"rows": 0, "unigram": None, "bigram": None}


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="not of one length"):
        BaselineCounts().add([1, 2], [True])
