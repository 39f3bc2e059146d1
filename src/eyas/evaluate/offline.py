"""Offline evaluation: how many tokens a drafter would get accepted, from stored states alone.

The pass is that of the training: the same rows, the same unrolled steps, the same tally. What it says of a row is what
greedy decoding does where drafting starts at that row, as long as the sample is the target's own greedy answer.
Letters: `F` fields of the data set, `N` rows of a pack, `A` auxiliary layers, `n` rows that some step supervises.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.config import EvaluateConfig, TargetConfig, TrainConfig
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, DataError
from eyas.log import Progress, human_time
from eyas.model import checkpoint as engine_layout
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.layout import CONFIG
from eyas.records import UNKNOWN
from eyas.store.reader import DataSet
from eyas.target.head import TargetHead
from eyas.train.attention import causal_for
from eyas.train.drafts import EVALUATION
from eyas.train.loader import Batch, Loader
from eyas.train.metrics import Summary, Tally, labels_of, slices, summarize
from eyas.train.packs import evaluation_packs
from eyas.train.plan import dtype_of, require_target
from eyas.train.ranks import device_of
from eyas.train.samples import TrainingSamples
from eyas.train.step import Lesson, Pass, count, lesson
from eyas.train.teacher import Likeliest, TargetTeacher
from eyas.train.ttt import Options

FILE = EVALUATION

FORMULAS = (
    "rows n: x[t+1] … x[t+2+s] all written by the target; v: of them, target's likeliest token in the draft vocabulary",
    "a: drafter's likeliest token is the target's; c: so at this step and at all before it, that is s+1 drafted "
    "tokens accepted",
    "accuracy = Σ a / Σ n · within = Σ a / Σ v · in vocab = Σ v / Σ n · cumul. c_s = Σ c / Σ n · cond. = c_s / c_{s-1}",
    "length, pooled, in line s = 1 + c_0 + … + c_s: expected for chains of s+1 drafted tokens, bonus token included",
    "length, sample mean: the same of each sample's own Σ c / Σ n, averaged over samples",
)


@dataclass(frozen=True, slots=True)
class OfflineReceipt:
    """What an offline evaluation came to."""

    draft: str
    data: str
    split: str
    fingerprint: str
    samples: int
    tokens: int
    dtype: str
    seconds: float
    summary: Summary
    slices: Mapping[str, Summary]
    notes: tuple[str, ...] = ()
    file: str = ""

    def as_dict(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return own | {
            "summary": self.summary.to_json(),
            "slices": {label: one.to_json() for label, one in self.slices.items()},
            "notes": list(self.notes),
            "formulas": list(FORMULAS),
        }

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.draft}: {self.samples:,} samples ({self.split}), {self.tokens:,} tokens of {self.data} in "
            f"{self.dtype} · {human_time(self.seconds)}",
            *self.summary.lines(),
        ]
        for label, one in self.slices.items():
            accuracy, length = one.accuracy[0], one.acceptance_length_pooled[max(0, one.longest_chain - 1)]
            few = ", too few to conclude from" if one.small else ""
            lines.append(
                f"{label}: {one.num_samples:,} samples{few}, step-0 accuracy {accuracy or '–'}, length {length or '–'} "
                f"(pooled, chains of {one.longest_chain})"
            )
        warnings = [note for note in self.notes if note.startswith("warning: ")]
        rest = [note for note in self.notes if note not in warnings]
        return [*warnings, *lines, *FORMULAS, *rest, f"file     {self.file}"]


def evaluate(
    config: EvaluateConfig,
    train: TrainConfig,
    target: TargetConfig,
    *,
    draft: Path,
    table: SampleTable,
    states: Path,
    progress: Progress,
) -> OfflineReceipt:
    """Every sample of the split once, in packs of `train.pack_tokens`; of `train` only how to compute is taken.

    Raises ConfigError for a checkpoint whose layers, sizes or target are not those of the data set, SpecMismatch for
    another target than the captured one, DataError where the split holds no captured sample or none that tells.
    """
    started = time.monotonic()
    assert target.path is not None
    progress.say("evaluate: opening the data set, joining the sample table")
    data = DataSet(states)
    require_target(data, target.path)
    samples = TrainingSamples(table, data)
    indices = {
        "train": samples.train,
        "held_out": samples.held_out,
        "all": np.sort(np.concatenate([samples.train, samples.held_out])),
    }[config.split]
    if not len(indices):
        raise DataError(f"{table.path}: no captured sample is in split '{config.split}'; set evaluate.split")
    packs = evaluation_packs(samples.ids, samples.token_counts, indices, pack_tokens=train.pack_tokens)
    device = torch.device(device_of(train.device))
    dtype = dtype_of(train, device)
    draft_model, vocab_map, info = engine_layout.load(
        draft, target=target.path, aux_layers=config.aux_layers, trust_remote_code=target.trust_remote_code
    )
    fields = _fields(draft_model, data, draft)
    norm = data.spec.last_hidden_norm
    assert norm != "unknown"
    head = TargetHead.load(target.path, trust_remote_code=target.trust_remote_code).on(device, dtype)
    teacher = TargetTeacher(head, vocab_map, norm, NotKept())
    if dtype == torch.bfloat16 and not draft_model.shape.own_embedding:
        draft_model.embed_tokens.to(dtype)  # as a training does
    compiled = train.compile if train.compile is not None else device.type == "cuda"
    run = Pass(draft_model.to(device), Options(dtype, causal_for(device, dtype), compiled))

    tally = Tally(len(indices), config.ttt_length)
    done = 0
    total = int(samples.token_counts[indices].sum(dtype=np.int64))
    with Loader(data, samples, [[p] for p in packs], device=device, prefetch_bytes=train.prefetch_bytes) as loader:
        for (batch,) in loader:
            look(run, teacher, batch, tally, indices, fields)
            done += batch.num_tokens
            rate = done / (time.monotonic() - started)
            progress.show(f"evaluate: {done:,} of {total:,} tokens · {rate:,.0f} tokens/s")
    if not np.isfinite(tally["loss_sum"]).all():
        raise ConfigError(f"draft {draft}: its logits are not finite numbers: weights or {CONFIG} are damaged")
    if not tally["supervised"].any():
        raise DataError(f"{table.path}: no row of split '{config.split}' is supervised: nothing is drafted there")
    labels = [labels_of(samples.source(i), samples.tags(i), samples.language(i)) for i in indices.tolist()]
    return OfflineReceipt(
        draft=str(draft),
        data=str(states),
        split=config.split,
        fingerprint=data.spec.fingerprint,
        samples=len(indices),
        tokens=total,
        dtype=str(dtype).removeprefix("torch."),
        seconds=time.monotonic() - started,
        summary=summarize(tally),
        slices=slices(tally, labels),
        notes=_notes(info.extra, data, table, config.split),
    )


@torch.no_grad()
def look(
    run: Pass,
    teacher: TargetTeacher,
    batch: Batch,
    tally: Tally,
    indices: np.ndarray[tuple[int], np.dtype[np.int64]],
    fields: Sequence[int] | None = None,
) -> tuple[Lesson, torch.Tensor]:
    """Count one pack in `tally`, whose samples are `indices`; also its lesson, and `[S, n]` where the drafter is right.

    `fields`: which of the stored fields the drafter reads, the last state behind them; None is all.
    """
    if fields is not None:
        batch = dataclasses.replace(batch, states=batch.states[list(fields)])
    taught = lesson(batch, teacher, num_steps=tally.ttt_length, rule="drafted")
    _, outcome = run(taught, torch.ones(tally.ttt_length, device=batch.states.device))
    count(tally, indices, taught, outcome)
    return taught, outcome.correct & outcome.valid


class NotKept(Likeliest):
    """No cache of the target's likeliest tokens: one pass has no use for it."""

    def __init__(self) -> None:
        self._fd = -1

    def get(self, batch: Batch) -> torch.Tensor:
        return torch.full_like(batch.token_ids, -1)

    def put(self, batch: Batch, tokens: torch.Tensor) -> None:
        pass


