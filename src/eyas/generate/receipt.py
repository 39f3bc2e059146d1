"""What answers came to, all runs together: told at the end of each, whoever wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.generate.answers import AnsweredBy, Tally, Usage, by_reason, rejects_path
from eyas.log import human_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of every row of the prompts file: `planned = answered + rejected`, all runs together."""

    out: Path
    rejects: Path
    planned: int
    answered: int
    rejected: Mapping[str, int]
    """By reason."""
    retried: int
    """Rejects that were tried again; one that is rejected each time counts each time."""
    retried_answered: int
    """Rows among them that have an answer now."""
    ended_early: Mapping[str, int]
    """Answered conversations that stop before their last turn, by reason."""
    finish_reasons: Mapping[str, int]
    """Answers by how they ended: `stop`, or `length` when `max_new_tokens` cut them."""
    new_conversations: int
    """Answered by this run; the rest was there before."""
    new_tokens: int
    """Written in this run."""
    not_planned: int
    """Rows in the output whose prompt is no longer in the prompts file."""
    wall_s: float

    def lines(self) -> list[str]:
        """The receipt as people read it."""
        num_rejected = sum(self.rejected.values())
        lines = [
            f"planned {self.planned:,} = answered {self.answered:,} + rejected {num_rejected:,}"
            f"{by_reason(self.rejected)}",
            f"answers: {sum(self.finish_reasons.values()):,}{by_reason(self.finish_reasons)}, {self._tokens()}",
        ]
        if self.retried:
            lines.append(f"rejects tried again: {self.retried:,}, {self.retried_answered:,} of them answered now")
        if self.ended_early:
            num_early = sum(self.ended_early.values())
            lines.append(f"ended before their last turn: {num_early:,}{by_reason(self.ended_early)}")
        lines += self._about()
        if self.not_planned:
            lines.append(f"rows in {self.out} whose prompt is no longer in the prompts file: {self.not_planned:,}")
        if pace := self._pace():
            lines.append(
                f"this run: {self.new_conversations:,} conversations, {self.new_tokens:,} tokens in "
                f"{human_time(self.wall_s)}, {pace}"
            )
        else:
            lines.append("this run: nothing left to do")
        lines.append(f"conversations in {self.out}" + (f", rejects in {self.rejects}" if num_rejected else ""))
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The receipt as machines read it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(Receipt)}
        plain = {name: dict(value) for name, value in values.items() if isinstance(value, Mapping)}
        paths = {"out": str(self.out), "rejects": str(self.rejects)}
        return {**values, **plain, **paths, **self._more(), "wall_s": round(self.wall_s, 3)}

    def _tokens(self) -> str:
        """What was read and written."""
        raise NotImplementedError

    def _about(self) -> list[str]:
        """What else is to be told."""
        return []

    def _pace(self) -> str:
        """How fast this run was; empty where nothing was left to do."""
        raise NotImplementedError

    def _more(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReceipt(Receipt):
    """Answers from servers."""

    usage: Usage
    """Of all runs, rejected answers included."""
    retokenized: int
    """Answered conversations without token ids."""
    answered_by: Mapping[AnsweredBy, int]
    new_requests: int
    retries: int
    faults: Mapping[str, int]
    """Of this run, by kind."""
    endpoints: Mapping[str, int]
    """Answers of this run by endpoint."""

    def _tokens(self) -> str:
        cost = f", cost {self.usage.cost:.4g}" if self.usage.cost else ""
        return f"{self.usage.prompt_tokens:,} prompt + {self.usage.completion_tokens:,} completion tokens{cost}"

    def _about(self) -> list[str]:
        lines = []
        if self.retokenized:
            lines.append(
                f"without token ids from the server: {self.retokenized:,} of {self.answered:,} conversations; "
                "'eyas prepare' will tokenise them anew"
            )
        told = [(" ".join(word for word in who if word), n) for who, n in self.answered_by.items() if any(who)]
        if told:
            lines.append(f"answered by: {', '.join(f'{who} ({n:,})' for who, n in sorted(told))}")
        return lines

    def _pace(self) -> str:
        if not self.new_requests:
            return ""
        return (
            f"{self.new_requests / self.wall_s:,.1f} requests/s, {self.new_tokens / self.wall_s:,.0f} tokens/s, "
            f"{self.retries:,} retries{by_reason(self.faults)}"
        )

    def _more(self) -> dict[str, Any]:
        return {
            "pending": 0,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "requests": self.usage.requests,
            "cost": self.usage.cost,
            "retokenized": self.retokenized,
            "answered_by": [{"answered_by": list(who), "answers": n} for who, n in self.answered_by.items()],
            "new_requests": self.new_requests,
            "retries": self.retries,
            "faults": dict(self.faults),
            "endpoints": dict(self.endpoints),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReceipt(Receipt):
    """Answers written in this process."""

    generated_tokens: int
    device: str
    """Empty, like `dtype`, when nothing was left to do."""
    dtype: str

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.wall_s if self.wall_s > 0 else 0.0

    def _tokens(self) -> str:
        return f"{self.generated_tokens:,} tokens written by the target"

    def _pace(self) -> str:
        return f"{self.tokens_per_s:,.0f} tokens/s on {self.device} in {self.dtype}" if self.dtype else ""

    def _more(self) -> dict[str, Any]:
        return {
            "generated_tokens": self.generated_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "device": self.device,
            "dtype": self.dtype,
        }


def counted(out: Path, planned: int, tally: Tally, answered_before: int) -> dict[str, Any]:
    """What both receipts take from the files."""
    return {
        "out": out,
        "rejects": rejects_path(out),
        "planned": planned,
        "answered": tally.answered,
        "rejected": tally.rejected,
        "retried": tally.retried,
        "retried_answered": tally.retried_answered,
        "ended_early": tally.ended,
        "finish_reasons": tally.finish_reasons,
        "new_conversations": tally.num_answered - answered_before,
        "not_planned": tally.not_planned,
    }
