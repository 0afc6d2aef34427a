"""Attackers in numbers, against a gateway of its own process: refused, memory bounded, health under a second."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from server.auth.identity import digest_text
from tests.faults.client import completion
from tests.faults.cluster import Cluster, Topology
from tests.faults.siege import Watched, ask_raw, trickle, watched

MIB: Final = 1 << 20
HEALTH_S: Final = 1.0
KEY: Final = f"sk-{secrets.token_hex(24)}"
OPS_KEY: Final = secrets.token_hex(24)
MAX_BODY: Final = 4 * MIB
TIMEOUT_S: Final = 2.0
MAX_CONNECTIONS: Final = 1200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("siege")
    keys = folder / "keys.toml"
    others = [f"sk-{secrets.token_hex(24)}" for _ in range(1000)]
    entries = [f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "t"\n' for key in (KEY, *others)]
    keys.write_text("\n".join(entries))
    args = ["--api-keys", str(keys), "--max-body", str(MAX_BODY), "--max-connections", str(MAX_CONNECTIONS)]
    args += ["--header-timeout-s", str(TIMEOUT_S), "--body-timeout-s", str(TIMEOUT_S)]
    ops_key = folder / "ops-key"
    ops_key.write_text(OPS_KEY)
    args += ["--ops-key-file", str(ops_key)]
    with Cluster(folder, model, Topology(num_workers=1, gateway_args=args)) as running:
        yield running


@pytest.fixture
async def siege(cluster: Cluster) -> AsyncIterator[Watched]:
    """Judges the whole test: health, memory, and that the fleet works afterwards."""
    port = cluster.gateway.port
    with watched(port, cluster.gateway.process) as seen:
        yield seen
    assert seen.statuses == {200}
    assert max(seen.latencies_s) < HEALTH_S
    assert seen.grown_bytes < 160 * MIB
    status, data = await post(port, completion("One two three.", max_tokens=2))
    assert status == 200, data
    cluster.assert_quiet(10)


def head(*lines: str, target: str = "/v1/chat/completions", key: str | None = KEY) -> bytes:
    fields = ["Host: h", "Connection: close", "Content-Type: application/json", *lines]
    if key is not None:
        fields.append(f"Authorization: Bearer {key}")
    return f"POST {target} HTTP/1.1\r\n{''.join(field + chr(13) + chr(10) for field in fields)}\r\n".encode()


async def post(port: int, body: Any, *lines: str, target: str = "/v1/completions") -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await ask_raw(port, head(f"Content-Length: {len(data)}", *lines, target=target) + data)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2, **fields}


async def test_slowloris_300(cluster: Cluster, siege: Watched) -> None:
    """Heads, bodies and nothing at all, a byte now and then."""
    starts = [
        b"",
        b"GET /v1/models HTTP/1.1\r\nHost: h\r\nX: ",
        head("Content-Length: 100000"),
        head("Transfer-Encoding: chunked") + b"ffff\r\n",
    ]
    port = cluster.gateway.port
    watch = cluster.stopwatch()
    await asyncio.gather(*(trickle(port, starts[n % len(starts)], 0.5) for n in range(300)))
    assert watch.own_s() < 3 * TIMEOUT_S + 4.0


async def test_more_connections_than_there_may_be(cluster: Cluster, siege: Watched) -> None:
    """Silent connections are closed to make room for those with requests."""
    port = cluster.gateway.port
    idle = []
    try:
        for _ in range(MAX_CONNECTIONS * 2):
            idle.append(await asyncio.open_connection("127.0.0.1", port))
        assert cluster.gateway.process.num_fds() < MAX_CONNECTIONS + 200
        assert (await post(port, completion("One two.", max_tokens=1)))[0] == 200
    finally:
        for _, writer in idle:
            writer.close()


async def test_response_times_leak_no_keys(cluster: Cluster, rng: random.Random) -> None:
    """A key that is nearly right, one that is all wrong, one of another length: the same 401 after the same time."""
    almost = KEY[:-1] + ("0" if KEY[-1] != "0" else "1")
    guesses = {"almost": almost, "wrong": "zz" + KEY[2:][::-1], "short": "x", "long": KEY + "x" * 200}
    times: dict[str, list[float]] = {name: [] for name in guesses}
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
    try:
        for _ in range(300):
            for name in rng.sample(sorted(guesses), len(guesses)):
                began_s = time.perf_counter()
                request = f"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {guesses[name]}\r\n\r\n"
                writer.write(request.encode())
                data = await reader.readuntil(b"\r\n\r\n")
                length = int(data.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                times[name].append(time.perf_counter() - began_s)
                assert data.split(b" ", 2)[1] in (b"401", b"429"), body
    finally:
        writer.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = statistics.median(statistics.quantiles(times["wrong"], n=4)[2:]) - medians["wrong"]
    assert max(medians.values()) - min(medians.values()) < max(50e-6, 2 * spread), medians
