"""`generate`: the target answers every prompt in this process, and what it wrote is kept token by token.

Answers come in batches of similar length. Conversations of several turns go first, since each of their turns has to
wait for the one before. Every conversation is appended to the output when its last turn is there; a kill costs the
conversations in progress and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.config import EngineConfig, GenerateConfig, TargetConfig
from eyas.errors import ConfigError, DataError
from eyas.generate.answers import AnswerFiles, by_reason, check_overlap, paths_of, reject_row
from eyas.generate.dialogue import Dialogue, Limits
from eyas.generate.prompts import Prompt, PromptReject, Prompts, read_prompts, sampling_of
from eyas.generate.receipt import GenerateReceipt, counted
from eyas.generate.rows import RowTable
from eyas.log import Progress, human_time
from eyas.records import digest_bytes
from eyas.target.files import TargetFiles, check_remote_code, open_target, target_digest

if TYPE_CHECKING:
    from eyas.generate.answerer import Answerer

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""What decides how a conversation becomes token ids and where an answer ends."""

PROMPT_TOKENS_PER_ROW = 1024
"""`generate.batch_size` is meant for prompts up to this length; longer ones get smaller batches."""
PROMPT_TOKENS_PER_STEP = 32
"""How many prompt tokens are read in the time of one step of a small batch, at least: more on a GPU."""
PREFILL_COST = 0.3
"""What a prompt token costs in time, against a written one: only the ETA depends on it."""


def generate(
    generate: GenerateConfig,
    target: TargetConfig,
    engine: EngineConfig,
    progress: Progress,
    *,
    retry_rejects: bool = False,
) -> GenerateReceipt:
    """The target answers every prompt of `generate.prompts`; answered conversations are appended to `generate.out`.

    Resumes by content: what either output file holds is not done again, and a complete run loads no model; with
    `retry_rejects`, rejects are tried again, by this run and those that go on from it. Raises
    ConfigError or DataError for bad settings, for prompts that cannot be read, for a target that does not load, and for
    an output made with other settings; DataError when not one prompt has an answer; DataSetLocked when another process
    writes the same output.
    """
    start = time.monotonic()
    prompts_path, out = paths_of(generate)
    if target.path is None:
        raise ConfigError("target.path is not set: which model answers?")
    progress.show(f"generate: reading {prompts_path}", force=True)
    files = open_target(target.path)
    check_remote_code(files, trust_remote_code=target.trust_remote_code)
    sampling, identity = sampling_of(generate), _identity(files)
    rows = RowTable()
    prompts = read_prompts(prompts_path, sampling=sampling, target=identity, rows=rows)
    settings = {"sampling": sampling, "target": identity}
    with AnswerFiles(out, settings, rows, retry_rejects=retry_rejects) as answers:
        check_overlap(answers.tally, out, prompts_path)
        done_before = answers.tally.num_answered
        tokens_before = answers.tally.generated_tokens
        for reject in prompts.rejects:
            if not answers.tally.is_done(reject.row_id):
                answers.append_reject(reject_row(reject))
        answers.sync()
        waiting = [prompt for prompt in prompts.answerable if not answers.tally.is_done(prompt.row_id)]
        device = dtype = ""
        if waiting:
            progress.show(f"generate: {len(waiting)} prompts to answer, loading target {target.path}", force=True)
            from eyas.generate.answerer import Answerer  # imports torch: seconds, so after the first line

            answerer = Answerer(files, target, engine)
            device, dtype = str(answerer.device), answerer.dtype
            run = _Run(generate, answerer, answers, progress, prompts.num_rows, target_name=files.path.name)
            run.answer_all(waiting)
        tally = answers.tally
        receipt = GenerateReceipt(
            **counted(out, prompts.num_rows, tally, done_before),
            generated_tokens=tally.generated_tokens,
            new_tokens=tally.generated_tokens - tokens_before,
            wall_s=time.monotonic() - start,
            device=device,
            dtype=dtype,
        )
    _check(receipt, prompts, prompts_path)
    return receipt


def next_batch(
    waiting: Sequence[Dialogue], *, batch_size: int, max_new_tokens: int
) -> tuple[list[Dialogue], list[Dialogue]]:
    """The next dialogues to answer together, and the others.

    Who has most turns left comes first, since its turns have to wait for one another; then the shortest. A row joins
    unless padding would then cost more than a batch of its own.
    """
    batch: list[Dialogue] = []
    others: list[Dialogue] = []
    longest = num_tokens = 0
    for dialogue in sorted(waiting, key=lambda d: (-d.num_turns_left, len(d.token_ids))):
        width = max(longest, len(dialogue.token_ids))
        padded = width * (len(batch) + 1)
        padding = padded - num_tokens - len(dialogue.token_ids)
        fits = padded <= batch_size * PROMPT_TOKENS_PER_ROW and padding <= max_new_tokens * PROMPT_TOKENS_PER_STEP
        if len(batch) < batch_size and (fits or not batch):
            batch.append(dialogue)
            longest = width
            num_tokens += len(dialogue.token_ids)
        else:
            others.append(dialogue)
    return batch, others


