from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events import Removed, Stops, Stored
from cache.hashing import index_entry
from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import ReaderSettings, RedisIndex
from cache.redis_index.client import Reply
from cache.types import BlockHash, Tier
from tests.cache.redis_index.index_parts import chain
from tests.members import make_member
from tests.redis_server import RedisServer, newest_redis
from tests.running import running
from tests.waiting import HANG_S, until
from worker.publishing.inbox import PublisherInbox
from worker.publishing.publisher import Changes, Publisher, PublisherSettings

FAST = PublisherSettings(interval_s=0.002, heartbeat_s=0.05, retry_s=0.01, max_retry_s=0.05)


def member(epoch: str = "e0", *tiers: Tier, name: str = "w") -> WorkerMember:
    return make_member(name, epoch, url="http://127.0.0.1:1", tiers=tiers)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    binary = newest_redis()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), binary) as server:
        yield server


@asynccontextmanager
async def publishing(server: RedisServer, *tiers: Tier) -> AsyncIterator[tuple[Publisher, RedisIndex]]:
    publisher = Publisher(server.url, member("e0", *tiers), PublisherInbox(), settings=FAST)
    index = RedisIndex(server.url, ReaderSettings(poll_s=0.02, refresh_interval_s=0.0, deadline_s=HANG_S))
    async with running(publisher, index):
        yield publisher, index


async def matches(index: RedisIndex, hashes: list[BlockHash], expected: int, epoch: str = "e0") -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            found = await index.lookup(hashes) or []
            if [(item.matched_blocks, item.member.epoch) for item in found] == [(expected, epoch)]:
                return
            await asyncio.sleep(0.002)


async def ends(index: RedisIndex, hashes: list[BlockHash], expected: dict[str, tuple[int, ...]]) -> None:
    """Wait until each worker's match ends there: in its pool, then in each tier."""
    async with asyncio.timeout(HANG_S):
        while True:
            found = await index.lookup(hashes) or []
            if {item.member.worker_id: (item.matched_blocks, *item.tier_blocks) for item in found} == expected:
                return
            await asyncio.sleep(0.002)


async def test_offered_blocks_are_found(redis_server: RedisServer) -> None:
    hashes = chain(20)
    async with publishing(redis_server) as (publisher, index):
        engine = threading.Thread(
            target=lambda: [publisher.inbox.offer([Stored(block)], WorkerLoad(num_running=1)) for block in hashes]
        )
        engine.start()
        await matches(index, hashes, 20)
        engine.join()
        publisher.inbox.offer([Removed(block) for block in reversed(hashes[5:])], WorkerLoad(num_running=7))
        await matches(index, hashes, 5)
        found = await index.lookup(hashes)
        assert found is not None
        assert found[0].load.num_running == 7


async def test_blocks_of_tiers_are_found_behind_those_of_the_pool(redis_server: RedisServer) -> None:
    """Each place has a thread of its own, and another worker has no tiers."""
    hashes = chain(30)
    events = [Stored(block) for block in hashes]
    other = Publisher(redis_server.url, member("e9", name="w1"), PublisherInbox(), settings=FAST)
    async with publishing(redis_server, "host", "disk") as (publisher, index), running(other):
        places: list[Callable[[], object]] = [
            lambda: [publisher.inbox.offer([event], WorkerLoad(num_running=1)) for event in events[:10]],
            lambda: [publisher.inbox.offer_tier("host", [event]) for event in events[5:15]],
            lambda: [publisher.inbox.offer_tier("disk", [event]) for event in events[:25]],
        ]
        threads = [threading.Thread(target=place) for place in places]
        for thread in threads:
            thread.start()
        other.inbox.offer(events[:20], WorkerLoad())
        await ends(index, hashes, {"w": (10, 15, 25), "w1": (20,)})
        for thread in threads:
            thread.join()
        publisher.inbox.offer([Removed(block) for block in reversed(hashes[5:10])], WorkerLoad())
        publisher.inbox.offer_tier("host", [Removed(block) for block in reversed(hashes[7:15])])
        await ends(index, hashes, {"w": (5, 7, 25), "w1": (20,)})
        (entry, _) = sorted(await index.entries(), key=lambda entry: entry.member.worker_id)
        assert (entry.num_entries, entry.num_tier_entries) == (5, {"host": 2, "disk": 25})
        assert publisher.num_held == 5


