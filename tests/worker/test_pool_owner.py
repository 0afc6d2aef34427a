"""One owner of the pool behind an async interface: order, exactly one free, and nothing left by who is cancelled."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator

import pytest

from cache.factory import make_allocator
from cache.hashing import Namespace
from tests.waiting import HANG_S
from worker.pool_owner import OwnedAllocation, PoolClosedError, PoolOwner

ROOT = Namespace("model", "main", "tokenizer", 4).root(salt=b"tenant")
NUM_BLOCKS = 21

pytestmark = pytest.mark.usefixtures("small_heap")


@pytest.fixture(params=["hash", "radix", "off"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[PoolOwner]:
    async with PoolOwner(make_allocator(request.param, NUM_BLOCKS, 4)) as owner:
        yield owner
        await owner.check_integrity()
        assert await owner.num_free_blocks() == NUM_BLOCKS - 1, "a block was not given back"


async def allocate(pool: PoolOwner, num_tokens: int) -> OwnedAllocation:
    allocation = await pool.allocate(num_tokens, range(num_tokens), ROOT)
    assert allocation is not None
    return allocation


async def settle() -> None:
    """The loop holds the answer that woke this task until its turn ends; the free is a callback of a later one."""
    for _ in range(2):
        await asyncio.sleep(0)
        gc.collect()
    await asyncio.sleep(0)


async def test_it_is_freed_at_the_end_of_the_block(pool: PoolOwner) -> None:
    async with await allocate(pool, 10) as allocation:
        assert await pool.num_free_blocks() == NUM_BLOCKS - 1 - 3
        assert len(allocation.slots(0, 10)) == 10
    assert await pool.num_free_blocks() == NUM_BLOCKS - 1


async def test_a_second_free_does_nothing(pool: PoolOwner) -> None:
    async with await allocate(pool, 10) as allocation:
        allocation.free()
        assert await pool.num_free_blocks() == NUM_BLOCKS - 1
    allocation.free()


async def test_one_that_is_lost_frees_itself(pool: PoolOwner) -> None:
    allocation = await allocate(pool, 10)
    del allocation
    await settle()
    assert await pool.num_free_blocks() == NUM_BLOCKS - 1


async def test_what_does_not_fit_is_none(pool: PoolOwner) -> None:
    async with await allocate(pool, 40) as allocation:
        assert await pool.allocate(41, range(41), ROOT) is None
        assert not await allocation.extend(81)
        assert await allocation.extend(80)
        assert allocation.capacity == 80


async def test_commit_and_find() -> None:
    async with PoolOwner(make_allocator("hash", NUM_BLOCKS, 4)) as pool:
        async with await allocate(pool, 10) as allocation:
            await allocation.commit(range(10), 10)
            assert await pool.find(range(10), ROOT) == 8
            assert len(await pool.take_events()) == 2
            assert not await pool.reset()
        async with await allocate(pool, 10) as again:
            assert again.num_cached_tokens == 8
        async with await pool.allocate(10, range(10), ROOT, reuse=False) as anew:
            assert anew.num_cached_tokens == 0
        assert await pool.reset()


async def test_forks_are_freed_each(pool: PoolOwner) -> None:
    async with await allocate(pool, 6) as first:
        await first.commit(range(6), 6)
        async with await first.fork() as second:
            first.free()
            assert await pool.num_free_blocks() == NUM_BLOCKS - 1 - 2
            assert await second.extend(7)
            assert await pool.take_copies() == []


async def test_who_is_cancelled_leaves_nothing_behind(pool: PoolOwner) -> None:
    for num_turns in range(6):  # before the command is done, between its end and the answer, and after
        task = asyncio.create_task(pool.allocate(10, range(10), ROOT))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(result, OwnedAllocation | asyncio.CancelledError)
        del task, result
        await settle()
        assert await pool.num_free_blocks() == NUM_BLOCKS - 1


async def test_an_error_reaches_its_caller_and_not_the_owner(pool: PoolOwner) -> None:
    async with await allocate(pool, 4) as allocation:
        with pytest.raises(AssertionError, match="committed"):
            await allocation.commit(range(4), 5)
        assert await pool.num_free_blocks() == NUM_BLOCKS - 2


async def test_many_tasks_share_one_pool(pool: PoolOwner) -> None:
    held: set[int] = set()

    async def request(seed: int) -> None:
        draw = random.Random(seed)
        num_tokens = draw.randint(1, 30)
        allocation = await pool.allocate(num_tokens, [seed] * num_tokens, ROOT)
        if allocation is None:
            return
        async with allocation:
            blocks = set(allocation.block_table)
            assert not blocks & held, "a block was handed out twice"
            held.update(blocks)
            await asyncio.sleep(0)
            held.difference_update(blocks)

    await asyncio.gather(*(request(seed) for seed in range(100)))


async def test_whoever_waits_when_the_owner_is_cancelled_gets_an_answer() -> None:
    """As when the loop is shut down."""
    owner = PoolOwner(make_allocator("hash", NUM_BLOCKS, 4))
    async with asyncio.timeout(HANG_S), owner:
        waiting = asyncio.create_task(owner.find(range(10), ROOT))
        await asyncio.sleep(0)
        assert owner._task is not None
        owner._task.cancel()
        assert await waiting == 0
        with pytest.raises(PoolClosedError):
            await owner.find(range(10), ROOT)


async def test_after_the_end_a_call_is_refused_and_what_is_held_is_still_freed() -> None:
    allocator = make_allocator("hash", NUM_BLOCKS, 4)
    owner = PoolOwner(allocator)
    with pytest.raises(PoolClosedError):
        await owner.find([0], ROOT)
    async with owner:
        kept = await allocate(owner, 10)
        waiting = asyncio.create_task(owner.find(range(10), ROOT))
        await asyncio.sleep(0)
    assert await waiting == 0
    with pytest.raises(PoolClosedError):
        await kept.extend(11)
    kept.free()
