"""Loss masks from the target's own chat template: which tokens of a conversation did the target write?

A conversation is rendered and tokenised as serving engines do it: without the special tokens that the tokeniser would
add, because the template writes its own. Messages after the last assistant turn are left away first, tokens after the
last supervised one are cut.

**Which renderings.** The rendering of the messages up to an assistant turn shows an earlier turn *exactly* when it
begins with the prompt that asked for that turn (the messages before it, generation prompt included) and with the
rendering up to that turn. Where the template is prefix-stable, the rendering up to the last turn shows all turns
exactly: one sample with several supervised spans. Templates that rewrite history (thoughts shown in the last turn only,
another end of turn, say) do not; then the turns that the longest rendering does not show exactly get further
renderings, each ending with the last turn that is still missing. So each turn is supervised once, in the longest
rendering that shows it exactly. A turn whose own rendering does not begin with its prompt is *composed*: where the
template rewrites what stands before the turn, of the prompt and the turn as it is rendered; where the prompt opens a
thought that the template then leaves out, of the prompt, the thought and words of the row, and what the template puts
behind an answer. Where the row does not have the thought, the turn is context only, and counted. Where the template
changes a turn's words (trims them, say), what it shows is supervised, since servers show it so, and that is counted.

**Which tokens.** With `{% generation %}` the template says which tokens are the assistant's. Without, turn `i` begins
behind its prompt. The target's own words end with the token by which it stops. Where that is, a probe tells: what the
template appends to an answer (`<|im_end|>` and a line feed, say) is known text, and in it the first stop token of the
target (`eos_token_id` of tokeniser, config and generation config), else the first special token, is still the target's;
what follows is the template's. When the template appends no such token the turn ends with a stop token that begins the
next message, or else with the last token of its content. When an answer does not end as the probe did (a tool call,
say), the last stop token of the turn is its end; without one, the turn is context only. A target writes nothing after
it has stopped: where a stop token stands earlier in a turn, supervision ends there. `rules.Rules` take further tokens
away.

**What is not shown.** A turn with tool calls of which the template shows no name or no argument is context only, and so
is an empty answer, one that begins the conversation, and one whose message has `weight` 0. A thought that is not shown
is counted; its answer is supervised. Tools that make no difference to the prompt, and results of tools that do not
stand in the rendering, are counted.

**Tokens across a boundary.** A token with characters from both sides of a turn's start belongs to the prompt, since
the target never wrote it; one across the end of the content belongs to the template. Each such boundary is counted, as
is one before which the prompt alone would be tokenised otherwise.

A tokeniser without offsets (no fast backend) takes the same way, with the tokens of each prefix compared one by one;
a turn whose boundary falls inside a token is context only there. Letters: `T` tokens.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.data.beginnings import MANY_TURNS, NUM_TRIED_TURNS, PROBE, Renders
from eyas.data.render import DEFAULT_DATE, TEMPLATE_ERRORS, Renderer, Tokenizer, template_text, with_objects
from eyas.data.rules import Rules, opens_thought
from eyas.data.shown import (
    NUM_CALLS_NOT_SHOWN,
    NUM_LEADING,
    NUM_RESULTS_NOT_SHOWN,
    NUM_STOPPED_EARLIER,
    NUM_TOOLS_NOT_SHOWN,
    NUM_UNWEIGHTED,
    calls_of,
    is_empty,
    leave_out,
    look_at,
    num_results_not_shown,
    thought_of,
    why_unseen,
)
from eyas.data.sources import GivenTokens, GivenTurns, Messages, PlainText, Reason, Row, is_unweighted
from eyas.data.spans import Cut, FastTokens, SlowTokens, Tokens, View, decoded_view, decoder_of
from eyas.data.tokenizer import read_json
from eyas.errors import DataError
from eyas.records import Span, TokenIds, spans_of

MAX_CACHED_TAILS = 4096
MAX_TAIL_CHARS = 256


class MaskMethod(StrEnum):
    """How a sample's loss mask came about."""

    GIVEN = "given"
    """With the row."""
    TEXT = "text"
    """Plain text: every token but a leading BOS."""
    GENERATION_TAGS = "generation_tags"
    PREFIX_RENDER = "prefix_render"
    COMPOSED = "composed"
    """Prompt and the turn's own words, because no rendering has both."""


