"""What a capture does, said one by one: resumes, widens, retries, checks, refuses, stops."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.capture import loop, status
from eyas.capture.plan import order_key
from eyas.capture.requests import Requests
from eyas.data.table import SampleTable
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, EngineInfo, RequestSource
from eyas.engine.fake import FakeEngine, FakeSettings, Fault, to_block
from eyas.errors import (
    CaptureMismatch,
    ConfigError,
    DataSetLocked,
    EngineError,
    EngineUnavailable,
    OutOfSpace,
    SpecMismatch,
    Stopped,
    StoreError,
)
from eyas.observe import heartbeat
from eyas.store import record as records
from eyas.store.files import Files
from eyas.store.layout import Layout
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.store.writer import DataSetWriter
from fake_data import config, contents, make_table, run

LENGTHS = [5, 9, 12, 3, 20, 7, 8, 14, 2, 6, 11, 10]
Outcome = CaptureAnswer | CaptureFailure


class Watched:
    """An engine around the fake one: sees each request taken and each outcome given."""

    def __init__(self, **settings: Any) -> None:
        self.inner = FakeEngine(None, FakeSettings(**settings))
        self.head = self.inner.head
        self.asked: list[str] = []
        """Sample ids that the run itself asked for; a probe's are not among them."""
        self.on_take: Callable[[RequestSource, list[CaptureRequest]], None] = lambda source, taken: None
        self.on_outcome: Callable[[Outcome], None] = lambda outcome: None

    @property
    def calls(self) -> int:
        return self.inner.calls

    def info(self) -> EngineInfo:
        return self.inner.info()

    def capture(self, source: RequestSource) -> Iterator[Outcome]:
        watched = self

        class Source:
            def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
                taken = source.take(max_tokens, wait=wait)
                if isinstance(source, Requests):
                    watched.asked += [request.sample_id for request in taken]
                watched.on_take(source, taken)
                return taken

        for outcome in self.inner.capture(Source()):
            self.on_outcome(outcome)
            yield outcome
            del outcome

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    return make_table(tmp_path / "samples.parquet", LENGTHS, tags=True)


def ids_in_order(table: SampleTable, seed: int = 0) -> list[str]:
    return sorted((s.sample_id for s in table.samples()), key=lambda sample_id: order_key(sample_id, seed))


