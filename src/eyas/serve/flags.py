"""The server's flags: ours, then those of `engine.extra`, untouched; what contradicts capture is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eyas.config import EngineConfig, ServeConfig
from eyas.engine.sglang.server import SGLANG
from eyas.errors import ConfigError

Flags = dict[str, Any]
"""Values by flag, spelled with hyphens: True is a flag without a value, False one that is left out."""

_ALIASES: Mapping[str, str] = {
    "attention-data-parallel-size": "attn-dp-size",
    "enable-hicache": "enable-hierarchical-cache",
    "model": "model-path",
    "pipeline-parallel-size": "pp-size",
    "pp": "pp-size",
    "tensor-parallel-size": "tp-size",
    "tp": "tp-size",
}
_SET_ELSEWHERE: Mapping[str, str] = {
    "host": "engine.url names host and port",
    "port": "engine.url names host and port",
    "model-path": "target.path names the model",
    "tp-size": "set serve.tensor_parallel instead",
    "config": "a file of flags cannot be checked here: write its flags into engine.extra",
}
_CONTRADICTS: Mapping[str, str] = {
    "enable-dp-attention": "it splits requests over ranks, and only rank 0 stages: leave it out",
    "enable-flashinfer-allreduce-fusion": "auxiliary states would be one rank's partial sums: leave it out",
    "flashinfer-allreduce-fusion-backend": "auxiliary states would be one rank's partial sums: leave it out",
    "enable-hierarchical-cache": "rows of a cached prefix are never computed: leave it out",
    "enable-session-radix-cache": "rows of a cached prefix are never computed: leave it out",
    "enable-piecewise-cuda-graph": "prefill must run eagerly for its states to be seen: leave it out",
    "enforce-piecewise-cuda-graph": "prefill must run eagerly for its states to be seen: leave it out",
    "enable-symm-mem": "it uses NVLink multicast, with which capture was never tried: leave it out",
    "enable-torch-symm-mem": "it uses NVLink multicast, with which capture was never tried: leave it out",
    "enable-nccl-nvls": "it uses NVLink multicast, with which capture was never tried: leave it out",
}
_OFF = (False, 0, 1, "0", "1")


def own_flags(serve: ServeConfig, engine: EngineConfig, *, model_path: str, host: str, port: int) -> Flags:
    """What capture needs, in the order in which the command shows it."""
    flags: Flags = {"model-path": model_path, "host": host, "port": port}
    if serve.tensor_parallel > 1:
        flags["tp-size"] = serve.tensor_parallel
        flags["disable-custom-all-reduce"] = True
        # SGLang turns this fusion on by itself for many models.
        flags["enforce-disable-flashinfer-allreduce-fusion"] = True
    if engine.dtype != "auto":
        flags["dtype"] = engine.dtype
    if engine.device == "cpu":
        flags["device"] = "cpu"
    flags |= {
        "disable-radix-cache": True,
        "chunked-prefill-size": -1,
        "max-prefill-tokens": serve.max_prefill_tokens,
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "skip-server-warmup": True,
    }
    return flags


def extra_flags(extra: Mapping[str, Any]) -> Flags:
    """The flags of `engine.extra`, by the names that SGLang's own command line prefers."""
    spelled = {name.lstrip("-").replace("_", "-"): value for name, value in extra.items()}
    return {_ALIASES.get(name, name): value for name, value in spelled.items()}


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """The flags as words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, dict):
            words.append(_as_json(name, value))
        elif isinstance(value, list):
            words += [_as_json(name, item) if isinstance(item, dict) else str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def _as_json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except TypeError as error:
        raise ConfigError(f"engine.extra.{name}: {error}; write dates as text") from None


def contradictions(extra: Mapping[str, Any]) -> list[str]:
    """One line for each entry of `engine.extra` with which a server could not be captured from."""
    problems = SGLANG.secrets_in(extra)
    for name, value in extra_flags(extra).items():
        why = _why_not(name, value)
        if why is not None:
            problems.append(f"engine.extra.{name} = {value!r}: {why}")
    return problems


def _why_not(name: str, value: Any) -> str | None:
    if name in _SET_ELSEWHERE:
        return _SET_ELSEWHERE[name]
    if name == "disable-radix-cache":
        return None if value is True else "rows of a cached prefix are never computed: leave it out"
    if name == "enforce-disable-flashinfer-allreduce-fusion":
        return None if value is True else "auxiliary states would be one rank's partial sums: leave it out"
    if value is False:
        return None
    if name.startswith("speculative"):
        return "captured rows would be mixed with drafted ones: leave it out while capturing"
    if name in _CONTRADICTS:
        return _CONTRADICTS[name]
    if name == "pp-size" and value not in _OFF:
        return "pipeline parallelism splits the layers over processes: use serve.tensor_parallel"
    if name == "attn-dp-size" and value not in _OFF:
        return _CONTRADICTS["enable-dp-attention"]
    if name == "cuda-graph-backend-prefill" and value != "disabled":
        return "prefill must run eagerly for its states to be seen: leave it out"
    if name == "cuda-graph-config" and _prefill_backend(value) != "disabled":
        return "prefill must run eagerly for its states to be seen: give its prefill the backend 'disabled'"
    return None


def _prefill_backend(value: Any) -> str:
    """The backend that a `cuda-graph-config` gives to prefill; `disabled` where it gives none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return "unreadable"
    phase = value.get("prefill", {}) if isinstance(value, dict) else None
    return str(phase.get("backend", "disabled")) if isinstance(phase, dict) else "unreadable"
