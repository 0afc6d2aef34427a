"""Server-sent events on one ASGI response: the delayed 200, keep-alive comments, and a client that leaves.

data: {...}        one JSON object an event, no name       data: [DONE]      the last event of a complete answer
: ping             a comment, when there is nothing else   data: {"error":   the last event of a broken one
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Scope, Send

from worker.common.http_protocol import ANSWER, AnswerCycle

PING: Final = b": ping\n"
"""Without an empty line: some readers give out an event without data at each empty line (openai-go up to 3.8)."""
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LINE_ENDS: Final = re.compile(b"\xe2\x80[\xa8\xa9]|\xc2\x85")
"""U+2028, U+2029 and U+0085 in UTF-8: legal in JSON and in an event, and the end of a line for many clients."""


def escape_line_ends(events: bytes) -> bytes:
    """Return events of JSON without characters that a client may take for the end of a line."""
    if b"\xe2\x80" not in events and b"\xc2\x85" not in events:
        return events
    return _LINE_ENDS.sub(lambda match: b"\\u%04x" % ord(match[0].decode()), events)


def sse(payload: bytes, name: str = "") -> bytes:
    """Return one event."""
    return (b"event: %b\n" % name.encode() if name else b"") + b"data: " + payload + b"\n\n"


class SseWriter:
    """One streamed response. The 200 goes out with the first event or the first `ping`, whichever is earlier.

    A ping is a keep-alive: the server sends it while it has no event.
    """

    def __init__(
        self,
        send: Send,
        headers: Callable[[], list[tuple[bytes, bytes]]],
        ping: bytes = PING,
        write: Callable[[bytes], bool] = lambda part: False,
    ) -> None:
        """`write` of the AnswerCycle writes a part at once, where the client reads; False: `send` has to wait."""
        self._send = send
        self._write_now = write
        self._headers = headers
        self._ping_bytes = ping
        self._ping_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False
        self.started = False
        self.last_write_s = time.monotonic()

    async def write(self, events: bytes, *, more: bool = True) -> None:
        """Send events; wait while the client is slow to read."""
        if self._ping_task is not None:
            await asyncio.wait({self._ping_task})
        self._writing = True
        try:
            await self._put(escape_line_ends(events), more=more)
        finally:
            self._writing = False

    def ping(self) -> None:
        """Send a ping, which clients ignore, unless something is being written."""
        if not self._writing and self._ping_task is None:
            self._ping_task = asyncio.create_task(self._put(self._ping_bytes, more=True))
            self._ping_task.add_done_callback(self._end_ping)

    def probe(self) -> None:
        """Send a ping if the answer has begun: only a write shows that a half-closed client has gone."""
        if self.started:
            self.ping()

    @contextmanager
    def kept_alive(self, ping_s: float) -> Iterator[None]:
        """Send a ping within the block whenever nothing was sent for `ping_s`."""
        self._watch(ping_s)
        try:
            yield
        finally:
            for pending in (self._timer, self._ping_task):
                if pending is not None:
                    pending.cancel()

    def _watch(self, ping_s: float) -> None:
        silent_s = time.monotonic() - self.last_write_s
        if silent_s >= ping_s:
            self.ping()
            silent_s = 0.0
        self._timer = asyncio.get_running_loop().call_later(ping_s - silent_s, self._watch, ping_s)

    def _end_ping(self, task: asyncio.Task[None]) -> None:
        self._ping_task = None
        if not task.cancelled():
            task.exception()  # a client that is gone is noticed by the end of its connection

    async def _put(self, data: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            headers = HEADERS + self._headers()
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.last_write_s = time.monotonic()
        if more and self._write_now(data):
            return
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def client_of(scope: Scope) -> AnswerCycle:
    """Return the answer to the request, which has what is known of the client."""
    client: AnswerCycle = scope[ANSWER]()
    return client


class CancelOnDisconnect:
    """Cancels the current task when the client disconnects, or after `timeout_s` (None: no limit).

    The block then raises ClientDisconnect or TimeoutError. Leave it before the last part of the response is sent: a
    complete answer must not be cancelled.
    """

    __slots__ = ("_client", "_num_cancels", "_reason", "_task", "_timeout_s", "_timer")

    def __init__(self, client: AnswerCycle, timeout_s: float | None = None) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._reason: type[Exception] | None = None
        self._task: asyncio.Task[Any] | None = None
        """The task that is inside the block."""

    def __enter__(self) -> None:
        if self._client.disconnected:
            raise ClientDisconnect
        self._task = asyncio.current_task()
        if self._timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self.end, TimeoutError)
        self._client.on_lost = partial(self.end, ClientDisconnect)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        task, self._task = self._task, None
        self._client.on_lost = None
        if self._timer is not None:
            self._timer.cancel()
        if self._reason is not None and task is not None and task.uncancel() <= self._num_cancels:
            raise self._reason from error

    def end(self, reason: type[Exception]) -> None:
        """Cancel the block, which raises `reason` around it."""
        if self._task is not None and self._reason is None:
            self._reason, self._num_cancels = reason, self._task.cancelling()  # 3.11: groups that failed leave theirs
            self._task.cancel()
