"""The account of the adapter's requests: who waits, for how long, and how fast the engine prefills."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.adapter import load as load_module
from worker.adapter.api import EngineLoad
from worker.adapter.load import LoadAccount, Prefill
from worker.adapter.prefill_line import PrefillLine


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


def prefill(account: LoadAccount, clock: Clock, num_tokens: int, duration_s: float) -> None:
    """One prefill by itself, and a pause."""
    sent = account.send("g", num_tokens)
    clock.now_s += duration_s
    account.first_token(sent)
    account.end(sent)
    clock.now_s += 1.0
    account.current(None, 16, False)


def teach(account: LoadAccount, clock: Clock, fixed_s: float = 0.1, tokens_per_s: float = 1000.0) -> None:
    for num_tokens in (100, 900, 500, 2000, 300):
        prefill(account, clock, num_tokens, fixed_s + num_tokens / tokens_per_s)


def test_lengths_split_both_numbers(clock: Clock) -> None:
    account = LoadAccount()
    for _ in range(5):
        prefill(account, clock, 500, 0.6)
    load = account.current(None, 16, False)
    assert (load.prefill_tokens_per_s, load.prefill_fixed_s) == (0.0, 0.0), "one length has only their sum"
    assert account.line.seconds(500) == pytest.approx(0.6)
    teach(account, clock)
    load = account.current(None, 16, False)
    assert (load.prefill_tokens_per_s, load.prefill_fixed_s) == pytest.approx((1000.0, 0.1))
    for _ in range(200):
        prefill(account, clock, 500, 0.7)
    load = account.current(None, 16, False)
    assert load.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.15), "the last that was known"
    assert account.line.seconds(500) == pytest.approx(0.7, rel=0.01)


def test_a_rate_of_short_prefills_is_not_sure(clock: Clock) -> None:
    account = LoadAccount()
    for _ in range(20):
        teach(account, clock, 2.0)
    assert account.current(None, 16, False).is_rate_unsure
    for _ in range(30):
        teach(account, clock, 0.01)
    assert not account.current(None, 16, False).is_rate_unsure


def test_prefills_are_measured_from_token_to_token(clock: Clock) -> None:
    account = LoadAccount()
    teach(account, clock)
    started: list[int] = []
    sizes = (1000, 200, 3000, 700, 50, 1500)
    waiting = [account.send("g", num_tokens, partial(started.append, num_tokens)) for num_tokens in sizes]
    for number, each in enumerate(waiting, 1):
        assert started == [*sizes[:number]], "in line, and once"
        clock.now_s += 0.1 + each.num_tokens / 1000
        account.first_token(each)
        account.first_token(each)
    assert account.current(None, 16, False).queued_prefill_s == {}
    assert account.line.tokens_per_s == pytest.approx(1000.0)


def test_first_tokens_of_one_step_are_one_measurement(clock: Clock) -> None:
    """In any order: the engine computes several prompts in a step."""
    account = LoadAccount()
    for sizes in ((100, 400), (50, 50, 900), (300, 20), (1000, 1), (10, 10, 10)) * 4:
        step = [account.send("g", num_tokens) for num_tokens in sizes]
        clock.now_s += 0.1 + sum(sizes) / 1000
        for each in reversed(step):
            clock.now_s += 0.0002
            account.first_token(each)
        clock.now_s += 1.0
    account.current(None, 16, False)
    assert account.line.tokens_per_s == pytest.approx(1000.0, rel=0.02)


def test_the_rate_after_an_aborted_prefill(clock: Clock) -> None:
    """The next one may have been computed in part: it measures nothing."""
    account = LoadAccount()
    teach(account, clock)
    first, second, third = [account.send("g", num_tokens) for num_tokens in (100_000, 4000, 1000)]
    clock.now_s += 9.0
    account.drop(first)
    clock.now_s += 0.5
    account.first_token(second)
    clock.now_s += 1.1
    account.first_token(third)
    account.current(None, 16, False)
    assert account.line.tokens_per_s == pytest.approx(1000.0)


def test_one_bad_measurement_is_outvoted(clock: Clock) -> None:
    """Within 20 s of traffic, wherever it comes: the first one, as of an engine that compiles, or one later."""
    for when in ("first", "later"):
        account = LoadAccount()
        if when == "later":
            teach(account, clock)
        prefill(account, clock, 150, 60.0)
        assert when == "later" or account.current(None, 16, False).prefill_tokens_per_s == 0.0, "unmeasured, not slow"
        for num_tokens in (1000, 200, 3000, 700, 50, 1500, 4000, 600, 2500, 1200, 300, 900):
            prefill(account, clock, num_tokens, 0.1 + num_tokens / 1000)
        for num_tokens in (500, 1000, 4000, 8000):
            assert account.line.seconds(num_tokens) == pytest.approx(0.1 + num_tokens / 1000, rel=0.15)


def test_prefills_without_a_first_token_to_see(clock: Clock) -> None:
    """Requests that are not streamed spoil no measurement, and the engine's totals measure without streams."""
    account = LoadAccount()
    teach(account, clock)
    unseen = account.send("g", 8000, is_seen=False)
    clock.now_s += 0.3
    account.drop(unseen)
    for _ in range(5):
        prefill(account, clock, 100, 5.0)
    assert account.line.tokens_per_s == pytest.approx(1000.0)
    account.end(unseen)
    totals = EngineLoad(1.0, 0, 0, 10, 16, 0.0)
    account.read(totals)
    for num_tokens in (1000, 200, 3000, 700, 50, 1500) * 20:
        clock.now_s += 11.0
        done = totals.num_prefills + 1, totals.prefill_tokens + num_tokens, totals.prefill_s + 0.2 + num_tokens / 500
        totals = replace(totals, num_prefills=done[0], prefill_tokens=done[1], prefill_s=done[2])
        account.read(totals)
    assert (account.line.tokens_per_s, account.line.fixed_s) == pytest.approx((500.0, 0.2), rel=0.02)


