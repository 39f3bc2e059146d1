"""The plugin inside a server: right layers, whatever the model's setter thinks, and never in the server's way."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eyas.engine import staged
from eyas.engine.room import StagingLimits
from eyas.engine.settings import CaptureSetupError, Settings, write_settings
from eyas.engine.sglang import plugin as subject
from eyas.engine.sglang.arguments import contradiction
from eyas.engine.sglang.plugin import Plugin
from eyas.engine.sglang.taps import Taps
from eyas.engine.staged import RequestName

H, L, VOCAB = 4, 6, 32
RUN = "0123456789abcdef"
LIMITS = StagingLimits(staged_bytes=1 << 30, min_free_bytes=0, pool_bytes=1 << 30)
GOOD = {"disable_radix_cache": True, "tp_size": 1, "model_path": "m", "chunked_prefill_size": 4096}

# --- a stand-in for a server's models: hidden state k of a token is its embedding plus k, everywhere ---


class Layer(torch.nn.Module):
    """Adds one to the residual stream, with the stream split as `form` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        if form == "marks":
            self._is_layer_to_capture = False

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
        captured_last_layer_outputs: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states.clone() if residual is None else residual.add_(hidden_states)
        if captured_last_layer_outputs is not None:
            captured_last_layer_outputs.append(residual.clone())
        return torch.ones_like(residual), residual


class PlainLayer(torch.nn.Module):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return hidden_states.add_(1)


class Norm(torch.nn.Module):
    """Halves; fused: takes the residual stream too and gives the sum back, in its own buffer."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return x / 2
        residual.add_(x)
        return residual / 2, residual


class Inner(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embed_tokens = torch.nn.Embedding(VOCAB, H)
        self.layers = torch.nn.ModuleList(PlainLayer() if form == "plain" else Layer(form) for _ in range(L))
        self.norm = Norm()
        if form != "plain":
            self.layers_to_capture: list[int] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        hidden, residual, aux = self.embed_tokens(input_ids), None, []
        if self.form == "plain":
            for layer in self.layers:
                hidden = layer(positions, hidden, forward_batch)
            return self.norm(hidden), []
        for i, layer in enumerate(self.layers):
            if self.form == "marks":
                wanted = aux if layer._is_layer_to_capture else None
                hidden, residual = layer(positions, hidden, forward_batch, residual, wanted)
                continue
            if i in self.layers_to_capture:
                aux.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = layer(positions, hidden, forward_batch, residual=residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden, aux


class Logits:
    """Stands for LogitsProcessor: called with the server's own argument order."""

    def forward(self, input_ids: Any, hidden_states: Any, lm_head: Any, logits_metadata: Any,
                aux_hidden_states: Any = None, hidden_states_before_norm: Any = None) -> Any:  # fmt: skip
        return SimpleNamespace(customized_info=logits_metadata.customized_info)


class Model(torch.nn.Module):
    """`form`: `list` or `marks` (how layers are chosen), `plain` (no setter, no residual), `bare` (no setter)."""

    def __init__(self, form: str = "list", rule: Callable[[list[int]], list[int]] | None = None) -> None:
        super().__init__()
        self.model = Inner("list" if form == "bare" else form)
        self.config: Any = SimpleNamespace(num_hidden_layers=L, hidden_size=H, vocab_size=VOCAB)
        self.packed = False
        if form in ("list", "marks"):
            self.rule = rule or (lambda ids: [i + 1 for i in ids])
            self.set_eagle3_layers_to_capture = self._set

    def _set(self, layer_ids: list[int]) -> None:
        self.model.layers_to_capture = self.rule(layer_ids)
        if self.model.form == "marks":
            for i in self.model.layers_to_capture:
                self.model.layers[i]._is_layer_to_capture = True

    def run(self, plugin: Plugin, batch: Any, input_ids: torch.Tensor) -> Any:
        """A forward as the server does it, through the wrapped logits processor."""
        with torch.no_grad():
            hidden, aux = self.model(input_ids, input_ids, batch)
            given: Any = aux or None
            if self.packed and aux:
                given = torch.cat(aux, dim=-1)
            return plugin.around_logits(Logits.forward, Logits(), input_ids, hidden, None, batch, given)


