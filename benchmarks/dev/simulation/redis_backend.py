"""The replay's index on a real Redis: every publish and every lookup of simulated time goes through the real client.

The answers are those of the in-memory index, so a replay gives the same figures with both; what it shows is that the
shared index, not only its model, carries them. Redis' own clock runs in real time, so leases are long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Final, TypeVar

from benchmarks.dev.private_redis import private_redis
from cache.hashing import index_entry
from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, SetChange, WriterSettings
from cache.types import BlockHash, IndexEntry, WorkerId

T = TypeVar("T")
_LASTING_S: Final = 1e6
_TIMEOUT_S: Final = 30.0


class RedisBackend:
    """The part of `MemoryIndex` that a replay uses, on a server of its own. Close it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._url = self._stack.enter_context(private_redis())
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: dict[WorkerId, IndexWriter] = {}
        self._held: dict[WorkerId, set[IndexEntry]] = {}
        self._index = RedisIndex(self._url, ReaderSettings(poll_s=_LASTING_S, deadline_s=_TIMEOUT_S))
        self._start(self._index.run)

    def close(self) -> None:
        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._run(end())
        self._stack.close()

    def register(self, member: WorkerMember) -> None:
        settings = WriterSettings(lease_s=_LASTING_S, set_ttl_s=_LASTING_S, timeout_s=_TIMEOUT_S)
        writer = self._writers[member.worker_id] = IndexWriter(self._url, member, settings)
        self._held[member.worker_id] = set()
        self._start(writer.run)
        self._run(self._until(lambda: writer.client.up))
        assert self._run(writer.rewrite([], WorkerLoad()))
        self._run(self._until(lambda: self._index.shards[0].client.up))
        self._run(self._until_known(member))

    def publish(self, worker_id: WorkerId, stored: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        held = self._held[worker_id]
        added = [entry for entry in map(index_entry, stored) if entry not in held]
        held.update(added)
        dropped = [entry for entry in map(index_entry, removed) if entry in held]
        held.difference_update(dropped)
        change = SetChange(added, dropped, len(held))
        published = self._run(self._writers[worker_id].publish([change], WorkerLoad()))
        assert published, "Redis lost something"

    def match(self, hashes: Sequence[BlockHash]) -> list[Candidate]:
        """In the order of the workers' ids."""
        found = self._run(self._index.lookup(hashes))
        assert found is not None
        assert len(found) == len(self._writers)
        return found

    def _start(self, part: Callable[[], Awaitable[None]]) -> None:
        async def start() -> None:
            self._tasks.append(asyncio.ensure_future(part()))

        self._run(start())

    async def _until_known(self, member: WorkerMember) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            while member not in self._index.members():
                await self._index.lookup(())
                await asyncio.sleep(0.005)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - the connection has no event for this
                await asyncio.sleep(0.001)

    def _run(self, awaitable: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await awaitable

        return self._runner.run(wrapped())
