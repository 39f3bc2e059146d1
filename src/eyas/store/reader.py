"""Reading a data set: by index or by sample id, each sample with one `pread` into a buffer of the caller's.

Letters: `N` samples, `T` tokens of one, `A` auxiliary layers, `H` hidden size.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.errors import ShardCorrupt, ShardMissing, StoreError
from eyas.records import CaptureSpec, is_digest
from eyas.store import manifest
from eyas.store.files import raise_store_error
from eyas.store.layout import Layout
from eyas.store.writer import read_head
from eyas.values import row_bytes

if TYPE_CHECKING:
    import torch

_OPEN_FILES = 128
_PIECE = 1 << 20
"""Bytes that are hashed while they are still in a core's cache, and the kernel reads on."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One sample's fields over one buffer, field after field."""

    sample_id: str
    num_tokens: int
    spec: CaptureSpec
    data: memoryview
    """The bytes of all fields; `[fields, T, H]` in `spec.dtype`."""

    def field(self, name: str) -> memoryview:
        """The bytes of one field, `[T, H]`, without a copy."""
        size = self.num_tokens * row_bytes(self.spec.dtype, self.spec.hidden_size)
        at = self.spec.fields.index(name) * size
        return self.data[at : at + size]

    def tensors(self) -> torch.Tensor:
        """`[A + 1, T, H]`: auxiliary layers ascending, then the last state; a view of the buffer."""
        import torch

        flat = torch.frombuffer(self.data, dtype=getattr(torch, self.spec.dtype))
        return flat.view(len(self.spec.fields), self.num_tokens, self.spec.hidden_size)

    def aux_hidden_states(self) -> torch.Tensor:
        """`[T, A, H]`: a view of the buffer."""
        return self.tensors()[:-1].transpose(0, 1)

    def last_hidden_state(self) -> torch.Tensor:
        """`[T, H]`, before or after the final norm as `spec.last_hidden_norm` says; a view of the buffer."""
        return self.tensors()[-1]


class DataSet:
    """A data set open for reading, map-style: what was committed when it was opened. Opening reads no payload.

    Order of indices: by shard id, then by place in the shard; it does not depend on when or where shards were made.
    Safe to use from several threads. Pickles as its path, so that a loader's workers open their own files.
    """

    def __init__(self, root: Path | str, *, check: bool = True) -> None:
        """With `check`, each field's digest is compared as it is read.

        Raises StoreError where there is no data set, ShardCorrupt where a record is damaged, SpecMismatch where a
        record belongs to another data set.
        """
        self.layout = Layout(Path(root))
        self.spec = read_head(self.layout.head)
        self._check = check
        self._manifest = manifest.load(self.layout, self.spec)
        for shard in self._manifest.shards:
            if not shard.plain:
                raise StoreError(
                    f"{self.layout.record(shard.shard_id)}: stores only some rows or several parts of a sample, "
                    "which this eyas cannot read; use a newer one",
                    path=self.layout.record(shard.shard_id),
                )
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._by_id: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._manifest.ids)

    @property
    def fingerprint(self) -> str:
        return self.spec.fingerprint

    @property
    def num_tokens(self) -> int:
        return int(self._manifest.num_tokens.sum(dtype=np.int64))

    @property
    def token_counts(self) -> npt.NDArray[np.int32]:
        """`[N]` tokens of each sample."""
        return self._manifest.num_tokens

    @property
    def ids(self) -> npt.NDArray[np.uint8]:
        """`[N, 16]` sample ids, as `Permutation` takes them."""
        return self._manifest.ids

    def sample_id(self, index: int) -> str:
        return bytes(self._manifest.ids[index]).hex()

    def sample_bytes(self, index: int) -> int:
        """Bytes of one sample: the size of the buffer that `read_into` needs."""
        return int(self._manifest.num_tokens[index]) * self.spec.bytes_per_token

    def index_of(self, sample_id: str) -> int:
        """The index of a sample; KeyError where it is not in the data set."""
        if not is_digest(sample_id):
            raise KeyError(sample_id)
        high, order = self._first_halves()
        at = int(np.searchsorted(high, np.uint64(int(sample_id[:16], 16))))
        while at < len(high) and high[at] == int(sample_id[:16], 16):
            if self.sample_id(order[at]) == sample_id:
                return int(order[at])
            at += 1
        raise KeyError(sample_id)

    def indices_of(self, ids: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """`[n]`: the indices of many samples, `ids` `[n, 16]`; -1 for each that is not in the data set."""
        high, order = self._first_halves()
        at = np.searchsorted(high, manifest.id_keys(ids)[:, 0])
        found = np.full(len(ids), -1, np.int64)
        rest = np.arange(len(ids))
        # Each turn looks at the next of equal halves; there is hardly ever a second turn.
        while len(rest := rest[at[rest] < len(high)]):
            candidates = order[at[rest]]
            same = (self.ids[candidates] == ids[rest]).all(axis=1)
            found[rest[same]] = candidates[same]
            at[rest] += 1
            rest = rest[~same & (self.ids[candidates, :8] == ids[rest, :8]).all(axis=1)]
        return found

    def _first_halves(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The ids' first halves, sorted once, and their indices; equal halves of different ids stand side by side."""
        if self._by_id is None:
            high = manifest.id_keys(self._manifest.ids)[:, 0]
            order = np.argsort(high, kind="stable")
            self._by_id = high[order], order
        return self._by_id

    def __getitem__(self, index: int) -> StoredSample:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        # First the file and its size: only then is the sample's size worth memory.
        self._file(int(self._manifest.shard[index]))
        return self.read_into(index, aligned_buffer(self.sample_bytes(index)))

    def read_into(self, index: int, buffer: memoryview) -> StoredSample:
        """Read one sample into the front of a writable buffer (pinned memory, say) of at least `sample_bytes(index)`.

        Raises ShardMissing or ShardCorrupt, naming the file.
        """
        size = self.sample_bytes(index)
        if buffer.readonly or buffer.nbytes < size:
            kind = "read-only" if buffer.readonly else "writable"
            raise ValueError(f"{kind} buffer of {buffer.nbytes} bytes for a sample of {size}")
        view = buffer.cast("B")[:size]
        file = self._file(int(self._manifest.shard[index]))
        if self._check:
            self._read_checked(index, view, file)
        else:
            self._read(index, view, 0, file)
        return StoredSample(self.sample_id(index), int(self._manifest.num_tokens[index]), self.spec, view)

    def permutation(self, *, seed: int, epoch: int = 0, position: int = 0) -> Permutation:
        """A walk over all samples in an order that follows from the sample ids and `seed` alone."""
        return Permutation(self._manifest.ids, seed=seed, epoch=epoch, position=position)

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.layout.root, self._check)

    def _read(self, index: int, view: memoryview, at: int, file: _OpenFile) -> None:
        """Fill `view` from `at` bytes behind the start of the sample."""
        try:
            got = pread_into(file.fd, view, int(self._manifest.offset[index]) + at)
        except OSError as error:
            raise_store_error(error, file.path, "reading a sample")
        if got != view.nbytes:
            raise ShardCorrupt(
                f"{file.path}: ends {view.nbytes - got} bytes early; run 'eyas verify --repair {self.layout.root}'",
                path=file.path,
            )

    def _read_checked(self, index: int, view: memoryview, file: _OpenFile) -> None:
        """Read piece by piece and compare each field's digest; a small sample is read in one piece."""
        expected = self._manifest.digests[index].tobytes()
        size = view.nbytes // len(self.spec.fields)
        done = 0
        for f, name in enumerate(self.spec.fields):
            digest = xxhash.xxh3_128()
            for start in range(f * size, (f + 1) * size, _PIECE):
                end = min(start + _PIECE, (f + 1) * size)
                if done < end:
                    stop = min(done + _PIECE, view.nbytes)
                    self._read(index, view[done:stop], done, file)
                    done = stop
                digest.update(view[start:end])
            if digest.digest() != expected[16 * f : 16 * f + 16]:
                raise ShardCorrupt(
                    f"{file.path}: {name} of sample {self.sample_id(index)} differs from its digest; "
                    f"run 'eyas verify --repair {self.layout.root}'",
                    path=file.path,
                )

    def _file(self, shard: int) -> _OpenFile:
        # An ordered dictionary that several threads shorten at once loses count of itself.
        with self._lock:
            file = self._open.get(shard)
            if file is not None:
                self._open.move_to_end(shard)
                return file
            entry = self._manifest.shards[shard]
            assert entry.payload_digest is not None
            path = self.layout.payload(entry.shard_id, entry.payload_digest)
            if entry.released:
                raise ShardMissing(f"{path}: was released on purpose; capture it again to read it", path=path)
            # A file that leaves the table is closed when its last reader lets go of it, never under a read.
            file = self._open[shard] = _OpenFile(path, entry.payload_bytes, self.layout.root)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return file


