"""Which conversations share a passage with a benchmark: the same `ngram` words in a row.

Words are runs of letters, marks and digits, lower-cased and without compatibility forms; whatever stands between them
does not matter. In scripts written without blanks (Chinese, Japanese, Thai and their like) each character is a word.
Compared are the texts of all turns, tool turns, thoughts and the texts in the arguments of tool calls among them, each
by itself: a passage that begins in one and ends in another is not found. A prompt that is shorter than `ngram` is a
passage as a whole; one of fewer than 8 words counts only where it is all that a text says, because `go on` stands
everywhere.

All texts of a batch are looked at together, as arrays. A word has a shape, its first letter and its length, and a hash
of all its letters, 64 bits each; so has a passage, of those of its words, and differences of one running sum give the
shapes of all passages of any length. Hashes are made only where the shape is that of a benchmark's passage, which is
hardly ever chance. Letters: `C` UTF-16 units, `W` words of a batch. What UTF-16 needs two units for (emoji, rare
ideographs) counts as no letter.
"""

from __future__ import annotations

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
BLOCK_CHARS = 1 << 16
"""Characters that are looked at together: their arrays stay in the cache."""
MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARS = 160
TEXT_KEYS = ("turns", "messages", "conversations", "prompt", "question", "problem", "instruction", "query", "text")

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_BREAK = " \0 "
"""Between two texts: a word that no passage has."""
_WORD_BASE = 0xD1342543DE82EF95
_STEP = np.uint64(0x9E3779B97F4A7C15)
_LOAD = 4
"""Letters in 64 bits."""
_MASKS = np.array([(1 << (16 * n)) - 1 for n in range(_LOAD + 1)], dtype=np.uint64)
MAX_WORD_LETTERS = 64
"""Of a longer word only the beginning and the length count."""
# Scripts without blanks between words, as ranges of code points.
_UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),
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
    shapes: Words
    """Sorted, each once."""
    may_be: npt.NDArray[np.bool_]
    """By the top bits of a shape: whether it is worth a search."""
    shift: np.uint64


@dataclass(frozen=True, slots=True)
class _Text:
    """The words of a text."""

    units: npt.NDArray[np.uint16]
    """The text itself `[C]`."""
    letters: npt.NDArray[np.uint16]
    """What each unit counts as, 0 for no letter, and some zeros more `[C + 4]`."""
    starts: Places
    """Where each word begins `[W]`."""
    lengths: Places
    """Letters of each word `[W]`."""

    def shapes(self) -> Words:
        """First letter and length of each word `[W]`."""
        return self.letters[self.starts] + (self.lengths.astype(np.uint64) << np.uint64(16))

    def hashes(self, which: Places | slice = slice(None)) -> Words:
        """Hashes of the words, or of some of them."""
        starts, lengths = self.starts[which], self.lengths[which]
        # Four letters at a time, from wherever a word begins; what lies behind its end is masked.
        fours: Words = np.ndarray((len(self.units) + 1,), dtype="<u8", buffer=self.letters.data, strides=(2,))
        hashes = _mixed((fours[starts] & _MASKS[np.minimum(lengths, _LOAD)]) + lengths.astype(np.uint64) * _STEP)
        for done in range(_LOAD, MAX_WORD_LETTERS, _LOAD):
            longer = np.flatnonzero(lengths > done)
            if not len(longer):
                break
            more = fours[starts[longer] + done] & _MASKS[np.minimum(lengths[longer] - done, _LOAD)]
            hashes[longer] = _mixed(hashes[longer] * _STEP + more)
        return hashes

    def passages(self, places: Places, length: int) -> Words:
        """Hashes of the passages of so many words that begin at some words; as `_passages_of` all words' hashes."""
        hashes = self.hashes((places[:, None] + np.arange(length)).ravel()).reshape(-1, length)
        up, _ = _powers(length)
        return _mixed((hashes * up[:length]).sum(axis=1, dtype=np.uint64))


