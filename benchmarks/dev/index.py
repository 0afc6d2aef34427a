"""`headstart bench index`: the cost of a decision on a real Redis, against PING and the peers' schemas.

A private `redis-server` is started on loopback TCP. The lookup is measured on the four patterns of `index_load.fleet`,
and the worst counts.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import redis.asyncio
import uvloop

from benchmarks.dev.index_load.fleet import PATTERNS, running
from benchmarks.dev.index_load.lookups import (
    measure_changed,
    measure_decision,
    measure_during_rewrite,
    measure_ends,
    measure_lookup,
    measure_throughput,
)
from benchmarks.dev.index_load.peers import measure_peers
from benchmarks.dev.index_load.publishing import measure_publish
from benchmarks.dev.index_load.timing import timed, timing
from benchmarks.dev.private_redis import private_redis
from benchmarks.report import Figure, Report, option_parser, publish
from cache.redis_index.client import RedisClient
from cache.redis_index.connection import ClientSettings
from server.cli.serve import find_redis_server


async def measure(url: str) -> list[Figure]:
    client = RedisClient(url, ClientSettings(connect_timeout_s=5.0, max_pending=1 << 20, stall_s=60.0))
    async with running(client):
        listed = await _lookup_figures(url, client)
        on_disk = (await measure_lookup(url, client, 64, 512, "shared", on_disk="deep")).lookup
        ends = max([await measure_ends(url, client, pattern) for pattern in PATTERNS])
        changed = await measure_changed(url, client)
        decision = (await measure_decision(url, client)).whole
        decisions = await _decision_figures(url, client)
        blocks_per_s, bytes_per_entry = await measure_publish(url, client)
        during = await measure_during_rewrite(url, client)
        throughput = await measure_throughput(url, client)
        peers = await measure_peers(client, 64, 512)
        redis_py_client = redis.asyncio.Redis.from_url(url)
        redis_py = timing(await timed(redis_py_client.ping, 1000))
        await redis_py_client.aclose()
    listed += [
        Figure("lookup_64x512_disk_p50_s", on_disk.p50_s, "s", "shared in the pools, and deep on all 64 disks"),
        Figure("lookup_64x512_ends_over_plain", ends, "x", "all 64 workers with ends, the worst of four", "<= 1.3"),
        Figure("lookup_64x512_changed_p50_s", changed.p50_s, "s", "all 64 signed states new since the last lookup"),
        Figure("decision_p50_s", decision.p50_s, "s", "hash 4,096 tokens, look up, choose among 64", "<= 0.0015"),
        Figure("decision_p99_s", decision.p99_s, "s"),
        *decisions,
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


async def _decision_figures(url: str, client: RedisClient) -> list[Figure]:
    """Return the gateway's processor time for a decision, of the worst pattern by size of the fleet."""
    listed = []
    for num_workers, goals in ((64, ("", "")), (1000, ("<= 0.003", "<= 0.0004"))):
        results = {p: await measure_decision(url, client, num_workers, p, count=100) for p in PATTERNS}
        worst = max(PATTERNS, key=lambda pattern: results[pattern].cpu_s)
        slowest = max(PATTERNS, key=lambda pattern: results[pattern].choice_cpu_s)
        whole_s, choice_s = results[worst].cpu_s, results[slowest].choice_cpu_s
        listed += [
            Figure(f"decision_cpu_{num_workers}_s", whole_s, "s", f"the worst of four: {worst}", goals[0]),
            Figure(f"choice_cpu_{num_workers}_s", choice_s, "s", f"the worst of four: {slowest}", goals[1]),
        ]
    return listed


async def _lookup_figures(url: str, client: RedisClient) -> list[Figure]:
    listed = []
    pings_s = []
    goals = {(64, 512): "<= 3.2 x ping", (1000, 512): "<= 25 x ping"}
    for num_workers, num_blocks in ((64, 512), (1000, 512), (64, 4096)):
        size = f"{num_workers}x{num_blocks}"
        results = {}
        for pattern in (*PATTERNS, "random"):
            results[pattern] = await measure_lookup(url, client, num_workers, num_blocks, pattern)
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
        figures = uvloop.run(measure(options.redis))
    else:
        with private_redis() as url:
            figures = uvloop.run(measure(url))
    server = options.redis or Path(find_redis_server()).name
    publish(Report("index", figures, {"redis": server, "event_loop": "uvloop"}), options)
    return 0
