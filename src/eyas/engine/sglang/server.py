"""What is said to an SGLang server over HTTP, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np

from eyas.connections import Connections
from eyas.engine.dialect import Reply, lines_about_secrets
from eyas.engine.staged import INFO_KEY, RequestName

_SECRETS = ("api-key", "admin-api-key", "ssl-keyfile-password")
"""Flags of a server that hold a secret."""


class Sglang:
    """See `engine.dialect.Dialect`."""

    engine = "sglang"
    title = "SGLang"
    settings = ("torch", "architecture", "device", "dtype", "tp_size", "attention", "chunked_prefill_size")

    def request(self, name: RequestName, token_ids: list[int], *, logprobs: bool) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "rid": str(name),
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }
        if logprobs:
            body |= {"return_logprob": True, "logprob_start_len": 0}
        return "/generate", body

    def reply(self, text: str) -> Reply | None:
        try:
            meta = json.loads(text)["meta_info"]
            told, reason = meta.get(INFO_KEY), meta.get("finish_reason")
            aborted = None
            if isinstance(reason, dict) and reason.get("type") == "abort":
                aborted = int(reason.get("status_code") or 500), str(reason.get("message"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        said = [s for s in told if isinstance(s, dict)] if isinstance(told, list) else []
        return Reply(next(iter(said), None), meta, aborted)

    def logprobs(self, body: Mapping[str, Any], token_ids: list[int]) -> list[float]:
        try:
            told = [(entry[0], int(entry[1])) for entry in body["input_token_logprobs"]]
            # The vocabulary's last id is told as 0 (its `logprob_result_processor.py`).
            last = max(token_ids)
            if [token for _, token in told] in (token_ids, [0 if token == last else token for token in token_ids]):
                return [float(value) for value, _ in told[1:]]
        except (KeyError, TypeError, ValueError, IndexError):
            raise ValueError("that cannot be read, or none") from None
        raise ValueError(f"of {len(told)} tokens, and not of the {len(token_ids)} sent")

    def limits(self, client: httpx.Client) -> dict[str, Any]:
        response = client.get("/server_info")
        if response.status_code == 404:
            response = client.get("/get_server_info")
        try:
            return {"max_tokens": int(response.json()["max_req_input_len"])}
        except (ValueError, KeyError, TypeError):
            return {"max_tokens": np.iinfo(np.int32).max}

    async def num_waiting(self, connections: Connections) -> int | None:
        try:
            response = await connections.request("GET", "/v1/loads", params={"include": "core"}, timeout=5.0)
            loads = response.json()["loads"] if response.status_code == 200 else []
            return sum(int(load["num_waiting_reqs"]) for load in loads) if loads else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    def secrets_in(self, extra: Mapping[str, Any]) -> list[str]:
        return lines_about_secrets(extra, _SECRETS)


SGLANG = Sglang()
