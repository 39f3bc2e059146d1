"""The `vllm` engine: captures from a running vLLM server that has our connector, or vLLM's own."""

from __future__ import annotations

from eyas.config import EngineConfig, TargetConfig
from eyas.engine.client import ServerEngine
from eyas.engine.dialect import Dialect
from eyas.engine.vllm.server import VLLM
from eyas.engine.vllm.stock import StockVllm


class VllmEngine(ServerEngine):
    """See `engine.client.ServerEngine`."""

    def __init__(self, target: TargetConfig, engine: EngineConfig, aux_layers: tuple[int, ...] | None = None) -> None:
        told = engine.stock_layers
        dialect: Dialect = VLLM if told is None else StockVllm(target, told, aux_layers)
        super().__init__(dialect, target, engine, aux_layers)
