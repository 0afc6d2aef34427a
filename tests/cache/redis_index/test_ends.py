"""Pools in which a hit may stop before the end of a match: both sides of their keys, on a real Redis."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, RedisIndex, SetChange
from cache.types import BlockHash
from tests.cache.redis_index.index_parts import EAGER, LASTING, becomes, chain, entries, linked, matches, member
from tests.redis_server import RedisServer
from tests.waiting import until

POOL_KEY = "{headstart:0}:e:w0:epoch-of-w0:1"
SIZE = 16


def with_ends(name: str = "w0", ends: str = "exact") -> WorkerMember:
    return replace(member(name), ends=ends)


def stops(hashes: list[BlockHash], ends: set[int]) -> list[int]:
    """Return the last end at or before each block, or 0."""
    return [max((end for end in ends if end <= at), default=0) for at in range(1, len(hashes) + 1)]


@pytest.mark.parametrize("seed", range(3))
async def test_a_match_stops_at_its_last_end(redis_server: RedisServer, seed: int) -> None:
    """Workers with ends, without ends and with tiers, in one lookup."""
    rng = random.Random(seed)
    members = [with_ends(f"w{n:02}") if n % 3 else member(f"w{n:02}") for n in range(15)]
    members += [replace(member(f"x{n}"), tiers=("disk",)) for n in range(3)]
    prompts = [chain(rng.choice([0, 1, 2, 17, 64])) for _ in range(30)]
    held: dict[str, list[BlockHash]] = {m.worker_id: [] for m in members}
    ends: dict[str, list[int]] = {m.worker_id: [] for m in members}
    expected: list[dict[str, int]] = []
    whole: list[dict[str, int]] = []
    for hashes in prompts:
        expected.append({})
        whole.append({})
        shared = rng.randint(0, len(hashes))
        for m in members:
            length = rng.choice([shared, rng.randint(0, len(hashes))])
            held[m.worker_id] += hashes[:length]
            some = {at for at in range(1, length + 1) if rng.random() < 0.3} if m.ends else set(range(length + 1))
            if m.ends:
                ends[m.worker_id] += stops(hashes[:length], some)
            expected[-1][m.worker_id] = max((at for at in some if at <= length), default=0)
            most = length if length < len(hashes) or not m.ends else length - 1
            whole[-1][m.worker_id] = max((at for at in some if at <= most), default=0)
    writers = [IndexWriter(redis_server.url, m, LASTING) for m in members]
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, index):
        for writer in writers:
            own = writer.member.worker_id
            tiers = [entries(hashes) for hashes in prompts[:1]] if writer.member.tiers else []
            assert await writer.rewrite(entries(held[own]), WorkerLoad(), tiers, ends[own])
        await until(becomes(index, [], {m.worker_id: 0 for m in members}))
        for hashes, found, of_whole in zip(prompts, expected, whole, strict=True):
            assert await matches(index, hashes) == found
            candidates = await index.lookup(hashes, None, SIZE * len(hashes))
            assert {item.member.worker_id: item.matched_blocks for item in candidates or ()} == of_whole
            candidates = await index.lookup(hashes, None, SIZE * len(hashes) + 1)
            assert {item.member.worker_id: item.matched_blocks for item in candidates or ()} == found


async def test_older_readers_see_no_block_of_such_a_pool(redis_server: RedisServer) -> None:
    """They look for the keys of pools without ends."""
    hashes = chain(4)
    writer = IndexWriter(redis_server.url, with_ends(), LASTING)
    async with linked(writer):
        assert await writer.rewrite(entries(hashes), WorkerLoad(), (), stops(hashes, {2}))
        assert redis_server.command("EXISTS", POOL_KEY) == b":1\r\n"
        assert redis_server.command("EXISTS", POOL_KEY.replace(":e:", ":b:")) == b":0\r\n"


async def test_an_unknown_kind_of_ends_is_no_match(redis_server: RedisServer) -> None:
    hashes = chain(4)
    writers = [IndexWriter(redis_server.url, m, LASTING) for m in (with_ends("w0"), with_ends("w1", "inexact"))]
    later = IndexWriter(redis_server.url, with_ends("w2", "later"), LASTING)
    index = RedisIndex(redis_server.url, EAGER)
    async with linked(*writers, later, index):
        for writer in writers:
            assert await writer.rewrite(entries(hashes), WorkerLoad(), (), stops(hashes, {3}))
        assert await later.rewrite([], WorkerLoad(), ())
        await until(becomes(index, hashes, {"w0": 3, "w1": 3, "w2": 0}))


async def test_changes_of_ends_are_published(redis_server: RedisServer) -> None:
    hashes = chain(6)
    entry = entries(hashes)
    writer, index = IndexWriter(redis_server.url, with_ends(), LASTING), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        assert await writer.rewrite(entry[:4], WorkerLoad(), (), stops(hashes[:4], {2}))
        await until(becomes(index, hashes, {"w0": 2}))
        assert await writer.publish([SetChange(entry[4:], [], 6, [5, 5])], WorkerLoad())
        assert await matches(index, hashes) == {"w0": 5}
        assert await writer.publish([SetChange(entry[4:], [], 6, [0, 2])], WorkerLoad())
        assert await matches(index, hashes) == {"w0": 2}
        assert await matches(index, hashes[:5]) == {"w0": 0}
        assert await writer.publish([SetChange([], entry[3:], 3, [])], WorkerLoad())
        assert await matches(index, hashes) == {"w0": 2}
        assert int(redis_server.command("PTTL", POOL_KEY)[1:]) > 0


async def test_lost_ends_are_written_again(redis_server: RedisServer) -> None:
    hashes = chain(4)
    writer, index = IndexWriter(redis_server.url, with_ends(), LASTING), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        assert await writer.rewrite(entries(hashes), WorkerLoad(), (), stops(hashes, {2}))
        await until(becomes(index, hashes, {"w0": 2}))
        redis_server.command("DEL", POOL_KEY)
        assert await matches(index, hashes) == {"w0": 0}
        assert not await writer.publish([SetChange([], [], 4)], WorkerLoad())
        assert await writer.rewrite(entries(hashes), WorkerLoad(), (), stops(hashes, {2}))
        await until(becomes(index, hashes, {"w0": 2}))
        assert redis_server.command("EXISTS", POOL_KEY) == b":0\r\n", "the old version is unlinked"


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "9", "nan", "inf", "1e99", "2.5", "0x2"])
async def test_a_foreign_end_is_never_beyond_the_match(redis_server: RedisServer, value: str) -> None:
    hashes = chain(4)
    writer, index = IndexWriter(redis_server.url, with_ends(), LASTING), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        assert await writer.rewrite(entries(hashes), WorkerLoad(), (), stops(hashes, {2}))
        await until(becomes(index, hashes, {"w0": 2}))
        redis_server.command("HSET", POOL_KEY, entries(hashes)[3], value)
        assert await matches(index, hashes) in ({"w0": 0}, {"w0": 2})
        redis_server.command("DEL", POOL_KEY)
        redis_server.command("SET", POOL_KEY, value)
        assert await matches(index, hashes) == {"w0": 0}


async def test_a_worker_may_get_ends_in_a_new_epoch(redis_server: RedisServer) -> None:
    hashes = chain(4)
    writer, index = IndexWriter(redis_server.url, member(), LASTING), RedisIndex(redis_server.url, EAGER)
    async with linked(writer, index):
        assert await writer.rewrite(entries(hashes), WorkerLoad())
        await until(becomes(index, hashes, {"w0": 4}))
        writer.begin_epoch(replace(member(epoch="later"), ends="exact"))
        assert await writer.rewrite(entries(hashes), WorkerLoad(), (), stops(hashes, {1}))
        await until(becomes(index, hashes, {"w0": 1}))
        writer.begin_epoch(member(epoch="last"))
        assert await writer.rewrite(entries(hashes), WorkerLoad())
        await until(becomes(index, hashes, {"w0": 4}))
        assert await writer.publish([SetChange([], [], 4)], WorkerLoad())
