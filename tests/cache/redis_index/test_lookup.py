"""The gateway's side of the index on a real Redis: lookups, foreign data, failures."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from redis.asyncio.connection import Connection

from cache.records import Candidate, WorkerLoad
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, SetChange, WriterSettings, lookup, schema
from cache.redis_index.client import RedisDownError
from cache.redis_index.lookup import Shard
from cache.types import BlockHash, GatewayId
from tests.cache.redis_index.index_parts import (
    EAGER,
    FAILURES,
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
from tests.running import running
from tests.waiting import HANG_S, until


async def test_lookup_returns_every_live_worker_and_its_match(redis_server: RedisServer) -> None:
    hashes = chain(100)
    writers = [IndexWriter(redis_server.url, member(f"w{i}"), LASTING) for i in range(4)]
    index = RedisIndex(redis_server.url, EAGER)
    load = WorkerLoad({GatewayId("g"): 0.5}, 7.0, 8000.0, 1, 2, 3, 4, draining=True)
    async with linked(*writers, index):
        for writer, length in zip(writers, (0, 1, 64, 100), strict=True):
            assert await writer.rewrite(entries(hashes[:length]), load)
        await until(becomes(index, hashes, {"w0": 0, "w1": 1, "w2": 64, "w3": 100}))
        found = await index.lookup(hashes)
        assert found is not None
        assert [item.load for item in found] == [load] * 4
        assert all(item.load_age_s < HANG_S for item in found)
        assert await matches(index, chain(3)) == {"w0": 0, "w1": 0, "w2": 0, "w3": 0}
        (shard,) = index._shards
        shard.failed(time.monotonic())
        assert await matches(index, []) == {"w0": 0, "w1": 0, "w2": 0, "w3": 0}
        assert shard._num_failures == 0, "failures count in a row alone"


async def test_a_defect_in_a_lookup_costs_its_matches_alone(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []
    hashes = chain(3)
    writer, index = (
        IndexWriter(redis_server.url, member("w"), LASTING),
        RedisIndex(redis_server.url, EAGER, count=events.append),
    )
    async with linked(writer, index):
        await hold(hashes, index, writer)
        with monkeypatch.context() as patch:
            patch.setattr(index._shards[0], "_candidates", lambda *_, **__: 1 / 0)
            assert await index.lookup(hashes) is None
        assert "invalid" in events
        assert "ZeroDivisionError" in caplog.text
        await until(becomes(index, hashes, {"w": 3}))


async def test_every_match_length_is_found_from_every_hint(redis_server: RedisServer) -> None:
    hashes = chain(37)
    lengths = [*range(38), *range(37, -1, -1), 0, 37, 0, 1, 36, 5, 20, 19]
    writers = [IndexWriter(redis_server.url, member(f"w{i:03}"), LASTING) for i in range(len(lengths))]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, index):
        for writer, length in zip(writers, lengths, strict=True):
            assert await writer.rewrite(entries(hashes[:length]), WorkerLoad())
        await until(becomes(index, hashes, {f"w{i:03}": length for i, length in enumerate(lengths)}))


async def test_workers_of_another_model_are_not_asked(redis_server: RedisServer) -> None:
    hashes = chain(5)
    writers = [
        IndexWriter(redis_server.url, member("a", model="x"), LASTING),
        IndexWriter(redis_server.url, member("b"), LASTING),
    ]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, index):
        await hold(hashes, index, *writers)
        assert await matches(index, hashes, "x") == {"a": 5}


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


async def test_shards_are_read_together(redis_server: RedisServer) -> None:
    hashes = chain(6)
    writers = [IndexWriter(redis_server.url, member(f"w{i}"), replace(LASTING, num_shards=4)) for i in range(12)]
    index = RedisIndex(redis_server.url, ReaderSettings(num_shards=4, poll_s=0.02, deadline_s=HANG_S))
    async with linked(*writers, index):
        for i, writer in enumerate(writers):
            assert await writer.rewrite(entries(hashes[: i % 7]), WorkerLoad())
        await until(becomes(index, hashes, {f"w{i}": i % 7 for i in range(12)}))
        assert len(await index.entries()) == 12


async def test_cancelled_lookup_never_passes_its_reply_to_another(redis_server: RedisServer) -> None:
    """Ten thousand lookups are cancelled at every stage; as many concurrent ones get their own answers."""
    chains = [chain(length) for length in range(1, 21)]
    writer = IndexWriter(redis_server.url, member(), LASTING)
    index = RedisIndex(redis_server.url, EAGER)

    async def ask(hashes: list[BlockHash]) -> list[Candidate] | None:
        return await index.lookup(hashes)

    async with linked(writer, index):
        assert await writer.rewrite([entry for hashes in chains for entry in entries(hashes)], WorkerLoad())
        await until(becomes(index, chains[0], {"w0": 1}))
        num_checked = num_cancelled = 0
        for turn in range(600):
            tasks = [(hashes, asyncio.create_task(ask(hashes))) for hashes in chains for _ in range(2)]
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            cancelled = {id(task) for _, task in tasks[turn % 2 :: 2] if task.cancel()}
            num_cancelled += len(cancelled)
            for hashes, task in tasks:
                if id(task) in cancelled:
                    with suppress(asyncio.CancelledError):
                        await task
                    continue
                found = await task
                if found is None:  # Redis stood still
                    continue
                assert [item.matched_blocks for item in found] == [len(hashes)]
                num_checked += 1
        assert num_cancelled >= 10_000
        assert num_checked >= 10_000


async def test_a_stopped_redis_costs_little_and_comes_back(own_redis: RedisServer) -> None:
    hashes = chain(10)
    writer = IndexWriter(own_redis.url, member(), LASTING)
    events: list[str] = []
    index = RedisIndex(own_redis.url, ReaderSettings(breaker_probe_s=0.05), count=events.append)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        own_redis.stop()
        events.clear()
        for _ in range(50):
            assert await index.lookup(hashes) is None
        assert events.count("timeout") <= FAILURES, "then the breaker is open, and nothing is waited for"
        assert events.count("skipped") == 50 - events.count("timeout")
        assert "breaker_opened" in events
        own_redis.resume()
        await until(becomes(index, hashes, {"w0": 10}))
        assert "breaker_closed" in events


async def test_a_killed_redis_costs_little_and_comes_back(own_redis: RedisServer) -> None:
    hashes = chain(10)
    writer = IndexWriter(own_redis.url, member(), LASTING)
    events: list[str] = []
    settings = ReaderSettings(breaker_probe_s=0.05, max_refresh_age_s=3600.0)
    index = RedisIndex(own_redis.url, settings, count=events.append)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        own_redis.kill()
        await until(lambda: not (writer.client.up or index.health()[0].connected))
        events.clear()
        for _ in range(20):
            assert await index.lookup(hashes) is None
        assert events.count("down") + events.count("skipped") == 20, "nothing is waited for"
        own_redis.start()
        await until(lambda: writer.client.up)
        assert writer.in_doubt
        await hold(hashes, index, writer)


async def test_missing_redis_is_no_error() -> None:
    index = RedisIndex("unix:///nonexistent/redis.sock")
    async with running(index):
        await asyncio.sleep(0)
        assert await index.lookup(chain(3)) is None
        assert index.members() == []
        assert not index.health()[0].connected


@pytest.mark.parametrize("url", ["http://x", "redis+sentinel://h:1", "redis+cluster://", "foo"])
def test_an_unusable_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="Redis URL"):
        RedisIndex(url)


@pytest.mark.parametrize("url", ["redis+sentinel://[::1]:1/name", "redis+cluster://[fd00::1]:1,[fd00::2]"])
def test_a_url_may_name_hosts_by_their_ipv6_addresses(url: str) -> None:
    (health,) = RedisIndex(url).health()
    assert health.redis == url


@pytest.mark.parametrize(
    "url", ["redis://user:s3cret@h:1/0", "redis://h:1?password=s3cret", "redis+cluster://:s3cret@h:1,h:2"]
)
def test_health_shows_no_password(url: str) -> None:
    (health,) = RedisIndex(url).health()
    assert "s3cret" not in health.redis
    assert "h:1" in health.redis


def test_failures_in_a_row_open_the_breaker() -> None:
    events: list[str] = []
    shard = Shard("redis://h:1", 0, ReaderSettings(breaker_failures=3), events.append)
    for _ in range(3):
        shard.failed(time.monotonic())
        shard.failed(time.monotonic())
        assert not shard.breaker_open
        shard.succeeded()
    for _ in range(3):
        shard.failed(time.monotonic())
    assert shard.breaker_open
    shard.succeeded()
    assert not shard.breaker_open
    assert events == ["breaker_opened", "breaker_closed"]


def test_lookups_that_wait_together_are_one_failure() -> None:
    """One late reply of Redis must not open the breaker, however many lookups wait for it."""
    settings = ReaderSettings(breaker_failures=3, deadline_s=HANG_S)
    shard = Shard("redis://h:1", 0, settings, lambda event: None)
    for _ in range(2):
        begun_at = time.monotonic()
        for _ in range(20):
            shard.failed(begun_at)
        assert not shard.breaker_open
    shard.failed(time.monotonic())
    assert shard.breaker_open
    shard.succeeded()
    begun_at = time.monotonic() - 3 * HANG_S
    for _ in range(3):
        shard.failed(begun_at)
    assert shard.breaker_open, "this process has too little time: its own lookups end late"


async def test_an_answer_past_the_deadline_does_not_close_the_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ReaderSettings(deadline_s=0.02, breaker_failures=1, breaker_probe_s=0.001, poll_s=0.001)
    shard = Shard("redis://h:1", 0, settings, lambda event: None)
    shard.client._connection = Connection()
    delay_s, num_probes = 0.03, 0

    async def lookup(blob: bytes, model: str | None, *, reads_states: bool) -> list[Candidate]:
        nonlocal num_probes
        await asyncio.sleep(delay_s)
        num_probes += 1
        return []

    monkeypatch.setattr(shard, "lookup", lookup)
    shard.failed(time.monotonic())
    probing = asyncio.create_task(shard.probe())
    try:
        await until(lambda: num_probes == 3)
        assert shard.breaker_open
        delay_s = 0.0
        await until(lambda: not shard.breaker_open)
    finally:
        probing.cancel()


@pytest.mark.parametrize("prefix", ["", "a{b}", "x y", "p" * 200])
def test_an_unusable_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="key prefix"):
        RedisIndex("redis://localhost", ReaderSettings(prefix=prefix))


async def test_concurrent_lookups_on_a_new_connection_all_succeed(redis_server: RedisServer) -> None:
    """Each lookup learns from its own reply that the script is missing, or EVALSHA_RO on an old server."""
    hashes = chain(3)
    writer, index = IndexWriter(redis_server.url, member()), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        redis_server.command("SCRIPT", "FLUSH")
        (shard,) = index._shards
        shard._evalsha = b"EVALSHA_RO"
        shard._queries.clear()
        found = await asyncio.gather(*(matches(index, hashes) for _ in range(50)))
        assert found == [{"w0": 3}] * 50


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["unsigned", "signed"])
async def test_wrongly_read_registry_is_read_again(redis_server: RedisServer, secret: bytes) -> None:
    """Its version may be unchanged."""
    hashes = chain(3)
    writer = IndexWriter(redis_server.url, member(), WriterSettings(timeout_s=HANG_S, cluster_secret=secret))
    settings = ReaderSettings(poll_s=0.02, deadline_s=HANG_S, max_refresh_age_s=0.05, cluster_secret=secret)
    index = RedisIndex(redis_server.url, settings)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        index._shards[0].registry.refresh([], [])
        assert await matches(index, hashes) == {}
        await until(becomes(index, hashes, {"w0": 3}))


@pytest.mark.parametrize("matches", [None, b"QUEUED", [], [b"3"], [-1], [4], [None], [[]], ["x"], [1, 2]])
def test_invalid_match_reaches_no_router(matches: object) -> None:
    shard = Shard("redis://h:1", 0, EAGER, lambda event: None)
    shard.registry.refresh([(b"w0", schema.encode_member(member()))], [])
    query = shard._query(None)
    with pytest.raises(RedisDownError, match="malformed"):
        shard._candidates(query, 3, [b"v", [b"1", b"0"], matches, []])


async def test_a_registry_with_an_unreadable_time_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard("redis://h:1", 0, EAGER, lambda event: None)
    states = SimpleNamespace(is_whole=True, pairs=[])

    async def read(*_: object, **__: object) -> object:
        return (states, states), b"noon"

    monkeypatch.setattr(shard._hashes, "read", read)
    with pytest.raises(RedisDownError, match="malformed"):
        await shard.refresh()


def test_workers_beyond_a_shards_limit_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_WORKERS_PER_SHARD", 3)
    events: list[str] = []
    shard = Shard("redis://h:1", 0, EAGER, events.append)
    for num_workers in (3, 4):
        names = [f"w{n}" for n in range(num_workers)]
        shard.registry.refresh([(name.encode(), schema.encode_member(member(name))) for name in names], [])
        assert [worker.member.worker_id for worker in shard._query(None).workers] == ["w0", "w1", "w2"]
        assert events == ["invalid"] * (num_workers - 3)


async def test_a_refused_lookup_is_not_tried_again(own_redis: RedisServer) -> None:
    hashes = chain(3)
    writer = IndexWriter(own_redis.url, member(), LASTING)
    index = RedisIndex(own_redis.url, replace(EAGER, poll_s=3600.0))
    async with linked(writer, index):
        await hold(hashes, index, writer)
        own_redis.command("ACL", "SETUSER", "default", "-@scripting")
        assert await index.lookup(hashes) is None
        assert b"errorstat_NOPERM:count=1\r\n" in own_redis.command("INFO", "errorstats")


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
            await until(lambda version=version: index._shards[0]._version == version.encode())  # type: ignore[misc]
            assert await matches(index, hashes) == {"w0": 3}
            assert [m.worker_id for m in index.members()] == ["w0", "w1", "w2"]
