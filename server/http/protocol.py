"""uvicorn's httptools protocol with bounds, strict framing, and errors in our shape.

httptools is twice as fast as h11, and bounds nothing: it accepts a head of 200 MB. Here the head (target, fields,
trailers) is counted as it is parsed. So are bytes that are received and not parsed yet.

A connection has one open request. Later input stays unparsed until its answer is sent, so a flood of pipelined
requests costs only its bytes. It takes turns with the requests of other connections.

Reading is the first sign that a client has left. So reading pauses only while the app does not take the body, never
while an answer is made. The end of the input is no proof: a client may shut its sending side after its last request
(RFC 9112, 9.6), and gets its answers. Probes detect that it has gone. With TLS the end of input means that the client
has left: neither asyncio nor uvloop keeps half a TLS connection.
"""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any, Final, Literal, NoReturn

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError, HeaderTooLargeError, HttpVersionError, InvalidRequestError
from server.event_loop import ByteCollector
from server.http.answer import AnswerTransport, Http10Answer, error_bytes
from server.http.connections import ConnectionLimit, HttpLimits
from server.http.head import FRAMING, read_head
from server.http.stream import CLIENT, ClientConnection

LINGER_S: Final = 1.0
MAX_HEADERS: Final = 100
MAX_CHUNKS: Final = 4096
MIN_CHUNK_BYTES: Final = 16
"""Beyond MAX_CHUNKS, the chunks of a body have to be this large on average: a chunk costs more than its byte."""
MIN_BODY_BYTES: Final = 30 * 1024
"""A body has to deliver this much in each of its timeouts."""
MAX_AHEAD_BYTES: Final = 1 << 20
"""Pipelined bytes that are read while an earlier request is answered: unread, they would hide the client's end."""
WRITE_STALL_S: Final = 120.0
"""Once the send buffer is full, a client has to read some of its answer in this time."""
FIRST_PROBE_S: Final = 0.25
"""Once a client has ended its input, it is probed at once, after this time, and at growing intervals."""


