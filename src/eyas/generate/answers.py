"""Answers out: one JSON line per conversation, appended, and resumed by content after any kill.

Two files: `OUT` with a row per answered conversation and `OUT.rejects.jsonl` with a row per rejected prompt. A row that
stands in either of them is done, unless its reject is marked as `retried`: then it is pending, or its latest outcome
stands in a later line. `OUT.lock` holds the process id of who writes, and keeps a second writer away; it stays where it
is, since removing it would race with whoever waits for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import msgspec

from eyas.config import GenerateConfig
from eyas.errors import ConfigError, DataError, DataSetLocked, OutOfSpace, StoreError
from eyas.generate.prompts import OF_THE_PROMPT, PromptReject
from eyas.generate.rows import Known, RowTable

FIRST_KEY = "row_id"
LINE_START = b'{"row_id":"'
"""How each of our lines begins: what else ends in a torn line is somebody else's file and is left alone."""
RETRIED_END = b',"retried":true}\n'
"""How a reject ends that is tried again."""
NOT_JSONL = (".gz", ".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow", ".json")

AnsweredBy = tuple[str, ...]
"""Who answered, as told: provider, model, quantisation, fingerprint; empty where not told."""


@dataclass(slots=True)
class Usage:
    """What answers took: tokens as the engine counts them, requests sent, money."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    cost: float = 0.0

    def add(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.requests += other.requests
        self.cost += other.cost


class AnswerLine(msgspec.Struct):
    """What is counted of an answered row; the rest of the line is passed over."""

    row_id: str
    sampling: msgspec.Raw
    target: msgspec.Raw
    finish_reason: list[str]
    loss_mask: msgspec.Raw = msgspec.Raw()
    ended_early: str = ""
    usage: Usage | None = None
    answered_by: list[list[str]] | None = None
    retokenized: bool = False

    @property
    def generated_tokens(self) -> int:
        if mask := bytes(self.loss_mask):
            return mask.count(b"1")
        return self.usage.completion_tokens if self.usage is not None else 0


class RejectLine(msgspec.Struct):
    """What is counted of a rejected row."""

    row_id: str
    sampling: msgspec.Raw
    target: msgspec.Raw
    reason: str
    usage: Usage | None = None
    retried: bool = False


@dataclass(slots=True)
class Tally:
    """What the two files hold, counted from the rows themselves."""

    rows: RowTable = field(default_factory=RowTable)
    """Every row that is done, and those that are planned, if the table came with them."""
    num_answered: int = 0
    num_rejected: int = 0
    answered: int = 0
    """Of the planned rows."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Of the planned rows, by reason."""
    retried: int = 0
    """Rejects that were, or are to be, tried again; one that is rejected each time counts each time."""
    retried_answered: int = 0
    """Rows among them that have an answer now."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Of every assistant turn."""
    ended: Counter[str] = field(default_factory=Counter)
    """Answered conversations that stop before their last turn, by reason."""
    generated_tokens: int = 0
    num_retokenized: int = 0
    """Answered conversations without token ids."""
    usage: Usage = field(default_factory=Usage)
    """Of answers and rejects, where servers answered."""
    answered_by: Counter[AnsweredBy] = field(default_factory=Counter)
    """Answers by who gave them, where servers told."""

    def is_done(self, row_id: str) -> bool:
        return bool(self.rows.get(row_id) & Known.DONE)

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_rejected

    @property
    def not_planned(self) -> int:
        """Answered rows whose prompt is not in the prompts file."""
        return self.num_answered - self.answered

    def count_answer(self, line: AnswerLine) -> bool:
        """False when the row was there before."""
        before = self.rows.add(line.row_id, Known.ANSWERED)
        self.num_answered += 1
        self.retried_answered += bool(before & Known.RETRIED)
        if before & Known.PLANNED:
            self.answered += 1
        self.finish_reasons.update(line.finish_reason)
        if line.ended_early:
            self.ended[line.ended_early] += 1
        self.generated_tokens += line.generated_tokens
        self.num_retokenized += line.retokenized
        if line.usage is not None:
            self.usage.add(line.usage)
        for told in line.answered_by or ():
            self.answered_by[tuple(told)] += 1
        return not before & Known.DONE

    def count_reject(self, line: RejectLine) -> bool:
        """False when the row was there before."""
        before = self.rows.add(line.row_id, Known.RETRIED if line.retried else Known.REJECTED)
        if line.usage is not None:
            self.usage.add(line.usage)
        if line.retried:
            self.retried += 1
            return True
        self.num_rejected += 1
        if before & Known.PLANNED:
            self.rejected[line.reason] += 1
        return not before & Known.DONE


