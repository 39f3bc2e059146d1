"""Stored bytes as numbers, in numpy alone: bfloat16 travels as its 16 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eyas.records import DTYPE_BYTES

_CARRIER: dict[str, np.dtype[np.uint16] | np.dtype[np.uint32]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "float32": np.dtype("<u4"),
}
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_MAGNITUDE = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF}
_CHUNK = 1 << 19
"""Values looked at in one call: little enough for a core's cache, enough for few turns at the interpreter's lock."""


def all_finite(data: memoryview, dtype: str) -> bool:
    """Whether no value is infinite or not a number; in pieces that fit a core's cache."""
    bits = np.frombuffer(data, dtype=_CARRIER[dtype])
    infinity, magnitude = _INFINITY[dtype], _MAGNITUDE[dtype]
    scratch = np.empty(min(_CHUNK, bits.size), dtype=bits.dtype)
    for start in range(0, bits.size, _CHUNK):
        piece = bits[start : start + _CHUNK]
        np.bitwise_and(piece, magnitude, out=scratch[: piece.size])
        if scratch[: piece.size].max() >= infinity:
            return False
    return True


def first_nonfinite_row(data: memoryview, dtype: str, width: int) -> int | None:
    """The first of `[T, width]` rows that holds an infinite value or a NaN."""
    bits = np.frombuffer(data, dtype=_CARRIER[dtype]).reshape(-1, width)
    bad = (np.bitwise_and(bits, _MAGNITUDE[dtype]) >= _INFINITY[dtype]).any(axis=1)
    return int(bad.argmax()) if bad.any() else None


def as_float32(data: memoryview, dtype: str, width: int) -> npt.NDArray[np.float32]:
    """`[T, width]` float32 values, a copy."""
    if dtype == "float32":
        return np.frombuffer(data, dtype="<f4").reshape(-1, width).astype(np.float32)
    if dtype == "float16":
        return np.frombuffer(data, dtype="<f2").reshape(-1, width).astype(np.float32)
    bits = np.frombuffer(data, dtype="<u2").reshape(-1, width).astype(np.uint32) << 16
    return bits.view(np.float32)


def median_row_error(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """Median over rows of `|a - b| / |b|` for `[T, H]` values.

    The median, since a few rows of most models carry massive activations whose rounding says nothing of the rest.
    """
    norm = np.maximum(np.linalg.norm(b, axis=1), np.finfo(np.float32).tiny)
    return float(np.median(np.linalg.norm(a - b, axis=1) / norm))


def row_bytes(dtype: str, width: int) -> int:
    """Bytes of one row of a field."""
    return DTYPE_BYTES[dtype] * width
