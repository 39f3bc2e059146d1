"""An engine's answers, computed in a thread of its own."""

from __future__ import annotations

import queue
import threading

from eyas.engine.base import CaptureAnswer, CaptureFailure, Engine, RequestSource
from eyas.errors import EngineUnavailable

Outcome = CaptureAnswer | CaptureFailure


class Stream:
    """An engine's answers, computed in a thread of its own; `get` returns None at the end, or raises what it raised.

    The thread is a daemon: an engine that hangs cannot keep the process.
    """

    def __init__(self, engine: Engine, source: RequestSource) -> None:
        self._queue: queue.SimpleQueue[CaptureAnswer | CaptureFailure | BaseException | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(engine, source), name="engine", daemon=True)
        self._thread.start()

    def _run(self, engine: Engine, source: RequestSource) -> None:
        end: BaseException | None = None
        try:
            for outcome in engine.capture(source):
                self._queue.put(outcome)
                del outcome
                if self._stopped.is_set():
                    break
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            end = error
        self._queue.put(end)

    def get(self, *, timeout: float) -> CaptureAnswer | CaptureFailure | EngineUnavailable | None:
        """The next outcome, None at the end; EngineUnavailable is returned, not raised. queue.Empty after `timeout`."""
        outcome = self._queue.get(timeout=timeout)
        if isinstance(outcome, BaseException) and not isinstance(outcome, EngineUnavailable):
            raise outcome
        return outcome

    def stop(self) -> None:
        """Let the engine end after the answer that it is computing."""
        self._stopped.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()
