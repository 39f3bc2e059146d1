"""vLLM's own connector for hidden states, on a CPU: it copies through CUDA streams and page-locked memory by itself."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector

_empty_like = torch.empty_like


def _unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    return _empty_like(*args, **options)


class StockOnCpu(ExampleHiddenStatesConnector):
    """What it writes, names, locks and answers is its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        torch.cuda.Stream = torch.cuda.Event = MagicMock
        torch.cuda.stream = lambda _: contextlib.nullcontext()
        torch.empty_like = _unpinned
        super().__init__(*args, **options)