class Multimodal(torch.nn.Module):
    """A wrapper whose vision tower is deeper than its language model."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = torch.nn.Module()
        self.vision_tower.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2 * L))
        self.language_model = Model()
        self.config = SimpleNamespace(text_config=self.language_model.config, hidden_size=1, num_hidden_layers=2 * L)

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.language_model.set_eagle3_layers_to_capture(layer_ids)

    def run(self, *args: Any) -> Any:
        return self.language_model.run(*args)


class Mode:
    def __init__(self, extend: bool) -> None:
        self.extend = extend

    def is_extend(self) -> bool:
        return self.extend


def batch_of(rids: Sequence[Any] | None, num_rows: Sequence[int], prefix: Sequence[int] | None = None, *,
             extend: bool = True, info: Any = None) -> Any:  # fmt: skip
    return SimpleNamespace(
        forward_mode=Mode(extend), rids=rids, extend_seq_lens_cpu=list(num_rows), customized_info=info,
        extend_prefix_lens_cpu=list(prefix or [0] * len(num_rows)),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stands for the modules of SGLang that the plugin imports."""
    state = SimpleNamespace(arguments=dict(GOOD), rank=0, registered=[])

    class HookType:
        AROUND = "around"

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Any, kind: str) -> None:
            state.registered.append((target, hook, kind))

    def context() -> Any:
        if state.arguments is None:
            raise ValueError("Global server args is not set yet!")
        return SimpleNamespace(resolved_server_args_dict=lambda: state.arguments)

    modules: dict[str, dict[str, Any]] = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.runtime_context": {"get_context": context},
        "sglang.srt.distributed": {"get_tensor_model_parallel_rank": lambda: state.rank},
    }  # fmt: skip
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    yield state


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    (path / RUN).mkdir(parents=True)
    return path


def set_up(staging: Path, model: Any, layers: Sequence[int] | None = (2, 3)) -> Plugin:
    plugin = Plugin(Settings(staging, None if layers is None else tuple(layers), LIMITS))
    assert plugin.around_setup(lambda **_: "result", model=model, is_dspark=False) == "result"
    return plugin


def name_of(serial: int, num_tokens: int, flags: str = "") -> RequestName:
    return RequestName(RUN, serial, num_tokens, flags)


def check_file(staging: Path, model: Any, name: RequestName, ids: torch.Tensor, layers: Sequence[int]) -> None:
    """The file holds the embedding plus `k` for each hidden state `k`, and half of it plus `L` for the last one."""
    found = staged.read(name.path(staging), name)
    inner = model.language_model.model if isinstance(model, Multimodal) else model.model
    embedded = inner.embed_tokens.weight.detach()[ids].numpy()
    assert list(found.fields) == [f"hidden.{k}" for k in layers] + ["last"]
    assert found.token_ids.tolist() == ids.tolist()
    for field, (_, shape, data) in found.fields.items():
        states = np.frombuffer(data, "<f4").reshape(shape)
        wanted = (embedded + L) / 2 if field == "last" else embedded + int(field.split(".")[1])
        assert np.allclose(states, wanted, atol=1e-5), field


def capture(staging: Path, model: Any, layers: Sequence[int] | None, *, flags: str = "", rows: int = 5) -> Any:
    """Set up, run one batch with another client's request in it, and check the file."""
    plugin = set_up(staging, model, layers)
    name = name_of(1, rows, flags)
    ids = torch.arange(rows + 2) + 3
    output = model.run(plugin, batch_of(["HEALTH_CHECK_1", str(name)], [2, rows]), ids)
    told = output.customized_info["eyas"]
    assert told[0] is None
    assert "path" in told[1], told
    plugin._stager.close()
    wanted = plugin._layers
    if flags:
        wanted = tuple(sorted({*wanted, *(k - 1 for k in wanted if k > 1)}))
    check_file(staging, model, name, ids[2:], wanted)
    return plugin


# --- register ---


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch, server: SimpleNamespace) -> None:
    monkeypatch.delenv("EYAS_CAPTURE", raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)  # importing it would raise
    subject.register()
    assert server.registered == []


def test_two_hooks_are_registered_and_an_unknown_version_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "capture.json"
    write_settings(path, tmp_path, (2, 3), LIMITS, num_threads=2)
    assert Settings.read(path) == Settings(tmp_path, (2, 3), LIMITS, 2)
    monkeypatch.setenv("EYAS_CAPTURE", str(path))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.23")
    subject.register()
    assert [(target.rsplit(".", 1)[1], kind) for target, _, kind in server.registered] == [
        ("configure_aux_hidden_state_capture", "around"), ("forward", "around"),
    ]  # fmt: skip
    assert not caplog.records
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9.9")
    subject.register()
    assert "SGLang 9.9.9 is not one that capture was tried with (0.5.17, 0.5.23)" in caplog.text


