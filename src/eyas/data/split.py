"""Which conversations are held out of training, and which language a text is in: cheap, and the same on any machine.

A conversation's split follows from the text of its first user turn alone, so that its turns and all answers to it stay
together, new conversations move no old one, and a larger held-out share holds a smaller one. Rows without a user turn
go by their text. Token ids alone go by those before the first supervised one where these are at least
`MIN_PROMPT_TOKENS`, else by all of them: fewer (none, or a BOS) are the same for conversations that have nothing in
common.
"""

from __future__ import annotations

import re

import xxhash

from eyas.records import Span, TokenIds

TRAIN, HELD_OUT = "train", "held_out"
SPLIT_TAG = b"eyas.split.1\0"
MIN_PROMPT_TOKENS = 8
"""Token ids before the first supervised one that tell conversations apart."""
MAX_LANGUAGE_CHARS = 4096
"""Text that is looked at to tell its script."""
KANA_SHARE = 0.1
"""Japanese mixes kana with Chinese characters: with this share of kana the text is Japanese."""

_SCRIPTS: dict[str, re.Pattern[str]] = {
    "latin": re.compile(r"[A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u1e00-\u1eff]"),
    "han": re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "kana": re.compile("[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d]"),
    "hangul": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]"),
    "cyrillic": re.compile("[\u0400-\u052f]"),
    "arabic": re.compile("[\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufeff]"),
    "devanagari": re.compile("[\u0900-\u097f]"),
    "greek": re.compile("[\u0370-\u03ff\u1f00-\u1fff]"),
    "hebrew": re.compile("[\u0590-\u05ff]"),
    "thai": re.compile("[\u0e00-\u0e7f]"),
    "bengali": re.compile("[\u0980-\u09ff]"),
    "tamil": re.compile("[\u0b80-\u0bff]"),
    "telugu": re.compile("[\u0c00-\u0c7f]"),
    "georgian": re.compile("[\u10a0-\u10ff]"),
    "armenian": re.compile("[\u0530-\u058f]"),
}


def split_of_text(text: str, held_out: float) -> str:
    """The split of the conversation that begins with `text`; white space around it does not count."""
    return _split(text.strip().encode("utf-8", "surrogatepass"), held_out)


def split_of_ids(token_ids: TokenIds, loss_spans: tuple[Span, ...], held_out: float) -> str:
    """The split of a row that is token ids alone: by those before the first supervised one, by all where these are few.

    Few are fewer than `MIN_PROMPT_TOKENS`. Answers to one such prompt may then be in both splits.
    """
    first = loss_spans[0][0]
    key = token_ids[:first] if first >= MIN_PROMPT_TOKENS else token_ids
    return _split(key.astype("<i4").tobytes(), held_out)


def _split(key: bytes, held_out: float) -> str:
    return HELD_OUT if xxhash.xxh3_64_intdigest(SPLIT_TAG + key) < held_out * 2.0**64 else TRAIN


def script_of(text: str) -> str:
    """The script of most letters at the beginning of `text`; `other` for a rarer one, empty without letters."""
    text = text[:MAX_LANGUAGE_CHARS]
    if text.isascii():
        return "latin" if _SCRIPTS["latin"].search(text) else ""
    counts = {script: len(pattern.findall(text)) for script, pattern in _SCRIPTS.items()}
    east = counts["kana"] + counts["han"]
    if counts["kana"] > KANA_SHARE * east:
        counts["kana"], counts["han"] = east, 0
    # The first of equals, in the order above: the same on any machine.
    script = max(counts, key=lambda name: counts[name])
    if counts[script]:
        return script
    return "other" if any(c.isalpha() for c in text) else ""
