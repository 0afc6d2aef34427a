"""Redis that is gone, slow, emptied, failed over, or cut off from one side: rows 1 to 5, 11 and 13."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.e2e.serving import free_ports
from tests.faults.client import Outcome, ask, ask_all, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Gateway, Worker, metrics
from tests.faults.patient_gateway import LOOKUP_S
from tests.faults.proxy import FaultProxy
from tests.redis_server import RedisServer, newest_redis
from tests.waiting import HANG_S, wait_until

RECONNECT_S = 5.0
REWRITE_S = 3.0


@dataclass
class Site:
    """A fleet whose connections to Redis all go through proxies, to a primary with a replica."""

    cluster: Cluster
    gateway_side: FaultProxy
    worker_side: FaultProxy
    replica: RedisServer
    replica_port: int

    @property
    def sides(self) -> tuple[FaultProxy, FaultProxy]:
        return self.gateway_side, self.worker_side

    def follow(self) -> None:
        """The replica copies the primary."""
        self.replica.command("REPLICAOF", "127.0.0.1", str(self.cluster.redis_port))
        wait_until(lambda: b"master_link_status:up" in self.replica.command("INFO", "replication"), what="replication")

    def heal(self) -> None:
        for side in self.sides:
            side.heal()
            side.target = self.cluster.redis_port
            side.reset_all()
        if self.cluster.redis.runs:
            self.cluster.redis.resume()
        else:
            self.cluster.redis.start()
        self.follow()
        wait_until(lambda: routed(self.cluster), what="routing by the index again")


def routed(cluster: Cluster) -> bool:
    """The gateways use the index, and every worker that lives is in it with all that it holds."""
    blind = [gateway.metrics()["headstart_index_blind"] for gateway in cluster.gateways]
    if any(blind) or not all(map(connected, cluster.workers)):
        return False
    epochs = {worker["worker_id"]: worker["epoch"] for worker in cluster.gateway.workers()}
    with redis.Redis(port=cluster.redis_port, socket_timeout=HANG_S) as client:
        for worker in cluster.workers:
            keys = client.keys(f"*:b:{worker.name}:{epochs.get(worker.name)}:*")
            newest = max(keys, key=lambda key: int(key.rpartition(b":")[2]), default=None)
            if (client.scard(newest) if newest is not None else 0) != entries(worker):
                return False
    return True


def connected(worker: Worker) -> bool:
    return bool(metrics(worker.url)["headstart_worker_index_connected"])


def entries(worker: Worker) -> int:
    return int(metrics(worker.url)["headstart_worker_index_entries"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("redis")
    (port,) = free_ports(1)
    (folder / "replica").mkdir()
    with ExitStack() as stack:
        sides = [stack.enter_context(FaultProxy(0)) for _ in range(2)]
        topology = Topology(
            redis_ports=(sides[0].port, sides[1].port),
            static_workers=False,
            gateway_module="tests.faults.patient_gateway",
        )
        cluster = Cluster(folder, model, topology)
        for side in sides:
            side.target = cluster.redis_port
        stack.enter_context(cluster)
        binary = newest_redis()
        replica = stack.enter_context(RedisServer(folder / "replica", binary, "--port", str(port)))
        yield Site(cluster, sides[0], sides[1], replica, port)


@pytest.fixture(autouse=True)
def healed(request: pytest.FixtureRequest) -> Iterator[None]:
    if "site" not in request.fixturenames:
        yield
        return
    site: Site = request.getfixturevalue("site")
    site.heal()
    yield
    site.heal()
    site.cluster.assert_quiet()


class Stream:
    """Sends short requests one after another in a thread until it is left, and collects their `outcomes`."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self._url = url
        self._prompts = random.Random(rng.random())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with session() as http:
            while not self._stop.is_set():
                prompt = " ".join(self._prompts.choices(["red", "green", "blue"], k=40))
                self.outcomes.append(await ask(http, self._url, completion(prompt, max_tokens=2)))

    def more(self, count: int) -> list[Outcome]:
        """The next outcomes."""
        seen = len(self.outcomes)
        wait_until(lambda: len(self.outcomes) >= seen + count, what="requests")
        return self.outcomes[seen : seen + count]


def statuses(outcomes: list[Outcome]) -> set[object]:
    return {outcome.error or outcome.status for outcome in outcomes}


def lines(gateway: Gateway, text: str) -> int:
    return gateway.log.read_text().count(text)


async def warm_hit(cluster: Cluster, rng: random.Random) -> int:
    """Wait until the index promises a prompt that a worker has just computed; return the promised tokens."""
    body = completion(" ".join(rng.choices(["one", "two", "three"], k=200)), max_tokens=1)
    async with session() as http:
        await ask(http, cluster.gateway.url, body)
        async with asyncio.timeout(HANG_S):
            while True:
                await asyncio.sleep(0.4)
                if promised := int((await ask(http, cluster.gateway.url, body)).headers["x-headstart-cached-tokens"]):
                    return promised


