"""What a capture will cost, before it starts: bytes, hours, room, go or no-go."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eyas.capture.asker import timeout_s
from eyas.capture.plan import Selection, existing_parent, in_order, record_size, shard_tokens
from eyas.capture.requests import Batch
from eyas.capture.stream import Stream
from eyas.config import CaptureConfig
from eyas.data.table import SampleTable
from eyas.engine.base import CaptureAnswer, CaptureRequest, Engine, EngineInfo
from eyas.errors import DataError, EngineUnavailable
from eyas.log import human_bytes, human_time
from eyas.store.plan import cut
from eyas.store.shard import header_room

PROBE_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a capture will cost, before it starts."""

    samples: int
    tokens: int
    shards: int
    shard_tokens: int
    bytes_per_token: int
    payload_bytes: int
    record_bytes: int
    largest_sample_bytes: int
    in_flight_bytes: int
    free_bytes: int
    free_inodes: int
    min_free_bytes: int
    train_read_bytes_per_s: float
    """What one trainer reads at `train_tokens_per_s`."""
    train_tokens_per_s: float
    capture_tokens_per_s: float | None = None
    """From a probe, where an engine was asked."""

    @property
    def total_bytes(self) -> int:
        return self.payload_bytes + self.record_bytes

    @property
    def seconds(self) -> float | None:
        return None if self.capture_tokens_per_s is None else self.tokens / self.capture_tokens_per_s

    def obstacles(self) -> list[str]:
        """Why it cannot work, one line each; none means go."""
        lines = []
        if self.total_bytes + self.min_free_bytes > self.free_bytes:
            lines.append(
                f"disk: {human_bytes(self.total_bytes)} to write and {human_bytes(self.min_free_bytes)} to stay free "
                f"(capture.min_free_bytes), {human_bytes(self.free_bytes)} there; lower capture.limit or choose "
                "another capture.out"
            )
        if self.free_inodes and 2 * self.shards + 16 > self.free_inodes:
            lines.append(f"inodes: {2 * self.shards + 16} needed, {self.free_inodes} free; raise capture.shard_tokens")
        if self.largest_sample_bytes > self.in_flight_bytes:
            lines.append(
                f"capture.in_flight_bytes: the largest sample has {human_bytes(self.largest_sample_bytes)}, only "
                f"{human_bytes(self.in_flight_bytes)} may be in flight; raise it to {self.largest_sample_bytes} or more"
            )
        return lines


def estimate(
    table: SampleTable, capture: CaptureConfig, info: EngineInfo, *, train_tokens_per_s: float = 30_000.0
) -> Estimate:
    """Predict shards and bytes of a capture into an empty data set by cutting the real samples into shards.

    `train_tokens_per_s` is what one training GPU may consume (FIELD figure for an 8B shape on an H200: about 28,000).
    """
    assert capture.out is not None
    spec = info.spec
    tokens = samples = shards = payload = records = largest = 0
    with tempfile.TemporaryDirectory(prefix="eyas-plan-") as scratch:
        ordered = in_order(table, Selection.of(capture), capture.seed, Path(scratch))
        for shard in cut(ordered, shard_tokens(capture, spec)):
            lengths = [len(token_ids) for _, token_ids in shard]
            shards, samples, tokens = shards + 1, samples + len(shard), tokens + sum(lengths)
            largest = max(largest, *lengths)
            payload += header_room("0" * 32, spec, [(s, len(t)) for s, t in shard])
            records += record_size(len(shard), sum(lengths), spec, info.provenance)
    if not samples:
        raise DataError(f"{table.path}: no sample matches limit, tags and sources of [capture]; nothing to do")
    disk = os.statvfs(existing_parent(capture.out))
    return Estimate(
        samples=samples,
        tokens=tokens,
        shards=shards,
        shard_tokens=shard_tokens(capture, spec),
        bytes_per_token=spec.bytes_per_token,
        payload_bytes=payload + tokens * spec.bytes_per_token,
        record_bytes=records,
        largest_sample_bytes=largest * spec.bytes_per_token,
        in_flight_bytes=capture.in_flight_bytes,
        free_bytes=disk.f_bavail * disk.f_frsize,
        free_inodes=disk.f_favail,
        min_free_bytes=capture.min_free_bytes,
        train_read_bytes_per_s=train_tokens_per_s * spec.bytes_per_token,
        train_tokens_per_s=train_tokens_per_s,
    )


def probe_tokens_per_s(table: SampleTable, capture: CaptureConfig, engine: Engine, say: Callable[[str], None]) -> float:
    """Tokens per second of the engine over the first 32 samples of the plan, loading and warm-up left out.

    Nothing is stored. Raises EngineUnavailable when the engine does not answer, or not in time.
    """
    with tempfile.TemporaryDirectory(prefix="eyas-plan-") as scratch:
        ordered = in_order(table, Selection.of(capture), capture.seed, Path(scratch))
        samples = list(islice(ordered, PROBE_SAMPLES))
    limit = engine.info().max_tokens
    requests = [CaptureRequest(sample_id, ids) for sample_id, ids in samples if len(ids) <= limit]
    patience_s = timeout_s(capture, max((len(request.token_ids) for request in requests), default=0))
    _answered_tokens(engine, requests[:1], patience_s, say)
    start = time.monotonic()
    tokens = _answered_tokens(engine, requests, patience_s, say)
    return tokens / (time.monotonic() - start)


def _answered_tokens(
    engine: Engine, requests: list[CaptureRequest], patience_s: float, say: Callable[[str], None]
) -> int:
    """Tokens of the samples that are answered; an engine that says nothing for `patience_s` is given up."""
    stream = Stream(engine, Batch(requests))
    tokens = num_answers = 0
    heard_at = time.monotonic()
    while True:
        try:
            outcome = stream.get(timeout=min(1.0, patience_s))
        except queue.Empty:
            if time.monotonic() - heard_at > patience_s:
                raise EngineUnavailable(
                    f"the engine gave no answer within {human_time(patience_s)} (capture.timeout_s), after "
                    f"{num_answers} of the probe's {len(requests)} samples"
                ) from None
            say(f"plan: probe, {num_answers} of {len(requests)} samples")
            continue
        heard_at = time.monotonic()
        if isinstance(outcome, EngineUnavailable):
            raise outcome
        if outcome is None:
            break
        if isinstance(outcome, CaptureAnswer):
            tokens, num_answers = tokens + len(outcome.token_ids), num_answers + 1
    if not num_answers:
        raise EngineUnavailable("the engine answered none of the probe's samples")
    return tokens


def estimate_lines(found: Estimate) -> list[str]:
    """For people."""
    seconds = found.seconds
    time_line = (
        "unknown; --probe captures 32 samples and says"
        if seconds is None
        else (f"{human_time(seconds)} at {found.capture_tokens_per_s:,.0f} tokens/s (probe of {PROBE_SAMPLES} samples)")
    )
    return [
        f"samples   {found.samples:,}, {found.tokens:,} tokens, in {found.shards:,} shards of at most "
        f"{found.shard_tokens:,} tokens",
        f"bytes     {found.bytes_per_token:,} per token, {human_bytes(found.total_bytes)} in all; largest sample "
        f"{human_bytes(found.largest_sample_bytes)}",
        f"disk      {human_bytes(found.free_bytes)} and {found.free_inodes:,} inodes free",
        f"staging   {human_bytes(found.in_flight_bytes)} of memory in flight at most (capture.in_flight_bytes)",
        f"time      {time_line}",
        f"training  reads {human_bytes(found.train_read_bytes_per_s)}/s at {found.train_tokens_per_s:,.0f} tokens/s",
    ]
