"""The minutes of the last day."""

from __future__ import annotations

import pytest

from server.usage.account import Account
from server.usage.day import COLUMNS, MINUTES, DayHistory, outcome


def account(status: int = 200, *, finished: bool = True) -> Account:
    return Account(
        tenant="t", key="k", route="chat", status=status, finished=finished, prompt_tokens=100, prefill_saved_s=0.25
    )


@pytest.mark.parametrize(
    ("status", "finished", "column"),
    [
        (200, True, "answered"),
        (400, False, "answered"),
        (200, False, "failed"),
        (500, False, "failed"),
        (503, False, "failed"),
        (429, False, "refused"),
        (499, False, "left"),
        (0, False, "left"),
    ],
)
def test_outcomes(status: int, finished: bool, column: str) -> None:
    assert outcome(account(status, finished=finished)) == column


def test_requests_are_summed_by_minute() -> None:
    now_s = 600.0
    day = DayHistory(clock=lambda: now_s)
    for status in (200, 429):
        day.add(account(status))
    now_s = 725.0
    day.add(account(500))
    report = day.report()
    first, second = (dict(zip(report["columns"], row, strict=True)) for row in report["rows"])
    assert report["columns"] == ("at", *COLUMNS)
    assert (first["at"], first["answered"], first["refused"], first["prompt_tokens"]) == (600, 1, 1, 200)
    assert first["prefill_saved_s"] == 0.5
    assert (second["at"], second["failed"], second["answered"]) == (720, 1, 0)


def test_a_minute_of_yesterday_is_forgotten() -> None:
    now_s = 0.0
    day = DayHistory(clock=lambda: now_s)
    for minute in range(MINUTES + 10):
        now_s = 60.0 * minute
        day.add(account())
    assert [row[0] for row in day.report()["rows"]] == [60 * minute for minute in range(10, MINUTES + 10)]
    now_s += 3600.0
    assert len(day.report()["rows"]) == MINUTES - 60
