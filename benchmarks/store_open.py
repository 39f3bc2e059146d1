"""Opening a store of a million samples: first (records read, manifest written), then again (manifest alone).

    python benchmarks/store_open.py --samples 1000000

The store is synthetic: records as a capture writes them, with made-up digests, and no payload, which opening must not
touch. Prints JSON: seconds of the first open and of each later one, each later one in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from eyas.records import LAST, CaptureSpec, Provenance, shard_id_of
from eyas.store import record
from eyas.store.plan import MAX_SHARD_SAMPLES
from eyas.store.record import FieldEntry, Part, ShardRecord
from eyas.store.shard import ALIGNMENT
from eyas.store.writer import DataSetWriter

SPEC = CaptureSpec(
    target_digest="unknown",
    num_layers=61,
    hidden_size=7168,
    vocab_size=163_840,
    aux_layers=(2, 30, 58),
    last_hidden_norm="post",
    dtype="bfloat16",
)


def build(root: Path, num_samples: int, *, shard_samples: int = MAX_SHARD_SAMPLES, seed: int = 0) -> None:
    """A data set of records alone: `num_samples` samples of 1 to 63 tokens, all committed, payloads nowhere."""
    rng = np.random.default_rng(seed)
    with DataSetWriter(root, SPEC) as out:
        for start in range(0, num_samples, shard_samples):
            made = synthetic_record(rng, min(shard_samples, num_samples - start))
            out.layout.record(made.shard_id).write_bytes(record.to_bytes(made))


def synthetic_record(rng: np.random.Generator, n: int) -> ShardRecord:
    sample_ids, num_tokens = hex_digests(rng, n), rng.integers(1, 64, n)
    header_bytes = -(-200 * n // ALIGNMENT) * ALIGNMENT
    row_bytes = 2 * SPEC.hidden_size
    sample_at = header_bytes + np.concatenate([[0], np.cumsum(num_tokens)]) * SPEC.bytes_per_token
    fields = {}
    for f, name in enumerate(SPEC.fields):
        offset, num_bytes = sample_at[:-1] + f * num_tokens * row_bytes, num_tokens * row_bytes
        part = Part(tuple(offset.tolist()), tuple(num_bytes.tolist()), hex_digests(rng, n))
        fields[name] = FieldEntry("raw", SPEC.dtype, SPEC.hidden_size, {"": part})
    assert name == LAST
    return ShardRecord(
        shard_id=shard_id_of(sample_ids),
        fingerprint=SPEC.fingerprint,
        sample_ids=sample_ids,
        positions=tuple(range(n)),
        num_tokens=tuple(num_tokens.tolist()),
        fields=fields,
        rejects=(),
        provenance=Provenance("fake", "1"),
        run_id="synthetic",
        committed_at=1.7e9,
        payload_digest=hex_digests(rng, 1)[0],
        payload_bytes=int(sample_at[-1]),
        header_bytes=header_bytes,
    )


def hex_digests(rng: np.random.Generator, n: int) -> tuple[str, ...]:
    text = rng.bytes(16 * n).hex()
    return tuple(text[i : i + 32] for i in range(0, 32 * n, 32))


OPEN = """
import json, resource, sys, time
from eyas.store.reader import DataSet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
data = DataSet(sys.argv[1])
opened = time.perf_counter()
data.index_of(data.sample_id(len(data) // 2))
looked_up = time.perf_counter()
next(data.permutation(seed=1))
walked = time.perf_counter()
print(json.dumps({"samples": len(data), "open_s": opened - start, "first_lookup_s": looked_up - opened,
    "permutation_s": walked - looked_up, "grown_bytes":
    1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}))
"""


def open_once(root: Path) -> dict[str, float]:
    """Open it in a process of its own."""
    done = subprocess.run([sys.executable, "-c", OPEN, str(root)], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to build the store; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        root = Path(scratch) / "store"
        start = time.perf_counter()
        build(root, args.samples)
        built = time.perf_counter() - start
        first = open_once(root)
        again = [open_once(root) for _ in range(args.rounds)]
        assert not list((root / "shards").iterdir())
        result = {
            "samples": args.samples,
            "shards": len(list((root / "records").iterdir())),
            "record_bytes": sum(p.stat().st_size for p in (root / "records").iterdir()),
            "manifest_bytes": (root / "manifest.parquet").stat().st_size,
            "cpus": os.cpu_count(),
            "build_s": round(built, 2),
            "first_open_s": round(first["open_s"], 3),
            "open_s": round(statistics.median(a["open_s"] for a in again), 3),
            "open_s_rounds": [round(a["open_s"], 3) for a in again],
            "first_lookup_s": round(statistics.median(a["first_lookup_s"] for a in again), 3),
            "permutation_s": round(statistics.median(a["permutation_s"] for a in again), 3),
            "grown_bytes": round(statistics.median(a["grown_bytes"] for a in again)),
            "max_rss_of_build": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
