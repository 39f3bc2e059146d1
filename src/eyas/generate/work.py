"""Which conversation is next: those that wait for another try first, then new ones from the prompts file."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator

from eyas.generate.conversation import Conversation
from eyas.generate.prompts import Prompt

ROWS_AT_A_TIME = 256
"""Rows of the prompts file that are passed over before others get their turn."""


class Work:
    """Hands out conversations, for one event loop; holds only those that were begun.

    `prompts` may yield None where there is nothing to do. `admit` says whether a conversation may go on now, and is
    asked again when another one is settled or given back.
    """

    def __init__(self, prompts: Iterator[Prompt | None], admit: Callable[[Conversation], bool]) -> None:
        self.num_out = 0
        """Handed out, and neither filed nor given back."""
        self.num_new = 0
        """Conversations begun by this run."""
        self.allowed: int | None = None
        """So many may be begun for now."""
        self.done = asyncio.Event()
        """Set once nothing is left to hand out and nothing is out."""
        self.starved: Conversation | None = None
        """What was not admitted though nothing else was in progress: nothing more will be."""
        self._prompts, self._admit = prompts, admit
        self._next: Conversation | None = None
        self._exhausted = False
        self._again: list[tuple[float, int, Conversation]] = []
        self._serials = itertools.count()
        self._changed = asyncio.Event()

    async def take(self) -> Conversation | None:
        """The next one; waits until there is one, and is None when there will be no more."""
        passed = 0
        while True:
            now = time.monotonic()
            waiting = self._again[0] if self._again and self._again[0][0] <= now else None
            if waiting is None and self._next is None and self._may_begin():
                try:
                    prompt = next(self._prompts)
                except StopIteration:
                    self._exhausted = True
                    self.wake()
                    continue
                if prompt is not None:
                    self._next = Conversation(prompt)
                    self.num_new += 1
                    continue
                passed += 1
                if passed % ROWS_AT_A_TIME == 0:
                    await asyncio.sleep(0)
                continue
            candidate = waiting[2] if waiting is not None else self._next
            if candidate is not None and self._admit(candidate):
                self.num_out += 1
                if waiting is not None:
                    heapq.heappop(self._again)
                else:
                    self._next = None
                return candidate
            # What waits for its next try has its money already: only without it nothing can go on.
            is_last = candidate is not None and (waiting is not None or not self._again)
            if not self.num_out and (is_last or (self._exhausted and candidate is None and not self._again)):
                self.starved = candidate
                self.done.set()
                self.wake()
                return None
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, self._again[0][0] - now) if self._again and not waiting else None):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _may_begin(self) -> bool:
        return not self._exhausted and (self.allowed is None or self.num_new < self.allowed)

    def give_back(self, conversation: Conversation, pause_s: float = 0.0) -> None:
        """To be tried again after a pause."""
        self.num_out -= 1
        heapq.heappush(self._again, (time.monotonic() + pause_s, next(self._serials), conversation))
        self.wake()

    def settled(self) -> None:
        """One that was handed out is done with."""
        self.num_out -= 1
        if self._exhausted and not self.num_out and not self._again and self._next is None:
            self.done.set()
        self.wake()

    def resume(self, conversations: list[Conversation]) -> None:
        """Hand out once more what was settled."""
        for conversation in conversations:
            self.num_out += 1
            self.give_back(conversation)
        self.done.clear()

    def unfinished(self) -> list[Conversation]:
        """Begun, and waiting for another try that will not come."""
        return [conversation for _, _, conversation in self._again]

    def wake(self) -> None:
        self._changed.set()
