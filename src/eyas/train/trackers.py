"""Curves in TensorBoard and Weights & Biases, for those who have them: the same numbers as `events.jsonl`."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Trackers:
    """Whatever is installed and asked for; nothing where that is nothing."""

    def __init__(self, out: Path, *, wandb_project: str, settings: Mapping[str, Any]) -> None:
        """TensorBoard's files lie in `out/tensorboard`; Weights & Biases only where `wandb_project` names a project."""
        self._board: Any = None
        self._wandb: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"))
        if wandb_project:
            if importlib.util.find_spec("wandb") is None:
                logger.warning("train.wandb_project is set, but wandb is not installed: nothing is sent to it")
            else:
                wandb: Any = importlib.import_module("wandb")
                self._wandb = wandb.init(project=wandb_project, dir=str(out), config=dict(settings), resume="allow")

    def add(self, values: Mapping[str, float | None], step: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(known, step=step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
