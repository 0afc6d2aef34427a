"""Row 22 of the matrix in docs/reliability.md: a long run of mixed load, clients that leave, and faults of every kind.

Afterwards everything is as before. `--soak-s` is the duration; the figures on that page are of a run with 1200.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.faults.client import ask, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Part, Worker, metrics
from tests.faults.test_streams import random_body
from tests.faults.worker_process import Additions
from tests.waiting import HANG_S, wait_until

NUM_CLIENTS = 4
THINK_S = 0.5
NUM_BODIES = 200
"""Different requests: what remembers prompts, within its bounds, has seen them all by the second third."""
LEAVE_SHARE = 0.25
"""Clients that leave before the end."""
FAULT_INTERVAL_S = 12.0
SAMPLE_INTERVAL_S = 5.0
LONG_S = 600.0
GROWTH = 0.02
SHORT_GROWTH = 0.20
"""Allowed growth of a run too short for pools, caches and arenas to have filled by its second third."""
SET_TTL_S = 120.0
"""After which the set of a dead epoch has ended."""


@pytest.fixture
def soak_s(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--soak-s"))


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    """Small pools, so that they are full early and evict all the time.

    Requests are routed by load, so that every worker is busy and could leak memory. One worker can bear all of it,
    and the default policy would choose that one.
    """
    topology = Topology(
        num_workers=3,
        num_gateways=2,
        worker_args=["--num-blocks", "1025", "--drain-grace-s", "5"],
        gateway_args=["--stall-s", "1", "--drain-grace-s", "5", "--policy", "least_load"],
        additions=Additions(step_s=0.03),
    )
    with Cluster(tmp_path, model, topology) as running:
        yield running


class Load:
    """Clients with requests of every kind. Some clients leave."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._stopping = False
        self._bodies = [random_body(rng) for _ in range(NUM_BODIES)]
        self.counts: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        async with asyncio.TaskGroup() as group:
            self._stopping = False
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client())
            try:
                yield
            finally:
                self._stopping = True

    async def _client(self) -> None:
        async with session() as http:
            while not self._stopping:
                gateway = self._cluster.gateways[self._rng.random() < 0.3]
                request = asyncio.create_task(ask(http, gateway.url, self._rng.choice(self._bodies)))
                if self._rng.random() < LEAVE_SHARE:
                    await asyncio.wait([request], timeout=self._rng.uniform(0, 1.5))
                    request.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    outcome = await request
                    self.counts[f"{gateway.name} {outcome.error or 'ok'}"] += 1
                    assert outcome.ok or outcome.explicit or gateway is self._cluster.gateways[1], outcome
                    assert outcome.error != "timeout"
                await asyncio.sleep(self._rng.expovariate(1 / THINK_S))


class Faults:
    """Faults one after another, each ended before the next.

    The first gateway and the first worker never end: the test measures their memory.
    """

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self.counts: Counter[str] = Counter()

    async def go_on(self, for_s: float) -> None:
        end_s = time.monotonic() + for_s
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._worker_killed,
            self._worker_stopped,
            self._worker_drained,
            self._gateway_killed,
            self._redis_killed,
            self._redis_stopped,
            self._redis_emptied,
        ]
        while (left_s := end_s - time.monotonic()) > 2 * FAULT_INTERVAL_S:
            kind = self._rng.choice(kinds)
            self.counts[kind.__name__.lstrip("_")] += 1
            await kind()
            await asyncio.to_thread(self._cluster.wait_ready)
            await asyncio.sleep(min(left_s, self._rng.expovariate(1 / FAULT_INTERVAL_S)))
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))

    async def _worker_killed(self) -> None:
        await self._again(self._mortal_worker(), signal.SIGKILL)

    async def _worker_drained(self) -> None:
        await self._again(self._mortal_worker(), signal.SIGTERM)

    async def _gateway_killed(self) -> None:
        await self._again(self._cluster.gateways[1], signal.SIGKILL)

    async def _again(self, part: Part, number: int) -> None:
        part.send(number)
        await asyncio.to_thread(part.wait)
        part.start()

    def _mortal_worker(self) -> Worker:
        return self._rng.choice(self._cluster.workers[1:])

    async def _worker_stopped(self) -> None:
        victim = self._rng.choice(self._cluster.workers)
        victim.freeze()
        await asyncio.sleep(self._rng.uniform(0.5, 5))
        victim.thaw()

    async def _redis_killed(self) -> None:
        self._cluster.redis.kill()
        await asyncio.sleep(self._rng.uniform(0.5, 3))
        self._cluster.redis.start()

    async def _redis_stopped(self) -> None:
        self._cluster.redis.stop()
        await asyncio.sleep(self._rng.uniform(0.5, 3))
        self._cluster.redis.resume()

    async def _redis_emptied(self) -> None:
        self._cluster.redis.command("FLUSHALL")


