"""Loss masks from the target's own chat template: which tokens of a conversation did the target write?

A conversation is rendered once, as a whole, and tokenised once, as serving engines do it: without the special tokens
that the tokeniser would add, because the template writes its own. Messages after the last assistant turn are left
away first, tokens after the last supervised one are cut. Then, by template:

**With `{% generation %}`** the template says which tokens are the assistant's.

**Without**, by prefix rendering. Turn `i` begins where the rendering of the messages before it ends, generation prompt
included, and lies inside the rendering of the messages up to it. Both must be prefixes of the whole rendering; only
then do the tokens stand there as the target saw and wrote them. The target's own words end with the token by which it
stops. Where that is, a probe tells: what the template appends to an answer (`<|im_end|>` and a line feed, say) is known
text, and in it the first stop token of the target (`eos_token_id` of tokeniser, config and generation config), else
the first special token, is still the target's; what follows is the template's. When the template appends no such token
the turn ends with the last token of its content. When an answer does not end as the probe did (a tool call, say), the
last stop token of the turn is its end; without one, the turn is context only.

**Templates that rewrite history** (a think block shown only in the last turn, say): turns that do not stand in the
whole rendering as they were written are context only. If none remains, the row is dropped.

**Tokens across a boundary.** A token with characters from both sides of a turn's start belongs to the prompt, since
the target never wrote it; one across the end of the content belongs to the template. Each such boundary is counted, as
is one before which the prompt alone would be tokenised otherwise.

A tokeniser without offsets (no fast backend) takes the same way, with the tokens of each prefix compared one by one;
a turn whose boundary falls inside a token is context only there. Letters: `T` tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from eyas.config import TargetConfig
from eyas.data.sources import GivenTokens, Messages, PlainText, Reason, Row
from eyas.errors import ConfigError, DataError
from eyas.records import Span, TokenIds, canonical_json, digest_bytes, spans_of

Tokenizer = Any
"""A transformers tokeniser; importing its class would cost every command seconds."""

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "eyasprobe"
"""An answer that no template has reason to change."""
MAX_CACHED_TAILS = 4096
MAX_TAIL_CHARS = 256

# A template is a program from outside: these are what it raises on purpose and by oversight.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)

_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tokenization_*.py",
)


class MaskMethod(StrEnum):
    """How a sample's loss mask came about."""

    GIVEN = "given"
    """With the row."""
    TEXT = "text"
    """Plain text: every token but a leading BOS."""
    GENERATION_TAGS = "generation_tags"
    PREFIX_RENDER = "prefix_render"
    EXACT_TURNS_ONLY = "exact_turns_only"
    """Several, but not all assistant turns: the others are shown otherwise than they were written."""
    LAST_TURN_ONLY = "last_turn_only"
    """As before, and only the last one is left."""


@dataclass(frozen=True, slots=True)
class Masked:
    """Token ids `[T]` with their supervised spans; the last token is supervised."""

    token_ids: TokenIds
    loss_spans: tuple[Span, ...]
    method: MaskMethod
    num_straddling: int = 0
    """Boundaries of turns that are none of the tokenisation."""
    num_turns_left_out: int = 0
    """Assistant turns that are context only."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a row cannot become a sample."""

    reason: Reason
    detail: str = ""


