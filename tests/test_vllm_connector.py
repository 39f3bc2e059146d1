"""The connector inside a vLLM server: what it refuses to start with, what its two sides keep, write and tell."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import eyas
from eyas.engine import room, staged
from eyas.engine.room import StagingLimits
from eyas.engine.settings import CaptureSetupError, Settings, write_settings
from eyas.engine.staged import RequestName, Staged
from eyas.engine.vllm.arguments import contradiction
from eyas.engine.vllm.deploy import MODULES, write_plugin
from eyas.engine.vllm.scheduler import Finished, Save, SchedulerSide
from eyas.engine.vllm.worker import Slots, WorkerSide

H, L, BLOCK = 40, 6, 4
LAYERS = (1, 2, 3, 4, 6)
AUX = (2, 4)
LIMITS = StagingLimits(staged_bytes=1 << 20, min_free_bytes=0, pool_bytes=1 << 20)
SOURCE = Path(eyas.__file__).parent
SERVER_HAS = {"torch", "numpy", "xxhash", "vllm"}


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture
def run(staging: Path) -> Iterator[staged.Run]:
    found = staged.Run(staging)
    yield found
    found.close()


def name_of(run: staged.Run, num_tokens: int, serial: int = 1, flags: str = "") -> RequestName:
    return RequestName(run.token, serial, num_tokens, flags)


class Cache:
    """A cache of hidden states and what was put into it."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_blocks: int = 16) -> None:
        self.tensor = torch.zeros(num_blocks, len(LAYERS), BLOCK, H, dtype=dtype)
        self._random = torch.Generator().manual_seed(0)

    def fill(self, num_tokens: int, blocks: Sequence[int]) -> torch.Tensor:
        """`[T, slots, H]`, now in the cache."""
        states = torch.randn(num_tokens, len(LAYERS), H, generator=self._random).to(self.tensor.dtype)
        for row in range(num_tokens):
            self.tensor[blocks[row // BLOCK], :, row % BLOCK] = states[row]
        return states


def worker_of(cache: Cache, staging: Path, **options: Any) -> WorkerSide:
    return WorkerSide(cache.tensor, Slots(LAYERS, AUX, L), staging, LIMITS, num_threads=1, **options)


def scheduler_of(staging: Path, limits: StagingLimits = LIMITS, pool_bytes: int | None = None) -> SchedulerSide:
    slots = Slots(LAYERS, AUX, L)
    return SchedulerSide(Settings(staging, AUX, limits), {"vllm": "0"}, block_size=BLOCK,
                         fields_bytes=lambda name: 4 * H * len(slots.of(name)), pool_bytes=pool_bytes)  # fmt: skip


def finished(name: RequestName | str, num_tokens: int, **changes: Any) -> Finished:
    blocks = list(range(1, 2 + (num_tokens - 1) // BLOCK))
    base: dict[str, Any] = {
        "request_id": str(name), "parameters": {"eyas": str(name)}, "token_ids": list(range(num_tokens)),
        "num_computed": num_tokens, "block_ids": blocks, "is_whole": True,
    }  # fmt: skip
    return Finished(**(base | changes))


def states_in(found: Staged, field: str) -> torch.Tensor:
    dtype, shape, data = found.fields[field]
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


# --- the worker's side


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 13])
def test_a_file_holds_the_rows_of_its_blocks_bit_by_bit(
    staging: Path, run: staged.Run, dtype: torch.dtype, num_tokens: int
) -> None:
    cache = Cache(dtype)
    blocks = [9, 3, 12, 5][: -(-num_tokens // BLOCK)]
    states = cache.fill(num_tokens, blocks)
    other = cache.fill(4, [1])
    subject = worker_of(cache, staging)
    name = name_of(run, num_tokens)
    subject.save([Save("r1", str(name), list(range(num_tokens)), blocks)])
    subject.close()
    assert subject.done() == {"r1"} and subject.done() == set()
    found = staged.read(name.path(staging), name)
    assert list(found.fields) == ["hidden.2", "hidden.4", "last"] and found.last_hidden_norm == "pre"
    assert found.token_ids.tolist() == list(range(num_tokens))
    for field, k in (("hidden.2", 2), ("hidden.4", 4), ("last", 6)):
        assert torch.equal(states_in(found, field), states[:, LAYERS.index(k)])
    # Its blocks are clear, another request's are as they were.
    assert not cache.tensor[blocks].any() and torch.equal(cache.tensor[1].movedim(1, 0), other)


def test_neighbours_go_to_those_who_ask(staging: Path, run: staged.Run) -> None:
    cache = Cache()
    states = cache.fill(3, [2])
    subject = worker_of(cache, staging)
    name = name_of(run, 3, flags=staged.NEIGHBOURS)
    subject.save([Save("r", str(name), [1, 2, 3], [2])])
    subject.close()
    found = staged.read(name.path(staging), name)
    assert list(found.fields) == ["hidden.2", "hidden.4", "hidden.1", "hidden.3", "last"]
    assert torch.equal(states_in(found, "hidden.3"), states[:, LAYERS.index(3)])
    assert Slots(LAYERS, AUX, L).has_neighbours and not Slots((2, 4, 6), AUX, L).has_neighbours


def test_the_last_layers_output_can_be_an_auxiliary_state_too(staging: Path) -> None:
    assert Slots((2, 6), (2, 6), 6).of(RequestName("0" * 16, 1, 1)) == {"hidden.2": 0, "hidden.6": 1, "last": 1}


@pytest.mark.parametrize("clear", [True, False])
def test_a_row_that_was_never_computed_is_told(staging: Path, run: staged.Run, clear: bool) -> None:
    cache = Cache()
    cache.fill(7, [2, 5])
    cache.tensor[5, :, 1] = 0
    subject = worker_of(cache, staging, clear=clear)
    name = name_of(run, 7)
    subject.save([Save("r", str(name), list(range(7)), [2, 5])])
    subject.close()
    assert subject.done() == {"r"}
    assert name.path(staging).exists() is not clear
    if clear:
        told = staged.failed(name.path(staging)).read_text()
        assert "row 5, one of 1, was never computed" in told
        assert "padding" not in told
    else:  # with prefix caching blocks go on being used
        assert cache.tensor[2].any()


def test_a_first_row_of_zeros_may_be_of_padding(staging: Path, run: staged.Run) -> None:
    cache = Cache()
    cache.fill(7, [2, 5])
    cache.tensor[2, :, 0] = 0
    subject = worker_of(cache, staging)
    name = name_of(run, 7)
    subject.save([Save("r", str(name), list(range(7)), [2, 5])])
    subject.close()
    told = staged.failed(name.path(staging)).read_text()
    assert "row 0, one of 1, was never computed" in told and "begin with a token whose embedding is zero" in told


def test_a_write_that_fails_is_told_and_frees_the_blocks(
    staging: Path, run: staged.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache()
    cache.fill(3, [2])
    monkeypatch.setattr(staged, "digest_of", lambda _: 1 / 0)
    subject = worker_of(cache, staging)
    name = name_of(run, 3)
    subject.save([Save("r", str(name), [1, 2, 3], [2])])
    subject.close()
    assert subject.done() == {"r"} and not name.path(staging).exists()
    assert "ZeroDivisionError" in staged.failed(name.path(staging)).read_text()


def test_a_client_that_is_gone_leaves_nothing(staging: Path) -> None:
    gone = staged.Run(staging)
    cache = Cache()
    cache.fill(3, [2])
    name = name_of(gone, 3)
    gone.close()
    subject = worker_of(cache, staging)
    subject.save([Save("r", str(name), [1, 2, 3], [2])])
    subject.close()
    assert subject.done() == {"r"} and list(staging.iterdir()) == []


def test_other_ranks_write_what_is_asked_of_all_and_tell_nothing(staging: Path, run: staged.Run) -> None:
    cache = Cache()
    states = cache.fill(3, [2])
    subject = worker_of(cache, staging, rank=1)
    mine, all_ranks = name_of(run, 3), name_of(run, 3, 2, staged.RANKS)
    subject.save([Save("a", str(mine), [1, 2, 3], [2]), Save("b", str(all_ranks), [1, 2, 3], [2])])
    assert not mine.path(staging, 1).exists() and subject.done() == set()
    found = staged.read(all_ranks.path(staging, 1), all_ranks, 1)
    assert torch.equal(states_in(found, "last"), states[:, -1])


# --- the scheduler's side


def test_a_request_that_is_not_ours_or_was_aborted_passes_untouched(staging: Path, run: staged.Run) -> None:
    subject = scheduler_of(staging)
    name = name_of(run, 5)
    for other in ({}, {"eyas": "x"}, {"eyas": None}, {"do_remote_decode": True}):
        assert subject.finished(finished("a", 5, parameters=other)) == (False, None)
    assert subject.finished(finished(name, 5, is_whole=False)) == (False, None)
    assert subject.take() == []


def test_a_request_of_ours_keeps_its_blocks_and_says_where_its_file_will_be(staging: Path, run: staged.Run) -> None:
    subject = scheduler_of(staging)
    name = name_of(run, 5)
    keep, told = subject.finished(finished(name, 5, block_ids=[7, 8, 9]))
    num_bytes = 5 * (4 + 3 * 4 * H)
    assert keep and told == {"eyas": {"path": str(name.path(staging)), "bytes": num_bytes, "alone": True}}
    # The block of the generated token is not needed.
    assert subject.take() == [Save(str(name), str(name), [0, 1, 2, 3, 4], [7, 8])]
    assert subject.take() == []


def test_an_answer_says_whether_its_forwards_held_nothing_else(staging: Path, run: staged.Run) -> None:
    subject = scheduler_of(staging)
    one, two = name_of(run, 2, 1), name_of(run, 2, 2)
    subject.forward([str(one)])
    subject.forward([str(one), str(two)])
    subject.forward([str(two)])
    alone = name_of(run, 2, 3)
    subject.forward([str(alone)])
    told = [subject.finished(finished(name, 2))[1] for name in (one, two, alone)]
    assert [t["eyas"]["alone"] for t in told if t] == [False, False, True]
    assert not subject._together


def test_over_the_quota_a_request_fails_retryably_until_the_client_has_taken(staging: Path, run: staged.Run) -> None:
    num_bytes = 5 * (4 + 3 * 4 * H)
    subject = scheduler_of(staging, StagingLimits(2 * num_bytes + 1, 0, 0))
    names = [name_of(run, 5, serial) for serial in range(1, 5)]
    assert [subject.finished(finished(name, 5))[0] for name in names[:3]] == [True, True, False]
    _, told = subject.finished(finished(names[2], 5))
    assert told is not None and told["eyas"]["reason"] == staged.FULL and told["eyas"]["retry"] is True
    # Written: still there. Taken: room again.
    names[0].path(staging).write_bytes(b"")
    subject.written([str(names[0])])
    assert not subject.finished(finished(names[2], 5))[0]
    names[0].path(staging).unlink()
    assert subject.finished(finished(names[2], 5))[0]
    # A failure leaves no file, and so room.
    subject.written([str(names[1]), "somebody else's"])
    assert subject.finished(finished(names[3], 5))[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_ids": [1, 2]}, "a prompt of 2 tokens, 5 were said"),
        ({"num_computed": 4}, "4 of 5 rows were computed"),
        ({"block_ids": [3]}, "1 blocks of 4 are there"),
    ],
)
def test_rows_that_are_not_all_there_are_refused(
    staging: Path, run: staged.Run, changes: dict[str, Any], why: str
) -> None:
    keep, told = scheduler_of(staging).finished(finished(name_of(run, 5), 5, **changes))
    assert not keep and told is not None
    assert why in told["eyas"]["error"] and told["eyas"]["reason"] == staged.ROWS and not told["eyas"]["retry"]


def test_what_is_never_right_is_refused_for_good(staging: Path, run: staged.Run) -> None:
    def told(subject: SchedulerSide, name: RequestName) -> Any:
        keep, answer = subject.finished(finished(name, name.num_tokens))
        assert not keep and answer is not None and answer["eyas"]["retry"] is False
        return answer["eyas"]["reason"]

    assert told(scheduler_of(staging, StagingLimits(100, 0, 0)), name_of(run, 5)) == staged.TOO_LARGE
    assert told(scheduler_of(staging, pool_bytes=100), name_of(run, 5)) == staged.TOO_LARGE
    assert told(scheduler_of(staging), RequestName("f" * 16, 1, 5)) == staged.NO_DIRECTORY


def test_a_hello_tells_what_it_is_and_how_much_room_there_is(
    staging: Path, run: staged.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: 77)
    subject = scheduler_of(staging)
    keep, told = subject.finished(finished(RequestName("0" * 16, 1, 1, staged.HELLO), 1))
    assert not keep and told is not None
    assert told["eyas"]["hello"] == {
        "vllm": "0", "room": {"staged": 0, "limit": 1 << 20, "free": 77, "min_free": 0}, "counts": {},
    }  # fmt: skip


# --- the connector, beside stand-ins for vLLM's modules


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch, staging: Path, tmp_path: Path) -> Callable[..., Any]:
    base: Any = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")

    class Base:
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self.metadata: Any = None

        def bind_connector_metadata(self, metadata: Any) -> None:
            self.metadata = metadata

        def has_connector_metadata(self) -> bool:
            return self.metadata is not None

        def _get_connector_metadata(self) -> Any:
            return self.metadata

    base.KVConnectorBase_V1, base.KVConnectorMetadata = Base, type("Metadata", (), {})
    base.SupportsHMA = type("SupportsHMA", (), {})
    base.KVConnectorRole = SimpleNamespace(SCHEDULER=0, WORKER=1)
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_tensor_model_parallel_rank = lambda: 0
    vllm: Any = ModuleType("vllm")
    vllm.__version__ = "0.32.0+cpu"
    for module in (vllm, base, state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector",
                 "vllm.distributed.kv_transfer.kv_connector.v1"):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, "eyas.engine.vllm.connector", raising=False)
    from eyas.engine.vllm.connector import EyasConnector

    settings = tmp_path / "capture.json"
    write_settings(settings, staging, AUX, LIMITS)

    own_group = (("a", "x.cache_only_layers.6"),)

    def make(role: int, *, layers: Sequence[int] = LAYERS, groups: Sequence[Sequence[str]] = own_group,
             extra: dict[str, Any] | None = None, **changes: Any) -> Any:  # fmt: skip
        config = config_of(layers, {"eyas_settings": str(settings)} if extra is None else extra, **changes)
        found = [SimpleNamespace(layer_names=g, kv_cache_spec=SimpleNamespace(block_size=BLOCK)) for g in groups]
        return EyasConnector(config, role, SimpleNamespace(kv_cache_groups=found))

    return make


def config_of(layers: Sequence[int] = LAYERS, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A `VllmConfig`, as far as it is looked at."""
    hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(layers))
    parts: dict[str, dict[str, Any]] = {
        "speculative_config": {
            "method": "extract_hidden_states", "draft_model_config": SimpleNamespace(hf_config=hf_config),
        },
        "parallel_config": {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1},
        "cache_config": {"enable_prefix_caching": False},
        "scheduler_config": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
        "device_config": {"device_type": "cpu"},
        "model_config": {
            "dtype": torch.float32, "architectures": ["Llama"], "model": "m", "quantization": None,
            "max_model_len": 100,
            "get_total_num_hidden_layers": lambda: L, "get_hidden_size": lambda: H, "get_vocab_size": lambda: 7,
        },
        "kv_transfer_config": {"get_from_extra_config": lambda key, default: (extra or {}).get(key, default)},
    }  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("__")
        parts[part][field] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})


def request_of(name: RequestName, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    ids = list(range(name.num_tokens))
    return SimpleNamespace(request_id="r1", kv_transfer_params={"eyas": str(name)}, prompt_token_ids=ids,
                           num_computed_tokens=len(ids), status=SimpleNamespace(name=status))  # fmt: skip


def test_a_request_passes_through_both_sides(connector: Callable[..., Any], staging: Path, run: staged.Run) -> None:
    scheduler, worker = connector(0), connector(1)
    cache = Cache()
    states = cache.fill(5, [4, 2])
    worker.register_kv_caches({"model.attn": torch.zeros(1), "x.cache_only_layers.6": cache.tensor})
    name = name_of(run, 5)
    assert scheduler.request_finished_all_groups(request_of(name, "FINISHED_ABORTED"), ([4, 2],)) == (False, None)
    keep, told = scheduler.request_finished_all_groups(request_of(name), ([4, 2],))
    assert keep and told["eyas"]["alone"]
    worker.bind_connector_metadata(scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"r1": 5})))
    worker.shutdown()  # waits until it is written: beside the forward, which has not ended
    assert name.path(staging).exists()
    assert worker.get_finished({"r1"}) == ({"r1"}, None)
    assert worker.get_finished(set()) == (None, None)
    scheduler.update_connector_output(SimpleNamespace(finished_sending={"r1"}))
    assert torch.equal(states_in(staged.read(name.path(staging), name), "hidden.4"), states[:, 3])
    hello = scheduler.request_finished(request_of(RequestName("0" * 16, 1, 1, staged.HELLO)), [1])[1]["eyas"]["hello"]
    assert (hello["aux_layers"], hello["read_back"], hello["max_tokens"]) == ([2, 4], [1, 2, 3, 4, 6], 99)
    assert hello["neighbours"] and hello["counts"] == {"staged": 1} and hello["dtype"] == "float32"
    assert scheduler.get_finished_count() == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layers": (2, 6)}, r"extract the layers \[2, 6\]; they must ascend and hold \[2, 4, 6\]"),
        ({"layers": (2, 4)}, r"must ascend and hold \[2, 4, 6\]"),
        ({"extra": {}}, "has no eyas_settings"),
        ({"extra": {"eyas_settings": "/nowhere.json"}}, "/nowhere.json cannot be read"),
        ({"groups": [["a"]]}, "0 of 1 cache groups hold hidden states"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
def test_what_cannot_be_captured_from_ends_the_server(
    connector: Callable[..., Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(CaptureSetupError, match=why):
        connector(0, **changes)


def test_a_cache_of_another_shape_or_dtype_ends_the_server(connector: Callable[..., Any]) -> None:
    for cache in (Cache(torch.bfloat16).tensor, torch.zeros(4, len(LAYERS), 2 * BLOCK, H)):
        with pytest.raises(CaptureSetupError, match="no cache of hidden states"):
            connector(1).register_kv_caches({"x.cache_only_layers.6": cache})


@pytest.mark.parametrize(
    ("version", "changes", "why"),
    [
        ("0.32.0", {}, None),
        ("0.33.1", {"cache_config__enable_prefix_caching": True}, None),
        ("0.32.0", {"speculative_config__method": "eagle3"}, "hidden states are not extracted"),
        ("0.32.0", {"parallel_config__data_parallel_size": 2}, "start one server for each replica"),
        ("0.32.0", {"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ("0.31.2", {}, "chunked prefill .* before vLLM 0.32; start with --no-enable-chunked-prefill"),
        ("0.31.2", {"cache_config__enable_prefix_caching": True}, "start with --no-enable-prefix-caching"),
        ("0.31.2", {"scheduler_config__enable_chunked_prefill": False}, None),
        ("unknown", {}, "chunked prefill"),
    ],
)
def test_contradictions_by_version(version: str, changes: dict[str, Any], why: str | None) -> None:
    found = contradiction(config_of(**changes), version)
    assert (found is None) == (why is None)
    if why is not None:
        import re

        assert re.search(why, found or "")


# --- what the server's environment gets


def test_the_modules_import_each_other_and_what_a_server_has(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    ours = set()
    for module in MODULES:
        assert (tmp_path / "eyas" / module).read_bytes() == (SOURCE / module).read_bytes()
        for node in ast.walk(ast.parse((SOURCE / module).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names | SERVER_HAS | {"eyas"}, f"{module} imports {name}"
                if top == "eyas":
                    path = "/".join(name.split(".")[1:])
                    found = [p for p in (f"{path}.py", f"{path.rpartition('/')[0]}.py") if (SOURCE / p).exists()]
                    ours |= set(found[:1])
    assert ours <= set(MODULES)


def test_the_directory_alone_is_enough_for_both_sides(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import eyas.engine.vllm.worker as w, eyas.engine.vllm.scheduler, eyas.engine.vllm.arguments\n"
        "heavy = {'pydantic', 'httpx', 'pyarrow', 'transformers'} & set(sys.modules)\n"
        "print(w.__file__, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "eyas/engine/vllm/worker.py"), "[]"]


def test_settings_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_settings(path, tmp_path, (1, 2), LIMITS, num_threads=3)
    assert Settings.read(path) == Settings(tmp_path, (1, 2), LIMITS, 3)
    assert json.loads(path.read_text())["aux_layers"] == [1, 2]
    assert np.array_equal(Settings(tmp_path, None, LIMITS).layers_of(8), [2, 4, 5])
