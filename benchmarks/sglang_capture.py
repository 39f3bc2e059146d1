"""Capture from an SGLang server to verified shards, fsync included, against plain prefill of the same SGLang, and
against one request at a time through `torch.save` files; all in one run, alternating."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from eyas.capture.check import DeferredHead
from eyas.capture.run import capture
from eyas.config import CaptureConfig, EngineConfig, TargetConfig
from eyas.connections import Connections
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.engine.room import StagingLimits
from eyas.engine.settings import write_settings
from eyas.engine.sglang.client import SglangEngine
from eyas.engine.sglang.deploy import write_plugin
from eyas.log import Progress, setup
from eyas.records import Sample, default_aux_layers
from eyas.store.verify import verify
from eyas.target.files import open_target
from eyas.target.head import TargetHead
from hf_capture import SHAPES, capturing_seconds, make_target

Ids = list[np.ndarray[Any, Any]]


def main() -> None:
    options = parse()
    setup()
    options.scratch.mkdir(parents=True, exist_ok=True)
    target = options.target
    if target is None:
        target = options.scratch_target / "target"
        if not target.exists():
            make_target(target, options.shape)
    config = open_target(target).config
    servers: dict[str, Server] = {}
    try:
        for i, mode in enumerate(options.modes):
            # One after the other: each takes its share of the memory that is free when it starts.
            servers[mode] = Server(mode, options.port + i, target, config, options)
            servers[mode].wait()
        for lengths in options.lengths:
            measure(lengths, target, config, servers, options)
    finally:
        for server in servers.values():
            server.stop()


def measure(lengths: str, target: Path, config: Any, servers: dict[str, Server], options: argparse.Namespace) -> None:
    ids = make_prompts(lengths, options.tokens, min(config["vocab_size"], 50_000), options.max_length)
    tokens = sum(map(len, ids))
    table = make_table(options.scratch / "samples.parquet", ids)
    plain(servers["plain"], ids[: max(8, len(ids) // 8)], options.in_flight_tokens)  # kernels of these shapes
    places = options.out or [options.scratch / "states"]
    for place in places[:1] if lengths in options.first_only else places:
        runs: list[dict[str, float]] = []
        for repeat in range(options.repeats + 1):
            run = {"plain": tokens / plain(servers["plain"], ids, options.in_flight_tokens)}
            # Values are checked in the first run of all; the timed ones capture, nothing else.
            checked = lengths == options.lengths[0] and not repeat
            seconds, receipt = captured(servers["capture"], table, target, place, options, checked=checked)
            run["capture"] = receipt.captured_tokens / seconds
            run["ratio"] = run["capture"] / run["plain"]
            if repeat:  # the first one warms pinned memory, page cache and the client
                runs.append(run)
        report = verify(place)
        assert report.exit_code == 0, report.problems
        result = {
            "lengths": lengths,
            "out": str(place),
            "samples": len(ids),
            "tokens": tokens,
            "bytes": receipt.payload_bytes,
            "shards": receipt.shards,
            "retries": receipt.retries,
            **{name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]},
            "ratios": [round(run["ratio"], 4) for run in runs],
            "GB_per_s": round(statistics.median(r["capture"] for r in runs) * receipt.payload_bytes / tokens / 1e9, 3),
            "verify_GB_per_s": round(report.bytes_read / report.seconds / 1e9, 2),
            "gpu_MiB": {name: server.gpu_memory() for name, server in servers.items()},
        }
        if "founding" in servers and options.founding_samples:
            part = ids[: options.founding_samples]
            one_by_one = sum(map(len, part)) / founding(servers["founding"], part, options.scratch / "founding")
            result["founding"] = round(one_by_one, 1)
            result["times_founding"] = round(result["capture"] / one_by_one, 1)
        print(json.dumps(result), flush=True)
        shutil.rmtree(place, ignore_errors=True)


def make_prompts(lengths: str, tokens: int, vocab_size: int, longest: int) -> Ids:
    """Random prompts: all of one length, or `mix`, lognormal with a mean of about 1,760 tokens, as ShareGPT has."""
    rng = np.random.default_rng(1)
    ids: Ids = []
    while sum(map(len, ids)) < tokens:
        n = int(lengths) if lengths != "mix" else int(np.clip(rng.lognormal(7.1, 0.9), 32, longest))
        ids.append(rng.integers(10, vocab_size, min(n, longest)).astype(np.int32))
    return ids


def make_table(path: Path, ids: Ids) -> SampleTable:
    with TableWriter(path) as out:
        for one in ids:
            out.append(Sample(one, ((len(one) - 1, len(one)),)))
        counts = {"num_input": len(ids), "num_kept": len(ids), "num_supervised": len(ids)}
        out.publish(TableMetadata(num_tokens=sum(map(len, ids)), **counts))
    return SampleTable.open(path)


def plain(server: Server, ids: Ids, in_flight_tokens: int) -> float:
    """Seconds for the server to prefill all prompts, so many tokens in flight."""
    more = {"sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
    return answered_in(server.url, "/generate", "input_ids", ids, more, in_flight_tokens)


def answered_in(url: str, path: str, key: str, ids: Ids, more: dict[str, Any], in_flight_tokens: int) -> float:
    """Seconds until every prompt is answered: each asked as `key`, with `more` beside it, so many tokens in flight."""

    async def run() -> float:
        connections = Connections(base_url=url, timeout=httpx.Timeout(None), verify=False, keepalive_s=2.0)
        async with contextlib.aclosing(connections) as client:
            free, room = in_flight_tokens, asyncio.Condition()

            async def one(prompt: np.ndarray[Any, Any]) -> None:
                nonlocal free
                body = json.dumps({key: prompt.tolist(), **more})
                headers = {"content-type": "application/json"}
                response = await client.request("POST", path, content=body, headers=headers)
                response.raise_for_status()
                async with room:
                    free += len(prompt)
                    room.notify_all()

            start = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for prompt in ids:
                    async with room:
                        while free < len(prompt):
                            await room.wait()
                        free -= len(prompt)
                    group.create_task(one(prompt))
            return time.perf_counter() - start

    return asyncio.run(run())


def captured(
    server: Server, table: SampleTable, target: Path, out: Path, options: argparse.Namespace, *, checked: bool
) -> Any:
    """Seconds from the first request of the run proper to the last commit, and the receipt."""
    shutil.rmtree(out, ignore_errors=True)
    engine = SglangEngine(
        TargetConfig(path=target),
        EngineConfig(kind="sglang", url=server.url, check_layers=options.check_layers if checked else "off"),
    )
    config = CaptureConfig(
        out=out,
        shard_tokens=options.shard_tokens,
        in_flight_bytes=options.in_flight_bytes,
        check_fraction=0.0,
        min_free_bytes=0,
    )
    head = DeferredHead(lambda: TargetHead.load(target)) if checked else None
    receipt = capture(config, table, engine, head, progress=Progress(), stop=threading.Event())
    engine.close()
    return capturing_seconds(out), receipt


def founding(server: Server, ids: Ids, out: Path) -> float:
    """Seconds for one request at a time: ask, wait for `done`, load, save, remove."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with httpx.Client(base_url=server.url, timeout=None, trust_env=False) as client:
        for i, prompt in enumerate(ids):
            rid = f"req_{time.time_ns()}"
            body = {"rid": rid, "input_ids": prompt.tolist(), "sampling_params": {"max_new_tokens": 1}}
            client.post("/generate", json=body).raise_for_status()
            dump = server.dumps / rid
            while not (dump / "done").exists():
                time.sleep(0.05)
            layers = [torch.load(path, weights_only=True) for path in sorted(dump.glob("layer_*.pt"))]
            torch.save({"input_ids": torch.from_numpy(prompt), "layers": layers}, out / f"{i}.pt")
            shutil.rmtree(dump)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds


