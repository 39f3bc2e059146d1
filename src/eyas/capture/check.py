"""Every answer is checked before it counts: cheap checks on each sample, value checks on a probe and on a fraction.

Letters: `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from eyas.engine.base import CaptureAnswer, Reference
from eyas.errors import CaptureMismatch
from eyas.records import LAST, CaptureSpec, StateBlock, TokenIds, hidden_field
from eyas.values import all_finite, as_float32, first_nonfinite_row, median_row_error, row_bytes

SHORT_ROWS = 0.75
"""What a layer adds is shorter than the residual stream that it adds to, in most models far shorter."""
MAX_CHECKED_ROWS = 64
"""Rows of a sample whose logits are computed: the target's vocabulary may have a quarter of a million entries."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far right values may differ. Median errors; measured on SmolLM2 and the tiny models, see docs/LOG.md."""

    states: float
    """Median over rows of |a - b| / |b|."""
    logprob: float
    """Median over rows of the absolute difference, in nats."""


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(states=1e-3, logprob=2e-3),
    "float16": Tolerance(states=1e-2, logprob=3e-2),
    "bfloat16": Tolerance(states=3e-2, logprob=0.15),
}


class Head(Protocol):
    """The target's final norm and output matrix, read from its own files."""

    def next_logprobs(
        self, last: npt.NDArray[np.float32], next_ids: npt.ArrayLike, norm: Literal["pre", "post"]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Log-probability of `next_ids [n]` at rows `last [n, H]` (before or after the norm), and the arg-max."""
        ...


class DeferredHead:
    """A head that is loaded when it is first needed: a run with nothing to do loads nothing."""

    def __init__(self, load: Callable[[], Head]) -> None:
        self._load = load
        self._head: Head | None = None

    def next_logprobs(
        self, last: npt.NDArray[np.float32], next_ids: npt.ArrayLike, norm: Literal["pre", "post"]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """As the head that it stands for."""
        if self._head is None:
            self._head = self._load()
        return self._head.next_logprobs(last, next_ids, norm)


def check_answer(answer: CaptureAnswer, token_ids: TokenIds, spec: CaptureSpec) -> None:
    """Raise CaptureMismatch unless the answer is about the tokens sent, whole, of the right kind, and finite."""
    if not np.array_equal(answer.token_ids, token_ids):
        raise _mismatch(answer, "token_ids", f"{_first_difference(answer.token_ids, token_ids)}; not the sample sent")
    missing = [name for name in spec.fields if name not in answer.fields]
    if missing:
        raise _mismatch(answer, "layers", f"no {', '.join(missing)} in the answer")
    for name in spec.fields:
        block = answer.fields[name]
        if block.dtype != spec.dtype:
            raise _mismatch(answer, "dtype", f"{name} is {block.dtype}, not {spec.dtype}")
        if len(block.shape) != 2 or block.shape[1] != spec.hidden_size:
            shape = list(block.shape)
            raise _mismatch(answer, "width", f"{name} has shape {shape}, not [T, {spec.hidden_size}]")
        rows, width = block.shape
        if rows != len(token_ids):
            cause = (
                "prefix cache or chunked prefill?" if rows < len(token_ids) else "padding or another request's rows?"
            )
            raise _mismatch(answer, "rows", f"{name} has {rows} rows for {len(token_ids)} tokens ({cause})")
        if block.num_bytes != rows * row_bytes(block.dtype, width):
            raise _mismatch(answer, "bytes", f"{name} has {block.num_bytes} bytes, its shape says otherwise")
        if not all_finite(block.data, block.dtype):
            row = first_nonfinite_row(block.data, block.dtype, width)
            raise _mismatch(answer, "non_finite", f"{name} is not finite, first in row {row}")


@dataclass(frozen=True, slots=True)
class ValueReport:
    """What a value check measured on one sample; None where the engine or the target gives nothing to compare with."""

    logprob_error: float | None
    """Median |log-probability from the stored last state - the engine's own|, nats."""
    top1: float | None
    """Share of rows whose arg-max is the next token, both ways alike: only told, not judged."""
    hidden_error: Mapping[int, float]
    """Median relative row error against the engine's ordinary path, by hidden-state index."""
    alone_error: float | None
    """The largest median relative row error between the sample in a batch and alone."""

    def line(self) -> str:
        """One line for people."""
        parts = []
        if self.logprob_error is not None:
            parts.append(f"log-probabilities differ by {self.logprob_error:.1e}")
        if self.hidden_error:
            parts.append(f"layers by {max(self.hidden_error.values()):.1e} ({_indices(self.hidden_error)})")
        if self.alone_error is not None:
            parts.append(f"alone against batch by {self.alone_error:.1e}")
        return ", ".join(parts) or "nothing to compare with"


def check_values(answer: CaptureAnswer, spec: CaptureSpec, head: Head | None) -> ValueReport:
    """Compare an answer with the engine's own word and with the target's head; both as far as they are there.

    Raises CaptureMismatch that names the field, the size of the error and the likely cause.
    """
    reference = answer.reference
    if reference is None:
        return ValueReport(None, None, {}, None)
    tolerance = TOLERANCES[spec.dtype]
    hidden_error = _check_hidden(answer, reference, spec, tolerance)
    alone_error = _check_alone(answer, reference, tolerance)
    logprob_error = top1 = None
    if head is not None and spec.last_hidden_norm != "unknown" and len(reference.next_logprobs):
        logprob_error, top1 = _check_logprobs(answer, reference, spec, head, tolerance)
    _check_last(answer, reference, spec, tolerance)
    return ValueReport(logprob_error, top1, hidden_error, alone_error)


def _check_last(answer: CaptureAnswer, reference: Reference, spec: CaptureSpec, tolerance: Tolerance) -> None:
    """Against the target computed elsewhere: the engine's own log-probabilities come from the engine's own weights."""
    if reference.last is None or spec.last_hidden_norm == "unknown":
        return
    error = median_row_error(_values(answer.fields[LAST]), reference.last)
    if not error <= tolerance.states:
        raise _mismatch(
            answer,
            "last",
            f"the last hidden state differs from the target's own by {error:.2g} relative (allowed "
            f"{tolerance.states:.2g}); does the engine serve other weights than target.path?",
        )


def _check_hidden(
    answer: CaptureAnswer, reference: Reference, spec: CaptureSpec, tolerance: Tolerance
) -> dict[int, float]:
    errors = {}
    for k in spec.aux_layers:
        if k not in reference.hidden:
            continue
        states = _values(answer.fields[hidden_field(k)])
        errors[k] = median_row_error(states, reference.hidden[k])
        if errors[k] > tolerance.states:
            raise _mismatch(
                answer,
                "layer",
                f"hidden.{k} differs from the engine's ordinary path by {errors[k]:.2g} relative; "
                f"{_layer_cause(k, states, reference.hidden, tolerance)}",
            )
    return errors


def _layer_cause(
    k: int,
    states: npt.NDArray[np.float32],
    reference: Mapping[int, npt.NDArray[np.float32]],
    tolerance: Tolerance,
) -> str:
    """Why the states that came as hidden state `k` are not the reference's."""
    others = {j: median_row_error(states, theirs) for j, theirs in reference.items() if j != k}
    nearest = min(others, key=others.__getitem__, default=None)
    if nearest is not None and others[nearest] <= tolerance.states:
        off = "off by one layer" if abs(nearest - k) == 1 else "another layer"
        return f"it is hidden state {nearest} ({off}): the engine numbers its layers otherwise"
    length = float(np.median(np.linalg.norm(states, axis=1)) / np.median(np.linalg.norm(reference[k], axis=1)))
    if length < SHORT_ROWS:
        return (
            f"its rows are only {length:.2g} times as long as they should be: captured without the residual stream, as "
            'SGLang does for Gemma 3? Such a model needs engine.kind = "hf"'
        )
    return "other weights, dtype or positions?"


def _check_alone(answer: CaptureAnswer, reference: Reference, tolerance: Tolerance) -> float | None:
    worst: float | None = None
    for name, block in reference.alone.items():
        error = median_row_error(_values(answer.fields[name]), _values(block))
        worst = error if worst is None else max(worst, error)
        if error > tolerance.states:
            raise _mismatch(
                answer,
                "batch",
                f"{name} in a batch differs from the same sample alone by {error:.2g} relative; "
                "padding, attention mask or rows of another request?",
            )
    return worst


def _check_logprobs(
    answer: CaptureAnswer, reference: Reference, spec: CaptureSpec, head: Head, tolerance: Tolerance
) -> tuple[float, float]:
    norm = spec.last_hidden_norm
    assert norm != "unknown"
    rows = np.unique(np.linspace(0, len(reference.next_logprobs) - 1, MAX_CHECKED_ROWS).astype(np.int64))
    last = _values(answer.fields[LAST])[rows]
    next_ids, expected = answer.token_ids[rows + 1], reference.next_logprobs[rows]

    def error_as(norm: Literal["pre", "post"]) -> tuple[float, float]:
        found, top = head.next_logprobs(last, next_ids, norm)
        return float(np.median(np.abs(found - expected))), float(np.mean(top == next_ids))

    error, top1 = error_as(norm)
    if error > tolerance.logprob or not np.isfinite(error):
        other: Literal["pre", "post"] = "pre" if norm == "post" else "post"
        cause = "other weights, another final norm, or rows shifted?"
        if error_as(other)[0] <= tolerance.logprob:
            cause = f"the last state is {other}-norm, not {norm}-norm as the spec says"
        raise _mismatch(
            answer,
            "logprob",
            f"log-probabilities from 'last' differ from the engine's own by {error:.2g} nats; {cause}",
        )
    return error, top1


def compare_states(answer: CaptureAnswer, stored: Mapping[str, memoryview], spec: CaptureSpec) -> float:
    """The largest median relative row error between an answer and the stored fields of the same sample."""
    return max(
        median_row_error(_values(answer.fields[name]), as_float32(stored[name], spec.dtype, spec.hidden_size))
        for name in spec.fields
    )


def _values(block: StateBlock) -> npt.NDArray[np.float32]:
    return as_float32(block.data, block.dtype, block.shape[1])


def _mismatch(answer: CaptureAnswer, reason: str, detail: str) -> CaptureMismatch:
    return CaptureMismatch(f"sample {answer.sample_id}: {detail}", sample_id=answer.sample_id, reason=reason)


def _first_difference(found: TokenIds, sent: TokenIds) -> str:
    if len(found) != len(sent):
        return f"{len(found)} token ids came back for {len(sent)}"
    at = int(np.flatnonzero(found != sent)[0])
    return f"token {at} is {found[at]}, sent was {sent[at]}"


def _indices(errors: Mapping[int, float]) -> str:
    return ", ".join(map(str, errors))
