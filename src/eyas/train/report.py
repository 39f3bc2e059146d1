"""A training run as one HTML page with curves, and as `curves.png` where matplotlib is installed.

Everything comes from the run's `events.jsonl`. Its lines have, beside the envelope of `EventLog` (`t`, `run`, `event`):

- `start`: `stage` = `"train"`, `step` (steps done before: 0, or where it resumes), `steps`, `command`, `target`,
  `fingerprint`, `data`, `shape`, `settings` (objects, shown as they are);
- `step`: `step`, `epoch`, `tokens` (so far), `lr`, `loss` `[S]`, `accuracy` `[S]` (null where no row tells),
  `grad_norm`, `tokens_per_s`, `gpu_bytes`, `waited` (share of the time);
- `eval`: `step`, `epoch`, `tokens`, `seconds`, `summary` (`Summary.to_json()`), `slices` (label → `Summary.to_json()`),
  `baselines` (`Score.to_json()`, or null);
- `checkpoint`: `step`, `path` (in the run's directory), `bytes`, `seconds`, `best` (true: the best so far);
- `end`: `state` (`complete`, `stopped` or `failed`), `step`, `error` (class), `message`, `seconds`.

`step` counts optimizer steps that are done. Each start of the process writes one `start` and, unless it was killed, one
`end`. Keys that are missing or are no numbers leave a gap; further keys and events do no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import TrainError
from eyas.log import human_bytes, human_time
from eyas.train.charts import Chart, Line, draw, figure, short, text, thin
from eyas.train.metrics import Estimate, Summary
from eyas.train.status import Event, best_of, history, number, status, summary_of

PAGE = "report.html"
CURVES = "curves.png"

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --dim: #5c5c5c; --rule: #d9d9d9; --card: #f5f5f3;
  --good: #dff0df; --bad: #fbe3d6; --light: 42%; }
@media (prefers-color-scheme: dark) { :root { --paper: #161616; --ink: #ececec; --dim: #a3a3a3; --rule: #3a3a3a;
  --card: #212121; --good: #1f3d23; --bad: #55301c; --light: 66%; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: .9rem; margin: 0; } p { margin: .4rem 0; } .dim, small { color: var(--dim); }
.problem { background: var(--bad); padding: .4rem .7rem; border-radius: 4px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.cards div { background: var(--card); border-radius: 6px; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.5rem; line-height: 1.3; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; } svg .grid { stroke: var(--rule); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .dashed { stroke-dasharray: 6 4; }
svg .band { stroke: none; opacity: .18; }
.legend { color: var(--dim); font-size: .8rem; display: flex; flex-wrap: wrap; gap: 0 .8rem; min-height: 1.3em; }
.legend i { display: inline-block; width: .9em; height: .25em; margin: 0 .35em .2em 0; border-radius: 2px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
td, th { border-bottom: 1px solid var(--rule); padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } .numbers td, .numbers th { text-align: right; white-space: nowrap; padding: .25rem .35rem; }
.numbers th { white-space: normal; vertical-align: bottom; min-width: 3.2rem; }
.numbers td:first-child, .numbers th:first-child { text-align: left; } tr.worst td { background: var(--bad); }
tr.small td { color: var(--dim); } .facts { display: grid; gap: 1.2rem 2.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
.facts td { overflow-wrap: anywhere; } .facts td:first-child { color: var(--dim); white-space: nowrap; }
pre { background: var(--card); border-radius: 6px; padding: .6rem .8rem; font: 13px/1.5 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
""".strip()


@dataclass(frozen=True, slots=True)
class Run:
    """What the events say, as it stands."""

    start: Event
    resumed_at: list[int]
    steps: list[Event]
    evals: list[tuple[Event, Summary]]
    checkpoints: list[Event]
    end: Event | None

    @property
    def ended(self) -> Event | None:
        """How the run ended, where no later start went on from there."""
        return self.end if self.end is not None and self.end.get("run") == self.start.get("run") else None

    @property
    def baselines(self) -> Event:
        """What guessing gets: told with the first evaluation."""
        told = [_dict(event, "baselines") for event in (self.start, *(event for event, _ in self.evals))]
        return next((one for one in told if one), {})

    @property
    def best(self) -> tuple[Event, Summary] | None:
        """The best evaluation of a step that was saved; where none was, of all."""
        saved = {event["step"] for event in self.checkpoints}
        evals = [one for one in self.evals if one[0]["step"] in saved] or self.evals
        at = best_of(evals)
        return None if at is None else evals[at]


