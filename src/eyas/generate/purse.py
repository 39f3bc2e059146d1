"""The money of each conversation: set aside before it is asked on, charged as its answers come."""

from __future__ import annotations

from eyas.generate.answers import Usage
from eyas.generate.conversation import Conversation
from eyas.generate.cost import TEMPLATE_TOKENS, Budget


class Purse:
    """One budget, and the conversations that live on it."""

    def __init__(self, budget: Budget, max_new_tokens: int) -> None:
        self._budget, self._max_new_tokens = budget, max_new_tokens

    def charge(self, conversation: Conversation, usage: Usage, *, cost_told: bool, usage_told: bool) -> None:
        """Take what an answer cost."""
        if not usage_told:
            # Nobody said what it took: no less than it can have been.
            usage.prompt_tokens = _prompt_bound(conversation)
            usage.completion_tokens = self._max_new_tokens
        usage.cost = self._budget.cost_of(usage, told=cost_told)
        self._budget.spend(usage, told=cost_told)
        conversation.usage.add(usage)

    def worst(self, conversation: Conversation, num_turns: int | None = None) -> float:
        """The most that the answers to come can cost: each prompt holds all answers before it."""
        if self._budget.most is None:
            return 0.0
        turns = conversation.num_turns_left if num_turns is None else num_turns
        new, prompt = self._max_new_tokens, _prompt_bound(conversation)
        return self._budget.worst(turns * prompt + new * turns * (turns - 1) // 2, turns * new)

    def keep(self, conversation: Conversation, amount: float) -> None:
        """Have so much set aside for it."""
        self._budget.set_aside(amount - conversation.set_aside)
        conversation.set_aside = amount

    def admits(self, conversation: Conversation, num_out: int) -> bool:
        """Set aside what the rest of it can cost; False while that would pass `generate.max_cost`.

        `num_out` are being asked now.
        """
        if self._budget.most is None:
            return True
        if num_out >= self._budget.most_at_a_time:
            return False
        worst = self.worst(conversation)
        if self._budget.room() < worst - conversation.set_aside:
            return False
        self.keep(conversation, worst)
        return True


def _prompt_bound(conversation: Conversation) -> int:
    """Tokens of the next prompt, at most."""
    return conversation.num_bytes_left + TEMPLATE_TOKENS * len(conversation.prompt.messages)
