"""Row ids by the million: what is known of each, in at most 32 bytes a row."""

from __future__ import annotations

from typing import Final

import xxhash

KEY_BYTES = 16
FULLEST = 0.75
"""Share of the slots in use at which the table grows: fuller ones have long ways to go."""
GROWTH = 1.4
SMALLEST = 64


class Known:
    """What is known of a row. Plain numbers: an `IntFlag` costs more than the look-up."""

    PLANNED: Final = 1
    """It is a row of the prompts file."""
    VISITED: Final = 2
    """Its line was read for the second time."""
    ANSWERED: Final = 4
    REJECTED: Final = 8
    RETRIED: Final = 16
    """It was rejected, and is tried again since."""
    DONE: Final = 12


class RowTable:
    """Row id to flags, an open-addressed table of 17 bytes a slot; nothing is ever taken out.

    Ids are kept as their digests, so any text will do.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._resize(SMALLEST)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        return len(self._keys) + len(self._flags)

    def get(self, row_id: str) -> int:
        """The row's flags; 0 where it is not known."""
        return self._flags[self._find(xxhash.xxh3_128_digest(row_id.encode()))]

    def add(self, row_id: str, flags: int) -> int:
        """Set flags, which are not zero; returns those that were set before."""
        key = xxhash.xxh3_128_digest(row_id.encode())
        slot = self._find(key)
        before = self._flags[slot]
        self._flags[slot] = before | flags
        if not before:
            self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
            self._num_rows += 1
            if self._num_rows > FULLEST * self._num_slots:
                self._grow()
        return before

    def _find(self, key: bytes) -> int:
        """The slot that holds the key, or the free one where it belongs."""
        slot = int.from_bytes(key[:8], "little") % self._num_slots
        keys, flags = self._keys, self._flags
        while flags[slot] and keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] != key:
            slot = slot + 1 if slot + 1 < self._num_slots else 0
        return slot

    def _resize(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._keys = bytearray(num_slots * KEY_BYTES)
        self._flags = bytearray(num_slots)

    def _grow(self) -> None:
        keys, flags = self._keys, self._flags
        self._resize(int(self._num_slots * GROWTH))
        for old, known in enumerate(flags):
            if known:
                key = bytes(keys[old * KEY_BYTES : (old + 1) * KEY_BYTES])
                slot = self._find(key)
                self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
                self._flags[slot] = known
