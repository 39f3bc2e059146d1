"""Acceptance and speed on running servers: one with the drafter, and, for comparison, one of the same target without.

Neither engine switches speculation off for a request, so plain decoding needs a server of its own. At each batch size
both answer the same prompts, in turns, several times; what a run moved the servers' counters by is its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.config import DataConfig, EvaluateConfig, TargetConfig
from eyas.data.tokenizer import tokenizer_files
from eyas.errors import ConfigError, DataError, EngineError
from eyas.evaluate.answers import Answer, Sampling
from eyas.evaluate.client import About, Server
from eyas.evaluate.counters import Acceptance, Counters, of_one_answer
from eyas.evaluate.prompts import BUILT_IN, Prompt, PromptReader, set_name, stop_ids
from eyas.evaluate.server_receipt import ServerReceipt
from eyas.evaluate.server_runs import Own, Run
from eyas.generate.key import Key
from eyas.log import Progress
from eyas.target.files import target_digest

WARM_UP_TOKENS = 8
TURN_CONCURRENCY = 8
"""Requests in flight while the prompts of later turns are made."""
PROBE = "In 2026, 12,345 naïve eyasses – {x: [1]} – flew 7 km²:\n\tüber «Zürich»  and  back."
"""Words, digits, spaces and letters at which tokenisers differ."""

OwnDecoding = Callable[[int | None], Own]
"""Decodes the same prompts in this process, in chains of so many drafted tokens."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Addresses, as the command line has them."""

    url: str
    baseline_url: str | None = None


def evaluate(
    config: EvaluateConfig,
    target: TargetConfig,
    data: DataConfig,
    *,
    servers: Servers,
    key: Key,
    prompts: Path | None,
    limit: int | None,
    own: OwnDecoding | None,
    progress: Progress,
) -> ServerReceipt:
    """Measure the drafter of a running server.

    Raises ConfigError for addresses that cannot be meant, DataError for prompts that cannot be read or asked,
    EngineUnavailable where a server is gone or silent, EngineError where it is not what it must be.
    """
    with_draft = Server(servers.url, option="--server", timeout_s=config.timeout_s, key=key)
    baseline = None
    if servers.baseline_url is not None:
        baseline = Server(servers.baseline_url, option="--baseline-server", timeout_s=config.timeout_s, key=key)
        if baseline.url == with_draft.url:
            raise ConfigError(f"--baseline-server: {baseline.url} is the server with the drafter; start another one")
    return asyncio.run(
        _Evaluation(config, target, data, with_draft, baseline, progress).run(prompts, limit=limit, own=own)
    )


