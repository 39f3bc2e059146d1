"""The `vllm` engine: captures from a running vLLM server that has our connector."""

from __future__ import annotations

from eyas.config import EngineConfig, TargetConfig
from eyas.engine.client import ServerEngine
from eyas.engine.vllm.server import VLLM


class VllmEngine(ServerEngine):
    """See `engine.client.ServerEngine`."""

    def __init__(self, target: TargetConfig, engine: EngineConfig, aux_layers: tuple[int, ...] | None = None) -> None:
        super().__init__(VLLM, target, engine, aux_layers)
