"""A server's own arguments, as far as capture cares: which of them contradict it.

Part of the plugin, so it needs the standard library alone, beside the server itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def contradiction(arguments: Mapping[str, Any]) -> str | None:
    """Why a server started with these arguments, resolved, cannot be captured from; None when it can."""
    if not arguments:
        return None

    def size(name: str) -> int:
        return int(arguments.get(name) or 1)

    if arguments.get("speculative_algorithm"):
        return "speculation is on (--speculative-algorithm): captured rows would be mixed with drafted ones"
    if size("pp_size") > 1:
        return "pipeline parallelism (--pp-size) splits the layers over processes; use --tp-size"
    if arguments.get("enable_dp_attention") or size("attn_dp_size") > 1:
        return (
            "DP attention (--enable-dp-attention, --attn-dp-size) splits requests over ranks; only rank 0 stages; use "
            "--tp-size alone"
        )
    if size("attn_cp_size") > 1:
        return "context parallelism (--attn-cp-size) splits a prompt over ranks; use --tp-size"
    if arguments.get("enable_two_batch_overlap"):
        return "two-batch overlap is on: it captures no auxiliary states; start without --enable-two-batch-overlap"
    if not arguments.get("disable_radix_cache"):
        return "the radix cache is on: rows of a cached prefix are never computed; start with --disable-radix-cache"
    backend = _prefill_graphs(arguments.get("cuda_graph_config"))
    if backend not in (None, "disabled"):
        return (
            f"prefill runs in CUDA graphs ({backend}), where nothing can be looked at; start with "
            "--cuda-graph-backend-prefill disabled"
        )
    # SGLang turns it on by itself for most mixtures of experts on more than one GPU.
    if size("tp_size") > 1 and arguments.get("flashinfer_allreduce_fusion_backend"):
        return (
            "all-reduce fusion is on: auxiliary states would be one rank's partial sums; start with "
            "--enforce-disable-flashinfer-allreduce-fusion"
        )
    if size("tp_size") > 1 and arguments.get("enable_aiter_allreduce_fusion"):
        return (
            "all-reduce fusion is on: auxiliary states would be one rank's partial sums; start without "
            "--enable-aiter-allreduce-fusion"
        )
    return None


def _prefill_graphs(config: Any) -> str | None:
    """Which backend captures prefill in graphs, by SGLang's `cuda_graph_config`, an object or written out."""
    prefill = config.get("prefill") if isinstance(config, Mapping) else getattr(config, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", None)
    return None if backend is None else str(getattr(backend, "value", backend))


def server_arguments() -> Mapping[str, Any]:
    """The server's arguments as SGLang resolved them (what was given is another thing); empty where it hides them."""
    try:
        from sglang.srt.runtime_context import get_context

        return dict(get_context().resolved_server_args_dict())
    except (ImportError, AttributeError, ValueError, TypeError, RuntimeError, AssertionError):
        return {}
