"""The ops port: for operators, never for clients.

GET /metrics /workers /index /prefixes /decisions/{id} /events /history /health/live /health/ready
POST /route/explain /prefixes/compare /drain /workers/{id}/drain|purge
GET /dashboard /chat /pages/...                               /chat/api/...: the public API, for the chat page
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.formatting import json_response
from server.auth.authentication import with_ops_key
from server.auth.identity import DEFAULT_TENANT, Identity
from server.errors import ForbiddenError, InvalidRequestError, NotFoundError, UnavailableError
from server.http.middleware import Application, body_limit, send_error, with_context
from server.metrics import GatewayMetrics
from server.ops.feed import Feed
from server.ops.overview import Overview
from server.ops.prefix import compare, path_of
from server.request.choice import GenerationSpec
from server.request_context import CURRENT
from server.router.decisions import MAX_RECENT, PER_S
from server.schema.decoding import read_json
from server.workers.connection import WorkerError
from worker.wire import SamplingDefaults

MAX_BODY_BYTES: Final = 32 << 20  # as much as a gateway takes by default
MAX_PREFIXES: Final = 1000  # in one answer, each with the workers that hold it
ACTIONS: Final = ("drain", "purge")
"""Actions of an operator on one worker."""
FOLDER: Final = Path(__file__).parent.parent / "pages"
SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
CHAT_API: Final = "/chat/api"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Pair(msgspec.Struct):
    """Two bodies of requests."""

    a: msgspec.Raw
    b: msgspec.Raw


_PAIR: Final = msgspec.json.Decoder(Pair)
_BODY: Final = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True, eq=False)
class OpsApi:
    """The handlers of the ops port."""

    overview: Overview
    feed: Feed
    identity_for: Callable[[str], Identity]
    """Returns the identity of a tenant, whose cache an explanation is about."""
    on_drain: Callable[[], None]

    def routes(self) -> list[Route]:
        get: dict[str, Callable[..., Any]] = {
            "/metrics": self.metrics,
            "/workers": self.workers,
            "/index": self.index,
            "/prefixes": self.prefixes,
            "/decisions/{id}": self.decisions,
            "/events": self.feed,
            "/history": self.history,
            "/health/live": self.overview.api.live,
            "/health/ready": self.overview.api.ready,
        }
        post = {"/route/explain": self.explain, "/prefixes/compare": self.compare, "/drain": self.drain}
        post |= {f"/workers/{{worker_id}}/{action}": partial(self.act, action=action) for action in ACTIONS}
        return [
            *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in post.items()),
            *page_routes(),
        ]

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.overview.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def workers(self, request: Request) -> Response:
        """Return every live worker with its last report to this gateway; `?digests=1`: with those of its prompts."""
        return json_response(self.overview.workers(with_digests=request.query_params.get("digests") == "1"))

    async def index(self, request: Request) -> Response:
        """Read the registry from Redis: blocks, lease and load of every worker."""
        return json_response(await self.overview.index_report())

    async def prefixes(self, request: Request) -> Response:
        """Return the prefixes that requests share most: ?limit=20&model=NAME."""
        limit = request.query_params.get("limit", "20")
        if not limit.isdecimal() or not 0 < int(limit) <= MAX_PREFIXES:
            raise InvalidRequestError(f"limit must be 1 to {MAX_PREFIXES}.", param="limit")
        return json_response({"prefixes": self.overview.prefixes(int(limit), request.query_params.get("model"))})

    async def decisions(self, request: Request) -> Response:
        """Return the decisions about a request and its times: by its id, its answer's or its client's.

        Raises NotFoundError.
        """
        id_ = request.path_params["id"]
        if not (found := self.overview.decisions.find(id_)):
            kept = f"the last {MAX_RECENT} are kept, at most {PER_S:g} a second"
            ids = "Give the request's id, its answer's, or the client's own x-request-id."
            logs = "The usage log and the access log have every request."
            raise NotFoundError(f"No recorded decision is about {id_!r:.200}: {kept}. {ids} {logs}")
        return json_response({"decisions": found})

    async def history(self, request: Request) -> Response:
        """Return what this gateway has done in each minute of the last day."""
        return await asyncio.to_thread(lambda: json_response(self.overview.day.report()))

    async def compare(self, request: Request) -> Response:
        """Compare the prompts of two bodies: where they differ first, with sixty tokens of each. Sends nothing."""
        pair = await read_json(await request.body(), _PAIR.decode)
        identity, specs, bodies = self.identity_for(DEFAULT_TENANT), list[GenerationSpec](), list[dict[str, Any]]()
        for name, raw in (("a", bytes(pair.a)), ("b", bytes(pair.b))):
            body = await read_json(raw, _BODY.decode)
            try:
                path = path_of(raw, body)
                prepared = await self.overview.api.endpoints[path].prepared(path, raw, identity)
                prepared.specs[0].model.check_readable(prepared.specs[0].model.name)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{name}: {error.message}", param=error.param) from error
            specs.append(prepared.specs[0])
            bodies.append(body)
        return json_response(await asyncio.to_thread(compare, specs[0], specs[1], bodies))

    async def explain(self, request: Request) -> Response:
        """Return which worker a chat or completion would get now, and its cost at every worker. Places nothing.

        `?tenant=NAME` uses that tenant's cache.
        """
        body = await request.body()
        fields = await read_json(body, _BODY.decode)
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        tenant = request.query_params.get("tenant", DEFAULT_TENANT)
        prepared = await self.overview.api.endpoints[path].prepared(path, body, self.identity_for(tenant))
        spec = prepared.specs[0]
        sampling, names = msgspec.to_builtins(spec.sampling), SamplingDefaults.__struct_fields__
        shown = {name: sampling[name] for name in names if spec.text_request is None}  # else they are the engine's
        return json_response(
            await self.overview.explain(spec.route_request())
            | {"sampling_params": shown, "repaired": CURRENT.get().repairs}
        )

    async def drain(self, request: Request) -> Response:
        self.on_drain()
        return json_response({"draining": True})

    async def act(self, request: Request, action: str) -> Response:
        """Drain a worker, or purge its cache. Raises NotFoundError or UnavailableError."""
        worker_id = request.path_params["worker_id"]
        workers = self.overview.fleet.workers()
        member = next((member for member in workers if member.worker_id == worker_id), None)
        if member is None:
            raise NotFoundError(f"There is no worker {worker_id!r:.200}; GET /workers lists them.")
        try:
            answer = await self.overview.api.services.requests.client.act(member.url, action)
        except WorkerError as error:
            raise UnavailableError(f"Worker {worker_id} did not {action}: {error}.") from error
        return json_response({"worker": worker_id, **answer})


def page_routes() -> list[Route]:
    """Return the routes of both pages and of their files, which load nothing from other servers."""
    files = StaticFiles(directory=FOLDER)

    async def file(request: Request, name: str = "") -> Response:
        response = await files.get_response(name or request.path_params["name"], request.scope)
        response.headers.update(SECURITY_HEADERS)
        return response

    return [
        Route("/", RedirectResponse("dashboard", status_code=307), methods=["GET"]),
        Route("/dashboard", partial(file, name="dashboard.html"), methods=["GET"]),
        Route("/chat", partial(file, name="chat.html"), methods=["GET"]),
        Route("/pages/{name}", file, methods=["GET"]),
    ]


def with_chat_api(app: ASGIApp, public: ASGIApp) -> ASGIApp:
    """Send requests under `CHAT_API` to the public app, in process, and all others to the ops app.

    The chat page sends the API key that the user typed, so it has the access of the public port. A page of another site
    in an operator's browser gets 403 if its request changes something.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS and _is_foreign(Headers(scope=scope)):
            error = ForbiddenError("Pages of other sites may not use the ops port.", code="cross_origin")
            await send_error(error, send)
        elif scope["type"] == "http" and scope["path"].startswith(CHAT_API + "/"):
            path = scope["path"].removeprefix(CHAT_API)
            await public({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        else:
            await app(scope, receive, send)

    return call


def _is_foreign(headers: Headers) -> bool:
    """Return whether a page of another site sent the request. Only browsers name an origin in headers."""
    if (site := headers.get("sec-fetch-site")) is not None and site not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def ops_app(api: OpsApi, public: ASGIApp, key: bytes | None, *, local: bool, has_tenants: bool) -> Application:
    """Return the app. Requests that change something need the `key`. `local`: only this machine reaches the port."""
    return Application(
        routes=api.routes(),
        middleware=[
            Middleware(with_chat_api, public),
            Middleware(with_context, GatewayMetrics()),  # its own: requests of operators are not traffic
            Middleware(with_ops_key, key, local=local, has_tenants=has_tenants),
            Middleware(body_limit, MAX_BODY_BYTES),
        ],
    )
