"""The public app: OpenAI's and Anthropic's routes and health, nothing else. Operations are in `server.ops.app`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from ipaddress import ip_network

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cache.records import WorkerMember
from server.api.chat import ChatEndpoint
from server.api.completions import CompletionEndpoint
from server.api.embeddings import EmbeddingEndpoint
from server.api.endpoint import EndpointServices, GenerateEndpoint
from server.api.engine.text import ENGINE_PATHS, PoolingEndpoint
from server.api.formatting import json_response
from server.api.messages import MessagesEndpoint
from server.api.models import ModelsApi
from server.api.responses import ResponsesEndpoint
from server.api.tokenize import TokenizeApi
from server.auth.authentication import Authenticator, authenticated
from server.config import GatewayConfig
from server.errors import MESSAGES_PATH, MODELS_PATH, RESPONSES_PATH, UnavailableError
from server.http.forwarded import behind_fronts
from server.http.middleware import Application, body_limit, with_context
from server.metrics import GatewayMetrics
from server.request_context import RequestContext


class PublicApi:
    """The handlers of the public port."""

    def __init__(self, endpoint: EndpointServices, live_workers: Callable[[], Sequence[WorkerMember]]) -> None:
        """`live_workers` returns the workers that a request could be sent to."""
        self.draining = False
        self.services = endpoint
        self._live_workers = live_workers
        self._models = endpoint.models
        self._chats = ChatEndpoint(endpoint)
        self._messages = MessagesEndpoint(endpoint)
        self._responses = ResponsesEndpoint(endpoint)
        self.endpoints: dict[str, GenerateEndpoint] = {
            "/v1/chat/completions": self._chats,
            "/v1/completions": CompletionEndpoint(endpoint),
            RESPONSES_PATH: self._responses,
            MESSAGES_PATH: self._messages,
            **{path: PoolingEndpoint(endpoint) for path in ENGINE_PATHS},
            "/v1/embeddings": EmbeddingEndpoint(endpoint),
        }
        """The endpoints that run a model, by path; all take POST."""

    def routes(self) -> list[Route]:
        models, texts = ModelsApi(self._models), TokenizeApi(self.services, self._chats)
        return [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in self.endpoints.items()),
            Route(f"{MESSAGES_PATH}/count_tokens", self._messages.count, methods=["POST"]),
            Route(f"{RESPONSES_PATH}/input_tokens", self._responses.count, methods=["POST"]),
            Route(f"{RESPONSES_PATH}/compact", self._responses.compact, methods=["POST"]),
            Route(MODELS_PATH, models.list, methods=["GET"]),
            Route(f"{MODELS_PATH}/{{model:path}}", models.get, methods=["GET"]),
            Route("/tokenize", texts.tokenize, methods=["POST"]),
            Route("/detokenize", texts.detokenize, methods=["POST"]),
            Route("/tokenizer_info", texts.tokenizer_info, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/health/live", self.live, methods=["GET"]),
            *(Route(path, self.ready, methods=["GET"]) for path in ("/health/ready", "/health", "/ping")),
        ]

    async def version(self, request: Request) -> Response:
        return json_response({"version": version("headstart")})

    async def live(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Return 200 if at least one worker can serve a request, of any model."""
        if self.draining:
            raise UnavailableError("This gateway is draining.", retry_after_s=1.0)
        workers = [worker for worker in self._live_workers() if self._models.revision(worker) is not None]
        if not workers:
            raise UnavailableError("No worker is ready.", retry_after_s=1.0)
        return json_response({"status": "ok", "workers": len(workers)})


def public_app(
    config: GatewayConfig,
    api: PublicApi,
    metrics: GatewayMetrics,
    authenticator: Authenticator,
    count_usage: Callable[[RequestContext], None],
) -> Application:
    fronts = Middleware(behind_fronts, list(map(ip_network, config.trusted_proxies)))
    other_origins = Middleware(  # before the keys: preflights need none
        CORSMiddleware,
        allow_origins=config.cors_origin,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", "retry-after-ms", "openai-processing-ms"),
    )
    return Application(
        routes=api.routes(),
        middleware=[
            *([fronts] if config.trusted_proxies else []),
            *([other_origins] if config.cors_origin else []),
            Middleware(with_context, metrics, access_log=config.access_log, count_usage=count_usage),
            Middleware(authenticated, authenticator),
            Middleware(body_limit, config.max_body_bytes, api.services.models.max_body_bytes),
        ],
    )
