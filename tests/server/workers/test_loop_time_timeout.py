from __future__ import annotations

import asyncio
import time

import pytest

from server.workers.connection import loop_time_timeout


async def test_a_busy_loop_does_not_count_as_waiting() -> None:
    async def answer() -> int:
        await asyncio.sleep(0.05)
        return 7

    task = asyncio.create_task(loop_time_timeout(answer(), 0.2))
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 -- the loop is to stand still
    assert await task == 7


async def test_work_that_never_ends_is_cancelled() -> None:
    ended = asyncio.Event()

    async def silence() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await loop_time_timeout(silence(), 0.05)
    assert ended.is_set()

    task = asyncio.create_task(loop_time_timeout(silence(), 10))
    await asyncio.sleep(0)
    ended.clear()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_errors_of_the_work_are_raised() -> None:
    async def fail() -> None:
        raise ConnectionRefusedError("no")

    with pytest.raises(ConnectionRefusedError):
        await loop_time_timeout(fail(), 1.0)


async def test_a_result_that_comes_as_its_caller_gives_up_is_discarded() -> None:
    ready, discarded = asyncio.Event(), list[int]()

    async def answer() -> int:
        await ready.wait()
        return 7

    task = asyncio.create_task(loop_time_timeout(answer(), 10, discarded.append))
    for _ in range(3):
        await asyncio.sleep(0)
    ready.set()
    await asyncio.sleep(0)  # the work ends; its caller has not run yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert discarded == [7]
