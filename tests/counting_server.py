"""A stand-in for an engine with a drafter: streams as SGLang or vLLM does, counts as they do, and errs by order.

The answer to a prompt is `answer_of(prompt)`. With `accepted`, its tokens come in verifications that keep so many
drafted tokens each, over and over; every verification gives one more, the bonus token. The first token comes with the
prompt's own pass, as with the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

STOP = 2
LENGTHS = (7, 12, 9, 16)


def answer_of(prompt: Sequence[int]) -> list[int]:
    """Seven to sixteen tokens by the prompt's sum, the last of them the stop token."""
    seed = sum(prompt)
    return [10 + (seed + 7 * i) % 80 for i in range(LENGTHS[seed % 4] - 1)] + [STOP]


def verifications_of(num_new: int, accepted: Sequence[int]) -> list[int]:
    """What each verification of an answer of `num_new` tokens accepts, tokens behind the answer's end included."""
    found = []
    left = num_new - 1
    for kept in itertools.cycle(accepted):
        if left <= 0:
            return found
        found.append(kept)
        left -= kept + 1
    raise AssertionError


@dataclass
class Asked:
    """One request for an answer."""

    prompt: list[int]
    body: dict[str, Any]
    headers: dict[str, str]
    nth: int
    """The how-manieth of all, from 1."""


@dataclass
class Act:
    """What is done instead of the right answer, or beside it."""

    status: int = 200
    text: str = ""
    foreign: tuple[int, int] = (0, 0)
    """Requests and tokens of somebody else that are counted meanwhile."""
    restart: bool = False
    """The counters begin again behind the answer."""
    hang: bool = False
    wait_for: int = 0
    """The answer begins when so many requests are, or have been, in flight."""
    cut_events: int | None = None
    """So many events are sent, then the connection closes."""
    event: Any = None
    """Sent in place of the first event."""
    answer: list[int] | None = None
    kept: list[int] | None = None
    """Drafted tokens that each verification of the answer keeps, instead of the server's `accepted`."""