def test_row_1_down_at_the_start(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """A gateway with `--workers` serves without Redis, and finds it when it comes."""
    with Cluster(tmp_path, model, Topology(redis=False, num_workers=1)) as cluster:
        with Stream(cluster.gateway.url, rng) as stream:
            assert statuses(stream.more(5)) == {200}
            assert cluster.gateway.num_ready() == 1
            assert cluster.gateway.metrics()["headstart_index_blind"] == 1.0
            assert lines(cluster.gateway, "no Redis at") == 1, "told once, however often it was tried"
            cluster.redis.start()
            cluster.stopwatch().wait_until(lambda: routed_once(cluster), RECONNECT_S, "reconnected")
            stream.more(3)
        assert statuses(stream.outcomes) == {200}
        wait_until(lambda: lines(cluster.gateway, "connected to Redis at") == 1, what="a connection that lasts is told")
        cluster.assert_quiet()


def routed_once(cluster: Cluster) -> bool:
    return not cluster.gateway.metrics()["headstart_index_blind"] and all(map(connected, cluster.workers))


def test_row_1_killed_and_started_again(site: Site, rng: random.Random) -> None:
    cluster = site.cluster
    census = cluster.census()
    with Stream(cluster.gateway.url, rng) as stream:
        stream.more(3)
        logged = lines(cluster.gateway, "lookups fail"), lines(cluster.gateway, "no Redis at")
        cluster.redis.kill()
        assert statuses(stream.more(15)) == {200}
        assert cluster.gateway.num_ready() == 2
        connections = site.gateway_side.num_connections
        time.sleep(2.0)
        assert site.gateway_side.num_connections - connections < 20, "a herd of reconnections"
        assert lines(cluster.gateway, "lookups fail") - logged[0] <= 1
        assert lines(cluster.gateway, "no Redis at") - logged[1] == 1
        cluster.redis.start()
        cluster.stopwatch().wait_until(lambda: routed_once(cluster), RECONNECT_S, "reconnected")
        stream.more(3)
    assert statuses(stream.outcomes) == {200}
    cluster.assert_census(census)


@pytest.mark.parametrize("fault", [{"delay_s": 0.1}, {"delay_s": 2.5}, {"hole_down": True}, "stopped"])
def test_row_2_slow(site: Site, rng: random.Random, fault: Any) -> None:
    """Replies take 200 ms, 5 s, or never come: once the breaker is open, no request waits for Redis."""
    cluster = site.cluster
    with Stream(cluster.gateway.url, rng) as stream:
        stream.more(5)
        healthy_s = statistics.median(outcome.ttft_s for outcome in stream.more(40))
        if fault == "stopped":
            cluster.redis.stop()
        else:
            for side in site.sides:
                side.set(**fault)
        time.sleep(2 * LOOKUP_S)  # what was answered before the fault has been counted
        wait_until(lambda: is_open(cluster), what="the breaker opens")
        failed, opened = num_failed(cluster), count(cluster, "breaker_opened")
        slow_s = statistics.median(outcome.ttft_s for outcome in stream.more(40))
        assert num_failed(cluster) <= failed + 1, "timeouts stack"
        assert count(cluster, "breaker_opened") == opened
        assert is_open(cluster)
    print(f"first token after {healthy_s * 1e3:.1f} ms, with a broken Redis after {slow_s * 1e3:.1f} ms")
    assert statuses(stream.outcomes) == {200}


def is_open(cluster: Cluster) -> bool:
    return count(cluster, "breaker_opened") > count(cluster, "breaker_closed")


def num_failed(cluster: Cluster) -> float:
    """Count the lookups for which a request has waited without a result."""
    return count(cluster, "timeout") + count(cluster, "down")


def count(cluster: Cluster, event: str) -> float:
    return cluster.gateway.metrics().get(f"headstart_index_events_total{{{event}}}", 0.0)


async def test_row_3_emptied(site: Site, rng: random.Random) -> None:
    """Every worker sees that its keys are gone and writes them again: at its next heartbeat, without a restart."""
    cluster = site.cluster
    assert await warm_hit(cluster, rng) > 0
    epochs = {worker["worker_id"]: worker["epoch"] for worker in cluster.gateway.workers()}
    for command in (("FLUSHALL",), ("EVAL", "return redis.call('DEL', unpack(redis.call('KEYS', '*:b:*')))", "0")):
        with Stream(cluster.gateway.url, rng) as stream:
            stream.more(2)
            assert not cluster.redis.command(*command).startswith(b"-")
            stream.more(2)
        cluster.stopwatch().wait_until(lambda: routed(cluster), REWRITE_S, "rewritten")
        assert statuses(stream.outcomes) == {200}
        assert await warm_hit(cluster, rng) > 0
    assert {worker["worker_id"]: worker["epoch"] for worker in cluster.gateway.workers()} == epochs


async def test_row_4_failover(site: Site, rng: random.Random) -> None:
    """The primary dies; its address leads to the replica, read-only at first, then promoted."""
    cluster = site.cluster
    members = len(cluster.gateway.workers())
    with Stream(cluster.gateway.url, rng) as stream:
        stream.more(3)
        cluster.redis.kill()
        for side in site.sides:
            side.target = site.replica_port
        stream.more(10)
        site.replica.command("REPLICAOF", "NO", "ONE")
        wait_until(lambda: not cluster.gateway.metrics()["headstart_index_blind"], what="the new primary")
        wait_until(lambda: all(map(connected, cluster.workers)), what="the workers there")
        stream.more(3)
    assert statuses(stream.outcomes) == {200}
    assert await warm_hit(cluster, rng) > 0
    assert len(cluster.gateway.workers()) == members, "duplicate or phantom workers"


def test_row_4_loading(site: Site, rng: random.Random) -> None:
    """A Redis that loads its data refuses every command for a while."""
    cluster = site.cluster
    with Stream(cluster.gateway.url, rng) as stream:
        stream.more(3)
        for side in site.sides:
            side.set(reply=b"-LOADING Redis is loading the dataset in memory\r\n")
            side.reset_all()
        stream.more(10)
        for side in site.sides:
            side.heal()
        wait_until(lambda: routed_once(cluster), what="loaded")
    assert statuses(stream.outcomes) == {200}


def test_row_5_clocks_that_disagree(
    tmp_path: Path, model: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers ten minutes ahead and behind, then a jump of an hour: leases depend only on Redis' clock."""
    if shutil.which("faketime") is None:
        pytest.fail("install Debian's `faketime`: without it nothing is known about clocks that disagree")
    cluster = Cluster(tmp_path, model, Topology(static_workers=False))
    clocks = []
    for worker, offset in zip(cluster.workers, ("+600", "-600"), strict=True):
        clock = tmp_path / f"{worker.name}.clock"
        clock.write_text(offset)
        clocks.append(clock)
    cluster.workers = [faked(worker, clock) for worker, clock in zip(cluster.workers, clocks, strict=True)]
    with cluster, Stream(cluster.gateway.url, rng) as stream:
        stream.more(3)
        assert asyncio.run(warm_hit(cluster, rng)) > 0
        for clock, offset in zip(clocks, ("-3600", "+3600"), strict=True):
            clock.write_text(offset)
        time.sleep(2.5)
        stream.more(5)
        assert asyncio.run(warm_hit(cluster, rng)) > 0
        wait_until(lambda: cluster.gateway.num_ready() == 2, what="both are ready")
        wait_until(lambda: max(worker["load_age_s"] for worker in cluster.gateway.workers()) < 5, what="fresh loads")
    assert statuses(stream.outcomes) == {200}


def faked(worker: Worker, clock: Path) -> Worker:
    """Return the same worker as a separate process, whose wall clock is off by the offset in the file."""
    from tests.faults.exec_worker import ExecWorker

    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    environment = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    return ExecWorker(worker.name, worker.port, worker.log, worker.args, environment)


async def test_row_11_lost_and_repeated_writes(site: Site, rng: random.Random) -> None:
    """Connections between workers and Redis break again and again, in mid-batch, with replies lost.

    In the end the index holds exactly the blocks of the workers, and every answer is right.
    """
    cluster = site.cluster
    with Stream(cluster.gateway.url, rng) as stream:
        for _ in range(12):
            site.worker_side.set(**rng.choice([{"hole_down": True}, {"reset_after_bytes": rng.randint(1, 400)}, {}]))
            stream.more(rng.randint(1, 4))
            site.worker_side.heal()
            site.worker_side.reset_all()
    assert statuses(stream.outcomes) == {200}
    wait_until(lambda: routed(cluster), what="in step")
    body = completion(" ".join(rng.choices(["one", "two"], k=100)), max_tokens=8)
    first, second = [(await ask_all(cluster.gateway.url, [body]))[0] for _ in range(2)]
    assert first.same_as(second)


async def test_row_13_workers_cut_off_from_redis(site: Site, rng: random.Random) -> None:
    """Their leases lapse, but they answer the gateway themselves: streams go on and new ones come."""
    cluster = site.cluster
    body = completion("a long stream", max_tokens=1500)
    (reference,) = await ask_all(cluster.gateway.url, [body])
    running = asyncio.create_task(ask_all(cluster.gateway.url, [body] * 4))
    site.worker_side.set(hole_up=True, hole_down=True)
    with Stream(cluster.gateway.url, rng) as stream:
        await asyncio.to_thread(time.sleep, 6.0)  # longer than a lease
        stream.more(5)
    assert statuses(stream.outcomes) == {200}
    assert all(outcome.same_as(reference) for outcome in await running)
    wait_until(lambda: cluster.gateway.num_ready() == 2, what="both are ready")
