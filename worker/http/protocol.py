"""uvicorn's httptools protocol with the bound on a head that its slower h11 has, and with fewer writes."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 1024


class _CoalescingTransport:
    """Writes the parts of a response that one turn of the loop gives at once: one system call, and one wake-up."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose bytes are, for too long, neither a whole head nor a part of a body."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_unused = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_CoalescingTransport(transport, self.loop))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._num_unused += len(data)
        super().data_received(data)
        if self._num_unused > MAX_HEAD_BYTES:
            self.transport.close()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._num_unused = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_unused = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_unused = 0
