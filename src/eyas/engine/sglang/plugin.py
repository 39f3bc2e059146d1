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
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.engine import staged
from eyas.engine.settings import CaptureSetupError, Settings
from eyas.engine.sglang.arguments import contradiction, server_arguments
from eyas.engine.sglang.taps import Taps, layers_of, names_of
from eyas.engine.staged import INFO_KEY, RequestName
from eyas.engine.stager import Stager

logger = logging.getLogger(__name__)

SETTINGS_VARIABLE = "EYAS_CAPTURE"
"""Set by the launcher alone: the path of the settings file."""
KNOWN_VERSIONS = ("0.5.17", "0.5.23")
"""SGLang versions that the plugin was run in; others warn, and the client's probe decides."""
LAST = "last"
_SETUP = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"


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
        arguments = server_arguments()
        if not arguments:
            logger.warning("eyas: the server's arguments cannot be read: what contradicts capture is not refused")
        why = contradiction(arguments)
        if why is not None:
            raise CaptureSetupError(f"eyas: cannot capture: {why}")
        config = text_config(model)
        num_layers = int(config.num_hidden_layers)
        wanted = self._settings.layers_of(num_layers)
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


def text_config(model: Any) -> Any:
    """The text part of a model's configuration."""
    config = model.config
    return next((c for name in ("text_config", "llm_config") if (c := getattr(config, name, None)) is not None), config)


def embedding_weight(model: Any) -> torch.Tensor:
    """The embeddings: never quantised, so of the dtype that the residual stream has."""
    named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    found: torch.Tensor = next((p for name, p in named if "embed_tokens" in name), named[0][1])
    return found


def _tensor_parallel_rank() -> int:
    try:
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())
    except (ImportError, AttributeError, RuntimeError, AssertionError):
        return 0