def events(out: Path, *kinds: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
    return [row for row in rows if not kinds or row["event"] in kinds]


def rejects(out: Path) -> dict[str, tuple[str, str]]:
    layout = Layout(out)
    found = [r for shard_id in layout.record_ids() for r in records.read(layout.record(shard_id)).rejects]
    return {r.sample_id: (r.reason, r.detail) for r in found}


def require_sound(out: Path) -> None:
    report = verify(out)
    assert report.problems == [] and report.exit_code == 0


def stop_after(engine: Watched, num_answers: int) -> threading.Event:
    stop = threading.Event()
    left = itertools.count(1)

    def count(outcome: Outcome) -> None:
        if engine.asked and next(left) == num_answers:
            stop.set()

    engine.on_outcome = count
    return stop


# --- going on


def test_a_second_run_goes_on_with_no_flag_and_does_only_the_rest(
    table: SampleTable, out: Path, tmp_path: Path
) -> None:
    run(table, config(tmp_path / "whole"))
    first = Watched(window_tokens=1, seconds_per_1k_tokens=3.0)
    little = 21 * first.info().spec.bytes_per_token
    with pytest.raises(Stopped):
        run(table, config(out, in_flight_bytes=little), engine=first, stop=stop_after(first, 6))
    done = Layout(out).record_ids()
    assert done
    kept = {path: path.stat().st_mtime_ns for path in Layout(out).records.iterdir()}
    second = Watched()
    receipt = run(table, config(out), engine=second)
    assert receipt.committed == len(LENGTHS) and receipt.pending == 0
    assert 0 < len(second.asked) < len(LENGTHS) and receipt.captured_tokens < receipt.tokens
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert contents(out) == contents(tmp_path / "whole")


def test_a_complete_run_asks_the_engine_for_nothing(table: SampleTable, out: Path) -> None:
    first = run(table, config(out))
    engine = Watched(version="2")  # nothing to capture, so nothing to compare either
    again = run(table, config(out), engine=engine)
    assert engine.calls == 0
    assert (again.committed, again.data_digest, again.captured_tokens) == (first.committed, first.data_digest, 0)


def test_order_of_answers_does_not_matter(table: SampleTable, out: Path, tmp_path: Path) -> None:
    run(table, config(out))
    late = Fault(kind="late", every=2)
    for seed, window in ((0, 4096), (1, 30), (2, 60)):
        other = tmp_path / f"other{seed}"
        run(table, config(other), shuffle=seed, window_tokens=window, faults=(late,))
        assert contents(other) == contents(out)


def test_a_changed_spec_is_refused_naming_the_fields(table: SampleTable, out: Path) -> None:
    run(table, config(out, limit=3))
    before = contents(out)
    with pytest.raises(SpecMismatch) as caught:
        run(table, config(out), hidden_size=8, dtype="float32")
    assert caught.value.exit_code == 2
    for part in ("hidden_size: 16 there, 8 here", "dtype: bfloat16 there, float32 here", str(out)):
        assert part in str(caught.value)
    with pytest.raises(SpecMismatch, match=r"aux_layers: \[2, 4, 5\] there, \[3, 4, 5\] here"):
        run(table, config(out), engine=FakeEngine((3, 4, 5)))
    assert contents(out) == before


# --- another engine


def test_another_version_that_agrees_is_checked_on_a_few_committed_samples(table: SampleTable, out: Path) -> None:
    run(table, config(out, limit=6))
    run(table, config(out), version="2", drift=1e-3)
    rows = events(out, "recheck")
    assert 1 <= len(rows) <= 4
    assert all(row["error"] <= 3e-2 and "fake 1 -> fake 2" in row["changed"] for row in rows)
    require_sound(out)
    run(table, config(out), version="2", drift=1e-3)
    assert len(events(out, "recheck")) == len(rows)


def test_another_version_that_differs_is_refused(table: SampleTable, out: Path) -> None:
    run(table, config(out, limit=6))
    before = Layout(out).record_ids()
    with pytest.raises(SpecMismatch) as caught:
        run(table, config(out), version="2", drift=0.5, faults=())
    assert caught.value.exit_code == 2
    assert "fake 1 -> fake 2" in str(caught.value) and "drift 0.0 -> 0.5" in str(caught.value)
    assert Layout(out).record_ids() == before
    run(table, config(out))
    require_sound(out)


# --- wider, narrower


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ({"limit": 4}, {"limit": 9}),
        ({"limit": 4}, {}),
        ({"tags": ("even",)}, {"tags": ("even", "odd")}),
        ({"tags": ("even",)}, {}),
        ({"sources": ("b",)}, {"sources": ("a", "b")}),
        ({"tags": ("odd",), "limit": 2}, {"limit": 8}),
    ],
)
def test_widening_adds_only_the_rest(
    table: SampleTable, out: Path, narrow: dict[str, Any], wide: dict[str, Any]
) -> None:
    first = run(table, config(out, **narrow))
    kept = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.rglob("*") if p.parent.name in ("records", "plan")}
    done = {DataSet(out).sample_id(i) for i in range(first.committed)}
    engine = Watched()
    second = run(table, config(out, **wide), engine=engine)
    assert done.isdisjoint(engine.asked), "a captured sample was captured again"
    assert len(engine.asked) == second.committed - first.committed > 0
    assert {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in kept} == kept
    require_sound(out)


def test_a_narrower_selection_afterwards_does_nothing(table: SampleTable, out: Path) -> None:
    run(table, config(out))
    before = contents(out)
    for narrow in ({"limit": 3}, {"tags": ("odd",)}, {"sources": ("a",), "limit": 2}):
        engine = Watched()
        receipt = run(table, config(out, **narrow), engine=engine)
        assert engine.calls == 0 and receipt.committed == len(LENGTHS)
    assert contents(out) == before
    assert Layout(out).temporaries() == []


def test_a_grown_table_adds_its_new_samples(table: SampleTable, out: Path, tmp_path: Path) -> None:
    run(table, config(out))
    grown = make_table(tmp_path / "grown.parquet", [*LENGTHS, 4, 4, 9])
    engine = Watched()
    assert run(grown, config(out), engine=engine).committed == len(LENGTHS) + 3
    assert len(engine.asked) == 3


# --- rejects


def test_rejects_are_rows_of_the_records_with_reason_and_detail(table: SampleTable, out: Path) -> None:
    bad = ids_in_order(table)[5:9]
    kinds = ("wrong_ids", "fewer_rows", "nan", "refused")
    faults = tuple(Fault(kind=kind, samples=(sample_id,), row=1) for kind, sample_id in zip(kinds, bad, strict=True))
    receipt = run(table, config(out), faults=faults)
    assert (receipt.planned, receipt.committed, receipt.rejected) == (12, 8, 4)
    assert receipt.rejects_by_reason == {"token_ids": 1, "rows": 1, "non_finite": 1, "refused": 1}
    found = rejects(out)
    assert {found[s][0] for s in bad} == set(receipt.rejects_by_reason)
    assert "row 1" in found[bad[2]][1] and "hidden.2" in found[bad[2]][1]
    assert found[bad[3]][1] == "scripted: refused"
    assert {row["sample_id"]: (row["reason"], row["detail"]) for row in events(out, "reject")} == found
    require_sound(out)


def test_rejected_samples_are_not_tried_again_unless_asked(table: SampleTable, out: Path) -> None:
    run(table, config(out), faults=(Fault(kind="refused", samples=tuple(ids_in_order(table)[5:8])),))
    engine = Watched()
    assert run(table, config(out), engine=engine).rejected == 3
    assert engine.calls == 0


