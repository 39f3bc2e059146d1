"""One sample asked of a server: sent over HTTP, answered through the staging directory, checked for wholeness.

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt

from eyas.connections import Connections
from eyas.engine import staged
from eyas.engine.base import CaptureAnswer, CaptureRequest, EngineInfo, Reference
from eyas.engine.dialect import Dialect, Reply, ask_hello, brief, is_passing, needs_certificates
from eyas.engine.pickup import OwnPickup, PluginFiles, RowsError
from eyas.engine.reference import LayerCheck
from eyas.engine.staged import RequestName, Staged, StagedError
from eyas.errors import EngineError, EngineRefused, EngineUnavailable, EngineWrong
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
STAGED_PATIENCE_S = 120.0
"""How long a file may take to appear after the server has answered: with vLLM, beside the forward after the next."""
QUIET_PATIENCE_S = 5.0
KEEPALIVE_S = 2.0
"""Servers close what is idle, often after 5 s: not at the moment at which we use it again."""
READERS = 4

T = TypeVar("T")


class Asking:
    """What is asked of one server, any number of samples at a time; coroutines are for the loop that it is given.

    Raises EngineRefused and EngineUnavailable, with the sample's id where they are only about it, and EngineError.
    """

    def __init__(
        self,
        dialect: Dialect,
        loop: asyncio.AbstractEventLoop,
        url: str,
        hello: Mapping[str, Any],
        run: staged.Run,
        info: EngineInfo,
        serials: Iterator[int],
        layer_check: Callable[[], LayerCheck | None],
    ) -> None:
        self._dialect, self._loop = dialect, loop
        self._url, self._hello, self._staging_run, self._info = url, hello, run, info
        self._serials, self._layer_check = serials, layer_check
        self._counting = threading.Lock()
        self._held_bytes = self._held_files = 0
        """Of states that were answered and are not given back yet."""
        self._held: deque[int] = deque()
        """Changes of that, by readers and by finalizers, which run wherever the last view of a file is dropped."""
        self._files = dialect.pickup(run) if isinstance(dialect, OwnPickup) else PluginFiles(run, UNFINISHED_PATIENCE_S)
        self._awaited: set[int] = set()
        """Serials whose files somebody waits for; any other file of ours may go."""
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="eyas-read")
        self._connections = Connections(
            base_url=self._url,
            timeout=httpx.Timeout(None, connect=10.0),
            verify=needs_certificates(self._url),
            keepalive_s=KEEPALIVE_S,
        )
        self._reference_lock = asyncio.Lock()
        self._num_asked = 0
        """Requests that the server has and has not answered."""

    async def answer(self, serial: int, request: CaptureRequest) -> CaptureAnswer:
        """A sample's states, and its reference where that is wanted. `serial` is this try's and no other's."""
        name, found, _ = await self._states(serial, request)
        self._awaited.discard(name.serial)
        self._require_same_server(found)
        reference = await self._reference(request) if request.with_reference else None
        return CaptureAnswer(
            request.sample_id, request.attempt, found.token_ids, _blocks(found), reference, server=self._url
        )

    def held(self) -> tuple[int, int]:
        """Bytes and files of states that were answered and not given back yet."""
        with self._counting:
            while self._held:
                num_bytes = self._held.popleft()
                self._held_bytes += num_bytes
                self._held_files += 1 if num_bytes > 0 else -1
            return self._held_bytes, self._held_files

    def sweep(self) -> None:
        """Remove the files that nobody waits for: of requests that were given up, or that a killed server began."""
        self._files.sweep(self._awaited)

    async def num_waiting(self) -> int | None:
        """How many requests wait at the server to be computed; None where it does not tell."""
        return await self._dialect.num_waiting(self._connections)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._connections.aclose()

    def stop_reading(self) -> None:
        """End the threads that read files."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._files.close()

    def _require_same_server(self, found: Staged) -> None:
        """A server that was started anew between two requests may capture otherwise: it must be asked what it is."""
        spec = self._info.spec
        kind = {(dtype, shape[1]) for dtype, shape, _ in found.fields.values()}
        as_said = kind == {(spec.dtype, spec.hidden_size)} and set(found.fields) == set(spec.fields)
        if not as_said or found.last_hidden_norm != spec.last_hidden_norm:
            told = ", ".join(sorted(f"{dtype} of width {width}" for dtype, width in kind))
            raise EngineUnavailable(
                f"the server at {self._url} stages {', '.join(found.fields)} as {told}, {found.last_hidden_norm}-norm: "
                "not what it said of itself",
                engine=self._dialect.engine,
            )

    async def _states(
        self, serial: int, request: CaptureRequest, flags: str = "", *, logprobs: bool = False
    ) -> tuple[RequestName, Staged, Reply]:
        """One request's name, states and answer. Asks again while the server has no room.

        The name's serial stays among those awaited, for the files of other ranks; the caller takes it out.
        """
        deadline = time.monotonic() + FULL_PATIENCE_S
        pause = FULL_PAUSE_S
        while True:
            name = RequestName(self._staging_run.token, serial, len(request.token_ids), flags)
            self._awaited.add(serial)
            try:
                reply = await self._post(name, request, logprobs=logprobs)
                said = self._said(reply, request)
                if said.get("reason") != staged.FULL:
                    return name, await self._fetch(name, request, said), reply
            except BaseException:
                self._awaited.discard(serial)
                raise
            self._awaited.discard(serial)
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"sample {request.sample_id}: the server has had no room for {FULL_PATIENCE_S:.0f} s: "
                    f"{said.get('error')}",
                    engine=self._dialect.engine,
                    sample_id=request.sample_id,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_FULL_PAUSE_S)
            serial = next(self._serials)

    def _said(self, reply: Reply, request: CaptureRequest) -> Mapping[str, Any]:
        """What the plugin says of a request: that it is staged, or that there is no room. Raises for anything else."""
        said = reply.said
        if said is None:
            raise EngineError(
                f"the server at {self._url} answers without the capture plugin: was it started anew without it?",
                engine=self._dialect.engine,
            )
        error, reason = said.get("error"), said.get("reason")
        if reason == staged.FULL or (error is None and "path" in said):
            return said
        if reason == staged.NO_DIRECTORY:
            raise EngineError(str(error), engine=self._dialect.engine)
        make = EngineUnavailable if said.get("retry") else EngineRefused
        raise make(
            f"sample {request.sample_id}: {error or 'its rows are not all there'}",
            engine=self._dialect.engine,
            sample_id=request.sample_id,
        )

    async def _post(self, name: RequestName, request: CaptureRequest, *, logprobs: bool) -> Reply:
        """The answer to a prompt.

        Raises EngineRefused, and EngineUnavailable, with the sample's id where it is only about it.
        """
        path, body = self._dialect.request(name, request.token_ids.tolist(), logprobs=logprobs)
        self._num_asked += 1
        try:
            response = await self._connections.request(
                "POST",
                path,
                content=json.dumps(body, separators=(",", ":")).encode(),
                headers={"content-type": "application/json"},
            )
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"the server at {self._url} is gone ({type(error).__name__})", engine=self._dialect.engine
            ) from None
        finally:
            self._num_asked -= 1
        status, text = response.status_code, response.text
        if status == 200:
            reply = self._dialect.reply(text)
            if reply is None:
                if request.attempt > 1:
                    # Raises when such a server answers there no more.
                    await self._aside(partial(ask_hello, self._dialect, self._url))
                raise EngineUnavailable(
                    f"sample {request.sample_id}: the server's answer cannot be read: {brief(text)}",
                    engine=self._dialect.engine,
                    sample_id=request.sample_id,
                )
            if reply.aborted is None:
                return reply
            status, text = reply.aborted
        why = f"sample {request.sample_id}: the server answers {status}: {brief(text)}"
        if status in (400, 413, 422):
            raise EngineRefused(why, engine=self._dialect.engine, sample_id=request.sample_id)
        if is_passing(status):
            raise EngineUnavailable(why, engine=self._dialect.engine, sample_id=request.sample_id)
        raise EngineError(f"{self._url}: the server answers {status}: {brief(text)}", engine=self._dialect.engine)

    async def _fetch(
        self, name: RequestName, request: CaptureRequest, said: Mapping[str, Any], rank: int = 0
    ) -> Staged:
        """Take a request's file: wait for it, read it, check it, remove it."""
        deadline = time.monotonic() + STAGED_PATIENCE_S
        pause = 0.001
        path: Path | None = None
        try:
            path = self._files.path(name, said, rank)
            while missing := self._files.missing(path):
                if time.monotonic() > deadline:
                    raise StagedError(missing)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.01)
            try:
                return await self._loop.run_in_executor(self._readers, self._read, path, name, rank)
            finally:
                self._files.remove(path)
        except PermissionError:
            raise EngineError(
                f"{path}: written by uid {self._hello['uid']} and not readable here: run client and server as one "
                "user, or the server as root",
                engine=self._dialect.engine,
            ) from None
        except (StagedError, OSError) as error:
            make = EngineRefused if isinstance(error, RowsError) else EngineUnavailable
            raise make(
                f"sample {request.sample_id}: {error}", engine=self._dialect.engine, sample_id=request.sample_id
            ) from None

    def _read(self, path: Path, name: RequestName, rank: int) -> Staged:
        """In a reader's thread: map a file; its bytes count as held until its memory is given back."""
        num_bytes = path.stat().st_size
        found = self._files.read(path, name, rank, partial(self._held.append, -num_bytes))
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
                name, found, reply = await self._states(next(self._serials), request, flags, logprobs=True)
            except EngineRefused:
                if staged.NEIGHBOURS not in flags:
                    raise
                # With its neighbours the sample may be too large for the server; without them it was not.
                flags, check = flags.replace(staged.NEIGHBOURS, ""), None
                name, found, reply = await self._states(next(self._serials), request, flags, logprobs=True)
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
            if not self._said(reply, request).get("alone", True):
                alone = {}
                if is_quiet:
                    logger.info("sample %s is not compared alone against in a batch: the server computed it together "
                                "with another client's requests", request.sample_id)  # fmt: skip
            return Reference(self._logprobs(reply, request), hidden, last, alone)

    def _logprobs(self, reply: Reply, request: CaptureRequest) -> npt.NDArray[np.float32]:
        """`[T-1]`: the server's log-probability of token `t+1` at row `t`."""
        try:
            return np.array(self._dialect.logprobs(reply.body, request.token_ids.tolist()), dtype=np.float32)
        except ValueError as error:
            raise EngineUnavailable(
                f"sample {request.sample_id}: the server answers with log-probabilities {error}: the last hidden state "
                "cannot be checked",
                engine=self._dialect.engine,
                sample_id=request.sample_id,
            ) from None

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
        """Every tensor-parallel rank must hold the same states. Raises EngineWrong."""
        for rank in range(1, int(self._hello["tp_size"])):
            other = await self._fetch(name, request, {}, rank)
            for name_of_field, (dtype, (_, width), data) in first.fields.items():
                mine, theirs = (as_float32(d, dtype, width) for d in (data, other.fields[name_of_field][2]))
                error = median_row_error(mine, theirs)
                if not error <= RANK_TOLERANCE:
                    raise EngineWrong(
                        f"sample {request.sample_id}: {name_of_field} of tensor-parallel rank {rank} differs from rank "
                        f"0's by {error:.2g} relative: one rank's partial sums? Start the server without all-reduce "
                        "fusion",
                        engine=self._dialect.engine,
                    )


def _blocks(found: Staged) -> dict[str, StateBlock]:
    return {name: StateBlock(dtype, shape, data) for name, (dtype, shape, data) in found.fields.items()}
