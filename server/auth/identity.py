"""The identity behind a request, and the salt that keeps one tenant's cache from another's.

tenant salt  = HMAC(cluster secret, "tenant" || tenant)       made here, never taken from a request
request salt = HMAC(tenant salt, "cache_salt" || cache_salt)  a request can narrow, never widen
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Final

from starlette.types import Scope

from server.auth.limits import KeyEntry, KeyUsage
from server.errors import ForbiddenError

DEFAULT_TENANT: Final = "default"
IDENTITY: Final = "headstart.identity"
DIGEST_PREFIX: Final = "sha256:"


class Identity:
    """A tenant, and what the key that was presented may do."""

    __slots__ = ("key", "salt", "tag", "tenant", "usage")

    def __init__(self, cluster_secret: bytes, key: KeyEntry, usage: KeyUsage | None = None) -> None:
        """`usage` is what an earlier version of the key's entry has used."""
        self.key = key
        self.usage: KeyUsage | None = None
        """None: the key has no limits."""
        if (key.requests_per_minute, key.tokens_per_minute, key.max_streams) != (None, None, None):
            self.usage = usage or KeyUsage()
            self.usage.apply(key)
        self.tenant = key.tenant
        self.salt = tenant_salt(cluster_secret, key.tenant)
        self.tag = blake2b(self.salt, digest_size=8, person=b"tenant tag").hexdigest()
        """The name by which workers tell tenants apart; it reveals nothing else about them."""

    def may_use(self, *names: str) -> bool:
        """Return whether the key may use a model with any of these names."""
        return self.key.models is None or not self.key.models.isdisjoint(names)


def identity_of(scope: Scope) -> Identity:
    """Return the identity that AuthenticationMiddleware has put into the scope."""
    identity: Identity = scope[IDENTITY]
    return identity


def tenant_identity(cluster_secret: bytes, tenant: str) -> Identity:
    """Return a tenant's identity without the limits of a key."""
    return Identity(cluster_secret, KeyEntry(digest="", tenant=tenant, may_prioritise=True))


def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    return hmac.digest(cluster_secret, b"tenant\0" + tenant.encode(), "sha256")


def request_salt(identity: Identity, cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return identity.salt
    return hmac.digest(identity.salt, b"cache_salt\0" + cache_salt.encode(), "sha256")


def allowed_priority(identity: Identity, priority: int | None) -> int:
    """Return the priority of a request, 0 by default. Raises ForbiddenError where the key may not set one."""
    if priority and not identity.key.may_prioritise:
        raise ForbiddenError("This key may not set a priority.", param="priority")
    return priority or 0
