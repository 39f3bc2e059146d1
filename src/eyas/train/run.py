"""Train a drafter: join states and samples, make the drafter or take up the latest checkpoint, learn, look, keep."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from eyas.config import DraftConfig, TargetConfig, TrainConfig
from eyas.data.table import SampleTable
from eyas.errors import ConfigError, EyasError, SpecMismatch, Stopped, TrainError
from eyas.log import Progress, human_bytes, human_time
from eyas.model import checkpoint as engine_layout
from eyas.model.create import draft_shape, initialise, num_parameters
from eyas.model.eagle3 import Eagle3Draft
from eyas.model.shape import DraftShape
from eyas.model.vocab_map import VocabMap
from eyas.observe.events import EventLog
from eyas.observe.heartbeat import Heartbeat
from eyas.records import UNKNOWN
from eyas.store.files import raise_store_error
from eyas.store.reader import DataSet
from eyas.store.writer import lock
from eyas.target.files import TargetFiles, open_target, target_digest
from eyas.target.head import TargetHead
from eyas.train import checkpoint
from eyas.train.attention import causal_for
from eyas.train.baseline import Baseline, BaselineCounts
from eyas.train.checkpoint import TrainState
from eyas.train.estimate import estimate_memory
from eyas.train.loader import Loader
from eyas.train.loop import StepSums, Trainer
from eyas.train.metrics import Summary, labels_of, slices, summarize
from eyas.train.optimizer import Optimizer, learning_rate
from eyas.train.packs import Pack, Schedule, evaluation_packs
from eyas.train.ranks import Ranks
from eyas.train.report import plots_missing, write_report
from eyas.train.samples import TrainingSamples
from eyas.train.status import EVENTS, HEARTBEAT, STAGE
from eyas.train.step import Pass
from eyas.train.teacher import Likeliest, TargetTeacher
from eyas.train.trackers import Trackers
from eyas.train.ttt import Options

# Settings that may change from one start to the next: they decide how long or how fast, not what.
FREE_SETTINGS = frozenset({
    "out", "epochs", "max_steps", "recompute", "compile", "sharded", "device", "eval_every", "checkpoint_every", "keep",
    "log_every", "prefetch_bytes", "wandb_project", "interval_s",
})  # fmt: skip
RATE_WINDOW_STEPS = 20


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a training reads, opened and checked against each other."""

    data: DataSet
    table: SampleTable
    samples: TrainingSamples
    files: TargetFiles
    target: TargetConfig
    target_digest: str


@dataclass(frozen=True, slots=True)
class TrainReceipt:
    """What a training came to."""

    out: str
    steps: int
    tokens: int
    """Tokens of all packs, over all epochs and starts."""
    seconds: float
    """Of this start."""
    tokens_per_s: float
    waited: float
    """Share of this start's time in which it waited for data."""
    summary: Summary | None
    """Of the held-out samples, at the best checkpoint."""
    baselines: Mapping[str, Any] | None
    best: str
    best_step: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        value = dataclasses.asdict(self)
        return value | {"summary": None if self.summary is None else self.summary.to_json()}

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.out}: {self.steps:,} steps, {self.tokens:,} tokens · {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.waited:.1%} of the time waiting for data · {human_time(self.seconds)}"
        ]
        if self.summary is not None:
            lines += [f"held out, at the best checkpoint (step {self.best_step:,}):", *self.summary.lines()]
        if self.baselines and self.baselines.get("rows"):
            lines.append(
                f"step-0 accuracy by guessing: unigram {self.baselines['unigram']:.3f}, "
                f"bigram {self.baselines['bigram']:.3f}"
            )
        return [*lines, f"best     {self.best}", *(f"page     {name}" for name in self.files), *self.notes]


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
        say = _Speaker(progress, ranks)
        say("opening the data set, joining the sample table")
        inputs = _open(table, states, target, config, ranks)
        shape, vocab_map = _shape(inputs, draft_config)
        schedule = Schedule(
            inputs.samples.ids,
            inputs.samples.token_counts,
            inputs.samples.train,
            pack_tokens=config.pack_tokens,
            step_packs=config.step_packs,
            seed=config.seed,
        )
        held_out = evaluation_packs(
            inputs.samples.ids,
            inputs.samples.token_counts,
            inputs.samples.held_out,
            pack_tokens=config.pack_tokens,
        )
        out = _prepare_directory(config.out, ranks)
        run = _Run(inputs, config, draft_config, shape, vocab_map, schedule, held_out, ranks, say, stop, out, resolved)
        try:
            receipt = run.train()
        finally:
            run.close()
        return receipt if ranks.first else None