@dataclass(frozen=True, slots=True)
class Masked:
    """Token ids `[T]` with their supervised spans; the last token is supervised."""

    token_ids: TokenIds
    loss_spans: tuple[Span, ...]
    method: MaskMethod
    turn_ends: tuple[int, ...] = ()
    """Where the supervised turns end, ascending."""
    num_straddling: int = 0
    """Boundaries of turns that are none of the tokenisation."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a row cannot become a sample."""

    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """What became of a row: a sample, and further ones where the template rewrites history, the longest first."""

    samples: tuple[Masked | Refused, ...]
    """At least one."""
    counts: Counter[str] = field(default_factory=Counter)
    """What is to be told about it, by the names of `table.TableMetadata`."""


class Masker:
    """Turns rows into token ids and loss masks, for one target."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        directory: Path,
        *,
        rules: Rules = Rules(),  # noqa: B008 - frozen
        options: Mapping[str, Any] | None = None,
        date: datetime.date = DEFAULT_DATE,
        drop_above: int = 0,
    ) -> None:
        """`directory` is the target's; its `config.json` and `generation_config.json` are read if they are there.

        `drop_above`: samples with more tokens will be dropped, so that conversations of many turns need not be
        rendered turn by turn when they are longer; 0 for none.
        """
        self._drop_above = drop_above
        config = read_json(directory / "config.json")
        generation = read_json(directory / "generation_config.json")
        self.directory = directory
        self._tokenizer = tokenizer
        self._rules = rules
        self._renderer = Renderer(tokenizer, options, date)
        self._has_template = bool(template_text(tokenizer))
        self._vocab_size = _vocab_size(config) or len(tokenizer)
        self._stop_ids = _eos_ids(tokenizer.eos_token_id, generation.get("eos_token_id"), config.get("eos_token_id"))
        added = tokenizer.added_tokens_decoder
        self._added_ids = np.array(sorted({*added, *tokenizer.all_special_ids}), dtype=np.int32)
        special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        self.special_ids = special - {tokenizer.unk_token_id}
        self._suffix = self._probe_suffix() if self._has_template else None
        self._tails: dict[str, list[int]] = {}
        self.decode = decoder_of(tokenizer)

    @property
    def uses_date(self) -> bool:
        """Whether the template asks for today's date."""
        return self._renderer.uses_date

    def mask(self, rows: Sequence[Row]) -> list[MaskedRow]:
        """One result per row, in order. The rows are tokenised together: hand over some megabytes of text at most.

        DataError when a row is a conversation and the target has no chat template.
        """
        results: dict[int, MaskedRow] = {}
        plans: dict[int, _Plan] = {}
        for number, row in enumerate(rows):
            counts: Counter[str] = Counter()
            match row.content:
                case GivenTokens():
                    results[number] = MaskedRow((self._given(row.content, counts),), counts)
                case GivenTurns():
                    results[number] = MaskedRow(tuple(self._given_turns(row.content, counts)), counts)
                case PlainText():
                    results[number] = MaskedRow((self._text(row.content, counts),), counts)
                case Messages():
                    if not self._has_template:
                        raise DataError(
                            f"{row.where}: {self.directory} has no chat template, so conversations cannot become "
                            "samples; put the target's chat_template.jinja there, or use rows with 'text' or with "
                            "'input_ids' and 'loss_mask'"
                        )
                    plan = self._plan(row.content)
                    if isinstance(plan, Refused):
                        results[number] = MaskedRow((plan,))
                    else:
                        plans[number] = plan
        tokens = self._tokens([shown.text for plan in plans.values() for shown in plan.renderings])
        for number, plan in plans.items():
            samples = tuple(self._by_turns(shown, next(tokens), plan.counts) for shown in plan.renderings)
            results[number] = MaskedRow(samples, plan.counts)
        return [results[number] for number in range(len(rows))]

    def _given(self, content: GivenTokens, counts: Counter[str]) -> Masked | Refused:
        largest = int(content.token_ids.max())
        if largest >= self._vocab_size:
            return Refused(Reason.TOKEN_OUT_OF_VOCABULARY, f"token id {largest}, vocabulary of {self._vocab_size}")
        mask = content.loss_mask.copy()
        turns = spans_of(mask)
        if self._rules.last_turn_only and turns:
            counts["num_turns_skipped"] += len(turns) - 1
            mask[: turns[-1][0]] = False
            turns = turns[-1:]
        view = decoded_view(content.token_ids, self.decode) if self._rules.need_text else None
        return self._finish(content.token_ids, mask, turns, MaskMethod.GIVEN, view, counts)

    def _given_turns(self, content: GivenTurns, counts: Counter[str]) -> Iterator[Masked | Refused]:
        """As for messages: the longest prompt with its answer, and further ones for the turns that are not in it."""
        missing = list(content.turns)
        if self._rules.last_turn_only:
            counts["num_turns_skipped"] += len(missing) - 1
            del missing[:-1]
        largest = max(int(ids.max()) for turn in missing for ids in turn)
        if largest >= self._vocab_size:
            yield Refused(Reason.TOKEN_OUT_OF_VOCABULARY, f"token id {largest}, vocabulary of {self._vocab_size}")
            return
        num_turns = len(missing)
        while missing:
            whole = np.concatenate(missing[-1])
            shown = [turn for turn in missing if _begins_with(whole, turn)]
            missing = [turn for turn in missing if not _begins_with(whole, turn)]
            turns = [(len(prompt), len(prompt) + len(answer)) for prompt, answer in shown]
            counts["num_rewritten"] = int(len(turns) < num_turns)
            mask = np.zeros(len(whole), dtype=np.bool_)
            for start, end in turns:
                mask[start:end] = True
            view = decoded_view(whole, self.decode) if self._rules.need_text else None
            yield self._finish(whole, mask, turns, MaskMethod.GIVEN, view, counts)

    def _text(self, content: PlainText, counts: Counter[str]) -> Masked | Refused:
        bos, bos_id = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        has_bos = bool(bos) and content.text.startswith(bos)
        ids = np.array(self._encode(content.text, add_special_tokens=not has_bos), dtype=np.int32)
        mask = np.ones(len(ids), dtype=np.bool_)
        if len(ids) and bos_id is not None and ids[0] == bos_id:
            mask[0] = False
        view = decoded_view(ids, self.decode) if self._rules.need_text else None
        return self._checked(ids, mask, spans_of(mask), MaskMethod.TEXT, view, counts)

    def _plan(self, content: Messages) -> _Plan | Refused:
        messages, turns = _turns(content)
        if not turns:
            return Refused(Reason.NO_ASSISTANT_TURN, "the only assistant turn answers nothing")
        if all(is_empty(messages[i]) for i in turns):
            return Refused(Reason.NO_ASSISTANT_TURN, "every answer is empty")
        objects = with_objects(messages)
        try:
            return self._plan_turns(Renders(self._renderer, objects, content.tools), turns)
        except TEMPLATE_ERRORS as error:
            refusal = Refused(Reason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}")
        if objects != tuple(messages):
            # Some templates write the arguments of calls as they are and need text.
            try:
                return self._plan_turns(Renders(self._renderer, messages, content.tools), turns)
            except TEMPLATE_ERRORS:
                pass
        return refusal

    def _plan_turns(self, renders: Renders, turns: list[int]) -> _Plan | Refused:
        """The renderings that together show each turn once. Whatever the template says to the whole is raised."""
        weighted = [i for i in turns if not is_unweighted(renders.messages[i])]
        if not weighted:
            return Refused(Reason.NO_ASSISTANT_TURN, "every assistant message has weight 0")
        wanted = weighted[-1:] if self._rules.last_turn_only else weighted
        counts: Counter[str] = Counter(num_turns_skipped=len(weighted) - len(wanted))
        if not self._rules.last_turn_only:
            if renders.messages[0]["role"] == "assistant":
                leave_out(counts, NUM_LEADING)
            leave_out(counts, NUM_UNWEIGHTED, len(turns) - len(weighted))
        renders.up_to(turns[-1])
        counts[NUM_TOOLS_NOT_SHOWN] = int(renders.hides_tools(wanted[0]))
        if refused := self._surely_too_long(renders, wanted):
            return refused
        tags = self._renderer.has_tags(renders.tools)
        renderings: list[_Rendering] = []
        missing = list(wanted)
        left_out: list[int] = []
        unseen: Counter[str] = Counter()
        while missing:
            last = missing[-1]
            shown = renders.shown(missing, with_begins=tags)
            if shown:
                whole = renders.up_to(last)
                missing = [i for i in missing if i not in shown]
                seen = []
                for i, place in shown.items():
                    span = place.start, place.end
                    why = look_at(renders.messages[i], whole, span, counts)
                    if why:
                        unseen[why] += 1
                    else:
                        seen.append((place.begin, span))
                if not seen:
                    continue
                if not renderings:
                    counts[NUM_RESULTS_NOT_SHOWN] = num_results_not_shown(renders.messages[:last], whole)
                spans = [span for _, span in seen]
                rendering = _Rendering(whole, spans, MaskMethod.PREFIX_RENDER)
                if tags:
                    marked = self._renderer.tagged(renders.messages[: last + 1], renders.tools)
                    begins = [begin for begin, _ in seen]
                    rendering = _Rendering(whole, spans, MaskMethod.GENERATION_TAGS, marked, begins)
                renderings.append(rendering)
                continue
            missing.pop()
            composed = self._compose(renders, last)
            if composed is None:
                left_out.append(last)
            elif why := why_unseen(renders.messages[last], composed.text, composed.turns[0], counts):
                unseen[why] += 1
            else:
                counts["num_turns_composed"] += 1
                if not renderings:
                    counts[NUM_RESULTS_NOT_SHOWN] = num_results_not_shown(renders.messages[:last], composed.text)
                renderings.append(composed)
        for why, num_turns in unseen.items():
            leave_out(counts, why, num_turns)
        if not renderings and unseen[NUM_CALLS_NOT_SHOWN]:
            return Refused(Reason.NOT_SHOWN, "the template does not show the tool calls of its assistant turns")
        if not renderings and not left_out:
            return Refused(Reason.NO_ASSISTANT_TURN, "its answers are empty as the template shows them")
        if not renderings:
            numbers = ", ".join(str(i + 1) for i in reversed(left_out[-20:]))
            return Refused(
                Reason.TEMPLATE_REWRITES_HISTORY,
                f"assistant message {numbers}: no rendering shows the prompt and then the answer",
            )
        counts["num_turns_left_out"] += len(left_out)
        counts["num_rewritten"] += len(renderings) + len(left_out) > 1
        return _Plan(renderings, counts)

    def _surely_too_long(self, renders: Renders, turns: list[int]) -> Refused | None:
        """Refuse a long conversation by its whole rendering, where that shows each of some turns exactly.

        Turn by turn the work grows with the square of the number of turns.
        """
        last = turns[-1]
        message = renders.messages[last]
        # The last turn is surely supervised, so that its sample is longer than its prompt.
        plain = bool(message["content"].strip()) and not calls_of(message)
        if not self._drop_above or len(turns) <= MANY_TURNS or not plain:
            return None
        num_tokens = len(self._encode(renders.before(last)))
        if num_tokens <= self._drop_above:
            return None
        if not all(renders.shows(i, last) for i in [last, *turns[:: len(turns) // NUM_TRIED_TURNS]]):
            return None
        return Refused(Reason.TOO_LONG, f"over {num_tokens:,} tokens, data.max_tokens is {self._drop_above:,}")

    def _compose(self, renders: Renders, turn: int) -> _Rendering | None:
        """Prompt and answer put together, where it can be told how the answer was written."""
        try:
            before = renders.before(turn)
            written = renders.written(turn)
        except TEMPLATE_ERRORS:
            return None
        if written:
            text = before + written
            return _Rendering(text, [(len(before), len(text))], MaskMethod.COMPOSED)
        markers, message = opens_thought(before), renders.messages[turn]
        if markers is None or self._suffix is None or message.get("tool_calls"):
            return None
        opening, closing = markers
        content, thought = message["content"], thought_of(message)
        if closing in content:
            written = content
            if content.lstrip().startswith(opening):
                written = content.lstrip().removeprefix(opening)
                # What stands behind the marker in the prompt is not written again.
                written = written.removeprefix(before[before.rindex(opening) + len(opening) :])
        elif thought:
            feed = "\n"
            written = f"{thought.strip(feed)}\n{closing}\n\n{content.lstrip(feed)}"
        else:
            return None
        text = before + written + self._suffix
        return _Rendering(text, [(len(before), len(text))], MaskMethod.COMPOSED)

    def _by_turns(self, shown: _Rendering, tokens: Tokens, counts: Counter[str]) -> Masked | Refused:
        view = tokens.view() if self._rules.need_text else None
        mask = np.zeros(len(tokens.ids), dtype=np.bool_)
        turns: list[Span] = []
        if shown.marked is not None:
            ids, marked = shown.marked
            assert ids == tokens.ids.tolist(), "one text, one tokenisation"
            if marked.all():
                return Refused(
                    Reason.ALL_SUPERVISED, "the template marks every token as the assistant's, prompt included"
                )
            edges = tokens.view()
            for begin_char, (_, end_char) in zip(shown.begins, shown.turns, strict=True):
                first, last = edges.touched(begin_char, end_char)
                mask[first:last] |= marked[first:last]
                inside = first + np.flatnonzero(marked[first:last])
                if len(inside):
                    start = int(inside[0])
                    stop = self._first_stop(tokens.ids, start, int(inside[-1]) + 1, counts)
                    mask[stop:last] = False
                    turns.append((start, stop))
            return self._checked(tokens.ids, mask, turns, shown.method, view, counts)
        straddling = 0
        endless = 0
        for start_char, end_char in shown.turns:
            begin = tokens.cut(start_char)
            end, end_straddles = self._turn_end(shown.text, tokens, begin, tokens.cut(end_char), end_char)
            if begin is None or end is None:
                endless += 1
                continue
            if end <= begin.after:
                continue
            if (stop := self._first_stop(tokens.ids, begin.after, end, counts)) < end:
                end, end_straddles = stop, 0
            straddling += (not begin.clean) + end_straddles
            mask[begin.after : end] = True
            turns.append((begin.after, end))
        if not turns and endless:
            return Refused(Reason.NO_TURN_END, "no stop token after the answer, or a boundary inside a token")
        counts["num_turns_left_out"] += len(shown.turns) - len(turns)
        return self._checked(tokens.ids, mask, turns, shown.method, view, counts, num_straddling=straddling)

    def _first_stop(self, ids: TokenIds, start: int, end: int, counts: Counter[str]) -> int:
        """Where the turn `[start, end)` stops first: a target writes nothing after that."""
        closing = int(ids[end - 1])
        stops = self._stop_ids | ({closing} if closing in self.special_ids else set())
        first = next((i + 1 for i, token in enumerate(ids[start:end].tolist(), start) if token in stops), end)
        if first < end:
            counts["num_turns_changed"] += 1
            counts[NUM_STOPPED_EARLIER] += 1
        return first

    def _turn_end(
        self, text: str, tokens: Tokens, begin: Cut | None, close: Cut | None, end_char: int
    ) -> tuple[int | None, int]:
        """The token index at which the target's own words end (None: unknown), and 1 if that is inside a token."""
        if begin is None or close is None:
            return None, 0
        if self._suffix is None or not text.endswith(self._suffix, 0, end_char):
            ids = tokens.ids[begin.after : close.before].tolist()
            stop = next((i for i, token in enumerate(reversed(ids)) if token in self._stop_ids), None)
            return (None if stop is None else begin.after + len(ids) - stop), 0
        content = tokens.cut(end_char - len(self._suffix))
        if content is None:
            return None, 0
        appended = tokens.ids[content.after : close.before].tolist()
        for wanted in (self._stop_ids, self.special_ids):
            found = next((i for i, token in enumerate(appended) if token in wanted), None)
            if found is not None:
                return content.after + found + 1, 0
        if content.clean and content.before < len(tokens.ids) and int(tokens.ids[content.before]) in self._stop_ids:
            # Some templates let the next message's header end a turn: the target wrote that token to stop.
            return content.before + 1, 0
        return content.before, int(not content.clean)

    def _checked(
        self,
        ids: TokenIds,
        mask: npt.NDArray[np.bool_],
        turns: Sequence[Span],
        method: MaskMethod,
        view: View | None,
        counts: Counter[str],
        *,
        num_straddling: int = 0,
    ) -> Masked | Refused:
        bos = self._tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            return Refused(Reason.DOUBLE_BOS, f"the first two tokens are both {self._tokenizer.bos_token}")
        if method is not MaskMethod.TEXT and mask.all():
            return Refused(Reason.ALL_SUPERVISED, "the template marks every token as the assistant's, prompt included")
        return self._finish(ids, mask, turns, method, view, counts, num_straddling=num_straddling)

    def _finish(
        self,
        ids: TokenIds,
        mask: npt.NDArray[np.bool_],
        turns: Sequence[Span],
        method: MaskMethod,
        view: View | None,
        counts: Counter[str],
        *,
        num_straddling: int = 0,
    ) -> Masked | Refused:
        why = ""
        if view is not None:
            taken = self._rules.apply(mask, turns, view)
            counts["num_reasoning_tokens"] += taken[0]
            counts["num_ignored_tokens"] += taken[1]
            if any(taken):
                why = f"; data.reasoning and data.ignore took {sum(taken):,}"
        spans = spans_of(mask)
        if not spans:
            return Refused(Reason.NO_SUPERVISED_TOKEN, f"{len(ids)} tokens, none of them the target's ({method}){why}")
        length = spans[-1][1]
        ends = tuple(min(end, length) for start, end in turns if mask[start:end].any())
        return Masked(ids[:length].copy(), spans, method, ends, num_straddling)

    def _probe_suffix(self) -> str | None:
        question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}
        try:
            rendered = self._renderer.text([question, answer], ())
        except TEMPLATE_ERRORS:
            return None
        _, found, suffix = rendered.rpartition(PROBE)
        return suffix if found else None

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids

    def _encode_tail(self, text: str) -> list[int]:
        # What precedes an answer is nearly always the same few characters after the last special token.
        if (known := self._tails.get(text)) is not None:
            return known
        ids = self._encode(text)
        if len(text) <= MAX_TAIL_CHARS and len(self._tails) < MAX_CACHED_TAILS:
            self._tails[text] = ids
        return ids

    def _tokens(self, texts: Sequence[str]) -> Iterator[Tokens]:
        if not texts:
            return
        if not self._tokenizer.is_fast:
            for text in texts:
                yield SlowTokens(text, self._encode, self.decode)
            return
        out = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for text, ids, offsets in zip(texts, out["input_ids"], out["offset_mapping"], strict=True):
            yield FastTokens(text, ids, offsets, self._added_ids, self._encode_tail)


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A text and the assistant turns that stand in it exactly, as `[start, end)` in characters."""

    text: str
    turns: list[tuple[int, int]]
    method: MaskMethod
    marked: tuple[list[int], npt.NDArray[np.bool_]] | None = None
    """Token ids and the template's own mask, where it has tags."""
    begins: list[int] = field(default_factory=list)
    """Where each turn's message begins, its header included."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The renderings that a conversation becomes, the longest first."""

    renderings: list[_Rendering]
    counts: Counter[str]


def _begins_with(whole: TokenIds, turn: tuple[TokenIds, TokenIds]) -> bool:
    prompt, answer = turn
    end = len(prompt) + len(answer)
    same = end <= len(whole) and np.array_equal(whole[: len(prompt)], prompt)
    return bool(same and np.array_equal(whole[len(prompt) : end], answer))


def _turns(content: Messages) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages up to the last assistant turn, and the positions of the assistant turns that answer something."""
    assistant = [i for i, message in enumerate(content.messages) if message["role"] == "assistant"]
    # What comes after the last answer cannot have moved it, but a template may render that answer otherwise then.
    return list(content.messages[: assistant[-1] + 1]), [i for i in assistant if i > 0]


def _vocab_size(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0


def _eos_ids(*values: Any) -> set[int]:
    flat = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    return {entry for entry in flat if isinstance(entry, int)}
