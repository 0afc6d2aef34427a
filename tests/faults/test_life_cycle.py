"""Parts that are asked to stop, again and again, while clients work: row 20."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.faults.client import Outcome, ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Gateway, Part
from tests.faults.worker_process import Additions
from tests.waiting import HANG_S, wait_until

NUM_ROUNDS = 10
NUM_CLIENTS = 6
GRACE_S = 4.0


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> Iterator[Cluster]:
    """A stopping part gives its requests the grace of the parameter, or less when all have ended."""
    grace = ["--drain-grace-s", str(request.param)]
    topology = Topology(num_gateways=2, worker_args=grace, gateway_args=grace, additions=Additions(step_s=0.01))
    with Cluster(tmp_path, model, topology) as running:
        yield running


class Balancer:
    """Sends each request to a gateway that is in rotation, as a service in front of several does."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._rng = rng
        self.rotation: set[Gateway] = set(cluster.gateways)
        self.outcomes: list[Outcome] = []
        self._stopping = False

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        async with session() as http:
            clients = [asyncio.create_task(self._client(http)) for _ in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._stopping = True
                await asyncio.gather(*clients)

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while not self._stopping:
            gateway = self._rng.choice(sorted(self.rotation, key=lambda each: each.name))
            prompt = " ".join(self._rng.choices(["up", "down", "left", "right"], k=self._rng.randint(5, 60)))
            body = completion(prompt, max_tokens=self._rng.randint(1, 100), stream=self._rng.random() < 0.7)
            self.outcomes.append(await ask(http, gateway.url, body))


async def restart(part: Part) -> None:
    """SIGTERM, exit code 0, no child left, and back again."""
    children = part.process.children(recursive=True)
    part.send(signal.SIGTERM)
    assert await asyncio.to_thread(part.wait) == 0, part.tail()
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive, f"orphans: {alive}"
    part.start()


@pytest.mark.parametrize("cluster", [HANG_S], indirect=True, ids=["grace"])
async def test_row_20_ten_rolling_restarts_of_all_parts(cluster: Cluster, rng: random.Random) -> None:
    """No request fails: all fit the grace period. Streams of a worker that stops end there or go on elsewhere."""
    balancer = Balancer(cluster, rng)
    async with balancer.load():
        for number in range(NUM_ROUNDS):
            for gateway in cluster.gateways:
                balancer.rotation.discard(gateway)
                await asyncio.sleep(0.1)
                await restart(gateway)
                await asyncio.to_thread(wait_until, lambda g=gateway: g.num_ready() == 2, what="gateway back")
                balancer.rotation.add(gateway)
            for worker in cluster.workers:
                await restart(worker)
                await asyncio.to_thread(wait_until, worker.is_ready, what="worker back")
                await asyncio.to_thread(
                    wait_until, lambda: all(g.num_ready() == 2 for g in cluster.gateways), what="both known"
                )
            cluster.redis.kill()
            await asyncio.sleep(0.2)
            cluster.redis.start()
            failed = [outcome for outcome in balancer.outcomes if not outcome.ok]
            assert not failed, (number, failed[:3])
    assert len(balancer.outcomes) > 100
    assert all(outcome.ok for outcome in balancer.outcomes)
    cluster.assert_quiet()


@pytest.mark.parametrize("cluster", [GRACE_S], indirect=True, ids=["grace"])
async def test_row_20_streams_longer_than_the_grace(cluster: Cluster, rng: random.Random) -> None:
    """A worker hands over what does not fit its grace, unnoticed; a gateway ends its own streams with an error."""
    body = completion("a very long answer", max_tokens=1200)
    async with session() as http:
        reference = await ask(http, cluster.gateway.url, body)
        assert reference.took_s > GRACE_S + 3
        stream = asyncio.create_task(ask(http, cluster.gateway.url, body))
        await asyncio.to_thread(wait_until, lambda: any(worker.num_open for worker in cluster.workers))
        busy = next(worker for worker in cluster.workers if worker.num_open)
        watch, begun_s = cluster.stopwatch(), time.monotonic()
        busy.send(signal.SIGTERM)
        ended_s = await asyncio.to_thread(watch.wait_until, lambda: busy.poll() == 0, GRACE_S + 4, "it has ended")
        assert time.monotonic() - begun_s > GRACE_S - 0.5, f"ended after {ended_s:.1f} s"
        assert (await stream).same_as(reference)
        cut = asyncio.create_task(ask(http, cluster.gateway.url, body))
        unstreamed = asyncio.create_task(ask(http, cluster.gateway.url, body | {"stream": False}))
        await asyncio.sleep(0.5)
        cluster.gateway.send(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: not cluster.gateway.num_ready(), what="no longer ready")
        assert await asyncio.to_thread(cluster.gateway.wait) == 0
        outcome = await cut
        assert (outcome.status, outcome.error, outcome.done) == (200, "shutting_down", False)
        outcome = await unstreamed
        assert (outcome.status, outcome.error) == (503, "shutting_down")
    cluster.assert_quiet()
