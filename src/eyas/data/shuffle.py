"""Lines in the order of a hash, repetitions left out, in memory that does not grow with their number.

Lines go to bucket files by the first bits of their place; each bucket is then sorted by itself. One that is too large
is split by the next bits. Equal ids have equal places, so a repetition always meets its original.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

BUCKET_BITS = 6
SPLIT_BITS = 4
MAX_BUCKET_BYTES = 32 << 20
BUFFER_BYTES = 1 << 16

_HEADER = struct.Struct("<16s16sHIQBI")
_PLACE_BITS = 64


class Entry(msgspec.Struct, gc=False):
    """A line on its way."""

    place: bytes
    """16 bytes: lines are sorted by it."""
    id: bytes
    """16 bytes."""
    source: int
    file: int
    number: int
    """Row in its file."""
    flags: int
    line: bytes


Admit = Callable[[Entry, Entry | None], bool]
"""Told of a line, and of the line of equal id that is kept already: whether to keep this one. Asked in the order in
which lines were added, as far as equal ids go; True for a repetition is a mistake."""


class Shuffle:
    """Collects lines and gives them back in order. `directory` is made for it; its caller removes it.

    OSError where the disk does not take them.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        directory.mkdir(mode=0o700)
        self._seed = (seed % 2**64).to_bytes(8, "little")
        self._buckets = _Buckets(directory / "b", _PLACE_BITS - BUCKET_BITS, BUCKET_BITS)

    def add(self, id: bytes, source: int, file: int, number: int, flags: int, line: bytes) -> None:
        place = xxhash.xxh3_128_digest(self._seed + id)
        self._buckets.add(place, _HEADER.pack(place, id, source, file, number, flags, len(line)), line)

    def in_order(self, admit: Admit) -> Iterator[Entry]:
        """The lines that are admitted, ascending by place. To be read once."""
        yield from _sorted(self._buckets, admit)


class _Buckets:
    def __init__(self, prefix: Path, shift: int, bits: int) -> None:
        self._paths = [prefix.with_name(f"{prefix.name}{number:02x}") for number in range(1 << bits)]
        self._files: list[BinaryIO | None] = [None] * (1 << bits)
        self._mask = (1 << bits) - 1
        self.shift = shift

    def add(self, place: bytes, header: bytes, line: bytes) -> None:
        number = (int.from_bytes(place[:8], "big") >> self.shift) & self._mask
        file = self._files[number]
        if file is None:
            file = self._files[number] = self._paths[number].open("wb", buffering=BUFFER_BYTES)
        file.write(header + line)

    def close(self) -> list[Path]:
        """The files that there are, in order."""
        for file in self._files:
            if file is not None:
                file.close()
        return [path for path, file in zip(self._paths, self._files, strict=True) if file is not None]


def _sorted(buckets: _Buckets, admit: Admit) -> Iterator[Entry]:
    for path in buckets.close():
        if path.stat().st_size > MAX_BUCKET_BYTES and buckets.shift >= SPLIT_BITS:
            parts = _Buckets(path, buckets.shift - SPLIT_BITS, SPLIT_BITS)
            for header, fields, line in _records(path):
                parts.add(fields[0], header, line)
            path.unlink()
            yield from _sorted(parts, admit)
            continue
        kept: dict[bytes, Entry] = {}
        for _, (place, id, source, file, number, flags), line in _records(path):
            entry = Entry(place, id, source, file, number, flags, line)
            if admit(entry, kept.get(entry.place)):
                kept[entry.place] = entry
        path.unlink()
        for place in sorted(kept):
            yield kept[place]


def _records(path: Path) -> Iterator[tuple[bytes, list[Any], bytes]]:
    """The header of each line, the fields of an `Entry` in it, and the line."""
    with path.open("rb", buffering=1 << 20) as file:
        while header := file.read(_HEADER.size):
            *fields, num_bytes = _HEADER.unpack(header)
            yield header, fields, file.read(num_bytes)
