"""`serve`: start a server that captures, wait until it can, keep it running, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.data.table import SampleTable
from eyas.engine import staged
from eyas.engine.dialect import ask_hello
from eyas.engine.room import StagingLimits, free_bytes
from eyas.engine.settings import write_settings
from eyas.errors import ConfigError, EngineError, EngineUnavailable
from eyas.log import Progress, human_bytes, human_time
from eyas.observe import heartbeat
from eyas.observe.heartbeat import Heartbeat
from eyas.serve.causes import how_it_ended, likely_cause
from eyas.serve.command import ServerPlan, context_problem, quota_problem
from eyas.serve.process import ServerProcess, note
from eyas.serve.watch import Watch
from eyas.store.files import Files, raise_store_error

TAIL_LINES = 15
LONGEST_PAUSE_S = 60.0
READY_INTERVAL_S = 600.0
"""Seconds between two lines about a server that is simply ready."""

State = Literal["starting", "ready", "restarting", "stopped"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take."""

    settled_s: float = 300.0
    """A server that was ready for so long begins a new row of restarts."""
    silent_s: float = 300.0
    """A server that answered no health check for so long hangs."""
    stop_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    tick_s: float = 0.2


def prepare(plan: ServerPlan, samples: Path | None, resolved_config: str) -> StagingLimits:
    """Write what the server needs: staging directory, plugin, settings.

    Raises ConfigError, also while another `eyas serve` reads these files, and StoreError.
    """
    other = _other_serve(plan)
    if other is not None:
        raise ConfigError(
            f"capture.out: 'eyas serve' (pid {other['pid']}, {other.get('state')}) runs from the files of "
            f"{plan.places.root} at {other.get('url')}; stop it first"
        )
    if os.pathsep in str(plan.places.plugin):
        raise ConfigError(
            f"capture.out: {plan.places.root.parent} has a '{os.pathsep}' in it, which no Python path can hold; "
            "choose another directory"
        )
    try:
        is_new = not plan.places.root.parent.exists()
        plan.places.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_new:
            Files().sync_directory(plan.places.root.parent.parent)
        _make_staging(plan.staging)
        limits = StagingLimits(
            staged_bytes=plan.serve.staging_bytes or free_bytes(plan.staging) // 2,
            min_free_bytes=plan.serve.min_free_bytes,
            pool_bytes=plan.serve.pool_bytes,
        )
        free = free_bytes(plan.staging)
        usable = min(limits.staged_bytes, free - limits.min_free_bytes)
        if usable <= 0:
            raise ConfigError(
                f"serve.staging {plan.staging}: {human_bytes(free)} are free and "
                f"{human_bytes(limits.min_free_bytes)} must stay so (serve.min_free_bytes): nothing could be staged; "
                "give the container more shared memory, or lower that"
            )
        if samples is not None and samples.is_file():
            largest = _largest_sample(samples)
            problem = context_problem(plan, largest) or quota_problem(plan, usable, largest)
            if problem is not None:
                raise ConfigError(problem)
        plan.kind.write_plugin(plan.places.plugin)
        write_settings(plan.places.settings, plan.staging, plan.aux_layers or None, limits)
        plan.places.config.write_text(resolved_config)
    except OSError as error:
        raise_store_error(error, Path(error.filename or plan.places.root), "preparing the server")
    return limits


