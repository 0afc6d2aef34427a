"""Members, chains, and running indexes for the tests of readers and writers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from cache.hashing import index_entry
from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, WriterSettings
from cache.types import BlockHash, IndexEntry
from tests.members import make_member
from tests.running import running
from tests.waiting import HANG_S, until

LASTING = WriterSettings(timeout_s=HANG_S, lease_s=600.0)
"""Without renewal."""
SECRET = b"secret"
FAILURES = ReaderSettings().breaker_failures
EAGER = ReaderSettings(poll_s=0.02, refresh_interval_s=0.0, deadline_s=HANG_S)


def member(name: str = "w0", epoch: str | None = None, model: str = "m") -> WorkerMember:
    return make_member(name, epoch or f"epoch-of-{name}", url="http://127.0.0.1:1", model=model, namespace="n" * 32)


def chain(length: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(16)) for _ in range(length)]


def entries(hashes: Sequence[BlockHash]) -> list[IndexEntry]:
    return [index_entry(block_hash) for block_hash in hashes]


def is_connected(index: RedisIndex) -> bool:
    return any(shard["connected"] for shard in index.health())


@asynccontextmanager
async def linked(*parts: IndexWriter | RedisIndex) -> AsyncIterator[None]:
    async with running(*parts):
        for part in parts:
            await until(lambda part=part: part.client.up if isinstance(part, IndexWriter) else is_connected(part))
        yield


async def matches(index: RedisIndex, hashes: Sequence[BlockHash], model: str | None = None) -> dict[str, int] | None:
    found = await index.lookup(hashes, model)
    return None if found is None else {item.member.worker_id: item.matched_blocks for item in found}


def becomes(index: RedisIndex, hashes: Sequence[BlockHash], expected: dict[str, int]) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return await matches(index, hashes) == expected

    return check


async def hold(hashes: Sequence[BlockHash], index: RedisIndex, *writers: IndexWriter) -> None:
    """Write the chain as held by each worker, and wait until the index finds it at these and no others."""
    for writer in writers:
        assert await writer.rewrite(entries(hashes), WorkerLoad())
    await until(becomes(index, hashes, {writer.member.worker_id: len(hashes) for writer in writers}))
