"""`eyas serve` with a stand-in for SGLang: the command line, refusals, restarts, signals, no process left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas import config
from eyas.config import Config
from eyas.engine import staged
from eyas.engine.sglang.client import SglangEngine
from eyas.errors import ConfigError, EngineError
from eyas.log import Progress
from eyas.serve import flags, process, sglang
from eyas.serve.causes import how_it_ended, likely_cause
from eyas.serve.command import ServerPlan, absolute, bytes_per_token, plan_server, quota_problem
from eyas.serve.process import group_members
from eyas.serve.run import Patience, prepare, running_server, serve
from eyas.serve.status import server_status
from eyas.store.verify import verify
from fake_data import config as capture_config
from fake_data import make_table, run

STAND_IN = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

here = Path(__file__).parent
mode = lambda: (here / "mode").read_text()
with (here / "starts").open("a") as starts:
    starts.write(json.dumps([os.getpid(), sys.argv[1:]]) + "\\n")
scheduler = subprocess.Popen(["sleep", "600"])
print("loading weights", flush=True)
print("server_args=the flags", flush=True)
if mode() == "talks":
    import threading
    threading.Thread(target=lambda: [print(f"batch {i:06d} " + 80 * "x", flush=True) or time.sleep(0.0002)
                                     for i in range(8000)], daemon=True).start()
if mode() == "dies":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", flush=True)
    sys.exit(7)
if mode() == "stubborn":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode() == "slow":
    time.sleep(600)
settings = json.loads(Path(os.environ["EYAS_CAPTURE"]).read_text())
assert (Path(os.environ["PYTHONPATH"].split(":")[0]) / "eyas/engine/sglang/plugin.py").exists()
hello = {
    "staged_version": "STAGED_VERSION", "sglang": "0.0.stand-in", "architecture": "Llama",
    "model_path": "m", "num_layers": 8, "hidden_size": 16, "dtype": "bfloat16",
    "aux_layers": settings["aux_layers"], "last_hidden_norm": "post",
    "tp_size": 1, "device": "none", "attention": "none", "staging": settings["staging"],
    "room": {"limit": settings["staged_bytes"], "free": 1},
}
if mode() == "other layers":
    hello["aux_layers"] = [1, 2, 3]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if mode() == "hangs" and self.path == "/health":
            time.sleep(600)
        self.answer({"max_req_input_len": 100})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({"meta_info": {} if mode() == "no plugin" else {"eyas": [{"hello": hello}]}})
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

port = int(sys.argv[sys.argv.index("--port") + 1])
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.daemon_threads = True
server.serve_forever()
"""

PATIENCE = Patience(settled_s=300, silent_s=3, stop_s=1, tick_s=0.02)


class World:
    """A run file, a target, and an interpreter that runs the stand-in whatever it is told to run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.staging = root / "staging"
        self.target = root / "target"
        self.target.mkdir()
        body = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 100, "dtype": "bfloat16"}
        (self.target / "config.json").write_text(json.dumps(body))
        (self.target / "model.safetensors").write_bytes(b"")
        (root / "stand_in.py").write_text(STAND_IN.replace("STAGED_VERSION", staged.VERSION))
        python = root / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {root}/stand_in.py "$@"\n')
        python.chmod(0o755)
        self.mode("ok")
        self.run_file = root / "run.toml"
        self.run_file.write_text(
            f"""
            [target]
            path = "target"
            [engine]
            kind = "sglang"
            url = "http://127.0.0.1:{self.port}"
            [serve]
            python = "{python}"
            staging = "staging"
            staging_bytes = 1000000
            backoff_s = 0.05
            max_restarts = 2
            [capture]
            out = "states"
            """
        )
        self.server = root / "states" / "server"
        self.groups: set[int] = set()

    def mode(self, text: str) -> None:
        (self.root / "mode").write_text(text)

    def tree(self, *overrides: str) -> Config:
        return config.load(self.run_file, overrides)

    def plan(self, *overrides: str, **inherited: str) -> ServerPlan:
        tree = self.tree(*overrides)
        return plan_server(tree.serve, tree.engine, tree.target, tree.capture, inherited=inherited)

    def starts(self) -> list[tuple[int, list[str]]]:
        """Pid and arguments of each server that was started."""
        path = self.root / "starts"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self) -> list[int]:
        """Processes of those servers' groups that still live: the stand-in's own and its scheduler's."""
        return [pid for group in self.groups for pid in group_members(group)]

    def beat(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.server / "heartbeat.json").read_text()))
        except FileNotFoundError:
            return {}

    def note_groups(self) -> None:
        for pid, _ in self.starts():
            with contextlib.suppress(ProcessLookupError):
                self.groups.add(os.getpgid(pid))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    assert made.left() == []


