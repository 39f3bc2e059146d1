"""The record of a shard: JSON written last. What it does not name does not exist in the payload.

Letters: `n` captured samples of the shard, `T` tokens of a sample, `H` hidden size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from eyas.errors import ShardCorrupt, ShardMissing, SpecMismatch, StoreError
from eyas.records import (
    DIGEST_HEX,
    DTYPE_BYTES,
    FORMAT_VERSION,
    CaptureSpec,
    Provenance,
    Reject,
    canonical_json,
    digest_bytes,
)
from eyas.store import codec
from eyas.store.files import raise_store_error
from eyas.store.layout import payload_name

KNOWN_REQUIREMENTS: frozenset[str] = frozenset()
"""Features a record may require of its reader (`requires`); an unknown one is a refusal."""

MAX_TOKENS = 2**31 - 1
MAX_BYTES = 2**63 - 1
"""Token counts are 32-bit, sizes and offsets 64-bit numbers in every language that may read them."""

_SEAL = "record_digest"
_KEYS = frozenset({
    "format", "requires", "shard_id", "fingerprint", "payload", "samples", "fields", "field_order", "rejects",
    "duplicates", "released", "provenance",
})  # fmt: skip
_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Part:
    """Where one part of a field lies in the payload, for each sample."""

    offset: tuple[int, ...]
    """`[n]` bytes from the start of the file."""
    num_bytes: tuple[int, ...]
    digest: tuple[str, ...]
    """`[n]` xxh3-128 of the stored bytes."""


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """One field of all samples of a shard."""

    codec: str
    dtype: str
    width: int
    """`H`: the logical shape is `[rows, H]`."""
    parts: dict[str, Part]
    rows: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """For each sample the spans of rows that are stored; None = all rows of every sample."""
    digest: tuple[str, ...] | None = None
    """`[n]` xxh3-128 of the logical bytes; None = equal to the digest of the stored bytes (`raw`)."""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What a shard holds, and how it was made. A shard all of whose samples were rejected has no payload."""

    shard_id: str
    fingerprint: str
    sample_ids: tuple[str, ...]
    """`[n]` captured samples, in plan order."""
    positions: tuple[int, ...]
    """`[n]` place of each in the shard's plan: the `i` of its tensor names."""
    num_tokens: tuple[int, ...]
    fields: dict[str, FieldEntry]
    rejects: tuple[Reject, ...]
    provenance: Provenance
    run_id: str
    committed_at: float
    """Seconds since 1970, UTC."""
    payload_digest: str | None = None
    payload_bytes: int = 0
    header_bytes: int = 0
    duplicates: tuple[str, ...] = ()
    """Samples of the plan that another shard of this data set counts for (after a merge)."""
    released: bool = False
    """The payload was freed on purpose: the samples count as committed and are not captured again."""
    requires: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    """Optional keys that this version does not know, kept as they are."""

    @property
    def payload_name(self) -> str | None:
        return None if self.payload_digest is None else payload_name(self.shard_id, self.payload_digest)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


def to_bytes(record: ShardRecord) -> bytes:
    """The record as canonical JSON with its own digest, and a line end."""
    body: dict[str, Any] = {
        **record.extra,
        "format": FORMAT_VERSION,
        "requires": list(record.requires),
        "shard_id": record.shard_id,
        "fingerprint": record.fingerprint,
        "payload": None
        if record.payload_digest is None
        else {
            "name": record.payload_name,
            "bytes": record.payload_bytes,
            "header_bytes": record.header_bytes,
            "digest": record.payload_digest,
        },
        "samples": {
            "sample_id": list(record.sample_ids),
            "position": list(record.positions),
            "num_tokens": list(record.num_tokens),
        },
        "fields": {
            name: {
                "codec": entry.codec,
                "dtype": entry.dtype,
                "shape": ["T", entry.width],
                "rows": None if entry.rows is None else [[list(s) for s in spans] for spans in entry.rows],
                "digest": None if entry.digest is None else list(entry.digest),
                "parts": {
                    part_name: {
                        "offset": list(part.offset),
                        "bytes": list(part.num_bytes),
                        "digest": list(part.digest),
                    }
                    for part_name, part in entry.parts.items()
                },
            }
            for name, entry in record.fields.items()
        },
        "field_order": list(record.fields),
        "rejects": [{"sample_id": r.sample_id, "reason": r.reason, "detail": r.detail} for r in record.rejects],
        "duplicates": list(record.duplicates),
        "released": record.released,
        "provenance": {
            "engine": record.provenance.engine,
            "version": record.provenance.version,
            "settings": record.provenance.settings,
            "host": record.provenance.host,
            "run_id": record.run_id,
            "committed_at": record.committed_at,
        },
    }
    return sealed(body, _SEAL)