class _Speaker:
    """Says things once, whatever the number of ranks."""

    def __init__(self, progress: Progress, ranks: Ranks) -> None:
        self._progress, self._first = progress, ranks.first

    def __call__(self, line: str) -> None:
        if self._first:
            self._progress.say(f"train: {line}")

    def show(self, line: str) -> None:
        if self._first:
            self._progress.show(f"train: {line}")

    def due(self) -> bool:
        return self._first and self._progress.due()


def _open(table: SampleTable, states: Path, target: TargetConfig, config: TrainConfig, ranks: Ranks) -> Inputs:
    assert target.path is not None
    if config.step_packs < ranks.world:
        raise ConfigError(
            f"train.step_packs: {config.step_packs} packs a step leave {ranks.world - config.step_packs} of "
            f"{ranks.world} ranks without one; set it to {ranks.world} or a multiple"
        )
    data = DataSet(states)
    files = open_target(target.path)
    digest = target_digest(target.path)
    if data.spec.target_digest not in (UNKNOWN, digest):
        raise SpecMismatch(
            f"{states}: captured from target {data.spec.target_digest}, but {target.path} is {digest}; its head would "
            "teach what the states do not say: set target.path to the model that was captured",
            path=states,
        )
    if data.spec.last_hidden_norm == "unknown":
        raise ConfigError(
            f"{states}: does not say whether its last hidden state is before or after the target's final norm"
        )
    samples = TrainingSamples(table, data, max_train_samples=config.max_train_samples)
    return Inputs(data, table, samples, files, target, digest)


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


def _keep_resolved(out: Path, resolved: str) -> None:
    path = out / "run.toml"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(resolved)
        temporary.rename(path)
    except OSError as error:
        raise_store_error(error, path, "keeping the run's configuration")