class Serving:
    """`serve` in a thread of this process."""

    def __init__(self, world: World, *overrides: str, patience: Patience = PATIENCE) -> None:
        self.stop = threading.Event()
        self.said = io.StringIO()
        self.error: EngineError | None = None
        self.world = world
        plan = world.plan(*overrides)
        limits = prepare(plan, None, "")

        def target() -> None:
            try:
                serve(plan, limits, Progress(stream=self.said), self.stop, next_command="eyas capture r",
                      patience=patience)  # fmt: skip
            except EngineError as error:
                self.error = error

        self.thread = threading.Thread(target=target)
        self.thread.start()

    def wait_for(self, state: str, restarts: int = 0) -> dict[str, Any]:
        return wait_for(self.world, lambda b: b.get("state") == state and b["restarts"] >= restarts)

    def end(self) -> str:
        self.stop.set()
        return self.join()

    def join(self) -> str:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.said.getvalue()


def wait_for(world: World, condition: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while not condition(beat := world.beat()):
        assert time.monotonic() < deadline, beat
        world.note_groups()
        time.sleep(0.02)
    world.note_groups()
    return beat


def eyas(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, check=False, timeout=120, **options)


def command(*args: object) -> list[str]:
    return [sys.executable, "-c", "from eyas.cli import main; main()", *map(str, args)]


def test_the_command_holds_what_capture_needs(world: World) -> None:
    plan = world.plan("engine.dtype=float32", "engine.device=cpu", PYTHONPATH="/mine", SGLANG_PLUGINS="other")
    assert plan.argv[1:3] == ("-m", "sglang.launch_server")
    assert " ".join(plan.argv[3:]) == (
        f"--model-path {world.target} --host 127.0.0.1 --port {world.port} --dtype float32 --device cpu "
        "--disable-radix-cache --chunked-prefill-size -1 --max-prefill-tokens 16384 "
        "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled "
        "--skip-server-warmup --sleep-on-idle"
    )
    assert plan.environment == {
        "PYTHONPATH": f"{world.server}/plugin:/mine",
        "EYAS_CAPTURE": f"{world.server}/capture.json",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_PLUGINS": "other,eyas",
    }
    assert plan.aux_layers == (2, 4, 5)


def test_several_gpus_reduce_in_the_plain_way(world: World) -> None:
    words = world.plan("serve.tensor_parallel=4").argv
    at = words.index("--tp-size")
    assert words[at : at + 4] == (
        "--tp-size", "4", "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"
    )  # fmt: skip


def test_extra_options_pass_through_and_win() -> None:
    own = sglang.own_flags(Config().serve, Config().engine, model_path="m", host="h", port=1)
    extra = {
        "attention-backend": "triton",
        "mem_fraction_static": 0.4,
        "--max-prefill-tokens": 8192,
        "skip-server-warmup": False,
        "cuda-graph-bs-decode": [1, 2],
        "json-model-override-args": {"a": 1},
        "disable-overlap-schedule": True,
    }
    words = flags.as_words(own | sglang.extra_flags(extra))
    text = " ".join(words)
    assert "--attention-backend triton" in text and "--mem-fraction-static 0.4" in text
    assert "--max-prefill-tokens 8192" in text and "16384" not in text
    assert "--skip-server-warmup" not in words and "--disable-overlap-schedule" in words
    assert "--cuda-graph-bs-decode 1 2" in text and '--json-model-override-args {"a":1}' in text
    assert sglang.contradictions(extra) == []


@pytest.mark.parametrize(
    "name, value",
    [
        ("speculative-algorithm", "EAGLE3"),
        ("speculative_num_steps", 3),
        ("pp-size", 2),
        ("pipeline-parallel-size", 2),
        ("enable-dp-attention", True),
        ("attn-dp-size", 2),
        ("enable-flashinfer-allreduce-fusion", True),
        ("flashinfer-allreduce-fusion-backend", "auto"),
        ("disable-radix-cache", False),
        ("enable-hierarchical-cache", True),
        ("cuda-graph-backend-prefill", "tc_piecewise"),
        ("cuda-graph-config", {"prefill": {"backend": "full"}}),
        ("cuda-graph-config", '{"prefill": {"backend": "full"}}'),
        ("cuda-graph-config", "{"),
        ("enable-torch-symm-mem", True),
        ("enable_symm_mem", True),
        ("enable-nccl-nvls", True),
        ("host", "0.0.0.0"),
        ("port", 1),
        ("model", "m"),
        ("tp-size", 2),
        ("config", "flags.yaml"),
    ],
)
def test_flags_that_contradict_capture_are_refused(name: str, value: Any) -> None:
    (problem,) = sglang.contradictions({name: value})
    assert problem.startswith("engine.extra.")


@pytest.mark.parametrize("name", ["api-key", "api_key", "--admin-api-key", "ssl-keyfile-password"])
def test_a_secret_among_the_flags_is_refused_and_shown_nowhere(world: World, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world.plan(f"engine.extra.{name}=hush")
    assert str(caught.value).startswith(f"engine.extra.{name}: capture sends no key") and "hush" not in str(
        caught.value
    )
    with pytest.raises(ConfigError, match="capture sends no key"):
        SglangEngine(world.tree().target, world.tree(f"engine.extra.{name}=hush").engine)
    assert not world.server.exists()


def test_flags_that_only_look_like_it_are_not() -> None:
    harmless = {
        "pp-size": 1,
        "enable-dp-attention": False,
        "speculative-algorithm": False,
        "disable-radix-cache": True,
        "cuda-graph-backend-prefill": "disabled",
        "cuda-graph-backend-decode": "full",
        "cuda-graph-config": {"decode": {"backend": "full"}},
    }
    assert sglang.contradictions(harmless) == []


def test_all_problems_are_told_at_once(world: World) -> None:
    (world.target / "model.safetensors").unlink()
    wrong = ("engine.url=127.0.0.1", "serve.python=/no/python", "engine.extra.pp-size=2")
    done = eyas("serve", world.run_file, *wrong)
    assert done.returncode == 2 and done.stdout == ""
    for start in ("engine.url", "target.path", "serve.python", "engine.extra.pp-size"):
        assert f"eyas: {start}" in done.stderr, done.stderr
    # Whose flags they are is not known then.
    done = eyas("serve", world.run_file, "engine.kind=hf", *wrong)
    for start in ("engine.kind", "engine.url", "target.path", "serve.python"):
        assert f"eyas: {start}" in done.stderr, done.stderr
    assert not (world.root / "states").exists() and world.starts() == []


def test_layers_outside_the_target_are_refused(world: World) -> None:
    with pytest.raises(ConfigError, match=r"capture\.aux_layers .* within 0\.\.8"):
        world.plan("capture.aux_layers=[2, 9]")


@pytest.mark.parametrize("url", ["http://127.0.0.1:0", "http://127.0.0.1", "https://127.0.0.1:1"])
def test_an_address_without_a_port_to_listen_at_is_refused(world: World, url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.url is .*: give it as http://HOST:PORT, a port of 1 or more"):
        world.plan(f"engine.url={url}")


@pytest.mark.parametrize("url", ["http://me:s3cret@127.0.0.1:1", "https://me:s3cret@127.0.0.1:x"])
def test_an_address_with_a_password_is_refused_and_not_shown(world: World, url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.url holds a user name or a password") as caught:
        world.plan(f"engine.url={url}")
    assert "s3cret" not in str(caught.value)


def test_a_quota_below_the_largest_sample_is_refused(world: World) -> None:
    make_table(world.root / "samples.parquet", [10, 300, 20])
    plan = world.plan()
    assert plan.bytes_per_token == 4 * 16 * 2 + 8
    need = round(300 * (4 * 16 * 2 + 8) / 0.9)
    assert quota_problem(plan, need, 300) is None
    with pytest.raises(ConfigError, match=r"serve\.staging_bytes: the largest sample has 300 tokens"):
        prepare(world.plan(f"serve.staging_bytes={need - 1}"), world.root / "samples.parquet", "")
    assert prepare(world.plan(f"serve.staging_bytes={need}"), world.root / "samples.parquet", "").staged_bytes == need
    assert bytes_per_token(plan.target, "float8_e4m3fn", (1,)) is None


def test_staging_that_cannot_be_is_named_by_its_field(world: World) -> None:
    world.staging.write_text("a file")
    with pytest.raises(ConfigError, match=r"serve\.staging: .*File exists; name a directory"):
        prepare(world.plan(), None, "")
    with pytest.raises(ConfigError, match=r"serve\.staging: /proc/nothing: No such file"):
        prepare(world.plan("serve.staging=/proc/nothing"), None, "")


def test_a_path_that_python_cannot_hold_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match=r"capture\.out: .*a:b has a ':' in it"):
        prepare(world.plan(f"capture.out={world.root}/a:b"), None, "")


def test_the_files_of_a_running_serve_stay_as_they_are(world: World) -> None:
    process = subprocess.Popen(command("serve", world.run_file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(world, lambda b: b.get("state") == "ready")
    before = (world.server / "capture.json").read_bytes()
    done = eyas("serve", world.run_file, "--print", "serve.staging_bytes=2000000")
    assert done.returncode == 2 and "runs from the files of" in done.stderr and done.stdout == ""
    assert (world.server / "capture.json").read_bytes() == before
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_print_writes_plugin_and_settings_and_starts_nothing(world: World) -> None:
    done = eyas(
        "serve", world.run_file, "--print", 'engine.extra.x="two words"', env=os.environ | {"PYTHONPATH": "/a b"}
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert (
        words[0] == "env" and f"PYTHONPATH={world.server}/plugin:/a b" in words and words[-2:] == ["--x", "two words"]
    )
    settings = json.loads((world.server / "capture.json").read_text())
    assert settings["staged_bytes"] == 1_000_000 and settings["aux_layers"] == [2, 4, 5]
    assert settings["staging"] == str(world.staging) and world.staging.stat().st_mode & 0o777 == 0o700
    assert (world.server / "plugin/eyas/engine/sglang/plugin.py").exists() and world.starts() == []
    assert config.load(world.server / "run.toml").serve.staging_bytes == 1_000_000


def test_an_interpreter_is_relative_to_where_it_was_named(world: World) -> None:
    text = world.run_file.read_text()
    assert f'python = "{world.root}/python"' in text
    world.run_file.write_text(text.replace(f"{world.root}/python", "./python"))
    (world.root / "elsewhere").mkdir()
    for overrides in [], ["serve.python=../python"]:
        done = eyas("serve", world.run_file, "--print", *overrides, cwd=world.root / "elsewhere")
        assert done.returncode == 0, done.stderr
        words = shlex.split(done.stdout)
        assert Path(words[words.index("-m") - 1]).samefile(world.root / "python")
        saved = config.load(world.server / "run.toml").serve.python
        assert saved is not None and Path(saved).is_absolute() and Path(saved).samefile(world.root / "python")
    assert absolute("python3.12", world.root) == "python3.12" and absolute(None, world.root) is None


def test_plugin_alone_for_a_container(world: World) -> None:
    done = eyas("serve", world.run_file, "--plugin", world.root / "p")
    assert done.returncode == 0 and "PYTHONPATH" in done.stdout
    assert (world.root / "p/eyas/engine/sglang/plugin.py").exists() and not (world.root / "states").exists()


def test_from_start_to_sigterm(world: World) -> None:
    world.staging.mkdir()
    dead = world.staging / ("0" * 16)
    dead.mkdir()
    (dead / staged.OWNER).touch()
    (dead / "1.states").write_bytes(b"x" * 1000)
    log = world.root / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command("serve", world.run_file), stdout=out, stderr=out)
    beat = wait_for(world, lambda b: b.get("state") == "ready")
    assert beat["url"] == f"http://127.0.0.1:{world.port}" and beat["engine_version"] == "0.0.stand-in"
    (start,) = world.starts()
    assert beat["server_pid"] == start[0] and beat["pid"] == process.pid
    watching = subprocess.Popen(command("watch", world.root / "states"), stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    seen = [watching.stdout.readline() for _ in range(5)]
    assert "nothing is captured yet" in seen[0] and "server   ready for" in seen[1] and seen[3:5] != ["", ""]
    found = server_status(world.root / "states")
    assert found is not None and found.alive and found.server_alive and found.state == "ready"
    assert f"pid {start[0]} alive" in found.lines()[0] and "ready" in found.lines()[0]
    assert "capture can use it" in (running_server(world.plan()) or "")
    with pytest.raises(ConfigError, match=r"captures the hidden states \[2, 4, 5\], not \[1, 2, 3\]"):
        running_server(world.plan("capture.aux_layers=[1, 2, 3]"))
    with socket.socket() as probe, pytest.raises(ConfigError, match="another 'eyas serve'"):
        probe.bind(("127.0.0.1", 0))
        running_server(world.plan(f"engine.url=http://127.0.0.1:{probe.getsockname()[1]}"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert watching.wait(30) == 0 and "stopped" in watching.communicate()[0]
    assert world.left() == [] and not world.staging.exists() and len(world.starts()) == 1
    text = log.read_text()
    assert "removed what 1 dead runs had left" in text and "next: eyas capture" in text and "Traceback" not in text
    assert "hidden [2, 4, 5] + last (post-norm)" in text
    assert world.beat()["state"] == "stopped"
    told = json.loads(eyas("status", world.root / "states", "--json").stdout)["server"]
    assert told["state"] == "stopped" and told["alive"] is False and told["server_pid"] is None
    assert "start 1: " in (world.server / "server.log").read_text()


@pytest.mark.parametrize("victim", ["supervisor", "keeper"])
def test_no_process_outlives_a_kill_9(world: World, victim: str) -> None:
    process = subprocess.Popen(command("serve", world.run_file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(world, lambda b: b.get("state") == "ready")
    (group,) = world.groups
    assert len(group_members(group)) == 3, "keeper, server, scheduler"
    if victim == "supervisor":
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while world.left() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert world.left() == []
        status = server_status(world.root / "states")
        assert status is not None and status.server_alive is False
        assert "dead: 'eyas serve'" in status.lines()[0]
    else:
        os.kill(group, signal.SIGKILL)
        wait_for(world, lambda b: b.get("state") == "ready" and b["restarts"] == 1)
        assert group_members(group) == []
        process.terminate()
        assert process.wait(30) == 0


def test_a_server_that_ignores_sigterm_is_killed(world: World) -> None:
    world.mode("stubborn")
    serving = Serving(world)
    serving.wait_for("ready")
    assert "no process of the server is left" in serving.end()
    assert world.left() == []


def test_stop_while_it_loads(world: World) -> None:
    world.mode("slow")
    serving = Serving(world)
    wait_for(world, lambda _: world.starts())
    serving.end()
    assert serving.error is None and world.left() == [] and not world.staging.exists()


def test_a_server_that_dies_while_loading_fails_at_once_with_its_last_lines(world: World) -> None:
    world.mode("dies")
    done = eyas("serve", world.run_file)
    assert done.returncode == 1 and len(world.starts()) == 1
    assert "exit code 7" in done.stderr and "  torch.OutOfMemoryError" in done.stderr
    assert "likely cause: GPU memory is full" in done.stderr
    status = server_status(world.root / "states")
    assert status is not None and status.state == "stopped" and "exit code 7" in status.error


def test_a_server_that_never_becomes_ready_fails(world: World) -> None:
    world.mode("slow")
    serving = Serving(world, "serve.start_timeout_s=1.5")
    serving.join()
    assert "not ready within 2s (serve.start_timeout_s)" in str(serving.error)


@pytest.mark.parametrize(
    "mode, why", [("no plugin", "it runs without the capture plugin"), ("other layers", "[1, 2, 3], not [2, 4, 5]")]
)
def test_a_server_that_cannot_be_captured_from_fails_at_once(world: World, mode: str, why: str) -> None:
    world.mode(mode)
    serving = Serving(world)
    serving.join()
    assert why in str(serving.error) and len(world.starts()) == 1


def test_a_server_that_dies_is_restarted_and_given_up_when_it_goes_on_dying(world: World) -> None:
    serving = Serving(world)
    serving.wait_for("ready")
    os.kill(world.starts()[-1][0], signal.SIGKILL)
    serving.wait_for("ready", restarts=1)
    world.mode("dies")
    os.kill(world.starts()[-1][0], signal.SIGKILL)
    said = serving.join()
    assert len(world.starts()) == 3
    assert "the server ended (SIGKILL) after it was ready" in said and "restart 1 of at most 2 in a row" in said
    assert "gave up after 2 restarts in a row" in str(serving.error) and "exit code 7" in str(serving.error)
    log = (world.server / "server.log").read_text()
    assert all(f"start {n}: " in log for n in (1, 2, 3)) and "restart 2 of at most 2" in log


def test_a_server_that_lived_long_begins_a_new_row(world: World) -> None:
    patience = Patience(settled_s=0.0, silent_s=30, stop_s=1, tick_s=0.02)
    serving = Serving(world, "serve.max_restarts=1", patience=patience)
    for restarts in range(3):
        serving.wait_for("ready", restarts=restarts)
        os.kill(world.starts()[-1][0], signal.SIGKILL)
    serving.wait_for("ready", restarts=3)
    serving.end()
    assert serving.error is None


def test_a_server_that_hangs_is_restarted(world: World) -> None:
    serving = Serving(world)
    serving.wait_for("ready")
    world.mode("hangs")
    wait_for(world, lambda b: b["state"] == "restarting" or b["restarts"])
    world.mode("ok")
    serving.wait_for("ready", restarts=1)
    assert "answered no health check" in serving.end()


def test_a_log_of_days_stays_small_and_keeps_its_first_lines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 200_000)
    monkeypatch.setattr(process, "HEAD_BYTES", 2_000)
    world.mode("talks")
    log = world.server / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text("an older server's\n")
    serving = Serving(world, patience=Patience(silent_s=60, stop_s=1, tick_s=0.02))
    serving.wait_for("ready")
    wait_for(world, lambda _: "batch 007999" in log.read_text())
    assert serving.end() and serving.error is None
    text, before = log.read_text(), (log.parent / "server.log.1").read_text()
    assert len(text) < 300_000 and len(before) < 300_000
    lines = text.splitlines()
    assert " start 1: " in lines[0] and "--disable-radix-cache" in lines[0]
    assert lines[1:3] == ["loading weights", "server_args=the flags"] and text.count("server_args") == 1
    assert text.count(f"what came between: {log}.1") == 1
    # Between what was put aside and what came then hardly a line is missing, and the last lines are all there.
    parts = [part.rpartition("what came between")[2].splitlines()[1:] for part in (before, text)]
    told = [int(line.split()[1]) for part in parts for line in part if line.startswith("batch 0")]
    assert told[-1] == 7999 and len(told) > 2000 and told[-1] - told[0] - len(told) < 100
    assert not list(log.parent.glob("*.tmp"))


def test_something_else_on_the_port_is_a_clear_error(world: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", world.port))
        with pytest.raises(ConfigError, match=r"engine\.url: a server cannot listen"):
            running_server(world.plan())
    page = subprocess.Popen([sys.executable, "-m", "http.server", str(world.port), "--bind", "127.0.0.1"],
                            stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", world.port)).close()
                break
            time.sleep(0.05)
        with pytest.raises(ConfigError, match=r"engine\.url: port \d+ is in use"):
            running_server(world.plan())
    finally:
        page.kill()
        page.wait()


def test_a_data_set_and_its_server_do_not_touch_each_other(world: World) -> None:
    plan = world.plan()
    prepare(plan, None, "[capture]\n")
    before = sorted(p for p in world.server.rglob("*"))
    table = make_table(world.root / "samples.parquet", [5, 6, 7])
    run(table, capture_config(world.root / "states"))
    assert verify(world.root / "states", repair=True).exit_code == 0
    assert sorted(p for p in world.server.rglob("*")) == before
    prepare(plan, None, "[capture]\n")
    assert verify(world.root / "states").exit_code == 0


def test_likely_causes() -> None:
    assert how_it_ended(137) == "SIGKILL" and how_it_ended(3) == "exit code 3"
    assert "memory limit" in (likely_cause(137, ["loading"]) or "")
    assert "serve.python" in (likely_cause(1, ["/p: Error while finding 'x' (No module named 'sglang')"]) or "")
    assert "does not know --foo" in (likely_cause(2, ["error: unrecognized arguments: --foo"]) or "")
    refusal = "CaptureSetupError: eyas: cannot capture: speculation is on"
    assert "speculation is on" in (likely_cause(1, [refusal, "later"]) or "")
    assert likely_cause(1, ["nothing known"]) is None
    own_end = "kill_process_tree called: parent_pid=1, include_parent=True, pid=1"
    crash = "Subprocess scheduler_0 (pid=25905) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    assert (likely_cause(137, [crash, own_end]) or "").startswith("scheduler_0 was killed from outside")
    warning = "UserWarning: No module named 'torchaudio'"
    assert (
        likely_cause(137, [warning, *["fine"] * 40, own_end]) is None and likely_cause(137, [warning, own_end]) is None
    )