class _RejectedError(Exception):
    """Raised inside the parser's callbacks, to end the parsing."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection.

    After an error its input is read and dropped: an immediate close would reset the connection, and the peer might
    never see the answer.
    """

    _connection: ClientConnection
    _phase: Literal["idle", "head", "body"] = "idle"
    _timer: TimerHandle | None = None
    _write_timer: TimerHandle | None = None
    _probe_timer: TimerHandle | None = None
    _is_half_closed = False
    """The client has ended its input."""
    _head_bytes = 0
    _unparsed_bytes = 0
    _new_body_bytes = 0
    """Body bytes since the timer was set."""
    _num_chunks = 0
    _body_bytes = 0
    _length: int | None = None
    """The body's length; None: it is chunked."""
    _tail = b""
    """The last parsed bytes: a mark that ends a head or a chunked body may begin in them."""
    _framing: dict[bytes, bytes]
    """The header fields that decide how the message is read."""
    _drops_input = False
    """Further input is dropped."""
    _rejection: ApiError | None = None
    """The error of the callback that rejected the input."""

    def __init__(
        self, limits: HttpLimits, connections: ConnectionLimit, collector: ByteCollector, *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._collector = collector
        self._limits = limits
        self._connections = connections
        self._ahead = bytearray()
        """The input after the request that is being answered."""
        self._is_ahead_full = False
        """More input came than is kept: the connection ends after the complete requests in `_ahead`."""

    def connection_made(self, transport: Any) -> None:
        self._connection = ClientConnection()
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._limits.header_timeout_s, self._on_timeout)
        if not self._connections.open(self):
            self.drop()

    def drop(self) -> None:
        """Abort: there are too many connections, and this one has no request."""
        self._drops_input = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._drops_input = True
        self._ahead.clear()
        self._lose_client()
        self._cancel_timer()
        self._cancel_write_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._connections.close(self)
        del self.parser  # it holds this object, and with it the last request

    def data_received(self, data: bytes) -> None:
        if self._drops_input or self._is_ahead_full:
            return
        num_parsed = 0 if self._ahead or self._is_waiting else self._parse(data)
        if num_parsed < len(data) and not self._drops_input:
            self._ahead += data[num_parsed:] if num_parsed else data
            self._is_ahead_full = len(self._ahead) > MAX_AHEAD_BYTES

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return False, which closes the connection, unless a whole request waits for its answer."""
        if self._drops_input or self.scheme == "https" or not (self._is_waiting or self._ahead):
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._end_with_last_answer()
            self._probe(FIRST_PROBE_S)
        return True

    def _end_with_last_answer(self) -> None:
        if not self._ahead and self.cycle is not None:
            self.cycle.keep_alive = False

    def _probe(self, wait_s: float) -> None:
        """Write a byte that a present client ignores, now and after `wait_s`: the client may have gone."""
        self._probe_timer = self.loop.call_later(wait_s, self._probe, 3 * wait_s)
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or self.transport.get_write_buffer_size():
            return
        cycle.transport.probe(chunked=cycle.chunked_encoding is True)
        if cycle.chunked_encoding is False:
            self._connection.probe()

    @property
    def _is_waiting(self) -> bool:
        """True while a request is being answered, or while the client does not read its answer."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return self._phase == "idle" and (not is_answered or self.flow.write_paused)

    def _parse(self, data: bytes | bytearray) -> int:
        """Parse up to the end of one request, which is answered first. Return the number of bytes parsed."""
        start = 0
        with memoryview(data) as view:
            while start < len(data) and not (self._drops_input or self._is_waiting):
                end = self._next_end(data, start)
                self._tail = (self._tail + bytes(view[max(start, end - 3) : end]))[-3:]
                self._unparsed_bytes += end - start
                with view[start:end] as piece:
                    super().data_received(piece)  # type: ignore[arg-type]
                start = end
                if self._unparsed_bytes > self._limits.max_header_bytes and not self._drops_input:
                    self.send_400_response("")
        if self._phase != "idle" and self._timer is None and not self._drops_input:
            timeout_s = self._limits.header_timeout_s if self._phase == "head" else self._limits.body_timeout_s
            self._timer = self.loop.call_later(timeout_s, self._on_timeout)
        return start

    def _next_end(self, data: bytes | bytearray, start: int) -> int:
        """Return an end in `data` such that the piece before it completes at most one head or one body."""
        if self._phase == "body" and self._length is not None:
            return min(len(data), start + self._length - self._body_bytes)
        mark = b"\r\n\r\n" if self._phase == "body" else b"\n\r\n"
        tail = self._tail[1 - len(mark) :]
        seam = (tail + data[start : start + len(mark)]).find(mark)
        if seam >= 0:
            return min(len(data), start + seam + len(mark) - len(tail))
        end = data.find(mark, start)
        return len(data) if end < 0 else end + len(mark)

    def _parse_ahead(self) -> None:
        """Parse what was received after the last request."""
        if self._ahead and not (self._drops_input or self._is_waiting or self.transport.is_closing()):
            num_parsed = self._parse(self._ahead)
            del self._ahead[:num_parsed]
        if self._is_half_closed and not self._drops_input:
            if self._is_waiting:
                self._end_with_last_answer()
            else:  # the rest is not a whole request and cannot become one
                self.transport.close()
        elif self._is_ahead_full and not (self._drops_input or self._is_waiting):
            self._drops_input = True
            self._cancel_timer()
            self._close_with(b"")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._framing = {}
        self._phase = "head"
        super().on_message_begin()
        scope: Any = self.scope
        scope[CLIENT] = self._connection

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._reject(HeaderTooLargeError("The request's headers are too large."))
        super().on_header(name, value)
        name = self.headers[-1][0]
        if name in FRAMING and self._phase == "head":
            if name in self._framing:
                self._reject()
            self._framing[name] = value.strip()

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._cancel_timer()
        self._check_head()
        self._new_body_bytes = self._num_chunks = self._body_bytes = 0
        self._connections.begin(self)
        super().on_headers_complete()
        self._phase = "body"  # not before the cycle is the new message's: a bad target raises above

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        cycle.transport = AnswerTransport(self.transport)  # type: ignore[assignment]
        if cycle.scope["http_version"] == "1.0":
            cycle.keep_alive = self.parser.should_keep_alive()
            cycle.waiting_for_100_continue = False
            app = Http10Answer(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._new_body_bytes += len(body)
        self._body_bytes += len(body)
        self._num_chunks += 1
        self._collector.count(len(body))
        if self._num_chunks > MAX_CHUNKS and self._body_bytes < MIN_CHUNK_BYTES * self._num_chunks:
            self._reject()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        self._phase = "idle"
        self._cancel_timer()
        super().on_message_complete()
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Continue the connection. The rest of a body that was answered early (401, 413) is not awaited."""
        cycle: Any = self.cycle
        cycle.transport.flush()
        super().on_response_complete()
        # The connection may stay: nothing of the request stays with it.
        cycle.body = bytearray()
        cycle.scope = self.scope = {}  # type: ignore[typeddict-item]
        self.headers = []
        if self.transport.is_closing():
            return
        self._connections.end(self)
        if self._phase == "body":
            self.loop.call_later(LINGER_S, self._close_unread, cycle)
        elif self._ahead or self._is_ahead_full:
            self.loop.call_soon(self._parse_ahead)  # after the turns of other connections

    def _close_unread(self, cycle: object) -> None:
        if self._phase == "body" and self.cycle is cycle:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()
        self._parse_ahead()

    def _watch_writing(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_STALL_S, self._check_writing, unsent_bytes)

    def _check_writing(self, unsent_bytes: int) -> None:
        """Abort if the client has taken nothing since."""
        if self.transport.get_write_buffer_size() >= unsent_bytes:
            self.transport.abort()
        else:
            self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # a close would wait for the client to read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _lose_client(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._connection.lose()

    def _count_head(self, num_bytes: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._reject()

    def _check_head(self) -> None:
        """Refuse an ambiguous head, and take the host and path from a target in absolute form."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._reject(HttpVersionError("Only HTTP/1.1 and HTTP/1.0 are spoken here."))
        head = read_head(version, self.url, self._framing)
        if head is None:
            self._reject()
        self.url, self._length = head.target, head.length
        if head.authority is not None:
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", head.authority))

    def _reject(self, error: ApiError | None = None) -> NoReturn:
        """End the parsing. It calls `send_400_response`."""
        self._rejection = error
        raise _RejectedError

    def send_400_response(self, msg: str) -> None:
        """Answer with the callback's error, 431 for too large a head, or 400. It ends a request with a broken body."""
        self._drops_input = True
        error = self._rejection
        if error is None and max(self._head_bytes, self._unparsed_bytes) > self._limits.max_header_bytes:
            error = HeaderTooLargeError("The request's headers are too large.")
        is_begun = False
        if self.cycle is not None and not self.cycle.response_complete:
            self._lose_client()
            is_begun = self.cycle.response_started
        if is_begun:
            self.transport.close()
        else:
            self._close_with(error_bytes(error or InvalidRequestError("This is not a valid HTTP request.")))

    def _close_with(self, response: bytes) -> None:
        transport: Any = self.transport
        transport.write(response)
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(LINGER_S, transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_timeout(self) -> None:
        """Close after a slow head or body. While reading is paused, the client is not at fault."""
        self._timer = None
        if self._phase == "body" and (self.flow.read_paused or self._new_body_bytes >= MIN_BODY_BYTES):
            self._new_body_bytes = 0
            self._timer = self.loop.call_later(self._limits.body_timeout_s, self._on_timeout)
        elif not self.transport.is_closing():
            self.transport.close()