@dataclass
class CountingServer:
    """Serves from a thread of this process while it is a context."""

    engine: str = "vllm"
    accepted: tuple[int, ...] = ()
    """Of the verifications, in turns; empty without a drafter."""
    num_draft_tokens: int = 3
    by_request: bool = True
    """Whether vLLM tells acceptance with each answer, and SGLang more than its verifications."""
    counts: bool = True
    token_ids: bool = True
    """Whether answers come in token ids."""
    late: int = 0
    """So many readings still show the counters as they were before the latest answer."""
    incremental: bool = False
    """SGLang: events bring what is new, not all so far."""
    algorithm: str = "EAGLE3"
    topk: int = 1
    model_path: str = "/nowhere/served"
    draft_path: str = "/nowhere/draft"
    """SGLang tells it."""
    quantisation: str | None = None
    """Likewise."""
    max_tokens: int = 400
    tokenize: Callable[[str], list[int] | None] = lambda text: None
    render: Callable[[list[dict[str, Any]]], list[int] | None] = lambda messages: None
    """Token ids of messages, with what asks for an answer."""
    script: Callable[[Asked], Act | None] = lambda asked: None
    metrics_lines: tuple[str, ...] = ()
    """Further lines of the page of counters."""
    asked: list[Asked] = field(default_factory=list)
    most_in_flight: int = 0

    def __enter__(self) -> CountingServer:
        self._sums: Counter[str] = Counter()
        self._shown: Counter[str] = Counter()
        self._positions = [0] * self.num_draft_tokens
        self._stale = 0
        self._started = 1000.0
        self._in_flight = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda loop, context: None)
        listener = self._loop.run_until_complete(asyncio.start_server(self._client, "127.0.0.1", 0, backlog=256))
        self.port = listener.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        listener.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        payload = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1]
        if path == ("/generate" if self.engine == "sglang" else "/v1/completions"):
            body = json.loads(payload)
            prompt = body["input_ids"] if self.engine == "sglang" else body["prompt"]
            asked = Asked(prompt, body, headers, len(self.asked) + 1)
            self.asked.append(asked)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            try:
                return await self._stream(asked, self.script(asked) or Act(), writer)
            finally:
                self._in_flight -= 1
        found = self._page(path, json.loads(payload) if payload else {})
        writer.write(_whole(200 if found is not None else 404, found if found is not None else "Not Found"))
        return True

    # -- what it says of itself ----------------------------------------------------------------------------------------

    def _page(self, path: str, body: dict[str, Any]) -> str | None:
        if self.engine not in ("vllm", "sglang"):
            return None
        if path == "/metrics":
            return self._metrics() if self.counts else None
        if path == "/tokenize":
            ids = self.render(body["messages"]) if "messages" in body else self.tokenize(body["prompt"])
            return json.dumps({"tokens": ids, "count": len(ids)}) if ids is not None else None
        if self.engine == "vllm":
            model = {"id": "served", "owned_by": "vllm", "root": self.model_path, "max_model_len": self.max_tokens}
            pages: dict[str, Any] = {"/v1/models": {"data": [model]}, "/version": {"version": "0.32.0"}}
        else:
            on = bool(self.accepted)
            told = {
                "version": "0.5.23",
                "max_total_num_tokens": self.max_tokens,
                "context_length": None,
                "speculative_algorithm": self.algorithm if on else None,
                "speculative_num_steps": self.num_draft_tokens if on else None,
                "speculative_num_draft_tokens": self.num_draft_tokens + 1 if on else None,
                "speculative_eagle_topk": self.topk if on else None,
                "speculative_draft_model_path": self.draft_path if on else None,
                "quantization": self.quantisation,
            }
            pages = {"/model_info": {"model_path": self.model_path}, "/server_info": told}
        return json.dumps(pages[path]) if path in pages else None

    def _metrics(self) -> str:
        if self._stale > 0:
            self._stale -= 1
        else:
            self._shown = self._sums.copy()
        lines = [f"{self.engine}:up 1.0", "# HELP of nothing", "no sample at all"]
        if self.engine == "vllm":
            lines.append(f"process_start_time_seconds {self._started}")
        names = {
            "vllm": ("request_success", "generation_tokens"),
            "sglang": ("num_requests", "generation_tokens"),
        }[self.engine]
        spec = {"vllm": ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")}
        for name in (*names, *(spec.get(self.engine, ("spec_verify_calls",)) if self.accepted else ())):
            # Two ranks or two reasons: a name stands there several times.
            half = self._shown[name] // 2
            lines.append(f'{self.engine}:{name}_total{{engine="0",name="a {{b}}"}} {half}.0')
            lines.append(f'{self.engine}:{name}_total{{engine="1",name="c\\"d"}} {self._shown[name] - half}.0')
            lines.append(f'{self.engine}:{name}_created{{engine="0"}} 1.79e+09')
        if self.accepted and self.engine == "vllm":
            for s in range(self.num_draft_tokens):
                label = f'{{engine="0",position="{s}"}}'
                value = float(self._shown[f"pos{s}"])
                lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{label} {value}")
        return "\n".join([*lines, *self.metrics_lines]) + "\n"

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _stream(self, asked: Asked, act: Act, writer: asyncio.StreamWriter) -> bool:
        if act.hang:
            await asyncio.sleep(3600)
        while self.most_in_flight < act.wait_for:
            await asyncio.sleep(0.001)
        if act.status != 200:
            writer.write(_whole(act.status, act.text))
            return True
        sampling = asked.body.get("sampling_params", asked.body)
        most = sampling.get("max_new_tokens", sampling.get("max_tokens"))
        whole = act.answer if act.answer is not None else answer_of(asked.prompt)
        new = whole[:most]
        kept = verifications_of(len(new), self.accepted) if self.accepted else []
        kept = kept if act.kept is None else act.kept
        sizes = [1, *(n + 1 for n in kept)] if self.accepted else [1] * len(new)
        events = self._events(asked, new, sizes, kept, "length" if len(whole) > most else "stop")
        if act.event is not None:
            events[0] = act.event
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i, event in enumerate(events):
            if act.cut_events is not None and i >= act.cut_events:
                return False
            writer.write(_chunk(f"data: {json.dumps(event)}\n\n"))
            await writer.drain()
            await asyncio.sleep(0)
        self._count(len(new), kept, act)
        writer.write(_chunk("data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    def _events(
        self, asked: Asked, new: list[int], sizes: list[int], kept: list[int], reason: str
    ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        histogram = [kept.count(j) for j in range(self.num_draft_tokens + 1)]
        start = 0
        for size in sizes:
            piece, done = new[start : start + size], new[: start + size]
            start += size
            finished = start >= len(new)
            if self.engine == "vllm":
                choice: dict[str, Any] = {
                    "text": "".join(f"<{i}>" for i in piece),
                    "finish_reason": reason if finished else None,
                }
                if self.token_ids:
                    choice["token_ids"] = piece
                events.append({"choices": [choice]})
                continue
            meta: dict[str, Any] = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(done)}
            meta["finish_reason"] = {"type": reason} if finished else None
            if self.accepted:
                now = kept[: len(events)]
                meta["spec_verify_ct"] = len(now)
                if self.by_request:
                    meta["spec_num_correct_drafts"] = sum(now)
                    meta["spec_num_proposed_drafts"] = len(now) * self.num_draft_tokens
                    meta["spec_correct_drafts_histogram"] = [now.count(j) for j in range(max(now, default=0) + 1)]
            events.append({"text": "", "output_ids": piece if self.incremental else done, "meta_info": meta})
        if self.engine == "vllm":
            usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(new)}
            last: dict[str, Any] = {"choices": [], "usage": usage}
            if self.accepted and self.by_request:
                told = {"acceptance_histogram": histogram, "num_draft_tokens": len(kept) * self.num_draft_tokens}
                last["metrics"] = {"speculative_decoding": told}
            events.append(last)
        return events

    def _count(self, num_new: int, kept: list[int], act: Act) -> None:
        names = ("request_success", "num_requests")
        if act.restart:
            self._sums.clear()
            self._started += 1
        for name in names:
            self._sums[name] += 1 + act.foreign[0]
        self._sums["generation_tokens"] += num_new + act.foreign[1]
        self._sums["spec_decode_num_drafts"] += len(kept)
        self._sums["spec_verify_calls"] += len(kept)
        self._sums["spec_decode_num_draft_tokens"] += len(kept) * self.num_draft_tokens
        self._sums["spec_decode_num_accepted_tokens"] += sum(kept)
        for s in range(self.num_draft_tokens):
            self._sums[f"pos{s}"] += sum(n > s for n in kept)
        self._stale = self.late


def _whole(status: int, text: str) -> bytes:
    data = text.encode()
    return f"HTTP/1.1 {status} X\r\ncontent-type: text/plain\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def _chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
