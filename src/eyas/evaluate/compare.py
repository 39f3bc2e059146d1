"""Real decoding of a prompt set, with the drafter and without, in turns: what is accepted, and what time it saves."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.config import DataConfig, EngineConfig, EvaluateConfig, TargetConfig
from eyas.engine.hf import HfEngine
from eyas.errors import ConfigError, DataError
from eyas.evaluate.choice import choice_of
from eyas.evaluate.decode import Decoded, Target, decode, decode_plainly
from eyas.evaluate.drafter import Drafter
from eyas.evaluate.prompts import Prompt, read_prompts, stop_ids
from eyas.log import Progress, human_time
from eyas.model import checkpoint as engine_layout
from eyas.target.files import target_digest
from eyas.train.metrics import CONFIDENCE, NUM_RESAMPLES, Estimate

FILE = "decoding.json"
WARM_UP_TOKENS = 8

FORMULAS = (
    "acceptance length, pooled = 1 + Σ accepted / Σ verifications: tokens per target pass over a chain, the bonus "
    "token included, as servers count it",
    "acceptance length, request mean: the same of each request, averaged over requests",
    "acceptance at position s = share of verifications that accepted more than s drafted tokens; conditional: of those "
    "that accepted s",
    "tokens per forward = new tokens / target forwards: prompts count, tokens behind an answer's end do not",
    "speed-up = median over requests of (plain seconds per new token) / (speculative seconds per new token), both in "
    "this process, in turns",
)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, answered both ways."""

    name: str
    prompt_tokens: int
    new_tokens: int
    forwards: int
    verifications: int
    accepted: tuple[int, ...]
    """Verifications that accepted more than `s` drafted tokens, for each position `s`."""
    seconds: float
    plain_tokens: int
    plain_seconds: float
    cut: bool
    identical: bool
    """Both ways wrote the same."""

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def speedup(self) -> float:
        return (self.plain_seconds / self.plain_tokens) / (self.seconds / self.new_tokens)


