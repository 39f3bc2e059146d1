"""`generate` from OpenAI-compatible servers: every conversation is answered turn by turn, and every row accounted for.

The prompts file is read twice: once to check it and to know what is planned, and once as a stream while servers answer,
so that memory holds the conversations in progress and 32 bytes for each row. An endpoint with a free slot takes the
next conversation and keeps it while it answers; what fails goes to whoever is free next. Conversations are appended as
they are finished, in any order; a kill costs those in progress and nothing else.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.config import GenerateConfig
from eyas.errors import DataError, Stopped
from eyas.generate.answers import AnswerFiles, by_reason, check_overlap, paths_of, rejects_path
from eyas.generate.cost import Budget, prices_from
from eyas.generate.key import check_endpoint, read_key
from eyas.generate.loop import Loop, Planned
from eyas.generate.models import only_model
from eyas.generate.monitor import Monitor, heartbeat_path
from eyas.generate.prompts import Prompt, iter_prompts
from eyas.generate.receipt import RemoteReceipt, counted
from eyas.generate.request import check_extra, check_numbers, settings_of
from eyas.generate.rows import Known, RowTable
from eyas.log import Progress
from eyas.observe import heartbeat


def generate(
    config: GenerateConfig, progress: Progress, stop: threading.Event, *, retry_rejects: bool = False
) -> RemoteReceipt:
    """Servers answer every prompt of `generate.prompts`; answered conversations are appended to `generate.out`.

    Resumes by content: what either output file holds is not asked again; with `retry_rejects`, rejects are, by this run
    and those that go on from it. Raises ConfigError for bad settings, a refused
    key, or answers from providers that were not asked for; DataError for prompts that cannot be read and when not one
    has an answer; Stopped when `stop` is set, when `generate.max_cost` is reached or credits are used up;
    EngineUnavailable when all servers are gone for long.
    """
    start = time.monotonic()
    prompts_path, out = paths_of(config)
    key = read_key(config)
    urls = tuple(dict.fromkeys(check_endpoint(url) for url in config.endpoints))
    check_numbers(config)
    prices = prices_from(config.price_per_1m)
    check_extra(config.extra, key)
    model = config.model or asyncio.run(only_model(urls, key, config, progress, stop))
    settings = settings_of(config, model)
    rows = RowTable()
    plan = planned_rows(prompts_path, settings, rows, progress, stop)
    with AnswerFiles(out, settings, rows, retry_rejects=retry_rejects) as answers:
        tally = answers.tally
        check_overlap(tally, out, prompts_path)
        # A run that was killed has paid for answers that stand in no row.
        beat = heartbeat.read(heartbeat_path(out)) or {}
        budget = Budget(most=config.max_cost, prices=prices, spent=max(tally.usage.cost, float(beat.get("spent", 0.0))))
        before = (tally.num_answered, tally.usage.completion_tokens, tally.usage.requests)
        monitor = Monitor(out, tally, plan.num_rows, progress, model=model, endpoints=list(urls))
        monitor.spent = lambda: budget.spent + budget.uncertain
        with monitor:
            todo = iter_prompts(prompts_path, **settings, rows=rows, mark=Known.VISITED)
            loop = Loop(config, model, answers, monitor, budget, plan)
            try:
                asyncio.run(loop.answer_all(todo, urls, key, stop))
            finally:
                answers.sync()
                monitor.on_commit()
            if monitor.pending:
                raise DataError(f"{prompts_path}: rows are unaccounted for: {monitor.identity()}; has it changed?")
            if not tally.answered:
                raise DataError(
                    f"{prompts_path}: not one of {plan.num_rows} prompts has an answer{by_reason(tally.rejected)}; see "
                    f"{rejects_path(out)}"
                )
            monitor.state_name = "complete"
            monitor.events.add("complete", answered=tally.answered, rejected=dict(tally.rejected))
        return RemoteReceipt(
            **counted(out, plan.num_rows, tally, before[0]),
            usage=tally.usage,
            retokenized=tally.num_retokenized,
            answered_by=tally.answered_by,
            new_tokens=tally.usage.completion_tokens - before[1],
            new_requests=tally.usage.requests - before[2],
            retries=monitor.retries,
            faults=monitor.faults,
            endpoints={e.url: e.answered for e in loop.endpoints},
            wall_s=time.monotonic() - start,
        )


def planned_rows(
    path: Path, settings: Mapping[str, Any], rows: RowTable, progress: Progress, stop: threading.Event
) -> Planned:
    """The first reading: everything that is wrong with the file is found before a server is asked."""
    num_rows = answerable = turns = prompt_bytes = 0
    for prompt in iter_prompts(path, **settings, rows=rows, mark=Known.PLANNED):
        num_rows += 1
        if isinstance(prompt, Prompt):
            answerable += 1
            turns += prompt.num_turns
            prompt_bytes += sum(len(str(message.get("content"))) for message in prompt.messages)
        if num_rows % 1000 == 0:
            progress.show(f"generate: {num_rows:,} rows of {path} read")
            if stop.is_set():
                raise Stopped(f"{path}: stopped on request while it was read; nothing was asked")
    return Planned(num_rows, answerable, turns, prompt_bytes)
