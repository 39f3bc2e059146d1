"""The connector as vLLM's own environment needs it."""

from __future__ import annotations

from pathlib import Path

from eyas.engine.deploy import SHARED, write_modules

MODULES = (
    *SHARED,
    "engine/vllm/__init__.py",
    "engine/vllm/arguments.py",
    "engine/vllm/connector.py",
    "engine/vllm/scheduler.py",
    "engine/vllm/worker.py",
)


def write_plugin(dest: Path) -> None:
    """Put the connector into `dest`, importable where `dest` is on PYTHONPATH."""
    write_modules(dest, MODULES)
