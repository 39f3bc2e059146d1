"""What the client of `eyas generate` costs: requests per second against an instant server, memory by rows.

    python benchmarks/generate_client.py [--rows 10000] [--resume 10000 100000 1000000] [--concurrency 64]

The server is a process of its own that answers at once, from a template, and shares the cores with the client; one
answer in a hundred is cut at its length, so that its row is rejected, and one in five hundred is an error 500.
`resident_mb` is what the client holds in the course of the run.
`--resume` measures memory: that many rows of which all but 2,000 are answered already, so that both passes over the
prompts, the output and the table of done rows are as large as they get. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

TO_DO = 2_000
CUT_EVERY, FAULT_EVERY = 100, 499
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
PROMPT_IDS, TOKEN_IDS = list(range(100, 140)), list(range(1000, 1060))


def completion(finish_reason: str) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * len(TOKEN_IDS)},
        "finish_reason": finish_reason,
        "token_ids": TOKEN_IDS,
    }
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(TOKEN_IDS)}
    about = {"id": "gen-1", "object": "chat.completion", "model": "target", "prompt_token_ids": PROMPT_IDS}
    body = json.dumps({**about, "choices": [choice], "usage": usage}).encode()
    return HEAD % len(body) + body


class Instant(asyncio.Protocol):
    """Answers every request at once, from a template: a stand-in for a server that is never the limit."""

    answer, cut = completion("stop"), completion("length")
    error = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"
    requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self.buffer) < end + 4 + length:
                return
            self.buffer = self.buffer[end + 4 + length :]
            Instant.requests += 1
            if Instant.requests % FAULT_EVERY == 0:
                self.transport.write(self.error)
            else:
                self.transport.write(self.answer if Instant.requests % CUT_EVERY else self.cut)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Instant, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def prompt(i: int) -> dict[str, object]:
    return {"id": str(i), "messages": [{"role": "user", "content": f"question {i}: " + "why is that so? " * 8}]}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(rows: int, port: int, concurrency: int, answered: int) -> dict[str, Any]:
    """One run in this process, which does nothing else; figures of it."""
    from eyas.config import GenerateConfig
    from eyas.generate.prompts import iter_prompts
    from eyas.generate.remote import generate
    from eyas.generate.request import settings_of
    from eyas.generate.rows import Known, RowTable
    from eyas.log import Progress

    class Held(Progress):
        """A progress line that nobody reads: when one is due, what the process holds is written down."""

        def show(self, line: str, *, force: bool = False) -> None:
            if force or self.due():
                held.append(round(resident_mb(), 1))
                super().show(line, force=True)

    held: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        prompts, out = Path(directory) / "prompts.jsonl", Path(directory) / "out.jsonl"
        with prompts.open("w") as file:
            for i in range(rows):
                file.write(json.dumps(prompt(i)) + "\n")
        config = GenerateConfig(
            prompts=prompts,
            out=out,
            endpoints=(f"http://127.0.0.1:{port}/v1",),
            model="target",
            concurrency=concurrency,
            max_new_tokens=64,
        )
        settings = settings_of(config, "target")
        if answered and os.fork() == 0:  # in a child, so that its memory is not ours
            with out.open("w") as file:
                todo = iter_prompts(prompts, **settings, rows=RowTable(), mark=Known.PLANNED)
                for _, row in zip(range(answered), todo, strict=False):
                    line = {
                        "row_id": row.row_id,
                        "id": row.prompt_id,
                        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "word " * 60}],
                        "finish_reason": ["stop"],
                        "input_ids": PROMPT_IDS + TOKEN_IDS,
                        "loss_mask": [0] * len(PROMPT_IDS) + [1] * len(TOKEN_IDS),
                        "usage": {"prompt_tokens": 40, "completion_tokens": 60, "requests": 1, "cost": 0.0},
                        **settings,
                    }
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
            os._exit(0)
        if answered:
            os.wait()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu, start = time.process_time(), time.monotonic()
        receipt = generate(config, Held(interval_s=max(1, rows / 8000), stream=io.StringIO()), threading.Event())
        wall, cpu = time.monotonic() - start, time.process_time() - cpu
        assert receipt.planned == rows == receipt.answered + sum(receipt.rejected.values()), receipt.lines()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "rows": rows,
            "requests": receipt.new_requests,
            "answered": receipt.answered,
            "rejected": dict(receipt.rejected),
            "requests_per_s": round(receipt.new_requests / wall, 1),
            "wall_s": round(wall, 1),
            "cpu_ms_per_request": round(1000 * cpu / receipt.new_requests, 2),
            "rss_before_mb": round(before / 1000, 1),
            "peak_rss_mb": round(peak / 1000, 1),
            "resident_mb": held,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--resume", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    if options.one:
        rows, port, answered = options.one
        print(json.dumps(run(rows, port, options.concurrency, answered)))
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = server.stdout.readline().strip()

    def one(rows: int, answered: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--concurrency", str(options.concurrency)]
        done = subprocess.run(
            [*command, "--one", str(rows), port, str(answered)], check=True, capture_output=True, text=True
        )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    try:
        figures = {
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "throughput": one(options.rows, 0),
            "resume": [one(rows, rows - TO_DO) for rows in options.resume],
        }
    finally:
        server.kill()
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
