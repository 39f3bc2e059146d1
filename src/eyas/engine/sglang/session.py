"""Requests in flight to one SGLang server: sent while they fit, answered through the staging directory.

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt

from eyas.connections import Connections
from eyas.engine import staged
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, EngineInfo, Reference, RequestSource
from eyas.engine.sglang.reference import LayerCheck
from eyas.engine.sglang.server import ENGINE, ask_hello, brief, generate_body, is_passing, needs_certificates
from eyas.engine.staged import INFO_KEY, RequestName, Staged, StagedError
from eyas.errors import EngineError, EngineRefused, EngineUnavailable
from eyas.records import LAST, StateBlock
from eyas.values import as_float32, median_row_error

logger = logging.getLogger(__name__)

RANK_TOLERANCE = 1e-3
"""Median relative row error between tensor-parallel ranks: they hold the same states, reduced alike."""
FULL_PAUSE_S, MAX_FULL_PAUSE_S = 0.05, 1.0
"""Pause before a request that the server had no room for is sent again; doubles."""
FULL_PATIENCE_S = 60.0
"""How long it is sent again before its sample counts as failed, with the server's words."""
UNFINISHED_PATIENCE_S = 30.0
"""A file that nobody waits for and that nobody wrote to for so long was left by a killed server."""
STAGED_PATIENCE_S = 30.0
"""How long a file may take to appear after the server has answered."""
QUIET_PATIENCE_S = 5.0
STALLED_S = 30.0
"""When nothing was heard for so long, work is taken although enough is in flight: what hangs is asked for once more."""
MAX_FLIGHTS = 512
"""Requests in flight, each with a connection of its own: a process has often but 1024 open files."""
KEEPALIVE_S = 2.0
"""Servers close what is idle, often after 5 s: not at the moment at which we use it again."""
READERS = 4
CLOSE_PATIENCE_S = 5.0

