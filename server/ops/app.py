"""The ops port: for operators, never for clients.

GET /metrics /workers /index /prefixes /events /health/live /health/ready
POST /route/explain /drain /workers/{id}/drain|purge
GET /dashboard /chat /pages/...                               /chat/api/...: the public API, for the chat page
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from cache.records import Candidate
from server.app import PublicApi, json_response
from server.auth.authentication import OpsKeyMiddleware
from server.auth.identity import DEFAULT_TENANT, Identity
from server.errors import InvalidRequestError
from server.http.middleware import BodyLimitMiddleware, ErrorMiddleware, RequestContextMiddleware
from server.metrics import GatewayMetrics
from server.ops.events import EventsEndpoint
from server.ops.feed import Feed
from server.ops.forward import ForwardMiddleware
from server.ops.origin import SameOriginMiddleware
from server.ops.pages import Pages
from server.ops.prefix_tree import SharedPrefix
from server.router.placement import RouteRequest
from server.schema.decoding import decode_json, inspect

MAX_BODY_BYTES: Final = 32 << 20
MAX_PREFIXES: Final = 1000
ACTIONS: Final = ("drain", "purge")
"""What an operator may do with one worker."""


@dataclass(frozen=True, slots=True, eq=False)
class OpsServices:
    page: Callable[[], Awaitable[bytes]]
    """What /metrics shows."""
    metrics: GatewayMetrics
    """Of the ops port itself."""
    api: PublicApi
    of_tenant: Callable[[str], Identity]
    """Whose cache an explanation speaks of."""
    explain: Callable[[RouteRequest], Awaitable[dict[str, Any]]]
    candidates: Callable[[], Sequence[Candidate]]
    index_state: Callable[[], dict[str, Any]]
    index_report: Callable[[], Awaitable[dict[str, Any]]]
    prefixes: Callable[[int, str | None], Sequence[SharedPrefix]]
    """At most so many, of one model or of all."""
    drain: Callable[[], None]
    act: Callable[[str, str], Awaitable[dict[str, Any]]]
    """Does one of ACTIONS at a worker."""
    feed: Feed
    public: ASGIApp
    key: bytes | None = None
    """What a change through this port needs."""
    local: bool = True
    """Only this machine reaches this port."""
    has_tenants: bool = False
    """API keys keep clients apart."""


class OpsApi:
    def __init__(self, services: OpsServices) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/workers", self.workers, methods=["GET"]),
            Route("/index", self.index, methods=["GET"]),
            Route("/prefixes", self.prefixes, methods=["GET"]),
            Route("/route/explain", self.explain, methods=["POST"]),
            Route("/drain", self.drain, methods=["POST"]),
            *(Route(f"/workers/{{worker_id}}/{action}", self._act(action), methods=["POST"]) for action in ACTIONS),
            Route("/events", EventsEndpoint(self._services.feed), methods=["GET"]),
            *Pages().routes(),
            Route("/health/live", self._services.api.live, methods=["GET"]),
            Route("/health/ready", self._services.api.ready, methods=["GET"]),
        ]

    async def metrics(self, request: Request) -> Response:
        return Response(await self._services.page(), media_type=CONTENT_TYPE_LATEST)

    async def workers(self, request: Request) -> Response:
        """Every live worker: what it says of itself, and its load as this gateway last heard it."""
        workers = [
            {
                **_fields(candidate.member),
                "load": msgspec.structs.asdict(candidate.load),
                "load_age_s": candidate.load_age_s,
            }
            for candidate in self._services.candidates()
        ]
        return json_response({"workers": workers, "index": self._services.index_state()})

    async def index(self, request: Request) -> Response:
        """What Redis says of every worker, read now: blocks held, lease, load."""
        return json_response(await self._services.index_report())

    async def prefixes(self, request: Request) -> Response:
        """Return the prefixes that this gateway's requests share most: ?limit=20&model=NAME."""
        limit = request.query_params.get("limit", "20")
        if not limit.isdecimal() or not 0 < int(limit) <= MAX_PREFIXES:
            raise InvalidRequestError(f"limit must be 1 to {MAX_PREFIXES}.", param="limit")
        prefixes = self._services.prefixes(int(limit), request.query_params.get("model"))
        return json_response({"prefixes": [_fields(prefix) for prefix in prefixes]})

    async def explain(self, request: Request) -> Response:
        """For a chat or completion body: where it would go now, and what every worker would cost. Nothing is sent.

        `?tenant=NAME` asks about that tenant's cache.
        """
        body = await request.body()
        fields = decode_json(body, msgspec.json.decode, inspected=await inspect(body))
        if not isinstance(fields, dict):
            raise InvalidRequestError("The body is that of a chat or a completion request.")
        endpoint = self._services.api.chat if "messages" in fields else self._services.api.completions
        tenant = request.query_params.get("tenant", DEFAULT_TENANT)
        prepared = await endpoint.prepare(body, self._services.of_tenant(tenant))
        spec = prepared.specs[0]
        return json_response(await self._services.explain(spec.route_request(spec.prompt_hashes())))

    async def drain(self, request: Request) -> Response:
        self._services.drain()
        return json_response({"draining": True})

    def _act(self, action: str) -> Callable[[Request], Awaitable[Response]]:
        async def act(request: Request) -> Response:
            return json_response(await self._services.act(request.path_params["worker_id"], action))

        return act


def _fields(value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = asdict(value)
    return fields


def ops_app(services: OpsServices) -> ASGIApp:
    app: ASGIApp = Router(routes=OpsApi(services).routes(), redirect_slashes=False)
    app = BodyLimitMiddleware(app, MAX_BODY_BYTES)
    app = OpsKeyMiddleware(app, services.key, local=services.local, has_tenants=services.has_tenants)
    app = ErrorMiddleware(app, services.metrics)
    app = RequestContextMiddleware(app, services.metrics)
    return SameOriginMiddleware(ForwardMiddleware(app, services.public))
