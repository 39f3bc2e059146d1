"""From configuration to a server's command line and environment, or to a list of what does not fit."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from eyas.config import CaptureConfig, EngineConfig, ServeConfig, TargetConfig
from eyas.engine.dialect import require_no_password
from eyas.errors import ConfigError
from eyas.records import DTYPE_BYTES, default_aux_layers
from eyas.serve import sglang, vllm
from eyas.serve.flags import Kind, Start
from eyas.target.files import TargetFiles, open_target

KINDS: Mapping[str, Kind] = {"sglang": sglang.KIND, "vllm": vllm.KIND}
"""By `engine.kind`."""
CLIENT_SHARE = 0.9
"""Of the quota, as much as one capturing process uses."""


@dataclass(frozen=True, slots=True)
class Places:
    """What a server leaves in the data set's directory, under `server/`."""

    root: Path

    @property
    def plugin(self) -> Path:
        """On the server's PYTHONPATH."""
        return self.root / "plugin"

    @property
    def settings(self) -> Path:
        """What the plugin is asked for."""
        return self.root / "capture.json"

    @property
    def log(self) -> Path:
        """What all its servers said, one after the other; what is long ago lies beside it, and longer ago nowhere."""
        return self.root / "server.log"

    @property
    def heartbeat(self) -> Path:
        return self.root / "heartbeat.json"

    @property
    def config(self) -> Path:
        """The resolved configuration of the latest start."""
        return self.root / "run.toml"


def places_of(out: Path) -> Places:
    """Where the server of the data set `out` has its files."""
    return Places(out / "server")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server that can be started: everything is decided, nothing is written yet."""

    kind: Kind
    url: str
    host: str
    port: int
    target: TargetFiles
    aux_layers: tuple[int, ...]
    bytes_per_token: int | None
    """Of one sample's states; None where the target does not tell its dtype."""
    staging: Path
    places: Places
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """What is added to the environment of whoever starts it."""
    serve: ServeConfig
    max_tokens: tuple[str, int] | None
    """The longest sample that the server will take, and the field that says so; None where it is not known before."""

    def shell(self) -> str:
        """The command for a shell, on one line."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join(["env", *settings, *self.argv])


def plan_server(
    serve: ServeConfig,
    engine: EngineConfig,
    target: TargetConfig,
    capture: CaptureConfig,
    *,
    inherited: Mapping[str, str] = os.environ,
) -> ServerPlan:
    """Decide how the server is started. Raises ConfigError, one line for each problem that can be seen beforehand."""
    problems: list[str] = []
    kind = KINDS.get(engine.kind)
    if kind is None:
        problems.append(
            f'engine.kind is "{engine.kind}": set it to "sglang" or "vllm", or capture will not ask the server'
        )
    host, port = "", 0
    try:
        host, port = address(engine.url)
    except ConfigError as error:
        problems.append(str(error))
    if capture.out is None:
        problems.append("capture.out is not set; give it in the run file or as capture.out=PATH")
    files: TargetFiles | None = None
    if target.path is None:
        problems.append("target.path is not set; give it in the run file or as target.path=PATH")
    else:
        try:
            files = open_target(target.path)
        except ConfigError as error:
            problems.append(f"target.path: {error}")
    aux_layers = capture.aux_layers
    if files is not None:
        num_layers = files.text_config.get("num_hidden_layers")
        if isinstance(num_layers, int):
            aux_layers = default_aux_layers(num_layers) if aux_layers is None else aux_layers
            if list(aux_layers) != sorted(set(aux_layers)) or any(not 0 <= k <= num_layers for k in aux_layers):
                problems.append(
                    f"capture.aux_layers is {list(aux_layers)}: it must ascend, without repeats, within 0..{num_layers}"
                )
    python = interpreter(serve.python)
    if python is None:
        problems.append(
            f"serve.python: no interpreter {serve.python}; give the path of the python that has the server installed"
        )
    if kind is not None:
        problems += kind.contradictions(engine.extra)
    if problems or kind is None or files is None or capture.out is None or python is None:
        raise ConfigError("\n".join(problems))
    places = places_of(capture.out)
    start = Start(
        serve=serve,
        engine=engine,
        model=files.path,
        files=files,
        trust_remote_code=target.trust_remote_code,
        host=host,
        port=port,
        python=python,
        aux_layers=aux_layers or (),
        settings=places.settings.absolute(),
    )
    return ServerPlan(
        kind=kind,
        url=engine.url.rstrip("/"),
        host=host,
        port=port,
        target=files,
        aux_layers=aux_layers or (),
        bytes_per_token=bytes_per_token(files, _dtype(engine), aux_layers or ()),
        staging=serve.staging if serve.staging is not None else Path(f"/dev/shm/eyas-{port}"),
        places=places,
        argv=(str(python), *kind.command(start)),
        environment=environment(kind, places, inherited),
        serve=serve,
        max_tokens=kind.max_tokens(engine.extra, files),
    )


def address(url: str) -> tuple[str, int]:
    """Host and port of `engine.url`. Raises ConfigError."""
    require_no_password(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or not port or parts.scheme != "http" or parts.path not in ("", "/"):
        raise ConfigError(f"engine.url is '{url}': give it as http://HOST:PORT, a port of 1 or more")
    return host, port


def interpreter(python: str | None) -> Path | None:
    """The interpreter, its own links left alone: a virtual environment's python is one. None where there is none."""
    found = shutil.which(str(Path(python).expanduser()) if python is not None else sys.executable)
    return Path(found).absolute() if found else None