class _Evaluation:
    def __init__(
        self,
        config: EvaluateConfig,
        target: TargetConfig,
        data: DataConfig,
        with_draft: Server,
        baseline: Server | None,
        progress: Progress,
    ) -> None:
        assert target.path is not None
        self._config, self._target, self._path = config, target, target.path
        self._reader = PromptReader(target, data)
        self._servers = {True: with_draft} | ({False: baseline} if baseline is not None else {})
        self._progress = progress
        self._stop_ids = tuple(sorted(stop_ids(target.path)))
        self._salts = (f"eyas-{time.time_ns():x}-{i}" for i in range(1 << 62))
        self._notes: list[str] = []

    async def run(self, path: Path | None, *, limit: int | None, own: OwnDecoding | None) -> ServerReceipt:
        started = time.monotonic()
        try:
            found = self._reader.read(path, limit=limit)
            about = await self._look()
            prompts, skipped = _sorted_out(found, list(about.values()), self._config.max_new_tokens)
            if not prompts:
                why = next((f"{name}: {why}" for name, why in skipped.items()), "the file is empty")
                raise DataError(f"{path or BUILT_IN}: none of its {len(found):,} prompts can be asked; first: {why}")
            here = own(about[True].num_draft_tokens) if own is not None else None
            prompts = await self._with_later_turns(prompts, list(about.values()), skipped)
            runs = [run async for run in self._runs(prompts)]
        finally:
            for server in self._servers.values():
                await server.aclose()
        return ServerReceipt(
            server=about[True],
            baseline=about.get(False),
            prompt_set=set_name(path),
            prompts=tuple(prompts),
            max_new_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            repeats=self._config.repeats,
            runs=tuple(runs),
            skipped=skipped,
            seconds=time.monotonic() - started,
            own=here,
            notes=tuple(self._notes) + _notes(about, runs),
        )

    async def _look(self) -> dict[bool, About]:
        """What the servers are; refused where they cannot be compared or measured."""
        about = {side: await server.look() for side, server in self._servers.items()}
        self._progress.show("evaluate: the servers answer; comparing their tokenisers and weights", force=True)
        _check_speculation(about)
        has_tokenizer = bool(tokenizer_files(self._path))
        own_ids = self._reader.tokenizer(PROBE, add_special_tokens=False)["input_ids"] if has_tokenizer else None
        for side, one in about.items():
            told = await self._servers[side].token_ids(PROBE) if own_ids is not None else None
            if told is None:
                self._notes.append(f"{one.url}: its tokeniser could not be compared with that of {self._path}")
            elif told != own_ids:
                raise EngineError(
                    f"{one.url}: makes other tokens of a text than {self._path} does; it serves another model "
                    f"({one.model_path}), or set target.path to that one"
                )
            self._notes += _other_weights(one, self._path)
        return about

    async def _with_later_turns(
        self, prompts: Sequence[Prompt], about: Sequence[About], skipped: dict[str, str]
    ) -> list[Prompt]:
        """The prompts, and behind each one those of its later turns, which stand on the target's own greedy answers."""
        plain = self._servers.get(False, self._servers[True])
        sampling = Sampling(self._config.max_new_tokens, 0.0, 0, self._stop_ids)
        chains = [[prompt] for prompt in prompts]
        open_ends = [chain for chain in chains if chain[-1].later]
        while open_ends:
            self._progress.show(f"evaluate: answering {len(open_ends):,} turns that others follow")
            asked = [chain[-1] for chain in open_ends]
            answers = await self._unmeasured(plain, asked, sampling, TURN_CONCURRENCY)
            still_open = []
            for chain, prompt, answer in zip(open_ends, asked, answers, strict=True):
                if answer.token_ids is None:
                    raise EngineError(
                        f"{plain.url}: does not answer in token ids, which later turns need; use a newer one"
                    )
                after = self._reader.next_turn(prompt, answer.token_ids)
                fitting, unfit = _sorted_out([after] if after else [], about, self._config.max_new_tokens)
                skipped |= unfit
                chain += fitting
                if fitting and fitting[0].later:
                    still_open.append(chain)
            open_ends = still_open
        return [prompt for chain in chains for prompt in chain]

    async def _unmeasured(
        self, server: Server, prompts: Sequence[Prompt], sampling: Sampling, size: int
    ) -> list[Answer]:
        """Answers that are in no figure: waited for until they are counted, so that no run counts them as its own."""
        before = await server.counters()
        answers, _ = await _in_flight(server, prompts, sampling, size, self._salts)
        if before is not None:
            await server.settled(before, answers)
        return answers

    async def _runs(self, prompts: Sequence[Prompt]) -> AsyncGenerator[Run, None]:
        """Every run, batch size by batch size; who goes first takes turns."""
        config = self._config
        sizes = sorted(set(config.batch_sizes))
        warm = Sampling(WARM_UP_TOKENS, config.temperature, config.seed, self._stop_ids)
        for server in self._servers.values():
            self._progress.show(f"evaluate: {server.url}: warming up with {sizes[-1]:,} short answers", force=True)
            # The first requests of a shape pay for kernels and memory.
            asked = [prompts[i % len(prompts)] for i in range(sizes[-1])]
            await self._unmeasured(server, asked, warm, sizes[-1])
        plan = [
            (size, repeat, side)
            for size in sizes
            for repeat in range(config.repeats)
            for side in ((True, False) if repeat % 2 == 0 else (False, True))
            if side in self._servers
        ]
        for number, (size, repeat, side) in enumerate(plan, 1):
            yield await self._run(prompts, size, repeat, side, where=f"run {number:,} of {len(plan):,}")

    async def _run(self, prompts: Sequence[Prompt], size: int, repeat: int, side: bool, *, where: str) -> Run:
        config, server = self._config, self._servers[side]
        # Whole sets, so that prompts weigh alike, and enough that the servers are busy most of the time.
        sets = -(-2 * size // len(prompts)) if size > 1 else 1
        order = [i for _ in range(sets) for i in range(len(prompts))]
        asked = [prompts[i] for i in order]
        sampling = Sampling(config.max_new_tokens, config.temperature, config.seed, self._stop_ids)
        which = "with the drafter" if side else "without"

        def show(done: int) -> None:
            self._progress.show(f"evaluate: {where}, batch size {size}, {which}: {done:,} of {len(asked):,} answers")

        before = await server.counters()
        told: list[Acceptance | None]
        if size == 1:
            answers, told = await _one_by_one(server, asked, sampling, self._salts, before, show, with_draft=side)
            seconds = sum(answer.seconds for answer in answers)
        else:
            answers, seconds = await _in_flight(server, asked, sampling, size, self._salts, show)
            told = [answer.acceptance for answer in answers]
        moved = await server.settled(before, answers) if before is not None else None
        return Run(size, repeat, side, tuple(order), tuple(answers), tuple(told), seconds, moved)


async def _in_flight(
    server: Server,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    size: int,
    salts: Iterator[str],
    show: Callable[[int], None] = lambda done: None,
) -> tuple[list[Answer], float]:
    """Answers in the order of the prompts, `size` requests in flight, and the seconds from first to last."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for i, prompt in waiting:
            answers[i] = await server.answer(prompt.token_ids, _seeded(sampling, i), salt=next(salts), name=prompt.name)
            show(len(answers))

    started = time.perf_counter()
    tasks = [asyncio.create_task(work()) for _ in range(min(size, len(prompts)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [answers[i] for i in range(len(prompts))], time.perf_counter() - started


async def _one_by_one(
    server: Server,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    salts: Iterator[str],
    before: Counters | None,
    show: Callable[[int], None],
    *,
    with_draft: bool,
) -> tuple[list[Answer], list[Acceptance | None]]:
    """Answers, and what was accepted for each: told with it, or read off the counters between two of them."""
    answers: list[Answer] = []
    told: list[Acceptance | None] = []
    for i, prompt in enumerate(prompts):
        answer = await server.answer(prompt.token_ids, _seeded(sampling, i), salt=next(salts), name=prompt.name)
        answers.append(answer)
        show(len(answers))
        found = answer.acceptance
        if found is None and with_draft and before is not None and before.accepted_tokens is not None:
            moved = await server.settled(before, [answer])
            found = of_one_answer(moved, answer.num_new_tokens)
            before = await server.counters() or before
        told.append(found)
    return answers, told


def _seeded(sampling: Sampling, i: int) -> Sampling:
    if sampling.temperature == 0:
        return sampling
    return Sampling(sampling.max_new_tokens, sampling.temperature, sampling.seed + i, sampling.stop_ids)


def _sorted_out(
    prompts: Sequence[Prompt], about: Sequence[About], max_new_tokens: int
) -> tuple[list[Prompt], dict[str, str]]:
    """Prompts that fit the servers, and why others do not."""
    fitting, skipped = [], {}
    most = min((one.max_tokens for one in about if one.max_tokens is not None), default=None)
    for prompt in prompts:
        count = len(prompt.token_ids)
        if count < 1:
            skipped[prompt.name] = "no tokens"
        elif most is not None and count + max_new_tokens > most:
            skipped[prompt.name] = f"{count} tokens and {max_new_tokens} new ones; the server takes {most}"
        else:
            fitting.append(prompt)
    return fitting, skipped


def _check_speculation(about: dict[bool, About]) -> None:
    one = about[True]
    if not one.speculation:
        how = (
            """--speculative-config '{"method":"eagle3","model":DIR,"num_speculative_tokens":3}'"""
            if one.engine == "vllm"
            else "--speculative-algorithm EAGLE3 --speculative-draft-model-path DIR"
        )
        raise EngineError(f"{one.url}: the drafter is not active: it runs without speculation; start it with {how}")
    if False in about and about[False].speculation:
        other = about[False]
        raise EngineError(f"{other.url}: speculates, too ({other.speculation}); start the baseline without a drafter")


def _other_weights(about: About, target: Path) -> list[str]:
    """A warning where the server's weights lie here and are not the target's; others cannot be looked at."""
    there = Path(about.model_path)
    if not about.model_path or not (there / "config.json").is_file():
        return [f"{about.url}: serves {about.model_path or about.model}; its weights are not here to be compared"]
    if target_digest(there) == target_digest(target):
        return []
    return [f"warning: {about.url}: serves {there}, which has other weights than {target}"]


def _notes(about: dict[bool, About], runs: Sequence[Run]) -> tuple[str, ...]:
    notes = []
    one = about[True]
    if one.speculation.upper() == "EAGLE":
        notes.append(
            f"warning: {one.url}: runs EAGLE, not EAGLE3: of an EAGLE-3 drafter nothing is accepted there; start it "
            "with --speculative-algorithm EAGLE3"
        )
    if one.topk is not None and one.topk > 1:
        notes.append(f"{one.url}: drafts trees of {one.topk} branches; decoding in this process drafts chains")
    if False in about and about[False].model_path != one.model_path:
        notes.append(f"warning: the servers name other models: {one.model_path} and {about[False].model_path}")
    if False in about and (about[False].engine, about[False].version) != (one.engine, one.version):
        notes.append("warning: the two servers are not of one engine and version: their speeds differ by that, too")
    for other in about.values():
        if not other.counts:
            notes.append(f"{other.url}: has no counters, so traffic of others is not seen; SGLang: --enable-metrics")
    if one.engine == "vllm" and any(None in run.told for run in runs if run.with_draft):
        notes.append(
            f"{one.url}: tells acceptance by request only one at a time, between two readings of its counters; newer "
            "vLLM tells it with each answer: --per-request-spec-decode-metrics summary"
        )
    return tuple(notes)
