"""Behind each front of docs/behind-a-front.md: restarts, refused uploads, clients that leave, idle connections.

`pytest -m faults tests/faults/test_documented_fronts.py --front-requests 2000` sends more requests around restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from server.auth.identity import digest_text
from tests.faults.client import ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.documented_fronts import NAMES, DocumentedFront
from tests.faults.part import Gateway, Part
from tests.faults.worker_process import Additions
from tests.waiting import HANG_S, until

KEY: Final = f"sk-{secrets.token_hex(24)}"
LIMITED_KEY: Final = f"sk-{secrets.token_hex(24)}"
"""It has no request left after the first one of a minute."""
NOTICE_S: Final = 4.0
MAX_BODY_BYTES: Final = 512 << 10
NUM_CLIENTS: Final = 6
PAUSE_S: Final = 0.05
PIECE_BYTES: Final = 64 << 10
SLOW_S: Final = 3.0
"""How long a slow upload takes."""
NUM_LEAVERS: Final = 5
GATEWAY_IDLE_S: Final = 5
FRONT_IDLE_S: Final = 2
NUM_GAPS: Final = 140
LINK_DELAY_S: Final = 0.001
SHORT_IDLE: Final = {
    "nginx": {"keepalive_timeout 60s": f"keepalive_timeout {FRONT_IDLE_S}s"},
    "haproxy": {"pool-purge-delay 5s": "pool-purge-delay 300ms"},
    "envoy": {"idle_timeout: 60s": f"idle_timeout: {FRONT_IDLE_S}s"},
    "caddy": {"keepalive 60s": f"keepalive {FRONT_IDLE_S}s"},
    "traefik": {"idleConnTimeout: 60s": f"idleConnTimeout: {FRONT_IDLE_S}s"},
    "apache": {"ttl=60": f"ttl={FRONT_IDLE_S}"},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("fleet")
    keys = folder / "keys.toml"
    entry = '[[keys]]\ndigest = "{}"\ntenant = "{}"\n'
    limited = entry.format(digest_text(LIMITED_KEY.encode()), "limited") + "requests_per_minute = 1\n"
    keys.write_text(entry.format(digest_text(KEY.encode()), "one") + limited)
    arguments = f"--api-keys {keys} --max-body {MAX_BODY_BYTES} --drain-notice-s {NOTICE_S} --drain-grace-s 20"
    topology = Topology(
        num_gateways=2,
        gateway_args=[*arguments.split(), "--keep-alive-s", str(GATEWAY_IDLE_S)],
        worker_args=["--drain-grace-s", "20"],
        additions=Additions(step_s=0.01),
    )
    with Cluster(folder, model, topology) as running:
        yield running


@contextlib.asynccontextmanager
async def standing(
    name: str, folder: Path, ports: Sequence[int], changes: dict[str, str] | None = None
) -> AsyncIterator[DocumentedFront]:
    """A front that has found its gateways."""
    with DocumentedFront(name, folder, ports, changes) as front:
        async with session() as http:

            async def serves() -> bool:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{front.url}/health/ready") as response:
                        return response.status == 200
                return False

            await until(serves)
        yield front


def ports_of(cluster: Cluster) -> list[int]:
    return [gateway.port for gateway in cluster.gateways]


# --- restarts ---------------------------------------------------------------------------------------------------------


async def restart(part: Part, how: str) -> None:
    if how == "POST /drain":
        assert isinstance(part, Gateway)
        async with session() as http, http.post(f"{part.ops_url}/drain") as response:
            assert response.status == 200
    else:
        part.send(signal.SIGTERM)
    assert await asyncio.to_thread(part.wait) == 0, part.tail()
    part.start()


@pytest.mark.parametrize("how", ["SIGTERM", "POST /drain", "a worker"])
@pytest.mark.parametrize("name", NAMES)
async def test_restarts_in_turn_fail_no_request(
    name: str, how: str, cluster: Cluster, tmp_path: Path, rng: random.Random, request: pytest.FixtureRequest
) -> None:
    wanted = int(request.config.getoption("--front-requests"))
    outcomes: Counter[str] = Counter()
    headers = {"authorization": f"Bearer {KEY}"}
    is_done = False

    async def client(http: aiohttp.ClientSession, url: str) -> None:
        while not is_done or outcomes.total() < wanted:
            body = completion("up down", stream=rng.random() < 0.5, max_tokens=rng.randint(1, 40))
            outcome = await ask(http, url, body, headers=headers)
            outcomes["ok" if outcome.ok else f"{outcome.status} {outcome.error}"] += 1
            await asyncio.sleep(rng.uniform(0, 2 * PAUSE_S))

    async with standing(name, tmp_path, ports_of(cluster)) as front, session() as http, asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(client(http, front.url))
        for part in cluster.workers if how == "a worker" else cluster.gateways:
            num_wanted = outcomes.total() + NUM_CLIENTS
            await until(lambda num=num_wanted: outcomes.total() > num)
            await restart(part, how)
            await asyncio.to_thread(cluster.wait_ready)
            await asyncio.sleep(3.0)  # the health checks find it
        is_done = True
    print(f"{name}, {how}: {dict(outcomes)}")
    assert outcomes.keys() == {"ok"}, outcomes


# --- refusals during uploads ------------------------------------------------------------------------------------------


async def upload(port: int, key: str, num_bytes: int, seconds: float, expects: bool) -> int:
    """Send all of a body, whatever comes; return the status, or 0 without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {num_bytes}\r\n"
    head += "Expect: 100-continue\r\n\r\n" if expects else "\r\n"
    may_send = asyncio.Event()

    async def send() -> None:
        writer.write(head.encode())
        if expects:
            await may_send.wait()
        num_pieces = num_bytes // PIECE_BYTES
        with contextlib.suppress(ConnectionError):
            for _ in range(num_pieces):
                writer.write(b" " * PIECE_BYTES)
                await writer.drain()
                await asyncio.sleep(seconds / num_pieces)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(HANG_S):
            while line := await reader.readline():
                if line.startswith(b"HTTP/1.1 100"):
                    may_send.set()
                elif line.startswith(b"HTTP/1.1 "):
                    status = int(line.split()[1])
                    text = await reader.readuntil(b"}")
                    assert b'"error"' in text, text  # it is the gateway's own
                    return status
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    return 0


