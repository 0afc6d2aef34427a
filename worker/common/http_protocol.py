"""uvicorn's protocol with our reader instead of its parser: the connections of every port.

A connection has one open request. Later input stays unread until its answer is sent, so a flood of pipelined requests
costs only its bytes. It takes turns with the requests of other connections.

A client that has closed its connection and one that has only shut its sending side look alike: both send a FIN.
Only a write shows the difference: the first one answers it with a reset. So a probe writes a byte that the answer has
anyway, or may have:

before the status is known     the next byte of `HTTP/1.1 `
in a body of chunks            a leading zero of the next chunk's size

An interim response (1xx) would not do: HTTP/1.0 has none, and some clients take it for the answer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import weakref
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from worker.common.connection_limit import ConnectionLimit
from worker.common.http_reader import MessageError, RequestHead, RequestReader

MAX_HEAD_BYTES: Final = 64 * 1024  # twice what nginx takes
LINGER_S: Final = 120.0
"""A client that was refused may send the rest of its body in this time: some fronts read the answer only afterwards."""
MAX_LINGER_BYTES: Final = 128 << 20  # several times the largest body that is taken: the rest gets a reset
LINGER_SILENCE_S: Final = 5.0  # then it has stopped: a front may keep its side open
MAX_AHEAD_BYTES: Final = 1 << 20
"""Pipelined bytes that are read while an earlier request is answered: unread, they would hide the client's end."""
ANSWER: Final = "headstart.answer"
"""The key in the scope of a weak reference to the AnswerCycle, which holds the scope itself."""
_VERSION: Final = b"HTTP/1.1 "
_CONTINUE: Final = b"HTTP/1.1 100 "
MAX_ZEROS: Final = 8
"""Some clients read 16 digits of a chunk's size."""
_BODILESS: Final = (204, 304)


class AnswerCycle(RequestResponseCycle):
    """An answer, which ends the connection if the body of its request has not ended (RFC 9110, 10.1.1).

    `disconnected`: the client has left before the end.
    """

    on_lost: Callable[[], object] | None = None
    """Called when the client leaves before the end. Less than a task that awaits `receive`."""
    on_probe: Callable[[], object] | None = None
    """Writes what a client ignores into a body without chunks."""

    def lose(self) -> None:
        """Note that the client has left."""
        self.disconnected, self.waiting_for_100_continue = True, False
        self.message_event.set()
        on_lost, self.on_lost, self.on_probe = self.on_lost, None, None
        if on_lost is not None:
            on_lost()

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        if self.more_body:
            self.keep_alive = False
        return super().send(message)

    def write(self, part: bytes) -> bool:
        """Write a part of a body of chunks at once. False: the client does not read now, so it is for `send`."""
        is_open = not (self.flow.write_paused or self.disconnected or self.response_complete)
        if not (part and is_open and self.chunked_encoding):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True


