"""SGLang's command line: our flags, then those of `engine.extra`, untouched; what contradicts capture is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.config import EngineConfig, ServeConfig
from eyas.engine.sglang.deploy import write_plugin
from eyas.engine.sglang.server import SGLANG
from eyas.serve.flags import Flags, Kind, Start, as_words, spelled

MODULE = "sglang.launch_server"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"
"""SGLang's list of the plugins that it may load; unset means all."""

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


def command(start: Start) -> list[str]:
    """What follows the interpreter."""
    flags = own_flags(start.serve, start.engine, model_path=str(start.model), host=start.host, port=start.port)
    flags |= extra_flags(start.engine.extra)
    if start.trust_remote_code:
        flags.setdefault("trust-remote-code", True)
    return ["-m", MODULE, *as_words(flags)]


def environment(settings: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the plugin needs on top of PYTHONPATH."""
    added = {"EYAS_CAPTURE": str(settings), "HF_HUB_OFFLINE": "1"}
    allowed = [name.strip() for name in inherited.get(PLUGINS_VARIABLE, "").split(",") if name.strip()]
    if allowed and "eyas" not in allowed:
        added[PLUGINS_VARIABLE] = ",".join([*allowed, "eyas"])
    return added


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
        # Else the idle scheduler spins, and keeps the interpreter from the threads that write what it staged last.
        "sleep-on-idle": True,
    }
    return flags


def extra_flags(extra: Mapping[str, Any]) -> Flags:
    """The flags of `engine.extra`, by the names that SGLang's own command line prefers."""
    return {_ALIASES.get(name, name): value for name, value in spelled(extra).items()}


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


KIND = Kind(
    dialect=SGLANG,
    write_plugin=write_plugin,
    command=command,
    contradictions=contradictions,
    environment=environment,
)