def absolute(python: str | None, base: Path) -> str | None:
    """`serve.python` as it can be saved: a path is relative to `base`, a name is looked for on PATH."""
    if python is None or os.sep not in python:
        return python
    return str(base / Path(python).expanduser())  # its links left alone


def _dtype(engine: EngineConfig) -> str:
    """The dtype that the server is asked for."""
    return str(engine.extra.get("dtype", engine.dtype))


def environment(kind: Kind, places: Places, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the server needs on top of the environment that it inherits."""
    path = [str(places.plugin.absolute()), *filter(None, [inherited.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), **kind.environment(places.settings.absolute(), inherited)}


def bytes_per_token(files: TargetFiles, dtype: str, aux_layers: tuple[int, ...]) -> int | None:
    """What one token of a sample takes in the staging directory; None where it cannot be told from the files."""
    config = files.text_config
    if dtype == "auto":
        told = [holder.get(key) for holder in (config, files.config) for key in ("dtype", "torch_dtype")]
        dtype = next((str(value) for value in told if value), "")
    hidden_size = config.get("hidden_size")
    if dtype not in DTYPE_BYTES or not isinstance(hidden_size, int):
        return None
    return (len(aux_layers) + 1) * hidden_size * DTYPE_BYTES[dtype] + 8


def quota_problem(plan: ServerPlan, staging_bytes: int, largest_tokens: int) -> str | None:
    """Why a sample of `largest_tokens` could never pass through the staging directory; None when it can."""
    if plan.bytes_per_token is None:
        return None
    need = round(plan.bytes_per_token * largest_tokens / CLIENT_SHARE)
    if need <= staging_bytes:
        return None
    return (
        f"serve.staging_bytes: the largest sample has {largest_tokens:,} tokens and needs a quota of {need:,} bytes in "
        f"{plan.staging}, it has {staging_bytes:,}; raise it, free shared memory, or lower data.max_tokens"
    )


def context_problem(plan: ServerPlan, largest_tokens: int) -> str | None:
    """Why a sample of `largest_tokens` is too long for the server itself; None when it is not, or nobody knows."""
    if plan.max_tokens is None or largest_tokens <= plan.max_tokens[1]:
        return None
    field, limit = plan.max_tokens
    return (
        f"{field}: the largest sample has {largest_tokens:,} tokens, {plan.kind.dialect.title} takes {limit:,} and "
        "generates one; raise it, or lower data.max_tokens"
    )
