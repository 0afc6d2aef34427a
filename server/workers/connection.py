"""An HTTP/1.1 client for workers: keep-alive connections, each with one request and its streamed answer at a time.

    idle -> send -> head -> read ... -> release -> idle          anything else closes the connection

With a cluster secret, a connection shows a token only after the worker has proven itself on it (`worker.common.proof`).

WorkerError
|-- WorkerRefused   the worker refused: another may accept, or the same one with another epoch
+-- WorkerLost      no answer, a broken one, or a stream without its last frame: treat the worker as dead
    |-- WorkerAbsent      no worker of this fleet: no proof, or an answer outside the protocol
    |   +-- WorkerElsewhere   a worker of the fleet that is registered under another URL
    +-- StaleConnection   a kept-alive connection was closed before an answer: the worker may be fine

A general client costs several times as much per request.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import msgpack

from server.workers.networks import WorkerNetworks
from worker.common.proof import (
    MAX_PROOF_BYTES,
    PROVE_PATH,
    Proof,
    instance_token,
    is_same_endpoint,
    new_challenge,
    verifies,
)
from worker.wire import CONTENT_TYPE, Failed, WireError, unpack

_LARGE_BYTES: Final = 64 * 1024  # a copy of a smaller body costs less than a second write
HIGH_WATER_BYTES: Final = 256 * 1024
"""At this many unread bytes the worker must wait, so that a slow client does not fill the gateway's memory."""
MAX_IDLE_S: Final = 20.0  # workers close idle connections after 120 s
MAX_IDLE_PER_WORKER: Final = 512  # more requests at once are rare
MAX_WORKERS: Final = 10_000  # bounds what forged entries can add
CONNECT_TIMEOUT_S: Final = 2.0  # a lost SYN packet is sent again after 1 s
PROOF_TIMEOUT_S: Final = 2.0  # a proof is one round trip
MAX_HEAD_BYTES: Final = 64 * 1024  # bounds what an unknown server's answer takes
LAST_CHUNK_TIMEOUT_S: Final = 2.0  # it follows the last frame at once
_TIMEOUT_SLICES: Final = 8  # a pause of the loop counts as one of them
T = TypeVar("T")


class WorkerError(Exception):
    """A worker did not carry out a request."""


class WorkerRefused(WorkerError):
    """The worker answered with an error before it started."""

    def __init__(self, status: int, failed: Failed) -> None:
        super().__init__(f"{status} {failed.code}: {failed.message}")
        self.status = status
        self.failed = failed
        self.retry_after_s = 1.0 if failed.retry_after_s is None else failed.retry_after_s


class WorkerLost(WorkerError):
    """The worker gave no answer, or a broken one."""


class WorkerAbsent(WorkerLost):
    """No worker of this fleet is at the address, so none has the request."""


class WorkerElsewhere(WorkerAbsent):
    """A worker of the fleet answers there, with a proof for another URL, `proven_url`."""

    def __init__(self, url: str, proven_url: str) -> None:
        super().__init__(f"{url}: the worker there is registered as {proven_url}")
        self.proven_url = proven_url


class StaleConnection(WorkerLost):
    """A kept-alive connection ended before an answer."""


async def loop_time_timeout(
    work: Coroutine[Any, Any, T], timeout_s: float, discard: Callable[[T], object] = lambda result: None
) -> T:
    """Return the result of `work`, or raise TimeoutError. Only time in which this event loop has run counts.

    `asyncio.timeout` compares clocks, so a busy or stopped loop would time out although the answer is in the socket.
    `discard` gets a result that arrives at the timeout or as the caller is cancelled.
    """
    task = asyncio.create_task(work, context=Context())  # else an idle connection would keep the request's context
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


