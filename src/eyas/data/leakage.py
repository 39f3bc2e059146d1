"""Which conversations share a passage with a benchmark: the same `ngram` words in a row.

Words are runs of letters, marks and digits, lower-cased and without compatibility forms; whatever stands between them
does not matter. In scripts written without blanks (Chinese, Japanese, Thai and their like) each character is a word.
A prompt that is shorter than `ngram` is a passage as a whole; one of fewer than 8 words counts only where it is all
that a turn says, because `go on` stands everywhere.

All texts of a batch are looked at together, as arrays: a word is a 64-bit hash, a passage a hash of its words' hashes,
which differences of one running sum give for any length. Letters: `C` characters, `W` words of a batch.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eyas.data.files import RawRow, Rows, broken_json, open_rows
from eyas.errors import DataError

SHORTEST_PASSAGE = 8
"""Words below which a prompt counts only as a whole turn."""
BLOCK_CHARS = 1 << 17
"""Characters that are looked at together: their arrays stay in the cache."""
MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARS = 160
TEXT_KEYS = ("turns", "messages", "conversations", "prompt", "question", "problem", "instruction", "query", "text")

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_BREAK = "\0"
"""Between two texts: a word that no passage has."""
_SINGLE = np.uint64(1 << 31)
_CHAR_BASE, _WORD_BASE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
# Scripts without blanks between words, as ranges of code points.
_UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeakExample:
    """One conversation that shares a passage with one prompt."""

    where: str
    """`FILE:LINE` of the conversation."""
    prompt: str
    """`FILE:LINE` of the benchmark's row."""
    passage: str


