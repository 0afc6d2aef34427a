"""A slow or loading Redis, and a read-only replica: lookups stay cheap, and recover afterwards."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cache.hashing import index_entry
from cache.records import WorkerLoad
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, SetChange, WriterSettings
from cache.types import BlockHash
from tests.cache.redis_index.index_parts import LASTING, chain, entries, member
from tests.faults.proxy import FaultProxy
from tests.redis_server import RedisServer, needs_redis_7
from tests.running import running
from tests.waiting import until

SETTINGS = ReaderSettings(poll_s=0.05, refresh_interval_s=0.0, breaker_probe_s=0.05)

GATEWAY_RIGHTS = (
    "+get",
    "+hgetall",
    "+time",
    "+evalsha_ro",
    "+script|load",
    "+sismember",
    "+smismember",
    "+hmget",
    "+hvals",
    *("+hlen", "+hkeys", "+hstrlen", "+memory|usage"),
)
WORKER_RIGHTS = (
    *("+multi", "+exec", "+time", "+get", "+set", "+sadd", "+srem", "+smismember", "+scard", "+pexpire", "+unlink"),
    *("+hset", "+hget", "+hexists", "+hdel", "+hgetall", "+hlen", "+hkeys", "+hmget", "+hstrlen", "+memory|usage"),
)


class Scene:
    """A worker that writes to the server directly, and a gateway that reads through the proxy."""

    def __init__(self, server: RedisServer, proxy: FaultProxy) -> None:
        self.events: list[str] = []
        self.writer = IndexWriter(server.url, member(), LASTING)
        self.index = RedisIndex(f"redis://127.0.0.1:{proxy.port}", SETTINGS, count=self.events.append)
        self.hashes = chain(10)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all parts, and begin when the index finds what the worker has written."""
        async with running(self.writer, self.index):
            await until(self.write)
            await until(self.sees)
            yield

    async def write(self) -> bool:
        if not self.writer.client.up:
            return False
        return await self.writer.rewrite(entries(self.hashes), WorkerLoad())

    async def sees(self) -> bool:
        found = await self.index.lookup(self.hashes)
        return found is not None and [item.matched_blocks for item in found] == [10]

    async def costs_little(self) -> bool:
        """Return whether an open breaker makes most of 51 lookups skip Redis."""
        self.events.clear()
        for _ in range(51):
            await self.index.lookup(self.hashes)
        return self.events.count("skipped") >= 51 - 2 * SETTINGS.breaker_failures


@pytest.fixture
def proxy(own_redis: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(own_redis.socket) as running:
        yield running


@pytest.mark.parametrize("fault", [{"delay_s": 0.2}, {"reply": b"-LOADING Redis is loading the dataset in memory\r\n"}])
async def test_a_slow_or_loading_redis_costs_little_and_comes_back(
    own_redis: RedisServer, proxy: FaultProxy, fault: dict[str, Any]
) -> None:
    scene = Scene(own_redis, proxy)
    async with scene.running():
        proxy.set(**fault)
        assert await scene.costs_little()
        assert await scene.index.lookup(scene.hashes) is None
        proxy.heal()
        await until(scene.sees)


async def test_replica_serves_lookups_but_no_writers(own_redis: RedisServer, proxy: FaultProxy) -> None:
    scene = Scene(own_redis, proxy)
    async with scene.running():
        own_redis.command("REPLICAOF", "127.0.0.1", "1")
        assert not await scene.writer.publish([SetChange([], [], 10)], WorkerLoad())
        assert scene.writer.in_doubt
        await until(scene.sees)
        own_redis.command("REPLICAOF", "NO", "ONE")
        await until(scene.write)
        await until(scene.sees)


@needs_redis_7
@pytest.mark.parametrize("denied", [(), ("-hvals",), ("-hlen", "-hkeys", "-hstrlen", "-memory")])
async def test_users_with_only_their_rights_can_work(own_redis: RedisServer, denied: tuple[str, ...]) -> None:
    """The gateway may read and run read-only scripts; the worker may write its keys and run none."""
    own_redis.command("ACL", "SETUSER", "gateway", "on", ">g", "~{headstart:*", *GATEWAY_RIGHTS, *denied)
    own_redis.command("ACL", "SETUSER", "worker", "on", ">w", "~{headstart:*", *WORKER_RIGHTS)
    writer = IndexWriter(own_redis.url, member(), WriterSettings(username="worker", password="w"))
    index = RedisIndex(
        own_redis.url, ReaderSettings(poll_s=0.05, refresh_interval_s=0.0, username="gateway", password="g")
    )
    hashes = [BlockHash(os.urandom(16)) for _ in range(4)]
    async with running(writer, index):

        async def written() -> bool:
            return writer.client.up and await writer.rewrite([index_entry(h) for h in hashes[:3]], WorkerLoad())

        async def seen() -> bool:
            found = await index.lookup(hashes)
            return found is not None and [item.matched_blocks for item in found] == [3]

        await until(written)
        assert await writer.publish([SetChange([index_entry(hashes[3])], [], 4)], WorkerLoad())
        (entry,) = await writer.upkeep.workers()
        assert await writer.upkeep.held([entry], hashes) == [True] * 4
        assert await writer.publish([SetChange([], [index_entry(hashes[3])], 3)], WorkerLoad())
        assert await writer.upkeep.held([entry], hashes) == [True, True, True, False]
        assert await writer.upkeep.held([], hashes) == [False] * 4
        await until(seen)
        assert await writer.upkeep.prune() == 0
        assert await writer.upkeep.remove_oversized() == 2
        await writer.retire()
        assert own_redis.command("HLEN", "{headstart:0}:members") == b":0\r\n"
