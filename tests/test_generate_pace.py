"""How many at a time, and how long: learned from answers, halved by complaints."""

from __future__ import annotations

from eyas.generate.pace import FIRST_LIMIT, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_limit_doubles_at_first_and_grows_by_one_a_round_after_a_complaint() -> None:
    clock = Clock()
    pace = Pace(64, clock)
    assert pace.limit == FIRST_LIMIT
    for _ in range(FIRST_LIMIT):
        pace.answered(0.1, pace.limit)
    assert pace.limit == 2 * FIRST_LIMIT
    for _ in range(200):
        pace.answered(0.1, pace.limit)
    assert pace.limit == 64
    clock.now = 1.0
    pace.congested(sent_at=0.5)
    assert pace.limit == 32
    for _ in range(33):
        pace.answered(0.1, pace.limit)
    assert pace.limit == 33


def test_requests_that_were_on_their_way_together_halve_the_limit_once() -> None:
    clock = Clock()
    pace = Pace(16, clock)
    clock.now = 1.0
    for _ in range(10):
        pace.congested(sent_at=0.5)
    assert pace.limit == 8
    clock.now = 2.0
    pace.congested(sent_at=1.5)
    assert pace.limit == 4
    for i in range(10):
        clock.now = 3.0 + i
        pace.congested(sent_at=clock.now - 0.1)
    assert pace.limit == 1


def test_pause_doubles_while_nobody_answers_and_begins_anew_after_an_answer() -> None:
    clock = Clock()
    pace = Pace(16, clock)
    pauses = []
    for i in range(10):
        clock.now = float(i + 1)
        pauses.append(pace.congested(sent_at=i + 0.5))
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0] and pauses[-1] == 60.0
    pace.answered(0.1, 1)
    clock.now = 20.0
    assert pace.congested(sent_at=19.0) == 0.5


def test_an_unused_limit_does_not_grow() -> None:
    pace = Pace(64)
    for _ in range(100):
        pace.answered(0.1, 2)
    assert pace.limit == FIRST_LIMIT


def test_time_for_an_answer_grows_with_time_outs_and_with_what_answers_take() -> None:
    pace = Pace(4)
    assert pace.timeout_s(10) == 10
    pace.timed_out()
    assert pace.timeout_s(10) == 12.5
    for _ in range(50):
        pace.timed_out()
    assert pace.timeout_s(10) == 20
    for _ in range(200):
        pace.answered(0.1, 1)
    assert pace.timeout_s(10) == 10, "it wears off"
    slow = Pace(4)
    slow.answered(30.0, 1)
    assert slow.timeout_s(10) == 120
