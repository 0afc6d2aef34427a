"""The minutes of the last day."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from server.usage.account import Account
from server.usage.day import COLUMNS, MAX_NAMED, MINUTES, DayHistory, outcome

UNKNOWN = "", ""


def account(status: int = 200) -> Account:
    return Account(tenant="t", key="k", route="chat", model="m", status=status, prompt_tokens=100, prefill_saved_s=0.25)


@pytest.mark.parametrize(
    ("status", "finished", "column"),
    [
        (200, True, "answered"),
        (400, False, "wrong"),
        (401, False, "wrong"),
        (200, False, "failed"),
        (500, False, "failed"),
        (503, False, "failed"),
        (429, False, "refused"),
        (499, False, "left"),
        (0, False, "left"),
    ],
)
def test_outcomes(status: int, finished: bool, column: str) -> None:
    assert outcome(status, finished=finished) == column


def test_requests_are_summed_by_minute() -> None:
    now_s = 600.0
    day = DayHistory(clock=lambda: now_s)
    done = account()
    done.finished, done.first_token_s = True, 0.02
    day.add(200, "", done, UNKNOWN, "")
    day.add(429, "queue_full", account(429), UNKNOWN, "")
    day.add(429, "rate_limit_exceeded", None, UNKNOWN, "")
    now_s = 725.0
    day.add(500, "internal_error", account(500), UNKNOWN, "")
    report = day.report()
    first, early, second = (dict(zip(report["columns"], row, strict=True)) for row in report["rows"])
    assert report["columns"] == ("at", "model", *COLUMNS, "errors", "first_tokens")
    assert (first["at"], first["answered"], first["refused"], first["prompt_tokens"]) == (600, 1, 1, 200)
    assert (first["prefill_saved_s"], first["errors"]) == (0.5, {"queue_full": 1})
    assert sum(first["first_tokens"]) == first["first_tokens"][bisect_left(report["first_token_bounds_s"], 0.02)] == 1
    assert (early["model"], early["refused"], early["errors"]) == ("", 1, {"rate_limit_exceeded": 1})
    assert (second["at"], second["failed"], second["answered"]) == (720, 1, 0)


def test_who_was_turned_away_is_named() -> None:
    day = DayHistory()
    for number in range(MAX_NAMED + 5):
        day.add(429, "queue_full", None, (f"t{number}", "k"), "")
    day.add(429, "queue_full", None, ("t1", "k"), "")
    day.add(400, "bad", None, ("t1", "k"), "")
    assert day.turned_away["refused", "queue_full, tenant t1"] == 2
    assert day.turned_away["refused", "queue_full"] == 5
    assert len(day.turned_away) == MAX_NAMED + 1


def test_who_had_no_answer_is_named_with_the_last_request() -> None:
    now_s = 60.0
    day = DayHistory(clock=lambda: now_s)
    day.add(400, "context_length_exceeded", account(400), ("t", "k"), "req_1")
    day.add(429, "queue_full", None, ("t", "k"), "req_2")
    now_s = 90.0
    day.add(400, "context_length_exceeded", account(400), ("t", "k"), "req_3")
    last, first = day.report()["reasons"]
    assert last == {
        **{"outcome": "wrong", "reason": "context_length_exceeded", "tenant": "t", "key": "k", "model": "m"},
        **{"requests": 2, "last_at": 90.0, "last_id": "req_3"},
    }
    assert (first["outcome"], first["key"], first["model"], first["last_id"]) == ("refused", "k", "", "req_2")
    for number in range(MAX_NAMED + 5):
        day.add(400, "bad", None, (f"t{number}", "k"), "req_4")
    assert len(day.report()["reasons"]) == MAX_NAMED


def test_a_minute_of_yesterday_is_forgotten() -> None:
    now_s = 0.0
    day = DayHistory(clock=lambda: now_s)
    for minute in range(MINUTES + 10):
        now_s = 60.0 * minute
        day.add(200, "", account(), UNKNOWN, "")
    assert [row[0] for row in day.report()["rows"]] == [60 * minute for minute in range(10, MINUTES + 10)]
    now_s += 3600.0
    assert len(day.report()["rows"]) == MINUTES - 60
