from __future__ import annotations

from server.request.retry import MAX_BALANCE, RetryBudget


def test_retries_are_earned_by_requests_and_by_time_and_saved_up_to_a_limit() -> None:
    now_s = 0.0
    budget = RetryBudget(clock=lambda: now_s)

    def num_allowed() -> int:
        return next(number for number in range(10_000) if not budget.spend())

    assert num_allowed() == MAX_BALANCE
    assert num_allowed() == 0
    now_s += 4.25
    assert num_allowed() == 8
    for _ in range(35):
        budget.earn()
    assert num_allowed() == 4
    now_s += 1e6
    for _ in range(1000):
        budget.earn()
    assert num_allowed() == MAX_BALANCE
