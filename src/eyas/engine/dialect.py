"""How the servers of one engine are asked over HTTP: what differs between engines that stage their answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import httpx

from eyas.connections import Connections
from eyas.engine import staged
from eyas.engine.staged import RequestName
from eyas.errors import ConfigError, EngineError, EngineUnavailable


@dataclass(frozen=True, slots=True)
class Reply:
    """What the body of an answer of status 200 says."""

    said: Mapping[str, Any] | None
    """By our plugin about the request; None where it says nothing."""
    body: Mapping[str, Any]
    aborted: tuple[int, str] | None = None
    """Status and text where the request failed all the same."""


class Dialect(Protocol):
    """One engine's way of being asked."""

    @property
    def engine(self) -> str:
        """As `engine.kind` has it; a hello has the engine's version under this name."""
        ...

    @property
    def title(self) -> str:
        """As people write it."""
        ...

    @property
    def settings(self) -> tuple[str, ...]:
        """Entries of a hello that belong into the provenance."""
        ...

    def request(self, name: RequestName, token_ids: list[int], *, logprobs: bool) -> tuple[str, dict[str, Any]]:
        """Path and body of the POST that asks for a prompt's states, and for as little generation as there is."""
        ...

    def reply(self, text: str) -> Reply | None:
        """What an answer's body says; None where it is none of this engine's."""
        ...

    def logprobs(self, body: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        """The server's log-probabilities of a prompt's tokens, the first left out.

        Raises ValueError where they are not those, with words that follow "log-probabilities".
        """
        ...

    def limits(self, client: httpx.Client) -> dict[str, Any]:
        """What belongs into a hello and the plugin does not know. Raises httpx.HTTPError."""
        ...

    async def num_waiting(self, connections: Connections) -> int | None:
        """How many requests wait at the server to be computed; None where it does not tell."""
        ...

    def secrets_in(self, extra: Mapping[str, Any]) -> list[str]:
        """One line for each entry of `engine.extra` that holds a secret; its value is told nowhere."""
        ...


@runtime_checkable
class FindsOut(Protocol):
    """A dialect that knows servers without our plugin."""

    def find_out(self, url: str, name: RequestName, said: Mapping[str, Any]) -> dict[str, Any] | None:
        """The hello of such a server, from what it answers to `name`; None where it is none.

        Raises ConfigError and EngineError where it cannot be captured from.
        """
        ...


def ask_hello(dialect: Dialect, url: str) -> dict[str, Any]:
    """What the server at `url` says of itself.

    Raises EngineUnavailable where none answers, EngineError where it cannot be captured from, ConfigError where `url`
    is no address.
    """
    # Several processes may ask at the same moment: the names of requests are never used twice.
    name = RequestName("0" * 16, secrets.randbelow(10**18), 1, staged.HELLO)
    path, body = dialect.request(name, [1], logprobs=False)
    require_no_password(url)
    _require_address(url)
    try:
        with httpx.Client(base_url=url, timeout=30.0, verify=needs_certificates(url), trust_env=False) as client:
            response = client.post(path, json=body)
            limits = dialect.limits(client)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"engine.url {url} is not an address: {error}") from None
    except httpx.HTTPError as error:
        raise EngineUnavailable(
            f"no {dialect.title} server answers at {url} ({type(error).__name__}); start one with 'eyas serve', or "
            "set engine.url",
            engine=dialect.engine,
        ) from None
    return _hello_of(dialect, url, response, path, name) | limits


def require_no_password(url: str) -> None:
    """Raises ConfigError, which does not show it."""
    # Whether the rest can be read as an address or not: what says that it cannot shows it.
    if "@" in url:
        raise ConfigError(
            "engine.url holds a user name or a password, which would stand in logs and saved run files: leave it "
            "out, and let the server listen where nobody else can reach it"
        )


def _require_address(url: str) -> None:
    """Raises ConfigError."""
    try:
        parsed = httpx.URL(url)
        host = parsed.host
        if "://" in url and not host:
            raise httpx.InvalidURL("it names no host")
        if parsed.port is not None and not 0 < parsed.port < 1 << 16:
            raise httpx.InvalidURL(f"port {parsed.port} is none")
        host.encode("idna")  # as it is when the name is looked up
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"engine.url {url} is not an address: {error}") from None


def _hello_of(dialect: Dialect, url: str, response: httpx.Response, path: str, name: RequestName) -> dict[str, Any]:
    """A hello from its answer. Raises EngineUnavailable and EngineError."""
    status, text = response.status_code, brief(response.text)
    if is_passing(status):
        raise EngineUnavailable(f"the server at {url} answers {status}: {text}", engine=dialect.engine)
    if status in (401, 403):
        raise EngineError(
            f"the server at {url} answers {status}: it wants a key, and capture sends none; start it without --api-key",
            engine=dialect.engine,
        )
    if status != 200:
        raise EngineError(
            f"the server at {url} answers {status} to POST {path}: {text}; is it {dialect.title}?",
            engine=dialect.engine,
        )
    reply = dialect.reply(response.text)
    if reply is None:
        raise EngineError(f"the server at {url} does not answer as {dialect.title} does: {text}", engine=dialect.engine)
    said = reply.said or {}
    if isinstance(dialect, FindsOut) and (found := dialect.find_out(url, name, said)) is not None:
        return found
    if "hello" not in said:
        failure = said.get("error")
        why = f"its capture plugin fails: {failure}" if failure else "it runs without the capture plugin"
        raise EngineError(
            f"the server at {url} cannot be captured from: {why}; start it with 'eyas serve', or as "
            "'eyas serve --print' shows",
            engine=dialect.engine,
        )
    version = said["hello"].get("staged_version")
    if version != staged.VERSION:
        raise EngineError(
            f"the server at {url} has a plugin of another eyas (staged files {version}, here "
            f"{staged.VERSION}); start it anew",
            engine=dialect.engine,
        )
    return dict(said["hello"])


def lines_about_secrets(extra: Mapping[str, Any], flags: tuple[str, ...]) -> list[str]:
    """One line for each entry of `engine.extra` that is one of `flags`, which hold secrets."""
    return [
        f"engine.extra.{name}: capture sends no key, and it would stand in saved run files, the server's log and the "
        "process list; leave it out, and let the server listen where nobody else can reach it"
        for name in extra
        if name.lstrip("-").replace("_", "-") in flags
    ]


def is_passing(status: int) -> bool:
    """Whether an HTTP status may be another one later; 501, not implemented, never is."""
    return status in (408, 429) or (status >= 500 and status != 501)


def needs_certificates(url: str) -> bool:
    """Whether certificates are to be loaded, which takes a twentieth of a second: only where they are looked at."""
    return url.startswith("https:")


def brief(text: str, limit: int = 300) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
