"""Rows 12 to 15, 18, 21 and 23 of the matrix in docs/reliability.md.

Clients leave or do not read, and gateways die or are cut off. Logs cannot be written, and parts have another version.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import free_ports
from tests.faults.client import Outcome, ask, ask_all, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.exec_worker import ExecWorker
from tests.faults.part import ROOT, Gateway
from tests.faults.proxy import FaultProxy
from tests.faults.worker_process import Additions
from tests.tiny_model import write_tiny_model
from tests.waiting import until, wait_until

STEP_S = 0.01


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    topology = Topology(num_gateways=2, additions=Additions(step_s=STEP_S))
    with Cluster(tmp_path_factory.mktemp("clients"), model, topology) as running:
        yield running


@pytest.fixture
def cluster(fleet: Cluster) -> Iterator[Cluster]:
    yield fleet
    if fleet.gateways[0].poll() is not None:
        fleet.gateways[0].start()
    fleet.wait_ready()
    fleet.assert_quiet()


def bodies(rng: random.Random, count: int, **options: Any) -> list[dict[str, Any]]:
    prompts = [" ".join(rng.choices(["north", "south", "east", "west"], k=rng.randint(4, 40))) for _ in range(count)]
    return [completion(prompt, **options) for prompt in prompts]


class Progress:
    """Counts the events that streams have brought."""

    def __init__(self) -> None:
        self.num_events = 0

    def count(self, _: Outcome) -> None:
        self.num_events += 1


def num_open(cluster: Cluster) -> int:
    return sum(worker.num_open for worker in cluster.workers)


async def test_row_12_gateway_killed(cluster: Cluster, rng: random.Random) -> None:
    """Its work at the workers is freed within two seconds; streams of the other gateway do not notice."""
    asked = bodies(rng, 20, max_tokens=1500)
    others = bodies(rng, 6, max_tokens=400)
    reference = await ask_all(cluster.gateways[1].url, others)
    doomed = asyncio.create_task(ask_all(cluster.gateways[0].url, asked))
    await asyncio.to_thread(wait_until, lambda: num_open(cluster) == 20, what="those that will be lost run")
    spared = asyncio.create_task(ask_all(cluster.gateways[1].url, others))
    await asyncio.to_thread(wait_until, lambda: num_open(cluster) == 26, what="all run")
    cluster.gateways[0].kill()
    await asyncio.to_thread(cluster.stopwatch().wait_until, lambda: num_open(cluster) <= 6, 2.0, "freed")
    assert {outcome.error for outcome in await doomed} == {"cut"}
    assert all(outcome.same_as(want) for outcome, want in zip(await spared, reference, strict=True))


@pytest.mark.parametrize("fault", [{"hole_up": True, "hole_down": True}, {"hole_down": True}])
async def test_row_13_gateway_cut_off_from_a_worker(
    tmp_path: Path, model: Path, rng: random.Random, fault: dict[str, bool]
) -> None:
    """Both ways and one: streams go on at the other worker; when the cut ends, both serve again."""
    proxy = FaultProxy(0)
    topology = Topology(gateway_args=["--stall-s", "1"], additions=Additions(step_s=STEP_S), advertise={0: proxy.port})
    cluster = Cluster(tmp_path, model, topology)
    proxy.target = cluster.workers[0].port
    with proxy, cluster:
        asked = bodies(rng, 12, max_tokens=150)
        reference = await ask_all(cluster.gateway.url, asked)
        progress = Progress()
        running = asyncio.create_task(ask_all(cluster.gateway.url, asked, on_tokens=progress.count))
        await until(lambda: progress.num_events >= 20 * len(asked))
        proxy.set(**fault)
        watch = cluster.stopwatch()
        outcomes = await running
        assert watch.own_s() < 15
        assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
        proxy.heal()
        await asyncio.to_thread(wait_until, lambda: cluster.gateway.num_ready() == 2, what="healed")
        cluster.assert_quiet(10.0)


async def test_row_13_connections_that_reset(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """Every stream's connection to its only worker breaks, several times: nothing is lost and nothing comes twice."""
    proxy = FaultProxy(0, seed=rng.randrange(1000))
    topology = Topology(num_workers=1, additions=Additions(step_s=STEP_S), advertise={0: proxy.port})
    cluster = Cluster(tmp_path, model, topology)
    proxy.target = cluster.workers[0].port
    with proxy, cluster:
        asked = bodies(rng, 16, max_tokens=150)
        reference = await ask_all(cluster.gateway.url, asked)
        progress = Progress()
        running = asyncio.create_task(ask_all(cluster.gateway.url, asked, on_tokens=progress.count))
        for share in (1 / 3, 2 / 3):
            await until(lambda share=share: progress.num_events >= share * 150 * len(asked))
            assert await asyncio.to_thread(proxy.reset_all) > 0
        outcomes = await running
        assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
        cluster.assert_quiet()


