"""Real decoding of a prompt set, with the drafter and without, in turns: what is accepted, and what time it saves."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import deque
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
from eyas.evaluate.counters import Acceptance
from eyas.evaluate.decode import Decoded, Target, decode, decode_plainly
from eyas.evaluate.drafter import Drafter
from eyas.evaluate.estimate import length_estimate
from eyas.evaluate.prompts import BUILT_IN, Prompt, PromptReader, set_name, stop_ids
from eyas.evaluate.server_runs import Own
from eyas.log import Progress, human_time
from eyas.model import checkpoint as engine_layout
from eyas.target.files import target_digest
from eyas.train.drafts import DECODING
from eyas.train.metrics import Estimate

FILE = DECODING
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
    category: str = ""
    prompt_ids: tuple[int, ...] = ()
    plain_ids: tuple[int, ...] = ()
    """What the target wrote alone."""

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
        return length_estimate(self._terms(), pooled=True)

    @property
    def acceptance_length_request_mean(self) -> Estimate | None:
        return length_estimate(self._terms(), pooled=False)

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
    def slices(self) -> dict[str, tuple[int, Estimate]]:
        """Prompts and pooled acceptance length of each category; empty where there is just one."""
        names = sorted({r.category for r in self.requests})
        found = {}
        for name in names if len(names) > 1 else ():
            terms = self._terms(name)
            if (estimate := length_estimate(terms, pooled=True)) is not None:
                found[name] = (len(terms), estimate)
        return found

    @property
    def num_cut(self) -> int:
        return self._sum("cut")

    @property
    def num_identical(self) -> int:
        return self._sum("identical")

    def own(self) -> Own:
        """What a server's evaluation is compared with."""
        mean = self.acceptance_length_request_mean
        accepted = np.sum([r.accepted for r in self.requests], axis=0).tolist() if self.requests else []
        verifications = self._sum("verifications")
        return Own(
            dtype=self.dtype,
            acceptance=Acceptance(
                verifications, verifications * self.num_draft_tokens, sum(accepted), tuple(map(int, accepted))
            ),
            request_mean=mean.value if mean is not None else None,
            answers={r.prompt_ids: r.plain_ids for r in self.requests},
        )

    def _terms(self, category: str | None = None) -> npt.NDArray[np.float64]:
        """`[N, 2]`: accepted tokens and verifications of each request, or each of a category, that had any."""
        chosen = [r for r in self.requests if r.verifications and category in (None, r.category)]
        terms = [(r.num_accepted, r.verifications) for r in chosen]
        return np.array(terms, dtype=np.float64).reshape(-1, 2)

    def as_dict(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        pooled, mean = self.acceptance_length_pooled, self.acceptance_length_request_mean
        fast, plain = self.tokens_per_s
        return own | {
            "requests": [_told(request) for request in self.requests],
            "slices": {name: {"prompts": n, **dataclasses.asdict(e)} for name, (n, e) in self.slices.items()},
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
            *self._slice_lines(),
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

    def _slice_lines(self) -> list[str]:
        told = ", ".join(f"{name or '–'} {e} ({n})" for name, (n, e) in self.slices.items())
        return [f"by category, pooled: {told}"] if told else []


def _told(request: Request) -> dict[str, Any]:
    """For the file: what was asked and answered stays out of it."""
    told = dataclasses.asdict(request)
    return {name: value for name, value in told.items() if name not in ("prompt_ids", "plain_ids")}


def evaluate(
    config: EvaluateConfig,
    target: TargetConfig,
    engine: EngineConfig,
    data: DataConfig,
    *,
    draft: Path,
    prompts: Path | None,
    limit: int | None,
    progress: Progress,
) -> DecodeReceipt:
    """Answer each prompt with the drafter and without, in turns; the target is loaded as the `hf` engine loads it.

    Without `prompts` the built-in set is answered. A later turn stands on the target's own answer to the one before.

    Raises ConfigError for a drafter that does not fit the target, DataError for prompts that cannot be read, or when
    none of them can be answered.
    """
    started = time.monotonic()
    assert target.path is not None
    reader = PromptReader(target, data)
    found = reader.read(prompts, limit=limit)
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
        raise DataError(f"{prompts or BUILT_IN}: none of its {len(found):,} prompts can be answered; first: {why}")

    requests: list[Request] = []
    # The first passes of a process pay for kernels and memory.
    warm = config.model_copy(update={"max_new_tokens": WARM_UP_TOKENS})
    _both(asked, drafter, answerable[0], warm, stops, 0)
    waiting = deque(answerable)
    while waiting:
        prompt = waiting.popleft()
        requests.append(_both(asked, drafter, prompt, config, stops, len(requests)))
        if (following := reader.next_turn(prompt, requests[-1].plain_ids)) is not None:
            fitting, unfit = _sorted_out([following], asked, config)
            waiting.extendleft(fitting)
            skipped |= unfit
        new = sum(r.new_tokens for r in requests)
        total = len(requests) + len(waiting)
        progress.show(f"evaluate: {len(requests):,} of {total:,} prompts, {new:,} new tokens")
    trained_on, digest = info.extra.get("target_digest"), target_digest(target.path)
    notes = (
        (f"warning: the drafter was trained for target {trained_on}, this one is {digest}",)
        if trained_on not in (None, "unknown", digest)
        else ()
    )
    return DecodeReceipt(
        draft=str(draft),
        target=str(target.path),
        prompts=set_name(prompts),
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
        category=prompt.category,
        prompt_ids=prompt.token_ids,
        plain_ids=alone.token_ids,
    )
