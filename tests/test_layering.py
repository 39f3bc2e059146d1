"""Dependencies point down: rooms on one level do not import each other, and `eyas --help` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import eyas

SOURCE = Path(eyas.__file__).parent
LEVELS: list[set[str]] = [
    {"errors", "records", "log"},
    {"config", "connections", "files", "values"},
    {"target"},
    {"data", "store", "engine", "model", "observe"},
    {"generate", "capture", "serve", "train"},
    {"evaluate", "export"},  # share the pass, the samples and the tally with the training
    {"doctor"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
SAME_LEVEL_ALLOWED = {("records", "errors"), ("log", "errors"), ("records", "log")}
FORBIDDEN_NAMES = {"utils", "common", "core", "helpers", "misc"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Rooms that a module imports, also inside functions and under TYPE_CHECKING."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("eyas.")}
    return rooms


MODULES = sorted(p for p in SOURCE.rglob("*.py") if p.name != "__init__.py" or p.parent != SOURCE)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_imports_only_from_below(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no level: add it to LEVELS"
    for other in imports_of(path) - {room, "__version__"}:
        below = LEVEL[other] < LEVEL[room]
        assert below or (room, other) in SAME_LEVEL_ALLOWED, f"{path}: {room} must not import {other}"


def test_no_room_without_a_subject() -> None:
    names = {p.stem for p in SOURCE.rglob("*.py")} | {p.name for p in SOURCE.iterdir() if p.is_dir()}
    assert not names & FORBIDDEN_NAMES


def test_pickle_and_prints_are_nowhere() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not {"pickle", "dill", "cloudpickle", "shelve"} & set(modules), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", path


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys, eyas.cli\n"
        "try:\n    eyas.cli.app(['--help'], standalone_mode=False)\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
