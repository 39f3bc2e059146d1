"""Train a drafter: join states and samples, make the drafter or take up the latest checkpoint, learn, look, keep."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.config import DraftConfig, TargetConfig, TrainConfig
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, EyasError, Stopped, TrainError
from eyas.log import Progress
from eyas.model import checkpoint as engine_layout
from eyas.model.create import initialise
from eyas.model.eagle3 import Eagle3Draft
from eyas.store.files import raise_store_error
from eyas.store.writer import lock
from eyas.target.head import TargetHead
from eyas.train import checkpoint
from eyas.train.attention import causal_for
from eyas.train.baseline import Baseline, BaselineCounts
from eyas.train.checkpoint import TrainState
from eyas.train.loader import Loader
from eyas.train.loop import Trainer
from eyas.train.metrics import Summary, labels_of, summarize
from eyas.train.monitor import Monitor
from eyas.train.optimizer import Optimizer
from eyas.train.plan import TrainPlan, make_plan, open_inputs
from eyas.train.ranks import Ranks
from eyas.train.receipt import TrainReceipt
from eyas.train.report import plots_missing, write_report
from eyas.train.step import Pass
from eyas.train.teacher import Likeliest, TargetTeacher
from eyas.train.ttt import Options


def train(
    config: TrainConfig,
    draft_config: DraftConfig,
    target: TargetConfig,
    *,
    table: SampleTable,
    states: Path,
    resolved: str,
    progress: Progress,
    stop: threading.Event,
) -> TrainReceipt | None:
    """Train until the epochs are done; started again, it goes on from the latest checkpoint. Rank 0 has the receipt.

    `resolved`: the whole configuration as TOML, kept beside the checkpoints. Raises Stopped after a checkpoint when
    `stop` is set; ConfigError, SpecMismatch and DataError before anything is written; NonFinite at the first loss or
    gradient that is no number.
    """
    assert config.out is not None and target.path is not None
    if config.out.resolve() == states.resolve():
        raise ConfigError(f"train.out: {config.out} is the data set itself; choose another directory")
    with Ranks.of(config.device) as ranks:
        monitor = Monitor(progress, ranks)
        monitor.say("opening the data set, joining the sample table")
        inputs = open_inputs(table, states, target, max_train_samples=config.max_train_samples)
        plan = make_plan(inputs, config, draft_config, ranks)
        out = _prepare_directory(config.out, ranks)
        held = lock(out / "lock") if ranks.first else -1
        try:
            receipt = _Run(plan, ranks, monitor, stop, out).train(resolved)
        finally:
            monitor.close()
            if held >= 0:
                os.close(held)
        return receipt if ranks.first else None


def _prepare_directory(out: Path, ranks: Ranks) -> Path:
    if ranks.first:
        try:
            (out / checkpoint.CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise_store_error(error, out, "making the run's directory")
            raise ConfigError(f"train.out {out}: cannot be written: {error.strerror}") from None
    ranks.barrier()
    return out


class _Run:
    """A training under way: what is made once, and what happens between two steps."""

    def __init__(self, plan: TrainPlan, ranks: Ranks, monitor: Monitor, stop: threading.Event, out: Path) -> None:
        self.plan, self.ranks, self.monitor, self.stop, self.out = plan, ranks, monitor, stop, out
        self.config, self.inputs = plan.config, plan.inputs
        self.state = TrainState(0, 0, None, None, plan.settings)
        self.summary: Summary | None = None
        self.summary_step = -1
        self.baselines: Mapping[str, Any] | None = None

    def train(self, resolved: str) -> TrainReceipt:
        found = self._take_up()
        self.monitor.open(self.out, resolved)
        try:
            trainer = self._make(found)
            baseline = self._baseline()
            self.monitor.start(self.plan, self.out)
            waited_s = 0.0
            if self.state.step >= self.plan.num_steps:
                self.monitor.say(f"all {self.plan.num_steps:,} steps are done already")
            else:
                waited_s = self._steps(trainer, baseline)
            seconds = time.monotonic() - self.monitor.started
            self.monitor.end()
            return self._receipt(seconds, waited_s)
        except BaseException as error:
            self.monitor.end(error)
            if self.ranks.first:
                self._page(png=False)
            raise

    def _take_up(self) -> Path | None:
        """The latest checkpoint with its state, which must be of a run with these settings; nothing is written yet."""
        # As the first rank sees it: on another host a shared file system may still show an older one.
        found = checkpoint.latest(self.out) if self.ranks.first else None
        known = torch.tensor(0 if found is None else int(found.name) + 1, device=self.ranks.device)
        number = int(self.ranks.sum(known)) - 1
        found = checkpoint.step_directory(self.out, number) if number >= 0 else None
        if found is not None:
            self.state = checkpoint.read_state(found)
            self.plan.require_same_settings(found, self.state.settings)
        now = self.monitor.now
        now.step, now.steps, now.tokens = self.state.step, self.plan.num_steps, self.state.tokens
        return found

    def _make(self, found: Path | None) -> Trainer:
        """The drafter with its optimizer and its teacher, new or from the latest checkpoint."""
        self.monitor.now.state = "loading"
        config, device, dtype = self.config, self.ranks.device, self.plan.dtype
        draft = self._new_draft() if found is None else self._draft_of(found)
        for line in self.plan.lines(self.ranks):
            self.monitor.say(line)
        if dtype == torch.bfloat16 and not self.plan.shape.own_embedding:
            draft.embed_tokens.to(dtype)
        draft.to(device)
        compiled = config.compile if config.compile is not None else device.type == "cuda"
        run = Pass(draft, Options(dtype, causal_for(device, dtype), compiled, config.recompute))
        optimizer = Optimizer(run, config, self.ranks, dtype)
        if found is not None:
            optimizer.load_moments(checkpoint.read_moments(found, optimizer.moments_like()))
        target, norm = self.inputs.target, self.inputs.data.spec.last_hidden_norm
        assert target.path is not None and norm != "unknown"
        head = TargetHead.load(target.path, trust_remote_code=target.trust_remote_code).on(device, dtype)
        name = f"likeliest-{self.inputs.likeliest_key}-{str(dtype).removeprefix('torch.')}.i32"
        teacher = TargetTeacher(head, self.plan.vocab_map, norm, Likeliest(self.out / name, self.inputs.data))
        return Trainer(run, optimizer, teacher, self.inputs.data, self.inputs.samples, config, self.ranks)

    def _new_draft(self) -> Eagle3Draft:
        target, start_from = self.inputs.target, self.plan.draft.start_from
        assert target.path is not None
        draft = Eagle3Draft(self.plan.shape)
        initialise(
            draft, target.path, self.plan.vocab_map, self.config.seed, trust_remote_code=target.trust_remote_code
        )
        if start_from is not None:
            layers = self.plan.draft.start_from_aux_layers
            new = engine_layout.warm_start(draft, self.plan.vocab_map, start_from, aux_layers=layers)
            self.monitor.say(f"starts from {start_from}; {new:,} tokens are new to it")
        return draft

    def _draft_of(self, found: Path) -> Eagle3Draft:
        target = self.inputs.target
        try:
            draft, vocab_map, _ = engine_layout.load(
                found / checkpoint.DRAFT, target=target.path, trust_remote_code=target.trust_remote_code
            )
        except ConfigError as error:
            raise TrainError(f"{error}; remove {found} to go on from the checkpoint before it") from None
        if draft.shape != self.plan.shape or not torch.equal(vocab_map.d2t, self.plan.vocab_map.d2t):
            raise TrainError(f"{found}: its drafter has another shape or vocabulary than this run's")
        self.monitor.say(f"goes on from {found}, step {self.state.step:,}")
        self._point()  # a kill may have come between the checkpoint and its links
        return draft

    def _baseline(self) -> Baseline | None:
        if not self.plan.held_out:
            self.monitor.say("no sample is held out (data.held_out): nothing tells which checkpoint is best")
            return None
        counts = BaselineCounts()
        for index in self.inputs.samples.train.tolist():
            counts.add(self.inputs.samples.token_ids(index), self.inputs.samples.loss_mask(index))
        return counts.baseline()

    def _steps(self, trainer: Trainer, baseline: Baseline | None) -> float:
        """All steps that are left; returns the seconds which they waited for data."""
        config, ranks, num_steps = self.config, self.ranks, self.plan.num_steps
        first = self.state.step
        walk = self.plan.schedule.steps(first, num_steps, rank=ranks.rank, world=ranks.world)
        self.monitor.now.state = "training"
        with Loader(
            self.inputs.data, self.inputs.samples, walk, device=ranks.device, prefetch_bytes=config.prefetch_bytes
        ) as loader:
            for step in range(first, num_steps):
                epoch, packs = self.plan.schedule.step(step)
                turns = -(-len(packs) // ranks.world)
                sums = trainer.step(step, num_steps, next(loader), turns, self.stop.is_set())
                done = step + 1
                self.state = dataclasses.replace(self.state, step=done, tokens=self.state.tokens + sums.tokens)
                self.monitor.step(self.plan, self.state, epoch, sums, trainer.grad_norm, loader.waited_s)
                # A look that is due comes before a stop: no later start would make up for it.
                looked = self._look_due(done, epoch)
                if looked:
                    self._look(trainer, epoch, baseline)
                if looked or sums.stop or done % config.checkpoint_every == 0:
                    self._save(trainer)
                    self.monitor.restart_clock(loader.waited_s)
                if sums.stop and done < num_steps:
                    raise Stopped(f"{self.out}: stopped after step {done:,}, saved; the same command goes on from here")
            return loader.waited_s

    def _look_due(self, done: int, epoch: int) -> bool:
        if done == self.plan.num_steps:
            return True
        if self.config.eval_every is not None:
            return done % self.config.eval_every == 0
        return self.plan.schedule.step(done)[0] != epoch

    def _look(self, trainer: Trainer, epoch: int, baseline: Baseline | None) -> None:
        """Evaluate on the held-out samples; the best acceptance length so far makes the best checkpoint."""
        if not self.plan.held_out:
            return
        self.monitor.now.state = "evaluating"
        started = time.monotonic()
        tally, score = trainer.evaluate(self.plan.held_out, None if self.baselines else baseline)
        if score is not None:
            self.baselines = score.to_json()
        self.summary, self.summary_step = summarize(tally), self.state.step
        found, best = self.summary.score, self.state.best_score
        if found is not None and (best is None or found > best):
            self.state = dataclasses.replace(self.state, best_score=found, best_step=self.state.step)
        samples = self.inputs.samples
        self.monitor.evaluated(
            self.summary,
            tally,
            [labels_of(samples.source(i), samples.tags(i), samples.language(i)) for i in samples.held_out.tolist()],
            self.baselines,
            epoch=epoch,
            seconds=time.monotonic() - started,
            best=self.state.best_step == self.state.step,
        )
        self.monitor.now.state = "training"

    def _save(self, trainer: Trainer) -> None:
        """Write a checkpoint, let `latest` and `best` point to what they say, remove old ones. All ranks take part."""
        started = time.monotonic()
        weights, moments = trainer.optimizer.whole_weights(), trainer.optimizer.moments()
        if self.ranks.first:
            draft = Eagle3Draft(self.plan.shape)
            with torch.no_grad():
                for name, parameter in draft.named_parameters():
                    if name in weights:
                        parameter.copy_(weights[name])
            path = checkpoint.save(
                self.out, draft, self.plan.vocab_map, moments, self.state,
                target_config=self.inputs.files.config, about=self._about(),
            )  # fmt: skip
            self._point()
            checkpoint.prune(self.out, self.config.keep)
            self.monitor.event(
                "checkpoint",
                step=self.state.step,
                path=str(path.relative_to(self.out)),
                bytes=sum(p.stat().st_size for p in path.rglob("*") if p.is_file()),
                seconds=time.monotonic() - started,
                best=self.state.best_step in (self.state.step, None),
            )
            self._page(png=False)
        self.ranks.barrier()

    def _point(self) -> None:
        """Let the links say what the state says."""
        if self.ranks.first:
            best = self.state.step if self.state.best_step is None else self.state.best_step
            checkpoint.point(self.out, checkpoint.LATEST, self.state.step)
            if (checkpoint.step_directory(self.out, best) / checkpoint.STATE).is_file():
                checkpoint.point(self.out, checkpoint.BEST, best)

    def _page(self, *, png: bool) -> list[Path]:
        """The report; a page that cannot be written costs no training."""
        try:
            return write_report(self.out, png=png)
        except (TrainError, OSError) as error:
            self.monitor.say(str(error))
            return []

    def _about(self) -> dict[str, Any]:
        """How the drafter was made, for its config.json."""
        spec = self.inputs.data.spec
        return {
            "target_digest": spec.target_digest,
            "quantisation": spec.quantisation,
            "fingerprint": spec.fingerprint,
            "step": self.state.step,
            "tokens": self.state.tokens,
            "settings": dict(self.state.settings),
            "held_out": self.summary.to_json() if self.summary and self.summary_step == self.state.step else None,
        }

    def _receipt(self, seconds: float, waited_s: float) -> TrainReceipt:
        best_step = self.state.step if self.state.best_step is None else self.state.best_step
        best = checkpoint.step_directory(self.out, best_step) / checkpoint.DRAFT
        missing = plots_missing()
        return TrainReceipt(
            out=str(self.out),
            steps=self.state.step,
            tokens=self.state.tokens,
            seconds=seconds,
            tokens_per_s=self.monitor.now.tokens_per_s,
            waited=waited_s / max(seconds, 1e-9),
            summary=self._best_summary(best),
            baselines=self.baselines,
            best=str(best),
            best_step=best_step,
            files=tuple(map(str, self._page(png=True))) if self.ranks.first else (),
            notes=(missing,) if missing else (),
        )

    def _best_summary(self, best: Path) -> Summary | None:
        """What the best checkpoint says of itself."""
        try:
            _, _, info = engine_layout.load(best)
        except EyasError:
            return self.summary
        held_out = info.extra.get("held_out")
        return Summary.from_json(held_out) if held_out else self.summary
