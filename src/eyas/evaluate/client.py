"""One serving engine, SGLang or vLLM, as an evaluation asks it: what it is, what it counts, and streamed answers.

Prompts go out as token ids and answers are asked back as token ids, so that no tokeniser stands between. Each request
has a salt that keeps it out of the prefix cache: a prompt that is asked again is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.connections import Connections
from eyas.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable
from eyas.evaluate.counters import Acceptance, Counters, of_sglang, of_vllm, read_counters
from eyas.generate.key import Key

KEEPALIVE_S = 2.0
"""Servers close what is idle, often after 5 s: not at the moment at which we use it again."""
CONNECT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 30.0
"""For what a server knows without computing."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are written."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer."""

    token_ids: tuple[int, ...] | None
    """What was written, the stop token included; None where the server does not say."""
    text: str
    num_new_tokens: int
    arrivals: tuple[tuple[float, int], ...]
    """For each piece that arrived, seconds since the request was sent and new tokens so far."""
    seconds: float
    cut: bool
    """Ended by `max_new_tokens`."""
    acceptance: Acceptance | None
    """As the server tells it with the answer."""

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces that arrived one after the other: what a reader waits for."""
        times = [at for at, _ in self.arrivals]
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def token_s(self) -> float | None:
        """Seconds per token behind those of the first piece; None where there are none."""
        (first, had), (last, has) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (has - had) if has > had else None


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself."""

    url: str
    engine: str
    """`vllm` or `sglang`."""
    version: str
    model: str
    """The name by which it is asked."""
    model_path: str
    max_tokens: int | None
    """Of prompt and answer together."""
    speculation: str
    """The algorithm's name, empty without one."""
    num_draft_tokens: int | None
    """Drafted tokens of a chain, at most; of a tree, its depth."""
    topk: int | None
    """Branches at each step of the draft; 1 is a chain."""
    counts: bool
    """Whether it has counters to read."""


