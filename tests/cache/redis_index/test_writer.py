"""The worker's side of the index on a real Redis: damage, versions, epochs, leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from cache.records import WorkerLoad
from cache.redis_index import IndexWriter, RedisIndex, SetChange, WriterSettings
from cache.redis_index.client import Argument, Reply
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


async def test_a_worker_asks_which_blocks_others_hold(redis_server: RedisServer) -> None:
    hashes = chain(10)
    first, second = (IndexWriter(redis_server.url, member(name), LASTING) for name in ("w0", "w1"))
    async with linked(first, second):
        assert await first.rewrite(entries(hashes[:2]), WorkerLoad())
        assert await second.rewrite(entries(hashes[1:4]), WorkerLoad())
        both = await first.upkeep.workers()
        assert await first.upkeep.held(both, hashes[:6]) == [True] * 4 + [False] * 2
        others = [entry for entry in both if entry.member.worker_id == "w1"]
        assert await first.upkeep.held(others, hashes[:6]) == [False, True, True, True, False, False]
        redis_server.command("FLUSHALL")
        assert await first.upkeep.held(both, hashes[:2]) == [False, False]


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["unsigned", "signed"])
@pytest.mark.parametrize("field", ["states", "members"])
@pytest.mark.parametrize("found", [None, b"junk", b"genuine of another"], ids=["gone", "junk", "foreign"])
async def test_overwritten_entry_is_put_back_and_its_set_stays(
    redis_server: RedisServer, field: str, found: bytes | None, secret: bytes
) -> None:
    events: list[str] = []
    settings = WriterSettings(timeout_s=HANG_S, cluster_secret=secret)
    writer = IndexWriter(redis_server.url, member(), settings, count=events.append)
    other = IndexWriter(
        redis_server.url,
        member(epoch="other"),
        WriterSettings(timeout_s=HANG_S, cluster_secret=b"other" * bool(secret)),
    )
    hash_key, set_key = "{headstart:0}:" + field, "{headstart:0}:b:w0:epoch-of-w0:1"
    async with linked(writer, other):
        assert await writer.rewrite(entries(chain(10)), WorkerLoad())
        genuine = redis_server.command("HGET", hash_key, "w0")
        if found is None:
            redis_server.command("HDEL", hash_key, "w0")
        elif found == b"junk":
            redis_server.command("HSET", hash_key, "w0", found)
        else:
            assert await other.rewrite([], WorkerLoad())
        assert redis_server.command("HGET", hash_key, "w0") != genuine
        assert await writer.publish([SetChange([], [], 10)], WorkerLoad())
        assert redis_server.command("SCARD", set_key) == b":10\r\n"
        assert (redis_server.command("HGET", hash_key, "w0") == genuine) == (field == "members")
        assert events == ["rewritten", "displaced"]
        assert await writer.publish([SetChange([], [], 10)], WorkerLoad())
        assert events == ["rewritten", "displaced"]


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["unsigned", "signed"])
async def test_redis_restored_from_a_snapshot_raises_doubt(redis_server: RedisServer, secret: bytes) -> None:
    """A set from a snapshot may hold as many entries, but other ones."""
    writer = IndexWriter(redis_server.url, member(), WriterSettings(timeout_s=HANG_S, cluster_secret=secret))
    async with linked(writer):
        assert await writer.rewrite(entries(chain(10)), WorkerLoad())
        snapshot = redis_server.command("HGET", "{headstart:0}:states", "w0").partition(b"\r\n")[2][:-2]
        assert await writer.publish([SetChange([], [], 10)], WorkerLoad())
        redis_server.command("HSET", "{headstart:0}:states", "w0", snapshot)
        assert not await writer.publish([SetChange([], [], 10)], WorkerLoad())
        assert writer.in_doubt


async def test_a_forged_state_of_this_epoch_is_displaced(redis_server: RedisServer) -> None:
    """Access to Redis does not make a worker write its sets again."""
    writer = IndexWriter(redis_server.url, member(), WriterSettings(timeout_s=HANG_S, cluster_secret=SECRET))
    async with linked(writer):
        assert await writer.rewrite(entries(chain(10)), WorkerLoad())
        genuine = redis_server.command("HGET", "{headstart:0}:states", "w0").partition(b"\r\n")[2][:-2]
        redis_server.command("HSET", "{headstart:0}:states", "w0", genuine[:-1] + bytes([genuine[-1] ^ 1]))
        assert await writer.publish([SetChange([], [], 10)], WorkerLoad())
        assert redis_server.command("SCARD", "{headstart:0}:b:w0:epoch-of-w0:1") == b":10\r\n"


@pytest.mark.parametrize("key", ["states", "members", "version", "b:w0:epoch-of-w0:1", "b:w0:epoch-of-w0:2"])
@pytest.mark.parametrize("other", [("SET", "x"), ("RPUSH", "x", "y"), ("SADD", "x"), ("HSET", "x", "y")])
async def test_key_of_another_type_is_repaired(redis_server: RedisServer, key: str, other: tuple[str, ...]) -> None:
    hashes = chain(10)
    writer, index = IndexWriter(redis_server.url, member()), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        await hold(hashes, index, writer)
        redis_server.command("DEL", "{headstart:0}:" + key)
        redis_server.command(other[0], "{headstart:0}:" + key, *other[1:])

        async def is_back() -> bool:
            if writer.in_doubt:
                await writer.rewrite(entries(hashes), WorkerLoad())
            else:
                await writer.publish([SetChange([], [], 10)], WorkerLoad())
            return not writer.in_doubt and await matches(index, hashes) == {"w0": 10}

        await until(is_back)


async def test_a_set_has_a_ttl_from_its_first_entry_on(redis_server: RedisServer) -> None:
    """A worker may die after any command of a rewrite."""
    settings = WriterSettings(timeout_s=HANG_S, chunk=3, chunks_in_flight=2)
    writer = IndexWriter(redis_server.url, member(), settings)
    async with linked(writer):
        real, sent = writer.client.call, []

        async def one_by_one(*commands: Sequence[Argument], timeout_s: float) -> list[Reply]:
            replies: list[Reply] = []
            part: list[Sequence[Argument]] = []
            for command in commands:  # a MULTI is sent whole, and counts with its EXEC
                part.append(command)
                if part[0] != ("MULTI",) or command == ("EXEC",):
                    replies += await real(*part, timeout_s=timeout_s)
                    part.clear()
                    ttl = redis_server.command("PTTL", "{headstart:0}:b:w0:epoch-of-w0:1")
                    sent.append(ttl)
                    assert ttl != b":-1\r\n"
            return replies

        writer.client.call = one_by_one  # type: ignore[method-assign]
        assert await writer.rewrite(entries(chain(20)), WorkerLoad())
        assert len(sent) >= 7


async def test_sets_that_others_own_are_passed_over(redis_server: RedisServer) -> None:
    """The second attempt is at none of the next keys, and the one after it at the next key again."""
    hashes = chain(10)
    writer = IndexWriter(redis_server.url, member(), LASTING)
    async with linked(writer):
        for version in range(1, 1001):
            redis_server.command("SADD", f"{{headstart:0}}:b:w0:epoch-of-w0:{version}", "12345678")
        assert not await writer.rewrite(entries(hashes), WorkerLoad())
        assert await writer.rewrite(entries(hashes), WorkerLoad())
        (found,) = writer._set_keys
        assert await writer.rewrite(entries(hashes), WorkerLoad())
        version = int(found.rpartition(b":")[2])
        assert writer._set_keys == [b"{headstart:0}:b:w0:epoch-of-w0:%d" % (version + 1)]


async def test_restarted_worker_is_never_credited_with_old_blocks(redis_server: RedisServer) -> None:
    hashes = chain(10)
    before, after = (
        IndexWriter(redis_server.url, member(), LASTING),
        IndexWriter(redis_server.url, member(epoch="e1"), LASTING),
    )
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(before, after, index):
        await hold(hashes, index, before)
        assert await after.rewrite([], WorkerLoad())
        found = await index.lookup(hashes)
        assert found is not None
        assert all(item.matched_blocks == 0 for item in found)
        assert await before.publish([SetChange([], [], 10)], WorkerLoad()), "the old process takes its entry back"
        assert await after.publish([SetChange([], [], 0)], WorkerLoad()), "the new one again"
        await until(becomes(index, hashes, {"w0": 0}))


async def test_retired_worker_disappears_at_once(redis_server: RedisServer) -> None:
    writer, index = IndexWriter(redis_server.url, member(), LASTING), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        assert await writer.rewrite(entries(chain(3)), WorkerLoad())
        await until(becomes(index, [], {"w0": 0}))
        await writer.retire()
        await until(becomes(index, [], {}))
        await until(lambda: index.members() == [])
        assert redis_server.command("DBSIZE") == b":1\r\n", "the version alone is left"


async def test_replaced_worker_leaves_the_entry_to_its_successor(redis_server: RedisServer) -> None:
    before, after = (
        IndexWriter(redis_server.url, member(), LASTING),
        IndexWriter(redis_server.url, member(epoch="e1"), LASTING),
    )
    async with linked(before, after):
        assert await before.rewrite([], WorkerLoad())
        assert await after.rewrite([], WorkerLoad())
        await before.retire()
        assert redis_server.command("HLEN", "{headstart:0}:members") == b":1\r\n"
        await after.retire()
        assert redis_server.command("HLEN", "{headstart:0}:members") == b":0\r\n"


async def test_members_dead_for_an_hour_are_pruned(redis_server: RedisServer) -> None:
    dead = IndexWriter(redis_server.url, member("dead"), WriterSettings(timeout_s=HANG_S, lease_s=0.01))
    # Its own lease has ended, too: a slow worker that is about to write again.
    alive = IndexWriter(
        redis_server.url, member("alive"), WriterSettings(timeout_s=HANG_S, lease_s=0.01, dead_after_s=0.05)
    )
    patient = IndexWriter(redis_server.url, member("patient"), WriterSettings(timeout_s=HANG_S, dead_after_s=30.0))
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(dead, alive, patient, index):
        assert await dead.rewrite([], WorkerLoad())
        assert await alive.rewrite([], WorkerLoad())
        await until(lambda: {m.worker_id for m in index.members()} == {"dead", "alive"})
        states = "{headstart:0}:states"
        assert redis_server.command("HLEN", states) == b":2\r\n"
        redis_server.command("HSET", states, "newer", "in a form to come")
        await asyncio.sleep(0.05)
        assert await patient.upkeep.prune() == 0, "seconds are no milliseconds"

        async def pruned() -> bool:
            return await alive.upkeep.prune() == 1

        await until(pruned)
        await until(lambda: {m.worker_id for m in index.members()} == {"alive"})
        assert redis_server.command("HEXISTS", states, "newer") == b":1\r\n"


async def test_incomplete_rewrite_stays_in_doubt(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = IndexWriter(redis_server.url, member(), LASTING)

    async def fill(*what: object) -> bool:
        return True

    async with linked(writer):
        with monkeypatch.context() as patched:
            patched.setattr(writer, "_fill", fill)
            assert not await writer.rewrite(entries(chain(3)), WorkerLoad())
            assert writer.in_doubt
        assert await writer.rewrite(entries(chain(3)), WorkerLoad())
        assert not writer.in_doubt
        writer.begin_epoch(member(epoch="next"))
        assert writer.in_doubt


@pytest.mark.parametrize("refused", ["sadd", "hset"])
async def test_failed_rewrites_leave_one_set_at_most(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """A Redis without memory must not fill with sets that no reader uses."""
    writer = IndexWriter(own_redis.url, member(), WriterSettings(timeout_s=HANG_S, chunk=10, chunks_in_flight=1))
    async with linked(writer):
        real, num_sent = writer._transactions.run, 0

        async def run(commands: list[Sequence[Argument]]) -> list[Reply] | None:
            nonlocal num_sent
            num_sent += 1
            is_refused = num_sent % 3 == 0 if refused == "sadd" else commands[0][0] == "HSET"
            return None if is_refused else await real(commands)

        with monkeypatch.context() as patched:
            patched.setattr(writer._transactions, "run", run)
            for _ in range(4):
                assert not await writer.rewrite(entries(chain(40)), WorkerLoad())
                assert own_redis.command("DBSIZE") == b":1\r\n"
        assert await writer.rewrite(entries(chain(40)), WorkerLoad())
        assert own_redis.command("KEYS", "*:b:*").count(b"epoch-of-w0") == 1


async def test_a_refusal_is_logged_once(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted each time."""
    events: list[str] = []
    writer = IndexWriter(own_redis.url, member(), LASTING, count=events.append)
    async with linked(writer):
        for num_refused in (2, 4):
            own_redis.command("CONFIG", "SET", "maxmemory", "1")
            caplog.clear()
            for _ in range(2):
                assert not await writer.rewrite(entries(chain(3)), WorkerLoad())
            assert [text.partition(":")[0] for text in caplog.messages] == ["Redis refuses what w0 publishes"]
            assert events.count("refused") == num_refused
            own_redis.command("CONFIG", "SET", "maxmemory", "0")
            assert await writer.rewrite(entries(chain(3)), WorkerLoad()), "a later refusal is logged again"


def test_lease_after_a_clock_jump_is_in_doubt() -> None:
    writer = IndexWriter("redis://h:1", member())
    assert writer.in_doubt, "before the first rewrite"
    writer._offset_ms = 0.0

    def settled(jump_ms: int) -> bool:
        now_ms = int(time.monotonic() * 1000) + jump_ms
        return writer._settle([b"%d" % (now_ms // 1000), b"%d" % (now_ms % 1000 * 1000)])

    assert settled(0)
    assert not settled(60_000)
    assert writer.in_doubt
    assert settled(60_000)
    assert not writer.in_doubt
