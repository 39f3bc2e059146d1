"""Inside an SGLang server: hands the hidden states of our requests to the stager. No patch, official hooks alone.

SGLang loads this through the entry-point group `sglang.srt.plugins` in every process. It does nothing unless the
launcher names a settings file in `EYAS_CAPTURE`. Then two of SGLang's functions are wrapped: the one that sets a model
up for auxiliary states, where the layers are chosen by our indices and read back, and the logits processor's forward,
which sees a batch, its requests' names, the auxiliary states and the final ones (after the norm).

SGLang swallows what a plugin raises while it is loaded, so a server may run without it: the client notices, since the
answers then say nothing. What is raised while the model is set up ends the server, visibly.

Needs torch, NumPy, xxhash and the standard library alone, beside the server itself.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.engine import staged
from eyas.engine.staged import INFO_KEY, RequestName
from eyas.engine.stager import Stager, StagingLimits

logger = logging.getLogger(__name__)

SETTINGS_VARIABLE = "EYAS_CAPTURE"
"""Set by the launcher alone: the path of the settings file."""
KNOWN_VERSIONS = ("0.5.17", "0.5.23")
"""SGLang versions that the plugin was run in; others warn, and the client's probe decides."""
LAST = "last"
_SETUP = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"


class CaptureSetupError(RuntimeError):
    """The server cannot capture as it was started; it ends."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the launcher asks of the plugin."""

    staging: Path
    aux_layers: tuple[int, ...] | None
    """Hidden-state indices; None = `[2, L//2, L-3]`."""
    limits: StagingLimits
    num_threads: int = 4

    @classmethod
    def read(cls, path: Path) -> Settings:
        """From the launcher's JSON. Raises CaptureSetupError."""
        try:
            body = json.loads(path.read_text())
            layers = body["aux_layers"]
            if not isinstance(layers, list | None):
                raise TypeError(f"aux_layers is {layers!r}")
            return cls(
                staging=Path(body["staging"]),
                aux_layers=None if layers is None else tuple(int(k) for k in layers),
                limits=StagingLimits(int(body["staged_bytes"]), int(body["min_free_bytes"]), int(body["pool_bytes"])),
                num_threads=int(body.get("num_threads", 4)),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CaptureSetupError(f"eyas: {path} cannot be read as capture settings: {error!r}") from None


def register() -> None:
    """The entry point. Without the launcher's variable nothing happens at all."""
    path = os.environ.get(SETTINGS_VARIABLE)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin = Plugin(Settings.read(Path(path)))
    HookRegistry.register(_SETUP, plugin.around_setup, HookType.AROUND)
    HookRegistry.register(_LOGITS, plugin.around_logits, HookType.AROUND)
    version = sglang_version()
    if version not in KNOWN_VERSIONS:
        logger.warning(
            "eyas: SGLang %s is not one that capture was tried with (%s): the probe at the start of a capture decides",
            version,
            ", ".join(KNOWN_VERSIONS),
        )


def sglang_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Plugin:
    """One scheduler process's part of the capture."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stager: Stager | None = None
        self._layers: tuple[int, ...] = ()
        self._taps: Taps | None = None
        self._about: dict[str, Any] = {}

    def around_setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `configure_aux_hidden_state_capture`: choose the layers, refuse what cannot be captured from."""
        result = original(*args, **kwargs)
        model = kwargs["model"] if "model" in kwargs else args[0]
        arguments = _server_arguments()
        if not arguments:
            logger.warning("eyas: the server's arguments cannot be read: what contradicts capture is not refused")
        why = contradiction(arguments)
        if why is not None:
            raise CaptureSetupError(f"eyas: cannot capture: {why}")
        config = text_config(model)
        num_layers = int(config.num_hidden_layers)
        wanted = self._settings.aux_layers
        if wanted is None:
            wanted = tuple(sorted({min(max(k, 0), num_layers) for k in (2, num_layers // 2, num_layers - 3)}))
        outside = [k for k in wanted if not 0 <= k <= num_layers]
        if outside or list(wanted) != sorted(set(wanted)):
            raise CaptureSetupError(
                f"eyas: aux_layers {list(wanted)} must ascend, without repeats, within 0..{num_layers}"
            )
        self._layers = wanted
        self._taps = Taps(model, wanted, num_layers)
        rank = _tensor_parallel_rank()
        self._stager = Stager(
            self._settings.staging, self._settings.limits, rank=rank, num_threads=self._settings.num_threads
        )
        self._about = self._describe(model, config, arguments, rank)
        logger.info("eyas: capturing hidden states %s and the last one (post-norm) of %d layers, staged in %s",
                    list(wanted), num_layers, self._settings.staging)  # fmt: skip
        return result

    def around_logits(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `LogitsProcessor.forward(self, input_ids, hidden_states, lm_head, batch, aux_hidden_states=None)`."""
        batch: Any = args[4] if len(args) > 4 else kwargs.get("logits_metadata")
        answers = self._answers(batch, args, kwargs)
        output = original(*args, **kwargs)
        if any(answer is not None for answer in answers):
            try:
                output.customized_info = {**(output.customized_info or {}), INFO_KEY: answers}
            except Exception:
                logger.exception("eyas: this server's answers cannot carry ours")
        return output

    def _answers(
        self, batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any] | None]:
        """What the answers of a forward's requests say; whatever goes wrong here is told there."""
        if self._stager is None or self._taps is None:
            return ()
        tapped = self._taps.collect()
        names = names_of(batch)
        if not any(names):
            return ()
        try:
            return self._stage(names, batch, args, kwargs, tapped)
        except Exception as error:
            logger.exception("eyas: staging failed")
            self._stager.counts["failed"] += sum(name is not None for name in names)
            failure = {"error": f"{type(error).__name__}: {error}", "reason": "plugin", "retry": True}
            return [None if name is None else dict(failure) for name in names]

    def _stage(
        self,
        names: list[RequestName | None],
        batch: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tapped: Mapping[int, torch.Tensor],
    ) -> list[dict[str, Any] | None]:
        assert self._stager is not None and self._taps is not None
        input_ids = args[1] if len(args) > 1 else kwargs["input_ids"]
        last = args[2] if len(args) > 2 else kwargs["hidden_states"]
        aux = args[5] if len(args) > 5 else kwargs.get("aux_hidden_states")
        num_rows = [int(n) for n in batch.extend_seq_lens_cpu]
        prefix_rows = [int(n) for n in batch.extend_prefix_lens_cpu]
        if not len(num_rows) == len(prefix_rows) == len(names) or sum(num_rows) > len(last):
            raise ValueError(f"a batch of {len(names)} requests, {num_rows} rows, {len(last)} states")
        layers = self._taps.active
        states = layers_of(aux, layers, last.shape[1], tapped, self._taps.by_setter(layers))
        fields = {f"hidden.{k}": states[k] for k in layers} | {LAST: last}
        hello = [name is not None and staged.HELLO in name.flags for name in names]
        # A rank other than the first stages only what is asked of every rank.
        mine = [
            None if name is None or is_hello or (self._about["tp_rank"] and staged.RANKS not in name.flags) else name
            for name, is_hello in zip(names, hello, strict=True)
        ]
        neighbours = {f"hidden.{k}" for k in layers if k not in self._layers}
        answers = self._stager.stage(mine, num_rows, prefix_rows, input_ids, fields, neighbours)
        return [self.hello() if h else answer for h, answer in zip(hello, answers, strict=True)]

    def hello(self) -> dict[str, Any]:
        """What this server is and how much room it has."""
        assert self._stager is not None
        return {"hello": {**self._about, "room": self._stager.room(), "counts": dict(self._stager.counts)}}

    def _describe(self, model: Any, config: Any, arguments: Mapping[str, Any], rank: int) -> dict[str, Any]:
        parameter = embedding_weight(model)
        cuda = parameter.is_cuda
        assert self._taps is not None
        return {
            "staged_version": staged.VERSION,
            "sglang": sglang_version(),
            "torch": str(torch.__version__),
            "architecture": type(model).__name__,
            "model_path": str(arguments.get("model_path", "")),
            "quantization": str(arguments.get("quantization") or "none"),
            "num_layers": int(config.num_hidden_layers),
            "hidden_size": int(config.hidden_size),
            "vocab_size": int(config.vocab_size),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "aux_layers": list(self._layers),
            "read_back": self._taps.read_back(),
            "neighbours": self._taps.can_have_neighbours,
            "last_hidden_norm": "post",
            "tp_rank": rank,
            "tp_size": int(arguments.get("tp_size", 1) or 1),
            "device": torch.cuda.get_device_name(parameter.device) if cuda else "cpu",
            "attention": str(arguments.get("attention_backend")),
            "chunked_prefill_size": arguments.get("chunked_prefill_size"),
            "max_prefill_tokens": arguments.get("max_prefill_tokens"),
            "staging": str(self._settings.staging),
            "host": socket.gethostname(),
            "uid": os.geteuid(),
            "pid": os.getpid(),
        }


class Taps:
    """Which hidden states a model hands out, by our indices: `k` = after `k` decoder layers.

    SGLang's own setter where it can, read back; forward hooks for the embeddings (`0`), for the last layer's output
    (`L`), which the setter silently never captures, and for models without a setter.
    """

    def __init__(self, model: Any, layers: Sequence[int], num_layers: int) -> None:
        self.active: tuple[int, ...] = tuple(layers)
        self._layers = tuple(layers)
        self._num_layers = num_layers
        self._tapped: dict[int, torch.Tensor] = {}
        self._inner: Any = None
        middle = [k for k in layers if 0 < k < num_layers]
        setter = getattr(model, "set_eagle3_layers_to_capture", None)
        self._by_setter: set[int] = set()
        if middle and setter is not None:
            self._inner = set_and_read_back(model, setter, middle)
            self._by_setter = set(middle)
        else:
            for k in middle:
                self._tap_before(decoder_layers(model, num_layers)[k], k)
        if 0 in layers:
            self._tap_before(decoder_layers(model, num_layers)[0], 0)
        if num_layers in layers:
            self._tap_norm(final_norm(model, num_layers), num_layers)
        self.can_have_neighbours = self._inner is not None
        if self.can_have_neighbours:
            self._inner.register_forward_pre_hook(self._choose, with_kwargs=True)

    def by_setter(self, layers: Sequence[int]) -> list[int]:
        """Those of `layers` that come in the list of auxiliary states, in its order."""
        return [k for k in layers if 0 < k < self._num_layers and (k in self._by_setter or k not in self._layers)]

    def read_back(self) -> list[int] | None:
        """What the model itself says that it captures."""
        return _captured_by(self._inner) if self._inner is not None else None

    def collect(self) -> dict[int, torch.Tensor]:
        """What the hooks saw in the forward that just ran; forgotten here."""
        tapped, self._tapped = self._tapped, {}
        return tapped

    def _choose(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a forward: with a request that asks for it, capture the state before each auxiliary one too."""
        batch = next((v for v in (*args, *kwargs.values()) if hasattr(v, "rids")), None)
        asked = any(name is not None and staged.NEIGHBOURS in name.flags for name in names_of(batch))
        layers = set(self._layers)
        if asked:
            layers |= {k - 1 for k in self._layers if k > 1}
        self.active = tuple(sorted(layers))
        _capture_in(self._inner, self.by_setter(self.active))

    def _tap_before(self, layer: Any, k: int) -> None:
        """Keep the residual stream as it enters `layer`."""
        signature = inspect.signature(layer.forward)
        if "hidden_states" not in signature.parameters:
            raise CaptureSetupError(
                f"eyas: {type(layer).__name__} takes no 'hidden_states': hidden state {k} cannot be captured here; "
                "choose other capture.aux_layers"
            )
        if k > 0 and any(name.endswith("_boundary") for name in vars(layer) | layer._modules):
            raise CaptureSetupError(
                f"eyas: {type(layer).__name__} keeps the residual stream outside its layers and the model has no "
                f"set_eagle3_layers_to_capture: hidden state {k} cannot be captured here"
            )

        def hook(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            states, residual = given["hidden_states"], given.get("residual")
            self._tapped[k] = states.clone() if residual is None else states + residual

        layer.register_forward_pre_hook(hook, with_kwargs=True)

    def _tap_norm(self, norm: Any, k: int) -> None:
        """Keep what enters the final norm: the fused norm answers with (normed, residual stream)."""

        def before(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            if len(given) == 1:
                self._tapped[k] = given[0].clone()

        def after(_: Any, __: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 1:
                self._tapped[k] = output[1].clone()  # a buffer that the server uses again

        norm.register_forward_pre_hook(before, with_kwargs=True)
        norm.register_forward_hook(after)


def set_and_read_back(model: Any, setter: Callable[[list[int]], None], layers: Sequence[int]) -> Any:
    """Make a model capture `layers` (our indices) and return the module that says so.

    Most setters take the layer whose output is wanted and add one; some shift by rules of their own. What counts is
    what stands there afterwards. Raises CaptureSetupError when it never equals `layers`.
    """
    seen = []
    for asked in ([k - 1 for k in layers], list(layers)):
        for module in model.modules():
            _mark(module, ())  # setters add marks, they take none away
        try:
            setter(asked)
        except (IndexError, ValueError, AssertionError) as error:
            seen.append(f"{asked} raised {type(error).__name__}: {error}")
            continue
        inner = next((m for m in model.modules() if _captured_by(m)), None)
        found = _captured_by(inner) if inner is not None else None
        if found == list(layers):
            return inner
        seen.append(f"{asked} became {found}")
    raise CaptureSetupError(
        f"eyas: {type(model).__name__}.set_eagle3_layers_to_capture does not give hidden states {list(layers)}: "
        + "; ".join(seen)
    )


def _captured_by(module: Any) -> list[int] | None:
    """The layers before which a module captures, in either of SGLang's two ways of saying it; marks are what counts."""
    marks = _marks(module)
    if any(mark is not None for mark in marks):
        return [i for i, mark in enumerate(marks) if mark] or None
    listed = getattr(module, "layers_to_capture", None)
    return sorted(int(k) for k in listed) if listed else None


def _capture_in(module: Any, layers: Sequence[int]) -> None:
    """Make a module that was set up capture before `layers`."""
    if hasattr(module, "layers_to_capture"):
        module.layers_to_capture = list(layers)
    _mark(module, layers)


def _marks(module: Any) -> list[bool | None]:
    layers = getattr(module, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return []
    return [getattr(layer, "_is_layer_to_capture", None) for layer in layers]


def _mark(module: Any, layers: Sequence[int]) -> None:
    if any(mark is not None for mark in _marks(module)):
        for i, layer in enumerate(module.layers):
            layer._is_layer_to_capture = i in layers


def layers_of(
    aux: Any,
    layers: Sequence[int],
    hidden_size: int,
    tapped: Mapping[int, torch.Tensor],
    by_setter: Sequence[int],
) -> dict[int, torch.Tensor]:
    """The states `[R, H]` by our index, from SGLang's list (or one packed tensor) and from our hooks."""
    if aux is None:
        given: list[torch.Tensor] = []
    elif isinstance(aux, torch.Tensor):
        given = list(torch.split(aux, hidden_size, dim=-1))
    else:
        given = list(aux)
    if len(given) != len(by_setter):
        raise ValueError(f"the model gave {len(given)} auxiliary states, {len(by_setter)} were asked for")
    states = dict(zip(by_setter, given, strict=True)) | dict(tapped)
    missing = [k for k in layers if k not in states]
    if missing:
        raise ValueError(f"no hidden state {missing} in this forward")
    return states


def is_prefill(batch: Any) -> bool:
    """Whether a batch extends sequences, and tells whose."""
    mode = getattr(batch, "forward_mode", None)
    return (
        mode is not None
        and bool(mode.is_extend())
        and bool(getattr(batch, "rids", None))
        and getattr(batch, "extend_seq_lens_cpu", None) is not None
    )


def names_of(batch: Any) -> list[RequestName | None]:
    """The requests of a batch that extends sequences, None for those that are not ours; empty for any other batch."""
    if not is_prefill(batch):
        return []
    return [RequestName.parse(rid) if isinstance(rid, str) else None for rid in batch.rids]


def contradiction(arguments: Mapping[str, Any]) -> str | None:
    """Why a server started with these arguments, resolved, cannot be captured from; None when it can."""
    if not arguments:
        return None

    def size(name: str) -> int:
        return int(arguments.get(name) or 1)

    if arguments.get("speculative_algorithm"):
        return "speculation is on (--speculative-algorithm): captured rows would be mixed with drafted ones"
    if size("pp_size") > 1:
        return "pipeline parallelism (--pp-size) splits the layers over processes; use --tp-size"
    if arguments.get("enable_dp_attention") or size("attn_dp_size") > 1:
        return (
            "DP attention (--enable-dp-attention, --attn-dp-size) splits requests over ranks; only rank 0 stages; use "
            "--tp-size alone"
        )
    if size("attn_cp_size") > 1:
        return "context parallelism (--attn-cp-size) splits a prompt over ranks; use --tp-size"
    if arguments.get("enable_two_batch_overlap"):
        return "two-batch overlap is on: it captures no auxiliary states; start without --enable-two-batch-overlap"
    if not arguments.get("disable_radix_cache"):
        return "the radix cache is on: rows of a cached prefix are never computed; start with --disable-radix-cache"
    backend = _prefill_graphs(arguments.get("cuda_graph_config"))
    if backend not in (None, "disabled"):
        return (
            f"prefill runs in CUDA graphs ({backend}), where nothing can be looked at; start with "
            "--cuda-graph-backend-prefill disabled"
        )
    # SGLang turns it on by itself for most mixtures of experts on more than one GPU.
    if size("tp_size") > 1 and arguments.get("flashinfer_allreduce_fusion_backend"):
        return (
            "all-reduce fusion is on: auxiliary states would be one rank's partial sums; start with "
            "--enforce-disable-flashinfer-allreduce-fusion"
        )
    if size("tp_size") > 1 and arguments.get("enable_aiter_allreduce_fusion"):
        return (
            "all-reduce fusion is on: auxiliary states would be one rank's partial sums; start without "
            "--enable-aiter-allreduce-fusion"
        )
    return None


def _prefill_graphs(config: Any) -> str | None:
    """Which backend captures prefill in graphs, by SGLang's `cuda_graph_config`, an object or written out."""
    prefill = config.get("prefill") if isinstance(config, Mapping) else getattr(config, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", None)
    return None if backend is None else str(getattr(backend, "value", backend))


def text_config(model: Any) -> Any:
    """The text part of a model's configuration."""
    config = model.config
    return next((c for name in ("text_config", "llm_config") if (c := getattr(config, name, None)) is not None), config)


def decoder_layers(model: Any, num_layers: int) -> Any:
    """The list of decoder layers: the list of modules called `layers` that has so many; not a vision tower's."""
    lists = [
        (name, m) for name, m in model.named_modules() if name.split(".")[-1] == "layers" and hasattr(m, "__len__")
    ]
    fitting = [(name, m) for name, m in lists if len(m) == num_layers]
    if not fitting:
        found = ", ".join(f"{name} has {len(m)}" for name, m in lists) or "none"
        raise CaptureSetupError(f"eyas: no list of {num_layers} decoder layers in {type(model).__name__}: {found}")
    return min(fitting, key=lambda found: any(word in found[0] for word in ("vis", "audio", "encoder")))[1]


def final_norm(model: Any, num_layers: int) -> Any:
    """The norm beside the decoder layers."""
    layers = decoder_layers(model, num_layers)
    for module in model.modules():
        if getattr(module, "layers", None) is layers and getattr(module, "norm", None) is not None:
            return module.norm
    raise CaptureSetupError(
        f"eyas: no final norm found in {type(model).__name__}: its last layer's output cannot be captured"
    )


def embedding_weight(model: Any) -> torch.Tensor:
    """The embeddings: never quantised, so of the dtype that the residual stream has."""
    named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    found: torch.Tensor = next((p for name, p in named if "embed_tokens" in name), named[0][1])
    return found


def _server_arguments() -> Mapping[str, Any]:
    """The server's arguments as SGLang resolved them (what was given is another thing); empty where it hides them."""
    try:
        from sglang.srt.runtime_context import get_context

        return dict(get_context().resolved_server_args_dict())
    except (ImportError, AttributeError, ValueError, TypeError, RuntimeError, AssertionError):
        return {}


def _tensor_parallel_rank() -> int:
    try:
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())
    except (ImportError, AttributeError, RuntimeError, AssertionError):
        return 0
