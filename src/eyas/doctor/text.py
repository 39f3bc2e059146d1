"""Template and tokeniser: are the samples what the target's files would make of their conversations today?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from eyas.config import DataConfig, TargetConfig
from eyas.data.files import find_files, lines_of, open_rows
from eyas.data.parts import settings_of
from eyas.data.render import TEMPLATE_ERRORS, Renderer, Tokenizer, with_objects
from eyas.data.rules import Rules, patterns
from eyas.data.sources import Messages, Row, rows_of
from eyas.data.table import TableMetadata
from eyas.data.template import Masked as Rendered
from eyas.data.template import Masker
from eyas.data.tokenizer import load_tokenizer, template_digest, tokenizer_digest
from eyas.doctor.findings import Finding, broken, ok, unknown
from eyas.errors import ConfigError, DataError
from eyas.records import Span, TokenIds, sample_id_of

NUM_FILES = 8
NUM_ROWS = 64
"""Conversations of each of the first files of `data.sources` that are rendered again."""
PROBES = ("a", "b c")
DOUBLED = 0.01
"""Share of the samples that may begin with the same special token twice."""
LOST = 0.5
"""Share of the rendered samples that the table may lack: merged, dropped or limited ones."""
RESPLIT = 0.02
"""Share of supervised tokens at which the target would write the same text in other tokens."""


@dataclass(frozen=True, slots=True)
class Text:
    """The target's tokeniser and template, loaded; what is None is not there."""

    tokenizer: Tokenizer
    tokenizer_digest: str
    template_digest: str
    opening: tuple[int, ...] | None
    """Tokens with which the template opens an answer."""

    @classmethod
    def load(cls, target: TargetConfig, data: DataConfig) -> Text | str:
        """Why there is none, where there is none."""
        assert target.path is not None
        try:
            tokenizer = load_tokenizer(target)
        except (DataError, ConfigError) as error:
            return str(error)
        return cls(
            tokenizer,
            tokenizer_digest(target.path),
            template_digest(tokenizer),
            opening_of(tokenizer, Renderer(tokenizer, data.template_options, data.date)),
        )


def opening_of(tokenizer: Tokenizer, renderer: Renderer) -> tuple[int, ...] | None:
    """What the template appends to ask for an answer, as token ids; None where it appends nothing."""
    if not tokenizer.chat_template:
        return None
    found = set()
    for text in PROBES:
        messages = [{"role": "user", "content": text}]
        try:
            without = renderer.text(messages, ())
            asking = renderer.text(messages, (), add_generation_prompt=True)
        except TEMPLATE_ERRORS:
            return None
        if not asking.startswith(without) or asking == without:
            return None
        found.add(tuple(tokenizer(asking[len(without) :], add_special_tokens=False, verbose=False)["input_ids"]))
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Rerendered:
    """What the first conversations of the sources become today."""

    masks: dict[str, tuple[Span, ...]]
    """By sample id."""
    prompts: int
    """Rows that bring their own token ids and their messages, so that both can be compared."""
    prompts_differ: int
    """Of them, rows whose first prompt is rendered to other token ids today."""
    example: str
    asked: tuple[tuple[list[dict[str, Any]], list[int]], ...]
    """Messages that ask for a first answer, and the token ids that were asked with in training."""


def rerender(data: DataConfig, target: TargetConfig, text: Text) -> Rerendered | str:
    """Why it cannot be done, where it cannot: no sources, or sources that cannot be read."""
    if not data.sources:
        return "data.sources is not set"
    assert target.path is not None
    masks: dict[str, tuple[Span, ...]] = {}
    compared = differ = 0
    example = ""
    try:
        files = [path for path in find_files(data.sources, field="data.sources") if path.is_file()]
        masker = Masker(
            text.tokenizer,
            target.path,
            rules=Rules(data.last_turn_only, data.reasoning, patterns(data.ignore)),
            options=data.template_options,
            date=data.date,
        )
        renderer = Renderer(text.tokenizer, data.template_options, data.date)
        asked: list[tuple[list[dict[str, Any]], list[int]]] = []
        for path in files[:NUM_FILES]:
            rows = islice(open_rows([path], field="data.sources"), NUM_ROWS)
            raw = list(lines_of(rows))
            usable = [row for row in rows_of(raw) if isinstance(row, Row)]
            for masked in masker.mask(usable):
                for sample in masked.samples:
                    if isinstance(sample, Rendered):
                        masks[sample_id_of(sample.token_ids)] = sample.loss_spans
            for row in usable:
                messages = _first_question(row)
                now = _render(text.tokenizer, renderer, messages) if messages else None
                if now is not None:
                    asked.append((messages, now))
            for where, given, messages in _given_and_asked(raw):
                now = _render(text.tokenizer, renderer, messages)
                if now is None:
                    continue
                asked.append((messages, given))
                compared += 1
                if now != given:
                    differ += 1
                    example = example or f"{where}: {len(given)} prompt tokens then, {len(now)} now"
    except (DataError, ConfigError) as error:
        return str(error)
    return Rerendered(masks, compared, differ, example, tuple(asked))


def _given_and_asked(raw: Sequence[tuple[Any, bytes]]) -> Iterator[tuple[Any, list[int], list[dict[str, Any]]]]:
    """Rows that have token ids, a mask and messages: where, the first prompt as ids, and the messages that asked."""
    for where, line in raw:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if not isinstance(value, dict):
            continue
        ids, mask = value.get("input_ids"), value.get("loss_mask")
        messages = value.get("messages")
        if not (isinstance(ids, list) and isinstance(mask, list) and isinstance(messages, list) and 1 in mask):
            continue
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
        if "assistant" not in roles or roles[0] == "assistant" or value.get("tools"):
            continue
        yield where, ids[: mask.index(1)], messages[: roles.index("assistant")]


