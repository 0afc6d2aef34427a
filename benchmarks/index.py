"""`headstart bench index`: what a decision costs on a real Redis, beside PING and the peers' schemas.

A private `redis-server` is started on loopback TCP. The lookup is measured on four patterns and the worst counts:

    three    3 workers match, the others nothing        head    all hold block 0 and no more
    shared   all share 64 blocks                        deep    all match deep, each differently from its neighbour

Beside them `random`: all match deep, at lengths that have nothing to do with each other: no finger helps there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import redis.asyncio
import uvloop

from benchmarks.private_redis import private_redis
from benchmarks.report import Figure, Report, option_parser, publish
from cache.hashing import Namespace as BlockNamespace
from cache.hashing import hash_chain, index_entry
from cache.index import WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, WriterSettings
from cache.redis_index.endpoint import Endpoint
from cache.redis_index.link import Link, LinkSettings, pack_command
from cache.redis_index.schema import Keys, encode_member, encode_state
from cache.types import BlockHash, Epoch, GatewayId, IndexEntry, WorkerId
from server.router.dispatch import DispatchSettings
from server.router.placement import RouteRequest
from server.router.router import HeadstartRouter, RouterSettings
from server.serve.redis import find_redis_server
from server.workers.fleet import FetchError, Fleet
from worker.wire import PROTOCOL_VERSION, WorkerState

PATTERNS: Final = ("three", "head", "shared", "deep")
OTHER_BLOCKS: Final = 200
"""Blocks a worker holds beside those of the prompt."""
LOAD: Final = WorkerLoad({GatewayId("gateway-1"): 1.5, GatewayId("gateway-2"): 0.25}, 1000.0, 8000.0, 5, 3, 900, 2000)
READER: Final = ReaderSettings(deadline_s=5.0, poll_s=3600.0)
FAR_MS: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class Timing:
    p50_s: float
    p99_s: float


# --- connections --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(*parts: RedisIndex | IndexWriter | Link) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(part.run()) for part in parts]
    try:
        for part in parts:
            await _connected(part)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _connected(part: RedisIndex | IndexWriter | Link) -> None:
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        link = part.link if isinstance(part, IndexWriter) else part
        if not link.blind if isinstance(link, RedisIndex) else link.up:
            return
        await asyncio.sleep(0.001)
    raise SystemExit("no connection to Redis")


# --- what workers hold ----------------------------------------------------------------------------------------------


def depth(pattern: str, number: int, num_blocks: int, num_workers: int, rng: random.Random) -> int:
    """How many blocks of the prompt worker `number` holds."""
    match pattern:
        case "three":
            return rng.randrange(num_blocks // 4, num_blocks) if number % (num_workers // 3) == 7 else 0
        case "head":
            return 1
        case "shared":
            return 64
        case "deep":
            return num_blocks // 2 + number % (num_blocks // 2)
    return rng.randrange(num_blocks // 2, num_blocks)


def chain(length: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(16)) for _ in range(length)]


def entries(length: int) -> list[IndexEntry]:
    return [IndexEntry(os.urandom(8)) for _ in range(length)]


def member_of(number: int) -> WorkerMember:
    name = f"worker-{number:04}"
    return WorkerMember(
        WorkerId(name),
        Epoch(f"{number:016x}"),
        f"http://10.0.{number // 256}.{number % 256}:8000",
        "model",
        "0" * 32,
        "cuda-bfloat16",
        16,
        131072,
        PROTOCOL_VERSION,
    )


async def populate(link: Link, hashes: Sequence[BlockHash], num_workers: int, pattern: str) -> None:
    """A registry of live workers, each with its set, as their writers leave it."""
    rng = random.Random(0)
    keys = Keys(READER.prefix, 0)
    await link.call(("FLUSHALL",), timeout_s=30)
    for number in range(num_workers):
        member = member_of(number)
        held = [index_entry(h) for h in hashes[: depth(pattern, number, len(hashes), num_workers, rng)]]
        state = encode_state(
            member, LOAD, generation=1, batch=1, deadline_ms=FAR_MS, written_ms=1, num_entries=len(held)
        )
        await link.call(
            ("SADD", keys.blocks(member.worker_id, member.epoch, 1), *held, *entries(OTHER_BLOCKS)),
            ("HSET", keys.members, member.worker_id, encode_member(member)),
            ("HSET", keys.states, member.worker_id, state),
            timeout_s=30,
        )
    await link.call(("SET", keys.version, os.urandom(8)), timeout_s=30)


# --- timing ---------------------------------------------------------------------------------------------------------


async def timed(operation: Callable[[], Awaitable[object]], count: int) -> list[float]:
    times_s = []
    for _ in range(count):
        started_s = time.perf_counter()
        await operation()
        times_s.append(time.perf_counter() - started_s)
    return times_s


def timing(times_s: Sequence[float]) -> Timing:
    ordered = sorted(times_s)
    return Timing(statistics.median(ordered), ordered[int(len(ordered) * 0.99)])


@dataclass(frozen=True, slots=True)
class LookupResult:
    """PINGs and lookups took turns, so that both met the same machine."""

    ping: Timing
    lookup: Timing


async def measure_lookup(
    url: str, link: Link, num_workers: int, num_blocks: int, pattern: str, num_rounds: int = 20
) -> LookupResult:
    hashes = chain(num_blocks)
    await populate(link, hashes, num_workers, pattern)
    index = RedisIndex(url, READER)
    pings_s: list[float] = []
    lookups_s: list[float] = []
    async with running(index):
        found = await index.lookup(hashes)
        assert found is not None
        assert len(found) == num_workers, f"{len(found)} of {num_workers} workers found"
        for _ in range(num_rounds):
            pings_s += await timed(index.ping, 50)
            lookups_s += await timed(lambda: index.lookup(hashes), 50 if num_workers <= 100 else 5)
    return LookupResult(timing(pings_s), timing(lookups_s))


async def measure_decision(url: str, link: Link, count: int = 500) -> Timing:
    """4,096 tokens hashed, looked up, and a worker chosen among 64."""
    tokens = [random.Random(1).randrange(50_000) for _ in range(4096)]
    root = BlockNamespace("model", "r", "t", 16).root(salt=b"s")
    await populate(link, hash_chain(root, tokens, 16), 64, "shared")
    index = RedisIndex(url, READER)
    settings = RouterSettings(GatewayId("gateway-1"), dispatch=DispatchSettings(workers_share=True))
    router = HeadstartRouter(index, Fleet(index, _no_fetch, clock=time.monotonic), settings)

    async def decide() -> None:
        hashes = hash_chain(root, tokens, 16)
        placement = await router.place(RouteRequest("r", "model", len(tokens), hashes))
        placement.close(ok=False)

    async with running(index):
        await decide()
        return timing(await timed(decide, count))


async def _no_fetch(url: str) -> WorkerState:
    raise FetchError(url)


# --- publishing -----------------------------------------------------------------------------------------------------


async def measure_publish(url: str, link: Link) -> tuple[float, float]:
    """Blocks published per second in batches of 2,000, and Redis' bytes per entry at 200,000."""
    await link.call(("FLUSHALL",), timeout_s=30)
    writer = IndexWriter(url, member_of(0), WriterSettings(timeout_s=30.0, lease_s=60.0))
    blocks = entries(200_000)
    async with running(writer):
        assert await writer.rewrite([], LOAD)
        started_s = time.perf_counter()
        for start in range(0, len(blocks), 2000):
            assert await writer.publish(blocks[start : start + 2000], [], LOAD, start + 2000)
        blocks_per_s = len(blocks) / (time.perf_counter() - started_s)
        key = Keys(READER.prefix, 0).blocks(member_of(0).worker_id, member_of(0).epoch, 1)
        (num_bytes,) = await link.call(("MEMORY", "USAGE", key, "SAMPLES", 0), timeout_s=30)
    return blocks_per_s, num_bytes / len(blocks)


