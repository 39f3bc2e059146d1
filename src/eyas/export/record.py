"""What an export says of itself: from what it was made, and the digests of what it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eyas
from eyas.errors import ConfigError
from eyas.model.shape import DraftShape

RECORD = "export.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """`export.json`. Digests are xxh3-128; `unknown` where nothing says it."""

    engine: str
    dtype: str
    shape: Mapping[str, Any]
    num_draft_tokens: int
    embedding_dtype: str | None
    """Of the target's embedding, as safetensors spells it; None where it is not written."""
    target_digest: str
    """Of the target that the export was made with."""
    captured_digest: str
    """Of the target whose states the drafter was trained on."""
    quantisation: str
    """Of the target that the export was made with."""
    target_name: str | None
    source: str
    """The drafter that was exported, relative to the export."""
    source_weights: str
    weights: str
    """Digest of the weight file's tensors."""
    config: str
    """Digest of config.json's bytes."""
    eyas: str = eyas.__version__
    format_version: int = FORMAT_VERSION

    def draft_shape(self) -> DraftShape:
        return DraftShape(**{**self.shape, "aux_layers": tuple(self.shape["aux_layers"])})

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def read_record(directory: Path) -> ExportRecord | None:
    """The record of an export; None where there is none. ConfigError where it cannot be understood."""
    path = directory / RECORD
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format_version"] > FORMAT_VERSION:
            raise ConfigError(
                f"{path}: format version {value['format_version']}, this eyas knows {FORMAT_VERSION}; use a newer one"
            )
        # What a later version adds is left aside.
        record = ExportRecord(**{f.name: value[f.name] for f in dataclasses.fields(ExportRecord)})
        record.draft_shape()
        if not isinstance(record.source, str):
            raise TypeError(f"source is {record.source!r}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); export the drafter again") from None
    return record