def _make_staging(staging: Path) -> None:
    """The staging directory, ours to write into. Raises ConfigError that names the field."""
    try:
        staging.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"serve.staging: {staging}: {error.strerror}; name a directory in shared memory") from None
    if not os.access(staging, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(
            f"serve.staging: {staging} belongs to uid {staging.stat().st_uid}; uid {os.geteuid()} may not write there"
        )


def _other_serve(plan: ServerPlan) -> dict[str, Any] | None:
    """The heartbeat of a live `eyas serve` for the same data set."""
    beat = heartbeat.read(plan.places.heartbeat)
    return beat if beat is not None and heartbeat.is_alive(beat) and beat.get("state") != "stopped" else None


def running_server(plan: ServerPlan) -> str | None:
    """A line about the server that already answers at `engine.url` and fits; None where the port is free.

    Raises ConfigError when something else has the port, or another `eyas serve` runs for this data set.
    """
    other = _other_serve(plan)
    if not _answers(plan.host, plan.port):
        if other is not None:
            raise ConfigError(
                f"capture.out: another 'eyas serve' (pid {other['pid']}, {other.get('state')}) runs the server of "
                f"{plan.places.root.parent} at {other.get('url')}; wait for it, or stop it"
            )
        _require_free_port(plan)
        return None
    try:
        said = ask_hello(plan.kind.dialect, plan.url)
    except EngineError as error:
        if other is not None and isinstance(error, EngineUnavailable):
            raise ConfigError(
                f"engine.url: 'eyas serve' (pid {other['pid']}) is starting this server: {error}"
            ) from None
        raise ConfigError(
            f"engine.url: port {plan.port} is in use: {error}. Stop what runs there, or choose another port"
        ) from None
    differs = _difference(plan, said)
    if differs is not None:
        raise ConfigError(f"engine.url: a server with the plugin already runs at {plan.url}, but {differs}; stop it, "
                          "or choose another port")  # fmt: skip
    return (
        f"a server already runs at {plan.url}: {said['architecture']}, {_engine(plan, said)}, hidden states "
        f"{said['aux_layers']} + last, staged in {said['staging']}; capture can use it"
    )


def serve(
    plan: ServerPlan,
    limits: StagingLimits,
    progress: Progress,
    stop: threading.Event,
    *,
    next_command: str,
    patience: Patience | None = None,
) -> None:
    """Run the server until `stop`. Raises EngineError when it cannot be started, or not be kept running."""
    supervisor = _Supervisor(plan, limits, progress, stop, next_command, patience or Patience())
    beat = Heartbeat(plan.places.heartbeat, supervisor.contents)
    beat.start()
    try:
        supervisor.run()
    except EngineError as error:
        supervisor.error = str(error).splitlines()[0]
        raise
    except OSError as error:
        supervisor.error = f"{error.filename or plan.places.root}: {error.strerror}"
        raise EngineError(f"the server cannot be run: {supervisor.error}") from None
    finally:
        supervisor.enter("stopped")
        beat.close()
        _tidy(plan.staging)


@dataclass(frozen=True, slots=True)
class _End:
    """How one server ended, when nobody asked for it."""

    why: str
    tail: list[str]
    ready_s: float | None
    """How long it was ready; None when it never was."""
    cause: str | None = None

    def lines(self, log: Path) -> str:
        """For people: why, the log's last lines, and what to look at."""
        shown = [f"its last lines ({log}):", *(f"  {line}" for line in self.tail)] if self.tail else [f"see {log}"]
        return "\n".join([self.why, *shown, *([f"likely cause: {self.cause}"] if self.cause else [])])


class _Supervisor:
    def __init__(
        self,
        plan: ServerPlan,
        limits: StagingLimits,
        progress: Progress,
        stop: threading.Event,
        next_command: str,
        patience: Patience,
    ) -> None:
        self._plan, self._limits, self._progress, self._stop = plan, limits, progress, stop
        self._next, self._patience = next_command, patience
        self._quiet = Progress(interval_s=READY_INTERVAL_S)
        self._state: State = "starting"
        self._since = time.time()
        self._server: ServerProcess | None = None
        self._version = ""
        self._restarts = 0
        self.error = ""

    def run(self) -> None:
        """One server after the other, until stopped or too many have ended in a row."""
        failures = 0
        while (end := self._one_server()) is not None:
            if not self._version:
                raise EngineError(end.lines(self._plan.places.log))
            if end.ready_s is not None and end.ready_s >= self._patience.settled_s:
                failures = 0
            failures += 1
            if failures > self._plan.serve.max_restarts:
                raise EngineError(
                    f"gave up after {failures - 1} restarts in a row (serve.max_restarts): "
                    f"{end.lines(self._plan.places.log)}"
                )
            pause = min(self._plan.serve.backoff_s * 2 ** (failures - 1), LONGEST_PAUSE_S)
            event = (
                f"{end.why}; restart {failures} of at most {self._plan.serve.max_restarts} in a row in "
                f"{human_time(pause)}"
            )
            self._say(event + (f" (likely cause: {end.cause})" if end.cause else ""))
            self._note(event)
            self.enter("restarting")
            if self._stop.wait(pause):
                break
            self._restarts += 1
        self._note("stopped on request")
        self._say("serve: stopped on request; no process of the server is left")

    def enter(self, state: State) -> None:
        self._state, self._since = state, time.time()

    def contents(self) -> dict[str, Any]:
        """Of the heartbeat."""
        server = self._server
        pid = server.pid if server is not None else None
        return {
            "state": self._state,
            "url": self._plan.url,
            "server_pid": pid,
            "server_started": heartbeat.start_ticks(pid) if pid is not None else None,
            "engine": self._plan.kind.dialect.engine,
            "engine_version": self._version,
            "restarts": self._restarts,
            "log": str(self._plan.places.log),
            "staging": str(self._plan.staging),
            "since": round(self._since, 3),
            "error": self.error,
        }

    def _one_server(self) -> _End | None:
        """Start a server and look after it until it ends; None when it was stopped on request."""
        _make_staging(self._plan.staging)
        removed, num_bytes = staged.remove_dead_runs(self._plan.staging)
        if removed:
            self._say(f"serve: removed what {removed} dead runs had left in {self._plan.staging}: "
                      f"{human_bytes(num_bytes)}")  # fmt: skip
        server = self._server = ServerProcess(
            self._plan.argv, self._plan.environment, self._plan.places.log, f"start {self._restarts + 1}:"
        )
        watch = Watch(self._plan.kind.dialect, self._plan.url)
        try:
            return self._look_after(server, watch)
        finally:
            watch.close()
            self._progress.close()
            self._quiet.close()
            server.stop(self._patience.stop_s)
            self._server = None

    def _look_after(self, server: ServerProcess, watch: Watch) -> _End | None:
        ready_at: float | None = None
        while not self._stop.wait(self._patience.tick_s):
            server.rotate()
            now = time.monotonic()
            ready_s = None if ready_at is None else now - ready_at
            code = server.exit_code()
            if code is not None:
                lines = server.tail(TAIL_LINES)
                when = (
                    f"while it was loading, after {human_time(now - server.started)}"
                    if ready_s is None
                    else f"after it was ready for {human_time(ready_s)}"
                )
                why = f"the server ended ({how_it_ended(code)}) {when}"
                return _End(why, lines, ready_s, self._cause(code, server))
            if watch.refused is not None:
                raise EngineError("\n".join([str(watch.refused), f"see {server.log}"]))
            if ready_s is None:
                if watch.hello is not None:
                    self._require_as_planned(watch.hello)
                    ready_at = now
                    self._become_ready(server, watch.hello, now - server.started)
                elif now - server.started > self._plan.serve.start_timeout_s:
                    limit = human_time(self._plan.serve.start_timeout_s)
                    why = f"the server was not ready within {limit} (serve.start_timeout_s)"
                    return _End(why, server.tail(TAIL_LINES), None)
                elif self._progress.due():
                    loading = f"serve: loading, {human_time(now - server.started)} so far"
                    self._progress.show(": ".join([loading, *server.tail(1)]))
            elif now - watch.healthy_at > self._patience.silent_s:
                why = f"the server answered no health check for {human_time(now - watch.healthy_at)}: it hangs"
                return _End(why, server.tail(TAIL_LINES), ready_s)
            elif self._quiet.due():
                self._quiet.show(": ".join([f"serve: ready for {human_time(ready_s)}", *server.tail(1)]))
        return None

    def _cause(self, code: int, server: ServerProcess) -> str | None:
        num_lines = self._plan.kind.last_words
        return likely_cause(code, server.tail(num_lines), num_lines)

    def _require_as_planned(self, said: Mapping[str, Any]) -> None:
        differs = _difference(self._plan, said)
        if differs is None and str(said.get("staging")) != str(self._plan.staging):
            differs = f"it stages in {said.get('staging')}, not in {self._plan.staging}: it is another server"
        if differs is not None:
            raise EngineError(f"the server at {self._plan.url} is not as it was asked for: {differs}")

    def _become_ready(self, server: ServerProcess, said: Mapping[str, Any], seconds: float) -> None:
        is_first = not self._version
        self._version = str(said[self._plan.kind.dialect.engine])
        self.enter("ready")
        self._progress.close()
        self._note(f"ready after {human_time(seconds)}")
        self._say(f"serve: ready after {human_time(seconds)}, pid {server.pid}")
        if is_first:
            for line in self._ready_lines(said):
                self._say(line)
        self._quiet.show(f"serve: ready at {self._plan.url}", force=True)

    def _ready_lines(self, said: Mapping[str, Any]) -> list[str]:
        room = said.get("room", {})
        return [
            f"  model    {self._plan.target.path} ({said['architecture']}, {said['num_layers']} layers, hidden size "
            f"{said['hidden_size']}, {said['dtype']})",
            f"  engine   {_engine(self._plan, said)} on {said['device']}, tensor parallel {said['tp_size']}"
            + (f", attention {said['attention']}" if "attention" in said else ""),
            f"  states   hidden {said['aux_layers']} + last ({said['last_hidden_norm']}-norm)",
            f"  staging  {said['staging']}, {human_bytes(float(room.get('limit', self._limits.staged_bytes)))} at most,"
            f" {human_bytes(float(room.get('free', 0)))} free",
            f"  url      {self._plan.url}",
            f"  log      {self._plan.places.log}",
            f"next: {self._next}",
        ]

    def _say(self, line: str) -> None:
        self._progress.say(line)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError), self._plan.places.log.open("a") as log:
            log.write(note(text) + "\n")


