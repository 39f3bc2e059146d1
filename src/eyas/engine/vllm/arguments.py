"""A vLLM server's own settings, as far as capture cares: which of them contradict it, by version.

Part of the connector, so it needs the standard library alone, beside the server itself.
"""

from __future__ import annotations

import re
from typing import Any

KNOWN_VERSIONS = ("0.32.0",)
"""vLLM versions that the connector was run in; others warn, and the client's probe decides."""
WHOLE_SINCE = "0.32"
"""Chunked prefill and prefix caching gave whole, equal states in this version; older ones are said to lose rows."""


def parsed(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def is_whole(version: str) -> bool:
    """Whether states are whole with chunked prefill and with prefix caching, as far as is known."""
    found = parsed(version)
    return found is not None and found >= (parsed(WHOLE_SINCE) or ())


def contradiction(config: Any, version: str) -> str | None:
    """Why a server with this `VllmConfig` cannot be captured from; None when it can."""
    speculation = config.speculative_config
    if speculation is None or speculation.method != "extract_hidden_states":
        return (
            "hidden states are not extracted: start it with --speculative-config "
            "'{\"method\": \"extract_hidden_states\", …}', as 'eyas serve --print' shows"
        )
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism splits the layers over processes; use --tensor-parallel-size"
    if parallel.data_parallel_size > 1:
        return "data parallelism splits one quota over schedulers; start one server for each replica"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (getattr(parallel, name, 1) or 1) > 1:
            return f"context parallelism ({name}) splits a prompt over ranks; use --tensor-parallel-size"
    if is_whole(version):
        return None
    if config.cache_config.enable_prefix_caching:
        return f"prefix caching has given too few rows before vLLM {WHOLE_SINCE}; start with --no-enable-prefix-caching"
    if config.scheduler_config.enable_chunked_prefill:
        return f"chunked prefill has given wrong rows before vLLM {WHOLE_SINCE}; start with --no-enable-chunked-prefill"
    return None
