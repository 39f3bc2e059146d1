"""The report and the status of a training run, from events as the loop writes them."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.errors import TrainError
from eyas.observe.events import EventLog
from eyas.observe.heartbeat import Heartbeat
from eyas.train import charts, report
from eyas.train.baseline import Score
from eyas.train.charts import MAX_POINTS, svg
from eyas.train.metrics import Tally, labels_of, slices, summarize
from eyas.train.report import CURVES, PAGE, plots_missing, read_run, write_report
from eyas.train.status import history, is_run, status

STEPS, TTT_LENGTH, SAMPLES = 400, 4, 80
HOSTILE = '<script>alert("1")</script> & \u202e\x1b[31m'


def tally_at(step: int, seed: int = 0) -> Tally:
    """Held-out samples of a drafter that gets better with the steps."""
    rng = np.random.default_rng(seed)
    rows, skill = 4000, 0.7 * (1 - np.exp(-(step + 30) / 150))
    tally = Tally(SAMPLES, TTT_LENGTH)
    samples = rng.integers(0, SAMPLES, rows)
    odds = skill * 0.93 ** np.arange(TTT_LENGTH)[:, None] * np.where(samples < 25, 0.8, 1.0)
    tally.add_rows(
        samples,
        supervised=np.arange(TTT_LENGTH)[:, None] < rng.integers(1, TTT_LENGTH + 1, rows),
        in_vocab=rng.random((TTT_LENGTH, rows)) < 0.97,
        correct=rng.random((TTT_LENGTH, rows)) < odds,
        loss=rng.random((TTT_LENGTH, rows)) + 4 - 3 * odds,
    )
    return tally


def start(log: EventLog, *, step: int = 0, target: str = "HuggingFaceTB/SmolLM2-135M-Instruct") -> None:
    log.add(
        "start",
        stage="train",
        step=step,
        steps=STEPS,
        command="eyas train run.toml train.lr=1e-4",
        target=target,
        fingerprint="9f3c1b70aa",
        data={
            "data_set": "states",
            "train": {"samples": 10_234, "tokens": 5_120_000},
            "held_out": {"samples": SAMPLES},
        },
        shape={"hidden_size": 576, "layers": 1, "draft_vocab_size": 32_000, "aux_layers": [2, 15, 27]},
        settings={"lr": 1e-4, "ttt_length": TTT_LENGTH, "mask_rule": "both_written", "clip": 0.5},
        baselines=Score(10_000, 412, 1933).to_json(),
    )


def step(log: EventLog, n: int) -> None:
    rng = np.random.default_rng(n)
    skill = 1 - np.exp(-(n + 30) / 150)
    log.add(
        "step",
        step=n,
        epoch=n / 200,
        tokens=n * 16_384,
        lr=1e-4 * min(1, n / 40),
        loss=[float(6 - 3 * skill + 0.4 * s + 0.1 * rng.normal()) for s in range(TTT_LENGTH)],
        accuracy=[*(float(0.7 * skill * 0.93**s) for s in range(TTT_LENGTH - 1)), None],
        grad_norm=float(0.4 + rng.exponential(0.1)),
        tokens_per_s=28_400 + 900 * float(rng.normal()),
        gpu_bytes=19.3e9,
        waited=0.02,
    )


def evaluate(log: EventLog, n: int, *, name: str = "code") -> None:
    tally = tally_at(n)
    labels = [
        labels_of("chat" if i < 50 else "web", [name] * (i < 10), "da" if i < 25 else "en") for i in range(SAMPLES)
    ]
    found = slices(tally, labels, num_resamples=50)
    log.add(
        "eval",
        step=n,
        epoch=n / 200,
        tokens=n * 16_384,
        seconds=3.1,
        summary=summarize(tally, num_resamples=50).to_json(),
        slices={label: one.to_json() for label, one in found.items()},
    )


def a_run(root: Path, *, until: int = STEPS, name: str = "code", target: str = "SmolLM2") -> EventLog:
    root.mkdir(exist_ok=True)
    log = EventLog(root / "events.jsonl", run_id="one")
    start(log, target=target)
    evaluate(log, 0)
    for n in range(1, until + 1):
        step(log, n)
        if n % 50 == 0:
            evaluate(log, n, name=name)
            (root / "checkpoints" / f"step-{n}").mkdir(parents=True, exist_ok=True)
            log.add("checkpoint", step=n, path=f"checkpoints/step-{n}", bytes=512_000_000, seconds=1.2, best=True)
    return log


def beat(root: Path, **contents: Any) -> None:
    body = {"stage": "train", "state": "training", "step": 100, "steps": STEPS, "tokens": 1_638_400}
    Heartbeat(root / "heartbeat.json", lambda: body | contents).beat()


def beat_of_a_dead_process(root: Path, **contents: Any) -> None:
    beat(root, **contents)
    path = root / "heartbeat.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid_started": 1}))


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second: only the tests of the picture have one."""
    monkeypatch.setattr(report, "plots_missing", lambda: "no picture here")


