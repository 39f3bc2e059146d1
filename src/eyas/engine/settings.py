"""What the launcher asks of a capture plugin: a small JSON file, written here and read inside the server.

Needs the standard library alone, beside what `room` needs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eyas.engine.room import StagingLimits


class CaptureSetupError(RuntimeError):
    """The server cannot capture as it was started; it ends."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the launcher asks of the plugin."""

    staging: Path
    aux_layers: tuple[int, ...] | None
    """Hidden-state indices; None = `[2, L//2, L-3]`."""
    limits: StagingLimits
    num_threads: int = 4

    @classmethod
    def read(cls, path: Path) -> Settings:
        """From the launcher's JSON. Raises CaptureSetupError."""
        try:
            body = json.loads(path.read_text())
            layers = body["aux_layers"]
            if not isinstance(layers, list | None):
                raise TypeError(f"aux_layers is {layers!r}")
            return cls(
                staging=Path(body["staging"]),
                aux_layers=None if layers is None else tuple(int(k) for k in layers),
                limits=StagingLimits(int(body["staged_bytes"]), int(body["min_free_bytes"]), int(body["pool_bytes"])),
                num_threads=int(body.get("num_threads", 4)),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CaptureSetupError(f"eyas: {path} cannot be read as capture settings: {error!r}") from None

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The auxiliary layers of a target of so many layers. Raises CaptureSetupError."""
        wanted = self.aux_layers
        if wanted is None:
            wanted = tuple(sorted({min(max(k, 0), num_layers) for k in (2, num_layers // 2, num_layers - 3)}))
        outside = [k for k in wanted if not 0 <= k <= num_layers]
        if outside or list(wanted) != sorted(set(wanted)):
            raise CaptureSetupError(
                f"eyas: aux_layers {list(wanted)} must ascend, without repeats, within 0..{num_layers}"
            )
        return wanted


def write_settings(
    path: Path, staging: Path, aux_layers: tuple[int, ...] | None, limits: StagingLimits, *, num_threads: int = 4
) -> None:
    """The file that the server's plugin reads."""
    body = {
        "staging": str(staging),
        "aux_layers": None if aux_layers is None else list(aux_layers),
        "staged_bytes": limits.staged_bytes,
        "min_free_bytes": limits.min_free_bytes,
        "pool_bytes": limits.pool_bytes,
        "num_threads": num_threads,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