_Line = TypeVar("_Line", AnswerLine, RejectLine)


def paths_of(config: GenerateConfig) -> tuple[Path, Path]:
    if config.prompts is None:
        raise ConfigError("generate.prompts is not set: which prompts are to be answered?")
    if config.out is None:
        raise ConfigError("generate.out is not set: where do the answered conversations go?")
    if config.out.absolute() == config.prompts.absolute() or (
        config.out.exists() and config.prompts.exists() and config.out.samefile(config.prompts)
    ):
        raise ConfigError(f"generate.out and generate.prompts are the same file, {config.out}; choose another out")
    if config.out.is_dir():
        raise ConfigError(f"generate.out {config.out} is a directory; give the name of a JSONL file")
    if config.out.suffix in NOT_JSONL:
        raise ConfigError(
            f"generate.out: {config.out} is to be plain JSONL, which grows line by line; end it with .jsonl"
        )
    return config.prompts, config.out


def check_overlap(tally: Tally, out: Path, prompts_path: Path) -> None:
    """Refuse to add to a file that has nothing to do with these prompts."""
    if tally.num_done and not tally.answered and not tally.rejected:
        raise ConfigError(
            f"{out}: holds {tally.num_done} rows, none of them about a prompt of {prompts_path}; "
            "choose another generate.out"
        )


def reject_row(reject: PromptReject) -> dict[str, Any]:
    return {
        "row_id": reject.row_id,
        "id": reject.prompt_id,
        "line": reject.line,
        "reason": reject.reason,
        "detail": reject.detail,
    }


