"""What `prepare` says of its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.data.parts import Example
from eyas.data.report import Report
from eyas.data.table import TableMetadata
from eyas.log import human_bytes, human_time


@dataclass(frozen=True, slots=True)
class PrepareReceipt:
    """What `prepare` did, or found done."""

    path: Path
    table: TableMetadata
    """`num_input + num_extra = num_kept + sum(dropped)`."""
    table_digest: str
    table_bytes: int
    examples: Mapping[str, tuple[Example, ...]]
    """The first dropped rows of each reason; none where the table was there already."""
    report: Report
    unused_options: tuple[str, ...]
    """Names in `data.template_options` that the template does not have."""
    num_workers: int
    """0: the table was there already."""
    num_parts_reused: int
    """Parts that a former run had made."""
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("table", "report")}
        examples = {reason: [dataclasses.asdict(e) for e in named] for reason, named in self.examples.items()}
        return {
            **dataclasses.asdict(self.table),
            **values,
            "path": str(self.path),
            "examples": examples,
            "report": self.report.to_json(),
        }

    def lines(self) -> list[str]:
        """The receipt for people: law 1 first, then sizes, then what is worth knowing, then what was dropped."""
        table = self.table
        extra = f" + {table.num_extra:,} extra samples" if table.num_extra else ""
        lines = [
            f"{self.path}: {table.num_input:,} rows{extra} = {table.num_kept:,} kept"
            f" + {sum(table.dropped.values()):,} dropped",
            f"{table.num_tokens:,} tokens, {table.num_supervised:,} supervised "
            f"({table.num_supervised / table.num_tokens:.1%}), {human_bytes(self.table_bytes)}, {self._pace()}",
            f"masks: {', '.join(f'{name} {count:,}' for name, count in table.mask_methods.items())}",
            *(_unused_option(name) for name in self.unused_options),
            *_about_template(table),
            *_about_rules(table),
        ]
        for reason, count in sorted(table.dropped.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"dropped {count:,} {reason}")
            lines += [f"  {example.where}: {example.detail}" for example in self.examples.get(reason, ())]
        lines += self.report.lines()
        lines.append(f"table {self.table_digest}  tokenizer {table.tokenizer_digest}  template {table.template_digest}")
        return lines

    def _pace(self) -> str:
        if not self.num_workers:
            return "nothing to do: same lines, same settings"
        rate = self.table.num_tokens / self.wall_s if self.wall_s else 0.0
        pace = f"{human_time(self.wall_s)}, {rate:,.0f} tokens/s"
        if self.num_workers > 1:
            pace += f", {self.num_workers} processes"
        if self.num_parts_reused:
            pace += f", {self.num_parts_reused:,} parts of a former run"
        return pace


def _unused_option(name: str) -> str:
    return f"attention: data.template_options.{name}: the template never uses this name; is it spelled right?"


def _about_template(table: TableMetadata) -> list[str]:
    lines = []
    exact = not (table.num_turns_left_out or table.num_turns_changed or table.num_tools_not_shown)
    exact = exact and not table.num_tool_results_not_shown
    if table.num_rewritten:
        share = table.num_repeated_tokens / table.num_tokens
        lines.append(
            f"template: rewrites history in {table.num_rewritten:,} conversations: {table.num_extra:,} extra samples, "
            f"which repeat {table.num_repeated_tokens:,} context tokens ({share:.1%} of all)"
        )
    elif exact and any(method in table.mask_methods for method in ("prefix_render", "generation_tags")):
        lines.append(
            "template: EXACT, one rendering shows every turn of a conversation as it was asked for and written"
        )
    if table.num_turns_composed:
        lines.append(
            f"{table.num_turns_composed:,} turns are put together of their prompt and their own words: the template "
            "has no rendering with both"
        )
    lines += _not_shown_lines(table)
    if table.num_turns_without_thought:
        lines.append(
            f"{table.num_turns_without_thought:,} turns come without thoughts and get an empty one from the template, "
            "as if the target had written it; answered without thinking? set "
            "data.template_options.enable_thinking=false"
        )
    if table.num_straddling:
        lines.append(f"{table.num_straddling:,} ends of turns fall inside a token; that token is not supervised")
    if table.num_retokenized:
        lines.append(
            f"{table.num_retokenized:,} rows ({table.num_retokenized / table.num_input:.1%}) had their answers "
            "tokenised again: their server gave no token ids"
        )
    if table.date:
        lines.append(f"the template writes the date into the prompt: {table.date}, by data.date")
    return lines


def _not_shown_lines(table: TableMetadata) -> list[str]:
    context = [
        (table.num_turns_without_calls, "assistant turns are left out: the template does not show their tool calls"),
        (table.num_turns_empty, "assistant turns are left out: they are empty"),
        (table.num_turns_leading, "assistant turns are left out: they begin the conversation and answer nothing"),
        (table.num_turns_unweighted, "assistant turns are context only: their weight is 0"),
    ]
    others = table.num_turns_left_out - sum(count for count, _ in context)
    changed = [
        (table.num_thoughts_not_shown, "turns are supervised without their thoughts: the template does not show those"),
        (table.num_turns_stopped_earlier, "turns are supervised up to the first stop token: the row has text after it"),
    ]
    more_changed = table.num_turns_changed - sum(count for count, _ in changed)
    found = [
        *context,
        (others, "assistant turns are context only: no rendering shows them as they were asked for and written"),
        *changed,
        (more_changed, "turns are supervised as the template shows them, not in the row's very words (trimmed, say)"),
        (table.num_tools_not_shown, "conversations declare tools that the template does not show"),
        (table.num_tool_results_not_shown, "results of tools are not shown by the template"),
    ]
    return [f"{count:,} {text}" for count, text in found if count]


def _about_rules(table: TableMetadata) -> list[str]:
    lines = []
    if table.num_turns_skipped:
        lines.append(f"last_turn_only: {table.num_turns_skipped:,} earlier turns are context")
    if not table.reasoning:
        lines.append(f"reasoning off: {table.num_reasoning_tokens:,} tokens of thoughts are context")
    if table.ignore:
        lines.append(f"ignore: {table.num_ignored_tokens:,} tokens are context")
    if table.num_cut:
        lines.append(
            f"too_long={table.too_long}: {table.num_cut:,} samples shortened to {table.max_tokens:,} tokens, "
            f"{table.num_cut_tokens:,} tokens lost"
        )
    return lines
