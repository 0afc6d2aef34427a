"""The gateway refuses prompts beyond its limit of waiting tokens."""

from __future__ import annotations

import pytest

from server.errors import OverloadedError
from server.request.queue_limit import PromptTokenLimiter


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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
