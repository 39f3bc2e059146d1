"""Everything that can go wrong, as one tree: the class decides what happens, one function acts on it."""

from __future__ import annotations

from pathlib import Path

EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INCOMPLETE = 3


class EyasError(Exception):
    """Something an operator can meet; its text is one clear line that says what, where and what to do."""

    exit_code = EXIT_FAILED


class ConfigError(EyasError):
    """The configuration cannot work; one line per problem."""

    exit_code = EXIT_CONFIG


class DataError(EyasError):
    """Input data is missing, empty or not what it claims to be."""


class EngineError(EyasError):
    """An engine did not give what was asked of it."""

    def __init__(self, message: str, *, engine: str = "", sample_id: str = "") -> None:
        super().__init__(message)
        self.engine = engine
        self.sample_id = sample_id


class EngineUnavailable(EngineError):
    """Worth another try: connection lost, time-out, 5xx, 408, 429."""

    exit_code = EXIT_INCOMPLETE


class EngineGone(EngineError):
    """The engine was waited for as long as was asked, and stayed away: the same command goes on from here."""

    exit_code = EXIT_INCOMPLETE


class EngineWrong(EngineError):
    """The engine's states are wrong, and what it answered before may be so, too: the run stops."""


class EngineRefused(EngineError):
    """The engine will never answer this sample (400, 413, 422, too long): a reject, not a retry."""


class CaptureMismatch(EyasError):
    """An answer is not about the sample that was sent: other ids, rows, layers, dtype, or non-finite values."""

    def __init__(self, message: str, *, sample_id: str = "", reason: str = "mismatch") -> None:
        super().__init__(message)
        self.sample_id = sample_id
        self.reason = reason


class StoreError(EyasError):
    """The data set on disk cannot be written or read."""

    def __init__(self, message: str, *, path: Path | str = "") -> None:
        super().__init__(message)
        self.path = str(path)


class SpecMismatch(StoreError):
    """The data set was made under another spec; the text names the fields that differ."""

    exit_code = EXIT_CONFIG


class ShardCorrupt(StoreError):
    """A shard's bytes are not those that its record names."""


class ShardMissing(StoreError):
    """A record names a payload that is not there."""


class OutOfSpace(StoreError):
    """The disk is full, or too nearly so to go on: free some and run the same command again."""

    exit_code = EXIT_INCOMPLETE


class DataSetLocked(StoreError):
    """Another process writes to this data set."""


class Stopped(EyasError):
    """Stopped on request (Ctrl-C, SIGTERM) or unfinished: the same command goes on from here."""

    exit_code = EXIT_INCOMPLETE


class TrainError(EyasError):
    """Training cannot go on."""


class NonFinite(TrainError):
    """A loss or a gradient that is no number: stopped before the optimizer could spread it."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class ExportError(EyasError):
    """A checkpoint cannot be written as it was asked for."""
