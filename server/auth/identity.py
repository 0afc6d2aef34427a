"""The identity behind a request, and the salt that keeps one tenant's cache from another's.

tenant salt  = HMAC(cluster secret, "tenant" || tenant)       made here, never taken from a request
request salt = HMAC(tenant salt, "cache_salt" || cache_salt)  a request can narrow, never widen
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from starlette.types import Scope

from server.errors import ForbiddenError

DEFAULT_TENANT: Final = "default"
IDENTITY: Final = "headstart.identity"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_streams: int | None = None


NO_LIMITS: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    """A tenant, and what the key that was presented may do."""

    tenant: str
    salt: bytes = field(repr=False)
    may_prioritise: bool = False
    models: frozenset[str] | None = None
    """The model names that it may use; None: all."""
    limits: KeyLimits = NO_LIMITS
    key_digest: bytes = field(default=b"", repr=False)
    """The digest of the key, under which its usage is counted. Empty without API keys."""
    tag: str = field(init=False, repr=False)
    """The name by which workers tell tenants apart; it reveals nothing else about them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", blake2b(self.salt, digest_size=8, person=b"tenant tag").hexdigest())

    def may_use(self, *names: str) -> bool:
        """Return whether the key may use a model with any of these names."""
        return self.models is None or not self.models.isdisjoint(names)


def identity_of(scope: Scope) -> Identity:
    """Return the identity that AuthenticationMiddleware has put into the scope."""
    identity: Identity = scope[IDENTITY]
    return identity


def tenant_identity(cluster_secret: bytes, tenant: str) -> Identity:
    """Return a tenant's identity without the limits of a key."""
    return Identity(tenant, tenant_salt(cluster_secret, tenant), may_prioritise=True)


def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    return hmac.digest(cluster_secret, b"tenant\0" + tenant.encode(), "sha256")


def request_salt(identity: Identity, cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return identity.salt
    return hmac.digest(identity.salt, b"cache_salt\0" + cache_salt.encode(), "sha256")


def allowed_priority(identity: Identity, priority: int | None) -> int:
    """Return the priority of a request, 0 by default. Raises ForbiddenError where the key may not set one."""
    if priority and not identity.may_prioritise:
        raise ForbiddenError("This key may not set a priority.", param="priority")
    return priority or 0
