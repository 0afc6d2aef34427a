"""The client of other workers, for the messages of `worker.contracts.exchange`.

http.client, not aiohttp: a fetch thread reads each record straight into the buffer that it copies to the pool. In the
event loop, megabytes of blocks would delay the streams. A socket's timeout counts from each receive. So whoever waits
for a peer also has a deadline, and interrupts it then.

A hash is a capability: only who has the tenant's salt can compute it. Only workers with the fleet's secret may ask, and
only their blocks are used: the MAC of each record proves the secret. A request carries a token of the peer's epoch
(`worker.common.proof`). Another process at the address of a worker that has gone cannot use the token elsewhere.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Final, TypeVar
from urllib.parse import urlsplit

from cache.block_record import HEADER_BYTES, RecordFormat
from cache.types import ChainLink
from worker.common.proof import EPOCH_HEADER, epoch_token
from worker.contracts.exchange import (
    FRAME_HEAD_BYTES,
    MAX_BLOCKS,
    MAX_CHAINS_BYTES,
    BlocksWanted,
    ChainsWanted,
    Handover,
    frame_head,
)
from worker.wire import CONTENT_TYPE, pack, unpack

_CONNECT_TIMEOUT_S: Final = 1.0  # a machine that has gone must not keep a fetch thread waiting
_FETCH_TIMEOUT_S: Final = 5.0  # to send a request for blocks, and for each receive

T = TypeVar("T")


class FetchError(Exception):
    """The peer does not send blocks."""


class PeerClient:
    """Asks other workers for their chains and blocks, on the thread that calls."""

    def __init__(self, record: RecordFormat, token: str, tls: ssl.SSLContext | None = None) -> None:
        """`token`: the `gateway_token` of the fleet."""
        self._record = record
        self._token = token
        self._tls = tls

    def ask(self, url: str, epoch: str, message: ChainsWanted | Handover, answer_type: type[T], timeout_s: float) -> T:
        """Send a message and return the answer. Raises FetchError, OSError, HTTPException or ValueError."""
        path = "/adopt" if isinstance(message, Handover) else "/chains"
        with self._posted(url, epoch, path, pack(message), timeout_s) as peer:
            timer = threading.Timer(timeout_s, peer.interrupt)
            timer.start()
            try:
                return unpack(peer.answer().read(MAX_CHAINS_BYTES), answer_type)
            finally:
                timer.cancel()

    @contextmanager
    def fetching(
        self, url: str, epoch: str, links: Sequence[ChainLink], *, background: bool = False
    ) -> Iterator[PeerStream]:
        """Ask the worker at `url` for these blocks. Raises FetchError, OSError or HTTPException, as `read` does."""
        hashes = b"".join(link.block_hash for link in links[:MAX_BLOCKS])
        wanted = BlocksWanted(epoch, self._record.fingerprint, links[0].parent, links[0].depth, hashes, background)
        with self._posted(url, epoch, "/blocks", pack(wanted), _FETCH_TIMEOUT_S) as peer:
            yield peer

    @contextmanager
    def _posted(self, url: str, epoch: str, path: str, body: bytes, timeout_s: float) -> Iterator[PeerStream]:
        headers = {"content-type": CONTENT_TYPE}
        if self._token:
            headers |= {"authorization": f"Bearer {epoch_token(self._token, epoch)}", EPOCH_HEADER: epoch}
        with closing(self._connection(url)) as connection:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.request("POST", path, body, headers)
            with closing(PeerStream(connection, self._record)) as stream:
                yield stream

    def _connection(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise FetchError(f"no URL of a worker: {url!r:.200}")
        if parts.scheme == "http" and self._tls is not None:
            raise FetchError(f"--worker-ca asks for TLS, and {url!r:.200} has none")
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_CONNECT_TIMEOUT_S)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_CONNECT_TIMEOUT_S, context=self._tls)


class PeerStream:
    """The answer of a peer. For `/blocks`, it is a `worker.kv_transfer.fetches.BlockReader`."""

    def __init__(self, connection: http.client.HTTPConnection, record: RecordFormat) -> None:
        """The request is sent."""
        self._connection = connection
        self._sock: socket.socket = connection.sock
        self._record = record
        self._answer: http.client.HTTPResponse | None = None
        self._head = memoryview(bytearray(FRAME_HEAD_BYTES + HEADER_BYTES))
        self._expected = frame_head(record.payload_bytes)

    def answer(self) -> http.client.HTTPResponse:
        """Return the answer, after its head. Raises FetchError unless the peer agrees, OSError or HTTPException."""
        if self._answer is None:
            self._answer = self._connection.getresponse()
            if self._answer.status != 200:
                raise FetchError(f"{self._connection.host}:{self._connection.port} answered {self._answer.status}")
        return self._answer

    def read(self, link: ChainLink, payload: memoryview, use: Callable[[memoryview], object]) -> bool:
        """Read the next record. Raises FetchError, OSError or HTTPException."""
        answer, head = self.answer(), self._head
        if answer.readinto(head) < len(head) or answer.readinto(payload) < len(payload):
            return False
        header = bytes(head[FRAME_HEAD_BYTES:])
        is_exact = head[:FRAME_HEAD_BYTES] == self._expected and self._record.verifies(header, link, payload)
        if is_exact:
            use(payload)
        return is_exact

    def interrupt(self) -> None:
        """Make a waiting read fail at once. Any thread."""
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not `SSLSocket.shutdown`, which waits for the reader

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
