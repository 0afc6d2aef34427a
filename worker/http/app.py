"""The worker's HTTP API (see `worker.wire` for the messages).

POST /generate /render /abort /prove           GET /state /bundle       msgpack, for gateways
POST /blocks /chains /adopt                                       msgpack, for other workers
POST /drain /purge          GET /health/live /health/ready /metrics /debug/state       JSON and text, for operators
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import msgpack
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cache.records import WorkerState
from worker.common.http_protocol import ANSWER, AnswerCycle
from worker.common.proof import (
    CHALLENGE_BYTES,
    EPOCH_HEADER,
    PROVE_PATH,
    epoch_token,
    instance_token,
    new_instance,
    prove,
)
from worker.common.sockets import HostNames
from worker.contracts.engine import EngineDeadError, RefusedError
from worker.http.blocks import BlocksEndpoint, adopt_chains, offer_chains
from worker.http.service import WorkerService
from worker.http.streams import read_body
from worker.wire import CONTENT_TYPE, Failed, ProtocolError, WireError, pack, unpack_request

STATUS_OF: Final = {
    "invalid_request": 400,
    "invalid_grammar": 400,
    "context_length_exceeded": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "wrong_epoch": 409,
    "wrong_layout": 409,
    "wrong_protocol": 409,
    "payload_too_large": 413,
    "queue_full": 429,
    "draining": 503,
    "not_ready": 503,
    "unknown_grammar": 503,
    "unsupported": 503,
    "worker_lost": 503,
}
OPEN_PATHS: Final = frozenset({"/health/live", "/health/ready", "/metrics", PROVE_PATH})
"""Need no token."""
_PEER_PATHS: Final = frozenset({"/blocks", "/chains", "/adopt"})
"""Take the token of the worker's epoch, too."""
_ADVICE: Final = "start the worker with --advertise-url to name it, or give the fleet a cluster secret"
_BROWSER_HEADERS: Final = frozenset({"accept-language", "referer"})
_UNAUTHORIZED: Final = Failed("unauthorized", "a token of this fleet's cluster secret is needed", retryable=True)
_EPOCH_HEADER: Final = EPOCH_HEADER.encode()
HEAD_WAIT_S: Final = 0.002  # an idle engine delivers Started in this time
_DEBUG_TIMEOUT_S: Final = 10.0  # the engine answers between two steps
_STREAM_HEADERS: Final = [(b"content-type", CONTENT_TYPE.encode())]