class Benchmarks:
    """The prompts of some benchmarks, and what was found of them so far."""

    def __init__(self, paths: Sequence[Path], ngram: int) -> None:
        self.reports: list[BenchmarkReport] = []
        self._benchmark_of: list[int] = []
        self._where: list[str] = []
        self._leaked: set[int] = set()
        self._shortest = min(SHORTEST_PASSAGE, ngram)
        found: dict[int, tuple[list[Words], list[Words], list[int]]] = {}
        for path in open_rows(paths, field="merge.benchmarks").files:
            self._read(path, ngram, found)
        self._passages = {length: _index(*lists) for length, lists in sorted(found.items())}

    def _read(self, path: Path, ngram: int, found: dict[int, tuple[list[Words], list[Words], list[int]]]) -> None:
        report = BenchmarkReport(str(path), 0)
        for row in Rows([path]):
            prompt = len(self._where)
            for text in _prompts(row):
                report.num_prompts += 1
                words = _words_in(text)
                if not len(words.starts):
                    continue
                length = min(len(words.starts), ngram)
                hashes = _passages_of(_sums(words.hashes()), length)
                lists = found.setdefault(length, ([], [], []))
                lists[0].append(hashes)
                lists[1].append(_passages_of(_sums(words.shapes()), length))
                lists[2].extend([prompt] * len(hashes))
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
        text = _words_in(_BREAK + _BREAK.join(pieces) + _BREAK)
        starts, shapes = text.starts, text.shapes()
        sums = _sums(shapes)
        is_break = shapes == _break_shape()
        ends: Places | None = None
        seen: set[tuple[int, int]] = set()
        for length, passages in self._passages.items():
            if length + 2 > len(starts):
                continue  # a break stands at both ends
            shapes = _passages_of(sums, length)  # [W - length + 1]
            likely = passages.may_be[(shapes >> passages.shift).astype(np.int64)]
            if length < self._shortest:
                whole = np.zeros(len(shapes), dtype=np.bool_)
                whole[1:-1] = is_break[: len(shapes) - 2] & is_break[length + 1 :]
                likely &= whole
            places = np.flatnonzero(likely)
            places = places[_places_in(passages.shapes, shapes[places])[1]]
            if not len(places):
                continue
            at, sure = _places_in(passages.hashes, text.passages(places, length))
            for place, prompt in zip(places[sure].tolist(), passages.prompts[at[sure]].tolist(), strict=True):
                if ends is None:
                    sizes = [len(piece.encode("utf-16-le", "replace")) // 2 + len(_BREAK) for piece in pieces]
                    ends = np.cumsum(sizes) + len(_BREAK)  # [conversations], in units
                i = block[int(np.searchsorted(ends, starts[place], side="right"))]
                if not found[i] or (i, self._benchmark_of[prompt]) not in seen:
                    said = text.units[starts[place] : starts[place + length]].tobytes().decode("utf-16-le", "replace")
                    passage = " ".join(said.split())[:MAX_EXAMPLE_CHARS]
                    found[i] = found[i] or passage
                    self._count(i, prompt, str(wheres[i]), passage, seen)
                self._leak(prompt)

    def _leak(self, prompt: int) -> None:
        if prompt not in self._leaked:
            self._leaked.add(prompt)
            self.reports[self._benchmark_of[prompt]].num_leaked_prompts += 1

    def _count(self, i: int, prompt: int, where: str, passage: str, seen: set[tuple[int, int]]) -> None:
        number = self._benchmark_of[prompt]
        report = self.reports[number]
        seen.add((i, number))
        report.num_conversations += 1
        if len(report.examples) < MAX_EXAMPLES:
            report.examples.append(LeakExample(where, self._where[prompt], passage))


def words_of(text: str) -> Words:
    """The words of a text as hashes `[W]`."""
    return _words_in(text).hashes()


def _words_in(text: str) -> _Text:
    units = np.frombuffer(text.encode("utf-16-le", "replace"), dtype="<u2")
    letter_of, is_word = _letters()
    letters = np.zeros(len(units) + _LOAD, dtype="<u2")
    letters[: len(units)] = letter_of.take(units)
    inside = np.zeros(len(units) + 2, dtype=np.bool_)  # one more at either end, which is no letter
    np.not_equal(letters[: len(units)], 0, out=inside[1:-1])
    begins_or_ends = inside[1:] != inside[:-1]  # [C + 1]
    edges = np.flatnonzero(begins_or_ends)
    high = np.flatnonzero(units >= _UNSPACED[0][0])
    alone = high[is_word[units[high]]]
    if len(alone):
        # A word of its own begins and ends also where the letters go on: there one word ends and another begins.
        cut = np.zeros(len(begins_or_ends), dtype=np.bool_)
        cut[alone] = cut[alone + 1] = True
        edges = np.flatnonzero(begins_or_ends | cut)
        edges = np.repeat(edges, np.where(begins_or_ends[edges], 1, 2))
    starts = edges[::2]
    return _Text(units, letters, starts, edges[1::2] - starts)


def _mixed(hashes: Words) -> Words:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return hashes ^ (hashes >> np.uint64(29))


def _sums(words: Words) -> Words:
    """Running sums `[W + 1]` of the words, each times a power of its place."""
    up, _ = _powers(len(words))
    sums = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(words * up[: len(words)], out=sums[1:])
    return sums


def _passages_of(sums: Words, length: int) -> Words:
    """Hashes of all passages of so many words `[W - length + 1]`."""
    _, down = _powers(len(sums))
    return _mixed((sums[length:] - sums[:-length]) * down[: len(sums) - length])


def _index(hashes: list[Words], shapes: list[Words], prompts: list[int]) -> _Passages:
    unique, first = np.unique(np.concatenate(hashes), return_index=True)
    unique_shapes = np.unique(np.concatenate(shapes))
    bits = min(24, max(16, (16 * len(unique_shapes)).bit_length()))
    shift = np.uint64(64 - bits)
    may_be = np.zeros(1 << bits, dtype=np.bool_)
    may_be[(unique_shapes >> shift).astype(np.int64)] = True
    return _Passages(unique, np.array(prompts, dtype=np.int32)[first], unique_shapes, may_be, shift)


def _places_in(ascending: Words, values: Words) -> tuple[Places, npt.NDArray[np.bool_]]:
    """Where each value would stand, and whether it does."""
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return at, ascending[at] == values


_power_tables: list[tuple[Words, Words]] = []


def _powers(count: int) -> tuple[Words, Words]:
    """Powers of an odd number and of its inverse, modulo 2^64."""
    if not _power_tables or len(_power_tables[-1][0]) < count:
        size = max(1 << 14, 1 << (count - 1).bit_length())
        inverse = pow(_WORD_BASE, -1, 1 << 64)
        _power_tables[:] = [(_power_table(_WORD_BASE, size), _power_table(inverse, size))]
    return _power_tables[-1]


def _power_table(base: int, size: int) -> Words:
    powers = np.full(size, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


@cache
def _break_shape() -> Any:
    (shape,) = _words_in(_BREAK).shapes()
    return shape


@cache
def _letters() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """For each UTF-16 unit the letter that it counts as, 0 for none, and whether it is a word of its own."""
    letters = np.zeros(1 << 16, dtype=np.uint16)
    alone = np.zeros(1 << 16, dtype=np.bool_)
    for code in range(1 << 16):
        char = chr(code)
        if unicodedata.category(char)[0] not in "LMN":
            continue
        plain = unicodedata.normalize("NFKC", char)
        plain = (plain if len(plain) == 1 else char).lower()
        letters[code] = ord(plain if len(plain) == 1 and ord(plain) < 1 << 16 else char)
    for low, high in _UNSPACED:
        alone[low : high + 1] = letters[low : high + 1] != 0
    letters[ord(_BREAK.strip())] = 0xFFFF
    return letters, alone


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
    asked = value[key]
    if (
        key == "instruction"
        and isinstance(asked, str)
        and isinstance(value.get("input"), str)
        and value["input"].strip()
    ):
        # As merge puts them together.
        asked = f"{asked}\n\n{value['input']}"
    texts = [text for item in _as_list(asked) if (text := _text(item))]
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
