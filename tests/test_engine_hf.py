"""The hf engine gives what transformers gives: every layer, every family, alone or in a batch, in any order of work."""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eyas.config import EngineConfig, TargetConfig
from eyas.engine import hf
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest
from eyas.engine.hf import HfEngine, form_batches, padded_tokens
from eyas.engine.pinned import HostPool
from eyas.errors import ConfigError, EngineError, EngineRefused
from eyas.records import LAST, StateBlock, as_token_ids, hidden_field, sample_id_of
from eyas.target.structure import find
from tiny_models import build, save, token_ids

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "deepseek_v3", "qwen3_moe", "mistral", "gpt_oss", "gemma2", "granite"]
NUM_LAYERS = 4
RELATIVE = 1e-5
"""Largest error allowed in float32, relative to the field's largest value: sums in another order, no more."""
LENGTHS = (23, 5, 37, 1, 12, 36, 30, 2)
TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Source:
    """Requests in plan order out of a quota of tokens; `take` asserts that nobody waits while answers are held back."""

    def __init__(self, requests: Iterable[CaptureRequest], quota_tokens: int = 10**9) -> None:
        self.waiting = list(requests)
        self.quota_tokens = quota_tokens
        self.reserved: dict[str, int] = {}

    def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        taken: list[CaptureRequest] = []
        while self.waiting:
            size = len(self.waiting[0].token_ids)
            full = sum(self.reserved.values()) + size > self.quota_tokens
            if full or (taken and sum(len(r.token_ids) for r in taken) + size > max_tokens):
                break
            taken.append(self.waiting.pop(0))
            self.reserved[taken[-1].sample_id] = size
        assert taken or not wait or not self.waiting, "waits for bytes that only its own answers can return"
        return taken

    def answered(self, sample_id: str) -> None:
        del self.reserved[sample_id]


def request(ids: Sequence[int], **options: bool) -> CaptureRequest:
    array = as_token_ids(ids)
    return CaptureRequest(sample_id_of(array), array, **options)


def requests(lengths: Sequence[int] = LENGTHS, **options: bool) -> list[CaptureRequest]:
    return [request(token_ids(length, seed=i), **options) for i, length in enumerate(lengths)]


def engine(
    path: Path, aux_layers: tuple[int, ...] | None = None, *, trust_remote_code: bool = False, **options: object
) -> HfEngine:
    settings = EngineConfig.model_validate({"dtype": "float32", "device": "cpu", "batch_tokens": 80, **options})
    return HfEngine(TargetConfig(path=path, trust_remote_code=trust_remote_code), settings, aux_layers)


def tensor(block: StateBlock) -> torch.Tensor:
    return torch.frombuffer(block.data, dtype=TORCH_DTYPE[block.dtype]).reshape(block.shape)


def answers_of(engine: HfEngine, source: Source) -> dict[str, CaptureAnswer]:
    answers = {}
    for answer in engine.capture(source):
        assert isinstance(answer, CaptureAnswer), answer
        assert answer.sample_id not in answers
        source.answered(answer.sample_id)
        answers[answer.sample_id] = answer
    return answers


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE) -> None:
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= relative, f"relative error {error:.2e}"


