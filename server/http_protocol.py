"""uvicorn's httptools protocol, with a bound on what it keeps and errors in our shape.

httptools is twice as fast as h11 and bounds nothing: a head of 200 MB is accepted. Here the head (target and header
fields, trailers too) is counted as it is parsed, and so is what has been received but not parsed yet.
"""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError, HeaderTooLargeError, InvalidRequestError
from server.middleware import new_request_id
from server.stream import CLIENT, ClientConnection

LINGER_S: Final = 1.0


class HeadTooLargeSignal(Exception):
    """Raised inside the parser's callbacks: ends the parsing."""


class GatewayProtocol(HttpToolsProtocol):
    """After an error the rest of the input is read and dropped: closing at once would reset the connection, and the
    peer might never see the answer."""

    _head_bytes = 0
    _unparsed_bytes = 0
    _refused = False
    _connection: ClientConnection

    @property
    def _max_head_bytes(self) -> int:
        return self.config.h11_max_incomplete_event_size or 65_536

    def connection_made(self, transport: Any) -> None:
        self._connection = ClientConnection()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.lose()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > self._max_head_bytes and not self._refused:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()
        scope: Any = self.scope
        scope[CLIENT] = self._connection

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += num_bytes
        if self._head_bytes > self._max_head_bytes:
            raise HeadTooLargeSignal

    def send_400_response(self, msg: str) -> None:
        """431 when a bound was passed, else 400; nothing when another answer is on its way."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        error: ApiError = InvalidRequestError("This is not a valid HTTP request.")
        if max(self._head_bytes, self._unparsed_bytes) > self._max_head_bytes:
            error = HeaderTooLargeError("The request's headers are too large.")
        self.transport.write(_response(error))
        transport: Any = self.transport
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(LINGER_S, transport.close)


def _response(error: ApiError) -> bytes:
    body = error.body()
    headers = [
        *error.headers(),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", new_request_id().encode()),
    ]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"HTTP/1.1 %d Bad Request\r\n%b\r\n%b" % (error.status, lines, body)
