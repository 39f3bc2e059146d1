"""Processes that make parts: one tokeniser each, fed in order; one that dies or falls silent is an error that says so.

Each is `python -m eyas.data.workers` with a pipe to it and one back, so nothing of the caller is imported again and
nothing is pickled. A request is three frames (where the part goes, which chunk, its lines), a reply is one, and before
it come some that say which line the worker has reached; a frame is 8 bytes length (little-endian) and as many bytes. A
worker ends when its input does, and is killed when we are.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from eyas.config import DataConfig, TargetConfig
from eyas.data.parts import BATCH_ROWS, AboutTemplate, Chunk, Facts, Maker, PartStore
from eyas.errors import ConfigError, DataError, EyasError
from eyas.log import human_time

END_TIMEOUT_S = 10.0
SILENT_S = 900.0
"""What loading the tokeniser, or some dozen rows, may take; nobody waits longer for a process that says nothing."""
PR_SET_PDEATHSIG = 1


class Workers:
    """So many processes that make parts; a context manager."""

    def __init__(self, num_workers: int, data: DataConfig, target: TargetConfig) -> None:
        settings = _json({"data": data.model_dump(mode="json"), "target": target.model_dump(mode="json")})
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self.about: AboutTemplate | None = None
        """Known as soon as a part is made."""
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="prepare")
        try:
            for _ in range(num_workers):
                self._all.append(_Worker(settings))
                self._idle.put(self._all[-1])
        except BaseException:
            self.close(kill=True)
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=kind is not None)

    def submit(self, chunk: Chunk, key: str) -> Future[Facts]:
        """Have the part made and put into the store; its facts come later."""
        return self._threads.submit(self._make, chunk, key)

    def close(self, *, kill: bool) -> None:
        """End all processes; those at work only when `kill`."""
        for worker in self._all:
            worker.close(kill=kill)
        self._threads.shutdown(wait=True, cancel_futures=True)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._all]

    def _make(self, chunk: Chunk, key: str) -> Facts:
        worker = self._idle.get()
        try:
            facts, self.about = worker.make(chunk, key)
            return facts
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self, settings: bytes) -> None:
        command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
        # The tokenisers library has threads of its own: one process is one core here.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self._settings: bytes | None = settings
        self._silent = False

    def make(self, chunk: Chunk, key: str) -> tuple[Facts, AboutTemplate]:
        line = chunk.numbers[0]
        reply = None
        try:
            head = {"key": key, "path": str(chunk.path), "numbers": chunk.numbers, "sizes": [*map(len, chunk.lines)]}
            with self._watched():
                if self._settings is not None:
                    _write(self._requests, self._settings)
                    self._settings = None
                _write(self._requests, _json(head))
                _write(self._requests, b"".join(chunk.lines))
            while (reply := self._heard()) is not None and "at" in reply:
                line = reply["at"]
        except (OSError, ValueError):
            # ValueError: the pipe was closed, because the run ends.
            reply = None
        if reply is None:
            code = self.process.wait()
            if self._silent:
                raise DataError(
                    f"{chunk.path}:{line}: the process that tokenises the lines from here on said nothing for "
                    f"{human_time(SILENT_S)} and was ended; look at the next {BATCH_ROWS} rows, take out what no "
                    "template can be meant for, and run the same command again, it goes on from here"
                )
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            hint = "; out of memory? fewer data.workers need less" if code == -signal.SIGKILL else ""
            raise DataError(
                f"{chunk.path}:{chunk.numbers[0]}: the process that tokenised the lines from here on {how}{hint}; "
                "run the same command again, it goes on from here"
            )
        if "error" in reply:
            raise _error(reply["kind"], reply["error"])
        return Facts.from_json(reply["facts"].encode()), AboutTemplate(**reply["about"])

    def _heard(self) -> dict[str, Any] | None:
        """The next thing that the process says; None where it ended, or was ended because it says nothing."""
        with self._watched():
            frame = _read(self._replies)
        return None if frame is None else json.loads(frame)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Whoever waits within for the process waits `SILENT_S` at most."""
        timer = threading.Timer(SILENT_S, self._end_silent)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end_silent(self) -> None:
        self._silent = True
        self.process.kill()

    def close(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        else:
            with contextlib.suppress(OSError):
                self._requests.close()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _error(kind: str, message: str) -> EyasError:
    return ConfigError(message) if kind == "ConfigError" else DataError(message)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(8, "little"))
    pipe.write(frame)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the pipe, also within a frame."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    frame = pipe.read(length)
    return frame if len(frame) == length else None


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Make parts until the requests end."""
    settings = _read(requests)
    if settings is None:
        return
    value = json.loads(settings)
    data, target = DataConfig.model_validate(value["data"]), TargetConfig.model_validate(value["target"])
    assert data.samples is not None
    store = PartStore(data.samples)
    maker: Maker | None = None
    while (head := _read(requests)) is not None and (lines := _read(requests)) is not None:
        request = json.loads(head)
        chunk = Chunk(Path(request["path"]), request["numbers"], _cut(lines, request["sizes"]))
        try:
            maker = maker or Maker(data, target)
            part, facts = maker.part(chunk, lambda line: _write(replies, _json({"at": line})))
            store.put(request["key"], part)
            reply = {"facts": facts.to_json().decode(), "about": dataclasses.asdict(maker.about())}
        except EyasError as error:
            reply = {"kind": type(error).__name__, "error": str(error)}
        except BrokenPipeError:
            return
        try:
            _write(replies, _json(reply))
        except BrokenPipeError:
            return


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    lines = []
    start = 0
    for size in sizes:
        lines.append(data[start : start + size])
        start += size
    return lines


def main() -> None:
    """What a worker process does."""
    # Ctrl-C reaches the whole group; whoever started us ends us, also by being killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    replies = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints goes to stderr, not between the replies.
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
