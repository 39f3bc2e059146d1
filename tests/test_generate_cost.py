"""Money: bounds that hold, whatever answers tell, and an estimate that scales with what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import ConfigError
from eyas.generate.answers import Usage
from eyas.generate.cost import Budget, Prices, Probe, estimate_line, prices_from


def test_prices_come_in_millions_and_in_pairs() -> None:
    assert prices_from({}) is None
    assert prices_from({"prompt": 3.0, "completion": 15.0}) == Prices(3e-6, 15e-6)
    with pytest.raises(ConfigError, match=r"price_per_1m\.prompt is not set"):
        prices_from({"completion": 1.0})
    with pytest.raises(ConfigError, match="below 0"):
        prices_from({"prompt": -1.0, "completion": 1.0})


def test_what_an_answer_tells_counts_before_the_table() -> None:
    budget = Budget(most=None, prices=Prices(1.0, 2.0), spent=0.0)
    assert budget.cost_of(Usage(3, 4, 1, 0.5), told=True) == 0.5
    assert budget.cost_of(Usage(3, 4), told=False) == 11.0


@given(
    prompt=st.floats(0, 10),
    completion=st.floats(0, 10),
    seen=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=20),
    asked=st.tuples(st.integers(1, 10_000), st.integers(1, 10_000)),
)
def test_bounds_from_told_costs_are_never_too_low(
    prompt: float, completion: float, seen: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    true = Prices(prompt, completion)
    budget = Budget(most=1e9, prices=None, spent=0.0)
    assert not budget.known
    for p, c in seen:
        usage = Usage(p, c, 1)
        usage.cost = true.of(usage)
        budget.spend(usage, told=True)
    assert budget.known
    assert budget.worst(*asked) >= true.of(Usage(*asked)) * (1 - 1e-9)


def test_bounds_follow_a_price_that_rises() -> None:
    budget = Budget(most=1e9, prices=None, spent=0.0)
    budget.spend(Usage(10, 10, 1, 0.0), told=True)
    assert budget.worst(10, 10) == 0.0
    budget.spend(Usage(10, 10, 1, 5.0), told=True)
    assert budget.worst(10, 10) >= 5.0
    dear = Budget(most=1e9, prices=Prices(0.1, 0.1), spent=0.0)
    dear.spend(Usage(10, 10, 1, 5.0), told=True)
    assert dear.worst(10, 10) >= 5.0


def test_room_is_what_is_neither_spent_nor_set_aside() -> None:
    budget = Budget(most=10.0, prices=Prices(1.0, 1.0), spent=2.0)
    budget.set_aside(3.0)
    budget.uncertain += 1.0
    assert budget.room() == 4.0
    budget.spend(Usage(1, 1, 1, 2.0), told=False)
    budget.set_aside(-3.0)
    assert budget.room() == 5.0
    assert Budget(most=None, prices=None, spent=5.0).room() == float("inf")


def test_estimate_scales_prompts_by_bytes_and_answers_by_turns() -> None:
    probe = Probe(20, 20, 2000, Usage(400, 1000, 20, 1.4), 2, wall_s=10.0, in_flight=20, most_in_flight=200)
    line = estimate_line(probe, conversations=980, turns=2000, prompt_bytes=98_000, has_cost=True)
    assert "20 prompts (2 rejected): 980 to come, about 19,600 prompt + 100,000 completion tokens" in line
    assert "cost 119.6 after 1.4 so far" in line
    assert line.endswith("1m40s to 16m40s")
