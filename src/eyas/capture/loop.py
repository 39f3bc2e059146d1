"""The caller's side of a capture: every outcome passes here before it counts."""

from __future__ import annotations

import queue
import threading
import time

from eyas.capture.asker import Asker, backoff_s, timeout_s
from eyas.capture.check import Head, check_answer, check_values
from eyas.capture.monitor import CAPTURING, Monitor
from eyas.capture.requests import TOO_LONG, Requests, Slot
from eyas.capture.sink import Done, Sink
from eyas.capture.stream import Outcome, Stream
from eyas.config import CaptureConfig
from eyas.engine.base import CaptureFailure, CaptureRequest, Engine
from eyas.errors import CaptureMismatch, EngineRefused, EngineUnavailable, Stopped

STOP_GRACE_S = 6.0
LOOK_S = 0.1
"""Seconds between two looks at what the engine owes and at what it will never see."""


class Loop:
    """The caller's side of a capture: checks answers, decides about failures, watches time and budget."""

    def __init__(
        self,
        config: CaptureConfig,
        engine: Engine,
        asker: Asker,
        head: Head | None,
        requests: Requests,
        sink: Sink,
        monitor: Monitor,
    ) -> None:
        self._config, self._engine, self._asker, self._head = config, engine, asker, head
        self._info, self._spec = asker.info, asker.info.spec
        self._requests, self._sink, self._monitor, self._counts = requests, sink, monitor, monitor.counts
        self._outstanding: dict[str, Slot] = {}
        self._burst = 0
        self._restarts = 0
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        requests.on_take = self._on_take

    def _on_take(self, slot: Slot) -> None:
        with self._lock:
            self._outstanding[slot.sample_id] = slot

    def run(self) -> None:
        """Until everything planned has an outcome. Raises Stopped and whatever stops a run."""
        stream = Stream(self._engine, self._requests)
        look_at = time.monotonic()
        try:
            while not self._requests.is_finished():
                self._sink.check()
                self._monitor.tick()
                # Not only when nothing arrives: others' answers must not keep a lost sample's place in the queue.
                if time.monotonic() >= look_at:
                    self._show_waiting()
                    self._settle_unsent()
                    self._expire()
                    look_at = time.monotonic() + LOOK_S
                try:
                    outcome = stream.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                if outcome is None or isinstance(outcome, EngineUnavailable):
                    if outcome is None and self._requests.is_finished():
                        continue
                    stream = self._restart(outcome)
                else:
                    self._settle(outcome)
                del outcome
            self._sink.check()
        except Stopped:
            self._let_finish(stream)
            raise
        finally:
            stream.stop()

    def _show_waiting(self) -> None:
        """An engine that waits for its server says so, and has a limit of its own: no time of ours runs meanwhile."""
        waiting_for = getattr(self._engine, "waiting_for", "")
        state = f"waiting for {waiting_for}" if waiting_for else CAPTURING
        if waiting_for:
            self._heard_at = time.monotonic()
        if state != self._counts.state:
            self._monitor.state(state)

    def _open_slots(self) -> bool:
        with self._lock:
            return bool(self._outstanding)

    def _let_finish(self, stream: Stream) -> None:
        """After a stop: take what is answered within a few seconds, so that a shard about to be whole becomes so."""
        self._requests.close()
        deadline = time.monotonic() + STOP_GRACE_S
        while self._open_slots() and time.monotonic() < deadline and stream.alive:
            try:
                outcome = stream.get(timeout=0.2)
            except queue.Empty:
                continue
            if outcome is None or isinstance(outcome, EngineUnavailable):
                return
            self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        self._heard_at = time.monotonic()
        slot = self._claim(outcome)
        if slot is None:
            self._counts.late_answers += 1
            return
        if isinstance(outcome, CaptureFailure):
            if isinstance(outcome.error, EngineRefused):
                self._reject(slot, "refused", str(outcome.error))
            else:
                self._ask_again(slot, outcome)
            return
        try:
            check_answer(outcome, slot.token_ids, self._spec)
        except CaptureMismatch as error:
            self._reject(slot, error.reason, str(error))
            return
        if outcome.reference is not None:
            try:
                report = check_values(outcome, self._spec, self._head)
            except CaptureMismatch as error:
                if outcome.server:
                    error.args = (f"{error} (answered by {outcome.server})",)
                raise
            self._counts.checked_samples += 1
            self._monitor.events.add("check", sample_id=slot.sample_id, found=report.line())
        self._burst = self._restarts = 0
        self._counts.answered_samples += 1
        self._counts.answered_tokens += slot.num_tokens
        if outcome.server:
            self._monitor.on_answer(outcome.server, slot.shard.plan.shard_id, slot.num_tokens)
        self._asker.remember(CaptureRequest(slot.sample_id, slot.token_ids, slot.attempt))
        self._sink.put(Done(slot, outcome.fields))

    def _settle_unsent(self) -> None:
        """Outcomes of the samples that the engine never sees."""
        for slot in self._requests.unsent():
            if slot.unsent == TOO_LONG:
                limit = self._info.max_tokens
                self._reject(slot, TOO_LONG, f"{slot.num_tokens} tokens, the engine takes at most {limit}")
            else:
                self._sink.put(Done(slot, None))

    def _claim(self, outcome: Outcome) -> Slot | None:
        """The slot that an outcome settles; None when it comes too late, after a time-out and another try."""
        with self._lock:
            slot = self._outstanding.get(outcome.sample_id)
            if slot is None or slot.attempt != outcome.attempt:
                return None
            del self._outstanding[outcome.sample_id]
        self._requests.settle()
        return slot

    def _ask_again(self, slot: Slot, failure: CaptureFailure) -> None:
        if failure.suspect and not slot.alone:
            # It was not alone with the servers that died, so it is not blamed yet.
            self._requests.retry(slot, after_s=0.0, alone=True)
        else:
            self._retry(slot, str(failure.error), alone=failure.suspect)

    def _retry(self, slot: Slot, why: str, *, alone: bool = False) -> None:
        if slot.attempt >= self._config.max_attempts:
            self._reject(slot, "unavailable", f"{why} ({slot.attempt} tries)")
            return
        pause = backoff_s(self._config, slot.attempt)
        slot.attempt += 1
        self._counts.retries += 1
        self._monitor.events.add("retry", sample_id=slot.sample_id, attempt=slot.attempt, reason=why, after_s=pause)
        self._requests.retry(slot, after_s=pause, alone=alone)

    def _reject(self, slot: Slot, reason: str, detail: str) -> None:
        counts = self._counts
        self._monitor.on_reject(slot.sample_id)
        counts.reasons[reason] += 1
        self._burst += 1
        self._monitor.events.add("reject", sample_id=slot.sample_id, reason=reason, detail=detail)
        self._sink.put(Done(slot, None, reason, detail))
        self._require_budget()

    def _require_budget(self) -> None:
        counts, root = self._counts, self._monitor.root
        # A share of a small data set rounds to nothing, yet one bad sample is no reason to stop, unless 0 says so.
        fraction = self._config.max_reject_fraction
        budget = max(1, int(fraction * counts.planned_samples)) if fraction else 0
        reasons = ", ".join(f"{n} {reason}" for reason, n in counts.reasons.most_common(3))
        if counts.rejected_samples > budget:
            raise CaptureMismatch(
                f"{root}: {counts.rejected_samples} of {counts.planned_samples} samples rejected ({reasons}), more "
                f"than capture.max_reject_fraction = {self._config.max_reject_fraction} allows; see events.jsonl",
                reason="budget",
            )
        if self._burst >= self._config.max_reject_burst:
            raise CaptureMismatch(
                f"{root}: {self._burst} samples in a row rejected ({reasons}); something is wrong with the engine or "
                "the samples; see events.jsonl",
                reason="burst",
            )

    def _restart(self, error: EngineUnavailable | None) -> Stream:
        """The engine is gone: wait, then ask it again for all that it took and did not answer."""
        self._restarts += 1
        why = error if error is not None else "the engine ended before its work was done"
        with self._lock:
            taken = sorted(self._outstanding.values(), key=lambda slot: slot.sequence)
            self._outstanding.clear()
        # Only a sample that was alone with the engine can be blamed for its end; so each has its turn alone.
        blamed = taken[0] if len(taken) == 1 else None
        condemned = blamed is not None and blamed.attempt >= self._config.max_attempts
        if condemned or self._restarts > self._config.max_attempts:
            # Bad samples or a dead engine? Nothing is rejected for the engine's sake, nor does a handful of bad
            # samples end the run: a sample that was answered before tells the two apart.
            if not self._asker.engine_lives():
                raise EngineUnavailable(
                    f"{why}; gave up after {self._restarts - 1} restarts; the same command goes on from here"
                )
            self._restarts = 1
        self._requests.settle(len(taken))
        for slot in taken:
            if slot is blamed:
                self._retry(slot, str(why), alone=True)
            else:
                self._requests.retry(slot, after_s=0.0, alone=True)
        self._monitor.pause(backoff_s(self._config, self._restarts), why)
        return Stream(self._engine, self._requests)

    def _expire(self) -> None:
        """Time-outs: a sample that waits too long is asked for again; an engine that takes nothing is given up."""
        now = time.monotonic()
        with self._lock:
            late = [s for s in self._outstanding.values() if now - s.taken_at > timeout_s(self._config, s.num_tokens)]
            for slot in late:
                del self._outstanding[slot.sample_id]
        for slot in late:
            self._requests.settle()
            self._retry(slot, f"no answer within {timeout_s(self._config, slot.num_tokens):.0f} s")
        idle_s = now - max(self._requests.last_activity, self._heard_at)
        if self._requests.waiting_retries and idle_s > 2 * timeout_s(self._config, self._requests.waiting_retries):
            raise EngineUnavailable("the engine neither answers nor takes work; the same command goes on from here")
