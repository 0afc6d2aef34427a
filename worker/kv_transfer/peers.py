"""The client of other workers, for the messages of `worker.contracts.exchange`.

http.client, not aiohttp: a fetch thread reads each record straight into the buffer that it copies to the pool. In the
event loop, megabytes of blocks would delay the streams.

A hash is a capability: only who has the tenant's salt can compute it. Only workers with the fleet's secret may ask, and
only their blocks are used: the MAC of each record proves the secret. A request carries a token of the peer's epoch
(`worker.common.proof`). Another process at the address of a worker that has gone cannot use the token elsewhere.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar
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
_SEND_TIMEOUT_S: Final = 5.0
_READ_TIMEOUT_S: Final = 5.0
"""For the head of an answer, and for each record: so a slow peer cannot block the thread."""

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
        with self._posted(url, epoch, path, pack(message)) as answer:
            answer.begin_within(url, timeout_s)
            return unpack(answer.read(MAX_CHAINS_BYTES), answer_type)

    @contextmanager
    def fetching(
        self, url: str, epoch: str, links: Sequence[ChainLink], *, background: bool = False
    ) -> Iterator[PeerStream]:
        """Ask the worker at `url` for these blocks. Raises FetchError, OSError or HTTPException, as `read` does."""
        hashes = b"".join(link.block_hash for link in links[:MAX_BLOCKS])
        wanted = BlocksWanted(epoch, self._record.fingerprint, links[0].parent, links[0].depth, hashes, background)
        with self._posted(url, epoch, "/blocks", pack(wanted)) as answer:
            yield PeerStream(url, answer, self._record)

    @contextmanager
    def _posted(self, url: str, epoch: str, path: str, body: bytes) -> Iterator[_Answer]:
        headers = {"content-type": CONTENT_TYPE}
        if self._token:
            headers |= {"authorization": f"Bearer {epoch_token(self._token, epoch)}", EPOCH_HEADER: epoch}
        connection = self._connection(url)
        try:
            connection.connect()
            connection.sock.settimeout(_SEND_TIMEOUT_S)  # for the whole body
            connection.request("POST", path, body, headers)
            with _Answer(connection.sock) as answer:
                yield answer
        finally:
            connection.close()

    def _connection(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise FetchError(f"no URL of a worker: {url!r:.200}")
        if parts.scheme == "http" and self._tls is not None:
            raise FetchError(f"--worker-ca asks for TLS, and {url!r:.200} has none")
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_CONNECT_TIMEOUT_S)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_CONNECT_TIMEOUT_S, context=self._tls)


class _TimedSocket(io.RawIOBase):
    """A socket's bytes until `end_s`, however they come: a timeout of the socket counts from each receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.end_s: float
        """Set before a read, on the monotonic clock."""

    def makefile(self, *_: Any) -> io.BufferedReader:
        """Return what `http.client` reads."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError."""
        left_s = self.end_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("a peer takes too long")
        self._sock.settimeout(left_s)
        return self._sock.recv_into(buffer)

    def interrupt(self) -> None:
        with suppress(OSError):
            # Not `SSLSocket.shutdown`, which would wait for the reader.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


class _Answer(http.client.HTTPResponse):
    """An answer of which each part has a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self.timed = _TimedSocket(sock)
        super().__init__(self.timed, method="POST")  # type: ignore[arg-type]

    def begin_within(self, url: str, timeout_s: float) -> None:
        """Read the head. Raises FetchError unless the peer agrees."""
        self.timed.end_s = time.monotonic() + timeout_s
        self.begin()
        if self.status != 200:
            raise FetchError(f"{url} answered {self.status}")


class PeerStream:
    """A `worker.kv_transfer.fetches.BlockReader` over the answer of a peer."""

    def __init__(self, url: str, answer: _Answer, record: RecordFormat) -> None:
        self._url = url
        self._answer = answer
        self._record = record
        self._has_begun = False
        self._head = bytearray(FRAME_HEAD_BYTES + HEADER_BYTES)
        self._expected = frame_head(record.payload_bytes)

    def read(self, link: ChainLink, payload: memoryview, use: Callable[[memoryview], object]) -> bool:
        """Read the next record, after the head of the answer. Raises FetchError, OSError or HTTPException."""
        if not self._has_begun:
            self._answer.begin_within(self._url, _READ_TIMEOUT_S)
            self._has_begun = True
        self._answer.timed.end_s = time.monotonic() + _READ_TIMEOUT_S
        head = memoryview(self._head)
        if not self._fill(head) or not self._fill(payload):
            return False
        header = bytes(head[FRAME_HEAD_BYTES:])
        is_exact = head[:FRAME_HEAD_BYTES] == self._expected and self._record.verifies(header, link, payload)
        if is_exact:
            use(payload)
        return is_exact

    def interrupt(self) -> None:
        """Make a waiting read fail at once. Any thread."""
        self._answer.timed.interrupt()

    def _fill(self, buffer: memoryview) -> bool:
        """Read until `buffer` is full. False: the stream has ended. Raises TimeoutError, OSError or HTTPException."""
        num_read = 0
        while num_read < len(buffer):
            data = self._answer.read1(len(buffer) - num_read)  # what one receive gives: `readinto` waits for all
            if not data:
                return False
            buffer[num_read : num_read + len(data)] = data
            num_read += len(data)
        return True
