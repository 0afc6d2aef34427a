"""The worker's HTTP side (see `worker.wire` for the messages).

    POST /generate /abort       GET /state /bundle                    msgpack, for gateways
    POST /drain /purge          GET /health/live /health/ready /metrics /debug/state       JSON and text, for operators

Pure ASGI where a stream lives, so that a client that leaves is noticed under every server: the disconnect is awaited
beside the stream, and leaving the handler by any way aborts what the engine still computes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgpack
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.engine.recovery import EngineDeadError
from worker.http.authentication import GatewayOnly, ProgramsOnly
from worker.http.debug_state import debug_state
from worker.http.service import Refusal, WorkerService
from worker.http.streams import Stream
from worker.wire import CONTENT_TYPE, Failed, WireError, pack, pack_frame, unpack_request

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
_DEBUG_TIMEOUT_S: Final = 10.0
_STREAM_HEADERS: Final = [(b"content-type", CONTENT_TYPE.encode())]

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(
    service: WorkerService, token: str = "", host: str = "127.0.0.1", advertise_url: str | None = None
) -> ASGIApp:
    """The ASGI application over one worker, for those who show `token`; without one, for programs, never for pages.

    `host` and `advertise_url` say to which names it answers then.
    """
    app = Starlette(
        routes=[
            Route("/generate", endpoint=GenerateEndpoint(service), methods=["POST"]),
            *(Route(path, endpoint=endpoint, methods=[method]) for method, path, endpoint in _endpoints(service)),
        ],
        exception_handlers={Refusal: _refused, EngineDeadError: _engine_dead},
    )
    return GatewayOnly(app, token) if token else ProgramsOnly(app, host, advertise_url)


class GenerateEndpoint:
    """POST /generate: a refusal, or 200 and frames until End or Failed."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
            stream = await self._service.submit(unpack_request(body))
        except ClientGone:
            return
        except WireError as error:
            await _refusal_response(Failed("invalid_request", str(error), retryable=False), 400)(scope, receive, send)
        except Refusal as refused:
            await _refusal_response(refused.failed, refused.status)(scope, receive, send)
        else:
            try:
                await self._relay(stream, receive, send)
            finally:
                self._service.release(stream)

    @staticmethod
    async def _relay(stream: Stream, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_disconnected(receive))
        watch.add_done_callback(lambda _: stream.close())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            while data := await stream.take():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch


class ClientGone(Exception):
    """The client left before its request was whole."""


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises Refusal past MAX_BODY_BYTES, ClientGone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise Refusal(Failed("payload_too_large", f"the body exceeds {MAX_BODY_BYTES} bytes", retryable=False))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _endpoints(service: WorkerService) -> list[tuple[str, str, Endpoint]]:
    async def abort(request: Request) -> Response:
        try:
            message = msgpack.unpackb(await read_body(request.receive))
            request_id, choice = message["request_id"], message.get("choice")
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            return _refusal_response(Failed("invalid_request", f"not an abort: {error}", retryable=False), 400)
        return _msgpack(msgpack.packb({"found": service.abort(request_id, choice)}))

    async def state(request: Request) -> Response:
        return _msgpack(pack(service.state))

    async def bundle(request: Request) -> Response:
        return _msgpack(service.bundle)

    async def live(request: Request) -> Response:
        return _health(await service.liveness())

    async def ready(request: Request) -> Response:
        return _health(await service.readiness(), service.index_problem())

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def debug(request: Request) -> Response:
        scheduler = service.parts.engine.scheduler
        async with asyncio.timeout(_DEBUG_TIMEOUT_S):
            return JSONResponse(await asyncio.wrap_future(service.parts.engine.call(lambda: debug_state(scheduler))))

    async def drain(request: Request) -> Response:
        service.drain()
        return JSONResponse({"draining": True, "open": service.num_open})

    async def purge(request: Request) -> Response:
        return JSONResponse({"epoch": await service.purge()})

    return [
        ("POST", "/abort", abort),
        ("GET", "/state", state),
        ("GET", "/bundle", bundle),
        ("GET", "/health/live", live),
        ("GET", "/health/ready", ready),
        ("GET", "/metrics", metrics),
        ("GET", "/debug/state", debug),
        ("POST", "/drain", drain),
        ("POST", "/purge", purge),
    ]


def _health(problem: str | None, index_problem: str | None = None) -> Response:
    """`index_problem` is a detail: a worker outside of the index serves."""
    detail = {} if index_problem is None else {"index": index_problem}
    if problem is None:
        return JSONResponse({"status": "ok", **detail})
    return JSONResponse({"status": "unavailable", "reason": problem, **detail}, status_code=503)


def _msgpack(body: Any) -> Response:
    return Response(body, media_type=CONTENT_TYPE)


def _refusal_response(failed: Failed, status: int) -> Response:
    return Response(pack_frame(failed), status, media_type=CONTENT_TYPE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _refusal_response(error.failed, error.status)


async def _engine_dead(request: Request, error: Exception) -> Response:
    return _refusal_response(Failed("worker_lost", str(error), retryable=True), 503)
