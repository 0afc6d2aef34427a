"""The client's side of a connection by HTTP/1.1, for the gateway's workers and for an adapter's engine.

    idle -> send -> head -> read ... -> release -> idle          anything else closes the connection

A general client costs several times as much per request, and per part of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Self, cast

import httptools

LARGE_BYTES: Final = 64 * 1024  # a copy of a smaller body costs less than a second write
HIGH_WATER_BYTES: Final = 256 * 1024
"""At this many unread bytes the server must wait, so that a slow reader does not fill this process's memory."""
MAX_IDLE: Final = 512  # connections to one server: more requests at once are rare
MAX_HEAD_BYTES: Final = 64 * 1024  # bounds what an unknown server's answer takes
LAST_CHUNK_TIMEOUT_S: Final = 2.0  # it follows the last part at once


# Why a connection for each stream: all of a worker's streams in one took 7 us of a token instead of 10, in a
# prototype. Then a client that reads slowly stops the streams of others, unless each has a window of its own. TCP has
# one already.
class HttpConnection(asyncio.Protocol):
    """One connection, with at most one request at a time, read by one task or handed to a function.

    A subclass names its errors: `lost` returns what a reader raises when the connection has broken.
    """

    def __init__(self, idle: list[Any], max_idle_s: float) -> None:
        """`idle`: the connections to the same server that wait for a request, each for `max_idle_s`."""
        self._idle = idle
        self._max_idle_s = max_idle_s
        self._num_head_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        """None once the connection has ended."""
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._status: int | None = None
        self._complete = True
        self._released = False
        self._reused = False
        self._paused = False
        self._broken: str | None = None
        self._stale = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._take: Callable[[bytes], None] | None = None
        self._raised: Exception | None = None
        """The error that `_take` has raised."""

    def lost(self, why: str, *, is_stale: bool) -> Exception:
        """Return the error. `is_stale`: a kept-alive connection was closed before an answer."""
        raise NotImplementedError

    def send(self, call: bytes, headers: bytes, body: bytes) -> None:
        """Send a `call` such as b"POST /generate", whole lines of `headers`, and the body."""
        assert self._transport is not None
        self._cancel_timer()
        self._status, self._complete, self._released, self._num_head_bytes = None, False, False, 0
        head = b"%b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (call, headers, len(body))
        if len(body) <= LARGE_BYTES:
            self._transport.write(head + body)
        else:  # without a copy
            self._transport.write(head)
            self._transport.write(body)

    async def head(self) -> int:
        """Return the answer's status. Raises the error of `lost`, as all readers do."""
        while self._status is None:
            await self._wait()
        return self._status

    async def read(self) -> bytes:
        """Return the next bytes of the body, b"" at its end."""
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

    async def read_start(self, max_bytes: int) -> bytes:
        """Return the whole body; of one that is longer than the bound, a little more than that."""
        body = bytearray()
        while len(body) <= max_bytes and (part := await self.read()):
            body += part
        return bytes(body)

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the whole body. One that is longer than `max_bytes` is an error, too."""
        if len(body := await self.read_start(max_bytes)) > max_bytes:
            raise self.lost(f"the answer has more than {max_bytes} bytes", is_stale=False)
        return body

    async def pass_on(self, take: Callable[[bytes], None]) -> None:
        """Hand the rest of the body to `take` as it arrives. Raises what `take` raises, which ends the connection."""
        self._take = take
        while self._parts or not self._complete:
            if self._parts:
                take(await self.read())
            else:
                await self._wait()
        if self._raised is not None:
            raise self._raised
        self._take = None

    def __enter__(self) -> Self:
        """Release the connection after the block, or close it if the block raises."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.release()
        else:
            self.close()

    def release(self) -> None:
        """Return it to the pool once the answer is complete; unread bytes are discarded."""
        self._parts, self._size = [], 0
        self._released = True
        if self._complete:
            self._rest()
        else:
            self._timer = self._loop.call_later(LAST_CHUNK_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Close at once, which aborts the request at the server."""
        self.fail("closed")
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str) -> None:
        """Raise the error of `lost` in the task that reads."""
        self._broken = self._broken or why
        self._wake()

    @property
    def usable(self) -> bool:
        return self._broken is None and self._complete

    def _rest(self) -> None:
        """Become idle."""
        self._cancel_timer()
        if not self.usable or self._paused or len(self._idle) >= MAX_IDLE:  # paused, it would read no answer
            self.close()
            return
        self._reused = True
        self._idle.append(self)
        self._timer = self._loop.call_later(self._max_idle_s, self.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self in self._idle:
            self._idle.remove(self)
        self._stale = self._broken is None and self._reused and self._status is None
        self.fail("connection lost" if exc is None else f"{type(exc).__name__}: {exc}")
        self._parser = None  # it refers to this object and its buffers

    def data_received(self, data: bytes) -> None:
        if self._complete or self._parser is None:
            self.close()  # an answer without a request
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(f"not HTTP: {error}")
            self.close()
        if self._status is None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.fail(f"a head of more than {MAX_HEAD_BYTES} bytes")
                self.close()

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self._take is not None:
            self._hand_over(body, self._take)
            return
        self._parts.append(body)
        self._size += len(body)
        if self._size > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _hand_over(self, body: bytes, take: Callable[[bytes], None]) -> None:
        if self._raised is None:
            try:
                take(body)
            except Exception as error:  # of the reader, which raises it
                self._raised = error
                self.close()

    def on_message_complete(self) -> None:
        self._complete = True
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self._broken = self._broken or "the server closes it"
        self._wake()
        if self._released:
            self._rest()

    async def _wait(self) -> None:
        if self._broken is not None:
            raise self._raised or self.lost(self._broken, is_stale=self._stale)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
