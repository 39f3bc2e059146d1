"""The `sglang` engine: captures from a running SGLang server that has our plugin.

Token ids go out over HTTP, many requests at a time; states come back through the staging directory, which client and
server share. The client owns the quota: what a request will stage is known before it is sent, and is sent only while
it fits this client's share. Layer numbers are ours throughout; the plugin translates.

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from eyas.config import EngineConfig, TargetConfig
from eyas.engine import staged
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, EngineInfo, Reference, RequestSource
from eyas.engine.sglang.reference import LayerCheck, layer_check
from eyas.engine.staged import RequestName, Staged, StagedError
from eyas.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable
from eyas.log import human_bytes, human_time
from eyas.records import LAST, CaptureSpec, Provenance, StateBlock
from eyas.target.files import open_target, quantisation, target_digest
from eyas.values import as_float32, median_row_error

logger = logging.getLogger(__name__)

ENGINE = "sglang"
INFO_KEY = "eyas"
REFERENCE_SAMPLES = 8
"""So many samples of a run have their auxiliary states computed again in this process; it is slow."""
RANK_TOLERANCE = 1e-3
"""Median relative row error between tensor-parallel ranks: they hold the same states, reduced alike."""
FULL_PAUSE_S = 0.05
STAGED_PATIENCE_S = 30.0
"""How long a file may take to appear after the server has answered."""
QUIET_PATIENCE_S = 5.0
READERS = 4


class SglangEngine:
    """The `sglang` engine; see `engine.base` for what it promises.

    `info` asks the server. Raises ConfigError where server and configuration do not fit together, EngineError where the
    server cannot be captured from, EngineUnavailable where there is none.
    """

    def __init__(
        self,
        target: TargetConfig,
        engine: EngineConfig,
        aux_layers: tuple[int, ...] | None = None,
    ) -> None:
        self._url = engine.url.rstrip("/")
        self._target, self._config, self._aux_layers = target, engine, aux_layers
        self._references_left = REFERENCE_SAMPLES
        self._layer_check: LayerCheck | None = None
        self._hello: dict[str, Any] = {}
        self._info: EngineInfo | None = None
        self._run: staged.Run | None = None
        self._serials = itertools.count(1)
        self._session: _Session | None = None

    def info(self) -> EngineInfo:
        """What the server serves and how it captures: it is asked, and checked against the target's files."""
        if self._info is None:
            self._hello = self._ask_hello()
            self._info = self._info_from(self._hello)
        return self._info

    def capture(self, source: RequestSource) -> Iterator[CaptureAnswer | CaptureFailure]:
        """Answers as they come. Waits for a server that is gone to come back, `engine.reconnect_s` long."""
        info = self.info()
        run = self._open_run()
        session = self._session
        if session is not None and session.lost:
            session.close()
            session = None
            self._await_server(info)
        if session is None:
            session = self._session = _Session(self, run, info)
        yield from session.answers(source)

    def close(self) -> None:
        """End what is in flight and remove this run's staging directory."""
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._run is not None:
            self._run.close()
            self._run = None

    def layer_check(self) -> LayerCheck:
        """How the auxiliary states of the first samples are checked; made when it is first needed."""
        if self._layer_check is None:
            self._layer_check = layer_check(self._target, self._config, self.info().spec)
        return self._layer_check

    def _await_server(self, info: EngineInfo) -> None:
        """Wait for the server to come back as it was."""
        deadline = time.monotonic() + self._config.reconnect_s
        pause = 0.5
        logger.warning("the server at %s is gone; waiting up to %s for it to come back", self._url,
                       human_time(self._config.reconnect_s))  # fmt: skip
        while True:
            try:
                hello = self._ask_hello()
                break
            except EngineUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 10.0)
        found = self._info_from(hello)
        differences = found.spec.differences(info.spec)
        if differences:
            raise ConfigError(f"the server at {self._url} came back different: {'; '.join(differences)}")
        self._hello = hello
        logger.warning("the server at %s is back", self._url)

    def _open_run(self) -> staged.Run:
        if self._run is None:
            staging = Path(self._hello["staging"])
            if not staging.is_dir():
                raise EngineError(
                    f"the server at {self._url} (host {self._hello['host']}) stages in {staging}, which does not exist "
                    "here: client and server must share that directory; run both on one host, or mount it into the "
                    "container",
                    engine=ENGINE,
                )
            removed, num_bytes = staged.remove_dead_runs(staging)
            if removed:
                logger.warning("removed what %d dead runs had left in %s: %s", removed, staging, human_bytes(num_bytes))
            try:
                self._run = staged.Run(staging)
            except OSError as error:
                raise EngineError(
                    f"{staging}: {error.strerror}: this user cannot write into the server's staging directory (the "
                    f"server runs as uid {self._hello['uid']})",
                    engine=ENGINE,
                ) from None
        return self._run

    def _ask_hello(self) -> dict[str, Any]:
        return ask_hello(self._url, next(self._serials))

    def _info_from(self, hello: Mapping[str, Any]) -> EngineInfo:
        if self._target.path is None:
            raise ConfigError(
                "target.path is not set: the directory of the model that the server serves (for its digest and its "
                "output matrix)"
            )
        files = open_target(self._target.path)
        config = files.config.get("text_config") or files.config
        for name, key in (
            ("num_layers", "num_hidden_layers"),
            ("hidden_size", "hidden_size"),
            ("vocab_size", "vocab_size"),
        ):
            if key in config and int(config[key]) != int(hello[name]):
                raise ConfigError(
                    f"target.path {self._target.path} has {key} {config[key]}, the server at {self._url} serves "
                    f"{hello[name]} ({hello['model_path']}): not the same model"
                )
        layers = tuple(int(k) for k in hello["aux_layers"])
        if self._aux_layers is not None and self._aux_layers != layers:
            raise ConfigError(
                f"capture.aux_layers is {list(self._aux_layers)}, the server at {self._url} was started for "
                f"{list(layers)}; start it anew, or change one of them"
            )
        own = quantisation(files.config)
        spec = CaptureSpec(
            target_digest=target_digest(self._target.path),
            quantisation=own if hello["quantization"] == "none" else str(hello["quantization"]),
            num_layers=int(hello["num_layers"]),
            hidden_size=int(hello["hidden_size"]),
            vocab_size=int(hello["vocab_size"]),
            aux_layers=layers,
            last_hidden_norm=hello["last_hidden_norm"],
            dtype=hello["dtype"],
        )
        told = ("torch", "architecture", "device", "dtype", "tp_size", "attention", "chunked_prefill_size")
        provenance = Provenance(
            engine=ENGINE,
            version=str(hello["sglang"]),
            settings={name: str(hello[name]) for name in told} | {"target_config": files.config_digest},
            host=str(hello["host"]),
        )
        return EngineInfo(spec=spec, provenance=provenance, max_tokens=int(hello["max_tokens"]))


