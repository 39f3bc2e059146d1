"""The plugin's directory alone is enough for a server's own environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy
import torch
import xxhash

import eyas
from eyas.engine.sglang.deploy import MODULES, write_plugin

SOURCE = Path(eyas.__file__).parent
SERVER_HAS = {"torch", "numpy", "xxhash", "sglang"}
PROGRAM = """
import importlib.metadata, os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "httpx", "pyarrow", "transformers", "safetensors", "tokenizers", "typer",
                                  "rich", "jinja2", "tomli_w", "sglang"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
found = [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if e.name == "eyas"]
assert [str(e.dist.locate_file("")) for e in found] == [sys.argv[1]], found
assert not any(name.split(".")[0] in ("torch", "eyas") for name in sys.modules)
register = found[0].load()
register()  # without the launcher's variable: nothing
import eyas, eyas.engine.stager
assert eyas.__file__.startswith(sys.argv[1]), eyas.__file__
print(found[0].value, found[0].dist.version)
"""


def test_the_directory_alone_is_found_and_imported_by_a_server(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    write_plugin(plugin)
    write_plugin(plugin)  # again, over what is there
    # An installation that has what a server has, and nothing of ours.
    site = tmp_path / "site"
    site.mkdir()
    for package in Path(torch.__file__).parents[1].iterdir():
        if not package.name.lower().startswith(("eyas", "_eyas", "__editable__")) and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    for module in (torch, numpy, xxhash):
        assert (site / module.__name__).exists()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {[str(plugin), str(site)]!r}\n" + PROGRAM,
         str(plugin)],
        capture_output=True, text=True, check=False, env={"PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["eyas.engine.sglang.plugin:register", eyas.__version__]


def test_the_directory_holds_these_files(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    about = f"eyas-{eyas.__version__}.dist-info"
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        *(f"eyas/{module}" for module in MODULES), f"{about}/METADATA", f"{about}/entry_points.txt",
    }  # fmt: skip
    assert all((tmp_path / "eyas" / module).read_bytes() == (SOURCE / module).read_bytes() for module in MODULES)


def test_an_older_plugin_in_the_same_place_is_not_found_too(tmp_path: Path) -> None:
    old = tmp_path / "eyas-0.0.1.dist-info"
    old.mkdir()
    (old / "entry_points.txt").write_text("[sglang.srt.plugins]\neyas = eyas.old:register\n")
    (tmp_path / "eyas-notes").mkdir()
    write_plugin(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eyas", f"eyas-{eyas.__version__}.dist-info", "eyas-notes"]


def test_the_modules_import_each_other_and_what_a_server_has() -> None:
    """Inside functions too: what is imported late would fail late."""
    ours, others = set(), set()
    for module in MODULES:
        for node in ast.walk(ast.parse((SOURCE / module).read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None and node.level == 0
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                if name.split(".")[0] != "eyas":
                    others.add(name.split(".")[0])
                path = Path(*name.split(".")[1:])
                for candidate in (path.with_suffix(".py") if path.name else path, path / "__init__.py"):
                    if name.startswith("eyas") and (SOURCE / candidate).is_file():
                        ours.add(str(candidate))
    assert ours <= set(MODULES)
    assert others - set(sys.stdlib_module_names) <= SERVER_HAS