class Masker:
    """Turns rows into token ids and loss masks, for one target."""

    def __init__(self, tokenizer: Tokenizer, directory: Path) -> None:
        """`directory` is the target's; its `config.json` and `generation_config.json` are read if they are there."""
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json")
        self.directory = directory
        self._tokenizer = tokenizer
        self._template_text = template_text(tokenizer)
        self._vocab_size = _vocab_size(config) or len(tokenizer)
        self._stop_ids = _eos_ids(tokenizer.eos_token_id, generation.get("eos_token_id"), config.get("eos_token_id"))
        added = tokenizer.added_tokens_decoder
        self._added_ids = np.array(sorted({*added, *tokenizer.all_special_ids}), dtype=np.int32)
        special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        self._special_ids = special - {tokenizer.unk_token_id}
        self._suffix = self._probe_suffix() if self._template_text else None
        self._tails: dict[str, list[int]] = {}

    def mask(self, rows: Sequence[Row]) -> list[Masked | Refused]:
        """One result per row, in order. The rows are tokenised together: hand over some megabytes of text at most.

        DataError when a row is a conversation and the target has no chat template.
        """
        results: dict[int, Masked | Refused] = {}
        plans: dict[int, _Plan] = {}
        for number, row in enumerate(rows):
            match row.content:
                case GivenTokens():
                    results[number] = self._given(row.content)
                case PlainText():
                    results[number] = self._text(row.content)
                case Messages():
                    if not self._template_text:
                        raise DataError(
                            f"{row.where}: {self.directory} has no chat template, so conversations cannot become "
                            "samples; put the target's chat_template.jinja there, or use rows with 'text' or with "
                            "'input_ids' and 'loss_mask'"
                        )
                    try:
                        plan = self._tagged(row.content) if self._has_tags(row.content) else self._plan(row.content)
                    except TEMPLATE_ERRORS as error:
                        plan = Refused(Reason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}")
                    if isinstance(plan, _Plan):
                        plans[number] = plan
                    else:
                        results[number] = plan
        for (number, plan), tokens in zip(plans.items(), self._tokens([p.text for p in plans.values()]), strict=True):
            results[number] = self._by_prefix(plan, tokens)
        return [results[number] for number in range(len(rows))]

    def _given(self, content: GivenTokens) -> Masked | Refused:
        largest = int(content.token_ids.max())
        if largest >= self._vocab_size:
            return Refused(Reason.TOKEN_OUT_OF_VOCABULARY, f"token id {largest}, vocabulary of {self._vocab_size}")
        return _finish(content.token_ids, content.loss_mask, MaskMethod.GIVEN)

    def _text(self, content: PlainText) -> Masked | Refused:
        bos, bos_id = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        has_bos = bool(bos) and content.text.startswith(bos)
        ids = np.array(self._encode(content.text, add_special_tokens=not has_bos), dtype=np.int32)
        mask = np.ones(len(ids), dtype=np.bool_)
        if len(ids) and bos_id is not None and ids[0] == bos_id:
            mask[0] = False
        return self._checked(ids, mask, MaskMethod.TEXT)

    def _has_tags(self, content: Messages) -> bool:
        # A tokeniser may have several templates, one of them for conversations with tools. Tags need offsets.
        template = self._tokenizer.get_chat_template(tools=list(content.tools) or None)
        return bool(self._tokenizer.is_fast and GENERATION_TAG.search(template))

    def _tagged(self, content: Messages) -> Masked | Refused:
        messages, turns = _turns(content)
        if not turns:
            return Refused(Reason.NO_ASSISTANT_TURN, "the only assistant turn answers nothing")
        out = self._tokenizer.apply_chat_template(
            messages,
            tools=list(content.tools) or None,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        ids = np.array(out["input_ids"], dtype=np.int32)
        mask = np.array(out["assistant_masks"], dtype=np.bool_)
        left_out = 0
        if len(turns) > 1:
            whole = self._render(messages, content)
            left_out = sum(not whole.startswith(self._render(messages[: i + 1], content)) for i in turns[:-1])
        if left_out:
            # The tags do not tell which span is which turn's, but the last span is in the last turn.
            last = spans_of(mask)[-1:]
            mask[: last[0][0] if last else None] = False
            left_out = len(turns) - 1
        method = MaskMethod.LAST_TURN_ONLY if left_out else MaskMethod.GENERATION_TAGS
        return self._checked(ids, mask, method, num_turns_left_out=left_out)

    def _plan(self, content: Messages) -> _Plan | Refused:
        messages, turns = _turns(content)
        if not turns:
            return Refused(Reason.NO_ASSISTANT_TURN, "the only assistant turn answers nothing")
        whole = self._render(messages, content)
        exact: list[tuple[int, int]] = []
        for i in turns:
            before = self._render(messages[:i], content, add_generation_prompt=True)
            up_to = whole if i == turns[-1] else self._render(messages[: i + 1], content)
            if len(before) < len(up_to) and whole.startswith(before) and whole.startswith(up_to):
                exact.append((len(before), len(up_to)))
        if not exact:
            numbers = ", ".join(str(i + 1) for i in turns[:20])
            return Refused(
                Reason.TEMPLATE_REWRITES_HISTORY,
                f"assistant message {numbers}: the prompt or the answer is not a prefix of the whole rendering",
            )
        ends_last = exact[-1][1] == len(whole)
        return _Plan(whole, exact, num_turns=len(turns), ends_last=ends_last)

    def _by_prefix(self, plan: _Plan, tokens: _Tokens) -> Masked | Refused:
        mask = np.zeros(len(tokens.ids), dtype=np.bool_)
        straddling = 0
        supervised: list[int] = []
        endless = 0
        for number, (start_char, end_char) in enumerate(plan.exact):
            begin = tokens.cut(start_char)
            end, end_straddles = self._turn_end(plan.text, tokens, begin, tokens.cut(end_char), end_char)
            if begin is None or end is None:
                endless += 1
                continue
            if end <= begin.after:
                continue
            straddling += (not begin.clean) + end_straddles
            mask[begin.after : end] = True
            supervised.append(number)
        if not supervised and endless:
            return Refused(Reason.NO_TURN_END, "no stop token after the answer, or a boundary inside a token")
        left_out = plan.num_turns - len(supervised)
        method = MaskMethod.PREFIX_RENDER
        if left_out:
            only_last = supervised == [len(plan.exact) - 1] and plan.ends_last
            method = MaskMethod.LAST_TURN_ONLY if only_last else MaskMethod.EXACT_TURNS_ONLY
        return self._checked(tokens.ids, mask, method, num_straddling=straddling, num_turns_left_out=left_out)

    def _turn_end(
        self, text: str, tokens: _Tokens, begin: _Cut | None, close: _Cut | None, end_char: int
    ) -> tuple[int | None, int]:
        """The token index at which the target's own words end (None: unknown), and 1 if that is inside a token."""
        if begin is None or close is None:
            return None, 0
        if self._suffix is None or not text.endswith(self._suffix, 0, end_char):
            ids = tokens.ids[begin.after : close.before].tolist()
            stops = [i for i, token in enumerate(ids) if token in self._stop_ids]
            return (begin.after + stops[-1] + 1 if stops else None), 0
        content = tokens.cut(end_char - len(self._suffix))
        if content is None:
            return None, 0
        appended = tokens.ids[content.after : close.before].tolist()
        for wanted in (self._stop_ids, self._special_ids):
            found = next((i for i, token in enumerate(appended) if token in wanted), None)
            if found is not None:
                return content.after + found + 1, 0
        return content.before, int(not content.clean)

    def _checked(
        self,
        ids: TokenIds,
        mask: npt.NDArray[np.bool_],
        method: MaskMethod,
        *,
        num_straddling: int = 0,
        num_turns_left_out: int = 0,
    ) -> Masked | Refused:
        bos = self._tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            return Refused(Reason.DOUBLE_BOS, f"the first two tokens are both {self._tokenizer.bos_token}")
        if method is not MaskMethod.TEXT and mask.all():
            return Refused(Reason.ALL_SUPERVISED, "the template marks every token as the assistant's, prompt included")
        return _finish(ids, mask, method, num_straddling=num_straddling, num_turns_left_out=num_turns_left_out)

    def _render(
        self, messages: Sequence[dict[str, Any]], content: Messages, *, add_generation_prompt: bool = False
    ) -> str:
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(content.tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        assert isinstance(rendered, str)
        return rendered

    def _probe_suffix(self) -> str | None:
        question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}
        try:
            rendered = self._render([question, answer], Messages((question, answer)))
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

    def _tokens(self, texts: Sequence[str]) -> Iterator[_Tokens]:
        if not texts:
            return
        if not self._tokenizer.is_fast:
            for text in texts:
                yield _SlowTokens(text, self)
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
            yield _FastTokens(text, ids, offsets, self)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A whole rendering and the assistant turns that stand in it exactly, as `[start, end)` in characters."""

    text: str
    exact: list[tuple[int, int]]
    num_turns: int
    ends_last: bool
    """Whether the last exact turn is the last turn."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A character boundary in tokens: `before` are wholly before it, from `after` on all are wholly behind it."""

    before: int
    after: int
    clean: bool
    """No token across it, and the text before it alone has the same tokens."""


class _FastTokens:
    """Tokens of one text, with boundaries found by offsets."""

    def __init__(self, text: str, ids: list[int], offsets: list[tuple[int, int]], masker: Masker) -> None:
        self.ids: TokenIds = np.array(ids, dtype=np.int32)
        self._text = text
        self._masker = masker
        edges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        self._ends = np.maximum.accumulate(edges[:, 1]) if len(edges) else edges[:, 1]
        # Some tokenisers trim the space off a token's offsets: what lies between two tokens is the second one's.
        self._starts = np.minimum(edges[:, 0], np.concatenate(([0], self._ends[:-1]))) if len(edges) else edges[:, 0]
        self._added = np.flatnonzero(np.isin(self.ids, masker._added_ids))

    def cut(self, chars: int) -> _Cut | None:
        before = int(np.searchsorted(self._ends, chars, side="right"))
        after = int(np.searchsorted(self._starts, chars, side="left"))
        if after > before:
            return _Cut(before, after, clean=False)
        # Added tokens split the text for good: one behind the boundary keeps both sides apart, and before the boundary
        # only what follows the last of them can come out otherwise alone.
        following = int(np.searchsorted(self._added, before))
        if before == len(self.ids) or (following < len(self._added) and self._added[following] == before):
            return _Cut(before, before, clean=True)
        nearest = following - 1
        first = int(self._added[nearest]) if nearest >= 0 else 0
        tail = self._text[int(self._starts[first]) if nearest >= 0 else 0 : chars]
        return _Cut(before, before, clean=self._masker._encode_tail(tail) == self.ids[first:before].tolist())


class _SlowTokens:
    """Tokens of one text, with boundaries found by tokenising each prefix."""

    def __init__(self, text: str, masker: Masker) -> None:
        self.ids: TokenIds = np.array(masker._encode(text), dtype=np.int32)
        self._text = text
        self._masker = masker

    def cut(self, chars: int) -> _Cut | None:
        prefix = self._masker._encode(self._text[:chars])
        if self.ids[: len(prefix)].tolist() != prefix:
            return None
        return _Cut(len(prefix), len(prefix), clean=True)


_Tokens = _FastTokens | _SlowTokens


def load_tokenizer(target: TargetConfig) -> Tokenizer:
    """The target's tokeniser; ConfigError when no directory is named, DataError when it holds none that can be read."""
    if target.path is None:
        raise ConfigError("target.path is not set; name the directory of the target model")
    if not target.path.is_dir():
        raise ConfigError(f"target.path: {target.path} is not a directory")
    files = tokenizer_files(target.path)
    if not files:
        raise DataError(f"{target.path}: no tokenizer.json or other tokeniser file")
    for file in files:
        # The tokeniser's own parser raises a bare Exception on broken JSON.
        if file.suffix == ".json":
            try:
                json.loads(file.read_bytes())
            except (OSError, ValueError) as error:
                raise DataError(f"{file}: cannot be read: {error}") from None
    # Imported here: it takes seconds, and most commands need none of it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(target.path), trust_remote_code=target.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{target.path}: its tokeniser cannot be loaded: {reason}") from None


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that decide how text becomes tokens: `tokenizer.json`, or lacking it all others, by name."""
    whole = directory / "tokenizer.json"
    if whole.is_file():
        return [whole]
    return sorted({file for pattern in _TOKENIZER_FILES for file in directory.glob(pattern) if file.is_file()})


def tokenizer_digest(directory: Path) -> str:
    """xxh3-128 over `tokenizer.json`, or over name and bytes of all tokeniser files where there is none."""
    files = tokenizer_files(directory)
    if [file.name for file in files] == ["tokenizer.json"]:
        return digest_bytes(files[0].read_bytes())
    return digest_bytes(*(part for file in files for part in (file.name.encode() + b"\0", file.read_bytes())))


def template_text(tokenizer: Tokenizer) -> str:
    """The chat template as text (several named ones as canonical JSON); empty when there is none."""
    template = tokenizer.chat_template
    if not template:
        return ""
    return template if isinstance(template, str) else canonical_json(template).decode()


def template_digest(tokenizer: Tokenizer) -> str:
    """xxh3-128 over the chat template's text; empty when there is none."""
    text = template_text(tokenizer)
    return digest_bytes(text.encode()) if text else ""


def _turns(content: Messages) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages up to the last assistant turn, and the positions of the assistant turns that answer something."""
    assistant = [i for i, message in enumerate(content.messages) if message["role"] == "assistant"]
    # What comes after the last answer cannot have moved it, but a template may render that answer otherwise then.
    return list(content.messages[: assistant[-1] + 1]), [i for i in assistant if i > 0]


def _finish(
    ids: TokenIds,
    mask: npt.NDArray[np.bool_],
    method: MaskMethod,
    *,
    num_straddling: int = 0,
    num_turns_left_out: int = 0,
) -> Masked | Refused:
    spans = spans_of(mask)
    if not spans:
        return Refused(Reason.NO_SUPERVISED_TOKEN, f"{len(ids)} tokens, none of them the target's ({method})")
    return Masked(ids[: spans[-1][1]].copy(), spans, method, num_straddling, num_turns_left_out)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}


def _vocab_size(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0


def _eos_ids(*values: Any) -> set[int]:
    flat = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    return {entry for entry in flat if isinstance(entry, int)}
