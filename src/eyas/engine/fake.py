"""An engine without a model: states that follow from the token ids, and any fault on demand. For tests and rehearsals.

Letters: `T` tokens, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, EngineInfo, Reference, RequestSource
from eyas.errors import ConfigError, EngineRefused, EngineUnavailable
from eyas.records import (
    LAST,
    CaptureSpec,
    Provenance,
    StateBlock,
    TokenIds,
    default_aux_layers,
    digest_bytes,
    hidden_field,
)

FaultKind = Literal[
    "late",
    "wrong_ids",
    "fewer_rows",
    "more_rows",
    "nan",
    "wrong_layer",
    "wrong_width",
    "wrong_dtype",
    "missing_layer",
    "pre_norm",
    "refused",
    "unavailable",
    "hang",
    "crash",
]


class Fault(BaseModel):
    """What goes wrong, for which samples, how often."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FaultKind
    every: int = Field(1, ge=1)
    """Meets about one sample in `every`, chosen by sample id."""
    offset: int = 0
    samples: tuple[str, ...] = ()
    """Meets just these samples instead."""
    attempts: int = 1_000_000
    """Meets a sample's first so many attempts."""
    layer: int | None = None
    """Hidden-state index that is wrong; default: the first one."""
    row: int = 0

    def meets(self, request: CaptureRequest) -> bool:
        if request.attempt > self.attempts:
            return False
        if self.samples:
            return request.sample_id in self.samples
        return int(request.sample_id[:8], 16) % self.every == self.offset % self.every


