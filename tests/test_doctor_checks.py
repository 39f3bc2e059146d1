"""The doctor's judgements one by one: few samples say nothing, healthy oddities are no faults, faults have names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eyas.doctor import masks, serving, states, text
from eyas.doctor.behaviour import Positions, Trial, judge_rope
from eyas.doctor.bench import MIN_SAMPLES, Outcome, gain, interval
from eyas.doctor.findings import LINKS, Report, broken, ok, unknown
from eyas.doctor.masks import Masked
from eyas.doctor.server import Served
from eyas.doctor.serving import Ours
from eyas.evaluate.answers import Answer
from eyas.evaluate.client import About
from eyas.evaluate.counters import Acceptance
from eyas.model.shape import DraftShape
from eyas.records import CaptureSpec, as_token_ids


def outcome(accepted: list[float], rows: float = 10.0) -> Outcome:
    values = np.array(accepted)
    return Outcome(values, np.minimum(values, rows), np.full(len(values), rows))


# -- differences -------------------------------------------------------------------------------------------------------


def test_a_difference_counts_when_it_is_large_sure_and_on_enough_samples() -> None:
    few, enough = MIN_SAMPLES - 1, MIN_SAMPLES
    assert not gain(outcome([2.0] * few), outcome([8.0] * few)).clear
    assert gain(outcome([2.0] * enough), outcome([8.0] * enough)).clear
    assert not gain(outcome([8.0] * 40), outcome([9.0] * 40)).clear, "sure, and too small to matter"
    scattered = gain(outcome([2.0] * 8), outcome([10.0, 0.0, 9.0, 0.0, 0.0, 8.0, 0.0, 1.0]))
    assert scattered.after > scattered.before and not scattered.clear, "large, and by chance"
    assert gain(outcome([8.0] * 8), outcome([2.0] * 8)).clear_loss


def test_an_interval_of_one_sample_is_everything() -> None:
    assert interval(np.array([3.0]), np.array([10.0])) == (0.3, 0.0, 1.0)
    assert interval(np.zeros(3), np.zeros(3)) == (0.0, 0.0, 1.0)


# -- masks -------------------------------------------------------------------------------------------------------------

OPENING = (5, 6)


def chats(*, likely: float = 1.0, first: int | None = None, shift: int = 0, count: int = 12) -> list[Masked]:
    """Question, opening 5 6, answer, and 2 behind it; the target would write a share `likely` of the answer."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        question, answer = rng.integers(10, 300, 6).tolist(), rng.integers(10, 300, 12).tolist()
        if first is not None:
            answer[0] = first
        ids = [3, *question, 4, *OPENING, *answer, 2, 3, 9]
        start = len(question) + 4
        best = rng.integers(400, 500, len(ids))
        for t in range(start, start + len(answer)):
            if rng.random() < likely:
                best[t - 1] = ids[t]
        found.append(Masked(as_token_ids(ids), ((start + shift, start + len(answer) + shift),), best))
    return found


def judged(samples: list[Masked], *, prompt: tuple[int, ...] | None = None) -> Any:
    return masks.judge_mask(
        samples, num_supervised=100, edges=masks.agreement(samples), prompt=prompt, derived=None, why_not="no sources"
    )


def test_a_right_mask_is_right_by_each_evidence() -> None:
    assert judged(chats()).state == "ok"
    assert judged(chats(), prompt=OPENING).state == "ok"
    assert judged(chats(first=77), prompt=OPENING).state == "ok", "every answer may begin alike, as thoughts do"


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask_is_seen_in_text_that_the_target_would_not_write_by_its_opening(shift: int) -> None:
    samples = chats(likely=0.4, shift=shift)
    assert judged(samples).state == "unknown"
    found = judged(samples, prompt=OPENING)
    assert found.state == "broken" and ("late" if shift > 0 else "early") in found.text


def test_answers_of_somebody_else_cannot_tell_and_are_noted() -> None:
    found = judged(chats(likely=0.3))
    assert found.state == "unknown" and "cannot tell" in found.text
    assert "are the answers its own?" in judged(chats(likely=0.3), prompt=OPENING).note


def test_few_spans_do_not_convict() -> None:
    assert judged(chats(shift=1, count=4), prompt=OPENING).state != "broken"


def test_a_drafter_that_may_not_draft_in_most_samples() -> None:
    samples = [Masked(one.token_ids, ((10, 11),)) for one in chats()]
    assert "no two supervised tokens in a row" in judged(samples).text
    assert judged(samples[:4] + chats()).state == "ok", "short answers are allowed"


def test_merged_rows_may_supervise_more_than_one_conversation_says() -> None:
    now = {"a": ((3, 5),), "b": ((3, 5),), "c": ((3, 5),)}
    assert masks.compare_masks(now, {"a": ((3, 5), (8, 9)), "b": ((3, 5),)}).differ == 0
    late = masks.compare_masks(now, {"a": ((4, 6),), "b": ((4, 6),)})
    assert (late.found, late.differ, late.shift) == (2, 2, 1)


# -- states ------------------------------------------------------------------------------------------------------------


