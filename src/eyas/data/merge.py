"""`data merge`: several sources to one file of conversations in the canonical form, every row accounted for.

Rows stream through once: read, brought into the canonical form, weighed, compared with the benchmarks, put into bucket
files beside the output. Then the buckets are read one by one: caps and repetitions are settled, the rest is written in
the order of a hash. The buckets need as much disk as the output, and are removed as they are read.

Why a row is dropped does not depend on the order of the sources, but for a repetition: the first source has it.
A weight keeps the conversations whose id, as a fraction, is below it; a cap keeps those with the smallest ids. So a
larger weight or cap keeps all that a smaller one keeps, and a source that grows loses nobody but to its cap.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from eyas.config import MergeConfig
from eyas.data.canonical import CANONICAL_VERSION
from eyas.data.files import STDIN, Rows, find_files, open_rows, same_file
from eyas.data.leakage import Benchmarks
from eyas.data.merge_receipt import MergeReceipt
from eyas.data.mixture import Mixture
from eyas.data.output import OutputFile, disk_errors, scratch_beside
from eyas.data.shuffle import Shuffle
from eyas.errors import ConfigError, DataError
from eyas.files import fsync_path
from eyas.log import Progress, human_bytes
from eyas.records import canonical_json, digest_bytes

REPORT_VERSION = 1
HASH_BLOCK_BYTES = 1 << 22


def merge(config: MergeConfig, progress: Progress) -> MergeReceipt:
    """Read the sources, bring their rows into the canonical form, mix them and write `merge.out`.

    What is at `merge.out` stays until the new file is complete; nothing else remains, also after an error. An output
    that was made of the same files with the same settings is left as it is. ConfigError for settings that cannot work;
    DataError, one line, when a source is missing, empty or damaged, or no conversation is left; OutOfSpace.
    """
    started = time.monotonic()
    out = _checked(config)
    # A pattern for all that lies beside the output must not match what the last run made.
    own = (out, report_path(out)) if report_path(out).exists() else ()
    sources = [
        open_rows([s.path], field=f"merge.sources[{i}].path", leave_out=own) for i, s in enumerate(config.sources)
    ]
    benchmark_files = find_files(config.benchmarks, field="merge.benchmarks", leave_out=own)
    _require_apart(out, "merge.sources", [file for rows in sources for file in rows.files])
    _require_apart(out, "merge.benchmarks", benchmark_files)
    inputs = _inputs_digest(config, sources, benchmark_files)
    with scratch_beside(out) as scratch:
        if inputs and (receipt := _made_before(out, inputs, progress)) is not None:
            return receipt
        if config.benchmarks:
            progress.show(f"merge: reading {len(benchmark_files)} benchmarks", force=True)
        mix = Mixture(config, sources, Benchmarks(benchmark_files, config.ngram) if config.benchmarks else None)
        with disk_errors(out):
            shuffle = Shuffle(scratch / "buckets", config.seed)
            for _ in mix.collect(shuffle):
                if progress.due():
                    progress.show(mix.progress_line(started))
            with OutputFile(scratch / "out", out.suffix) as output:
                for entry in shuffle.in_order(mix.admitter()):
                    mix.keep(entry)
                    output.write(entry.line)
                    if progress.due():
                        progress.show(f"merge: writing, {mix.num_kept:,} of {mix.num_collected:,} conversations")
                if not mix.num_kept:
                    raise DataError(mix.nothing_left())
                output.finish()
            receipt = mix.receipt(out, output, time.monotonic() - started)
            _publish(scratch, out, inputs, receipt)
    return receipt


def report_path(out: Path) -> Path:
    """The record that says of an output what it was made of."""
    return out.with_name(out.name + ".merge.json")


def _checked(config: MergeConfig) -> Path:
    problems = []
    if not config.sources:
        problems.append("merge.sources is empty; name at least one as [[merge.sources]] with its path")
    if config.out is None:
        problems.append("merge.out is not set; name the file to be written, conversations.jsonl.zst say")
    elif config.out.suffix in (".parquet", ".arrow", ".json", ".zip", ".bz2", ".xz"):
        problems.append(f"merge.out: {config.out} is to be JSONL; end its name with .jsonl, .jsonl.gz or .jsonl.zst")
    elif config.out.is_dir():
        problems.append(f"merge.out: {config.out} is a directory; name a file")
    if sum(source.path == STDIN for source in config.sources) > 1:
        problems.append("merge.sources: standard input can be read only once")
    if STDIN in config.benchmarks:
        problems.append("merge.benchmarks: standard input is no benchmark; name a file")
    if problems or config.out is None:
        raise ConfigError("\n".join(problems))
    return config.out


def _require_apart(out: Path, field: str, files: Sequence[Path]) -> None:
    """ConfigError where writing the output or its report would destroy one of the files."""
    for file in files:
        if file == STDIN:
            continue
        if same_file(file, out):
            raise ConfigError(f"merge.out: {out} is one of {field}{'' if file == out else f': {file}'}")
        if same_file(file, report_path(out)):
            raise ConfigError(f"{field}: {file} is the report of merge.out, which is written anew; take it out")


def _inputs_digest(config: MergeConfig, sources: Sequence[Rows], benchmarks: Sequence[Path]) -> str:
    """What the output is made of: settings, and each file's name, size and time; empty where that cannot be told."""
    files = [*(rows.files for rows in sources), benchmarks]
    if any(not file.is_file() for names in files for file in names):
        return ""
    stats = [[[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in names] for names in files]
    settings = config.model_dump(mode="json", exclude={"out"})
    return digest_bytes(canonical_json([REPORT_VERSION, CANONICAL_VERSION, settings, stats]))


def _made_before(out: Path, inputs: str, progress: Progress) -> MergeReceipt | None:
    """The receipt of an output that is complete and of the same inputs; anything doubtful counts as none."""
    try:
        report = json.loads(report_path(out).read_bytes())
        if report["inputs"] != inputs:
            return None
        receipt = MergeReceipt.from_json(report["receipt"])
        if out.stat().st_size != receipt.output_bytes:
            return None
        progress.show(f"merge: {out} is there already, checking its {human_bytes(receipt.output_bytes)}", force=True)
        if _digest_of(out) != receipt.digest:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dataclasses.replace(receipt, path=out, unchanged=True)


def _digest_of(path: Path) -> str:
    hash = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            hash.update(block)
    return hash.hexdigest()


def _publish(scratch: Path, out: Path, inputs: str, receipt: MergeReceipt) -> None:
    """Put the output in place, then the record that speaks of it: a record always finds the output that it means."""
    report = scratch / "report"
    with report.open("xb") as file:
        value = {"version": REPORT_VERSION, "inputs": inputs, "receipt": receipt.to_json()}
        file.write(json.dumps(value, indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    (scratch / "out").rename(out)
    report.rename(report_path(out))
    fsync_path(out.parent)
