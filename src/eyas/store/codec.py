"""How a field's logical bytes are stored. Version 1 knows one way: `raw`, one part, the bytes themselves."""

from __future__ import annotations

from collections.abc import Collection

from eyas.errors import StoreError

RAW = "raw"
WHOLE = ""
"""Name of the only part of a `raw` field."""

CODECS = (RAW,)


def require(codec: object, path: object) -> None:
    """Refuse a codec that this version cannot decode, before any byte is read."""
    if not isinstance(codec, str):
        raise ValueError(f"has codec {codec!r:.100}")
    if codec not in CODECS:
        raise StoreError(
            f"{path}: codec '{codec}' is unknown to this eyas (known: {', '.join(CODECS)}); use a newer one",
            path=str(path),
        )


def require_parts(codec: str, names: Collection[str]) -> None:
    """Raise ValueError where a field's parts are not those of its codec."""
    assert codec == RAW
    if list(names) != [WHOLE]:
        raise ValueError(f"has parts {sorted(names)} of a raw field, which has just one, '{WHOLE}'")


def part_tensor(sample_index: int, field: str, part: str) -> str:
    """The safetensors name of a part: `{i}.{field}`, and `.{part}` where it has a name."""
    return f"{sample_index}.{field}.{part}" if part else f"{sample_index}.{field}"