def expected_fields(model: torch.nn.Module, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """By transformers' own tuple, whose end is normed, and by the final norm's input for index `L`."""
    entering: list[torch.Tensor] = []
    hook = find(model).norm.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    device = find(model).embeddings.weight.device
    with torch.no_grad():
        states = model(
            torch.tensor([list(ids)], device=device), output_hidden_states=True, use_cache=False
        ).hidden_states
    hook.remove()
    fields = {hidden_field(k): states[k][0].cpu() for k in range(len(states) - 1)}
    return {**fields, hidden_field(len(states) - 1): entering[0][0].cpu(), LAST: states[-1][0].cpu()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_equals_transformers(family: str, tmp_path: Path) -> None:
    """Mixed lengths in padded batches, and one sample longer than a batch, against one sample at a time."""
    path = save(family, tmp_path / "t")
    batch_tokens = 36
    found = engine(path, tuple(range(NUM_LAYERS + 1)), batch_tokens=batch_tokens)
    todo = requests()
    assert max(len(r.token_ids) for r in todo) > batch_tokens
    answers = answers_of(found, Source(todo))
    assert len(answers) == len(todo)
    model = build(family)
    for r in todo:
        expected = expected_fields(model, r.token_ids.tolist())
        answer = answers[r.sample_id]
        assert list(answer.fields) == [*(hidden_field(k) for k in range(NUM_LAYERS + 1)), LAST]
        assert answer.token_ids.tolist() == r.token_ids.tolist()
        for name, block in answer.fields.items():
            assert (block.dtype, block.num_bytes) == ("float32", 4 * block.shape[0] * block.shape[1])
            assert_close(tensor(block), expected[name])


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "gpt_oss"])
def test_a_batch_does_not_change_a_sample(family: str, tmp_path: Path) -> None:
    path = save(family, tmp_path / "t")
    together = answers_of(engine(path, batch_tokens=10_000), Source(requests()))
    alone = answers_of(engine(path, batch_tokens=1), Source(requests()))
    for sample_id, answer in together.items():
        for name, block in answer.fields.items():
            assert_close(tensor(block), tensor(alone[sample_id].fields[name]))


def test_only_what_is_asked_for_is_answered(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    (answer,) = answers_of(engine(path, (3,)), Source(requests([7]))).values()
    assert list(answer.fields) == [hidden_field(3), LAST]
    assert engine(path).info().spec.aux_layers == (1, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, tmp_path: Path) -> None:
    """To the bit where the forward is the same; a batch adds in another order, and half precision shows it."""
    path = save("llama", tmp_path / "t")
    alone = answers_of(engine(path, (0, 2, 4), dtype=dtype, batch_tokens=1), Source(requests()))
    together = answers_of(engine(path, (0, 2, 4), dtype=dtype), Source(requests()))
    # Not `.to(dtype)`, which would round the rotary frequencies too.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=TORCH_DTYPE[dtype])
    for r in requests():
        expected = expected_fields(model, r.token_ids.tolist())
        for name, block in alone[r.sample_id].fields.items():
            assert (block.dtype, block.num_bytes) == (dtype, 2 * block.shape[0] * block.shape[1])
            assert torch.equal(tensor(block), expected[name])
            assert_close(tensor(together[r.sample_id].fields[name]), expected[name], relative=0.05)


def test_auto_dtype_is_the_targets(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "t")
    assert engine(tmp_path / "t", dtype="auto").info().spec.dtype == "bfloat16"


def test_info_names_everything_and_loads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save("llama", tmp_path / "t")
    monkeypatch.setattr(HfEngine, "_load", lambda self: pytest.fail("weights loaded"))
    found = engine(path, (0, 4))
    info = found.info()
    spec = info.spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.aux_layers) == (4, 32, 301, (0, 4))
    assert (spec.dtype, spec.last_hidden_norm, spec.quantisation, len(spec.target_digest)) == (
        "float32",
        "post",
        "none",
        32,
    )
    assert info.max_tokens == 512
    assert info.provenance.engine == "hf"
    assert info.provenance.settings["attention"] == "sdpa"
    assert info.provenance.key() == engine(path).info().provenance.key()
    eager = engine(path, extra={"attn_implementation": "eager"}).info().provenance
    assert eager.settings["attention"] == "eager"
    found.close()


def test_a_small_quota_is_no_deadlock(tmp_path: Path) -> None:
    """The window is larger than what can ever be reserved at once, and every reserved token must return."""
    path = save("llama", tmp_path / "t")
    todo = requests([9, 10, 11, 12] * 5)
    todo = [request(token_ids(len(r.token_ids), seed=i)) for i, r in enumerate(todo)]
    assert len(answers_of(engine(path), Source(todo, quota_tokens=13))) == len(todo)