GARBAGE = ["", "[]", "null", "3", "{}", '"x"', '{"staging": 1, "aux_layers": null}', "\udcff", '{"aux_layers": "23"}',
           '{"staging": "/s", "aux_layers": "23", "staged_bytes": 1, "min_free_bytes": 0, "pool_bytes": 1}',
           '{"staging": "/s", "aux_layers": ["a"], "staged_bytes": 1, "min_free_bytes": 0, "pool_bytes": 1}',
           '{"staging": "/s", "aux_layers": null, "staged_bytes": [], "min_free_bytes": 0, "pool_bytes": 1}',
           ]  # fmt: skip


@pytest.mark.parametrize("text", [None, *GARBAGE])
def test_settings_that_make_no_sense_are_one_clear_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "capture.json"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(CaptureSetupError, match=f"^eyas: {path} cannot be read as capture settings: "):
        Settings.read(path)


# --- layers ---


def deepseek(ids: list[int]) -> list[int]:
    return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


def gpt_oss(ids: list[int]) -> list[int]:
    return list(ids) if max(ids) == L else [i + 1 for i in ids]


RULES: dict[str, tuple[str, Any]] = {
    "adds-one": ("list", None), "deepseek": ("list", deepseek), "gpt-oss": ("list", gpt_oss),
    "marks": ("marks", None), "marks-deepseek": ("marks", deepseek), "as-it-is": ("list", list),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("form", "rule", "layers"),
    [
        (form, rule, layers)
        for form, rule in RULES.values()
        for layers in [(2, 3), (1, 5), (2, 3, 4), (3,), (1, 2, 3, 4, 5)]
        if not (rule is deepseek and layers[0] == 1)  # which it cannot say: see below
    ],
)
def test_the_right_layers_whatever_the_setters_rule(
    staging: Path, form: str, rule: Any, layers: tuple[int, ...], packed: bool
) -> None:
    model = Model(form, rule)
    model.packed = packed
    plugin = capture(staging, model, layers)
    assert plugin.hello()["hello"]["read_back"] == list(layers)


@pytest.mark.parametrize("form", ["list", "marks", "bare", "plain"])
@pytest.mark.parametrize("layers", [(0,), (L,), (0, L), (0, 2, L), (0, 1, 5, L), (2, 3)])
def test_embeddings_and_the_last_layer_and_models_without_a_setter(
    staging: Path, form: str, layers: tuple[int, ...]
) -> None:
    capture(staging, Model(form), layers)


def test_a_language_model_inside_another_model(staging: Path) -> None:
    capture(staging, Multimodal(), (0, 2, 3, L))


def test_default_layers(staging: Path) -> None:
    assert set_up(staging, Model(), None)._layers == (2, 3)
    small = Model()
    small.config.num_hidden_layers = 40
    with pytest.raises(CaptureSetupError, match=r"no list of 40 decoder layers in Model: model\.layers has 6"):
        set_up(staging, small, (0,))


@pytest.mark.parametrize("form", ["list", "marks"])
def test_marks_of_a_wrong_attempt_do_not_stay(form: str) -> None:
    model = Model(form, deepseek)
    Taps(model, (2, 5), L)  # asked for [1, 4] gives [2, 5]
    model = Model(form, list)
    taps = Taps(model, (3, 5), L)
    assert taps.read_back() == [3, 5]
    if form == "marks":
        assert [i for i, layer in enumerate(model.model.layers) if layer._is_layer_to_capture] == [3, 5]


@pytest.mark.parametrize("rule", [lambda ids: [i + 2 for i in ids], lambda ids: [1], lambda ids: []])
def test_a_setter_that_never_gives_ours_ends_the_server(staging: Path, rule: Any) -> None:
    with pytest.raises(CaptureSetupError) as raised:
        set_up(staging, Model("list", rule), (2, 3))
    text = str(raised.value)
    assert "Model.set_eagle3_layers_to_capture does not give hidden states [2, 3]" in text
    assert "[1, 2] became" in text and "[2, 3] became" in text


@pytest.mark.parametrize(("form", "layers", "second"), [("list", [1, 3], "[1, 3] became [2, 4]"),
                                                        ("marks", [1, 5], "[1, 5] raised IndexError")])  # fmt: skip
