"""A gateway's connection to a worker: the reader of every port, with fewer writes."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from worker.common.http_protocol import StrictProtocol

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

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class WorkerProtocol(StrictProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(MAX_HEAD_BYTES, *args, **kwargs)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_CoalescingTransport(transport, self.loop))  # type: ignore[arg-type]
