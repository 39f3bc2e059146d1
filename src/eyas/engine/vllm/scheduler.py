"""The scheduler's side of the connector: which finished requests are ours, whether they fit, what their answers say.

vLLM answers a request when its scheduler has finished it, and writes afterwards, so the quota is decided here. The
request's cache blocks, which hold its states, stay its own until the worker's side has written them.

Needs the standard library alone, beside what `room` needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.engine import staged
from eyas.engine.room import Room, refusal
from eyas.engine.settings import Settings
from eyas.engine.staged import INFO_KEY, ROWS, TOO_LARGE, RequestName


@dataclass(frozen=True, slots=True)
class Save:
    """A finished request whose states are to be written."""

    request_id: str
    """vLLM's own."""
    name: str
    token_ids: list[int]
    block_ids: list[int]
    """Its blocks in the cache of hidden states, in order."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that vLLM has finished."""

    request_id: str
    parameters: Mapping[str, Any]
    """What the client sent as `kv_transfer_params`."""
    token_ids: Sequence[int]
    """Of the prompt."""
    num_computed: int
    """Tokens whose states were computed."""
    block_ids: Sequence[int]
    is_whole: bool
    """Not aborted, ignored or failed."""


class SchedulerSide:
    """Decides about requests; for the one thread of vLLM's scheduler."""

    def __init__(
        self,
        settings: Settings,
        about: Mapping[str, Any],
        *,
        block_size: int,
        fields_bytes: Callable[[RequestName], int],
        pool_bytes: int | None,
    ) -> None:
        """`about` is what a hello says, `fields_bytes` what a row of a request's states takes.

        `pool_bytes` bounds one request's copy, where states come from a GPU.
        """
        self._staging, self._about, self._block_size = settings.staging, about, block_size
        self._fields_bytes, self._pool_bytes = fields_bytes, pool_bytes
        self._room = Room(settings.staging, settings.limits)
        self._together: set[str] = set()
        """Requests that shared a forward with others."""
        self._saves: list[Save] = []
        self._writing: dict[str, tuple[Path, int]] = {}
        self.counts: Counter[str] = Counter()

    def forward(self, request_ids: Collection[str]) -> None:
        """The requests of the forward that comes next."""
        if len(request_ids) > 1:
            self._together.update(request_ids)

    def finished(self, request: Finished) -> tuple[bool, dict[str, Any] | None]:
        """Whether a request's blocks are still needed, and what its answer carries; None where it is not ours."""
        was_alone = request.request_id not in self._together
        self._together.discard(request.request_id)
        name = RequestName.parse(str(request.parameters.get(INFO_KEY)))
        if name is None or not request.is_whole:
            return False, None
        if staged.HELLO in name.flags:
            about = {**self._about, "room": self._room.told(), "counts": dict(self.counts)}
            return False, {INFO_KEY: {"hello": about}}
        num_bytes = name.num_tokens * (4 + self._fields_bytes(name))
        why_not = self._why_not(name, request, num_bytes)
        if why_not is not None:
            self.counts["full" if why_not["retry"] else "failed"] += 1
            return False, {INFO_KEY: why_not}
        self._room.begin(num_bytes)
        path = name.path(self._staging)
        self._writing[request.request_id] = path, num_bytes
        num_blocks = -(-name.num_tokens // self._block_size)
        self._saves.append(
            Save(request.request_id, str(name), list(request.token_ids), list(request.block_ids[:num_blocks]))
        )
        return True, {INFO_KEY: {"path": str(path), "bytes": num_bytes, "alone": was_alone}}

    def take(self) -> list[Save]:
        """What the worker is to write, once."""
        saves, self._saves = self._saves, []
        return saves

    def written(self, request_ids: Collection[str]) -> None:
        """The worker is done with these: their files are there, or their failures."""
        for request_id in request_ids:
            path, num_bytes = self._writing.pop(request_id, (None, 0))
            if path is not None:
                self._room.end(num_bytes, path)
                self.counts["staged"] += 1

    def _why_not(self, name: RequestName, request: Finished, num_bytes: int) -> dict[str, Any] | None:
        num_tokens = len(request.token_ids)
        if num_tokens != name.num_tokens:
            return refusal(f"a prompt of {num_tokens} tokens, {name.num_tokens} were said", ROWS)
        if request.num_computed < num_tokens or len(request.block_ids) * self._block_size < num_tokens:
            return refusal(
                f"{request.num_computed} of {num_tokens} rows were computed, {len(request.block_ids)} blocks of "
                f"{self._block_size} are there",
                ROWS,
            )
        if self._pool_bytes is not None and num_bytes > self._pool_bytes:
            return refusal(
                f"its states take {num_bytes} bytes of host memory, the pool has {self._pool_bytes}", TOO_LARGE
            )
        self._room.look_again()
        return self._room.why_not(name, num_bytes)
