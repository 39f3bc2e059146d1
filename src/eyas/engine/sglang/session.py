"""Requests in flight to one SGLang server: sent while they fit, answered through the staging directory.

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from eyas.engine import staged
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, EngineInfo, Reference, RequestSource
from eyas.engine.sglang.reference import LayerCheck
from eyas.engine.sglang.server import ENGINE, INFO_KEY, brief, generate_body
from eyas.engine.staged import RequestName, Staged, StagedError
from eyas.errors import EngineError, EngineRefused, EngineUnavailable
from eyas.records import LAST, StateBlock
from eyas.values import as_float32, median_row_error

RANK_TOLERANCE = 1e-3
"""Median relative row error between tensor-parallel ranks: they hold the same states, reduced alike."""
FULL_PAUSE_S = 0.05
STAGED_PATIENCE_S = 30.0
"""How long a file may take to appear after the server has answered."""
QUIET_PATIENCE_S = 5.0
READERS = 4


@dataclass(slots=True)
class _Flight:
    """A request that was handed to us and is not answered yet."""

    request: CaptureRequest
    num_bytes: int
    task: Any = None


Outcome = CaptureAnswer | CaptureFailure


class Session:
    """Requests in flight to one server: an event loop in a thread of its own, until the server is lost."""

    def __init__(
        self,
        url: str,
        hello: Mapping[str, Any],
        run: staged.Run,
        info: EngineInfo,
        serials: Iterator[int],
        layer_check: Callable[[], LayerCheck | None],
    ) -> None:
        """`layer_check` gives the check of a sample's auxiliary states, or None where enough samples were checked."""
        self._url, self._hello, self._staging_run, self._info = url, hello, run, info
        self._serials, self._layer_check = serials, layer_check
        self._bytes_per_token = info.spec.bytes_per_token + 4
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome | BaseException | None]] = queue.SimpleQueue()
        """By serial; None of one that was given up. What it held is given back by who takes it from here."""
        self._settled: deque[tuple[int, Outcome | BaseException | None]] = deque()
        self._flights: dict[int, _Flight] = {}
        self._sent_bytes = 0
        """Of the requests in flight."""
        self._held_bytes = 0
        """Of states that were answered and are not given back yet."""
        self._released: deque[int] = deque()
        """What finalizers leave for us: they run wherever the last view of a file's memory is dropped."""
        self._tokens_in_flight = 0
        self._waiting: deque[CaptureRequest] = deque()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="eyas-read")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        self._client = httpx.AsyncClient(
            base_url=self._url,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=512),
            trust_env=False,
        )
        self._reference_lock = asyncio.Lock()
        self.lost = False
        chunk = int(self._hello.get("max_prefill_tokens") or 8192)
        self._least_tokens = 2 * chunk
        self._budget_tokens = 4 * chunk
        """Tokens in flight: enough that the server always has a next batch waiting."""
        self._share_bytes = 0
        self._looked_at = 0.0
        self._abandoned: list[Path] = []
        """Files that may yet appear, of requests that nobody waits for."""

    def answers(self, source: RequestSource) -> Iterator[Outcome]:
        """Take, send, answer, until the source has no more."""
        while True:
            self._look_around()
            if not self._waiting:
                room = self._budget_tokens - self._tokens_in_flight
                if room > 0 or not self._flights:
                    self._waiting.extend(source.take(max(room, 1), wait=not self._flights))
                    if not self._waiting and not self._flights:
                        return
            while self._waiting and self._fits(self._waiting[0]):
                self._send(self._waiting.popleft())
            try:
                self._settled.append(self._outcomes.get(timeout=0.01))
                while True:
                    self._settled.append(self._outcomes.get_nowait())
            except queue.Empty:
                pass
            while self._settled:
                serial, outcome = self._settled.popleft()
                self._settle(serial)
                if isinstance(outcome, BaseException):
                    self._lose()
                    raise outcome
                if outcome is not None:
                    yield outcome
                # The caller counts these bytes as gone once it has written them.
                del outcome

    def close(self) -> None:
        """Let go of the connections; what was asked and not answered is aborted by the server when they close."""
        if self._loop.is_running():
            self._call(self._shut()).result(timeout=10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
        self._readers.shutdown(wait=False)

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _lose(self) -> None:
        """The server is gone, or useless: nothing that it was asked will be answered."""
        self.lost = True
        self._flights.clear()
        self._settled.clear()
        self._waiting.clear()
        self.close()
        for path in self._staging_run.path.iterdir():
            if path.name != staged.OWNER:
                path.unlink(missing_ok=True)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _fits(self, request: CaptureRequest) -> bool:
        """Whether what a request stages fits this client's share; when nothing is in flight, the largest does."""
        while self._released:
            self._held_bytes -= self._released.popleft()
        if not self._flights or request.attempt > 1:
            return True  # what is asked for once more had its room all along; others may wait for it to be written
        return self._sent_bytes + self._held_bytes + self._need(request) <= self._share_bytes

    def _need(self, request: CaptureRequest) -> int:
        return len(request.token_ids) * self._bytes_per_token

    def _send(self, request: CaptureRequest) -> None:
        serial = next(self._serials)
        for old in [f for f in self._flights.values() if f.request.sample_id == request.sample_id]:
            # Asked for once more: nobody waits for the earlier try. Its connection closes, so the server aborts it.
            old.task.cancel()
        flight = self._flights[serial] = _Flight(request, self._need(request))
        self._sent_bytes += flight.num_bytes
        self._tokens_in_flight += len(request.token_ids)
        flight.task = self._call(self._carry(serial, request))

    def _settle(self, serial: int) -> None:
        flight = self._flights.pop(serial, None)
        if flight is not None:
            self._sent_bytes -= flight.num_bytes
            self._tokens_in_flight -= len(flight.request.token_ids)

    async def _carry(self, serial: int, request: CaptureRequest) -> None:
        """One request from sending to answer; whatever happens, exactly one outcome."""
        outcome: Outcome
        try:
            outcome = await self._answer(serial, request)
        except (EngineRefused, EngineUnavailable) as error:
            if error.sample_id:
                outcome = CaptureFailure(request.sample_id, request.attempt, error)
            else:
                self._outcomes.put((serial, error))
                return
        except asyncio.CancelledError:
            self._outcomes.put((serial, None))
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for answers
            self._outcomes.put((serial, error))
            return
        self._outcomes.put((serial, outcome))

    async def _answer(self, serial: int, request: CaptureRequest) -> CaptureAnswer:
        _, found, _ = await self._states(serial, request)
        reference = await self._reference(request) if request.with_reference else None
        return CaptureAnswer(request.sample_id, request.attempt, found.token_ids, _blocks(found), reference)

    async def _states(
        self, serial: int, request: CaptureRequest, flags: str = "", *, logprobs: bool = False
    ) -> tuple[RequestName, Staged, dict[str, Any]]:
        """One request's name, states and answer's `meta_info`. Asks again while the server has no room."""
        while True:
            name = RequestName(self._staging_run.token, serial, len(request.token_ids), flags)
            try:
                meta = await self._generate(name, request, logprobs=logprobs)
            except (asyncio.CancelledError, EngineUnavailable):
                self._abandoned.append(name.path(self._staging_run.staging))
                raise
            said = [s for s in meta.get(INFO_KEY) or () if isinstance(s, dict)]
            if not said:
                raise EngineError(
                    f"the server at {self._url} answers without the capture plugin: was it started anew without it?",
                    engine=ENGINE,
                )
            error = said[0].get("error")
            if error is None and "path" in said[0]:
                return name, await self._fetch(name, request), meta
            why = f"sample {request.sample_id}: {error or 'its rows are not all there'}"
            if said[0].get("reason") == "no_directory":
                raise EngineError(str(error), engine=ENGINE)
            if said[0].get("reason") == "full":
                await asyncio.sleep(FULL_PAUSE_S)
                serial = next(self._serials)
                continue
            make = EngineUnavailable if said[0].get("retry") else EngineRefused
            raise make(why, engine=ENGINE, sample_id=request.sample_id)

    async def _generate(self, name: RequestName, request: CaptureRequest, *, logprobs: bool) -> dict[str, Any]:
        """POST /generate. Raises EngineRefused, EngineUnavailable (with the sample's id where it is only about it)."""
        body = generate_body(name, request.token_ids.tolist(), logprobs=logprobs)
        try:
            response = await self._client.post(
                "/generate",
                content=json.dumps(body, separators=(",", ":")).encode(),
                headers={"content-type": "application/json"},
            )
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"the server at {self._url} is gone ({type(error).__name__})", engine=ENGINE
            ) from None
        status, text = response.status_code, response.text
        if status == 200:
            try:
                meta: dict[str, Any] = json.loads(text)["meta_info"]
            except (ValueError, KeyError, TypeError):
                raise EngineUnavailable(
                    f"sample {request.sample_id}: the server's answer cannot be read: {brief(text)}",
                    engine=ENGINE,
                    sample_id=request.sample_id,
                ) from None
            reason = meta.get("finish_reason")
            if isinstance(reason, dict) and reason.get("type") == "abort":
                status, text = int(reason.get("status_code") or 500), str(reason.get("message"))
            else:
                return meta
        why = f"sample {request.sample_id}: the server answers {status}: {brief(text)}"
        if status in (401, 403, 404):
            raise EngineError(f"{self._url}: the server answers {status}: {brief(text)}", engine=ENGINE)
        if status in (408, 429) or status >= 500:
            raise EngineUnavailable(why, engine=ENGINE, sample_id=request.sample_id)
        raise EngineRefused(why, engine=ENGINE, sample_id=request.sample_id)

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
            num_bytes = path.stat().st_size
            release = partial(self._released.append, num_bytes)
            found = await self._loop.run_in_executor(self._readers, staged.read, path, name, rank, release)
            self._released.append(-num_bytes)
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

    async def _reference(self, request: CaptureRequest) -> Reference:
        """The server's own word about a sample: asked for alone, as far as that can be, with its log-probabilities."""
        async with self._reference_lock:
            deadline = time.monotonic() + QUIET_PATIENCE_S
            quiet = sum(flight.request.with_reference for flight in self._flights.values())
            while len(self._flights) > quiet and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
                quiet = sum(flight.request.with_reference for flight in self._flights.values())
            check = await self._loop.run_in_executor(self._readers, self._layer_check)
            flags = staged.RANKS if int(self._hello["tp_size"]) > 1 else ""
            if check is not None and check.needs_neighbours and self._hello["neighbours"]:
                flags += staged.NEIGHBOURS
            name, found, meta = await self._states(next(self._serials), request, flags, logprobs=True)
            if staged.RANKS in flags:
                await self._compare_ranks(name, request, found)
            hidden: dict[int, npt.NDArray[np.float32]] = {}
            if check is not None:
                states = {
                    int(name.removeprefix("hidden.")): as_float32(data, dtype, shape[1])
                    for name, (dtype, shape, data) in found.fields.items()
                    if name != LAST
                }
                hidden = await self._loop.run_in_executor(self._readers, check.hidden, request.token_ids, states)
            wanted = {name: block for name, block in _blocks(found).items() if name in self._info.spec.fields}
            return Reference(_logprobs(meta), hidden, wanted)

    async def _compare_ranks(self, name: RequestName, request: CaptureRequest, first: Staged) -> None:
        """Every tensor-parallel rank must hold the same states. Raises EngineError."""
        for rank in range(1, int(self._hello["tp_size"])):
            other = await self._fetch(name, request, rank)
            for field, (dtype, (_, width), data) in first.fields.items():
                mine, theirs = as_float32(data, dtype, width), as_float32(other.fields[field][2], dtype, width)
                error = median_row_error(mine, theirs)
                if not error <= RANK_TOLERANCE:
                    raise EngineError(
                        f"sample {request.sample_id}: {field} of tensor-parallel rank {rank} differs from rank 0's by "
                        f"{error:.2g} relative: one rank's partial sums? Start the server without all-reduce fusion",
                        engine=ENGINE,
                    )

    def _look_around(self) -> None:
        """Once a second: who else shares the staging directory, and has the server enough to do?"""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        limit = int(self._hello["room"]["limit"])
        for path in [path for path in self._abandoned if path.exists()]:
            path.unlink(missing_ok=True)
            self._abandoned.remove(path)
        # A little less than all: files that were read and are not yet gone count at the server.
        self._share_bytes = limit * 9 // 10 // self._staging_run.num_sharing()
        if self._flights:
            self._call(self._adapt())

    async def _adapt(self) -> None:
        """More tokens in flight when nothing waits at the server, fewer when several batches do."""
        try:
            response = await self._client.get("/v1/loads", params={"include": "core"}, timeout=5.0)
            loads = response.json()["loads"] if response.status_code == 200 else []
            waiting = sum(int(load["num_waiting_reqs"]) for load in loads)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return
        if not loads:
            return
        num_flights = max(1, len(self._flights))
        if waiting == 0 and self._tokens_in_flight > self._budget_tokens // 2:
            self._budget_tokens += self._budget_tokens // 4
        elif waiting > num_flights * 3 // 4:
            self._budget_tokens = max(self._least_tokens, self._budget_tokens * 9 // 10)


def _logprobs(meta: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """`[T-1]`: the server's log-probability of token `t+1` at row `t`; empty where it told none."""
    told = [entry[0] for entry in meta.get("input_token_logprobs") or ()]
    return np.array([value for value in told[1:] if value is not None], dtype=np.float32)


def _blocks(found: Staged) -> dict[str, StateBlock]:
    return {name: StateBlock(dtype, shape, data) for name, (dtype, shape, data) in found.fields.items()}
