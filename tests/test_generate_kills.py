"""Answers from servers through the command line, killed at any moment: every row comes out once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.generate.answers import rejects_path
from misbehaving_server import Act, Asked, MisbehavingServer, error, text_of

ROWS = 10_000
FAULT_SHARE = 0.05
KILLS = 3
KEY = "sk-secret-0123456789"


def command(*args: object) -> list[str]:
    return [sys.executable, "-c", "from eyas.cli import main; main()", *map(str, args)]


def write_run(folder: Path, url: str, num_rows: int, **more: Any) -> Path:
    (folder / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"id": str(i), "messages": [{"role": "user", "content": f"question {i}"}]}) + "\n"
            for i in range(num_rows)
        )
    )
    lines = [f"{name} = {json.dumps(value)}" for name, value in more.items()]
    path = folder / "run.toml"
    path.write_text(
        '[generate]\nprompts = "prompts.jsonl"\nout = "out.jsonl"\nmodel = "target"\nmax_new_tokens = 64\n'
        f'endpoints = ["{url}"]\n' + "\n".join(lines) + "\n"
    )
    return path


@pytest.fixture
def server_process() -> Iterator[str]:
    """The address of a server in a process of its own, which fails now and then."""
    program = Path(__file__).with_name("misbehaving_server.py")
    process = subprocess.Popen([sys.executable, program, str(FAULT_SHARE)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    process.kill()
    process.wait()


@pytest.mark.parametrize("num_rows", [2_000, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_rows_with_faults_and_three_kills_come_out_once_each(
    tmp_path: Path, server_process: str, num_rows: int
) -> None:
    run = write_run(tmp_path, server_process, num_rows)
    out = tmp_path / "out.jsonl"
    for kill in range(1, KILLS + 1):
        process = subprocess.Popen(command("generate", run), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wanted, deadline = kill * num_rows // (KILLS + 1), time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if out.exists() and out.stat().st_size > wanted * 500:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        # A kill may come in mid-line; most do not, so one is made.
        with out.open("ab") as file:
            file.write(b'{"row_id":"0123')
    done = subprocess.run(command("generate", run, "--json"), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout)
    assert receipt["planned"] == num_rows == receipt["answered"] + sum(receipt["rejected"].values())
    assert receipt["new_conversations"] < num_rows
    rejects = rejects_path(out)
    rows = [json.loads(line) for path in (out, rejects) if path.exists() for line in path.read_text().splitlines()]
    assert sorted(int(row["id"]) for row in rows) == list(range(num_rows))
    assert len({row["row_id"] for row in rows}) == num_rows
    for row in rows:
        if "messages" in row:
            asked, answered = row["messages"]
            assert asked["content"] == f"question {row['id']}" and answered["content"] == text_of([asked])
    events = [json.loads(line) for line in (tmp_path / "out.jsonl.events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "start" for event in events) == KILLS + 1
    assert len({event["kind"] for event in events if event["event"] == "retry"}) >= 8, "not all faults happened"


def test_stop_signal_ends_with_exit_code_3_and_status_says_so(tmp_path: Path) -> None:
    with MisbehavingServer(lambda asked: Act(delay_s=0.05)) as server:
        run = write_run(tmp_path, server.url, 2000, concurrency=4)
        process = subprocess.Popen(command("generate", run), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        out = tmp_path / "out.jsonl"
        while not out.exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)
        running = subprocess.run(command("status", out, "--json"), capture_output=True, text=True, check=False)
        assert json.loads(running.stdout)["alive"] is True
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 3, said
    assert "stopped on request" in said.splitlines()[-1] and "the same command goes on" in said.splitlines()[-1]
    after = subprocess.run(command("status", out), capture_output=True, text=True, check=False)
    assert "stopped; the same generate command goes on from here" in after.stdout
    assert subprocess.run(command("watch", out), capture_output=True, text=True, check=False).stdout == after.stdout


def test_a_stop_signal_in_the_first_moments_ends_with_exit_code_3(tmp_path: Path) -> None:
    run = write_run(tmp_path, "http://127.0.0.1:9/v1", 1)
    # From the moment at which the command line is there, before any command is: what it imports takes long here.
    program = (
        "import os, signal, time\n"
        "from eyas import cli\n"
        "cli.app = lambda **k: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(5))\n"
        "cli.main()\n"
    )
    process = subprocess.run([sys.executable, "-c", program, "generate", str(run)], capture_output=True, text=True)
    assert (process.returncode, "stopped on request" in process.stderr) == (3, True)


def test_no_output_of_a_run_holds_the_key_not_even_a_traceback(tmp_path: Path) -> None:
    def script(asked: Asked) -> Act | None:
        if asked.nth == 1 and asked.last.endswith("7"):
            return Act(status=500, body=error(f"bad key {KEY}"))
        return Act(status=401, body=error(f"bad key {KEY}")) if asked.last.endswith("55") else None

    environment = os.environ | {"THE_KEY": KEY}
    with MisbehavingServer(script) as server:
        run = write_run(tmp_path, server.url, 100, api_key_env="THE_KEY")
        refused = subprocess.run(
            command("-v", "generate", run), capture_output=True, text=True, check=False, timeout=60, env=environment
        )
        broken = subprocess.run(
            [sys.executable, "-c", "import eyas.generate.loop as l\n"
             "def broken(*a, **k): raise RuntimeError('a bug')\n"
             "l.Loop._take_answer = broken\n"
             "from eyas.cli import main; main()", "generate", str(run)],
            capture_output=True, text=True, check=False, timeout=60, env=environment,
        )  # fmt: skip
    assert refused.returncode == 2 and "answers 401" in refused.stderr
    assert broken.returncode == 1 and "a bug" in broken.stderr and "Traceback" in broken.stderr
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    everything = left.decode() + refused.stdout + refused.stderr + broken.stdout + broken.stderr
    assert "bad key ***" in everything
    assert KEY not in everything
