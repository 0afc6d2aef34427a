"""Limits of keys over gateway processes and a real Redis: one fleet, and shares while Redis is not sound."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from server.auth.identity import digest_text
from tests.redis_server import RedisServer, needs_redis_7, newest_redis
from tests.server.test_gateway import Process, gateway_process
from tests.waiting import until

pytestmark = pytest.mark.e2e

INVALID = {"model": "tiny", "messages": [], "max_tokens": -1}
"""Counts as a request of its key, and is then refused with a 400."""


def keys_file(folder: Path, *limits: str) -> list[str]:
    """Write a key for each of these limits, and return the keys."""
    keys = [f"sk-{secrets.token_hex(16)}" for _ in limits]
    entries = [
        f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "one"\n{limit}\n'
        for key, limit in zip(keys, limits, strict=True)
    ]
    (folder / "keys.toml").write_text("\n".join(entries))
    (folder / "secret").write_text(secrets.token_hex(32))
    return keys


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, newest_redis()) as running:
        yield running


@asynccontextmanager
async def gateways(folder: Path, url: str, number: int, *options: str) -> AsyncIterator[list[Process]]:
    arguments = ["--redis", url, "--api-keys", str(folder / "keys.toml")]
    arguments += ["--cluster-secret-file", str(folder / "secret"), *options]
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(gateway_process(*arguments)) for _ in range(number)]
        for each in started:
            await until(lambda each=each: is_live(each))
        yield started


async def is_live(gateway: Process) -> bool:
    try:
        return (await gateway.get(gateway.url + "/health/live"))[0] == 200
    except aiohttp.ClientError:
        return False


async def ask(http: aiohttp.ClientSession, gateway: Process, key: str) -> tuple[bool, dict[str, str]]:
    """Return whether a request of the key was granted, and the headers."""
    headers = {"authorization": f"Bearer {key}"}
    async with http.post(gateway.url + "/v1/chat/completions", json=INVALID, headers=headers) as response:
        assert response.status in (400, 429), await response.text()
        return response.status == 400, {name.lower(): value for name, value in response.headers.items()}


async def drain(http: aiohttp.ClientSession, found: list[Process], key: str) -> Counter[str]:
    """Ask the gateways in turn until none grants any more; return how many each granted."""
    granted: Counter[str] = Counter()
    refused = 0
    while refused < 3 * len(found):
        for gateway in found:
            is_granted, _ = await ask(http, gateway, key)
            granted[gateway.url] += is_granted
            refused = 0 if is_granted else refused + 1
    return granted


async def left(http: aiohttp.ClientSession, gateway: Process, key: str) -> int:
    return int((await ask(http, gateway, key))[1]["x-ratelimit-remaining-requests"])


async def test_a_limit_holds_over_two_gateways(tmp_path: Path, server: RedisServer) -> None:
    (key,) = keys_file(tmp_path, "requests_per_minute = 300")
    async with gateways(tmp_path, server.url, 2) as found, aiohttp.ClientSession() as http:
        begun_s = time.monotonic()
        for _ in range(100):
            assert (await ask(http, found[0], key))[0]
        await until(lambda: at_most(http, found[1], key, 250))
        granted = await drain(http, found, key)
        allowed = 300 + 5.0 * (time.monotonic() - begun_s)
        assert granted.total() + 100 <= 1.1 * allowed, "not twice: what a stalled machine leaves unread is overdrawn"
        assert granted.total() >= 150, "what was left, but for a few polls"


async def at_most(http: aiohttp.ClientSession, gateway: Process, key: str, most: int) -> bool:
    return await left(http, gateway, key) <= most


def spoil(kind: str, client: Any, old: dict[bytes, dict[bytes, bytes]]) -> None:
    """Do to the gateways' records what a failure or an attacker could do."""
    for name in client.keys("*-limits:*"):
        records = client.hgetall(name)
        match kind:
            case "flushed":
                client.flushall()
            case "rewound":
                client.hset(name, mapping=old[name])
            case "forged":
                client.hset(name, mapping={field: random.randbytes(200) for field in records})
            case "huge":
                client.hset(name, mapping=dict.fromkeys([*records, b"a"], b"\xff" * (1 << 20)))
            case "another type":
                client.set(name, "text")


