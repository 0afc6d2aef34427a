"""The parser of replies, without a Redis."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import RedisError

from cache.redis_index.connection import MAX_REPLY_BYTES, BoundedParser

MIB = 1 << 20


@pytest.mark.parametrize(("num_bytes", "num_turns"), [(MIB // 2, 0), (3 * MIB + MIB // 2, 3)])
async def test_the_loop_turns_once_per_mib_of_a_reply(num_bytes: int, num_turns: int) -> None:
    """Other tasks run while a large reply is parsed. One that is not large takes no turn more."""
    connection, parser = Connection(), BoundedParser(lambda: MAX_REPLY_BYTES, socket_read_size=1 << 16)
    connection._reader = asyncio.StreamReader()
    parser.on_connect(connection)
    connection._reader.feed_data(b"$%d\r\n%b\r\n" % (num_bytes, b"x" * num_bytes))
    counted = 0

    async def count_turns() -> None:
        nonlocal counted
        while True:
            counted += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    assert len(await parser.read_response(disable_decoding=True)) == num_bytes
    assert counted == num_turns
    counting.cancel()


@pytest.mark.parametrize("announced", [b"*1000000000\r\n", b"~1000000000\r\n", b"*1\r\n*1000000000\r\n"])
async def test_no_list_is_made_for_a_reply_that_says_it_is_huge(announced: bytes) -> None:
    """Thirteen bytes can announce 10^9 elements."""
    connection, parser = Connection(), BoundedParser(lambda: MAX_REPLY_BYTES, socket_read_size=1 << 16)
    connection._reader = asyncio.StreamReader()
    parser.on_connect(connection)
    connection._reader.feed_data(announced)
    before = psutil.Process().memory_info().vms
    with pytest.raises((RedisError, TimeoutError)):
        await asyncio.wait_for(parser.read_response(disable_decoding=True), 0.2)
    assert psutil.Process().memory_info().vms - before < 1 << 30
