from __future__ import annotations

from benchmarks.dev.index_load.fleet import PATTERNS, running
from benchmarks.dev.index_load.lookups import measure_decision, measure_lookup
from benchmarks.dev.index_load.peers import measure_peers
from benchmarks.dev.index_load.publishing import measure_publish
from benchmarks.dev.private_redis import private_redis
from cache.redis_index.client import RedisClient
from cache.redis_index.connection import ClientSettings
from tests.waiting import HANG_S


async def test_the_measurements_measure_what_they_say() -> None:
    """Small sizes; each measurement asserts that its lookups found every worker."""
    with private_redis() as url:
        client = RedisClient(url, ClientSettings(connect_timeout_s=HANG_S))
        async with running(client):
            for pattern in (*PATTERNS, "random"):
                result = await measure_lookup(url, client, 24, 128, pattern, num_rounds=2)
                assert result.ping.p50_s > 0.0
                assert result.lookup.p50_s > 0.0
            on_disk = await measure_lookup(url, client, 24, 128, "shared", num_rounds=2, on_disk="deep")
            assert on_disk.lookup.p50_s > 0.0
            assert (await measure_lookup(url, client, 24, 128, "deep", num_rounds=2, has_ends=True)).lookup.p50_s > 0.0
            decision = await measure_decision(url, client, 80, "deep", count=10)
            assert decision.whole.p50_s > 0.0
            assert min(decision.cpu_s, decision.choice_cpu_s) > 0.0
            blocks_per_s, bytes_per_entry = await measure_publish(url, client)
            assert blocks_per_s > 0.0
            assert bytes_per_entry <= 80
            peers = await measure_peers(client, 8, 16)
            assert all(peer.p50_s > 0.0 for peer in peers.values())
