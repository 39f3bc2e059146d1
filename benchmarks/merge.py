"""Speed and resident memory of `eyas data merge` on made-up conversations, at several sizes.

    python benchmarks/merge.py --mb 300 900

Each size is merged in a process of its own, without and with benchmarks to compare with (GSM8K's size: 1,319 prompts).
Prints one JSON object a run: MB/s of JSON, of wall time and of the process's CPU time, and its peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def pieces(rng: random.Random) -> list[str]:
    """Sentences and lines of code of many lengths; words as frequent as in a language."""
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 10))) for _ in range(8000)]
    weights = [1 / (i + 3) for i in range(len(words))]
    made = []
    for _ in range(4000):
        text = " ".join(rng.choices(words, weights, k=rng.randint(4, 40)))
        made.append(
            rng.choice(["{}. ", "{}.\n\n", "- **{}**\n", '"{}," she said. ', "    return {}\n", "{} – où? "]).format(
                text
            )
        )
    return made


def row(rng: random.Random, made: list[str], number: int) -> dict[str, Any]:
    def said(most: int) -> str:
        return "".join(rng.choices(made, k=rng.randint(1, most)))

    turns = [text for _ in range(rng.choice([1, 1, 2, 3, 4])) for text in (said(4), said(14))]
    kind = number % 10
    if kind < 5:
        names = ("user", "assistant")
        messages: list[dict[str, Any]] = [{"role": names[i % 2], "content": text} for i, text in enumerate(turns)]
        if kind == 0:
            messages[-1]["reasoning_content"] = said(10)
        if kind == 1:
            messages[-1]["tool_calls"] = [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "find", "arguments": {"query": said(1), "k": 5.0}},
                }
            ]
        value: dict[str, Any] = {"id": f"row-{number}", "messages": messages}
        if kind == 1:
            value["tools"] = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
        return value
    if kind < 9:
        names = ("human", "gpt")
        return {
            "conversations": [{"from": names[i % 2], "value": text} for i, text in enumerate(turns)],
            "score": rng.random(),
        }
    return {"instruction": turns[0], "input": "", "output": turns[1]}


def make(path: Path, megabytes: int) -> None:
    rng = random.Random(0)
    made = pieces(rng)
    number = size = 0
    with path.open("wb") as out:
        while size < megabytes * 1_000_000:
            # Half of the files in the wild escape all that is not ASCII.
            line = json.dumps(row(rng, made, number), ensure_ascii=number % 2 == 0).encode() + b"\n"
            size += out.write(line)
            number += 1
            if number % 50 == 0:
                size += out.write(line)


def make_benchmark(path: Path) -> None:
    rng = random.Random(1)
    made = pieces(rng)
    with path.open("w") as out:
        for _ in range(1319):
            out.write(json.dumps({"question": "".join(rng.choices(made, k=3))}) + "\n")


def measure(source: Path, benchmarks: list[Path]) -> dict[str, Any]:
    """Runs in the child: one merge."""
    from eyas.config import MergeConfig, MergeSource
    from eyas.data.merge import merge
    from eyas.log import Progress

    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    out = source.with_name("out.jsonl")
    started, cpu = time.monotonic(), time.process_time()
    config = MergeConfig(sources=(MergeSource(path=source),), out=out, benchmarks=tuple(benchmarks))
    receipt = merge(config, Progress())
    wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu
    return {
        "mb": round(receipt.input_bytes / 1e6),
        "rows": receipt.num_input,
        "kept": receipt.num_kept,
        "dropped": dict(receipt.dropped),
        "benchmarks": len(benchmarks),
        "wall_mb_per_s": round(receipt.input_bytes / wall_s / 1e6, 1),
        "cpu_mb_per_s": round(receipt.input_bytes / cpu_s / 1e6, 1),
        "imported_mb": round(before_mb),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[300, 900])
    parser.add_argument(
        "--directory", type=Path, default=None, help="Where the files are made; default: a temporary one"
    )
    parser.add_argument("--child", nargs="+", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child[0], arguments.child[1:])))
        return
    directory = Path(tempfile.mkdtemp(prefix="eyas-merge-", dir=arguments.directory))
    try:
        benchmark = directory / "benchmark.jsonl"
        make_benchmark(benchmark)
        for megabytes in arguments.mb:
            source = directory / "source.jsonl"
            make(source, megabytes)
            for benchmarks in ([], [benchmark]):
                command = [sys.executable, __file__, "--child", str(source), *map(str, benchmarks)]
                subprocess.run(command, check=True)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