def make_app(
    service: WorkerService,
    token: str = "",
    host: str = "127.0.0.1",
    advertise_url: str | None = None,
    url: str | None = None,
) -> ASGIApp:
    """Build the application: for members of the fleet that share `token`; without one, for programs but no web pages.

    Without a token, a browser must name `host`, `advertise_url` or this machine. `url`: by default the member's.
    """
    endpoints, instance = _Endpoints(service), new_instance()

    async def prove_itself(request: Request) -> Response:
        challenge = await read_body(request, CHALLENGE_BYTES)
        if not token or len(challenge) != CHALLENGE_BYTES:
            raise WireError(f"challenge: {CHALLENGE_BYTES} bytes, to a worker with a cluster secret")
        return _msgpack(prove(token, challenge, url or service.engine.member.url, instance))

    app = Starlette(
        routes=[
            Route("/generate", endpoint=GenerateRoute(service), methods=["POST"]),
            Route("/blocks", endpoint=BlocksEndpoint(service), methods=["POST"]),
            Route("/chains", endpoint=partial(offer_chains, service), methods=["POST"]),
            Route("/adopt", endpoint=partial(adopt_chains, service), methods=["POST"]),
            Route("/render", endpoint=endpoints.render, methods=["POST"]),
            Route("/abort", endpoint=endpoints.abort, methods=["POST"]),
            Route("/state", endpoint=endpoints.state),
            Route("/bundle", endpoint=endpoints.bundle),
            Route("/health/live", endpoint=endpoints.live),
            Route("/health/ready", endpoint=endpoints.ready),
            Route("/metrics", endpoint=endpoints.metrics),
            Route("/debug/state", endpoint=endpoints.debug_state),
            Route("/drain", endpoint=endpoints.drain, methods=["POST"]),
            Route("/purge", endpoint=endpoints.purge, methods=["POST"]),
            Route(PROVE_PATH, endpoint=prove_itself, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((RefusedError, WireError, EngineDeadError, ClientDisconnect), _on_error),
    )
    guard = MembersOnly(token, instance, service) if token else ProgramsOnly(host, advertise_url)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        failed = guard.refusal(scope) if scope["type"] == "http" else None
        await (app if failed is None else _refusal_response(failed))(scope, receive, send)

    return guarded


class MembersOnly:
    """Asks for `Authorization: Bearer TOKEN`, except on OPEN_PATHS (see `worker.common.proof`)."""

    def __init__(self, token: str, instance: str, service: WorkerService) -> None:
        self._token = token
        self._service = service
        self._instance_token = instance_token(token, instance).encode()

    def refusal(self, scope: Scope) -> Failed | None:
        """Return why a request gets no answer, or None."""
        if scope["path"] in OPEN_PATHS:
            return None
        headers = [(name, value) for name, value in scope["headers"] if name in (b"authorization", _EPOCH_HEADER)]
        presented = [value.removeprefix(b"Bearer ") for _, value in headers if value.startswith(b"Bearer ")]
        match headers:
            case [(b"authorization", _)] if presented:
                if hmac.compare_digest(presented[0], self._instance_token):
                    return None
            case [(b"authorization", _), (_, epoch)] | [(_, epoch), (b"authorization", _)] if presented:
                return self._peer_refusal(scope["path"], presented[0], epoch.decode("latin-1"))
        return _UNAUTHORIZED

    def _peer_refusal(self, path: str, presented: bytes, epoch: str) -> Failed | None:
        if path not in _PEER_PATHS or not hmac.compare_digest(presented, epoch_token(self._token, epoch).encode()):
            return _UNAUTHORIZED
        try:
            own = self._service.engine.member.epoch
        except RefusedError as error:
            return error.failed
        return None if epoch == own else Failed("wrong_epoch", f"epoch: this is {own}", retryable=True)


class ProgramsOnly:
    """Refuses web pages, and browsers under an unknown Host.

    Browsers send `Origin` with every request that changes something, `Sec-Fetch-Site` over HTTPS or loopback, and
    `Accept-Language` always; gateways send none of them, and may use any name of a worker. A page whose own name
    resolves to this machine (DNS rebinding) may send only `Accept-Language`, but its Host is foreign.
    """

    def __init__(self, bound: str, advertise_url: str | None) -> None:
        """Accept `localhost`, this machine, `bound` (the value of --host) and the host of `advertise_url`."""
        advertised = urlsplit(advertise_url or "").hostname or "localhost"
        self._hosts = HostNames(bound, (socket.gethostname(), bound, advertised))

    def refusal(self, scope: Scope) -> Failed | None:
        """Return why a request gets no answer, or None."""
        headers = Headers(scope=scope)
        host = headers.get("host")
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
            problem = "a worker does not speak to pages"
        elif host is None or not _BROWSER_HEADERS.intersection(headers.keys()) or host in self._hosts:
            return None
        else:
            problem = f"this worker does not answer to the Host {host!r:.300}: {_ADVICE}"
        return Failed("forbidden", problem, retryable=True)


class GenerateRoute:
    """POST /generate as pure ASGI: a refusal, or 200 and frames until End or Failed. A disconnect aborts."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(Request(scope, receive))
        stream = await self._service.submit(unpack_request(body))
        answer: AnswerCycle = scope[ANSWER]()
        answer.on_lost = stream.close
        if answer.disconnected:
            stream.close()
        try:
            data = await stream.take(HEAD_WAIT_S)  # the Started of an idle engine leaves with the head
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            while not stream.is_taken:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await stream.take(write=answer.write)
            await send({"type": "http.response.body", "body": data, "more_body": False})
        finally:
            self._service.release(stream)


class _Endpoints:
    """The endpoints that answer at once."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    async def render(self, request: Request) -> Response:
        return Response(await self._service.engine.render(await read_body(request)), media_type=CONTENT_TYPE)

    async def abort(self, request: Request) -> Response:
        try:
            message = msgpack.unpackb(await read_body(request))
            request_id, choice = message["request_id"], message.get("choice")
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise WireError(f"not an abort: {error}") from error
        return _msgpack({"found": self._service.abort(request_id, choice)})

    async def state(self, request: Request) -> Response:
        return _msgpack(WorkerState(self._service.engine.member, self._service.engine.load))

    async def bundle(self, request: Request) -> Response:
        return _msgpack(self._service.engine.bundle)

    async def live(self, request: Request) -> Response:
        return _health(await self._service.liveness())

    async def ready(self, request: Request) -> Response:
        return _health(await self._service.readiness(), self._service.index_problem())

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def debug_state(self, request: Request) -> Response:
        async with asyncio.timeout(_DEBUG_TIMEOUT_S):
            return JSONResponse(await asyncio.wrap_future(self._service.engine.debug_state()))

    async def drain(self, request: Request) -> Response:
        self._service.drain()
        return JSONResponse({"draining": True, "open": self._service.num_open})

    async def purge(self, request: Request) -> Response:
        return JSONResponse({"epoch": await asyncio.wrap_future(self._service.engine.purge())})


def _health(problem: str | None, index_problem: str | None = None) -> Response:
    """`index_problem` is only a detail of the answer: a worker outside the index is ready too."""
    detail = {} if index_problem is None else {"index": index_problem}
    if problem is None:
        return JSONResponse({"status": "ok", **detail})
    return JSONResponse({"status": "unavailable", "reason": problem, **detail}, status_code=503)


def _msgpack(message: object) -> Response:
    return Response(pack(message), media_type=CONTENT_TYPE)


def _refusal_response(failed: Failed) -> Response:
    return Response(pack(failed), STATUS_OF.get(failed.code, 500), media_type=CONTENT_TYPE)


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case RefusedError():
            return _refusal_response(error.failed)
        case ProtocolError():
            return _refusal_response(Failed("wrong_protocol", str(error), retryable=True))
        case WireError():
            return _refusal_response(Failed("invalid_request", str(error), retryable=False))
        case EngineDeadError():
            return _refusal_response(Failed("worker_lost", str(error), retryable=True))
        case _:
            return Response(status_code=400)  # the client left before its request was whole