@dataclass(slots=True)
class _Flight:
    """A request that was handed to us and is not answered yet."""

    request: CaptureRequest
    num_bytes: int
    task: Any = None


Outcome = CaptureAnswer | CaptureFailure


class _Session:
    """Requests in flight to one server: an event loop in a thread of its own, until the server is lost."""

    def __init__(self, engine: SglangEngine, run: staged.Run, info: EngineInfo) -> None:
        self._engine, self._staging_run, self._info = engine, run, info
        self._url, self._hello = engine._url, engine._hello
        self._bytes_per_token = info.spec.bytes_per_token + 4
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome | BaseException | None]] = queue.SimpleQueue()
        """By serial; None of one that was given up. What it held is given back by who takes it from here."""
        self._settled: deque[tuple[int, Outcome | BaseException | None]] = deque()
        self._flights: dict[int, _Flight] = {}
        self._staged_bytes = 0
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
        """Whether what a request stages fits this client's share; the largest is let through alone."""
        if not self._flights:
            return True
        return self._staged_bytes + self._need(request) <= self._share_bytes

    def _need(self, request: CaptureRequest) -> int:
        return len(request.token_ids) * self._bytes_per_token

    def _send(self, request: CaptureRequest) -> None:
        serial = next(self._engine._serials)
        for old in [f for f in self._flights.values() if f.request.sample_id == request.sample_id]:
            # Asked for once more: nobody waits for the earlier try. Its connection closes, so the server aborts it.
            old.task.cancel()
        flight = self._flights[serial] = _Flight(request, self._need(request))
        self._staged_bytes += flight.num_bytes
        self._tokens_in_flight += len(request.token_ids)
        flight.task = self._call(self._carry(serial, request))

    def _settle(self, serial: int) -> None:
        flight = self._flights.pop(serial, None)
        if flight is not None:
            self._staged_bytes -= flight.num_bytes
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
        found, _ = await self._states(serial, request)
        reference = await self._reference(request) if request.with_reference else None
        return CaptureAnswer(request.sample_id, request.attempt, found.token_ids, _blocks(found), reference)

    async def _states(
        self, serial: int, request: CaptureRequest, flags: str = "", *, logprobs: bool = False
    ) -> tuple[Staged, dict[str, Any]]:
        """The states of one request, and its answer's `meta_info`. Asks again while the server has no room."""
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
                return await self._fetch(name, request), meta
            why = f"sample {request.sample_id}: {error or 'its rows are not all there'}"
            if said[0].get("reason") == "no_directory":
                raise EngineError(str(error), engine=ENGINE)
            if said[0].get("reason") == "full":
                await asyncio.sleep(FULL_PAUSE_S)
                serial = next(self._engine._serials)
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
                    f"sample {request.sample_id}: the server's answer cannot be read: {_brief(text)}",
                    engine=ENGINE,
                    sample_id=request.sample_id,
                ) from None
            reason = meta.get("finish_reason")
            if isinstance(reason, dict) and reason.get("type") == "abort":
                status, text = int(reason.get("status_code") or 500), str(reason.get("message"))
            else:
                return meta
        why = f"sample {request.sample_id}: the server answers {status}: {_brief(text)}"
        if status in (401, 403, 404):
            raise EngineError(f"{self._url}: the server answers {status}: {_brief(text)}", engine=ENGINE)
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
            found = await self._loop.run_in_executor(self._readers, staged.read, path, name, rank)
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
            check = None
            if self._engine._references_left > 0:
                self._engine._references_left -= 1
                check = await self._loop.run_in_executor(self._readers, self._engine.layer_check)
            flags = staged.RANKS if int(self._hello["tp_size"]) > 1 else ""
            if check is not None and check.needs_neighbours and self._hello["neighbours"]:
                flags += staged.NEIGHBOURS
            serial = next(self._engine._serials)
            found, meta = await self._states(serial, request, flags, logprobs=True)
            if staged.RANKS in flags:
                await self._compare_ranks(RequestName(self._staging_run.token, serial, len(request.token_ids), flags),
                                          request, found)  # fmt: skip
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


