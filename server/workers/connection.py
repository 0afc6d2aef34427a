"""The hot path's HTTP/1.1 client: keep-alive connections to workers, for a POST and its streamed answer.

    idle -> send -> head -> read ... -> give back -> idle          anything else closes the connection

A general client costs several times as much a request; everything that is not hot goes through aiohttp.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from server.workers.networks import WorkerNetworks

HIGH_WATER_BYTES: Final = 256 * 1024
"""With so many unread bytes the worker must wait: a slow client shall not fill our memory."""
MAX_IDLE_S: Final = 20.0
MAX_IDLE_PER_WORKER: Final = 512
LAST_CHUNK_TIMEOUT_S: Final = 2.0
_TIMEOUT_SLICES: Final = 8
T = TypeVar("T")


class ConnectionBrokenError(Exception):
    """The connection ended, or the answer is not HTTP. `reused`: a kept-alive one ended before any answer."""

    def __init__(self, message: str, *, reused: bool = False) -> None:
        super().__init__(message)
        self.reused = reused


async def loop_time_timeout(
    work: Coroutine[Any, Any, T], timeout_s: float, discard: Callable[[T], object] = lambda result: None
) -> T:
    """Return the result of `work`, or raise TimeoutError. Only time counts during which this event loop has run.

    `asyncio.timeout` compares clocks: a loop that was busy or stopped for longer finds the time over, although the
    answer is in the socket. `discard` gets a result that comes as the time ends or as the caller is cancelled.
    """
    task = asyncio.create_task(work)
    is_taken = False
    try:
        for _ in range(_TIMEOUT_SLICES):
            done, _ = await asyncio.wait((task,), timeout=timeout_s / _TIMEOUT_SLICES)
            if done:
                is_taken = True
                return task.result()
    finally:
        if not is_taken:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled() and task.exception() is None:
                discard(task.result())
    raise TimeoutError


class HttpConnection(asyncio.Protocol):
    """One connection, with at most one request at a time, read by one task."""

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
        """Return the answer's status. Raises ConnectionBrokenError."""
        while self._status is None:
            await self._wait()
        return self._status

    async def read(self) -> bytes:
        """Return what has arrived of the body, b"" at its end. Raises ConnectionBrokenError."""
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
        """Call `give_back` when the answer has ended: the caller reads no more of it."""
        self._parts, self._size = [], 0
        if self._complete:
            give_back(self)
        else:
            self._give_back = give_back
            self._idle_timer = loop.call_later(LAST_CHUNK_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Close at once: the worker takes it for an abort."""
        self.fail("closed")
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str) -> None:
        """Raise ConnectionBrokenError in the task that reads."""
        self._broken = self._broken or why
        self._wake()

    @property
    def usable(self) -> bool:
        return self._broken is None and self._complete

    def rest(self, loop: asyncio.AbstractEventLoop, expire: Callable[[HttpConnection], None]) -> None:
        """Become idle, and call `expire` after a while."""
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
            self.close()  # an answer without a request
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


class WorkerAddress:
    """A worker's parsed URL, and the head of every request to it up to its content length."""

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
    """Idle connections by worker. Owned by the event loop."""

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
        self._addresses: dict[str, WorkerAddress] = {}

    async def post(self, url: str, body: bytes) -> HttpConnection:
        """Send `body` to the worker's /generate. Raises OSError or TimeoutError when there is no connection."""
        address = self._addresses.get(url)
        if address is None:
            address = self._addresses[url] = WorkerAddress(url, self._token)
        connection = self._take(url)
        if connection is None:
            connection = await loop_time_timeout(self._dial(address), self._connect_timeout_s, HttpConnection.close)
        connection.send(b"%b%d\r\n\r\n%b" % (address.head, len(body), body))
        return connection

    def give_back(self, url: str, connection: HttpConnection) -> None:
        """Take a connection whose answer has been read, or all of it that matters."""
        connection.release(lambda released: self._put(url, released), asyncio.get_running_loop())

    def close(self) -> None:
        """Close every idle connection."""
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
            self._addresses.pop(url, None)
        connection.close()

    async def _dial(self, address: WorkerAddress) -> HttpConnection:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": address.host} if address.tls else {}
        refused: OSError | None = None
        for info in await self._networks.addresses(address.host, address.port):
            try:
                _, connection = await loop.create_connection(HttpConnection, *info[4][:2], **tls)
                return connection
            except OSError as error:
                refused = error
        assert refused is not None
        raise refused
