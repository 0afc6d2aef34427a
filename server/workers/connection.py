"""An HTTP/1.1 client for workers: keep-alive connections, each with one request and its streamed answer at a time.

With a cluster secret, a connection shows a token only after the worker has proven itself on it (`worker.common.proof`).

WorkerError
|-- WorkerRefused   the worker refused: another may accept, or the same one with another epoch
+-- WorkerLost      no answer, a broken one, or a stream without its last frame: treat the worker as dead
    |-- WorkerAbsent      no worker of this fleet: no proof, or an answer outside the protocol
    |   +-- WorkerElsewhere   a worker of the fleet that is registered under another URL
    +-- StaleConnection   a kept-alive connection was closed before an answer: the worker may be fine
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgpack

from server.workers.networks import WorkerNetworks
from worker.common.http_client import HttpConnection
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

MAX_IDLE_S: Final = 20.0  # workers close idle connections after 120 s
MAX_WORKERS: Final = 10_000  # bounds what forged entries can add
CONNECT_TIMEOUT_S: Final = 2.0  # a lost SYN packet is sent again after 1 s
PROOF_TIMEOUT_S: Final = 2.0  # a proof is one round trip
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
        self.idle: list[WorkerConnection] = []


class WorkerConnection(HttpConnection):
    """One connection to a worker."""

    def __init__(self, address: WorkerAddress) -> None:
        super().__init__(address.idle, MAX_IDLE_S)
        self._address = address
        self._authorization = b""

    def lost(self, why: str, *, is_stale: bool) -> WorkerLost:
        return (StaleConnection if is_stale else WorkerLost)(f"{self._address.url}: {why}")

    def ask(self, call: bytes, body: bytes) -> None:
        """Send a `call` such as b"POST /generate"."""
        self.send(call, self._address.headers + self._authorization, body)

    @property
    def is_proven(self) -> bool:
        """True once the worker has proven itself on this connection, which then carries the token."""
        return bool(self._authorization)

    async def prove(self, token: str) -> None:
        """Ask the worker for its proof. Raises WorkerLost, WorkerAbsent without a valid one."""
        url, challenge = self._address.url, new_challenge()
        self.ask(b"POST " + PROVE_PATH.encode(), challenge)
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

    async def send(self, url: str, call: bytes, body: bytes = b"", *, needs_proof: bool = True) -> WorkerConnection:
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
                connection = await loop_time_timeout(self._dial(address), CONNECT_TIMEOUT_S, WorkerConnection.close)
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
        connection.ask(call, body)
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

    async def _dial(self, address: WorkerAddress) -> WorkerConnection:
        loop = asyncio.get_running_loop()
        if self._networks.scheme == "https" and not address.tls:
            raise PermissionError(errno.EACCES, "it does not speak TLS, and --worker-ca asks for it")
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": address.host} if address.tls else {}
        refused: OSError | None = None
        for info in await self._networks.addresses(address.host, address.port):
            try:
                _, connection = await loop.create_connection(lambda: WorkerConnection(address), *info[4][:2], **tls)
                return connection
            except OSError as error:
                refused = error
        assert refused is not None
        raise refused
