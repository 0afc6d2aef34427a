"""The gateway's reading of the registry on a real Redis: foreign data, changes, and limits."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cache.records import WorkerLoad
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, SetChange, WriterSettings, schema
from cache.redis_index.client import RedisDownError
from cache.redis_index.lookup import Shard
from tests.cache.redis_index.index_parts import (
    EAGER,
    LASTING,
    SECRET,
    becomes,
    chain,
    entries,
    hold,
    linked,
    matches,
    member,
)
from tests.redis_server import RedisServer
from tests.waiting import HANG_S, until


@pytest.mark.parametrize(
    ("poison", "is_logged"),
    [
        (("HSET", "{headstart:0}:states", "w0", b"\xc1"), True),
        (("HSET", "{headstart:0}:states", "w0", "x" * 100_000), True),
        (("HSET", "{headstart:0}:states", "stranger", "x" * 100_000), True),
        (("HSET", "{headstart:0}:members", "evil", '{"worker_id":"evil"}'), True),
        (("HSET", "{headstart:0}:members", "evil", b"\xff" * 10), True),
        (("SET", "{headstart:0}:b:w0:epoch-of-w0:1", "a string"), False),
        (("SET", "{headstart:0}:version", "x" * 1000), False),
        (("SET", "{headstart:0}:foreign", "x"), False),
    ],
)
async def test_invalid_value_costs_at_most_its_own_worker(
    redis_server: RedisServer, poison: tuple[str | bytes, ...], is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ignored, logged once, and counted each time."""
    hashes = chain(10)
    writers = [
        IndexWriter(redis_server.url, member("w0"), LASTING),
        IndexWriter(redis_server.url, member("w1"), LASTING),
    ]
    events: list[str] = []
    index = RedisIndex(redis_server.url, EAGER, count=events.append)
    async with linked(*writers, index):
        await hold(hashes, index, *writers)
        redis_server.command(*poison)
        redis_server.command("SET", "{headstart:0}:version", "another")
        with caplog.at_level(logging.WARNING, logger="cache.redis_index"):
            for _ in range(20):
                found = await matches(index, hashes)
                assert found is not None
                assert found["w1"] == 10
                await asyncio.sleep(0.002)
            if is_logged:
                await until(lambda: "invalid" in events)
        assert len(caplog.records) == is_logged
        assert events.count("invalid") >= is_logged
        assert "evil" not in {m.worker_id for m in index.members()}


async def test_foreign_states_are_read_once(redis_server: RedisServer) -> None:
    """Foreign values of any size and number cost one refresh and no lookup."""
    hashes = chain(4)
    writers = [IndexWriter(redis_server.url, member(f"w{i}"), LASTING) for i in range(3)]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, index):
        await hold(hashes, index, *writers)
        redis_server.command("HSET", "{headstart:0}:states", "foreign", "x" * 1_000_000)
        sent = num_bytes_sent(redis_server)
        for _ in range(30):
            assert await matches(index, hashes) == {"w0": 4, "w1": 4, "w2": 4}
        assert num_bytes_sent(redis_server) - sent < 5_000_000, "one lookup that met it, and a refresh or two"


def num_bytes_sent(server: RedisServer) -> int:
    stats = server.command("INFO", "stats")
    (line,) = [line for line in stats.split(b"\r\n") if line.startswith(b"total_net_output_bytes:")]
    return int(line.partition(b":")[2])


async def test_registry_of_the_wrong_type_is_survived(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.command("SET", "{headstart:0}:states", "x")
    redis_server.command("SADD", "{headstart:0}:version", "x")
    redis_server.command("RPUSH", "{headstart:0}:members", "x")
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(index):
        assert not await matches(index, chain(3))
        assert "the registry cannot be read: WRONGTYPE" in caplog.text


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["unsigned", "signed"])
async def test_wrongly_read_registry_is_read_again(redis_server: RedisServer, secret: bytes) -> None:
    """Its version may be unchanged."""
    hashes = chain(3)
    writer = IndexWriter(redis_server.url, member(), WriterSettings(timeout_s=HANG_S, cluster_secret=secret))
    settings = ReaderSettings(poll_s=0.02, deadline_s=HANG_S, max_refresh_age_s=0.05, cluster_secret=secret)
    index = RedisIndex(redis_server.url, settings)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        index.shards[0].registry.refresh([], [])
        assert await matches(index, hashes) == {}
        await until(becomes(index, hashes, {"w0": 3}))


