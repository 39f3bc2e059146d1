"""Any kill at any moment resumes exactly: the process dies between any two system calls of writing and commit."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crash_files import Crash, CrashFiles, Mode
from eyas.config import CaptureConfig
from eyas.data.table import SampleTable
from eyas.engine.fake import FakeEngine, FakeSettings, Fault
from eyas.errors import DataSetLocked, EyasError
from eyas.store.files import Files
from eyas.store.layout import Layout
from eyas.store.plan import Segment
from eyas.store.verify import verify
from eyas.store.writer import DataSetWriter
from fake_data import config, contents, make_table, run

LENGTHS = [3, 2, 4, 3, 2, 2, 3, 4, 2]
SETTINGS: dict[str, Any] = {"num_layers": 3, "hidden_size": 4}


class QuickFiles(Files):
    """The real calls, without waiting for a disk."""

    def fsync(self, fd: int) -> None:
        os.fstat(fd)

    def sync_directory(self, path: Path) -> None:
        assert path.is_dir()


@dataclass
class World:
    """A table, the faults that it meets, and what an uninterrupted run makes of them."""

    base: Path
    table: SampleTable
    faults: tuple[Fault, ...]
    expected: dict[str, bytes] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)

    def fresh(self) -> Path:
        return self.base / f"out{next(self.names)}"

    def config(self, out: Path, **changes: Any) -> CaptureConfig:
        return config(out, **({"shard_tokens": 8, "check_fraction": 0.0} | changes))

    def capture(self, out: Path, files: Files | None = None, **changes: Any) -> None:
        engine = FakeEngine((1, 2), FakeSettings(faults=self.faults, **SETTINGS))
        run(self.table, self.config(out, **changes), engine=engine, files=files or QuickFiles())

    def crash(self, out: Path, at: int, mode: Mode) -> bool:
        """Capture until call `at`; whether the process died there."""
        vault = out.with_name(f"{out.name}-vault{at}")
        try:
            self.capture(out, CrashFiles(out, at, mode, vault))
        except Crash:
            return True
        finally:
            shutil.rmtree(vault)
        return False

    def require_whole(self, out: Path) -> None:
        """Byte for byte what an uninterrupted run makes, nothing left over, law 1, sound."""
        assert contents(out) == self.expected
        require_tidy(out)
        report = verify(out)
        assert (report.problems, report.orphans, report.exit_code) == ([], 0, 0)
        assert report.planned == report.committed + report.rejected == self.table.num_rows
        assert report.pending == 0


def require_what_is_done_is_whole(out: Path) -> None:
    """What the records name is there and sound at every moment, and law 1 holds: a reader may come at any time."""
    if (out / "eyas.json").exists():
        report = verify(out)
        assert report.problems == []
        assert report.planned == report.committed + report.rejected + report.pending


def require_tidy(out: Path) -> None:
    """No temporary file, no scratch, no payload without a record; nothing but what the format names."""
    layout = Layout(out)
    assert layout.temporaries() == []
    assert layout.payloads().keys() <= layout.record_ids()
    assert not layout.scratch.exists()
    ours = {"eyas.json", "shards", "records", "plan", "lock", "events.jsonl", "heartbeat.json"}
    assert {p.name for p in out.iterdir()} <= ours | {"verify.json", "manifest.parquet"}


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    # In memory where there is some: thousands of small files.
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() and os.access(shm, os.W_OK) else None) as name:
        yield Path(name)


def make_world(base: Path, name: str, lengths: list[int], *, rejects: bool) -> World:
    base = base / name
    base.mkdir()
    world = World(base, make_table(base / "samples.parquet", lengths), ())
    if rejects:
        world.capture(world.fresh())
        with Segment(Layout(world.base / "out0").segment(0)) as segment:
            shards = [segment.ids_of(shard)[0] for shard in segment.shards]
        assert len(shards) >= 4 and len(shards[1]) > 1
        bad = (shards[1][0], *shards[2])
        world.faults = (Fault(kind="refused", samples=bad),)
    out = world.fresh()
    world.capture(out)
    world.expected = contents(out)
    world.require_whole(out)
    return world


@pytest.fixture(scope="module")
def world(base: Path) -> World:
    """Four shards: one with a reject, one all of whose samples are rejected."""
    made = make_world(base, "rejects", LENGTHS, rejects=True)
    assert len([name for name in made.expected if name.startswith("records/")]) == 4
    assert len([name for name in made.expected if name.startswith("shards/")]) == 3
    return made


@pytest.mark.parametrize("mode", ["before", "after", "data_lost", "names_lost"])
def test_death_at_any_call_resumes_to_the_same_bytes(world: World, mode: Mode) -> None:
    for at in itertools.count(1):
        out = world.fresh()
        died = world.crash(out, at, mode)
        if mode in ("data_lost", "names_lost"):
            require_what_is_done_is_whole(out)
        world.capture(out)
        world.require_whole(out)
        shutil.rmtree(out)
        if not died:
            break
    assert at > 50, "the system calls do not pass through Files any more"


@pytest.mark.parametrize("mode", ["after", "both_lost"])
def test_death_during_the_resume_of_a_death(world: World, mode: Mode) -> None:
    rng = random.Random(7)
    for _ in range(15):
        out = world.fresh()
        first, second, third = rng.randrange(1, 85), rng.randrange(1, 60), rng.randrange(1, 30)
        for at in (first, second, third):
            world.crash(out, at, mode)
        world.capture(out)
        world.require_whole(out)
        shutil.rmtree(out)


def test_death_while_the_plan_is_widened(base: Path) -> None:
    world = make_world(base, "wider", LENGTHS, rejects=False)
    start = world.fresh()
    world.capture(start, limit=4)
    reference = world.fresh()
    shutil.copytree(start, reference)
    world.capture(reference)
    world.expected = contents(reference)
    assert "plan/00001.parquet" in world.expected
    for at in itertools.count(1):
        out = world.fresh()
        shutil.copytree(start, out)
        died = world.crash(out, at, "both_lost")
        world.capture(out)
        world.require_whole(out)
        shutil.rmtree(out)
        if not died:
            break


def test_death_while_planning_a_retry_of_rejects(world: World) -> None:
    """Also: a retry that was planned and not yet tried is not planned twice."""
    start = world.fresh()
    world.capture(start)

    def retry(out: Path, files: Files) -> None:
        good = FakeEngine((1, 2), FakeSettings(**SETTINGS))
        run(world.table, world.config(out), engine=good, files=files, retry_rejects=True)

    reference = world.fresh()
    shutil.copytree(start, reference)
    retry(reference, QuickFiles())
    expected = contents(reference)
    assert verify(reference).rejected == 0
    for at in itertools.count(1):
        out, vault = world.fresh(), world.base / "vault"
        shutil.copytree(start, out)
        files = CrashFiles(out, at, "both_lost", vault)
        died = False
        try:
            retry(out, files)
        except Crash:
            died = True
        retry(out, QuickFiles())
        assert contents(out) == expected
        require_tidy(out)
        report = verify(out)
        assert report.exit_code == 0 and report.committed == world.table.num_rows
        shutil.rmtree(out)
        shutil.rmtree(vault)
        if not died:
            break


@pytest.mark.parametrize("mode", ["before", "names_lost"])
def test_death_while_orphans_are_removed(world: World, mode: Mode) -> None:
    """The orphans of a first death are what a second run dies over."""
    for at in itertools.count(1):
        out = world.fresh()
        assert world.crash(out, 60, "after")
        vault = world.base / "vault"
        files = CrashFiles(out, at, mode, vault)
        died = False
        spec = FakeEngine((1, 2), FakeSettings(**SETTINGS)).info().spec
        try:
            with DataSetWriter(out, spec, files=files):
                pass
        except Crash:
            died = True
        shutil.rmtree(vault)
        world.capture(out)
        world.require_whole(out)
        shutil.rmtree(out)
        if not died:
            break
    assert at > 1


# --- a real process, a real SIGKILL

CHILD = """
import sys, json, io
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fake_data import config, run
from eyas.data.table import SampleTable
from eyas.engine.fake import FakeEngine, FakeSettings
out, table, pace = Path(sys.argv[2]), SampleTable.open(Path(sys.argv[3])), float(sys.argv[4])
engine = FakeEngine((1, 2), FakeSettings(num_layers=3, hidden_size=64, seconds_per_1k_tokens=pace))
print("go", flush=True)
run(table, config(out, shard_tokens=100, check_fraction=0.05), engine=engine)
"""
LONG = [5 + i % 11 for i in range(200)]  # 2,000 tokens


def start_child(out: Path, table: Path, pace: float) -> subprocess.Popen[bytes]:
    tests = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, tests, str(out), str(table), str(pace)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    return child


def long_capture(out: Path, table: SampleTable) -> None:
    engine = FakeEngine((1, 2), FakeSettings(num_layers=3, hidden_size=64))
    run(table, config(out, shard_tokens=100, check_fraction=0.05), engine=engine)


def test_kill_minus_nine_at_random_times_then_resume(tmp_path: Path) -> None:
    table = make_table(tmp_path / "samples.parquet", LONG)
    long_capture(tmp_path / "whole", table)
    out = tmp_path / "out"
    rng = random.Random(3)
    committed = []
    for _ in range(8):
        child = start_child(out, table.path, pace=1.0)  # two seconds for all
        time.sleep(rng.uniform(0.05, 0.5))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        committed.append(len(Layout(out).record_ids()))
    assert committed == sorted(committed), "a commit was lost"
    long_capture(out, table)
    assert contents(out) == contents(tmp_path / "whole")
    require_tidy(out)
    report = verify(out)
    assert report.exit_code == 0 and report.orphans == 0
    assert report.planned == report.committed == len(LONG)
    events = [json.loads(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
    assert sum(event["event"] == "start" for event in events) >= 2


def foreign_files(out: Path) -> dict[Path, bytes]:
    """Files of other people, some of which are called nearly as ours."""
    h = "0123456789abcdef0123456789abcdef"
    names = [
        "notes.txt", ".hidden", "run.toml.bak", "eyas.json~", "manifest.parquet.old", ".eyas.json.tmp", "shards.tar",
        f"shards/{h}.safetensors",
        f"shards/{h}.{h}.safetensors.part",
        f"shards/{h.upper()}.{h}.safetensors",
        f"shards/{h[:-1]}.{h}.safetensors",
        f"shards/.{h}.tmp",
        f"shards/.{h}.1234567.tmp",
        f"shards/.{h}.12345678.tmp.bak",
        f"shards/x.{h}.12345678.tmp",
        "shards/model-00001-of-00002.safetensors",
        f"records/{h}.json.bak",
        f"records/{h}x.json",
        f"records/.{h}.json.12345678.temp",
        "records/README",
        "plan/00000.parquet.copy",
        "plan/0001.parquet",
        "plan/.0000.parquet.12345678.tmp",
        "work/.scratch/kept",
    ]  # fmt: skip
    made = {}
    for i, name in enumerate(names):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        made[path] = bytes([i]) * (100 + i)
        path.write_bytes(made[path])
    return made


def test_files_of_others_stay_untouched_through_a_kill_and_a_resume(tmp_path: Path) -> None:
    table = make_table(tmp_path / "samples.parquet", LONG)
    out = tmp_path / "out"
    foreign = foreign_files(out)
    stats = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in foreign}
    child = start_child(out, table.path, pace=1.0)
    deadline = time.monotonic() + 20
    while len(Layout(out).record_ids()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    long_capture(out, table)
    assert {path: path.read_bytes() for path in foreign} == foreign
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in foreign} == stats
    report = verify(out, repair=True)
    assert report.exit_code == 0 and report.committed == len(LONG)
    assert {path: path.read_bytes() for path in foreign} == foreign


@pytest.mark.parametrize(
    "name", ["run.toml", "events.jsonl", "heartbeat.json", "manifest.parquet", "verify.json", "lock", ".scratch/kept"]
)
def test_a_directory_with_files_by_our_names_that_is_no_data_set_is_refused(tmp_path: Path, name: str) -> None:
    table = make_table(tmp_path / "samples.parquet", [3, 4])
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"somebody's\n")
    with pytest.raises(EyasError) as caught:
        run(table, config(tmp_path / "out"))
    assert caught.value.exit_code == 2 and path.parent.name in str(caught.value)
    assert path.read_bytes() == b"somebody's\n"
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == [path]


def test_the_lock_of_a_killed_run_does_not_hold_up_the_next(tmp_path: Path) -> None:
    table = make_table(tmp_path / "samples.parquet", LONG)
    out = tmp_path / "out"
    child = start_child(out, table.path, pace=1.0)
    deadline = time.monotonic() + 20
    while not Layout(out).segments() and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(DataSetLocked, match=f"pid {child.pid}"):
        long_capture(out, table)
    child.send_signal(signal.SIGKILL)
    child.wait()
    long_capture(out, table)
