"""Where a training run stands: answered from its events and its heartbeat, by any other shell."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import TrainError
from eyas.log import human_bytes, human_time
from eyas.observe import heartbeat
from eyas.train.metrics import Estimate, Summary

EVENTS = "events.jsonl"
HEARTBEAT = "heartbeat.json"
STAGE = "train"
UNREADABLE = "heartbeat.json cannot be read: whether a training runs here is not known"
MUCH_WAITING = 0.1
"""Share of the time waiting for data from which on it is worth a word."""
WORSE_EVALS = 3
"""Evaluations without a new best one from which on it is worth a word."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation on the held-out samples."""

    step: int
    age_s: float | None
    chain: int
    """Drafted tokens of the chains that the acceptance length is about."""
    acceptance_length: Estimate | None
    """Pooled."""
    accuracy: float | None
    """Of step 0."""

    def __str__(self) -> str:
        length, accuracy = self.acceptance_length or "unknown", "–" if self.accuracy is None else f"{self.accuracy:.3f}"
        return f"acceptance length {length} pooled, chains of {self.chain} · step-0 accuracy {accuracy}"


@dataclass(frozen=True, slots=True)
class Saved:
    """The latest checkpoint."""

    step: int
    path: str
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """Where a training run stands."""

    root: str
    target: str
    fingerprint: str
    alive: bool | None
    """Whether the training process lives; None when it runs on another host, or never ran."""
    state: str
    """What it is doing now, or how it ended."""
    process: str
    """`pid 123 on host`; empty when no training has run here."""
    heartbeat_age_s: float | None
    step: int
    steps: int
    """Planned; 0 where it is not known."""
    tokens: int
    tokens_per_s: float
    waited: float | None
    """Share of the time that it waited for data."""
    loss: float | None
    eta_s: float | None
    last_eval: Evaluation | None
    best_eval: Evaluation | None
    evals_since_best: int
    last_checkpoint: Saved | None
    free_bytes: int
    problems: tuple[str, ...]
    """What keeps the run from going on, or from being trusted."""
    hints: tuple[str, ...]
    """What would make it better."""
    last_error: str
    """The message with which the latest run ended, when it did not complete."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, free of NaN."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        share = f" of {self.steps:,} · {self.step / self.steps:.1%}" if self.steps else ""
        lines = [f"{self.root}: {self.headline()}"]
        if self.target or self.fingerprint:
            lines.append(f"  target   {self.target or 'unknown'} · states {self.fingerprint or 'unknown'}")
        lines.append(f"  steps    {self.step:,}{share} · {self.tokens:,} tokens")
        if self.alive:
            eta = human_time(self.eta_s) if self.eta_s is not None else "?"
            waited = f" · {self.waited:.1%} waiting for data" if self.waited is not None else ""
            loss = f" · loss {self.loss:.4g}" if self.loss is not None else ""
            lines.append(f"  speed    {self.tokens_per_s:,.0f} tokens/s{waited} · ETA {eta}{loss}")
        if self.last_eval is not None:
            lines.append(f"  held out {self.last_eval} · at step {self.last_eval.step:,}{_ago(self.last_eval.age_s)}")
        if self.best_eval is not None and self.evals_since_best:
            since = f"{self.evals_since_best} evaluation{'s' * (self.evals_since_best > 1)} ago"
            lines.append(f"  best     {self.best_eval} · at step {self.best_eval.step:,}, {since}")
        saved = "no checkpoint yet"
        if self.last_checkpoint is not None:
            one = self.last_checkpoint
            saved = f"checkpoint of step {one.step:,}{_ago(one.age_s)}" + (f": {one.path}" if one.path else "")
        lines.append(f"  saved    {saved} · {human_bytes(self.free_bytes)} disk left")
        if self.heartbeat_age_s is not None:
            lines.append(f"  age      last heartbeat {human_time(self.heartbeat_age_s)} ago")
        lines += [f"  hint     {hint}" for hint in self.hints]
        lines += [f"  problem  {problem}" for problem in self.problems]
        if self.last_error:
            lines.append(f"  error    {self.last_error}")
        return lines

    def headline(self) -> str:
        """Alive or not, and what it does or how it ended."""
        if not self.process:
            return self.state or "no training has run here"
        if self.alive is not False:
            return heartbeat.running(self.state, self.process, alive=self.alive, age_s=self.heartbeat_age_s)
        if self.state == "complete":
            return "complete"
        return heartbeat.ended(self.state, self.process, command="train")


def is_run(root: Path) -> bool:
    """Whether `eyas train` writes, or wrote, into this directory."""
    beat = heartbeat.read(root / HEARTBEAT)
    if beat is not None and beat.get("stage") == STAGE:
        return True
    first = next(read_events(root), {})
    return first["event"] == "start" and first.get("stage") == STAGE if first else False


def status(root: Path) -> Status:
    """Where the run in `root` stands now. Raises TrainError where there is none."""
    if not is_run(root):
        raise TrainError(f"{root}: no training has run here")
    beat: Event = heartbeat.read(root / HEARTBEAT) or {}
    alive = heartbeat.is_alive(beat) if beat else None
    now = time.time()
    found = history(root, skip=("step",))
    start = found.get("start", [{}])[-1]
    evals = [(event, summary) for event in found.get("eval", []) if (summary := summary_of(event)) is not None]
    best = best_of(evals)
    best_eval = None if best is None else _evaluation(*evals[best], now=now)
    evals_since_best = 0 if best is None else len(evals) - 1 - best
    saved = found.get("checkpoint", [])
    problems = [] if beat or not (root / HEARTBEAT).exists() else [UNREADABLE]
    if saved and (path := str(saved[-1].get("path", ""))) and not (root / path).exists():
        problems.append(f"{root / path}: the latest checkpoint is not there")
    waited = number(beat.get("waited"))
    hints = []
    if alive and waited is not None and waited > MUCH_WAITING:
        hints.append(f"{waited:.0%} of the time goes into waiting for data: a faster disk or more prefetch would help")
    if evals_since_best >= WORSE_EVALS and best_eval is not None:
        hints.append(f"no better than at step {best_eval.step:,} for {evals_since_best} evaluations")
    step, steps = _whole(beat.get("step")), _whole(beat.get("steps", start.get("steps")))
    tokens, tokens_per_s = _whole(beat.get("tokens")), number(beat.get("tokens_per_s")) or 0.0
    known_speed = alive and step and tokens_per_s > 0
    return Status(
        root=str(root),
        target=str(start.get("target", "")),
        fingerprint=str(start.get("fingerprint", "")),
        alive=alive,
        state=str(beat.get("state", "")),
        process=f"pid {beat['pid']} on {beat['host']}" if beat else "",
        heartbeat_age_s=_age(beat, "time", now),
        step=step,
        steps=steps,
        tokens=tokens,
        tokens_per_s=tokens_per_s if alive else 0.0,
        waited=waited,
        loss=number(beat.get("loss")),
        eta_s=round(max(0, steps - step) * (tokens / step) / tokens_per_s, 1) if known_speed and steps else None,
        last_eval=_evaluation(*evals[-1], now=now) if evals else None,
        best_eval=best_eval,
        evals_since_best=evals_since_best,
        last_checkpoint=Saved(_whole(saved[-1]["step"]), str(saved[-1].get("path", "")), _age(saved[-1], "t", now))
        if saved
        else _untold(root),
        free_bytes=shutil.disk_usage(root).free,
        problems=tuple(problems),
        hints=tuple(hints),
        last_error="" if alive else str(beat.get("error") or _last_message(found)),
    )


def read_events(root: Path, *, skip: Collection[str] = ()) -> Iterator[Event]:
    """The events of a run in the order of the file, but those named in `skip`; torn lines are passed over."""
    skipped = tuple(json.dumps({"event": name})[1:-1].encode() for name in skip)
    try:
        with (root / EVENTS).open("rb") as log:
            for line in log:
                if any(mark in line for mark in skipped):
                    continue
                try:
                    event = json.loads(line, parse_constant=lambda _: None)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:
        raise TrainError(f"{root / EVENTS}: {error.strerror or error} while being read") from None


def history(root: Path, *, skip: Collection[str] = ()) -> dict[str, list[Event]]:
    """The events by name, as the run stands: steps ascend, and what a resume has undone is left out.

    A start at step `n` undoes every event of a later step; an event takes the place of those of its own name at the
    same or a later step. Events that must have a step and have none are left out.
    """
    found: dict[str, list[Event]] = {}
    for event in read_events(root, skip=skip):
        name, step = event["event"], event.get("step")
        if type(step) is not int:
            if name in ("step", "eval", "checkpoint"):
                continue
            step = None
        if name == "start":
            found.pop("end", None)
            for other, events in found.items():
                if step is not None and other != "start":
                    _drop(events, step + 1)
        elif step is not None:
            _drop(found.get(name, []), step)
        found.setdefault(name, []).append(event)
    return found


def summary_of(event: Event) -> Summary | None:
    """What an evaluation found; None where the event does not tell it."""
    try:
        return Summary.from_json(event["summary"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def best_of(evals: list[tuple[Event, Summary]]) -> int | None:
    """Which evaluation has the highest score, the earliest among equals; None where no one has any."""
    scores = [(summary.score, -i) for i, (_, summary) in enumerate(evals) if summary.score is not None]
    return -max(scores)[1] if scores else None


def number(value: object) -> float | None:
    """A finite number, or None; of a list, its first entry."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _untold(root: Path) -> Saved | None:
    """The latest checkpoint that is there, though no event tells of it."""
    link = root / "checkpoints" / "latest"
    if not link.is_dir():
        return None
    name = link.resolve().name
    return Saved(int(name), f"checkpoints/{name}", None) if name.isdecimal() else None


def _drop(events: list[Event], step: int) -> None:
    while events and isinstance(events[-1].get("step"), int) and events[-1]["step"] >= step:
        events.pop()


def _evaluation(event: Event, summary: Summary, *, now: float) -> Evaluation:
    chain = summary.longest_chain
    accuracy = summary.accuracy[0] if summary.accuracy else None
    return Evaluation(
        step=event["step"],
        age_s=_age(event, "t", now),
        chain=chain,
        acceptance_length=summary.acceptance_length(chain) if chain else None,
        accuracy=None if accuracy is None else accuracy.value,
    )


def _last_message(found: dict[str, list[Event]]) -> str:
    ends = found.get("end", [])
    return str(ends[-1].get("message", "")) if ends and ends[-1].get("state") != "complete" else ""


def _age(event: Event, key: str, now: float) -> float | None:
    at = number(event.get(key))
    return None if at is None else round(max(0.0, now - at), 1)


def _ago(age_s: float | None) -> str:
    return "" if age_s is None else f", {human_time(age_s)} ago"


def _whole(value: object) -> int:
    return int(number(value) or 0)
