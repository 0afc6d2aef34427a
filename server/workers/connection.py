"""The hot path's HTTP/1.1 client: keep-alive connections to workers, and no more than a POST and its streamed answer.

    idle --take--> [send, head, read ...] --give back--> idle          anything else: closed

A general client costs several times as much a request; everything that is not hot goes through aiohttp.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools

from server.workers.networks import WorkerNetworks
from server.workers.patience import patiently

HIGH_WATER_BYTES: Final = 256 * 1024
"""Unread bytes at which the worker is told to wait: a slow client shall not fill our memory."""
MAX_IDLE_S: Final = 20.0
MAX_IDLE_PER_WORKER: Final = 512
LAST_CHUNK_TIMEOUT_S: Final = 2.0


class ConnectionBrokenError(Exception):
    """The connection ended, or what came was no HTTP. `reused`: before any answer, on a kept-alive connection."""

    def __init__(self, message: str, *, reused: bool = False) -> None:
        super().__init__(message)
        self.reused = reused


class HttpConnection(asyncio.Protocol):
    """One connection and at most one request on it. One task reads."""

    __slots__ = (
        "_broken",
        "_complete",
        "_give_back",
        "_idle_timer",
        "_parser",
        "_parts",
        "_paused",
        "_reused",
        "_size",
        "_status",
        "_transport",
        "_waiter",
    )

    def __init__(self) -> None:
        self._give_back: Callable[[HttpConnection], None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._size = 0
        self._status: int | None = None
        self._complete = True
        self._paused = False
        self._reused = False
        self._broken: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    # --- the request ------------------------------------------------------------------------------------------------

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._status, self._complete = None, False
        self._transport.write(request)

    async def head(self) -> int:
        """The answer's status. Raises ConnectionBrokenError."""
        while self._status is None:
            await self._wait()
        return self._status

    async def read(self) -> bytes:
        """What has come of the body, b"" at its end. Raises ConnectionBrokenError."""
        while not self._parts:
            if self._complete:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._size = [], 0
        if self._paused:
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        return data

    def release(self, give_back: Callable[[HttpConnection], None], loop: asyncio.AbstractEventLoop) -> None:
        """Nothing more is to be read: keep the connection once its answer has quite ended."""
        self._parts, self._size = [], 0
        if self._complete:
            give_back(self)
        else:
            self._give_back = give_back
            self._idle_timer = loop.call_later(LAST_CHUNK_TIMEOUT_S, self.close)

    def close(self) -> None:
        """At once: the worker takes it for an abort."""
        self.fail("closed")
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str) -> None:
        """Whoever reads gets ConnectionBrokenError."""
        self._broken = self._broken or why
        self._wake()

    @property
    def usable(self) -> bool:
        return self._broken is None and self._complete

    def rest(self, loop: asyncio.AbstractEventLoop, expire: Callable[[HttpConnection], None]) -> None:
        """Idle from now on, for a while."""
        self._reused = True
        self._idle_timer = loop.call_later(MAX_IDLE_S, expire, self)

    # --- the protocol -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.fail("connection lost" if exc is None else f"{type(exc).__name__}: {exc}")

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self.close()  # an answer that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not HTTP: {error}")
            self.close()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)
        if self._size > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._complete = True
        if not self._parser.should_keep_alive():
            self._broken = self._broken or "the worker closes it"
        self._wake()
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            give_back(self)

    async def _wait(self) -> None:
        if self._broken is not None:
            raise ConnectionBrokenError(self._broken, reused=self._reused and self._status is None)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Target:
    """A worker's address, taken apart once."""

    __slots__ = ("head", "host", "port", "tls")

    def __init__(self, url: str, token: str = "") -> None:
        parts = urlsplit(url)
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self.head = (
            f"POST {parts.path}/generate HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/msgpack\r\n"
            + (f"authorization: Bearer {token}\r\n" if token else "")
            + "content-length: "
        ).encode()


class ConnectionPool:
    """Idle connections by worker. Owned by the event loop; `close` ends them all."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        token: str = "",
        networks: WorkerNetworks | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._token = token
        self._networks = networks or WorkerNetworks()
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._idle: defaultdict[str, list[HttpConnection]] = defaultdict(list)
        self._targets: dict[str, Target] = {}

    async def post(self, url: str, body: bytes) -> HttpConnection:
        """Send `body` to the worker's /generate. Raises OSError or TimeoutError when there is no connection."""
        target = self._targets.get(url)
        if target is None:
            target = self._targets[url] = Target(url, self._token)
        connection = self._take(url) or await self._connect(target)
        connection.send(b"%b%d\r\n\r\n%b" % (target.head, len(body), body))
        return connection

    def give_back(self, url: str, connection: HttpConnection) -> None:
        """The whole answer has been read, or all of it that matters."""
        connection.release(lambda rested: self._put(url, rested), asyncio.get_running_loop())

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in list(connections):
                connection.close()
        self._idle.clear()

    def _take(self, url: str) -> HttpConnection | None:
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    def _put(self, url: str, connection: HttpConnection) -> None:
        idle = self._idle[url]
        if not connection.usable or len(idle) >= MAX_IDLE_PER_WORKER:
            connection.close()
            return
        connection.rest(asyncio.get_running_loop(), lambda old: self._expire(url, old))
        idle.append(connection)

    def _expire(self, url: str, connection: HttpConnection) -> None:
        if connection in self._idle[url]:
            self._idle[url].remove(connection)
        if not self._idle[url]:
            del self._idle[url]
            self._targets.pop(url, None)
        connection.close()

    async def _connect(self, target: Target) -> HttpConnection:
        return await patiently(self._dial(target), self._connect_timeout_s, HttpConnection.close)

    async def _dial(self, target: Target) -> HttpConnection:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": target.host} if target.tls else {}
        refused: OSError | None = None
        for info in await self._networks.addresses(target.host, target.port):
            try:
                _, connection = await loop.create_connection(HttpConnection, *info[4][:2], **tls)
                return connection
            except OSError as error:
                refused = error
        assert refused is not None
        raise refused