def test_the_engines_totals_bound_the_rate(clock: Clock) -> None:
    """It cannot be slower than what its prefills took together."""
    account = LoadAccount()
    teach(account, clock, 0.1, 1000.0)
    account.read(EngineLoad(1.0, 0, 0, 10, 16, 0.0))
    account.read(EngineLoad(1.0, 0, 0, 10, 16, 0.0, 40_000.0, 10.0, 20))
    teach(account, clock, 0.1, 1000.0)
    assert account.line.tokens_per_s >= 4000.0
    account.read(EngineLoad(2.0, 0, 0, 10, 16, 0.0))
    assert account.line.tokens_per_s >= 4000.0, "the totals of another process count for nothing"


def test_each_prefill_ends_after_those_before_it(clock: Clock) -> None:
    account = LoadAccount()
    account.line = PrefillLine(0.001)
    for number in range(3):
        account.send("g", 1000)
        assert account.seconds_left() == pytest.approx(number + 1)
    clock.now_s += 0.5
    assert account.seconds_left() == pytest.approx(2.5)
    clock.now_s += 5.0
    assert account.seconds_left() == pytest.approx(2.0), "the first is late"


def test_load_in_blocks_of_this_worker() -> None:
    account = LoadAccount()
    account.line = PrefillLine(0.001)
    account.send("g", 500)
    account.num_open_choices = 3
    load = account.current(EngineLoad(1.0, 7, 0, 100, 32, 0.25), 16, True)
    assert (load.num_blocks, load.num_free_blocks) == (200, 150)
    assert (load.num_running, load.num_waiting) == (7, 0)
    assert load.queued_prefill_s == {"g": 0.5}
    assert load.assigned_prefill_s == 0.5
    assert load.draining
    account.begin_epoch()
    assert account.current(None, 16, False).assigned_prefill_s == 0.0


@given(st.lists(st.tuples(st.sampled_from(["send", "token", "drop"]), st.integers(0, 7)), max_size=40))
def test_every_ending_empties_the_books(steps: list[tuple[str, int]]) -> None:
    account = LoadAccount()
    account.line = PrefillLine(0.001)
    waiting: list[Prefill] = []
    for kind, number in steps:
        match kind:
            case "send":
                waiting.append(account.send(f"g{number % 3}", 10 * number))
            case _ if waiting:
                prefill = waiting.pop(number % len(waiting))
                account.first_token(prefill) if kind == "token" else account.drop(prefill)
        queued = account.current(None, 16, False).queued_prefill_s
        assert set(queued) == {prefill.gateway_id for prefill in waiting}
        assert sum(queued.values()) == pytest.approx(sum(account.line.seconds(p.num_tokens) for p in waiting))
    for prefill in waiting:
        account.drop(prefill)
    assert account.current(None, 16, False).queued_prefill_s == {}
