"""`prepare` and its settings: splits, lengths, what is not supervised, what the table says about it."""

from __future__ import annotations

import datetime
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eyas.config import DataConfig, TargetConfig
from eyas.data.length import fit
from eyas.data.prepare import prepare
from eyas.data.prepare_receipt import PrepareReceipt
from eyas.data.render import Renderer
from eyas.data.report import Report, load_report, make_report, report_path
from eyas.data.rules import Rules, thoughts
from eyas.data.sources import GivenTokens, Messages, Reason, Row, Where
from eyas.data.split import HELD_OUT, split_of_text
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.data.template import Masked, Masker, MaskMethod, Refused
from eyas.errors import ConfigError
from eyas.log import Progress
from eyas.records import Sample
from fixtures.data import small


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **more}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.target(tmp_path_factory.mktemp("target"), "chatml")


def run(directory: Path, target: Path, rows: list[Any], **more: Any) -> tuple[PrepareReceipt, list[Sample]]:
    source = directory / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(sources=(source,), samples=directory / "samples.parquet", **more)
    receipt = prepare(data, TargetConfig(path=target), Progress(stream=io.StringIO()))
    return receipt, list(SampleTable.open(receipt.path).samples())


def supervised(sample: Sample) -> list[str]:
    tokenizer = small.tokenizer("chatml")
    return [tokenizer.decode(sample.token_ids[a:b].tolist(), skip_special_tokens=False) for a, b in sample.loss_spans]


# Splits


def test_turns_and_answers_of_a_conversation_are_in_one_split_whatever_their_form(tmp_path: Path, target: Path) -> None:
    questions = [f"question {i}" for i in range(60)]
    rows: list[Any] = []
    for i, question in enumerate(questions):
        rows += [
            chat(question, "one", id=f"{i}"),
            chat(question, "another", id=f"{i}"),
            chat(question, "one", "and then?", "two", id=f"{i}"),
            {"messages": [{"role": "system", "content": "Be kind"}, *chat(question, "yes")["messages"]], "id": f"{i}"},
            # As `generate` writes it: given ids count, the messages beside them say which conversation it is.
            {"input_ids": [40, 41, 60 + i], "loss_mask": [0, 0, 1], "id": f"{i}", **chat(question, "three")},
        ]
    receipt, samples = run(tmp_path, target, rows, held_out=0.3)
    assert len(samples) == len(rows)
    for sample in samples:
        assert sample.split == split_of_text(questions[int(sample.conversation_id)], 0.3)
    counts = Counter(sample.split for sample in samples)
    assert receipt.table.splits == counts and len(counts) == 2
    assert receipt.table.held_out == 0.3
    # Growth moves nobody.
    before = {sample.sample_id: sample.split for sample in samples}
    grown, _ = run(tmp_path, target, [*rows, *(chat(f"new {i}", "x") for i in range(50))], held_out=0.3)
    after = {sample.sample_id: sample.split for sample in SampleTable.open(grown.path).samples()}
    assert before.items() <= after.items()


def test_rows_without_a_user_turn_go_by_their_text_or_their_first_ids(tmp_path: Path, target: Path) -> None:
    rows: list[Any] = [{"text": f"text {i}"} for i in range(40)]
    asked = [41] * 7
    rows += [{"input_ids": [i, *asked, 42, 43], "loss_mask": [0] * 8 + [1, 1]} for i in range(20, 60)]
    rows += [{"input_ids": [i, *asked, 50, 51, 52], "loss_mask": [0] * 8 + [1, 0, 1]} for i in range(20, 60)]
    system = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]
    rows += [{"messages": [{"role": "system", "content": f"s{i}"}, system[1]]} for i in range(20)]
    _, samples = run(tmp_path, target, rows, held_out=0.5)
    assert [s.split for s in samples[:40]] == [split_of_text(f"text {i}", 0.5) for i in range(40)]
    assert [s.split for s in samples[40:80]] == [s.split for s in samples[80:120]]
    assert [s.split for s in samples[120:]] == [split_of_text(f"s{i}", 0.5) for i in range(20)]


def test_an_option_that_the_template_never_uses_is_told(tmp_path: Path, target: Path) -> None:
    for name, told in (("enable_thinkin", True), ("messag", True), ("messages_", True)):
        receipt, _ = run(tmp_path, target, [chat("Hi", "Yo")], template_options={name: False})
        assert any(f"data.template_options.{name}: the template never" in line for line in receipt.lines()) is told
    used, _ = run(tmp_path, target, [chat("Hi", "Yo")], template_options={"loop": 1, "message": 1})
    assert used.unused_options == ("loop",)


