"""What is said to an SGLang server over HTTP, and what it says of itself."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np

from eyas.engine import staged
from eyas.engine.staged import INFO_KEY, RequestName
from eyas.errors import ConfigError, EngineError, EngineUnavailable

ENGINE = "sglang"
_SECRETS = ("api-key", "admin-api-key", "ssl-keyfile-password")
"""Flags of a server that hold a secret."""


def ask_hello(url: str) -> dict[str, Any]:
    """What the server at `url` says of itself.

    Raises EngineUnavailable where none answers, EngineError where it cannot be captured from, ConfigError where `url`
    is no address.
    """
    # Several processes may ask at the same moment: the names of requests are never used twice.
    name = RequestName("0" * 16, secrets.randbelow(10**18), 1, staged.HELLO)
    try:
        if httpx.URL(url).port == 0:
            raise httpx.InvalidURL("port 0 is none")
        with httpx.Client(base_url=url, timeout=30.0, verify=needs_certificates(url), trust_env=False) as client:
            response = client.post("/generate", json=generate_body(name, [1]))
            limits = client.get("/server_info")
            if limits.status_code == 404:
                limits = client.get("/get_server_info")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"engine.url {url} is not an address: {error}") from None
    except httpx.HTTPError as error:
        raise EngineUnavailable(
            f"no SGLang server answers at {url} ({type(error).__name__}); start one with 'eyas serve', or "
            "set engine.url",
            engine=ENGINE,
        ) from None
    if is_passing(response.status_code):
        raise EngineUnavailable(
            f"the server at {url} answers {response.status_code}: {brief(response.text)}", engine=ENGINE
        )
    if response.status_code in (401, 403):
        raise EngineError(
            f"the server at {url} answers {response.status_code}: it wants a key, and capture sends none; start it "
            "without --api-key",
            engine=ENGINE,
        )
    if response.status_code != 200:
        raise EngineError(
            f"the server at {url} answers {response.status_code} to POST /generate: "
            f"{brief(response.text)}; is it SGLang?",
            engine=ENGINE,
        )
    try:
        told = response.json()["meta_info"].get(INFO_KEY)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EngineError(
            f"the server at {url} does not answer as SGLang does: {brief(response.text)}", engine=ENGINE
        ) from None
    said = [s for s in told if isinstance(s, dict)] if isinstance(told, list) else []
    hello = next((s["hello"] for s in said if "hello" in s), None)
    if hello is None:
        failure = next((s["error"] for s in said if "error" in s), None)
        why = f"its capture plugin fails: {failure}" if failure else "it runs without the capture plugin"
        raise EngineError(
            f"the server at {url} cannot be captured from: {why}; start it with 'eyas serve', or as "
            "'eyas serve --print' shows",
            engine=ENGINE,
        )
    version = hello.get("staged_version")
    if version != staged.VERSION:
        raise EngineError(
            f"the server at {url} has a plugin of another eyas (staged files {version}, here "
            f"{staged.VERSION}); start it anew",
            engine=ENGINE,
        )
    try:
        hello["max_tokens"] = int(limits.json()["max_req_input_len"])
    except (ValueError, KeyError, TypeError):
        hello["max_tokens"] = np.iinfo(np.int32).max
    return dict(hello)


def secrets_in(extra: Mapping[str, Any]) -> list[str]:
    """One line for each entry of `engine.extra` that holds a secret; its value is told nowhere."""
    return [
        f"engine.extra.{name}: capture sends no key, and it would stand in saved run files, the server's log and the "
        "process list; leave it out, and let the server listen where nobody else can reach it"
        for name in extra
        if name.lstrip("-").replace("_", "-") in _SECRETS
    ]


def is_passing(status: int) -> bool:
    """Whether an HTTP status may be another one later; 501, not implemented, never is."""
    return status in (408, 429) or (status >= 500 and status != 501)


def needs_certificates(url: str) -> bool:
    """Whether certificates are to be loaded, which takes a twentieth of a second: only where they are looked at."""
    return url.startswith("https:")


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


def brief(text: str, limit: int = 300) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
