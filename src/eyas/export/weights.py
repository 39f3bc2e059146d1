"""The tensors of a weight file, bit by bit: read, compared, digested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from eyas.errors import ConfigError
from eyas.records import canonical_json

WEIGHTS_TAG = b"eyas.draft.1\0"


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the directory's weight files, under its name there. ConfigError, one line, naming the file."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory}: no *.safetensors weights")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 - not a mapping
                    if name in found:
                        raise ConfigError(f"{file}: '{name}' is in another file, too")
                    found[name] = f.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: not a complete safetensors file: {error}") from None
    return found


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3-128 over name, dtype, shape and bytes of every tensor, in the order of their names."""
    digest = xxhash.xxh3_128(WEIGHTS_TAG)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(canonical_json([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]))
        digest.update(bits(tensor).numpy().data)
    return str(digest.hexdigest())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of one dtype and shape, and equal byte by byte."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: equal where the numbers are the same numbers, NaN and the sign of zero included."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
