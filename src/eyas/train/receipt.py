"""What a training came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.log import human_time
from eyas.train.metrics import Summary


@dataclass(frozen=True, slots=True)
class TrainReceipt:
    """What a training came to."""

    out: str
    steps: int
    tokens: int
    """Tokens of all packs, over all epochs and starts."""
    seconds: float
    """Of this start."""
    tokens_per_s: float
    waited: float
    """Share of this start's time in which it waited for data."""
    summary: Summary | None
    """Of the held-out samples, at the best checkpoint."""
    baselines: Mapping[str, Any] | None
    best: str
    best_step: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        value = dataclasses.asdict(self)
        return value | {"summary": None if self.summary is None else self.summary.to_json()}

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.out}: {self.steps:,} steps, {self.tokens:,} tokens · {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.waited:.1%} of the time waiting for data · {human_time(self.seconds)}"
        ]
        if self.summary is not None:
            lines += [f"held out, at the best checkpoint (step {self.best_step:,}):", *self.summary.lines()]
        if self.baselines and self.baselines.get("rows"):
            lines.append(
                f"step-0 accuracy by guessing: unigram {self.baselines['unigram']:.3f}, "
                f"bigram {self.baselines['bigram']:.3f}"
            )
        return [*lines, f"best     {self.best}", *(f"page     {name}" for name in self.files), *self.notes]
