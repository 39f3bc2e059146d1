"""Conversations between endpoints: who asks whom next, what becomes of each answer, and when to stop."""

from __future__ import annotations

import asyncio
import random
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyas.config import GenerateConfig
from eyas.errors import ConfigError, DataError, EngineError, EngineUnavailable, EyasError, Stopped
from eyas.generate.answers import AnsweredBy, AnswerFiles, Usage, by_reason, reject_row
from eyas.generate.conversation import Conversation
from eyas.generate.cost import TEMPLATE_TOKENS, Budget, Probe, estimate_line
from eyas.generate.endpoint import Endpoint
from eyas.generate.key import Key
from eyas.generate.monitor import Monitor
from eyas.generate.prompts import Prompt, PromptReject
from eyas.generate.purse import Purse
from eyas.generate.reply import (
    MAY_BE_CHARGED,
    OF_THE_ENDPOINT,
    REFUSED,
    Answer,
    Fault,
    FaultKind,
    Halt,
    Outcome,
    Refusal,
)
from eyas.generate.request import common_body, has_seed, seed_of
from eyas.generate.work import Work
from eyas.log import human_time

PROBE = 20
"""Conversations that are answered before the estimate is told and the rest begins."""
UNAVAILABLE = "unavailable"
MAX_PATIENCE = 4.0
"""An answer that timed out gets more time, up to so many times as much."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 20.0
LIVES_TRIES = 5
"""A server that fails now and then lives, too."""
TICK_S = 0.1
SYNC_S = 2.0
"""What a power cut may cost, at most; a kill costs nothing that was written."""
OTHER_FILES = 200
GRACE_S = 5.0
"""For answers that are on their way when a stop is asked for."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What the prompts file holds."""

    num_rows: int
    answerable: int
    turns: int
    prompt_bytes: int


