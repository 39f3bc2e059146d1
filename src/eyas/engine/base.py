"""The seam between capture and whoever computes hidden states: `info`, `capture`, `close`.

An adapter translates hidden-state indices into its engine's numbering; nobody else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from eyas.errors import EngineError
from eyas.records import CaptureSpec, Provenance, StateBlock, TokenIds


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves and how it answers."""

    spec: CaptureSpec
    provenance: Provenance
    max_tokens: int
    """Longest sample that the engine accepts."""


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One sample to be captured. Its bytes are reserved before the engine sees it."""

    sample_id: str
    token_ids: TokenIds
    attempt: int = 1
    with_reference: bool = False
    """Also answer with `reference`: what the engine itself says by its ordinary path."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The engine's own word about a sample, computed by its ordinary path and not by the capture path."""

    next_logprobs: npt.NDArray[np.float32]
    """`[T-1]`: log-probability of token `t+1` at row `t`."""
    hidden: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """`[T, H]` float32 by hidden-state index, where the engine can give them."""
    last: npt.NDArray[np.float32] | None = None
    """`[T, H]` float32: the last hidden state as the spec has it, where it can be computed without the engine."""
    alone: Mapping[str, StateBlock] = field(default_factory=dict)
    """The sample's fields captured in a batch of its own, where the engine can give them."""


@dataclass(frozen=True, slots=True)
class CaptureAnswer:
    """The fields of one sample. `token_ids` are those that the engine processed, for comparison with those sent."""

    sample_id: str
    attempt: int
    token_ids: TokenIds
    fields: Mapping[str, StateBlock]
    reference: Reference | None = None
    server: str = ""
    """Address of the server that answered; empty where the engine is none."""


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """One sample's request failed; the error's class says whether another try is worth it."""

    sample_id: str
    attempt: int
    error: EngineError
    suspect: bool = False
    """It was with more than one server that died: ask for it by itself, since it may be what kills them."""


class RequestSource(Protocol):
    """Where an engine takes its work from: requests in plan order whose bytes are reserved."""

    def take(self, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        """Up to `max_tokens` tokens' worth of requests, at least one if any is ready.

        With `wait`, blocks until something is ready and returns [] only when there is no more work. Without it, []
        means that nothing is ready now. Call it with `wait` only while no answer is held back: reserved bytes return
        through answers.
        """
        ...


class Engine(Protocol):
    """Computes hidden states of token sequences.

    An engine may have `waiting_for: str`: what it waits for, by a limit of its own, before it takes work again; empty
    while it computes.
    """

    def info(self) -> EngineInfo: ...

    def capture(self, source: RequestSource) -> Iterator[CaptureAnswer | CaptureFailure]:
        """Answers in any order, exactly one for each request taken.

        Raises EngineUnavailable when the whole engine is gone: what was taken and not answered is asked for again.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class ManyServers(Engine, Protocol):
    """An engine that deals its work to several servers, each an engine of its own."""

    vet: Callable[[str, Engine], None]
    """Called with address and engine of a server that comes back, before it gets work.

    Raises EyasError where its values are not right.
    """

    def servers(self) -> Mapping[str, str]:
        """Of each server, by its address: why it takes no part; empty while it does."""
        ...

    def present(self) -> Mapping[str, Engine]:
        """The servers that take part, by their address."""
        ...

    def lose(self, url: str, why: EngineError) -> None:
        """A server is gone: what it was asked for goes to the others, and it gets no work before it is back."""
        ...
