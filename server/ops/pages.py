"""The pages of the ops port: plain files, no build step, nothing loaded from elsewhere, no inline script or style."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from server.errors import NotFoundError

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
_TYPES: Final = {".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    tag: str


class Pages:
    """Reads every file once, when the gateway starts: only what was there then can be asked for."""

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