class _OpenFile:
    """The descriptor of a payload of the right size, closed with its last reference."""

    def __init__(self, path: Path, num_bytes: int, root: Path) -> None:
        self.path = path
        self.fd = -1
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ShardMissing(f"{path}: payload is gone; run 'eyas verify --repair {root}'", path=path) from None
        except OSError as error:
            raise_store_error(error, path, "opening a payload")
        require_size(self.fd, num_bytes, path, root)
        read_on(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


def _reopen(root: Path, check: bool) -> DataSet:
    return DataSet(root, check=check)


def aligned_buffer(num_bytes: int) -> memoryview:
    """Writable memory that starts on a cache line, whatever the allocator does.

    The kernel copies to an address of 16 modulo 64, where large numpy arrays start, at a third of the speed.
    """
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].data


def read_on(fd: int) -> None:
    """Ask the kernel to read further ahead than it does by itself: samples are large, and read whole."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def require_size(fd: int, num_bytes: int, path: Path, root: Path) -> None:
    """Raise ShardCorrupt where an open payload is no file of `num_bytes`."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
        what = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "not a file"
        raise ShardCorrupt(
            f"{path}: {what}, its record says {num_bytes} bytes; run 'eyas verify --repair {root}'", path=path
        )


def pread_into(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` from `offset`; returns fewer bytes only at the end of the file."""
    done = 0
    while done < view.nbytes:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


class PermutationState(TypedDict):
    """Where a walk stands; enough to go on from there on any machine."""

    seed: int
    epoch: int
    position: int


class Permutation:
    """An endless walk over sample indices, a new order each epoch, that can be left and taken up anywhere.

    Order: ascending `mix64(low half of the sample id XOR mix64(mix64(seed) + epoch))`, ties by the whole id, with mix64
    the finalizer of SplitMix64 (Steele, Lea and Flood 2014). It depends on ids and integers alone: not on a random
    number library, on shards, or on the order of capture. 8 bytes a sample.
    """

    def __init__(self, ids: npt.NDArray[np.uint8], *, seed: int, epoch: int = 0, position: int = 0) -> None:
        if not 0 <= position <= len(ids) or epoch < 0:
            raise ValueError(f"position {position} of {len(ids)} or epoch {epoch} is out of range")
        self._ids, self._seed, self._epoch, self._position = ids, seed, epoch, position
        self._indices: npt.NDArray[np.int64] | None = None

    def indices(self) -> npt.NDArray[np.int64]:
        """`[N]`: this epoch's order."""
        if self._indices is None:
            high, low = self._ids.view("<u8").reshape(-1, 2).T if len(self._ids) else np.zeros((2, 0), "<u8")
            key = _mix64(_mix64(np.uint64(self._seed & (2**64 - 1))) + np.uint64(self._epoch))
            self._indices = np.lexsort((high, low, _mix64(low ^ key)))
        return self._indices

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not len(self._ids):
            raise StopIteration
        if self._position == len(self._ids):
            self._epoch, self._position, self._indices = self._epoch + 1, 0, None
        index = int(self.indices()[self._position])
        self._position += 1
        return index

    @property
    def state(self) -> PermutationState:
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}


def _mix64(x: Any) -> Any:
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
