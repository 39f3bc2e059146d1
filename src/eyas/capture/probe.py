"""Before the first shard: are the values right, and does a changed engine still give what it gave?"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.capture.asker import Asker
from eyas.capture.check import TOLERANCES, Head, check_values, compare_states
from eyas.capture.monitor import Monitor
from eyas.engine.base import CaptureRequest
from eyas.errors import SpecMismatch
from eyas.records import Provenance, TokenIds
from eyas.store.reader import DataSet

PROBE_SAMPLES = 4
RECHECKED_SAMPLES = 4


def probe(
    asker: Asker, samples: Sequence[tuple[str, TokenIds]], head: Head | None, monitor: Monitor, server: str = ""
) -> None:
    """Check the values of a few samples against the engine's own word and the target's head. Raises CaptureMismatch.

    `server`: the address of the one that is probed, where there are several.
    """
    of_server = f" of {server}" if server else ""
    lines = []
    for answer in asker.ask([CaptureRequest(s, ids, with_reference=True) for s, ids in samples]):
        report = check_values(answer, asker.info.spec, head)
        monitor.counts.checked_samples += 1
        monitor.events.add("probe", sample_id=answer.sample_id, found=report.line(), server=answer.server)
        lines.append(report.line())
    if lines:
        monitor.say(f"probe{of_server} of {len(lines)} samples is right: {lines[0]}")


def recheck(
    asker: Asker, samples: Sequence[tuple[str, TokenIds]], stored: DataSet, changes: str, monitor: Monitor
) -> None:
    """Capture committed samples again; raise SpecMismatch when they differ by more than the tolerance."""
    spec, root = asker.info.spec, monitor.root
    tolerance = TOLERANCES[spec.dtype].states
    num_agreed = 0
    for answer in asker.ask([CaptureRequest(s, ids) for s, ids in samples[:RECHECKED_SAMPLES]]):
        sample = stored[stored.index_of(answer.sample_id)]
        error = compare_states(answer, {name: sample.field(name) for name in spec.fields}, spec)
        monitor.events.add("recheck", sample_id=answer.sample_id, error=error, changed=changes)
        if not error <= tolerance:
            raise SpecMismatch(
                f"{root}: {changes} changed since the last commit, and sample {answer.sample_id} now differs by "
                f"{error:.2g} relative (allowed {tolerance:.2g}); go back, or capture into a new directory",
                path=root,
            )
        num_agreed += 1
    monitor.say(f"{changes} changed; {num_agreed} committed samples captured again agree")


def provenance_changes(then: Provenance, now: Provenance) -> str:
    """What differs, for people: `torch 2.12 -> 2.13`; empty when nothing does."""
    changes = []
    if (then.engine, then.version) != (now.engine, now.version):
        changes.append(f"{then.engine} {then.version} -> {now.engine} {now.version}")
    for name in sorted(then.settings.keys() | now.settings.keys()):
        old, new = then.settings.get(name, "absent"), now.settings.get(name, "absent")
        if old != new:
            changes.append(f"{name} {old} -> {new}")
    return ", ".join(changes)
