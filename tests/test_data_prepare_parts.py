"""`prepare` with several processes, stopped and gone on with, and with nothing left to do: always the same bytes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.config import DataConfig, TargetConfig
from eyas.data import parts, workers
from eyas.data.parts import Chunk, Example, Facts, PartStore, chunks_of, key_of, read_part
from eyas.data.prepare import prepare
from eyas.data.prepare_receipt import PrepareReceipt
from eyas.data.report import report_path
from eyas.data.sources import Where
from eyas.data.table import SampleTable
from eyas.errors import DataError
from eyas.log import Progress
from fixtures.data import small


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def rows(num_rows: int) -> list[Any]:
    """Chats of several turns, some equal, some of no use."""
    made: list[Any] = []
    for i in range(num_rows):
        if i % 11 == 3:
            made.append({"messages": [], "id": str(i)})
        elif i % 7 == 5:
            made.append(chat("again", "the same", tags=[str(i)]))
        else:
            made.append(chat(f"question {i}", f"answer {i} " * (i % 5 + 1), source=f"s{i % 3}"))
    return made


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.target(tmp_path_factory.mktemp("target"), "think")


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(
    source: Path, samples: Path, target: Path, num_workers: int | None = 1, **more: Any
) -> tuple[PrepareReceipt, bytes]:
    data = DataConfig(sources=(source,), samples=samples, workers=num_workers, **more)
    receipt = prepare(data, TargetConfig(path=target), Progress(stream=io.StringIO()))
    return receipt, samples.read_bytes()


def test_the_table_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_ROWS", 7)
    source = write(tmp_path / "a.jsonl", rows(100))
    one, bytes_of_one = run(source, tmp_path / "one.parquet", target, 1)
    three, bytes_of_three = run(source, tmp_path / "three.parquet", target, 3)
    assert (one.num_workers, three.num_workers) == (1, 3)
    assert bytes_of_one == bytes_of_three
    assert one.table == three.table
    assert one.examples == three.examples
    assert one.report == three.report
    assert not list(tmp_path.glob(".*")), "parts are removed when the table is complete"
    assert one.table.num_input + one.table.num_extra == one.table.num_kept + sum(one.table.dropped.values())


def test_errors_are_those_of_one_process_and_what_is_done_stays_for_the_next_run(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_ROWS", 5)
    source = write(tmp_path / "a.jsonl", rows(60))
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join([*lines[:32], '{"messages": [\n', *lines[32:40], "\n", "{\n", *lines[40:]]))
    samples = tmp_path / "s.parquet"
    for num_workers in (2, 1):
        with pytest.raises(DataError, match=r"a\.jsonl:33: broken JSON"):
            run(source, samples, target, num_workers)
        if num_workers == 2:
            num_parts = len(list(PartStore(samples).directory.glob("*.part")))
            assert num_parts >= 6, "the chunks before the damage are done"
    source.write_text("".join(lines))
    receipt, found = run(source, samples, target, 2)
    assert receipt.num_parts_reused >= 6
    assert found == run(source, tmp_path / "fresh.parquet", target, 1)[1]


SCRIPT = """
import sys
from pathlib import Path
from eyas.config import DataConfig, TargetConfig
from eyas.data import parts
from eyas.data.prepare import prepare
from eyas.log import Progress
parts.CHUNK_ROWS = 10
source, samples, target = map(Path, sys.argv[1:])
try:
    prepare(DataConfig(sources=(source,), samples=samples, workers=2), TargetConfig(path=target), Progress())
except KeyboardInterrupt:
    sys.exit(3)
