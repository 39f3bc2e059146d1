"""`inspect`: samples as people read them, supervised tokens marked. Pure functions; printing is the caller's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.data.render import Tokenizer
from eyas.data.table import SampleTable
from eyas.errors import DataError
from eyas.records import Sample

if TYPE_CHECKING:
    from rich.text import Text

OPEN, CLOSE = "⟦", "⟧"
"""Around supervised text where there is no colour."""
SUPERVISED_STYLE = "bold green"
CONTEXT_STYLE = "dim"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that are all supervised, or none of them."""

    text: str
    supervised: bool


def select(table: SampleTable, *, limit: int | None = None, sample_id: str | None = None) -> Iterator[Sample]:
    """The first `limit` samples of the table, or those whose id begins with `sample_id`; DataError when none does."""
    found = 0
    for sample in table.samples():
        if limit is not None and found >= limit:
            return
        if sample_id is not None and not sample.sample_id.startswith(sample_id.lower()):
            continue
        found += 1
        yield sample
    if sample_id is not None and not found:
        raise DataError(f"{table.path}: no sample whose id begins with {sample_id}")


def header(sample: Sample) -> str:
    """One line: id, tokens, supervised tokens, source, conversation, tags, language, and the split if held out."""
    num_spans = len(sample.loss_spans)
    parts = [
        sample.sample_id,
        f"{sample.num_tokens:,} tokens",
        f"{sample.num_supervised:,} supervised in {num_spans} span{'s' * (num_spans != 1)}",
        f"source {sample.source}",
        f"conversation {sample.conversation_id}",
    ]
    if sample.tags:
        parts.append(f"tags {', '.join(sample.tags)}")
    if sample.language:
        parts.append(f"language {sample.language}")
    if sample.split != "train":
        parts.append(sample.split.replace("_", " "))
    return visible(" · ".join(parts), keep="")


def pieces(sample: Sample, tokenizer: Tokenizer) -> list[Piece]:
    """The sample's text in pieces, special tokens included; joined they are the decoded sample."""
    ids = sample.token_ids.tolist()
    edges = sorted({0, len(ids), *(edge for span in sample.loss_spans for edge in span)})
    starts = {start for start, _ in sample.loss_spans}
    result = []
    before = ""
    for start, end in itertools.pairwise(edges):
        # Decoded from the beginning: a piece alone would lose its leading space with some tokenisers.
        whole = _decode(tokenizer, ids[:end])
        text = whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, ids[start:end])
        before = whole
        result.append(Piece(visible(text), start in starts))
    return result


def plain(sample: Sample, tokenizer: Tokenizer) -> str:
    """Header and text without colour, supervised text in ⟦ ⟧."""
    text = "".join(f"{OPEN}{p.text}{CLOSE}" if p.supervised else p.text for p in pieces(sample, tokenizer))
    return f"{header(sample)}\n{text}"


def coloured(sample: Sample, tokenizer: Tokenizer) -> Text:
    """Header and text for a terminal, supervised text in colour."""
    from rich.text import Text

    text = Text()
    text.append(header(sample) + "\n", style="bold")
    for piece in pieces(sample, tokenizer):
        text.append(piece.text, style=SUPERVISED_STYLE if piece.supervised else CONTEXT_STYLE)
    return text


def render(
    table: SampleTable,
    tokenizer: Tokenizer,
    *,
    limit: int | None = 3,
    sample_id: str | None = None,
    colour: bool = False,
) -> Iterator[str | Text]:
    """The samples that `select` gives, each as a rich `Text` (`colour`) or as plain text."""
    for sample in select(table, limit=limit, sample_id=sample_id):
        yield coloured(sample, tokenizer) if colour else plain(sample, tokenizer)


def visible(text: str, keep: str = "\n\t") -> str:
    """Text with its control characters spelled out, so that data cannot write to a terminal what it likes."""
    return "".join(c if c.isprintable() or c in keep else _spelled(c) for c in text)


def _spelled(c: str) -> str:
    if c.isspace() and ord(c) > 0xFF:
        # Wide and narrow spaces count as unprintable; they are harmless.
        return c
    return c.encode("unicode_escape").decode()


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
