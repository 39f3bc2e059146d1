"""Inside a vLLM server: a KV connector that stages the hidden states that vLLM's own extraction has put into its cache.

vLLM loads it by `kv_connector_module_path`, no patch: once in the scheduler's process and once in each worker's. Its
own method `extract_hidden_states` computes; ids are hidden-state indices, and the id of the number of layers is the
last layer's output before the final norm. Requests that do not name one of our runs pass untouched.

What is raised while the connector is made ends the server, visibly.

Needs torch, NumPy, xxhash and the standard library alone, beside the server itself.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from eyas.engine import staged
from eyas.engine.settings import CaptureSetupError, Settings
from eyas.engine.vllm.arguments import KNOWN_VERSIONS, contradiction
from eyas.engine.vllm.scheduler import Finished, Save, SchedulerSide
from eyas.engine.vllm.worker import Slots, WorkerSide

logger = logging.getLogger("vllm.eyas")
"""Below vLLM's own, whose handlers it takes."""
SETTINGS_KEY = "eyas_settings"
"""In `kv_connector_extra_config`: the path of the launcher's settings file."""
CACHE_LAYER = "cache_only_layers"
"""Part of the name of the layer that keeps hidden states."""
WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


@dataclass
class Saves(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side tells the worker's with a step."""

    saves: list[Save] = field(default_factory=list)


class EyasConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both sides; vLLM calls the methods of the one that the process has."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        version = str(vllm.__version__)
        why = contradiction(vllm_config, version)
        if why is not None:
            raise CaptureSetupError(f"eyas: cannot capture: {why}")
        path = vllm_config.kv_transfer_config.get_from_extra_config(SETTINGS_KEY, None)
        if not path:
            raise CaptureSetupError(
                f"eyas: kv_connector_extra_config has no {SETTINGS_KEY}, the path of capture settings"
            )
        self._settings = Settings.read(Path(path))
        self._config = vllm_config
        model = vllm_config.model_config
        self._num_layers = int(model.get_total_num_hidden_layers())
        self._hidden_size = int(model.get_hidden_size())
        self._aux_layers = self._settings.layers_of(self._num_layers)
        self._layers = self._extracted()
        self._slots = Slots(self._layers, self._aux_layers, self._num_layers)
        self._group, self._block_size = _cache_group(kv_cache_config, vllm_config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            size = torch.empty(0, dtype=model.dtype).element_size()
            self._scheduler = SchedulerSide(
                self._settings,
                self._describe(version),
                block_size=self._block_size,
                fields_bytes=lambda name: len(self._slots.of(name)) * self._hidden_size * size,
                pool_bytes=self._settings.limits.pool_bytes if _device(vllm_config) != "cpu" else None,
            )
            if version.partition("+")[0] not in KNOWN_VERSIONS:
                logger.warning(
                    "eyas: vLLM %s is not one that capture was tried with (%s): the probe at the start of a capture "
                    "decides",
                    version,
                    ", ".join(KNOWN_VERSIONS),
                )
            logger.info(
                "eyas: capturing hidden states %s and the last one (pre-norm) of %d layers, staged in %s",
                list(self._aux_layers),
                self._num_layers,
                self._settings.staging,
            )

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of hidden states. Raises CaptureSetupError."""
        found = {name: cache for name, cache in kv_caches.items() if CACHE_LAYER in name}
        shape = (len(self._layers), self._block_size, self._hidden_size)
        dtype = self._config.model_config.dtype
        fitting = [c for c in found.values() if tuple(c.shape[1:]) == shape and c.dtype == dtype]
        if len(fitting) != 1:
            told = {name: (tuple(c.shape), c.dtype) for name, c in (found or kv_caches).items()}
            raise CaptureSetupError(f"eyas: no cache of hidden states [blocks, {shape}] of {dtype} among {told}")
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self._worker = WorkerSide(
            fitting[0],
            self._slots,
            self._settings.staging,
            self._settings.limits,
            rank=int(get_tensor_model_parallel_rank()),
            num_threads=self._settings.num_threads,
            # A block that is kept for later prompts must stay as it is.
            clear=not self._config.cache_config.enable_prefix_caching,
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: what it asks for is written while its forward runs, not behind it."""
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """A step ends: tell whose blocks are free."""
        if self._worker is None:
            return None, None
        self._begin(self._get_connector_metadata() if self.has_connector_metadata() else None)
        return self._worker.done() or None, None

    def _begin(self, told: KVConnectorMetadata | None) -> None:
        """Begin to write what a step's metadata asks for, once, and what had to wait."""
        saves = []
        if isinstance(told, Saves):
            saves, told.saves = told.saves, []
        if self._worker is not None:
            self._worker.save(saves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The model itself has put its states into the cache."""

    def wait_for_save(self) -> None:
        """Blocks stay a request's own until it is written."""

    def shutdown(self) -> None:
        """Write what is on its way."""
        if self._worker is not None:
            self._worker.close()

    # The scheduler's side.

    def get_finished_count(self) -> int | None:
        """The first rank alone tells when a request is written."""
        return 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers are told with the next forward."""
        assert self._scheduler is not None
        self._scheduler.forward(scheduler_output.num_scheduled_tokens.keys())
        return Saves(self._scheduler.take())

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers tell after a forward."""
        assert self._scheduler is not None
        self._scheduler.written(connector_output.finished_sending or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether blocks are still needed, and what the answer carries as `kv_transfer_params`."""
        assert self._scheduler is not None
        return self._scheduler.finished(
            Finished(
                request_id=request.request_id,
                parameters=request.kv_transfer_params or {},
                token_ids=request.prompt_token_ids or [],
                num_computed=request.num_computed_tokens,
                block_ids=block_ids,
                is_whole=request.status.name in WHOLE,
            )
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with each cache group's blocks."""
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """All slots of a token together: a forward writes it at once."""
        return "LBNHC"

    def _extracted(self) -> tuple[int, ...]:
        """The hidden-state indices that vLLM extracts, in the order of its slots. Raises CaptureSetupError."""
        told = getattr(
            self._config.speculative_config.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", ()
        )
        layers = tuple(int(k) for k in told or ())
        wanted = sorted({*self._aux_layers, self._num_layers})
        if list(layers) != sorted(set(layers)) or not set(wanted) <= set(layers):
            raise CaptureSetupError(
                f"eyas: cannot capture: vLLM was told to extract the layers {list(layers)}; they must ascend and hold "
                f"{wanted} (eagle_aux_hidden_state_layer_ids)"
            )
        return layers

    def _describe(self, version: str) -> dict[str, Any]:
        config, model, parallel = self._config, self._config.model_config, self._config.parallel_config
        scheduler = config.scheduler_config
        device = _device(config)
        return {
            "staged_version": staged.VERSION,
            "vllm": version,
            "torch": str(torch.__version__),
            "architecture": str(model.architectures[0]),
            "model_path": str(model.model),
            "quantization": str(model.quantization or "none"),
            "num_layers": self._num_layers,
            "hidden_size": self._hidden_size,
            "vocab_size": int(model.get_vocab_size()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "aux_layers": list(self._aux_layers),
            "read_back": list(self._layers),
            "neighbours": self._slots.has_neighbours,
            "last_hidden_norm": "pre",
            "tp_rank": 0,
            "tp_size": int(parallel.tensor_parallel_size),
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "max_prefill_tokens": int(scheduler.max_num_batched_tokens),
            # One token is generated.
            "max_tokens": int(model.max_model_len) - 1,
            "staging": str(self._settings.staging),
            "host": socket.gethostname(),
            "uid": os.geteuid(),
            "pid": os.getpid(),
        }


def _device(config: Any) -> str:
    kind = config.device_config.device_type
    return str(kind)


def _cache_group(kv_cache_config: Any, config: Any) -> tuple[int, int]:
    """Which cache group holds the hidden states, and how many tokens a block of it. Raises CaptureSetupError."""
    groups = list(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else []
    found = [i for i, group in enumerate(groups) if any(CACHE_LAYER in name for name in group.layer_names)]
    if len(found) != 1:
        raise CaptureSetupError(f"eyas: cannot capture: {len(found)} of {len(groups)} cache groups hold hidden states")
    return found[0], int(groups[found[0]].kv_cache_spec.block_size)