@pytest.mark.parametrize("kind", ["flushed", "rewound", "forged", "huge", "another type", "gone"])
async def test_each_gateway_grants_its_share_without_a_sound_redis(
    tmp_path: Path, server: RedisServer, kind: str
) -> None:
    """Two gateways have 150 each of 300 a minute. With Redis back the fleet has one bucket."""
    key, other = keys_file(tmp_path, "requests_per_minute = 300", "requests_per_minute = 300")
    client = redis.Redis(unix_socket_path=str(server.socket))
    spoiling = asyncio.Event()

    async def keep_spoiling() -> None:
        old = {name: client.hgetall(name) for name in client.keys("*-limits:*")}
        while not spoiling.is_set():
            with contextlib.suppress(redis.exceptions.ResponseError):  # the type that another spoiling gave
                await asyncio.to_thread(spoil, kind, client, old)
            await asyncio.sleep(0.1 if kind == "huge" else 0.01)

    async with gateways(tmp_path, server.url, 2) as found, aiohttp.ClientSession() as http:
        for _ in range(50):
            await ask(http, found[0], key)
        await until(lambda: at_most(http, found[1], key, 262))
        for _ in range(50):  # so that each gateway has seen the other's record advance
            await ask(http, found[1], key)
        await until(lambda: at_most(http, found[0], key, 225))
        task = None
        if kind == "gone":
            server.kill()
        else:
            task = asyncio.create_task(keep_spoiling())
        for gateway in found if kind == "gone" else ():  # else a read between two spoilings may find both
            await until(lambda gateway=gateway: has_part(gateway, 0.5))
        begun_s = time.monotonic()
        granted = [(await drain(http, [gateway], other)).total() for gateway in found]
        allowed = 300 + 5.0 * (time.monotonic() - begun_s)
        most = 1.1 if kind == "gone" else 2.2  # between two spoilings a gateway may read the others
        assert 145 <= sum(granted) <= most * allowed, "at least the first one's share"
        assert kind != "gone" or min(granted) >= 145

        if task is None:
            server.start()
        else:
            spoiling.set()
            await task
        for gateway in found:
            await until(lambda gateway=gateway: has_part(gateway, 1.0))
        before = await left(http, found[1], key)
        for _ in range(75):
            await ask(http, found[0], key)
        await until(lambda: at_most(http, found[1], key, max(0, before - 25)))


async def has_part(gateway: Process, part: float) -> bool:
    """Return whether this part of each limit is granted by the gateways that are known here."""
    return f"\nheadstart_key_limit_part {part}\n" in (await gateway.get(gateway.ops + "/metrics"))[1]


@needs_redis_7
async def test_the_limits_have_an_acl_user_of_their_own(tmp_path: Path) -> None:
    """The commands of the chart's users: gateways read the index, and write only the records of limits."""
    (key,) = keys_file(tmp_path, "requests_per_minute = 600")
    users = Path(__file__).parents[3] / "helm" / "headstart" / "files" / "redis-users.sh"
    rules = {
        line.split()[1]: line.split("resetchannels", 1)[1].replace("$PREFIX", "headstart")
        for line in users.read_text().splitlines()
        if line.startswith("user $")
    }
    acl = tmp_path / "users.acl"
    acl.write_text(
        "user default on nopass ~* &* +@all\n"
        + "".join(
            f"user {name.strip('$').lower()} on >pw resetkeys resetchannels{rule}\n" for name, rule in rules.items()
        )
    )
    (tmp_path / "password").write_text("pw")
    options = ("--redis-username", "gateway_user", "--redis-password-file", str(tmp_path / "password"))
    options += ("--limits-redis-username", "limits_user", "--limits-redis-password-file", str(tmp_path / "password"))
    server = RedisServer(tmp_path, newest_redis(), "--aclfile", str(acl))
    server.start()
    client = redis.Redis(unix_socket_path=str(server.socket), username="limits_user", password="pw")
    try:
        async with gateways(tmp_path, server.url, 2, *options) as found, aiohttp.ClientSession() as http:
            for _ in range(50):
                await ask(http, found[0], key)
            await until(lambda: at_most(http, found[1], key, 580))
            for command in (
                ("HSET", "{headstart:0}:states", "w", "x"),
                ("HGETALL", "{headstart:0}:states"),
                ("FLUSHALL",),
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command)
    finally:
        client.close()
        server.kill()


@pytest.mark.deep
async def test_twenty_keys_at_four_gateways_for_two_minutes(tmp_path: Path, server: RedisServer) -> None:
    """Keys of 600 requests a minute at half to three times their limit, over the wire."""
    rng, seconds, limit = random.Random(3), 120.0, 600
    first, *keys = keys_file(tmp_path, *[f"requests_per_minute = {limit}"] * 21)
    demands = {key: rng.choice((0.5, 0.9, 0.97, 1.3, 2.0)) for key in keys}
    asked: Counter[str] = Counter()
    granted: Counter[str] = Counter()
    took_s: dict[str, float] = {}

    async with gateways(tmp_path, server.url, 4) as found, aiohttp.ClientSession() as http:
        for _ in range(300):
            await ask(http, found[0], first)
        for gateway in found[1:]:  # until it has read the others
            await until(lambda gateway=gateway: at_most(http, gateway, first, 550))
        begun_s = time.monotonic()

        async def use(key: str) -> None:
            while (now_s := time.monotonic() - begun_s) < seconds:
                due = int(demands[key] * limit / 60.0 * now_s)
                for _ in range(due - asked[key]):
                    asked[key] += 1
                    granted[key] += (await ask(http, rng.choice(found), key))[0]
                await asyncio.sleep(0.02)
            took_s[key] = time.monotonic() - begun_s

        await asyncio.gather(*map(use, keys))
    worst_above = worst_below = 0.0
    for key in keys:
        allowed = limit * (1.0 + took_s[key] / 60.0)
        worst_above = max(worst_above, granted[key] / allowed - 1.0)
        worst_below = max(worst_below, 1.0 - granted[key] / min(asked[key], allowed))
    print(
        f"{asked.total()} requests, {granted.total()} granted: at most {worst_above:.2%} above, {worst_below:.2%} below"
    )
    assert worst_above <= 0.02
    assert worst_below <= 0.02
