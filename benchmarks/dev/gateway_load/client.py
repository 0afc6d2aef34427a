"""A load client on raw asyncio: it counts, it does not parse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit


class BrokenAnswerError(Exception):
    pass


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self.num_events = 0
        self._waiter: asyncio.Future[bytes] | None = None
        self._parts: list[bytes] = []
        self._left: int | None = None
        self.transport: asyncio.Transport

    @classmethod
    async def open(cls, url: str) -> Self:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(BrokenAnswerError("connection lost"))

    async def ask(self, request: bytes) -> bytes:
        """The whole answer, head included. Raises BrokenAnswerError unless its status is 200."""
        self._parts, self._left, self.num_events = [], None, 0
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._waiter

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            return  # the asker has given up
        self.num_events += data.count(b"data: {")
        self._parts.append(data)
        if self._left is None:
            self._begin()
        else:
            self._left -= len(data)
        if self._left is not None and (self._left <= 0 if self._left < 1 << 60 else data.endswith(b"0\r\n\r\n")):
            answer = b"".join(self._parts)
            if not answer.startswith(b"HTTP/1.1 200"):
                self._waiter.set_exception(BrokenAnswerError(answer[:500].decode(errors="replace")))
            else:
                self._waiter.set_result(answer)

    def _begin(self) -> None:
        received = b"".join(self._parts)
        head, found, body = received.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        mark = lowered.find(b"content-length:")
        if mark >= 0:
            self._left = int(lowered[mark + 15 :].split(b"\r\n", 1)[0]) - len(body)
        else:
            self._left = 1 << 61


def post(url: str, body: bytes) -> bytes:
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass(frozen=True, slots=True)
class Throughput:
    per_s: float
    num_events: int


async def latencies(url: str, bodies: Sequence[bytes]) -> list[float]:
    """Seconds of each request, one after the other."""
    connection = await Connection.open(url)
    times = []
    for body in bodies:
        request = post(url, body)
        started_s = time.perf_counter()
        await connection.ask(request)
        times.append(time.perf_counter() - started_s)
    connection.transport.close()
    return times


async def throughput(url: str, bodies: Sequence[bytes], num_connections: int) -> Throughput:
    """Send all requests over `num_connections` connections, each with one in flight."""
    connections = [await Connection.open(url) for _ in range(num_connections)]
    left: Iterator[bytes] = iter(bodies)
    events = 0

    async def work(connection: Connection) -> None:
        nonlocal events
        for body in left:
            await connection.ask(post(url, body))
            events += connection.num_events

    started_s = time.perf_counter()
    try:
        await asyncio.gather(*(work(connection) for connection in connections))
        elapsed_s = time.perf_counter() - started_s
    finally:
        for connection in connections:
            connection.transport.close()
    return Throughput(len(bodies) / elapsed_s, events)
