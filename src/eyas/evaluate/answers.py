"""A streamed answer, as either engine sends it: how it is asked for, and what arrived when."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.evaluate.counters import Acceptance, of_sglang, of_vllm


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are written."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer."""

    token_ids: tuple[int, ...] | None
    """What was written, the stop token included; None where the server does not say."""
    text: str
    num_new_tokens: int
    arrivals: tuple[tuple[float, int], ...]
    """For each piece that arrived, seconds since the request was sent and new tokens so far."""
    seconds: float
    cut: bool
    """Ended by `max_new_tokens`."""
    acceptance: Acceptance | None
    """As the server tells it with the answer."""

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces that arrived one after the other: what a reader waits for."""
        times = [at for at, _ in self.arrivals]
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def token_s(self) -> float | None:
        """Seconds per token behind those of the first piece; None where there are none."""
        (first, had), (last, has) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (has - had) if has > had else None


class BadStreamError(Exception):
    """An answer that cannot be understood."""


class Stream:
    """An answer as it arrives, from either engine."""

    def __init__(self, engine: str, max_new_tokens: int) -> None:
        self._engine, self._max_new_tokens = engine, max_new_tokens
        self._ids: list[int] = []
        self._has_ids = True
        self._text = ""
        self._num_new = 0
        self._reason = ""
        self._acceptance: Acceptance | None = None
        self.prompt_tokens: int | None = None
        self.arrivals: list[tuple[float, int]] = []

    def take(self, event: Any, at: float) -> None:
        """One event that arrived `at` seconds after the request was sent."""
        if not isinstance(event, dict):
            raise BadStreamError(f"an event that is no object: {brief(json.dumps(event))}")
        if event.get("error"):
            raise BadStreamError(f"the server breaks off: {brief(json.dumps(event['error']))}")
        before = self._num_new
        try:
            (self._take_sglang if self._engine == "sglang" else self._take_vllm)(event)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise BadStreamError(f"an event that is not understood: {brief(json.dumps(event))}") from None
        if self._num_new > before:
            self.arrivals.append((at, self._num_new))

    def answer(self, seconds: float) -> Answer:
        return Answer(
            token_ids=tuple(self._ids) if self._has_ids and len(self._ids) == self._num_new else None,
            text=self._text,
            num_new_tokens=self._num_new,
            arrivals=tuple(self.arrivals),
            seconds=seconds,
            cut=self._reason == "length",
            acceptance=self._acceptance,
        )

    def _take_vllm(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            ids = choice.get("token_ids")
            self._text += choice.get("text") or ""
            self._reason = choice.get("finish_reason") or self._reason
            if ids is None:
                # An older server: a token each, until the last event says how many they were.
                self._has_ids = False
                self._num_new += 1 if choice.get("text") else 0
            else:
                self._ids += map(int, ids)
                self._num_new += len(ids)
        if usage := event.get("usage"):
            self.prompt_tokens = int(usage["prompt_tokens"])
            self._correct(int(usage["completion_tokens"]))
        if told := (event.get("metrics") or {}).get("speculative_decoding"):
            self._acceptance = of_vllm(told)

    def _correct(self, num_new: int) -> None:
        if num_new != self._num_new and self.arrivals:
            self.arrivals[-1] = (self.arrivals[-1][0], num_new)
        self._num_new = num_new

    def _take_sglang(self, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        ids = [int(i) for i in event.get("output_ids") or []]
        self._num_new = int(meta["completion_tokens"])
        text = event.get("text") or ""
        # Whole so far, or what is new: servers are set up either way.
        whole = len(ids) == self._num_new
        self._ids = ids if whole else [*self._ids, *ids]
        self._text = text if whole else self._text + text
        self.prompt_tokens = int(meta["prompt_tokens"])
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise BadStreamError(f"the server breaks off: {brief(str(reason.get('message') or 'abort'))}")
        self._reason = reason.get("type") or self._reason
        self._acceptance = of_sglang(meta, self._num_new) or self._acceptance


def ask_vllm(model: str, prompt: Sequence[int], sampling: Sampling, salt: str) -> tuple[str, dict[str, Any]]:
    """What the model's own generation config may set is said, so that both servers do the same."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": salt,
    }
    if sampling.temperature > 0:
        body["seed"] = sampling.seed
    return "/v1/completions", body


def ask_sglang(model: str, prompt: Sequence[int], sampling: Sampling, salt: str) -> tuple[str, dict[str, Any]]:
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
    }
    if sampling.temperature > 0:
        parameters["sampling_seed"] = sampling.seed
    return "/generate", {"input_ids": list(prompt), "sampling_params": parameters, "stream": True, "extra_key": salt}


def brief(text: str, limit: int = 300) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
