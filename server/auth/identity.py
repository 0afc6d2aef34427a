"""Who asks, and the salt that keeps one tenant's cache from another's.

tenant salt  = HMAC(cluster secret, "tenant" || tenant)       drawn here, never taken from a request
request salt = HMAC(tenant salt, "cache_salt" || cache_salt)  a request can narrow, never widen
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Protocol

from starlette.types import Scope

from server.auth.api_keys import KeyEntry, KeyFile
from server.auth.throttle import FailedAuth
from server.errors import AuthenticationError, ForbiddenError

DEFAULT_TENANT: Final = "default"
IDENTITY: Final = "headstart.identity"
MAX_KEY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Of one key; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_streams: int | None = None


NO_LIMITS: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    tenant: str
    salt: bytes = field(repr=False)
    may_prioritise: bool = False
    models: frozenset[str] | None = None
    """The names it may use; None: all."""
    limits: KeyLimits = NO_LIMITS
    key_digest: bytes = field(default=b"", repr=False)
    """Of the key that was presented: what its limits are counted under. Empty without keys."""

    @property
    def tag(self) -> str:
        """What workers know the tenant by: it tells tenants apart and nothing of them."""
        return blake2b(self.salt, digest_size=8, person=b"tenant tag").hexdigest()

    def may_use(self, *names: str) -> bool:
        """Whether one of a model's names is among those of the key."""
        return self.models is None or not self.models.isdisjoint(names)


class Identities(Protocol):
    """Authentication: the answer to who sent a request."""

    def identify(self, scope: Scope) -> Identity:
        """Raises AuthenticationError, or OverloadedError for a source that has failed too often."""

    def of_tenant(self, tenant: str) -> Identity:
        """For operators, who may ask in any tenant's name."""


def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    return hmac.digest(cluster_secret, b"tenant\0" + tenant.encode(), "sha256")


def request_salt(identity: Identity, cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return identity.salt
    return hmac.digest(identity.salt, b"cache_salt\0" + cache_salt.encode(), "sha256")


def allowed_priority(identity: Identity, priority: int | None) -> int:
    """Raises ForbiddenError when this key may not choose its place in the queue."""
    if priority and not identity.may_prioritise:
        raise ForbiddenError("This key may not set a priority.", param="priority")
    return priority or 0


def identity_of(scope: Scope) -> Identity:
    """Who sent the request, once `server.auth.authentication` has let it in."""
    identity: Identity = scope[IDENTITY]
    return identity


class SingleTenant:
    """Without API keys everybody is the same trusted tenant."""

    def __init__(self, cluster_secret: bytes) -> None:
        self._cluster_secret = cluster_secret
        self._identity = self.of_tenant(DEFAULT_TENANT)

    def identify(self, scope: Scope) -> Identity:
        return self._identity

    def of_tenant(self, tenant: str) -> Identity:
        return Identity(tenant, tenant_salt(self._cluster_secret, tenant), may_prioritise=True)


class KeyHolders:
    """Everybody has to show a key of the file: `Authorization: Bearer KEY`; a key may hold spaces."""

    def __init__(self, cluster_secret: bytes, keys: KeyFile, failed: FailedAuth) -> None:
        self._cluster_secret = cluster_secret
        self._keys = keys
        self._failed = failed
        self._identities: dict[KeyEntry, Identity] = {}

    def identify(self, scope: Scope) -> Identity:
        key = _bearer(scope)
        self._failed.check(scope, key)
        entry = self._keys.find(key)
        if entry is None:
            self._failed.record(scope)
            raise AuthenticationError("A valid API key is needed: Authorization: Bearer KEY.")
        self._failed.succeeded(scope, key)
        identity = self._identities.get(entry)
        if identity is None:
            if len(self._identities) > 2 * len(self._keys):  # of entries that a reload has replaced
                self._identities.clear()
            identity = self._identities[entry] = self._identity(entry)
        return identity

    def of_tenant(self, tenant: str) -> Identity:
        return Identity(tenant, tenant_salt(self._cluster_secret, tenant), may_prioritise=True)

    def _identity(self, entry: KeyEntry) -> Identity:
        return Identity(
            tenant=entry.tenant,
            salt=tenant_salt(self._cluster_secret, entry.tenant),
            may_prioritise=entry.may_prioritise,
            models=entry.models,
            limits=KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_streams),
            key_digest=entry.raw_digest,
        )


def _bearer(scope: Scope) -> bytes:
    """The presented key; empty, which no entry's digest is of, for none, several or a misshapen one."""
    key = b""
    num_headers = 0
    for name, value in scope["headers"]:
        if name == b"authorization":
            num_headers += 1
            scheme, _, rest = value.partition(b" ")
            key = rest.strip() if scheme.lower() == b"bearer" else b""
    return key if num_headers == 1 and len(key) <= MAX_KEY_BYTES else b""
