"""A few samples asked for outside the plan: for a probe, for a re-check, or to see whether the engine lives."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Iterator, Sequence

from eyas.capture.check import check_answer
from eyas.capture.monitor import Monitor
from eyas.capture.requests import Batch
from eyas.capture.stream import Outcome, Stream
from eyas.config import CaptureConfig
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, Engine, EngineInfo
from eyas.errors import CaptureMismatch, EngineRefused, EngineUnavailable, EyasError

MAX_BACKOFF_S = 60.0


class Asker:
    """Asks an engine for a few samples outside the plan."""

    def __init__(self, config: CaptureConfig, engine: Engine, info: EngineInfo, monitor: Monitor) -> None:
        self.info = info
        self.known_good: CaptureRequest | None = None
        """A sample that was answered rightly in this run: the shortest so far."""
        self._config, self._engine, self._monitor = config, engine, monitor

    def ask(self, requests: Sequence[CaptureRequest]) -> Iterator[CaptureAnswer]:
        """The answers that pass the cheap checks, in any order; first in one batch, then what is left one by one.

        A sample that fails is left out, since the run itself will reject it. Raises what went wrong when all fail, and
        Stopped.
        """
        left = {request.sample_id: request for request in requests}
        num_answers = 0
        failure: EyasError = EngineUnavailable("the engine gave no answer; the same command goes on from here")
        for attempt in range(1, self._config.max_attempts + 1):
            asked = [dataclasses.replace(request, attempt=attempt) for request in left.values()]
            for batch in [asked] if attempt == 1 else [[request] for request in asked]:
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
                        self.remember(dataclasses.replace(request, attempt=attempt))
                        yield outcome
            if not left or (num_answers and attempt > 1):
                break
            if attempt < self._config.max_attempts:
                self._monitor.pause(backoff_s(self._config, attempt), failure)
        if requests and not num_answers:
            raise failure

    def remember(self, request: CaptureRequest) -> None:
        """Keep a sample that was answered rightly, if it is cheaper to ask for than the one kept so far."""
        if self.known_good is None or len(request.token_ids) < len(self.known_good.token_ids):
            self.known_good = dataclasses.replace(request, with_reference=False)

    def engine_lives(self) -> bool:
        """Whether the engine still answers a sample that it has answered before."""
        if self.known_good is None:
            return False
        # All outcomes are taken, so that the engine is done with this question before the next one.
        outcomes = list(self._outcomes([self.known_good]))
        return any(isinstance(outcome, CaptureAnswer) for outcome in outcomes)

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


def timeout_s(config: CaptureConfig, num_tokens: int) -> float:
    """How long the answer to a sample may take."""
    return config.timeout_s + config.timeout_s_per_1k_tokens * num_tokens / 1000


def backoff_s(config: CaptureConfig, attempt: int) -> float:
    """The pause after the `attempt`-th try."""
    return float(min(config.backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S))
