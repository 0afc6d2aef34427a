"""The gateway's side of the worker's HTTP API (`worker.wire`).

WorkerError
|-- WorkerRefused   the worker answered and did not start: another may, or the same with another epoch
+-- WorkerLost      no answer, a broken one, or a stream without its last frame: take the worker for dead
    +-- StaleConnection   a kept-alive connection was closed before an answer: the worker may be fine
"""

from __future__ import annotations

import ssl
import time
from typing import Any, Final, Self, TypeVar

import msgspec

from cache.records import WorkerState
from server.workers.connection import ConnectionBrokenError, ConnectionPool, HttpConnection, loop_time_timeout
from server.workers.networks import WorkerNetworks
from worker.wire import (
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
MAX_ANSWER_BYTES: Final = 256 * 1024
MAX_BUNDLE_BYTES: Final = 256 << 20
CONNECT_TIMEOUT_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 2.0
ACTION_TIMEOUT_S: Final = 10.0
BUNDLE_TIMEOUT_S: Final = 30.0
T = TypeVar("T")


class WorkerError(Exception):
    """A worker could not do what it was asked."""


class WorkerRefused(WorkerError):
    """The worker answered with an error before it started."""

    def __init__(self, status: int, failed: Failed) -> None:
        super().__init__(f"{status} {failed.code}: {failed.message}")
        self.status = status
        self.failed = failed
        self.retry_after_s = 1.0 if failed.retry_after_s is None else failed.retry_after_s


class WorkerLost(WorkerError):
    """The worker gave no answer, or a broken one."""


class StaleConnection(WorkerLost):
    """A kept-alive connection ended before an answer."""


class GenerateStream:
    """One POST /generate. `read` it to its last frame; leaving the context early aborts it."""

    __slots__ = ("_connection", "_pool", "_reader", "_request", "completed", "last_read_s", "url")

    def __init__(self, pool: ConnectionPool, url: str, request: GenerateRequest) -> None:
        self._pool = pool
        self.url = url
        self._request = request
        self._reader = FrameReader()
        self._connection: HttpConnection | None = None
        self.completed = False
        """Set it when the last frame was read: the connection is kept for other requests."""
        self.last_read_s = time.monotonic()

    async def __aenter__(self) -> Self:
        """Send the request. Raises WorkerRefused or WorkerLost."""
        try:
            connection = await self._pool.send(self.url, b"POST /generate", pack_request(self._request))
        except (OSError, ValueError) as error:  # ValueError: a URL that cannot be dialled
            raise WorkerLost(f"{self.url}: {type(error).__name__}: {error}") from error
        self._connection = connection
        try:
            status = await connection.head()
            if status != 200:
                raise WorkerRefused(status, await _refusal(status, connection))
        except ConnectionBrokenError as error:
            connection.close()
            kind = StaleConnection if error.stale else WorkerLost
            raise kind(f"{self.url}: {error}") from error
        except WorkerRefused:
            connection.release()
            raise
        except BaseException:
            connection.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._connection is None:
            return
        if self.completed:
            self._connection.release()
        else:
            self._connection.close()

    def give_up(self) -> None:
        """Raise WorkerLost in the task that reads. Called by the watch over silent streams."""
        if self._connection is not None:
            self._connection.fail("silent and unreachable")

    async def read(self) -> list[Frame]:
        """Return the frames that have arrived, at least one. Raises WorkerLost when the connection breaks or ends."""
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
    """Calls workers over keep-alive connections. Owned by the gateway, which closes it."""

    def __init__(
        self, token: str = "", networks: WorkerNetworks | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Show `token` to every worker, and dial none outside `networks`.

        `tls` checks the certificates of https workers; None: this machine's CAs do.
        """
        self._pool = ConnectionPool(connect_timeout_s=CONNECT_TIMEOUT_S, token=token, networks=networks, tls=tls)

    def close(self) -> None:
        self._pool.close()

    def generate(self, url: str, request: GenerateRequest) -> GenerateStream:
        return GenerateStream(self._pool, url, request)

    async def abort(self, url: str, request_id: str, choice: int | None) -> None:
        """End one choice, or the request. Raises WorkerLost."""
        body = msgspec.msgpack.encode({"request_id": request_id, "choice": choice})
        await self._exchange(url, b"POST /abort", PROBE_TIMEOUT_S, body)

    async def state(self, url: str) -> WorkerState:
        """Return the worker's member and load. Raises WorkerLost."""
        return _decoded(url, await self._exchange(url, b"GET /state", PROBE_TIMEOUT_S), WorkerState)

    async def bundle(self, url: str) -> TokenizerBundle:
        """Return the worker's tokenizer bundle. Raises WorkerLost."""
        data = await self._exchange(url, b"GET /bundle", BUNDLE_TIMEOUT_S, max_bytes=MAX_BUNDLE_BYTES)
        return _decoded(url, data, TokenizerBundle)

    async def act(self, url: str, action: str) -> dict[str, Any]:
        """Do an operator's action, "drain" or "purge", and return the worker's answer. Raises WorkerLost."""
        data = await self._exchange(url, b"POST /" + action.encode(), ACTION_TIMEOUT_S)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WorkerLost(f"{url}: {error}") from error

    async def is_alive(self, url: str) -> bool:
        """Return whether the worker answers that its engine lives."""
        try:
            await self._exchange(url, b"GET /health/live", PROBE_TIMEOUT_S)
        except WorkerLost:
            return False
        return True

    async def _exchange(
        self, url: str, call: bytes, timeout_s: float, body: bytes = b"", *, max_bytes: int = MAX_ANSWER_BYTES
    ) -> bytes:
        """Send a request and return the body of its answer. Raises WorkerLost."""
        try:
            status, answer = await loop_time_timeout(self._ask(url, call, body, max_bytes), timeout_s)
        except (ConnectionBrokenError, OSError, ValueError) as error:
            raise WorkerLost(f"{url}: {type(error).__name__}: {error}") from error
        if status >= 300:
            raise WorkerLost(f"{url}: status {status}")
        return answer

    async def _ask(self, url: str, call: bytes, body: bytes, max_bytes: int) -> tuple[int, bytes]:
        while True:
            connection = await self._pool.send(url, call, body)
            try:
                status, answer = await connection.head(), await connection.read_all(max_bytes)
            except BaseException as error:
                connection.close()
                if isinstance(error, ConnectionBrokenError) and error.stale:
                    continue  # it was closed while it was idle
                raise
            connection.release()
            return status, answer


def _decoded(url: str, data: bytes, kind: type[T]) -> T:
    try:
        return unpack(data, kind)
    except WireError as error:
        raise WorkerLost(f"{url}: {error}") from error


async def _refusal(status: int, connection: HttpConnection) -> Failed:
    """Return the Failed frame in the body of a refusal; a stand-in when the body is something else."""
    try:
        data = await loop_time_timeout(connection.read_all(MAX_REFUSAL_BYTES), PROBE_TIMEOUT_S)
        for frame in FrameReader().feed(data):
            if isinstance(frame, Failed):
                return frame
    except (WireError, ConnectionBrokenError, TimeoutError):
        pass
    return Failed(f"status_{status}", f"the worker answered {status}", status >= 429)
