"""The gateway's side of the index on a real Redis: lookups."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from cache.records import Candidate, WorkerLoad
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, lookup, schema
from cache.redis_index.client import RedisDownError
from cache.redis_index.lookup import Shard
from cache.types import BlockHash, GatewayId
from tests.cache.redis_index.index_parts import (
    EAGER,
    LASTING,
    becomes,
    chain,
    entries,
    hold,
    linked,
    matches,
    member,
)
from tests.redis_server import RedisServer
from tests.waiting import HANG_S, until


async def test_lookup_returns_every_live_worker_and_its_match(redis_server: RedisServer) -> None:
    hashes = chain(100)
    writers = [IndexWriter(redis_server.url, member(f"w{i}"), LASTING) for i in range(4)]
    index = RedisIndex(redis_server.url, EAGER)
    load = WorkerLoad({GatewayId("g"): 0.5}, 7.0, 8000.0, 1, 2, 3, 4, draining=True)
    async with linked(*writers, index):
        for writer, length in zip(writers, (0, 1, 64, 100), strict=True):
            assert await writer.rewrite(entries(hashes[:length]), load)
        await until(becomes(index, hashes, {"w0": 0, "w1": 1, "w2": 64, "w3": 100}))
        found = await index.lookup(hashes)
        assert found is not None
        assert [item.load for item in found] == [load] * 4
        assert all(item.load_age_s < HANG_S for item in found)
        assert await matches(index, chain(3)) == {"w0": 0, "w1": 0, "w2": 0, "w3": 0}
        (shard,) = index.shards
        shard.failed(time.monotonic())
        assert await matches(index, []) == {"w0": 0, "w1": 0, "w2": 0, "w3": 0}
        assert shard._num_failures == 0, "failures count in a row alone"


async def test_a_defect_in_a_lookup_costs_its_matches_alone(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []
    hashes = chain(3)
    writer, index = (
        IndexWriter(redis_server.url, member("w"), LASTING),
        RedisIndex(redis_server.url, EAGER, count=events.append),
    )
    async with linked(writer, index):
        await hold(hashes, index, writer)
        with monkeypatch.context() as patch:
            patch.setattr(index.shards[0], "_candidates", lambda *_, **__: 1 / 0)
            assert await index.lookup(hashes) is None
        assert "invalid" in events
        assert "ZeroDivisionError" in caplog.text
        await until(becomes(index, hashes, {"w": 3}))


async def test_every_match_length_is_found_from_every_hint(redis_server: RedisServer) -> None:
    hashes = chain(37)
    lengths = [*range(38), *range(37, -1, -1), 0, 37, 0, 1, 36, 5, 20, 19]
    writers = [IndexWriter(redis_server.url, member(f"w{i:03}"), LASTING) for i in range(len(lengths))]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, index):
        for writer, length in zip(writers, lengths, strict=True):
            assert await writer.rewrite(entries(hashes[:length]), WorkerLoad())
        await until(becomes(index, hashes, {f"w{i:03}": length for i, length in enumerate(lengths)}))


async def test_workers_of_another_model_are_not_asked(redis_server: RedisServer) -> None:
    hashes = chain(5)
    writers = [
        IndexWriter(redis_server.url, member("a", model="x"), LASTING),
        IndexWriter(redis_server.url, member("b"), LASTING),
    ]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, index):
        await hold(hashes, index, *writers)
        assert await matches(index, hashes, "x") == {"a": 5}


async def test_shards_are_read_together(redis_server: RedisServer) -> None:
    hashes = chain(6)
    writers = [IndexWriter(redis_server.url, member(f"w{i}"), replace(LASTING, num_shards=4)) for i in range(12)]
    index = RedisIndex(redis_server.url, ReaderSettings(num_shards=4, poll_s=0.02, deadline_s=HANG_S))
    async with linked(*writers, index):
        for i, writer in enumerate(writers):
            assert await writer.rewrite(entries(hashes[: i % 7]), WorkerLoad())
        await until(becomes(index, hashes, {f"w{i}": i % 7 for i in range(12)}))
        assert len(await index.entries()) == 12


async def test_cancelled_lookup_never_passes_its_reply_to_another(redis_server: RedisServer) -> None:
    """Ten thousand lookups are cancelled at every stage; as many concurrent ones get their own answers."""
    chains = [chain(length) for length in range(1, 21)]
    writer = IndexWriter(redis_server.url, member(), LASTING)
    index = RedisIndex(redis_server.url, EAGER)

    async def ask(hashes: list[BlockHash]) -> list[Candidate] | None:
        return await index.lookup(hashes)

    async with linked(writer, index):
        assert await writer.rewrite([entry for hashes in chains for entry in entries(hashes)], WorkerLoad())
        await until(becomes(index, chains[0], {"w0": 1}))
        num_checked = num_cancelled = 0
        for turn in range(600):
            tasks = [(hashes, asyncio.create_task(ask(hashes))) for hashes in chains for _ in range(2)]
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            cancelled = {id(task) for _, task in tasks[turn % 2 :: 2] if task.cancel()}
            num_cancelled += len(cancelled)
            for hashes, task in tasks:
                if id(task) in cancelled:
                    with suppress(asyncio.CancelledError):
                        await task
                    continue
                found = await task
                if found is None:  # Redis stood still
                    continue
                assert [item.matched_blocks for item in found] == [len(hashes)]
                num_checked += 1
        assert num_cancelled >= 10_000
        assert num_checked >= 10_000


async def test_concurrent_lookups_on_a_new_connection_all_succeed(redis_server: RedisServer) -> None:
    """Each lookup learns from its own reply that the script is missing, or EVALSHA_RO on an old server."""
    hashes = chain(3)
    writer, index = IndexWriter(redis_server.url, member()), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        redis_server.command("SCRIPT", "FLUSH")
        (shard,) = index.shards
        shard._evalsha = b"EVALSHA_RO"
        shard._queries.clear()
        found = await asyncio.gather(*(matches(index, hashes) for _ in range(50)))
        assert found == [{"w0": 3}] * 50


@pytest.mark.parametrize("matches", [None, b"QUEUED", [], [b"3"], [-1], [4], [None], [[]], ["x"], [1, 2]])
def test_invalid_match_reaches_no_router(matches: object) -> None:
    shard = Shard("redis://h:1", 0, EAGER, lambda event: None)
    shard.registry.refresh([(b"w0", schema.encode_member(member()))], [])
    query = shard._query(None)
    with pytest.raises(RedisDownError, match="malformed"):
        shard._candidates(query, 3, [b"v", [b"1", b"0"], matches, []])


def test_workers_beyond_a_shards_limit_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_WORKERS_PER_SHARD", 3)
    events: list[str] = []
    shard = Shard("redis://h:1", 0, EAGER, events.append)
    for num_workers in (3, 4):
        names = [f"w{n}" for n in range(num_workers)]
        shard.registry.refresh([(name.encode(), schema.encode_member(member(name))) for name in names], [])
        assert [worker.member.worker_id for worker in shard._query(None).workers] == ["w0", "w1", "w2"]
        assert events == ["invalid"] * (num_workers - 3)


async def test_a_refused_lookup_is_not_tried_again(own_redis: RedisServer) -> None:
    hashes = chain(3)
    writer = IndexWriter(own_redis.url, member(), LASTING)
    index = RedisIndex(own_redis.url, replace(EAGER, poll_s=3600.0))
    async with linked(writer, index):
        await hold(hashes, index, writer)
        own_redis.command("ACL", "SETUSER", "default", "-@scripting")
        assert await index.lookup(hashes) is None
        assert b"errorstat_NOPERM:count=1\r\n" in own_redis.command("INFO", "errorstats")
