"""The bytes of an answer: its head with its first part, HTTP/1.0 without chunks, and probes before it.

A client that has closed its connection and one that has only shut its sending side look alike: both send a FIN.
Only a write shows the difference: the first one answers it with a reset. So a probe writes a byte that the answer has
anyway, or may have:

before the status is known     the next byte of `HTTP/1.1 `
in a body of chunks            a leading zero of the next chunk's size

An interim response (1xx) would not do: HTTP/1.0 has none, and some clients take it for the answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import MutableMapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_VERSION: Final = b"HTTP/1.1 "
_CONTINUE: Final = b"HTTP/1.1 100 "
MAX_ZEROS: Final = 8
"""Some clients read 16 digits of a chunk's size."""
_BODILESS: Final = (204, 304)


class AnswerTransport:
    """Holds a response's head back until its first part, as ASGI asks: one system call and one packet, not two."""

    __slots__ = ("_head", "_num_probes", "_transport", "is_closing")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head: bytes | None = b""
        """None once it is sent."""
        self._num_probes = 0
        """Bytes of the next write that probes have sent already."""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head == b"" and not data.startswith(_CONTINUE):
            self._head = data
            return
        if self._head is not None:
            data = (self._head + data)[self._num_probes :]
            self._head = None if self._head else b""
        self._num_probes = 0
        self._transport.write(data)

    def probe(self, *, chunked: bool) -> None:
        """Write the next byte of the answer if it is known. `chunked`: the body has chunks."""
        if self._head:
            self.flush()
        elif self._head == b"" and self._num_probes < len(_VERSION):
            self._num_probes += 1
            self._transport.write(_VERSION[self._num_probes - 1 : self._num_probes])
        elif self._head is None and chunked and self._num_probes < MAX_ZEROS:
            self._num_probes += 1
            self._transport.write(b"0")

    def flush(self) -> None:
        """Send a head that waits for its first part."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        if (protocol := self._transport.get_protocol()) is not None:  # held, it would be a cycle of references
            protocol.close_answered()

    def reset(self) -> None:
        """Close so that the client sees an error: a plain end would complete a body without a length."""
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


class Http10Answer:
    """The app for one request of HTTP/1.0, which has no chunks.

    A body without a length ends with the connection, and a broken one with a reset. `Connection: keep-alive` is
    confirmed where the body has a length.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        """`cycle.keep_alive`: the client asks to keep the connection."""
        self._app = app
        self._cycle = cycle
        self._is_unframed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unchunked(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(message)
            elif self._is_unframed:
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_unchunked)
        finally:
            transport: Any = self._cycle.transport
            if self._is_unframed and not (self._cycle.response_complete or transport.is_closing()):
                transport.reset()

    def _begin(self, head: MutableMapping[str, Any]) -> None:
        cycle, headers = self._cycle, list(head.get("headers", ()))
        names = {name.lower() for name, _ in headers}
        has_end = cycle.scope["method"] == "HEAD" or head["status"] in _BODILESS or b"content-length" in names
        if not has_end:
            self._is_unframed = True
            cycle.keep_alive = cycle.chunked_encoding = False
        elif cycle.keep_alive and b"connection" not in names:
            head["headers"] = [*headers, (b"connection", b"keep-alive")]
