"""The pages of the ops port: plain files, no build step, nothing loaded from elsewhere, no inline script or style.

They stay on one origin: the chat page reaches the public API under a path of the ops port, and pages of other sites
may change nothing.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ForbiddenError, NotFoundError
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
_TYPES: Final = {".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    tag: str


class Pages:
    """Serves the files that were in the folder when the gateway started."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.is_file()}

    def routes(self) -> list[Route]:
        return [
            Route("/", self.home, methods=["GET"]),
            Route("/dashboard", self._page("dashboard.html"), methods=["GET"]),
            Route("/chat", self._page("chat.html"), methods=["GET"]),
            Route("/pages/{name}", self.file, methods=["GET"]),
        ]

    async def home(self, request: Request) -> Response:
        return RedirectResponse("dashboard", status_code=307)

    async def file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["name"])

    def _page(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def page(request: Request) -> Response:
            return self._answer(request, name)

        return page

    def _answer(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise NotFoundError(f"There is no page {name!r:.80}.")
        headers = {**SECURITY_HEADERS, "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return _File(body, media_type, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')


class ChatApiMiddleware:
    """Sends what lies under `CHAT_API` to the public app, in process, everything else on.

    The request carries the key that the user typed: the ops port gives away nothing that the public port would not.
    """

    def __init__(self, app: ASGIApp, public: ASGIApp) -> None:
        self._app = app
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(CHAT_API + "/"):
            path = scope["path"].removeprefix(CHAT_API)
            await self._public({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        else:
            await self._app(scope, receive, send)


class SameOriginMiddleware:
    """Answers 403 to a change that another site's page asks for, through an operator's browser.

    Browsers name a request's origin in headers; programs (curl, Prometheus, a gateway) send none of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS and _is_foreign(Headers(scope=scope)):
            error = ForbiddenError("Pages of other sites may not use the ops port.", code="cross_origin")
            await send_error(error, send)
        else:
            await self._app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    if (site := headers.get("sec-fetch-site")) is not None and site not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
