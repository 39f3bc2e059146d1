"""The target's chat template, rendered as a server renders it: options handed over, the date pinned, calls as objects.

Templates that write today's date into the prompt ask `strftime_now`. A table must not depend on the day on which it
was made, so such a template gets a macro of that name in front, which knows the configured date in each format that
the template asks for.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from eyas.errors import ConfigError
from eyas.records import canonical_json

Tokenizer = Any
"""A transformers tokeniser; importing its class would cost every command seconds."""

DEFAULT_DATE = datetime.date(2026, 1, 1)
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
DATE_FUNCTION = "strftime_now"
DATE_CALL = re.compile(rf"{DATE_FUNCTION}\s*\(\s*(?:format\s*=\s*)?((['\"]).*?\2)\s*\)")

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

OWN_OPTIONS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", DATE_FUNCTION),
    }
)
"""Names that `template_options` must not hold: they are ours to give."""


class Renderer:
    """Messages to text, for one tokeniser."""

    def __init__(
        self, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None, date: datetime.date = DEFAULT_DATE
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        check_options(self._options)
        # A tokeniser may have several templates, one of them for conversations with tools.
        self._originals = {has_tools: _template(tokenizer, has_tools) for has_tools in (False, True)}
        self._pinned = {has_tools: pin_date(text, date) for has_tools, text in self._originals.items()}
        self.uses_date = self._pinned != self._originals

    def has_tags(self, tools: Sequence[Any]) -> bool:
        """Whether the template for these tools says by `{% generation %}` what the assistant wrote."""
        # Tags need offsets.
        return bool(self._tokenizer.is_fast and GENERATION_TAG.search(self._originals[bool(tools)]))

    def text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], *, add_generation_prompt: bool = False
    ) -> str:
        """The rendering; whatever the template raises is one of `TEMPLATE_ERRORS`."""
        if not messages:
            return ""
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self._override(tools),
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._options,
        )
        assert isinstance(rendered, str)
        return rendered

    def tagged(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any]
    ) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Token ids and which of them the template's tags mark, `[T]` each."""
        out = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self._override(tools),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **self._options,
        )
        return out["input_ids"], np.array(out["assistant_masks"], dtype=np.bool_)

    def _override(self, tools: Sequence[Any]) -> str | None:
        has_tools = bool(tools)
        pinned = self._pinned[has_tools]
        return None if pinned == self._originals[has_tools] else pinned


def check_options(options: Mapping[str, Any]) -> None:
    """ConfigError for an option that is not the template's."""
    if own := sorted(OWN_OPTIONS & set(options)):
        raise ConfigError(f"data.template_options.{own[0]}: not an option of the template; eyas gives it by itself")


def pin_date(template: str, date: datetime.date) -> str:
    """The template with `date` as today; unchanged where it does not ask for it."""
    if DATE_FUNCTION not in template:
        return template
    literals = dict.fromkeys(match[1] for match in DATE_CALL.finditer(template))
    cases = "".join(
        f"{{%- if format == {literal} -%}}{{{{ {json.dumps(date.strftime(_unquoted(literal)))} }}}}{{%- endif -%}}"
        for literal in literals
    )
    known = f"[{', '.join(literals)}]"
    refusal = (
        f"{{%- if format not in {known} -%}}"
        f"{{{{ raise_exception('{DATE_FUNCTION} of a format that is no literal') }}}}{{%- endif -%}}"
    )
    # The line feed is the one that a block tag swallows; with it the template begins at the start of a line, as before.
    return f"{{%- macro {DATE_FUNCTION}(format) -%}}{cases}{refusal}{{%- endmacro %}}\n{template}"


def _unquoted(literal: str) -> str:
    # As Jinja reads a string.
    return literal[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")


def _template(tokenizer: Tokenizer, has_tools: bool) -> str:
    if not tokenizer.chat_template:
        return ""
    try:
        text: str = tokenizer.get_chat_template(tools=[{}] if has_tools else None)
    except ValueError:
        # Several named ones, none of them the default: whoever renders with it is told.
        return ""
    return text


def template_text(tokenizer: Tokenizer) -> str:
    """The chat template as text (several named ones as canonical JSON); empty when there is none."""
    template = tokenizer.chat_template
    if not template:
        return ""
    return template if isinstance(template, str) else canonical_json(template).decode()


def with_objects(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages with the arguments of calls as objects, as templates expect them; files carry them as JSON text.

    Arguments that are no JSON object stay as they are.
    """
    return tuple(_with_objects(message) if message.get("tool_calls") else message for message in messages)


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = message["tool_calls"]
    if isinstance(calls, str):
        calls = _parsed(calls, list)
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"])}
    if isinstance(call.get("arguments"), str):
        return call | {"arguments": _parsed(call["arguments"], dict)}
    return call


def _parsed(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, kind) else text