def sealed(body: dict[str, Any], seal: str) -> bytes:
    """Canonical JSON and a line end, with the digest of the rest of it under the key `seal`."""
    return canonical_json({**body, seal: digest_bytes(canonical_json(body))}) + b"\n"


def unsealed(data: bytes, seal: str) -> dict[str, Any]:
    """What `sealed` was given. Raises ValueError, with a phrase that says why, where a single byte differs."""
    if not data.strip():
        raise ValueError("is empty")
    try:
        body = json.loads(data.decode(), parse_constant=_no_number)
        spelled = canonical_json(body) + b"\n"
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ValueError("is not a JSON object")
    stated = body.pop(seal, None)
    # Every byte counts: the digest is that of the bytes without the member itself, which canonical JSON makes unique.
    before, member, after = spelled.partition(f'"{seal}":"{stated}",'.encode())
    if not member or data != spelled or digest_bytes(before, after[:-1]) != stated:
        raise ValueError("is damaged: its own digest does not fit its contents")
    return body


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def read(path: Path) -> ShardRecord:
    """The record at `path`, checked against its own digest and for inner consistency.

    Raises ShardCorrupt when it is damaged, StoreError when a newer eyas is needed or it is no file, ShardMissing when
    it is gone.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ShardMissing(f"{path}: no such record", path=path) from None
    except IsADirectoryError:
        raise StoreError(f"{path}: a directory stands where a record belongs; move it away", path=path) from None
    except OSError as error:
        raise_store_error(error, path, "reading a record")
    return from_bytes(data, path)


def from_bytes(data: bytes, path: Path) -> ShardRecord:
    """As `read`, for bytes that are already there; `path` is for messages and for the id that the name promises."""
    try:
        body = unsealed(data, _SEAL)
        require_version(body, path)
        record = _parse(body, path)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _corrupt(path, f"misses or mistypes a key ({type(error).__name__}: {error})") from None
    except ValueError as error:
        raise _corrupt(path, str(error)) from None
    _check(record, path)
    return record


def require_version(body: dict[str, Any], path: Path) -> None:
    """Raise StoreError where a newer eyas is needed, ValueError where version or requirements are none."""
    version, requires = body["format"], body["requires"]
    if type(version) is not int or version < 1:
        raise ValueError(f"has format {version!r}")
    if version > FORMAT_VERSION:
        raise StoreError(f"{path}: has format {version}, which this eyas does not know; use a newer one", path=path)
    unknown = sorted(set(_strings(requires)) - KNOWN_REQUIREMENTS)
    if unknown:
        raise StoreError(f"{path}: requires {unknown}, which this eyas does not know; use a newer one", path=path)


def require_spec(record: ShardRecord, spec: CaptureSpec, path: Path) -> None:
    """Refuse a record that was made under another spec, or whose fields are not the spec's."""
    if record.fingerprint != spec.fingerprint:
        raise SpecMismatch(
            f"{path}: made under spec {record.fingerprint}, the data set is {spec.fingerprint}; "
            "it does not belong here: move it away, or run 'eyas verify --repair'",
            path=path,
        )
    if not record.sample_ids:
        return
    if tuple(record.fields) != spec.fields:
        raise _corrupt(path, f"holds fields {list(record.fields)}, the spec says {list(spec.fields)}")
    for name, entry in record.fields.items():
        if entry.dtype != spec.dtype or entry.width != spec.hidden_size:
            raise _corrupt(
                path, f"{name} is {entry.dtype} [T, {entry.width}], not {spec.dtype} [T, {spec.hidden_size}]"
            )


def is_plain(record: ShardRecord) -> bool:
    """Raw, every row, one part for each field: places follow from the token counts alone."""
    return all(entry.codec == codec.RAW and entry.rows is None for entry in record.fields.values())


def require_plain(record: ShardRecord, path: Path) -> None:
    """Refuse what this version can name but not read."""
    if not is_plain(record):
        raise StoreError(f"{path}: stores only some rows of its samples, which this eyas cannot read", path=path)