def test_retry_rejects_captures_what_has_become_good(table: SampleTable, out: Path) -> None:
    bad = ids_in_order(table)[5:8]
    run(table, config(out), faults=(Fault(kind="refused", samples=tuple(bad)),))
    engine = Watched(faults=(Fault(kind="refused", samples=(bad[0],)),))
    receipt = run(table, config(out), engine=engine, retry_rejects=True)
    assert (receipt.committed, receipt.rejected) == (11, 1)
    assert sorted(set(engine.asked)) == sorted(bad)
    receipt = run(table, config(out), retry_rejects=True)
    assert (receipt.committed, receipt.rejected) == (12, 0)
    idle = Watched()
    run(table, config(out), engine=idle, retry_rejects=True)
    assert idle.calls == 0
    require_sound(out)


def test_retry_rejects_ends_also_where_all_are_still_bad(table: SampleTable, out: Path) -> None:
    bad = Fault(kind="refused", samples=tuple(ids_in_order(table)[5:8]))
    for _ in range(3):
        receipt = run(table, config(out, max_reject_fraction=0.25), faults=(bad,), retry_rejects=True)
        assert (receipt.committed, receipt.rejected, receipt.pending) == (9, 3, 0)
    require_sound(out)


def test_a_retry_that_was_planned_and_not_tried_is_not_planned_twice(table: SampleTable, out: Path) -> None:
    run(table, config(out), faults=(Fault(kind="refused", samples=tuple(ids_in_order(table)[5:8])),))
    stop = threading.Event()
    engine = Watched()
    engine.on_take = lambda source, taken: stop.set()
    with pytest.raises(Stopped):
        run(table, config(out), engine=engine, retry_rejects=True, stop=stop)
    assert len(Layout(out).segments()) == 2
    receipt = run(table, config(out), retry_rejects=True)
    assert (receipt.committed, receipt.rejected) == (12, 0)
    assert len(Layout(out).segments()) == 2
    require_sound(out)


@pytest.mark.parametrize("also_the_retry", [False, True])
def test_a_shard_redone_after_a_repair_leaves_to_the_retry_what_that_has_captured(
    table: SampleTable, out: Path, also_the_retry: bool
) -> None:
    bad = ids_in_order(table)[5:8]
    run(table, config(out), faults=(Fault(kind="refused", samples=tuple(bad)),))
    layout = Layout(out)
    originals = layout.record_ids()
    run(table, config(out), retry_rejects=True)
    for shard_id in layout.record_ids() if also_the_retry else originals:
        layout.record(shard_id).unlink()
    receipt = run(table, config(out))
    assert (receipt.planned, receipt.committed, receipt.rejected, receipt.pending) == (12, 12, 0, 0)
    require_sound(out)
    assert len({DataSet(out).sample_id(i) for i in range(12)}) == 12


def test_too_many_rejects_stop_the_run_naming_the_reasons(table: SampleTable, out: Path) -> None:
    bad = ids_in_order(table)[5:9]
    faults = (Fault(kind="nan", samples=tuple(bad[:3])), Fault(kind="fewer_rows", samples=tuple(bad[3:])))
    with pytest.raises(CaptureMismatch) as caught:
        run(table, config(out, max_reject_fraction=0.25), faults=faults)
    assert caught.value.exit_code == 1 and caught.value.reason == "budget"
    for part in ("4 of 12", "3 non_finite", "1 rows", "capture.max_reject_fraction", "events.jsonl"):
        assert part in str(caught.value)
    report = verify(out)
    assert report.problems == [] and report.orphans == 0
    run(table, config(out))
    require_sound(out)


def test_a_burst_of_rejects_stops_the_run(table: SampleTable, out: Path, tmp_path: Path) -> None:
    faults = (Fault(kind="wrong_width", samples=tuple(ids_in_order(table)[5:9])),)
    with pytest.raises(CaptureMismatch, match=r"4 samples in a row rejected .4 width.") as caught:
        run(table, config(out, max_reject_burst=4), faults=faults)
    assert caught.value.reason == "burst"
    run(table, config(tmp_path / "other", max_reject_burst=5), faults=faults)


def test_a_sample_longer_than_the_engine_takes_is_a_reject_and_never_sent(table: SampleTable, out: Path) -> None:
    engine = Watched(max_tokens=10)
    sent: list[int] = []
    engine.on_take = lambda source, taken: sent.extend(len(request.token_ids) for request in taken)
    receipt = run(table, config(out, check_fraction=1.0), engine=engine)
    too_long = [n for n in LENGTHS if n > 10]
    assert max(sent) == 10 and receipt.rejected == len(too_long)
    assert {reason for reason, _ in rejects(out).values()} == {"too_long"}
    assert "20 tokens, the engine takes at most 10" in {detail for _, detail in rejects(out).values()}
    require_sound(out)
    receipt = run(table, config(out), retry_rejects=True)
    assert receipt.committed == len(LENGTHS)


