"""The way that eyas exists to end, as a plugin for side-by-side figures: each request's states go through `torch.save`,
one file for each layer, into shared memory, and an empty file `done` says that they are there. Loaded by SGLang from a
directory that `sglang_capture.py` writes; not part of eyas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    setup = "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
    HookRegistry.register(f"{setup}.configure_aux_hidden_state_capture", around_setup, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor.forward", around_logits, HookType.AROUND)


def around_setup(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    layers = [int(k) - 1 for k in os.environ["FOUNDING_LAYERS"].split(",")]
    kwargs["model"].set_eagle3_layers_to_capture(layers)
    return result


def around_logits(original: Any, *args: Any, **kwargs: Any) -> Any:
    batch = args[4]
    rids = getattr(batch, "rids", None) or []
    if batch.forward_mode.is_extend() and any(rid.startswith("req_") for rid in rids):
        states = [*(args[5] if len(args) > 5 else kwargs["aux_hidden_states"]), args[2]]
        start = 0
        for rid, rows in zip(rids, batch.extend_seq_lens_cpu, strict=True):
            if rid.startswith("req_"):
                directory = Path(os.environ["FOUNDING_DUMPS"]) / rid
                directory.mkdir(parents=True)
                for i, tensor in enumerate(states):
                    torch.save(tensor[start : start + rows].cpu(), directory / f"layer_{i}.pt")
                (directory / "done").touch()
            start += rows
    return original(*args, **kwargs)
