"""Small data for tests of store and capture: a sample table, a configuration, a run with the fake engine."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np

from eyas.capture.run import Receipt, capture
from eyas.config import CaptureConfig
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.engine.fake import FakeEngine, FakeSettings, Fault
from eyas.log import Progress
from eyas.records import Sample
from eyas.store.files import Files
from eyas.store.layout import Layout


def make_table(path: Path, lengths: list[int], *, seed: int = 0, tags: bool = False) -> SampleTable:
    """A sample table with samples of these lengths; the last token of each is supervised."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            rng.integers(0, 1000, n).astype(np.int32),
            ((n - 1, n),),
            conversation_id=f"c{i}",
            source=("a", "b")[i % 2],
            tags=("even" if i % 2 == 0 else "odd",) if tags else (),
        )
        for i, n in enumerate(lengths)
    ]
    return make_table_of(path, samples)


def make_table_of(path: Path, samples: list[Sample]) -> SampleTable:
    """A sample table of these samples."""
    with TableWriter(path) as out:
        for sample in samples:
            out.append(sample)
        out.publish(
            TableMetadata(
                num_input=len(samples),
                num_kept=len(samples),
                num_tokens=sum(s.num_tokens for s in samples),
                num_supervised=len(samples),
            )
        )
    return SampleTable.open(path)


def config(out: Path, **changes: Any) -> CaptureConfig:
    base: dict[str, Any] = {
        "out": out,
        "shard_tokens": 40,
        "in_flight_bytes": 100_000,
        "min_free_bytes": 0,
        "backoff_s": 0.0,
        "max_reject_fraction": 1.0,
        "max_reject_burst": 1000,
        "interval_s": 0.05,
    }
    return CaptureConfig(**(base | changes))


def run(
    table: SampleTable,
    cfg: CaptureConfig,
    *,
    faults: tuple[Fault, ...] = (),
    files: Files | None = None,
    retry_rejects: bool = False,
    stop: threading.Event | None = None,
    engine: Any = None,
    **settings: Any,
) -> Receipt:
    """Capture with the fake engine, or with one that has a `head` as it does."""
    engine = engine or FakeEngine(None, FakeSettings(faults=faults, **settings))
    progress = Progress(stream=io.StringIO())
    return capture(
        cfg, table, engine, engine.head, progress=progress, files=files, retry_rejects=retry_rejects, stop=stop
    )


def contents(root: Path) -> dict[str, bytes]:
    """Every file that belongs to the data set proper, byte for byte; a record without the times of its making."""
    import json

    layout = Layout(root)
    found: dict[str, bytes] = {}
    for directory in (layout.shards, layout.plan):
        found |= {f"{directory.name}/{p.name}": p.read_bytes() for p in directory.iterdir()}
    found["eyas.json"] = layout.head.read_bytes()
    for path in layout.records.iterdir():
        body = json.loads(path.read_bytes()) if path.suffix == ".json" else {}
        body.pop("record_digest", None)
        for key in ("run_id", "committed_at"):
            body.get("provenance", {}).pop(key, None)
        found[f"records/{path.name}"] = json.dumps(body, sort_keys=True).encode()
    return found