async def test_a_large_tier_is_published_in_batches(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is found at the start may hold more than one MULTI takes; the pool comes first."""
    monkeypatch.setattr("worker.publishing.publisher._MAX_BATCH", 7)
    hashes = chain(40)
    async with publishing(redis_server, "disk") as (publisher, index):
        publisher.inbox.offer([], WorkerLoad())
        await ends(index, hashes, {"w": (0, 0)})
        publisher.inbox.offer_tier("disk", [Stored(block) for block in hashes])
        publisher.inbox.offer([Stored(block) for block in hashes[:10]], WorkerLoad())
        await ends(index, hashes, {"w": (10, 40)})


async def test_a_purge_empties_the_tiers(redis_server: RedisServer) -> None:
    hashes = chain(4)
    events = [Stored(block) for block in hashes]
    async with publishing(redis_server, "disk") as (publisher, index):
        publisher.inbox.offer(events[:2], WorkerLoad())
        publisher.inbox.offer_tier("disk", events)
        await ends(index, hashes, {"w": (2, 4)})
        publisher.inbox.begin_epoch(member("e1", "disk"))
        publisher.inbox.offer_tier("disk", events[:1])
        await matches(index, hashes, 0, "e1")
        await ends(index, hashes, {"w": (0, 1)})
        assert redis_server.command("KEYS", "*:e0:*") == b"*0\r\n"


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_connection_that_is_killed_in_a_publish_loses_nothing(
    redis_server: RedisServer, num_turns: int
) -> None:
    """Some turns of the event loop after the command was given out: before it is sent, or before its reply is read."""
    hashes = chain(30)
    async with publishing(redis_server, "host", "disk") as (publisher, index):
        publisher.inbox.offer([Stored(block) for block in hashes[:20]], WorkerLoad())
        await ends(index, hashes, {"w": (20, 20, 20)})
        client, killed = publisher._writer.client, list[asyncio.Task[None]]()
        real = client.submit

        async def kill() -> None:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            redis_server.command("CLIENT", "KILL", "TYPE", "normal")

        def submit(packed: Sequence[bytes], num_replies: int, max_reply_bytes: int) -> asyncio.Future[list[Reply]]:
            future = real(packed, num_replies, max_reply_bytes)
            if b"SADD" in b"".join(packed) and not killed:
                killed.append(asyncio.create_task(kill()))
            return future

        client.submit = submit  # type: ignore[method-assign]
        publisher.inbox.offer_tier("disk", [Stored(block) for block in hashes])
        publisher.inbox.offer_tier("host", [Stored(block) for block in hashes[:20]])
        publisher.inbox.offer([Removed(block) for block in reversed(hashes[10:20])], WorkerLoad())
        await until(lambda: bool(killed))
        await killed[0]
        await ends(index, hashes, {"w": (10, 20, 30)})


async def test_flushed_and_killed_servers_are_filled_again(redis_server: RedisServer) -> None:
    hashes = chain(50)
    async with publishing(redis_server) as (publisher, index):
        publisher.inbox.offer([Stored(block) for block in hashes], WorkerLoad())
        await matches(index, hashes, 50)
        redis_server.command("FLUSHALL")
        await matches(index, hashes, 50)
        redis_server.kill()
        await until(lambda: not publisher.connected)
        publisher.inbox.offer([Removed(block) for block in reversed(hashes[30:])], WorkerLoad())
        redis_server.start()
        await matches(index, hashes, 30)


async def test_a_clean_end_leaves_the_registry(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as (publisher, index):
        publisher.inbox.offer([], WorkerLoad())
        await matches(index, [], 0)
        await publisher.close()
        assert redis_server.command("HLEN", "{headstart:0}:members") == b":0\r\n"


async def test_the_lease_is_renewed_without_events(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as (publisher, index):
        publisher._pause = pause = AsyncMock(wraps=publisher._pause)  # type: ignore[method-assign]
        publisher.inbox.offer([], WorkerLoad())
        await matches(index, [], 0)
        assert not publisher.inbox.wake.is_set(), "it would never pause"
        before = (await index.entries())[0]
        async with asyncio.timeout(HANG_S):
            while (await index.entries())[0].lease_left_s <= before.lease_left_s:
                await index.lookup([])
        await until(lambda: call(FAST.interval_s) in pause.mock_calls)


def test_a_batch_is_limited_over_both_kinds() -> None:
    changes, blocks = Changes(), chain(5)
    changes.apply([Stored(block) for block in blocks[:3]])
    assert len(changes.take(3)[0]) == 3
    changes.apply([Removed(blocks[2]), *(Stored(block) for block in blocks[3:])])
    assert changes.take(2)[:2] == ([index_entry(blocks[3])], [index_entry(blocks[2])])
    assert changes.num_published == 3


async def test_a_failed_round_is_counted_reported_and_repaired(redis_server: RedisServer) -> None:
    hashes, events = chain(5), list[str]()
    settings = PublisherSettings(0.002, 0.05, 0.01, 0.05, rewrite_s=0.0, silent_s=0.05)
    publisher = Publisher(redis_server.url, member(), PublisherInbox(), settings=settings, count=events.append)
    index = RedisIndex(redis_server.url, ReaderSettings(poll_s=0.02, refresh_interval_s=0.0, deadline_s=HANG_S))
    async with running(publisher, index):
        publisher.inbox.offer([Stored(block) for block in hashes], WorkerLoad())
        await matches(index, hashes, 5)
        real = publisher._writer.publish
        publisher._writer.publish = AsyncMock(side_effect=RecursionError("from a reply"))  # type: ignore[method-assign]
        await until(lambda: "RecursionError: from a reply" in (publisher.problem or ""))
        assert events.count("failed") >= 1
        publisher._writer.publish = real  # type: ignore[method-assign]
        await until(lambda: publisher.problem is None)
        await matches(index, hashes, 5)


async def test_a_worker_without_redis_reports_a_problem() -> None:
    publisher = Publisher("redis://127.0.0.1:1", member(), PublisherInbox(), settings=replace(FAST, silent_s=0.5))
    async with running(publisher):
        await until(lambda: "no connection" in (publisher.problem or ""))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3), st.integers(0, 4))))
def test_taken_changes_turn_what_is_published_into_what_is_held(steps: list[tuple[int, int, int]]) -> None:
    """`steps`: a block, where a hit stops at it (-1: the block is removed), and how many changes are taken after it."""
    hashes, changes = [BlockHash(bytes([n]) * 16) for n in range(6)], Changes()
    held: dict[bytes, int] = {}
    published: dict[bytes, int] = {}

    def take(limit: int) -> None:
        stored, removed, num_published, stops = changes.take(limit)
        assert len(stored) + len(removed) <= limit
        assert all(published.get(entry) != stop for entry, stop in zip(stored, stops, strict=True)), "nothing new"
        published.update(zip(stored, stops, strict=True))
        for entry in removed:
            del published[entry]
        assert changes.num_published == num_published == len(published)

    for block, stop, limit in steps:
        entry = index_entry(hashes[block])
        if stop < 0:
            changes.apply([Removed(hashes[block])])
            held.pop(entry, None)
        else:
            changes.apply([Stored(hashes[block]), *([Stops(hashes[block], stop)] if stop else [])])
            held[entry] = stop or held.get(entry, 0)
        assert list(changes.held.items()) == list(held.items()), "the order of a rewrite: parents are stored first"
        assert bool(changes) == (published != held), "what comes and goes while Redis is away leaves nothing behind"
        take(limit)
    take(100)
    assert published == held
    assert not changes


async def test_ends_are_published_with_their_blocks(redis_server: RedisServer) -> None:
    publisher = Publisher(redis_server.url, make_member("w", "e0", ends="exact"), PublisherInbox(), settings=FAST)
    index = RedisIndex(redis_server.url, ReaderSettings(poll_s=0.02, refresh_interval_s=0.0, deadline_s=HANG_S))
    hashes = chain(4)
    async with running(publisher, index):
        events = [Stored(block_hash) for block_hash in hashes]
        publisher.inbox.offer([*events, *(Stops(block_hash, 2) for block_hash in hashes[1:])], WorkerLoad())
        await matches(index, hashes, 2)
        publisher.inbox.offer([Stops(hashes[3], 4)], WorkerLoad())
        await matches(index, hashes, 4)
        publisher.inbox.offer([Removed(hashes[3]), Stored(hashes[3])], WorkerLoad())
        await matches(index, hashes, 0)
        publisher.inbox.begin_epoch(make_member("w", "e1"))
        publisher.inbox.offer(events, WorkerLoad())
        await matches(index, hashes, 4, "e1")