def ask_hello(url: str, serial: int) -> dict[str, Any]:
    """What the server at `url` says of itself; `serial` is one that was not used before.

    Raises EngineUnavailable where none answers, EngineError where it cannot be captured from.
    """
    name = RequestName("0" * 16, serial, 1, staged.HELLO)
    try:
        with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as client:
            response = client.post("/generate", json=generate_body(name, [1]))
            limits = client.get("/server_info")
            if limits.status_code == 404:
                limits = client.get("/get_server_info")
    except httpx.HTTPError as error:
        raise EngineUnavailable(
            f"no SGLang server answers at {url} ({type(error).__name__}); start one with 'eyas serve', or "
            "set engine.url",
            engine=ENGINE,
        ) from None
    if response.status_code >= 500:
        raise EngineUnavailable(
            f"the server at {url} answers {response.status_code}: {_brief(response.text)}", engine=ENGINE
        )
    if response.status_code != 200:
        raise EngineError(
            f"the server at {url} answers {response.status_code} to POST /generate: "
            f"{_brief(response.text)}; is it SGLang?",
            engine=ENGINE,
        )
    try:
        said = response.json()["meta_info"].get(INFO_KEY)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EngineError(f"the server at {url} does not answer as SGLang does", engine=ENGINE) from None
    hello = next((s["hello"] for s in said or () if isinstance(s, dict) and "hello" in s), None)
    if hello is None:
        failure = next((s["error"] for s in said or () if isinstance(s, dict) and "error" in s), None)
        why = f"its capture plugin fails: {failure}" if failure else "it runs without the capture plugin"
        raise EngineError(
            f"the server at {url} cannot be captured from: {why}; start it with 'eyas serve', or as "
            "'eyas serve --print' shows",
            engine=ENGINE,
        )
    if hello["staged_version"] != staged.VERSION:
        raise EngineError(
            f"the server at {url} has a plugin of another eyas (staged files {hello['staged_version']}, here "
            f"{staged.VERSION}); start it anew",
            engine=ENGINE,
        )
    try:
        hello["max_tokens"] = int(limits.json()["max_req_input_len"])
    except (ValueError, KeyError, TypeError):
        hello["max_tokens"] = np.iinfo(np.int32).max
    return dict(hello)


def generate_body(name: RequestName, token_ids: list[int], *, logprobs: bool = False) -> dict[str, Any]:
    """The body of POST /generate: a prompt of token ids, and as little generation as there is."""
    body: dict[str, Any] = {
        "rid": str(name),
        "input_ids": token_ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    }
    if logprobs:
        body |= {"return_logprob": True, "logprob_start_len": 0}
    return body


def _logprobs(meta: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """`[T-1]`: the server's log-probability of token `t+1` at row `t`; empty where it told none."""
    told = [entry[0] for entry in meta.get("input_token_logprobs") or ()]
    return np.array([value for value in told[1:] if value is not None], dtype=np.float32)


def _blocks(found: Staged) -> dict[str, StateBlock]:
    return {name: StateBlock(dtype, shape, data) for name, (dtype, shape, data) in found.fields.items()}


def _brief(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
