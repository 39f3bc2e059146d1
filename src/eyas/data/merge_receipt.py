"""What `data merge` says of its work, for people and as the record beside its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.data.leakage import BenchmarkReport, LeakExample
from eyas.log import human_bytes, human_time

MAX_DETAIL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Example:
    """One dropped row."""

    where: str
    """`FILE:ROW`."""
    detail: str


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What became of one source. `num_input = num_kept + sum(dropped)`."""

    name: str
    path: str
    num_files: int
    num_input: int
    num_kept: int
    dropped: Mapping[str, int]
    num_bytes: int
    """JSON, not compressed."""


@dataclass(frozen=True, slots=True)
class MergeReceipt:
    """What `data merge` did. `num_input = num_kept + sum(dropped)`."""

    path: Path
    num_input: int
    num_kept: int
    dropped: Mapping[str, int]
    """Rows by reason."""
    sources: tuple[SourceReport, ...]
    forms: Mapping[str, int]
    """Kept rows: `messages`, `text`, `tokens`."""
    num_unanswered: int
    """Kept conversations without a word of an assistant: prompts for `generate`."""
    num_non_text: int
    """Kept conversations with images or the like, which `prepare` drops."""
    num_mended: int
    """Rows with NaN or Infinity, now null."""
    benchmarks: tuple[BenchmarkReport, ...]
    num_unchecked: int
    """Rows of nothing but token ids, which cannot be compared with benchmarks."""
    input_bytes: int
    """JSON, not compressed."""
    output_bytes: int
    digest: str
    """xxh3-128 over the bytes of the output."""
    examples: Mapping[str, tuple[Example, ...]]
    """The first dropped rows of each reason."""
    wall_s: float
    num_retagged: int = 0
    """Duplicates with tags that the first one did not have; it has them now."""
    unchanged: bool = False
    """The output was there already, made of the same files with the same settings."""

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> MergeReceipt:
        """Inverse of `to_json`; KeyError or TypeError for anything else."""
        examples = {reason: tuple(Example(**e) for e in named) for reason, named in value["examples"].items()}
        benchmarks = (
            BenchmarkReport(**{**b, "examples": [LeakExample(**e) for e in b["examples"]]}) for b in value["benchmarks"]
        )
        lists = {"examples": examples, "benchmarks": tuple(benchmarks)}
        sources = tuple(SourceReport(**source) for source in value["sources"])
        return cls(**{**value, **lists, "sources": sources, "path": Path(value["path"])})

    @property
    def next_command(self) -> str:
        """What comes next, without its run file."""
        return "eyas generate" if self.num_unanswered else "eyas prepare"

    def lines(self) -> list[str]:
        """The receipt for people: law 1 first, then each source, sizes, leakage, and what was dropped and where."""
        if self.unchanged:
            return [
                f"{self.path}: nothing to do: made of the same files with the same settings, "
                f"{self.num_kept:,} conversations, {human_bytes(self.output_bytes)}, digest {self.digest}"
            ]
        lines = [identity(str(self.path), self.num_input, self.num_kept, self.dropped)]
        for source in self.sources:
            text = identity(f"  {source.name}", source.num_input, source.num_kept, source.dropped)
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in _by_count(source.dropped))
            lines.append(text + (f" ({reasons})" if reasons else "") + f", {human_bytes(source.num_bytes)}")
        rate = self.input_bytes / self.wall_s / 1e6 if self.wall_s else 0.0
        forms = ", ".join(f"{name} {count:,}" for name, count in self.forms.items() if count)
        lines.append(
            f"{human_bytes(self.input_bytes)} read, {human_bytes(self.output_bytes)} written, "
            f"{human_time(self.wall_s)}, {rate:,.1f} MB/s"
        )
        lines.append(f"forms: {forms}")
        if self.num_unanswered:
            lines.append(f"{self.num_unanswered:,} conversations have no answer yet")
        if self.num_non_text:
            lines.append(f"{self.num_non_text:,} conversations hold more than text; 'eyas prepare' will drop them")
        if self.num_mended:
            lines.append(f"{self.num_mended:,} rows held NaN or Infinity, which are not JSON: null now")
        if self.num_retagged:
            lines.append(
                f"{self.num_retagged:,} duplicates had further tags: the conversation that is kept has them now"
            )
        for benchmark in self.benchmarks:
            lines.append(
                f"benchmark {benchmark.path}: {benchmark.num_leaked_prompts:,} of {benchmark.num_prompts:,} prompts "
                f"found in {benchmark.num_conversations:,} rows"
            )
            lines += [f"  {e.where} has {e.prompt}: {printable(e.passage)}" for e in benchmark.examples]
        if self.num_unchecked:
            lines.append(f"{self.num_unchecked:,} rows of token ids were not compared with the benchmarks")
        for reason, count in _by_count(self.dropped):
            lines.append(f"dropped {count:,} {reason}")
            lines += [f"  {example.where}: {example.detail}" for example in self.examples.get(reason, ())]
        lines.append(f"digest {self.digest}")
        return lines


def identity(name: str, num_input: int, num_kept: int, dropped: Mapping[str, int]) -> str:
    """Law 1 as a sentence."""
    return f"{name}: {num_input:,} rows = {num_kept:,} kept + {sum(dropped.values()):,} dropped"


def _by_count(dropped: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(dropped.items(), key=lambda item: (-item[1], item[0]))


def printable(text: str) -> str:
    """The text on one line, of bounded length."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= MAX_DETAIL_CHARS else text[: MAX_DETAIL_CHARS - 1] + "…"
