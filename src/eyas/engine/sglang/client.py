"""The `sglang` engine: captures from a running SGLang server that has our plugin."""

from __future__ import annotations

from eyas.config import EngineConfig, TargetConfig
from eyas.engine.client import ServerEngine
from eyas.engine.sglang.server import SGLANG


class SglangEngine(ServerEngine):
    """See `engine.client.ServerEngine`."""

    def __init__(self, target: TargetConfig, engine: EngineConfig, aux_layers: tuple[int, ...] | None = None) -> None:
        super().__init__(SGLANG, target, engine, aux_layers)
