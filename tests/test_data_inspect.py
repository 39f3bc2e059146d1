"""`inspect`: what is marked is what is supervised."""

from __future__ import annotations

import html
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eyas.data import inspect, page
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.errors import ConfigError, DataError
from eyas.records import Sample
from fixtures.data import small


def sample(text: str, *parts: str, **labels: object) -> Sample:
    """`text` tokenised, with each of `parts` supervised."""
    encoded = small.tokenizer("chatml")(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = np.zeros(len(encoded["input_ids"]), np.bool_)
    for part in parts:
        begin = text.index(part)
        mask |= [begin <= a and b <= begin + len(part) for a, b in encoded["offset_mapping"]]
    from eyas.records import spans_of

    return Sample(np.array(encoded["input_ids"], np.int32), spans_of(mask), **labels)  # type: ignore[arg-type]


def table(path: Path, *samples: Sample) -> SampleTable:
    with TableWriter(path) as writer:
        for one in samples:
            writer.append(one)
        writer.publish(TableMetadata(num_kept=len(samples)))
    return SampleTable.open(path)


ONE = sample(
    "<|im_start|>user\nHi 👋<|im_end|>yes, éno", "yes", "éno", conversation_id="c1", source="a.jsonl", tags=("x",)
)


def test_plain_text_brackets_the_supervised_tokens() -> None:
    assert inspect.plain(ONE, small.tokenizer("chatml")).splitlines() == [
        f"{ONE.sample_id} · 23 tokens · 7 supervised in 2 spans · source a.jsonl · conversation c1 · tags x",
        "<|im_start|>user",
        "Hi 👋<|im_end|>⟦yes⟧, ⟦éno⟧",
    ]


def test_colour_is_on_the_supervised_tokens_alone() -> None:
    from rich.console import Console

    text = inspect.coloured(ONE, small.tokenizer("chatml"))
    marked = [text.plain[span.start : span.end] for span in text.spans if span.style == inspect.SUPERVISED_STYLE]
    assert marked == ["yes", "éno"]
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=200, color_system="standard").print(text)
    assert "\x1b[1;32myes" in stream.getvalue()


def test_pieces_join_to_the_decoded_sample() -> None:
    tokenizer = small.tokenizer("chatml")
    assert "".join(piece.text for piece in inspect.pieces(ONE, tokenizer)) == tokenizer.decode(ONE.token_ids.tolist())


def test_control_characters_cannot_reach_the_terminal() -> None:
    bad = sample("a\x1b[31mb\rc\td", "b", conversation_id="\x1b[2J")
    text = inspect.plain(bad, small.tokenizer("chatml"))
    assert "\x1b" not in text and "\r" not in text
    assert "a\\x1b[31m⟦b⟧\\rc\td" in text


def test_selection_by_limit_and_by_the_beginning_of_an_id(tmp_path: Path) -> None:
    samples = [sample(f"text {i}", "text") for i in range(5)]
    stored = table(tmp_path / "t.parquet", *samples)
    tokenizer = small.tokenizer("chatml")
    assert len(list(inspect.render(stored, tokenizer, limit=2))) == 2
    (found,) = inspect.render(stored, tokenizer, sample_id=samples[3].sample_id[:8].upper())
    assert isinstance(found, str) and found.startswith(samples[3].sample_id)
    with pytest.raises(DataError, match="no sample whose id begins with zz"):
        list(inspect.render(stored, tokenizer, sample_id="zz"))


def test_language_and_a_split_that_is_not_training_are_told() -> None:
    assert inspect.header(sample("abc", "c", language="ja", split="held_out")).endswith(" · language ja · held out")
    assert "train" not in inspect.header(ONE)


def parsed(text: str) -> tuple[list[tuple[str, str, bool]], list[str]]:
    """Each token of the page as title, text and whether it is marked; and every tag with what it asks for."""
    from html.parser import HTMLParser

    tokens: list[tuple[str, str, bool]] = []
    tags: list[str] = []

    class Reader(HTMLParser):
        marked = False
        inside = False

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            if tag == "mark":
                self.marked = True
            title = dict(attrs).get("title")
            if tag == "span" and title is not None:
                self.inside = True
                tokens.append((title, "", self.marked))

        def handle_endtag(self, tag: str) -> None:
            if tag == "mark":
                self.marked = False
            if tag == "span":
                self.inside = False

        def handle_data(self, data: str) -> None:
            if self.inside:
                title, text, marked = tokens[-1]
                tokens[-1] = (title, text + data, marked)

    Reader().feed(text)
    return tokens, tags


