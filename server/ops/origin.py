"""A page of another site must not act on the ops port through an operator's browser.

Browsers say where a request comes from; everything else (curl, Prometheus, a gateway) sends neither header.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ForbiddenError
from server.http.middleware import send_error

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class SameOriginMiddleware:
    """Answers 403 to a change that another site's page asks for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE and _is_foreign(Headers(scope=scope)):
            await send_error(
                ForbiddenError("Pages of other sites may not use the ops port.", code="cross_origin"), send
            )
            return
        await self._app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    if (site := headers.get("sec-fetch-site")) is not None and site not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
