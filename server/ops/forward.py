"""The public API under a path of the ops port, for the chat page: same origin, so that no port needs CORS.

A request goes to the gateway's own public app, in process, with the key that the user typed: the ops port gives away
nothing that the public port would not.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX: Final = "/chat/api"


class ForwardMiddleware:
    """Sends what lies under `PREFIX` to `public`, everything else on."""

    def __init__(self, app: ASGIApp, public: ASGIApp) -> None:
        self._app = app
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX + "/"):
            path = scope["path"].removeprefix(PREFIX)
            await self._public({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        else:
            await self._app(scope, receive, send)
