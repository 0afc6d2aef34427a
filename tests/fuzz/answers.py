"""A worker's HTTP side at the cost of a few microseconds: fixed bytes for each path, whole or in two segments."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast


class Answers:
    """Serve `bodies` with status 200, `raw` as it is, and all else with 404."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: dict[str, bytes] = {}
        self.raw: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.in_segments = False
        """Each answer comes in two parts, some time apart."""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()

    def answer(self, path: str) -> tuple[bytes, bool]:
        """The bytes, and whether the connection goes on."""
        self.asked[path] += 1
        if path in self.raw:
            return self.raw[path], False
        body, status = self.bodies.get(path, b""), b"200 OK" if path in self.bodies else b"404 Not Found"
        return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body), True


class _Connection(asyncio.Protocol):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, self._data = self._data.partition(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode("latin-1").partition("?")[0]
            answer, goes_on = self._answers.answer(path)
            if self._answers.in_segments:
                middle = max(1, len(answer) - 20)
                self._transport.write(answer[:middle])
                asyncio.get_running_loop().call_later(0.002, self._rest, answer[middle:], goes_on)
            else:
                self._rest(answer, goes_on)

    def _rest(self, data: bytes, goes_on: bool) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if not goes_on:
            self._transport.close()