@dataclass(frozen=True, slots=True)
class DecodeReceipt:
    """What decoding a prompt set came to."""

    draft: str
    target: str
    prompts: str
    device: str
    dtype: str
    num_draft_tokens: int
    max_new_tokens: int
    temperature: float
    seed: int
    requests: tuple[Request, ...]
    skipped: Mapping[str, str]
    """Prompts that were not answered, by name, and why."""
    seconds: float
    notes: tuple[str, ...] = ()
    file: str = ""

    def _sum(self, name: str) -> int:
        return sum(int(getattr(request, name)) for request in self.requests)

    @property
    def acceptance_length_pooled(self) -> Estimate | None:
        return _estimate(self._terms(), pooled=True)

    @property
    def acceptance_length_request_mean(self) -> Estimate | None:
        return _estimate(self._terms(), pooled=False)

    @property
    def position_acceptance(self) -> tuple[float, ...]:
        """For each drafted position, of all verifications."""
        total = self._sum("verifications")
        sums = np.sum([r.accepted for r in self.requests], axis=0) if self.requests else []
        return tuple(float(n) / total for n in sums) if total else ()

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        cumulative = (1.0, *self.position_acceptance)
        return tuple(b / a if a else None for a, b in itertools.pairwise(cumulative))

    @property
    def tokens_per_forward(self) -> float:
        return self._sum("new_tokens") / max(1, self._sum("forwards"))

    @property
    def speedup(self) -> float | None:
        return statistics.median(r.speedup for r in self.requests) if self.requests else None

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Medians over requests: with the drafter, and plain."""
        return (
            statistics.median(r.new_tokens / r.seconds for r in self.requests),
            statistics.median(r.plain_tokens / r.plain_seconds for r in self.requests),
        )

    @property
    def num_cut(self) -> int:
        return self._sum("cut")

    @property
    def num_identical(self) -> int:
        return self._sum("identical")

    def _terms(self) -> npt.NDArray[np.float64]:
        """`[N, 2]`: accepted tokens and verifications of each request that had any."""
        terms = [(r.num_accepted, r.verifications) for r in self.requests if r.verifications]
        return np.array(terms, dtype=np.float64).reshape(-1, 2)

    def as_dict(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        pooled, mean = self.acceptance_length_pooled, self.acceptance_length_request_mean
        fast, plain = self.tokens_per_s
        return own | {
            "requests": [dataclasses.asdict(request) for request in self.requests],
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
            "acceptance_length_pooled": dataclasses.asdict(pooled) if pooled else None,
            "acceptance_length_request_mean": dataclasses.asdict(mean) if mean else None,
            "position_acceptance": list(self.position_acceptance),
            "conditional_acceptance": list(self.conditional_acceptance),
            "tokens_per_forward": self.tokens_per_forward,
            "speedup": self.speedup,
            "tokens_per_s": fast,
            "plain_tokens_per_s": plain,
            "num_cut": self.num_cut,
            "num_identical": self.num_identical,
            "formulas": list(FORMULAS),
        }

    def lines(self) -> list[str]:
        """For people."""
        count = len(self.requests)
        fast, plain = self.tokens_per_s
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature}"
        conditional = (f"{c:.3f}" if c is not None else "–" for c in self.conditional_acceptance)
        lines = [
            f"{self.draft}: {count:,} prompts of {self.prompts}, {self._sum('new_tokens'):,} new tokens, {how}, chains "
            f"of {self.num_draft_tokens} · {self.device}, {self.dtype} · {human_time(self.seconds)}",
            f"acceptance length {self.acceptance_length_pooled or '–'} pooled, "
            f"{self.acceptance_length_request_mean or '–'} request mean [95 % intervals over requests]",
            f"acceptance at position 0…: {' '.join(f'{a:.3f}' for a in self.position_acceptance)}; "
            f"conditional: {' '.join(conditional)}",
            f"tokens per forward {self.tokens_per_forward:.3f} ({self._sum('forwards'):,} target forwards)",
            f"speed-up {self.speedup:.2f}: {fast:,.1f} tokens/s, plain {plain:,.1f} (medians, batch size 1, in this "
            "process; a server's figures differ)",
        ]
        if self.temperature == 0:
            other = count - self.num_identical
            lines.append(
                f"{self.num_identical:,} of {count:,} answers identical to plain decoding"
                + (f"; {other:,} differ: in {self.dtype}, near-ties may fall either way" if other else "")
            )
        if self.num_cut:
            lines.append(
                f"warning: {self.num_cut:,} of {count:,} answers were cut by evaluate.max_new_tokens = "
                f"{self.max_new_tokens}: these figures are of their beginnings"
            )
        if self.skipped:
            name, why = next(iter(self.skipped.items()))
            lines.append(f"skipped {len(self.skipped):,} prompts; first: {name}: {why}")
        return [*lines, *FORMULAS, *self.notes, f"file     {self.file}"]


def evaluate(
    config: EvaluateConfig,
    target: TargetConfig,
    engine: EngineConfig,
    data: DataConfig,
    *,
    draft: Path,
    prompts: Path,
    limit: int | None,
    progress: Progress,
) -> DecodeReceipt:
    """Answer each prompt with the drafter and without, in turns; the target is loaded as the `hf` engine loads it.

    Raises ConfigError for a drafter that does not fit the target, DataError for prompts that cannot be read, or when
    none of them can be answered.
    """
    started = time.monotonic()
    assert target.path is not None
    found = read_prompts(prompts, target, data, limit=limit)
    progress.say(f"evaluate: {len(found):,} prompts, loading drafter and target")
    model, vocab_map, info = engine_layout.load(
        draft, target=target.path, aux_layers=config.aux_layers, trust_remote_code=target.trust_remote_code
    )
    if engine.kind != "hf":
        # What stands there is for another engine.
        engine = engine.model_copy(update={"kind": "hf", "extra": {}})
    loaded = HfEngine(target, engine, model.shape.aux_layers)
    structure, taps = loaded.target()
    for what, there, here in (
        ("target_hidden_size", model.shape.target_hidden_size, structure.hidden_size),
        ("vocab_size", model.shape.vocab_size, structure.vocab_size),
    ):
        if there != here:
            raise ConfigError(f"draft {draft}: {what} is {there}, target {target.path} has {here}")
    asked = Target(structure, taps, model.shape.aux_layers)
    dtype = structure.embeddings.weight.dtype
    drafter = Drafter(model, vocab_map, dtype, asked.device)  # type: ignore[arg-type]
    stops = stop_ids(target.path)
    answerable, skipped = _sorted_out(found, asked, config)
    if not answerable:
        why = next(iter(skipped.values()), "the file is empty")
        raise DataError(f"{prompts}: none of its {len(found):,} prompts can be answered; first: {why}")

    requests: list[Request] = []
    for number, prompt in enumerate(answerable):
        if number == 0:
            # The first passes of a process pay for kernels and memory.
            warm = config.model_copy(update={"max_new_tokens": WARM_UP_TOKENS})
            _both(asked, drafter, prompt, warm, stops, number)
        requests.append(_both(asked, drafter, prompt, config, stops, number))
        new = sum(r.new_tokens for r in requests)
        progress.show(f"evaluate: {number + 1:,} of {len(answerable):,} prompts, {new:,} new tokens")
    trained_on, digest = info.extra.get("target_digest"), target_digest(target.path)
    notes = (
        (f"warning: the drafter was trained for target {trained_on}, this one is {digest}",)
        if trained_on not in (None, "unknown", digest)
        else ()
    )
    return DecodeReceipt(
        draft=str(draft),
        target=str(target.path),
        prompts=str(prompts),
        device=str(asked.device),
        dtype=str(dtype).removeprefix("torch."),
        num_draft_tokens=config.num_draft_tokens,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        requests=tuple(requests),
        skipped=skipped,
        seconds=time.monotonic() - started,
        notes=notes,
    )


def _sorted_out(
    prompts: Sequence[Prompt], target: Target, config: EvaluateConfig
) -> tuple[list[Prompt], dict[str, str]]:
    """Prompts that can be answered, and why others cannot."""
    answerable, skipped = [], {}
    vocab_size = len(target.structure.embeddings.weight)  # type: ignore[arg-type]
    room = config.max_new_tokens + config.num_draft_tokens
    for prompt in prompts:
        count = len(prompt.token_ids)
        if count < 2:
            skipped[prompt.name] = f"{count} tokens; a drafter needs one behind another"
        elif max(prompt.token_ids) >= vocab_size:
            skipped[prompt.name] = f"token {max(prompt.token_ids)} outside of the target's {vocab_size}"
        elif target.max_tokens is not None and count + room > target.max_tokens:
            skipped[prompt.name] = f"{count} tokens and {room} new ones; the target takes {target.max_tokens}"
        else:
            answerable.append(prompt)
    return answerable, skipped


def _both(
    target: Target, drafter: Drafter, prompt: Prompt, config: EvaluateConfig, stops: frozenset[int], number: int
) -> Request:
    """One prompt, with the drafter and without; who goes first takes turns."""

    def fast() -> Decoded:
        return decode(
            target, drafter, prompt.token_ids, num_draft_tokens=config.num_draft_tokens,
            max_new_tokens=config.max_new_tokens, choice=choice_of(config.temperature, config.seed + number),
            stop_ids=stops,
        )  # fmt: skip

    def plain() -> Decoded:
        return decode_plainly(
            target, prompt.token_ids, max_new_tokens=config.max_new_tokens,
            choice=choice_of(config.temperature, config.seed + number), stop_ids=stops,
        )  # fmt: skip

    if number % 2:
        ours = fast()
        alone = plain()
    else:
        alone = plain()
        ours = fast()
    accepted = [0] * config.num_draft_tokens
    for verification in ours.verifications:
        for s in range(verification.num_accepted):
            accepted[s] += 1
    return Request(
        name=prompt.name,
        prompt_tokens=len(prompt.token_ids),
        new_tokens=len(ours.token_ids),
        forwards=ours.num_forwards,
        verifications=len(ours.verifications),
        accepted=tuple(accepted),
        seconds=ours.seconds,
        plain_tokens=len(alone.token_ids),
        plain_seconds=alone.seconds,
        cut=ours.cut,
        identical=ours.token_ids == alone.token_ids,
    )


def _estimate(terms: npt.NDArray[np.float64], *, pooled: bool) -> Estimate | None:
    """`1 + accepted / verifications` from `[N, 2]`, with its bootstrap interval over requests."""
    count = len(terms)
    if not count:
        return None

    def statistic(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:  # [resamples, N]
        if pooled:
            sums = weights @ terms
            return np.asarray(1 + sums[:, 0] / sums[:, 1])
        return np.asarray(1 + weights @ (terms[:, 0] / terms[:, 1]) / count)

    value = float(statistic(np.ones((1, count)))[0])
    if count < 2:
        return Estimate(value)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), NUM_RESAMPLES)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic(drawn.astype(np.float64)), [tail, 1 - tail])
    return Estimate(value, float(low), float(high))