def test_what_a_setter_cannot_say_ends_the_server(staging: Path, form: str, layers: list[int], second: str) -> None:
    with pytest.raises(CaptureSetupError) as raised:
        set_up(staging, Model(form, deepseek), layers)
    assert f"{[k - 1 for k in layers]} became {[k - 1 for k in layers]}; {second}" in str(raised.value)


@pytest.mark.parametrize("layers", [(3, 2), (2, 2), (-1,), (L + 1,)])
def test_layers_out_of_order_or_range_are_refused(staging: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(CaptureSetupError, match=r"must ascend, without repeats, within 0\.\.6"):
        set_up(staging, Model(), layers)


def test_layers_that_do_not_take_hidden_states_are_refused(staging: Path) -> None:
    model = Model("bare")
    model.model.layers = torch.nn.ModuleList(torch.nn.Linear(H, H) for _ in range(L))
    with pytest.raises(CaptureSetupError, match="Linear takes no 'hidden_states': hidden state 0 cannot be captured"):
        set_up(staging, model, (0,))


def test_layers_whose_residual_is_elsewhere_are_refused_beyond_the_first(staging: Path) -> None:
    model = Model("plain")
    for layer in model.model.layers:
        layer.attn_boundary = object()
    with pytest.raises(CaptureSetupError, match="keeps the residual stream outside its layers"):
        set_up(staging, model, (2,))
    set_up(staging, model, (0, L))


def test_a_model_without_a_norm_is_refused_for_its_last_layer(staging: Path) -> None:
    model = Model()
    model.model.norm = None
    with pytest.raises(CaptureSetupError, match="no final norm found in Model"):
        set_up(staging, model, (L,))


# --- neighbours ---


@pytest.mark.parametrize("form", ["list", "marks", "bare", "plain"])
@pytest.mark.parametrize("layers", [(2, 5), (1, 3), (2, 3), (0, 3, L)])
def test_neighbours_for_those_who_ask_and_then_no_more(staging: Path, form: str, layers: tuple[int, ...]) -> None:
    model = Model(form)
    plugin = capture(staging, model, layers, flags="n")
    assert plugin.hello()["hello"]["neighbours"] is True
    plugin = set_up(staging, model := Model(form), layers)
    plain, asking, later = name_of(2, 3), name_of(3, 4, "n"), name_of(4, 3)
    ids = torch.arange(7)
    model.run(plugin, batch_of([str(plain), str(asking)], [3, 4]), ids)
    model.run(plugin, batch_of([str(later)], [3]), ids[:3])
    plugin._stager.close()
    check_file(staging, model, plain, ids[:3], layers)
    check_file(staging, model, later, ids[:3], layers)
    more = sorted({*layers, *(k - 1 for k in layers if k > 1)})
    check_file(staging, model, asking, ids[3:], more)
    has_setter = form in ("list", "marks")
    assert plugin._taps.read_back() == ([k for k in layers if 0 < k < L] if has_setter else None)


@pytest.mark.parametrize("layers", [(0,), (L,), (0, L)])
def test_ends_alone_have_no_neighbours(staging: Path, layers: tuple[int, ...]) -> None:
    assert set_up(staging, Model(), layers).hello()["hello"]["neighbours"] is False


def test_a_setter_that_leaves_the_residual_stream_out_is_not_used(staging: Path) -> None:
    class Gemma3TextModel(Inner):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
            hidden, residual, aux = self.embed_tokens(input_ids), None, []
            for i, layer in enumerate(self.layers):
                if i in self.layers_to_capture:
                    aux.append(hidden)
                hidden, residual = layer(positions, hidden, forward_batch, residual=residual)
            hidden, _ = self.norm(hidden, residual)
            return hidden, aux

    model = Model()
    model.model = Gemma3TextModel("list")
    plugin = capture(staging, model, (0, 2, 3, L), flags="n")
    assert plugin.hello()["hello"]["read_back"] is None


# --- batches ---


@pytest.mark.parametrize(
    "batch",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(forward_mode=None),
        batch_of([f"eyas.{RUN}.1..2"], [2], extend=False),
        batch_of(None, [2]),
        batch_of([], []),
        batch_of(["HEALTH_CHECK_1", 5, None], [1, 1, 1]),
        SimpleNamespace(forward_mode=Mode(True), rids=[f"eyas.{RUN}.1..2"], extend_seq_lens_cpu=None),
    ],
)
def test_other_batches_pass_untouched(staging: Path, batch: Any) -> None:
    plugin = set_up(staging, Model())
    plugin._stager.stage = None  # would raise
    output = SimpleNamespace(customized_info=None)
    seen = []

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return output

    args = ("self", torch.arange(2), torch.zeros(2, H), None, batch, None)
    assert plugin.around_logits(original, *args, more=1) is output
    assert seen == [(args, {"more": 1})]
    assert output.customized_info is None
    assert plugin.around_logits(original, "self", logits_metadata=batch) is output


