"""Speed and resident memory of `eyas data merge`, beside `json.loads` of the same lines, on made-up conversations.

    python benchmarks/merge.py [--mb 100] [--repeats 5] [--against OTHER/src] [--short-rows 1000000]

A machine's own speed moves more than the code does, so all that is compared alternates in one run, each in a process of
its own: `json.loads` of the lines, merge, merge compared with benchmark prompts (as many and as long as GSM8K's; a few
rows quote one), and the last two with the code of another checkout. Speeds are MB of JSON per second of CPU time, as
medians; `ratio` is the median of a merge's speed over that of `json.loads` in the same round. `output` and `report`
are digests of the output and of what the receipt says: equal ones show that old and new code do the same.
`--short-rows` merges so many rows of one short turn instead. Prints one JSON object a size and kind of run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OWN_CODE = Path(__file__).parents[1] / "src"
PARSE, PLAIN, COMPARED = "json.loads", "merge", "merge, compared"


def vocabulary() -> list[str]:
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    return ["".join(rng.choices(letters, k=rng.randint(1, 10))) for _ in range(8000)]


def pieces(rng: random.Random) -> list[str]:
    """Sentences and lines of code of many lengths; words as frequent as in a language."""
    words = vocabulary()
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


def short_row(rng: random.Random, number: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": f"{rng.random()}."}]
    return {"id": f"row-{number}", "messages": turns}


def make(path: Path, megabytes: int, prompts: list[str]) -> None:
    rng = random.Random(0)
    made = pieces(rng)
    number = size = 0
    with path.open("wb") as out:
        while size < megabytes * 1_000_000:
            value = row(rng, made, number)
            if number % 500 == 7:
                value["conversations"][0]["value"] += rng.choice(prompts)
            # Half of the files in the wild escape all that is not ASCII.
            line = json.dumps(value, ensure_ascii=number % 2 == 0).encode() + b"\n"
            size += out.write(line)
            number += 1
            if number % 50 == 0:
                size += out.write(line)


def make_short(path: Path, num_rows: int) -> None:
    rng = random.Random(0)
    with path.open("wb") as out:
        for number in range(num_rows):
            out.write(json.dumps(short_row(rng, number)).encode() + b"\n")


def make_prompts() -> list[str]:
    """In the words of the conversations, but not in their sentences."""
    rng = random.Random(1)
    made = pieces(rng)
    return ["".join(rng.choices(made, k=3)) for _ in range(1319)]


def measure(kind: str, source: Path, benchmark: Path) -> dict[str, Any]:
    """Runs in the child: one reading, or one merge. CPU time of the system's calls included, that of imports not."""
    if kind == PARSE:
        started = time.process_time()
        with source.open("rb") as file:
            for line in file:
                json.loads(line)
        return {"cpu_mb_per_s": source.stat().st_size / (time.process_time() - started) / 1e6}
    from eyas.config import MergeConfig, MergeSource
    from eyas.data.merge import merge
    from eyas.log import Progress
    from eyas.records import canonical_json, digest_bytes

    imported_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    out = source.with_name("out.jsonl")
    benchmarks = (benchmark,) if kind == COMPARED else ()
    config = MergeConfig(sources=(MergeSource(path=source),), out=out, benchmarks=benchmarks)
    started, cpu = time.monotonic(), time.process_time()
    receipt = merge(config, Progress(stream=io.StringIO()))
    wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu
    for made in source.parent.glob("out.jsonl*"):
        made.unlink()
    said = {key: value for key, value in receipt.to_json().items() if key != "wall_s"}
    return {
        "cpu_mb_per_s": receipt.input_bytes / cpu_s / 1e6,
        "wall_s": wall_s,
        "mb": round(receipt.input_bytes / 1e6),
        "rows": receipt.num_input,
        "kept": receipt.num_kept,
        "dropped": dict(receipt.dropped),
        "output": receipt.digest,
        "report": digest_bytes(canonical_json(said)),
        "imported_mb": round(imported_mb),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def child(code: Path, kind: str, source: Path, benchmark: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, str(source), str(benchmark)]
    found = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(code)})
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def compare(source: Path, benchmark: Path, repeats: int, against: Path | None) -> None:
    """Print what each kind of run gave, all of them in turn, `repeats` times."""
    codes = [OWN_CODE] if against is None else [OWN_CODE, against]
    runs = [(code, kind) for kind in (PLAIN, COMPARED) for code in codes]
    parsed: list[float] = []
    results: dict[tuple[Path, str], list[dict[str, Any]]] = {run: [] for run in runs}
    for _ in range(repeats):
        parsed.append(child(OWN_CODE, PARSE, source, benchmark)["cpu_mb_per_s"])
        for code, kind in runs:
            results[code, kind].append(child(code, kind, source, benchmark))
    print(json.dumps({"run": PARSE, "cpu_mb_per_s": round(statistics.median(parsed), 1)}))
    for (code, kind), found in results.items():
        speeds = [result["cpu_mb_per_s"] for result in found]
        ratios = [speed / base for speed, base in zip(speeds, parsed, strict=True)]
        about = {
            "run": kind,
            "code": "own" if code == OWN_CODE else str(code),
            "ratio": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "cpu_mb_per_s": round(statistics.median(speeds), 1),
            "wall_s": round(statistics.median(result["wall_s"] for result in found), 1),
            "peak_mb": max(result["peak_mb"] for result in found),
        }
        print(json.dumps({**found[0], **about}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[100])
    parser.add_argument("--short-rows", type=int, default=0, help="Merge so many short rows, instead of --mb")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="The 'src' of another checkout, to run its code too")
    parser.add_argument("--directory", type=Path, help="Where the files are made; default: a temporary one")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, source, benchmark = arguments.child
        print(json.dumps(measure(kind, Path(source), Path(benchmark))))
        return
    if arguments.against is not None and not (arguments.against / "eyas").is_dir():
        parser.error(f"--against: there is no 'eyas' in {arguments.against}")
    directory = Path(tempfile.mkdtemp(prefix="eyas-merge-", dir=arguments.directory))
    try:
        benchmark, source = directory / "benchmark.jsonl", directory / "source.jsonl"
        prompts = make_prompts()
        benchmark.write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in prompts))
        for megabytes in [0] if arguments.short_rows else arguments.mb:
            if arguments.short_rows:
                make_short(source, arguments.short_rows)
            else:
                make(source, megabytes, prompts)
            compare(source, benchmark, arguments.repeats, arguments.against)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
