"""Several servers of one target as one engine: each takes what it has room for, and what one leaves the others do.

Each server keeps a pace, a byte quota and a run in its own staging directory, as if it were alone. Who gets which
request is decided in `engine.dealing`; here servers are compared, lost and taken back.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from eyas.config import EngineConfig, TargetConfig
from eyas.engine.base import CaptureAnswer, CaptureFailure, CaptureRequest, Engine, EngineInfo, RequestSource
from eyas.engine.client import ServerEngine, require_same
from eyas.engine.dealing import Dealing, Member, Owed
from eyas.engine.dialect import brief, require_no_password
from eyas.errors import ConfigError, EngineError, EngineGone, EngineUnavailable, EngineWrong, EyasError
from eyas.log import human_time

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""Seconds between two looks of an idle server for work."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Pause before a server that is gone is asked again; doubles."""

Make = Callable[[TargetConfig, EngineConfig, tuple[int, ...] | None], ServerEngine]


def open_servers(
    make: Make, target: TargetConfig, engine: EngineConfig, aux_layers: tuple[int, ...] | None
) -> ServerEngine | Servers:
    """The engine of `engine.urls`, or the one server of `engine.url` where that is empty. Raises ConfigError."""
    if len(engine.urls) < 2:
        only = {"url": engine.urls[0], "urls": ()} if engine.urls else {}
        return make(target, engine.model_copy(update=only), aux_layers)
    return Servers(make, target, engine, aux_layers)


@dataclass(eq=False, slots=True)
class _Turn:
    """One call of `capture`. A later call ends it."""

    dealing: Dealing
    outcomes: queue.SimpleQueue[CaptureAnswer | CaptureFailure | BaseException] = field(
        default_factory=queue.SimpleQueue
    )
    serving: set[Member] = field(default_factory=set)
    """Servers that have a thread."""
    over: bool = False


