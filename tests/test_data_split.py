"""Held out by the first user turn, languages by script: the same anywhere, and nobody moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.split import HELD_OUT, TRAIN, script_of, split_of_ids, split_of_text


def test_the_split_of_a_text_is_pinned() -> None:
    # A changed hash would move conversations from training into evaluation.
    held = [i for i in range(200) if split_of_text(f"question {i}", 0.05) == HELD_OUT]
    assert held == PINNED
    assert split_of_text("  question 3\n", 0.05) == split_of_text("question 3", 0.05)


PINNED = [57, 104, 112, 125, 134, 142, 170, 188, 189, 192, 198]


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_holds_a_smaller_one(text: str, a: float, b: float) -> None:
    small, large = sorted((a, b))
    if split_of_text(text, small) == HELD_OUT:
        assert split_of_text(text, large) == HELD_OUT


def test_shares_are_as_asked_for() -> None:
    for share in (0.0, 0.02, 0.5):
        held = sum(split_of_text(f"text {i}", share) == HELD_OUT for i in range(20_000))
        assert held == pytest.approx(20_000 * share, rel=0.1, abs=0)


def test_token_ids_go_by_what_stands_before_the_first_supervised_one() -> None:
    ids = np.arange(100, dtype=np.int32)
    longer = np.arange(200, dtype=np.int32)
    splits = {split_of_ids(ids + i, ((10, 20),), 0.5) for i in range(20)}
    assert splits == {TRAIN, HELD_OUT}
    for i in range(20):
        assert split_of_ids(ids + i, ((10, 20),), 0.5) == split_of_ids(longer + i, ((10, 15), (30, 40)), 0.5)


def test_token_ids_with_hardly_a_prompt_go_by_all_of_them() -> None:
    rows = np.random.default_rng(0).integers(0, 1000, (400, 30), dtype=np.int32)
    rows[:, 0] = 1
    for first in (0, 1, 7):
        held = sum(split_of_ids(ids, ((first, 30),), 0.2) == HELD_OUT for ids in rows)
        assert held == pytest.approx(80, rel=0.3)
    same = {split_of_ids(np.concatenate((np.arange(8, dtype=np.int32), ids)), ((8, 38),), 0.2) for ids in rows}
    assert len(same) == 1


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello there", "latin"),
        ("Ça va? Où est-ce?", "latin"),
        ("你好，世界 ok", "han"),
        ("日本語のテキストです", "kana"),
        ("東京都知事選挙についての漢字", "kana"),
        ("안녕하세요", "hangul"),
        ("Привет, world", "cyrillic"),
        ("مرحبا بالعالم", "arabic"),
        ("नमस्ते दुनिया", "devanagari"),
        ("γειά σου", "greek"),
        ("שלום", "hebrew"),
        ("สวัสดี", "thai"),
        ("ꦲꦏ꧀ꦱꦫ", "other"),
        ("123 + 4 = 🎉", ""),
        ("123", ""),
        ("", ""),
    ],
)
def test_the_script_of_most_letters(text: str, script: str) -> None:
    assert script_of(text) == script
