"""A client's connection on any port of the gateway: strict HTTP, timeouts, probes, error bodies.

A read is the first to notice that a client has left. So reading pauses only while the app does not take the body, never
while it makes an answer. The end of the input does not prove that the client has left. It may shut its sending side
after its last request (RFC 9112, 9.6) and wait for the answers. Then probes detect whether it is there. With TLS, the
end of the input means that it has left: neither asyncio nor uvloop supports half-closed TLS connections.
"""

from __future__ import annotations

import os
from asyncio import TimerHandle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from server.errors import HeaderTooLargeError, HttpVersionError, InvalidRequestError
from server.event_loop import ByteCollector
from worker.common.connection_limit import ConnectionLimit
from worker.common.http_protocol import StrictProtocol
from worker.common.http_reader import RequestHead

MIN_BODY_BYTES: Final = 30 * 1024
"""A body has to deliver this much in each `body_timeout_s`."""
WRITE_STALL_S: Final = 120.0
"""A client whose send buffer is full has to read some of it in this time."""
FIRST_PROBE_S: Final = 0.25
"""Once a client has ended its input, it is probed at once, after this time, and at growing intervals."""
_REFUSALS: Final = {
    400: InvalidRequestError("This is not a valid HTTP request."),
    431: HeaderTooLargeError("The request's headers are too large."),
    505: HttpVersionError("Only HTTP/1.1 and HTTP/1.0 are spoken here."),
}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_timeout_s: float
    body_timeout_s: float
    max_connections: int
    drain_grace_s: float
    keep_alive_s: float
    """How long an idle connection stays open. A balancer that keeps it for longer would send a request as it closes."""


class GatewayProtocol(StrictProtocol):
    """One connection."""

    _timer: TimerHandle | None = None
    _write_timer: TimerHandle | None = None
    _probe_timer: TimerHandle | None = None
    _is_half_closed = False
    """The client has ended its input."""
    _is_new = True
    """Nothing was received yet."""
    _new_body_bytes = 0
    """Body bytes since the timer was set."""

    def __init__(
        self, limits: HttpLimits, connections: ConnectionLimit, collector: ByteCollector, *arguments: Any
    ) -> None:
        super().__init__(*arguments, limit=connections)
        self._collector = collector
        self._limits = limits

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # A proxy may connect before it has a request.
        self._timer = self.loop.call_later(self._limits.keep_alive_s, self._on_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()

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
        if cycle.chunked_encoding is False and cycle.on_probe is not None:
            cycle.on_probe()

    def _read(self, data: bytes | bytearray) -> int:
        if self._is_new:
            self._is_new = False
            self._cancel_timer()
        num_read = super()._read(data)
        if self._reader.phase != "idle" and self._timer is None and not self._drops_input:
            timeout_s = self._limits.header_timeout_s if self._reader.phase == "head" else self._limits.body_timeout_s
            self._timer = self.loop.call_later(timeout_s, self._on_timeout)
        return num_read

    def _read_ahead(self) -> None:
        super()._read_ahead()
        if self._is_half_closed and not self._drops_input:
            if self._is_waiting:
                self._end_with_last_answer()
            else:  # the rest is not a whole request and cannot become one
                self.transport.close()

    def on_head(self, head: RequestHead) -> None:
        self._cancel_timer()
        self._new_body_bytes = 0
        super().on_head(head)
        if not self._connections.keeps_alive:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._new_body_bytes += len(body)
        self._collector.count(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._cancel_timer()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def _watch_writing(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_STALL_S, self._check_writing, unsent_bytes)

    def _check_writing(self, unsent_bytes: int) -> None:
        """Abort if the client has read nothing since `unsent_bytes` was measured."""
        if self.transport.get_write_buffer_size() >= unsent_bytes:
            self.transport.abort()
        else:
            self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # a close would wait for the client to read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _refusal(self, status: int) -> tuple[Iterable[tuple[bytes, bytes]], bytes]:
        request_id = (b"x-request-id", f"req_{os.urandom(16).hex()}".encode())
        return (*_REFUSALS[status].headers(), request_id), _REFUSALS[status].body()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        """Close after a slow head or body. While reading is paused, the client is not at fault."""
        self._timer = None
        if self._drops_input:  # it is closing: `_linger` bounds that
            return
        if self._reader.phase == "body" and (self.flow.read_paused or self._new_body_bytes >= MIN_BODY_BYTES):
            self._new_body_bytes = 0
            self._timer = self.loop.call_later(self._limits.body_timeout_s, self._on_timeout)
        elif not self.transport.is_closing():
            self.transport.close()
