"""What of a turn a rendering shows: its words, its calls, its thoughts; and the counters of what it does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.data.rules import EMPTY_THOUGHT, thoughts

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where messages carry thoughts apart from the answer."""
NUM_LEADING = "num_turns_leading"
NUM_EMPTY = "num_turns_empty"
NUM_CALLS_NOT_SHOWN = "num_turns_without_calls"
NUM_UNWEIGHTED = "num_turns_unweighted"
"""Why turns of `num_turns_left_out` are context only."""
NUM_THOUGHTS_NOT_SHOWN = "num_thoughts_not_shown"
NUM_STOPPED_EARLIER = "num_turns_stopped_earlier"
"""What is changed about turns of `num_turns_changed`."""
NUM_TOOLS_NOT_SHOWN = "num_tools_not_shown"
NUM_RESULTS_NOT_SHOWN = "num_tool_results_not_shown"


def leave_out(counts: Counter[str], why: str, num_turns: int = 1) -> None:
    counts["num_turns_left_out"] += num_turns
    counts[why] += num_turns


def look_at(message: Mapping[str, Any], whole: str, span: tuple[int, int], counts: Counter[str]) -> str:
    """Count what the template changes in a turn that it shows; why the turn is context only, empty where it is not."""
    start, end = span
    why = why_unseen(message, whole, span, counts)
    if why:
        return why
    # Thoughts may begin in the prompt.
    around = whole[max(0, start - 64) : end]
    content = message["content"]
    if content not in around:
        counts["num_turns_changed"] += 1
    if thought_of(message) or next(thoughts(content), None):
        return ""
    empty = EMPTY_THOUGHT.search(around)
    if empty is not None and empty.end() > min(start, 64):
        counts["num_turns_without_thought"] += 1
    return ""


def why_unseen(message: Mapping[str, Any], whole: str, span: tuple[int, int], counts: Counter[str]) -> str:
    """The counter of turns that must not be supervised as they are shown: without their calls, or with nothing."""
    start, end = span
    content = message["content"]
    calls = calls_of(message)
    if calls:
        # What the answer says about a function is not its call.
        written = whole[start:end].replace(content, "", 1) if content else whole[start:end]
        if not all(_shows_call(written, call) for call in calls):
            return NUM_CALLS_NOT_SHOWN
    thought = thought_of(message)
    if thought and _words(thought) not in _words(whole[max(0, start - 64) : end]):
        if not content.strip() and not calls:
            return NUM_EMPTY
        counts["num_turns_changed"] += 1
        counts[NUM_THOUGHTS_NOT_SHOWN] += 1
    return NUM_EMPTY if is_empty(message) else ""


def num_results_not_shown(messages: Sequence[Mapping[str, Any]], whole: str) -> int:
    """Messages of tools whose content does not stand in the rendering, as it is or as JSON."""
    num_missing = place = 0
    for message in messages:
        content = message["content"].strip() if message["role"] == "tool" else ""
        if not content:
            continue
        forms = (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
        # In their order: what stands before the last one is not looked at again.
        found = next((at for form in forms if (at := whole.find(form, place)) >= 0), -1)
        if found < 0 and _words(content) not in _words(whole):
            num_missing += 1
        place = max(place, found)
    return num_missing


def is_empty(message: Mapping[str, Any]) -> bool:
    return not (message["content"].strip() or calls_of(message) or thought_of(message))


def _words(text: str) -> str:
    return " ".join(text.split())


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        calls = [calls]
    return [*calls, message["function_call"]] if message.get("function_call") else list(calls)


def _shows_call(written: str, call: Any) -> bool:
    """Whether a rendering has the call's function, by name or by id, and something of its arguments."""
    if not isinstance(call, dict):
        return (call if isinstance(call, str) else json.dumps(call)) in written
    function = call["function"] if isinstance(call.get("function"), dict) else call
    names = [name for name in (function.get("name"), call.get("id")) if isinstance(name, str) and name]
    if names and not any(name in written for name in names):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments.strip() in written
    if not isinstance(arguments, dict) or not arguments:
        return bool(names)
    texts = [text for key, value in arguments.items() for text in (key, value)]
    forms = [form for text in texts for form in (str(text), json.dumps(text), json.dumps(text, ensure_ascii=False))]
    return any(form in written for form in forms if form)


def thought_of(message: Mapping[str, Any]) -> str:
    for key in THOUGHT_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key])
    return ""