def test_before_the_model_is_set_up_everything_passes(staging: Path) -> None:
    plugin = Plugin(Settings(staging, (2,), LIMITS))
    output = object()
    assert plugin.around_logits(lambda *_: output, 0, 1, 2, 3, batch_of([str(name_of(1, 2))], [2])) is output


def test_the_originals_exceptions_are_its_own(staging: Path) -> None:
    plugin = set_up(staging, model := Model())

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    for rids in (["HEALTH_CHECK_1"], [str(name_of(1, 2))]):
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            plugin.around_logits(fail, model, torch.arange(2), torch.zeros(2, H), None, batch_of(rids, [2]), None)


def test_keyword_arguments_are_found(staging: Path) -> None:
    plugin = set_up(staging, model := Model("list"))
    name, ids = name_of(1, 3), torch.arange(3)
    batch = batch_of([str(name)], [3])
    with torch.no_grad():
        hidden, aux = model.model(ids, ids, batch)
    output = plugin.around_logits(Logits.forward, Logits(), lm_head=None, logits_metadata=batch, input_ids=ids,
                                  hidden_states=hidden, aux_hidden_states=aux)  # fmt: skip
    assert "path" in output.customized_info["eyas"][0]
    plugin._stager.close()
    check_file(staging, model, name, ids, (2, 3))


