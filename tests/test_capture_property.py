"""Any order of answers, any kills, any fault script: nothing lost, nothing twice, nothing wrong, the same bytes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from crash_files import Crash, CrashFiles
from eyas.config import CaptureConfig
from eyas.engine.fake import FakeEngine, FakeSettings, Fault, FaultKind
from eyas.errors import CaptureMismatch, EngineError, EyasError
from eyas.store import record as records
from eyas.store.layout import Layout
from eyas.store.plan import open_segments
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.store.writer import DataSetWriter
from fake_data import config, make_table, run

FOR_EVER = 1_000_000
MAX_ATTEMPTS = 2
KINDS: tuple[FaultKind, ...] = (
    "late", "wrong_ids", "fewer_rows", "more_rows", "nan", "wrong_width", "wrong_dtype", "missing_layer", "refused",
    "unavailable", "hang", "crash",
)  # fmt: skip
BYTES_PER_TOKEN = 3 * 4 * 2


@dataclass(frozen=True)
class Script:
    """One story of a capture."""

    table_seed: int
    lengths: list[int]
    shard_tokens: int
    quota_tokens: int
    window_tokens: int
    shuffle: int | None
    troubles: list[tuple[FaultKind, list[int], int, int]]
    """Kind of fault, the samples that meet it, for how many attempts, in which row."""
    crash_after: int | None
    max_tokens: int
    kills: list[tuple[int, str]]
    faults: tuple[Fault, ...] = ()

    def on(self, sample_ids: list[str]) -> Script:
        """The same story told about these samples."""
        faults = tuple(
            Fault(kind=kind, samples=tuple(sample_ids[i % len(sample_ids)] for i in which), attempts=attempts, row=row)
            for kind, which, attempts, row in self.troubles
        )
        return dataclasses.replace(self, faults=faults)

    def engine(self, *, faulty: bool = True) -> FakeEngine:
        changes: dict[str, Any] = {"faults": self.faults, "crash_after": self.crash_after} if faulty else {}
        return FakeEngine(
            (1, 2),
            FakeSettings(
                num_layers=3,
                hidden_size=4,
                window_tokens=self.window_tokens,
                shuffle=self.shuffle,
                max_tokens=self.max_tokens,
                **changes,
            ),
        )

    def config(self, out: Path) -> CaptureConfig:
        hangs = any(fault.kind == "hang" for fault in self.faults)
        return config(
            out,
            shard_tokens=self.shard_tokens,
            in_flight_bytes=max(self.quota_tokens, *self.lengths) * BYTES_PER_TOKEN,
            max_attempts=MAX_ATTEMPTS,
            check_fraction=0.3,
            timeout_s=0.15 if hangs else 60.0,
        )

    def rejected(self, sample_id: str, num_tokens: int) -> bool:
        """What must become of a sample, whatever its neighbours do."""
        if num_tokens > self.max_tokens:
            return True
        for attempt in range(1, MAX_ATTEMPTS + 1):
            fault = next((f for f in self.faults if attempt <= f.attempts and sample_id in f.samples), None)
            if fault is None or fault.kind == "late":
                return False
            if fault.kind not in ("unavailable", "hang", "crash"):
                return True
        return True

    @property
    def unforeseen(self) -> bool:
        """Whether attempts are counted that no sample is to blame for.

        With a short time-out a slow machine loses an answer; and where an engine ends by itself, the sample that
        happens to be alone with it is blamed.
        """
        return self.crash_after is not None or any(fault.kind == "hang" for fault in self.faults)

    def always_bad(self, sample_id: str) -> bool:
        """Whether a sample is rejected however its attempts are counted."""
        met = [f for f in self.faults if sample_id in f.samples]
        return bool(met) and met[0].attempts == FOR_EVER and met[0].kind != "late"


faults = st.tuples(
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 13), min_size=1, max_size=4),
    st.sampled_from([1, FOR_EVER]),
    st.integers(0, 8),
)
scripts = st.builds(
    Script,
    table_seed=st.integers(0, 100),
    lengths=st.lists(st.integers(1, 12), min_size=5, max_size=14)
    | st.lists(st.integers(1, 12), min_size=1, max_size=4),
    shard_tokens=st.integers(1, 40),
    quota_tokens=st.integers(1, 60),
    window_tokens=st.integers(1, 40),
    shuffle=st.none() | st.integers(0, 5),
    troubles=st.lists(faults, min_size=1, max_size=4),
    crash_after=st.none() | st.integers(0, 10),
    max_tokens=st.sampled_from([1000, 1000, 1000, 9]),
    kills=st.lists(st.tuples(st.integers(1, 45), st.sampled_from(["before", "after", "both_lost"])), max_size=2),
)


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() and os.access(shm, os.W_OK) else None) as name:
        yield Path(name)


def require_law_1(out: Path, *, orphans: bool) -> None:
    """Sound at every moment, whatever stopped the run; temporary files only after a kill."""
    if not (out / "eyas.json").exists():
        return
    report = verify(out)
    assert report.problems == []
    assert report.planned == report.committed + report.rejected + report.pending
    assert orphans or report.orphans == 0


def outcomes(out: Path) -> tuple[set[str], dict[str, str]]:
    """Committed samples, and the reason of each reject. Fails on a sample that has two outcomes."""
    committed: set[str] = set()
    rejected: dict[str, str] = {}
    layout = Layout(out)
    for shard_id in layout.record_ids():
        record = records.read(layout.record(shard_id))
        assert committed.isdisjoint(record.sample_ids) and rejected.keys().isdisjoint(record.sample_ids)
        committed.update(record.sample_ids)
        for reject in record.rejects:
            assert reject.sample_id not in committed and reject.sample_id not in rejected
            assert reject.reason and reject.detail
            rejected[reject.sample_id] = reject.reason
    return committed, rejected


def require_right_states(out: Path, token_ids: dict[str, Any], engine: FakeEngine) -> None:
    stored = DataSet(out)
    for i in range(len(stored)):
        sample = stored[i]
        for name, block in engine._fields(token_ids[sample.sample_id]).items():
            assert bytes(sample.field(name)) == bytes(block.data)
    stored.close()


def payloads(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Layout(out).shards.iterdir()}


def reference_payloads(out: Path, ref: Path, rejected: set[str], engine: FakeEngine) -> dict[str, bytes]:
    """The shards of the same plan and outcomes, written one after the other without any of capture's machinery."""
    info = engine.info()
    with DataSetWriter(ref, info.spec) as writer:
        for segment in open_segments(Layout(out)):
            for plan in segment.shards:
                samples = segment.read(plan)
                shard = writer.shard_writer(plan, [(s, len(ids)) for s, ids in samples])
                for sample_id, ids in samples:
                    if sample_id in rejected:
                        shard.reject("some", "reason")
                    else:
                        shard.append(engine._fields(ids))
                shard.commit(info.provenance, run_id="", committed_at=0.0)
            segment.close()
    return payloads(ref)


