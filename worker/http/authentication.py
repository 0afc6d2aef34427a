"""Who may speak to a worker: gateways that know the cluster secret; without a secret, programs but no browser page.

Health and metrics are open. Browsers send `Origin` with every request that changes something, `Sec-Fetch-Site` where
they can, and `Accept-Language` always; gateways send none of them. A page whose own name leads to this machine (DNS
rebinding) reads with `Accept-Language` alone, but under a foreign Host. Gateways may use any name of a worker.
"""

from __future__ import annotations

import hmac
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.common.sockets import HostNames
from worker.wire import CONTENT_TYPE, Failed, pack_frame

_ADVICE: Final = "start the worker with --advertise-url to name it, or give the fleet a cluster secret"
_BROWSER_HEADERS: Final = frozenset({"accept-language", "referer"})
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


class ProgramsOnly:
    """Answers 403 to pages, and to browsers under an unknown Host.

    Known are `localhost`, this machine's name, `bound`, the host of `advertise_url`, and addresses that it is bound to.
    """

    def __init__(self, app: ASGIApp, bound: str, advertise_url: str | None) -> None:
        """`bound` is the value of --host."""
        self._app = app
        advertised = urlsplit(advertise_url or "").hostname or "localhost"
        self._hosts = HostNames(bound, (socket.gethostname(), bound, advertised))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        failed = Failed("forbidden", problem, retryable=True)
        await Response(pack_frame(failed), 403, media_type=CONTENT_TYPE)(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
            return "a worker does not speak to pages"
        host = headers.get("host")
        if host is None or not _BROWSER_HEADERS.intersection(headers.keys()) or host in self._hosts:
            return None
        return f"this worker does not answer to the Host {host!r:.300}: {_ADVICE}"
