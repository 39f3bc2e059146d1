"""The payload of a shard: an ordinary safetensors file, appended in plan order under a temporary name.

The header's room is reserved at the front (its size is known from the plan) and filled at the end. The digest in the
file's name is xxh3-128 over the header (length word included) and the part digests in file order, so that it costs no
second pass over the data.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eyas.errors import EyasError, StoreError
from eyas.records import (
    DTYPE_BYTES,
    FORMAT_VERSION,
    SAFETENSORS_DTYPE,
    CaptureSpec,
    Provenance,
    Reject,
    StateBlock,
    digest_bytes,
)
from eyas.store import codec
from eyas.store.files import Files, put_if_absent, raise_store_error, temporary_name
from eyas.store.layout import Layout
from eyas.store.record import FieldEntry, Part, ShardRecord, to_bytes

ALIGNMENT = 4096
WRITEBACK_BYTES = 32 << 20
PlannedSample = tuple[str, int]
"""`(sample_id, num_tokens)`."""


def tensor_entry(dtype: str, rows: int, width: int, start: int, num_bytes: int) -> dict[str, Any]:
    """One entry of a safetensors header; offsets count from the end of the header."""
    return {"dtype": SAFETENSORS_DTYPE[dtype], "shape": [rows, width], "data_offsets": [start, start + num_bytes]}


def header_json(shard_id: str, spec: CaptureSpec, samples: Sequence[tuple[int, int]]) -> bytes:
    """The safetensors header for `(position, num_tokens)` of each stored sample, without padding."""
    header: dict[str, Any] = {
        "__metadata__": {
            "eyas.format": str(FORMAT_VERSION),
            "eyas.shard_id": shard_id,
            "eyas.fingerprint": spec.fingerprint,
        }
    }
    at = 0
    row_bytes = spec.hidden_size * DTYPE_BYTES[spec.dtype]
    for position, num_tokens in samples:
        for name in spec.fields:
            num_bytes = num_tokens * row_bytes
            entry = tensor_entry(spec.dtype, num_tokens, spec.hidden_size, at, num_bytes)
            header[codec.part_tensor(position, name, codec.WHOLE)] = entry
            at += num_bytes
    return json.dumps(header, separators=(",", ":")).encode()


def header_room(shard_id: str, spec: CaptureSpec, planned: Sequence[PlannedSample]) -> int:
    """Bytes from the start of the file to the first tensor: enough for every sample, in steps of 4096."""
    full = header_json(shard_id, spec, [(i, num_tokens) for i, (_, num_tokens) in enumerate(planned)])
    return -(-(8 + len(full)) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Piece:
    """One sample's fields and their place in the payload."""

    index: int
    """Among the captured samples of the shard."""
    offset: int
    blocks: tuple[StateBlock, ...]