@pytest.mark.parametrize("size", [0, -1])
def test_a_draft_vocabulary_has_at_least_one_token(size: int) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        DataConfig(draft_vocab_sizes=(32, size))


def test_what_cannot_fit_by_its_bytes_is_dropped_before_it_is_tokenised(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Row] = []
    mask = Masker.mask

    def watched(self: Masker, rows: Any) -> Any:
        seen.extend(rows)
        return mask(self, rows)

    monkeypatch.setattr(Masker, "mask", watched)
    thought = chat("Hi", f"<think>{'hm ' * 2000}</think>Yo")
    rows = [chat("Hi", "Yo"), chat(*["some words"] * 200), {"text": "word " * 2000}, thought]
    receipt, samples = run(tmp_path, target, rows, max_tokens=64)
    assert (receipt.table.num_input, receipt.table.dropped, len(samples)) == (4, {"too_long": 3}, 1)
    # Templates may leave thoughts away: those do not count.
    assert [row.where.line for row in seen] == [1, 4]
    assert "by its bytes" in receipt.examples["too_long"][0].detail
    first = len(seen)
    run(tmp_path, target, rows, max_tokens=64, too_long="cut")
    assert [row.where.line for row in seen[first:]] == [1, 2, 3, 4]


@pytest.mark.parametrize("template", ["chatml", "think"])
def test_many_short_turns_that_are_too_long_are_not_rendered_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    num_renderings = 0
    text = Renderer.text

    def counted(self: Renderer, *given: Any, **more: Any) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return text(self, *given, **more)

    monkeypatch.setattr(Renderer, "text", counted)
    target = small.target(tmp_path / "target", template)
    rows = [chat("Hi", "Yo"), chat(*["a"] * 400)]
    receipt, samples = run(tmp_path, target, rows, max_tokens=200)
    if template == "chatml":
        assert num_renderings < 50
        assert (receipt.table.dropped, len(samples)) == ({"too_long": 1}, 1)
    else:
        # Where the template rewrites history, early turns have samples of their own, which fit.
        assert receipt.table.num_extra > 100 and len(samples) > 2


def test_an_equal_sample_in_both_splits_is_held_out(tmp_path: Path, target: Path) -> None:
    ids = {"input_ids": [40, 41, 42], "loss_mask": [0, 1, 1]}
    held = next(q for q in map(str, range(1000)) if split_of_text(q, 0.5) == HELD_OUT)
    train = next(q for q in map(str, range(1000)) if split_of_text(q, 0.5) != HELD_OUT)
    for order in ((held, train), (train, held)):
        receipt, (sample,) = run(tmp_path, target, [ids | chat(q, "a", id=q) for q in order], held_out=0.5)
        assert sample.split == HELD_OUT
        assert sample.conversation_id == order[0]
        assert receipt.table.splits == {HELD_OUT: 1}


def test_the_language_is_the_rows_own_or_the_script_of_its_text(tmp_path: Path, target: Path) -> None:
    rows = [
        chat("Hi", "Yo", language="en"),
        chat("Hi", "Yes", lang="de"),
        chat("Hi", "No", language=["en"]),
        chat("Привет", "Привет"),
        {"text": "안녕하세요"},
        {"text": "123"},
        {"input_ids": small.tokenizer("chatml")("Привет")["input_ids"], "loss_mask": [0] + [1] * 12},
    ]
    _, samples = run(tmp_path, target, rows)
    assert [s.language for s in samples] == ["en", "de", "latin", "cyrillic", "hangul", "", "cyrillic"]


# Lengths


def masked(num_tokens: int, *turns: tuple[int, int]) -> Masked:
    return Masked(np.arange(num_tokens, dtype=np.int32), turns, MaskMethod.GIVEN, tuple(end for _, end in turns))