class FakeSettings(BaseModel):
    """Shape, pace and faults; `engine.extra` of an `engine.kind = "fake"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = 8
    hidden_size: int = 16
    vocab_size: int = 65_536
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_tokens: int = 1_000_000
    window_tokens: int = 4096
    shuffle: int | None = None
    """Answers come in an order drawn from this seed."""
    seconds_per_1k_tokens: float = 0.0
    version: str = "1"
    drift: float = 0.0
    """Relative noise on every state, as another build of an engine might have."""
    faults: tuple[Fault, ...] = ()
    crash_after: int | None = None
    """The whole engine is gone once, after this many answers."""


def settings_from(extra: dict[str, Any]) -> FakeSettings:
    """Settings from `engine.extra`. Raises ConfigError, one line per problem."""
    try:
        return FakeSettings.model_validate(extra)
    except ValidationError as error:
        lines = [f"engine.extra.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


class FakeEngine:
    """Deterministic states from token ids, on the CPU, without torch."""

    def __init__(self, aux_layers: Sequence[int] | None = None, settings: FakeSettings | None = None) -> None:
        self.settings = s = settings if settings is not None else FakeSettings()
        layers = tuple(aux_layers) if aux_layers is not None else default_aux_layers(s.num_layers)
        shape = [s.num_layers, s.hidden_size, s.vocab_size]
        try:
            self._spec = CaptureSpec(
                target_digest=digest_bytes(b"eyas.fake", str(shape).encode()),
                num_layers=s.num_layers,
                hidden_size=s.hidden_size,
                vocab_size=s.vocab_size,
                aux_layers=layers,
                last_hidden_norm="post",
                dtype=s.dtype,
            )
        except ValidationError as error:
            raise ConfigError(
                "\n".join(f"capture.aux_layers, engine.extra: {e['msg']}" for e in error.errors()).replace(
                    ": Value error, ", ": "
                )
            ) from None
        self.head = FakeHead(s)
        self.calls = 0
        self._answered = 0
        self._noise = np.random.default_rng(1)

    def info(self) -> EngineInfo:
        provenance = Provenance(
            engine="fake", version=self.settings.version, settings={"drift": str(self.settings.drift)}
        )
        return EngineInfo(self._spec, provenance, self.settings.max_tokens)

    def close(self) -> None:
        """Nothing to give back."""

    def capture(self, source: RequestSource) -> Iterator[CaptureAnswer | CaptureFailure]:
        held: list[CaptureAnswer | CaptureFailure] = []
        rng = np.random.default_rng(self.settings.shuffle)
        while True:
            requests = source.take(self.settings.window_tokens, wait=not held)
            if not requests:
                if not held:
                    return
                yield from held
                held = []
                continue
            if self.settings.shuffle is not None:
                requests = [requests[i] for i in rng.permutation(len(requests))]
            for request in requests:
                self.calls += 1
                fault = next((f for f in self.settings.faults if f.meets(request)), None)
                if self.settings.seconds_per_1k_tokens:
                    time.sleep(self.settings.seconds_per_1k_tokens * len(request.token_ids) / 1000)
                self._perhaps_crash(fault)
                outcome = self._answer(request, fault)
                if fault is not None and fault.kind == "late" and outcome is not None:
                    held.append(outcome)
                elif outcome is not None:
                    self._answered += 1
                    yield outcome
                # The caller counts these bytes as gone once it has written them.
                del outcome

    def _perhaps_crash(self, fault: Fault | None) -> None:
        if self.settings.crash_after is not None and self._answered >= self.settings.crash_after:
            self.settings = self.settings.model_copy(update={"crash_after": None})
            raise EngineUnavailable("the fake engine crashed on purpose", engine="fake")
        if fault is not None and fault.kind == "crash":
            raise EngineUnavailable("the fake engine crashed on this sample", engine="fake")

    def _answer(self, request: CaptureRequest, fault: Fault | None) -> CaptureAnswer | CaptureFailure | None:
        kind = fault.kind if fault is not None else None
        if kind == "hang":
            return None
        if kind in ("refused", "unavailable"):
            make = EngineRefused if kind == "refused" else EngineUnavailable
            error = make(f"scripted: {kind}", engine="fake", sample_id=request.sample_id)
            return CaptureFailure(request.sample_id, request.attempt, error)
        fields = self._fields(request.token_ids)
        answer = CaptureAnswer(
            request.sample_id,
            request.attempt,
            request.token_ids,
            fields,
            self._reference(request.token_ids) if request.with_reference else None,
        )
        return answer if fault is None else self._spoil(answer, fault)

    def _fields(self, token_ids: TokenIds) -> dict[str, StateBlock]:
        fields = {hidden_field(k): self._block(self.hidden(token_ids, k)) for k in self._spec.aux_layers}
        fields[LAST] = self._block(normed(self.hidden(token_ids, self.settings.num_layers)))
        return fields

    def _block(self, values: npt.NDArray[np.float32]) -> StateBlock:
        if self.settings.drift:
            values = values * (1 + self.settings.drift * self._noise.standard_normal(values.shape, dtype=np.float32))
        return to_block(values, self._spec.dtype)

    def hidden(self, token_ids: TokenIds, k: int) -> npt.NDArray[np.float32]:
        """`[T, H]`: hidden-state index `k`, a function of `token_ids[: t + 1]` and `k`; neighbours in `k` are alike."""
        prefix = np.cumsum(_mix(token_ids.astype(np.uint64) + np.uint64(1)), dtype=np.uint64)
        base = _uniform(prefix, self.settings.hidden_size, 0)
        return (base + 0.5 * k * _uniform(prefix, self.settings.hidden_size, 1 + k)).astype(np.float32)

    def _reference(self, token_ids: TokenIds) -> Reference:
        last = normed(self.hidden(token_ids, self.settings.num_layers))
        logprobs, _ = self.head.next_logprobs(last[:-1], token_ids[1:], "post")
        hidden = {k: self.hidden(token_ids, k) for k in range(self.settings.num_layers)}
        return Reference(logprobs, hidden, alone=self._fields(token_ids))

    def _spoil(self, answer: CaptureAnswer, fault: Fault) -> CaptureAnswer:
        k = fault.layer if fault.layer is not None else self._spec.aux_layers[0]
        name, kind, ids = hidden_field(k), fault.kind, answer.token_ids
        fields = dict(answer.fields)
        right = self.hidden(ids, k)
        if kind == "wrong_ids":
            return dataclasses.replace(answer, token_ids=np.roll(ids, 1) + 1)
        if kind == "fewer_rows":
            fields[name] = self._block(right[:-1])
        elif kind == "more_rows":
            fields[name] = self._block(np.concatenate([right, right[-1:]]))
        elif kind == "nan":
            right[min(fault.row, len(right) - 1)] = np.nan
            fields[name] = self._block(right)
        elif kind == "wrong_layer":
            fields[name] = self._block(self.hidden(ids, k - 1 if k else 1))
        elif kind == "wrong_width":
            fields[name] = self._block(right[:, :-1])
        elif kind == "wrong_dtype":
            fields[name] = to_block(right, "float32" if self._spec.dtype != "float32" else "float16")
        elif kind == "missing_layer":
            del fields[name]
        elif kind == "pre_norm":
            fields[LAST] = self._block(self.hidden(ids, self.settings.num_layers))
        reference = answer.reference
        if reference is not None and kind in ("wrong_layer", "pre_norm"):
            # An engine that is set up wrongly is so with every batch.
            reference = dataclasses.replace(reference, alone=fields)
        return dataclasses.replace(answer, fields=fields, reference=reference)


class FakeHead:
    """The fake target's final norm and output matrix."""

    def __init__(self, settings: FakeSettings) -> None:
        self._vocab = min(settings.vocab_size, 512)
        rng = np.random.default_rng(7)
        self._weight = rng.standard_normal((self._vocab, settings.hidden_size)).astype(np.float32)

    def next_logprobs(
        self, last: npt.NDArray[np.float32], next_ids: npt.ArrayLike, norm: Literal["pre", "post"]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Log-probability of `next_ids [n]` at each row of `last [n, H]`, and the arg-max; ids count modulo 512."""
        logits = (last if norm == "post" else normed(last)) @ self._weight.T
        top = logits.max(axis=1)
        lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        rows = np.arange(len(last))
        return np.asarray(logits[rows, np.asarray(next_ids) % self._vocab] - lse, np.float32), logits.argmax(axis=1)


def normed(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The fake target's final norm: root-mean-square over `H`, no weight."""
    scale = np.sqrt(np.mean(values**2, axis=1, keepdims=True) + 1e-6)
    return np.asarray(values / scale, np.float32)


def to_block(values: npt.NDArray[np.float32], dtype: str) -> StateBlock:
    """`[T, H]` float32 values as a field's bytes; bfloat16 rounds to nearest even."""
    if dtype == "float32":
        out: npt.NDArray[np.generic] = values.astype(np.float32)
    elif dtype == "float16":
        out = values.astype(np.float16)
    else:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out = np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return StateBlock(dtype, values.shape, np.ascontiguousarray(out).reshape(-1).view(np.uint8).data)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(prefix: npt.NDArray[np.uint64], width: int, salt: int) -> npt.NDArray[np.float32]:
    """`[T, width]` numbers in -1..1, one stream for each salt."""
    unit: npt.NDArray[np.float32] = (_mix(prefix[:, None] + _columns(width, salt)) >> np.uint64(40)).astype(np.float32)
    unit *= np.float32(2.0**-23)
    unit -= np.float32(1)
    return unit


@lru_cache(maxsize=1024)
def _columns(width: int, salt: int) -> npt.NDArray[np.uint64]:
    return _mix(np.arange(width, dtype=np.uint64) + np.uint64(1_000_003 * (salt + 1)))
