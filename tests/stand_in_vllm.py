"""A stand-in for a vLLM server with our connector: a tiny model behind real HTTP and the connector's real two sides."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path
from typing import Any

import torch

from eyas.engine.room import StagingLimits
from eyas.engine.settings import Settings
from eyas.engine.staged import RequestName
from eyas.engine.vllm.scheduler import Finished, SchedulerSide
from eyas.engine.vllm.worker import Slots, WorkerSide
from stand_in_server import Act, Asked, StandIn, load

BLOCK = 4
"""Tokens in a block of the cache."""


class StandInVllm(StandIn):
    """Computes in batches, keeps states in blocks of a small cache, answers before they are written, as vLLM does."""

    def __init__(self, target: Path, staging: Path, *, layers: tuple[int, ...] = (1, 2, 3), staged_bytes: int = 1 << 26,
                 num_blocks: int = 256, neighbours: bool = True, lost_row: int | None = None, pre_norm: bool = True,
                 **options: Any) -> None:  # fmt: skip
        config = load(target).config
        depth, width = config.num_hidden_layers, config.hidden_size
        extracted = {*layers, depth} | ({k - 1 for k in layers if k > 1} if neighbours else set())
        self.extracted = sorted(extracted)
        self.lost_row = lost_row
        slots = Slots(self.extracted, layers, depth)
        limits = StagingLimits(staged_bytes, 0, 1 << 26)
        self.cache = torch.zeros(num_blocks, len(extracted), BLOCK, width)
        self.free = list(range(num_blocks))
        self.held: dict[str, list[int]] = {}
        said: dict[str, Any] = {}
        self.scheduler = SchedulerSide(
            Settings(staging, layers, limits), said, block_size=BLOCK,
            fields_bytes=lambda name: 4 * width * len(slots.of(name)), pool_bytes=None,
        )  # fmt: skip
        self.worker = WorkerSide(self.cache, slots, staging, limits, num_threads=2)
        about = {
            "vllm": "0.0.stand-in", "last_hidden_norm": "pre", "max_tokens": 400, "chunked_prefill": True,
            "prefix_caching": False, "neighbours": slots.has_neighbours, **options.pop("about", {}),
        }  # fmt: skip
        super().__init__(target, staging, layers=layers, staged_bytes=staged_bytes, pre_norm=pre_norm,
                         **{**about, **options})  # fmt: skip
        said.update(self.about)

    def ask(self, body: dict[str, Any]) -> tuple[Act, dict[str, Any]]:
        name = RequestName.parse(str((body.get("kv_transfer_params") or {}).get("eyas")))
        return self.answer(name, list(body["prompt"]), "prompt_logprobs" in body, {})

    def hello(self, name: RequestName) -> Any:
        _, told = self.scheduler.finished(Finished("hello", {"eyas": str(name)}, [1], 1, [], True))
        assert told is not None
        return told["eyas"]

    def text(self, meta: dict[str, Any]) -> str:
        choice = {"text": "", "finish_reason": meta.get("finish_reason", "length")}
        choice["prompt_logprobs"] = meta.get("prompt_logprobs")
        told = {"eyas": meta["eyas"]} if "eyas" in meta else None
        return json.dumps({"choices": [choice], "kv_transfer_params": told})

    def _compute(self) -> None:
        while True:
            batch = self._next_batch()
            if None in batch:
                return
            work = [item for item in batch if item is not None]
            self._random.shuffle(work)
            self.scheduler.forward([str(asked.name) for asked, _, _ in work])
            for asked, act, out in work:
                states, logprobs = self.states(asked.ids)
                meta = {"eyas": self._keep(asked, act, states)}
                if asked.logprobs:
                    told = [{str(i): {"logprob": value}} for i, value in zip(asked.ids[1:], logprobs, strict=True)]
                    meta["prompt_logprobs"] = [None, *told]
                out.put(meta)
            self.worker.save(self.scheduler.take())

    def _next_batch(self) -> list[tuple[Asked, Act, queue.Queue[dict[str, Any]]] | None]:
        """What has arrived; meanwhile blocks come back."""
        while True:
            self._free_written()
            try:
                batch = [self._queue.get(timeout=0.002)]
                break
            except queue.Empty:
                continue
        while not self._queue.empty() and len(batch) < 8:
            batch.append(self._queue.get())
        return batch

    def _free_written(self) -> None:
        done = self.worker.done()
        self.scheduler.written(done)
        for request_id in done:
            self.free += self.held.pop(request_id)

    def _keep(self, asked: Asked, act: Act, states: dict[str, torch.Tensor]) -> Any:
        """Put a request's states into blocks, and finish it; its answer's word."""
        num_blocks = -(-len(asked.ids) // BLOCK)
        while len(self.free) < num_blocks:
            self.worker.save(self.scheduler.take())
            time.sleep(0.001)
            self._free_written()
        blocks = [self.free.pop(0) for _ in range(num_blocks)]
        fields = [states["last"] if k == self.extracted[-1] else states[f"hidden.{k}"] for k in self.extracted]
        for row in range(len(asked.ids)):
            if row != self.lost_row:
                rows = torch.stack([field[row] for field in fields])
                self.cache[blocks[row // BLOCK], :, row % BLOCK] = rows
        request_id = f"{asked.name}-{asked.nth}"
        finished = Finished(request_id, {"eyas": str(asked.name)}, asked.ids, len(asked.ids), blocks, True)
        keep, told = self.scheduler.finished(finished)
        assert told is not None
        if keep:
            self.held[request_id] = blocks
        else:
            self.cache[blocks] = 0
            self.free += blocks
        return told["eyas"]
