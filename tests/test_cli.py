"""The command line as an operator meets it: lines, exit codes, kills, status, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyas import config
from eyas.errors import ConfigError
from fake_data import make_table

RUN = """
[data]
samples = "samples.parquet"
[engine]
kind = "fake"
[engine.extra]
{extra}
[capture]
out = "states"
shard_tokens = 200
min_free_bytes = 0
interval_s = 0.5
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    make_table(tmp_path / "samples.parquet", [5 + i % 60 for i in range(80)], tags=True)
    return write_run(tmp_path)


def write_run(folder: Path, extra: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(RUN.format(extra=extra))
    return path


def command(*args: object) -> list[str]:
    return [sys.executable, "-c", "from eyas.cli import main; main()", *map(str, args)]


def eyas(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, check=False, timeout=120, **options)


def test_capture_verify_status_and_again(run_file: Path) -> None:
    states = run_file.parent / "states"
    first = eyas("capture", run_file, "--json")
    assert first.returncode == 0, first.stderr
    receipt = json.loads(first.stdout)
    assert receipt["planned"] == receipt["committed"] == 80 and receipt["pending"] == 0
    assert json.loads(eyas("verify", states, "--json").stdout)["ok"] is True
    again = json.loads(eyas("capture", run_file, "--json").stdout)
    assert again["captured_tokens"] == 0 and again["data_digest"] == receipt["data_digest"]
    status = json.loads(eyas("status", states, "--json").stdout)
    assert (status["planned"], status["committed"], status["pending"], status["alive"]) == (80, 80, 0, False)
    assert status["state"] == "complete"
    assert (states / "run.toml").exists() and config.load(states / "run.toml").capture.shard_tokens == 200


def test_plan_predicts_the_bytes_within_one_percent(run_file: Path) -> None:
    planned = json.loads(eyas("plan", run_file, "--json").stdout)
    assert planned["go"] is True and planned["samples"] == 80
    assert not (run_file.parent / "states").exists()
    eyas("capture", run_file)
    root = run_file.parent / "states"
    written = sum(p.stat().st_size for d in ("shards", "records") for p in (root / d).iterdir())
    payload = sum(p.stat().st_size for p in (root / "shards").iterdir())
    assert planned["payload_bytes"] == payload
    assert abs(planned["total_bytes"] - written) < 0.01 * written, (planned["record_bytes"], written - payload)
    probed = json.loads(eyas("plan", run_file, "--probe", "--json").stdout)
    assert probed["capture_tokens_per_s"] > 0 and probed["seconds"] > 0


def test_plan_says_no_go_and_why(run_file: Path) -> None:
    done = eyas("plan", run_file, "capture.min_free_bytes=999999999999999")
    assert done.returncode == 1 and "no-go: disk" in done.stdout


def test_first_line_comes_at_once_into_a_file(run_file: Path) -> None:
    log = run_file.parent / "log"
    with log.open("wb") as out:
        start = time.monotonic()
        process = subprocess.Popen(command("capture", run_file), stdout=out, stderr=out)
        while not log.read_bytes() and time.monotonic() - start < 10:
            time.sleep(0.02)
        waited = time.monotonic() - start
        assert process.wait(60) == 0
    assert waited < 5, "two seconds on a quiet machine"
    assert log.read_text().splitlines()[0].split(" ", 1)[1].startswith("capture: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_with_exit_3_and_the_same_command_goes_on(run_file: Path, number: int) -> None:
    slow = write_run(run_file.parent, "seconds_per_1k_tokens = 2.0\nwindow_tokens = 100")
    states = run_file.parent / "states"
    process = subprocess.Popen(command("capture", slow), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_commit(states)
    during = json.loads(eyas("status", states, "--json").stdout)
    assert during["alive"] is True and during["state"] == "capturing" and 0 < during["pending"] < 80
    start = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 3 and time.monotonic() - start < 10
    assert "goes on from here" in stderr and "Traceback" not in stderr
    after = json.loads(eyas("status", states, "--json").stdout)
    assert after["alive"] is False and after["state"] == "stopped"
    assert eyas("capture", write_run(run_file.parent)).returncode == 0
    assert eyas("verify", states).returncode == 0


def test_status_after_kill_9(run_file: Path) -> None:
    slow = write_run(run_file.parent, "seconds_per_1k_tokens = 2.0\nwindow_tokens = 100")
    states = run_file.parent / "states"
    process = subprocess.Popen(command("capture", slow), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_commit(states)
    second = eyas("capture", slow)
    assert second.returncode == 1 and f"pid {process.pid}" in second.stderr
    process.kill()
    process.wait()
    found = eyas("status", states)
    assert found.returncode == 0 and "dead" in found.stdout and "goes on from here" in found.stdout
    assert eyas("verify", states).returncode == 3
    assert eyas("watch", states).returncode == 0


def wait_for_commit(states: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (states / "records").exists() and any(p.suffix == ".json" for p in (states / "records").iterdir()):
            return
        time.sleep(0.02)
    raise AssertionError("no commit within a minute")


def test_verify_repair_capture(run_file: Path) -> None:
    eyas("capture", run_file)
    states = run_file.parent / "states"
    victim = next((states / "shards").iterdir())
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    damaged = eyas("verify", states)
    assert damaged.returncode == 1 and victim.name in damaged.stdout
    assert eyas("verify", states, "--repair").returncode == 3
    assert eyas("capture", run_file).returncode == 0
    assert eyas("verify", states).returncode == 0


def test_merge(run_file: Path) -> None:
    folder = run_file.parent
    assert eyas("capture", run_file, 'capture.tags=["even"]', f"capture.out={folder / 'a'}").returncode == 0
    assert eyas("capture", run_file, 'capture.tags=["odd"]', f"capture.out={folder / 'b'}").returncode == 0
    merged = eyas("merge", folder / "c", folder / "a", folder / "b", "--json")
    assert json.loads(merged.stdout)["samples"] == 80
    assert eyas("verify", folder / "c").returncode == 0


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["capture", "absent.toml"], 2, "absent.toml: no such file"),
        (["capture", "run.toml", "capture.limt=3"], 2, "did you mean 'limit'?"),
        (["capture", "run.toml", "capture.limit=none"], 2, "capture.limit"),
        (["capture", "run.toml", "capture.aux_layers=[9]"], 2, "outside 0..8"),
        (["capture", "run.toml", "capture.in_flight_bytes=100"], 2, "capture.in_flight_bytes"),
        (["capture", "run.toml", "data.samples=absent.parquet"], 2, "absent.parquet is not there; run 'eyas prepare'"),
        (["capture", "run.toml", "data.samples=."], 2, "is a directory"),
        (["capture", "run.toml", "capture.out=garbage.toml"], 2, "is a file; choose another directory"),
        (["capture", "run.toml", "data.samples=garbage.toml"], 1, "garbage.toml"),
        (["prepare", "run.toml", "data.sources=absent.jsonl"], 2, "absent.jsonl: No such file or directory"),
        (["capture", "run.toml", "engine.extra.a=1", "engine.extra.a.b=2"], 2, "can hold no fields"),
        (["capture", "run.toml", 'engine.extra.faults=[{kind="refused", every=0}]'], 2, "engine.extra.faults.0.every"),
        (["capture", "run.toml", 'capture.tags=["none"]'], 1, "no sample matches"),
        (["capture", "run.toml", "engine.extra.colour=1"], 2, "engine.extra.colour"),
        (["capture", "run.toml", "engine.kind=hf"], 2, "target.path is not set"),
        (["capture", "run.toml", "engine.kind=hf", "target.path=."], 2, "config.json"),
        (["prepare", "run.toml", "target.path=."], 2, "data.sources"),
        (["status", "."], 1, "not a data set"),
        (["verify", "absent"], 1, "not a data set"),
        (["capture", "garbage.toml"], 2, "not valid TOML"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_gets_one_clear_line(run_file: Path, args: list[str], code: int, says: str) -> None:
    (run_file.parent / "garbage.toml").write_text("[capture\n")
    done = eyas(*args, cwd=run_file.parent)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr


def test_output_into_a_closed_pipe_is_no_traceback(run_file: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from eyas.cli import main; main()' plan {run_file} | true",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-", ">/dev/full", "2>&1 | head -1"])
def test_what_was_captured_counts_also_when_it_cannot_be_told(run_file: Path, closing: str) -> None:
    program = f"{sys.executable} -c 'from eyas.cli import main; main()'"
    script = f"set -o pipefail; {program} capture {run_file} {closing}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert eyas("verify", run_file.parent / "states").returncode == 0


def test_status_and_capture_see_what_is_gone(run_file: Path) -> None:
    states = run_file.parent / "states"
    eyas("capture", run_file)
    record = sorted((states / "records").iterdir())[0]
    whole = record.read_bytes()
    record.write_bytes(b"")
    found = eyas("status", states)
    assert found.returncode == 1 and "damaged: 1 problem" in found.stdout and record.name in found.stdout
    record.write_bytes(whole)
    next((states / "shards").iterdir()).unlink()
    found = eyas("status", states, "--json")
    assert found.returncode == 1 and "payload is gone" in json.loads(found.stdout)["problems"][0]
    again = eyas("capture", run_file)
    assert again.returncode == 1 and "payload is gone" in again.stderr and "--repair" in again.stderr
    assert eyas("verify", states, "--repair").returncode == 3
    repaired = eyas("status", states, "--json")
    assert repaired.returncode == 0 and json.loads(repaired.stdout)["pending"] > 0
    assert eyas("capture", run_file).returncode == 0


def test_a_plan_that_is_gone_is_said_and_made_anew(run_file: Path) -> None:
    states = run_file.parent / "states"
    eyas("capture", run_file)
    for segment in (states / "plan").iterdir():
        segment.unlink()
    found = eyas("status", states, "--json")
    assert found.returncode == 1 and json.loads(found.stdout)["pending"] == 0
    again = eyas("capture", run_file)
    assert again.returncode == 0 and "the plan was gone" in again.stderr
    assert eyas("verify", states).returncode == 0


def test_a_smaller_limit_is_answered(run_file: Path) -> None:
    eyas("capture", run_file)
    assert "the plan only grows" in eyas("capture", run_file, "capture.limit=10").stderr


def test_a_lost_head_is_named(run_file: Path) -> None:
    eyas("capture", run_file)
    (run_file.parent / "states" / "eyas.json").unlink()
    done = eyas("capture", run_file)
    assert done.returncode == 1 and "eyas.json: missing" in done.stderr


def test_paths_are_relative_to_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.toml").write_text('[capture]\nout = "states"\n[data]\nsources = ["a.jsonl"]\n')
    monkeypatch.chdir(tmp_path)
    tree = config.load(Path("sub/run.toml"), ["data.samples=here.parquet"])
    assert tree.capture.out == tmp_path / "sub" / "states"
    assert tree.data.sources == (tmp_path / "sub" / "a.jsonl",)
    assert tree.data.samples == tmp_path / "here.parquet"


def test_config_round_trip_and_every_problem_named(tmp_path: Path) -> None:
    tree = config.load(None, ["capture.aux_layers=[1,2]", "engine.extra.deep.key=3"])
    path = tmp_path / "run.toml"
    path.write_text(config.dump(tree))
    assert config.load(path) == tree
    with pytest.raises(ConfigError) as error:
        config.load(None, ["captur.limit=1", "capture.limt=1", "nothing"])
    assert len(str(error.value).splitlines()) == 3


def test_environment_variables_are_no_settings(run_file: Path) -> None:
    environment = os.environ | {"EYAS_CAPTURE_LIMIT": "1", "CAPTURE__LIMIT": "1"}
    assert json.loads(eyas("plan", run_file, "--json", env=environment).stdout)["samples"] == 80