Outcome = CaptureAnswer | CaptureFailure
T = TypeVar("T")


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
        self._url, self._hello, self._staging_run, self._info = url, hello, run, info
        self._serials, self._layer_check = serials, layer_check
        self._bytes_per_token = info.spec.bytes_per_token + 4
        self._turn = _Turn()
        self._turns = threading.Lock()
        self._max_files = max_files
        self._held_bytes = self._held_files = 0
        """Of states that were answered and are not given back yet."""
        self._held: deque[int] = deque()
        """Changes of that, by readers and by finalizers, which run wherever the last view of a file is dropped."""
        self._awaited: set[int] = set()
        """Serials whose files somebody waits for; any other file of ours may go."""
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="eyas-read")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        self._connections = Connections(
            base_url=self._url,
            timeout=httpx.Timeout(None, connect=10.0),
            verify=needs_certificates(self._url),
            keepalive_s=KEEPALIVE_S,
        )
        self._reference_lock = asyncio.Lock()
        self._num_asked = 0
        """Requests that the server has and has not answered."""
        self.lost = False
        self._closed = False
        chunk = int(self._hello.get("max_prefill_tokens") or 8192)
        self._least_tokens = 2 * chunk
        self._budget_tokens = 4 * chunk
        """Tokens in flight: enough that the server always has a next batch waiting."""
        self._share_bytes = 0
        self._looked_at = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of states that were answered and not given back yet: they lie in shared memory still."""
        return self._count_held()[0]

    def _count_held(self) -> tuple[int, int]:
        """Bytes and files of states that were answered and not given back yet."""
        with self._turns:
            while self._held:
                num_bytes = self._held.popleft()
                self._held_bytes += num_bytes
                self._held_files += 1 if num_bytes > 0 else -1
            return self._held_bytes, self._held_files

    def answers(self, source: RequestSource) -> Iterator[Outcome]:
        """Take, send, answer, until the source has no more. Ends the turn of an earlier call that did not end."""
        with self._turns:
            self._end(self._turn)
            turn = self._turn = _Turn(over=self._closed)
        try:
            while not turn.over:
                if not self._thread.is_alive():
                    raise EngineError("the thread that talks to the server has ended", engine=ENGINE)
                self._look_around(turn)
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
            self._readers.shutdown(wait=False, cancel_futures=True)

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._connections.aclose()

    def _lose(self) -> None:
        """The server is gone, or useless: nothing that it was asked will be answered."""
        self.lost = True
        self.close()
        self._sweep()

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
        held_bytes, held_files = self._count_held()
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
        of_sample = [(s, f) for s, f in turn.flights.items() if f.request.sample_id == request.sample_id]
        for old_serial, old in of_sample:
            if old.request.attempt < request.attempt:
                # Nobody waits for the earlier try. Its connection closes, so the server aborts it.
                self._settle(turn, old_serial)
                old.task.cancel()
        serial = next(self._serials)
        flight = turn.flights[serial] = _Flight(request, self._need(request))
        turn.sent_bytes += flight.num_bytes
        turn.sent_tokens += len(request.token_ids)
        flight.task = self._call(self._carry(turn, serial, request))
        if turn.over and flight.task is not None:
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
            outcome: Outcome | BaseException = await self._answer(serial, request)
        except asyncio.CancelledError:
            raise
        except (EngineRefused, EngineUnavailable) as error:
            # Its frames hold states, and a cycle would keep them until it is collected.
            error.__traceback__ = error.__context__ = None
            outcome = CaptureFailure(request.sample_id, request.attempt, error) if error.sample_id else error
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for answers
            outcome = error
        turn.outcomes.put((serial, outcome))

    async def _answer(self, serial: int, request: CaptureRequest) -> CaptureAnswer:
        name, found, _ = await self._states(serial, request)
        self._awaited.discard(name.serial)
        self._require_same_server(found)
        reference = await self._reference(request) if request.with_reference else None
        return CaptureAnswer(request.sample_id, request.attempt, found.token_ids, _blocks(found), reference)

    def _require_same_server(self, found: Staged) -> None:
        """A server that was started anew between two requests may capture otherwise: it must be asked what it is."""
        spec = self._info.spec
        kind = {(dtype, shape[1]) for dtype, shape, _ in found.fields.values()}
        as_said = kind == {(spec.dtype, spec.hidden_size)} and set(found.fields) == set(spec.fields)
        if not as_said or found.last_hidden_norm != spec.last_hidden_norm:
            raise EngineUnavailable(
                f"the server at {self._url} stages {', '.join(found.fields)}, not what it said of itself", engine=ENGINE
            )

    async def _states(
        self, serial: int, request: CaptureRequest, flags: str = "", *, logprobs: bool = False
    ) -> tuple[RequestName, Staged, dict[str, Any]]:
        """One request's name, states and answer's `meta_info`. Asks again while the server has no room.

        The name's serial stays among those awaited, for the files of other ranks; the caller takes it out.
        """
        deadline = time.monotonic() + FULL_PATIENCE_S
        pause = FULL_PAUSE_S
        while True:
            name = RequestName(self._staging_run.token, serial, len(request.token_ids), flags)
            self._awaited.add(serial)
            try:
                meta = await self._generate(name, request, logprobs=logprobs)
                said = self._said(meta, request)
                if said.get("reason") != staged.FULL:
                    return name, await self._fetch(name, request), meta
            except BaseException:
                self._awaited.discard(serial)
                raise
            self._awaited.discard(serial)
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"sample {request.sample_id}: the server has had no room for {FULL_PATIENCE_S:.0f} s: "
                    f"{said.get('error')}",
                    engine=ENGINE,
                    sample_id=request.sample_id,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_FULL_PAUSE_S)
            serial = next(self._serials)

    def _said(self, meta: Mapping[str, Any], request: CaptureRequest) -> dict[str, Any]:
        """What the plugin says of a request: that it is staged, or that there is no room. Raises for anything else."""
        told = meta.get(INFO_KEY)
        said = next((s for s in told if isinstance(s, dict)), None) if isinstance(told, list) else None
        if said is None:
            raise EngineError(
                f"the server at {self._url} answers without the capture plugin: was it started anew without it?",
                engine=ENGINE,
            )
        error, reason = said.get("error"), said.get("reason")
        if reason == staged.FULL or (error is None and "path" in said):
            return said
        if reason == staged.NO_DIRECTORY:
            raise EngineError(str(error), engine=ENGINE)
        make = EngineUnavailable if said.get("retry") else EngineRefused
        raise make(
            f"sample {request.sample_id}: {error or 'its rows are not all there'}",
            engine=ENGINE,
            sample_id=request.sample_id,
        )

    async def _generate(self, name: RequestName, request: CaptureRequest, *, logprobs: bool) -> dict[str, Any]:
        """POST /generate. Raises EngineRefused, EngineUnavailable (with the sample's id where it is only about it)."""
        body = generate_body(name, request.token_ids.tolist(), logprobs=logprobs)
        self._num_asked += 1
        try:
            response = await self._connections.request(
                "POST",
                "/generate",
                content=json.dumps(body, separators=(",", ":")).encode(),
                headers={"content-type": "application/json"},
            )
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"the server at {self._url} is gone ({type(error).__name__})", engine=ENGINE
            ) from None
        finally:
            self._num_asked -= 1
        status, text = response.status_code, response.text
        if status == 200:
            meta, abort = _meta_of(text)
            if meta is None:
                if request.attempt > 1:
                    await self._aside(partial(ask_hello, self._url))  # raises when SGLang answers there no more
                raise EngineUnavailable(
                    f"sample {request.sample_id}: the server's answer cannot be read: {brief(text)}",
                    engine=ENGINE,
                    sample_id=request.sample_id,
                )
            if abort is None:
                return meta
            status, text = abort
        why = f"sample {request.sample_id}: the server answers {status}: {brief(text)}"
        if status in (400, 413, 422):
            raise EngineRefused(why, engine=ENGINE, sample_id=request.sample_id)
        if is_passing(status):
            raise EngineUnavailable(why, engine=ENGINE, sample_id=request.sample_id)
        raise EngineError(f"{self._url}: the server answers {status}: {brief(text)}", engine=ENGINE)

    async def _fetch(self, name: RequestName, request: CaptureRequest, rank: int = 0) -> Staged:
        """Take a staged file: wait for it, read it, check it, remove it."""
        path = name.path(self._staging_run.staging, rank)
        deadline = time.monotonic() + STAGED_PATIENCE_S
        pause = 0.001
        while not path.exists():
            if staged.failed(path).exists():
                why = staged.failed(path).read_text() or "the server's log says why"
                staged.failed(path).unlink(missing_ok=True)
                raise EngineUnavailable(
                    f"sample {request.sample_id}: staging failed: {why}", engine=ENGINE, sample_id=request.sample_id
                )
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"sample {request.sample_id}: the server says it staged {path}, which is not here",
                    engine=ENGINE,
                    sample_id=request.sample_id,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        try:
            found = await self._loop.run_in_executor(self._readers, self._read, path, name, rank)
        except PermissionError:
            raise EngineError(
                f"{path}: written by uid {self._hello['uid']} and not readable here: run client and server as one "
                "user, or the server as root",
                engine=ENGINE,
            ) from None
        except (StagedError, OSError) as error:
            raise EngineUnavailable(
                f"sample {request.sample_id}: {error}", engine=ENGINE, sample_id=request.sample_id
            ) from None
        finally:
            path.unlink(missing_ok=True)
        return found

    def _read(self, path: Path, name: RequestName, rank: int) -> Staged:
        """In a reader's thread: map a file; its bytes count as held until its memory is given back."""
        num_bytes = path.stat().st_size
        found = staged.read(path, name, rank, partial(self._held.append, -num_bytes))
        self._held.append(num_bytes)
        return found

    async def _reference(self, request: CaptureRequest) -> Reference:
        """The server's own word about a sample: asked for alone, as far as that can be, with its log-probabilities."""
        async with self._reference_lock:
            deadline = time.monotonic() + QUIET_PATIENCE_S
            while self._num_asked and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            is_quiet = self._num_asked == 0
            check = await self._aside(self._layer_check)
            flags = staged.RANKS if int(self._hello["tp_size"]) > 1 else ""
            if check is not None and check.needs_neighbours and self._hello["neighbours"]:
                flags += staged.NEIGHBOURS
            try:
                name, found, meta = await self._states(next(self._serials), request, flags, logprobs=True)
            except EngineRefused:
                if staged.NEIGHBOURS not in flags:
                    raise
                # With its neighbours the sample may be too large for the server; without them it was not.
                flags, check = flags.replace(staged.NEIGHBOURS, ""), None
                name, found, meta = await self._states(next(self._serials), request, flags, logprobs=True)
            try:
                if staged.RANKS in flags:
                    await self._compare_ranks(name, request, found)
            finally:
                self._awaited.discard(name.serial)
            hidden: dict[int, npt.NDArray[np.float32]] = {}
            last = None
            if check is not None:
                states = {
                    int(name.removeprefix("hidden.")): as_float32(data, dtype, shape[1])
                    for name, (dtype, shape, data) in found.fields.items()
                    if name != LAST
                }
                hidden, last = await self._aside(partial(check.hidden, request.token_ids, states))
            alone = {name: block for name, block in _blocks(found).items() if name in self._info.spec.fields}
            if not self._said(meta, request).get("alone", True):
                alone = {}
                if is_quiet:
                    logger.info("sample %s is not compared alone against in a batch: the server computed it together "
                                "with another client's requests", request.sample_id)  # fmt: skip
            return Reference(_logprobs(meta, request), hidden, last, alone)

    async def _aside(self, function: Callable[[], T]) -> T:
        """The result of what may take minutes, computed in a daemon thread, which keeps nobody from ending."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not future.done():
                set_outcome(outcome)

        def run() -> None:
            try:
                settled = partial(settle, future.set_result, function())
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                settled = partial(settle, future.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(settled)

        threading.Thread(target=run, name="eyas-check", daemon=True).start()
        return await future

    async def _compare_ranks(self, name: RequestName, request: CaptureRequest, first: Staged) -> None:
        """Every tensor-parallel rank must hold the same states. Raises EngineError."""
        for rank in range(1, int(self._hello["tp_size"])):
            other = await self._fetch(name, request, rank)
            for name_of_field, (dtype, (_, width), data) in first.fields.items():
                mine, theirs = (as_float32(d, dtype, width) for d in (data, other.fields[name_of_field][2]))
                error = median_row_error(mine, theirs)
                if not error <= RANK_TOLERANCE:
                    raise EngineError(
                        f"sample {request.sample_id}: {name_of_field} of tensor-parallel rank {rank} differs from rank "
                        f"0's by {error:.2g} relative: one rank's partial sums? Start the server without all-reduce "
                        "fusion",
                        engine=ENGINE,
                    )

    def _look_around(self, turn: _Turn) -> None:
        """Once a second: who else shares the staging directory, and has the server enough to do?"""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        self._sweep()
        staged.remove_dead_runs(self._staging_run.staging)
        # A little less than all: files that were read and are not yet gone count at the server.
        self._share_bytes = int(self._hello["room"]["limit"]) * 9 // 10 // self._staging_run.num_sharing()
        if turn.flights:
            self._call(self._adapt(turn))

    def _sweep(self) -> None:
        """Remove the files that nobody waits for: of requests that were given up, or that a killed server began."""
        try:
            paths = list(self._staging_run.path.iterdir())
        except OSError:
            return  # it is gone; the server will say so
        for path in paths:
            serial = path.name.partition(".")[0]
            if not serial.isdecimal() or int(serial) in self._awaited:
                continue
            # What is still being written (.tmp) gets its name first.
            if path.suffix != ".tmp" or staged.age_s(path) > UNFINISHED_PATIENCE_S:
                path.unlink(missing_ok=True)

    async def _adapt(self, turn: _Turn) -> None:
        """More tokens in flight when nothing waits at the server, fewer when several batches do."""
        try:
            response = await self._connections.request("GET", "/v1/loads", params={"include": "core"}, timeout=5.0)
            loads = response.json()["loads"] if response.status_code == 200 else []
            waiting = sum(int(load["num_waiting_reqs"]) for load in loads)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return
        if not loads:
            return
        if waiting == 0 and turn.sent_tokens > self._budget_tokens // 2:
            self._budget_tokens += self._budget_tokens // 4
        elif waiting > max(1, len(turn.flights)) * 3 // 4:
            self._budget_tokens = max(self._least_tokens, self._budget_tokens * 9 // 10)


def _meta_of(text: str) -> tuple[dict[str, Any] | None, tuple[int, str] | None]:
    """An answer's `meta_info`, and status and text where it says that the request was aborted; None for neither."""
    try:
        meta = json.loads(text)["meta_info"]
        reason = meta.get("finish_reason")
        if not isinstance(reason, dict) or reason.get("type") != "abort":
            return meta, None
        return meta, (int(reason.get("status_code") or 500), str(reason.get("message")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, None


def _logprobs(meta: Mapping[str, Any], request: CaptureRequest) -> npt.NDArray[np.float32]:
    """`[T-1]`: the server's log-probability of token `t+1` at row `t`."""
    try:
        told = [(entry[0], int(entry[1])) for entry in meta["input_token_logprobs"]]
        if [token for _, token in told] == request.token_ids.tolist():
            return np.array([float(value) for value, _ in told[1:]], dtype=np.float32)
        why = f"of {len(told)} tokens, and not of the {len(request.token_ids)} sent"
    except (KeyError, TypeError, ValueError, IndexError):
        why = "that cannot be read, or none"
    raise EngineUnavailable(
        f"sample {request.sample_id}: the server answers with log-probabilities {why}: the last hidden state cannot "
        "be checked",
        engine=ENGINE,
        sample_id=request.sample_id,
    )


def _blocks(found: Staged) -> dict[str, StateBlock]:
    return {name: StateBlock(dtype, shape, data) for name, (dtype, shape, data) in found.fields.items()}
