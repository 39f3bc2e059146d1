"""One server: its connections, its pace, and whether it is there at all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import httpx

from eyas.connections import Connections
from eyas.generate.answers import encode_json
from eyas.generate.key import Key
from eyas.generate.pace import Pace
from eyas.generate.reply import (
    CONGESTION,
    REFUSED,
    TOKEN_IDS_FIELD,
    Answer,
    Fault,
    FaultKind,
    Outcome,
    Refusal,
    classify,
)

KEEPALIVE_S = 4.0
"""Less than the five seconds after which most servers close an idle connection."""
CONNECT_TIMEOUT_S = 10.0
MAX_AWAY_S = 60.0
"""Longest pause between two tries of a server that is gone."""
MIN_STREAK = 8
"""So many faults in a row, beside those in flight, and a server is set aside as if it were gone."""

MIN_BODY_BYTES = 8 << 20
"""An answer may be so large, and more with its prompt and the tokens that were asked for."""


class Endpoint:
    """An OpenAI-compatible server. For one event loop."""

    def __init__(self, url: str, key: Key, *, concurrency: int) -> None:
        self.url = url
        self.pace = Pace(concurrency)
        self.in_flight = 0
        self.answered = 0
        self.faults: Counter[str] = Counter()
        self.down_since: float | None = None
        """When it was set aside; None while it answers."""
        self.down_detail = ""
        self.asks_token_ids = True
        self._key = key
        self._paused_until = 0.0
        self._away_s = 0.5
        self._last_aside = float("-inf")
        self._streak = 0
        self._changed = asyncio.Event()
        self._headers = {"content-type": "application/json", "accept": "application/json", **key.headers()}
        self._completions = httpx.URL(url + "/chat/completions")
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._extensions = {"timeout": timeout.as_dict()}
        self._connections = Connections(
            base_url=url,
            timeout=timeout,
            verify=url.startswith("https:"),
            keepalive_s=KEEPALIVE_S,
        )

    @property
    def limit(self) -> int:
        """Requests at a time now: one, to see whether it is back, while it is set aside."""
        return 1 if self.down_since is not None else self.pace.limit

    @property
    def paused_s(self) -> float:
        """Until it may be asked again."""
        return max(0.0, self._paused_until - time.monotonic())

    async def ready(self) -> None:
        """Wait until it may be asked."""
        while True:
            pause = self.paused_s
            if not pause and self.in_flight < self.limit:
                return
            self._changed.clear()
            if not pause:
                await self._changed.wait()
                continue
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def release(self) -> None:
        """A slot is free again."""
        self.in_flight -= 1
        self._changed.set()

    async def ask(self, body: dict[str, Any], *, timeout_s: float) -> Outcome:
        """One chat completion. Whatever goes wrong is an outcome; what it says of the server is learned here."""
        asks_token_ids = self.asks_token_ids and TOKEN_IDS_FIELD not in body
        sent_at = time.monotonic()
        outcome = await self._post({**body, TOKEN_IDS_FIELD: True} if asks_token_ids else body, timeout_s)
        if _is_about_field(outcome) and asks_token_ids:
            # Only an answer shows that it was the field: the text may be about something else.
            self.faults[FaultKind.UNKNOWN_FIELD] += 1
            sent_at = time.monotonic()
            outcome = await self._post(body, timeout_s)
            if isinstance(outcome, Answer):
                self.asks_token_ids = False
        if isinstance(outcome, Fault) and _is_about_field(outcome):
            hint = f"; generate.extra sets {TOKEN_IDS_FIELD}, take it out" if TOKEN_IDS_FIELD in body else ""
            outcome = Refusal(REFUSED, outcome.detail + hint)
        now = time.monotonic()
        if isinstance(outcome, Fault):
            self._learn_fault(outcome, sent_at, now)
        else:
            # A refusal, too, shows that somebody is there.
            self._streak, self._away_s, self.down_since = 0, 0.5, None
            if isinstance(outcome, Answer):
                self.answered += 1
                self.pace.answered(now - sent_at, self.in_flight)
        return outcome

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes] | Fault:
        """Status and body of something else than a completion."""
        try:
            async with asyncio.timeout(timeout_s):
                request = httpx.Request("GET", self.url + path, headers=self._headers, extensions=self._extensions)
                status, _, body = await self._send(request, MIN_BODY_BYTES)
        except _TooBigError as error:
            return Fault(FaultKind.TOO_BIG, str(error))
        except TimeoutError:
            return Fault(FaultKind.TIMEOUT, f"no answer within {timeout_s:.0f} s")
        except (httpx.HTTPError, OSError) as error:
            return Fault(FaultKind.GONE, self._why(error))
        return status, body

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def _post(self, asked: dict[str, Any], timeout_s: float) -> Outcome:
        body, timeout_s = encode_json(asked), self.pace.timeout_s(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                # Built by hand: the client would parse the address, and merge headers, once more for each request.
                request = httpx.Request(
                    "POST", self._completions, headers=self._headers, content=body, extensions=self._extensions
                )
                status, headers, told = await self._send(request, _most_bytes(asked, len(body)))
        except _TooBigError as error:
            return Fault(FaultKind.TOO_BIG, str(error))
        except TimeoutError:
            return Fault(FaultKind.TIMEOUT, f"no whole answer within {timeout_s:.0f} s")
        except httpx.RemoteProtocolError as error:
            kind = FaultKind.CUT_BODY if "body" in str(error) else FaultKind.CONNECTION
            return Fault(kind, self._why(error))
        except httpx.DecodingError as error:
            return Fault(FaultKind.NOT_JSON, self._why(error))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return Fault(FaultKind.GONE, self._why(error))
        except (httpx.HTTPError, OSError) as error:
            return Fault(FaultKind.CONNECTION, self._why(error))
        return classify(status, headers, told, self._key)

    async def _send(self, request: httpx.Request, most_bytes: int) -> tuple[int, httpx.Headers, bytes]:
        """Status, headers and whole body, of which no more than `most_bytes` are ever held."""
        async with self._connections.take() as client:
            response = await client.send(request, stream=True)
            try:
                if "," in response.headers.get("content-encoding", ""):
                    raise httpx.DecodingError("compressed more than once")  # bombs, mostly
                chunks, num_bytes = [], 0
                async for chunk in response.aiter_bytes():
                    num_bytes += len(chunk)
                    if num_bytes > most_bytes:
                        raise _TooBigError(f"an answer of more than {most_bytes:,} bytes")
                    chunks.append(chunk)
            finally:
                await response.aclose()
        return response.status_code, response.headers, b"".join(chunks)

    def _why(self, error: BaseException) -> str:
        return self._key.scrub(f"{type(error).__name__}: {error}".rstrip(": "))[:200]

    def _learn_fault(self, fault: Fault, sent_at: float, now: float) -> None:
        self.faults[fault.kind] += 1
        if fault.kind is FaultKind.TIMEOUT:
            self.pace.timed_out()
        if fault.kind in CONGESTION:
            pause = self.pace.congested(sent_at)
            if fault.kind is not FaultKind.TIMEOUT:
                # Some servers always say 0, or a date in the past.
                self._pause(now + max(pause, fault.retry_after_s or 0.0))
        elif fault.retry_after_s is not None:
            self._pause(now + fault.retry_after_s)
        if fault.kind is FaultKind.RATE_LIMIT:
            return  # it is there, and says what it wants
        self._streak += 1
        if (fault.kind is FaultKind.GONE or self._streak > MIN_STREAK + self.in_flight) and sent_at > self._last_aside:
            self._last_aside = now
            self.down_since = now if self.down_since is None else self.down_since
            self.down_detail = fault.detail
            self._away_s = min(MAX_AWAY_S, 2 * self._away_s)
            self._pause(now + self._away_s)

    def _pause(self, until: float) -> None:
        self._paused_until = max(self._paused_until, until)
        self._changed.set()


class _TooBigError(Exception):
    """A body without end."""


def _is_about_field(outcome: Outcome) -> bool:
    return isinstance(outcome, Fault) and outcome.kind is FaultKind.UNKNOWN_FIELD


def _most_bytes(asked: dict[str, Any], asked_bytes: int) -> int:
    """Of an answer: prompt and answer in token ids and text, and what may be told of each new token."""
    new = asked.get("max_tokens")
    return MIN_BODY_BYTES + 16 * asked_bytes + 4096 * (new if isinstance(new, int) else 0)
