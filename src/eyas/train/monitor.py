"""What a person sees of a training: progress line, events, heartbeat, trackers; written once, by the first rank."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.errors import Stopped
from eyas.log import Progress, human_time
from eyas.observe.events import EventLog
from eyas.observe.heartbeat import Heartbeat
from eyas.store.files import raise_store_error
from eyas.train.checkpoint import TrainState
from eyas.train.loop import StepSums
from eyas.train.metrics import Summary, Tally, slices
from eyas.train.optimizer import learning_rate
from eyas.train.plan import TrainPlan
from eyas.train.ranks import Ranks
from eyas.train.status import EVENTS, HEARTBEAT, STAGE
from eyas.train.trackers import Trackers

RATE_WINDOW_STEPS = 20


@dataclass(slots=True)
class Standing:
    """Where a run stands, for the heartbeat."""

    state: str = "starting"
    step: int = 0
    steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    waited: float = 0.0
    """Share of the time that it waited for data, over the latest steps."""
    loss: float | None = None
    error: str = ""


class Monitor:
    """Tells what happens. Ranks other than the first say nothing."""

    def __init__(self, progress: Progress, ranks: Ranks) -> None:
        self.now = Standing()
        self.started = time.monotonic()
        self._progress, self._ranks = progress, ranks
        self._events: EventLog | None = None
        self._heartbeat: Heartbeat | None = None
        self._trackers: Trackers | None = None
        self._since: StepSums | None = None
        self._window_start, self._window_tokens, self._window_waited = self.started, 0, 0.0

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._ranks.first:
            self._progress.say(f"train: {line}")

    def open(self, out: Path, resolved: str) -> None:
        """Keep the configuration beside the run, and begin its events and its heartbeat."""
        if not self._ranks.first:
            return
        run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        path = out / "run.toml"
        try:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(resolved)
            temporary.rename(path)
            path = out / EVENTS
            self._events = EventLog(path, run_id=run_id)
        except OSError as error:
            raise_store_error(error, path, "opening the run")
        self._heartbeat = Heartbeat(out / HEARTBEAT, lambda: {"stage": STAGE, **dataclasses.asdict(self.now)})
        self._heartbeat.start()

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._events is not None:
            self._events.close()
        if self._trackers is not None:
            self._trackers.close()

    def event(self, event: str, **details: object) -> None:
        if self._events is not None:
            self._events.add(event, **details)

    def start(self, plan: TrainPlan, out: Path) -> None:
        """The run is made; its steps begin."""
        if self._ranks.first:
            self._trackers = Trackers(out, wandb_project=plan.config.wandb_project, settings=plan.settings)
        self.event(
            "start",
            stage=STAGE,
            step=self.now.step,
            steps=plan.num_steps,
            command=f"eyas train {out / 'run.toml'}",
            target=str(plan.inputs.target.path),
            fingerprint=plan.inputs.data.fingerprint,
            data=dataclasses.asdict(plan.inputs.samples.counts),
            shape=dataclasses.asdict(plan.shape),
            settings=plan.settings,
        )
        self.restart_clock(0.0)

    def restart_clock(self, waited_s: float) -> None:
        """Begin a new window of speed; `waited_s` is what the loader has waited so far."""
        self._window_start, self._window_tokens, self._window_waited = time.monotonic(), 0, waited_s

    def step(
        self, plan: TrainPlan, state: TrainState, epoch: int, sums: StepSums, norm: float, waited_s: float
    ) -> None:
        """An optimizer step is done."""
        now = self.now
        self._since = sums if self._since is None else self._since + sums
        self._window_tokens += sums.tokens
        passed = time.monotonic() - self._window_start
        now.step, now.tokens, now.loss = state.step, state.tokens, sums.losses()[0]
        now.tokens_per_s, now.waited = self._window_tokens / passed, (waited_s - self._window_waited) / passed
        self._show(sums)
        if state.step % plan.config.log_every == 0 or state.step == plan.num_steps:
            self._log(plan, epoch, self._since, norm)
            self._since = None
        if state.step % RATE_WINDOW_STEPS == 0:
            self.restart_clock(waited_s)

    def evaluated(
        self,
        summary: Summary,
        tally: Tally,
        labels: Sequence[Collection[str]],
        baselines: Mapping[str, Any] | None,
        *,
        epoch: int,
        seconds: float,
        best: bool,
    ) -> None:
        """The held-out samples were looked at."""
        step = self.now.step
        self.event(
            "eval",
            step=step,
            epoch=epoch,
            tokens=self.now.tokens,
            seconds=seconds,
            summary=summary.to_json(),
            slices={label: one.to_json() for label, one in slices(tally, labels).items()} if self._events else {},
            baselines=baselines,
        )
        length = summary.acceptance_length(summary.longest_chain)
        self.say(
            f"step {step:,}, epoch {epoch + 1}: held out, step-0 accuracy {summary.accuracy[0]}, acceptance length "
            f"{length} (pooled, chains of {summary.longest_chain}){' · best so far' if best else ''}"
        )
        if self._trackers is not None:
            values = {f"held_out/accuracy_{s}": a.value if a else None for s, a in enumerate(summary.accuracy)}
            self._trackers.add({**values, "held_out/acceptance_length": length.value if length else None}, step)

    def end(self, error: BaseException | None = None) -> None:
        """The run is complete, or ended by `error`."""
        now = self.now
        if error is None:
            now.state = "complete"
        else:
            resumable = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 1) == Stopped.exit_code
            now.state, now.error = "stopped" if resumable else "failed", str(error)
        self.event(
            "end",
            state=now.state,
            step=now.step,
            error="" if error is None else type(error).__name__,
            message=now.error,
            seconds=time.monotonic() - self.started,
        )

    def _show(self, sums: StepSums) -> None:
        if not (self._ranks.first and self._progress.due()):
            return
        now, accuracy = self.now, sums.accuracies()[0]
        left = (now.steps - now.step) * sums.tokens / max(1.0, now.tokens_per_s)
        self._progress.show(
            f"train: step {now.step:,} of {now.steps:,} · {now.tokens_per_s:,.0f} tokens/s · "
            f"{now.waited:.1%} waiting for data · loss {_number(now.loss)} · accuracy {_number(accuracy)} · "
            f"ETA {human_time(left)}"
        )

    def _log(self, plan: TrainPlan, epoch: int, sums: StepSums, norm: float) -> None:
        now, device = self.now, self._ranks.device
        rate = learning_rate(now.step - 1, plan.num_steps, plan.config)
        losses, accuracies = sums.losses(), sums.accuracies()
        self.event(
            "step",
            step=now.step,
            epoch=epoch,
            tokens=now.tokens,
            lr=rate,
            loss=losses,
            accuracy=accuracies,
            grad_norm=norm,
            tokens_per_s=now.tokens_per_s,
            gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            waited=now.waited,
        )
        if self._trackers is not None:
            values = {f"train/loss_{s}": value for s, value in enumerate(losses)}
            values |= {f"train/accuracy_{s}": value for s, value in enumerate(accuracies)}
            rest = {"train/lr": rate, "train/grad_norm": norm, "train/tokens_per_s": now.tokens_per_s}
            self._trackers.add({**values, **rest}, now.step)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