def test_too_long_is_dropped_ended_at_a_turn_or_cut() -> None:
    three = masked(30, (5, 10), (15, 20), (25, 30))
    assert fit(three, 30, "drop") is three
    dropped = fit(three, 29, "drop")
    assert isinstance(dropped, Refused) and dropped.reason is Reason.TOO_LONG
    for limit, length in ((29, 20), (20, 20), (19, 10), (10, 10)):
        ended = fit(three, limit, "turn")
        assert isinstance(ended, Masked)
        assert (len(ended.token_ids), ended.loss_spans[-1]) == (length, (length - 5, length))
    for limit, spans in ((29, ((5, 10), (15, 20), (25, 29))), (24, ((5, 10), (15, 20))), (6, ((5, 6),))):
        cut = fit(three, limit, "cut")
        assert isinstance(cut, Masked)
        assert (cut.loss_spans, len(cut.token_ids)) == (spans, spans[-1][1])
    for too_long in ("turn", "cut"):
        nothing = fit(three, 5, too_long)  # type: ignore[arg-type]
        assert isinstance(nothing, Refused) and nothing.reason is Reason.TOO_LONG
    assert isinstance(fit(three, 9, "turn"), Refused)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 60), st.sampled_from(["drop", "turn", "cut"])
)
def test_no_length_leaves_a_sample_without_supervised_tokens(lengths: list[int], limit: int, too_long: Any) -> None:
    edges = np.cumsum([0, *lengths]).tolist()
    turns = [(edges[i], edges[i + 1]) for i in range(1, len(lengths), 2)]
    sample = masked(turns[-1][1], *turns)
    result = fit(sample, limit, too_long)
    if isinstance(result, Refused):
        first = turns[0][1] if too_long == "turn" else turns[0][0] + 1 if too_long == "cut" else len(sample.token_ids)
        assert limit < first
        return
    assert 0 < len(result.token_ids) <= max(limit, 0)
    assert result.loss_spans[-1][1] == len(result.token_ids)
    whole = [span for span in turns if span[1] <= limit]
    assert list(result.loss_spans)[: len(whole)] == whole


def test_shortened_samples_are_counted_and_told(tmp_path: Path, target: Path) -> None:
    rows = [chat("Hi", "a" * 50, "Hi", "b" * 50), chat("Hi", "c" * 200), chat("Hi", "d")]
    receipt, samples = run(tmp_path, target, rows, max_tokens=100, too_long="turn")
    assert [supervised(s) for s in samples] == [["a" * 50 + "<|im_end|>"], ["d<|im_end|>"]]
    table = receipt.table
    assert (table.num_cut, table.num_cut_tokens, table.dropped) == (1, 73, {"too_long": 1})
    assert "too_long=turn: 1 samples shortened to 100 tokens, 73 tokens lost" in receipt.lines()
    receipt, samples = run(tmp_path, target, rows, max_tokens=100, too_long="cut")
    assert [s.num_tokens for s in samples] == [100, 100, 23]
    assert supervised(samples[1]) == ["c" * 79]
    assert receipt.table.num_cut == 2


# What is not supervised


def test_ignored_text_takes_every_token_that_it_touches(tmp_path: Path) -> None:
    merging = small.target(tmp_path / "merging", "chatml", merges=True)
    rows = [chat("Hi", "well hello there, 12"), chat("12", "12")]
    receipt, samples = run(tmp_path, merging, rows, ignore=("ello", r"\d+"))
    tokenizer = small.tokenizer("chatml", merges=True)
    parts = [[tokenizer.decode(s.token_ids[a:b].tolist()) for a, b in s.loss_spans] for s in samples]
    # " hello" is one token: it is touched, so it goes as a whole.
    assert parts == [["well", " there, ", "<|im_end|>"], ["<|im_end|>"]]
    assert receipt.table.num_ignored_tokens == 1 + 2 + 2
    assert receipt.table.ignore == ("ello", r"\d+")
    assert any(line.startswith("ignore: 5 tokens") for line in receipt.lines())


def test_a_row_whose_every_token_is_ignored_is_dropped_with_the_reason(tmp_path: Path, target: Path) -> None:
    receipt, _ = run(tmp_path, target, [chat("Hi", "secret"), chat("Hi", "Yo")], ignore=(r"secret<\|im_end\|>",))
    assert receipt.table.dropped == {"no_supervised_token": 1}
    assert "data.ignore took 7" in receipt.examples["no_supervised_token"][0].detail


def test_an_expression_that_is_none_is_a_configuration_error(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.ignore: '\(' is no regular expression"):
        run(tmp_path, target, [chat("Hi", "Yo")], ignore=("(",))
    with pytest.raises(ConfigError, match=r"data\.template_options\.tokenize"):
        run(tmp_path, target, [chat("Hi", "Yo")], template_options={"tokenize": True})


def test_rules_hold_for_given_ids_too(tmp_path: Path, target: Path) -> None:
    tokenizer = small.tokenizer("chatml")

    def given_row(*pieces: tuple[str, int]) -> dict[str, Any]:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in pieces]
        mask = [bit for (_, bit), one in zip(pieces, ids, strict=True) for _ in one]
        return {"input_ids": [token for one in ids for token in one], "loss_mask": mask}

    row = given_row(("Q", 0), ("<think>hm</think>Yo 12", 1), ("So?<think>", 0), ("er</think>No.", 1))
    _, (plain,) = run(tmp_path, target, [row])
    assert supervised(plain) == ["<think>hm</think>Yo 12", "er</think>No."]
    receipt, (sample,) = run(tmp_path, target, [row], reasoning=False, ignore=("12",))
    assert supervised(sample) == ["Yo ", "No."]
    assert (receipt.table.num_reasoning_tokens, receipt.table.num_ignored_tokens) == (17 + 10, 2)
    receipt, (sample,) = run(tmp_path, target, [row], last_turn_only=True)
    assert supervised(sample) == ["er</think>No."]
    assert receipt.table.num_turns_skipped == 1


