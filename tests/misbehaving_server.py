"""An OpenAI-compatible server on a real port that answers by a rule and misbehaves on a script.

Tokens are bytes, so that a test can say what every id must be: a turn is its role's letter, its text's bytes and
`END`. Run as a program, `misbehaving_server.py [FAULT_SHARE]`, it prints its port and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

END = 256
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}


@dataclass
class Asked:
    """One request, as a script sees it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    nth: int
    """The how-manieth about these messages, from 1."""

    @property
    def last(self) -> str:
        """What the last message says."""
        return str(self.body["messages"][-1]["content"])


@dataclass
class Act:
    """What a script wants instead of the right answer; what is left out is right."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    body: bytes | None = None
    """In place of the completion."""
    edit: Callable[[dict[str, Any]], object] | None = None
    """Changes the right completion before it is sent."""
    delay_s: float = 0.0
    hang: bool = False
    reset: bool = False
    """The connection is reset before an answer."""
    cut: float | None = None
    """So much of the body is sent, then the connection closes."""
    drip_s: float | None = None
    """Pause between two bytes."""


Script = Callable[[Asked], Act | None]


def text_of(messages: list[dict[str, Any]]) -> str:
    """The right answer to these messages."""
    last = str(messages[-1]["content"])
    return f"answer {hashlib.md5(last.encode()).hexdigest()[:8]} to {last}"


def ids_of(messages: list[dict[str, Any]]) -> list[int]:
    """The prompt of the next answer, in token ids."""
    ids: list[int] = []
    for message in messages:
        ids += [ROLES[message["role"]], *str(message.get("content") or "").encode(), END]
    return [*ids, ROLES["assistant"]]


def completion(body: dict[str, Any], *, ids: bool = True) -> dict[str, Any]:
    """The right answer."""
    messages = body["messages"]
    text = text_of(messages)
    prompt_ids, token_ids = ids_of(messages), [*text.encode(), END]
    message = {"role": "assistant", "content": text, "tool_calls": [], "reasoning_content": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}
    answer = {"id": "gen-1", "object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}
    if ids and body.get("return_token_ids"):
        answer["prompt_token_ids"], choice["token_ids"] = prompt_ids, token_ids
    return answer


def error(message: str, code: Any = None, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, "code": code, **more}}).encode()


class MisbehavingServer:
    """Serves from a thread of this process while it is a context."""

    def __init__(self, script: Script = lambda asked: None, *, ids: bool = True, port: int = 0, **options: Any) -> None:
        self.script, self.ids = script, ids
        self.asked: list[Asked] = []
        """In order of arrival; what is asked of `/models` is not among them."""
        self.models: list[str] = options.pop("models", ["target"])
        self.keep = options.pop("keep", True)
        """Whether `asked` is kept."""
        self.num_asked = 0
        self.in_flight = self.most_in_flight = self.connections = 0
        self._counts: Counter[str] = Counter()
        self._port = port
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> MisbehavingServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self) -> None:
        """Gone at once: nothing listens, every connection is reset."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(10)

    def _stop(self) -> None:
        self._listener.close()
        for writer in list(self._writers):
            _reset(writer)
        self._loop.call_soon(self._loop.stop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda loop, context: None)
        self._listener = self._loop.run_until_complete(
            asyncio.start_server(self._client, "127.0.0.1", self._port, backlog=512)
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        payload = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1]
        if path.endswith("/models"):
            data = json.dumps({"data": [{"id": name} for name in self.models]}).encode()
            writer.write(_head(200, "application/json", len(data), {}) + data)
            return True
        asked = Asked(path, headers, json.loads(payload), 0)
        name = json.dumps(asked.body["messages"], sort_keys=True)
        self._counts[name] += 1
        asked.nth = self._counts[name]
        self.num_asked += 1
        if self.keep:
            self.asked.append(asked)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(asked, self.script(asked) or Act(), writer)
        finally:
            self.in_flight -= 1

    async def _answer(self, asked: Asked, act: Act, writer: asyncio.StreamWriter) -> bool:
        if act.delay_s:
            await asyncio.sleep(act.delay_s)
        if act.hang:
            await asyncio.sleep(3600)
        if act.reset:
            _reset(writer)
            return False
        if act.body is not None:
            data = act.body
        else:
            right = completion(asked.body, ids=self.ids)
            if act.edit is not None:
                act.edit(right)
            data = json.dumps(right).encode()
        head = _head(act.status, act.content_type, len(data), act.headers)
        if act.cut is not None:
            writer.write(head + data[: int(len(data) * act.cut)])
            await writer.drain()
            return False
        if act.drip_s is not None:
            writer.write(head)
            for i in range(len(data)):
                writer.write(data[i : i + 1])
                await writer.drain()
                await asyncio.sleep(act.drip_s)
            return True
        writer.write(head + data)
        return True


def _head(status: int, content_type: str, length: int, headers: dict[str, str]) -> bytes:
    lines = {"content-type": content_type, "content-length": str(length), **headers}
    return (f"HTTP/1.1 {status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n").encode()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


FAULTS: tuple[Callable[[], Act], ...] = (
    lambda: Act(status=500, body=error("engine fell over")),
    lambda: Act(body=error("upstream is gone", 502)),
    lambda: Act(edit=lambda right: right.update(choices=[])),
    lambda: Act(cut=0.5),
    lambda: Act(reset=True),
    lambda: Act(content_type="text/html", body=b"<html>Bad gateway</html>"),
    lambda: Act(body=b'{"choices": [{"mess'),
    lambda: Act(edit=lambda right: right["choices"][0].update(finish_reason="error")),
    lambda: Act(status=429, headers={"retry-after": "0"}, body=error("slow down", 429)),
    lambda: Act(status=503, headers={"retry-after": "0"}, body=error("busy")),
)
"""Faults that another try cures, one of each kind."""


def now_and_then(share: float, seed: int = 0) -> Script:
    """Misbehaves in this share of the requests."""
    rng = random.Random(seed)
    return lambda asked: rng.choice(FAULTS)() if rng.random() < share else None


def main() -> None:
    share = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    with MisbehavingServer(now_and_then(share), keep=False) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