def write_report(run_dir: Path, *, png: bool = True) -> list[Path]:
    """Write the page and, with `png`, the picture where matplotlib is installed; the paths of what was written.

    A run that is still going has a report, too. Raises TrainError where no training has run, or nothing can be written.
    """
    now = status(run_dir)
    run = read_run(run_dir)
    charts = charts_of(run)
    if run.ended:  # its process writes this page and still holds the lock
        now = dataclasses.replace(now, alive=False, state=str(run.ended.get("state", "")))
    notes = [*now.problems, *filter(None, [now.last_error])]
    whole = "".join(page(run, charts, headline=now.headline(), notes=notes))
    written = [_write(run_dir / PAGE, lambda path: path.write_text(whole, encoding="utf-8"))]
    if png and charts and not plots_missing():
        written.append(_write(run_dir / CURVES, lambda path: draw(charts, path)))
    return written


def plots_missing() -> str:
    """Why there are no PNG files and how to get them; empty where there are."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return f"{CURVES} was left out: it needs matplotlib (pip install 'eyas[plots]')"


def read_run(run_dir: Path) -> Run:
    """The run as its events tell it."""
    found = history(run_dir)
    starts = found.get("start", [])
    return Run(
        start=starts[-1] if starts else {},
        resumed_at=[int(number(event.get("step")) or 0) for event in starts[1:]],
        steps=found.get("step", []),
        evals=[(event, summary) for event in found.get("eval", []) if (summary := summary_of(event)) is not None],
        checkpoints=found.get("checkpoint", []),
        end=found.get("end", [None])[-1],
    )


def charts_of(run: Run) -> list[Chart]:
    """The curves that there is anything to show of."""
    steps, evals = run.steps, run.evals
    accuracy = _per_step("step", evals, lambda one: [_value(a) for a in one[1].accuracy])
    ends = [(float(evals[0][0]["step"]), float(evals[-1][0]["step"]))] if evals else []
    for i, name in enumerate(("bigram", "unigram")):
        value = number(run.baselines.get(name))
        accuracy += [
            Line(f"{name}, step 0", [(x, value) for x in (first, last)], hue=90 + 50 * i, dashed=True)
            for first, last in ends
            if value is not None
        ]
    charts = [
        Chart("Training loss", _per_step("step", steps, lambda event: _list(event, "loss")), from_zero=False),
        Chart("Held-out loss", _per_step("step", evals, lambda one: list(one[1].loss)), from_zero=False),
        Chart("Training accuracy", _per_step("step", steps, lambda event: _list(event, "accuracy"))),
        Chart("Held-out accuracy", accuracy),
        Chart("Held-out acceptance length, longest chain", _acceptance(evals), from_zero=False),
        Chart("Learning rate", _one("lr", steps)),
        Chart("Gradient norm before clipping", _one("grad_norm", steps)),
        Chart("Tokens per second", _one("tokens_per_s", steps)),
        Chart("Share of the time waiting for data", _one("waited", steps)),
        Chart("GPU memory, GB", _one("gpu_bytes", steps, scale=1e-9)),
    ]
    return [
        dataclasses.replace(chart, lines=told)
        for chart in charts
        if (told := [line for line in chart.lines if line.points])
    ]


def page(run: Run, charts: Sequence[Chart], *, headline: str, notes: Sequence[str]) -> Iterator[str]:
    """The page in pieces; `notes` are problems to show at its top."""
    title = f"Drafter for {run.start.get('target') or 'an unknown target'}"
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n"
        f'<p class="dim">{text(headline)} · as of {time.strftime("%Y-%m-%d %H:%M:%S %z")}</p>\n'
    )
    yield from (f'<p class="problem">{text(note)}</p>\n' for note in notes)
    best = run.best
    yield _cards(run, best)
    yield from _best(run, best)
    yield "<h2>Curves over optimizer steps</h2>\n"
    yield f'<div class="charts">\n{"".join(map(figure, charts))}</div>\n' if charts else "<p>Nothing yet.</p>\n"
    if why := plots_missing():
        yield f'<p class="dim">{text(why)}</p>\n'
    if best is not None:
        yield _slices(best[0], best[1])
    yield _facts(run)
    yield "</body>\n</html>\n"


def _per_step(name: str, sources: Sequence[Any], values: Callable[[Any], list[Any]]) -> list[Line]:
    """One line for each entry of `values(source)`, blue to orange."""
    told = [(float(_event(source)["step"]), values(source)) for source in sources]
    num = max((len(entries) for _, entries in told), default=0)
    lines = []
    for s in range(num):
        points = [(x, y) for x, entries in told if s < len(entries) and (y := number(entries[s])) is not None]
        lines.append(Line(f"{name} {s}", thin(points), hue=220 + 160 * s / max(1, num - 1)))
    return lines


def _one(key: str, events: Sequence[Event], *, scale: float = 1.0) -> list[Line]:
    points = [(float(event["step"]), y * scale) for event in events if (y := number(event.get(key))) is not None]
    return [Line("latest", thin(points))]


def _acceptance(evals: Sequence[tuple[Event, Summary]]) -> list[Line]:
    lines: list[Line] = []
    for name, field, hue in (
        ("pooled", "acceptance_length_pooled", 220.0),
        ("mean of the samples", "acceptance_length_sample_mean", 20.0),
    ):
        told = [
            (float(event["step"]), one)
            for event, summary in evals
            if summary.longest_chain and (one := getattr(summary, field)[summary.longest_chain - 1]) is not None
        ]
        band = [(x, one.low, one.high) for x, one in told if one.low is not None]
        lines.append(Line(name, [(x, one.value) for x, one in told], hue=hue, band=band, dashed=bool(lines)))
    return lines


def _cards(run: Run, best: tuple[Event, Summary] | None) -> str:
    cards: list[tuple[str, str]] = []
    if best is not None:
        event, summary = best
        k = summary.longest_chain
        pooled, mean = summary.acceptance_length_pooled[k - 1], summary.acceptance_length_sample_mean[k - 1]
        for name, one in (("pooled", pooled), ("mean of the samples", mean)):
            if one is not None:
                cards.append((f"{one.value:.3f}", f"acceptance length, {name}{_interval(one)}, chains of {k}"))
        if summary.accuracy[0] is not None:
            bigram = number(run.baselines.get("bigram"))
            beside = "" if bigram is None else f"; a bigram gets {bigram:.3f}"
            cards.append((f"{summary.accuracy[0].value:.3f}", f"held-out step-0 accuracy{beside}"))
        cards.append((f"{event['step']:,}", f"step of the best evaluation, of {len(run.evals)} so far"))
    last = run.steps[-1] if run.steps else {}
    if last:
        steps = number(run.start.get("steps"))
        tokens = number(last.get("tokens"))
        beside = "" if tokens is None else f"; {short(tokens)} tokens"
        cards.append((f"{last['step']:,}", (f"of {steps:,.0f} steps" if steps else "steps") + " done" + beside))
    return f'<div class="cards">{"".join(f"<div><b>{text(a)}</b>{text(b)}</div>" for a, b in cards)}</div>\n'


def _best(run: Run, best: tuple[Event, Summary] | None) -> Iterator[str]:
    yield "<h2>Best checkpoint, on held-out samples</h2>\n"
    if best is None:
        yield "<p>No evaluation yet.</p>\n"
        return
    event, summary = best
    saved = next((one for one in reversed(run.checkpoints) if one["step"] == event["step"]), None)
    where = f"saved in {saved['path']}" if saved and saved.get("path") else "saved" if saved else "not saved"
    few = "; too few to conclude from" if summary.small else ""
    yield f"<p>Step {event['step']:,}, {text(where)} · {summary.num_samples:,} samples{few}.</p>\n"
    head = ["step", "rows", "loss", "accuracy", "in vocabulary", "accuracy within", "cumulative", "conditional"]
    head += ["acceptance length, pooled", "… mean of the samples"]
    rows = [
        [
            f"{s}",
            f"{summary.supervised[s]:,}",
            _shown(summary.loss[s]),
            _shown(summary.accuracy[s]),
            _shown(summary.in_vocab[s]),
            _shown(summary.accuracy_in_vocab[s]),
            _shown(summary.cumulative[s]),
            _shown(summary.conditional[s]),
            _shown(summary.acceptance_length_pooled[s]),
            _shown(summary.acceptance_length_sample_mean[s]),
        ]
        for s in range(summary.ttt_length)
    ]
    yield _table(head, rows)
    baselines = run.baselines
    told = [
        f"{name} {value:.3f}" for name in ("bigram", "unigram") if (value := number(baselines.get(name))) is not None
    ]
    if told:
        yield f"<p>What guessing gets at step 0, by the training samples' supervised tokens: {' · '.join(told)}.</p>\n"
    yield (
        '<p class="dim">Accuracy counts a true token outside the draft vocabulary as a miss; “within” leaves those '
        "out. Cumulative: all steps so far were right. Conditional: right, given that all earlier ones were. "
        "Acceptance length: tokens per target forward for a chain that ends with this step, the bonus token included; "
        "pooled = 1 + the sum of the cumulative accuracies; in the mean each conversation weighs the same. In "
        "brackets: 95 % bootstrap intervals over samples.</p>\n"
    )


def _slices(event: Event, whole: Summary) -> str:
    summaries: dict[str, Summary] = {}
    for label, body in _dict(event, "slices").items():
        if (summary := summary_of({"summary": body})) is not None:
            summaries[label] = summary
    if not summaries:
        return ""
    k = whole.longest_chain

    def length(summary: Summary) -> Estimate | None:
        return summary.acceptance_length(k) if 0 < k <= summary.ttt_length else None

    kinds: dict[str, list[tuple[float, str]]] = {}
    for label, summary in summaries.items():
        one = length(summary)
        if one is not None and not summary.small:
            kinds.setdefault(label.partition(":")[0], []).append((one.value, label))
    worst = {min(found)[1] for found in kinds.values() if len(found) > 1}
    rows, classes = [], []
    for label, summary in [("all samples", whole), *summaries.items()]:
        first = summary.accuracy[0] if summary.accuracy else None
        mark = "lowest of its kind" if label in worst else "too few to conclude from" if summary.small else ""
        mean = summary.acceptance_length_sample_mean[k - 1] if 0 < k <= summary.ttt_length else None
        rows.append([label, f"{summary.num_samples:,}", _shown(first), _shown(length(summary)), _shown(mean), mark])
        classes.append("worst" if label in worst else "small" if summary.small else "")
    head = [
        "slice",
        "samples",
        "step-0 accuracy",
        f"acceptance length, pooled, chains of {k}",
        "… mean of the samples",
        "",
    ]
    return f"<h2>Slices of the held-out samples</h2>\n{_table(head, rows, classes)}"


def _facts(run: Run) -> str:
    about: dict[str, Any] = {"target": run.start.get("target"), "states": run.start.get("fingerprint")}
    if run.resumed_at:
        about["resumed at steps"] = ", ".join(f"{step:,}" for step in run.resumed_at)
    if run.checkpoints:
        last = run.checkpoints[-1]
        size = number(last.get("bytes"))
        about["latest checkpoint"] = f"step {last['step']:,}" + (f", {human_bytes(size)}" if size else "")
    seconds = number(run.end.get("seconds")) if run.end else None
    if seconds is not None:
        about["latest process ran for"] = human_time(seconds)
    groups = {"Run": about} | {name.capitalize(): _dict(run.start, name) for name in ("data", "shape", "settings")}
    tables = "".join(
        f"<div><h3>{name}</h3><table>{''.join(_fact(key, value) for key, value in _flat(group))}</table></div>"
        for name, group in groups.items()
        if group
    )
    command = run.start.get("command")
    told = f"<pre>{text(command)}</pre>\n" if command else ""
    return f'<h2>What was trained</h2>\n{told}<div class="facts">{tables}</div>\n'


def _fact(key: str, value: object) -> str:
    shown = f"{value:,}" if type(value) is int else "–" if value is None else str(value)
    return f"<tr><td>{text(key)}</td><td>{text(shown)}</td></tr>"


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested objects by dotted path."""
    for key, entry in value.items():
        if isinstance(entry, dict):
            yield from _flat(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    body = "".join(
        f'<tr class="{classes[i] if classes else ""}">{"".join(f"<td>{text(cell)}</td>" for cell in row)}</tr>\n'
        for i, row in enumerate(rows)
    )
    names = "".join(f"<th>{text(name)}</th>" for name in head)
    return f'<div class="wide"><table class="numbers"><tr>{names}</tr>\n{body}</table></div>\n'


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    """Whole or not at all, and as private as the run's events."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=0o600)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise TrainError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


def _interval(one: Estimate) -> str:
    return "" if one.low is None else f" [{one.low:.3f}, {one.high:.3f}]"


def _shown(value: float | Estimate | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, Estimate) else f"{value:.3f}"


def _value(one: Estimate | None) -> float | None:
    return None if one is None else one.value


def _event(source: Any) -> Event:
    found: Event = source[0] if isinstance(source, tuple) else source
    return found


def _list(event: Event, key: str) -> list[Any]:
    value = event.get(key)
    return value if isinstance(value, list) else [value]


def _dict(event: Event, key: str) -> dict[str, Any]:
    value = event.get(key)
    return value if isinstance(value, dict) else {}
