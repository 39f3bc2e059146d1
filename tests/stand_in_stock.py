"""A stand-in for a vLLM server with vLLM's own connector: answers first, writes a file under a lock afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.engine.staged import RequestName
from stand_in_server import Act, Asked, StandIn, load

Write = Callable[[Asked, Path, dict[str, torch.Tensor]], bool]
"""Puts something else at the path; whether it did."""


class StandInStock(StandIn):
    """One answer at a time is computed; its file is written by a thread of its own, as vLLM does."""

    def __init__(self, target: Path, staging: Path, *, layers: tuple[int, ...] = (1, 2, 3),
                 write: Write = lambda *_: False, write_s: float = 0.01, **options: Any) -> None:  # fmt: skip
        self.extracted = sorted({*layers, load(target).config.num_hidden_layers})
        self.write, self.write_s = write, write_s
        super().__init__(target, staging, layers=layers, pre_norm=True, **options)

    def ask(self, body: dict[str, Any]) -> tuple[Act, dict[str, Any]]:
        name = RequestName.parse(body["request_id"])
        assert name is not None
        ids = list(body["prompt"])
        if name.run == "0" * 16:  # a first question, which is a request like any other here
            meta: dict[str, Any] = {}
            self._stage(Asked(name, ids, False, 1), meta)
            return Act(), meta
        return self.answer(name, ids, "prompt_logprobs" in body, {})

    def pages(self) -> dict[str, str]:
        model = {"data": [{"root": str(self.about["model_path"]), "max_model_len": 401}]}
        return {"/health": "", "/version": '{"version": "0.32.0"}', "/v1/models": json.dumps(model), "/metrics": ""}

    def text(self, meta: dict[str, Any]) -> str:
        choice = {"text": "", "finish_reason": "length", "prompt_logprobs": meta.get("prompt_logprobs")}
        return json.dumps({"choices": [choice], "kv_transfer_params": meta.get("told")})

    def _compute(self) -> None:
        while (item := self._queue.get()) is not None:
            asked, _, out = item
            meta: dict[str, Any] = {}
            if asked.logprobs:
                _, logprobs = self.states(asked.ids)
                told = [{str(i): {"logprob": value}} for i, value in zip(asked.ids[1:], logprobs, strict=True)]
                meta["prompt_logprobs"] = [None, *told]
            self._stage(asked, meta)
            out.put(meta)

    def _stage(self, asked: Asked, meta: dict[str, Any]) -> None:
        """Make the lock and hold it; the answer names the file, which comes later."""
        path = self.staging / f"cmpl-{asked.name}-0-{len(self.asked):08x}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        states, _ = self.states(asked.ids)
        fields = [states["last"] if k == self.extracted[-1] else states[f"hidden.{k}"] for k in self.extracted]
        tensors = {"hidden_states": torch.stack(fields, dim=1).contiguous(), "token_ids": torch.tensor(asked.ids)}

        def write() -> None:
            try:
                time.sleep(self.write_s)
                if not self.write(asked, path, tensors):
                    save_file(tensors, path)
            finally:
                os.close(lock)

        threading.Thread(target=write, daemon=True).start()
        meta["told"] = {"hidden_states_path": str(path)}
