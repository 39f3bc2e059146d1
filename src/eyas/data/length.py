"""Samples that are too long: dropped, ended with the last turn that fits, or cut; never without supervised tokens."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterable
from typing import Literal

from eyas.data.sources import Reason
from eyas.data.template import Masked, Refused

TooLong = Literal["drop", "turn", "cut"]


def surely_too_long(texts: Iterable[str], max_tokens: int, token_bytes: int) -> Refused | None:
    """Why texts cannot fit, told by their bytes alone, where a token stands for `token_bytes` at most (0: unknown).

    White space around a text does not count, since templates may trim it.
    """
    if not token_bytes:
        return None
    num_bytes = sum(len(unicodedata.normalize("NFC", text.strip()).encode("utf-8", "replace")) for text in texts)
    least = -(-num_bytes // token_bytes)
    if least <= max_tokens:
        return None
    return Refused(Reason.TOO_LONG, f"at least {least:,} tokens by its bytes, data.max_tokens is {max_tokens:,}")


def fit(masked: Masked, max_tokens: int, too_long: TooLong) -> Masked | Refused:
    """The sample with at most `max_tokens` tokens, its last one supervised, or why that cannot be."""
    length = len(masked.token_ids)
    if length <= max_tokens:
        return masked
    limit = f"{length:,} tokens, data.max_tokens is {max_tokens:,}"
    if too_long == "drop":
        return Refused(Reason.TOO_LONG, limit)
    if too_long == "turn":
        end = max((end for end in masked.turn_ends if end <= max_tokens), default=0)
        if not end:
            return Refused(Reason.TOO_LONG, f"{limit}; its first supervised turn does not fit")
    else:
        end = max_tokens
    spans = tuple((start, min(stop, end)) for start, stop in masked.loss_spans if start < end)
    if not spans:
        return Refused(Reason.TOO_LONG, f"{limit}; nothing before that is supervised")
    end = spans[-1][1]
    return dataclasses.replace(
        masked,
        token_ids=masked.token_ids[:end].copy(),
        loss_spans=spans,
        turn_ends=tuple(min(stop, end) for stop in masked.turn_ends if stop <= end or too_long == "cut"),
    )
