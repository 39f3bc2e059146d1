"""Characters to tokens: where a boundary of the text lies between tokens, and which tokens a stretch of text touches.

Letters: `T` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.records import TokenIds

Encode = Callable[[str], list[int]]
Edges = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """A character boundary in tokens: `before` are wholly before it, from `after` on all are wholly behind it."""

    before: int
    after: int
    clean: bool
    """No token across it, and the text before it alone has the same tokens."""


@dataclass(frozen=True, slots=True)
class View:
    """A text and where each token of it begins and ends, `[T]` each, in characters."""

    text: str
    starts: Edges
    ends: Edges

    def touched(self, start: int, end: int) -> tuple[int, int]:
        """The tokens `[first, last)` that have characters in `[start, end)`."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        return first, max(first, last)


class FastTokens:
    """Tokens of one text, with boundaries found by offsets."""

    def __init__(
        self, text: str, ids: list[int], offsets: Sequence[tuple[int, int]], added_ids: TokenIds, encode_tail: Encode
    ) -> None:
        self.ids: TokenIds = np.array(ids, dtype=np.int32)
        self._text = text
        self._encode_tail = encode_tail
        edges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        self._ends = np.maximum.accumulate(edges[:, 1]) if len(edges) else edges[:, 1]
        # Some tokenisers trim the space off a token's offsets: what lies between two tokens is the second one's.
        self._starts = np.minimum(edges[:, 0], np.concatenate(([0], self._ends[:-1]))) if len(edges) else edges[:, 0]
        self._added = np.flatnonzero(np.isin(self.ids, added_ids))

    def view(self) -> View:
        """Text and offsets."""
        return View(self._text, self._starts, self._ends)

    def cut(self, chars: int) -> Cut | None:
        """The boundary before character `chars`."""
        before = int(np.searchsorted(self._ends, chars, side="right"))
        after = int(np.searchsorted(self._starts, chars, side="left"))
        if after > before:
            return Cut(before, after, clean=False)
        # Added tokens split the text for good: one behind the boundary keeps both sides apart, and before the boundary
        # only what follows the last of them can come out otherwise alone.
        following = int(np.searchsorted(self._added, before))
        if before == len(self.ids) or (following < len(self._added) and self._added[following] == before):
            return Cut(before, before, clean=True)
        nearest = following - 1
        first = int(self._added[nearest]) if nearest >= 0 else 0
        tail = self._text[int(self._starts[first]) if nearest >= 0 else 0 : chars]
        return Cut(before, before, clean=self._encode_tail(tail) == self.ids[first:before].tolist())


class SlowTokens:
    """Tokens of one text, with boundaries found by tokenising each prefix."""

    def __init__(self, text: str, encode: Encode, decode: Callable[[list[int]], str]) -> None:
        self.ids: TokenIds = np.array(encode(text), dtype=np.int32)
        self._text = text
        self._encode = encode
        self._decode = decode

    def view(self) -> View:
        """Text and offsets, as far as single tokens tell."""
        return decoded_view(self.ids, self._decode)

    def cut(self, chars: int) -> Cut | None:
        """The boundary before character `chars`; None where it falls inside a token."""
        prefix = self._encode(self._text[:chars])
        if self.ids[: len(prefix)].tolist() != prefix:
            return None
        return Cut(len(prefix), len(prefix), clean=True)


Tokens = FastTokens | SlowTokens


def decoded_view(ids: TokenIds, decode: Callable[[list[int]], str]) -> View:
    """Token ids as text, each token decoded alone: characters of several tokens come out as replacement characters."""
    known: dict[int, str] = {}
    pieces = []
    for token in ids.tolist():
        if token not in known:
            known[token] = decode([token])
        pieces.append(known[token])
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return View("".join(pieces), np.concatenate(([0], ends[:-1])).astype(np.int64), ends)


def longest_token_bytes(tokenizer: Any) -> int:
    """The most bytes of text that one token can stand for; 0 where nothing bounds that.

    Nothing does where a token can stand for any unknown word, or where text is changed or left away before it becomes
    tokens: so only byte-level BPE without a normaliser other than NFC has a bound, which says how NFC is to be counted.
    """
    if not tokenizer.is_fast:
        return 0
    backend = tokenizer.backend_tokenizer
    before = repr(backend.pre_tokenizer)
    kept = "ByteLevel" in before and "Whitespace" not in before and "removed" not in before.lower()
    if type(backend.model).__name__ != "BPE" or not kept or backend.truncation is not None:
        return 0
    if backend.normalizer is not None and type(backend.normalizer).__name__ != "NFC":
        return 0
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added):
        return 0
    # A character of a byte-level token is a byte; those of added tokens are counted in bytes, as all can be.
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """Token ids to text, special tokens included and nothing tidied up."""

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode
