"""The chain of links from the target's weights to a server's counters, and what was found about each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "broken", "unknown"]
"""`unknown`: could not be checked; the text says why."""

LINKS: Mapping[str, str] = {
    "target": "data set, drafter and target.path are about the same weights",
    "states": "the stored auxiliary states are those of the hidden-state indices that name them",
    "norm": "the last hidden state is before or after the final norm, as the data set says",
    "template": "template and tokeniser are those that the samples were made with",
    "mask": "supervised are the tokens that the target wrote, and no others",
    "files": "the checkpoint is complete and can be loaded",
    "aux": "fc reads as many layers as the checkpoint names",
    "layers": "the checkpoint names the layers that it was trained with",
    "vocab": "the draft vocabulary is the one that it was trained with, and holds what the target says",
    "embedding": "the drafter reads the target's embedding",
    "rope": "positions are those that it was trained with",
    "accuracy": "held-out accuracy is that of the training",
    "decoding": "decoding in this process accepts what the stored states promise",
    "engine": "the server speculates with EAGLE-3",
    "served": "the server has this drafter and this target",
    "tokens": "the server makes the token ids of the samples",
    "serving": "the server accepts what decoding in this process accepts",
}
"""In the order of cause and effect: a broken link may spoil those behind it, never one before it."""

SIGNS: Mapping[State, str] = {"ok": "ok", "broken": "BROKEN", "unknown": "?"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    link: str
    state: State
    text: str
    """The evidence, with its figures."""
    do: str = ""
    """For a broken link: what to do."""
    note: str = ""
    """What limits acceptance although nothing is broken."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The same figures for machines, plain JSON."""

    def __post_init__(self) -> None:
        assert self.link in LINKS, self.link

    def line(self) -> str:
        text = f"could not be checked: {self.text}" if self.state == "unknown" else self.text
        tail = f"; do: {self.do}" if self.do else ""
        return f"{SIGNS[self.state]:<7} {self.link:<10} {text}{tail}" + (f" (note: {self.note})" if self.note else "")

    def as_dict(self) -> dict[str, Any]:
        return {
            "link": self.link,
            "state": self.state,
            "text": self.text,
            "do": self.do,
            "note": self.note,
            "numbers": dict(self.numbers),
        }


def ok(link: str, text: str, *, note: str = "", **numbers: Any) -> Finding:
    return Finding(link, "ok", text, note=note, numbers=numbers)


def broken(link: str, text: str, do: str, **numbers: Any) -> Finding:
    return Finding(link, "broken", text, do, numbers=numbers)


def unknown(link: str, why: str, **numbers: Any) -> Finding:
    return Finding(link, "unknown", why, numbers=numbers)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one checkpoint."""

    draft: str
    data: str
    server: str
    findings: tuple[Finding, ...]

    @property
    def cause(self) -> Finding | None:
        """The most upstream broken link."""
        return first_broken(self.findings)

    def verdict(self) -> str:
        """The last line."""
        cause = self.cause
        if cause is not None:
            others = [f.link for f in in_order(self.findings) if f.state == "broken" and f is not cause]
            also = f"; also broken: {', '.join(others)}" if others else ""
            return f"the most upstream broken link is '{cause.link}': {cause.do}{also}"
        left = [f.link for f in in_order(self.findings) if f.state == "unknown"]
        text = f"no broken link among the {len(self.findings) - len(left)} that could be checked"
        text += f" (not checked: {', '.join(left)})" if left else ""
        notes = [f"{f.link}: {f.note}" for f in in_order(self.findings) if f.note]
        return "; ".join([text, *notes])

    def as_dict(self) -> dict[str, Any]:
        cause = self.cause
        return {
            "draft": self.draft,
            "data": self.data,
            "server": self.server,
            "broken": cause.link if cause else None,
            "verdict": self.verdict(),
            "findings": [f.as_dict() for f in in_order(self.findings)],
        }


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """By the chain."""
    links = list(LINKS)
    return sorted(findings, key=lambda f: links.index(f.link))


def first_broken(findings: Iterable[Finding], among: Iterable[str] | None = None) -> Finding | None:
    """The most upstream broken one of these links, or of all."""
    links = set(LINKS if among is None else among)
    return next((f for f in in_order(findings) if f.state == "broken" and f.link in links), None)
