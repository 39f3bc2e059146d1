"""A run's checkpoints, complete or not there: the drafter as engines load it, the optimizer, and the state, last."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyas.errors import OutOfSpace, TrainError
from eyas.files import fsync_path
from eyas.model import checkpoint as engine_layout
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.vocab_map import VocabMap

CHECKPOINTS = "checkpoints"
DRAFT = "draft"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
LATEST, BEST = "latest", "best"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands, beside weights and moments. The order of the data follows from `step` and the seed alone."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens of all packs so far."""
    best_score: float | None
    """The best acceptance length on held-out samples so far, and the step that had it."""
    best_step: int | None
    settings: Mapping[str, Any]
    """What decides the weights: another setting is another run."""
    format_version: int = FORMAT_VERSION


def step_directory(out: Path, step: int) -> Path:
    return out / CHECKPOINTS / f"{step:08d}"


def save(
    out: Path,
    draft: Eagle3Draft,
    vocab_map: VocabMap,
    moments: Mapping[str, torch.Tensor],
    state: TrainState,
    *,
    target_config: Mapping[str, Any],
    about: Mapping[str, Any],
) -> Path:
    """Write a checkpoint under a temporary name and rename it; an equal one that is there already stays.

    `moments`: the optimizer's tensors by name; `about`: plain JSON for the drafter's config.json.
    """
    final = step_directory(out, state.step)
    if (final / STATE).is_file():
        return final
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        for leftover in (temporary, final):
            if leftover.exists():
                shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        engine_layout.save(
            draft, vocab_map, temporary / DRAFT, target_config=target_config, dtype="float32", extra=about
        )
        save_file({name: t.detach().cpu().contiguous() for name, t in moments.items()}, temporary / OPTIMIZER)
        (temporary / STATE).write_text(json.dumps(asdict(state), indent=2, sort_keys=True) + "\n")
        for name in (OPTIMIZER, STATE):
            fsync_path(temporary / name)
        fsync_path(temporary)
        temporary.rename(final)
        fsync_path(final.parent)
    except (OSError, SafetensorError, OutOfSpace) as error:
        raise _not_written(final, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def point(out: Path, name: str, step: int) -> None:
    """Let `checkpoints/latest` or `checkpoints/best` be the one of `step`, in one rename."""
    link = out / CHECKPOINTS / name
    temporary = link.with_name(f".{name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"{step:08d}")
        temporary.rename(link)
        fsync_path(link.parent)
    except OSError as error:
        raise _not_written(link, error) from None


def prune(out: Path, keep: int) -> None:
    """Remove all but the `keep` latest checkpoints and the best one, and what interrupted writes left."""
    root = out / CHECKPOINTS
    kept = {_target(root / LATEST), _target(root / BEST)}
    steps = sorted(p.name for p in root.iterdir() if p.name.isdigit() and p.is_dir() and not p.is_symlink())
    for name in [*(s for s in steps[:-keep] if s not in kept), *(p.name for p in root.glob(".*.tmp"))]:
        path = root / name
        if path.is_symlink():
            path.unlink()
        else:
            # Its record first: what is half removed is no checkpoint.
            (path / STATE).unlink(missing_ok=True)
            shutil.rmtree(path)


def latest(out: Path) -> Path | None:
    """The newest complete checkpoint, by its step; None where there is none yet."""
    root = out / CHECKPOINTS
    if not root.is_dir():
        return None
    found = [p for p in root.iterdir() if p.name.isdigit() and (p / STATE).is_file()]
    return max(found, key=lambda p: int(p.name), default=None)


def read_state(directory: Path) -> TrainState:
    """TrainError, naming the file, where it cannot be read or is newer than this eyas."""
    path = directory / STATE
    try:
        value = json.loads(path.read_text())
        version = value["format_version"]
        if version > FORMAT_VERSION:
            raise TrainError(f"{path}: format version {version}, this eyas knows {FORMAT_VERSION}; use a newer one")
        state = TrainState(**value)
        if state.step != int(directory.name):
            raise ValueError(f"it is of step {state.step!r}")
        if not (isinstance(state.tokens, int) and isinstance(state.settings, dict)):
            raise ValueError("tokens or settings are of another type")
        return state
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainError(
            f"{path}: cannot be read ({error}); remove {directory} to go on from the checkpoint before it"
        ) from None


def read_moments(directory: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, which must be those of `like` by name and shape. TrainError otherwise."""
    path = directory / OPTIMIZER
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    except (OSError, SafetensorError) as error:
        raise TrainError(
            f"{path}: cannot be read ({error}); remove {directory} to go on from the checkpoint before it"
        ) from None
    differ = [n for n in sorted(found.keys() | like.keys()) if n not in found or n not in like]
    differ += [n for n in found.keys() & like.keys() if found[n].shape != like[n].shape]
    if differ:
        raise TrainError(f"{path}: does not fit the drafter: {', '.join(differ[:3])}")
    return found


def _not_written(path: Path, error: OSError | SafetensorError | OutOfSpace) -> OutOfSpace | TrainError:
    """safetensors has the system's error in its words only."""
    full = isinstance(error, OutOfSpace) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left" in str(error):
        return OutOfSpace(f"{path}: no space left to write it; free some, then run the same command again", path=path)
    what = getattr(error, "strerror", None) or error
    return TrainError(f"{path}: not written: {what}")


def _target(link: Path) -> str:
    return link.readlink().name if link.is_symlink() else ""
