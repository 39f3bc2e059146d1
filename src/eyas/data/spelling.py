"""JSON that is moved about as bytes: in its own spelling where it is kept, in one spelling where it is hashed."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

Fields = dict[str, bytes]
"""The fields of an object, each as JSON."""

an_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
a_list = msgspec.json.Decoder(list[msgspec.Raw])
a_text = msgspec.json.Decoder(str)
encode = msgspec.json.Encoder().encode

STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(STRING, re.DOTALL)


def fields_of(decoded: dict[str, msgspec.Raw]) -> Fields:
    """The fields of a decoded object."""
    return {key: bytes(raw) for key, raw in decoded.items()}


def string(raw: bytes) -> bytes:
    """A JSON string in its one spelling: nothing is escaped that need not be."""
    if b"\\u" in raw or b"\\/" in raw:
        return encode(a_text.decode(raw))
    return raw


def compact(raw: bytes) -> bytes:
    """The same JSON without blanks between its tokens; numbers, escapes and the order of keys stay."""
    return msgspec.json.format(raw, indent=-1) if raw[:1] in (b"{", b"[") else raw


def one_spelling(raw: bytes) -> bytes:
    """JSON for digests: each string in its one spelling."""
    if b"\\" not in raw:
        return raw
    if b"\\u" in raw or b"\\/" in raw:
        return _STRINGS.sub(lambda found: string(found[0]), raw)
    return raw


def as_text(raw: bytes) -> bytes:
    """JSON as a JSON string that holds it."""
    return encode(raw.decode())


def joined(fields: Fields) -> bytes:
    """An object of these fields."""
    return b"{" + b",".join(key_of(key) + b":" + value for key, value in fields.items()) + b"}"


@lru_cache(maxsize=1024)
def key_of(name: str) -> bytes:
    """A name as JSON; there are few, and each comes again and again."""
    return encode(name)


def kind_of(raw: bytes) -> str:
    """What a value is, in words."""
    names: dict[Any, str] = {b"n": "null", b"t": "a boolean", b"f": "a boolean", b'"': "text", b"[": "a list"}
    return names.get(raw[:1], "an object" if raw[:1] == b"{" else "a number")