def _rewrite_for_ever(url: str) -> None:
    """In a process of its own: a worker that rewrites 200,000 entries again and again."""

    async def rewrite() -> None:
        writer = IndexWriter(url, member_of(9999), WriterSettings(timeout_s=30.0, lease_s=60.0))
        blocks = entries(200_000)
        async with running(writer):
            while await writer.rewrite(blocks, LOAD):
                pass

    uvloop.run(rewrite())


async def measure_during_rewrite(url: str, link: Link) -> Timing:
    hashes = chain(512)
    await populate(link, hashes, 64, "shared")
    rewriter = get_context("spawn").Process(target=_rewrite_for_ever, args=(url,), daemon=True)
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


async def measure_throughput(url: str, link: Link, seconds: float = 3.0) -> float:
    """Lookups per second of one Redis at 64 workers x 512 blocks, asked by 8 processes with 4 in flight each."""
    hashes = chain(512)
    await populate(link, hashes, 64, "shared")
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, _count_lookups, url, hashes, 0.1) for _ in range(8)))
        counts = await asyncio.gather(
            *(loop.run_in_executor(pool, _count_lookups, url, hashes, seconds) for _ in range(8))
        )
    return sum(counts) / seconds


# --- the peers' schemas ---------------------------------------------------------------------------------------------