class StrictProtocol(HttpToolsProtocol):
    """One connection.

    After an error, or an answer to a part of a request, its input is read and dropped: an immediate close would reset
    the connection, and the peer might never see the answer.
    """

    _drops_input = False
    """Further input is dropped."""
    _num_dropped_bytes = 0
    _is_ahead_full = False
    """More input came than is kept: the connection ends after the complete requests in `_ahead`."""

    def __init__(self, *args: Any, limit: ConnectionLimit | None = None, **kwargs: Any) -> None:
        """`limit`: the port's, which has opened this connection."""
        super().__init__(*args, **kwargs)
        self._connections = limit or ConnectionLimit(0)
        self.parser = None  # type: ignore[assignment]  # it holds this object
        self._reader = RequestReader(MAX_HEAD_BYTES)
        self._ahead = bytearray()
        """The input after the request that is being answered."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connections.made(self)

    def drop(self) -> None:
        """Abort: there are too many connections, and this one has no request."""
        self._drops_input = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lose_client()
        self._connections.close(self)
        self._drops_input = True
        self._ahead.clear()

    def data_received(self, data: bytes) -> None:
        if self._drops_input:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > MAX_LINGER_BYTES:
                self.transport.close()
        if self._drops_input or self._is_ahead_full:
            return
        num_read = 0 if self._ahead or self._is_waiting else self._read(data)
        if num_read < len(data) and not self._drops_input:
            self._ahead += data[num_read:] if num_read else data
            self._is_ahead_full = len(self._ahead) > MAX_AHEAD_BYTES

    @property
    def _is_waiting(self) -> bool:
        """True while a request is being answered, or while the client does not read its answer."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return self._reader.phase == "idle" and (not is_answered or self.flow.write_paused)

    def _read(self, data: bytes | bytearray) -> int:
        """Read up to the end of one request, which is answered first. Return the number of bytes read."""
        self._unset_keepalive_if_required()
        position = 0
        try:
            while position < len(data) and not (self._drops_input or self._is_waiting):
                position = self._reader.read(data, position, self)
        except MessageError as error:
            self._refuse(error.status)
        return position

    def _read_ahead(self) -> None:
        """Read what was received after the last request."""
        if self._ahead and not (self._drops_input or self._is_waiting or self.transport.is_closing()):
            del self._ahead[: self._read(self._ahead)]
        if self._is_ahead_full and not (self._drops_input or self._is_waiting):
            self._close_with(b"")

    def on_head(self, head: RequestHead) -> None:
        """Start the answer."""
        self._connections.begin(self)
        path, _, query = head.target.partition(b"?")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": head.version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "root_path": "",
            "method": head.method,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "headers": head.headers,
        }
        self.cycle = AnswerCycle(
            self.scope,
            AnswerTransport(self.transport),  # type: ignore[arg-type]
            self.flow,
            self.logger,
            self.access_logger,
            self.access_log,
            self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=head.expects_continue,
            keep_alive=head.keep_alive,
            on_response=self.on_response_complete,
        )
        self.scope[ANSWER] = weakref.ref(self.cycle)  # type: ignore[typeddict-unknown-key]
        app: Any = partial(answer_http10, self.app, self.cycle) if head.version == "1.0" else self.app
        self._start_asgi_task(self.cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self.cycle.body += body
            if len(self.cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self.cycle.more_body = self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()
        self.flow.resume_reading()  # only a read shows that the client has left

    def on_response_complete(self) -> None:
        """Continue the connection."""
        if not self.transport.is_closing():
            self._connections.end(self)
        cycle: Any = self.cycle
        cycle.transport.flush()
        super().on_response_complete()
        if self._drops_input:  # `_linger` bounds it
            self._unset_keepalive_if_required()
        # The connection may stay: nothing of the request stays with it.
        cycle.body, cycle.on_lost, cycle.on_probe = bytearray(), None, None
        cycle.scope = self.scope = {}  # type: ignore[typeddict-item]
        if (self._ahead or self._is_ahead_full) and not self.transport.is_closing():
            self.loop.call_soon(self._read_ahead)  # after the turns of other connections

    def close_answered(self) -> None:
        """Close after the last answer. The rest of a body that was refused (401, 413) may still come."""
        if self._reader.phase == "body":
            return self._close_with(b"")
        self.transport.close()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_ahead()

    def _lose_client(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            cycle: Any = self.cycle
            cycle.lose()

    def _refuse(self, status: int) -> None:
        """Answer with an error, after which nothing is read. It ends a request with a broken body."""
        is_open = self.cycle is not None and not self.cycle.response_complete
        self._lose_client()
        if is_open and self.cycle.response_started:
            self._close_with(b"")
        else:
            own_headers, body = self._refusal(status)
            ends = (b"content-length", b"%d" % len(body)), (b"connection", b"close")
            headers = *self.server_state.default_headers, *own_headers, *ends
            self._close_with(b"".join([STATUS_LINE[status], *(b"%b: %b\r\n" % one for one in headers), b"\r\n", body]))

    def _refusal(self, status: int) -> tuple[Iterable[tuple[bytes, bytes]], bytes]:
        """Return headers and the body of the answer to what is no request."""
        return (), b""

    def _close_with(self, answer: bytes) -> None:
        self._drops_input = True
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger(-1, self.loop.time() + LINGER_S)

    def _linger(self, num_dropped_bytes: int, until_s: float) -> None:
        """Close when no input has come since this number of bytes, or at the end of the time."""
        if self._num_dropped_bytes == num_dropped_bytes or self.loop.time() >= until_s:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(LINGER_SILENCE_S, self._linger, self._num_dropped_bytes, until_s)


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


async def answer_http10(app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the app for one request of HTTP/1.0, which has no chunks.

    A body without a length ends with the connection, and a broken one with a reset. `Connection: keep-alive` is
    confirmed where the body has a length and the client asks to keep the connection (`cycle.keep_alive`).
    """
    is_unframed = False

    async def send_unchunked(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in headers}
            has_end = scope["method"] == "HEAD" or message["status"] in _BODILESS or b"content-length" in names
            if not has_end:
                is_unframed = True
                cycle.keep_alive = cycle.chunked_encoding = False
            elif cycle.keep_alive and b"connection" not in names:
                message["headers"] = [*headers, (b"connection", b"keep-alive")]
        elif is_unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    try:
        await app(scope, receive, send_unchunked)
    finally:
        transport: Any = cycle.transport
        if is_unframed and not (cycle.response_complete or transport.is_closing()):
            transport.reset()
