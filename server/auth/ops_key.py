"""Who may change something through the ops port: the holder of the ops key, or, without one, this machine alone.

Whether a tenant has sent a prompt is for the same: `/route/explain?tenant=` tells what its cache holds.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import AuthenticationError, ForbiddenError

_READING: Final = frozenset({"GET", "HEAD"})
_QUESTIONS: Final = frozenset({"/route/explain"})
"""Asked with a body, and changing nothing. A query names a tenant."""


class OpsKeyMiddleware:
    """Deny by default: whatever is neither read nor a known question needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: bytes | None, *, local: bool, has_tenants: bool = False) -> None:
        """`local`: only this machine reaches the ops port. `has_tenants`: API keys keep clients apart."""
        self._app = app
        self._digest = None if key is None else hashlib.sha256(b"Bearer " + key).digest()
        self._local = local
        self._has_tenants = has_tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _READING and not (scope["path"] in _QUESTIONS and self._may_ask(scope)):
            self._check(scope)
        await self._app(scope, receive, send)

    def _may_ask(self, scope: Scope) -> bool:
        return self._local or not (self._has_tenants or scope.get("query_string"))

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
