"""Conversations that nobody could answer, money, endpoints that pause: nothing is settled by accident."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ConfigError, EngineError, EngineUnavailable, Stopped
from eyas.generate.monitor import heartbeat_path
from eyas.generate.status import status
from misbehaving_server import Act, Asked, MisbehavingServer, error
from test_generate_remote import Setting, asking


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def costs(cost: float) -> Act:
    return Act(edit=lambda right: right["usage"].update(cost=cost))


def test_an_outage_at_the_end_leaves_the_rest_pending_and_the_same_command_goes_on(setting: Setting) -> None:
    setting.ask(32)
    down = [True]
    with MisbehavingServer(lambda asked: Act(status=500) if down[0] and server.num_asked > 30 else None) as server:
        with pytest.raises(EngineUnavailable, match=r"unavailable, none succeeds between them.*pending [1-9]"):
            setting.run(server.url, max_attempts=2, concurrency=4)
        assert setting.rejects() == {} and len(setting.rows()) >= 20
        down[0] = False
        receipt = setting.run(server.url, max_attempts=2)
    assert receipt.answered == 32 and len(setting.rows()) == 32 and setting.rejects() == {}


def test_a_server_that_refuses_everything_on_resume_rejects_nothing(setting: Setting) -> None:
    setting.ask(30)
    with MisbehavingServer() as server:
        setting.run(server.url)
    setting.ask(40)
    with MisbehavingServer(lambda asked: Act(status=400, body=error("no"))) as server, pytest.raises(EngineError):
        setting.run(server.url)
    assert setting.rejects() == {}
    with MisbehavingServer() as server:
        assert setting.run(server.url).answered == 40


def test_a_bad_prompt_at_the_end_is_a_reject_once_the_server_shows_that_it_lives(setting: Setting) -> None:
    setting.ask(3)
    with MisbehavingServer(
        lambda asked: Act(status=400, body=error("no")) if "question" in asked.last and "2" in asked.last else None
    ) as server:
        receipt = setting.run(server.url, concurrency=1)
    assert (receipt.answered, dict(receipt.rejected)) == (2, {"refused": 1})


def test_a_later_turn_that_fails_for_a_while_is_answered_in_the_end(setting: Setting) -> None:
    setting.write([asking("long", "second", id="x")] + [asking(f"q{n}", id=f"p{n}") for n in range(30)])
    failures = [3]

    def script(asked: Asked) -> Act | None:
        if asked.last == "second" and failures[0]:
            failures[0] -= 1
            return Act(status=500)
        return None

    with MisbehavingServer(script) as server:
        receipt = setting.run(server.url, max_attempts=3)
    assert receipt.answered == 31 and dict(receipt.ended_early) == {}
    assert len(setting.rows()["x"]["finish_reason"]) == 2


def test_a_later_turn_that_always_fails_keeps_what_stands_before_it(setting: Setting) -> None:
    setting.write([asking("long", "second", id="x")] + [asking(f"q{n}", id=f"p{n}") for n in range(5)])
    with MisbehavingServer(lambda asked: Act(status=500) if asked.last == "second" else None) as server:
        receipt = setting.run(server.url, max_attempts=2)
    assert receipt.answered == 6 and dict(receipt.ended_early) == {"unavailable": 1}


def test_an_endpoint_that_asks_for_a_long_pause_keeps_nobody_from_ending(setting: Setting) -> None:
    setting.ask(10)
    start = time.monotonic()
    with (
        MisbehavingServer(lambda asked: Act(status=429, headers={"retry-after": "3600"})) as busy,
        MisbehavingServer() as good,
    ):
        receipt = setting.run(busy.url, good.url)
    assert receipt.answered == 10 and time.monotonic() - start < 20


def test_a_limit_that_is_never_lifted_ends_the_run_resumably(setting: Setting) -> None:
    setting.ask(5)
    limited = Act(status=429, body=error("insufficient_quota"))
    with (
        MisbehavingServer(lambda asked: limited) as server,
        pytest.raises(EngineUnavailable, match=r"no answer for .*, only faults .*pending 5"),
    ):
        setting.run(server.url, reconnect_s=1.0, timeout_s=0.2, timeout_s_per_1k_tokens=0.0)
    assert setting.rejects() == {}


@pytest.mark.parametrize("first", [0.0, 0.001])
def test_a_cheap_first_answer_does_not_let_a_crowd_in(setting: Setting, first: float) -> None:
    setting.ask(40)
    with (
        MisbehavingServer(lambda asked: costs(first if server.num_asked == 1 else 1.0)) as server,
        pytest.raises(Stopped, match="max_cost"),
    ):
        setting.run(server.url, max_cost=4.0, concurrency=16)
    assert sum(row["usage"]["cost"] for row in setting.rows().values()) <= 4.0


def test_what_a_killed_run_spent_on_unfinished_conversations_counts_in_the_next(setting: Setting) -> None:
    setting.ask(3)
    heartbeat_path(setting.out).write_text(json.dumps({"pid": 1, "host": "h", "time": 0.0, "spent": 3.5}))
    with MisbehavingServer(lambda asked: costs(1.0)) as server, pytest.raises(Stopped, match=r"3\.5 is spent"):
        setting.run(server.url, max_cost=4.0, price_per_1m={"prompt": 1e6, "completion": 1e6})
    assert server.num_asked == 0


def test_an_error_that_names_no_cost_is_no_reason_to_stop(setting: Setting) -> None:
    setting.ask(3)
    with MisbehavingServer(
        lambda asked: Act(body=error("upstream", 502)) if server.num_asked == 1 else costs(0.1)
    ) as server:
        assert setting.run(server.url, max_cost=100.0).answered == 3


def test_status_counts_what_is_planned_no_more_apart(setting: Setting) -> None:
    setting.ask(20)
    with MisbehavingServer() as server:
        setting.run(server.url)
        setting.ask(5)
        setting.run(server.url)
    found: Any = status(setting.out)
    assert (found.planned, found.answered, found.rejected, found.pending) == (5, 5, 0, 0)


def test_a_seed_of_the_users_stays_and_a_limit_beside_ours_is_refused(setting: Setting) -> None:
    setting.ask(3)
    with MisbehavingServer() as server:
        setting.run(server.url, temperature=1.0, seed=5, extra={"seed": 7})
        assert {asked.body["seed"] for asked in server.asked} == {7}
        with pytest.raises(ConfigError, match=r"extra\.max_tokens: set generate\.max_new_tokens"):
            setting.run(server.url, extra={"max_tokens": 100_000})
