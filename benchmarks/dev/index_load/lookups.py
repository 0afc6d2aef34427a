"""Measure a lookup: against PING, within a decision, and on a busy Redis."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import uvloop

from benchmarks.dev.index_load.fleet import READER, chain, member_of, populate, running, state_of
from benchmarks.dev.index_load.publishing import rewrite_for_ever
from benchmarks.dev.index_load.timing import Timing, timed, timing
from cache.hashing import Namespace, hash_chain
from cache.records import WorkerState
from cache.redis_index import RedisIndex
from cache.redis_index.client import RedisClient, pack
from cache.redis_index.schema import Keys
from cache.types import BlockHash, GatewayId
from server.metrics import GatewayMetrics
from server.router.router import Router
from server.router.types import RouteRequest
from server.workers.connection import WorkerLost
from server.workers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class LookupResult:
    """PINGs and lookups took turns, so that both met the same machine."""

    ping: Timing
    lookup: Timing


@dataclass(frozen=True, slots=True)
class DecisionResult:
    whole: Timing
    cpu_s: float
    """Processor time of the gateway for a whole decision."""
    choice_cpu_s: float
    """Processor time of the choice, without the lookup."""


async def measure_lookup(
    url: str,
    client: RedisClient,
    num_workers: int,
    num_blocks: int,
    pattern: str,
    num_rounds: int = 20,
    on_disk: str = "",
    *,
    has_ends: bool = False,
) -> LookupResult:
    hashes = chain(num_blocks)
    await populate(client, hashes, num_workers, pattern, on_disk, has_ends=has_ends)
    index = RedisIndex(url, READER)
    ping = pack([("PING",)])

    async def ping_once() -> None:
        async with asyncio.timeout(READER.deadline_s):
            await client.submit((ping,), 1)

    pings_s: list[float] = []
    lookups_s: list[float] = []
    async with running(index):
        found = await index.lookup(hashes)
        assert found is not None
        assert len(found) == num_workers, f"{len(found)} of {num_workers} workers found"
        assert not on_disk or any(item.tier_blocks != (item.matched_blocks,) for item in found), "no disk adds a block"
        for _ in range(num_rounds):
            pings_s += await timed(ping_once, 50)
            lookups_s += await timed(lambda: index.lookup(hashes), 50 if num_workers <= 100 else 5)
    return LookupResult(timing(pings_s), timing(lookups_s))


async def measure_ends(url: str, client: RedisClient, pattern: str, num_pairs: int = 10) -> float:
    """Return the time of a lookup of 512 blocks at 64 workers with ends, over that without: the median of pairs."""
    ratios = []
    for number in range(num_pairs):
        pair = {}
        for has_ends in (False, True) if number % 2 else (True, False):
            pair[has_ends] = await measure_lookup(url, client, 64, 512, pattern, 4, has_ends=has_ends)
        ratios.append(pair[True].lookup.p50_s / pair[False].lookup.p50_s)
    return statistics.median(ratios)


async def measure_changed(url: str, client: RedisClient, num_workers: int = 64, num_lookups: int = 500) -> Timing:
    """Lookups of 512 blocks, each after a publish of every worker."""
    hashes = chain(512)
    await populate(client, hashes, num_workers, "shared")
    members, states = [member_of(number) for number in range(num_workers)], Keys(READER.prefix, 0).states
    index = RedisIndex(url, READER)
    lookups_s: list[float] = []
    async with running(index):
        await index.lookup(hashes)
        for batch in range(2, num_lookups + 2):
            written = [part for member in members for part in (member.worker_id, state_of(member, batch))]
            await client.call(("HSET", states, *written), timeout_s=30)
            lookups_s += await timed(lambda: index.lookup(hashes), 1)
    return timing(lookups_s)


async def measure_decision(
    url: str, client: RedisClient, num_workers: int = 64, pattern: str = "shared", count: int = 500
) -> DecisionResult:
    """4,096 tokens hashed, looked up, and a worker chosen."""
    tokens = [random.Random(1).randrange(50_000) for _ in range(4096)]
    root = Namespace("model", "r", "t", 16).root(salt=b"s")
    await populate(client, hash_chain(root, tokens, 16), num_workers, pattern)
    index = RedisIndex(url, READER)
    fleet = Fleet(index, _no_fetch)
    router = Router(index, fleet, GatewayId("gateway-1"), GatewayMetrics())

    async def decide() -> None:
        hashes = hash_chain(root, tokens, 16)
        placement = await router.place(RouteRequest("r", "model", len(tokens), hashes))
        router.closed(placement)

    async with running(index):
        await decide()
        begun_s = time.process_time()
        whole = timing(await timed(decide, count))
        cpu_s = (time.process_time() - begun_s) / count
        request = RouteRequest("r", "model", len(tokens), hash_chain(root, tokens, 16))
        candidates = fleet.candidates("model", await index.lookup(request.hashes, "model"))
        scorer, begun_s = router.scorer, time.process_time()
        for _ in range(count):
            scorer.closed(scorer.place(scorer.decide(request, candidates)))
        return DecisionResult(whole, cpu_s, (time.process_time() - begun_s) / count)


async def _no_fetch(url: str) -> WorkerState:
    raise WorkerLost(url)


async def measure_during_rewrite(url: str, client: RedisClient) -> Timing:
    hashes = chain(512)
    await populate(client, hashes, 64, "shared")
    rewriter = get_context("spawn").Process(target=rewrite_for_ever, args=(url,), daemon=True)
    rewriter.start()
    index = RedisIndex(url, READER)
    try:
        async with running(index):
            while len(index.members()) < 65:  # the rewriter has switched for the first time
                await index.lookup(hashes)
                await asyncio.sleep(0.005)
            return timing(await timed(lambda: index.lookup(hashes), 2000))
    finally:
        rewriter.kill()
        rewriter.join()


def _count_lookups(url: str, hashes: list[BlockHash], seconds: float) -> int:
    async def count() -> int:
        index = RedisIndex(url, READER)
        num_lookups = 0
        async with running(index):
            await index.lookup(hashes)
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                await asyncio.gather(*(index.lookup(hashes) for _ in range(4)))
                num_lookups += 4
        return num_lookups

    return uvloop.run(count())


async def measure_throughput(url: str, client: RedisClient, seconds: float = 3.0) -> float:
    """Lookups per second of one Redis at 64 workers x 512 blocks. Eight processes have 4 in flight each."""
    hashes = chain(512)
    await populate(client, hashes, 64, "shared")
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, _count_lookups, url, hashes, 0.1) for _ in range(8)))
        counts = await asyncio.gather(
            *(loop.run_in_executor(pool, _count_lookups, url, hashes, seconds) for _ in range(8))
        )
    return sum(counts) / seconds
