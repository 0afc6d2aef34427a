"""Shared state of failed attempts: the retry budget, poison requests."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from cache.hashing import MediaStart
from server.request import services
from server.request.services import (
    MAX_POISON_ENTRIES,
    MAX_RETRIES,
    POISON_TTL_S,
    RETRIES_PER_REQUEST,
    PoisonCache,
    retry_budget,
)
from worker.wire import Embed, EngineCall, SamplingParams


def test_requests_and_time_earn_retries_up_to_a_limit() -> None:
    now_s, budget = 0.0, retry_budget()

    def num_allowed() -> int:
        return next(number for number in range(10_000) if budget.take(now_s))

    def earn(num_requests: int) -> None:
        for _ in range(num_requests):
            budget.add(now_s, RETRIES_PER_REQUEST)

    assert num_allowed() == MAX_RETRIES
    assert num_allowed() == 0
    now_s += 4.25
    assert num_allowed() == 8
    earn(36)
    assert num_allowed() == 4
    now_s += 1e6
    earn(1000)
    assert num_allowed() == MAX_RETRIES


def test_a_poison_request_is_known_by_all_that_is_computed() -> None:
    now_s = 0.0
    cache = PoisonCache(clock=lambda: now_s)

    def spec(ids: list[int], max_tokens: int = 5, call: EngineCall | None = None, **changes: Any) -> Any:
        text_request = None if call is None else SimpleNamespace(call=call)
        fields = {"root": b"r" * 16, "embed": None, "media": (), "text_request": text_request, **changes}
        return SimpleNamespace(prompt_ids=ids, sampling=SamplingParams(max_tokens=max_tokens), **fields)

    assert spec([1, 2]) not in cache
    cache.add(spec([1, 2]))
    assert spec([1, 2]) in cache
    for other in (
        spec([1, 2, 3]),
        spec([1, 2], max_tokens=6),
        spec([1, 2], root=b"s" * 16),
        spec([1, 2], embed=Embed()),
        spec([1, 2], media=(MediaStart("image", 1),)),
    ):
        assert other not in cache
    cache.add(spec([], call=EngineCall("/v1/embeddings", b"1")))
    assert spec([], call=EngineCall("/v1/embeddings", b"1")) in cache
    assert spec([], call=EngineCall("/v1/embeddings", b"2")) not in cache, "an engine reads the prompt itself"
    assert spec([], call=EngineCall("/rerank", b"1")) not in cache
    for number in range(MAX_POISON_ENTRIES):
        cache.add(spec([number]))
    assert len(cache._until_s) == MAX_POISON_ENTRIES
    assert spec([1, 2]) not in cache, "the oldest made room"
    assert spec([1]) in cache
    now_s += POISON_TTL_S + 1
    assert not any(spec([number]) in cache for number in range(MAX_POISON_ENTRIES))


def test_expired_poison_costs_other_requests_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails again expires later than those after it."""
    now_s = 0.0
    cache = PoisonCache(clock=lambda: now_s)
    num_hashed = Counter[str]()
    monkeypatch.setattr(services, "_poison_key", lambda spec: num_hashed.update([spec]) or spec)
    names: Any = ["first", "second", "first"]
    for name in names:
        cache.add(name)
        now_s += 1.0
    now_s += POISON_TTL_S - 2.0
    assert names[0] in cache
    assert names[1] not in cache
    now_s += 1.0
    num_hashed.clear()
    assert names[0] not in cache
    assert not num_hashed
