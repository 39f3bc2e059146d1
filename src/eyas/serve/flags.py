"""Flags of a server's command line, and what `serve` must know of an engine to start its servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config import EngineConfig, ServeConfig
from eyas.engine.dialect import Dialect
from eyas.errors import ConfigError
from eyas.serve import causes
from eyas.target.files import TargetFiles

Flags = dict[str, Any]
"""Values by flag, spelled with hyphens: True is a flag without a value, False one that is left out."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a server's command line is made from."""

    serve: ServeConfig
    engine: EngineConfig
    model: Path
    files: TargetFiles
    trust_remote_code: bool
    host: str
    port: int
    python: Path
    aux_layers: tuple[int, ...]
    settings: Path
    """Where the plugin's settings will be."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How servers of one engine are started. What it does may raise ConfigError, one line for each problem."""

    dialect: Dialect
    write_plugin: Callable[[Path], None]
    """Put what the server imports into a directory for its PYTHONPATH."""
    command: Callable[[Start], list[str]]
    """What follows the interpreter."""
    contradictions: Callable[[Mapping[str, Any]], list[str]]
    """One line for each entry of `engine.extra` with which a server could not be captured from."""
    environment: Callable[[Path, Mapping[str, str]], dict[str, str]]
    """What is added, beside PYTHONPATH, for settings at a path, to what is inherited."""
    last_words: int = causes.LINES
    """Lines of the log's end in which the cause of an end stands."""
    max_tokens: Callable[[Mapping[str, Any], TargetFiles], tuple[str, int] | None] = lambda extra, files: None
    """The longest sample that the server will take, and the field that says so; None where it is not known before."""


def spelled(extra: Mapping[str, Any]) -> Flags:
    """The entries of `engine.extra` with hyphens and without dashes before them.

    What follows a dot is a field of that flag's value, and stays as it is.
    """
    parts = {name: name.lstrip("-").partition(".") for name in extra}
    return {flag.replace("_", "-") + dot + entry: extra[name] for name, (flag, dot, entry) in parts.items()}


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