async def test_row_14_slow_clients(cluster: Cluster, rng: random.Random) -> None:
    """64 clients that read a byte a second: the others' tokens come as before, and memory stays flat."""
    async with session() as http:
        (body,) = bodies(rng, 1, max_tokens=100)
        watch = cluster.stopwatch()
        before, before_s = await ask(http, cluster.gateway.url, body), watch.own_s()
        slow = [await open_slow(cluster.gateway, body | {"max_tokens": 3000}) for body in bodies(rng, 64)]
        await asyncio.sleep(2.0)
        rss = cluster.gateway.process.memory_info().rss
        during, during_s = [], []
        for _ in range(3):
            watch = cluster.stopwatch()
            during.append(await ask(http, cluster.gateway.url, body))
            during_s.append(watch.own_s())
        for reader, _ in slow:
            assert await reader.read(1)
        assert cluster.gateway.process.memory_info().rss < rss + (48 << 20)
        for _, writer in slow:
            writer.transport.abort()
    assert all(outcome.same_as(before) for outcome in during)
    assert min(during_s) < 3 * before_s + 1.0


async def open_slow(gateway: Gateway, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", gateway.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=16)
    data = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    return reader, writer


async def test_row_15_disconnect_storm(cluster: Cluster, rng: random.Random) -> None:
    """200 streams and 200 unstreamed requests are dropped: within two seconds nothing of them is left, and the next
    requests are as quick as before."""
    census = cluster.census()
    probes = bodies(rng, 9, max_tokens=4)
    before_s = await median_s(cluster, probes)
    storm = bodies(rng, 200, max_tokens=1000) + [b | {"stream": False} for b in bodies(rng, 200, max_tokens=1000)]
    async with session() as http:
        tasks = [asyncio.create_task(ask(http, cluster.gateway.url, body)) for body in storm]
        await asyncio.to_thread(wait_until, lambda: num_open(cluster) >= 380, what="the storm")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(cluster.assert_quiet, 4.0)
    assert await median_s(cluster, probes) < before_s + 0.1
    cluster.assert_census(census, slack=6)


async def median_s(cluster: Cluster, probes: list[dict[str, Any]]) -> float:
    """Ask one after the other; return the median of what they took."""
    took_s = []
    for body in probes:
        watch = cluster.stopwatch()
        await ask_all(cluster.gateway.url, [body])
        took_s.append(watch.own_s())
    return statistics.median(took_s)


@pytest.mark.parametrize("log", ["full disk", "blocked pipe"])
async def test_row_18_logs_that_cannot_be_written(tmp_path: Path, model: Path, rng: random.Random, log: str) -> None:
    """stderr and stdout lead to a full disk, or to a full pipe without a reader: requests are served."""
    cluster = Cluster(tmp_path, model, Topology(num_workers=1, worker_args=["--log-level", "debug"]))
    reader, writer = os.pipe()
    if log == "blocked pipe":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
    else:
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    worker = cluster.workers[0]
    worker_command = ["-m", "worker", "--worker-id", "w0", "--port", str(worker.port), *worker.args]
    gateway = cluster.gateway
    ports = ["--port", str(gateway.port), "--ops-port", str(gateway.ops_port)]
    gateway_command = ["-m", "server.gateway", *ports, *gateway.args, "--log-level", "debug"]
    cluster.redis.start()
    processes = [start_with_log(command, writer) for command in (worker_command, gateway_command)]
    try:
        await asyncio.to_thread(wait_until, lambda: gateway.num_ready() == 1, what="ready")
        outcomes = await ask_all(gateway.url, bodies(rng, 100, max_tokens=8))
        assert {outcome.status for outcome in outcomes} == {200}
        async with session() as http:  # what is logged: refusals, clients that leave, Redis that goes
            cluster.redis.kill()
            for _ in range(50):
                task = asyncio.create_task(ask(http, gateway.url, completion("x", max_tokens=500)))
                await asyncio.sleep(0.02)
                task.cancel()
        outcomes = await ask_all(gateway.url, bodies(rng, 50, max_tokens=8))
        assert {outcome.status for outcome in outcomes} == {200}
        assert [process.poll() for process in processes] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(reader)
        os.close(writer)
        cluster.redis.kill()


def start_with_log(command: list[str], log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


async def test_row_21_dead_peers_are_probed(cluster: Cluster, rng: random.Random) -> None:
    """A peer whose machine is gone sends no FIN. Connections that worker and gateway have accepted carry the
    kernel's keep-alive timer (2 in /proc/net/tcp), which is what ends them."""
    async with session() as http:
        stream = asyncio.create_task(ask(http, cluster.gateway.url, completion("x", max_tokens=600)))
        idle = socket.create_connection(("127.0.0.1", cluster.gateway.port))
        quiet = socket.create_connection(("127.0.0.1", cluster.workers[0].port))
        for port in (cluster.gateway.port, cluster.workers[0].port):
            await until(lambda port=port: keepalive_timers(port) > 0)
        idle.close()
        quiet.close()
        assert (await stream).ok


def keepalive_timers(port: int) -> int:
    """Established connections accepted on the port whose keep-alive timer runs."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == "01"]
    return sum(row[5].startswith("02:") for row in local)


async def test_row_23_another_model_under_the_same_name(cluster: Cluster, tmp_path: Path, rng: random.Random) -> None:
    """A worker of other weights joins under the name of a model that is served: it is another revision, which waits
    while more workers have the first one. No block of the one is ever taken for the other's."""
    other = write_tiny_model(tmp_path / "other", seed=99, max_position_embeddings=2048)
    args = [str(other) if arg == cluster.workers[0].args[1] else arg for arg in cluster.workers[0].args]
    stranger = cluster.worker("stranger", free_ports(1)[0], args, None)
    asked = bodies(rng, 6, max_tokens=20)
    reference = await ask_all(cluster.gateway.url, asked)
    stranger.start()
    try:
        await asyncio.to_thread(wait_until, stranger.is_ready)

        def stands_by() -> bool:
            return any((w["worker_id"], w["state"]) == ("stranger", "standby") for w in cluster.gateway.workers())

        await asyncio.to_thread(wait_until, stands_by, what="listed as another revision")
        outcomes = await ask_all(cluster.gateway.url, asked * 3)
        assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference * 3, strict=True))
        assert "stranger" not in {outcome.headers["x-headstart-worker"] for outcome in outcomes}
    finally:
        stranger.stop()


async def test_row_23_another_protocol(cluster: Cluster, rng: random.Random) -> None:
    """A worker that speaks another version of the protocol is refused by the gateway, and refuses a gateway itself."""
    worker = cluster.workers[0]
    newer = ExecWorker(
        "newer", free_ports(1)[0], cluster.folder / "newer.log", worker.args, {}, "tests.faults.newer_worker"
    )
    newer.start()
    try:
        await asyncio.to_thread(wait_until, newer.is_ready)
        said = "worker newer at"
        await asyncio.to_thread(wait_until, lambda: said in cluster.gateway.log.read_text(), what="refused loudly")
        assert "it speaks protocol" in cluster.gateway.log.read_text()
        outcomes = await ask_all(cluster.gateway.url, bodies(rng, 12, max_tokens=4))
        assert {outcome.headers["x-headstart-worker"] for outcome in outcomes} <= {"w0", "w1"}
    finally:
        newer.stop()
