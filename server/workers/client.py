"""The gateway's side of the worker's HTTP API (`worker.wire`).

WorkerError
|-- WorkerRefused   the worker answered and did not start: another may, or the same with another epoch
+-- WorkerLost      no answer, a broken one, or a stream without its last frame: take the worker for dead
    +-- StaleConnection   a kept-alive connection was closed before an answer: the worker may be fine
"""

from __future__ import annotations

import asyncio
import ssl
import time
from types import TracebackType
from typing import Final, Self, TypeVar

import aiohttp
import msgspec

from server.workers.connection import ConnectionBrokenError, ConnectionPool, HttpConnection
from server.workers.networks import WorkerNetworks
from server.workers.patience import patiently
from worker.wire import (
    CONTENT_TYPE,
    Failed,
    Frame,
    FrameReader,
    GenerateRequest,
    TokenizerBundle,
    WireError,
    pack_request,
    unpack,
)

MAX_REFUSAL_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 256 << 20
"""Of what is no stream: a tokenizer bundle is the largest."""
CONNECT_TIMEOUT_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 2.0
BUNDLE_TIMEOUT_S: Final = 30.0
T = TypeVar("T")
_HEADERS: Final = {"content-type": CONTENT_TYPE}


class WorkerError(Exception):
    """A worker could not do what it was asked."""


class WorkerRefused(WorkerError):
    def __init__(self, status: int, failed: Failed) -> None:
        super().__init__(f"{status} {failed.code}: {failed.message}")
        self.status = status
        self.failed = failed


class WorkerLost(WorkerError):
    pass


class StaleConnection(WorkerLost):
    pass


class GenerateStream:
    """One POST /generate. `read` it to its last frame; leaving the context early aborts it."""

    __slots__ = ("_connection", "_given_up", "_pool", "_reader", "_request", "completed", "last_read_s", "url")

    def __init__(self, pool: ConnectionPool, url: str, request: GenerateRequest) -> None:
        self._pool = pool
        self.url = url
        self._request = request
        self._reader = FrameReader()
        self._connection: HttpConnection | None = None
        self._given_up = False
        self.completed = False
        self.last_read_s = time.monotonic()

    async def __aenter__(self) -> Self:
        """Sends the request. Raises WorkerRefused or WorkerLost."""
        try:
            connection = await self._pool.post(self.url, pack_request(self._request))
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a URL that cannot be dialled
            raise WorkerLost(f"{self.url}: {type(error).__name__}: {error}") from error
        self._connection = connection
        try:
            status = await connection.head()
            if status != 200:
                raise WorkerRefused(status, await _refusal(status, connection))
        except ConnectionBrokenError as error:
            connection.close()
            kind = StaleConnection if error.reused and not self._given_up else WorkerLost
            raise kind(f"{self.url}: {error}") from error
        except WorkerRefused:
            self._pool.give_back(self.url, connection)
            raise
        except BaseException:
            connection.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is None:
            return
        if self.completed:
            self._pool.give_back(self.url, self._connection)
        else:
            self._connection.close()

    def complete(self) -> None:
        """The last frame was read: the connection may be used again."""
        self.completed = True

    def give_up(self) -> None:
        """Called by the watch over silent streams: whoever reads gets WorkerLost."""
        self._given_up = True
        if self._connection is not None:
            self._connection.fail("silent and unreachable")

    async def read(self) -> list[Frame]:
        """The frames that have arrived, at least one. Raises WorkerLost when the connection breaks or ends."""
        assert self._connection is not None, "not entered"
        frames: list[Frame] = []
        try:
            while not frames:
                data = await self._connection.read()
                if not data:
                    raise WorkerLost(f"{self.url}: the stream ended without its last frame")
                self.last_read_s = time.monotonic()
                frames.extend(self._reader.feed(data))
        except (WireError, ConnectionBrokenError) as error:
            raise WorkerLost(f"{self.url}: {error}") from error
        return frames


class WorkerClient:
    """Keep-alive connections to every worker. Owned by the gateway; `close` ends them."""

    def __init__(self, session: aiohttp.ClientSession, pool: ConnectionPool) -> None:
        self.session = session
        """For everything but /generate."""
        self._pool = pool

    @classmethod
    def open(cls, token: str = "", networks: WorkerNetworks | None = None, tls: ssl.SSLContext | None = None) -> Self:
        """Call inside a running loop. `token` is shown to every worker; none outside of `networks` is dialled.

        `tls`: how the certificates of https workers are checked; None: by the CAs of this machine.
        """
        networks = networks or WorkerNetworks()
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=20.0,
            ttl_dns_cache=5,
            socket_factory=networks.open_socket,
            ssl=True if tls is None else tls,
        )
        return cls(
            aiohttp.ClientSession(
                connector=connector,
                headers={"authorization": f"Bearer {token}"} if token else None,
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            ),
            ConnectionPool(connect_timeout_s=CONNECT_TIMEOUT_S, token=token, networks=networks, tls=tls),
        )

    async def close(self) -> None:
        self._pool.close()
        await self.session.close()

    def generate(self, url: str, request: GenerateRequest) -> GenerateStream:
        return GenerateStream(self._pool, url, request)

    async def abort(self, url: str, request_id: str, choice: int | None) -> None:
        """End one choice, or the request. Raises WorkerLost."""
        body = msgspec.msgpack.encode({"request_id": request_id, "choice": choice})
        await self._exchange("POST", url + "/abort", body, PROBE_TIMEOUT_S)

    async def bundle(self, url: str) -> TokenizerBundle:
        """Raises WorkerLost."""
        return _checked(url, await self._exchange("GET", url + "/bundle", None, BUNDLE_TIMEOUT_S), TokenizerBundle)

    async def is_alive(self, url: str) -> bool:
        """Whether the worker answers and says that its engine lives."""
        try:
            await self._exchange("GET", url + "/health/live", None, PROBE_TIMEOUT_S)
        except WorkerLost:
            return False
        return True

    async def _exchange(self, method: str, url: str, body: bytes | None, timeout_s: float) -> bytes:
        try:
            return await patiently(self._ask(method, url, body), timeout_s)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise WorkerLost(f"{url}: {type(error).__name__}: {error}") from error

    async def _ask(self, method: str, url: str, body: bytes | None) -> bytes:
        async with self.session.request(method, url, data=body, headers=_HEADERS, allow_redirects=False) as response:
            data = await read_bounded(response.content, MAX_ANSWER_BYTES)
            if response.status >= 300:
                raise WorkerLost(f"{url}: status {response.status}")
            return data


async def read_bounded(content: aiohttp.StreamReader, limit_bytes: int) -> bytes:
    """Read a whole body, in however many parts it comes. Raises WorkerLost past the limit."""
    parts: list[bytes] = []
    num_bytes = 0
    async for part in content.iter_any():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > limit_bytes:
            raise WorkerLost(f"the answer has more than {limit_bytes} bytes")
    return b"".join(parts)


def _checked(url: str, data: bytes, kind: type[T]) -> T:
    try:
        return unpack(data, kind)
    except WireError as error:
        raise WorkerLost(f"{url}: {error}") from error


async def _refusal(status: int, connection: HttpConnection) -> Failed:
    """The Failed frame in the body of a refusal; a stand-in when the body is something else."""
    data = b""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            while (part := await connection.read()) and len(data) < MAX_REFUSAL_BYTES:
                data += part
        for frame in FrameReader().feed(data):
            if isinstance(frame, Failed):
                return frame
    except (WireError, ConnectionBrokenError, TimeoutError):
        pass
    return Failed(f"status_{status}", f"the worker answered {status}", status >= 429)
