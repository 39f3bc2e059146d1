"""Names in a data set's directory. The names alone say what is done; whatever they do not match is not ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.records import is_digest
from eyas.store.files import raise_store_error

_PAYLOAD = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.safetensors")
_RECORD = re.compile(r"([0-9a-f]{32})\.json")
_TEMPORARY = re.compile(
    r"\.(?:[0-9a-f]{32}(?:\.[0-9a-f]{32}\.safetensors|\.json)?|\d{5}\.parquet|eyas\.json|manifest\.parquet|heartbeat\.json|run\.toml|verify\.json)\.[0-9a-f]{8}\.tmp"
)
_SEGMENT = re.compile(r"(\d{5})\.parquet")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the directory `root`."""

    root: Path

    @property
    def head(self) -> Path:
        """Format version, spec and fingerprint; written first, once."""
        return self.root / "eyas.json"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def records(self) -> Path:
        return self.root / "records"

    @property
    def plan(self) -> Path:
        return self.root / "plan"

    @property
    def scratch(self) -> Path:
        """Room for files that only a running process needs; removed whole by the next one."""
        return self.root / ".scratch"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def manifest(self) -> Path:
        """A cache over the records; may be deleted at any time."""
        return self.root / "manifest.parquet"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def heartbeat(self) -> Path:
        return self.root / "heartbeat.json"

    @property
    def config(self) -> Path:
        """The resolved configuration of the latest run."""
        return self.root / "run.toml"

    @property
    def report(self) -> Path:
        """What the latest `verify` found."""
        return self.root / "verify.json"

    def record(self, shard_id: str) -> Path:
        assert is_digest(shard_id)
        return self.records / f"{shard_id}.json"

    def payload(self, shard_id: str, digest: str) -> Path:
        return self.shards / payload_name(shard_id, digest)

    def segment(self, number: int) -> Path:
        return self.plan / f"{number:05d}.parquet"

    def record_ids(self) -> set[str]:
        """Ids of the shards that have a record: the set of what is done."""
        return {m[1] for m in _matches(self.records, _RECORD)}

    def payloads(self) -> dict[str, list[Path]]:
        """Payload files by shard id, with or without a record."""
        found: dict[str, list[Path]] = {}
        for match in _matches(self.shards, _PAYLOAD):
            found.setdefault(match[1], []).append(self.shards / match[0])
        return found

    def temporaries(self) -> list[Path]:
        """Our unfinished files: whoever holds the lock may remove them."""
        return [
            directory / match[0]
            for directory in (self.root, self.shards, self.records, self.plan)
            for match in _matches(directory, _TEMPORARY)
        ]

    def segments(self) -> list[Path]:
        """The plan's segments, in order."""
        return [self.plan / m[0] for m in sorted(_matches(self.plan, _SEGMENT), key=lambda m: m[0])]


def payload_name(shard_id: str, digest: str) -> str:
    """The name of a shard's payload: what it should hold, then what it does hold."""
    assert is_digest(shard_id) and is_digest(digest)
    return f"{shard_id}.{digest}.safetensors"


def _matches(directory: Path, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    try:
        names = [p.name for p in directory.iterdir()]
    except FileNotFoundError:
        return
    except OSError as error:
        raise_store_error(error, directory, "listing it")
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            yield match
