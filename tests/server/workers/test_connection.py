from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from server.workers.client import GenerateStream, WorkerClient
from server.workers.connection import ConnectionPool, StaleConnection, WorkerConnection, WorkerLost
from tests.waiting import until
from tests.worker.scheduler.engine import generate
from worker.common.http_client import HIGH_WATER_BYTES

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Run `serve` for every request on a connection; yield its URL and the request heads."""
    heads: list[bytes] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                heads.append(head)
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", heads


@pytest.fixture
async def pool() -> AsyncIterator[ConnectionPool]:
    opened = ConnectionPool()
    yield opened
    opened.close()


async def read_all(connection: WorkerConnection) -> bytes:
    await connection.head()
    parts = []
    while part := await connection.read():
        parts.append(part)
    return b"".join(parts)


async def test_a_connection_is_reused_after_a_slow_answer(pool: ConnectionPool) -> None:
    """The answer arrives byte by byte."""
    peers = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.add(writer.get_extra_info("peername"))
        for byte in CHUNKED + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()

    async with server(serve) as (url, heads):
        for _ in range(3):
            connection = await pool.send(url, b"POST /generate", b"body")
            assert await connection.head() == 200
            assert await read_all(connection) == b"hello world"
            connection.release()
        assert len(peers) == 1
        assert heads[0].startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")


async def test_release_before_the_last_chunk(pool: ConnectionPool) -> None:
    go = asyncio.Event()
    num_peers = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\nx\r\n")
        await go.wait()
        writer.write(b"0\r\n\r\n")

    async with server(serve) as (url, heads):
        first = await pool.send(url, b"POST /generate", b"")
        assert await first.read() == b"x"
        first.release()
        second = await pool.send(url, b"POST /generate", b"")
        assert second is not first, "the first has not ended yet"
        go.set()
        assert await read_all(second) == b"x"
        await until(lambda: first.usable)
        assert await pool.send(url, b"POST /generate", b"") is first
        num_peers = len(heads)
        second.close()
    assert num_peers <= 3


async def test_a_connection_closed_while_idle_is_not_taken(pool: ConnectionPool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        await writer.drain()
        raise ConnectionResetError

    async with server(serve) as (url, _):
        connection = await pool.send(url, b"POST /generate", b"")
        assert await read_all(connection) == b"x"
        connection.release()
        await until(lambda: not connection.usable)
        assert await pool.send(url, b"POST /generate", b"") is not connection


@pytest.mark.parametrize("sent", [b"", CHUNKED[:20], CHUNKED + b"5\r\nhe", b"\0\0\0\0\r\n\r\n", CHUNKED + b"zz\r\n"])
async def test_broken_answers(pool: ConnectionPool, sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        raise ConnectionResetError

    async with server(serve) as (url, _):
        connection = await pool.send(url, b"POST /generate", b"")
        with pytest.raises(WorkerLost) as broken:
            await read_all(connection)
        assert not isinstance(broken.value, StaleConnection)


async def test_without_a_reader_the_sender_waits(pool: ConnectionPool) -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        for _ in range(400):
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            sent += 0x10000
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with server(serve) as (url, _):
        connection = await pool.send(url, b"POST /generate", b"")
        await connection.head()
        seen = -1
        while seen != sent:
            seen = sent
            await asyncio.sleep(0.1)
        assert sent < 400 * 0x10000 / 2
        assert connection._size <= 2 * HIGH_WATER_BYTES
        assert len(await read_all(connection)) == 400 * 0x10000


async def test_a_connection_that_was_paused_is_not_kept(pool: ConnectionPool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = HIGH_WATER_BYTES + 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        await writer.drain()

    async with server(serve) as (url, _):
        connection = await pool.send(url, b"POST /generate", b"")
        await connection.head()
        await until(lambda: connection.usable)
        connection.release()
        again = await pool.send(url, b"POST /generate", b"")
        assert len(await read_all(again)) == HIGH_WATER_BYTES + 1
        assert again is not connection, "it would read no answer"
        again.release()


def answers_once() -> Any:
    """Serve the first request of each connection, and break it at the next one."""
    answered = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer in answered:
            raise ConnectionResetError
        answered.add(writer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    return serve


async def test_a_kept_connection_that_broke_is_stale(pool: ConnectionPool) -> None:
    async with server(answers_once()) as (url, _):
        first = await pool.send(url, b"POST /generate", b"")
        assert await read_all(first) == b""
        first.release()
        again = await pool.send(url, b"POST /generate", b"")
        assert again is first
        with pytest.raises(StaleConnection):
            await again.head()


async def test_a_call_on_a_connection_closed_while_idle_is_sent_again() -> None:
    client = WorkerClient()
    async with server(answers_once()) as (url, heads):
        assert [await client.is_alive(url) for _ in range(3)] == [True] * 3
        assert len(heads) == 5
        client.close()


async def test_no_listener() -> None:
    with pytest.raises(WorkerLost, match="Connect"):
        await ConnectionPool().send("http://127.0.0.1:1", b"POST /generate", b"")


async def test_a_generation_over_a_kept_connection_that_broke_is_stale() -> None:
    with closing(WorkerClient()) as client:
        async with server(answers_once()) as (url, heads):
            assert await client.is_alive(url)  # its connection is kept
            with pytest.raises(StaleConnection):
                async with GenerateStream(client, url, generate([1, 2, 3], 1)):
                    pass
    assert [head.split()[1] for head in heads] == [b"/health/live", b"/generate"]