def _parse(body: dict[str, Any], path: Path) -> ShardRecord:
    samples = _exactly(body["samples"], "sample_id", "position", "num_tokens")
    made = _exactly(body["provenance"], "engine", "version", "settings", "host", "run_id", "committed_at")
    payload = body["payload"]
    if payload is not None:
        _exactly(payload, "name", "bytes", "header_bytes", "digest")
    rejects = [_exactly(r, "sample_id", "reason", "detail") for r in body["rejects"]]
    field_order = _strings(body["field_order"])
    if len(set(field_order)) != len(field_order):
        raise ValueError("names a field twice")
    fields = _exactly(body["fields"], *field_order)
    record = ShardRecord(
        shard_id=_digest(body["shard_id"]),
        fingerprint=_digest(body["fingerprint"]),
        sample_ids=_digests(samples["sample_id"]),
        positions=_ints(samples["position"], 0, MAX_TOKENS),
        num_tokens=_ints(samples["num_tokens"], 1, MAX_TOKENS),
        fields={name: _parse_field(fields[name], path) for name in field_order},
        rejects=tuple(Reject(_digest(r["sample_id"]), _string(r["reason"]), _string(r["detail"])) for r in rejects),
        provenance=Provenance(
            engine=_string(made["engine"]),
            version=_string(made["version"]),
            settings={name: _string(value) for name, value in made["settings"].items()},
            host=_string(made["host"]),
        ),
        run_id=_string(made["run_id"]),
        committed_at=_seconds(made["committed_at"]),
        payload_digest=None if payload is None else _digest(payload["digest"]),
        payload_bytes=0 if payload is None else _ints([payload["bytes"]], 0, MAX_BYTES)[0],
        header_bytes=0 if payload is None else _ints([payload["header_bytes"]], 8, MAX_BYTES)[0],
        duplicates=_digests(body["duplicates"]),
        released=_flag(body["released"]),
        requires=_strings(body["requires"]),
        extra={k: v for k, v in body.items() if k not in _KEYS},
    )
    if payload is not None and payload["name"] != record.payload_name:
        raise ValueError(f"names a payload {payload['name']!r} that is not made of its shard id and digest")
    return record


def _parse_field(entry: dict[str, Any], path: Path) -> FieldEntry:
    # First the codec: an unknown one may have keys of its own.
    codec.require(entry["codec"], path)
    _exactly(entry, "codec", "dtype", "shape", "rows", "digest", "parts")
    symbol, width = entry["shape"]
    if symbol != "T" or entry["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"has shape {entry['shape']} or dtype {entry['dtype']!r}")
    parts = {name: _exactly(part, "offset", "bytes", "digest") for name, part in entry["parts"].items()}
    codec.require_parts(entry["codec"], parts)
    rows = entry["rows"]
    return FieldEntry(
        codec=entry["codec"],
        dtype=entry["dtype"],
        width=_ints([width], 1, MAX_TOKENS)[0],
        parts={
            name: Part(
                _ints(part["offset"], 0, MAX_BYTES), _ints(part["bytes"], 0, MAX_BYTES), _digests(part["digest"])
            )
            for name, part in parts.items()
        },
        rows=None if rows is None else tuple(tuple(_span(span) for span in spans) for spans in rows),
        digest=None if entry["digest"] is None else _digests(entry["digest"]),
    )


def _check(record: ShardRecord, path: Path) -> None:
    """What a damaged or forged record could get wrong, without a look at the payload."""
    n = len(record.sample_ids)
    if path.name != f"{record.shard_id}.json":
        raise _corrupt(path, f"is the record of shard {record.shard_id}")
    ids = [*record.sample_ids, *(r.sample_id for r in record.rejects), *record.duplicates]
    if len(set(ids)) != len(ids):
        raise _corrupt(path, "names a sample twice")
    if (
        len(record.positions) != n
        or len(record.num_tokens) != n
        or list(record.positions) != sorted(set(record.positions))
    ):
        raise _corrupt(path, "lists of samples, positions and token counts do not fit each other")
    if (record.payload_digest is None) != (n == 0):
        raise _corrupt(path, "names a payload without samples, or samples without a payload")
    for name, entry in record.fields.items():
        lists: list[Sized | None] = [entry.digest, entry.rows]
        lists += [x for part in entry.parts.values() for x in (part.offset, part.num_bytes, part.digest)]
        if any(x is not None and len(x) != n for x in lists):
            raise _corrupt(path, f"field {name} does not have one entry for each of {n} samples")
        if entry.digest not in (None, *(part.digest for part in entry.parts.values())):
            raise _corrupt(path, f"field {name}: the digest of a raw field's values is that of its stored bytes")
        for j in range(n if entry.rows is not None else 0):
            spans = entry.rows[j] if entry.rows is not None else ()
            edges = [e for span in spans for e in span]
            if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= record.num_tokens[j]):
                raise _corrupt(path, f"field {name}: rows of sample {record.sample_ids[j]} lie outside it")
    _check_layout(record, path)


