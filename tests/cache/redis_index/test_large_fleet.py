"""The states of a large fleet: read next to its lookups, and never so late that a lookup is wrong for long."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

import pytest

from benchmarks.dev.index_load.fleet import LOAD, READER, SECRET, SIGNER, member_of, populate
from cache.records import WorkerLoad
from cache.redis_index import ReaderSettings, RedisIndex
from cache.redis_index.client import RedisClient
from cache.redis_index.connection import ClientSettings
from cache.redis_index.lookup import MAX_ALL_STATES, LoopTimer
from cache.redis_index.schema import Keys, encode_state
from tests.cache.redis_index.index_parts import chain, linked
from tests.redis_server import RedisServer
from tests.running import running
from tests.waiting import HANG_S, until

KEYS = Keys(READER.prefix, 0)
NUM_WORKERS = MAX_ALL_STATES + 6
FAR_MS = 1 << 50


def state(number: int, batch: int, load: WorkerLoad = LOAD, deadline_ms: int = FAR_MS) -> bytes:
    member = member_of(number)
    numbers = {"set_version": 1, "batch": batch, "deadline_ms": deadline_ms, "written_ms": 1, "num_entries": 9}
    return SIGNER.sign_state(member.worker_id, encode_state(member, load, **numbers))


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["unsigned", "signed"])
async def test_changes_of_states_are_seen(redis_server: RedisServer, secret: bytes) -> None:
    """A new load, an ended lease, and a state that is gone, though most lookups read no state."""
    hashes, client = chain(8), RedisClient(redis_server.url, ClientSettings())
    index = RedisIndex(redis_server.url, ReaderSettings(deadline_s=HANG_S, poll_s=3600.0, cluster_secret=secret))

    async def loads() -> dict[str, int]:
        found = await index.lookup(hashes, "model")
        assert found is not None
        return {item.member.worker_id: item.load.num_running for item in found}

    async with running(client, index), linked(index):
        await until(lambda: client.up)
        await populate(client, hashes, NUM_WORKERS, "head")
        await until(lambda: _sees(index, NUM_WORKERS))
        other = member_of(3).worker_id
        await client.call(("HSET", KEYS.states, other, state(3, 2, WorkerLoad(num_running=77))), timeout_s=30)
        await until(lambda: _is(loads, other, 77))
        await client.call(("HSET", KEYS.states, other, state(3, 3, LOAD, deadline_ms=1)), timeout_s=30)
        await until(lambda: _is(loads, other, None))
        assert len(await loads()) == NUM_WORKERS - 1
        if not secret:
            await client.call(("HDEL", KEYS.states, member_of(4).worker_id), timeout_s=30)
            await until(lambda: _is(loads, member_of(4).worker_id, None))


async def test_lookups_in_a_row_leave_the_states_out(redis_server: RedisServer) -> None:
    """In a small fleet every lookup reads them. In a large one, those that grow old are read in time."""
    hashes, client = chain(8), RedisClient(redis_server.url, ClientSettings())
    settings = replace(READER, deadline_s=HANG_S, states_age_s=HANG_S)
    for num_workers in (MAX_ALL_STATES, NUM_WORKERS):
        index = RedisIndex(redis_server.url, settings)
        (shard,) = index.shards
        async with running(client, index), linked(index):
            await until(lambda: client.up)
            await populate(client, hashes, num_workers, "head")
            await until(lambda index=index, n=num_workers: _sees(index, n))
            read_at = shard._states_at
            found = await index.lookup(hashes, "model")
            assert found is not None
            assert (shard._states_at > read_at) == (num_workers <= MAX_ALL_STATES)
            assert [item.matched_blocks for item in found] == [1] * num_workers
            assert {item.load.num_running for item in found} == {LOAD.num_running}
            shard._states_at = read_at = time.monotonic() - 1.5 * HANG_S
            assert await index.lookup(hashes, "model")
            await until(lambda shard=shard, read_at=read_at: shard._states_at > read_at)  # next to the lookup


async def test_a_late_loop_reads_what_came_in_time() -> None:
    """The answer is in the socket when the loop runs again, later than the timer."""
    ended: list[bool] = []
    reader, writer = await asyncio.open_connection(sock=(ends := socket.socketpair())[0])
    LoopTimer(0.02, lambda: ended.append(True))
    answer = asyncio.create_task(reader.readexactly(5))
    await asyncio.sleep(0.0)
    ends[1].send(b"reply")
    time.sleep(0.05)  # noqa: ASYNC251 (the loop stands still)
    assert await answer == b"reply"
    assert not ended
    await until(lambda: bool(ended))
    assert ended == [True]
    cancelled = LoopTimer(0.0, lambda: ended.append(False))
    cancelled.cancel()
    await asyncio.sleep(0.01)
    assert ended == [True]
    writer.close()
    ends[1].close()


async def _sees(index: RedisIndex, num_workers: int) -> bool:
    found = await index.lookup([])
    return found is not None and len(found) == num_workers


async def _is(loads, worker_id: str, expected: int | None) -> bool:
    await asyncio.sleep(0)
    return (await loads()).get(worker_id) == expected