class Server:
    """A running server. For one event loop.

    Raises EngineUnavailable where it is gone, silent or overloaded, EngineRefused where it will never answer a request,
    EngineError where it is not what it must be.
    """

    def __init__(self, url: str, *, option: str, timeout_s: float, key: Key | None = None) -> None:
        """`url` with or without `/v1`; `option` is named where it is no address: ConfigError."""
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{option} {url} is not an address: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.port == 0:
            raise ConfigError(f"{option} {url} is not an address; give one like http://127.0.0.1:30000")
        self._key = key or Key()
        self._timeout_s = timeout_s
        self._engine = self._model = ""
        self._connections = Connections(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            verify=self.url.startswith("https:"),
            keepalive_s=KEEPALIVE_S,
            headers=self._key.headers(),
        )

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def look(self) -> About:
        """Ask the server what it is."""
        for path in ("/model_info", "/get_model_info"):
            info = await self._get_json(path)
            if isinstance(info, dict) and "model_path" in info:
                return await self._look_at_sglang(info)
        return await self._look_at_vllm()

    async def counters(self) -> Counters | None:
        """A reading of its counters; None where it has none."""
        status, text = await self._get("/metrics")
        return read_counters(text, self._engine) if status == 200 else None

    async def token_ids(self, text: str) -> list[int] | None:
        """A text in its tokeniser; None where it does not say."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        status, told = await self._whole("POST", "/tokenize", json=body)
        try:
            tokens = json.loads(told)["tokens"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            return None
        return tokens if isinstance(tokens, list) and all(isinstance(t, int) for t in tokens) else None

    async def answer(self, prompt: Sequence[int], sampling: Sampling, *, salt: str, name: str) -> Answer:
        """Stream the answer to a prompt of token ids; `name` is the prompt's, for errors."""
        ask = _ask_sglang if self._engine == "sglang" else _ask_vllm
        path, body = ask(self._model, prompt, sampling, salt)
        content = json.dumps(body, separators=(",", ":")).encode()
        stream = _Stream(self._engine, sampling.max_new_tokens)
        sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                async with contextlib.aclosing(self._events(path, content, name)) as events:
                    async for event in events:
                        stream.take(event, time.perf_counter() - sent)
        except TimeoutError:
            raise EngineUnavailable(
                f"{self.url}: prompt {name}: no whole answer within evaluate.timeout_s = {self._timeout_s:g} s"
            ) from None
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self.url}: gone while it answered ({type(error).__name__})") from None
        except _BadStreamError as error:
            raise EngineError(f"{self.url}: prompt {name}: {self._key.scrub(str(error))}") from None
        if stream.prompt_tokens not in (None, len(prompt)):
            raise EngineError(
                f"{self.url}: prompt {name}: {len(prompt)} tokens were sent, the server read {stream.prompt_tokens}"
            )
        if not stream.arrivals:
            raise EngineError(f"{self.url}: prompt {name}: the answer has no tokens")
        return stream.answer(time.perf_counter() - sent)

    async def _events(self, path: str, content: bytes, name: str) -> AsyncGenerator[Any, None]:
        """Server-sent events as they arrive, each one parsed."""
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        async with (
            self._connections.take() as client,
            client.stream("POST", path, content=content, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise self._refusal(response.status_code, (await response.aread()).decode(errors="replace"), name)
            ended = False
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    ended = True
                    continue
                try:
                    yield json.loads(data)
                except ValueError:
                    raise _BadStreamError(f"an event that is not JSON: {_brief(data)}") from None
            if not ended:
                raise httpx.RemoteProtocolError("the stream ended in the middle")

    def _refusal(self, status: int, text: str, name: str) -> EngineError:
        why = f"{self.url}: prompt {name}: the server answers {status}: {_brief(self._key.scrub(text))}"
        if status in (408, 429) or (status >= 500 and status != 501):
            return EngineUnavailable(why)
        if status in (401, 403):
            return EngineError(f"{why}; it wants a key: name it with generate.api_key_env or generate.api_key_file")
        return EngineRefused(why) if status in (400, 413, 422) else EngineError(why)

    async def _look_at_sglang(self, info: Mapping[str, Any]) -> About:
        told = await self._get_json("/server_info") or await self._get_json("/get_server_info") or {}
        self._engine = "sglang"
        self._model = str(info.get("served_model_name") or info["model_path"])
        speculation = str(told.get("speculative_algorithm") or "")
        steps, drafted = told.get("speculative_num_steps"), told.get("speculative_num_draft_tokens")
        if not isinstance(steps, int) and isinstance(drafted, int):
            steps = drafted - 1  # the root, the token that is known, is counted there
        limits = [told.get("context_length"), told.get("max_total_num_tokens"), told.get("max_req_input_len")]
        return About(
            url=self.url,
            engine="sglang",
            version=str(told.get("version") or ""),
            model=self._model,
            model_path=str(info["model_path"]),
            max_tokens=min((n for n in limits if isinstance(n, int) and n > 0), default=None),
            speculation=speculation,
            num_draft_tokens=steps if speculation and isinstance(steps, int) else None,
            topk=told.get("speculative_eagle_topk") if speculation else None,
            counts=await self.counters() is not None,
        )

    async def _look_at_vllm(self) -> About:
        status, text = await self._get("/v1/models")
        if status in (401, 403):
            raise self._refusal(status, text, "-")
        try:
            models = [m for m in json.loads(text)["data"] if not m.get("parent")] if status == 200 else []
        except (ValueError, KeyError, TypeError, AttributeError):
            models = []
        self._engine = "vllm"
        counters = await self.counters()
        if not models or not (counters or models[0].get("owned_by") == "vllm"):
            raise EngineError(f"{self.url}: answers as neither SGLang nor vLLM does; give the address of one of them")
        if counters is None:
            raise EngineError(f"{self.url}: has no counters at /metrics; start vLLM without --disable-log-stats")
        version = await self._get_json("/version") or {}
        self._model = str(models[0]["id"])
        most = models[0].get("max_model_len")
        return About(
            url=self.url,
            engine="vllm",
            version=str(version.get("version") or ""),
            model=self._model,
            model_path=str(models[0].get("root") or ""),
            max_tokens=most if isinstance(most, int) else None,
            speculation="speculative decoding" if counters.verifications is not None else "",
            num_draft_tokens=len(counters.accepted) or None,
            topk=None,
            counts=True,
        )

    async def _get_json(self, path: str) -> Any:
        status, text = await self._get(path)
        if status in (401, 403):
            raise self._refusal(status, text, "-")
        try:
            return json.loads(text) if status == 200 else None
        except ValueError:
            return None

    async def _get(self, path: str) -> tuple[int, str]:
        return await self._whole("GET", path)

    async def _whole(self, method: str, path: str, **options: Any) -> tuple[int, str]:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                response = await self._connections.request(method, path, **options)
                if response.is_redirect:
                    # Prometheus' application may stand behind a slash.
                    response = await self._connections.request(method, path + "/", **options)
        except TimeoutError:
            raise EngineUnavailable(f"{self.url}: no answer to {path} within {LOOK_TIMEOUT_S:.0f} s") from None
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"{self.url}: no server answers there ({type(error).__name__}); start it, or give its address"
            ) from None
        return response.status_code, response.text


class _BadStreamError(Exception):
    """An answer that cannot be understood."""


class _Stream:
    """An answer as it arrives, from either engine."""

    def __init__(self, engine: str, max_new_tokens: int) -> None:
        self._engine, self._max_new_tokens = engine, max_new_tokens
        self._ids: list[int] = []
        self._has_ids = True
        self._text = ""
        self._num_new = 0
        self._reason = ""
        self._acceptance: Acceptance | None = None
        self.prompt_tokens: int | None = None
        self.arrivals: list[tuple[float, int]] = []

    def take(self, event: Any, at: float) -> None:
        """One event that arrived `at` seconds after the request was sent."""
        if not isinstance(event, dict):
            raise _BadStreamError(f"an event that is no object: {_brief(json.dumps(event))}")
        if event.get("error"):
            raise _BadStreamError(f"the server breaks off: {_brief(json.dumps(event['error']))}")
        before = self._num_new
        try:
            (self._take_sglang if self._engine == "sglang" else self._take_vllm)(event)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise _BadStreamError(f"an event that is not understood: {_brief(json.dumps(event))}") from None
        if self._num_new > before:
            self.arrivals.append((at, self._num_new))

    def answer(self, seconds: float) -> Answer:
        return Answer(
            token_ids=tuple(self._ids) if self._has_ids and len(self._ids) == self._num_new else None,
            text=self._text,
            num_new_tokens=self._num_new,
            arrivals=tuple(self.arrivals),
            seconds=seconds,
            cut=self._reason == "length",
            acceptance=self._acceptance,
        )

    def _take_vllm(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            ids = choice.get("token_ids")
            self._text += choice.get("text") or ""
            self._reason = choice.get("finish_reason") or self._reason
            if ids is None:
                # An older server: a token each, until the last event says how many they were.
                self._has_ids = False
                self._num_new += 1 if choice.get("text") else 0
            else:
                self._ids += map(int, ids)
                self._num_new += len(ids)
        if usage := event.get("usage"):
            self.prompt_tokens = int(usage["prompt_tokens"])
            self._correct(int(usage["completion_tokens"]))
        if told := (event.get("metrics") or {}).get("speculative_decoding"):
            self._acceptance = of_vllm(told)

    def _correct(self, num_new: int) -> None:
        if num_new != self._num_new and self.arrivals:
            self.arrivals[-1] = (self.arrivals[-1][0], num_new)
        self._num_new = num_new

    def _take_sglang(self, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        ids = [int(i) for i in event.get("output_ids") or []]
        self._num_new = int(meta["completion_tokens"])
        text = event.get("text") or ""
        # Whole so far, or what is new: servers are set up either way.
        whole = len(ids) == self._num_new
        self._ids = ids if whole else [*self._ids, *ids]
        self._text = text if whole else self._text + text
        self.prompt_tokens = int(meta["prompt_tokens"])
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise _BadStreamError(f"the server breaks off: {_brief(str(reason.get('message') or 'abort'))}")
        self._reason = reason.get("type") or self._reason
        self._acceptance = of_sglang(meta, self._num_new) or self._acceptance


def _ask_vllm(model: str, prompt: Sequence[int], sampling: Sampling, salt: str) -> tuple[str, dict[str, Any]]:
    """What the model's own generation config may set is said, so that both servers do the same."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": salt,
    }
    if sampling.temperature > 0:
        body["seed"] = sampling.seed
    return "/v1/completions", body


def _ask_sglang(model: str, prompt: Sequence[int], sampling: Sampling, salt: str) -> tuple[str, dict[str, Any]]:
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
    }
    if sampling.temperature > 0:
        parameters["sampling_seed"] = sampling.seed
    return "/generate", {"input_ids": list(prompt), "sampling_params": parameters, "stream": True, "extra_key": salt}


def _brief(text: str, limit: int = 300) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
