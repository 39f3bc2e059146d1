"""A running server, asked what the target was asked in the samples, one question after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.config import Config
from eyas.doctor.material import Question
from eyas.errors import ConfigError, EngineError
from eyas.evaluate.answers import Answer, Sampling
from eyas.evaluate.client import About, Server
from eyas.evaluate.counters import Acceptance, of_one_answer, pooled
from eyas.generate.key import read_key


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself, answers, and makes of conversations."""

    about: About
    answers: tuple[Answer, ...] = ()
    """To the first questions: to all, unless `failure` says why not."""
    told: tuple[Acceptance | None, ...] = ()
    """What each answer accepted; None where the server does not count, or counted others beside it."""
    foreign_tokens: int = 0
    """Tokens of other people's requests that its counters saw meanwhile."""
    failure: str = ""
    rendered: tuple[list[int], ...] = ()
    """Token ids of the first conversations: of all, unless `not_rendered` says why not."""
    not_rendered: str = ""

    @property
    def acceptance(self) -> Acceptance | None:
        """Of all answers of which it is known; None where it is of none."""
        known = [one for one in self.told if one is not None]
        return pooled(known) if known else None

    @property
    def num_draft_tokens(self) -> int | None:
        """Drafted tokens of a chain."""
        found = self.acceptance
        if self.about.num_draft_tokens or found is None or not found.verifications:
            return self.about.num_draft_tokens
        return round(found.drafted_tokens / found.verifications) or None


def interview(
    url: str,
    config: Config,
    questions: Sequence[Question] = (),
    conversations: Sequence[Sequence[dict[str, Any]]] = (),
    stop_ids: Collection[int] = (),
) -> Served:
    """Greedy answers, and conversations in the server's own template.

    ConfigError where `url` is no address, nobody answers there at all, or no server of the two kinds.
    """
    return asyncio.run(_interview(url, config, questions, conversations, stop_ids))


async def _interview(
    url: str,
    config: Config,
    questions: Sequence[Question],
    conversations: Sequence[Sequence[dict[str, Any]]],
    stop_ids: Collection[int],
) -> Served:
    server = Server(url, option="--server", timeout_s=config.evaluate.timeout_s, key=read_key(config.generate))
    answers: list[Answer] = []
    told: list[Acceptance | None] = []
    rendered: list[list[int]] = []
    foreign, failure, not_rendered = 0, "", ""
    try:
        try:
            about = await server.look()
        except EngineError as error:
            raise ConfigError(f"--server {error}") from None
        try:
            for i, question in enumerate(questions):
                answer, acceptance, others = await _answer(server, question, stop_ids, name=str(i))
                answers.append(answer)
                told.append(acceptance)
                foreign += others
        except EngineError as error:
            failure = str(error)
        try:
            for messages in conversations:
                rendered.append(await server.conversation_ids(messages))
        except EngineError as error:
            not_rendered = str(error)
    finally:
        await server.aclose()
    return Served(about, tuple(answers), tuple(told), foreign, failure, tuple(rendered), not_rendered)


async def _answer(
    server: Server, question: Question, stop_ids: Collection[int], *, name: str
) -> tuple[Answer, Acceptance | None, int]:
    """The answer, what it accepted, and tokens that the counters saw beside it."""
    sampling = Sampling(question.num_new_tokens, 0.0, 0, tuple(sorted(stop_ids)))
    before = await server.counters()
    salt = f"eyas-{time.time_ns():x}-{name}"
    answer = await server.answer(question.prompt.tolist(), sampling, salt=salt, name=name)
    if answer.acceptance is not None or before is None:
        return answer, answer.acceptance, 0
    moved = await server.settled(before, [answer])
    foreign = max(0, round(moved.generated_tokens) - answer.num_new_tokens)
    return answer, of_one_answer(moved, answer.num_new_tokens), foreign
