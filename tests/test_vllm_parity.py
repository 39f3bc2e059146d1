"""`eyas verify --parity`: engines and data sets that agree, and whose convention differs where they do not."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.capture.parity import Party, compare, engine_party
from eyas.cli.parity import parity
from eyas.config import EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.engine.hf import HfEngine
from eyas.errors import ConfigError, EngineUnavailable
from eyas.log import Progress
from eyas.records import TokenIds
from eyas.target.head import TargetHead
from server_world import World, cfg, make_table
from stand_in_server import StandIn
from stand_in_vllm import StandInVllm
from test_vllm_client import VllmWorld

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> SampleTable:
    return make_table(tmp_path_factory.mktemp("table") / "samples.parquet", [5, 9, 12, 3, 20, 7, 8, 14, 2, 6])


@pytest.fixture(scope="module")
def samples(table: SampleTable) -> dict[str, TokenIds]:
    return {s.sample_id: s.token_ids for s in table.samples()}


@pytest.fixture(scope="module")
def own(target: Path, samples: dict[str, TokenIds]) -> Party:
    """Every hidden state of the samples, of transformers."""
    depth = int(json.loads((target / "config.json").read_text())["num_hidden_layers"])
    config = EngineConfig(dtype="float32", device="cpu")
    return engine_party("hf", HfEngine(TargetConfig(path=target), config, tuple(range(depth + 1))), samples)


@pytest.fixture
def world(target: Path, tmp_path: Path, head: TargetHead) -> Iterator[VllmWorld]:
    (tmp_path / "staging").mkdir()
    found = VllmWorld(target, tmp_path / "staging", head)
    yield found
    found.close()


def party_of(own: Party, *, shift: int = 0, norm: str = "post", told: str | None = None) -> Party:
    """As an engine would give it that numbers layers otherwise, or hands out the state on another side of the norm."""
    depth = own.spec.num_layers
    samples = {
        s: {f"hidden.{k}": fields[f"hidden.{k + shift}"] for k in LAYERS}
        | {"last": fields["last"] if norm == "post" else fields[f"hidden.{depth}"]}
        for s, fields in own.samples.items()
    }
    spec = own.spec.model_copy(update={"aux_layers": LAYERS, "last_hidden_norm": told or norm})
    return Party("other", spec, samples)


def test_the_last_state_agrees_on_either_side_of_the_norm(
    own: Party, samples: dict[str, TokenIds], head: TargetHead
) -> None:
    for norm in ("pre", "post"):
        found = compare(own, party_of(own, norm=norm), samples, head.normed, head)
        assert found.agrees and found.norm == norm
        assert [field.field for field in found.fields] == ["hidden.1", "hidden.2", "hidden.3", "last"]
        assert all(field.cosine > 0.999999 and field.worst < 1e-5 for field in found.fields)
        assert found.fields[-1].argmax == 1.0 and found.fields[0].argmax is None


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_that_are_numbered_otherwise_are_named(
    own: Party, samples: dict[str, TokenIds], head: TargetHead, shift: int
) -> None:
    found = compare(own, party_of(own, shift=shift), samples, head.normed, head)
    assert not found.agrees and found.fields[-1].agrees
    for k, field in zip(LAYERS, found.fields[:-1], strict=True):
        assert not field.agrees and field.error > 0.01
        assert field.cause == f"it is hf's hidden.{k + shift}: the layers are numbered otherwise"


@pytest.mark.parametrize(("norm", "told"), [("pre", "post"), ("post", "pre")])
def test_a_norm_that_is_told_wrongly_is_named(
    own: Party, samples: dict[str, TokenIds], head: TargetHead, norm: str, told: str
) -> None:
    found = compare(own, party_of(own, norm=norm, told=told), samples, head.normed, head)
    assert [field.agrees for field in found.fields] == [True, True, True, False]
    assert found.fields[-1].cause == f"its last state is {norm}-norm, not {told}-norm as it says"


def test_other_values_are_not_called_a_convention(own: Party, samples: dict[str, TokenIds], head: TargetHead) -> None:
    party = party_of(own)
    rng = np.random.default_rng(0)
    noisy = {s: {f: v + rng.normal(0, v.std(), v.shape).astype(np.float32) for f, v in fields.items()}
             for s, fields in party.samples.items()}  # fmt: skip
    found = compare(own, dataclasses.replace(party, samples=noisy), samples, head.normed, head)
    assert not any(field.agrees for field in found.fields) and (found.fields[-1].argmax or 0) < 1
    assert all("other weights, dtype or positions?" in field.cause for field in found.fields)


def test_the_command_compares_a_data_set_with_what_is_reachable(
    world: VllmWorld, target: Path, table: SampleTable, tmp_path: Path, head: TargetHead, capsys: Any
) -> None:
    server = world.serve()
    (tmp_path / "sg").mkdir()
    other = World(target, tmp_path / "sg", head)
    sglang = other.serve(shift=1)
    try:
        world.capture(table, cfg(tmp_path / "out"))
        (tmp_path / "out/run.toml").write_text(
            f'[target]\npath = "{target}"\n[data]\nsamples = "{table.path}"\n'
            f'[engine]\nkind = "vllm"\nurl = "{server.url}"\ndevice = "cpu"\n'
        )

        def run(wanted: str, *, as_json: bool = False) -> tuple[int, str]:
            code = parity(tmp_path / "out", wanted, Progress(stream=io.StringIO()), as_json=as_json)
            return code, capsys.readouterr().out

        assert isinstance(server, StandInVllm) and isinstance(sglang, StandIn)
        code, said = run(f"hf,vllm,sglang={sglang.url}")
        assert code == 1
        assert "data set (pre-norm): agrees" in said and "vllm (pre-norm): agrees" in said
        assert "sglang (post-norm): DIFFERS" in said
        assert "hidden.2   cosine" in said and "it is hf's hidden.3: the layers are numbered otherwise" in said
        server.kill()
        code, said = run("hf,vllm", as_json=True)
        told = json.loads(said)
        assert code == 0 and told["agrees"] and told["reference"] == "hf" and told["samples"] == 8
        assert [party["name"] for party in told["parties"]] == ["data set"]
        assert told["parties"][0]["fields"][-1]["argmax"] == 1.0 and "no vLLM server answers" in told["absent"][0]
        with pytest.raises(EngineUnavailable, match="no vLLM server answers"):
            run("vllm")
        with pytest.raises(ConfigError, match="'tgi' is none of hf, sglang, vllm"):
            run("hf,tgi")
    finally:
        other.close()