def test_noise_of_another_engine_is_no_fault_and_another_layer_is_one() -> None:
    rng = np.random.default_rng(0)
    base = {k: rng.standard_normal((20, 16)).astype(np.float32) for k in range(5)}
    seen = [states.Seen(base, base[4])]
    spec = CaptureSpec(
        target_digest="d", num_layers=4, hidden_size=16, vocab_size=9, aux_layers=(1, 2), last_hidden_norm="post",
        dtype="bfloat16",
    )  # fmt: skip
    noisy = {k: base[k] + 0.1 * rng.standard_normal((20, 16)).astype(np.float32) for k in base}
    assert states.judge_states(spec, [noisy], seen).state == "ok", "a tenth off, and every other layer is far"
    found = states.judge_states(spec, [{1: base[2], 2: base[3]}], seen)
    assert found.state == "broken" and "shifted by +1" in found.text
    found = states.judge_states(spec, [{1: base[1], 2: base[3]}], seen)
    assert "not as named" in found.text and "hidden.2 holds hidden state 3" in found.text
    strange = {k: rng.standard_normal((20, 16)).astype(np.float32) for k in (1, 2)}
    assert "at every index near" in states.judge_states(spec, [strange], seen).text


# -- positions ---------------------------------------------------------------------------------------------------------


class StandIn:
    """A bench on which a drafter is so good with each offset."""

    def __init__(self, accepted: dict[int, float]) -> None:
        self.accepted = accepted
        self.position = np.arange(10)

    def run(self, draft: Any, *, offset: int = 0) -> int:
        return offset

    def judge(self, drafts: int, vocab_map: Any, rows: Any = None) -> Outcome:
        return outcome([self.accepted[drafts]] * 12)


def trial(accepted: dict[int, float]) -> Trial:
    stand_in: Any = StandIn(accepted)
    nothing: Any = None
    as_it_is: Any = 0
    return Trial(stand_in, nothing, nothing, as_it_is)


def positions(**changes: Any) -> Positions:
    shape = DraftShape(
        target_hidden_size=8, vocab_size=9, aux_layers=(1,), hidden_size=8, draft_vocab_size=9, num_heads=1,
        num_kv_heads=1, head_dim=8, intermediate_size=8, max_position_embeddings=64,
    )  # fmt: skip
    return Positions(**{"rope": shape.rope, "max_positions": 64, "fresh": shape, "longest_sample": 9,
                        "recorded": True, **changes})  # fmt: skip


def test_a_drafter_trained_with_positions_that_are_off_by_one() -> None:
    found = judge_rope(positions(), trial({0: 4.0, -1: 8.0, 1: 2.0}))
    assert found.state == "broken" and "moved by -1" in found.text
    assert judge_rope(positions(), trial({0: 8.0, -1: 8.2, 1: 8.1})).state == "ok"


def test_a_foreign_drafter_may_have_positions_of_its_own() -> None:
    other = {"rope_type": "default", "rope_theta": 5.0}
    assert judge_rope(positions(rope=other), None).state == "broken"
    found = judge_rope(positions(rope=other, recorded=False), None)
    assert found.state == "ok" and "of its own" in found.note


# -- text --------------------------------------------------------------------------------------------------------------


class Letters:
    """Tokens that are pieces of text."""

    pieces = ("he", "llo", "hello", " you", "x")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


def test_text_that_the_target_would_write_in_longer_tokens() -> None:
    ids = as_token_ids([4, 0, 1, 3])  # x he llo you
    right, longer, other = np.array([0, 1, 3, 0]), np.array([2, 1, 3, 0]), np.array([3, 1, 3, 0])
    assert text.resplit_share(Letters(), [(ids, [(1, 4)], right)]) == (0.0, 3)
    assert text.resplit_share(Letters(), [(ids, [(1, 4)], longer)]) == (pytest.approx(1 / 3), 3)
    assert text.resplit_share(Letters(), [(ids, [(1, 4)], other)]) == (0.0, 3), "another word is another word"


# -- serving -----------------------------------------------------------------------------------------------------------

VLLM = About("http://x", "vllm", "0", "target", "/target", None, "speculative decoding", 3, None, True)


def served(accepted: int, count: int, verifications: int = 20) -> Served:
    answer = Answer((1,) * 30, "", 30, ((0.1, 30),), 0.1, True, None)
    return Served(VLLM, (answer,) * count, (Acceptance(verifications, 3 * verifications, accepted),) * count)


def ours(accepted: int, count: int) -> list[Ours]:
    return [Ours((1,) * 30, 20, accepted) for _ in range(count)]


def test_a_server_must_be_clearly_worse_on_enough_prompts() -> None:
    assert serving.judge_serving(served(6, 8), ours(20, 8), 3).state == "broken"
    assert serving.judge_serving(served(6, 3), ours(20, 3), 3).state == "unknown"
    assert serving.judge_serving(served(19, 8), ours(20, 8), 3).state == "ok", "near-ties"
    assert serving.judge_serving(served(30, 8), ours(20, 8), 3).state == "ok", "a tree accepts more"


def test_a_weak_drafter_that_accepts_nothing_anywhere_is_no_fault_of_the_server() -> None:
    assert serving.judge_engine(served(0, 8), 1.01).state == "ok"
    assert serving.judge_engine(served(0, 8), 1.5).state == "broken"
    assert serving.judge_engine(served(0, 1, verifications=10), 1.5).state == "ok", "too few to say"


# -- the verdict -------------------------------------------------------------------------------------------------------


def test_the_verdict_is_the_most_upstream_link_whatever_was_found_first() -> None:
    found = (broken("vocab", "v", "mend v"), ok("target", "t"), broken("mask", "m", "mend m"), unknown("states", "s"))
    report = Report("draft", "data", "", found)
    assert report.cause is not None and report.cause.link == "mask"
    assert report.verdict() == "the most upstream broken link is 'mask': mend m; also broken: vocab"
    links = [f["link"] for f in report.as_dict()["findings"]]
    assert links == sorted(links, key=list(LINKS).index)
    healthy = Report("draft", "data", "", (ok("target", "t"), unknown("states", "s")))
    assert healthy.verdict() == "no broken link among the 1 that could be checked (not checked: states)"