class ShardWriter:
    """Writes one shard: `append` or `reject` each planned sample in plan order, then `commit`.

    Nothing that it writes exists before `commit` has written the record. One thread at a time, `put` apart.
    """

    def __init__(
        self, files: Files, layout: Layout, spec: CaptureSpec, shard_id: str, planned: Sequence[PlannedSample]
    ) -> None:
        self.shard_id = shard_id
        self._files, self._layout, self._spec, self._planned = files, layout, spec, planned
        self._room = header_room(shard_id, spec, planned)
        self._at = self._written_back = self._room
        self._unflushed = 0
        self._lock = threading.Lock()
        self._next = 0
        self._positions: list[int] = []
        self._rejects: list[Reject] = []
        self._duplicates: list[str] = []
        self._offsets: dict[str, list[int]] = {name: [] for name in spec.fields}
        self._digests: dict[str, list[str]] = {name: [] for name in spec.fields}
        self._temporary = temporary_name(layout.shards / shard_id)
        self._fd: int | None = None
        self._unfinished = False
        """Whether there is a file by the temporary name."""

    def append(self, fields: Mapping[str, StateBlock]) -> int:
        """Write the next planned sample's fields; returns their bytes. The caller has checked dtype and shape."""
        return self.put(self.place(fields))

    def place(self, fields: Mapping[str, StateBlock]) -> Piece:
        """Give the next planned sample its place in the payload; `put` writes it, `commit` needs it written."""
        _, num_tokens = self._planned[self._next]
        blocks = [fields[name] for name in self._spec.fields]
        row_bytes = self._spec.hidden_size * DTYPE_BYTES[self._spec.dtype]
        assert all(block.num_bytes == num_tokens * row_bytes for block in blocks)
        try:
            if self._fd is None:
                self._fd = self._files.create(self._temporary)
                self._unfinished = True
        except OSError as error:
            raise_store_error(error, self._temporary, "writing a shard")
        piece = Piece(len(self._positions), self._at, tuple(blocks))
        for name, block in zip(self._spec.fields, blocks, strict=True):
            self._offsets[name].append(self._at)
            self._digests[name].append("")
            self._at += block.num_bytes
        self._positions.append(self._next)
        self._next += 1
        return piece

    def put(self, piece: Piece) -> int:
        """Write what was placed; returns its bytes. For any thread, several pieces at a time. Raises OutOfSpace."""
        assert self._fd is not None
        try:
            written = self._files.write(self._fd, [block.data for block in piece.blocks], piece.offset)
            with self._lock:
                self._unflushed += written
                start, end = self._written_back, self._at
                due = self._unflushed >= WRITEBACK_BYTES
                if due:
                    self._unflushed, self._written_back = 0, end
            if due:
                self._files.start_writeback(self._fd, start, end - start)
        except OSError as error:
            raise_store_error(error, self._temporary, "writing a shard")
        for name, block in zip(self._spec.fields, piece.blocks, strict=True):
            self._digests[name][piece.index] = digest_bytes(block.data)
        return written

    def reject(self, reason: str, detail: str) -> None:
        """Record that the next planned sample has no data, and why."""
        self._rejects.append(Reject(self._planned[self._next][0], reason, detail))
        self._next += 1

    def skip(self) -> None:
        """Record that another shard of the data set counts for the next planned sample."""
        self._duplicates.append(self._planned[self._next][0])
        self._next += 1

    @property
    def complete(self) -> bool:
        return self._next == len(self._planned)

    @property
    def written(self) -> bool:
        """Whether everything that was placed is in the payload."""
        return all(all(digests) for digests in self._digests.values())

    def commit(self, provenance: Provenance, *, run_id: str, committed_at: float) -> ShardRecord:
        """Finish the payload, give it its name, write the record. Returns the record.

        Raises OutOfSpace or StoreError, and EyasError if another commit of this shard came first: that one stands.
        """
        if not (self.complete and self.written):
            raise StoreError(f"{self._temporary}: not all samples of the shard were written", path=self._temporary)
        digest = self._finish_payload() if self._fd is not None else None
        record = self._record(digest, provenance, run_id, committed_at)
        path = self._layout.record(self.shard_id)
        try:
            won = put_if_absent(self._files, path, to_bytes(record))
        except OSError as error:
            raise_store_error(error, path, "committing a shard")
        if not won:
            raise EyasError(f"{path}: another process committed this shard; stop one of the two runs")
        return record

    def abandon(self) -> None:
        """Drop what was written, so that it does not stand in the way of whoever has to make room."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)
        if self._unfinished:
            self._unfinished = False
            self._files.unlink(self._temporary)

    def _finish_payload(self) -> str:
        assert self._fd is not None
        header = self._header()
        part_digests = [
            bytes.fromhex(self._digests[name][j]) for j in range(len(self._positions)) for name in self._spec.fields
        ]
        digest = payload_digest(header, part_digests)
        final = self._layout.payload(self.shard_id, digest)
        try:
            self._files.write(self._fd, [header], 0)
            self._files.fsync(self._fd)
            fd, self._fd = self._fd, None
            self._files.close(fd)
            self._files.rename(self._temporary, final)
            self._unfinished = False
            self._files.sync_directory(self._layout.shards)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.abandon()
            raise_store_error(error, final, "finishing a shard")
        return digest

    def _header(self) -> bytes:
        """The whole header, padded with spaces to the reserved room, its length word in front."""
        body = header_json(self.shard_id, self._spec, [(i, self._planned[i][1]) for i in self._positions])
        length = self._room - 8
        return length.to_bytes(8, "little") + body.ljust(length)

    def _record(self, digest: str | None, provenance: Provenance, run_id: str, committed_at: float) -> ShardRecord:
        tokens = tuple(self._planned[i][1] for i in self._positions)
        row_bytes = self._spec.hidden_size * DTYPE_BYTES[self._spec.dtype]
        sizes = tuple(t * row_bytes for t in tokens)
        fields = {
            name: FieldEntry(
                codec=codec.RAW,
                dtype=self._spec.dtype,
                width=self._spec.hidden_size,
                parts={codec.WHOLE: Part(tuple(self._offsets[name]), sizes, tuple(self._digests[name]))},
            )
            for name in self._spec.fields
        }
        return ShardRecord(
            shard_id=self.shard_id,
            fingerprint=self._spec.fingerprint,
            sample_ids=tuple(self._planned[i][0] for i in self._positions),
            positions=tuple(self._positions),
            num_tokens=tokens,
            fields=fields,
            rejects=tuple(self._rejects),
            duplicates=tuple(self._duplicates),
            provenance=provenance,
            run_id=run_id,
            committed_at=committed_at,
            payload_digest=digest,
            payload_bytes=0 if digest is None else self._at,
            header_bytes=0 if digest is None else self._room,
        )


def payload_digest(header: bytes, part_digests: Sequence[bytes]) -> str:
    """The digest that a payload's name carries: header (length word included), then the part digests in file order."""
    h = xxhash.xxh3_128(header)
    for part_digest in part_digests:
        h.update(part_digest)
    return h.hexdigest()


def payload_path(layout: Layout, record: ShardRecord) -> Path:
    """Where a record's payload lies."""
    assert record.payload_digest is not None
    return layout.payload(record.shard_id, record.payload_digest)
