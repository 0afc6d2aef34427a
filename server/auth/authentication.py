"""Authentication of both ports: API keys on the public one, the ops key for changes through the other.

Everything but health is denied by default, on the very path that the routes match. A URL that a framework rebuilds
holds the client's Host header, and is no safe ground for a decision (CVE-2026-48710): `scope["path"]` is.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth.api_keys import KeyFile
from server.auth.identity import IDENTITY, Identity
from server.auth.limits import AuthThrottle, KeyUsage, RateLimits, source_of
from server.errors import AuthenticationError, ForbiddenError
from server.request_context import context_of

OPEN_PATHS: Final = frozenset({"/health/live", "/health/ready"})
USAGE: Final = "headstart.usage"
MAX_KEY_BYTES: Final = 1024
_READING: Final = frozenset({"GET", "HEAD"})
_QUESTIONS: Final = frozenset({"/route/explain"})
"""POST routes of the ops port that change nothing. A query string names a tenant, whose cache the answer describes."""


class Authenticator:
    """Finds the identity of a request's sender by its `Authorization: Bearer KEY`. A key may hold spaces."""

    def __init__(self, keys: KeyFile | None, everyone: Identity) -> None:
        """Without `keys`, every request is one of `everyone`, who is trusted."""
        self._keys = keys
        self._everyone = everyone
        self.throttle = AuthThrottle()

    def authenticate(self, scope: Scope) -> Identity:
        """Raises AuthenticationError, or OverloadedError for a source that has failed too often."""
        if self._keys is None:
            return self._everyone
        source, key = source_of(scope), _bearer(scope)
        self.throttle.check(source, key)
        identity = self._keys.find(key)
        if identity is None:
            self.throttle.failed(source)
            raise AuthenticationError("A valid API key is needed: Authorization: Bearer KEY.")
        self.throttle.succeeded(source, key)
        return identity


def _bearer(scope: Scope) -> bytes:
    """Return the presented key; empty, which matches no entry, for none, several or a malformed one."""
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, rest = shown[0].partition(b" ") if len(shown) == 1 else (b"", b"", b"")
    key = rest.strip() if scheme.lower() == b"bearer" else b""
    return key if len(key) <= MAX_KEY_BYTES else b""


class AuthenticationMiddleware:
    """Puts an Identity, and the KeyUsage of a key with limits, into the scope."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, limits: RateLimits) -> None:
        self._app = app
        self._authenticator = authenticator
        self._limits = limits

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["path"] in OPEN_PATHS:
            return self._app(scope, receive, send)
        scope[IDENTITY] = identity = self._authenticator.authenticate(scope)
        usage = self._limits.admit(identity.key) if scope["method"] == "POST" else None
        return self._app(scope, receive, send) if usage is None else self._limited(usage, scope, receive, send)

    async def _limited(self, usage: KeyUsage, scope: Scope, receive: Receive, send: Send) -> None:
        scope[USAGE] = usage
        context_of(scope).key_headers = usage.headers
        try:
            await self._app(scope, receive, send)
        finally:
            usage.num_open -= 1


def usage_of(scope: Scope) -> KeyUsage | None:
    usage: KeyUsage | None = scope.get(USAGE)
    return usage


class OpsKeyMiddleware:
    """Requires `Authorization: Bearer KEY` for every change through the ops port; without a key, this machine."""

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
