"""One decoder layer by itself gives what the whole model gives there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from eyas.errors import ConfigError
from eyas.target.layer import TargetLayers
from eyas.values import median_row_error
from tiny_models import FAMILIES, save

REFUSED = {"gpt2"}
"""Absolute positions are added before the first layer, by weights that are not a layer's."""
RENAMED = {"qwen3_moe", "deepseek_v3", "mixtral"}
"""Families whose experts are stored one by one and held together: layers with experts are refused."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_layer_alone_gives_the_next_hidden_state(family: str, tmp_path: Path) -> None:
    path = save(family, tmp_path / family)
    layers = TargetLayers(path)
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    taken: list[torch.Tensor] = []
    structure_layers = layers._structure.blocks_name.removeprefix(layers._structure.trunk_name).lstrip(".")
    trunk = model.get_submodule(layers._structure.trunk_name)
    for block in trunk.get_submodule(structure_layers):
        block.register_forward_pre_hook(
            lambda _, a, kw: taken.append((a[0] if a else kw["hidden_states"]).clone()), with_kwargs=True
        )
    with torch.inference_mode():
        trunk(input_ids=ids, use_cache=False)
    hidden = [states[0].numpy() for states in taken]
    if family in RENAMED | REFUSED:
        for k in range(1, len(hidden)):
            try:
                found = layers.hidden_after(k, hidden[k - 1])
            except ConfigError as error:
                assert "cannot be run by itself" in str(error)
            else:
                assert median_row_error(found, hidden[k]) < 1e-5
        return
    for k in range(1, len(hidden)):
        assert layers.layer_bytes(k) > 0
        found = layers.hidden_after(k, hidden[k - 1])
        assert found.shape == hidden[k].shape
        assert median_row_error(found, hidden[k]) < 1e-5, k
        if k + 1 < len(hidden):
            assert median_row_error(found, hidden[k + 1]) > 1e-2
