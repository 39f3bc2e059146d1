"""What is said to a vLLM server over HTTP, and what it says of itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx

from eyas.connections import Connections
from eyas.engine.dialect import Reply, lines_about_secrets
from eyas.engine.staged import INFO_KEY, RequestName

_SECRETS = ("api-key", "ssl-keyfile-password")
"""Flags of a server that hold a secret."""
_WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
"""In its Prometheus metrics: requests that wait for their first forward, one line for each engine."""


class Vllm:
    """See `engine.dialect.Dialect`."""

    engine = "vllm"
    title = "vLLM"
    settings = ("torch", "architecture", "device", "dtype", "tp_size", "chunked_prefill", "prefix_caching")

    def request(self, name: RequestName, token_ids: list[int], *, logprobs: bool) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "kv_transfer_params": {INFO_KEY: str(name)},
        }
        if logprobs:
            body["prompt_logprobs"] = 0  # the prompt's own tokens alone
        return "/v1/completions", body

    def reply(self, text: str) -> Reply | None:
        try:
            body = json.loads(text)
            choice = body["choices"][0]
            told, reason = body.get("kv_transfer_params"), choice.get("finish_reason")
            said = told.get(INFO_KEY) if isinstance(told, dict) else None
            aborted = (503, f"finish_reason {reason}") if reason in ("abort", "error") else None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return None
        return Reply(said if isinstance(said, dict) else None, choice, aborted)

    def logprobs(self, body: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        told = body.get("prompt_logprobs")
        if not isinstance(told, list):
            raise ValueError("that cannot be read, or none")
        if len(told) != len(token_ids):
            raise ValueError(f"of {len(told)} tokens, and not of the {len(token_ids)} sent")
        try:
            return [float(entry[str(i)]["logprob"]) for entry, i in zip(told[1:], token_ids[1:], strict=True)]
        except KeyError:
            raise ValueError(f"of other tokens than the {len(token_ids)} sent") from None
        except (TypeError, ValueError):
            raise ValueError("that cannot be read, or none") from None

    def limits(self, client: httpx.Client) -> dict[str, Any]:
        return {}  # the connector knows them

    async def num_waiting(self, connections: Connections) -> int | None:
        try:
            response = await connections.request("GET", "/metrics", timeout=5.0)
            return sum(int(float(n)) for n in found) if (found := _WAITING.findall(response.text)) else None
        except (httpx.HTTPError, ValueError):
            return None

    def secrets_in(self, extra: Mapping[str, Any]) -> list[str]:
        return lines_about_secrets(extra, _SECRETS)


VLLM = Vllm()