def test_the_page_marks_each_supervised_token_and_names_its_id(tmp_path: Path) -> None:
    tokenizer = small.tokenizer("chatml")
    stored = table(tmp_path / "t.parquet", ONE)
    tokens, _ = parsed("".join(page.page(stored, stored.samples(), tokenizer)))
    ids = ONE.token_ids.tolist()
    mask = ONE.loss_mask().tolist()
    place = 0
    for title, _, marked in tokens:
        number, _, named = title.removeprefix("token ").partition(", id ")
        these = [int(one) for one in named.split()]
        assert int(number) == place
        assert these == ids[place : place + len(these)]
        assert mask[place : place + len(these)] == [marked] * len(these)
        place += len(these)
    assert place == len(ids)
    assert "".join(text for _, text, _ in tokens).replace("↵", "") == tokenizer.decode(ids)
    # The waving hand is four tokens and one character.
    assert [len(title.split(", id ")[1].split()) for title, text, _ in tokens if text == "👋"] == [4]


def test_what_a_sample_says_stays_text_and_the_page_asks_for_nothing(tmp_path: Path) -> None:
    bad = sample(
        "<script>alert(1)</script><img src=x onerror=y> &amp; \x1b[31m",
        "<img src=x onerror=y>",
        source="<b>s</b>",
        conversation_id='"><script>',
    )
    stored = table(tmp_path / "<i>t.parquet", bad)
    text = "".join(page.page(stored, stored.samples(), small.tokenizer("chatml")))
    tokens, tags = parsed(text)
    assert not {"script", "img", "b", "a", "link", "iframe"} & set(tags)
    assert "\x1b" not in text
    assert "".join(t for _, t, _ in tokens).startswith("<script>alert(1)</script><img src=x onerror=y> &amp; \\x1b[31m")
    for outside in ("http://", "https://", "url(", "@import", "src="):
        assert outside not in text.replace("src=x", ""), outside
    assert "prefers-color-scheme: dark" in text and "default-src 'none'" in text
    assert html.unescape(text).count(bad.sample_id) == 1


def test_a_page_of_some_samples_says_how_many_there_are(tmp_path: Path) -> None:
    tokenizer = small.tokenizer("chatml")
    stored = table(tmp_path / "t.parquet", *(sample(f"text {i}", "text") for i in range(5)))
    some = "".join(page.page(stored, inspect.select(stored, limit=3), tokenizer))
    assert "<p>3 of 5 samples are shown; --limit and --sample choose them.</p>" in some
    assert "are shown" not in "".join(page.page(stored, stored.samples(), tokenizer))


def test_a_page_is_whole_or_not_there(tmp_path: Path) -> None:
    samples = [sample(f"text {i}", "text") for i in range(5)]
    stored = table(tmp_path / "t.parquet", *samples)
    tokenizer = small.tokenizer("chatml")
    path = tmp_path / "page.html"
    assert page.write_page(path, stored, inspect.select(stored, limit=2), tokenizer) == 2
    assert path.read_text(encoding="utf-8").count("<section>") == 2
    before = path.read_bytes()
    with pytest.raises(DataError, match="no sample whose id"):
        page.write_page(path, stored, inspect.select(stored, sample_id="zz"), tokenizer)
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="cannot be written"):
        page.write_page(tmp_path / "no" / "page.html", stored, [], tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "t.parquet"]


def test_a_page_takes_the_place_of_a_page_and_of_nothing_else(tmp_path: Path) -> None:
    stored = table(tmp_path / "t.parquet", ONE)
    others = stored.path, tmp_path / "run.toml"
    others[1].write_text("[data]\n")
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "<!doctype html"}\n')
    (tmp_path / "link.html").hardlink_to(stored.path)
    (tmp_path / "soft.html").symlink_to(source)
    for name in ("t.parquet", "run.toml", "a.jsonl", "link.html", "soft.html", "."):
        with pytest.raises(ConfigError, match=r"^--html: "):
            page.check_page(tmp_path / name, *others)
    new = tmp_path / "new.html"
    page.check_page(new, *others)
    page.write_page(new, stored, stored.samples(), small.tokenizer("chatml"))
    page.check_page(new, *others)
    new.write_text("\n<!DOCTYPE HTML>")
    page.check_page(new, *others)


def test_the_command_refuses_a_page_that_would_destroy_its_table(tmp_path: Path) -> None:
    before = table(tmp_path / "t.parquet", ONE).path.read_bytes()
    run = tmp_path / "run.toml"
    run.write_text(f'[data]\nsamples = "t.parquet"\n[target]\npath = "{small.target(tmp_path / "target", "chatml")}"\n')
    command = [sys.executable, "-c", "from eyas.cli import main; main()", "inspect", str(run), "--html"]
    for name in ("t.parquet", "run.toml"):
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert "eyas: --html: " in done.stderr
    assert (tmp_path / "t.parquet").read_bytes() == before
