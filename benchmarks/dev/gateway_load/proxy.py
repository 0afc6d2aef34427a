"""The least that a Starlette proxy can do: pass bytes on. `python -m benchmarks.dev.gateway_load.proxy TARGET PORT`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def app(target: str) -> Starlette:
    sessions: list[aiohttp.ClientSession] = []

    async def passed_on(request: Request) -> Response:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        answer = await sessions[0].post(target + "/v1/chat/completions", data=await request.body())
        if answer.content_type != "text/event-stream":
            return Response(await answer.read(), media_type="application/json")

        async def relay() -> AsyncIterator[bytes]:
            async for data in answer.content.iter_any():
                yield data

        return StreamingResponse(relay(), media_type="text/event-stream")

    async def live(request: Request) -> Response:
        return Response()

    return Starlette(routes=[Route("/v1/chat/completions", passed_on, methods=["POST"]), Route("/health/ready", live)])


if __name__ == "__main__":
    uvicorn.run(
        app(sys.argv[1]), port=int(sys.argv[2]), http="h11", loop="uvloop", log_level="critical", access_log=False
    )
