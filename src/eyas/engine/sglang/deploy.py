"""What a server's own environment needs of eyas: a directory for its PYTHONPATH, with the plugin and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import eyas
from eyas.engine.room import StagingLimits

MODULES = (
    "__init__.py",
    "engine/__init__.py",
    "engine/pinned.py",
    "engine/room.py",
    "engine/staged.py",
    "engine/stager.py",
    "engine/sglang/__init__.py",
    "engine/sglang/arguments.py",
    "engine/sglang/plugin.py",
    "engine/sglang/taps.py",
)
"""They import torch, NumPy, xxhash and the standard library, and each other."""
ENTRY_POINTS = "[sglang.srt.plugins]\neyas = eyas.engine.sglang.plugin:register\n"


def write_plugin(dest: Path) -> None:
    """Put the plugin into `dest`, as a distribution that SGLang finds when `dest` is on PYTHONPATH."""
    source = Path(eyas.__file__).parent
    for module in MODULES:
        path = dest / "eyas" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((source / module).read_bytes())
    for old in dest.glob("eyas-*.dist-info"):
        # Two entry points would register the plugin twice.
        shutil.rmtree(old)
    about = dest / f"eyas-{eyas.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eyas\nVersion: {eyas.__version__}\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)


def write_settings(
    path: Path, staging: Path, aux_layers: tuple[int, ...] | None, limits: StagingLimits, *, num_threads: int = 4
) -> None:
    """The file that `EYAS_CAPTURE` names; see `plugin.Settings`."""
    body = {
        "staging": str(staging),
        "aux_layers": None if aux_layers is None else list(aux_layers),
        "staged_bytes": limits.staged_bytes,
        "min_free_bytes": limits.min_free_bytes,
        "pool_bytes": limits.pool_bytes,
        "num_threads": num_threads,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
