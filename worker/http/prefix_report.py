"""What GET /prefixes tells: the most shared prefixes of the pool, and for how long each has not been used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from cache.allocators.base import CacheStats
from cache.hashing import index_entry
from cache.prefixes import PrefixRun, SharedPrefix, top_prefixes
from worker.engine.engine import Engine
from worker.http.access_times import AccessTimes
from worker.wire import PrefixReport, PrefixUse


async def prefix_report(engine: Engine, limit: int) -> PrefixReport:
    """The pool is copied on the engine's thread; the tree is built beside it."""

    def copy_pool() -> tuple[Iterator[PrefixRun], CacheStats, AccessTimes]:
        allocator = engine.scheduler.allocator
        return allocator.prefix_runs(), allocator.stats(), engine.access_times.copy()

    runs, stats, times = await asyncio.wrap_future(engine.call(copy_pool))
    now_s = time.monotonic()
    best = await asyncio.to_thread(top_prefixes, runs, limit)

    def use(prefix: SharedPrefix) -> PrefixUse:
        path = tuple(index_entry(block_hash).hex() for block_hash in prefix.path)
        idle_s = times.age_s(stats.num_accesses - prefix.idle_accesses, now_s) if prefix.idle_accesses else 0.0
        return PrefixUse(path, prefix.num_blocks, prefix.num_references, prefix.num_hits, idle_s)

    member = engine.member
    return PrefixReport(
        member.worker_id,
        member.epoch,
        member.model,
        member.block_size,
        stats.num_cached_blocks,
        tuple(use(prefix) for prefix in best),
    )
