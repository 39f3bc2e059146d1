"""`inspect`: what is marked is what is supervised."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from eyas.data import inspect
from eyas.data.table import SampleTable, TableMetadata, TableWriter
from eyas.errors import DataError
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
