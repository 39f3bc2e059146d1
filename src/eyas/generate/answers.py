"""Answers out: one JSON line per conversation, appended, and resumed by content after any kill.

Two files: `OUT` with a row per answered conversation and `OUT.rejects.jsonl` with a row per rejected prompt. A row that
stands in either of them is done. `OUT.lock` keeps a second writer away; it stays where it is, since removing it would
race with whoever waits for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from eyas.errors import ConfigError, DataError, DataSetLocked, OutOfSpace, StoreError

FIRST_KEY = "row_id"
LINE_START = b'{"row_id":"'
"""How each of our lines begins: what else ends in a torn line is somebody else's file and is left alone."""


@dataclass(slots=True)
class Tally:
    """What the two files hold, counted from the rows themselves."""

    answered: set[str] = field(default_factory=set)
    """Row ids."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Row id to reason."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Of every assistant turn."""
    ended: Counter[str] = field(default_factory=Counter)
    """Answered conversations that stop before their last turn, by reason."""
    generated_tokens: int = 0

    def count_answer(self, row: Mapping[str, Any]) -> None:
        self.answered.add(row[FIRST_KEY])
        self.finish_reasons.update(row["finish_reason"])
        if row.get("ended_early"):
            self.ended[row["ended_early"]] += 1
        self.generated_tokens += sum(row["loss_mask"])

    def count_reject(self, row: Mapping[str, Any]) -> None:
        self.rejected[row[FIRST_KEY]] = row["reason"]

    @property
    def done(self) -> set[str]:
        return self.answered | self.rejected.keys()


def rejects_path(out: Path) -> Path:
    return out.with_name(out.name + ".rejects.jsonl")


class AnswerFiles:
    """Both files, open for appending under the lock; their rows so far are in `tally`.

    `settings` are the values that every row carries (sampling, target); a row with other ones belongs to another run
    and is refused with ConfigError. DataSetLocked when another process writes.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self._out = out
        self._settings = settings
        self._lock = -1
        self._answers: _Lines | None = None
        self._rejects: _Lines | None = None
        self.tally = Tally()

    def __enter__(self) -> Self:
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._out.with_name(self._out.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            _raise(error, self._out, "being opened")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._close()
            raise DataSetLocked(
                f"{self._out}: another 'eyas generate' is writing to it; wait for it or choose another generate.out",
                path=self._out,
            ) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def append_answer(self, row: dict[str, Any]) -> None:
        assert self._answers is not None
        self._answers.append({**row, **self._settings})
        self.tally.count_answer(row)

    def append_reject(self, row: dict[str, Any]) -> None:
        assert self._rejects is not None
        self._rejects.append({**row, **self._settings})
        self.tally.count_reject(row)

    def sync(self) -> None:
        """Make what was appended outlive a power cut."""
        for lines in (self._answers, self._rejects):
            if lines is not None:
                lines.sync()

    def _read(self) -> None:
        rejects = rejects_path(self._out)
        for path, count in ((self._out, self.tally.count_answer), (rejects, self.tally.count_reject)):
            for number, row in _rows(path):
                try:
                    known = row[FIRST_KEY] in self.tally.done
                    self._check_settings(path, number, row)
                    count(row)
                except (KeyError, TypeError, AttributeError):
                    raise ConfigError(
                        f"{path}:{number}: not a row of 'eyas generate'; choose another generate.out"
                    ) from None
                if known:
                    raise DataError(f"{path}:{number}: row_id {row[FIRST_KEY]} occurs twice; remove one of the lines")
        self._answers, self._rejects = _Lines(self._out), _Lines(rejects)

    def _check_settings(self, path: Path, number: int, row: Mapping[str, Any]) -> None:
        differences = []
        for name, mine in self._settings.items():
            theirs = row[name]
            for key in sorted({*mine, *theirs}):
                if mine.get(key) != theirs.get(key):
                    differences.append(f"{name}.{key}: {theirs.get(key)} there, {mine.get(key)} here")
        if differences:
            raise ConfigError(
                f"{path}:{number}: made with other settings ({'; '.join(differences)}); choose another generate.out"
            )

    def _close(self) -> None:
        for lines in (self._answers, self._rejects):
            if lines is not None:
                lines.close()
        self._answers = self._rejects = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class _Lines:
    """A JSONL file that only grows, by whole lines. Created with its first line, private to the user."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = _cut_torn_line(path)
        self._dirty = False

    def append(self, row: Mapping[str, Any]) -> None:
        assert next(iter(row)) == FIRST_KEY
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            written = 0
            while written < len(line):
                # At a position of our own: whatever an interrupted write left behind is overwritten.
                written += os.pwrite(self._fd, line[written:], self._size + written)
        except OSError as error:
            _raise(error, self._path, "being written")
        self._size += len(line)
        self._dirty = True

    def sync(self) -> None:
        if self._dirty:
            try:
                os.fsync(self._fd)
            except OSError as error:
                _raise(error, self._path, "being written")
            self._dirty = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The complete lines of a file of ours, from 1; a torn last line is not one of them."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.startswith(LINE_START[: len(line)]):
                    raise ConfigError(f"{path}:{number}: not a row of 'eyas generate'; choose another generate.out")
                if line.endswith(b"\n"):
                    yield number, json.loads(line)
    except FileNotFoundError:
        return
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}:{number}: damaged: {error}; remove the line, it will be answered anew") from None
    except OSError as error:
        _raise(error, path, "being read")


def _cut_torn_line(path: Path) -> int:
    """Drop what a kill left behind the last complete line; the size that remains."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            keep = size
            while keep and not _ends_line(file.fileno(), keep):
                keep -= 1
            if keep < size:
                file.truncate(keep)
            return keep
    except FileNotFoundError:
        return 0
    except OSError as error:
        _raise(error, path, "being opened")


def _ends_line(fd: int, size: int) -> bool:
    return os.pread(fd, 1, size - 1) == b"\n"


def _raise(error: OSError, path: Path, doing: str) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise OutOfSpace(f"{path}: no space left; free some, then run the same command again", path=path) from None
    raise StoreError(f"{path}: {error.strerror or error} while {doing}", path=path) from error
