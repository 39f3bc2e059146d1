"""Money and time: what answers cost, what the rest will cost, and a limit that is never passed.

Before a conversation begins, the most that it can cost is set aside; what it did cost replaces that with each answer.
Where no price is given, answers that name their cost bound it: with `cost = p·P + c·C` for `p` prompt and `c`
completion tokens, no price `P` is above `cost/p` and no `C` above `cost/c`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import ConfigError
from eyas.generate.answers import Usage
from eyas.log import human_time

TEMPLATE_TOKENS = 64
"""What a chat template may add to a turn, at most."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Per token."""

    prompt: float
    completion: float

    def of(self, usage: Usage) -> float:
        return self.prompt * usage.prompt_tokens + self.completion * usage.completion_tokens


def prices_from(table: Mapping[Any, float]) -> Prices | None:
    """From `generate.price_per_1m`; None where it is empty."""
    if not table:
        return None
    missing = [name for name in ("prompt", "completion") if name not in table]
    if missing:
        raise ConfigError(f"generate.price_per_1m.{missing[0]} is not set; give both prices, 0 where it costs nothing")
    if min(table.values()) < 0:
        raise ConfigError("generate.price_per_1m: a price is below 0")
    return Prices(table["prompt"] / 1e6, table["completion"] / 1e6)


class Budget:
    """What was spent, what is set aside for conversations that run, and how much more may be."""

    def __init__(self, *, most: float | None, prices: Prices | None, spent: float) -> None:
        self.most = most
        self.spent = spent
        self.uncertain = 0.0
        """For answers of this run that were given up, and may have been charged all the same."""
        self._prices = prices
        self._set_aside = 0.0
        self._num_told = 0
        self._bound: Prices | None = prices

    @property
    def most_at_a_time(self) -> float:
        """Conversations that may be asked at a time: without a price table, as many as have told their cost so far.

        One cheap answer says little about the next one.
        """
        return float("inf") if self.most is None or self._prices is not None else max(1, self._num_told)

    @property
    def known(self) -> bool:
        """Whether it can be said what a request may cost."""
        return self.most is None or self._bound is not None

    def worst(self, prompt_tokens: int, completion_tokens: int) -> float:
        """The most that so many tokens can cost."""
        return self._bound.of(Usage(prompt_tokens, completion_tokens)) if self._bound is not None else 0.0

    def room(self) -> float:
        """What may still be set aside."""
        if self.most is None:
            return float("inf")
        return self.most - self.spent - self.uncertain - self._set_aside

    def set_aside(self, amount: float) -> None:
        """More of it, or less when negative."""
        self._set_aside += amount

    def cost_of(self, usage: Usage, *, told: bool) -> float:
        """What an answer costs: what its server says, or the price table's."""
        if told or self._prices is None:
            return usage.cost
        return self._prices.of(usage)

    def spend(self, usage: Usage, *, told: bool) -> None:
        """Count an answer whose cost is settled, and learn from it what others may cost."""
        self.spent += usage.cost
        if not told:
            return
        self._num_told += usage.cost > 0
        prompt, completion = usage.cost / max(1, usage.prompt_tokens), usage.cost / max(1, usage.completion_tokens)
        if self._bound is None or usage.cost > self._bound.of(usage) * (1 + 1e-9):
            # The first to tell; or dearer than the table says, or than it was before.
            self._bound = Prices(prompt, completion)
        elif self._prices is None:
            self._bound = Prices(min(prompt, self._bound.prompt), min(completion, self._bound.completion))


@dataclass(frozen=True, slots=True)
class Probe:
    """What the first conversations took."""

    conversations: int
    turns: int
    prompt_bytes: int
    usage: Usage
    rejected: int
    wall_s: float
    in_flight: int
    """Requests at a time during the probe, and those that there may be."""
    most_in_flight: int


def estimate_line(probe: Probe, *, conversations: int, turns: int, prompt_bytes: int, has_cost: bool) -> str:
    """What the rest will take, if it is like the probe: prompts by their bytes, answers by their turns."""
    by_turns = turns / max(1, probe.turns)
    by_bytes = prompt_bytes / max(1, probe.prompt_bytes)
    prompt = probe.usage.prompt_tokens * by_bytes
    completion = probe.usage.completion_tokens * by_turns
    share = probe.usage.prompt_tokens + probe.usage.completion_tokens
    cost = probe.usage.cost * (prompt + completion) / max(1, share)
    longest = probe.wall_s * by_turns
    shortest = longest * min(1.0, probe.in_flight / max(1, probe.most_in_flight))
    line = (
        f"estimate from {probe.conversations} prompts ({probe.rejected} rejected): {conversations:,} to come, "
        f"about {prompt:,.0f} prompt + {completion:,.0f} completion tokens"
    )
    if has_cost:
        line += f", cost {cost:.4g} after {probe.usage.cost:.4g} so far"
    return f"{line}, {human_time(shortest)} to {human_time(longest)}"
