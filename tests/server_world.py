"""What tests of captures from servers share: tables, a world of servers and engines, and what must hold afterwards."""

from __future__ import annotations

import io
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.capture.run import Receipt, capture
from eyas.config import CaptureConfig, EngineConfig, TargetConfig
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.engine.client import ServerEngine
from eyas.engine.hf import HfEngine
from eyas.engine.sglang.client import SglangEngine
from eyas.log import Progress
from eyas.records import Sample
from eyas.store import record as records
from eyas.store.layout import Layout
from eyas.store.reader import DataSet
from eyas.store.verify import verify
from eyas.target.head import TargetHead
from fake_data import config
from stand_in_server import Act, Asked, StandIn, right

TOKEN_BYTES = 4 * 32 * 4 + 4
"""Of a staged token: three layers and the last state of the tiny model in float32, and its id."""
LENGTHS = [5, 9, 12, 3, 20, 7, 8, 14, 2, 6, 11, 10]
Script = Callable[[Asked], Act | None]


def make_table(path: Path, lengths: Sequence[int]) -> SampleTable:
    rng = np.random.default_rng(7)
    with TableWriter(path) as out:
        for i, n in enumerate(lengths):
            ids = rng.integers(0, 301, n).astype(np.int32)
            out.append(Sample(ids, ((n - 1, n),), conversation_id=f"c{i}"))
        out.publish(
            TableMetadata(
                num_input=len(lengths), num_kept=len(lengths), num_tokens=sum(lengths), num_supervised=len(lengths)
            )
        )
    return SampleTable.open(path)


class World:
    """A target, a staging directory, servers on one port and engines that use them; all closed at the end."""

    kind = "sglang"
    make_server: Callable[..., Any] = StandIn
    make_engine: Callable[..., ServerEngine] = SglangEngine

    def __init__(self, target: Path, staging: Path, head: TargetHead) -> None:
        self.target, self.staging, self.head = target, staging, head
        self.servers: list[Any] = []
        self.engines: list[ServerEngine] = []
        self.said = io.StringIO()

    def serve(self, script: Script = right, **options: Any) -> Any:
        """A server; on the port of the one before, if that was killed."""
        port = self.servers[-1].port if self.servers and self.servers[-1].dead else 0
        self.servers.append(self.make_server(self.target, self.staging, port=port, script=script, **options))
        return self.servers[-1]

    def engine(self, layers: tuple[int, ...] | None = None, **options: Any) -> Any:
        base: dict[str, Any] = {"kind": self.kind, "url": self.servers[-1].url, "reconnect_s": 20.0,
                                "check_layers": "off"}  # fmt: skip
        found = self.make_engine(TargetConfig(path=self.target), EngineConfig(**(base | options)), layers)
        self.engines.append(found)
        return found

    def capture(
        self,
        table: SampleTable,
        cfg: CaptureConfig,
        engine: ServerEngine | None = None,
        stop: threading.Event | None = None,
    ) -> Receipt:
        """As `eyas capture`: the engine is closed afterwards, whatever happens; nothing may be left of it then."""
        engine = engine or self.engine()
        try:
            receipt = capture(cfg, table, engine, self.head, progress=Progress(stream=self.said), stop=stop)
        finally:
            engine.close()
        assert receipt.planned == receipt.committed + receipt.rejected and receipt.pending == 0
        return receipt

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for server in self.servers:
            if not server.dead:
                server.kill()


def cfg(out: Path, **changes: Any) -> CaptureConfig:
    return config(out, **({"in_flight_bytes": 1_000_000, "check_fraction": 0.0, "max_attempts": 3} | changes))


def rejects(out: Path) -> dict[str, tuple[str, str]]:
    layout = Layout(out)
    found = [r for shard_id in layout.record_ids() for r in records.read(layout.record(shard_id)).rejects]
    return {r.sample_id: (r.reason, r.detail) for r in found}


def require_sound(out: Path) -> None:
    report = verify(out)
    assert report.problems == [] and report.exit_code == 0


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
    return [row for row in rows if row["event"] == kind]


def require_values(out: Path, table: SampleTable, own: HfEngine) -> None:
    """Every sample's fields are the target's own, computed by another engine alone."""
    stored = DataSet(out)
    for sample in table.samples():
        found = stored[stored.index_of(sample.sample_id)]
        for name, expected in own.states(sample.token_ids).items():
            states = np.frombuffer(found.field(name), dtype="<f4").reshape(-1, 32)
            np.testing.assert_allclose(states, expected, rtol=1e-5, atol=1e-5)
    stored.close()


def of_length(num_tokens: int, script: Script) -> Script:
    """A script for the run's requests about the sample of that length; the probe's are answered rightly."""
    return lambda asked: script(asked) if len(asked.ids) == num_tokens else None


def after_probe(script: Script, num_probed: int = 4) -> Script:
    """A script that begins once the probe's samples were answered: each is asked for twice."""
    seen = itertools.count(1)
    return lambda asked: script(asked) if next(seen) > 2 * num_probed else None


def first_times(times: int, act: Act) -> Script:
    """Misbehaves so often about each sample, not counting the probe."""
    counts: Counter[tuple[int, ...]] = Counter()

    def script(asked: Asked) -> Act | None:
        counts[tuple(asked.ids)] += 1
        return act if counts[tuple(asked.ids)] <= times else None

    return script
