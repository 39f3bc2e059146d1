"""The loop: packs to lessons, lessons to gradients, gradients to weights; and the look at held-out samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from eyas.config import TrainConfig
from eyas.errors import NonFinite
from eyas.store.reader import DataSet
from eyas.train.baseline import Baseline, Score
from eyas.train.loader import Batch, Loader
from eyas.train.metrics import Tally
from eyas.train.optimizer import Optimizer, learning_rate
from eyas.train.packs import Pack
from eyas.train.ranks import Ranks
from eyas.train.samples import TrainingSamples
from eyas.train.step import Lesson, Pass, count, empty_batch, lesson, samples_of
from eyas.train.teacher import TargetTeacher


@dataclass(slots=True)
class StepSums:
    """Sums over the rows of some optimizer steps, over all ranks: `[S]` each."""

    loss: np.ndarray[tuple[int], np.dtype[np.float64]]
    valid: np.ndarray[tuple[int], np.dtype[np.float64]]
    supervised: np.ndarray[tuple[int], np.dtype[np.float64]]
    correct: np.ndarray[tuple[int], np.dtype[np.float64]]
    tokens: int
    stop: bool = False
    """Some rank was asked to stop."""

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(
            self.loss + other.loss,
            self.valid + other.valid,
            self.supervised + other.supervised,
            self.correct + other.correct,
            self.tokens + other.tokens,
            self.stop or other.stop,
        )

    def losses(self) -> list[float | None]:
        """Mean soft cross-entropy of each step; None where no row carried one."""
        return [_share(a, b) for a, b in zip(self.loss, self.valid, strict=True)]

    def accuracies(self) -> list[float | None]:
        """Honest accuracy of each step: what the drafter cannot say counts as a miss."""
        return [_share(a, b) for a, b in zip(self.correct, self.supervised, strict=True)]


@dataclass(slots=True)
class Trainer:
    """One rank's part of a training, after everything was made and before it starts."""

    run: Pass
    optimizer: Optimizer
    teacher: TargetTeacher
    data: DataSet
    samples: TrainingSamples
    config: TrainConfig
    ranks: Ranks
    grad_norm: float = math.nan
    """Of the latest step, before it was clipped."""

    def step(self, step: int, num_steps: int, batches: Sequence[Batch], num_turns: int, stop: bool) -> StepSums:
        """One optimizer step over this rank's `batches`; every rank makes `num_turns` passes.

        Raises NonFinite, on all ranks and before the weights change, when a loss or a gradient is no number.
        """
        config, device = self.config, self.ranks.device
        lessons = [self._lesson(batch, config.mask_rule) for batch in batches]
        # A row's loss is divided by the step's count of rows over all ranks and packs: known before any gradient.
        counts = torch.stack([t.valid.sum(1) for t in lessons]).sum(0) if lessons else self._zeros()
        counts = self.ranks.sum(counts.to(torch.float64))
        decay = config.step_decay ** torch.arange(config.ttt_length, dtype=torch.float64, device=device)
        weight = (decay / counts.clamp(min=1)).to(torch.float32)
        sums = torch.zeros(3, config.ttt_length, dtype=torch.float64, device=device)
        suspects: list[str] = []
        for taught in [*lessons, *self._fillers(num_turns - len(lessons))]:
            loss, outcome = self.run(taught, weight)
            loss.backward()
            sums += torch.stack([
                outcome.loss.sum(1), taught.rows.supervised.sum(1), (outcome.correct & outcome.valid).sum(1)
            ])  # fmt: skip
            suspects += _broken(taught, outcome.loss)
        norm = self.optimizer.sum_gradients()
        tail = torch.tensor([sum(b.num_tokens for b in batches), int(stop)], dtype=torch.float64, device=device)
        total = self.ranks.sum(torch.cat([sums.flatten(), tail])).tolist()
        loss_sums, supervised, correct = np.array(total[:-2]).reshape(3, -1)
        found = StepSums(loss_sums, counts.cpu().numpy(), supervised, correct, int(total[-2]), total[-1] > 0)
        if not (math.isfinite(norm) and np.isfinite(loss_sums).all()):
            raise NonFinite(self._told(step, norm, suspects, batches), step=step)
        self.optimizer.step(learning_rate(step, num_steps, config))
        self.grad_norm = norm
        return found

    @torch.no_grad()
    def evaluate(self, packs: Sequence[Pack], baseline: Baseline | None = None) -> tuple[Tally, Score | None]:
        """Every held-out sample once, by the rule of what a server drafts; `baseline` is scored on the same rows."""
        held_out, num_steps = self.samples.held_out, self.config.ttt_length
        tally, score = Tally(len(held_out), num_steps), None
        mine = list(packs[self.ranks.rank :: self.ranks.world])
        num_turns = -(-len(packs) // self.ranks.world)
        weight = torch.ones(num_steps, device=self.ranks.device)
        with Loader(
            self.data, self.samples, [[p] for p in mine], device=self.ranks.device,
            prefetch_bytes=self.config.prefetch_bytes,
        ) as loader:  # fmt: skip
            for batch in itertools.chain(loader, [[empty_batch(self._like())]] * (num_turns - len(mine))):
                taught = self._lesson(batch[0], "drafted")
                _, outcome = self.run(taught, weight)
                count(tally, held_out, taught, outcome)
                if baseline is not None and len(taught.rows.rows):
                    more = _baseline_score(baseline, taught)
                    score = more if score is None else score + more
        hits = (0, 0, 0) if score is None else (score.num_rows, score.unigram_hits, score.bigram_hits)
        whole = torch.cat([torch.from_numpy(tally.sums).flatten(), torch.tensor(hits, dtype=torch.float64)])
        whole = self.ranks.sum(whole.to(self.ranks.device)).cpu()
        tally.sums[...] = whole[:-3].view(tally.sums.shape).numpy()
        return tally, None if baseline is None else Score(*(int(n) for n in whole[-3:]))

    def _lesson(self, batch: Batch, rule: str) -> Lesson:
        return lesson(batch, self.teacher, num_steps=self.config.ttt_length, rule=rule)  # type: ignore[arg-type]

    def _fillers(self, count: int) -> list[Lesson]:
        """Lessons of nothing: ranks with fewer packs come along, so that none waits for them for ever."""
        return [self._lesson(empty_batch(self._like()), self.config.mask_rule) for _ in range(count)]

    def _like(self) -> torch.Tensor:
        spec = self.data.spec
        shape = (len(spec.fields), 0, spec.hidden_size)
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self.ranks.device)

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.config.ttt_length, dtype=torch.int64, device=self.ranks.device)

    def _told(self, step: int, norm: float, suspects: Sequence[str], batches: Sequence[Batch]) -> str:
        suspects = list(suspects) or [i for b in batches for i in b.sample_ids]
        if self.ranks.world > 1:
            everyone: list[list[str]] = [[] for _ in range(self.ranks.world)]
            dist.all_gather_object(everyone, suspects)
            suspects = [i for some in everyone for i in some]
        more = f" and {len(suspects) - 8} more" if len(suspects) > 8 else ""
        return (
            f"step {step}: loss or gradient is not finite (gradient norm {norm}); the weights are those of the step "
            f"before. Samples: {', '.join(suspects[:8])}{more}. Look at them ('eyas inspect --sample ID'), lower "
            "train.learning_rate, or go on from an earlier checkpoint"
        )


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _broken(taught: Lesson, loss: torch.Tensor) -> list[str]:
    """Ids of the samples with a loss that is no number."""
    bad = ~torch.isfinite(loss).all(0)
    if not bool(bad.any()):
        return []
    wrong = set(samples_of(taught)[bad.cpu().numpy()].tolist())
    batch = taught.batch
    return [i for index, i in zip(batch.indices, batch.sample_ids, strict=True) if index in wrong]


def _baseline_score(baseline: Baseline, taught: Lesson) -> Score:
    rows, batch = taught.rows, taught.batch
    first = rows.supervised[0]
    last_tokens = batch.token_ids[rows.read[0][first]].cpu().numpy()
    truth = taught.likeliest[rows.teacher[0][first]].cpu().numpy()
    return baseline.score(last_tokens, truth)
