"""Capture with the `hf` engine to shards on disk, fsync included, against the plain trunk over the same batches.

    python benchmarks/hf_capture.py --target DIR --dtype float32 --tokens 12000 --lengths 50 400
    python benchmarks/hf_capture.py --shape 8b --dtype bfloat16 --tokens 400000 --lengths 200 2000 --batch-tokens 16384

Both run in one process, alternating, `--repeats` times. Prints one JSON object with the medians and their ratio.
`--shape 8b` writes a Llama of the 8B shape with random weights (16 GB) to `--scratch` first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.capture.run import capture
from eyas.config import CaptureConfig, EngineConfig, TargetConfig
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.engine.base import CaptureRequest
from eyas.engine.hf import HfEngine
from eyas.log import Progress, setup
from eyas.records import Sample

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128_256},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1000},
}  # fmt: skip


def make_target(path: Path, shape: str) -> None:
    """A Llama with random weights, saved one block per file so that no second copy of it is ever in memory."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    if (path / "model.safetensors.index.json").exists():
        return
    path.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, dtype="bfloat16", tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        groups.setdefault(parts[2] if "layers" in parts else "rest", {})[name] = tensor
    index: dict[str, str] = {}
    torch.manual_seed(0)
    for group, tensors in groups.items():
        file = f"model-{group}.safetensors"
        made = {}
        for name, tensor in tensors.items():
            values = torch.ones if name.endswith("norm.weight") else torch.randn
            scale = 1.0 if name.endswith("norm.weight") else 0.02
            made[name] = (values(tensor.shape, dtype=torch.bfloat16, device=device) * scale).cpu()
            index[name] = file
        save_file(made, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def make_table(path: Path, tokens: int, lengths: tuple[int, int], vocab_size: int) -> SampleTable:
    rng = np.random.default_rng(1)
    samples = []
    while sum(s.num_tokens for s in samples) < tokens:
        n = int(rng.integers(lengths[0], lengths[1] + 1))
        samples.append(Sample(rng.integers(0, vocab_size, n).astype(np.int32), ((n - 1, n),)))
    total = sum(s.num_tokens for s in samples)
    with TableWriter(path) as out:
        for sample in samples:
            out.append(sample)
        counts = {"num_input": len(samples), "num_kept": len(samples)}
        out.publish(TableMetadata(**counts, num_tokens=total, num_supervised=len(samples)))
    return SampleTable.open(path)


class Recorder:
    """Remembers the batches that the engine forms, so that the plain forward sees the same ones."""

    def __init__(self, engine: HfEngine) -> None:
        self.batches: list[list[np.ndarray[Any, Any]]] = []
        self._start = engine._start
        engine._start = self  # type: ignore[assignment, method-assign]

    def __call__(self, loaded: Any, batch: list[CaptureRequest]) -> Any:
        self.batches.append([request.token_ids for request in batch])
        return self._start(loaded, batch)


@torch.inference_mode()
def plain_seconds(engine: HfEngine, batches: list[list[np.ndarray[Any, Any]]]) -> float:
    """The trunk alone over the same batches: no hooks, no copies, nothing kept."""
    loaded = engine._loaded
    assert loaded is not None
    cuda = engine._device.type == "cuda"
    start = time.perf_counter()
    for batch in batches:
        padded = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long, pin_memory=cuda)
        for row, ids in zip(padded.numpy(), batch, strict=True):
            row[: len(ids)] = ids
        loaded.structure.trunk(input_ids=padded.to(engine._device, non_blocking=True), use_cache=False)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def capturing_seconds(out: Path) -> float:
    """From the first request of the run proper to the last commit: loading and probe left out, fsync included."""
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    begin = next(e["t"] for e in events if e.get("state") == "capturing")
    return float(max(e["t"] for e in events if e["event"] == "commit") - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument(
        "--out", type=Path, nargs="+", help="directories of the data set, one after the other; default: in --scratch"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--lengths", type=int, nargs=2, default=(50, 400))
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--in-flight-bytes", type=int, default=4_000_000_000)
    parser.add_argument("--shard-tokens", type=int)
    parser.add_argument("--pinned-bytes", type=int, help="default: 1.25 times --in-flight-bytes")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    setup()
    options.scratch.mkdir(parents=True, exist_ok=True)
    target = options.target
    if target is None:
        target = options.scratch / "target"
        make_target(target, options.shape)
    engine = HfEngine(
        TargetConfig(path=target),
        EngineConfig(dtype=options.dtype, device=options.device, batch_tokens=options.batch_tokens),
        pinned_bytes=options.pinned_bytes or options.in_flight_bytes * 5 // 4,
    )
    info = engine.info()
    table = make_table(
        options.scratch / "samples.parquet", options.tokens, tuple(options.lengths), min(info.spec.vocab_size, 50_000)
    )
    recorder = Recorder(engine)
    for place in options.out or [options.scratch / "states"]:
        runs: list[dict[str, float]] = []
        for _ in range(options.repeats + 1):
            shutil.rmtree(place, ignore_errors=True)
            recorder.batches.clear()
            config = CaptureConfig(
                out=place,
                shard_tokens=options.shard_tokens,
                in_flight_bytes=options.in_flight_bytes,
                check_fraction=0.0,
                min_free_bytes=0,
            )
            receipt = capture(config, table, engine, None, progress=Progress())
            seconds = capturing_seconds(place)
            # The probe's batch comes first; it is not part of what was timed.
            plain = receipt.captured_tokens / plain_seconds(engine, recorder.batches[1:])
            captured = receipt.captured_tokens / seconds
            runs.append({"capture_tokens_per_s": captured, "plain_tokens_per_s": plain, "ratio": captured / plain})
        del runs[0]  # warm-up: allocator, pinned pool, page cache
        shutil.rmtree(place, ignore_errors=True)
        medians = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
        result = {
            "target": options.shape or str(target.name),
            "out": str(place),
            "device": info.provenance.settings.get("device_name"),
            "dtype": info.spec.dtype,
            "tokens": receipt.tokens,
            "samples": receipt.committed,
            "bytes": receipt.payload_bytes,
            "shards": receipt.shards,
            "batch_tokens": options.batch_tokens,
            "in_flight_bytes": options.in_flight_bytes,
            "cores": os.cpu_count(),
            "GB_per_s": round(medians["capture_tokens_per_s"] * info.spec.bytes_per_token / 1e9, 3),
            **medians,
            "ratios": [round(run["ratio"], 4) for run in runs],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