def test_a_block_is_released_with_its_views(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    source = Source(requests([20, 20, 20]))
    capture = engine(path).capture(source)
    answer = next(capture)
    assert isinstance(answer, CaptureAnswer)
    views = [block.data[:8] for block in answer.fields.values()]
    owners = [weakref.ref(block.data.obj) for block in answer.fields.values()]
    del answer
    gc.collect()
    assert all(owner() is not None for owner in owners)
    views.clear()
    gc.collect()
    assert all(owner() is None for owner in owners)
    capture.close()


def test_samples_that_cannot_be_answered_fail_alone(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    bad = {
        "301 outside 0..300": request([5, 301]),
        "513 tokens, and the target takes 512": request([1] * 513),
        "no tokens": CaptureRequest("0" * 32, np.zeros(0, dtype=np.int32)),
        "-1 outside": CaptureRequest("f" * 32, np.array([3, -1], dtype=np.int32)),
    }
    good = requests([6, 7])
    found = list(engine(path).capture(Source([good[0], *bad.values(), good[1]])))
    failures = {f.sample_id: f for f in found if isinstance(f, CaptureFailure)}
    assert {a.sample_id for a in found if isinstance(a, CaptureAnswer)} == {r.sample_id for r in good}
    for words, r in bad.items():
        error = failures[r.sample_id].error
        assert isinstance(error, EngineRefused)
        assert error.sample_id == r.sample_id
        assert words in str(error)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("logit_rows", [1000, 4])
def test_reference_is_the_whole_models_word(
    family: str, logit_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short samples by one forward; longer ones, here of more than four rows, with their logits in pieces."""
    monkeypatch.setattr(hf, "REFERENCE_LOGIT_BYTES", 4 * 301 * logit_rows)
    path = save(family, tmp_path / "t")
    todo = [*requests([23, 1, 2], with_reference=True), *requests([20, 22])]
    answers = answers_of(engine(path, (0, 2, 4), batch_tokens=1000), Source(todo))
    model = build(family)
    for r in todo:
        reference = answers[r.sample_id].reference
        if not r.with_reference:
            assert reference is None
            continue
        assert reference is not None
        ids = torch.tensor([r.token_ids.tolist()])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert reference.next_logprobs.dtype == np.float32
        np.testing.assert_allclose(reference.next_logprobs, logprobs.numpy(), atol=1e-4)
        expected = expected_fields(model, r.token_ids.tolist())
        assert list(reference.hidden) == [0, 2]
        for k, states in reference.hidden.items():
            assert_close(torch.from_numpy(states), expected[hidden_field(k)])
        for name, block in reference.alone.items():
            assert_close(tensor(block), expected[name])


def test_batches_keep_to_their_budget_and_to_similar_lengths() -> None:
    todo = requests([9, 30, 11, 10, 100, 29, 28, 12])
    batches = form_batches(todo, 60)
    assert [[len(r.token_ids) for r in batch] for batch in batches] == [[100], [30, 29], [28, 12], [11, 10, 9]]
    assert all(len(batch) == 1 or padded_tokens(batch) <= 60 for batch in batches)


class OutOfMemory:
    """A device on which only so many padded tokens fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
        self.forwards: list[int] = []
        original = HfEngine._forward

        def forward(engine: HfEngine, loaded: object, ids: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
            padded = len(ids) * max(map(len, ids))
            self.forwards.append(padded)
            if padded > max_tokens:
                raise torch.OutOfMemoryError("no memory")
            return original(engine, loaded, ids)  # type: ignore[arg-type]

        monkeypatch.setattr(HfEngine, "_forward", forward)


def test_out_of_memory_splits_batches_and_refuses_what_never_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = OutOfMemory(monkeypatch, 30)
    path = save("llama", tmp_path / "t")
    todo = requests([10, 12, 11, 31, 9, 12])
    with caplog.at_level(logging.WARNING):
        found = list(engine(path, batch_tokens=100).capture(Source(todo)))
    assert {f.sample_id: type(f) for f in found} == {
        r.sample_id: CaptureFailure if len(r.token_ids) == 31 else CaptureAnswer for r in todo
    }
    assert max(memory.forwards[2:]) <= 50
    assert "out of device memory" in caplog.text


def test_layers_outside_the_target_are_named(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    with pytest.raises(ConfigError, match=r"\[5, -1\] lie outside 0\.\.4"):
        engine(path, (5, 2, -1))
    with pytest.raises(ConfigError, match="ascend"):
        engine(path, (2, 1))


def test_devices_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    with pytest.raises(ConfigError, match="not one of auto, cpu, cuda"):
        engine(path, device="tpu9")
    with pytest.raises(ConfigError, match=r"sees no CUDA device|CUDA devices"):
        engine(path, device="cuda:99")


def test_a_directory_without_weights_and_an_unset_path(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        engine(path)
    with pytest.raises(ConfigError, match=r"target\.path"):
        HfEngine(TargetConfig(), EngineConfig())


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    path = save("llama", tmp_path / "t")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        list(engine(path).capture(Source(requests([3]))))


def hooked(monkeypatch: pytest.MonkeyPatch, module: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Let the model that the engine loads treat the input of one of its modules as `change` says."""
    original = HfEngine._load_model

    def load_model(engine: HfEngine) -> torch.nn.Module:
        model = original(engine)
        model.get_submodule(module).register_forward_pre_hook(lambda _, args: change(args[0]))
        return model

    monkeypatch.setattr(HfEngine, "_load_model", load_model)


def test_a_layer_that_writes_into_its_input_does_not_change_what_was_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save("llama", tmp_path / "t")
    plain = answers_of(engine(path, (2,)), Source(requests([7])))

    def double(states: torch.Tensor) -> None:
        states.mul_(2)

    hooked(monkeypatch, "model.layers.2", double)
    changed = answers_of(engine(path, (2,)), Source(requests([7])))
    ((sample_id, answer),) = changed.items()
    assert torch.equal(tensor(answer.fields["hidden.2"]), tensor(plain[sample_id].fields["hidden.2"]))
    assert not torch.equal(tensor(answer.fields[LAST]), tensor(plain[sample_id].fields[LAST]))


@pytest.mark.parametrize(
    ("module", "change", "words"),
    [
        ("model.norm", lambda states: states + 1, "'model.norm' does not take the last decoder layer's output"),
        ("model.layers.2", lambda states: states.repeat(2, 1, 1), "not one residual stream through 'model.layers'"),
    ],
)
def test_a_model_that_is_connected_otherwise_is_refused(
    module: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save("llama", tmp_path / "t")
    hooked(monkeypatch, module, change)
    with pytest.raises(EngineError, match=words):
        list(engine(path).capture(Source(requests([3]))))


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class BroughtConfig(LlamaConfig):
    model_type = "brought_along"


class BroughtForCausalLM(LlamaForCausalLM):
    config_class = BroughtConfig
"""


def test_code_of_the_target_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    path = save("llama", tmp_path / "t")
    text = (path / "config.json").read_text()
    auto_map = '"auto_map": {"AutoConfig": "code.BroughtConfig", "AutoModelForCausalLM": "code.BroughtForCausalLM"},'
    text = text.replace('"model_type": "llama"', f'{auto_map} "model_type": "brought_along"')
    (path / "config.json").write_text(text)
    (path / "code.py").write_text(CODE)
    with pytest.raises(ConfigError, match="trust_remote_code = true"):
        engine(path)
    (answer,) = answers_of(engine(path, (4,), trust_remote_code=True), Source(requests([7]))).values()
    assert_close(tensor(answer.fields[LAST]), expected_fields(build("llama"), answer.token_ids.tolist())[LAST])


def test_engine_base_needs_no_torch() -> None:
    code = "import sys, eyas.engine.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def pool(limit_bytes: int = 1 << 20) -> HostPool:
    """A pool of ordinary memory: what it does with ranges does not depend on their being page-locked."""
    return HostPool(limit_bytes, slab_bytes=1 << 16, new_slab=lambda n: torch.zeros(n, dtype=torch.uint8))


def test_slabs_that_are_free_make_room_for_a_larger_one() -> None:
    pinned = pool(1 << 18)
    small = [pinned.take(1 << 16) for _ in range(4)]
    assert all(small) and pinned.take(1 << 17) is None
    del small
    assert pinned.take(1 << 17) is not None
    assert pinned.held_bytes == 1 << 17
    assert pinned.take(1 << 16) is not None


def test_a_buffer_is_never_handed_out_while_anybody_sees_it() -> None:
    rng = random.Random(0)
    p = pool()
    views: list[tuple[memoryview, bytes]] = []
    for i in range(2000):
        taken = p.take(rng.randrange(1, 30_000))
        if taken is None or rng.random() < 0.3:
            rng.shuffle(views)
            del views[len(views) // 2 :]
        if taken is not None:
            pattern = bytes([i % 251])
            taken.destination.fill_(pattern[0])
            view = [taken.array.data, taken.array[1:].data, np.asarray(taken.array.data)[:1].data][i % 3]
            views.append((view, pattern))
        del taken
        view, pattern = rng.choice(views) if views else (memoryview(b""), b"")
        assert bytes(view) == pattern * view.nbytes
        del view
    assert p.held_bytes <= 1 << 20
    views.clear()
    gc.collect()
    assert p.free_bytes == p.held_bytes


def test_a_full_pool_says_so_and_a_large_buffer_gets_its_own_slab() -> None:
    p = pool(limit_bytes=1 << 18)
    large = p.take(100_000)
    assert large is not None and p.held_bytes == 102_400
    held = []
    while (taken := p.take(40_000)) is not None:
        held.append(taken)
    assert p.held_bytes <= 1 << 18
    del large
    assert p.take(90_000) is not None


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("pinned_bytes", [1 << 28, 1])
def test_cuda_equals_transformers_through_the_pool_in_any_order_of_release(tmp_path: Path, pinned_bytes: int) -> None:
    """Many batches; views are held, checked and dropped in random order, so that ranges are used again and again."""
    path = save("llama", tmp_path / "t", max_position_embeddings=2048)
    rng = random.Random(0)
    todo = [request(token_ids(rng.randrange(1, 400), seed=i)) for i in range(400)]
    source = Source(todo, quota_tokens=20_000)
    layers = (0, 2, 4)
    options = {"device": "cuda", "batch_tokens": 4096, "extra": {"pinned_bytes": pinned_bytes}}
    found = engine(path, layers, **options)
    model = build("llama", max_position_embeddings=2048).to("cuda")
    held: list[CaptureAnswer] = []
    checked = 0

    def check_one() -> None:
        nonlocal checked
        answer = held.pop(rng.randrange(len(held)))
        expected = expected_fields(model, answer.token_ids.tolist())
        for name, block in answer.fields.items():
            assert_close(tensor(block), expected[name], relative=1e-4)
        source.answered(answer.sample_id)
        checked += 1

    for answer in found.capture(source):
        assert isinstance(answer, CaptureAnswer)
        held.append(answer)
        del answer
        # Keep enough free for the next request, and otherwise as many views alive as the quota allows.
        while held and sum(source.reserved.values()) > 15_000:
            check_one()
    found.close()
    while held:
        check_one()
    assert checked == len(todo)


@pytest.mark.gpu
@CUDA
def test_cuda_reference_and_half_precision(tmp_path: Path) -> None:
    path = save("gemma3", tmp_path / "t")
    todo = requests(with_reference=True)
    answers = answers_of(engine(path, (0, 2), device="cuda", dtype="bfloat16"), Source(todo))
    for answer in answers.values():
        assert answer.reference is not None
        for k in (0, 2):
            hidden = torch.from_numpy(answer.reference.hidden[k])
            assert_close(tensor(answer.fields[hidden_field(k)]), hidden, relative=0.05)
        for name, block in answer.reference.alone.items():
            assert_close(tensor(answer.fields[name]), tensor(block), relative=0.05)


@pytest.mark.gpu
@CUDA
def test_cuda_out_of_memory_is_real_and_survived(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "t", max_position_embeddings=1 << 20)
    found = engine(path, device="cuda", batch_tokens=400_000)
    device = torch.device("cuda", 0)
    _, total = torch.cuda.mem_get_info(device)
    list(found.capture(Source(requests([3]))))
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + (256 << 20)) / total, device)
    try:
        todo = [request(token_ids(n, seed=i)) for i, n in enumerate([600] * 200)]
        results = list(found.capture(Source(todo)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    failures = [r for r in results if isinstance(r, CaptureFailure)]
    assert not failures, f"{len(failures)} of {len(results)}: {failures[0].error}"
    assert len(results) == len({r.sample_id for r in results}) == 200