async def measure_peers(link: Link, num_workers: int, num_blocks: int) -> dict[str, Timing]:
    """What others keep in Redis, all workers holding all blocks: read in one pipeline and decoded to matches."""
    blocks = [os.urandom(8) for _ in range(num_blocks)]
    fields = [json.dumps({"pod": f"10.0.0.{n}:8000", "tier": "gpu", "speculative": False}) for n in range(num_workers)]
    await link.call(("FLUSHALL",), timeout_s=30)
    for block in blocks:
        flat = [part for field in fields for part in (field, "")]
        await link.call(
            ("HSET", b"json:" + block, *flat),
            ("SADD", b"set:" + block, *(str(n) for n in range(num_workers))),
            ("SET", b"bits:" + block, b"\xff" * (-(-num_workers // 8))),
            timeout_s=30,
        )
    hkeys = b"".join(pack_command(("HKEYS", b"json:" + block)) for block in blocks)
    smembers = b"".join(pack_command(("SMEMBERS", b"set:" + block)) for block in blocks)
    mget = pack_command(("MGET", *(b"bits:" + block for block in blocks)))

    async def json_fields() -> int:
        holders = None
        depth = 0
        for reply in await link.submit([hkeys], num_blocks):
            pods = {json.loads(field)["pod"] for field in reply}
            holders = pods if holders is None else holders & pods
            depth += len(holders)
        return depth

    async def sets() -> int:
        holders = None
        depth = 0
        for reply in await link.submit([smembers], num_blocks):
            holders = set(reply) if holders is None else holders.intersection(reply)
            depth += len(holders)
        return depth

    async def bitmaps() -> int:
        holders = (1 << num_workers) - 1
        depth = 0
        for bits in (await link.submit([mget], 1))[0]:
            holders &= int.from_bytes(bits, "big")
            depth += holders.bit_count()
        return depth

    return {
        "hash_per_block_json": timing(await timed(json_fields, 15)),
        "set_per_block": timing(await timed(sets, 50)),
        "mget_bitmaps": timing(await timed(bitmaps, 200)),
    }


# --- the report -----------------------------------------------------------------------------------------------------


async def measure(url: str, options: Namespace) -> list[Figure]:
    link = Link(Endpoint(url, connect_timeout_s=5.0), LinkSettings(max_pending=1 << 20, stall_s=60.0))
    async with running(link):
        listed = await _lookup_figures(url, link, options)
        decision = await measure_decision(url, link)
        blocks_per_s, bytes_per_entry = await measure_publish(url, link)
        during = await measure_during_rewrite(url, link)
        throughput = await measure_throughput(url, link)
        peers = await measure_peers(link, 64, 512)
        client = redis.asyncio.Redis.from_url(url)
        redis_py = timing(await timed(client.ping, 1000))
        await client.aclose()
    listed += [
        Figure("decision_p50_s", decision.p50_s, "s", "hash 4,096 tokens, look up, choose among 64", "<= 0.0015"),
        Figure("decision_p99_s", decision.p99_s, "s"),
        Figure("publish_blocks_per_s", blocks_per_s, "/s", "MULTIs of 2,000 blocks", ">= 200,000"),
        Figure("bytes_per_entry", bytes_per_entry, "bytes", "MEMORY USAGE of a set of 200,000", "<= 80"),
        Figure("lookup_during_rewrite_p50_s", during.p50_s, "s", "while one worker rewrites 200,000 entries"),
        Figure("lookup_during_rewrite_p99_s", during.p99_s, "s", "the same", "<= 0.025"),
        Figure("lookups_per_s_8_clients", throughput, "/s", "64 x 512, clients and server on this machine's CPUs"),
        Figure("ping_redis_py_p50_s", redis_py.p50_s, "s", "PING by redis.asyncio.Redis, for comparison"),
        *(
            Figure(f"{figure.name[:-6]}_over_redis_py_ping", figure.value / redis_py.p50_s, "x", "for comparison")
            for figure in listed
            if figure.name in ("lookup_64x512_p50_s", "lookup_1000x512_p50_s")
        ),
    ]
    listed += [
        Figure(f"peer_{name}_64x512_p50_s", peer.p50_s, "s", "the peers' schema, every worker holds every block")
        for name, peer in peers.items()
    ]
    return listed


async def _lookup_figures(url: str, link: Link, options: Namespace) -> list[Figure]:
    listed = []
    pings_s = []
    goals = {(64, 512): "<= 3.2 x ping", (1000, 512): "<= 25 x ping"}
    for num_workers, num_blocks in ((64, 512), (1000, 512), (64, 4096)):
        size = f"{num_workers}x{num_blocks}"
        results = {}
        for pattern in (*PATTERNS, "random"):
            results[pattern] = await measure_lookup(url, link, num_workers, num_blocks, pattern)
            pings_s.append(results[pattern].ping.p50_s)
        worst = max(PATTERNS, key=lambda pattern: results[pattern].lookup.p50_s)
        goal = goals.get((num_workers, num_blocks), "")
        listed.append(
            Figure(f"lookup_{size}_p50_s", results[worst].lookup.p50_s, "s", f"the worst of four: {worst}", goal)
        )
        ratio = max(results[p].lookup.p50_s / results[p].ping.p50_s for p in PATTERNS)
        listed.append(Figure(f"lookup_{size}_over_ping", ratio, "x", "the worst of four, over PING in its turn"))
        for pattern, result in results.items():
            listed.append(Figure(f"lookup_{size}_{pattern}_p50_s", result.lookup.p50_s, "s", pattern))
            listed.append(Figure(f"lookup_{size}_{pattern}_p99_s", result.lookup.p99_s, "s", pattern))
    listed.insert(
        0, Figure("ping_p50_s", statistics.median(pings_s), "s", "PING by the same client, with a deadline too")
    )
    return listed


def main(argv: list[str]) -> int:
    parser = option_parser("index", __doc__ or "")
    parser.add_argument("--redis", metavar="URL", help="use this Redis instead of a private one; it is FLUSHED")
    options = parser.parse_args(argv)
    if options.redis:
        figures = uvloop.run(measure(options.redis, options))
    else:
        with private_redis() as url:
            figures = uvloop.run(measure(url, options))
    server = options.redis or Path(find_redis_server()).name
    publish(Report("index", figures, {"redis": server, "event_loop": "uvloop"}), options)
    return 0
