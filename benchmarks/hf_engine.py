"""Engine-only capture against the same model's plain trunk forward: the same batches, one process, taking turns.

    python benchmarks/hf_engine.py --target .cache/smollm2 --dtype bfloat16 --rounds 5

Prints JSON: tokens per second of both (medians over the rounds; real tokens, padding not counted) and the median of the
per-round ratios, by the clock and by the process's CPU time. The second is the one to read on a CPU that other jobs use
too; take one thread there, or waiting threads burn CPU time. Nothing is written: an answer is dropped when it is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from eyas.config import EngineConfig, TargetConfig
from eyas.engine.base import CaptureAnswer, CaptureRequest
from eyas.engine.hf import DTYPES, WINDOW_BATCHES, HfEngine, form_batches, padded_tokens
from eyas.records import as_token_ids, sample_id_of
from eyas.target.structure import find

Times = tuple[float, float]
"""Seconds by the clock and of CPU."""


def now() -> Times:
    return time.perf_counter(), time.process_time()


def since(start: Times) -> Times:
    clock, cpu = now()
    return clock - start[0], cpu - start[1]


class Source:
    """Every request is ready; the engine's window is the only limit."""

    def __init__(self, requests: Sequence[CaptureRequest]) -> None:
        self.waiting = list(requests)

    def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        taken: list[CaptureRequest] = []
        while self.waiting and (not taken or sum(len(r.token_ids) for r in (*taken, self.waiting[0])) <= max_tokens):
            taken.append(self.waiting.pop(0))
        return taken


def batches_of(requests: Sequence[CaptureRequest], batch_tokens: int) -> list[list[CaptureRequest]]:
    """The batches that the engine forms of these requests."""
    source, batches = Source(requests), []
    while window := source.take(
        WINDOW_BATCHES["cuda" if torch.cuda.is_available() else "cpu"] * batch_tokens, wait=True
    ):
        batches += form_batches(window, batch_tokens)
    return batches


def random_requests(args: argparse.Namespace, vocab_size: int) -> list[CaptureRequest]:
    rng = random.Random(args.seed)
    requests, tokens = [], 0
    while tokens < args.tokens:
        ids = as_token_ids([rng.randrange(vocab_size) for _ in range(rng.randint(args.shortest, args.longest))])
        requests.append(CaptureRequest(sample_id_of(ids), ids))
        tokens += len(ids)
    return requests


@torch.inference_mode()
def time_plain(trunk: torch.nn.Module, batches: Sequence[Sequence[CaptureRequest]], device: torch.device) -> Times:
    start = now()
    for batch in batches:
        padded = torch.zeros(len(batch), max(len(r.token_ids) for r in batch), dtype=torch.long)
        for row, request in zip(padded.numpy(), batch, strict=True):
            row[: len(request.token_ids)] = request.token_ids
        trunk(input_ids=padded.to(device), use_cache=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return since(start)


def time_capture(engine: HfEngine, requests: Sequence[CaptureRequest]) -> tuple[Times, int]:
    start, num_bytes, answered = now(), 0, 0
    for answer in engine.capture(Source(requests)):
        assert isinstance(answer, CaptureAnswer), answer
        num_bytes += sum(block.num_bytes for block in answer.fields.values())
        answered += 1
    assert answered == len(requests)
    return since(start), num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of one round, at least")
    parser.add_argument("--shortest", type=int, default=50)
    parser.add_argument("--longest", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of torch; default: torch's own")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    settings = EngineConfig(dtype=args.dtype, device=args.device, batch_tokens=args.batch_tokens)
    engine = HfEngine(TargetConfig(path=args.target), settings)
    info = engine.info()
    requests = random_requests(args, info.spec.vocab_size)
    tokens = sum(len(r.token_ids) for r in requests)
    batches = batches_of(requests, args.batch_tokens)
    device = torch.device(args.device)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=DTYPES[args.dtype]).to(device).eval()
    trunk = find(model).trunk

    # Both once before the clock counts: weights paged in, kernels chosen, page-locked memory warm.
    time_plain(trunk, batches, device)
    time_capture(engine, requests)
    plain: list[Times] = []
    capture: list[Times] = []
    num_bytes = 0
    for turn in range(args.rounds):
        # Who goes first changes, so that a drift of the machine favours neither.
        for which in ("plain", "capture") if turn % 2 == 0 else ("capture", "plain"):
            if which == "plain":
                plain.append(time_plain(trunk, batches, device))
            else:
                times, num_bytes = time_capture(engine, requests)
                capture.append(times)
    engine.close()
    result = {
        "target": args.target.name,
        "aux_layers": info.spec.aux_layers,
        "settings": info.provenance.settings,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "samples": len(requests),
        "tokens": tokens,
        "padding_fraction": round(1 - tokens / sum(map(padded_tokens, batches)), 4),
        "bytes_per_round": num_bytes,
        "rounds": args.rounds,
        "plain_tokens_per_s": round(tokens / statistics.median(clock for clock, _ in plain), 1),
        "capture_tokens_per_s": round(tokens / statistics.median(clock for clock, _ in capture), 1),
        "median_ratio": round(statistics.median(p[0] / c[0] for p, c in zip(plain, capture, strict=True)), 4),
        "median_ratio_cpu": round(statistics.median(p[1] / c[1] for p, c in zip(plain, capture, strict=True)), 4),
        "plain_s": [[round(t, 3) for t in times] for times in plain],
        "capture_s": [[round(t, 3) for t in times] for times in capture],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
