"""Authentication of both ports: API keys on the public one, the ops key for changes through the other.

Everything but health is denied by default, on the very path that the routes match. A URL that a framework rebuilds
holds the client's Host header, and is no safe ground for a decision (CVE-2026-48710): `scope["path"]` is.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth.api_keys import KeyEntry, KeyFile
from server.auth.identity import DEFAULT_TENANT, IDENTITY, Identity, KeyLimits, tenant_identity, tenant_salt
from server.auth.limits import AuthThrottle, Lease, RateLimits
from server.errors import AuthenticationError, ForbiddenError
from server.request_context import context_of

OPEN_PATHS: Final = frozenset({"/health/live", "/health/ready"})
LEASE: Final = "headstart.lease"
MAX_KEY_BYTES: Final = 1024
_READING: Final = frozenset({"GET", "HEAD"})
_QUESTIONS: Final = frozenset({"/route/explain"})
"""POST routes of the ops port that change nothing. A query string names a tenant, whose cache the answer describes."""


class Authenticator(Protocol):
    """Finds the identity of a request's sender."""

    def authenticate(self, scope: Scope) -> Identity:
        """Raises AuthenticationError, or OverloadedError for a source that has failed too often."""


class SingleTenant:
    """Takes every request as one trusted tenant's, where there are no API keys."""

    def __init__(self, cluster_secret: bytes) -> None:
        self._identity = tenant_identity(cluster_secret, DEFAULT_TENANT)

    def authenticate(self, scope: Scope) -> Identity:
        return self._identity


class KeyAuthenticator:
    """Requires a key of the file: `Authorization: Bearer KEY`. A key may hold spaces."""

    def __init__(self, cluster_secret: bytes, keys: KeyFile, throttle: AuthThrottle) -> None:
        self._cluster_secret = cluster_secret
        self._keys = keys
        self._throttle = throttle
        self._identities: dict[KeyEntry, Identity] = {}

    def authenticate(self, scope: Scope) -> Identity:
        key = _bearer(scope)
        self._throttle.check(scope, key)
        entry = self._keys.find(key)
        if entry is None:
            self._throttle.failed(scope)
            raise AuthenticationError("A valid API key is needed: Authorization: Bearer KEY.")
        self._throttle.succeeded(scope, key)
        identity = self._identities.get(entry)
        if identity is None:
            if len(self._identities) > 2 * len(self._keys):  # entries that a reload has replaced
                self._identities.clear()
            identity = self._identities[entry] = Identity(
                tenant=entry.tenant,
                salt=tenant_salt(self._cluster_secret, entry.tenant),
                may_prioritise=entry.may_prioritise,
                models=entry.models,
                limits=KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_streams),
                key_digest=entry.raw_digest,
            )
        return identity


def _bearer(scope: Scope) -> bytes:
    """Return the presented key; empty, which matches no entry, for none, several or a malformed one."""
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, rest = shown[0].partition(b" ") if len(shown) == 1 else (b"", b"", b"")
    key = rest.strip() if scheme.lower() == b"bearer" else b""
    return key if len(key) <= MAX_KEY_BYTES else b""


class AuthenticationMiddleware:
    """Puts an Identity, and the Lease of a key with limits, into the scope."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, limits: RateLimits) -> None:
        self._app = app
        self._authenticator = authenticator
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scope[IDENTITY] = identity = self._authenticator.authenticate(scope)
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
