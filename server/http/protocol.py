"""uvicorn's httptools protocol, with a bound on what it keeps and errors in our shape.

httptools is twice as fast as h11 and bounds nothing: a head of 200 MB is accepted. Here the head (target and header
fields, trailers too) is counted as it is parsed, and so is what has been received but not parsed yet.

Reading is what tells that a client has left. So it pauses only while the body of the request that is being answered
waits for its app, never while an answer is being made.
"""

from __future__ import annotations

import re
from asyncio import TimerHandle
from http import HTTPStatus
from typing import Any, Final, Literal

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError, HeaderTooLargeError, HttpVersionError, InvalidRequestError
from server.http.connection_limit import ConnectionLimit
from server.http.middleware import new_request_id
from server.http.stream import CLIENT, ClientConnection

LINGER_S: Final = 1.0
MAX_HEADERS: Final = 100
MAX_CRUMBS: Final = 4096
CRUMB_BYTES: Final = 16
"""Beyond so many pieces a body has to come in larger ones on average: a chunk costs more than its byte."""
MIN_BODY_BYTES: Final = 30 * 1024
"""Of a body, in each of its timeouts."""
MAX_AHEAD_BYTES: Final = 1 << 20
"""Of requests that are sent before the answer to an earlier one: they are read, for they hide the connection's end."""
_HOST: Final = re.compile(rb"[A-Za-z0-9._-]{1,255}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")


class HeadTooLargeSignal(Exception):
    """Raised inside the parser's callbacks: ends the parsing."""


class BadMessageSignal(Exception):
    """As above: what two servers may read in two ways, what names no host, a body in crumbs."""


class VersionSignal(Exception):
    """As above: a version of HTTP that is not spoken here."""


