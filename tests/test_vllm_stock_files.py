"""Files of vLLM's own connector: what its lock says, what is in them, what is refused, what is removed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny_models
from eyas.config import TargetConfig
from eyas.engine import staged
from eyas.engine.pickup import RowsError
from eyas.engine.staged import RequestName, StagedError
from eyas.engine.vllm import stock_files
from eyas.engine.vllm.server import VLLM
from eyas.engine.vllm.stock import StockVllm
from eyas.engine.vllm.stock_files import StockFiles, first_shape, missing
from eyas.errors import ConfigError

T, N, H = 5, 4, 8
SLOTS = {"hidden.2": 1, "last": 3}


class Written:
    """A run, and a server that writes for it."""

    def __init__(self, staging: Path) -> None:
        self.staging, self.run = staging, staged.Run(staging)
        self.files = StockFiles(self.run, lambda _: SLOTS, N)
        self.released: list[int] = []
        self.states = torch.randn(T, N, H)
        self.ids = torch.arange(100, 100 + T)

    def name(self, serial: int = 7) -> RequestName:
        return RequestName(self.run.token, serial, T)

    def path(self, serial: int = 7) -> Path:
        return self.staging / f"cmpl-{self.name(serial)}-0-0a1b2c3d.safetensors"

    def lock(self, serial: int = 7) -> int:
        fd = os.open(f"{self.path(serial)}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def write(self, serial: int = 7, **tensors: torch.Tensor) -> Path:
        os.close(self.lock(serial))
        save_file({"hidden_states": self.states, "token_ids": self.ids} | tensors, self.path(serial))
        return self.path(serial)

    def read(self, serial: int = 7) -> staged.Staged:
        return self.files.read(self.path(serial), self.name(serial), 0, lambda: self.released.append(serial))

    def left(self) -> list[str]:
        return sorted(path.name for path in self.staging.iterdir() if path != self.run.path)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    found = Written(tmp_path)
    yield found
    found.run.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_bytes", [1, 300, 1 << 20])
def test_the_slots_of_a_file_become_fields_and_their_memory_is_counted(
    written: Written, dtype: torch.dtype, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_files, "_CHUNK_BYTES", chunk_bytes)
    states = written.states.to(dtype)
    written.write(hidden_states=states)
    found = written.read()
    assert found.token_ids.tolist() == written.ids.tolist() and found.last_hidden_norm == "pre"
    assert list(found.fields) == list(SLOTS)
    for field, slot in SLOTS.items():
        kind, shape, data = found.fields[field]
        assert (kind, shape) == (str(dtype).removeprefix("torch."), (T, H))
        assert bytes(data) == states[:, slot].contiguous().view(torch.uint8).numpy().tobytes()
    kept = found.fields["last"][2]
    del found, data
    assert written.released == []  # the last view of it is still there
    del kept
    assert written.released == [7]


def test_a_file_is_waited_for_until_its_lock_is_free(written: Written) -> None:
    assert "is not here, nor is its lock" in missing(written.path())
    fd = written.lock()
    assert "still holds its lock" in missing(written.path())
    written.path().write_bytes(b"half of it")
    assert "still holds its lock" in missing(written.path())
    os.close(fd)
    assert missing(written.path()) == ""


def test_a_lock_that_is_free_without_a_file_is_a_failed_write(written: Written) -> None:
    os.close(written.lock())
    with pytest.raises(StagedError, match="wrote no file; its log says why"):
        missing(written.path())


def test_a_file_without_a_lock_is_refused(written: Written) -> None:
    written.write()
    Path(f"{written.path()}.lock").unlink()
    with pytest.raises(StagedError, match="use_synchronization_lock"):
        missing(written.path())


def test_a_file_of_any_shorter_or_larger_length_is_not_whole(written: Written) -> None:
    whole = written.write().read_bytes()
    for part in [whole[:n] for n in range(0, len(whole), 7)] + [whole[:-1], whole + b"\0"]:
        written.path().write_bytes(part)
        with pytest.raises(StagedError, match="not whole"):
            written.read()
    assert written.released == []


def rewritten(path: Path, **changes: Any) -> None:
    """The same bytes under another header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + size]) | changes).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


