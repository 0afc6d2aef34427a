from __future__ import annotations

from cache.types import Epoch, WorkerId
from server.request.full_queues import PAUSE_S, FullQueues
from server.workers.client import WorkerRefused
from worker.wire import Failed

A, B = (WorkerId("a"), Epoch("1")), (WorkerId("b"), Epoch("1"))


def refused(retry_after_s: float | None) -> WorkerRefused:
    return WorkerRefused(429, Failed("queue_full", "full", retryable=True, retry_after_s=retry_after_s))


def test_only_the_refused_tenant_stays_away_and_only_for_a_while() -> None:
    now_s = 0.0
    queues = FullQueues(clock=lambda: now_s)
    first, second = refused(2.0), refused(0.01)
    queues.note(A, "flood", first)
    queues.note(B, "flood", second)
    assert queues.of("flood") == {A: first, B: second}
    assert queues.of("weak") == {}
    now_s = 0.02
    assert queues.of("flood") == {A: first}, "B has said that it is soon free"
    now_s = PAUSE_S + 0.001
    assert queues.of("flood") == {}
    assert not queues._by_tenant, "nothing is kept of a tenant that may never come again"