class WorkerAddress:
    """A worker's parsed URL, the headers of every request to it, and its idle connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self.headers = f"host: {parts.netloc}\r\ncontent-type: {CONTENT_TYPE}\r\n".encode()
        self.idle: list[HttpConnection] = []


# Why a connection for each stream: all of a worker's streams in one took 7 us of a token instead of 10, in a
# prototype. Then a client that reads slowly stops the streams of others, unless each has a window of its own. TCP has
# one already.
class HttpConnection(asyncio.Protocol):
    """One connection, with at most one request at a time, read by one task."""

    def __init__(self, address: WorkerAddress) -> None:
        self._address = address
        self._authorization = b""
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

    def send(self, call: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._cancel_timer()
        self._status, self._complete, self._released, self._num_head_bytes = None, False, False, 0
        headers = self._address.headers + self._authorization
        head = b"%b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (call, headers, len(body))
        if len(body) <= _LARGE_BYTES:
            self._transport.write(head + body)
        else:  # without a copy
            self._transport.write(head)
            self._transport.write(body)

    @property
    def is_proven(self) -> bool:
        """True once the worker has proven itself on this connection, which then carries the token."""
        return bool(self._authorization)

    async def prove(self, token: str) -> None:
        """Ask the worker for its proof. Raises WorkerLost, WorkerAbsent without a valid one."""
        url, challenge = self._address.url, new_challenge()
        self.send(b"POST " + PROVE_PATH.encode(), challenge)
        status, answer = await self.head(), await self.read_all(MAX_PROOF_BYTES)
        if status != 200:
            raise WorkerAbsent(f"{url}: asked to prove that it has the cluster secret, it answers status {status}")
        try:
            proof = unpack(answer, Proof)
            if not verifies(proof, token, challenge):
                raise WorkerAbsent(f"{url}: its proof is not made with this gateway's cluster secret")
            if not is_same_endpoint(proof.url, url):
                raise WorkerElsewhere(url, proof.url)
        except (WireError, ValueError) as error:
            raise WorkerAbsent(f"{url}: asked to prove that it has the cluster secret: {error}") from error
        if not self.usable:
            raise WorkerAbsent(f"{url}: it closes the connection after its proof")
        self._authorization = f"authorization: Bearer {instance_token(token, proof.instance)}\r\n".encode()

    async def head(self) -> int:
        """Return the answer's status. Raises WorkerLost."""
        while self._status is None:
            await self._wait()
        return self._status

    async def read(self) -> bytes:
        """Return the next bytes of the body, b"" at its end. Raises WorkerLost."""
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

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the whole body. Raises WorkerLost, also when it is longer than `max_bytes`."""
        body = bytearray()
        while part := await self.read():
            body += part
            if len(body) > max_bytes:
                raise WorkerLost(f"{self._address.url}: the answer has more than {max_bytes} bytes")
        return bytes(body)

    def release(self) -> None:
        """Return it to the pool once the answer is complete; unread bytes are discarded."""
        self._parts, self._size = [], 0
        self._released = True
        if self._complete:
            self._rest()
        else:
            self._timer = self._loop.call_later(LAST_CHUNK_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Close at once, which aborts the request at the worker."""
        self.fail("closed")
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str) -> None:
        """Raise WorkerLost in the task that reads."""
        self._broken = self._broken or why
        self._wake()

    @property
    def usable(self) -> bool:
        return self._broken is None and self._complete

    def _rest(self) -> None:
        """Become idle, for at most `MAX_IDLE_S`."""
        self._cancel_timer()
        if not self.usable or len(self._address.idle) >= MAX_IDLE_PER_WORKER:
            self.close()
            return
        self._reused = True
        self._address.idle.append(self)
        self._timer = self._loop.call_later(MAX_IDLE_S, self.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self in self._address.idle:
            self._address.idle.remove(self)
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
        self._parts.append(body)
        self._size += len(body)
        if self._size > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._complete = True
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self._broken = self._broken or "the worker closes it"
        self._wake()
        if self._released:
            self._rest()

    async def _wait(self) -> None:
        if self._broken is not None:
            kind = StaleConnection if self._stale else WorkerLost
            raise kind(f"{self._address.url}: {self._broken}")
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ConnectionPool:
    """Opens connections to workers and keeps them. Owned by the event loop."""

    def __init__(
        self, token: str = "", networks: WorkerNetworks | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """`token`: the fleet's, of which each worker must give a proof. No address outside `networks` is dialled.

        `tls` checks the certificates of https workers; None: with this machine's CAs.
        """
        self._token = token
        self._networks = networks or WorkerNetworks()
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._addresses: dict[str, WorkerAddress] = {}
        self.unpackers: list[msgpack.Unpacker] = []
        """A spare unpacker for streams: at most one, without bytes."""

    async def send(self, url: str, call: bytes, body: bytes = b"", *, needs_proof: bool = True) -> HttpConnection:
        """Send a `call` such as b"POST /generate" to a worker. `needs_proof`: only after the worker has proven itself.

        Raises WorkerLost, or WorkerAbsent if no worker of this fleet is there.
        """
        try:
            address = self._address(url)
            while address.idle:
                connection = address.idle.pop()
                if connection.usable:
                    break
            else:
                connection = await loop_time_timeout(self._dial(address), CONNECT_TIMEOUT_S, HttpConnection.close)
        except (OSError, ValueError) as error:  # ValueError: a URL that cannot be dialled
            raise WorkerAbsent(f"{url}: {type(error).__name__}: {error}") from error
        if self._token and needs_proof and not connection.is_proven:
            try:
                await loop_time_timeout(connection.prove(self._token), PROOF_TIMEOUT_S)
            except TimeoutError as error:
                connection.close()
                raise WorkerAbsent(f"{url}: no proof within {PROOF_TIMEOUT_S:.0f} s") from error
            except BaseException:
                connection.close()
                raise
        connection.send(call, body)
        return connection

    def _address(self, url: str) -> WorkerAddress:
        """Raises ValueError."""
        address = self._addresses.get(url)
        if address is None:
            if len(self._addresses) >= MAX_WORKERS:
                self._addresses.clear()  # idle connections end by themselves
            address = self._addresses[url] = WorkerAddress(url)
        return address

    def close(self) -> None:
        """Close every idle connection."""
        for address in self._addresses.values():
            while address.idle:
                address.idle.pop().close()

    async def _dial(self, address: WorkerAddress) -> HttpConnection:
        loop = asyncio.get_running_loop()
        if self._networks.scheme == "https" and not address.tls:
            raise PermissionError(errno.EACCES, "it does not speak TLS, and --worker-ca asks for it")
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": address.host} if address.tls else {}
        refused: OSError | None = None
        for info in await self._networks.addresses(address.host, address.port):
            try:
                _, connection = await loop.create_connection(lambda: HttpConnection(address), *info[4][:2], **tls)
                return connection
            except OSError as error:
                refused = error
        assert refused is not None
        raise refused
