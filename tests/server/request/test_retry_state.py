"""Shared state of failed attempts: full workers, the retry budget, poison requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cache.types import Epoch, WorkerId
from server.request.retry_state import (
    BACKPRESSURE_S,
    MAX_POISON_ENTRIES,
    MAX_RETRIES,
    POISON_TTL_S,
    BackpressureCache,
    PoisonCache,
    RetryBudget,
)
from server.workers.connection import WorkerRefused
from worker.wire import Failed, SamplingParams


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


A, B = (WorkerId("a"), Epoch("1")), (WorkerId("b"), Epoch("1"))


def refusal(retry_after_s: float | None) -> WorkerRefused:
    return WorkerRefused(429, Failed("queue_full", "full", retryable=True, retry_after_s=retry_after_s))


def test_only_the_refused_tenant_stays_away_and_only_for_a_while() -> None:
    clock = Clock()
    cache = BackpressureCache(clock=clock)
    first, second = refusal(2.0), refusal(0.01)
    cache.add(A, "flood", first)
    cache.add(B, "flood", second)
    assert cache.refusals("flood") == {A: first, B: second}
    assert cache.refusals("weak") == {}
    clock.now_s += 0.02
    assert cache.refusals("flood") == {A: first}, "B has room sooner"
    clock.now_s += BACKPRESSURE_S
    assert cache.refusals("flood") == {}
    assert not cache._by_tenant, "nothing is kept of a tenant that may never come again"


def test_requests_and_time_earn_retries_up_to_a_limit() -> None:
    now_s = 0.0
    budget = RetryBudget(clock=lambda: now_s)

    def num_allowed() -> int:
        return next(number for number in range(10_000) if not budget.spend())

    def earn(num_requests: int) -> None:
        for _ in range(num_requests):
            budget.earn()

    assert num_allowed() == MAX_RETRIES
    assert num_allowed() == 0
    now_s += 4.25
    assert num_allowed() == 8
    earn(35)
    assert num_allowed() == 4
    now_s += 1e6
    earn(1000)
    assert num_allowed() == MAX_RETRIES


def test_a_poison_request_is_known_by_all_that_is_computed() -> None:
    now_s = 0.0
    cache = PoisonCache(clock=lambda: now_s)

    def spec(ids: list[int], root: bytes = b"r" * 16, max_tokens: int = 5) -> Any:
        return SimpleNamespace(root=root, prompt_ids=ids, sampling=SamplingParams(max_tokens=max_tokens))

    assert spec([1, 2]) not in cache
    cache.add(spec([1, 2]))
    assert spec([1, 2]) in cache
    for other in (spec([1, 2, 3]), spec([1, 2], max_tokens=6), spec([1, 2], root=b"s" * 16)):
        assert other not in cache
    for number in range(MAX_POISON_ENTRIES):
        cache.add(spec([number]))
    assert len(cache._until_s) == MAX_POISON_ENTRIES
    assert spec([1, 2]) not in cache, "the oldest made room"
    assert spec([1]) in cache
    now_s += POISON_TTL_S + 1
    assert not any(spec([number]) in cache for number in range(MAX_POISON_ENTRIES))
    assert not cache._until_s
