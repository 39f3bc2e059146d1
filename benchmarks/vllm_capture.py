"""Capture from a vLLM server to verified shards, fsync included, against plain prefill of the same vLLM, in pairs.

Both servers run already: the capturing one as `eyas serve` starts it, the plain one without `--speculative-config` and
`--kv-transfer-config`. Beside wall time, the CPU seconds of servers and client are told: on a CPU that others use they
compare better.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from eyas.capture.run import capture
from eyas.config import CaptureConfig, EngineConfig, TargetConfig
from eyas.data.table import SampleTable
from eyas.engine.vllm.client import VllmEngine
from eyas.log import Progress, setup
from eyas.store.verify import verify
from eyas.target.files import open_target
from hf_capture import capturing_seconds
from sglang_capture import Ids, answered_in, make_prompts, make_table

TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    options = parse()
    setup()
    options.scratch.mkdir(parents=True, exist_ok=True)
    vocab_size = int(open_target(options.target).config["vocab_size"])
    for lengths in options.lengths:
        ids = make_prompts(lengths, options.tokens, min(vocab_size, 50_000), options.max_length)
        table = make_table(options.scratch / "samples.parquet", ids)
        runs = []
        for repeat in range(options.repeats + 1):
            pair = {"plain": plain(ids, options), "capture": captured(table, options)}
            if repeat:  # the first one warms caches and the client
                runs.append(pair)
        tokens = sum(map(len, ids))
        report = verify(options.scratch / "states")
        assert report.exit_code == 0, report.problems
        result: dict[str, Any] = {"lengths": lengths, "samples": len(ids), "tokens": tokens}
        for i, clock in enumerate(("wall", "cpu")):
            ratios = [run["plain"][i] / run["capture"][i] for run in runs]
            result[f"{clock}_ratio"] = round(statistics.median(ratios), 3)
            result[f"{clock}_ratios"] = [round(ratio, 3) for ratio in ratios]
            for name in ("plain", "capture"):
                rate = statistics.median(tokens / run[name][i] for run in runs)
                result[f"{name}_tokens_per_{clock}_s"] = round(rate, 1)
        print(json.dumps(result), flush=True)
        shutil.rmtree(options.scratch / "states", ignore_errors=True)


def plain(ids: Ids, options: argparse.Namespace) -> tuple[float, float]:
    """Wall and CPU seconds for the plain server to prefill all prompts, so many tokens in flight."""
    more = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    before = cpu_seconds(options.plain_pid)
    seconds = answered_in(options.plain, "/v1/completions", "prompt", ids, more, options.in_flight_tokens)
    return seconds, cpu_seconds(options.plain_pid) - before


def captured(table: SampleTable, options: argparse.Namespace) -> tuple[float, float]:
    """Wall seconds from the first request of the run proper to the last commit; CPU seconds of the whole run."""
    out = options.scratch / "states"
    shutil.rmtree(out, ignore_errors=True)
    engine = VllmEngine(
        TargetConfig(path=options.target), EngineConfig(kind="vllm", url=options.capture, check_layers="off")
    )
    config = CaptureConfig(out=out, shard_tokens=options.tokens // 4, check_fraction=0.0, min_free_bytes=0)
    before = cpu_seconds(options.capture_pid)
    capture(config, table, engine, None, progress=Progress(), stop=threading.Event())
    used = cpu_seconds(options.capture_pid) - before
    engine.close()
    return capturing_seconds(out), used


def cpu_seconds(pid: int) -> float:
    """Of this process, and of a server and all that it started."""
    total = time.process_time()
    waiting = [pid]
    while waiting:
        one = Path(f"/proc/{waiting.pop()}")
        fields = (one / "stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
        for children in one.glob("task/*/children"):
            waiting += map(int, children.read_text().split())
    return total


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--plain", required=True, help="the plain server's address")
    parser.add_argument("--plain-pid", type=int, required=True)
    parser.add_argument("--capture", required=True, help="the capturing server's address")
    parser.add_argument("--capture-pid", type=int, required=True)
    parser.add_argument("--lengths", nargs="+", default=["512"], help="tokens of a prompt, or mix")
    parser.add_argument("--max-length", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=40_000, help="of one run")
    parser.add_argument("--in-flight-tokens", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
