"""Fixtures of many files; a file that needs another one defines its own under the name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from eyas.target.head import TargetHead


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    import tiny_models

    return tiny_models.save("llama", tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="module")
def head(target: Path) -> TargetHead:
    """Its last norm and output matrix."""
    from eyas.target.head import TargetHead

    return TargetHead.load(target)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a stage writes; not there yet."""
    return tmp_path / "out"