class _Run:
    """A training under way: what is made once, and what happens between two steps."""

    def __init__(
        self,
        inputs: Inputs,
        config: TrainConfig,
        draft_config: DraftConfig,
        shape: DraftShape,
        vocab_map: VocabMap,
        schedule: Schedule,
        held_out: Sequence[Pack],
        ranks: Ranks,
        say: _Speaker,
        stop: threading.Event,
        out: Path,
        resolved: str,
    ) -> None:
        self.inputs, self.config, self.draft_config, self.ranks = inputs, config, draft_config, ranks
        self.shape, self.vocab_map, self.schedule, self.held_out = shape, vocab_map, schedule, held_out
        self.say, self.stop, self.out, self.resolved = say, stop, out, resolved
        self.started = time.monotonic()
        self.num_steps = schedule.num_steps(config.epochs)
        if config.max_steps is not None:
            self.num_steps = min(self.num_steps, config.max_steps)
        self.dtype = _dtype(config, ranks.device)
        self.settings = _settings(config, draft_config, inputs)
        self.state = TrainState(0, 0, None, None, self.settings)
        self.first_step = 0
        self.doing = "starting"
        self.summary: Summary | None = None
        self.summary_step = -1
        self.baselines: Mapping[str, Any] | None = None
        self.rate = 0.0
        self.waited = 0.0
        self.latest_loss: float | None = None
        self._lock = lock(out / "lock") if ranks.first else -1
        run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        self._run_id = run_id
        self._events: EventLog | None = None
        self._heartbeat: Heartbeat | None = None
        self._trackers: Trackers | None = None

    def train(self) -> TrainReceipt:
        found = self._take_up()
        if self.ranks.first:
            _keep_resolved(self.out, self.resolved)
            try:
                self._events = EventLog(self.out / EVENTS, run_id=self._run_id)
            except OSError as error:
                raise_store_error(error, self.out / EVENTS, "opening the log of events")
            self._heartbeat = Heartbeat(self.out / HEARTBEAT, self._beat)
            self._heartbeat.start()
        try:
            receipt = self._train(found)
        except BaseException as error:
            resumable = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 1) == Stopped.exit_code
            self.doing = "stopped" if resumable else "failed"
            self._end(type(error).__name__, str(error))
            raise
        return receipt

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._events is not None:
            self._events.close()
        if self._trackers is not None:
            self._trackers.close()
        if self._lock >= 0:
            os.close(self._lock)

    def _take_up(self) -> Path | None:
        """The latest checkpoint with its state, which must be of a run with these settings; nothing is written yet."""
        # As the first rank sees it: on another host a shared file system may still show an older one.
        found = checkpoint.latest(self.out) if self.ranks.first else None
        known = torch.tensor(0 if found is None else int(found.name) + 1, device=self.ranks.device)
        number = int(self.ranks.sum(known)) - 1
        found = checkpoint.step_directory(self.out, number) if number >= 0 else None
        if found is not None:
            self.state = checkpoint.read_state(found)
            self._require_same_settings(found)
        return found

    def _train(self, found: Path | None) -> TrainReceipt:
        trainer = self._make(found)
        baseline = self._baseline()
        self._tell_start()
        waited_s = 0.0
        start = self.state.step
        if start >= self.num_steps:
            self.say(f"all {self.num_steps:,} steps are done already")
        else:
            waited_s = self._steps(trainer, baseline)
        seconds = time.monotonic() - self.started
        self.doing = "complete"
        self._end()
        return self._receipt(seconds, waited_s)

    def _make(self, found: Path | None) -> Trainer:
        """The drafter with its optimizer and its teacher, new or from the latest checkpoint."""
        self.doing = "loading"
        config, device = self.config, self.ranks.device
        assert self.inputs.target.path is not None
        if found is None:
            draft = Eagle3Draft(self.shape)
            initialise(
                draft, self.inputs.target.path, self.vocab_map, config.seed,
                trust_remote_code=self.inputs.target.trust_remote_code,
            )  # fmt: skip
            if self.draft_config.start_from is not None:
                new = engine_layout.warm_start(
                    draft, self.vocab_map, self.draft_config.start_from,
                    aux_layers=self.draft_config.start_from_aux_layers,
                )  # fmt: skip
                self.say(f"starts from {self.draft_config.start_from}; {new:,} tokens are new to it")
            moments = None
        else:
            try:
                draft, vocab_map, _ = engine_layout.load(
                    found / checkpoint.DRAFT, target=self.inputs.target.path,
                    trust_remote_code=self.inputs.target.trust_remote_code,
                )  # fmt: skip
            except ConfigError as error:
                raise TrainError(f"{error}; remove {found} to go on from the checkpoint before it") from None
            if draft.shape != self.shape or not torch.equal(vocab_map.d2t, self.vocab_map.d2t):
                raise TrainError(f"{found}: its drafter has another shape or vocabulary than this run's")
            self.say(f"goes on from {found}, step {self.state.step:,}")
            self._point()  # a kill may have come between the checkpoint and its links
            moments = found
        self.first_step = self.state.step
        self._say_size()
        if self.dtype == torch.bfloat16 and not self.shape.own_embedding:
            draft.embed_tokens.to(self.dtype)
        draft.to(device)
        compiled = config.compile if config.compile is not None else device.type == "cuda"
        options = Options(self.dtype, causal_for(device, self.dtype), compiled, config.recompute)
        run = Pass(draft, options)
        optimizer = Optimizer(run, config, self.ranks, self.dtype)
        if moments is not None:
            optimizer.load_moments(checkpoint.read_moments(moments, optimizer.moments_like()))
        head = TargetHead.load(
            self.inputs.target.path, trust_remote_code=self.inputs.target.trust_remote_code
        ).on(device, self.dtype)  # fmt: skip
        norm = self.inputs.data.spec.last_hidden_norm
        assert norm != "unknown"
        name = f"likeliest-{_digest_of(self.inputs)}-{str(self.dtype).removeprefix('torch.')}.i32"
        likeliest = Likeliest(self.out / name, self.inputs.data)
        teacher = TargetTeacher(head, self.vocab_map, norm, likeliest)
        return Trainer(run, optimizer, teacher, self.inputs.data, self.inputs.samples, config, self.ranks)

    def _steps(self, trainer: Trainer, baseline: Baseline | None) -> float:
        """All steps that are left; returns the seconds which they waited for data."""
        config, ranks = self.config, self.ranks
        walk = self.schedule.steps(self.first_step, self.num_steps, rank=ranks.rank, world=ranks.world)
        since: StepSums | None = None
        window_start, window_tokens, window_waited = time.monotonic(), 0, 0.0
        self.doing = "training"
        with Loader(
            self.inputs.data, self.inputs.samples, walk, device=ranks.device, prefetch_bytes=config.prefetch_bytes
        ) as loader:
            for step in range(self.first_step, self.num_steps):
                epoch, packs = self.schedule.step(step)
                turns = -(-len(packs) // ranks.world)
                sums = trainer.step(step, self.num_steps, next(loader), turns, self.stop.is_set())
                since = sums if since is None else since + sums
                window_tokens += sums.tokens
                done = step + 1
                self.state = dataclasses.replace(self.state, step=done, tokens=self.state.tokens + sums.tokens)
                passed = time.monotonic() - window_start
                self.rate, self.waited = window_tokens / passed, (loader.waited_s - window_waited) / passed
                self.latest_loss = sums.losses()[0]
                self._show(sums)
                if done % config.log_every == 0 or done == self.num_steps:
                    self._log_step(step, epoch, since, trainer.grad_norm)
                    since = None
                # A look that is due comes before a stop: no later start would make up for it.
                looked = self._look_due(done, epoch)
                if looked:
                    self._look(trainer, epoch, baseline)
                if looked or sums.stop or done % config.checkpoint_every == 0:
                    self._save(trainer)
                if sums.stop and done < self.num_steps:
                    raise Stopped(f"{self.out}: stopped after step {done:,}, saved; the same command goes on from here")
                if looked or done % RATE_WINDOW_STEPS == 0:
                    window_start, window_tokens, window_waited = time.monotonic(), 0, loader.waited_s
            return loader.waited_s

    def _look_due(self, done: int, epoch: int) -> bool:
        if done == self.num_steps:
            return True
        if self.config.eval_every is not None:
            return done % self.config.eval_every == 0
        return self.schedule.step(done)[0] != epoch

    def _look(self, trainer: Trainer, epoch: int, baseline: Baseline | None) -> None:
        """Evaluate on the held-out samples; the best acceptance length so far makes the best checkpoint."""
        if not self.held_out:
            return
        self.doing = "evaluating"
        started = time.monotonic()
        tally, score = trainer.evaluate(self.held_out, None if self.baselines else baseline)
        if score is not None:
            self.baselines = score.to_json()
        samples = self.inputs.samples
        labels = [labels_of(samples.source(i), samples.tags(i), samples.language(i)) for i in samples.held_out.tolist()]
        self.summary = summarize(tally)
        step, seconds = self.state.step, time.monotonic() - started
        self.summary_step = step
        self._event(
            "eval",
            step=step,
            epoch=epoch,
            tokens=self.state.tokens,
            seconds=seconds,
            summary=self.summary.to_json(),
            slices={label: one.to_json() for label, one in slices(tally, labels).items()},
            baselines=self.baselines,
        )
        found = self.summary.score
        best = self.state.best_score
        if found is not None and (best is None or found > best):
            self.state = dataclasses.replace(self.state, best_score=found, best_step=step)
        accuracy = self.summary.accuracy[0]
        length = self.summary.acceptance_length(self.summary.longest_chain)
        mark = " · best so far" if self.state.best_step == step else ""
        self.say(
            f"step {step:,}, epoch {epoch + 1}: held out, step-0 accuracy {accuracy}, acceptance length {length} "
            f"(pooled, chains of {self.summary.longest_chain}){mark}"
        )
        if self._trackers is not None:
            values = {f"held_out/accuracy_{s}": a.value if a else None for s, a in enumerate(self.summary.accuracy)}
            self._trackers.add({**values, "held_out/acceptance_length": length.value if length else None}, step)
        self.doing = "training"

    def _save(self, trainer: Trainer) -> None:
        """Write a checkpoint, let `latest` and `best` point to what they say, remove old ones. All ranks take part."""
        started = time.monotonic()
        weights, moments = trainer.optimizer.whole_weights(), trainer.optimizer.moments()
        if self.ranks.first:
            draft = Eagle3Draft(self.shape)
            with torch.no_grad():
                for name, parameter in draft.named_parameters():
                    if name in weights:
                        parameter.copy_(weights[name])
            path = checkpoint.save(
                self.out, draft, self.vocab_map, moments, self.state,
                target_config=self.inputs.files.config, about=self._about(),
            )  # fmt: skip
            best = self.state.best_step in (self.state.step, None)
            self._point()
            checkpoint.prune(self.out, self.config.keep)
            size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            self._event(
                "checkpoint",
                step=self.state.step,
                path=str(path.relative_to(self.out)),
                bytes=size,
                seconds=time.monotonic() - started,
                best=best,
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
        except TrainError as error:
            self.say(str(error))
            return []

    def _about(self) -> dict[str, Any]:
        """How the drafter was made, for its config.json."""
        spec = self.inputs.data.spec
        return {
            "target_digest": spec.target_digest,
            "fingerprint": spec.fingerprint,
            "step": self.state.step,
            "tokens": self.state.tokens,
            "settings": dict(self.settings),
            "held_out": self.summary.to_json() if self.summary and self.summary_step == self.state.step else None,
        }

    def _baseline(self) -> Baseline | None:
        if not self.held_out:
            self.say("no sample is held out (data.held_out): nothing tells which checkpoint is best")
            return None
        counts = BaselineCounts()
        for index in self.inputs.samples.train.tolist():
            counts.add(self.inputs.samples.token_ids(index), self.inputs.samples.loss_mask(index))
        return counts.baseline()

    def _require_same_settings(self, found: Path) -> None:
        there = self.state.settings
        differ = [
            f"{name}: {there.get(name)} there, {self.settings.get(name)} here"
            for name in sorted(there.keys() | self.settings.keys())
            if there.get(name) != self.settings.get(name)
        ]
        if differ:
            raise ConfigError(
                "\n".join(f"{found}: {line}" for line in differ) + f"\n{self.out}: another run; set another train.out"
            )

    def _say_size(self) -> None:
        count = num_parameters(self.shape)
        share = self._supervised_share()
        self.say(
            f"drafter of {count.num_trainable / 1e6:,.1f} M trainable parameters, {self.shape.draft_vocab_size:,} of "
            f"{self.shape.vocab_size:,} tokens; {self.num_steps:,} steps of {self.config.step_packs} packs, "
            f"{self.schedule.fill():.1%} full; {share:.0%} of the tokens supervised; {self.ranks.world} ranks on "
            f"{self.ranks.device.type}, {str(self.dtype).removeprefix('torch.')}"
        )
        found = estimate_memory(
            self.shape,
            self.inputs.data.spec,
            self.config,
            dtype=self.dtype,
            device_type=self.ranks.device.type,
            supervised_share=share,
            world=self.ranks.world,
        )
        line = found.line()
        if self.ranks.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.ranks.device)[0]
            line += f"; {human_bytes(free)} are free"
            if found.total > free:
                line += ": more than there is; lower train.pack_tokens, or set train.recompute or train.sharded"
        self.say(line)

    def _supervised_share(self) -> float:
        samples = self.inputs.samples
        some = samples.train[:: max(1, len(samples.train) // 2000)].tolist()
        tokens = sum(samples.num_tokens(i) for i in some)
        return float(sum(np.count_nonzero(samples.loss_mask(i)) for i in some) / max(1, tokens))

    def _tell_start(self) -> None:
        spec = self.inputs.data.spec
        if self.ranks.first:
            self._trackers = Trackers(self.out, wandb_project=self.config.wandb_project, settings=self.settings)
        self._event(
            "start",
            stage=STAGE,
            step=self.state.step,
            steps=self.num_steps,
            command=f"eyas train {self.out / 'run.toml'}",
            target=str(self.inputs.target.path),
            fingerprint=spec.fingerprint,
            data=dataclasses.asdict(self.inputs.samples.counts),
            shape=dataclasses.asdict(self.shape),
            settings=dict(self.settings),
        )

    def _show(self, sums: StepSums) -> None:
        if not self.say.due():
            return
        step = self.state.step
        left = (self.num_steps - step) * sums.tokens / max(1.0, self.rate)
        accuracy, loss = sums.accuracies()[0], self.latest_loss
        self.say.show(
            f"step {step:,} of {self.num_steps:,} · {self.rate:,.0f} tokens/s · "
            f"{self.waited:.1%} waiting for data · loss {_number(loss)} · accuracy {_number(accuracy)} · "
            f"ETA {human_time(left)}"
        )

    def _log_step(self, step: int, epoch: int, sums: StepSums, norm: float) -> None:
        device, rate = self.ranks.device, learning_rate(step, self.num_steps, self.config)
        gpu_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        losses, accuracies = sums.losses(), sums.accuracies()
        self._event(
            "step",
            step=step + 1,
            epoch=epoch,
            tokens=self.state.tokens,
            lr=rate,
            loss=losses,
            accuracy=accuracies,
            grad_norm=norm,
            tokens_per_s=self.rate,
            gpu_bytes=gpu_bytes,
            waited=self.waited,
        )
        if self._trackers is not None:
            values = {f"train/loss_{s}": value for s, value in enumerate(losses)}
            values |= {f"train/accuracy_{s}": value for s, value in enumerate(accuracies)}
            rest = {"train/lr": rate, "train/grad_norm": norm, "train/tokens_per_s": self.rate}
            self._trackers.add({**values, **rest}, step + 1)

    def _receipt(self, seconds: float, waited_s: float) -> TrainReceipt:
        tokens = self.state.tokens
        spent = max(seconds, 1e-9)
        best_step = self.state.best_step if self.state.best_step is not None else self.state.step
        files: list[Path] = []
        if self.ranks.first:
            files = self._page(png=True)
        best = checkpoint.step_directory(self.out, best_step) / checkpoint.DRAFT
        missing = plots_missing()
        return TrainReceipt(
            out=str(self.out),
            steps=self.state.step,
            tokens=tokens,
            seconds=seconds,
            tokens_per_s=self.rate,
            waited=waited_s / spent,
            summary=self._best_summary(best),
            baselines=self.baselines,
            best=str(best),
            best_step=best_step,
            files=tuple(map(str, files)),
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

    def _event(self, event: str, **details: object) -> None:
        if self._events is not None:
            self._events.add(event, **details)

    def _end(self, error: str = "", message: str = "") -> None:
        self._event(
            "end",
            state=self.doing,
            step=self.state.step,
            error=error,
            message=message,
            seconds=time.monotonic() - self.started,
        )
        self._error = message

    _error = ""

    def _beat(self) -> dict[str, Any]:
        return {
            "stage": STAGE,
            "state": self.doing,
            "step": self.state.step,
            "steps": self.num_steps,
            "tokens": self.state.tokens,
            "tokens_per_s": self.rate,
            "waited": self.waited,
            "loss": self.latest_loss,
            "error": self._error,
        }


def _dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, config.dtype)
    return found


def _settings(config: TrainConfig, draft: DraftConfig, inputs: Inputs) -> dict[str, Any]:
    """What decides the weights, as plain JSON."""
    train = {f"train.{k}": v for k, v in config.model_dump(mode="json").items() if k not in FREE_SETTINGS}
    drafter = {f"draft.{k}": v for k, v in draft.model_dump(mode="json").items()}
    return {
        **train,
        **drafter,
        "fingerprint": inputs.data.fingerprint,
        "samples": inputs.table.digest,
        "num_train": len(inputs.samples.train),
    }


def _digest_of(inputs: Inputs) -> str:
    """Of what the target's likeliest tokens depend on: the states, their order, and the target's head."""
    digest = xxhash.xxh3_64(f"{inputs.data.fingerprint} {inputs.target_digest}".encode())
    digest.update(inputs.data.ids.tobytes())
    return digest.hexdigest()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