def _first_question(row: Row) -> list[dict[str, Any]]:
    if not isinstance(row.content, Messages) or row.content.tools:
        return []
    roles = [message["role"] for message in row.content.messages]
    if "assistant" not in roles or roles[0] == "assistant":
        return []
    return list(row.content.messages[: roles.index("assistant")])


def _render(tokenizer: Tokenizer, renderer: Renderer, messages: Sequence[dict[str, Any]]) -> list[int] | None:
    try:
        shown = renderer.text(with_objects(tuple(messages)), (), add_generation_prompt=True)
    except TEMPLATE_ERRORS:
        return None
    ids: list[int] = tokenizer(shown, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def doubled_share(samples: Sequence[TokenIds], special: frozenset[int]) -> float:
    """Share of the samples that begin with the same special token twice."""
    twice = sum(bool(len(ids) > 1 and ids[0] == ids[1] and int(ids[0]) in special) for ids in samples)
    return twice / max(1, len(samples))


def resplit_share(tokenizer: Tokenizer, samples: Sequence[tuple[TokenIds, Sequence[Span], Any]]) -> tuple[float, int]:
    """Share of the supervised tokens at which the target would write the same text in longer tokens; and their number.

    `samples`: token ids, spans, and the target's likeliest tokens `[T]` behind each token.
    """
    checked = other = 0
    for ids, spans, likeliest in samples:
        for start, end in spans:
            for t in range(max(start, 1), end):
                checked += 1
                guess = int(likeliest[t - 1])
                if guess == int(ids[t]):
                    continue
                # Only a longer token tells: where the guess is shorter, the text may just go on otherwise.
                piece, written = tokenizer.decode([guess]), tokenizer.decode([int(ids[t])])
                rest = tokenizer.decode(ids[t : min(end, t + 8)].tolist())
                longer = len(piece) > len(written) and "\ufffd" not in piece
                other += int(bool(written.strip()) and longer and rest.startswith(piece))
    return other / max(1, checked), checked


def judge_template(
    metadata: TableMetadata,
    text: Text | str,
    target: TargetConfig,
    data: DataConfig,
    *,
    samples: Sequence[TokenIds],
    again: Rerendered | str,
    in_table: int,
    resplit: tuple[float, int] | None,
) -> Finding:
    """Digests first, then the conversations rendered anew, then what the token ids themselves show.

    `in_table`: how many of the samples that were rendered anew the table has.
    """
    numbers: dict[str, Any] = {"retokenized": metadata.num_retokenized, "rows": metadata.num_kept}
    again_do = "run 'eyas prepare', 'eyas capture' and 'eyas train' anew with the template that is served"
    if isinstance(text, str):
        return unknown("template", text, **numbers)
    special = frozenset(int(i) for i in text.tokenizer.all_special_ids)
    twice = doubled_share(samples, special)
    numbers |= {"doubled": twice}
    parts = [
        (what, then, now)
        for what, then, now in (
            ("chat template", metadata.template_digest, text.template_digest),
            ("tokeniser", metadata.tokenizer_digest, text.tokenizer_digest),
        )
        if then
    ]
    numbers["digests"] = {what: [then, now] for what, then, now in parts}
    changed = [f"{what} {then[:12]}… then, {now[:12] or 'none'}… now" for what, then, now in parts if then != now]
    if changed:
        return broken(
            "template", f"the samples were made with another {' and another '.join(changed)}", again_do, **numbers
        )
    if twice > DOUBLED:
        return broken(
            "template",
            f"{twice:.0%} of the samples begin with the same special token twice",
            "tokenise without adding special tokens: the template writes its own",
            **numbers,
        )
    said = [f"{', '.join(what for what, _, _ in parts)} unchanged"] if parts else []
    if isinstance(again, Rerendered):
        numbers |= {
            "rendered": len(again.masks),
            "in_table": in_table,
            "prompts": again.prompts,
            "prompts_differ": again.prompts_differ,
        }
        if again.prompts_differ > DOUBLED * again.prompts:
            return broken(
                "template",
                f"{again.prompts_differ} of {again.prompts} prompts are rendered to other token ids today than those "
                f"that were answered ({again.example})",
                again_do,
                **numbers,
            )
        if again.masks and in_table < LOST * len(again.masks):
            settings = settings_of(data, target) == metadata.settings_digest
            hint = (
                "" if settings or not metadata.settings_digest else " (settings or target's text files changed since)"
            )
            return broken(
                "template",
                f"only {in_table} of {len(again.masks)} samples that the sources give today are in the table{hint}",
                again_do,
                **numbers,
            )
        if again.prompts:
            said.append(f"{again.prompts} prompts rendered again are the same token ids")
        if again.masks:
            said.append(f"{in_table} of {len(again.masks)} samples rendered again are in the table")
    note = ""
    if resplit is not None:
        numbers |= {"resplit": resplit[0], "resplit_of": resplit[1]}
        if resplit[0] > RESPLIT:
            return broken(
                "template",
                f"at {resplit[0]:.1%} of {resplit[1]:,} supervised tokens the target would write the same text in "
                "other tokens: the answers were tokenised again",
                "generate with 'eyas generate' from servers that return token ids, then prepare, capture and train "
                "anew",
                **numbers,
            )
        said.append(f"same text in other tokens at {resplit[0]:.2%} of {resplit[1]:,} supervised tokens")
    if metadata.num_retokenized:
        note = f"{metadata.num_retokenized:,} of {metadata.num_kept:,} rows were tokenised again from text"
    if not parts and not isinstance(again, Rerendered):
        return unknown("template", f"the sample table names no template or tokeniser, and {again}", **numbers)
    return ok("template", "; ".join(said), note=note, **numbers)