STATES_BYTES = T * N * H * 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"more": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "holds"),
        ({"hidden_states": {"dtype": "I8", "shape": [T, N, H], "data_offsets": [0, STATES_BYTES]}}, "cannot be read"),
        ({"hidden_states": {"dtype": "F32", "shape": [T, N], "data_offsets": [0, STATES_BYTES]}}, "cannot be read"),
        ({"hidden_states": {"dtype": "F32", "shape": [T, -N, -H], "data_offsets": [0, STATES_BYTES]}}, "not fit"),
        ({"hidden_states": {"dtype": "F32", "shape": [T, N, 0], "data_offsets": [0, 0]}}, "not fit"),
        ({"hidden_states": {"dtype": "F32", "shape": [T, N, H + 1], "data_offsets": [0, STATES_BYTES]}}, "not fit"),
        ({"token_ids": {"dtype": "I64", "shape": [T], "data_offsets": [8, 8 + 8 * T]}}, "not fit"),
        ({"hidden_states": {"dtype": "F32", "shape": [T, N, 1e400], "data_offsets": [0, 1]}}, "cannot be read"),
        ({"token_ids": []}, "cannot be read"),
    ],
)
def test_a_header_that_cannot_be_is_refused(written: Written, changes: dict[str, Any], why: str) -> None:
    rewritten(written.write(), **changes)
    with pytest.raises(StagedError, match=why):
        written.read()


def test_rows_and_layers_must_be_those_asked_for(written: Written) -> None:
    written.write(hidden_states=written.states[:3].contiguous(), token_ids=written.ids[:3].contiguous())
    with pytest.raises(RowsError, match="3 rows of 5 tokens"):
        written.read()
    written.write(hidden_states=written.states[:3].contiguous())
    with pytest.raises(RowsError, match="3 rows of 5 tokens"):
        written.read()
    written.write(token_ids=torch.arange(6))
    with pytest.raises(RowsError, match="5 rows of 6 tokens"):
        written.read()
    written.write(hidden_states=written.states[:, :3].contiguous())
    with pytest.raises(StagedError, match="holds 3 layers, 4 were told"):
        written.read()
    written.write(token_ids=written.ids - 101)
    with pytest.raises(StagedError, match="token ids that are none"):
        written.read()


