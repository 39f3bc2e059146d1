"""The same samples from several engines, and from a data set: do they agree, and if not, whose convention differs?

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from eyas.capture.check import TOLERANCES, Head
from eyas.capture.requests import Batch
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, Engine
from eyas.errors import EngineError
from eyas.records import LAST, CaptureSpec, TokenIds, hidden_field
from eyas.store.reader import DataSet
from eyas.values import as_float32, median_row_error

Values = npt.NDArray[np.float32]
Fields = Mapping[str, Values]
"""`[T, H]` by field."""
Norm = Callable[[Values], Values]
"""The target's final norm."""
MAX_SAMPLES = 8
MAX_TOKENS = 1024
"""Longer samples are left out: a comparison takes no more than a minute."""


@dataclass(frozen=True, slots=True)
class Party:
    """One engine's (or a data set's) states of some samples."""

    name: str
    spec: CaptureSpec
    samples: Mapping[str, Fields]
    """By sample id; perhaps of more layers than the spec's."""


@dataclass(frozen=True, slots=True)
class FieldParity:
    """How one field of a party compares with the same one of the reference, over all rows of all samples."""

    field: str
    cosine: float
    """Mean over rows."""
    error: float
    """Median over rows of the relative error."""
    worst: float
    """Of all rows."""
    argmax: float | None
    """Of `last`: share of the rows at which the target's head ranks the same token first."""
    agrees: bool
    cause: str
    """Where it does not agree: which convention would make it agree."""

    def line(self) -> str:
        """For people."""
        top = f", arg-max agrees at {self.argmax:.1%} of the rows" if self.argmax is not None else ""
        line = f"cosine {self.cosine:.6f}, relative error {self.error:.2g} (worst row {self.worst:.2g}){top}"
        return f"{self.field:10} {line}" + (f": {self.cause}" if self.cause else "")


@dataclass(frozen=True, slots=True)
class Parity:
    """How a party compares with the reference."""

    name: str
    norm: str
    """Of its last state: `pre` or `post`."""
    fields: tuple[FieldParity, ...]

    @property
    def agrees(self) -> bool:
        """Whether every field does."""
        return all(field.agrees for field in self.fields)


def stored_party(data: DataSet, sample_ids: Sequence[str]) -> Party:
    """What a data set holds of these samples."""
    spec = data.spec
    found: dict[str, Fields] = {}
    for sample_id in sample_ids:
        sample = data[data.index_of(sample_id)]
        found[sample_id] = {f: as_float32(sample.field(f), spec.dtype, spec.hidden_size) for f in spec.fields}
    return Party("data set", spec, found)


def engine_party(name: str, engine: Engine, samples: Mapping[str, TokenIds]) -> Party:
    """What an engine gives for these samples, by id. Raises EngineError."""
    spec = engine.info().spec
    found: dict[str, Fields] = {}
    for answer in engine.capture(Batch([CaptureRequest(s, ids) for s, ids in samples.items()])):
        if isinstance(answer, CaptureFailure):
            raise answer.error
        assert isinstance(answer, CaptureAnswer)
        found[answer.sample_id] = {
            f: as_float32(block.data, block.dtype, block.shape[1]) for f, block in answer.fields.items()
        }
    missing = [s for s in samples if s not in found]
    if missing:
        raise EngineError(f"{name} gave no answer for sample {missing[0]}", engine=name)
    return Party(name, spec, found)


def compare(reference: Party, party: Party, samples: Mapping[str, TokenIds], norm: Norm, head: Head) -> Parity:
    """Each field of a party against the reference's, the last state after the norm on both sides."""
    tolerance = max(TOLERANCES[spec.dtype].states for spec in (reference.spec, party.spec))
    theirs, mine = _joined(reference, samples, norm), _joined(party, samples, norm)
    fields = []
    for field in (*(hidden_field(k) for k in party.spec.aux_layers), LAST):
        argmax = _argmax_agreement(reference, party, samples, head) if field == LAST else None
        if field in theirs and theirs[field].shape == mine[field].shape:
            cosine, error, worst = _distance(mine[field], theirs[field])
        else:
            cosine = error = worst = float("nan")
        agrees = error <= tolerance
        cause = "" if agrees else _cause(field, mine[field], theirs, reference, party, samples, norm, tolerance)
        fields.append(FieldParity(field, cosine, error, worst, argmax, agrees, cause))
    return Parity(party.name, party.spec.last_hidden_norm, tuple(fields))


def _joined(party: Party, samples: Mapping[str, TokenIds], norm: Norm) -> dict[str, Values]:
    """All rows of all samples by field, `last` after the norm."""
    names = next(iter(party.samples.values())).keys()
    joined = {name: np.concatenate([party.samples[s][name] for s in samples]) for name in names}
    if party.spec.last_hidden_norm == "pre":
        joined[LAST] = norm(joined[LAST])
    return joined


def _distance(mine: Values, theirs: Values) -> tuple[float, float, float]:
    """Mean cosine, median and largest relative error of rows."""
    tiny = np.finfo(np.float32).tiny
    a, b = np.linalg.norm(mine, axis=1), np.maximum(np.linalg.norm(theirs, axis=1), tiny)
    cosine = np.einsum("th,th->t", mine, theirs, dtype=np.float64) / np.maximum(a * b, tiny)
    return (
        float(cosine.mean()),
        median_row_error(mine, theirs),
        float((np.linalg.norm(mine - theirs, axis=1) / b).max()),
    )


def _argmax_agreement(reference: Party, party: Party, samples: Mapping[str, TokenIds], head: Head) -> float:
    """Share of the rows at which the target's head ranks the same token first."""

    def tops(of: Party, sample_id: str, token_ids: TokenIds) -> npt.NDArray[np.int64]:
        told: Literal["pre", "post"] = "pre" if of.spec.last_hidden_norm == "pre" else "post"
        return head.next_logprobs(of.samples[sample_id][LAST], token_ids, told)[1]

    same = [tops(reference, s, ids) == tops(party, s, ids) for s, ids in samples.items()]
    return float(np.mean(np.concatenate(same)))


def _cause(
    field: str,
    mine: Values,
    theirs: Mapping[str, Values],
    reference: Party,
    party: Party,
    samples: Mapping[str, TokenIds],
    norm: Norm,
    tolerance: float,
) -> str:
    """Which of the reference's states a field really is: the nearest index, or the other side of the norm."""
    candidates = {name: values for name, values in theirs.items() if name not in (field, LAST)}
    if field == LAST:
        # As if the party had told the norm wrongly: its values as they are, and once more through the norm.
        raw = np.concatenate([party.samples[s][LAST] for s in samples])
        told = party.spec.last_hidden_norm
        other = raw if told == "pre" else norm(raw)
        if median_row_error(other, theirs[LAST]) <= tolerance:
            return f"its last state is {'post' if told == 'pre' else 'pre'}-norm, not {told}-norm as it says"
        mine = raw
    else:
        candidates["the last state after the norm"] = theirs[LAST]
    errors = {name: median_row_error(mine, v) for name, v in candidates.items() if v.shape == mine.shape}
    nearest = min(errors, key=errors.__getitem__, default=None)
    if nearest is None:
        return f"{reference.name} has nothing to compare it with"
    if errors[nearest] <= tolerance:
        return f"it is {reference.name}'s {nearest}: the layers are numbered otherwise"
    return f"nearest is {reference.name}'s {nearest} ({errors[nearest]:.2g}): other weights, dtype or positions?"
