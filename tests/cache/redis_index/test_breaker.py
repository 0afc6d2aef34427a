"""A Redis that is down: lookups cost little, a breaker opens, and the index comes back."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio.connection import Connection

from cache.records import Candidate
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex
from cache.redis_index.lookup import Shard
from tests.cache.redis_index.index_parts import (
    FAILURES,
    LASTING,
    becomes,
    chain,
    hold,
    linked,
    member,
)
from tests.redis_server import RedisServer
from tests.running import running
from tests.waiting import HANG_S, until


async def test_a_stopped_redis_costs_little_and_comes_back(own_redis: RedisServer) -> None:
    hashes = chain(10)
    writer = IndexWriter(own_redis.url, member(), LASTING)
    events: list[str] = []
    index = RedisIndex(own_redis.url, ReaderSettings(breaker_probe_s=0.05), count=events.append)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        own_redis.stop()
        events.clear()
        for _ in range(50):
            assert await index.lookup(hashes) is None
        assert events.count("timeout") <= FAILURES, "then the breaker is open, and nothing is waited for"
        assert events.count("skipped") == 50 - events.count("timeout")
        assert "breaker_opened" in events
        own_redis.resume()
        await until(becomes(index, hashes, {"w0": 10}))
        assert "breaker_closed" in events


async def test_a_killed_redis_costs_little_and_comes_back(own_redis: RedisServer) -> None:
    hashes = chain(10)
    writer = IndexWriter(own_redis.url, member(), LASTING)
    events: list[str] = []
    settings = ReaderSettings(breaker_probe_s=0.05, max_refresh_age_s=3600.0)
    index = RedisIndex(own_redis.url, settings, count=events.append)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        own_redis.kill()
        await until(lambda: not (writer.client.up or index.health()[0]["connected"]))
        events.clear()
        for _ in range(20):
            assert await index.lookup(hashes) is None
        assert events.count("down") + events.count("skipped") == 20, "nothing is waited for"
        own_redis.start()
        await until(lambda: writer.client.up)
        assert writer.in_doubt
        await hold(hashes, index, writer)


async def test_missing_redis_is_no_error() -> None:
    index = RedisIndex("unix:///nonexistent/redis.sock")
    async with running(index):
        await asyncio.sleep(0)
        assert await index.lookup(chain(3)) is None
        assert index.members() == []
        assert not index.health()[0]["connected"]


def test_failures_in_a_row_open_the_breaker() -> None:
    events: list[str] = []
    shard = Shard("redis://h:1", 0, ReaderSettings(breaker_failures=3), events.append)
    for _ in range(3):
        shard.failed(time.monotonic())
        shard.failed(time.monotonic())
        assert not shard.breaker_open
        shard.succeeded()
    for _ in range(3):
        shard.failed(time.monotonic())
    assert shard.breaker_open
    shard.succeeded()
    assert not shard.breaker_open
    assert events == ["breaker_opened", "breaker_closed"]


def test_lookups_that_wait_together_are_one_failure() -> None:
    """One late reply of Redis must not open the breaker, however many lookups wait for it."""
    settings = ReaderSettings(breaker_failures=3, deadline_s=HANG_S)
    shard = Shard("redis://h:1", 0, settings, lambda event: None)
    for _ in range(2):
        begun_at = time.monotonic()
        for _ in range(20):
            shard.failed(begun_at)
        assert not shard.breaker_open
    shard.failed(time.monotonic())
    assert shard.breaker_open
    shard.succeeded()
    begun_at = time.monotonic() - 3 * HANG_S
    for _ in range(3):
        shard.failed(begun_at)
    assert shard.breaker_open, "this process has too little time: its own lookups end late"


async def test_an_answer_past_the_deadline_does_not_close_the_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ReaderSettings(deadline_s=0.02, breaker_failures=1, breaker_probe_s=0.001, poll_s=0.001)
    shard = Shard("redis://h:1", 0, settings, lambda event: None)
    shard.client._connection = Connection()
    delay_s, num_probes = 0.03, 0

    async def lookup(blob: bytes, model: str | None, *, reads_states: bool) -> list[Candidate]:
        nonlocal num_probes
        await asyncio.sleep(delay_s)
        num_probes += 1
        return []

    monkeypatch.setattr(shard, "lookup", lookup)
    shard.failed(time.monotonic())
    probing = asyncio.create_task(shard.probe())
    try:
        await until(lambda: num_probes == 3)
        assert shard.breaker_open
        delay_s = 0.0
        await until(lambda: not shard.breaker_open)
    finally:
        probing.cancel()