@pytest.mark.parametrize(
    ("turn", "prompt", "expected"),
    [
        ("<think>hm</think>Yo", "", ["<think>hm</think>"]),
        ("hm</think>Yo", "<think>\n", ["hm</think>"]),
        ("hm</think>Yo", "", ["hm</think>"]),
        ("hm, and on", "x<think>\n", ["hm, and on"]),
        ("<think>hm, and on", "", ["<think>hm, and on"]),
        ("Yo", "", []),
        ("<think>a</think>b<think>c</think>d", "", ["<think>a</think>", "<think>c</think>"]),
        ("[THINK]a[/THINK]b", "", ["[THINK]a[/THINK]"]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
            "<|start|>assistant",
            ["<|channel|>analysis<|message|>a<|end|>"],
        ),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", "", []),
    ],
)
def test_where_thoughts_stand(turn: str, prompt: str, expected: list[str]) -> None:
    assert [turn[a:b] for a, b in thoughts(turn, prompt)] == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text("ab \n", max_size=6), st.text("ab1 \n", max_size=9)), min_size=1, max_size=4))
def test_masks_are_those_of_the_characters(turns: list[tuple[str, str]]) -> None:
    # One token per byte: what the mask must be can be told by characters alone.
    tokenizer = small.tokenizer("chatml")
    messages = tuple(
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    )
    import re

    rules = Rules(ignore=(re.compile("a1|b+"),))
    row = Row(Where(Path("a"), 1), 1, Messages(messages), "c", "s", ())
    (result,) = Masker(tokenizer, Path("none"), rules=rules).mask([row])
    (sample,) = result.samples
    if not any(answer.strip() for _, answer in turns):
        assert isinstance(sample, Refused) and sample.reason is Reason.NO_ASSISTANT_TURN
        return
    assert isinstance(sample, Masked)
    expected: list[int] = []
    for question, answer in turns:
        expected += [0] * (len("user\n") + 1 + len(question) + 2 + 1 + len("assistant\n"))
        keep = [1] * len(answer)
        for match in re.finditer("a1|b+", answer):
            keep[match.start() : match.end()] = [0] * len(match.group())
        expected += [*keep, 1, 0] if answer.strip() else [0] * (len(answer) + 2)
    expected = expected[: len(expected) - expected[::-1].index(1)]
    mask = np.zeros(len(sample.token_ids), np.int8)
    for a, b in sample.loss_spans:
        mask[a:b] = 1
    assert mask.tolist() == expected
    assert result.counts["num_ignored_tokens"] == sum(len("".join(re.findall("a1|b+", answer))) for _, answer in turns)


# What the table and the receipt say


def test_settings_are_recorded(tmp_path: Path) -> None:
    dated = small.target(tmp_path / "dated", "chatml")
    template = "{{ strftime_now('%d.%m.%y') }}{{ word }}" + small.template("chatml")
    (dated / "chat_template.jinja").write_text(template)
    options = {"template_options": {"word": "x"}, "date": datetime.date(2030, 2, 3), "too_long": "cut"}
    receipt, (sample,) = run(tmp_path, dated, [chat("Hi", "Yo")], **options)
    text = small.tokenizer("chatml").decode(sample.token_ids.tolist())
    assert text.startswith("03.02.30x<|im_start|>")
    table = SampleTable.open(receipt.path).metadata
    assert (table.date, table.template_options, table.too_long) == ("2030-02-03", {"word": "x"}, "cut")
    assert "2030-02-03, by data.date" in "\n".join(receipt.lines())
    plain = small.target(tmp_path / "plain", "chatml")
    receipt, _ = run(tmp_path, plain, [chat("Hi", "Yo")])
    assert receipt.table.date == ""
    assert "data.date" not in "\n".join(receipt.lines())
    assert "template: EXACT" in "\n".join(receipt.lines())


