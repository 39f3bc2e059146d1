"""What an engine takes its work from: order, quota, retries, turns alone, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from eyas.capture.requests import MAX_IN_FLIGHT_SAMPLES, TOO_LONG, Batch, OpenShard, Requests, Slot
from eyas.engine.base import CaptureRequest
from eyas.store.plan import ShardPlan

SHARD = OpenShard(ShardPlan(0, 0, "0" * 32, 0, 0), ())


def slots(*lengths: int, bytes_per_token: int = 10) -> list[Slot]:
    return [
        Slot(i, SHARD, f"{i:032x}", np.zeros(n, np.int32), n * bytes_per_token, False) for i, n in enumerate(lengths)
    ]


def taken(requests: list[CaptureRequest]) -> list[int]:
    return [int(request.sample_id, 16) for request in requests]


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_requests_come_in_plan_order_up_to_the_tokens_asked_for() -> None:
    requests = Requests(iter(slots(3, 3, 3, 3)), quota_bytes=1000)
    assert taken(requests.take(7, wait=False)) == [0, 1]
    assert taken(requests.take(100, wait=False)) == [2, 3]
    assert requests.take(100, wait=False) == []


def test_a_sample_larger_than_the_tokens_asked_for_comes_by_itself() -> None:
    requests = Requests(iter(slots(50, 1)), quota_bytes=1000)
    assert taken(requests.take(7, wait=False)) == [0]
    assert taken(requests.take(7, wait=False)) == [1]


def test_no_more_tiny_samples_are_in_flight_than_their_bookkeeping_is_worth() -> None:
    all_slots = slots(*[1] * (2 * MAX_IN_FLIGHT_SAMPLES))
    requests = Requests(iter(all_slots), quota_bytes=10**12)
    assert len(requests.take(10**9, wait=False)) == MAX_IN_FLIGHT_SAMPLES
    quarter = MAX_IN_FLIGHT_SAMPLES // 4
    for slot in all_slots[: quarter - 1]:
        requests.release(slot)
    assert requests.take(10**9, wait=False) == []
    requests.release(all_slots[quarter - 1])
    assert len(requests.take(10**9, wait=False)) == quarter


def test_bytes_are_reserved_before_a_request_is_handed_out_and_never_exceed_the_quota() -> None:
    all_slots = slots(3, 3, 3, 3)
    requests = Requests(iter(all_slots), quota_bytes=65)
    assert taken(requests.take(100, wait=False)) == [0]
    assert taken(requests.take(100, wait=False)) == [1]
    assert taken(requests.take(100, wait=False)) == []
    assert (requests.in_flight_bytes, requests.in_flight_samples) == (60, 2)
    requests.release(all_slots[1])
    assert taken(requests.take(100, wait=False)) == [2]
    assert requests.in_flight_bytes == 60


def test_one_take_is_a_quarter_of_the_quota_and_waits_until_a_quarter_is_free() -> None:
    all_slots = slots(*[1] * 12)  # ten bytes each
    requests = Requests(iter(all_slots), quota_bytes=80)
    assert [len(requests.take(100, wait=False)) for _ in range(5)] == [2, 2, 2, 2, 0]
    requests.release(all_slots[0])
    assert requests.take(100, wait=False) == []
    requests.release(all_slots[1])
    assert taken(requests.take(100, wait=False)) == [8, 9]


def test_slots_are_made_no_earlier_than_needed() -> None:
    made: list[int] = []

    def lazily() -> object:
        for slot in slots(3, 3, 3, 3):
            made.append(slot.sequence)
            yield slot

    requests = Requests(lazily(), quota_bytes=30)  # type: ignore[arg-type]
    assert made == []
    requests.take(100, wait=False)
    assert made == [0, 1]  # the second is known to have no room yet


def test_waiting_ends_when_bytes_come_back() -> None:
    all_slots = slots(3, 3)
    requests = Requests(iter(all_slots), quota_bytes=30)
    requests.take(100, wait=True)
    thread, found = in_thread(lambda: taken(requests.take(100, wait=True)))
    time.sleep(0.05)
    assert thread.is_alive()
    requests.settle()
    requests.release(all_slots[0])
    thread.join(5)
    assert found == [[1]]


def test_waiting_ends_with_nothing_when_the_last_sample_is_given_back() -> None:
    all_slots = slots(3)
    requests = Requests(iter(all_slots), quota_bytes=30)
    requests.take(100, wait=True)
    thread, found = in_thread(lambda: requests.take(100, wait=True))
    time.sleep(0.05)
    assert thread.is_alive() and not requests.is_finished()
    requests.settle()
    requests.release(all_slots[0])
    thread.join(5)
    assert found == [[]] and requests.is_finished()


def test_retries_come_first_in_plan_order_and_keep_their_bytes() -> None:
    all_slots = slots(3, 3, 3, 3)
    requests = Requests(iter(all_slots), quota_bytes=61)
    while requests.take(100, wait=False):
        pass
    now = time.monotonic() - 1
    for slot in (all_slots[1], all_slots[0]):
        slot.attempt += 1
        requests.settle()
        requests.retry(slot, after_s=-1)
    assert requests.in_flight_bytes == 60
    requests._retries = [(now, sequence, slot) for _, sequence, slot in sorted(requests._retries, key=lambda r: r[1])]
    again = [*requests.take(100, wait=False), *requests.take(100, wait=False)]
    assert taken(again) == [0, 1] and [request.attempt for request in again] == [2, 2]
    assert requests.in_flight_bytes == 60


def test_a_retry_waits_for_its_time_and_wakes_who_waits() -> None:
    all_slots = slots(3)
    requests = Requests(iter(all_slots), quota_bytes=60)
    requests.take(100, wait=False)
    requests.settle()
    requests.retry(all_slots[0], after_s=0.15)
    assert requests.take(100, wait=False) == [] and requests.waiting_retries == 0
    start = time.monotonic()
    assert taken(requests.take(100, wait=True)) == [0]
    assert 0.1 < time.monotonic() - start < 3


def test_alone_means_that_the_engine_has_nothing_else() -> None:
    all_slots = slots(3, 3, 3)
    requests = Requests(iter(all_slots), quota_bytes=1000)
    assert taken(requests.take(6, wait=False)) == [0, 1]
    requests.settle()
    requests.retry(all_slots[0], after_s=0, alone=True)
    assert requests.take(100, wait=False) == [], "sample 1 is still with the engine"
    requests.settle()
    assert taken(requests.take(100, wait=False)) == [0]
    assert requests.take(100, wait=False) == [], "sample 0 has the engine alone"
    requests.settle()
    assert taken(requests.take(100, wait=False)) == [2]


def test_samples_that_the_engine_never_sees_are_handed_to_the_caller() -> None:
    all_slots = slots(3, 3, 3)
    all_slots[0].unsent = all_slots[1].unsent = TOO_LONG
    requests = Requests(iter(all_slots), quota_bytes=1000)
    assert taken(requests.take(100, wait=False)) == [2]
    assert [slot.sequence for slot in requests.unsent()] == [0, 1]
    assert requests.unsent() == []
    for slot in all_slots:
        assert not requests.is_finished()
        requests.release(slot)
    assert requests.is_finished()


def test_samples_that_the_engine_never_sees_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.capture.requests.UNSENT_WAITING", 2)
    all_slots = slots(*[1] * 6)
    for slot in all_slots[:5]:
        slot.unsent = TOO_LONG
    requests = Requests(iter(all_slots), quota_bytes=1000)
    assert requests.take(100, wait=False) == []
    assert [slot.sequence for slot in requests.unsent()] == [0, 1]
    assert requests.take(100, wait=False) == []
    assert [slot.sequence for slot in requests.unsent()] == [2, 3]
    assert taken(requests.take(100, wait=False)) == [5]


def test_closing_ends_all_waiting() -> None:
    all_slots = slots(3, 3)
    requests = Requests(iter(all_slots), quota_bytes=30)
    requests.take(100, wait=True)
    thread, found = in_thread(lambda: requests.take(100, wait=True))
    time.sleep(0.02)
    requests.close()
    thread.join(5)
    assert found == [[]] and requests.is_finished() and requests.closed
    assert requests.take(100, wait=True) == []


def test_whoever_hears_of_a_request_hears_before_the_engine_answers() -> None:
    heard: list[int] = []
    requests = Requests(iter(slots(3, 3)), quota_bytes=1000)
    requests.on_take = lambda slot: heard.append(slot.sequence)
    requests.take(3, wait=False)
    assert heard == [0]


def test_a_batch_is_handed_out_once_and_whole() -> None:
    batch = Batch([CaptureRequest(f"{i:032x}", np.zeros(9, np.int32)) for i in range(3)])
    assert taken(batch.take(1, wait=True)) == [0, 1, 2]
    assert batch.take(1, wait=True) == []
