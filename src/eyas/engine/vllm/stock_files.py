"""The files of vLLM's own ExampleHiddenStatesConnector: waited for by its lock, read, removed.

The connector writes `<request id>.safetensors` into one directory, under its final name from the first byte on:
`hidden_states` `[T, n, H]` in the model's dtype and `token_ids` `[T]` int64. Before it answers it has made
`<file>.lock` and holds it exclusively (`flock`); it lets go when the file is written, or when writing has failed, which
it tells in its log alone. An aborted request's file is written, too.

Letters: `T` tokens, `n` extracted layers, `H` hidden size.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from eyas.engine import staged
from eyas.engine.pickup import RowsError
from eyas.engine.staged import CODES, ITEM_BYTES, RequestName, Staged, StagedError

LOCK = ".lock"
SUFFIX = ".safetensors"
NORM = "pre"
"""vLLM's id `L` is the last layer's output; the probe says so where it is not."""
STATES, IDS = "hidden_states", "token_ids"
CLOSE_PATIENCE_S = 5.0
"""How long the end of a run waits for the server to let go of what was given up."""
_LOOK_S = 0.05
_CHUNK_BYTES = 1 << 20
_DTYPES = {code: dtype for dtype, code in CODES.items()}

SlotsOf = Callable[[RequestName], Mapping[str, int]]
"""Which slot of a file's layers holds which field of a request."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a file's header says."""

    dtype: str
    num_tokens: int
    num_layers: int
    hidden_size: int
    states_at: int
    """First byte of the states in the file."""
    ids_at: int


def shape_of(file: BinaryIO, path: Path) -> Shape:
    """The shape of a file that is exactly as long as its header says. Raises StagedError."""
    num_bytes = os.fstat(file.fileno()).st_size
    size = int.from_bytes(file.read(8), "little")
    if num_bytes < 8 or size > min(staged.MAX_HEADER_BYTES, num_bytes - 8):
        raise StagedError(f"{path}: {num_bytes} bytes with a header of {size}: not whole")
    try:
        tensors = json.loads(file.read(size))
        tensors.pop("__metadata__", None)
        if tensors.keys() != {STATES, IDS}:
            raise StagedError(f"{path}: holds {sorted(tensors)}, not {[STATES, IDS]}")
        states, ids = tensors[STATES], tensors[IDS]
        num_tokens, num_layers, width = (int(n) for n in states["shape"])
        dtype = _DTYPES[states["dtype"]]
        (begin, end), (ids_begin, ids_end) = (map(int, tensor["data_offsets"]) for tensor in (states, ids))
        fits = (
            min(num_layers, width) > 0
            and ids["dtype"] == "I64"
            and end - begin == num_tokens * num_layers * width * ITEM_BYTES[dtype]
            and ids_end - ids_begin == 8 * ids["shape"][0]
            and {begin, ids_begin} == {0, min(end, ids_end)}
        )
        ends_at, num_ids = 8 + size + max(end, ids_end), int(ids["shape"][0])
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise StagedError(f"{path}: its header cannot be read, or is none of vLLM's own connector") from None
    if not fits:
        raise StagedError(f"{path}: its header does not fit its tensors")
    if ends_at != num_bytes:
        raise StagedError(f"{path}: {num_bytes} bytes of {ends_at}: not whole")
    if num_ids != num_tokens:
        raise RowsError(f"{path}: {num_tokens} rows of {num_ids} tokens: prefix caching or chunked prefill?")
    return Shape(dtype, num_tokens, num_layers, width, 8 + size + begin, 8 + size + ids_begin)


def missing(path: Path) -> str:
    """What is still to come before a file can be read; empty when it can.

    Raises StagedError where it never will, as far as the lock tells.
    """
    lock = path.with_name(path.name + LOCK)
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if not path.exists():
            return f"the server says it wrote {path}, which is not here, nor is its lock"
        raise StagedError(
            f"{path}: has no lock, so nobody can tell when it is whole: start the server with "
            "use_synchronization_lock on, as it is by default"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"{path}: the server still holds its lock"
    finally:
        os.close(fd)
    if not path.exists():
        raise StagedError(f"{path}: the server let go of its lock and wrote no file; its log says why")
    return ""


def remove(path: Path) -> None:
    """Remove a file and its lock. Raises PermissionError."""
    path.unlink(missing_ok=True)
    path.with_name(path.name + LOCK).unlink(missing_ok=True)


def first_shape(path: Path, patience_s: float) -> Shape:
    """Wait for a file, tell its shape, remove it. Raises StagedError and OSError."""
    deadline = time.monotonic() + patience_s
    while why := missing(path):
        if time.monotonic() > deadline:
            raise StagedError(why)
        time.sleep(_LOOK_S / 5)
    try:
        with path.open("rb", buffering=0) as file:
            return shape_of(file, path)
    finally:
        remove(path)


class StockFiles:
    """See `engine.pickup.Pickup`."""

    def __init__(self, run: staged.Run, slots: SlotsOf, num_layers: int) -> None:
        """Files of `num_layers` layers each."""
        self._directory, self._slots, self._num_layers = run.staging, slots, num_layers
        self._own = re.compile(rf"(?:.*[^0-9a-z])?eyas\.{run.token}\.(\d+)\.[a-z]*\.\d+\D.*")

    def path(self, name: RequestName, said: Mapping[str, Any], rank: int) -> Path:
        path = Path(str(said.get("path")))
        # It is removed afterwards: nothing but this request's file may be named.
        found = self._own.fullmatch(path.name)
        if path.parent != self._directory or path.suffix != SUFFIX or found is None or int(found[1]) != name.serial:
            raise StagedError(f"the server names {path}, which is not this request's file in {self._directory}")
        return path

    def missing(self, path: Path) -> str:
        return missing(path)

    def read(self, path: Path, name: RequestName, rank: int, on_release: Callable[[], object]) -> Staged:
        """As `Pickup.read`: copied out layer by layer, since a file holds a token's layers side by side."""
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            shape = shape_of(file, path)
            if shape.num_layers != self._num_layers:
                raise StagedError(f"{path}: holds {shape.num_layers} layers, {self._num_layers} were told")
            if shape.num_tokens != name.num_tokens:
                raise RowsError(
                    f"{path}: {shape.num_tokens} rows of {name.num_tokens} tokens: prefix caching or chunked prefill?"
                )
            ids = np.empty(shape.num_tokens, dtype="<i8")
            file.seek(shape.ids_at)
            _fill(file, ids, path)
            if ids.min(initial=0) < 0 or ids.max(initial=0) > np.iinfo(np.int32).max:
                raise StagedError(f"{path}: holds token ids that are none")
            slots = self._slots(name)
            states = _by_field(file, shape, list(slots.values()), path)
            after = os.fstat(file.fileno())
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise StagedError(f"{path}: was written to while it was read")
        weakref.finalize(states, on_release).atexit = False
        size = (shape.num_tokens, shape.hidden_size)
        fields = {field: (shape.dtype, size, states[i].data.cast("B")) for i, field in enumerate(slots)}
        return Staged(ids.astype("<i4"), fields, NORM)

    def remove(self, path: Path) -> None:
        remove(path)

    def sweep(self, awaited: Collection[int]) -> None:
        for path in self._left(awaited):
            # One whose lock is held is still being computed or written.
            with contextlib.suppress(StagedError, OSError):
                if missing(path):
                    continue
            with contextlib.suppress(OSError):
                remove(path)

    def close(self) -> None:
        """Remove what was given up; waits a little for what the server is still writing."""
        deadline = time.monotonic() + CLOSE_PATIENCE_S
        self.sweep(())
        while self._left(()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self.sweep(())

    def _left(self, awaited: Collection[int]) -> list[Path]:
        """This run's files, whether they have their lock only or nothing else."""
        try:
            names = {entry.name.removesuffix(LOCK) for entry in os.scandir(self._directory)}
        except OSError:
            return []
        found = [(name, self._own.fullmatch(name)) for name in sorted(names)]
        return [self._directory / name for name, match in found if match and int(match[1]) not in awaited]


def _by_field(file: BinaryIO, shape: Shape, slots: Sequence[int], path: Path) -> npt.NDArray[np.uint8]:
    """`[len(slots), T, bytes of a row]`: the states of these slots, each by itself. Raises StagedError."""
    row_bytes = shape.hidden_size * ITEM_BYTES[shape.dtype]
    states = np.empty((len(slots), shape.num_tokens, row_bytes), dtype=np.uint8)
    num_rows = max(1, _CHUNK_BYTES // (shape.num_layers * row_bytes))
    chunk = np.empty((num_rows, shape.num_layers, row_bytes), dtype=np.uint8)
    file.seek(shape.states_at)
    for first in range(0, shape.num_tokens, num_rows):
        part = chunk[: min(num_rows, shape.num_tokens - first)]
        _fill(file, part, path)
        for i, slot in enumerate(slots):
            states[i, first : first + len(part)] = part[:, slot]
    return states


def _fill(file: BinaryIO, array: npt.NDArray[Any], path: Path) -> None:
    """Read as many bytes as an array has. Raises StagedError where they are not there."""
    view = array.data.cast("B")
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise StagedError(f"{path}: ended while it was read")
        view = view[count:]