class Loop:
    """The event loop's work: endpoints, conversations between them, and the reasons to stop."""

    def __init__(
        self,
        config: GenerateConfig,
        model: str,
        answers: AnswerFiles,
        monitor: Monitor,
        budget: Budget,
        plan: Planned,
    ) -> None:
        self._config, self._answers, self._monitor, self._budget, self._plan = config, answers, monitor, budget, plan
        self._purse = Purse(budget, config.max_new_tokens)
        self.endpoints: list[Endpoint] = []
        self._body = common_body(config, model)
        self._timeout_s = config.timeout_s + config.timeout_s_per_1k_tokens * config.max_new_tokens / 1000
        told = [who for who in answers.tally.answered_by if any(who)]
        self._answered_by: AnsweredBy | None = told[0] if told else None
        if len(told) > 1 and not config.mixed_providers:
            raise ConfigError(self._mixed(told[0], told[1]))
        self._suspects: list[tuple[Conversation, str, str]] = []
        """Refused or failed for good, and perhaps not by their own fault: filed once another succeeds."""
        self._cut_short: list[tuple[Conversation, str, str]] = []
        """Failed for good in a later turn: what was answered is kept, and tried once more at the end."""
        self._asking: set[Conversation] = set()
        """Conversations whose next answer is on its way."""
        self._heard_at = time.monotonic()
        self._end: EyasError | None = None
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._probe_started = 0.0
        self._probed = 0
        """Conversations of the probe that are settled."""
        self._probe_turns = self._probe_bytes = 0
        self._usage_before = Usage()

    async def answer_all(
        self, todo: Iterator[Prompt | PromptReject], urls: tuple[str, ...], key: Key, stop: threading.Event
    ) -> None:
        """Until every row is accounted for, or there is a reason to stop, which is raised."""
        self._work = Work(self._new(todo), self._admit)
        tally = self._answers.tally
        self._usage_before.add(tally.usage)
        pending = self._monitor.pending
        self._probing = pending > PROBE
        self._work.allowed = PROBE if self._probing else None
        self._probe_started = time.monotonic()
        _allow_open_files(self._config.concurrency * len(urls))
        self.endpoints = [Endpoint(url, key, concurrency=self._config.concurrency) for url in urls]
        self._monitor.endpoints = self.endpoints
        self._monitor.state("probing" if self._probing else "answering", pending=pending)
        self._monitor.show(force=True)
        ticker = asyncio.create_task(self._tick(stop))
        try:
            await self._until_done()
            if self._goes_on() and self._doubtful():
                await self._try_once_more()
            if self._goes_on():
                await self._judge_the_last()
            self._tell_unfinished()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._over.set()
            self._ticking = False
            await ticker
            for endpoint in self.endpoints:
                await endpoint.aclose()
        if self._failure is not None:
            raise self._failure
        if self._end is not None:
            raise self._end

    def _goes_on(self) -> bool:
        return self._end is None and self._failure is None

    async def _until_done(self) -> None:
        """Until all work is done or there is a reason to stop; an endpoint that pauses keeps nobody from ending."""
        pumps = [asyncio.create_task(self._pump(endpoint)) for endpoint in self.endpoints]
        waiters = [asyncio.create_task(self._over.wait()), asyncio.create_task(self._work.done.wait())]
        try:
            # A pump ends only when one of the two has come, or by an error, which is raised below.
            await asyncio.wait([*pumps, *waiters], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*pumps, *waiters):
                task.cancel()
            ends = await asyncio.gather(*pumps, *waiters, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        await self._drain()

    def _doubtful(self) -> list[Conversation]:
        """Nobody could answer them, and no answer since says that the servers are not to blame."""
        return [c for c, reason, _ in [*self._suspects, *self._cut_short] if reason == UNAVAILABLE]

    async def _try_once_more(self) -> None:
        """At the end, if the servers live, each gets another try: what failed them may have passed."""
        if not await self._lives():
            self._end = self._about_suspects()
            return
        again = self._doubtful()
        self._suspects = [suspect for suspect in self._suspects if suspect[1] != UNAVAILABLE]
        self._cut_short = []
        for conversation in again:
            conversation.attempts = max(0, self._config.max_attempts - 2)
        self._work.resume(again)
        await self._until_done()

    async def _lives(self) -> bool:
        """Whether any server answers a question that nothing can be wrong with."""
        body = {**self._body, "messages": [{"role": "user", "content": "Hello"}]}
        self._budget.uncertain += self._budget.worst(2 * TEMPLATE_TOKENS, self._config.max_new_tokens)
        for attempt in range(LIVES_TRIES):
            for endpoint in self.endpoints:
                if self._over.is_set():
                    return False
                if isinstance(await endpoint.ask(body, timeout_s=self._timeout_s), Answer):
                    return True
            await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
        return False

    def _new(self, todo: Iterator[Prompt | PromptReject]) -> Iterator[Prompt | None]:
        """Prompts that nobody has answered; rejects on the way are filed, and what is done is passed over."""
        for prompt in todo:
            if self._answers.tally.is_done(prompt.row_id):
                yield None
            elif isinstance(prompt, PromptReject):
                self._reject(reject_row(prompt))
                yield None
            else:
                yield prompt

    async def _pump(self, endpoint: Endpoint) -> None:
        """Keep an endpoint as busy as it likes to be."""
        while True:
            await endpoint.ready()
            conversation = await self._work.take()
            if conversation is None:
                return
            if self._over.is_set():
                self._work.give_back(conversation)
                return
            if endpoint.paused_s or endpoint.in_flight >= endpoint.limit:
                self._work.give_back(conversation)
                continue
            endpoint.in_flight += 1
            task = asyncio.create_task(self._serve(endpoint, conversation))
            self._tasks.add(task)
            task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._over.set()

    async def _serve(self, endpoint: Endpoint, conversation: Conversation) -> None:
        """Put a conversation to an endpoint until it is done, or somebody else should have it."""
        self._asking.add(conversation)
        try:
            while True:
                timeout_s = self._timeout_s * min(MAX_PATIENCE, 1.5**conversation.num_timeouts)
                body = {**self._body, "messages": conversation.messages}
                if conversation.prompt.tools:
                    body["tools"] = conversation.prompt.tools
                if has_seed(self._config):
                    body["seed"] = seed_of(conversation, self._config.seed)
                outcome = await endpoint.ask(body, timeout_s=timeout_s)
                if not self._take(endpoint, conversation, outcome):
                    return
                if self._over.is_set() or endpoint.paused_s or endpoint.in_flight > endpoint.limit:
                    self._work.give_back(conversation)
                    return
        finally:
            self._asking.discard(conversation)
            endpoint.release()

    def _take(self, endpoint: Endpoint, conversation: Conversation, outcome: Outcome) -> bool:
        """Act on what came of a request; whether this endpoint should be asked for the next turn at once."""
        if isinstance(outcome, Answer):
            return self._take_answer(endpoint, conversation, outcome)
        if isinstance(outcome, Fault):
            self._take_fault(endpoint, conversation, outcome)
        elif isinstance(outcome, Refusal):
            if outcome.reason == REFUSED:
                self._suspect(conversation, REFUSED, outcome.detail)
            else:
                conversation.end(outcome.reason, outcome.detail)
                self._file(conversation)
        else:
            self._work.give_back(conversation)
            self._halt(_halted(endpoint, outcome, self._monitor.identity()))
        return False

    def _take_answer(self, endpoint: Endpoint, conversation: Conversation, answer: Answer) -> bool:
        self._heard_at = time.monotonic()
        who = answer.answered_by
        if any(who) and not self._config.mixed_providers:
            if self._answered_by is None:
                self._answered_by = who
            elif who != self._answered_by:
                conversation.usage.add(answer.usage)
                self._work.give_back(conversation)
                self._halt(ConfigError(self._mixed(self._answered_by, who)))
                return False
        self._purse.charge(conversation, answer.usage, cost_told=answer.cost_told, usage_told=answer.usage_told)
        if not self._budget.known:
            self._halt(
                ConfigError(
                    "generate.max_cost is set, answers do not name their cost, and generate.price_per_1m is empty; "
                    "set it"
                )
            )
        conversation.take(answer, keep_cut=self._config.keep_cut)
        if self._suspects:
            self._file_suspects()
        if conversation.done:
            self._file(conversation)
            return False
        if self._budget.most is not None:
            self._purse.keep(conversation, self._purse.worst(conversation))
            self._work.wake()
        return True

    def _take_fault(self, endpoint: Endpoint, conversation: Conversation, fault: Fault) -> None:
        if fault.usage is not None:
            self._purse.charge(conversation, fault.usage, cost_told=fault.usage.cost > 0, usage_told=True)
        elif fault.kind in MAY_BE_CHARGED and self._budget.most is not None:
            self._budget.uncertain += self._purse.worst(conversation, num_turns=1)
        pause_s = 0.0
        if fault.kind not in OF_THE_ENDPOINT:
            conversation.attempts += 1
            conversation.num_timeouts += fault.kind is FaultKind.TIMEOUT
            pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**conversation.attempts) * random.uniform(0.5, 1.0)
        self._monitor.on_fault(endpoint, fault.kind, fault.detail, conversation.prompt.row_id, conversation.attempts)
        if conversation.attempts >= self._config.max_attempts:
            detail = f"{conversation.attempts} tries failed, the last: {fault.detail}"
            self._suspect(conversation, UNAVAILABLE, detail)
        else:
            self._work.give_back(conversation, pause_s)

    def _admit(self, conversation: Conversation) -> bool:
        return self._purse.admits(conversation, self._work.num_out)

    def _out_of_money(self, conversation: Conversation) -> Stopped:
        budget = self._budget
        assert budget.most is not None
        uncertain = f" and {budget.uncertain:.4g} more may be" if budget.uncertain else ""
        return Stopped(
            f"generate.max_cost {budget.most:.4g}: {budget.spent:.4g} is spent{uncertain}, the next conversation could "
            f"cost {self._purse.worst(conversation):.4g}; {self._monitor.identity()}; raise it and run the same "
            "command again"
        )

    def _suspect(self, conversation: Conversation, reason: str, detail: str) -> None:
        """Perhaps the conversation is to blame, perhaps the servers: the next answer tells."""
        self._suspects.append((conversation, reason, detail))
        self._purse.keep(conversation, 0.0)
        self._settled(conversation)
        if len(self._suspects) >= self._config.max_reject_burst:
            self._halt(self._about_suspects())

    def _about_suspects(self) -> EyasError:
        suspects = [*self._suspects, *self._cut_short]
        _, reason, detail = suspects[-1]
        text = (
            f"{len(suspects)} conversations in a row are {reason}, none succeeds between them, the last: "
            f"{detail}; {self._monitor.identity()}; mend that, or raise generate.max_reject_burst"
        )
        return EngineUnavailable(text) if reason == UNAVAILABLE else EngineError(text)

    def _file_suspects(self, *, final: bool = False) -> None:
        suspects, self._suspects = self._suspects, []
        for conversation, reason, detail in suspects:
            if reason == UNAVAILABLE and conversation.finish_reasons and not final:
                self._cut_short.append((conversation, reason, detail))
                continue
            conversation.end(reason, detail)
            self._write(conversation)

    async def _judge_the_last(self) -> None:
        """There is no more work: those that nobody could answer are rejects, if the servers live."""
        self._suspects += self._cut_short
        if self._suspects and not await self._lives():
            self._end = self._about_suspects()
            return
        self._file_suspects(final=True)
        if self._work.starved is not None:
            self._end = self._out_of_money(self._work.starved)

    def _tell_unfinished(self) -> None:
        """Conversations that a stop cuts short are asked anew: what their answers took stands in no row."""
        usage = Usage()
        for conversation in [
            *self._work.unfinished(),
            *self._asking,
            *(suspect[0] for suspect in [*self._suspects, *self._cut_short]),
        ]:
            usage.add(conversation.usage)
        if usage.requests:
            self._monitor.events.add("unfinished", requests=usage.requests, cost=usage.cost)
            cost = f", cost {usage.cost:.4g}" if usage.cost else ""
            self._monitor.say(f"{usage.requests} answers of unfinished conversations are dropped{cost}")

    def _file(self, conversation: Conversation) -> None:
        self._purse.keep(conversation, 0.0)
        self._write(conversation)
        self._settled(conversation)

    def _write(self, conversation: Conversation) -> None:
        if conversation.finish_reasons:
            self._answers.append_answer(conversation.row())
            return
        prompt = conversation.prompt
        row = reject_row(
            PromptReject(prompt.row_id, prompt.prompt_id, prompt.line, conversation.ended, conversation.detail)
        )
        if conversation.usage.requests:
            row["usage"] = conversation.usage
        self._reject(row)

    def _reject(self, row: dict[str, Any]) -> None:
        self._answers.append_reject(row)
        self._monitor.on_reject(row["row_id"], row["reason"], row["detail"])

    def _settled(self, conversation: Conversation) -> None:
        self._work.settled()
        if self._probing:
            self._probed += 1
            self._probe_turns += len(conversation.finish_reasons)
            self._probe_bytes += sum(len(str(message.get("content"))) for message in conversation.prompt.messages)
            if self._probed >= PROBE:
                self._end_probe()

    def _end_probe(self) -> None:
        tally, before = self._answers.tally, self._usage_before
        self._probing = False
        if self._suspects and not tally.num_answered:
            self._halt(self._about_suspects())
            return
        if not tally.num_answered:
            self._halt(
                DataError(
                    f"not one of the first {PROBE} prompts has an answer{by_reason(tally.rejected)}; see "
                    "the rejects file, mend the settings, and choose another generate.out"
                )
            )
            return
        usage = Usage(
            tally.usage.prompt_tokens - before.prompt_tokens,
            tally.usage.completion_tokens - before.completion_tokens,
            tally.usage.requests - before.requests,
            tally.usage.cost - before.cost,
        )
        left = self._monitor.pending
        share = left / max(1, self._plan.answerable)
        probe = Probe(
            conversations=PROBE,
            turns=max(1, self._probe_turns),
            prompt_bytes=self._probe_bytes,
            usage=usage,
            rejected=self._monitor.num_rejected,
            wall_s=time.monotonic() - self._probe_started,
            in_flight=PROBE,
            most_in_flight=self._config.concurrency * len(self.endpoints),
        )
        line = estimate_line(
            probe,
            conversations=left,
            turns=round(self._plan.turns * share),
            prompt_bytes=round(self._plan.prompt_bytes * share),
            has_cost=usage.cost > 0,
        )
        self._monitor.say(line)
        self._monitor.state("answering", estimate=line)
        self._work.allowed = None
        self._work.wake()

    def _mixed(self, first: AnsweredBy, other: AnsweredBy) -> str:
        names = ("provider", "model", "quantisation", "fingerprint")
        differences = [
            f"{name}: {a or 'not told'} before, {b or 'not told'} now"
            for name, a, b in zip(names, first, other, strict=True)
            if a != b
        ]
        return (
            f"answers come from different places ({'; '.join(differences)}): one file holds one target's answers; pin "
            "it with generate.providers and generate.quantizations, or set generate.mixed_providers = true"
        )

    def _halt(self, error: EyasError) -> None:
        """Ask nothing more; answers that are on their way are still taken."""
        if self._end is None:
            self._end = error
            self._over.set()

    async def _drain(self) -> None:
        """Let what is on its way come in."""
        deadline = time.monotonic() + GRACE_S
        while self._tasks and self._failure is None and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left)

    async def _tick(self, stop: threading.Event) -> None:
        """What happens by the clock: the progress line, fsync, and the reasons to stop that no answer brings."""
        self._ticking = True
        synced = time.monotonic()
        while self._ticking:
            await asyncio.sleep(TICK_S)
            if stop.is_set():
                self._halt(
                    Stopped(f"stopped on request: {self._monitor.identity()}; the same command goes on from here")
                )
            self._monitor.rates()
            self._monitor.show()
            now = time.monotonic()
            if now - synced >= SYNC_S:
                synced = now
                try:
                    await asyncio.to_thread(self._answers.sync)
                except EyasError as error:
                    self._failure = error
                    self._over.set()
                    return
                self._monitor.on_commit()
            patience_s = self._config.reconnect_s + MAX_PATIENCE * self._timeout_s
            if self._monitor.retries and now - self._heard_at > patience_s:
                self._halt(
                    EngineUnavailable(
                        f"no answer for {human_time(now - self._heard_at)}, only faults "
                        f"({by_reason(self._monitor.faults).strip() or 'none told'}); {self._monitor.identity()}; the "
                        "same command goes on from here"
                    )
                )
            downs = [e.down_since for e in self.endpoints]
            since = [d for d in downs if d is not None]
            if len(since) == len(downs) and now - max(since) > self._config.reconnect_s:
                gone = "; ".join(f"{e.url}: {e.down_detail}" for e in self.endpoints)
                self._halt(
                    EngineUnavailable(
                        f"no server for {human_time(now - max(since))} ({gone}); {self._monitor.identity()}; the same "
                        "command goes on from here"
                    )
                )


def _allow_open_files(connections: int) -> None:
    """A connection each for the requests in flight: as many files as this user may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"generate.concurrency: {connections} connections need {wanted} open files, {hard} are allowed (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _halted(endpoint: Endpoint, halt: Halt, identity: str) -> EyasError:
    if halt.credits:
        return Stopped(
            f"{endpoint.url}: credits are used up (402: {halt.detail}); {identity}; add some, and the same "
            "command goes on from here"
        )
    return ConfigError(f"{endpoint.url} {halt.detail}; {identity}; mend that, and the same command goes on from here")
