"""Resident memory of `capture` against the number of rows in the sample table, with the fake engine.

    python benchmarks/capture_memory.py --rows 10000 1000000

Each size runs in a process of its own. Prints one JSON object: peak and median resident memory while capturing, with
model-free baseline and in-flight bytes subtracted beside the raw figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS")


def make_table(path: Path, rows: int, tokens: int) -> None:
    from eyas.data.table import TableMetadata, TableWriter
    from eyas.records import Sample

    rng = np.random.default_rng(0)
    with TableWriter(path) as out:
        for start in range(0, rows, 10_000):
            ids = rng.integers(0, 50_000, (min(10_000, rows - start), tokens)).astype(np.int32)
            for row in ids:
                out.append(Sample(row, ((tokens - 1, tokens),), source="made", conversation_id="c"))
        out.publish(TableMetadata(num_input=rows, num_kept=rows, num_tokens=rows * tokens, num_supervised=rows))


def measure(table_path: Path, out: Path, in_flight_bytes: int) -> dict[str, float]:
    """Runs in the child: one capture, memory sampled ten times a second."""
    from eyas.capture.run import capture
    from eyas.config import CaptureConfig
    from eyas.data.table import SampleTable
    from eyas.engine.fake import FakeEngine, FakeSettings
    from eyas.log import Progress

    engine = FakeEngine(None, FakeSettings(hidden_size=8, window_tokens=16_384))
    config = CaptureConfig(out=out, shard_tokens=200_000, in_flight_bytes=in_flight_bytes, check_fraction=0.0005)
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.1):
            samples.append(resident_mb())

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    start = time.monotonic()
    receipt = capture(config, SampleTable.open(table_path), engine, engine.head, progress=Progress())
    seconds = time.monotonic() - start
    done.set()
    watcher.join()
    assert receipt.pending == 0
    half = samples[len(samples) // 2 :]
    return {
        "rows": receipt.committed,
        "seconds": round(seconds, 1),
        "peak_mb": round(max(samples), 1),
        "median_mb": round(statistics.median(samples), 1),
        "second_half_median_mb": round(statistics.median(half), 1),
        "samples_per_s": round(receipt.committed / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--tokens", type=int, default=12, help="tokens of each row")
    parser.add_argument("--in-flight-bytes", type=int, default=16_000_000)
    parser.add_argument("--child", nargs=2, metavar=("TABLE", "OUT"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(Path(options.child[0]), Path(options.child[1]), options.in_flight_bytes)))
        return
    results = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as scratch:
            table, out = Path(scratch, "samples.parquet"), Path(scratch, "states")
            make_table(table, rows, options.tokens)
            command = [sys.executable, __file__, "--in-flight-bytes", str(options.in_flight_bytes)]
            done = subprocess.run([*command, "--child", table, out], stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout))
            shutil.rmtree(out)
    first = results[0]
    for result in results:
        result["peak_ratio"] = round(result["peak_mb"] / first["peak_mb"], 3)
        result["median_ratio"] = round(result["median_mb"] / first["median_mb"], 3)
    print(json.dumps({"tokens": options.tokens, "in_flight_bytes": options.in_flight_bytes, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
