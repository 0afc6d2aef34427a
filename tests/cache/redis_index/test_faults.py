"""A slow or loading Redis, and a read-only replica: lookups stay cheap, and recover afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cache.hashing import index_entry
from cache.records import WorkerLoad
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, SetChange, WriterSettings
from cache.types import BlockHash
from tests.cache.redis_index.index_parts import LASTING, chain, entries, member
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


class Proxy:
    """A proxy on a unix socket that can be slow, or answer like a loading server."""

    def __init__(self, path: Path, server: Path) -> None:
        self.url = f"unix://{path}"
        self.delay_s = 0.0
        self.loading = False
        self._path = path
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        listener = await asyncio.start_unix_server(self._serve, str(self._path))
        try:
            yield
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(str(self._server))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, upstream_writer, writer))
                group.create_task(self._replies(upstream_reader, writer))
        except* (ConnectionError, EOFError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            upstream_writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(1 << 16):
            if self.loading:
                client.write(b"-LOADING Redis is loading the dataset in memory\r\n")
            else:
                upstream.write(data)
        raise EOFError

    async def _replies(self, upstream: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := await upstream.read(1 << 16):
            await asyncio.sleep(self.delay_s)
            client.write(data)
        raise EOFError


class Scene:
    """A worker that writes to the server directly, and a gateway that reads through the proxy."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.events: list[str] = []
        self.proxy = Proxy(folder / "proxy.sock", server.socket)
        self.writer = IndexWriter(server.url, member(), LASTING)
        self.index = RedisIndex(self.proxy.url, SETTINGS, count=self.events.append)
        self.hashes = chain(10)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all parts, and begin when the index finds what the worker has written."""
        async with self.proxy.running(), running(self.writer, self.index):
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


@pytest.mark.parametrize(("fault", "begun", "over"), [("delay_s", 0.2, 0.0), ("loading", True, False)])
async def test_a_slow_or_loading_redis_costs_little_and_comes_back(
    own_redis: RedisServer, tmp_path: Path, fault: str, begun: float, over: float
) -> None:
    scene = Scene(own_redis, tmp_path)
    async with scene.running():
        setattr(scene.proxy, fault, begun)
        assert await scene.costs_little()
        assert await scene.index.lookup(scene.hashes) is None
        setattr(scene.proxy, fault, over)
        await until(scene.sees)


async def test_replica_serves_lookups_but_no_writers(own_redis: RedisServer, tmp_path: Path) -> None:
    scene = Scene(own_redis, tmp_path)
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
