"""The gateway itself refuses too many waiting tokens, and requests that full workers have just refused."""

from __future__ import annotations

import pytest

from cache.types import Epoch, WorkerId
from server.errors import OverloadedError
from server.request.limits import BACKPRESSURE_S, BackpressureCache, PromptTokenLimiter
from server.workers.connection import WorkerRefused
from worker.wire import Failed


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


A, B = (WorkerId("a"), Epoch("1")), (WorkerId("b"), Epoch("1"))


def test_each_tenant_fills_its_own_share() -> None:
    clock = Clock()
    limiter = PromptTokenLimiter(1000, clock=clock)
    for _ in range(10):
        limiter.reserve("heavy", 100)
    with pytest.raises(OverloadedError) as refused:
        limiter.reserve("heavy", 1)
    assert refused.value.retry_after_s == 1.0, "nothing is known of the pace"
    for _ in range(5):
        limiter.reserve("weak", 100)
    with pytest.raises(OverloadedError):
        limiter.reserve("weak", 1)
    clock.now_s += 1
    for tenant in ["heavy"] * 10 + ["weak"] * 5:
        limiter.release(tenant, 100)
    assert limiter.num_tokens == 0
    limiter.reserve("heavy", 5000)
    limiter.release("heavy", 5000)
    limiter.reserve("heavy", 900)
    with pytest.raises(OverloadedError) as refused:
        limiter.reserve("heavy", 200)
    assert refused.value.retry_after_s == pytest.approx(900 / 650)


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
