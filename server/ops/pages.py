"""The pages of the ops port: plain files, no build step, nothing loaded from elsewhere, no inline script or style.

They stay on one origin: the chat page reaches the public API under a path of the ops port, and pages of other sites
may change nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ForbiddenError
from server.http.middleware import send_error

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


def page_routes() -> list[Route]:
    """Return the routes of both pages and of their files."""
    files = StaticFiles(directory=FOLDER)

    async def file(request: Request, name: str = "") -> Response:
        response = await files.get_response(name or request.path_params["name"], request.scope)
        response.headers.update(SECURITY_HEADERS)
        return response

    async def home(request: Request) -> Response:
        return RedirectResponse("dashboard", status_code=307)

    return [
        Route("/", home, methods=["GET"]),
        Route("/dashboard", partial(file, name="dashboard.html"), methods=["GET"]),
        Route("/chat", partial(file, name="chat.html"), methods=["GET"]),
        Route("/pages/{name}", file, methods=["GET"]),
    ]


class PagesMiddleware:
    """Sends requests under `CHAT_API` to the public app, in process, and all others on.

    They carry the key that the user typed: the ops port gives away nothing that the public port would not. A change
    that another site's page asks for, through an operator's browser, is answered 403.
    """

    def __init__(self, app: ASGIApp, public: ASGIApp) -> None:
        self._app = app
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS and _is_foreign(Headers(scope=scope)):
            error = ForbiddenError("Pages of other sites may not use the ops port.", code="cross_origin")
            await send_error(error, send)
        elif scope["type"] == "http" and scope["path"].startswith(CHAT_API + "/"):
            path = scope["path"].removeprefix(CHAT_API)
            await self._public({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    """Browsers name a request's origin in headers; programs (curl, Prometheus, a gateway) send none of them."""
    if (site := headers.get("sec-fetch-site")) is not None and site not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