def test_samples_all_of_which_are_too_long_end_the_run_too(table: SampleTable, out: Path) -> None:
    engine = Watched(max_tokens=1)
    assert run(table, config(out), engine=engine).rejected == len(LENGTHS)
    assert engine.calls == 0
    require_sound(out)


# --- an engine that fails


@pytest.mark.parametrize("num_poison", [1, 3])
def test_samples_that_crash_the_engine_are_rejected_alone(table: SampleTable, out: Path, num_poison: int) -> None:
    bad = ids_in_order(table)[5 : 5 + num_poison]
    faults = (Fault(kind="crash", samples=tuple(bad)),)
    receipt = run(table, config(out, max_attempts=2), faults=faults)
    assert receipt.committed == len(LENGTHS) - num_poison
    assert rejects(out).keys() == set(bad)
    assert {reason for reason, _ in rejects(out).values()} == {"unavailable"}
    require_sound(out)


def test_a_handful_of_samples_that_crash_the_engine_and_nothing_else_left(table: SampleTable, out: Path) -> None:
    """Nothing good is pending any more, and yet the run ends: a committed sample shows that the engine lives."""
    bad = ids_in_order(table)[5:8]
    run(table, config(out), faults=(Fault(kind="refused", samples=tuple(bad)),))
    receipt = run(
        table, config(out, max_attempts=2), faults=(Fault(kind="crash", samples=tuple(bad)),), retry_rejects=True
    )
    assert (receipt.committed, receipt.rejected, receipt.pending) == (9, 3, 0)


def test_an_engine_that_crashes_once_costs_nothing(table: SampleTable, out: Path, tmp_path: Path) -> None:
    run(table, config(tmp_path / "whole"))
    receipt = run(table, config(out), crash_after=7)
    assert receipt.committed == len(LENGTHS) and receipt.retries >= 1
    assert contents(out) == contents(tmp_path / "whole")


def test_an_engine_that_stays_away_from_the_start(table: SampleTable, out: Path) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        run(table, config(out, max_attempts=2), faults=(Fault(kind="crash"),))
    assert caught.value.exit_code == 3
    assert run(table, config(out)).committed == len(LENGTHS)


@pytest.mark.parametrize("answers", [5, 10, 15])
def test_an_engine_that_goes_away_for_good_ends_the_run_and_rejects_nobody(
    table: SampleTable, out: Path, answers: int
) -> None:
    engine = Watched(window_tokens=20)
    left = itertools.count()

    def gone(outcome: Outcome) -> None:
        if next(left) >= answers:
            raise EngineUnavailable("connection refused")

    engine.on_outcome = gone
    with pytest.raises(EngineUnavailable, match=r"connection refused.*the same command goes on") as caught:
        run(table, config(out, max_attempts=2), engine=engine)
    assert caught.value.exit_code == 3
    assert rejects(out) == {}
    assert heartbeat.read(out / "heartbeat.json")["state"] == "stopped"  # type: ignore[index]
    receipt = run(table, config(out))
    assert (receipt.committed, receipt.rejected) == (len(LENGTHS), 0)


def test_an_engine_that_ends_before_its_work_is_done_is_asked_again(table: SampleTable, out: Path) -> None:
    class Lazy(Watched):
        def capture(self, source: RequestSource) -> Iterator[Outcome]:
            yield from itertools.islice(super().capture(source), 3)

    receipt = run(table, config(out), engine=Lazy(window_tokens=30))
    assert receipt.committed == len(LENGTHS)


def test_a_hang_is_timed_out_and_tried_again(table: SampleTable, out: Path) -> None:
    bad = ids_in_order(table)[5]
    faults = (Fault(kind="hang", samples=(bad,), attempts=1),)
    receipt = run(table, config(out, timeout_s=0.3, timeout_s_per_1k_tokens=0.0), faults=faults)
    assert receipt.committed == len(LENGTHS)
    tries = [row for row in events(out, "retry") if row.get("sample_id") == bad]
    assert tries and all("no answer within" in row["reason"] for row in tries)


def test_a_hang_for_good_is_a_reject(table: SampleTable, out: Path) -> None:
    bad = ids_in_order(table)[5]
    cfg = config(out, timeout_s=0.3, timeout_s_per_1k_tokens=0.0, max_attempts=2)
    run(table, cfg, faults=(Fault(kind="hang", samples=(bad,)),))
    reason, detail = rejects(out)[bad]
    assert reason == "unavailable" and "no answer within" in detail and "2 tries" in detail
    require_sound(out)


