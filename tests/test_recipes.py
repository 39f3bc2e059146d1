"""Recipes are configurations that load, and their arithmetic holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas import config

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
WIDTHS = {
    "8b-eight-gpus-vllm": (4096, 32_768),
    "8b-one-gpu": (4096, 32_768),
    "kimi-k2.5-eight-gpus": (7168, 57_344),
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_its_largest_sample_fits(path: Path) -> None:
    tree = config.load(path)
    width, told = WIDTHS[path.stem]
    assert tree.capture.aux_layers is not None
    bytes_per_token = (len(tree.capture.aux_layers) + 1) * width * 2
    assert bytes_per_token == told and f"{told:,} bytes a token" in path.read_text()
    largest = tree.data.max_tokens * (bytes_per_token + 4)
    assert tree.serve.staging_bytes is not None
    assert largest <= tree.serve.staging_bytes
    assert largest <= tree.capture.in_flight_bytes <= tree.serve.staging_bytes * max(1, len(tree.engine.urls))
    assert tree.serve.max_prefill_tokens * bytes_per_token <= tree.serve.pool_bytes
