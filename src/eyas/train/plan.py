"""What a training will be, before anything is written: checked inputs, the drafter's shape, the order of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from eyas.config import DraftConfig, TargetConfig, TrainConfig
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, SpecMismatch
from eyas.log import human_bytes
from eyas.model.create import draft_shape, num_parameters
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.records import UNKNOWN
from eyas.store.reader import DataSet
from eyas.target.files import TargetFiles, open_target, target_digest
from eyas.train.estimate import estimate_memory
from eyas.train.packs import Pack, Schedule, evaluation_packs
from eyas.train.ranks import Ranks
from eyas.train.samples import TrainingSamples

# Settings that may change from one start to the next: they decide how long or how fast, not what.
FREE_SETTINGS = frozenset({
    "out", "epochs", "max_steps", "recompute", "compile", "sharded", "device", "eval_every", "checkpoint_every", "keep",
    "log_every", "prefetch_bytes", "wandb_project", "interval_s",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a training reads, opened and checked against each other."""

    data: DataSet
    table: SampleTable
    samples: TrainingSamples
    files: TargetFiles
    target: TargetConfig
    target_digest: str

    @property
    def likeliest_key(self) -> str:
        """Digest of what the target's likeliest tokens depend on: the states, their order, and the target's head."""
        digest = xxhash.xxh3_64(f"{self.data.fingerprint} {self.target_digest}".encode())
        digest.update(self.data.ids.tobytes())
        return digest.hexdigest()


def open_inputs(table: SampleTable, states: Path, target: TargetConfig, *, max_train_samples: int | None) -> Inputs:
    """The data set of `states` with its samples and its target.

    SpecMismatch where another target was captured, ConfigError where the data set does not say what a teacher needs,
    DataError where table and data set do not belong together.
    """
    assert target.path is not None
    data = DataSet(states)
    files = open_target(target.path)
    digest = require_target(data, target.path)
    samples = TrainingSamples(table, data, max_train_samples=max_train_samples)
    return Inputs(data, table, samples, files, target, digest)


def require_target(data: DataSet, target: Path) -> str:
    """The digest of the target, whose head says what the states of `data` mean.

    SpecMismatch where another target was captured, ConfigError where the data set does not say how to read its last
    hidden state.
    """
    states, digest = data.layout.root, target_digest(target)
    if data.spec.target_digest not in (UNKNOWN, digest):
        raise SpecMismatch(
            f"{states}: captured from target {data.spec.target_digest}, but {target} is {digest}; its head would "
            "teach what the states do not say: set target.path to the model that was captured",
            path=states,
        )
    if data.spec.last_hidden_norm == "unknown":
        raise ConfigError(
            f"{states}: does not say whether its last hidden state is before or after the target's final norm"
        )
    return digest


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Everything that follows from configuration and inputs."""

    inputs: Inputs
    config: TrainConfig
    draft: DraftConfig
    shape: DraftShape
    vocab_map: VocabMap
    schedule: Schedule
    held_out: Sequence[Pack]
    num_steps: int
    dtype: torch.dtype
    """Of the arithmetic."""

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the weights, as plain JSON: a run goes on only under the same."""
        train = {f"train.{k}": v for k, v in self.config.model_dump(mode="json").items() if k not in FREE_SETTINGS}
        drafter = {f"draft.{k}": v for k, v in self.draft.model_dump(mode="json").items()}
        return {
            **train,
            **drafter,
            "fingerprint": self.inputs.data.fingerprint,
            "samples": self.inputs.table.digest,
            "num_train": len(self.inputs.samples.train),
        }

    def lines(self, ranks: Ranks) -> list[str]:
        """How large it is, and what it will take of a device's memory."""
        count, share, device = num_parameters(self.shape), self._supervised_share(), ranks.device
        memory = estimate_memory(
            self.shape,
            self.inputs.data.spec,
            self.config,
            dtype=self.dtype,
            device_type=device.type,
            supervised_share=share,
            world=ranks.world,
        )
        line = memory.line()
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            line += f"; {human_bytes(free)} are free"
            if memory.total > free:
                line += ": more than there is; lower train.pack_tokens, or set train.recompute or train.sharded"
        return [
            f"drafter of {count.num_trainable / 1e6:,.1f} M trainable parameters, {self.shape.draft_vocab_size:,} of "
            f"{self.shape.vocab_size:,} tokens; {self.num_steps:,} steps of {self.config.step_packs} packs, "
            f"{self.schedule.fill():.1%} full; {share:.0%} of the tokens supervised; {ranks.world} ranks on "
            f"{device.type}, {str(self.dtype).removeprefix('torch.')}",
            line,
        ]

    def require_same_settings(self, found: Path, there: Mapping[str, Any]) -> None:
        """ConfigError, one line for each setting of the checkpoint `found` that is another one here."""
        here = self.settings
        differ = [
            f"{found}: {name}: {there.get(name)} there, {here.get(name)} here"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        ]
        if differ:
            raise ConfigError("\n".join([*differ, f"{self.config.out}: another run; set another train.out"]))

    def _supervised_share(self) -> float:
        samples = self.inputs.samples
        some = samples.train[:: max(1, len(samples.train) // 2000)].tolist()
        tokens = sum(samples.num_tokens(i) for i in some)
        return float(sum(np.count_nonzero(samples.loss_mask(i)) for i in some) / max(1, tokens))


def make_plan(inputs: Inputs, config: TrainConfig, draft: DraftConfig, ranks: Ranks) -> TrainPlan:
    """ConfigError where the configuration does not fit the inputs or the number of ranks."""
    if config.step_packs < ranks.world:
        raise ConfigError(
            f"train.step_packs: {config.step_packs} packs a step leave {ranks.world - config.step_packs} of "
            f"{ranks.world} ranks without one; set it to {ranks.world} or a multiple"
        )
    shape, vocab_map = _shape(inputs, draft)
    samples = inputs.samples
    schedule = Schedule(
        samples.ids,
        samples.token_counts,
        samples.train,
        pack_tokens=config.pack_tokens,
        step_packs=config.step_packs,
        seed=config.seed,
    )
    held_out = evaluation_packs(samples.ids, samples.token_counts, samples.held_out, pack_tokens=config.pack_tokens)
    num_steps = schedule.num_steps(config.epochs)
    if config.max_steps is not None:
        num_steps = min(num_steps, config.max_steps)
    dtype = dtype_of(config, ranks.device)
    return TrainPlan(inputs, config, draft, shape, vocab_map, schedule, held_out, num_steps, dtype)


def _shape(inputs: Inputs, config: DraftConfig) -> tuple[DraftShape, VocabMap]:
    """The drafter's shape, and its vocabulary: the most frequent supervised tokens of the training samples."""
    vocab_size = inputs.data.spec.vocab_size
    size = min(config.vocab_size, vocab_size)
    shape = draft_shape(
        inputs.files.config,
        inputs.data.spec,
        draft_vocab_size=size,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        norm_aux=config.norm_aux,
        carry_normed=config.carry_normed,
    )
    if size == vocab_size:
        return shape, VocabMap.full(vocab_size)
    return shape, VocabMap.from_counts(inputs.samples.supervised_counts(vocab_size), size)


def dtype_of(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Of the arithmetic."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, config.dtype)
    return found
