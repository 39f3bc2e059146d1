"""A data set open for writing: one process at a time, held by its lock."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from eyas import __version__
from eyas.errors import ConfigError, DataSetLocked, ShardCorrupt, SpecMismatch, StoreError
from eyas.records import FORMAT_VERSION, CaptureSpec
from eyas.store import record as records
from eyas.store.files import Files, put_if_absent, raise_store_error
from eyas.store.layout import Layout
from eyas.store.plan import Segment, ShardPlan, open_segments
from eyas.store.shard import PlannedSample, ShardWriter

_LOCK = re.compile(rb"(pid \d+ on [^\n]*\n)?")
HEAD_SEAL = "head_digest"
MAX_PUT_THREADS = 4
"""One thread fills the page cache at about 1 GB/s: the kernel has to find, clear and account every page."""


class DataSetWriter:
    """Creates or goes on with a data set. Removes what a killed run left unfinished, and nothing that is not ours."""

    def __init__(self, root: Path, spec: CaptureSpec, *, files: Files | None = None) -> None:
        """Raises DataSetLocked when another process holds it, SpecMismatch when it was made under another spec."""
        self.layout = Layout(root)
        self.spec = spec
        self.files = files if files is not None else Files()
        self.put_threads = 1 if files is not None else max(1, min(MAX_PUT_THREADS, (os.cpu_count() or 1) // 4))
        """How many threads may write pieces of a shard at one time. One where the order of system calls is watched."""
        self._lock_fd: int | None = None
        _require_ours_or_free(self.layout)
        try:
            is_new = not root.exists()
            for directory in (root, self.layout.shards, self.layout.records, self.layout.plan):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_new:
                self.files.sync_directory(root.parent)
        except OSError as error:
            raise_store_error(error, root, "creating the data set")
        self._lock_fd = lock(self.layout.lock)
        try:
            self._require_or_write_head()
            shutil.rmtree(self.layout.scratch, ignore_errors=True)
            self.orphans_removed = remove_orphans(self.files, self.layout)
        except BaseException:
            self.close()
            raise

    def segments(self) -> list[Segment]:
        """The plan so far, in order."""
        return open_segments(self.layout)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory on the data set's disk, removed afterwards; after a kill, by the next run."""
        self.layout.scratch.mkdir(mode=0o700)
        try:
            yield self.layout.scratch
        finally:
            shutil.rmtree(self.layout.scratch, ignore_errors=True)

    def shard_writer(self, plan: ShardPlan, planned: Sequence[PlannedSample]) -> ShardWriter:
        return ShardWriter(self.files, self.layout, self.spec, plan.shard_id, planned)

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> DataSetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_or_write_head(self) -> None:
        path = self.layout.head
        if not path.exists():
            if self.layout.record_ids() or self.layout.segments():
                raise StoreError(f"{path}: missing, but the directory holds records; restore it from a copy", path=path)
            body = {
                "format": FORMAT_VERSION,
                "requires": [],
                "fingerprint": self.spec.fingerprint,
                "spec": self.spec.model_dump(mode="json"),
                "made_by": f"eyas {__version__}",
            }
            try:
                put_if_absent(self.files, path, records.sealed(body, HEAD_SEAL))
            except OSError as error:
                raise_store_error(error, path, "creating the data set")
        require_spec(path, self.spec)


def require_spec(head: Path, spec: CaptureSpec) -> None:
    """Raise SpecMismatch, naming the fields that differ, unless the data set with this head was made under `spec`."""
    made_under = read_head(head)
    if made_under != spec:
        differences = "; ".join(spec.differences(made_under))
        raise SpecMismatch(
            f"{head.parent}: made under another spec ({differences}); choose another capture.out, or undo that",
            path=head,
        )


def read_head(path: Path) -> CaptureSpec:
    """The spec of a data set. Raises StoreError where there is none, ShardCorrupt where it is damaged."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(
            f"{path.parent}: not a data set (no {path.name}); give the directory named by capture.out", path=path
        ) from None
    except OSError as error:
        raise_store_error(error, path, "reading the data set's head")
    try:
        body = records.unsealed(data, HEAD_SEAL)
        records.require_version(body, path)
        spec = CaptureSpec.model_validate(body["spec"])
        if body["fingerprint"] != spec.fingerprint:
            raise ValueError("has a fingerprint that does not fit its spec")
    except (KeyError, TypeError, ValueError) as error:
        why = f"misses key {error}" if isinstance(error, KeyError) else str(error).replace("\n", " ")
        raise ShardCorrupt(f"{path}: head {why}; restore it from a copy", path=path) from None
    return spec


def _require_ours_or_free(layout: Layout) -> None:
    """Refuse a directory that is not a data set but holds files by names that we would write over."""
    if layout.head.exists():
        return
    if layout.record_ids() or layout.segments():
        raise ShardCorrupt(f"{layout.head}: missing, though plan and records are there; restore it", path=layout.head)
    written = (layout.config, layout.events, layout.heartbeat, layout.manifest, layout.report, layout.scratch)
    taken = [path.name for path in written if path.exists()]
    # The lock comes before the head: a run that was killed between the two leaves it.
    if layout.lock.exists() and not (layout.lock.is_file() and _LOCK.fullmatch(layout.lock.read_bytes())):
        taken.append(layout.lock.name)
    if taken:
        raise ConfigError(
            f"{layout.root}: not a data set, but it holds {', '.join(taken)}, which a data set would write over; "
            "choose another capture.out"
        )


def lock(path: Path) -> int:
    """Take the data set's lock, which the kernel gives back however the process ends; returns its descriptor."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise_store_error(error, path, "taking the lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise DataSetLocked(
            f"{path.parent}: {holder} is writing to it; wait, or stop that process ('eyas status {path.parent}')",
            path=path,
        ) from None
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise_store_error(error, path, "taking the lock")
    return fd


def remove_orphans(files: Files, layout: Layout) -> int:
    """Remove temporary files and payloads that no record names; call it under the lock. Returns how many."""
    orphans = layout.temporaries()
    committed = layout.record_ids()
    for shard_id, payloads in layout.payloads().items():
        if shard_id not in committed:
            orphans += payloads
        elif len(payloads) > 1:
            named = records.read(layout.record(shard_id)).payload_name
            orphans += [path for path in payloads if path.name != named]
    for path in orphans:
        files.unlink(path)
    return len(orphans)
