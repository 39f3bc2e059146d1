"""One serving engine, SGLang or vLLM, as an evaluation asks it: what it is, what it counts, and streamed answers.

Prompts go out as token ids and answers are asked back as token ids, so that no tokeniser stands between. Each request
has a salt that keeps it out of the prefix cache: a prompt that is asked again is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.connections import Connections
from eyas.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable
from eyas.evaluate.answers import Answer, BadStreamError, Sampling, Stream, ask_sglang, ask_vllm, brief
from eyas.evaluate.counters import Counters, difference, read_counters
from eyas.generate.key import Key

KEEPALIVE_S = 2.0
"""Servers close what is idle, often after 5 s: not at the moment at which we use it again."""
CONNECT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 30.0
"""For what a server knows without computing."""
SETTLE_S = 5.0
"""How long a server may take to count an answer that it has sent."""
SETTLE_PAUSE_S = 0.02


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
    draft_path: str = ""
    """Where the drafter lies, empty where it does not say: vLLM never does."""
    quantisation: str = ""
    """Of the target's weights, empty where it does not say."""


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

    async def settled(self, before: Counters, answers: Sequence[Answer]) -> Counters:
        """What its counters moved by, once they have counted these answers, or have had time to."""
        tokens = sum(answer.num_new_tokens for answer in answers)
        deadline = time.monotonic() + SETTLE_S
        while True:
            after = await self.counters()
            moved = difference(before, after) if after is not None else None
            if moved is None:
                raise EngineUnavailable(f"{self.url}: was started anew in the middle: its counters began again")
            counted = moved.requests >= len(answers) and moved.generated_tokens >= tokens
            if counted or time.monotonic() > deadline:
                return moved
            await asyncio.sleep(SETTLE_PAUSE_S)

    async def token_ids(self, text: str) -> list[int] | None:
        """A text in its tokeniser; None where it does not say."""
        return (await self._tokenize({"prompt": text, "add_special_tokens": False}))[0]

    async def conversation_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Messages in its chat template, with what asks for an answer behind them; EngineError where it cannot."""
        ids, why = await self._tokenize({"messages": list(messages)})
        if ids is None:
            raise EngineError(f"{self.url}: makes no token ids of a conversation: {why}")
        return ids

    async def _tokenize(self, what: Mapping[str, Any]) -> tuple[list[int] | None, str]:
        """Token ids, or why there are none."""
        status, told = await self._whole("POST", "/tokenize", json={"model": self._model, **what})
        why = f"it answers {status} to /tokenize: {brief(self._key.scrub(told))}"
        try:
            tokens = json.loads(told)["tokens"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            tokens = None
        is_right = isinstance(tokens, list) and all(isinstance(t, int) for t in tokens)
        return (tokens if is_right else None), why

    async def answer(self, prompt: Sequence[int], sampling: Sampling, *, salt: str, name: str) -> Answer:
        """Stream the answer to a prompt of token ids; `name` is the prompt's, for errors."""
        ask = ask_sglang if self._engine == "sglang" else ask_vllm
        path, body = ask(self._model, prompt, sampling, salt)
        content = json.dumps(body, separators=(",", ":")).encode()
        stream = Stream(self._engine, sampling.max_new_tokens)
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
        except BadStreamError as error:
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
                    raise BadStreamError(f"an event that is not JSON: {brief(data)}") from None
            if not ended:
                raise httpx.RemoteProtocolError("the stream ended in the middle")

    def _refusal(self, status: int, text: str, name: str) -> EngineError:
        why = f"{self.url}: prompt {name}: the server answers {status}: {brief(self._key.scrub(text))}"
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
            draft_path=str(told.get("speculative_draft_model_path") or "") if speculation else "",
            quantisation=str(told.get("quantization") or ""),
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
