"""A target's directory: what is refused and how, and what its digest does and does not depend on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from eyas.errors import ConfigError
from eyas.target.files import INDEX, check_remote_code, open_target, quantisation, target_digest, tensor_entries

RNG = np.random.default_rng(0)
TENSORS = {
    "model.norm.weight": RNG.standard_normal(64, dtype=np.float32),
    "lm_head.weight": RNG.standard_normal((3000, 64), dtype=np.float32),
    "model.embed.weight": RNG.standard_normal((40, 64), dtype=np.float32),
}


def write_target(path: Path, tensors: dict[str, np.ndarray] = TENSORS, shards: int = 1) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = sorted(tensors, reverse=True)
    weight_map = {}
    for i in range(shards):
        part = {name: tensors[name] for name in names[i::shards]}
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tensor_entries(open_target(path))
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in (str(path), *words)), text


def test_missing_directory_is_one_clear_line(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "no such directory")


def test_a_file_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert_refused(tmp_path / "f", "not a directory")


def test_directory_without_config(tmp_path: Path) -> None:
    assert_refused(tmp_path, "no config.json")


@pytest.mark.parametrize(("text", "word"), [("{", "not valid JSON"), ("[]", "list"), ("\udcff", "cannot be read")])
def test_broken_config(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(tmp_path, "config.json", word)


def test_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_refused(tmp_path, "no *.safetensors weights")


def test_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", shards=3)
    (path / "model-00001-of-00003.safetensors").unlink()
    assert_refused(path, "model-00001-of-00003.safetensors", "3 files")


def test_truncated_weights(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert_refused(path, "finish the download")
    os.truncate(file, 5)
    assert_refused(path, "finish the download")


def test_absurd_header_size_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    file = path / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    assert_refused(path, "safetensors")


def test_digest_depends_on_neither_sharding_nor_name_nor_time(tmp_path: Path) -> None:
    one = write_target(tmp_path / "one")
    three = write_target(tmp_path / "elsewhere" / "three", shards=3)
    os.utime(one / "model.safetensors", (1, 1))
    assert target_digest(one) == target_digest(three)


def test_digest_is_pinned(tmp_path: Path) -> None:
    tensors = {"a": np.arange(8, dtype=np.float32), "b": np.arange(200_000, dtype=np.int32).reshape(2, -1)}
    assert target_digest(write_target(tmp_path / "t", tensors)) == "cbad17b1cd028fa0c4c396768f385d34"


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_digest_changes_with_any_tensor(tmp_path: Path, name: str) -> None:
    other = {**TENSORS, name: TENSORS[name] + 1}
    assert target_digest(write_target(tmp_path / "a")) != target_digest(write_target(tmp_path / "b", other))


def test_digest_changes_with_name_dtype_and_shape(tmp_path: Path) -> None:
    variants = [
        TENSORS,
        {("head" if n == "lm_head.weight" else n): t for n, t in TENSORS.items()},
        {n: t.view(np.int32) for n, t in TENSORS.items()},
        {n: t.reshape(-1) for n, t in TENSORS.items()},
    ]
    digests = {target_digest(write_target(tmp_path / str(i), v)) for i, v in enumerate(variants)}
    assert len(digests) == len(variants)


def test_quantisation_is_named() -> None:
    assert quantisation({}) == "none"
    assert quantisation({"quantization_config": {"quant_method": "fp8"}}) == "fp8"
    assert quantisation({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == "awq"


def test_code_brought_along_needs_permission(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    (path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "configuration_x.X"}}))
    files = open_target(path)
    check_remote_code(files, trust_remote_code=True)
    check_remote_code(files, trust_remote_code=False, shipped=True)
    with pytest.raises(ConfigError, match=r"target\.trust_remote_code = true"):
        check_remote_code(files, trust_remote_code=False)


def test_the_digest_needs_no_torch() -> None:
    code = "import sys, eyas.target.files, eyas.target.smollm2; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
