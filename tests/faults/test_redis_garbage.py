"""Real gateways and workers while their Redis holds garbage and answers garbage: all go on, and all is served."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis

from cache.redis_index.schema import Keys
from tests.faults.client import Outcome, ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.forged_redis import SECRET
from tests.faults.part import wait_until
from tests.fuzz.garbage import attack
from tests.fuzz.redis_proxy import Proxy, random_fault

pytestmark = pytest.mark.faults
DURATION_S = 30.0


async def test_garbage_ends_nothing_and_fails_no_request(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """Both sides of a fleet of two gateways and two workers read through proxies that spoil replies."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    args = ["--cluster-secret-file", str(secret)]
    read, write = Proxy(tmp_path / "fleet" / "redis.sock"), Proxy(tmp_path / "fleet" / "redis.sock")
    async with AsyncExitStack() as stack:
        for proxy in (read, write):
            await stack.enter_async_context(proxy.listening())
        topology = Topology(
            num_gateways=2,
            worker_args=args,
            gateway_args=args,
            static_workers=False,
            redis_ports=(read.port, write.port),
        )
        cluster = Cluster(tmp_path / "fleet", model, topology)
        await asyncio.to_thread(cluster.__enter__)
        stack.push_async_callback(asyncio.to_thread, cluster.__exit__)
        store = stack.enter_context(redis.Redis(unix_socket_path=str(cluster.redis.socket)))
        http = await stack.enter_async_context(session())
        outcomes: list[Outcome] = []
        until_s = time.monotonic() + DURATION_S

        async def client(number: int) -> None:
            while time.monotonic() < until_s:
                body = completion(f"Conversation {number}. " + "One two three four. " * 20, max_tokens=8)
                outcomes.append(await ask(http, cluster.gateways[number % 2].url, body))

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        while time.monotonic() < until_s:
            attack(rng, store, Keys("headstart", 0), ["w0", "w1"])
            if rng.random() < 0.2:
                rng.choice([read, write]).faults = [random_fault(rng)]
            await asyncio.sleep(0.05)
        read.faults, write.faults = [], []
        await asyncio.gather(*clients)
        failed = [(outcome.status, outcome.error) for outcome in outcomes if not outcome.ok]
        assert not failed, f"{len(failed)} of {len(outcomes)} requests failed: {failed[:5]}"
        assert len(outcomes) > 20
        assert all(part.poll() is None for part in cluster.parts), "a process has ended"
        for key in (b"members", b"states", b"version"):
            store.delete(b"{headstart:0}:" + key)

        def listed() -> bool:
            return store.hlen("{headstart:0}:members") == 2 and all(g.num_ready() == 2 for g in cluster.gateways)

        await asyncio.to_thread(wait_until, listed, what="both workers are in the index")
        for gateway in cluster.gateways:
            counted = await asyncio.to_thread(gateway.metrics)
            assert counted["headstart_index_events_total{invalid}"] > 0
