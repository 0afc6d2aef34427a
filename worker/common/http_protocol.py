"""uvicorn's protocol with our reader instead of its parser: the connections of every port.

A connection has one open request. Later input stays unread until its answer is sent, so a flood of pipelined requests
costs only its bytes. It takes turns with the requests of other connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final
from urllib.parse import unquote

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from worker.common.http_answer import AnswerTransport, Http10Answer
from worker.common.http_reader import MessageError, RequestHead, RequestReader

MAX_HEAD_BYTES: Final = 64 * 1024
LINGER_S: Final = 120.0
"""A client that was refused may send the rest of its body in this time: a front reads the answer afterwards."""
MAX_LINGER_BYTES: Final = 128 << 20
LINGER_SILENCE_S: Final = 5.0  # then it has stopped: a front may keep its side open
MAX_AHEAD_BYTES: Final = 1 << 20
"""Pipelined bytes that are read while an earlier request is answered: unread, they would hide the client's end."""


class AnswerCycle(RequestResponseCycle):
    """An answer, which ends the connection if the body of its request has not ended (RFC 9110, 10.1.1)."""

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        if self.more_body:
            self.keep_alive = False
        return super().send(message)


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = None  # type: ignore[assignment]  # it holds this object
        self._reader = RequestReader(MAX_HEAD_BYTES)
        self._ahead = bytearray()
        """The input after the request that is being answered."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
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
        app: Any = Http10Answer(self.app, self.cycle) if head.version == "1.0" else self.app
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

    def on_response_complete(self) -> None:
        """Continue the connection."""
        cycle: Any = self.cycle
        cycle.transport.flush()
        super().on_response_complete()
        # The connection may stay: nothing of the request stays with it.
        cycle.body = bytearray()
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
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()

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