@dataclass(slots=True)
class BenchmarkReport:
    """What one benchmark has in common with the conversations."""

    path: str
    num_prompts: int
    num_leaked_prompts: int = 0
    """Prompts of which some conversation has a passage."""
    num_conversations: int = 0
    """Conversations, repetitions included, that have a passage of it."""
    examples: list[LeakExample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Passages:
    """All passages of one length."""

    hashes: Words
    """Sorted, each once."""
    prompts: npt.NDArray[np.int32]
    """The first prompt that has it."""
    may_be: npt.NDArray[np.bool_]
    """By the top bits of a hash: whether it is worth a search."""
    shift: np.uint64


class Benchmarks:
    """The prompts of some benchmarks, and what was found of them so far."""

    def __init__(self, paths: Sequence[Path], ngram: int) -> None:
        self.reports: list[BenchmarkReport] = []
        self._benchmark_of: list[int] = []
        self._where: list[str] = []
        self._leaked: set[int] = set()
        self._shortest = min(SHORTEST_PASSAGE, ngram)
        found: dict[int, tuple[list[Words], list[int]]] = {}
        for path in open_rows(paths, field="merge.benchmarks").files:
            self._read(path, ngram, found)
        self._passages = {length: _index(*lists) for length, lists in sorted(found.items())}

    def _read(self, path: Path, ngram: int, found: dict[int, tuple[list[Words], list[int]]]) -> None:
        report = BenchmarkReport(str(path), 0)
        for row in Rows([path]):
            prompt = len(self._where)
            for text in _prompts(row):
                report.num_prompts += 1
                words, _ = words_of(text)
                if not len(words):
                    continue
                length = min(len(words), ngram)
                hashes = _passages_of(_sums(words), length)
                lists = found.setdefault(length, ([], []))
                lists[0].append(hashes)
                lists[1].extend([prompt] * len(hashes))
            self._where.append(str(row.where))
            self._benchmark_of.append(len(self.reports))
        self.reports.append(report)

    def find(self, conversations: Sequence[Sequence[str]], wheres: Sequence[object]) -> list[str]:
        """For each conversation, given as its texts, the passage that it shares, or an empty text; all are counted."""
        found = [""] * len(conversations)
        first = num_chars = 0
        for i, texts in enumerate(conversations):
            num_chars += sum(map(len, texts)) + len(texts) + 1
            if num_chars >= BLOCK_CHARS or i + 1 == len(conversations):
                self._find(conversations, wheres, range(first, i + 1), found)
                first, num_chars = i + 1, 0
        return found

    def _find(
        self, conversations: Sequence[Sequence[str]], wheres: Sequence[object], block: range, found: list[str]
    ) -> None:
        pieces = [_BREAK.join(conversations[i]) for i in block]
        joined = _BREAK + _BREAK.join(pieces) + _BREAK
        words, starts = words_of(joined)
        sums = _sums(words)
        ends = np.cumsum([len(piece) + 1 for piece in pieces])  # [conversations], in characters
        is_break = words == _break_word()
        seen: set[tuple[int, int]] = set()
        for length, passages in self._passages.items():
            if length + 2 > len(words):
                continue  # a break stands at both ends
            hashes = _passages_of(sums, length)  # [W - length + 1]
            likely = passages.may_be[(hashes >> passages.shift).astype(np.int64)]
            if length < self._shortest:
                whole = np.zeros(len(hashes), dtype=np.bool_)
                whole[1:-1] = is_break[: len(hashes) - 2] & is_break[length + 1 :]
                likely &= whole
            places = np.flatnonzero(likely)
            at = np.minimum(np.searchsorted(passages.hashes, hashes[places]), len(passages.hashes) - 1)
            sure = passages.hashes[at] == hashes[places]
            for place, prompt in zip(places[sure].tolist(), passages.prompts[at[sure]].tolist(), strict=True):
                i = block[int(np.searchsorted(ends, starts[place] - 1, side="right"))]
                end = int(starts[place + length]) if place + length < len(starts) else len(joined)
                passage = " ".join(joined[int(starts[place]) : end].split())[:MAX_EXAMPLE_CHARS].strip(_BREAK)
                found[i] = found[i] or passage
                self._count(i, prompt, str(wheres[i]), passage, seen)

    def _count(self, i: int, prompt: int, where: str, passage: str, seen: set[tuple[int, int]]) -> None:
        number = self._benchmark_of[prompt]
        report = self.reports[number]
        if prompt not in self._leaked:
            self._leaked.add(prompt)
            report.num_leaked_prompts += 1
        if (i, number) in seen:
            return
        seen.add((i, number))
        report.num_conversations += 1
        if len(report.examples) < MAX_EXAMPLES:
            report.examples.append(LeakExample(where, self._where[prompt], passage))


def words_of(text: str) -> tuple[Words, Places]:
    """The words of a text as hashes `[W]`, and where each begins, in characters `[W]`."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)  # [C]
    letters = _letters().take(codes, mode="clip")  # twice as fast as an index, and no code is out of range
    inside = letters != 0
    alone = letters >= _SINGLE
    begins = inside.copy()
    begins[1:] &= ~inside[:-1] | alone[1:] | alone[:-1]
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.empty(0, dtype=np.uint64), starts
    up, down = _powers(_CHAR_BASE, len(codes))
    terms = letters * up[: len(codes)]
    # What is no letter adds nothing, so a word's sum may run up to the next word.
    sums = np.cumsum(terms)
    before = sums[starts] - terms[starts]
    hashes = np.diff(before, append=sums[-1:]) * down[starts]
    return _mixed(hashes), starts


def _mixed(hashes: Words) -> Words:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return hashes ^ (hashes >> np.uint64(29))


def _sums(words: Words) -> Words:
    """Running sums `[W + 1]` of the words, each times a power of its place."""
    up, _ = _powers(_WORD_BASE, len(words))
    sums = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(words * up[: len(words)], out=sums[1:])
    return sums


def _passages_of(sums: Words, length: int) -> Words:
    """Hashes of all passages of so many words `[W - length + 1]`."""
    _, down = _powers(_WORD_BASE, len(sums))
    return _mixed((sums[length:] - sums[:-length]) * down[: len(sums) - length])


def _index(hashes: list[Words], prompts: list[int]) -> _Passages:
    unique, first = np.unique(np.concatenate(hashes), return_index=True)
    bits = min(24, max(16, (16 * len(unique)).bit_length()))
    shift = np.uint64(64 - bits)
    may_be = np.zeros(1 << bits, dtype=np.bool_)
    may_be[(unique >> shift).astype(np.int64)] = True
    return _Passages(unique, np.array(prompts, dtype=np.int32)[first], may_be, shift)


_tables: dict[int, tuple[Words, Words]] = {}


def _powers(base: int, count: int) -> tuple[Words, Words]:
    """Powers of an odd number and of its inverse, modulo 2^64."""
    table = _tables.get(base)
    if table is None or len(table[0]) < count:
        size = max(1 << 16, 1 << (count - 1).bit_length())
        inverse = pow(base, -1, 1 << 64)
        table = _tables[base] = _power_table(base, size), _power_table(inverse, size)
    return table


def _power_table(base: int, size: int) -> Words:
    powers = np.full(size, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


@cache
def _break_word() -> Any:
    words, _ = words_of(_BREAK)
    return words[0]


@cache
def _letters() -> Words:
    """For each code point the letter that it counts as: 0 for none, with the top bit set for a word of its own."""
    table = np.zeros(sys.maxunicode + 1, dtype=np.uint64)
    for code in range(0x40000):
        char = chr(code)
        if unicodedata.category(char)[0] not in "LMN":
            continue
        plain = unicodedata.normalize("NFKC", char)
        plain = (plain if len(plain) == 1 else char).lower()
        table[code] = ord(plain if len(plain) == 1 else char)
    for low, high in _UNSPACED:
        span = table[low : high + 1]
        span[span != 0] |= _SINGLE
    table[ord(_BREAK)] = _SINGLE | np.uint64(0x7FFFFFFF)
    return table


def _prompts(row: RawRow) -> Iterable[str]:
    """The texts of one row that a model is asked with."""
    try:
        value = msgspec.json.decode(row.data)
    except msgspec.DecodeError as error:
        raise broken_json(row, error) from None
    if isinstance(value, str):
        return [value]
    key = next((key for key in TEXT_KEYS if isinstance(value, dict) and value.get(key)), None)
    if key is None:
        raise DataError(f"{row.where}: no prompt in it; merge.benchmarks knows {', '.join(TEXT_KEYS)}")
    texts = [text for item in _as_list(value[key]) if (text := _text(item))]
    if not texts:
        raise DataError(f"{row.where}: '{key}' holds no text")
    return texts


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(item: Any) -> str:
    """A text, or what a message that is not the answer says."""
    if isinstance(item, str):
        return item
    if isinstance(item, dict) and item.get("role", item.get("from")) not in ("assistant", "gpt", "system"):
        said = item.get("content", item.get("value"))
        if isinstance(said, list):
            return "\n".join(
                part["text"] for part in said if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        return said if isinstance(said, str) else ""
    return ""
