"""The identity behind a request, and the salt that keeps one tenant's cache from another's.

tenant salt  = HMAC(cluster secret, "tenant" || tenant)       made here, never taken from a request
request salt = HMAC(tenant salt, "cache_salt" || cache_salt)  a request can narrow, never widen
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.types import Scope

from server.errors import ForbiddenError

DEFAULT_TENANT: Final = "default"
IDENTITY: Final = "headstart.identity"
DIGEST_PREFIX: Final = "sha256:"

_Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}$")]
_Limit = Annotated[int, Meta(ge=1, le=10**12)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[keys]]` table of the key file."""

    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
    tenant: _Label
    name: _Label | None = None
    models: frozenset[str] | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_streams: _Limit | None = None
    may_prioritise: bool = False


class Identity:
    """A tenant, and what the key that was presented may do."""

    __slots__ = ("key", "salt", "tag", "tenant")

    def __init__(self, cluster_secret: bytes, key: KeyEntry) -> None:
        self.key = key
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