def _check_layout(record: ShardRecord, path: Path) -> None:
    """Tensors stand one behind the other, from the end of the header to the end of the file.

    Where another shard counts for some samples of the payload there are gaps, but still no overlap.
    """
    if not record.sample_ids:
        return
    parts = [(name, entry, part) for name, entry in record.fields.items() for part in entry.parts.values()]
    if not parts:
        raise _corrupt(path, "has samples without fields")
    # [n, parts], in file order; unsigned, since the sum of two 63-bit numbers must not overflow.
    offset = np.array([part.offset for _, _, part in parts], np.uint64).T
    num_bytes = np.array([part.num_bytes for _, _, part in parts], np.uint64).T
    rows = np.array([_stored_rows(entry, record.num_tokens) for _, entry, _ in parts], np.uint64).T
    row_bytes = np.array([entry.width * DTYPE_BYTES[entry.dtype] for _, entry, _ in parts], np.uint64)
    end = offset + num_bytes
    before = np.concatenate([[np.uint64(record.header_bytes)], end.ravel()[:-1]]).reshape(end.shape)
    placed = offset == before
    if record.duplicates:
        placed[:, 0] = offset[:, 0] >= before[:, 0]
    wrong = ~placed | (num_bytes % row_bytes != 0) | (num_bytes // row_bytes != rows)
    if wrong.any():
        j, p = np.argwhere(wrong)[0]
        raise _corrupt(path, f"{parts[p][0]} of sample {record.sample_ids[j]} is not where its size says")
    at = int(end[-1, -1])
    if at > record.payload_bytes or (at < record.payload_bytes and not record.duplicates):
        raise _corrupt(path, f"payload has {record.payload_bytes} bytes, its tensors end at {at}")


def _stored_rows(entry: FieldEntry, num_tokens: tuple[int, ...]) -> list[int]:
    """How many rows of each sample are stored."""
    if entry.rows is None:
        return list(num_tokens)
    return [sum(end - start for start, end in spans) for spans in entry.rows]


def _exactly(value: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A JSON object with just these keys: what a later version adds, it adds at the top, where it is kept."""
    if not isinstance(value, dict) or value.keys() != set(keys):
        found = sorted(value) if isinstance(value, dict) else value
        raise ValueError(f"has {found!r:.200} where an object of {list(keys)} belongs")
    return value


def _ints(values: list[Any], low: int, high: int) -> tuple[int, ...]:
    if not set(map(type, values)) <= {int}:
        raise ValueError("has something else in a list of whole numbers")
    if values and not low <= min(values) <= max(values) <= high:
        raise ValueError(f"has a number outside {low}..{high}: {min(values)}..{max(values)}"[:200])
    return tuple(values)


def _strings(values: list[Any]) -> tuple[str, ...]:
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise ValueError("has something else where a text belongs")
    return tuple(values)


def _string(value: Any) -> str:
    return _strings([value])[0]


def _digests(values: list[Any]) -> tuple[str, ...]:
    if not set(map(len, _strings(values))) <= {DIGEST_HEX} or _HEX.fullmatch("".join(values)) is None:
        raise ValueError("has a digest or id that is not 32 hex digits")
    return tuple(values)


def _digest(value: Any) -> str:
    return _digests([value])[0]


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1e12 or not math.isfinite(value):
        raise ValueError("has a time of commit that is none")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("has something else than true or false for 'released'")
    return value


def _span(span: list[Any]) -> tuple[int, int]:
    start, end = _ints(span, 0, MAX_TOKENS)
    return start, end


def _corrupt(path: Path, what: str) -> ShardCorrupt:
    return ShardCorrupt(f"{path}: record {what}; run 'eyas verify --repair' on the data set", path=path)
