"""`eyas verify --parity`: the same samples of a data set from every engine that is reachable."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas import config, log
from eyas.cli.edge import need, need_file, result, server_engine
from eyas.errors import EXIT_FAILED, ConfigError, EngineUnavailable

if TYPE_CHECKING:
    from eyas.config import Config
    from eyas.engine.base import Engine
    from eyas.records import CaptureSpec, TokenIds

KINDS = ("hf", "sglang", "vllm")


def parity(root: Path, wanted: str, progress: log.Progress, *, as_json: bool) -> int:
    """Compare a data set with the engines of `wanted`, as `hf,vllm` or `vllm=http://HOST:PORT`; the exit code."""
    asked = _asked(wanted)
    from eyas.capture.parity import MAX_SAMPLES, MAX_TOKENS, compare, engine_party, stored_party
    from eyas.data.table import SampleTable
    from eyas.store.layout import Layout
    from eyas.store.reader import DataSet
    from eyas.target.head import TargetHead

    tree = config.load(Layout(root).config)
    table = SampleTable.open(need_file(tree.data.samples, "data.samples", "run 'eyas prepare'"))
    head = TargetHead.load(need(tree.target.path, "target.path"), trust_remote_code=tree.target.trust_remote_code)
    data = DataSet(root)
    with contextlib.closing(data):
        stored = {data.sample_id(i) for i in range(len(data))}
        samples: dict[str, TokenIds] = {}
        for sample in table.samples():
            if len(samples) < MAX_SAMPLES and sample.sample_id in stored and 1 < sample.num_tokens <= MAX_TOKENS:
                samples[sample.sample_id] = sample.token_ids
        if not samples:
            raise ConfigError(f"{root}: no sample of 2 to {MAX_TOKENS} tokens is captured yet; capture some first")
        parties, absent = [], []
        for kind, url in asked:
            progress.show(f"parity: asking {kind} for {len(samples)} samples", force=True)
            engine = _engine(tree, kind, url, data.spec)
            try:
                with contextlib.closing(engine):
                    parties.append(engine_party(kind, engine, samples))
            except EngineUnavailable as error:
                absent.append(f"left out: {error}")
        if not parties:
            raise EngineUnavailable("; ".join(absent), engine=asked[0][0])
        found = [
            compare(parties[0], party, samples, head.normed, head)
            for party in (stored_party(data, list(samples)), *parties[1:])
        ]
    progress.close()
    num_tokens = sum(map(len, samples.values()))
    lines = [f"{root}: {len(samples)} samples, {num_tokens:,} tokens, against {parties[0].name}", *absent]
    for one in found:
        lines.append(f"{one.name} ({one.norm}-norm): {'agrees' if one.agrees else 'DIFFERS'}")
        lines += [f"  {field.line()}" for field in one.fields]
    agrees = all(one.agrees for one in found)
    told: dict[str, Any] = {
        "samples": len(samples),
        "tokens": num_tokens,
        "reference": parties[0].name,
        "parties": [dataclasses.asdict(one) | {"agrees": one.agrees} for one in found],
        "absent": absent,
        "agrees": agrees,
    }
    result(told, lines, as_json=as_json)
    return 0 if agrees else EXIT_FAILED


def _asked(wanted: str) -> list[tuple[str, str | None]]:
    """Kinds and addresses; the reference is the first. Raises ConfigError."""
    found = []
    for word in wanted.split(","):
        kind, _, url = word.strip().partition("=")
        if kind not in KINDS:
            raise ConfigError(f"--parity {wanted}: '{kind}' is none of {', '.join(KINDS)}; give them as hf,vllm=URL")
        found.append((kind, url or None))
    return found


def _engine(tree: Config, kind: str, url: str | None, spec: CaptureSpec) -> Engine:
    """An engine as a comparison needs it; the one in this process gives the neighbouring layers, too."""
    own = tree.engine
    address = url or (own.urls[0] if own.urls and kind == own.kind else own.url)
    settings: dict[str, Any] = {"kind": kind, "url": address, "check_layers": "off", "reconnect_s": 0.0}
    if kind == own.kind:
        settings |= {"extra": own.extra, "stock_layers": own.stock_layers}
    asked = config.EngineConfig(**settings, dtype=spec.dtype, device=own.device, batch_tokens=own.batch_tokens)
    if kind != "hf":
        return server_engine(kind)(tree.target, asked, spec.aux_layers)
    from eyas.engine.hf import HfEngine

    near = {k + step for k in spec.aux_layers for step in (-1, 0, 1) if 0 <= k + step <= spec.num_layers}
    return HfEngine(tree.target, asked, tuple(sorted(near | {spec.num_layers})))
