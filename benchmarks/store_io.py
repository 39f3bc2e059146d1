"""The store against the disk: writing against `dd` with fsync, reading all samples against `cat`, taking turns.

    python benchmarks/store_io.py --dir /data/scratch --bytes 4e9 --rounds 5

Writing: shards appended and committed (fsync, rename, record) as `capture` does it, the commit in a thread of its own.
`dd` writes as many zero bytes with `conv=fsync`. Reading: every sample in index order into one buffer, without
(`plain`) and with digests compared (`checked`; also by two threads, as the workers of a loader do), against `cat` of
the payloads to /dev/null. Cold means that the kernel was told to drop their pages (`POSIX_FADV_DONTNEED`), warm that
they are in memory. Prints GB/s (medians) and the median ratios of pairs of one round; above 1 the store is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from eyas.records import CaptureSpec, Provenance, StateBlock, sample_id_of
from eyas.store.plan import SegmentHead, cut, write_segment
from eyas.store.reader import DataSet, aligned_buffer
from eyas.store.record import ShardRecord
from eyas.store.verify import verify
from eyas.store.writer import DataSetWriter

COMMITS_WAITING = 2


def spec_of(hidden_size: int) -> CaptureSpec:
    return CaptureSpec(
        target_digest="unknown",
        num_layers=61,
        hidden_size=hidden_size,
        vocab_size=163_840,
        aux_layers=(2, 30, 58),
        last_hidden_norm="post",
        dtype="bfloat16",
    )


class Source:
    """Samples of random finite values out of one pool of memory, so that making them costs nothing."""

    def __init__(self, spec: CaptureSpec, num_bytes: int, tokens: int, shard_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.spec = spec
        lengths: list[int] = []
        while sum(lengths) * spec.bytes_per_token < num_bytes:
            lengths.append(int(rng.integers(max(1, tokens // 2), tokens + tokens // 2 + 1)))
        ids = [rng.integers(0, spec.vocab_size, n).astype(np.int32) for n in lengths]
        samples = [(sample_id_of(i), i) for i in ids]
        self.shards = list(cut(samples, max(1, shard_bytes // spec.bytes_per_token)))
        self.num_bytes = sum(lengths) * spec.bytes_per_token
        self._pool = rng.integers(0, 0x3F80, 3 * max(lengths) * spec.hidden_size, dtype=np.uint16).view(np.uint8)
        self._at = 0

    def fields(self, num_tokens: int) -> dict[str, StateBlock]:
        shape, size = (num_tokens, self.spec.hidden_size), num_tokens * self.spec.hidden_size * 2
        blocks = {}
        for name in self.spec.fields:
            if self._at + size > len(self._pool):
                self._at = (self._at + 7 * 64) % 4096
            blocks[name] = StateBlock(self.spec.dtype, shape, self._pool[self._at : self._at + size].data)
            self._at += 1 << 16
        return blocks


def write_store(root: Path, source: Source) -> float:
    """Seconds from the first byte to the last record, all of it durable."""
    with DataSetWriter(root, source.spec) as out, ThreadPoolExecutor(1) as committer:
        head = SegmentHead(0, "capture", 0, 0, 1, "", {})
        shards = ((shard, [True] * len(shard)) for shard in source.shards)
        write_segment(out.files, out.layout.segment(0), head, shards)
        (segment,) = out.segments()
        commits: list[Future[ShardRecord]] = []
        start = time.perf_counter()
        for plan, samples in zip(segment.shards, source.shards, strict=True):
            shard = out.shard_writer(plan, [(sample_id, len(ids)) for sample_id, ids in samples])
            for _, ids in samples:
                shard.append(source.fields(len(ids)))
            if len(commits) >= COMMITS_WAITING:
                commits.pop(0).result()
            made = Provenance("benchmark", "1")
            commits.append(committer.submit(shard.commit, made, run_id="benchmark", committed_at=time.time()))
        for commit in commits:
            commit.result()
        seconds = time.perf_counter() - start
        segment.close()
    return seconds


def write_dd(path: Path, num_bytes: int) -> float:
    block = 4 << 20
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={block}", f"count={num_bytes // block}", "conv=fsync"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return (time.perf_counter() - start) * num_bytes / (num_bytes // block * block)


def read_store(data: DataSet, buffers: list[memoryview]) -> float:
    """Every sample in index order, each thread with a buffer of its own."""

    def read(thread: int) -> None:
        for i in range(thread, len(data), len(buffers)):
            data.read_into(i, buffers[thread])

    start = time.perf_counter()
    if len(buffers) == 1:
        read(0)
    else:
        with ThreadPoolExecutor(len(buffers)) as pool:
            list(pool.map(read, range(len(buffers))))
    return time.perf_counter() - start


def read_cat(paths: list[Path]) -> float:
    start = time.perf_counter()
    with Path("/dev/null").open("wb") as nowhere:
        subprocess.run(["cat", *map(str, paths)], check=True, stdout=nowhere)
    return time.perf_counter() - start


def drop(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure_writes(base: Path, source: Source, rounds: int) -> tuple[list[float], list[float]]:
    store, dd = [], []
    for turn in range(rounds):
        for which in ("store", "dd") if turn % 2 == 0 else ("dd", "store"):
            # Nothing of the former turn may still be on its way to the disk.
            os.sync()
            if which == "store":
                store.append(write_store(base / "store", source))
                if turn < rounds - 1:
                    shutil.rmtree(base / "store")
            else:
                dd.append(write_dd(base / "dd", source.num_bytes))
                (base / "dd").unlink()
    return store, dd


def measure_reads(root: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    paths = sorted((root / "shards").iterdir())
    plain, checked = DataSet(root, check=False), DataSet(root, check=True)
    size = max(plain.sample_bytes(i) for i in range(len(plain)))
    buffers = [aligned_buffer(size) for _ in range(2)]
    for buffer in buffers:
        buffer[:] = bytes(size)  # its pages are there before the clock counts
    ways: dict[str, Callable[[], float]] = {
        "cat": lambda: read_cat(paths),
        "plain": lambda: read_store(plain, buffers[:1]),
        "checked": lambda: read_store(checked, buffers[:1]),
        "checked_2_threads": lambda: read_store(checked, buffers),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for state in ("cold", "warm"):
        times: dict[str, list[float]] = {name: [] for name in ways}
        os.sync()
        if state == "warm":
            read_cat(paths)
        for turn in range(rounds):
            order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
            for name in order:
                if state == "cold":
                    drop(paths)
                times[name].append(ways[name]())
        found[state] = times
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--bytes", type=float, default=4e9)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1000, help="mean tokens of a sample")
    parser.add_argument("--shard-bytes", type=float, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    source = Source(spec_of(args.hidden_size), int(args.bytes), args.tokens, int(args.shard_bytes))
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="eyas-store-io-") as scratch:
        base = Path(scratch)
        store, dd = measure_writes(base, source, args.rounds)
        reads = measure_reads(base / "store", args.rounds)
        sound = verify(base / "store", sample_fraction=0.0).exit_code == 0
    rate = lambda times: round(source.num_bytes / statistics.median(times) / 1e9, 3)  # noqa: E731
    ratio = lambda ours, theirs: round(  # noqa: E731
        statistics.median(t / o for o, t in zip(ours, theirs, strict=True)), 3
    )
    result = {
        "bytes": source.num_bytes,
        "shards": len(source.shards),
        "samples": sum(map(len, source.shards)),
        "bytes_per_token": source.spec.bytes_per_token,
        "cpus": os.cpu_count(),
        "rounds": args.rounds,
        "sound": sound,
        "write_gb_per_s": rate(store),
        "dd_gb_per_s": rate(dd),
        "write_ratio": ratio(store, dd),
        "write_s": [round(s, 2) for s in store],
        "dd_s": [round(s, 2) for s in dd],
    }
    for state, times in reads.items():
        for name in times:
            result[f"{state}_{name}_gb_per_s"] = rate(times[name])
            result[f"{state}_{name}_s"] = [round(s, 2) for s in times[name]]
        for name in list(times)[1:]:
            result[f"{state}_{name}_ratio"] = ratio(times[name], times["cat"])
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
