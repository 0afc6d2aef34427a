"""A fleet with a cluster secret, a forger who writes to its Redis without it, and replies that are spoiled."""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.faults.client import Outcome, ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.forger import Forger
from tests.faults.part import wait_until
from tests.faults.proxy import FaultProxy
from tests.waiting import HANG_S, until
from tests.worker_tokens import gateway_headers

SECRET: Final = b"the secret of this fleet"


def secret_cluster(folder: Path, model: Path, secret: bytes = SECRET, **topology: Any) -> Cluster:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "secret"
    file.write_bytes(secret)
    args = ["--cluster-secret-file", str(file)]
    return Cluster(folder, model, Topology(worker_args=args, gateway_args=args, **topology))


@contextmanager
def besieged(folder: Path, model: Path, **topology: Any) -> Iterator[tuple[Cluster, Sequence[FaultProxy]]]:
    """A fleet whose gateways and workers read Redis through a proxy each."""
    with FaultProxy(0, seed=1) as read, FaultProxy(0, seed=2) as write:
        cluster = secret_cluster(folder, model, redis_ports=(read.port, write.port), **topology)
        read.target = write.target = cluster.redis_port
        with cluster:
            yield cluster, (read, write)


def purge(cluster: Cluster) -> None:
    """Begin a new epoch on every worker."""
    for worker in cluster.workers:

        def post(path: str, body: bytes, headers: dict[str, str], url: str = worker.url) -> bytes:
            with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=HANG_S) as response:
                return bytes(response.read())

        post("/purge", b"", gateway_headers(SECRET, partial(post, headers={})))


async def hits(cluster: Cluster, prompts: list[str]) -> list[int]:
    """The cached tokens of each prompt, which were all sent before."""
    async with session() as http:
        outcomes = [await ask(http, cluster.gateway.url, completion(prompt, max_tokens=1)) for prompt in prompts]
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [int(outcome.headers["x-headstart-cached-tokens"]) for outcome in outcomes]


async def with_a_forger(
    cluster: Cluster, proxies: Sequence[FaultProxy], rng: random.Random, duration_s: float, num_requests: int
) -> None:
    """Send requests, streamed and not, while entries are forged and one reply in ten is spoiled.

    None fails, no process ends, and afterwards hits are as before.
    """
    prompts = [f"Conversation {number}. " + "One two three four five six seven. " * 12 for number in range(6)]
    await hits(cluster, prompts)
    purge(cluster)
    await hits(cluster, prompts)
    expected: list[int] = []

    async def are_known() -> bool:
        expected[:] = await hits(cluster, prompts)
        return min(expected) >= 64

    await until(are_known)
    outcomes: list[Outcome] = []
    with Forger(cluster.redis, rng) as forger:
        for proxy in proxies:
            proxy.set(spoil=0.1)
        purge(cluster)  # entries of an epoch that has ended, which were seen
        async with session() as http:
            tasks = []
            begun_s = time.monotonic()
            for number in range(num_requests):
                until_s = begun_s + number * duration_s / num_requests
                await asyncio.sleep(max(0.0, until_s - time.monotonic()))
                prompt = rng.choice([*prompts, f"Something new {number}."])
                body = completion(prompt, max_tokens=rng.choice([1, 16]), stream=rng.random() < 0.5)
                tasks.append(asyncio.create_task(ask(http, cluster.gateway.url, body)))
            outcomes = list(await asyncio.gather(*tasks))
        assert forger.counts.total() > duration_s, "it has hardly written"
        assert all(proxy.num_spoiled for proxy in proxies)
    for proxy in proxies:
        proxy.heal()
    failed = [(outcome.status, outcome.error) for outcome in outcomes if not outcome.ok]
    assert not failed, f"{len(failed)} of {len(outcomes)} requests failed: {failed[:5]}"
    assert all(part.poll() is None for part in cluster.parts), "a process has ended"

    async def back() -> bool:
        return await hits(cluster, prompts) == expected

    ended_s = time.monotonic()
    await until(back)
    print(f"{len(outcomes)} requests, {forger.counts.total()} writes, hits back in {time.monotonic() - ended_s:.1f} s")
    events = cluster.gateway.metrics()
    assert events["headstart_index_events_total{invalid}"] > 0
    wait_until(lambda: cluster.gateway.num_ready() == len(cluster.workers), what="all workers known")
