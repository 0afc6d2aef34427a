"""Authentication of both ports: API keys on the public one, the ops key for changes through the other.

Everything except health is denied by default, by `scope["path"]`, which the routes match too. Do not authorise by
`request.url`: it contains the client's Host header (CVE-2026-48710).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth.identity import IDENTITY, Identity, KeyFile, digest_of
from server.auth.limits import AuthThrottle, KeyUsage, source_of
from server.errors import AuthenticationError, ForbiddenError
from server.request_context import CURRENT

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
MAX_KEY_BYTES: Final = 1024  # a longer key is refused unhashed; `headstart keys` makes shorter ones
TENANT_HEADER: Final = "x-headstart-tenant"
_READING: Final = frozenset({"GET", "HEAD"})
_QUESTIONS: Final = frozenset({"/route/explain", "/prefixes/compare"})
"""POST routes of the ops port that change nothing. A query string names a tenant, whose cache the answer describes."""


class Authenticator:
    """Finds the identity of a request's sender by its `Authorization: Bearer KEY`, or its `x-api-key: KEY`.

    A key may hold spaces. The key of a trusted front proves the header that names the tenant; no other key does.
    """

    def __init__(self, keys: KeyFile | None, everyone: Identity, tenant_header: str = TENANT_HEADER) -> None:
        """Without `keys`, all requests use the identity `everyone`."""
        self._keys = keys
        self._everyone = everyone
        self._tenant_header = tenant_header.lower().encode()
        self.throttle = AuthThrottle()

    def authenticate(self, scope: Scope) -> Identity:
        """Take the header of the tenant out of the scope, and return the sender's identity.

        Raises AuthenticationError, or OverloadedError for a wrong key of a source that has shown too many.
        Raises InvalidRequestError for a header of a trusted front that is not one name.
        """
        identity = self._everyone if self._keys is None else self._keys.find(_key(scope))
        if identity is None:
            self.throttle.failed(source_of(scope))
            raise AuthenticationError("A valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY.")
        if named := [value for name, value in scope["headers"] if name == self._tenant_header]:
            scope["headers"] = [header for header in scope["headers"] if header[0] != self._tenant_header]
            if identity.key.trusted_front and self._keys is not None:
                return self._keys.tenant_of(identity, named)
        return identity


def _key(scope: Scope) -> bytes:
    """Return the bearer key or, without an Authorization header, that of `x-api-key`; empty as in `_bearer`."""
    names = [name for name, _ in scope["headers"]]
    if b"authorization" in names or names.count(b"x-api-key") != 1:
        return _bearer(scope)
    key: bytes = scope["headers"][names.index(b"x-api-key")][1].strip()
    return key if len(key) <= MAX_KEY_BYTES else b""


def _bearer(scope: Scope) -> bytes:
    """Return the presented key; empty, which matches no entry, if there is not exactly one valid header."""
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, rest = shown[0].partition(b" ") if len(shown) == 1 else (b"", b"", b"")
    key = rest.strip() if scheme.lower() == b"bearer" else b""
    return key if len(key) <= MAX_KEY_BYTES else b""


def authenticated(app: ASGIApp, authenticator: Authenticator) -> ASGIApp:
    """Put an Identity into the scope, and count the requests of a key with limits."""

    def call(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["path"] in OPEN_PATHS:
            return app(scope, receive, send)
        scope[IDENTITY] = identity = authenticator.authenticate(scope)
        CURRENT.get().sender, usage = (identity.tenant, identity.key_name), identity.usage
        if usage is not None:
            CURRENT.get().limit_headers = usage.headers
            if scope["method"] == "POST":
                return limited(usage, scope, receive, send)
        return app(scope, receive, send)

    async def limited(usage: KeyUsage, scope: Scope, receive: Receive, send: Send) -> None:
        await usage.admit()
        try:
            await app(scope, receive, send)
        finally:
            usage.close()

    return call


def with_ops_key(app: ASGIApp, key: bytes | None, *, local: bool, has_tenants: bool = False) -> ASGIApp:
    """Require `Authorization: Bearer KEY` for every change through the ops port; without a key, a local client.

    A question about a tenant's cache counts as a change. `local`: only this machine reaches the ops port.
    `has_tenants`: API keys keep clients apart.
    """
    digest = None if key is None else digest_of(key)
    is_alone = local and key is None

    def call(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["method"] in _READING:
            is_open = "tenant" not in QueryParams(scope.get("query_string", b""))
        else:
            is_open = scope["path"] in _QUESTIONS and not (has_tenants or scope.get("query_string"))
        if not (is_open or is_alone):
            if digest is None:
                raise ForbiddenError("Others reach this port: start the gateway with --ops-key-file to allow this.")
            if not hmac.compare_digest(digest_of(_bearer(scope)), digest):
                raise AuthenticationError("The ops key is needed: Authorization: Bearer KEY.")
        return app(scope, receive, send)

    return call