def _engine(plan: ServerPlan, said: Mapping[str, Any]) -> str:
    return f"{plan.kind.dialect.title} {said[plan.kind.dialect.engine]}"


def _difference(plan: ServerPlan, said: Mapping[str, Any]) -> str | None:
    """How a server's hello differs from what was asked for."""
    config = plan.target.text_config
    for key, name in (("num_hidden_layers", "num_layers"), ("hidden_size", "hidden_size")):
        if isinstance(config.get(key), int) and config[key] != said.get(name):
            return f"it serves another model ({said.get('model_path')}: {key} {said.get(name)}, not {config[key]})"
    layers = tuple(said.get("aux_layers") or ())
    if plan.aux_layers and layers != plan.aux_layers:
        return f"it captures the hidden states {list(layers)}, not {list(plan.aux_layers)}"
    return None


def _largest_sample(path: Path) -> int:
    """In tokens."""
    batches = SampleTable.open(path).batches(["num_tokens"])
    return max((max(batch.column(0).to_pylist(), default=0) for batch in batches), default=0)


def _answers(host: str, port: int) -> bool:
    """Whether anything listens there."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _require_free_port(plan: ServerPlan) -> None:
    try:
        found = socket.getaddrinfo(plan.host, plan.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
    except OSError as error:
        raise ConfigError(
            f"engine.url: a server cannot listen at {plan.host}:{plan.port} here: {error.strerror}; name an address of "
            "this host and a free port"
        ) from None


def _tidy(staging: Path) -> None:
    """Give shared memory back: what dead runs left, and the directory, when nobody uses it."""
    with contextlib.suppress(OSError):
        staged.remove_dead_runs(staging)
        staging.rmdir()