async def test_a_registry_with_an_unreadable_time_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard("redis://h:1", 0, EAGER, lambda event: None)
    states = SimpleNamespace(is_whole=True, pairs=[])

    async def read(*_: object, **__: object) -> object:
        return (states, states), b"noon"

    monkeypatch.setattr(shard._hashes, "read", read)
    with pytest.raises(RedisDownError, match="malformed"):
        await shard.refresh()


async def test_an_idle_reader_reads_the_registry_once_connected(redis_server: RedisServer) -> None:
    writer = IndexWriter(redis_server.url, member(), LASTING)
    index = RedisIndex(redis_server.url, replace(EAGER, poll_s=3600.0))
    async with linked(writer):
        assert await writer.rewrite([], WorkerLoad())
        async with linked(index):
            await until(lambda: index.members() == [member()])


HEADER = b"\n*1234567"


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["unsigned", "signed"])
@pytest.mark.parametrize(
    "junk",
    [
        [("SET", "version", HEADER)],
        [("HSET", "members", "zz", HEADER), ("HSET", "states", "zz", HEADER)],
        [("SET", f"b:w0:epoch-of-w0:{n}", "x") for n in range(2, 60)],
        [("SADD", f"b:w0:epoch-of-w0:{n}", "junk") for n in range(1, 60)],
        [("DEL", "version"), ("RPUSH", "version", "x")],
        [("SET", "version", b"x" * (1 << 20))],
        [("HSET", "members", *(f"w{n // 2}" if n % 2 == 0 else "x" for n in range(2, 6000)))],
    ],
    ids=["header in version", "header in fields", "strings ahead", "sets ahead", "list", "large", "many"],
)
async def test_foreign_keys_cost_no_hits_for_long(
    redis_server: RedisServer, junk: list[tuple[str | bytes, ...]], secret: bytes
) -> None:
    """It stays there: the worker and the gateway cope with it."""
    hashes = chain(10)
    writer = IndexWriter(redis_server.url, member(), WriterSettings(timeout_s=HANG_S, cluster_secret=secret))
    settings = ReaderSettings(poll_s=0.02, deadline_s=HANG_S, cluster_secret=secret, max_refresh_age_s=0.2)
    index = RedisIndex(redis_server.url, settings)

    async def is_there() -> bool:
        if writer.in_doubt:
            await writer.rewrite(entries(hashes), WorkerLoad())
        else:
            await writer.publish([SetChange([], [], 10)], WorkerLoad())
        return not writer.in_doubt and (await matches(index, hashes) or {}).get("w0") == 10

    async with linked(writer, index):
        await until(is_there)
        for command, key, *rest in junk:
            assert isinstance(key, str)
            redis_server.command(command, "{headstart:0}:" + key, *rest)
        await until(is_there)
        for _ in range(5):
            assert await is_there()


async def test_too_many_members_hide_no_known_one(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_MEMBERS", 3)
    hashes = chain(3)
    writer = IndexWriter(redis_server.url, member())
    index = RedisIndex(redis_server.url, ReaderSettings(poll_s=0.02, deadline_s=HANG_S, max_refresh_age_s=0.05))
    async with linked(writer, index):
        await hold(hashes, index, writer)
        for num_members in (3, 9):  # at the limit, and beyond
            for n in range(1, num_members):
                redis_server.command("HSET", "{headstart:0}:members", f"w{n}", schema.encode_member(member(f"w{n}")))
            version = f"of {num_members}"
            redis_server.command("SET", "{headstart:0}:version", version)
            await until(lambda version=version: index.shards[0]._version == version.encode())  # type: ignore[misc]
            assert await matches(index, hashes) == {"w0": 3}
            assert [m.worker_id for m in index.members()] == ["w0", "w1", "w2"]