def by_reason(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{reason} {n}' for reason, n in sorted(counts.items()))})" if counts else ""


def rejects_path(out: Path) -> Path:
    return out.with_name(out.name + ".rejects.jsonl")


class AnswerFiles:
    """Both files, open for appending under the lock; their rows so far are in `tally`.

    `settings` are the values that every row carries (sampling, target); a row with other ones belongs to another run
    and is refused with ConfigError. `rows` are those planned. With `retry_rejects`, planned rows that are rejected are
    pending again, from now on and for later runs. DataSetLocked when another process writes.
    """

    def __init__(
        self, out: Path, settings: Mapping[str, Any], rows: RowTable | None = None, *, retry_rejects: bool = False
    ) -> None:
        self._out = out
        self._retry_rejects = retry_rejects
        self._settings = settings
        self._settings_json = {name: msgspec.json.encode(value) for name, value in settings.items()}
        self._lock = -1
        self._answers: _Lines | None = None
        self._rejects: _Lines | None = None
        self.tally = Tally() if rows is None else Tally(rows)

    def __enter__(self) -> Self:
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._out.with_name(self._out.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            _raise(error, self._out, "being opened")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
            self._read()
        except BlockingIOError:
            pid = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
            who = f" (pid {pid})" if pid.isdigit() else ""
            self._close()
            raise DataSetLocked(
                f"{self._out}: another 'eyas generate'{who} is writing to it; wait for it or choose another "
                "generate.out",
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
        self._append(self._answers, row, AnswerLine, self.tally.count_answer)

    def append_reject(self, row: dict[str, Any]) -> None:
        assert self._rejects is not None
        self._append(self._rejects, row, RejectLine, self.tally.count_reject)

    def _append(self, lines: _Lines, row: dict[str, Any], kind: type[_Line], count: Callable[[_Line], bool]) -> None:
        assert next(iter(row)) == FIRST_KEY
        line = encode_json({**row, **self._settings})
        # Counted as it will be read again: a row that cannot be read back is never written.
        counted = msgspec.json.decode(line, type=kind)
        assert not self.tally.is_done(counted.row_id)
        lines.append(line + b"\n")
        count(counted)

    def sync(self) -> None:
        """Make what was appended outlive a power cut."""
        for lines in (self._answers, self._rejects):
            if lines is not None:
                lines.sync()

    def _read(self) -> None:
        rejects = rejects_path(self._out)
        if self._retry_rejects and rejects.exists():
            self._retry(rejects)
        # Rejects come first: whether an answer is that of a row that was tried again, they tell.
        for _, number, line in self._lines_in(rejects, RejectLine):
            self._count(rejects, number, line.row_id, self.tally.count_reject(line))
        for _, number, answer in self._lines_in(self._out, AnswerLine):
            self._count(self._out, number, answer.row_id, self.tally.count_answer(answer))
        self._answers, self._rejects = _Lines(self._out), _Lines(rejects)

    def _retry(self, rejects: Path) -> None:
        """Mark the rejects of planned rows as tried again, all at once: the file is replaced by one with the marks."""
        temporary = rejects.with_name(f".{rejects.name}.tmp")
        try:
            with os.fdopen(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                for text, _, line in self._lines_in(rejects, RejectLine):
                    again = self.tally.rows.get(line.row_id) & Known.PLANNED and line.reason not in OF_THE_PROMPT
                    file.write(text.removesuffix(b"}\n") + RETRIED_END if again and not line.retried else text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(rejects)
        except OSError as error:
            _raise(error, rejects, "being written")
        finally:
            temporary.unlink(missing_ok=True)

    def _lines_in(self, path: Path, kind: type[_Line]) -> Iterator[tuple[bytes, int, _Line]]:
        """The lines of a file of ours, each with its number and what it says, which is of these settings."""
        decoder = msgspec.json.Decoder(kind)
        for number, text in _lines_of(path):
            try:
                line = decoder.decode(text)
                self._check_settings(path, number, line)
            except (msgspec.ValidationError, TypeError, AttributeError):
                raise ConfigError(
                    f"{path}:{number}: not a row of 'eyas generate'; choose another generate.out"
                ) from None
            except msgspec.DecodeError as error:
                raise DataError(
                    f"{path}:{number}: damaged: {error}; remove the line, it will be answered anew"
                ) from None
            yield text, number, line

    def _count(self, path: Path, number: int, row_id: str, new: bool) -> None:
        if not new:
            raise DataError(f"{path}:{number}: row_id {row_id} occurs twice; remove one of the lines")

    def _check_settings(self, path: Path, number: int, line: AnswerLine | RejectLine) -> None:
        differences = []
        for name, mine in self._settings.items():
            raw = bytes(getattr(line, name))
            if raw == self._settings_json[name]:
                continue
            theirs = msgspec.json.decode(raw)
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

    def append(self, line: bytes) -> None:
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
            # Before the fsync: what another thread appends meanwhile waits for the next one.
            self._dirty = False
            try:
                os.fsync(self._fd)
            except OSError as error:
                _raise(error, self._path, "being written")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode_json(value: Any) -> bytes:
    """One JSON spelling, without spaces, of rows and requests."""
    try:
        return msgspec.json.encode(value)
    except OverflowError:  # an integer of more than 64 bits, in a field that we only pass on
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=msgspec.to_builtins)
        return text.encode()


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file of ours, from 1; a torn last line is not one of them, nor is a blank one."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number > 1 and line.isspace():
                    continue
                if not line.startswith(LINE_START[: len(line)]):
                    raise ConfigError(f"{path}:{number}: not a row of 'eyas generate'; choose another generate.out")
                if line.endswith(b"\n"):
                    yield number, line
    except FileNotFoundError:
        return
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
            # An editor may have added an empty line.
            while keep > 1 and _ends_line(file.fileno(), keep - 1):
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