@pytest.mark.parametrize("name", NAMES)
async def test_refusals_of_uploads_arrive(name: str, cluster: Cluster, tmp_path: Path) -> None:
    kinds = {401: "sk-wrong", 413: KEY, 429: LIMITED_KEY}
    own = {401: (401, 429), 413: (413,), 429: (429, 413)}  # many wrong keys get 429; a minute may begin
    wrong: list[object] = []
    gate = asyncio.Semaphore(4)
    num = 0

    async def one(status: int, megabytes: int, seconds: float, expects: bool, port: int) -> None:
        nonlocal num
        async with gate:
            if status == 429:  # no request of the minute is left
                await upload(port, LIMITED_KEY, PIECE_BYTES, 0.0, False)
            begun_s = time.monotonic()
            found = await upload(port, kinds[status], megabytes << 20, seconds, expects)
            num += 1
            if found not in own[status]:
                wrong.append((status, megabytes, seconds, expects, found, round(time.monotonic() - begun_s, 2)))

    cases = itertools.product(kinds, (1, 8, 40), (0.0, SLOW_S), (False, True))
    async with standing(name, tmp_path, ports_of(cluster)) as front:
        await asyncio.gather(*(one(*case, front.port) for case in cases))
    print(f"{name}: {num} uploads, {len(wrong)} without the gateway's status: {wrong}")
    assert not wrong


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
async def test_a_client_that_leaves_early_frees_its_worker(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """Apache notices only when it writes: there, of a stream."""
    body = completion("up down", stream=name == "apache", max_tokens=1500)
    headers = {"authorization": f"Bearer {KEY}"}

    def num_open() -> int:
        return sum(worker.num_open for worker in cluster.workers)

    async with standing(name, tmp_path, ports_of(cluster)) as front:
        for _ in range(NUM_LEAVERS):
            async with session() as http:
                asking = asyncio.create_task(ask(http, front.url, body, headers=headers))
                await until(lambda: asyncio.to_thread(num_open))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            watch = cluster.stopwatch()
            took_s = await asyncio.to_thread(watch.wait_until, lambda: not num_open(), 1.0, "a worker that is free")
            print(f"{name}: free after {took_s:.2f} s")


# --- idle connections -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def link(port: int) -> AsyncIterator[int]:
    """A port that passes bytes and ends on to another, a millisecond later each way."""

    open_tasks: set[asyncio.Task[None] | None] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(LINK_DELAY_S)
                writer.write(data)
        await asyncio.sleep(LINK_DELAY_S)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_tasks.add(asyncio.current_task())
        writers = [writer]
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            writers.append(back)
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))
        except asyncio.CancelledError:
            pass  # the link ends
        finally:
            for each in writers:
                each.transport.abort()
            for each in writers:  # a loop that ends before leaves them open
                with contextlib.suppress(ConnectionError):
                    await each.wait_closed()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        server.close()
        for task in open_tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*filter(None, open_tasks), return_exceptions=True)


@pytest.mark.parametrize("name", NAMES)
async def test_idle_connections_end_at_the_right_side(
    name: str, cluster: Cluster, tmp_path: Path, rng: random.Random
) -> None:
    """Requests come after silences about as long as the front, or the gateway, keeps a connection."""
    headers = {"authorization": f"Bearer {KEY}"}
    outcomes: Counter[str] = Counter()

    async def client(http: aiohttp.ClientSession, url: str, gaps: Sequence[float]) -> None:
        for gap in (0.0, *gaps):
            await asyncio.sleep(gap)
            outcome = await ask(http, url, completion("up", stream=False, max_tokens=1), headers=headers)
            outcomes["ok" if outcome.ok else f"{outcome.status} {outcome.error}"] += bool(gap)

    def gaps() -> list[float]:
        return [base + rng.uniform(-0.03, 0.03) for base in (FRONT_IDLE_S, GATEWAY_IDLE_S)]

    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(link(port)) for port in ports_of(cluster)]
        front = await stack.enter_async_context(standing(name, tmp_path, ports, SHORT_IDLE[name]))
        http = await stack.enter_async_context(session())
        await asyncio.gather(*(client(http, front.url, gaps()) for _ in range(NUM_GAPS // 2)))
    print(f"{name}: {dict(outcomes)}")
    assert outcomes.keys() == {"ok"}, outcomes
