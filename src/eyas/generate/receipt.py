"""What answers from servers came to, all runs together: told at the end of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.generate.answers import AnsweredBy, Usage, by_reason
from eyas.log import human_time


@dataclass(frozen=True, slots=True)
class RemoteReceipt:
    """What became of every row of the prompts file: `planned = answered + rejected`, all runs together."""

    out: Path
    rejects: Path
    planned: int
    answered: int
    rejected: Mapping[str, int]
    """By reason."""
    ended_early: Mapping[str, int]
    finish_reasons: Mapping[str, int]
    usage: Usage
    """Of all runs, rejected answers included."""
    retokenized: int
    """Answered conversations without token ids."""
    answered_by: Mapping[AnsweredBy, int]
    not_planned: int
    new_conversations: int
    new_tokens: int
    new_requests: int
    retries: int
    faults: Mapping[str, int]
    """Of this run, by kind."""
    endpoints: Mapping[str, int]
    """Answers of this run by endpoint."""
    wall_s: float

    def lines(self) -> list[str]:
        """The receipt as people read it."""
        usage, num_rejected = self.usage, sum(self.rejected.values())
        cost = f", cost {usage.cost:.4g}" if usage.cost else ""
        lines = [
            f"planned {self.planned:,} = answered {self.answered:,} + rejected {num_rejected:,}"
            f"{by_reason(self.rejected)}",
            f"answers: {sum(self.finish_reasons.values()):,}{by_reason(self.finish_reasons)}, {usage.prompt_tokens:,} "
            f"prompt + {usage.completion_tokens:,} completion tokens{cost}",
        ]
        if self.ended_early:
            lines.append(
                f"ended before their last turn: {sum(self.ended_early.values()):,}{by_reason(self.ended_early)}"
            )
        if self.retokenized:
            lines.append(
                f"without token ids from the server: {self.retokenized:,} of {self.answered:,} conversations; "
                "'eyas prepare' will tokenise them anew"
            )
        told = [(" ".join(word for word in who if word), n) for who, n in self.answered_by.items() if any(who)]
        if told:
            lines.append(f"answered by: {', '.join(f'{who} ({n:,})' for who, n in sorted(told))}")
        if self.not_planned:
            lines.append(f"rows in {self.out} whose prompt is no longer in the prompts file: {self.not_planned:,}")
        if self.new_requests:
            lines.append(
                f"this run: {self.new_conversations:,} conversations, {self.new_tokens:,} tokens in "
                f"{human_time(self.wall_s)}, {self.new_requests / self.wall_s:,.1f} requests/s, "
                f"{self.new_tokens / self.wall_s:,.0f} tokens/s, {self.retries:,} retries{by_reason(self.faults)}"
            )
        else:
            lines.append("this run: nothing left to do")
        lines.append(f"conversations in {self.out}" + (f", rejects in {self.rejects}" if num_rejected else ""))
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The receipt as machines read it."""
        return {
            "out": str(self.out),
            "rejects": str(self.rejects),
            "planned": self.planned,
            "answered": self.answered,
            "rejected": dict(self.rejected),
            "pending": 0,
            "ended_early": dict(self.ended_early),
            "finish_reasons": dict(self.finish_reasons),
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "requests": self.usage.requests,
            "cost": self.usage.cost,
            "retokenized": self.retokenized,
            "answered_by": [{"answered_by": list(who), "answers": n} for who, n in self.answered_by.items()],
            "not_planned": self.not_planned,
            "new_conversations": self.new_conversations,
            "new_tokens": self.new_tokens,
            "new_requests": self.new_requests,
            "retries": self.retries,
            "faults": dict(self.faults),
            "endpoints": dict(self.endpoints),
            "wall_s": round(self.wall_s, 3),
        }