class Servers:
    """An engine of several servers; see `engine.base` for what it promises, and `engine.base.ManyServers`."""

    def __init__(
        self, make: Make, target: TargetConfig, engine: EngineConfig, aux_layers: tuple[int, ...] | None = None
    ) -> None:
        """Raises ConfigError."""
        urls = [url.rstrip("/") for url in engine.urls]
        for url in urls:
            require_no_password(url)
        twice = [url for url, count in Counter(urls).items() if count > 1]
        if twice:
            raise ConfigError(f"engine.urls names {twice[0]} twice: give each server once")
        # How long a server may be away is decided here: others go on meanwhile.
        alone = [engine.model_copy(update={"url": url, "urls": (), "reconnect_s": 0.0}) for url in urls]
        self._members = [Member(make(target, config, aux_layers)) for config in alone]
        for member in self._members:
            member.engine.layer_checks = self._members[0].engine.layer_checks
            member.engine.num_servers = len(self._members)
        self._reconnect_s, self._kind = engine.reconnect_s, engine.kind
        self._info: EngineInfo | None = None
        self._changed = threading.Condition()
        self._turn: _Turn | None = None
        self._deaths: Counter[str] = Counter()
        """How many servers died while they had a sample, by sample id."""
        self._closed = False
        self.vet: Callable[[str, Engine], None] = lambda url, server: None
        self.waiting_for = ""
        """As `engine.base.Engine` says: servers that are all gone."""

    def info(self) -> EngineInfo:
        """What all of them serve. One that does not answer is left to come later; raises when none does.

        Raises ConfigError or EngineError where one is another than the first, or stages in another's directory.
        """
        if self._info is None:
            found: dict[Member, EngineInfo] = {}
            for member in self._members:
                try:
                    found[member], member.why = member.engine.info(), ""
                except EngineUnavailable as error:
                    member.why = brief(str(error))
            if not found:
                raise EngineUnavailable("; ".join(m.why for m in self._members), engine=self._kind)
            (first, info), *others = found.items()
            for member, other in others:
                require_same(f"the server at {member.url} differs from the one at {first.url}", other, info, self._kind)
            for member in found:
                self._require_own_staging(member)
            hosts = dict.fromkeys(other.provenance.host for other in found.values())
            provenance = replace(info.provenance, host=", ".join(hosts))
            max_tokens = min(other.max_tokens for other in found.values())
            self._info = replace(info, provenance=provenance, max_tokens=max_tokens)
            for member in self._members:
                if member.why:
                    logger.warning("%s; the other %d servers begin, it may come later", member.why, len(found))
        return self._info

    def capture(self, source: RequestSource) -> Iterator[CaptureAnswer | CaptureFailure]:
        """Answers as they come, whoever gives them. Waits, `engine.reconnect_s` long, only while all are gone."""
        turn = _Turn(Dealing(source, self._members, self.info().spec.bytes_per_token + 4))
        with self._changed:
            if self._turn is not None:
                self._turn.over = True
            self._turn = turn
            self._changed.notify_all()
            for member in self._members:
                if member.why:
                    self._bring_back(member)
            self._await_one(turn)
            for member in self._members:
                if not member.why:
                    self._start(turn, member)
        try:
            while not turn.over:
                try:
                    outcome = turn.outcomes.get(timeout=LOOK_S)
                except queue.Empty:
                    self._look_for_the_end(turn)
                    continue
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
                del outcome  # its states count as held while anybody has them
        finally:
            with self._changed:
                turn.over = True
                self._changed.notify_all()

    def close(self) -> None:
        """Close every server's session, and remove every run's directory."""
        with self._changed:
            self._closed = True
            if self._turn is not None:
                self._turn.over = True
            self._changed.notify_all()
        for member in self._members:
            member.engine.close()

    def servers(self) -> Mapping[str, str]:
        """As `engine.base.ManyServers` says."""
        return {member.url: member.why for member in self._members}

    def present(self) -> Mapping[str, Engine]:
        """As `engine.base.ManyServers` says."""
        return {member.url: member.engine for member in self._members if not member.why}

    def lose(self, url: str, why: EngineError) -> None:
        """As `engine.base.ManyServers` says."""
        self._lose(next(member for member in self._members if member.url == url), why)

    # --- who gets what

    def take(self, turn: _Turn, member: Member, max_tokens: int, *, wait: bool) -> list[CaptureRequest]:
        """As `engine.base.RequestSource.take`, for one server; [] too when it takes no part any more."""
        dealing = turn.dealing
        with self._changed:
            while self._takes_part(turn, member):
                taken = dealing.take(member, max_tokens, wait=wait)
                while dealing.silent:
                    silent = dealing.silent.pop()
                    why = f"the server at {silent.url} answered nothing while a sample's time ran out"
                    self._lose(silent, EngineUnavailable(why, engine=self._kind))
                if taken or not wait:
                    return taken
                self._changed.wait(LOOK_S)
            dealing.leave(member)
            return []

    def _answered(self, turn: _Turn, member: Member, outcome: CaptureAnswer | CaptureFailure) -> None:
        with self._changed:
            if not turn.dealing.answered(member, outcome):
                return
            self._deaths.pop(outcome.sample_id, None)
        turn.outcomes.put(outcome)

    def _look_for_the_end(self, turn: _Turn) -> None:
        """When nothing is owed, wait for the source to have more, or to say that there is none."""
        dealing = turn.dealing
        with self._changed:
            if turn.over or not dealing.is_settled() or not turn.outcomes.empty():
                return
            dealing.asking = True
        found = dealing.source.take(1, wait=True)
        with self._changed:
            dealing.asking = False
            dealing.add(found)
            turn.over |= not found
            self._changed.notify_all()

    # --- servers that go and come

    def _takes_part(self, turn: _Turn, member: Member) -> bool:
        return not (turn.over or member.why or self._closed)

    def _start(self, turn: _Turn, member: Member) -> None:
        if member not in turn.serving:
            turn.serving.add(member)
            threading.Thread(target=self._serve, args=(turn, member), name="eyas-server", daemon=True).start()

    def _serve(self, turn: _Turn, member: Member) -> None:
        """In a thread for each server and turn: its answers, until there is no more work or it is gone."""
        while True:
            with self._changed:
                if not self._takes_part(turn, member):
                    turn.serving.discard(member)
                    return
            try:
                for outcome in member.engine.capture(_Share(self, turn, member)):
                    self._answered(turn, member, outcome)
                    del outcome
                with self._changed:
                    # Nothing, unless another thread captured from it meanwhile.
                    for owed in turn.dealing.of(member):
                        turn.dealing.give_back(owed)
            except EngineError as error:
                if isinstance(error, EngineWrong):
                    turn.outcomes.put(error)
                self._lose(member, error)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for answers
                turn.outcomes.put(error)
                return

    def _lose(self, member: Member, error: EngineError) -> None:
        with self._changed:
            if member.why or self._closed:
                return
            member.why = brief(str(error))
            turn = self._turn
            owed = [] if turn is None else turn.dealing.of(member)
            logger.warning("%s; it is left out, %d requests go to the others", member.why, len(owed))
            if turn is not None:
                for one in owed:
                    self._give_back(turn, one, member.why)
                if all(other.why for other in self._members):
                    why = f"all {len(self._members)} servers are gone; the last one: {error}"
                    turn.outcomes.put(EngineUnavailable(why, engine=self._kind))
            self._bring_back(member)
            self._changed.notify_all()

    def _give_back(self, turn: _Turn, owed: Owed, why: str) -> None:
        """Another server's turn; the second time it is asked for alone, since it may be what kills them."""
        request = owed.request
        self._deaths[request.sample_id] += 1
        if self._deaths[request.sample_id] == 1:
            turn.dealing.give_back(owed)
        else:
            turn.dealing.forgive(owed)
            error = EngineUnavailable(f"sample {request.sample_id}: {why}", engine=self._kind)
            turn.outcomes.put(CaptureFailure(request.sample_id, request.attempt, error, suspect=True))

    def _bring_back(self, member: Member) -> None:
        if not member.returning:
            member.returning = True
            threading.Thread(target=self._return, args=(member,), name="eyas-return", daemon=True).start()

    def _return(self, member: Member) -> None:
        """In a thread for each server that is gone: until it is back, is what it was, and gives right values."""
        assert self._info is not None
        pause = FIRST_PAUSE_S
        try:
            member.engine.drop()
            while not self._pause(pause):
                pause = min(2 * pause, MAX_PAUSE_S)
                try:
                    member.engine.rejoin(self._info)
                    self._require_length(member, self._info.max_tokens)
                    self._require_own_staging(member)
                    self.vet(member.url, member.engine)
                    break
                except EyasError as error:
                    why = brief(str(error))
                    if not isinstance(error, EngineUnavailable) and why != member.why:
                        logger.warning("the server at %s stays left out: %s", member.url, why)
                    member.why = why
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for answers
            if self._turn is not None:
                self._turn.outcomes.put(error)
            return
        finally:
            if self._closed:
                member.engine.close()  # it may have begun anew
        with self._changed:
            if self._closed:
                return
            member.why, member.returning = "", False
            logger.warning("the server at %s is back", member.url)
            if self._turn is not None and not self._turn.over:
                self._start(self._turn, member)
            self._changed.notify_all()

    def _pause(self, seconds: float) -> bool:
        """Wait; True once this engine is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, timeout=seconds)

    def _await_one(self, turn: _Turn) -> None:
        """Wait until one server is there, or this turn is over."""

        def settled() -> bool:
            return turn.over or not all(member.why for member in self._members)

        if settled():
            return
        self.waiting_for = f"the {len(self._members)} servers, which are all gone"
        logger.warning("all %d servers are gone; waiting up to %s for one to come back", len(self._members),
                       human_time(self._reconnect_s))  # fmt: skip
        try:
            if not self._changed.wait_for(settled, timeout=self._reconnect_s):
                raise EngineGone(
                    f"{'; '.join(member.why for member in self._members)}; none came back within "
                    f"{human_time(self._reconnect_s)} (engine.reconnect_s)",
                    engine=self._kind,
                )
        finally:
            self.waiting_for = ""

    def _require_length(self, member: Member, max_tokens: int) -> None:
        """One that comes late must take what the others were found to take: nothing is refused for its sake."""
        takes = member.engine.info().max_tokens
        if takes < max_tokens:
            raise EngineError(
                f"the server at {member.url} takes samples of {takes:,} tokens, the others took {max_tokens:,}",
                engine=self._kind,
            )

    def _require_own_staging(self, member: Member) -> None:
        """A directory is one server's: its quota is counted by that one alone."""
        for other in self._members:
            if other is not member and not other.why and other.engine.staging == member.engine.staging:
                raise ConfigError(
                    f"the servers at {member.url} and {other.url} both stage in {member.engine.staging}: give each a "
                    "serve.staging of its own, and name each server once in engine.urls"
                )


class _Share:
    """Where one server takes its work from."""

    def __init__(self, servers: Servers, turn: _Turn, member: Member) -> None:
        self.take = partial(servers.take, turn, member)
