"""The use of keys in Redis: the script against its model, and what it does where Redis cannot count."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from cache.redis_index import LEASE_S, Charge, KeyUse, ReaderSettings, RedisIndex
from cache.types import GatewayId
from tests.redis_server import RedisServer, needs_redis_7, newest_redis
from tests.running import running
from tests.server.auth.limits_machine import CountedUse
from tests.waiting import HANG_S, until

REQUEST = [Charge("requests", 600, 1, 1), Charge("streams", 8, 1, 1)]


@asynccontextmanager
async def connected(server: RedisServer, **settings: object) -> AsyncIterator[RedisIndex]:
    index = RedisIndex(server.url, ReaderSettings(**{"deadline_s": HANG_S, **settings}))  # type: ignore[arg-type]
    async with running(index):
        await until(lambda: index.health()[0]["connected"])
        yield index


def use_of(index: RedisIndex, gateway: str = "g0") -> KeyUse:
    return KeyUse(index, GatewayId(gateway))


def now_s(client: redis.Redis) -> float:
    seconds, micros = client.time()  # type: ignore[misc]
    return seconds + micros / 1e6


def held_in(client: redis.Redis) -> dict[str, tuple[float, float]]:
    """Return the hash as the script reads it."""
    found: dict[str, tuple[float, float]] = {}
    for field, value in client.hgetall("{headstart:0}:limits:k").items():  # type: ignore[union-attr]
        amount, _, at_s = value.decode().partition(" ")
        with contextlib.suppress(ValueError):
            found[field.decode()] = max(0.0, float(amount)), float(at_s)
    return found


def forge(client: redis.Redis, rng: random.Random) -> None:
    now = now_s(client)
    amount = rng.choice(["0", "3", "700", "-5", "1e9", ""])
    at_s = now + rng.choice([-90_000.0, -61.0, -3.0, 5.0, LEASE_S + 1000.0])
    field = rng.choice(["requests", "tokens", "day", "open:g1", "open:z"])
    client.hset("{headstart:0}:limits:k", field, f"{amount} {at_s}")


def random_charges(rng: random.Random) -> list[Charge]:
    found = []
    for kind in rng.sample(["requests", "tokens", "day", "streams"], rng.randint(1, 4)):
        amount = rng.choice([0, 1, 5])
        needed = rng.choice([0, amount, -1 if kind == "streams" else 0])
        found.append(Charge(kind, rng.choice([6, 600]), needed, amount))
    return found


async def test_the_script_counts_as_the_model_does(redis_server: RedisServer) -> None:
    """After any use and any write. The model is asked for the times before and after the script."""
    client, rng = redis.Redis(unix_socket_path=str(redis_server.socket)), random.Random(5)
    async with connected(redis_server) as index:
        uses = {name: use_of(index, name) for name in ("g0", "g1", "g2")}
        for _ in range(600):
            if rng.random() < 0.3:
                forge(client, rng)
            charges, name = random_charges(rng), rng.choice(list(uses))
            before, first_s = held_in(client), now_s(client)
            used = await uses[name].count("k", charges)
            last_s = now_s(client)
            models = [CountedUse(lambda at_s=at_s: at_s, dict(before)) for at_s in (first_s, last_s)]
            most, least = [model.count(name, charges) for model in models]
            assert used is not None
            assert len(used) == len(charges)
            for low, value, high in zip(least, used, most, strict=True):
                assert is_between(low, value, high), (charges, before)
            assert_between(held_in(client), *[model.held for model in models])
    client.close()


def assert_between(found: dict[str, tuple[float, float]], *models: dict[str, tuple[float, float]]) -> None:
    for name in found.keys() | models[0].keys() | models[1].keys():
        values = [model.get(name, (math.nan, math.nan)) for model in models]
        for at in (0, 1):
            low, high = sorted(value[at] for value in values)
            assert is_between(low, found[name][at], high), (name, found, models)


def is_between(low: float, value: float, high: float) -> bool:
    """Redis writes 14 digits."""
    return low <= value <= high or value == pytest.approx(low, rel=1e-12) or value == pytest.approx(high, rel=1e-12)


@pytest.mark.parametrize(
    ("commands", "remedy"),
    [
        ([("CONFIG", "SET", "maxmemory", "1")], [("CONFIG", "SET", "maxmemory", "0")]),
        ([("REPLICAOF", "127.0.0.1", "1")], [("REPLICAOF", "NO", "ONE")]),
        ([("DEL", "{headstart:0}:limits:k"), ("SET", "{headstart:0}:limits:k", "text")], []),
    ],
    ids=["full", "read-only", "another type"],
)
async def test_what_cannot_be_counted_is_no_answer(
    own_redis: RedisServer, commands: Sequence[Sequence[str]], remedy: Sequence[Sequence[str]]
) -> None:
    """And no connection is lost for it: lookups go on."""
    events: list[str] = []
    async with connected(own_redis) as index:
        use = use_of(index)
        index.shards[0].client._on_change = lambda up: events.append("changed")
        assert await use.count("k", REQUEST) == [0.0, 0.0]
        for command in commands:
            own_redis.command(*command)
        assert await use.count("k", REQUEST) is None
        use.report("k", REQUEST)
        assert await index.lookup([]) is not None
        for command in remedy:
            own_redis.command(*command)
        await until(lambda: counts(use))
        assert events == []


async def counts(use: KeyUse) -> bool:
    return await use.count("k", REQUEST) is not None


async def test_no_request_waits_longer_than_for_a_lookup(own_redis: RedisServer) -> None:
    """Three in a row open the breaker. Then nothing is asked until a probe of the index finds Redis again."""
    async with connected(own_redis, deadline_s=0.05, breaker_probe_s=0.05) as index:
        use = use_of(index)
        await until(lambda: counts(use))
        own_redis.stop()
        for _ in range(3):
            assert await use.count("k", REQUEST) is None
        asked = len(index.shards[0].client._pending)
        assert index.health()[0]["breaker_open"]
        for _ in range(100):
            assert await use.count("k", REQUEST) is None
            use.report("k", REQUEST)
        assert len(index.shards[0].client._pending) <= asked + 3, "probes and a PING alone"
        own_redis.resume()
        await until(lambda: counts(use))


@needs_redis_7
async def test_a_gateway_writes_the_use_of_keys_alone(tmp_path: Path) -> None:
    """By the chart's users: it reads the index, and can write nothing of it, with a script or without."""
    users = Path(__file__).parents[3] / "helm" / "headstart" / "files" / "redis-users.sh"
    line = next(line for line in users.read_text().splitlines() if line.startswith("user $GATEWAY_USER"))
    rule = line.split("resetchannels", 1)[1].replace("$PREFIX", "headstart")
    acl = tmp_path / "users.acl"
    acl.write_text(f"user default on nopass ~* &* +@all\nuser gateway on >pw resetkeys resetchannels{rule}\n")
    with RedisServer(tmp_path, newest_redis(), "--aclfile", str(acl)) as server:
        async with connected(server, username="gateway", password="pw") as index:
            assert await use_of(index).count("k", REQUEST) == [0.0, 0.0]
            used = await use_of(index, "g1").count("k", REQUEST)
            assert used is not None
            assert 0.0 <= used[0] <= used[1] == 1.0
            assert await index.lookup([]) is not None
        client = redis.Redis(unix_socket_path=str(server.socket), username="gateway", password="pw")
        for command in (
            ("HSET", "{headstart:0}:states", "w", "x"),
            ("EVAL", "return redis.call('HSET', KEYS[1], 'w', 'x')", 1, "{headstart:0}:states"),
            ("DEL", "{headstart:0}:version"),
            ("HSET", "headstart-limits", "w", "x"),
            ("FLUSHALL",),
        ):
            with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission"):
                client.execute_command(*command)
        client.close()
