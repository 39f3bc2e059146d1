"""What is said to a vLLM server over HTTP, and what it says of itself."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from eyas.connections import Connections
from eyas.engine.dialect import Reply, lines_about_secrets
from eyas.engine.staged import INFO_KEY, NO_DIRECTORY, RequestName, StagedError
from eyas.engine.vllm.stock_files import first_shape
from eyas.errors import ConfigError

_SECRETS = ("api-key", "ssl-keyfile-password")
"""Flags of a server that hold a secret."""
STOCK_PATH = "hidden_states_path"
"""Where an answer of vLLM's own connector names its file."""
FIRST_PATIENCE_S = 30.0
"""How long the file of a first question may take."""
_WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
"""In its Prometheus metrics: requests that wait for their first forward, one line for each engine."""


class Vllm:
    """See `engine.dialect.Dialect`."""

    engine = "vllm"
    title = "vLLM"
    settings: tuple[str, ...] = (
        "torch",
        "architecture",
        "device",
        "dtype",
        "tp_size",
        "chunked_prefill",
        "prefix_caching",
    )

    def request(self, name: RequestName, token_ids: list[int], *, logprobs: bool) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "request_id": str(name),
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
            told = told if isinstance(told, dict) else {}
            said = self.said(told)
            aborted = (503, f"finish_reason {reason}") if reason in ("abort", "error") else None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return None
        return Reply(said, choice, aborted)

    def said(self, told: Mapping[str, Any]) -> dict[str, Any] | None:
        """What an answer's `kv_transfer_params` say of its request."""
        said = told.get(INFO_KEY)
        if isinstance(said, dict):
            return said
        if isinstance(told.get(STOCK_PATH), str):
            why = (
                "the server has vLLM's own connector for hidden states, not ours: start one with 'eyas serve', or set "
                "engine.stock_layers to the layers that this one extracts (its eagle_aux_hidden_state_layer_ids)"
            )
            return {"error": why, "reason": NO_DIRECTORY, STOCK_PATH: told[STOCK_PATH]}
        return None

    def find_out(self, url: str, name: RequestName, said: Mapping[str, Any]) -> dict[str, Any] | None:
        """As `engine.dialect.FindsOut`: there is no hello where a server has vLLM's own connector, but its name."""
        path = said.get(STOCK_PATH)
        if path is None:
            return None
        if str(name) in Path(path).name:  # it has written a file for that question
            with contextlib.suppress(OSError, StagedError):
                first_shape(Path(path), FIRST_PATIENCE_S)
        raise ConfigError(f"{url}: {said['error']}")

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
