"""Which model servers serve, where the run file does not say."""

from __future__ import annotations

import asyncio
import json
import threading
import time

from eyas.config import GenerateConfig
from eyas.errors import ConfigError, EngineUnavailable, Stopped
from eyas.generate.endpoint import Endpoint
from eyas.generate.key import Key
from eyas.generate.reply import Fault
from eyas.log import Progress, human_time

TICK_S = 0.1


async def only_model(
    urls: tuple[str, ...], key: Key, config: GenerateConfig, progress: Progress, stop: threading.Event
) -> str:
    """The one model that the first server to answer lists."""
    deadline, pause = time.monotonic() + config.reconnect_s, 0.5
    while True:
        failures = []
        for url in urls:
            progress.show(f"generate: asking {url} for its model", force=True)
            endpoint = Endpoint(url, key, concurrency=1)
            try:
                asking = asyncio.create_task(endpoint.get("/models", timeout_s=min(30.0, config.timeout_s)))
                while not (await asyncio.wait([asking], timeout=TICK_S))[0]:
                    if stop.is_set():
                        asking.cancel()
                        raise Stopped("stopped on request; nothing was asked")
                found = asking.result()
            finally:
                await endpoint.aclose()
            if isinstance(found, Fault):
                failures.append(f"{url}: {found.detail}")
            elif found[0] >= 500 or found[0] == 429:
                failures.append(f"{url}: status {found[0]}")
            else:
                return _model_in(url, *found, key)
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"no server: {'; '.join(failures)}; the same command goes on from here")
        progress.show(f"generate: {'; '.join(failures)}; next try in {human_time(pause)}")
        until = time.monotonic() + pause
        while time.monotonic() < until:
            if stop.is_set():
                raise Stopped("stopped on request; nothing was asked")
            await asyncio.sleep(TICK_S)
        pause = min(10.0, 2 * pause)


def _model_in(url: str, status: int, body: bytes, key: Key) -> str:
    if status in (401, 403):
        raise ConfigError(f"{url} answers {status}: the key is missing, wrong, or may not do this")
    try:
        names = [str(model["id"]) for model in json.loads(body)["data"]] if status == 200 else []
    except (ValueError, KeyError, TypeError, RecursionError):
        names = []
    if len(names) != 1:
        shown = ", ".join(key.scrub(name)[:200] for name in names[:5])
        listed = f"lists {len(names)} models" if names else f"lists no models (status {status})"
        raise ConfigError(f"{url} {listed}; set generate.model" + (f", {shown} say" if names else ""))
    if key.is_in(names[0]):
        raise ConfigError(
            f"{url} lists the key as its model, and the model's name stands in every row; set generate.model"
        )
    return names[0]