class Tags(HTMLParser):
    """Refuses a page whose tags do not close, and keeps its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        for name, _ in attrs:
            assert name not in ("src", "href") and not name.startswith("on")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def read_page(path: Path) -> Tags:
    tags = Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    assert not tags.open
    return tags


def test_a_page_shows_the_run(tmp_path: Path) -> None:
    a_run(tmp_path).add("end", state="complete", step=STEPS, seconds=321.0)
    written = write_report(tmp_path)
    assert written[0] == tmp_path / PAGE and stat.S_IMODE(written[0].stat().st_mode) == 0o600
    tags = read_page(written[0])
    assert "script" not in tags.seen
    for words in (
        "Drafter for SmolLM2",
        "9f3c1b70aa",
        "eyas train run.toml",
        "train.samples10,234",
        "Training loss",
        "Held-out acceptance length",
        "Gradient norm",
        "bigram 0.193 · unigram 0.041",
        "saved in checkpoints/step-400",
        "95 %",
    ):
        assert words in tags.text, words
    best = read_run(tmp_path).best
    assert best is not None and best[0]["step"] == STEPS
    for one in best[1].acceptance_length_pooled:
        assert str(one) in tags.text
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_lowest_slice_of_a_kind_is_marked_and_a_small_one_is_not(tmp_path: Path) -> None:
    a_run(tmp_path, until=50)
    page = write_report(tmp_path)[0].read_text()
    worst = re.findall(r'<tr class="worst"><td>(.*?)</td>', page)
    assert worst == ["source:chat"]  # 25 samples in Danish are fewer than a slice needs
    assert re.findall(r'<tr class="small"><td>(.*?)</td>', page) == ["language:da", "tag:code"]


def test_whatever_the_events_say_is_text(tmp_path: Path) -> None:
    log = a_run(tmp_path, until=50, name=HOSTILE, target=HOSTILE)
    log.add("end", state="failed", step=50, message=HOSTILE)
    tags = read_page(write_report(tmp_path)[0])
    assert "script" not in tags.seen and '<script>alert("1")</script>' in tags.text
    assert "\u202e" not in tags.text and "\x1b" not in tags.text


def test_a_run_that_has_just_begun_and_a_torn_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", run_id="one")
    start(log)
    assert "No evaluation yet" in read_page(write_report(tmp_path)[0]).text
    step(log, 1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 2, "lo')
    assert "step 0" in read_page(write_report(tmp_path)[0]).text
    step(EventLog(tmp_path / "events.jsonl", run_id="two"), 2)
    assert [event["step"] for event in read_run(tmp_path).steps] == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"event": "step"}',
        '{"event": "step", "step": 3}',
        '{"event": "step", "step": 3, "loss": [NaN, Infinity, "x", null, 1e999], "lr": "fast", "waited": true}',
        '{"event": "step", "step": 3, "loss": 2.5}',
        '{"event": "eval", "step": 3, "summary": null}',
        '{"event": "eval", "step": 3, "summary": {"num_samples": 3}, "slices": 7}',
        '{"event": "checkpoint", "step": 3}',
        '{"event": "start", "stage": "train", "data": 3, "baselines": [1]}',
        '{"event": "end"}',
        "\x00\x00",
    ],
)
def test_odd_lines_do_no_harm(tmp_path: Path, line: str) -> None:
    a_run(tmp_path, until=2)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    page = read_page(write_report(tmp_path)[0])
    assert "nan" not in page.text.lower().split()
    json.dumps(status(tmp_path).as_dict(), allow_nan=False)
    status(tmp_path).lines()


def test_what_a_resume_has_undone_is_left_out(tmp_path: Path) -> None:
    a_run(tmp_path, until=120)
    log = EventLog(tmp_path / "events.jsonl", run_id="two")
    start(log, step=50)
    run = read_run(tmp_path)
    assert [event["step"] for event in run.steps] == list(range(1, 51))
    assert [event["step"] for event, _ in run.evals] == [0, 50]
    assert [event["step"] for event in run.checkpoints] == [50]
    for n in (51, 52):
        step(log, n)
    start(log, step=51)
    step(log, 52)
    evaluate(log, 52)
    evaluate(log, 52)
    run = read_run(tmp_path)
    assert [event["step"] for event in run.steps] == list(range(1, 53))
    assert [event["step"] for event, _ in run.evals] == [0, 50, 52]
    assert run.resumed_at == [50, 51]
    assert "resumed at steps50, 51" in read_page(write_report(tmp_path)[0]).text


def test_the_end_of_an_earlier_process_is_no_end(tmp_path: Path) -> None:
    log = a_run(tmp_path, until=50)
    log.add("end", state="stopped", step=50, message="stopped on request")
    assert status(tmp_path).last_error == "stopped on request"
    start(log, step=50)
    assert "end" not in history(tmp_path) and not status(tmp_path).last_error


def test_long_runs_have_short_curves(tmp_path: Path) -> None:
    chart = charts.Chart("x", report._one("lr", [{"step": n, "lr": n % 2} for n in range(100_000)]))
    assert len(chart.lines[0].points) <= MAX_POINTS
    assert len(svg(chart)) < 10_000


@pytest.mark.parametrize(
    "values", [[0.0], [0.0, 0.0], [5.0, 5.0], [-3.0, -3.0], [1e-12, 2e-12], [1e300, -1e300], [7.0]]
)
def test_any_scale_can_be_drawn(values: list[float]) -> None:
    for from_zero in (True, False):
        chart = charts.Chart(
            "x", [charts.Line("y", [(float(i), y) for i, y in enumerate(values)])], from_zero=from_zero
        )
        picture = svg(chart)
        assert "nan" not in picture and "inf" not in picture
        assert 2 <= picture.count('class="grid"') <= 12
        numbers = [float(n) for pair in re.findall(r'points="([^"]*)"', picture) for n in re.split("[ ,]", pair)]
        assert all(0 <= n <= 480 for n in numbers)


def test_the_picture_by_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    monkeypatch.setattr(report, "plots_missing", plots_missing)
    a_run(tmp_path, until=100)
    written = write_report(tmp_path)
    assert written == [tmp_path / PAGE, tmp_path / CURVES]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert "matplotlib" not in written[0].read_text()


def test_without_matplotlib_the_page_says_how_to_get_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "plots_missing", plots_missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    a_run(tmp_path, until=2)
    assert write_report(tmp_path) == [tmp_path / PAGE]
    assert "pip install 'eyas[plots]'" in read_page(tmp_path / PAGE).text


def test_matplotlib_and_torch_are_not_imported_for_a_status() -> None:
    code = (
        "import sys, eyas.train.report, eyas.train.status\n"
        "sys.exit(bool({'torch', 'matplotlib', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_status_of_a_living_run(tmp_path: Path) -> None:
    a_run(tmp_path, until=100)
    beat(tmp_path, tokens_per_s=16_384.0, waited=0.25, loss=3.2, error=None)
    assert is_run(tmp_path)
    found = status(tmp_path)
    assert found.alive and found.step == 100 and found.steps == STEPS and found.eta_s == 300.0
    assert found.last_eval is not None and found.last_eval.step == 100 and found.last_eval.chain == TTT_LENGTH
    assert found.last_checkpoint is not None and found.last_checkpoint.path == "checkpoints/step-100"
    assert found.evals_since_best == 0 and not found.problems
    text = "\n".join(found.lines())
    assert "running as pid" in text and "100 of 400 · 25.0%" in text and "ETA 5m00s" in text and "loss 3.2" in text
    assert "hint     25% of the time" in text
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["last_eval"]["acceptance_length"]["low"] > 1


def test_status_of_a_run_that_was_killed_and_of_one_that_failed(tmp_path: Path) -> None:
    a_run(tmp_path, until=50)
    beat_of_a_dead_process(tmp_path)
    found = status(tmp_path)
    assert found.alive is False and found.eta_s is None
    assert found.headline().startswith("dead: pid") and "goes on from here" in found.headline()
    beat_of_a_dead_process(tmp_path, state="failed", error="loss is nan at step 51")
    assert status(tmp_path).headline() == "failed; the error says what to do"
    assert "  error    loss is nan at step 51" in status(tmp_path).lines()
    beat_of_a_dead_process(tmp_path, state="complete")
    assert status(tmp_path).headline() == "complete"


def test_status_tells_what_is_wrong(tmp_path: Path) -> None:
    log = a_run(tmp_path, until=50)
    log.add("checkpoint", step=60, path="checkpoints/step-60")
    for n in (1, 2, 3):
        worse = summarize(tally_at(n), num_resamples=10).to_json()
        log.add("eval", step=50 + n, summary=worse, slices={})
    (tmp_path / "heartbeat.json").write_text("{")
    found = status(tmp_path)
    assert [re.sub(r".*/", "", problem) for problem in found.problems] == [
        "heartbeat.json cannot be read: whether a training runs here is not known",
        "step-60: the latest checkpoint is not there",
    ]
    assert found.hints == ("no better than at step 50 for 3 evaluations",)
    assert any(line.startswith("  best     acceptance length") for line in found.lines())


def test_a_checkpoint_of_which_no_event_tells_is_told(tmp_path: Path) -> None:
    a_run(tmp_path, until=50)
    (tmp_path / "checkpoints/00000040").mkdir(parents=True, exist_ok=True)
    (tmp_path / "checkpoints/latest").symlink_to("00000040")
    first = (tmp_path / "events.jsonl").read_text().splitlines()[0]
    (tmp_path / "events.jsonl").write_text(first + "\nrubbish\n")
    assert any("checkpoint of step 40: checkpoints/00000040" in line for line in status(tmp_path).lines())


def test_other_directories_are_no_runs(tmp_path: Path) -> None:
    assert not is_run(tmp_path) and not is_run(tmp_path / "nowhere")
    EventLog(tmp_path / "events.jsonl", run_id="a").add("start", engine="fake")
    Heartbeat(tmp_path / "heartbeat.json", lambda: {"state": "capturing"}).beat()
    assert not is_run(tmp_path)
    for function in (status, write_report):
        with pytest.raises(TrainError, match="no training has run here"):
            function(tmp_path)


def test_the_status_of_a_long_run_takes_no_time(tmp_path: Path) -> None:
    log = a_run(tmp_path, until=50)
    line = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)[-4]
    assert b'"event": "step"' in line
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line * 100_000)
    evaluate(log, 60)
    begun = time.process_time()
    found = status(tmp_path)
    assert time.process_time() - begun < 1
    assert found.last_eval is not None and dataclasses.asdict(found)["last_eval"]["step"] == 60
