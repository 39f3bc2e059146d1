"""`prepare`: every row accounted for, equal samples merged, the old table safe until the new one is whole."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.config import DataConfig, TargetConfig
from eyas.data import parts
from eyas.data import prepare as prepare_module
from eyas.data.prepare import prepare
from eyas.data.prepare_receipt import PrepareReceipt
from eyas.data.table import SampleTable
from eyas.data.template import Masker
from eyas.errors import ConfigError, DataError
from eyas.log import Progress
from eyas.records import Sample, sample_id_of
from fixtures.data import small

TABLE = ["samples.parquet", "samples.parquet.report.json"]


def chat(question: str, *answers: str, **more: Any) -> dict[str, Any]:
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.target(tmp_path_factory.mktemp("target"), "chatml")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(
    directory: Path, target: Path, *sources: list[Any], max_tokens: int = 4096, stream: io.StringIO | None = None
) -> tuple[PrepareReceipt, list[Sample]]:
    paths = tuple(write(directory / f"{'ab'[i]}.jsonl", rows) for i, rows in enumerate(sources))
    data = DataConfig(sources=paths, samples=directory / "samples.parquet", max_tokens=max_tokens)
    receipt = prepare(data, TargetConfig(path=target), Progress(stream=stream or io.StringIO()))
    return receipt, list(SampleTable.open(receipt.path).samples())


def test_every_form_becomes_a_sample_and_the_receipt_says_how(tmp_path: Path, target: Path) -> None:
    rows = [
        chat("Hi", "Yo", "No", id="one", tags=["x", "y"], source="mine"),
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        {"input_ids": [20, 21, 22, 23], "loss_mask": [0, 1, 1, 0], **chat("ignored", "ignored")},
        {"text": "Once upon a time"},
    ]
    receipt, samples = run(tmp_path, target, rows)
    assert (receipt.table.num_input, receipt.table.num_kept, receipt.table.dropped) == (4, 4, {})
    assert receipt.table.mask_methods == {"given": 1, "text": 1, "prefix_render": 2}
    assert receipt.table.num_tokens == sum(sample.num_tokens for sample in samples)
    assert receipt.table.num_supervised == sum(sample.num_supervised for sample in samples)
    assert (samples[0].conversation_id, samples[0].source, samples[0].tags) == ("one", "mine", ("x", "y"))
    assert samples[2].token_ids.tolist() == [20, 21, 22]
    assert samples[2].loss_spans == ((1, 3),)
    assert all(sample.sample_id == sample_id_of(sample.token_ids) for sample in samples)
    table = SampleTable.open(receipt.path)
    assert (table.digest, table.num_tokens) == (receipt.table_digest, receipt.table.num_tokens)
    assert table.metadata.tokenizer_digest == receipt.table.tokenizer_digest != ""
    assert table.metadata.template_digest == receipt.table.template_digest != ""
    assert table.metadata.max_tokens == 4096


def test_the_receipt_tells_what_the_template_does_not_show_and_then_claims_nothing(
    tmp_path: Path, target: Path
) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    question, answer = chat("Hi", "Yo")["messages"]
    messages = [
        *(answer, question, call, {"role": "tool", "content": "7"}, answer | {"reasoning_content": "hm"}),
        *(question, answer | {"content": ""}, question, answer | {"content": "ok <|im_end|> after"}),
    ]
    receipt, (sample,) = run(tmp_path, target, [{"messages": messages}])
    assert len(sample.loss_spans) == 2
    lines = receipt.lines()
    assert "1 assistant turns are left out: the template does not show their tool calls" in lines
    assert "1 assistant turns are left out: they are empty" in lines
    assert "1 assistant turns are left out: they begin the conversation and answer nothing" in lines
    assert "1 turns are supervised without their thoughts: the template does not show those" in lines
    assert "1 turns are supervised up to the first stop token: the row has text after it" in lines
    assert (receipt.table.num_turns_left_out, receipt.table.num_turns_changed) == (3, 2)
    assert not any("EXACT" in line for line in lines)
    again, _ = run(tmp_path, target, [{"messages": messages}])
    assert again.num_workers == 0 and not any("EXACT" in line for line in again.lines())
    assert [line for line in again.lines() if " turns are " in line] == [
        line for line in lines if " turns are " in line
    ]
    assert (again.table.num_turns_empty, again.table.num_thoughts_not_shown) == (1, 1), "the table says so itself"


def test_the_receipt_tells_of_tools_results_and_weights(tmp_path: Path, target: Path) -> None:
    call = {"role": "assistant", "content": "f", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    question, answer = chat("Hi", "Yo")["messages"]
    messages = [question, answer | {"weight": 0}, question, call, {"role": "tool", "content": "7"}, answer]
    receipt, _ = run(tmp_path, target, [{"messages": messages, "tools": [{"name": "f"}]}, chat("Hi", "Yo")])
    assert "1 conversations declare tools that the template does not show" in receipt.lines()
    assert "1 assistant turns are context only: their weight is 0" in receipt.lines()
    assert not any("EXACT" in line for line in receipt.lines())
    assert SampleTable.open(receipt.path).metadata.num_tools_not_shown == 1


def test_an_answer_of_weight_0_does_not_make_a_row_too_long_by_its_bytes(tmp_path: Path, target: Path) -> None:
    messages = [*chat("Hi", "Yo")["messages"], *chat("So?", "word " * 5000)["messages"]]
    messages[-1]["weight"] = 0
    receipt, _ = run(tmp_path, target, [{"messages": messages}], max_tokens=64)
    assert (receipt.table.num_kept, receipt.table.num_turns_unweighted) == (1, 1)


def test_each_reason_is_counted_with_the_first_places(tmp_path: Path, target: Path) -> None:
    rows = [
        chat("Hi", "Yo"),
        {"messages": [{"role": "user", "content": "Hi"}]},
        *[chat("Hi", "long " * 100, id=str(i)) for i in range(5)],
        {"input_ids": [1, 2], "loss_mask": [0, 0]},
        [],
        chat("Hi", "Yo"),
    ]
    receipt, samples = run(tmp_path, target, rows, max_tokens=100)
    assert receipt.table.dropped == {
        "no_assistant_turn": 1,
        "too_long": 5,
        "no_supervised_token": 1,
        "not_an_object": 1,
        "duplicate": 1,
    }
    assert (receipt.table.num_input, receipt.table.num_kept, receipt.table.num_merged) == (10, 1, 1)
    assert len(samples) == 1
    assert [example.where for example in receipt.examples["too_long"]] == [f"{tmp_path}/a.jsonl:{n}" for n in (3, 4, 5)]
    assert "data.max_tokens is 100" in receipt.examples["too_long"][0].detail
    assert receipt.examples["duplicate"][0].where == f"{tmp_path}/a.jsonl:10"
    assert f"{tmp_path}/a.jsonl:1" in receipt.examples["duplicate"][0].detail
    text = "\n".join(receipt.lines())
    assert "10 rows = 1 kept + 9 dropped" in text
    assert "dropped 5 too_long" in text
    assert json.loads(json.dumps(receipt.to_json()))["num_kept"] == 1


def test_the_length_limit_is_exact_and_counts_what_is_left_after_the_cut(tmp_path: Path, target: Path) -> None:
    rows = [{"input_ids": [20] * n, "loss_mask": [0] + [1] * 7 + [0] * (n - 8)} for n in (8, 12)]
    rows += [{"input_ids": [21] * 9, "loss_mask": [0] + [1] * 8}]
    receipt, samples = run(tmp_path, target, rows, max_tokens=8)
    assert receipt.table.dropped == {"too_long": 1, "duplicate": 1}
    assert [sample.num_tokens for sample in samples] == [8]


def test_equal_samples_merge_their_masks_and_tags_into_the_first(tmp_path: Path, target: Path) -> None:
    ids = [20, 21, 22, 23, 24, 25]
    first = [
        {"input_ids": [30, 31], "loss_mask": [0, 1], "id": "other"},
        {"input_ids": ids, "loss_mask": [0, 1, 0, 0, 0, 1], "id": "p", "tags": ["x", "y"]},
    ]
    second = [
        {"input_ids": ids, "loss_mask": [0, 0, 1, 0, 0, 1], "id": "q", "tags": ["y", "z"]},
        {"input_ids": ids, "loss_mask": [0, 1, 0, 0, 0, 1], "id": "r"},
        {"input_ids": [*ids, 26], "loss_mask": [0, 0, 0, 0, 1, 1, 0], "id": "s"},
        {"input_ids": [40, 41], "loss_mask": [0, 1], "id": "last"},
    ]
    receipt, samples = run(tmp_path, target, first, second)
    assert [sample.conversation_id for sample in samples] == ["other", "p", "last"]
    assert samples[1].loss_spans == ((1, 3), (4, 6))
    assert (samples[1].tags, samples[1].source) == (("x", "y", "z"), "a.jsonl")
    assert (receipt.table.num_input, receipt.table.num_kept, receipt.table.num_merged) == (6, 3, 3)
    assert receipt.table.dropped == {"duplicate": 3}
    assert receipt.table.mask_methods == {"given": 3}
    assert receipt.table.num_supervised == 1 + 4 + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", *TABLE]


def test_same_input_gives_the_same_bytes(tmp_path: Path, target: Path) -> None:
    rows = [chat(str(i), "answer") for i in range(30)] + [chat("3", "answer")]
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    assert run(tmp_path / "x", target, rows)[0].table_digest == run(tmp_path / "y", target, rows)[0].table_digest


POOL: list[tuple[str, Any]] = [
    ("chat a", chat("Hi", "Yo")),
    ("chat a", chat("Hi", "Yo", id="same tokens", tags="t")),
    ("chat b", chat("Hi", "Yo", "Yes")),
    (
        "chat b",
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in chat("Hi", "Yo", "Yes")["messages"]]},
    ),
    ("chat c", chat("é👋", "ß")),
    ("text", {"text": "Hi"}),
    ("ids", {"input_ids": [50, 51, 52], "loss_mask": [0, 1, 1]}),
    ("ids", {"input_ids": [50, 51, 52, 53], "loss_mask": [0, 0, 1, 0]}),
    ("drop too_long", chat("Hi", "x" * 300)),
    ("drop no_assistant_turn", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("drop no_supervised_token", {"input_ids": [50, 51], "loss_mask": [0, 0]}),
    ("drop unknown_role", {"messages": [{"role": "narrator", "content": "Hi"}]}),
    ("drop unknown_form", {"prompt": "Hi"}),
    ("drop not_an_object", 5),
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(range(len(POOL))), min_size=1, max_size=60), st.integers(1, 7))
def test_any_mix_is_accounted_for(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, picks: list[int], batch_rows: int
) -> None:
    monkeypatch.setattr(parts, "BATCH_ROWS", batch_rows)
    (tmp_path / "samples.parquet").unlink(missing_ok=True)
    names = [POOL[pick][0] for pick in picks]
    usable = [name for name in names if not name.startswith("drop")]
    expected = Counter(name.removeprefix("drop ") for name in names if name.startswith("drop"))
    if len(usable) > len(set(usable)):
        expected["duplicate"] = len(usable) - len(set(usable))
    rows = [POOL[pick][1] for pick in picks]
    if not usable:
        with pytest.raises(DataError, match="none of"):
            run(tmp_path, target, rows, max_tokens=200)
        return
    receipt, samples = run(tmp_path, target, rows, max_tokens=200)
    assert receipt.table.dropped == expected
    assert receipt.table.num_input == len(rows) == receipt.table.num_kept + sum(receipt.table.dropped.values())
    assert len(samples) == receipt.table.num_kept == len(set(usable)) == sum(receipt.table.mask_methods.values())
    assert len({sample.sample_id for sample in samples}) == len(samples)
    assert all(sample.num_supervised > 0 for sample in samples)
    assert all(sample.loss_spans[-1][1] == sample.num_tokens for sample in samples)
    assert all(sample.num_supervised < sample.num_tokens for sample in samples)
    order = list(dict.fromkeys(usable))
    assert [sample.num_tokens for sample in samples][: len(order)] == [_tokens_of(name) for name in order]


def _tokens_of(name: str) -> int:
    # One token per byte and special token: "…user\nHi…\n" is 10, "…assistant\n" 11.
    return {"chat a": 24, "chat b": 24 + 1 + 21 + 4, "chat c": 12 + 2 + 11 + 3, "text": 3, "ids": 3}[name]


def test_law_one_is_checked_and_not_assumed(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Masker.mask
    monkeypatch.setattr(Masker, "mask", lambda self, rows: original(self, rows[1:]) if rows else [])
    monkeypatch.setattr(parts, "zip", lambda *values, strict: zip(*values, strict=False), raising=False)
    with pytest.raises(DataError, match=r"3 rows read \+ 0 extra samples, but 2 kept \+ 0 dropped"):
        run(tmp_path, target, [chat(str(i), "Yo") for i in range(3)])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_nothing_left_is_one_line_with_the_top_reasons_and_the_old_table_stays(tmp_path: Path, target: Path) -> None:
    receipt, _ = run(tmp_path, target, [chat("Hi", "Yo")])
    before = receipt.path.read_bytes()
    with pytest.raises(DataError) as error:
        run(tmp_path, target, [{"messages": []}, {"messages": []}, 5])
    assert "\n" not in str(error.value)
    assert f"none of 3 rows became a sample: empty_conversation 2 (first: {tmp_path}/a.jsonl:1" in str(error.value)
    assert "not_an_object 1" in str(error.value)
    assert receipt.path.read_bytes() == before


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, target: Path) -> None:
    good = write(tmp_path / "good.jsonl", [chat("Hi", "Yo")])
    cases: list[tuple[bytes | None, str]] = [
        (None, "No such file"),
        (b"", "empty file"),
        (b"\n\n", "empty file"),
        (b'{"text": "a"}\n{"text"', "bad.jsonl:2: broken JSON"),
        (b'{"text": "a"}\n\n{"text": "\xc3"}\n', "bad.jsonl:3: invalid UTF-8"),
    ]
    bad = tmp_path / "bad.jsonl"
    data = DataConfig(sources=(good, bad), samples=tmp_path / "s" / "samples.parquet")
    for content, expected in cases:
        bad.unlink(missing_ok=True)
        if content is not None:
            bad.write_bytes(content)
        with pytest.raises(DataError if content is not None else ConfigError) as error:
            prepare(data, TargetConfig(path=target), Progress(stream=io.StringIO()))
        assert expected in str(error.value)
        assert str(bad) in str(error.value)
        assert "\n" not in str(error.value)
        assert not data.samples or not data.samples.parent.exists() or not list(data.samples.parent.iterdir())


def test_unset_paths_are_configuration_errors(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "a.jsonl", [chat("Hi", "Yo")])
    table = tmp_path / "samples.parquet"
    progress = Progress(stream=io.StringIO())
    for data, path, expected in (
        (DataConfig(samples=table), target, "data.sources is not set"),
        (DataConfig(sources=(source,)), target, "data.samples is not set"),
        (DataConfig(sources=(source,), samples=source), target, "is one of data.sources"),
        (DataConfig(sources=(source,), samples=Path()), target, r"data\.samples: \. is a directory; name the file"),
        (DataConfig(sources=(source,), samples=tmp_path), target, r"data\.samples: .* is a directory; name the file"),
        (DataConfig(sources=(source,), samples=table), None, "target.path is not set"),
        (DataConfig(sources=(source,), samples=table), tmp_path / "nope", "is not a directory"),
    ):
        with pytest.raises(ConfigError, match=expected):
            prepare(data, TargetConfig(path=path), progress)


def test_without_a_template_conversations_are_refused_and_other_forms_go_through(tmp_path: Path) -> None:
    bare = small.target(tmp_path / "bare", None)
    with pytest.raises(DataError, match="has no chat template"):
        run(tmp_path, bare, [chat("Hi", "Yo")])
    receipt, _ = run(tmp_path, bare, [{"text": "Hi"}])
    assert receipt.table.template_digest == ""


def test_a_template_that_rewrites_history_gives_extra_samples_and_the_receipt_says_at_which_price(
    tmp_path: Path,
) -> None:
    think = small.target(tmp_path / "think", "think")
    receipt, samples = run(tmp_path, think, [chat("Hi", "a", "b", "c"), chat("So?", "a")])
    table = receipt.table
    assert (table.num_input, table.num_extra, table.num_kept, table.num_rewritten) == (2, 2, 4, 1)
    assert table.mask_methods == {"prefix_render": 4}
    extra = samples[1:3]
    assert table.num_repeated_tokens == sum(sample.num_tokens - sample.num_supervised for sample in extra)
    text = "\n".join(receipt.lines())
    assert "2 rows + 2 extra samples = 4 kept + 0 dropped" in text
    assert "rewrites history in 1 conversations: 2 extra samples" in text
    assert [len(sample.loss_spans) for sample in samples] == [1, 1, 1, 1]
    assert {sample.conversation_id for sample in samples[:3]} == {samples[0].conversation_id}


def test_progress_begins_before_the_tokeniser_and_goes_on_by_the_interval(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(parts, "load_tokenizer", lambda _target: seen.append(stream.getvalue()) or 1 / 0)
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, target, [chat("Hi", "Yo")], stream=stream)
    assert "prepare: reading the tokeniser" in seen[0]
    monkeypatch.undo()
    monkeypatch.setattr(parts, "CHUNK_ROWS", 1)
    path = write(tmp_path / "a.jsonl", [chat(str(i), "Yo") for i in range(5)])
    data = DataConfig(sources=(path,), samples=tmp_path / "samples.parquet")
    prepare(data, TargetConfig(path=target), Progress(stream=stream, interval_s=0.0))
    lines = [line for line in stream.getvalue().splitlines() if "rows" in line]
    assert len(lines) >= 5
    assert "100% of" in lines[-1] and "tokens/s" in lines[-1]


def _hang_after_rows(directory: Path, target: Path, reached: Any) -> None:
    original = Masker.mask

    def mask(self: Masker, rows: Any) -> Any:
        if next(calls) == 3:
            reached.set()
            signal.pause()
        return original(self, rows)

    calls = iter(range(100))
    Masker.mask = mask  # type: ignore[method-assign]
    parts.BATCH_ROWS = 4
    run(directory, target, [chat(str(i), "Yo") for i in range(100)])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_leaves_the_old_table_and_the_next_run_is_whole(
    tmp_path: Path, target: Path, sent: signal.Signals
) -> None:
    receipt, _ = run(tmp_path, target, [chat("Hi", "Yo")])
    before = receipt.path.read_bytes()
    context = multiprocessing.get_context("fork")
    reached = context.Event()
    child = context.Process(target=_hang_after_rows, args=(tmp_path, target, reached))
    child.start()
    assert reached.wait(30)
    time.sleep(0.1)
    assert child.pid is not None
    os.kill(child.pid, sent)
    child.join(30)
    assert child.exitcode not in (0, None)
    assert receipt.path.read_bytes() == before
    leftover = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert leftover == ([".samples.parquet.tmp"] if sent == signal.SIGKILL else [])
    receipt, _ = run(tmp_path, target, [chat(str(i), "Yo") for i in range(100)])
    assert receipt.table.num_kept == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", *TABLE]


def test_first_occurrences_against_a_plain_dictionary() -> None:
    chance = random.Random(0)
    # Ids that end in zero bytes are where a fixed-width text type could go wrong.
    ids = [bytes([chance.randrange(2) for _ in range(3)] + [0] * 13) for _ in range(200)]
    first: dict[bytes, int] = {}
    expected = [first.setdefault(one, number) for number, one in enumerate(ids)]
    assert prepare_module._first_occurrences(bytearray(b"".join(ids))).tolist() == expected


def test_the_room_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, eyas.data.prepare, eyas.data.inspect; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_form_of_file_gives_the_same_samples(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"question {n}", f"answer {n}") for n in range(30)]
    plain = write(tmp_path / "plain.jsonl", rows)
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "0.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes().split(b"\n", 10)[0] + b"\n"))
    (packed / "1.json").write_text(json.dumps(rows[1:15]))
    pq.write_table(pa.Table.from_pylist(rows[15:25]), packed / "2.parquet")
    (packed / "3.zst").write_bytes(zstandard.compress("\n".join(map(json.dumps, rows[25:])).encode()))
    tables = []
    for name, source in (("a", plain), ("b", packed / "*")):
        config = DataConfig(sources=(source,), samples=tmp_path / f"{name}.parquet", workers=1)
        receipt = prepare(config, TargetConfig(path=target), Progress(stream=io.StringIO()))
        assert receipt.table.num_input == receipt.table.num_kept == 30
        tables.append([s.sample_id for s in SampleTable.open(tmp_path / f"{name}.parquet").samples()])
    assert tables[0] == tables[1]
    with pytest.raises(ConfigError, match=r"data\.sources: the pattern '.*\*\.txt' matches no file"):
        prepare(
            DataConfig(sources=(packed / "*.txt",), samples=tmp_path / "c.parquet"),
            TargetConfig(path=target),
            Progress(stream=io.StringIO()),
        )


def test_many_rows_without_a_supervised_token_stop_the_run_and_name_the_first(tmp_path: Path, target: Path) -> None:
    empty = [{"input_ids": [n, 5, 6], "loss_mask": [0, 0, 0]} for n in range(11)]
    source = write(tmp_path / "a.jsonl", [chat(f"q{n}", "a") for n in range(500)] + empty)
    data = DataConfig(sources=(source,), samples=tmp_path / "samples.parquet", workers=1)
    with pytest.raises(DataError, match=r"^11 of 511 rows have no supervised token \(first: .*a\.jsonl:501"):
        prepare(data, TargetConfig(path=target), Progress(stream=io.StringIO()))
    assert not (tmp_path / "samples.parquet").exists()
    more = data.model_copy(update={"max_unsupervised": 0.05})
    receipt = prepare(more, TargetConfig(path=target), Progress(stream=io.StringIO()))
    assert receipt.table.num_kept == 500 and receipt.table.dropped == {"no_supervised_token": 11}
