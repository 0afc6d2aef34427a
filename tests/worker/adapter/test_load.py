"""The account of the adapter's requests: who waits, for how long, and how fast the engine prefills."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.adapter import load as load_module
from worker.adapter.api import EngineLoad
from worker.adapter.load import LoadAccount, Prefill
from worker.contracts.engine import RequestKey
from worker.contracts.rates import PrefillRate

KEY = RequestKey(0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load_module, "time", clock)
    return clock


def test_the_rate_is_measured_from_token_to_token(clock: Clock) -> None:
    account = LoadAccount()
    first, second = account.send(KEY, "g", 1000), account.send(KEY, "h", 500)
    assert account.start_first() is first
    assert account.start_first() is None, "once"
    clock.now_s += 2.0
    account.first_token(first)
    assert account.rate.tokens_per_s == pytest.approx(500.0)
    assert account.start_first() is second
    clock.now_s += 1.0
    account.first_token(second)
    assert account.rate.tokens_per_s == pytest.approx(500.0)
    account.first_token(second)
    assert account.current(None, 16, False).queued_prefill_s == {}


def test_small_prefills_measure_nothing(clock: Clock) -> None:
    account = LoadAccount()
    prefill = account.send(KEY, "g", load_module.MIN_MEASURED_TOKENS - 1)
    account.start_first()
    clock.now_s += 1.0
    account.first_token(prefill)
    assert account.rate.tokens_per_s == 0.0


def test_a_token_out_of_turn_measures_nothing(clock: Clock) -> None:
    account = LoadAccount()
    first, second = account.send(KEY, "g", 1000), account.send(KEY, "g", 1000)
    account.start_first()
    clock.now_s += 1.0
    account.first_token(second)
    assert account.rate.tokens_per_s == 0.0
    account.drop(first)
    account.drop(first)


def test_the_rate_after_an_aborted_prefill(clock: Clock) -> None:
    """The next prefill counts from the abort, not from when it was sent."""
    account = LoadAccount()
    first, second = account.send(KEY, "g", 100_000), account.send(KEY, "g", 4000)
    assert account.start_first() is first
    clock.now_s += 9.0
    account.drop(first)
    assert account.start_first() is second
    clock.now_s += 0.5
    account.first_token(second)
    assert account.rate.tokens_per_s == pytest.approx(8000.0)


def test_the_engines_totals_are_a_beginning() -> None:
    account = LoadAccount()
    account.seed_rate(EngineLoad(1.0, 0, 0, 10, 16, 0.0))
    assert account.rate.tokens_per_s == 0.0
    account.seed_rate(EngineLoad(1.0, 0, 0, 10, 16, 0.0, 3000.0, 2.0))
    account.seed_rate(EngineLoad(1.0, 0, 0, 10, 16, 0.0, 9.0, 2.0))
    assert account.rate.tokens_per_s == 1500.0


def test_each_prefill_ends_after_those_before_it(clock: Clock) -> None:
    account = LoadAccount()
    account.rate = PrefillRate(1000, 1.0)
    for number in range(3):
        account.send(KEY, "g", 1000)
        account.start_first()
        assert account.seconds_left() == pytest.approx(number + 1)
    clock.now_s += 0.5
    assert account.seconds_left() == pytest.approx(2.5)
    clock.now_s += 5.0
    assert account.seconds_left() == pytest.approx(2.0), "the first is late"


def test_a_rate_behind_a_prefill_without_a_token(clock: Clock) -> None:
    account = LoadAccount()
    unseen, second = account.send(KEY, "g", 1000), account.send(KEY, "g", 1000)
    account.start_first()
    clock.now_s += 1.0
    account.drop(unseen)
    account.start_first()
    clock.now_s += 1.0
    account.first_token(second)
    assert account.rate.tokens_per_s == pytest.approx(1000.0)


def test_load_in_blocks_of_this_worker() -> None:
    account = LoadAccount()
    account.rate = PrefillRate(1000, 1.0)
    account.send(KEY, "g", 500)
    account.num_open_choices = 3
    load = account.current(EngineLoad(1.0, 7, 0, 100, 32, 0.25), 16, True)
    assert (load.num_blocks, load.num_free_blocks) == (200, 150)
    assert (load.num_running, load.num_waiting) == (7, 0)
    assert load.queued_prefill_s == {"g": 0.5}
    assert load.assigned_prefill_s == 0.5
    assert load.draining
    account.begin_epoch()
    assert account.current(None, 16, False).assigned_prefill_s == 0.0


@given(st.lists(st.tuples(st.sampled_from(["send", "token", "drop", "start"]), st.integers(0, 7)), max_size=40))
def test_every_ending_empties_the_books(steps: list[tuple[str, int]]) -> None:
    account = LoadAccount()
    account.rate = PrefillRate(1000, 1.0)
    waiting: list[Prefill] = []
    for kind, number in steps:
        match kind:
            case "send":
                waiting.append(account.send(KEY, f"g{number % 3}", 10 * number))
            case "start":
                account.start_first()
            case _ if waiting:
                prefill = waiting.pop(number % len(waiting))
                account.first_token(prefill) if kind == "token" else account.drop(prefill)
        queued = account.current(None, 16, False).queued_prefill_s
        assert set(queued) == {prefill.gateway_id for prefill in waiting}
        assert sum(queued.values()) == pytest.approx(sum(account.rate.seconds(p.num_tokens) for p in waiting))
    for prefill in waiting:
        account.drop(prefill)
    assert account.current(None, 16, False).queued_prefill_s == {}
    assert account.start_first() is None