class Server:
    """One SGLang server: `plain` as it is, `capture` with our plugin, `founding` with the old way's."""

    def __init__(self, mode: str, port: int, target: Path, config: Any, options: argparse.Namespace) -> None:
        self.mode, self.url = mode, f"http://127.0.0.1:{port}"
        self.log = options.scratch / f"{mode}.log"
        self.dumps = options.staging / f"eyas-founding-{port}"
        self._staging = options.staging / f"eyas-{port}"
        environment = dict(os.environ)
        paths = [*options.server_path]
        if mode == "capture":
            paths.insert(0, str(options.scratch / "plugin"))
            write_plugin(options.scratch / "plugin")
            self._staging.mkdir(parents=True, exist_ok=True)
            limits = StagingLimits(options.staged_bytes, 1_000_000_000, options.pool_bytes)
            write_settings(options.scratch / "capture.json", self._staging, None, limits)
            environment["EYAS_CAPTURE"] = str(options.scratch / "capture.json")
        if mode == "founding":
            paths.insert(0, str(options.scratch / "founding-plugin"))
            about = options.scratch / "founding-plugin" / "founding-1.dist-info"
            about.mkdir(parents=True, exist_ok=True)
            (about / "METADATA").write_text("Metadata-Version: 2.1\nName: founding\nVersion: 1\n")
            (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nfounding = founding_plugin:register\n")
            shutil.copy(Path(__file__).with_name("founding_plugin.py"), about.parent)
            layers = default_aux_layers(int(config["num_hidden_layers"]))
            environment |= {"FOUNDING_LAYERS": ",".join(map(str, layers)), "FOUNDING_DUMPS": str(self.dumps)}
        environment["PYTHONPATH"] = ":".join(paths)
        command = [options.server_python, "-m", "sglang.launch_server", "--model-path", str(target), "--host",
                   "127.0.0.1", "--port", str(port), "--disable-radix-cache", "--chunked-prefill-size", "-1",
                   "--max-prefill-tokens", "16384", "--cuda-graph-backend-decode", "disabled",
                   "--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup",
                   *shlex.split(options.server_flags)]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        start = time.monotonic()
        while True:
            if self._process.poll() is not None:
                sys.exit(f"{self.mode}: {self.log.read_text(errors='replace')[-3000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=20, trust_env=False).status_code == 200:
                    print(f"{self.mode} ready after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
                    return
            except httpx.HTTPError:
                time.sleep(1)

    def gpu_memory(self) -> int | None:
        """MiB on the GPU of all the server's processes."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError):
            return None
        rows = [line.split(",") for line in lines if "," in line]
        mine = [
            int(used) for pid, used in rows if Path(f"/proc/{pid.strip()}").exists()
            and os.getpgid(int(pid)) == self._process.pid
        ]  # fmt: skip
        return sum(mine) or None

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            time.sleep(2)
        shutil.rmtree(self.dumps, ignore_errors=True)
        shutil.rmtree(self._staging, ignore_errors=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--scratch-target", type=Path, default=Path("bench-scratch"), help="where weights are made")
    parser.add_argument("--out", type=Path, nargs="+")
    parser.add_argument("--staging", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--modes", nargs="+", default=["plain", "capture", "founding"])
    parser.add_argument("--lengths", nargs="+", default=["512", "2048", "8192", "mix"])
    parser.add_argument("--first-only", nargs="*", default=[], help="lengths captured to the first of --out alone")
    parser.add_argument("--max-length", type=int, default=8190)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--founding-samples", type=int, default=20)
    parser.add_argument("--in-flight-tokens", type=int, default=65_536, help="of the plain runs")
    parser.add_argument("--in-flight-bytes", type=int, default=6_000_000_000)
    parser.add_argument("--staged-bytes", type=int, default=6_000_000_000)
    parser.add_argument("--pool-bytes", type=int, default=4 << 30)
    parser.add_argument("--shard-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--check-layers", default="auto")
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--server-path", nargs="*", default=[], help="the servers' PYTHONPATH")
    parser.add_argument("--server-flags", default="")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
