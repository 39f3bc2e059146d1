"""Asks a server how it is, from a thread of its own, so that a server that hangs does not hang us."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx

from eyas.engine.dialect import Dialect, ask_hello
from eyas.errors import EngineError, EngineUnavailable

HEALTH_TIMEOUT_S = 30.0
"""SGLang itself gives its answer 20 s."""


class Watch:
    """What is known about the server at `url`, once a second while it loads and every ten seconds afterwards."""

    def __init__(self, dialect: Dialect, url: str) -> None:
        self._dialect, self._url = dialect, url
        self._stop = threading.Event()
        self.hello: Mapping[str, Any] | None = None
        """What it said of itself when it was healthy first."""
        self.refused: EngineError | None = None
        """Why it can never be captured from."""
        self.healthy_at = time.monotonic()
        """When it last answered."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; does not wait for an answer that is due."""
        self._stop.set()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
            while self.refused is None and not self._stop.wait(1.0 if self.hello is None else 10.0):
                try:
                    healthy = client.get("/health").status_code == 200
                except httpx.HTTPError:
                    healthy = False
                if not healthy:
                    continue
                self.healthy_at = time.monotonic()
                if self.hello is None:
                    self._ask()

    def _ask(self) -> None:
        try:
            self.hello = ask_hello(self._dialect, self._url)
        except EngineUnavailable:
            pass  # it has only just begun to answer
        except EngineError as error:
            self.refused = error