"""


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_no_process_and_is_gone_on_with(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    source = write(tmp_path / "a.jsonl", rows(3_000))
    samples = tmp_path / "s.parquet"
    store = PartStore(samples)
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, source, samples, target], start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while len(list(store.directory.glob("*.part"))) < 5:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        processes = children_of(child.pid)
        assert len(processes) == 2
        # Ctrl-C reaches every process of the terminal's group.
        os.killpg(child.pid, sent) if sent == signal.SIGINT else child.kill()
        assert child.wait(60) == (3 if sent == signal.SIGINT else -signal.SIGKILL)
        while any(map(is_running, processes)):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.05)
    finally:
        child.kill()
    done = len(list(store.directory.glob("*.part")))
    assert 5 <= done < 300 and not samples.exists()
    # A part that a crash has damaged is made again.
    victim = sorted(store.directory.glob("*.part"))[2]
    victim.write_bytes(victim.read_bytes()[:-3])
    monkeypatch.setattr(parts, "CHUNK_ROWS", 10)
    receipt, found = run(source, samples, target, 1)
    assert receipt.num_parts_reused == done - 1
    assert not store.directory.exists()
    fresh, expected = run(source, tmp_path / "fresh.parquet", target, 1)
    assert found == expected
    assert fresh.num_parts_reused == 0


def test_a_process_that_dies_is_an_error_and_no_hang(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_ROWS", 5)
    source = write(tmp_path / "a.jsonl", rows(60))
    start = workers.Workers.__init__

    def start_and_kill(self: workers.Workers, *args: Any) -> None:
        start(self, *args)
        os.kill(self.pids[0], signal.SIGKILL)

    monkeypatch.setattr(workers.Workers, "__init__", start_and_kill)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"a\.jsonl:\d+: the process .* was killed by SIGKILL; out of memory\?"):
        run(source, tmp_path / "s.parquet", target, 2)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("long", [False, True], ids=["asked", "being asked"])
def test_a_process_that_is_silent_is_ended_and_the_rows_are_named(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setattr(workers, "SILENT_S", 1.0)
    start = workers.Workers.__init__

    def start_and_stop(self: workers.Workers, *args: Any) -> None:
        start(self, *args)
        os.kill(self.pids[0], signal.SIGSTOP)

    monkeypatch.setattr(workers.Workers, "__init__", start_and_stop)
    text = "a text that no pipe takes whole " * 5000 if long else "hello"
    source = write(tmp_path / "a.jsonl", [{"text": text} for _ in range(4)])
    with pytest.raises(DataError, match=r"a\.jsonl:1: the process .* said nothing for 1s and was ended; look at the"):
        run(source, tmp_path / "s.parquet", target, 2)


def test_a_worker_says_which_line_it_has_reached(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BATCH_ROWS", 3)
    lines = [json.dumps(row).encode() for row in rows(8)]
    reached: list[int] = []
    maker = parts.Maker(DataConfig(), TargetConfig(path=target))
    maker.part(Chunk(tmp_path / "a.jsonl", list(range(11, 19)), lines), reached.append)
    assert reached[0] >= 11 and len(reached) > 1 and reached == sorted(set(reached))


ORPHAN = """
import os, signal, sys
from pathlib import Path
from eyas.config import DataConfig, TargetConfig
from eyas.data.parts import Chunk
from eyas.data.workers import Workers
data = DataConfig(samples=Path(sys.argv[2]))
workers = Workers(1, data, TargetConfig(path=Path(sys.argv[1])))
workers.submit(Chunk(Path("a"), [1], [b'{"text": "hello"}']), "0" * 32).result()
(pid,) = workers.pids
print(pid, flush=True)
os.kill(pid, signal.SIGSTOP)  # at work, so to say: it does not look at the end of its pipe
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_die_with_who_started_them_also_at_work(tmp_path: Path, target: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(target), str(tmp_path / "s.parquet")]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = is_running(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_two_who_write_one_part_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = Path.open

    def spy(self: Path, *args: Any, **more: Any) -> Any:
        opened.append(self.name)
        return real(self, *args, **more)

    monkeypatch.setattr(Path, "open", spy)
    PartStore(tmp_path / "s.parquet").put("a" * 32, b"x")
    assert opened == [f".{'a' * 32}.part.{os.getpid()}.tmp"] and parts.PART_NAME.fullmatch(opened[0])


def test_the_same_lines_and_settings_are_nothing_to_do(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "a.jsonl", rows(40))
    samples = tmp_path / "s.parquet"
    first, found = run(source, samples, target)
    stamp = samples.stat().st_mtime_ns
    again, same = run(source, samples, target)
    assert (again.num_workers, again.table, again.table_digest, again.report) == (
        0,
        first.table,
        first.table_digest,
        first.report,
    )
    assert (same, samples.stat().st_mtime_ns) == (found, stamp)
    assert "nothing to do" in "\n".join(again.lines())
    # Where it lies does not matter, nor whether the last line ends.
    moved = tmp_path / "elsewhere" / "a.jsonl"
    moved.parent.mkdir()
    moved.write_text(source.read_text().rstrip("\n"))
    assert run(moved, samples, target)[0].num_workers == 0
    # Other sizes are another report of the same table.
    sized, _ = run(source, samples, target, draft_vocab_sizes=(10,))
    assert (sized.num_workers, sized.report.draft_vocab_sizes) == (0, (10,))
    assert json.loads(report_path(samples).read_text())["draft_vocab_sizes"] == [10]
    report_path(samples).unlink()
    assert run(source, samples, target)[0].report == first.report
    assert report_path(samples).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 99},
        {"too_long": "cut"},
        {"last_turn_only": True},
        {"reasoning": False},
        {"ignore": ("x",)},
        {"template_options": {"a": 1}},
        {"date": "2026-02-03"},
        {"held_out": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_setting_makes_the_table_anew(tmp_path: Path, target: Path, change: dict[str, Any]) -> None:
    source = write(tmp_path / "a.jsonl", rows(5))
    samples = tmp_path / "s.parquet"
    run(source, samples, target)
    assert run(source, samples, target, **change)[0].num_workers == 1
    assert run(source, samples, target, **change)[0].num_workers == 0


def test_other_lines_another_name_and_another_target_make_the_table_anew(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", rows(5))
    target = small.target(tmp_path / "target", "chatml")
    samples = tmp_path / "s.parquet"
    run(source, samples, target)
    write(source, rows(6))
    assert run(source, samples, target)[0].num_workers == 1
    source = source.rename(tmp_path / "b.jsonl")
    assert run(source, samples, target)[0].num_workers == 1, "the name is the samples' source"
    (target / "generation_config.json").write_text('{"eos_token_id": [1]}')
    assert run(source, samples, target)[0].num_workers == 1
    (target / "chat_template.jinja").write_text(small.template("turn"))
    assert run(source, samples, target)[0].num_workers == 1
    assert run(source, samples, target)[0].num_workers == 0
    samples.write_bytes(samples.read_bytes()[:-1])
    assert run(source, samples, target)[0].num_workers == 1


def test_pipes_can_be_read_once_only_and_are(tmp_path: Path, target: Path) -> None:
    pipe, samples = tmp_path / "pipe.jsonl", tmp_path / "s.parquet"
    os.mkfifo(pipe)
    text = "".join(json.dumps(row) + "\n" for row in rows(30))
    for _ in range(2):
        writer = subprocess.Popen(["sh", "-c", 'cat > "$0"', pipe], stdin=subprocess.PIPE, text=True)
        assert writer.stdin is not None
        writer.stdin.write(text)
        writer.stdin.close()
        receipt, _ = run(pipe, samples, target, None)
        assert writer.wait(10) == 0
        assert (receipt.num_workers, receipt.table.num_input) == (len(os.sched_getaffinity(0)), 30)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=30)), max_size=40), st.integers(1, 6))
