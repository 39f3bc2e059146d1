"""A target's directory: is everything there, what are its weights called, and which weights are they. Without torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from eyas.errors import ConfigError
from eyas.records import canonical_json, digest_bytes

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TARGET_TAG = b"eyas.target.1\0"

BLOCK_BYTES = 16 * 1024
MAX_BLOCKS = 16
"""Blocks sampled of one tensor at most."""
BLOCK_BUDGET = 32 * 1024
"""Blocks sampled of the whole target, as long as each tensor gets at least one: 512 MiB."""
MAX_HEADER_BYTES = 512 * 1024 * 1024

# Fields of config.json that say who wrote the file and how it is to be loaded, and nothing about values.
_CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes lie: `[start, end)` of `file`."""

    file: Path
    dtype: str
    """As safetensors spells it: `BF16`, `F32`, …"""
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """A target directory in which everything that loading needs is there."""

    path: Path
    config: Mapping[str, Any]
    """`config.json` as it stands."""
    weights: tuple[Path, ...]
    """The safetensors files that hold the weights, by name."""

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of `config.json` that is about the language model, where the target is multimodal."""
        part = self.config.get("text_config")
        return part if isinstance(part, Mapping) and part else self.config

    @property
    def config_digest(self) -> str:
        """Digest of `config.json` without the fields that cannot change a value."""
        return digest_bytes(canonical_json({k: v for k, v in self.config.items() if k not in _CONFIG_NOISE}))


def open_target(path: Path) -> TargetFiles:
    """The target at `path`, after looking at its directory, `config.json` and index but not at its weights.

    Raises ConfigError, one line, when something that loading needs is missing or broken.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "no such directory"
        raise ConfigError(
            f"target {path}: {what}; target.path names a directory with config.json and safetensors weights"
        )
    config = _read_json(path / CONFIG, path)
    return TargetFiles(path=path, config=config, weights=_weight_files(path))


def tensor_entries(files: TargetFiles) -> dict[str, TensorEntry]:
    """Every tensor of the target by name, from the headers of its weight files alone.

    Raises ConfigError when a file is truncated, is not safetensors, or when two files hold a tensor of the same name.
    """
    entries: dict[str, TensorEntry] = {}
    for file in files.weights:
        for name, entry in _header(file).items():
            if name in entries:
                raise ConfigError(
                    f"target {files.path}: tensor '{name}' is in {entries[name].file.name} and in {file.name}"
                )
            entries[name] = entry
    return entries


def target_digest(path: Path) -> str:
    """Which weights these are: xxh3-128 over all tensors of the target in the order of their names.

    Covered: name, dtype, shape and byte size of every tensor, and of its bytes `n` evenly spread blocks of 16 KiB, or
    all bytes where it has no more than that. `n` is 32768 divided by the number of tensors, within 1..16: at most
    512 MiB are read, or 16 KiB a tensor where there are more than 32 thousand. Not covered: bytes between the blocks,
    `config.json`, the tokenizer, how tensors are spread over files and in which order, names and times of files. So it
    tells checkpoints apart and recognises one that was copied or sharded anew; it does not prove that a disk kept every
    byte.
    """
    entries = tensor_entries(open_target(path))
    blocks = max(1, min(MAX_BLOCKS, BLOCK_BUDGET // max(1, len(entries))))
    parts: dict[str, bytes] = {}
    by_file: dict[Path, list[str]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        with file.open("rb", buffering=0) as f:
            for name in sorted(names, key=lambda n: entries[n].start):
                parts[name] = _tensor_digest(f, entries[name], blocks)
    digest = xxhash.xxh3_128(TARGET_TAG)
    for name in sorted(parts):
        entry = entries[name]
        digest.update(canonical_json([name, entry.dtype, list(entry.shape), entry.end - entry.start]))
        digest.update(parts[name])
    return str(digest.hexdigest())


def quantisation(config: Mapping[str, Any]) -> str:
    """How the weights of a `config.json` are quantised: `none`, or the method that its `quantization_config` names."""
    for holder in (config, config.get("text_config") or {}):
        value = holder.get("quantization_config") or holder.get("compression_config")
        if value:
            method = value.get("quant_method") or value.get("quantization_method") or "unnamed"
            return str(method)
    return "none"


def check_remote_code(files: TargetFiles, *, trust_remote_code: bool, shipped: bool = False) -> None:
    """Raises ConfigError when loading the target needs Python code that it brings along and nobody allowed it to run.

    `shipped`: transformers has its own code for this kind of model, which is then used, and the target's is not.
    """
    if files.config.get("auto_map") and not trust_remote_code and not shipped:
        raise ConfigError(
            f"target {files.path}: {CONFIG} has auto_map, so loading it runs Python code from that directory; "
            "read the code, then set target.trust_remote_code = true"
        )


def _read_json(file: Path, target: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"target {target}: no {file.name}; is this the directory of a model?") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"target {target}: {file.name} is not valid JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"target {target}: {file.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"target {target}: {file.name} holds a JSON {type(value).__name__}, not an object")
    return value


def _weight_files(path: Path) -> tuple[Path, ...]:
    """As transformers looks for them: one file, else the index, else whatever safetensors files there are."""
    if (path / SINGLE).is_file():
        return (path / SINGLE,)
    if (path / INDEX).is_file():
        weight_map = _read_json(path / INDEX, path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"target {path}: {INDEX} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"target {path}: {INDEX} names {len(names)} files, missing: {', '.join(missing[:3])}{more}; "
                "finish the download"
            )
        return tuple(path / name for name in names)
    found = tuple(sorted(path.glob("*.safetensors")))
    if not found:
        raise ConfigError(f"target {path}: no *.safetensors weights; other formats (.bin, .pt, .gguf) are not read")
    return found


def _header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as f:
        prefix = f.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ConfigError(
                f"target weights {file}: not a complete safetensors file ({size} bytes); finish the download"
            )
        raw = f.read(length)
    data_start = 8 + length
    entries: dict[str, TensorEntry] = {}
    try:
        header = json.loads(raw)
        for name, value in header.items():
            if name == "__metadata__":
                continue
            start, end = value["data_offsets"]
            shape = tuple(int(n) for n in value["shape"])
            entries[name] = TensorEntry(
                file, str(value["dtype"]), shape, data_start + int(start), data_start + int(end)
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"target weights {file}: broken safetensors header: {error}") from None
    last = max((entry.end for entry in entries.values()), default=data_start)
    if any(not data_start <= entry.start <= entry.end for entry in entries.values()) or last > size:
        raise ConfigError(f"target weights {file}: {size} bytes, but its header names {last}; finish the download")
    return entries


def _tensor_digest(f: BinaryIO, entry: TensorEntry, blocks: int) -> bytes:
    num_bytes = entry.end - entry.start
    digest = xxhash.xxh3_128()
    if num_bytes <= blocks * BLOCK_BYTES:
        digest.update(_pread(f, num_bytes, entry))
    else:
        for i in range(blocks):
            # The middle of the i-th of `blocks` equal stripes.
            offset = (2 * i + 1) * (num_bytes - BLOCK_BYTES) // (2 * blocks)
            digest.update(_pread(f, BLOCK_BYTES, entry, offset))
    return bytes(digest.digest())


def _pread(f: BinaryIO, num_bytes: int, entry: TensorEntry, offset: int = 0) -> bytes:
    data = os.pread(f.fileno(), num_bytes, entry.start + offset) if num_bytes else b""
    if len(data) != num_bytes:
        raise ConfigError(
            f"target weights {entry.file}: {num_bytes} bytes expected at {entry.start + offset}, read {len(data)}"
        )
    return data
