"""An HTTP server with scripted answers, which records its requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.server.scripted_worker import listening

Answer = Response | Callable[[], Response]


def sse(*events: Any, done: bool = True) -> Callable[[], Response]:
    """A stream: bytes go out as they are, other values as JSON events."""
    parts = [
        event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n" for event in events
    ]
    if done:
        parts.append(b"data: [DONE]\n\n")

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return lambda: StreamingResponse(body(), media_type="text/event-stream")


class ScriptedHttp:
    """`answers` by method and path, e.g. `GET /health`; others answer 404."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        self.headers.append(dict(request.headers))
        self.bodies.append(json.loads(body) if body else None)
        answer = self.answers.get(f"{request.method} {request.url.path}")
        if answer is None:
            return Response(status_code=404)
        return answer if isinstance(answer, Response) else answer()


@asynccontextmanager
async def scripted_http(server: ScriptedHttp) -> AsyncIterator[str]:
    async with listening(server.app) as url:
        yield url
