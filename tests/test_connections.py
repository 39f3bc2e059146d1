"""Connections: kept alive and used again, one request each, closed when a request is given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from eyas.connections import Connections

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers after `delay_s`; counts connections, and those that were open when their client left."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.connections = 0
        self.aborted = 0
        self.most = 0
        self._busy = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self._busy += 1
                self.most = max(self.most, self._busy)
                gone = asyncio.ensure_future(reader.read(1))
                done, _ = await asyncio.wait([gone], timeout=self.delay_s)
                self._busy -= 1
                if done:
                    self.aborted += 1
                    break
                gone.cancel()
                await asyncio.wait([gone])
                writer.write(ANSWER)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving(server: Server, keepalive_s: float = 60.0) -> AsyncIterator[Connections]:
    listener = await asyncio.start_server(server, "127.0.0.1", 0, backlog=256)
    port = listener.sockets[0].getsockname()[1]
    connections = Connections(
        base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(20), verify=False, keepalive_s=keepalive_s
    )
    async with contextlib.aclosing(connections):
        yield connections
    listener.close()


async def ask(connections: Connections) -> str:
    return (await connections.request("GET", "/")).text


def test_as_many_connections_as_requests_at_a_time_and_each_is_used_again() -> None:
    async def run() -> None:
        server = Server(0.05)
        async with serving(server) as connections:
            for _ in range(3):
                assert await asyncio.gather(*(ask(connections) for _ in range(40))) == ["ok"] * 40
            assert server.connections == server.most == 40
            assert await ask(connections) == "ok"
            assert server.connections == 40

    asyncio.run(run())


def test_an_old_connection_is_opened_anew() -> None:
    async def run() -> None:
        server = Server(0.0)
        async with serving(server, keepalive_s=0.1) as connections:
            await ask(connections)
            await ask(connections)
            assert server.connections == 1
            await asyncio.sleep(0.2)
            await ask(connections)
            assert server.connections == 2

    asyncio.run(run())


def test_a_request_that_is_given_up_closes_its_connection_and_nobody_gets_its_answer() -> None:
    async def run() -> None:
        server = Server(0.3)
        async with serving(server) as connections:
            task = asyncio.ensure_future(ask(connections))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await ask(connections) == "ok"
            assert server.aborted == 1 and server.connections == 2

    asyncio.run(run())


def test_closing_in_mid_request_leaves_no_connection_open() -> None:
    async def run() -> None:
        server = Server(0.1)
        async with serving(server) as connections:
            task = asyncio.ensure_future(ask(connections))
            await asyncio.sleep(0.03)
            await connections.aclose()
            assert await task == "ok"
            assert connections._idle == []

    asyncio.run(run())
