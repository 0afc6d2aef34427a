"""Counters by tenant and key: bounded, and never counted twice or lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.usage import totals as module
from server.usage.account import Account, PromptTimes
from server.usage.totals import MAX_SERIES, OTHER, UsageTotals


def account(key: str, num_tokens: int, tenant: str = "one") -> Account:
    cached = {"pool": num_tokens // 2, "peer": num_tokens // 4}
    return Account(tenant=tenant, key=key, route="chat", prompt_tokens=num_tokens, cached_tokens=cached, queue_s=0.5)


def samples(totals: UsageTotals, name: str) -> dict[tuple[str, ...], float]:
    (family,) = [each for each in totals.collect() if each.name == f"headstart_usage_{name}"]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_each_key_has_its_series() -> None:
    totals = UsageTotals(clock=lambda: 0.0)
    for key, num_tokens in (("a", 100), ("b", 8), ("a", 100)):
        totals.add(account(key, num_tokens))
    assert samples(totals, "requests")["one", "a"] == 2
    assert samples(totals, "tokens")["one", "a", "prompt"] == 200
    assert samples(totals, "cached_tokens")["one", "a", "pool"] == 100
    assert samples(totals, "cached_tokens")["one", "b", "peer"] == 2
    assert samples(totals, "seconds")["one", "b", "queue"] == 0.5
    assert samples(totals, "requests")[OTHER, OTHER] == 0
    (row,) = totals.by_tenant(8)
    assert (row["tenant"], row["requests"], row["prompt_tokens"], row["cached_tokens"]) == ("one", 3, 208, 156)


def test_a_key_named_as_the_rest_has_no_second_series() -> None:
    """Prometheus would drop one of two with the same labels."""
    totals = UsageTotals(clock=lambda: 0.0)
    totals.add(account(OTHER, 100, tenant=OTHER))
    [family] = [each for each in totals.collect() if each.name == "headstart_usage_requests"]
    assert [sample.value for sample in family.samples] == [1]


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 10_000), st.floats(0.0, 5.0)), max_size=400))
def test_increases_sum_to_what_was_used(uses: list[tuple[int, int, float]]) -> None:
    """A reader that adds up the increases of all series, new ones from zero, gets every token."""
    now_s, seen, increased = 0.0, dict[tuple[str, ...], float](), 0.0
    totals = UsageTotals(clock=lambda: now_s)
    for key, num_tokens, step_s in uses:
        now_s += step_s
        totals.add(account(f"k{key}", num_tokens))
        current = samples(totals, "tokens")
        assert len(current) <= 2 * (MAX_SERIES + 1)
        increased += sum(max(0.0, value - seen.get(name, 0.0)) for name, value in current.items())
        assert all(value >= seen.get(name, 0.0) for name, value in current.items()), "no series goes back"
        seen = current
    assert increased == sum(num_tokens for _, num_tokens, _ in uses)


def test_a_heavy_key_takes_the_series_of_a_light_one() -> None:
    now_s = 0.0
    totals = UsageTotals(clock=lambda: now_s)
    for number in range(MAX_SERIES):
        totals.add(account(f"k{number}", 10 + number))
    for _ in range(10):
        now_s += 1.0
        totals.add(account("heavy", 1000))
    names = {key for _, key in samples(totals, "requests")}
    assert "heavy" in names
    assert "k0" not in names
    assert len(names) == MAX_SERIES + 1


def test_the_ranking_is_bounded() -> None:
    totals = UsageTotals(clock=lambda: 0.0)
    for number in range(module.MAX_RANKED + 100):
        totals.add(account(f"k{number}", 1))
    assert len(totals._weights) == module.MAX_RANKED


def test_times_of_a_prompt_that_is_moved() -> None:
    """Waits and times at workers add up. The rate is that of the first worker."""
    now_s = 0.0
    times = PromptTimes(lambda: now_s)
    first, second = (lambda: times.start(100.0, 0.1)), (lambda: times.start(5.0, 0.2))
    steps = (times.wait, first, times.wait, second, times.wait, times.stop)
    for step, after_s in zip(steps, (1.0, 2.0, 4.0, 8.0, 0.0, 16.0), strict=True):
        step()
        now_s += after_s
    times.stop()
    assert (times.queue_s, times.held_s, times.tokens_per_s, times.fixed_s) == (5.0, 10.0, 100.0, 0.1)


@given(
    gateway_s=st.floats(0.0, 100.0),
    queue_s=st.none() | st.floats(0.0, 100.0),
    passed_s=st.floats(0.0, 100.0),
    held_s=st.floats(0.0, 100.0),
)
def test_only_time_in_queues_counts_as_waiting(
    gateway_s: float, queue_s: float | None, passed_s: float, held_s: float
) -> None:
    """Time that a worker does not report as its queue was on the wire. A worker's clock may report too much."""
    now_s = 0.0
    times = PromptTimes(lambda: now_s)
    for step, after_s in (
        (times.wait, gateway_s),
        (times.wait, passed_s),
        (lambda: times.start(1.0, 0.0, queue_s), held_s),
        (times.stop, 0.0),
    ):
        step()
        now_s += after_s
    at_worker_s = passed_s if queue_s is None else min(queue_s, passed_s)
    assert times.queue_s == pytest.approx(gateway_s + at_worker_s)
    assert times.wire_s == pytest.approx(passed_s - at_worker_s)
    assert times.held_s == pytest.approx(held_s)