def test_a_hang_is_timed_out_also_while_others_keep_answering(out: Path, tmp_path: Path) -> None:
    table = make_table(tmp_path / "many.parquet", [10] * 60)
    bad = ids_in_order(table)[6]
    engine = Watched(
        faults=(Fault(kind="hang", samples=(bad,), attempts=1),), seconds_per_1k_tokens=3.0, window_tokens=20
    )
    cfg = config(out, timeout_s=0.3, timeout_s_per_1k_tokens=0.0, in_flight_bytes=10**7)
    assert run(table, cfg.model_copy(update={"check_fraction": 0.0}), engine=engine).committed == 60
    places = [i for i, sample_id in enumerate(engine.asked) if sample_id == bad]
    assert len(places) >= 2 and places[1] < len(engine.asked) - 5


def test_a_late_answer_of_an_older_attempt_is_ignored(table: SampleTable, out: Path) -> None:
    bad = ids_in_order(table)[5]

    class Ghost(Watched):
        """Answers the first attempt wrongly, and only when the second one has come."""

        ghost: CaptureAnswer | None = None
        num_ghosts = 0

        def capture(self, source: RequestSource) -> Iterator[Outcome]:
            for outcome in super().capture(source):
                if isinstance(source, Requests) and outcome.sample_id == bad and isinstance(outcome, CaptureAnswer):
                    if outcome.attempt == 1:
                        zeros = {k: to_block(np.zeros(b.shape, np.float32), b.dtype) for k, b in outcome.fields.items()}
                        self.ghost = dataclasses.replace(outcome, fields=zeros, reference=None)
                        continue
                    assert self.ghost is not None
                    self.num_ghosts += 1
                    yield self.ghost
                yield outcome

    engine = Ghost()
    run(table, config(out, timeout_s=0.3, timeout_s_per_1k_tokens=0.0), engine=engine)
    assert engine.num_ghosts >= 1
    stored = DataSet(out)
    sample = stored[stored.index_of(bad)]
    ids = next(s.token_ids for s in table.samples() if s.sample_id == bad)
    for name, block in engine.inner._fields(ids).items():
        assert bytes(sample.field(name)) == bytes(block.data)


# --- values


def test_a_wrong_layer_is_found_by_the_probe_and_named(table: SampleTable, out: Path) -> None:
    with pytest.raises(CaptureMismatch) as caught:
        run(table, config(out), faults=(Fault(kind="wrong_layer", layer=4),))
    assert "hidden.4" in str(caught.value) and "off by one" in str(caught.value)
    assert "hidden state 3" in str(caught.value)
    assert Layout(out).record_ids() == set() and list(Layout(out).shards.iterdir()) == []
    assert caught.value.exit_code == 1


def test_a_last_state_before_the_norm_is_found_by_the_probe(table: SampleTable, out: Path) -> None:
    with pytest.raises(CaptureMismatch, match="pre-norm, not post-norm"):
        run(table, config(out), faults=(Fault(kind="pre_norm"),))
    assert Layout(out).record_ids() == set()


@pytest.mark.parametrize("kind", ["wrong_layer", "pre_norm"])
def test_wrong_values_after_the_probe_are_found_by_the_sampled_check(table: SampleTable, out: Path, kind: Any) -> None:
    bad = ids_in_order(table)[-1]
    engine = Watched(faults=(Fault(kind=kind, samples=(bad,)),))
    with pytest.raises(CaptureMismatch, match=f"sample {bad}"):
        run(table, config(out, check_fraction=1.0), engine=engine)
    assert bad in engine.asked
    report = verify(out)
    assert report.problems == [] and report.orphans == 0 and report.pending > 0


def test_the_share_of_samples_checked_is_as_configured(table: SampleTable, tmp_path: Path) -> None:
    all_of_them = run(table, config(tmp_path / "all", check_fraction=1.0)).checked_samples
    none = run(table, config(tmp_path / "none", check_fraction=0.0)).checked_samples
    assert all_of_them - none == len(LENGTHS)


# --- bytes in flight


def test_bytes_in_flight_never_exceed_the_quota_and_memory_is_given_back(out: Path, tmp_path: Path) -> None:
    table = make_table(tmp_path / "many.parquet", [1 + i % 20 for i in range(150)])
    engine = Watched(shuffle=3, window_tokens=60, faults=(Fault(kind="late", every=3),))
    bytes_per_token = engine.info().spec.bytes_per_token
    quota = 45 * bytes_per_token
    alive: dict[int, int] = {}
    seen: list[int] = []
    most_alive: list[int] = []
    lock = threading.Lock()

    def forget(key: int) -> None:
        with lock:
            del alive[key]

    keys = itertools.count()

    def on_take(source: RequestSource, taken: list[CaptureRequest]) -> None:
        if isinstance(source, Requests):
            seen.append(source.in_flight_bytes)

    def on_outcome(outcome: Outcome) -> None:
        if engine.asked and isinstance(outcome, CaptureAnswer):
            for block in outcome.fields.values():
                key = next(keys)
                with lock:
                    alive[key] = block.num_bytes
                weakref.finalize(block.data.obj, forget, key)
            with lock:
                most_alive.append(sum(alive.values()))

    engine.on_take, engine.on_outcome = on_take, on_outcome
    run(table, config(out, in_flight_bytes=quota, check_fraction=0.0), engine=engine)
    assert max(seen) <= quota and max(seen) > quota / 2
    # The bytes of an answer count as gone as soon as they are written; who wrote them may hold them a moment longer.
    assert max(most_alive) <= quota + 20 * bytes_per_token
    assert sum(len(s.token_ids) for s in table.samples()) * bytes_per_token > 10 * quota
    assert alive == {}
    require_sound(out)


