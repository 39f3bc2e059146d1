"""Renderings of the beginnings of one conversation, and which turns the longest of them shows exactly."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

from eyas.data.render import TEMPLATE_ERRORS, Renderer
from eyas.data.shown import THOUGHT_KEYS

PROBE = "eyasprobe"
"""An answer that no template has reason to change."""
MANY_TURNS, NUM_TRIED_TURNS = 64, 8
"""Conversations with more turns are dropped by their whole rendering; so many turns tell that it shows all of them."""
PIECE_MESSAGES = 8
MAX_MISSED_TURNS = 8
"""Where there are many turns, those before so many that are not shown count as not shown, and get renderings of their
own: they would be looked at again for each of these."""
MAX_KEPT_CHARS = 16 << 20
"""Renderings of one conversation that are remembered; beyond it the oldest are made again."""


class Place(NamedTuple):
    """Where a turn stands in a rendering, in characters."""

    begin: int
    """Of its message, header included; of its words where nobody asked."""
    start: int
    """Of its words, behind the prompt."""
    end: int


class Renders:
    """Renderings of the beginnings of one conversation, remembered as far as that is cheap."""

    def __init__(self, renderer: Renderer, messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> None:
        self.messages = messages
        self.tools = tools
        self._renderer = renderer
        self._kept: dict[tuple[int, bool], str] = {}
        self._kept_chars = 0

    def before(self, turn: int) -> str:
        """The prompt that asks for the turn."""
        return self._text(turn, True)

    def up_to(self, turn: int) -> str:
        """The messages up to the turn, itself included."""
        return self._text(turn + 1, False)

    def begin(self, turn: int, whole: str) -> int:
        """Where the turn's message begins in `whole`, which shows it exactly: if possible, before its header."""
        try:
            without_prompt = self._text(turn, False)
        except TEMPLATE_ERRORS:
            return len(self.before(turn))
        return len(without_prompt) if whole.startswith(without_prompt) else len(self.before(turn))

    def hides_tools(self, turn: int) -> bool:
        """Whether there are tools, and the prompt that asks for the turn is the same without them."""
        if not self.tools:
            return False
        try:
            without = self._renderer.text(self.messages[:turn], (), add_generation_prompt=True)
            return without == self.before(turn)
        except TEMPLATE_ERRORS:
            return False

    def written(self, turn: int) -> str:
        """What follows the generation prompt where the turn is rendered last; empty where that cannot be told."""
        without_prompt, before, up_to = self._text(turn, False), self.before(turn), self.up_to(turn)
        header = before.removeprefix(without_prompt)
        if not before.startswith(without_prompt) or not header:
            return ""
        # The same messages with another answer: what both renderings begin with is not the answer's.
        message = self.messages[turn]
        other = message | {key: f"{PROBE} {len(up_to)}" for key in ("content", *THOUGHT_KEYS) if message.get(key)}
        probe = self._renderer.text([*self.messages[:turn], other], self.tools)
        place = up_to.rfind(header, 0, num_common(up_to, probe))
        return up_to[place + len(header) :] if place >= 0 else ""

    def shows(self, turn: int, last: int) -> bool:
        """Whether the rendering up to `last` shows the turn as it was asked for and written."""
        try:
            before, up_to = self.before(turn), self.up_to(turn)
            whole = self.up_to(last)
        except TEMPLATE_ERRORS:
            return False
        return len(before) < len(up_to) and whole.startswith(before) and whole.startswith(up_to)

    def shown(self, turns: Sequence[int], *, with_begins: bool) -> dict[int, Place]:
        """Which turns the rendering up to the last of them shows exactly, ascending; none where not even that one."""
        last = turns[-1]
        if not self.shows(last, last):
            return {}
        many = len(turns) > MANY_TURNS
        if many and (found := self._by_pieces(turns, with_begins)) is not None:
            return found
        whole = self.up_to(last)
        found = {}
        num_missed = 0
        for i in reversed(turns):
            if i == last or self.shows(i, last):
                found[i] = self._place(i, whole, with_begins)
            else:
                num_missed += 1
                if many and num_missed >= MAX_MISSED_TURNS:
                    break
        return dict(reversed(found.items()))

    def _by_pieces(self, turns: Sequence[int], with_begins: bool) -> dict[int, Place] | None:
        """What `shown` says of many turns that all are, in time that grows with their number, not with its square.

        Each few messages are rendered by themselves, behind the beginning of the conversation. Where these pieces, one
        behind the other, are the rendering of the whole, a turn stands in it where it stands in its piece; some turns
        are looked at in the whole as well. None where that does not hold, or a turn is not shown.
        """
        last = turns[-1]
        answers = [i for i in range(1, last + 1) if self.messages[i]["role"] == "assistant"]
        first = answers[0]
        head = self.messages[: first + 1]
        found: dict[int, Place] = {}
        try:
            start, whole = self.up_to(first), self.up_to(last)
            if not whole.startswith(start) or (first in turns and not self.shows(first, last)):
                return None
            if first in turns:
                found[first] = self._place(first, whole, with_begins)
            begin, num_chars = first + 1, len(start)
            while begin <= last:
                end = answers[min(bisect.bisect_left(answers, begin + PIECE_MESSAGES - 1), len(answers) - 1)]
                piece = Renders(self._renderer, [*head, *self.messages[begin : end + 1]], self.tools)
                text = piece.up_to(len(piece.messages) - 1)
                if not text.startswith(start) or not whole.startswith(text[len(start) :], num_chars):
                    return None
                for i in turns[bisect.bisect_left(turns, begin) : bisect.bisect_right(turns, end)]:
                    here = len(head) + i - begin
                    if not piece.shows(here, len(piece.messages) - 1):
                        return None
                    place = piece._place(here, text, with_begins)
                    found[i] = Place(*(edge + num_chars - len(start) for edge in place))
                begin, num_chars = end + 1, num_chars + len(text) - len(start)
            tried = turns[:: len(turns) // NUM_TRIED_TURNS]
            same = all(self.shows(i, last) and self._place(i, whole, with_begins) == found[i] for i in tried)
        except TEMPLATE_ERRORS:
            return None
        return found if same and num_chars == len(whole) else None

    def _place(self, turn: int, whole: str, with_begin: bool) -> Place:
        start = len(self.before(turn))
        return Place(self.begin(turn, whole) if with_begin else start, start, len(self.up_to(turn)))

    def _text(self, num_messages: int, prompt: bool) -> str:
        key = num_messages, prompt
        if (known := self._kept.pop(key, None)) is None:
            known = self._renderer.text(self.messages[:num_messages], self.tools, add_generation_prompt=prompt)
            self._kept_chars += len(known)
        self._kept[key] = known
        while self._kept_chars > MAX_KEPT_CHARS and len(self._kept) > 1:
            self._kept_chars -= len(self._kept.pop(next(iter(self._kept))))
        return known


def num_common(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
