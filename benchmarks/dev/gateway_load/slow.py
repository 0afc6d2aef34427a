"""Streams that are read at full speed, and some that are read a byte at a time: do these hurt those?"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

SLOW_INTERVAL_S: Final = 1.0
"""Between two bytes that a slow reader takes."""
_TOKEN: Final = b" the"
"""Text of each of the stub's tokens: several ready at once come as one event, so events cannot be counted."""


class Stream(asyncio.Protocol):
    """One endless stream, its tokens counted as they come."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport
        self._tail = b""
        self.num_tokens = 0
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        self.num_tokens += data.count(_TOKEN)
        self._tail = data[-len(_TOKEN) + 1 :]

    def close(self) -> None:
        self._transport.abort()


class SlowReader:
    """One endless stream of which a byte a second is read, into the smallest window there is."""

    def __init__(self, url: str, request: bytes) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._request = request

    async def run(self) -> None:
        """Read without end. Raises ConnectionError when the stream ends."""
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.setblocking(False)
            await loop.sock_connect(client, self._address)
            await loop.sock_sendall(client, self._request)
            while await loop.sock_recv(client, 1):  # noqa: ASYNC110
                await asyncio.sleep(SLOW_INTERVAL_S)
        raise ConnectionError("a slow reader's stream has ended")


@dataclass(frozen=True, slots=True)
class Rate:
    per_s: float
    num_lost: int


async def open_streams(url: str, request: bytes, count: int) -> list[Stream]:
    """Open `count` streams, and wait for the first token of each."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(count):
        _, stream = await loop.create_connection(lambda: Stream(request), parts.hostname or "", parts.port or 80)
        streams.append(stream)
    async with asyncio.timeout(60):
        while not all(stream.num_tokens for stream in streams):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return streams


async def rate_of(streams: list[Stream], seconds: float) -> Rate:
    """Tokens a second of all together."""
    before, begun_s = sum(stream.num_tokens for stream in streams), time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed_s = time.perf_counter() - begun_s
    per_s = (sum(stream.num_tokens for stream in streams) - before) / elapsed_s
    return Rate(per_s, sum(stream.lost for stream in streams))
