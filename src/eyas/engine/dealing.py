"""Who has which request: one source's work among several servers. Bookkeeping alone: its user holds a lock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, RequestSource
from eyas.engine.client import ServerEngine


@dataclass(eq=False, slots=True)
class Member:
    """One of several servers."""

    engine: ServerEngine
    why: str = ""
    """Why it takes no part; empty while it does."""
    returning: bool = False
    """A thread tries to bring it back."""
    heard_at: float = 0.0
    """Monotonic time of its latest answer."""

    @property
    def url(self) -> str:
        """Its address."""
        return self.engine.url


@dataclass(frozen=True, slots=True)
class Owed:
    """A request that a server has and has not answered."""

    request: CaptureRequest
    member: Member
    since: float


@dataclass(eq=False, slots=True)
class Dealing:
    """One source's requests: those that nobody has, and those that a server owes. A sample is with one server."""

    source: RequestSource
    members: Sequence[Member]
    bytes_per_token: int
    """Of a staged sample."""
    asking: bool = False
    """Somebody waits for the source; nobody else asks it then."""
    silent: list[Member] = field(default_factory=list)
    """Servers that answered nothing while a sample's time ran out; the user takes them out."""
    _waiting: deque[CaptureRequest] = field(default_factory=deque)
    """Not dealt yet, or given back by a server that is gone."""
    _owed: dict[str, Owed] = field(default_factory=dict)
    """By sample id."""
    _hungry: set[Member] = field(default_factory=set)
    """Servers that have nothing to do and asked for work."""

    def of(self, member: Member) -> list[Owed]:
        """What a server owes."""
        return [owed for owed in self._owed.values() if owed.member is member]

    def is_settled(self) -> bool:
        """Whether all that was taken from the source is answered."""
        return not (self._owed or self._waiting)

    def add(self, requests: Iterable[CaptureRequest]) -> None:
        """Requests to be dealt."""
        self._waiting.extend(requests)

    def give_back(self, owed: Owed) -> None:
        """A server owes this no more; whoever has room may take it."""
        self.forgive(owed)
        self._waiting.append(owed.request)

    def forgive(self, owed: Owed) -> None:
        """A server owes this no more, and nobody else shall have it."""
        del self._owed[owed.request.sample_id]

    def take(self, member: Member, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        """Up to `max_tokens` tokens' worth for a server; with `wait` it has nothing to do and is remembered as such.

        One that has nothing to do comes first.
        """
        taken = []
        if not (self._hungry - {member}) or not self.of(member):
            taken = self._deal(member, max_tokens)
        if wait and not taken:
            self._hungry.add(member)
        else:
            self._hungry.discard(member)
        return taken

    def leave(self, member: Member) -> None:
        """A server asks no more."""
        self._hungry.discard(member)

    def answered(self, member: Member, outcome: CaptureAnswer | CaptureFailure) -> bool:
        """Take an outcome in; False when its sample was given to another one, or asked for once more, meanwhile."""
        owed = self._owed.get(outcome.sample_id)
        if owed is None or owed.member is not member or owed.request.attempt != outcome.attempt:
            return False
        del self._owed[outcome.sample_id]
        member.heard_at = time.monotonic()
        return True

    def _deal(self, member: Member, max_tokens: int) -> list[CaptureRequest]:
        """What a server can stage; no more than its part of what is there while others have nothing to do."""
        if not self._waiting and not self.asking:
            self._waiting.extend(self.source.take(max_tokens, wait=False))
        busy = {owed.member for owed in self._owed.values()}
        num_idle = sum(not other.why and other not in busy for other in self.members if other is not member)
        most = -(-len(self._waiting) // (1 + num_idle))
        taken: list[CaptureRequest] = []
        left: list[CaptureRequest] = []
        tokens = 0
        while self._waiting and len(taken) < most:
            request = self._waiting.popleft()
            if taken and tokens + len(request.token_ids) > max_tokens:
                left.append(request)
                break
            if self._fits(member, request):
                taken.append(request)
                tokens += len(request.token_ids)
            else:
                left.append(request)
        self._waiting.extendleft(reversed(left))
        return [request for request in taken if self._owe(member, request)]

    def _fits(self, member: Member, request: CaptureRequest) -> bool:
        """Whether a server may stage so large a sample; the roomiest one is asked, whatever its limit."""
        limit = member.engine.staging_limit
        roomiest = max((other.engine.staging_limit for other in self.members if not other.why), default=limit)
        return limit >= roomiest or len(request.token_ids) * self.bytes_per_token <= limit

    def _owe(self, member: Member, request: CaptureRequest) -> bool:
        """From here on this server has the sample, and no other; False when a later try is under way already."""
        earlier = self._owed.get(request.sample_id)
        if earlier is not None and earlier.request.attempt > request.attempt:
            return False
        self._owed[request.sample_id] = Owed(request, member, time.monotonic())
        if earlier is not None and earlier.member is not member:
            # It is asked for once more, since its time was over.
            earlier.member.engine.forget(request.sample_id, below=request.attempt)
            if earlier.member.heard_at < earlier.since:
                self.silent.append(earlier.member)
        return True