def test_rows_that_were_tokenised_again_are_counted(tmp_path: Path, target: Path) -> None:
    rows = [chat("Hi", "Yo", retokenized=True), chat("Hi", "No", retokenized=False), chat("Hi", "So"), chat("a", "b")]
    receipt, _ = run(tmp_path, target, rows)
    assert receipt.table.num_retokenized == 1
    assert "1 rows (25.0%) had their answers tokenised again" in "\n".join(receipt.lines())
    receipt, _ = run(tmp_path, target, rows[1:])
    assert "tokenised again" not in "\n".join(receipt.lines())


# The report


def report_of(tmp_path: Path, samples: list[Sample], sizes: tuple[int, ...]) -> tuple[SampleTable, Report]:
    path = tmp_path / "t.parquet"
    with TableWriter(path) as writer:
        for one in samples:
            writer.append(one)
        writer.publish(TableMetadata(num_kept=len(samples)))
    table = SampleTable.open(path)
    return table, make_report(table, sizes)


def sample_of(ids: list[int], start: int, **labels: Any) -> Sample:
    return Sample(np.array(ids, np.int32), ((start, len(ids)),), **labels)


def test_coverage_by_hand(tmp_path: Path) -> None:
    samples = [
        # Supervised: 7 7 7 5 | 9 9 5 | 3. In training by frequency, ties to the lower id: 7, 3, 5. 9 is held out.
        sample_of([1, 7, 7, 7, 5], 1, source="a", tags=("x", "y"), language="latin"),
        sample_of([1, 2, 9, 9, 5], 2, source="b", tags=("x",), split="held_out"),
        sample_of([1, 1, 1, 3], 3, source="a"),
    ]
    _, report = report_of(tmp_path, samples, (1, 2, 3, 100))
    assert (report.num_distinct, report.vocabulary_of) == (3, "train")
    assert (report.total.num_samples, report.total.num_tokens, report.total.num_supervised) == (3, 14, 8)
    assert report.total.coverage == (0.375, 0.5, 0.75, 0.75)
    by_name = {kind: {one.name: one for one in found} for kind, found in report.slices.items()}
    assert by_name["source"]["a"].coverage == (0.6, 0.8, 1.0, 1.0)
    assert by_name["source"]["b"].coverage == (0.0, 0.0, 0.333333, 0.333333)
    assert by_name["split"]["held_out"].num_supervised == 3
    assert (by_name["tag"]["x"].num_tokens, by_name["tag"]["y"].num_tokens) == (10, 5)
    assert {name: one.num_samples for name, one in by_name["language"].items()} == {"latin": 1, "unknown": 2}
    assert [one.name for one in report.slices["source"]] == ["a", "b"]
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    lines = "\n".join(report.lines())
    assert "37.50%" in lines and "held_out" in lines


def test_many_slices_are_told_as_the_largest_and_other(tmp_path: Path) -> None:
    samples = [sample_of([1] * (i % 90 + 1) + [i], 1, source=f"s{i:03}", tags=(f"t{i}",)) for i in range(200)]
    _, report = report_of(tmp_path, samples, (5,))
    assert len(report.slices["source"]) == 65
    assert report.slices["source"][-1].name == "other"
    assert sum(one.num_samples for one in report.slices["source"]) == 200
    assert sum(one.num_tokens for one in report.slices["tag"]) == report.total.num_tokens
    assert len(report.lines()) < 40


def test_coverage_against_plain_counting(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    samples = [
        sample_of(chance.zipf(1.5, 40).clip(0, 500).tolist(), int(chance.integers(0, 39)), source=str(i % 3))
        for i in range(600)
    ]
    table, report = report_of(tmp_path, samples, (3, 10, 50))
    total: Counter[int] = Counter()
    for one in samples:
        total.update(one.token_ids[one.loss_mask()].tolist())
    order = sorted(total, key=lambda token: (-total[token], token))
    for number, size in enumerate((3, 10, 50)):
        kept = set(order[:size])
        for name, found in (("all", report.total), *((s.name, s) for s in report.slices["source"])):
            ids = [t for s in samples if name in ("all", s.source) for t in s.token_ids[s.loss_mask()].tolist()]
            assert found.coverage[number] == pytest.approx(sum(t in kept for t in ids) / len(ids), abs=1e-6)
    assert load_report(table, (3, 10, 50)) is None
    report_path(table.path).write_text("{}")
    assert load_report(table, (3, 10, 50)) is None


def test_given_content_is_not_changed_by_rules() -> None:
    content = GivenTokens(np.array([20, 21, 22], np.int32), np.array([True, False, True]))
    row = Row(Where(Path("a"), 1), 1, content, "c", "s", ())
    Masker(small.tokenizer("chatml"), Path("none"), rules=Rules(last_turn_only=True)).mask([row])
    assert content.loss_mask.tolist() == [True, False, True]
