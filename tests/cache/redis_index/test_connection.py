"""The parser of replies, without a Redis."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio.connection import Connection

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
