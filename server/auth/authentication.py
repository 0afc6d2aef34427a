"""Nothing but health is answered to a stranger: deny by default, decided on the very path that the routes match.

A request's URL as a framework rebuilds it holds the client's Host header; that path is no safe ground for a decision
(CVE-2026-48710). `scope["path"]` is what the router goes by, so that what passes here is what is served there.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth.identity import IDENTITY, Identities
from server.auth.limits import Lease, RateLimits
from server.request_context import context_of

OPEN_PATHS: Final = frozenset({"/health/live", "/health/ready"})
LEASE: Final = "headstart.lease"


class AuthenticationMiddleware:
    """Puts an Identity, and the Lease of a key with limits, into the scope. Errors are ErrorMiddleware's."""

    def __init__(self, app: ASGIApp, identities: Identities, limits: RateLimits) -> None:
        self._app = app
        self._identities = identities
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scope[IDENTITY] = identity = self._identities.identify(scope)
        lease = self._limits.admit(identity) if scope["method"] == "POST" else None
        if lease is None:
            await self._app(scope, receive, send)
            return
        scope[LEASE] = lease
        context_of(scope).headers = lease.headers
        try:
            await self._app(scope, receive, send)
        finally:
            lease.close()


def lease_of(scope: Scope) -> Lease | None:
    lease: Lease | None = scope.get(LEASE)
    return lease