class GatewayProtocol(HttpToolsProtocol):
    """After an error the rest of the input is read and dropped: closing at once would reset the connection, and the
    peer might never see the answer."""

    _head_bytes = 0
    _unparsed_bytes = 0
    _refused = False
    _connection: ClientConnection
    _phase: Literal["idle", "head", "body"] = "idle"
    _timer: TimerHandle | None = None
    _num_body_bytes = 0
    """Since the timer was set."""
    _num_pieces = 0
    _body_bytes = 0
    _ahead_bytes = 0
    _bad_version = False
    _answering: RequestResponseCycle | None = None
    """The cycle whose app runs, or ran last; uvicorn's `cycle` is the newest, which may wait behind it."""
    _last_words: bytes | None = None
    """The refusal of what came behind the requests that are still to be answered."""
    header_timeout_s = 10.0
    body_timeout_s = 30.0
    connection_limit: ConnectionLimit | None = None

    @property
    def _max_head_bytes(self) -> int:
        return self.config.h11_max_incomplete_event_size or 65_536

    def connection_made(self, transport: Any) -> None:
        self._connection = ClientConnection()
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.header_timeout_s, self._slow)
        if self.connection_limit is not None and not self.connection_limit.open(self):
            self.drop()

    def drop(self) -> None:
        """At once: there are too many connections, and this one asks for nothing."""
        self._refused = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()
        self._disarm()
        if self.connection_limit is not None:
            self.connection_limit.close(self)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unparsed_bytes += len(data)
        super().data_received(data)
        self._ahead_bytes = self._ahead_bytes + len(data) if self.pipeline else 0
        if self._ahead_bytes > MAX_AHEAD_BYTES and not self._refused:
            self._end_behind(b"")
        if self._unparsed_bytes > self._max_head_bytes and not self._refused:
            self.send_400_response("")
        if self._phase != "idle" and self._timer is None and not self._refused:
            timeout_s = self.header_timeout_s if self._phase == "head" else self.body_timeout_s
            self._timer = self.loop.call_later(timeout_s, self._slow)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._phase = "head"
        super().on_message_begin()
        scope: Any = self.scope
        scope[CLIENT] = self._connection

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._head_bytes = self._max_head_bytes + 1
            raise HeadTooLargeSignal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._disarm()
        self._check_head()
        self._num_body_bytes = self._num_pieces = self._body_bytes = 0
        if self.connection_limit is not None:
            self.connection_limit.begin(self)
        super().on_headers_complete()
        self._phase = "body"  # not before the cycle is the new message's: a bad target raises above
        self._read_on()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def _read_on(self) -> None:
        """Undo uvicorn's pause unless it holds back the body of the request that is being answered."""
        if self._phase == "idle" or self.cycle is not self._answering:
            self.flow.resume_reading()

    @property
    def _is_behind(self) -> bool:
        """Whether what is being read comes behind a request that is still to be answered."""
        if self._answering is None or self._answering.response_complete:
            return False
        return self._phase != "body" or self.cycle is not self._answering

    def _end_behind(self, last_words: bytes) -> None:
        """Answer the whole requests that wait, then send `last_words` and close. The rest is read and dropped."""
        self._refused = True
        self._disarm()
        if self._phase == "body":
            self.pipeline.popleft()
        self._last_words = last_words

    def _leave(self) -> None:
        """Nobody is there for the answer any more."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._connection.lose()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._num_body_bytes += len(body)
        self._body_bytes += len(body)
        self._num_pieces += 1
        if self._num_pieces > MAX_CRUMBS and self._body_bytes < CRUMB_BYTES * self._num_pieces:
            raise BadMessageSignal("a body in crumbs")
        super().on_body(body)
        self._read_on()

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        self._phase = "idle"
        self._disarm()
        super().on_message_complete()
        self._read_on()

    def on_response_complete(self) -> None:
        """An answer before the body's end (401, 413): the rest of the body is not waited for."""
        ahead = bool(self.pipeline)
        super().on_response_complete()
        if self._last_words is not None and not ahead and not self.transport.is_closing():
            self._close_with(self._last_words)
            return
        if self.connection_limit is not None and self.cycle.response_complete and not self.transport.is_closing():
            self.connection_limit.end(self)
        if self._phase == "body" and self.cycle.response_complete:
            self.loop.call_later(LINGER_S, self._abandon, self.cycle)

    def _abandon(self, cycle: object) -> None:
        if self._phase == "body" and self.cycle is cycle:
            self.transport.close()

    def _check_head(self) -> None:
        """Raises BadMessageSignal or VersionSignal.

        Source: RFC 9112, 2.3, 3.2 and 6.1 to 6.3, read as strictly as it allows.
        """
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._bad_version = True
            raise VersionSignal(version)
        if not self.url.startswith(b"/") and self.url != b"*":
            raise BadMessageSignal("a target that is no path")
        values: dict[bytes, list[bytes]] = {b"host": [], b"content-length": [], b"transfer-encoding": []}
        for name, value in self.headers:
            if name in values:
                values[name].append(value.strip())
        hosts, lengths, codings = values.values()
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            raise BadMessageSignal("one Host is needed")
        if hosts and _HOST.fullmatch(hosts[0]) is None:
            raise BadMessageSignal("a Host that is none")
        if len(lengths) + len(codings) > 1 or (lengths and not lengths[0].isdigit()):
            raise BadMessageSignal("a length that is not clear")
        if codings and (codings[0].lower() != b"chunked" or version == "1.0"):
            raise BadMessageSignal("a coding other than chunked, or one that its version does not know")

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _slow(self) -> None:
        """Too slow a head, or too little of a body; one that we do not read at the moment is not the client's fault."""
        self._timer = None
        if self._phase == "body" and (self.flow.read_paused or self._num_body_bytes >= MIN_BODY_BYTES):
            self._num_body_bytes = 0
            self._timer = self.loop.call_later(self.body_timeout_s, self._slow)
        elif self._is_behind:
            self._end_behind(b"")
        elif not self.transport.is_closing():
            self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += num_bytes
        if self._head_bytes > self._max_head_bytes:
            raise HeadTooLargeSignal

    def send_400_response(self, msg: str) -> None:
        """431 when a bound was passed, 505 for another HTTP, else 400; behind the answers that are still due."""
        self._refused = True
        error: ApiError = InvalidRequestError("This is not a valid HTTP request.")
        if self._bad_version:
            error = HttpVersionError("Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        elif max(self._head_bytes, self._unparsed_bytes) > self._max_head_bytes:
            error = HeaderTooLargeError("The request's headers are too large.")
        answering = self._answering
        if self._is_behind:
            self._end_behind(_response(error))
        elif answering is None or answering.response_complete:
            self._close_with(_response(error))
        else:
            self._leave()
            if answering.response_started:
                self.transport.close()
            else:
                self._close_with(_response(error))

    def _close_with(self, response: bytes) -> None:
        transport: Any = self.transport
        transport.write(response)
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(LINGER_S, transport.close)


def protocol_with(
    header_timeout_s: float, body_timeout_s: float, connection_limit: ConnectionLimit
) -> type[GatewayProtocol]:
    """The protocol with these bounds; uvicorn wants a class."""
    timeouts = {"header_timeout_s": header_timeout_s, "body_timeout_s": body_timeout_s}
    return type("GatewayProtocol", (GatewayProtocol,), {**timeouts, "connection_limit": connection_limit})


def _response(error: ApiError) -> bytes:
    body = error.body()
    headers = [
        *error.headers(),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", new_request_id().encode()),
    ]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    reason = HTTPStatus(error.status).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (error.status, reason, lines, body)