def test_chunks_hold_every_line_once_and_one_source_each(lines: list[tuple[str, bytes]], chunk_rows: int) -> None:
    lines.sort(key=lambda line: line[0])
    given_lines = [(Where(Path(name), number), line) for number, (name, line) in enumerate(lines)]
    before = parts.CHUNK_ROWS, parts.CHUNK_BYTES
    parts.CHUNK_ROWS, parts.CHUNK_BYTES = chunk_rows, 64
    try:
        chunks = list(chunks_of(given_lines))
    finally:
        parts.CHUNK_ROWS, parts.CHUNK_BYTES = before
    back = [(Where(c.path, n), line) for c in chunks for n, line in zip(c.numbers, c.lines, strict=True)]
    assert back == given_lines
    assert all(len(c.lines) <= chunk_rows and (c.num_bytes <= 64 or len(c.lines) == 1) for c in chunks)


def test_a_parts_key_is_its_content_place_and_settings() -> None:
    def key(name: str = "a", number: int = 1, line: bytes = b"x\n", more: bytes = b"y", settings: str = "s") -> str:
        return key_of(Chunk(Path(name), [number, number + 1], [line, more]), settings)

    assert key() == key(line=b"x\r\n")
    others = [key(name="b"), key(number=2), key(line=b"xy\n", more=b""), key(line=b"z\n"), key(settings="t")]
    assert len({key(), *others}) == 6


