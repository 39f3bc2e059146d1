"""Capture from a server with vLLM's own connector: its files and locks, and what it does not tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.data.table import SampleTable
from eyas.engine import asking
from eyas.engine.hf import HfEngine
from eyas.errors import CaptureMismatch, ConfigError, EngineError
from eyas.target.head import TargetHead
from server_world import LENGTHS, cfg, events, make_table, rejects, require_sound
from stand_in_server import Act, Asked
from stand_in_stock import StandInStock
from test_vllm_client import VllmWorld, own, require_values, table

__all__ = ["own", "table"]

Tensors = dict[str, torch.Tensor]


class StockWorld(VllmWorld):
    make_server = StandInStock

    def engine(self, layers: tuple[int, ...] | None = None, **options: Any) -> Any:
        return super().engine(layers, **({"stock_layers": tuple(self.servers[-1].extracted)} | options))

    def left(self) -> list[Path]:
        """Files, once threads that still write have ended."""
        time.sleep(0.05)
        return [path for path in self.staging.iterdir() if path.is_file()]


@pytest.fixture
def world(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StockWorld]:
    monkeypatch.setattr(asking, "STAGED_PATIENCE_S", 0.5)
    (tmp_path / "staging").mkdir()
    found = StockWorld(target, tmp_path / "staging", TargetHead.load(target))
    yield found
    found.close()


def once(write: Any) -> Any:
    """Misbehaves at the first request of one length, not at its retry."""
    done = threading.Event()

    def wrapped(asked: Asked, path: Path, tensors: Tensors) -> bool:
        if len(asked.ids) != 20 or asked.logprobs or done.is_set():
            return False
        done.set()
        write(asked, path, tensors)
        return True

    return wrapped


def half(asked: Asked, path: Path, tensors: Tensors) -> None:
    save_file(tensors, path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def too_few_layers(asked: Asked, path: Path, tensors: Tensors) -> None:
    save_file(tensors | {"hidden_states": tensors["hidden_states"][:, 1:].contiguous()}, path)


@pytest.mark.parametrize("check", ["target", "layer"])
def test_states_become_what_the_target_itself_gives_and_no_file_is_left(
    world: StockWorld, tmp_path: Path, table: SampleTable, own: HfEngine, check: str
) -> None:
    world.serve(layers=(1, 2, 3))
    receipt = world.capture(table, cfg(tmp_path / "out", check_fraction=0.3), world.engine(check_layers=check))
    assert (receipt.committed, receipt.rejected, receipt.retries) == (len(LENGTHS), 0, 0)
    require_sound(tmp_path / "out")
    require_values(tmp_path / "out", table, own)
    assert world.left() == []
    assert "layers by" in events(tmp_path / "out", "probe")[0]["found"]


@pytest.mark.parametrize("write", [half, too_few_layers, lambda *_: None], ids=["half", "layers", "nothing"])
def test_a_file_that_is_not_the_requests_is_no_answer_and_the_sample_is_asked_for_again(
    world: StockWorld, tmp_path: Path, table: SampleTable, own: HfEngine, write: Any
) -> None:
    world.serve(write=once(write))
    receipt = world.capture(table, cfg(tmp_path / "out"))
    assert (receipt.committed, receipt.rejected) == (len(LENGTHS), 0) and receipt.retries >= 1
    require_values(tmp_path / "out", table, own)
    assert world.left() == []


def test_a_lock_that_is_held_for_long_is_waited_for(
    world: StockWorld, tmp_path: Path, table: SampleTable, own: HfEngine
) -> None:
    world.serve(write=once(lambda asked, path, tensors: (time.sleep(0.3), save_file(tensors, path))))
    receipt = world.capture(table, cfg(tmp_path / "out"))
    assert (receipt.committed, receipt.retries) == (len(LENGTHS), 0)
    require_values(tmp_path / "out", table, own)


def test_too_few_rows_are_a_reject_at_once(world: StockWorld, tmp_path: Path, table: SampleTable) -> None:
    def write(asked: Asked, path: Path, tensors: Tensors) -> bool:
        if len(asked.ids) != 20 or asked.logprobs:
            return False
        save_file({name: tensor[:8].contiguous() for name, tensor in tensors.items()}, path)
        return True

    world.serve(write=write)
    receipt = world.capture(table, cfg(tmp_path / "out"))
    assert (receipt.committed, receipt.rejected, receipt.retries) == (len(LENGTHS) - 1, 1, 0)
    ((_, detail),) = rejects(tmp_path / "out").values()
    assert "8 rows of 20 tokens: prefix caching or chunked prefill?" in detail
    assert world.left() == []


def test_states_of_other_tokens_are_a_reject(world: StockWorld, tmp_path: Path, table: SampleTable) -> None:
    def write(asked: Asked, path: Path, tensors: Tensors) -> bool:
        if len(asked.ids) != 20:
            return False
        save_file(tensors | {"token_ids": tensors["token_ids"] + 1}, path)
        return True

    world.serve(write=write)
    receipt = world.capture(table, cfg(tmp_path / "out"))
    assert (receipt.committed, receipt.rejected) == (len(LENGTHS) - 1, 1)
    ((_, detail),) = rejects(tmp_path / "out").values()
    assert "token" in detail


def test_files_of_others_stay(world: StockWorld, tmp_path: Path, table: SampleTable) -> None:
    others = [world.staging / name for name in ("cmpl-1.safetensors", "cmpl-1.safetensors.lock", "notes.txt")]
    for path in others:
        path.touch()
    world.serve()
    assert world.capture(table, cfg(tmp_path / "out")).committed == len(LENGTHS)
    assert sorted(world.left()) == sorted(others)


def test_layers_that_are_told_wrongly_are_found_out(world: StockWorld, tmp_path: Path, table: SampleTable) -> None:
    depth = world.serve(layers=(1, 2)).extracted[-1]
    engine = world.engine(stock_layers=(1, 3, depth), check_layers="target")
    with pytest.raises(CaptureMismatch, match=r"hidden\.3 .* it is hidden state 2"):
        world.capture(table, cfg(tmp_path / "out"), engine)


@pytest.mark.parametrize("told", [(1, 2), (2, 1, 4), (4,)])
def test_layers_that_cannot_be_are_refused(world: StockWorld, told: tuple[int, ...]) -> None:
    world.serve()
    with pytest.raises(ConfigError, match=r"engine\.stock_layers is"):
        world.engine(stock_layers=told).info()


def test_another_number_of_layers_is_refused_by_its_address(world: StockWorld) -> None:
    server = world.serve(layers=(1, 2, 3))
    with pytest.raises(ConfigError, match=f"the server at {server.url} extracts 4 layers"):
        world.engine(stock_layers=(1, 2, server.extracted[-1])).info()


def test_who_told_no_layers_learns_how(world: StockWorld) -> None:
    world.serve()
    with pytest.raises(ConfigError, match=r"vLLM's own connector .* set engine\.stock_layers"):
        world.engine(stock_layers=None).info()
    assert world.left() == []


def test_what_protection_is_missing_is_told_once(
    world: StockWorld, tmp_path: Path, table: SampleTable, caplog: pytest.LogCaptureFixture
) -> None:
    world.serve()
    world.capture(table, cfg(tmp_path / "out"))
    (line,) = [r.getMessage() for r in caplog.records if "no quota" in r.getMessage()]
    assert str(world.staging) in line and "no digest" in line


def test_a_directory_that_is_not_here_is_named(world: StockWorld, tmp_path: Path) -> None:
    server = world.serve()
    server.staging = tmp_path / "elsewhere"
    server._stage = lambda asked, meta: meta.update(told={"hidden_states_path": f"/nowhere/{asked.name}.safetensors"})
    with pytest.raises(EngineError, match="writes into /nowhere, which does not exist here"):
        world.engine().info()


def test_a_bad_request_is_a_reject(world: StockWorld, tmp_path: Path, table: SampleTable) -> None:
    text = '{"error": {"message": "maximum context length is 8"}}'
    world.serve(lambda asked: Act(status=400, text=text) if len(asked.ids) == 20 else None)
    receipt = world.capture(table, cfg(tmp_path / "out"))
    assert (receipt.rejected, receipt.retries) == (1, 0)


def test_two_captures_do_not_meet(world: StockWorld, tmp_path: Path, own: HfEngine) -> None:
    tables = [make_table(tmp_path / f"{n}.parquet", LENGTHS[n:]) for n in (0, 1)]
    world.serve()
    done: list[int] = []

    def run(n: int) -> None:
        done.append(world.capture(tables[n], cfg(tmp_path / f"out{n}"), world.engine()).committed)

    threads = [threading.Thread(target=run, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [len(LENGTHS) - 1, len(LENGTHS)]
    for n in (0, 1):
        require_values(tmp_path / f"out{n}", tables[n], own)
    assert world.left() == []