def test_a_failure_is_told_and_never_breaks_the_forward(staging: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = set_up(staging, model := Model())
    batch = batch_of(["x", str(name_of(1, 3))], [1, 3])
    with caplog.at_level(logging.CRITICAL):
        told = []
        for aux in (None, [torch.zeros(4, H)], torch.zeros(4, 3 * H), [torch.zeros(2, H)] * 2):
            args = (Logits(), torch.arange(4), torch.zeros(4, H), None, batch, aux)
            told.append(plugin.around_logits(Logits.forward, *args).customized_info["eyas"])
    assert all(first is None for first, _ in told)
    assert [second["error"] for _, second in told] == [
        "ValueError: the model gave 0 auxiliary states, 2 were asked for",
        "ValueError: the model gave 1 auxiliary states, 2 were asked for",
        "ValueError: the model gave 3 auxiliary states, 2 were asked for",
        "ValueError: hidden.2, hidden.3: fewer rows than the 4 of the batch",
    ]
    assert {(second["reason"], second["retry"]) for _, second in told} == {("plugin", True)}
    assert plugin.hello()["hello"]["counts"] == {"failed": 4}
    output = model.run(plugin, batch_of([str(name_of(2, 3))], [5]), torch.arange(4))
    assert "5] rows, 4 states" in output.customized_info["eyas"][0]["error"]
    assert list((staging / RUN).iterdir()) == []


def test_a_forward_whose_hooks_saw_nothing_is_not_answered_with_an_older_ones_states(staging: Path) -> None:
    plugin = set_up(staging, model := Model(), (0, 2))
    model.run(plugin, batch_of(["x"], [3]), torch.arange(3))  # seen, and forgotten
    args = (
        Logits(),
        torch.arange(3),
        torch.zeros(3, H),
        None,
        batch_of([str(name_of(1, 3))], [3]),
        [torch.zeros(3, H)],
    )
    told = plugin.around_logits(Logits.forward, *args).customized_info["eyas"]
    assert told[0]["error"] == "ValueError: no hidden state [0] in this forward"


def test_an_output_that_can_carry_nothing_is_given_back(staging: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = set_up(staging, Model())
    args = (Logits(), torch.arange(3), torch.zeros(3, H), None, batch_of([str(name_of(1, 3))], [3]))
    assert plugin.around_logits(lambda *_: 7, *args, [torch.zeros(3, H)] * 2) == 7
    assert "cannot carry ours" in caplog.text


def test_what_others_say_is_kept(staging: Path) -> None:
    plugin = set_up(staging, model := Model())
    batch = batch_of([str(name_of(1, 3))], [3], info={"theirs": [1]})
    told = model.run(plugin, batch, torch.arange(3)).customized_info
    assert told["theirs"] == [1] and "path" in told["eyas"][0]
    assert batch.customized_info == {"theirs": [1]}


def test_chunks_and_padding(staging: Path) -> None:
    plugin = set_up(staging, model := Model())
    name, ids = name_of(1, 5), torch.arange(5)
    first = model.run(plugin, batch_of([str(name)], [2], [0]), torch.cat([ids[:2], torch.zeros(3, dtype=torch.long)]))
    assert first.customized_info == {"eyas": [{"pending": 2}]}
    model.run(plugin, batch_of([str(name)], [3], [2]), ids[2:])
    plugin._stager.close()
    check_file(staging, model, name, ids, (2, 3))


def test_hello(staging: Path, server: SimpleNamespace) -> None:
    server.arguments |= {"attention_backend": "fa3", "quantization": None, "max_prefill_tokens": 99}
    plugin = set_up(staging, model := Model(), (0, 2))
    output = model.run(plugin, batch_of(["x", f"eyas.{'0' * 16}.1.h.1"], [2, 1]), torch.arange(3))
    assert output.customized_info["eyas"][0] is None
    hello = output.customized_info["eyas"][1]["hello"]
    json.dumps(hello)  # it goes through one
    expected = {"staged_version": staged.VERSION, "architecture": "Model", "model_path": "m", "quantization": "none",
                "num_layers": L, "hidden_size": H, "vocab_size": VOCAB, "dtype": "float32", "aux_layers": [0, 2],
                "read_back": [2], "neighbours": True, "last_hidden_norm": "post", "tp_rank": 0, "tp_size": 1,
                "device": "cpu", "attention": "fa3", "chunked_prefill_size": 4096, "max_prefill_tokens": 99,
                "staging": str(staging), "uid": os.geteuid(), "pid": os.getpid(), "counts": {}}  # fmt: skip
    assert expected.items() <= hello.items()
    assert hello["room"]["staged"] == 0 and hello["room"]["limit"] == 1 << 30
    assert list((staging / RUN).iterdir()) == []


def test_hello_without_its_staging_directory(tmp_path: Path) -> None:
    plugin = set_up(tmp_path / "missing", Model())
    assert plugin.hello()["hello"]["room"]["free"] == 0


def test_other_ranks_stage_what_is_asked_of_every_rank(staging: Path, server: SimpleNamespace) -> None:
    server.rank = 1
    plugin = set_up(staging, model := Model())
    told = model.run(plugin, batch_of([str(name_of(1, 2)), str(name_of(2, 3, "r"))], [2, 3]), torch.arange(5))
    assert told.customized_info["eyas"][0] is None
    plugin._stager.close()
    assert [path.name for path in (staging / RUN).iterdir()] == ["2.rank1"]
    assert plugin.hello()["hello"]["tp_rank"] == 1


# --- what cannot be captured from ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"attn_dp_size": 2}, "--attn-dp-size"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"enable_two_batch_overlap": True}, "without --enable-two-batch-overlap"),
        ({"disable_radix_cache": False}, "start with --disable-radix-cache"),
        ({"disable_radix_cache": None}, "start with --disable-radix-cache"),
        ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, "--cuda-graph-backend-prefill disabled"),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise"))}, "(tc_piecewise)"),
        ({"tp_size": 2, "flashinfer_allreduce_fusion_backend": "auto"},
         "start with --enforce-disable-flashinfer-allreduce-fusion"),
        ({"tp_size": 2, "enable_aiter_allreduce_fusion": True}, "without --enable-aiter-allreduce-fusion"),
    ],
)  # fmt: skip
def test_contradictions_end_the_server_and_name_the_flag(
    staging: Path, server: SimpleNamespace, arguments: dict[str, Any], says: str
) -> None:
    server.arguments |= arguments
    with pytest.raises(CaptureSetupError, match=r"^eyas: cannot capture: ") as raised:
        set_up(staging, Model())
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"pp_size": 1, "attn_dp_size": 1, "attn_cp_size": None, "speculative_algorithm": None},
        {"cuda_graph_config": {"prefill": {"backend": "disabled"}, "decode": {"backend": "full"}}},
        {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))},
        {"tp_size": 1, "flashinfer_allreduce_fusion_backend": "auto"},
        {"tp_size": 2, "flashinfer_allreduce_fusion_backend": None},
    ],
)
def test_what_can_be_captured_from_is(arguments: dict[str, Any]) -> None:
    assert contradiction(GOOD | arguments) is None


def test_arguments_that_are_hidden_are_said(
    staging: Path, server: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    server.arguments = None
    set_up(staging, Model())
    assert "the server's arguments cannot be read" in caplog.text
