"""The nouns: what a sample, a capture spec, a record and a reject are. Letters: `T` tokens, `H` hidden size.

Everything here is plain data without torch, so that any room and any small tool can read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

FORMAT_VERSION = 1
SAMPLE_TAG = b"eyas.sample.1\0"
SHARD_TAG = b"eyas.shard.1\0"
DIGEST_HEX = 32
"""Hex digits of an xxh3-128 digest, the one digest of this project."""

LAST = "last"
UNKNOWN = "unknown"

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SAFETENSORS_DTYPE: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

TokenIds = npt.NDArray[np.int32]
Span = tuple[int, int]


def digest_bytes(*parts: bytes | bytearray | memoryview) -> str:
    """xxh3-128 over the parts, one after the other, as 32 hex digits."""
    h = xxhash.xxh3_128()
    for part in parts:
        h.update(part)
    return h.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one JSON spelling that digests are taken of: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sample_id_of(token_ids: npt.ArrayLike, non_text_digest: bytes = b"") -> str:
    """A sample's identity: xxh3-128 of a tag, the int32 little-endian token ids, the digest of non-text inputs."""
    ids = np.ascontiguousarray(token_ids, dtype="<i4")
    return digest_bytes(SAMPLE_TAG, ids.tobytes(), non_text_digest)


def shard_id_of(sample_ids: Iterable[str], attempt: int = 0) -> str:
    """A shard's identity: xxh3-128 of a tag and its ordered sample ids (16 bytes each).

    The how-manieth retry enters as four little-endian bytes behind the tag; a first try (0) adds nothing.
    """
    h = xxhash.xxh3_128(SHARD_TAG + (attempt.to_bytes(4, "little") if attempt else b""))
    for sample_id in sample_ids:
        h.update(bytes.fromhex(sample_id))
    return h.hexdigest()


def hidden_field(k: int) -> str:
    """The field that holds hidden-state index `k` (after `k` decoder layers)."""
    return f"hidden.{k}"


def is_digest(text: str) -> bool:
    """Whether `text` is 32 lower-case hex digits, the only form in which a digest may become part of a file name."""
    return len(text) == DIGEST_HEX and all(c in "0123456789abcdef" for c in text)


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence with the tokens that are supervised; row `t` of everything is about token `t`."""

    token_ids: TokenIds
    """`[T]` int32."""
    loss_spans: tuple[Span, ...] = ()
    """Supervised tokens as half-open, ascending, disjoint spans `[start, end)`."""
    sample_id: str = ""
    conversation_id: str = ""
    source: str = ""
    tags: tuple[str, ...] = ()
    split: str = "train"
    """`train` or `held_out`."""
    language: str = ""
    """As the row says, else the script that most of its text is written in; empty where neither is known."""

    def __post_init__(self) -> None:
        if not self.sample_id:
            object.__setattr__(self, "sample_id", sample_id_of(self.token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_supervised(self) -> int:
        return sum(end - start for start, end in self.loss_spans)

    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """`[T]` bool: true where the token is supervised."""
        mask = np.zeros(len(self.token_ids), dtype=np.bool_)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask


def spans_of(mask: npt.ArrayLike) -> tuple[Span, ...]:
    """The half-open spans in which a `[T]` mask is true."""
    m = np.asarray(mask, dtype=np.int8)
    if m.size == 0:
        return ()
    edges = np.flatnonzero(np.diff(m, prepend=0, append=0))
    return tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))


class CaptureSpec(BaseModel):
    """What a consumer must know about the values. Its digest is the data set's fingerprint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_digest: str
    """Digest of the target's weights, or `unknown`."""
    quantisation: str = "none"
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    aux_layers: tuple[int, ...]
    """Hidden-state indices, ascending: `k` = the residual stream after `k` decoder layers, `0..num_layers`."""
    last_hidden_norm: Literal["pre", "post", "unknown"]
    """Whether the last hidden state is before or after the target's final norm."""
    dtype: Literal["bfloat16", "float16", "float32"]
    origin: dict[str, str] = Field(default_factory=dict)
    """For imports: where a value that was not measured comes from, by field name."""

    @field_validator("aux_layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if list(layers) != sorted(set(layers)):
            raise ValueError(f"aux_layers {list(layers)} must be ascending without repeats")
        return layers

    @model_validator(mode="after")
    def _in_range(self) -> CaptureSpec:
        bad = [k for k in self.aux_layers if not 0 <= k <= self.num_layers]
        if bad:
            raise ValueError(f"aux_layers {bad} lie outside 0..{self.num_layers}, the target's hidden-state indices")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of every sample, in the order in which they are stored."""
        return (*(hidden_field(k) for k in self.aux_layers), LAST)

    @property
    def bytes_per_token(self) -> int:
        return len(self.fields) * self.hidden_size * DTYPE_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        return digest_bytes(canonical_json(self.model_dump(mode="json")))

    def differences(self, other: CaptureSpec) -> list[str]:
        """One phrase for each field that differs: `aux_layers: [2, 15, 27] there, [3, 15, 27] here`."""
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        return [f"{name}: {theirs[name]} there, {mine[name]} here" for name in mine if mine[name] != theirs[name]]


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """`[2, L//2, L-3]`, without repeats and inside `0..L` for very small models."""
    return tuple(sorted({min(max(k, 0), num_layers) for k in (2, num_layers // 2, num_layers - 3)}))


@dataclass(frozen=True, slots=True)
class StateBlock:
    """One field of one sample as it left the engine: `[T, H]`, C-contiguous, native little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """The bytes, without a copy; keeps whatever owns the memory alive."""

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Reject:
    """A sample that could not be captured, and why: a row, never only a log line."""

    sample_id: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a shard was made: engine, version, settings that may move the values a little, host."""

    engine: str
    version: str
    settings: dict[str, str] = field(default_factory=dict)
    """Whatever may change values within tolerance: device, library versions, parallelism, flags."""
    host: str = ""

    def key(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What must be equal for no re-check to be needed; the host's name alone does not count."""
        return self.engine, self.version, tuple(sorted(self.settings.items()))


def as_token_ids(values: Sequence[int] | npt.ArrayLike) -> TokenIds:
    """Token ids as a contiguous int32 array; ValueError when they do not fit."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError("token ids must be a flat list of integers")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError("token ids must lie in 0..2**31-1")
    return np.ascontiguousarray(array, dtype=np.int32)
