"""The plugin as SGLang's own environment needs it."""

from __future__ import annotations

from pathlib import Path

from eyas.engine.deploy import SHARED, write_modules

MODULES = (
    *SHARED,
    "engine/stager.py",
    "engine/sglang/__init__.py",
    "engine/sglang/arguments.py",
    "engine/sglang/plugin.py",
    "engine/sglang/taps.py",
)
ENTRY_POINTS = "[sglang.srt.plugins]\neyas = eyas.engine.sglang.plugin:register\n"


def write_plugin(dest: Path) -> None:
    """Put the plugin into `dest`, as a distribution that SGLang finds when `dest` is on PYTHONPATH."""
    write_modules(dest, MODULES, ENTRY_POINTS)