def test_a_quota_below_the_largest_sample_is_an_error_of_the_plan(table: SampleTable, out: Path) -> None:
    engine = Watched()
    need = max(LENGTHS) * engine.info().spec.bytes_per_token
    with pytest.raises(ConfigError) as caught:
        run(table, config(out, in_flight_bytes=need - 1), engine=engine)
    assert caught.value.exit_code == 2
    assert "capture.in_flight_bytes" in str(caught.value) and str(need) in str(caught.value)
    assert engine.calls == 0
    layout = Layout(out)
    assert layout.segments() == [] and layout.temporaries() == [] and not layout.scratch.exists()
    run(table, config(out, in_flight_bytes=need))


def test_a_quota_lowered_below_what_is_pending_is_an_error_too(table: SampleTable, out: Path) -> None:
    engine = Watched(window_tokens=1)
    with pytest.raises(Stopped):
        run(table, config(out, in_flight_bytes=21 * 128), engine=engine, stop=stop_after(engine, 2))
    with pytest.raises(ConfigError, match=r"capture\.in_flight_bytes"):
        run(table, config(out, in_flight_bytes=1))


# --- room


def test_too_little_room_is_said_before_the_engine_is_asked(
    table: SampleTable, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched()
    monkeypatch.setattr("eyas.capture.run.free_bytes", lambda root: 20_000)
    with pytest.raises(OutOfSpace, match=r"capture\.min_free_bytes") as caught:
        run(table, config(out, min_free_bytes=10_000), engine=engine)
    assert caught.value.exit_code == 3 and engine.calls == 0
    monkeypatch.undo()
    run(table, config(out))


def test_a_disk_that_fills_up_stops_the_run_between_two_shards(
    table: SampleTable, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    monkeypatch.setattr("eyas.capture.run.free_bytes", lambda root: 10**9 if next(looks) < 3 else 100)
    with pytest.raises(OutOfSpace, match="too little for the next shard"):
        run(table, config(out, min_free_bytes=50, in_flight_bytes=21 * 128))
    monkeypatch.undo()
    layout = Layout(out)
    assert 1 <= len(layout.record_ids()) < 4 and layout.temporaries() == []
    run(table, config(tmp_path / "whole"))
    run(table, config(out))
    assert contents(out) == contents(tmp_path / "whole")


class FailingFiles(Files):
    """From the n-th call that needs room on, there is none; what only frees things goes on working."""

    def __init__(self, at: int, number: int) -> None:
        self.calls, self._at, self._errno = 0, at, number

    def _perhaps_fail(self) -> None:
        self.calls += 1
        if self.calls >= self._at:
            raise OSError(self._errno, os.strerror(self._errno))

    def create(self, path: Path) -> int:
        self._perhaps_fail()
        return super().create(path)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        self._perhaps_fail()
        return super().write(fd, parts, offset)

    def fsync(self, fd: int) -> None:
        self._perhaps_fail()

    def rename(self, old: Path, new: Path) -> None:
        self._perhaps_fail()
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self._perhaps_fail()
        super().link(old, new)

    def sync_directory(self, path: Path) -> None:
        self._perhaps_fail()


@pytest.mark.parametrize(("number", "error", "exit_code"), [(errno.ENOSPC, OutOfSpace, 3), (errno.EIO, StoreError, 1)])
def test_a_disk_that_fails_at_any_call_stops_the_run_tidily(
    tmp_path: Path, number: int, error: type[StoreError], exit_code: int
) -> None:
    table = make_table(tmp_path / "small.parquet", [3, 4, 5, 6, 2])
    small = {"num_layers": 3, "hidden_size": 4}
    step = 1 if number == errno.ENOSPC else 4
    run(table, config(tmp_path / "whole", shard_tokens=10), **small)
    whole = contents(tmp_path / "whole")
    for at in itertools.count(1, step):
        out = tmp_path / f"out{at}"
        try:
            run(table, config(out, shard_tokens=10), files=FailingFiles(at, number), **small)
        except StoreError as caught:
            assert type(caught) is error and caught.exit_code == exit_code
            assert str(out) in str(caught) or str(out.parent) in str(caught)
        else:
            assert at > 20
            return
        assert Layout(out).temporaries() == [], at
        run(table, config(out, shard_tokens=10), files=FailingFiles(10**9, 0), **small)
        assert contents(out) == whole
        shutil.rmtree(out)


def test_a_disk_that_fills_up_while_planning(table: SampleTable, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("eyas.capture.plan._Bucket.add", full)
    with pytest.raises(OutOfSpace):
        run(table, config(out))
    assert Layout(out).temporaries() == [] and not Layout(out).scratch.exists()
    monkeypatch.undo()
    run(table, config(out))


# --- stopping


def test_a_stop_ends_the_run_within_seconds_and_commits_what_is_whole(out: Path, tmp_path: Path) -> None:
    table = make_table(tmp_path / "many.parquet", [10] * 100)
    engine = Watched(seconds_per_1k_tokens=2.0)
    stop = stop_after(engine, 20)
    start = time.monotonic()
    with pytest.raises(Stopped, match="the same command goes on") as caught:
        run(table, config(out), engine=engine, stop=stop)
    assert time.monotonic() - start < 10 and caught.value.exit_code == 3
    assert Layout(out).record_ids() and Layout(out).temporaries() == []
    assert [row["event"] for row in events(out)][-1] == "stopped"
    assert run(table, config(out)).committed == 100


def test_a_stop_does_not_wait_for_an_engine_that_hangs(
    table: SampleTable, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loop.STOP_GRACE_S <= 8
    monkeypatch.setattr(loop, "STOP_GRACE_S", 0.5)
    engine, stop, release = Watched(window_tokens=30), threading.Event(), threading.Event()

    def hang(source: RequestSource, taken: list[CaptureRequest]) -> None:
        if len(engine.asked) > 4:
            stop.set()
            release.wait(30)

    engine.on_take = hang
    start = time.monotonic()
    try:
        with pytest.raises(Stopped):
            run(table, config(out), engine=engine, stop=stop)
        assert time.monotonic() - start < 5
    finally:
        release.set()
    assert run(table, config(out)).committed == len(LENGTHS)


def test_a_stop_before_anything_leaves_nothing_half_done(table: SampleTable, out: Path) -> None:
    stop = threading.Event()
    stop.set()
    engine = Watched()
    with pytest.raises(Stopped):
        run(table, config(out), engine=engine, stop=stop)
    layout = Layout(out)
    assert engine.calls == 0 and layout.segments() == [] and layout.temporaries() == []
    assert not layout.scratch.exists()
    run(table, config(out))


def test_a_stop_ends_a_pause_between_two_tries(table: SampleTable, out: Path) -> None:
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        run(table, config(out, backoff_s=30.0), faults=(Fault(kind="crash"),), stop=stop)
    assert time.monotonic() - start < 5


# --- two at once


def test_two_at_once_is_refused(table: SampleTable, out: Path) -> None:
    with DataSetWriter(out, FakeEngine().info().spec):
        with pytest.raises(DataSetLocked, match=f"pid {os.getpid()} on .* is writing") as caught:
            run(table, config(out))
        assert caught.value.exit_code == 1
    run(table, config(out))


# --- what others see


def test_events_are_one_object_per_line(table: SampleTable, out: Path) -> None:
    order = ids_in_order(table)
    faults = (
        Fault(kind="refused", samples=(order[5],)),
        Fault(kind="unavailable", samples=(order[6],), attempts=1),
    )
    receipt = run(table, config(out), faults=faults)
    rows = events(out)
    assert all(row.keys() >= {"t", "run", "event"} for row in rows)
    assert len({row["run"] for row in rows}) == 1
    commits = events(out, "commit")
    assert {row["shard"] for row in commits} == Layout(out).record_ids()
    assert sum(row["samples"] for row in commits) == receipt.committed
    assert [row["sample_id"] for row in events(out, "reject")] == [order[5]]
    retry = [row for row in events(out, "retry") if row.get("sample_id") == order[6]]
    assert [(row["attempt"], row["reason"]) for row in retry] == [(2, "scripted: unavailable")]
    assert rows[0]["event"] == "start" and rows[-1] == rows[-1] | {"event": "state", "state": "complete"}


def test_a_torn_last_line_of_the_events_is_closed(table: SampleTable, out: Path) -> None:
    run(table, config(out, limit=3))
    whole = (out / "events.jsonl").read_bytes()
    torn = b'{"t": 1.5, "event": "com'
    (out / "events.jsonl").write_bytes(whole + torn)
    run(table, config(out))
    after = (out / "events.jsonl").read_bytes()
    assert after.startswith(whole + torn + b"\n") and after.endswith(b"\n")
    lines = after.splitlines()
    assert lines.count(torn) == 1
    for line in lines:
        if line != torn:
            json.loads(line)


def test_the_heartbeat_says_which_process_does_what(table: SampleTable, out: Path) -> None:
    engine = Watched(window_tokens=20)
    during: list[dict[str, Any]] = []

    def look(source: RequestSource, taken: list[CaptureRequest]) -> None:
        beat = heartbeat.read(out / "heartbeat.json")
        assert beat is not None
        during.append(beat)

    engine.on_take = look
    bad = ids_in_order(table)[5]
    engine.inner.settings = engine.inner.settings.model_copy(
        update={"faults": (Fault(kind="refused", samples=(bad,)),)}
    )
    run(table, config(out), engine=engine)
    beat = during[0]
    assert beat["pid"] == os.getpid() and heartbeat.is_alive(beat) is True
    assert heartbeat.is_alive(beat | {"pid_started": beat["pid_started"] + 1}) is False
    assert heartbeat.is_alive(beat | {"host": "elsewhere"}) is None
    after = heartbeat.read(out / "heartbeat.json")
    assert after is not None
    assert after["state"] == "complete" and after["time"] >= beat["time"]
    assert (after["planned"], after["committed"], after["rejected"], after["pending"]) == (12, 11, 1, 0)
    assert after["rejects_by_reason"] == {"refused": 1} and after["in_flight_bytes"] == 0


def test_the_heartbeat_of_a_stopped_run_says_so(table: SampleTable, out: Path) -> None:
    engine = Watched(window_tokens=1)
    with pytest.raises(Stopped):
        run(table, config(out, in_flight_bytes=21 * 128), engine=engine, stop=stop_after(engine, 3))
    beat = heartbeat.read(out / "heartbeat.json")
    assert beat is not None and beat["state"] == "stopped"
    assert beat["planned"] == beat["committed"] + beat["rejected"] + beat["pending"]


def test_the_receipt_states_law_1_and_what_is_on_disk(table: SampleTable, out: Path) -> None:
    receipt = run(table, config(out), faults=(Fault(kind="refused", samples=(ids_in_order(table)[5],)),))
    assert receipt.planned == receipt.committed + receipt.rejected + receipt.pending
    assert receipt.payload_bytes == sum(p.stat().st_size for p in Layout(out).shards.iterdir())
    stored = DataSet(out)
    assert (receipt.committed, receipt.tokens) == (len(stored), stored.num_tokens)
    assert receipt.fingerprint == stored.fingerprint


def test_an_error_of_the_engine_itself_is_not_swallowed(table: SampleTable, out: Path) -> None:
    engine = Watched()

    def broken(outcome: Outcome) -> None:
        if engine.asked:
            raise EngineError("401: the key is wrong")

    engine.on_outcome = broken
    with pytest.raises(EngineError, match="401"):
        run(table, config(out), engine=engine)
    assert rejects(out) == {} and Layout(out).temporaries() == []


@pytest.mark.parametrize("shape", [(160,), (2, 5, 16), (5, 15), (5, 17), (0, 16)])
def test_an_answer_of_any_other_shape_is_a_reject(out: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    table = make_table(tmp_path / "five.parquet", [5] * 8)
    bad = ids_in_order(table)[6]

    class Odd(Watched):
        def capture(self, source: RequestSource) -> Iterator[Outcome]:
            for outcome in super().capture(source):
                if outcome.sample_id == bad and isinstance(outcome, CaptureAnswer):
                    block = to_block(np.zeros(shape, np.float32), "bfloat16")
                    outcome = dataclasses.replace(outcome, fields=dict(outcome.fields) | {"last": block})
                yield outcome

    run(table, config(out, check_fraction=0.0), engine=Odd())
    assert rejects(out).keys() == {bad}
    require_sound(out)


def test_many_threads_write_what_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [int(n) for n in np.random.default_rng(3).integers(1, 30, 200)]
    table = make_table(tmp_path / "samples.parquet", lengths)
    run(table, config(tmp_path / "one", shard_tokens=400), faults=(Fault(kind="refused", every=7),))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for attempt in range(3):
        out = tmp_path / f"many{attempt}"
        receipt = run(table, config(out, shard_tokens=400), faults=(Fault(kind="refused", every=7),), shuffle=attempt)
        assert receipt.pending == 0
        assert contents(out) == contents(tmp_path / "one")


def test_a_disk_that_fills_up_under_many_threads_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(tmp_path / "samples.parquet", [20] * 120)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    real, calls = os.pwritev, itertools.count()

    def pwritev(fd: int, views: Any, offset: int) -> int:
        if next(calls) >= 30 and len(views) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    out = tmp_path / "states"
    # So little may be in flight that bytes which a failed write kept would stop the run for good.
    with pytest.raises(OutOfSpace):
        run(table, config(out, shard_tokens=200, in_flight_bytes=20 * 160 * 4))
    monkeypatch.setattr(os, "pwritev", real)
    assert not list((out / "shards").glob("*.tmp")) and not list((out / "shards").glob(".*.tmp"))
    assert run(table, config(out, shard_tokens=200)).pending == 0
    assert verify(out).exit_code == 0


def test_a_heartbeat_that_cannot_be_read_is_not_taken_for_none(table: SampleTable, out: Path) -> None:
    run(table, config(out))
    Layout(out).heartbeat.write_bytes(b"\x00garbage")
    assert status.status(out).headline().startswith("heartbeat.json cannot be read")
    Layout(out).heartbeat.unlink()
    assert status.status(out).headline() == "no capture has run here"