class _Run:
    """The loop over batches, and what it shows."""

    def __init__(
        self,
        config: GenerateConfig,
        answerer: Answerer,
        answers: AnswerFiles,
        progress: Progress,
        num_planned: int,
        *,
        target_name: str,
    ) -> None:
        self._config = config
        self._answerer = answerer
        self._answers = answers
        self._progress = progress
        self._num_planned = num_planned
        self._target_name = target_name
        self._limits = Limits(config.max_new_tokens, answerer.max_tokens)
        self._start = time.monotonic()
        self._written = 0  # tokens, of finished batches
        self._cost_done = 0.0  # in written tokens' worth of time, of finished batches
        self._cost_left = 0.0  # of everything else, the present batch included

    def answer_all(self, prompts: Sequence[Prompt]) -> None:
        waiting = self._open(prompts)
        self._start = time.monotonic()
        number = 0
        while waiting:
            number += 1
            self._cost_left = sum(map(self._cost, waiting))
            batch, waiting = next_batch(
                waiting, batch_size=self._config.batch_size, max_new_tokens=self._config.max_new_tokens
            )
            self._answer_batch(batch, number)
            waiting += self._file(batch)

    def _open(self, prompts: Sequence[Prompt]) -> list[Dialogue]:
        """Render and encode every prompt; those that cannot be put to the target are rejected here."""
        dialogues = []
        for i, prompt in enumerate(prompts):
            dialogues.append(Dialogue(prompt, self._answerer.chat, self._limits))
            self._progress.show(f"generate: {i + 1}/{len(prompts)} prompts encoded")
        return self._file(dialogues)

    def _answer_batch(self, batch: Sequence[Dialogue], number: int) -> None:
        width = max(len(dialogue.token_ids) for dialogue in batch)
        what = f"batch {number}: {len(batch)} answers"
        prefill_cost = sum(PREFILL_COST * len(dialogue.token_ids) for dialogue in batch)
        cost = sum(map(self._cost_of_turn, batch))

        def on_step(written: int, steps: int) -> None:
            if self._progress.due():
                self._show(f"{what}, token {steps}/{self._config.max_new_tokens}", written, prefill_cost + written)

        self._show(f"{what}, reading prompts of up to {width} tokens", 0, 0.0, force=number == 1)
        written = self._answerer.answer(
            [dialogue.token_ids for dialogue in batch],
            max_new_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            seeds=[f"{d.prompt.row_id}.{len(d.finish_reasons)}" for d in batch],
            on_step=on_step,
        )
        for dialogue, answer in zip(batch, written, strict=True):
            dialogue.answer(answer)
        self._written += sum(map(len, written))
        self._cost_done += cost

    def _file(self, dialogues: Sequence[Dialogue]) -> list[Dialogue]:
        """Append the conversations that are finished, durably; the others are returned."""
        for dialogue in dialogues:
            if dialogue.done and dialogue.finish_reasons:
                self._answers.append_answer(self._answer_row(dialogue))
            elif dialogue.done:
                assert dialogue.ended is not None
                prompt = dialogue.prompt
                reject = PromptReject(
                    prompt.row_id, prompt.prompt_id, prompt.line, str(dialogue.ended), dialogue.detail
                )
                self._answers.append_reject(reject_row(reject))
        self._answers.sync()
        return [dialogue for dialogue in dialogues if not dialogue.done]

    def _answer_row(self, dialogue: Dialogue) -> dict[str, Any]:
        prompt = dialogue.prompt
        row: dict[str, Any] = {
            "row_id": prompt.row_id,
            "id": prompt.prompt_id,
            "source": prompt.source,
            "tags": list(prompt.tags),
            "messages": dialogue.messages,
            "finish_reason": dialogue.finish_reasons,
            "input_ids": dialogue.token_ids,
            "loss_mask": dialogue.loss_mask,
            "target_name": self._target_name,
            "dtype": self._answerer.dtype,
        }
        if prompt.tools:
            row["tools"] = list(prompt.tools)
        if dialogue.ended is not None:
            row["ended_early"] = str(dialogue.ended)
            row["ended_detail"] = dialogue.detail
        return row

    def _show(self, what: str, written: int, cost: float, *, force: bool = False) -> None:
        elapsed = time.monotonic() - self._start
        done = self._answers.tally.num_done
        line = f"generate: {done}/{self._num_planned} conversations, {what}"
        if written or self._written:
            line += f", {(self._written + written) / max(elapsed, 1e-9):.0f} tokens/s"
        cost_done = self._cost_done + cost
        if cost_done > 0:
            line += f", {human_time(elapsed / cost_done * (self._cost_left - cost))} left"
        self._progress.show(line, force=force)

    def _cost_of_turn(self, dialogue: Dialogue) -> float:
        return self._config.max_new_tokens + PREFILL_COST * len(dialogue.token_ids)

    def _cost(self, dialogue: Dialogue) -> float:
        return dialogue.num_turns_left * self._cost_of_turn(dialogue)


def _identity(files: TargetFiles) -> dict[str, str]:
    """Which target writes: its weights, its structure, and what turns messages into token ids."""
    parts: list[bytes] = []
    for name in TOKENIZER_FILES:
        file = files.path / name
        if file.is_file():
            data = file.read_bytes()
            parts += [name.encode(), len(data).to_bytes(8, "little"), data]
    return {
        "digest": target_digest(files.path),
        "config_digest": files.config_digest,
        "tokenizer_digest": digest_bytes(*parts),
    }


def _check(receipt: GenerateReceipt, prompts: Prompts, prompts_path: Path) -> None:
    """Law 1: every row of the prompts file is answered or rejected, and none is both."""
    if receipt.planned != receipt.answered + sum(receipt.rejected.values()):
        raise DataError("; ".join([f"{prompts_path}: rows are unaccounted for", *receipt.lines()[:1]]))
    if not receipt.answered:
        first = prompts.rejects[0] if prompts.rejects else None
        example = f"; line {first.line}: {first.reason}, {first.detail}" if first else ""
        raise DataError(
            f"{prompts_path}: not one of {receipt.planned} prompts has an answer"
            f"{by_reason(receipt.rejected)}{example}; see {receipt.rejects}"
        )
