"""What of the target's own words is not supervised: thoughts, when they are not wanted, and what matches a pattern.

A thought stands between two markers, which belong to it; each family of models has its own. Where the prompt has
opened the thought already, it begins with the turn; where it is not closed, it ends with the turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas.data.spans import View
from eyas.errors import ConfigError
from eyas.records import Span

THOUGHT_MARKERS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)", re.DOTALL)
"""Harmony's thoughts: a message of their own, its end included."""
EMPTY_THOUGHT = re.compile("|".join(rf"{re.escape(a)}\s*{re.escape(b)}" for a, b in THOUGHT_MARKERS))

_BLOCKS = [
    (opening, closing, re.compile(rf"{re.escape(opening)}.*?(?:{re.escape(closing)}|\Z)", re.DOTALL))
    for opening, closing in THOUGHT_MARKERS
]


@dataclass(frozen=True, slots=True)
class Rules:
    """What of the assistant turns is supervised."""

    last_turn_only: bool = False
    reasoning: bool = True
    ignore: tuple[re.Pattern[str], ...] = ()

    @property
    def need_text(self) -> bool:
        return bool(self.ignore) or not self.reasoning

    def apply(self, mask: npt.NDArray[np.bool_], turns: Sequence[Span], view: View) -> tuple[int, int]:
        """Clear the mask `[T]` where a rule says so; tokens that it took for thoughts and for matches.

        A token that is partly in a thought or in a match is taken as a whole. `turns` are token spans.
        """
        taken = [0, 0]
        for start, end in turns:
            if start >= end:
                continue
            first, last = int(view.starts[start]), int(view.ends[end - 1])
            text = view.text[first:last]
            stretches = [] if self.reasoning else list(thoughts(text, view.text[:first]))
            matches = [match.span() for pattern in self.ignore for match in pattern.finditer(text)]
            for kind, found in enumerate((stretches, matches)):
                for a, b in found:
                    if a == b:
                        continue
                    i, j = view.touched(first + a, first + b)
                    i, j = max(i, start), min(j, end)
                    taken[kind] += int(np.count_nonzero(mask[i:j]))
                    mask[i:j] = False
        return taken[0], taken[1]


def patterns(texts: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """The regular expressions of `data.ignore`; ConfigError for one that is none."""
    compiled = []
    for text in texts:
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            raise ConfigError(f"data.ignore: {text!r} is no regular expression: {error}") from None
    return tuple(compiled)


def opens_thought(prompt: str) -> tuple[str, str] | None:
    """The markers of the thought that the prompt ends in."""
    end = prompt.rstrip()
    return next((pair for pair in THOUGHT_MARKERS if end.endswith(pair[0])), None)


def thoughts(turn: str, prompt: str = "") -> Iterator[Span]:
    """Where the thoughts of a turn stand in its text, markers included."""
    opened = opens_thought(prompt[-200:])
    for opening, closing, block in _BLOCKS:
        begin = 0
        close, reopen = turn.find(closing), turn.find(opening)
        if close >= 0 and (reopen < 0 or close < reopen):
            begin = close + len(closing)
            yield 0, begin
        elif opened == (opening, closing) and close < 0 and reopen < 0:
            yield 0, len(turn)
            continue
        for match in block.finditer(turn, begin):
            yield match.span()
    for match in ANALYSIS.finditer(turn):
        yield match.span()
