"""Before the first shard: are the values right, and does a changed engine still give what it gave?"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence

from eyas.capture.check import TOLERANCES, Head, check_answer, check_values, compare_states
from eyas.capture.loop import backoff_s, timeout_s
from eyas.capture.monitor import Monitor
from eyas.capture.requests import Batch
from eyas.capture.stream import Outcome, Stream
from eyas.config import CaptureConfig
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, Engine, EngineInfo
from eyas.errors import CaptureMismatch, EngineRefused, EngineUnavailable, EyasError, SpecMismatch
from eyas.records import Provenance, TokenIds
from eyas.store.reader import DataSet

PROBE_SAMPLES = 4
RECHECKED_SAMPLES = 4


class Asker:
    """Asks an engine for a few samples outside the plan."""

    def __init__(self, config: CaptureConfig, engine: Engine, info: EngineInfo, monitor: Monitor) -> None:
        self.info = info
        self._config, self._engine, self._monitor = config, engine, monitor

    def ask(self, requests: Sequence[CaptureRequest]) -> Iterator[CaptureAnswer]:
        """The answers that pass the cheap checks, in any order; first in one batch, then what is left one by one.

        A sample that fails is left out, since the run itself will reject it. Raises what went wrong when all fail, and
        Stopped.
        """
        left = {request.sample_id: request for request in requests}
        num_answers, failure = 0, EyasError("the engine gave no answer")
        for attempt in range(1, self._config.max_attempts + 1):
            batches = [list(left.values())] if attempt == 1 else [[request] for request in left.values()]
            for batch in batches:
                for outcome in self._outcomes(batch):
                    if isinstance(outcome, EngineUnavailable):
                        failure = outcome
                    elif isinstance(outcome, CaptureFailure):
                        failure = outcome.error
                        if isinstance(failure, EngineRefused):
                            left.pop(outcome.sample_id, None)
                    else:
                        request = left.pop(outcome.sample_id, None)
                        try:
                            if request is None:
                                raise CaptureMismatch(f"sample {outcome.sample_id}: answered, but not asked for")
                            check_answer(outcome, request.token_ids, self.info.spec)
                        except CaptureMismatch as error:
                            failure = error
                            continue
                        num_answers += 1
                        yield outcome
            if not left or (num_answers and attempt > 1):
                break
            if attempt < self._config.max_attempts:
                self._monitor.pause(backoff_s(self._config, attempt), failure)
        if requests and not num_answers:
            raise failure

    def _outcomes(self, batch: list[CaptureRequest]) -> Iterator[Outcome | EngineUnavailable]:
        stream = Stream(self._engine, Batch(batch))
        deadline = time.monotonic() + sum(timeout_s(self._config, len(r.token_ids)) for r in batch)
        while True:
            self._monitor.tick()
            try:
                outcome = stream.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    yield EngineUnavailable("the engine gave no answer in time")
                    return
                continue
            if outcome is None:
                return
            yield outcome
            if isinstance(outcome, EngineUnavailable):
                return


def probe(asker: Asker, samples: Sequence[tuple[str, TokenIds]], head: Head | None, monitor: Monitor) -> None:
    """Check the values of a few samples against the engine's own word and the target's head. Raises CaptureMismatch."""
    usable = [(s, ids) for s, ids in samples if 1 < len(ids) <= asker.info.max_tokens][:PROBE_SAMPLES]
    lines = []
    for answer in asker.ask([CaptureRequest(s, ids, with_reference=True) for s, ids in usable]):
        report = check_values(answer, asker.info.spec, head)
        monitor.counts.checked_samples += 1
        monitor.events.add("probe", sample_id=answer.sample_id, found=report.line())
        lines.append(report.line())
    if lines:
        monitor.say(f"probe of {len(lines)} samples is right: {lines[0]}")


def recheck(
    asker: Asker, samples: Sequence[tuple[str, TokenIds]], stored: DataSet, changes: str, monitor: Monitor
) -> None:
    """Capture committed samples again; raise SpecMismatch when they differ by more than the tolerance."""
    spec, root = asker.info.spec, monitor.root
    tolerance = TOLERANCES[spec.dtype].states
    num_agreed = 0
    for answer in asker.ask([CaptureRequest(s, ids) for s, ids in samples[:RECHECKED_SAMPLES]]):
        sample = stored[stored.index_of(answer.sample_id)]
        error = compare_states(answer, {name: sample.field(name) for name in spec.fields}, spec)
        monitor.events.add("recheck", sample_id=answer.sample_id, error=error, changed=changes)
        if not error <= tolerance:
            raise SpecMismatch(
                f"{root}: {changes} changed since the last commit, and sample {answer.sample_id} now differs by "
                f"{error:.2g} relative (allowed {tolerance:.2g}); go back, or capture into a new directory",
                path=root,
            )
        num_agreed += 1
    monitor.say(f"{changes} changed; {num_agreed} committed samples captured again agree")


def provenance_changes(then: Provenance, now: Provenance) -> str:
    """What differs, for people: `torch 2.12 -> 2.13`; empty when nothing does."""
    changes = []
    if (then.engine, then.version) != (now.engine, now.version):
        changes.append(f"{then.engine} {then.version} -> {now.engine} {now.version}")
    for name in sorted(then.settings.keys() | now.settings.keys()):
        old, new = then.settings.get(name, "absent"), now.settings.get(name, "absent")
        if old != new:
            changes.append(f"{name} {old} -> {new}")
    return ", ".join(changes)
