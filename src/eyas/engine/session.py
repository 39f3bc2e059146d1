"""Requests in flight to one server: sent while they fit, answered through the staging directory.

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.engine import staged
from eyas.engine.asking import Asking
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, EngineInfo, RequestSource
from eyas.engine.dialect import Dialect
from eyas.engine.reference import LayerCheck
from eyas.errors import EngineError, EngineRefused, EngineUnavailable

STALLED_S = 30.0
"""When nothing was heard for so long, work is taken although enough is in flight: what hangs is asked for once more."""
MAX_FLIGHTS = 512
"""Requests in flight, each with a connection of its own: a process has often but 1024 open files."""
CLOSE_PATIENCE_S = 5.0

Outcome = CaptureAnswer | CaptureFailure


@dataclass(slots=True)
class _Flight:
    """A request that was handed to us and is not answered yet."""

    request: CaptureRequest
    num_bytes: int
    task: Any = None


@dataclass(slots=True)
class _Turn:
    """One call of `answers`: what it took and still owes. A later call ends it, whichever thread it runs in."""

    outcomes: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = field(default_factory=queue.SimpleQueue)
    """By serial."""
    flights: dict[int, _Flight] = field(default_factory=dict)
    waiting: deque[CaptureRequest] = field(default_factory=deque)
    sent_bytes: int = 0
    """Of the requests in flight."""
    sent_tokens: int = 0
    share_used_up: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    over: bool = False


class Session:
    """Requests in flight to one server: an event loop in a thread of its own, until the server is lost.

    What a turn owes is kept by the thread that runs `answers`; the loop's thread only looks at it.
    """

    def __init__(
        self,
        dialect: Dialect,
        url: str,
        hello: Mapping[str, Any],
        run: staged.Run,
        info: EngineInfo,
        serials: Iterator[int],
        layer_check: Callable[[], LayerCheck | None],
        max_files: int,
    ) -> None:
        """`layer_check` gives the check of a sample's auxiliary states, or None where enough samples were checked.

        So many samples as `max_files` may be in flight or answered and not written yet.
        """
        self._dialect = dialect
        self._staging_run, self._serials, self._max_files = run, serials, max_files
        self._bytes_per_token = info.spec.bytes_per_token + 4
        self._turn = _Turn()
        self._turns = threading.Lock()
        self._forgotten: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=dialect.engine, daemon=True)
        self._thread.start()
        self._asking = Asking(dialect, self._loop, url, hello, run, info, serials, layer_check)
        self.lost = False
        self._closed = False
        chunk = int(hello.get("max_prefill_tokens") or 8192)
        self._least_tokens = 2 * chunk
        self._budget_tokens = 4 * chunk
        """Tokens in flight: enough that the server always has a next batch waiting."""
        # A little less than all: files that were read and are not yet gone count at the server.
        self._quota_bytes = int(hello["room"]["limit"]) * 9 // 10
        self._share_bytes = 0
        self._looked_at = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of states that were answered and not given back yet: they lie in shared memory still."""
        return self._asking.held()[0]

    def answers(self, source: RequestSource) -> Iterator[Outcome]:
        """Take, send, answer, until the source has no more. Ends the turn of an earlier call that did not end."""
        with self._turns:
            self._end(self._turn)
            turn = self._turn = _Turn(over=self._closed)
        try:
            while not turn.over:
                if not self._thread.is_alive():
                    raise EngineError("the thread that talks to the server has ended", engine=self._dialect.engine)
                self._look_around(turn)
                self._forget(turn)
                if not self._take(turn, source):
                    return
                self._send_waiting(turn)
                settled = self._settled(turn)
                while settled:
                    outcome = settled.popleft()
                    if isinstance(outcome, BaseException):
                        self._lose()
                        raise outcome
                    yield outcome
                    # The caller counts these bytes as gone once it has written them.
                    del outcome
        finally:
            self._end(turn)

    def forget(self, sample_id: str, *, below: int) -> None:
        """Nobody waits for a sample's tries before the `below`-th. Any thread may call it."""
        self._forgotten.put((sample_id, below))

    def close(self) -> None:
        """Let go of the connections; what was asked and not answered is aborted by the server when they close."""
        with self._turns:
            self._end(self._turn)
            first, self._closed = not self._closed, True
        if first:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=CLOSE_PATIENCE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=CLOSE_PATIENCE_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._asking.stop_reading()

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._asking.close()

    def _lose(self) -> None:
        """The server is gone, or useless: nothing that it was asked will be answered."""
        self.lost = True
        self.close()
        self._asking.sweep()

    def _end(self, turn: _Turn) -> None:
        """Give up what a turn took and did not answer."""
        turn.over = True
        turn.waiting.clear()
        for flight in list(turn.flights.values()):
            if flight.task is not None:
                flight.task.cancel()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop's thread; None once that is closed."""
        with self._turns:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        return None

    def _take(self, turn: _Turn, source: RequestSource) -> bool:
        """Take work while there is room for it; False when all is done.

        Not before a quarter of the tokens in flight is free: what is sent one by one, as answers come back, is computed
        one by one.
        """
        room = self._budget_tokens - turn.sent_tokens
        stalled = time.monotonic() - turn.heard_at > STALLED_S
        enough = room >= self._budget_tokens // 4 and len(turn.flights) <= MAX_FLIGHTS * 3 // 4
        if stalled or (not turn.waiting and enough):
            idle = not turn.flights and not turn.waiting
            for request in source.take(max(room, 1), wait=idle):
                if request.attempt > 1:
                    # Asked for once more: nobody waits for the earlier try, sent or not.
                    turn.waiting = deque(r for r in turn.waiting if r.sample_id != request.sample_id)
                    turn.waiting.appendleft(request)
                else:
                    turn.waiting.append(request)
            if idle:
                turn.heard_at = time.monotonic()
            elif stalled:
                turn.heard_at = time.monotonic() - STALLED_S + STALLED_S / 30  # a while for each further one
        return bool(turn.waiting or turn.flights)

    def _send_waiting(self, turn: _Turn) -> None:
        while turn.waiting and not turn.over and self._fits(turn, turn.waiting[0]):
            self._send(turn, turn.waiting.popleft())

    def _settled(self, turn: _Turn) -> deque[Outcome | BaseException]:
        """The outcomes that are there; their places are free again. Waits a little where there is none."""
        found: deque[Outcome | BaseException] = deque()
        failures: list[BaseException] = []
        try:
            serial, outcome = turn.outcomes.get(timeout=0.01)
            while True:
                turn.heard_at = time.monotonic()
                if not self._settle(turn, serial):
                    pass  # given up
                elif isinstance(outcome, BaseException):
                    failures.append(outcome)
                else:
                    found.append(outcome)
                del outcome
                serial, outcome = turn.outcomes.get_nowait()
        except queue.Empty:
            pass
        # What was answered before the server was lost is answered.
        found.extend(failures[:1])
        return found

    def _fits(self, turn: _Turn, request: CaptureRequest) -> bool:
        """Whether what a request stages fits this client's share; when nothing is in flight, the largest does."""
        if not turn.flights or request.attempt > 1:
            return True  # what is asked for once more had its room all along; others may wait for it to be written
        held_bytes, held_files = self._asking.held()
        if len(turn.flights) >= min(MAX_FLIGHTS, self._max_files - held_files):
            return False
        used = turn.sent_bytes + held_bytes
        # Once the share is used up, nothing goes out before a quarter of it is free: a server that is sent requests
        # one by one, as bytes trickle back, computes batches of one.
        if turn.share_used_up and used > self._share_bytes * 3 // 4:
            return False
        turn.share_used_up = used + self._need(request) > self._share_bytes
        return not turn.share_used_up

    def _need(self, request: CaptureRequest) -> int:
        return len(request.token_ids) * self._bytes_per_token

    def _send(self, turn: _Turn, request: CaptureRequest) -> None:
        self._give_up(turn, request.sample_id, below=request.attempt)
        serial = next(self._serials)
        flight = turn.flights[serial] = _Flight(request, self._need(request))
        turn.sent_bytes += flight.num_bytes
        turn.sent_tokens += len(request.token_ids)
        flight.task = self._call(self._carry(turn, serial, request))
        if turn.over and flight.task is not None:
            flight.task.cancel()

    def _forget(self, turn: _Turn) -> None:
        while not self._forgotten.empty():
            sample_id, below = self._forgotten.get()
            turn.waiting = deque(r for r in turn.waiting if r.sample_id != sample_id or r.attempt >= below)
            self._give_up(turn, sample_id, below=below)

    def _give_up(self, turn: _Turn, sample_id: str, *, below: int) -> None:
        """Nobody waits for a sample's earlier tries. Their connections close, so the server aborts them."""
        of_sample = [(s, f) for s, f in turn.flights.items() if f.request.sample_id == sample_id]
        for serial, flight in of_sample:
            if flight.request.attempt < below:
                self._settle(turn, serial)
                if flight.task is not None:
                    flight.task.cancel()

    def _settle(self, turn: _Turn, serial: int) -> bool:
        """Free a request's place; False where that was done before."""
        flight = turn.flights.pop(serial, None)
        if flight is None:
            return False
        turn.sent_bytes -= flight.num_bytes
        turn.sent_tokens -= len(flight.request.token_ids)
        return True

    async def _carry(self, turn: _Turn, serial: int, request: CaptureRequest) -> None:
        """One request from sending to answer: exactly one outcome, unless it is given up."""
        try:
            outcome: Outcome | BaseException = await self._asking.answer(serial, request)
        except asyncio.CancelledError:
            raise
        except (EngineRefused, EngineUnavailable) as error:
            # Its frames hold states, and a cycle would keep them until it is collected.
            error.__traceback__ = error.__context__ = None
            outcome = CaptureFailure(request.sample_id, request.attempt, error) if error.sample_id else error
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for answers
            outcome = error
        turn.outcomes.put((serial, outcome))

    def _look_around(self, turn: _Turn) -> None:
        """Once a second: who else shares the staging directory, and has the server enough to do?"""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        self._asking.sweep()
        staged.remove_dead_runs(self._staging_run.staging)
        self._share_bytes = self._quota_bytes // self._staging_run.num_sharing()
        if turn.flights:
            self._call(self._adapt(turn))

    async def _adapt(self, turn: _Turn) -> None:
        """More tokens in flight when nothing waits at the server, fewer when several batches do."""
        waiting = await self._asking.num_waiting()
        if waiting is None:
            return
        if waiting == 0 and turn.sent_tokens > self._budget_tokens // 2:
            self._budget_tokens += self._budget_tokens // 4
        elif waiting > max(1, len(turn.flights)) * 3 // 4:
            self._budget_tokens = max(self._least_tokens, self._budget_tokens * 9 // 10)