def test_facts_add_up_and_survive_a_part() -> None:
    a, b = Facts(num_input=2, num_samples=1, num_tokens=5), Facts(num_input=1)
    a.counts["num_extra"] += 3
    for number in range(2):
        a.drop(f"f:{number}", "too_long", "bad \x1b[31m\nline")
        b.drop(f"f:{number + 2}", "too_long", "later")
    a.add(Facts.from_json(b.to_json()))
    assert (a.num_input, a.dropped, a.counts) == (3, {"too_long": 4}, {"num_extra": 3})
    assert a.examples == {
        "too_long": [Example("f:0", "bad  [31m line"), Example("f:1", "bad  [31m line"), Example("f:2", "later")]
    }
    assert Facts.from_json(a.to_json()) == a


def test_any_damaged_byte_of_a_part_is_found(tmp_path: Path, target: Path) -> None:
    data = DataConfig(samples=tmp_path / "s.parquet")
    maker = parts.Maker(data, TargetConfig(path=target))
    lines = [json.dumps(row).encode() for row in rows(10)]
    part, facts = maker.part(Chunk(Path("a"), list(range(10)), lines))
    read, batch = read_part(part)
    assert read == facts
    assert batch.num_rows == facts.num_samples > 0
    for position in range(0, len(part), 41):
        damaged = bytearray(part)
        damaged[position] ^= 1
        with pytest.raises(ValueError, match="not the bytes"):
            read_part(damaged)
    nothing, _ = maker.part(Chunk(Path("a"), [1], [b"5"]))
    assert read_part(nothing)[1].num_rows == 0


def test_only_parts_are_removed(tmp_path: Path) -> None:
    store = PartStore(tmp_path / "s.parquet")
    store.put("0" * 32, b"x")
    (store.directory / f".{'1' * 32}.part.tmp").write_bytes(b"")
    store.remove()
    assert not store.directory.exists()
    store.put("0" * 32, b"x")
    (store.directory / "notes.txt").write_text("mine")
    store.remove()
    assert [p.name for p in store.directory.iterdir()] == ["notes.txt"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from(["drop", "turn", "cut"]), st.integers(8, 90)
)
def test_any_mix_is_accounted_for_where_history_is_rewritten(
    tmp_path: Path, target: Path, picks: list[int], too_long: str, max_tokens: int
) -> None:
    def conversation(num_turns: int, thought: str) -> dict[str, Any]:
        turns = []
        for i in range(num_turns):
            turns += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"{thought}a{i}"}]
        return {"messages": turns}

    kinds = [
        conversation(1, ""),
        conversation(2, ""),
        conversation(3, "<think>\nhm\n</think>\n\n"),
        {"text": "some plain words"},
        {"input_ids": [20, 21, 22, 23, 24, 25, 26, 27, 28], "loss_mask": [0, 0, 1, 1, 0, 0, 0, 1, 1]},
        {"messages": []},
    ]
    (tmp_path / "s.parquet").unlink(missing_ok=True)
    source = write(tmp_path / "a.jsonl", [kinds[pick] for pick in picks])
    try:
        receipt, _ = run(source, tmp_path / "s.parquet", target, 1, max_tokens=max_tokens, too_long=too_long)
    except DataError as error:
        assert "none of" in str(error)
        return
    table = receipt.table
    num_extra = sum({1: 1, 2: 2}.get(pick, 0) for pick in picks)
    assert (table.num_input, table.num_extra) == (len(picks), num_extra)
    assert table.num_input + table.num_extra == table.num_kept + sum(table.dropped.values())
    samples = list(SampleTable.open(receipt.path).samples())
    assert len(samples) == table.num_kept == sum(table.mask_methods.values()) == sum(table.splits.values())
    assert all(0 < sample.num_supervised < sample.num_tokens <= max_tokens for sample in samples if sample.num_tokens)
    assert all(sample.loss_spans[-1][1] == sample.num_tokens for sample in samples)
    assert receipt.report.total.num_tokens == table.num_tokens
    assert receipt.report.total.num_supervised == table.num_supervised