names = itertools.count()


def examples(number: int) -> settings:
    """The same stories every time; EYAS_EXAMPLES=2000 looks for new ones."""
    more = os.environ.get("EYAS_EXAMPLES")
    return settings(
        max_examples=int(more or number),
        derandomize=more is None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@examples(40)
@given(script=scripts)
def test_any_order_any_kills_any_faults(base: Path, script: Script) -> None:
    tell_in(base, script)


@pytest.mark.parametrize("kind", KINDS)
@examples(2)
@given(script=scripts)
def test_each_fault(base: Path, kind: FaultKind, script: Script) -> None:
    tell_in(base, dataclasses.replace(script, troubles=[(kind, [1, 3], 1, 1), (kind, [4, 5], FOR_EVER, 1)]))


def tell_in(base: Path, script: Script) -> None:
    place = base / f"example{next(names)}"
    place.mkdir()
    try:
        tell(script, place)
    finally:
        shutil.rmtree(place)


def tell(script: Script, place: Path) -> None:
    table, out = make_table(place / "samples.parquet", script.lengths, seed=script.table_seed), place / "out"
    token_ids = {sample.sample_id: sample.token_ids for sample in table.samples()}
    script = script.on(list(token_ids))
    cfg, clean = script.config(out), script.engine(faulty=False)

    for number, (at, mode) in enumerate(script.kills):
        files = CrashFiles(out, at, mode, place / f"vault{number}")  # type: ignore[arg-type]
        try:
            run(table, cfg, engine=script.engine(), files=files)
        except Crash:
            event("killed")
        except EyasError as error:
            assert isinstance(error, EngineError | CaptureMismatch)
        require_law_1(out, orphans=True)

    complete = False
    for _ in range(2):
        try:
            receipt = run(table, cfg, engine=script.engine())
        except EyasError as error:
            # Where every sample that could be asked is bad, the engine itself is under suspicion.
            assert isinstance(error, EngineError | CaptureMismatch), error
            require_law_1(out, orphans=False)
            continue
        complete = True
        break
    expected_rejects = {s for s, ids in token_ids.items() if script.rejected(s, len(ids))}
    answerable = [s for s, ids in token_ids.items() if 1 < len(ids) <= script.max_tokens]
    if complete:
        event("complete")
        for fault in script.faults:
            event(f"met {fault.kind}")
        committed, rejected = outcomes(out)
        assert receipt.planned == receipt.committed + receipt.rejected == len(token_ids)
        assert (receipt.committed, receipt.rejected) == (len(committed), len(rejected))
        assert committed | rejected.keys() == token_ids.keys()
        assert rejected.keys() >= {sample_id for sample_id in token_ids if script.always_bad(sample_id)}
        assert script.unforeseen or rejected.keys() == expected_rejects
        require_right_states(out, token_ids, clean)
        assert payloads(out) == reference_payloads(out, place / "reference", set(rejected), clean)
        idle = script.engine()
        again = run(table, cfg, engine=idle)
        assert idle.calls == 0 and again.data_digest == receipt.data_digest
    else:
        event("stopped")
        assert script.unforeseen or not answerable or expected_rejects, "a run without a bad sample did not end"

    # The faults are gone: every sample but those that the engine cannot take.
    cfg = cfg.model_copy(update={"timeout_s": 60.0})
    final = run(table, cfg, engine=script.engine(faulty=False), retry_rejects=True)
    committed, _ = outcomes_after_retry(out)
    too_long = {s for s, ids in token_ids.items() if len(ids) > script.max_tokens}
    assert committed == token_ids.keys() - too_long
    assert (final.committed, final.rejected, final.pending) == (len(committed), len(too_long), 0)
    require_law_1(out, orphans=False)
    require_right_states(out, token_ids, clean)


def outcomes_after_retry(out: Path) -> tuple[set[str], set[str]]:
    """Committed samples, each once, and those whose latest outcome is a reject."""
    committed: list[str] = []
    rejected: set[str] = set()
    layout = Layout(out)
    for shard_id in layout.record_ids():
        record = records.read(layout.record(shard_id))
        committed += record.sample_ids
        rejected.update(reject.sample_id for reject in record.rejects)
    assert len(set(committed)) == len(committed), "a sample was captured twice"
    return set(committed), rejected - set(committed)