def test_a_file_that_changes_while_it_is_read_is_refused(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written.write()
    by_field = stock_files._by_field

    def touched(*args: Any) -> Any:
        os.utime(path, ns=(1, 1))
        return by_field(*args)

    monkeypatch.setattr(stock_files, "_by_field", touched)
    with pytest.raises(StagedError, match="was written to while it was read"):
        written.read()
    assert written.released == []


@pytest.mark.parametrize(
    "told",
    [
        "{staging}/cmpl-eyas.{run}.8..5-0-ab.safetensors",  # another request's
        "{staging}/cmpl-eyas.0123456789abcdef.7..5-0-ab.safetensors",  # another run's
        "{staging}/sub/cmpl-eyas.{run}.7..5-0-ab.safetensors",
        "{staging}/../cmpl-eyas.{run}.7..5-0-ab.safetensors",
        "{staging}/cmpl-eyas.{run}.7..5-0-ab.txt",
        "/etc/passwd",
        "",
    ],
)
def test_a_path_that_is_not_the_requests_own_is_never_touched(written: Written, told: str) -> None:
    said = {"path": told.format(staging=written.staging, run=written.run.token)}
    with pytest.raises(StagedError, match="not this request's file"):
        written.files.path(written.name(), said, 0)
    assert written.files.path(written.name(), {"path": str(written.path())}, 0) == written.path()


def test_what_nobody_waits_for_is_removed_and_nothing_else(written: Written) -> None:
    others = [
        "cmpl-eyas.0123456789abcdef.1..5-0-ab.safetensors",
        "cmpl-1-0-ab.safetensors",
        "cmpl-1-0-ab.safetensors.lock",
    ]
    for name in others:
        (written.staging / name).write_bytes(b"")
    awaited = written.write(1)
    written.write(2)
    os.close(written.lock(3))  # a lock alone: the write failed, or the server was killed
    fd = written.lock(4)  # still computed
    written.files.sweep({1})
    assert written.left() == sorted([*others, awaited.name, f"{awaited.name}.lock", f"{written.path(4).name}.lock"])
    os.close(fd)
    written.files.remove(awaited)
    written.files.sweep(())
    assert written.left() == sorted(others)


def test_the_end_waits_for_what_the_server_still_writes(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = written.lock(4)
    looks = iter(range(100))

    def sleep(_: float) -> None:
        if next(looks) == 2:
            save_file({"hidden_states": written.states, "token_ids": written.ids}, written.path(4))
            os.close(fd)

    monkeypatch.setattr(stock_files.time, "sleep", sleep)
    written.files.close()
    assert written.left() == [] and next(looks) == 3


def test_a_first_file_tells_its_shape_and_is_gone(written: Written) -> None:
    written.write()
    shape = first_shape(written.path(), 1.0)
    assert (shape.dtype, shape.num_tokens, shape.num_layers, shape.hidden_size) == ("float32", T, N, H)
    assert written.left() == []


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    return TargetConfig(path=tiny_models.save("llama", tmp_path_factory.mktemp("target") / "llama"))


@pytest.mark.parametrize(
    ("told", "aux", "why"),
    [
        ((1, 2, 3), None, "and 4, the number of layers"),
        ((1, 2, 4), (1, 3), r"capture\.aux_layers \[1, 3\]"),
        ((2, 1, 4), (1, 2), "must ascend"),
        ((1, 1, 4), (1,), "must ascend"),
        ((4,), None, "no auxiliary layer"),
    ],
)
def test_layers_that_cannot_be_are_refused(
    target: TargetConfig, told: tuple[int, ...], aux: tuple[int, ...] | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        StockVllm(target, told, aux)


def test_a_target_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"target\.path is not set"):
        StockVllm(TargetConfig(), (1, 4), None)


def test_fields_come_from_the_slots_of_their_layers(target: TargetConfig) -> None:
    dialect = StockVllm(target, (1, 2, 3, 4), (2, 3))
    name = RequestName("0" * 16, 1, 5)
    assert dialect._slots(name) == {"hidden.2": 1, "hidden.3": 2, "last": 3}
    neighbours = RequestName("0" * 16, 1, 5, staged.NEIGHBOURS)
    assert dialect._slots(neighbours) == {"hidden.2": 1, "hidden.3": 2, "hidden.1": 0, "last": 3}


def answer(**told: Any) -> str:
    return json.dumps({"choices": [{"finish_reason": "length"}], "kv_transfer_params": told})


def test_each_dialect_names_the_other_ones_server(target: TargetConfig) -> None:
    stock, ours = answer(hidden_states_path="/files/a.safetensors"), answer(eyas={"path": "/x", "bytes": 1})
    reply = VLLM.reply(stock)
    assert reply is not None and reply.said is not None and "set engine.stock_layers" in reply.said["error"]
    dialect = StockVllm(target, (1, 4), None)
    reply = dialect.reply(ours)
    assert reply is not None and reply.said is not None and "leave engine.stock_layers out" in reply.said["error"]
    reply = dialect.reply(stock)
    assert reply is not None and reply.said == {"path": "/files/a.safetensors"}
    reply = VLLM.reply(ours)
    assert reply is not None and reply.said == {"path": "/x", "bytes": 1}


def test_a_first_question_to_a_server_with_the_stock_connector_leaves_no_file(written: Written) -> None:
    path = written.write()
    with pytest.raises(ConfigError, match=r"http://x: .*vLLM's own connector"):
        VLLM.find_out("http://x", written.name(), {"hidden_states_path": str(path), "error": "vLLM's own connector"})
    assert written.left() == []