class Memory:
    """Resident bytes of the parts that live all along."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self.samples: dict[str, list[int]] = {part.name: [] for part in parts}

    async def sample(self) -> None:
        while True:
            for part in self._parts:
                self.samples[part.name].append(part.process.memory_info().rss)
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def growth(self) -> dict[str, float]:
        """From the mean of the second third to that of the last."""
        growths = {}
        for name, samples in self.samples.items():
            third = len(samples) // 3
            second, last = samples[third : 2 * third], samples[-third:]
            growths[name] = sum(last) / len(last) / (sum(second) / len(second)) - 1
        return growths


def num_keys(cluster: Cluster) -> int:
    with redis.Redis(port=cluster.redis_port, socket_timeout=HANG_S) as client:
        return int(client.dbsize())


async def test_row_22_soak(cluster: Cluster, rng: random.Random, soak_s: float) -> None:
    load = Load(cluster, random.Random(rng.random()))
    async with load.running():
        await asyncio.sleep(10)
    cluster.assert_quiet()
    census, keys = cluster.census(), num_keys(cluster)
    faults = Faults(cluster, random.Random(rng.random()))
    survivors: list[Part] = [cluster.gateway, cluster.workers[0]]
    pids = [part.pid for part in survivors]
    memory = Memory(survivors)
    sampling = asyncio.create_task(memory.sample())
    try:
        async with load.running():
            await faults.go_on(soak_s)
    finally:
        sampling.cancel()
    growth = memory.growth()
    print(f"{soak_s:.0f} s: {dict(load.counts)}; faults {dict(faults.counts)}")
    print(
        "resident: "
        + "; ".join(
            f"{name} {[sample >> 20 for sample in samples[:: max(1, len(samples) // 20)]]} MiB, {growth[name]:+.2%}"
            for name, samples in memory.samples.items()
        )
    )
    num_served = metrics(cluster.workers[0].url)["headstart_worker_requests_total"]
    print(f"the watched worker served {num_served:.0f} requests")
    assert num_served > soak_s / 10, "a worker that rests says nothing about its memory"
    assert [part.pid for part in survivors if part.poll() is None] == pids
    await asyncio.to_thread(cluster.wait_ready)
    cluster.assert_quiet()
    await asyncio.to_thread(cluster.assert_census, census, 60, 4)
    print(f"descriptors and tasks: {census} before, {cluster.census()} after")
    await asyncio.to_thread(wait_until, lambda: num_keys(cluster) <= keys, SET_TTL_S + HANG_S, "keys of the dead")
    print(f"keys: {keys} before, {num_keys(cluster)} after")
    asked = sum(count for name, count in load.counts.items() if name.startswith(cluster.gateway.name))
    assert load.counts[f"{cluster.gateway.name} ok"] > 0.98 * asked, "with the gateway that was never killed"
    assert max(growth.values()) < (GROWTH if soak_s >= LONG_S else SHORT_GROWTH), growth