def _fields(model: Eagle3Draft, data: DataSet, draft: Path) -> tuple[int, ...] | None:
    """Where the drafter's layers are among the stored fields; None where these are just its own."""
    shape, spec = model.shape, data.spec
    for what, there, here in (
        ("target_hidden_size", shape.target_hidden_size, spec.hidden_size),
        ("vocab_size", shape.vocab_size, spec.vocab_size),
    ):
        if there != here:
            raise ConfigError(f"draft {draft}: {what} is {there}, the data set {data.layout.root} has {here}")
    missing = sorted(set(shape.aux_layers) - set(spec.aux_layers))
    if missing:
        raise ConfigError(
            f"draft {draft}: reads hidden-state indices {list(shape.aux_layers)}, of which the data set "
            f"{data.layout.root} does not hold {missing} (it has {list(spec.aux_layers)}); capture them first"
        )
    if shape.aux_layers == tuple(spec.aux_layers):
        return None
    return (*(spec.aux_layers.index(k) for k in shape.aux_layers), len(spec.aux_layers))


def _notes(extra: Mapping[str, Any], data: DataSet, table: SampleTable, split: str) -> tuple[str, ...]:
    notes = []
    trained_with = (extra.get("settings") or {}).get("samples")
    if split == "held_out" and trained_with not in (None, table.digest):
        notes.append(
            f"warning: the drafter was trained with another sample table ({trained_with}): what is held out in "
            f"{table.path} may have been trained on, and then these figures are too good; "
            "they hold where data.held_out and the first user turns are the same"
        )
    trained_on, here = extra.get("target_digest"), data.spec.target_digest
    if trained_on and UNKNOWN not in (trained_on, here) and trained_on != here:
        notes.append(f"warning: the drafter was trained for target {trained_on}, these states are of {here}")
    if split != "held_out":
        notes.append(f"note: split '{split}' holds samples that the drafter may have been trained on")
    return tuple(notes)
