"""Which drafter is meant, the training it came from, and where what is found out about it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError
from eyas.model.checkpoint import CONFIG
from eyas.store.files import raise_store_error, replace
from eyas.train.checkpoint import BEST, CHECKPOINTS, DRAFT, LATEST, STATE

EVALUATION = "evaluation.json"
DECODING = "decoding.json"
"""What an evaluation leaves beside a drafter: from captured states, from real decoding."""


def find_draft(given: Path | None, run: Path | None) -> Path:
    """The directory of a drafter: `given`, which may also be a checkpoint or a training, else the best one of `run`.

    Links are followed, so that the name is that of the step. ConfigError where there is none.
    """
    if given is None and run is None:
        raise ConfigError("which drafter? give --draft DIR, or train.out for the best checkpoint of a training")
    root = given if given is not None else run
    assert root is not None
    best, latest = (root / CHECKPOINTS / name / DRAFT for name in (BEST, LATEST))
    for directory in (root, root / DRAFT, best, latest):
        if (directory / CONFIG).is_file():
            return directory.resolve()
    raise ConfigError(
        f"{root}: holds no drafter: neither {CONFIG} nor {CHECKPOINTS}/{BEST}/{DRAFT}/{CONFIG}; "
        + ("run 'eyas train' first, or give --draft DIR" if given is None else "give the directory of a checkpoint")
    )


def training_of(draft: Path) -> Path | None:
    """The directory of the training that a drafter's directory lies in; None where it is of none of ours."""
    checkpoint = draft.parent
    return checkpoint.parent.parent if (checkpoint / STATE).is_file() else None


def beside(draft: Path, name: str) -> Path:
    """Where a finding about `draft` is written: beside our own checkpoint's state, inside of another's directory."""
    return (draft.parent if (draft.parent / STATE).is_file() else draft) / name


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Put `value` as JSON at `path`, all at once. StoreError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), durable=True)
    except OSError as error:
        raise_store_error(error, path, "writing what the evaluation found; name another file with --out")
