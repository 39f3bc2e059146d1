"""Engines that are servers: captures from a running one that has our plugin.

Token ids go out over HTTP, many requests at a time; states come back through the staging directory, which client and
server share. The client owns the quota: what a request will stage is known before it is sent, and is sent only while
it fits this client's share. Layer numbers are ours throughout; the plugin translates.
"""

from __future__ import annotations

import itertools
import logging
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.config import EngineConfig, TargetConfig
from eyas.engine import staged
from eyas.engine.base import CaptureAnswer, CaptureFailure, EngineInfo, RequestSource
from eyas.engine.dialect import Dialect, ask_hello
from eyas.engine.reference import LayerCheck, LayerChecks
from eyas.engine.session import Session
from eyas.errors import ConfigError, EngineError, EngineGone, EngineUnavailable, Stopped
from eyas.log import human_bytes, human_time
from eyas.records import CaptureSpec, Provenance
from eyas.target.files import open_target, quantisation, target_digest

logger = logging.getLogger(__name__)

REFERENCE_SAMPLES = 8
"""So many samples of a run have their auxiliary states computed again in this process; it is slow."""
MAX_OPEN_FILES = 65_536
OTHER_FILES = 24
"""What a run opens beside its samples' files: shards, records, the target's weights."""


class ServerEngine:
    """An engine that is a server; see `engine.base` for what it promises.

    `info` asks the server. Raises ConfigError where server and configuration do not fit together, EngineError where the
    server cannot be captured from, EngineUnavailable where there is none.
    """

    def __init__(
        self,
        dialect: Dialect,
        target: TargetConfig,
        engine: EngineConfig,
        aux_layers: tuple[int, ...] | None = None,
    ) -> None:
        problems = dialect.secrets_in(engine.extra)
        if problems:
            raise ConfigError("\n".join(problems))
        self._dialect = dialect
        self._url = engine.url.rstrip("/")
        self._target, self._config, self._aux_layers = target, engine, aux_layers
        self._references_left = REFERENCE_SAMPLES
        self.layer_checks = LayerChecks(target, engine)
        """Servers of one target share these: they may hold the whole target."""
        self.num_servers = 1
        """How many servers this process captures from at once: they divide its open files."""
        self._hello: dict[str, Any] = {}
        self._info: EngineInfo | None = None
        self._run: staged.Run | None = None
        self._serials = itertools.count(1)
        self._session: Session | None = None
        self._turn = 0
        """Which call of `capture` is the latest: an earlier one that still waits for the server gives up."""
        self._changed = threading.Condition()
        self._checking = threading.Lock()
        self.waiting_for = ""
        """As `engine.base.Engine` says: a server that is gone."""

    @property
    def url(self) -> str:
        """The server's address."""
        return self._url

    @property
    def staging(self) -> str:
        """The directory through which its states come; empty before `info`."""
        return str(self._hello.get("staging", ""))

    @property
    def staging_limit(self) -> int:
        """Bytes that may lie there at one time: a larger sample is refused."""
        return int(self._hello["room"]["limit"])

    def info(self) -> EngineInfo:
        """What the server serves and how it captures: it is asked, and checked against the target's files."""
        if self._info is None:
            self._hello = ask_hello(self._dialect, self._url)
            self._info = self._info_from(self._hello)
        return self._info

    def capture(self, source: RequestSource) -> Iterator[CaptureAnswer | CaptureFailure]:
        """Answers as they come. Waits for a server that is gone to come back, `engine.reconnect_s` long."""
        info = self.info()
        with self._changed:
            self._turn += 1
            turn = self._turn
            self._changed.notify_all()
        if self._session is not None and self._session.lost:
            self.waiting_for = f"the server at {self._url}, which is gone"
            try:
                self._await_server(info, turn)
            finally:
                self.waiting_for = ""
        with self._changed:
            if turn != self._turn:
                return
            if self._session is not None and self._session.lost:
                self._session = None
            run = self._open_run()
            if self._session is None:
                self._session = Session(
                    self._dialect,
                    self._url,
                    self._hello,
                    run,
                    info,
                    self._serials,
                    self._next_layer_check,
                    max(1, _max_files() // self.num_servers),
                )
            session = self._session
        yield from session.answers(source)

    def forget(self, sample_id: str, *, below: int) -> None:
        """Nobody waits for a sample's tries before the `below`-th: free their places. Any thread may call it."""
        session = self._session
        if session is not None:
            session.forget(sample_id, below=below)

    def drop(self) -> None:
        """Give up what is in flight; a call of `capture` ends. Any thread may call it."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def rejoin(self, info: EngineInfo) -> None:
        """Ask a server that was gone what it is now, and require that it is what `info` says.

        Raises EngineUnavailable where it does not answer, ConfigError or EngineError where it is another one.
        """
        hello = ask_hello(self._dialect, self._url)
        found = self._info_from(hello)
        require_same(f"the server at {self._url} came back different", found, info, self._dialect.engine)
        self.drop()
        self._hello, self._info, self._references_left = hello, found, REFERENCE_SAMPLES

    def close(self) -> None:
        """End what is in flight and remove this run's staging directory."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()
            if self._session is not None:
                self._session.close()
                self._session = None
            if self._run is not None:
                self._run.close()
                self._run = None

    def _next_layer_check(self) -> LayerCheck | None:
        """How a sample's auxiliary states are checked; None after the first few. Made when it is first needed."""
        with self._checking:  # it is asked for anew when a sample's time is over, and loading takes long
            if self._references_left <= 0:
                return None
            self._references_left -= 1
            return self.layer_checks.of(self.info().spec)

    def _await_server(self, info: EngineInfo, turn: int) -> None:
        """Wait for the server to come back as it was; returns early when this call of `capture` is not the latest."""
        deadline = time.monotonic() + self._config.reconnect_s
        pause = 0.5
        logger.warning("the server at %s is gone; waiting up to %s for it to come back", self._url,
                       human_time(self._config.reconnect_s))  # fmt: skip
        while True:
            try:
                hello = ask_hello(self._dialect, self._url)
                break
            except EngineUnavailable as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EngineGone(
                        f"{error}; it did not come back within {human_time(self._config.reconnect_s)} "
                        "(engine.reconnect_s)",
                        engine=self._dialect.engine,
                    ) from None
            with self._changed:
                if self._changed.wait_for(lambda: turn != self._turn, timeout=min(pause, left)):
                    return
            pause = min(2 * pause, 10.0)
        found = self._info_from(hello)
        require_same(
            f"the server at {self._url} came back different", found, info, self._dialect.engine,
            "run the same command again: it compares with committed samples, and goes on from here",
        )  # fmt: skip
        self._hello = hello
        logger.warning("the server at %s is back", self._url)

    def _open_run(self) -> staged.Run:
        staging = Path(self._hello["staging"])
        if self._run is not None and (self._run.staging != staging or not self._run.path.is_dir()):
            self._run.close()  # the server came back with another directory, or somebody emptied it
            self._run = None
        if self._run is None:
            if not staging.is_dir():
                raise EngineError(
                    f"the server at {self._url} (host {self._hello['host']}) stages in {staging}, which does not exist "
                    "here: client and server must share that directory; run both on one host, or mount it into the "
                    "container",
                    engine=self._dialect.engine,
                )
            room = self._hello["room"]
            usable = min(int(room["limit"]), int(room["free"]) + int(room["staged"]) - int(room["min_free"]))
            if usable <= self.info().spec.bytes_per_token:
                raise EngineError(
                    f"{staging}: the server has no room for states: {human_bytes(int(room['free']))} are free, "
                    f"{human_bytes(int(room['min_free']))} must stay so (serve.min_free_bytes); give the container "
                    "more shared memory, or lower that",
                    engine=self._dialect.engine,
                )
            removed, num_bytes = staged.remove_dead_runs(staging)
            if removed:
                logger.warning("removed what %d dead runs had left in %s: %s", removed, staging, human_bytes(num_bytes))
            try:
                self._run = staged.Run(staging)
            except OSError as error:
                raise EngineError(
                    f"{staging}: {error.strerror}: this user cannot write into the server's staging directory (the "
                    f"server runs as uid {self._hello['uid']})",
                    engine=self._dialect.engine,
                ) from None
        return self._run

    def _info_from(self, hello: Mapping[str, Any]) -> EngineInfo:
        if self._target.path is None:
            raise ConfigError(
                "target.path is not set: the directory of the model that the server serves (for its digest and its "
                "output matrix)"
            )
        files = open_target(self._target.path)
        config = files.text_config
        for name, key in (
            ("num_layers", "num_hidden_layers"),
            ("hidden_size", "hidden_size"),
            ("vocab_size", "vocab_size"),
        ):
            if key in config and int(config[key]) != int(hello[name]):
                raise ConfigError(
                    f"target.path {self._target.path} has {key} {config[key]}, the server at {self._url} serves "
                    f"{hello[name]} ({hello['model_path']}): not the same model"
                )
        digest = target_digest(self._target.path)
        served = Path(str(hello["model_path"]))
        if served.is_dir() and not served.samefile(self._target.path) and target_digest(served) != digest:
            raise ConfigError(
                f"target.path {self._target.path} and what the server at {self._url} serves ({served}) have different "
                "weights; set target.path to the served model"
            )
        layers = tuple(int(k) for k in hello["aux_layers"])
        if self._aux_layers is not None and self._aux_layers != layers:
            raise ConfigError(
                f"capture.aux_layers is {list(self._aux_layers)}, the server at {self._url} was started for "
                f"{list(layers)}; start it anew, or change one of them"
            )
        own = quantisation(files.config)
        spec = CaptureSpec(
            target_digest=digest,
            quantisation=own if hello["quantization"] == "none" else str(hello["quantization"]),
            num_layers=int(hello["num_layers"]),
            hidden_size=int(hello["hidden_size"]),
            vocab_size=int(hello["vocab_size"]),
            aux_layers=layers,
            last_hidden_norm=hello["last_hidden_norm"],
            dtype=hello["dtype"],
        )
        provenance = Provenance(
            engine=self._dialect.engine,
            version=str(hello[self._dialect.engine]),
            settings={name: str(hello[name]) for name in self._dialect.settings}
            | {"model": str(hello["model_path"]), "target_config": files.config_digest},
            host=str(hello["host"]),
        )
        return EngineInfo(spec=spec, provenance=provenance, max_tokens=int(hello["max_tokens"]))


def require_same(what: str, found: EngineInfo, other: EngineInfo, engine: str, advice: str = "") -> None:
    """Raise ConfigError where two servers' values are not the same thing, EngineError where they may differ a little.

    `what` begins the line, `advice` ends the second.
    """
    differences = found.spec.differences(other.spec)
    if differences:
        raise ConfigError(f"{what}: {'; '.join(differences)}")
    then = {"version": other.provenance.version, **other.provenance.settings}
    now = {"version": found.provenance.version, **found.provenance.settings}
    changes = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
    if changes:
        raise EngineError(f"{what}: {', '.join(changes)}" + (f"; {advice}" if advice else ""), engine=engine)


def _max_files() -> int:
    """How many samples may have files here, by the descriptors that this user may have, raised as far as that goes.

    Each takes a connection, and a mapped file, which keeps a descriptor until its states are written. Raises Stopped.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft > wanted:
        wanted = MAX_OPEN_FILES
    elif soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    num_samples = (wanted - len(list(Path("/proc/self/fd").iterdir())) - OTHER_FILES) // 2
    if num_samples < 1:
        raise Stopped(
            f"this process may have {wanted} open files, too few to capture with: raise 'ulimit -n', to 1024 say, and "
            "run the same command again"
        )
    return num_samples
