"""What a server's own environment needs of eyas: a directory for its PYTHONPATH, with a plugin and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import eyas

SHARED = (
    "__init__.py",
    "engine/__init__.py",
    "engine/pinned.py",
    "engine/room.py",
    "engine/settings.py",
    "engine/staged.py",
)
"""What every plugin needs. They import torch, NumPy, xxhash and the standard library, and each other."""


def write_modules(dest: Path, modules: Sequence[str], entry_points: str = "") -> None:
    """Put modules of eyas into `dest`, as a distribution that is found when `dest` is on PYTHONPATH. Raises OSError."""
    source = Path(eyas.__file__).parent
    for module in modules:
        path = dest / "eyas" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((source / module).read_bytes())
    for old in dest.glob("eyas-*.dist-info"):
        # Two entry points would register the plugin twice.
        shutil.rmtree(old)
    about = dest / f"eyas-{eyas.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eyas\nVersion: {eyas.__version__}\n")
    if entry_points:
        (about / "entry_points.txt").write_text(entry_points)
