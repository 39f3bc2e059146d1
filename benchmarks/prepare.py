"""Speed and memory of `eyas prepare`: tokens/s with one and two processes, peak memory at two sizes. Prints JSON.

    python benchmarks/prepare.py --target demo/target --tokens 4000000

Chats of one to five turns, two thirds English words and one third made-up ones. Each run is a process of its own, so
its peak memory is its own; with several processes that of the parent and of the largest child are told apart. On a
machine with other work, tokens per second of processor time (all processes together) say more than those by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = (
    *("the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as"),
    *("his", "they", "be", "at", "one", "have", "this", "from", "or", "had", "by", "hot", "word", "but", "what"),
    *("some", "we", "can", "out", "other", "were", "all", "there", "when", "up", "use", "your", "how", "said"),
    *("each", "she", "which", "do", "their", "time", "if", "will", "way", "about", "many", "then", "them", "write"),
)


def write_chats(path: Path, num_tokens: int, seed: int = 0) -> None:
    """About so many tokens of chats."""
    chance = random.Random(seed)
    written = 0

    def text(num_words: int) -> str:
        return " ".join(
            chance.choice(WORDS) if chance.random() < 0.67 else f"{chance.choice(WORDS)}{chance.choice(WORDS)}"
            for _ in range(num_words)
        )

    with path.open("w", encoding="utf-8") as file:
        number = 0
        while written < num_tokens:
            messages = []
            for _ in range(chance.randint(1, 5)):
                question, answer = chance.randint(5, 60), chance.randint(20, 300)
                messages += [
                    {"role": "user", "content": text(question)},
                    {"role": "assistant", "content": text(answer)},
                ]
                written += int(1.4 * (question + answer)) + 10
            file.write(json.dumps({"id": f"c{number}", "source": "made", "messages": messages}) + "\n")
            number += 1


def one_run(source: Path, samples: Path, target: Path, workers: int) -> None:
    """Prepare in this process and print what it took."""
    import io

    from eyas.config import DataConfig, TargetConfig
    from eyas.data.prepare import prepare
    from eyas.log import Progress

    data = DataConfig(sources=(source,), samples=samples, workers=workers, max_tokens=8192)
    started = time.monotonic()
    receipt = prepare(data, TargetConfig(path=target), Progress(stream=io.StringIO()))
    seconds = time.monotonic() - started
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = [usage.ru_utime + usage.ru_stime for usage in usages]
    print(
        json.dumps(
            {
                "workers": workers,
                "rows": receipt.table.num_input,
                "tokens": receipt.table.num_tokens,
                "seconds": round(seconds, 2),
                "tokens_per_s": round(receipt.table.num_tokens / seconds),
                "tokens_per_cpu_s": round(receipt.table.num_tokens / sum(cpu_seconds)),
                "cpu_seconds": round(sum(cpu_seconds), 2),
                "peak_rss_mb": usages[0].ru_maxrss // 1024,
                "peak_rss_child_mb": usages[1].ru_maxrss // 1024,
                "table_digest": receipt.table_digest,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("demo/target"))
    parser.add_argument("--tokens", type=int, default=4_000_000, help="size of the larger input")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        source, samples, workers = options.one
        one_run(Path(source), Path(samples), options.target, int(workers))
        return
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for num_tokens in (options.tokens // 4, options.tokens):
            source = Path(scratch) / f"{num_tokens}.jsonl"
            write_chats(source, num_tokens)
            digests = set()
            for workers in options.workers:
                samples = Path(scratch) / f"{num_tokens}.{workers}.parquet"
                command = [sys.executable, __file__, "--target", str(options.target)]
                done = subprocess.run(
                    [*command, "--one", str(source), str(samples), str(workers)],
                    check=True,
                    stdout=subprocess.PIPE,
                    # One process is one core: without this the tokenisers library uses all of them.
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                )
                results.append(json.loads(done.stdout))
                digests.add(results[-1].pop("table_digest"))
            assert len(digests) == 1, "the table must not depend on the number of processes"
    print(json.dumps({"target": str(options.target), "runs": results}, indent=1))


if __name__ == "__main__":
    main()
