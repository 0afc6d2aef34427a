"""Who may change something through the ops port: the holder of the ops key, or, without one, this machine alone."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import AuthenticationError, ForbiddenError

_READING: Final = frozenset({"GET", "HEAD"})
_QUESTIONS: Final = frozenset({"/route/explain"})
"""Asked with a body, and changing nothing."""


class OpsKeyMiddleware:
    """Deny by default: whatever is neither read nor a known question needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: bytes | None, *, local: bool) -> None:
        """`local`: only this machine reaches the ops port."""
        self._app = app
        self._digest = None if key is None else hashlib.sha256(b"Bearer " + key).digest()
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _READING and scope["path"] not in _QUESTIONS:
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises AuthenticationError or ForbiddenError."""
        if self._digest is None:
            if not self._local:
                raise ForbiddenError("Others reach this port: start the gateway with --ops-key-file to allow this.")
            return
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        given = hashlib.sha256(shown[0] if len(shown) == 1 else b"").digest()
        if not hmac.compare_digest(given, self._digest):
            raise AuthenticationError("The ops key is needed: Authorization: Bearer KEY.")
