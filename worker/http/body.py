"""The bodies of requests."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.types import Receive

from worker.contracts.engine import RefusedError
from worker.wire import Failed

MAX_BODY_BYTES: Final = 32 * 1024 * 1024  # as much as a gateway takes by default


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read the whole body. Raises ClientDisconnect, and RefusedError past `max_bytes`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise RefusedError(Failed("payload_too_large", f"the body exceeds {max_bytes} bytes", retryable=False))
    return bytes(body)


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left. Call it after the whole body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass
