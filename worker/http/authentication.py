"""A worker serves gateways that know the cluster secret; only health and metrics are for everybody."""

from __future__ import annotations

import hmac
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.wire import CONTENT_TYPE, Failed, pack_frame

OPEN_PATHS: Final = frozenset({"/health/live", "/health/ready", "/metrics"})


class GatewayOnly:
    """Asks for `Authorization: Bearer TOKEN` on every other path, known or not; compares in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_gateway(scope):
            await self._app(scope, receive, send)
            return
        failed = Failed("unauthorized", "the token of the cluster secret is needed", retryable=True)
        await Response(pack_frame(failed), 401, media_type=CONTENT_TYPE)(scope, receive, send)

    def _is_gateway(self, scope: Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._expected)
