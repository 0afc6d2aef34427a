"""Measure publishing."""

from __future__ import annotations

import time

import uvloop

from benchmarks.dev.index_load.fleet import LOAD, READER, SECRET, entries, member_of, running
from cache.redis_index import IndexWriter, SetChange, WriterSettings
from cache.redis_index.client import RedisClient
from cache.redis_index.schema import Keys


async def measure_publish(url: str, client: RedisClient) -> tuple[float, float]:
    """Blocks published per second in batches of 2,000, and Redis' bytes per entry at 200,000."""
    await client.call(("FLUSHALL",), timeout_s=30)
    writer = IndexWriter(url, member_of(0), WriterSettings(timeout_s=30.0, lease_s=60.0, cluster_secret=SECRET))
    blocks = entries(200_000)
    async with running(writer):
        assert await writer.rewrite([], LOAD)
        started_s = time.perf_counter()
        for start in range(0, len(blocks), 2000):
            assert await writer.publish([SetChange(blocks[start : start + 2000], [], start + 2000)], LOAD)
        blocks_per_s = len(blocks) / (time.perf_counter() - started_s)
        key = Keys(READER.prefix, 0).blocks(member_of(0).worker_id, member_of(0).epoch, 1)
        (num_bytes,) = await client.call(("MEMORY", "USAGE", key, "SAMPLES", 0), timeout_s=30)
    return blocks_per_s, num_bytes / len(blocks)


def rewrite_for_ever(url: str) -> None:
    """In a process of its own: a worker that rewrites 200,000 entries again and again."""

    async def rewrite() -> None:
        writer = IndexWriter(url, member_of(9999), WriterSettings(timeout_s=30.0, lease_s=60.0, cluster_secret=SECRET))
        blocks = entries(200_000)
        async with running(writer):
            while await writer.rewrite(blocks, LOAD):
                pass

    uvloop.run(rewrite())
