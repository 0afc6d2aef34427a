"""Who asks, and the salt that keeps one tenant's cache from another's.

tenant salt  = HMAC(cluster secret, "tenant" || tenant)       drawn here, never taken from a request
request salt = HMAC(tenant salt, "cache_salt" || cache_salt)  a request can narrow, never widen
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final, Protocol

from starlette.types import Scope

from server.errors import ForbiddenError

DEFAULT_TENANT: Final = "default"


@dataclass(frozen=True, slots=True)
class Identity:
    tenant: str
    salt: bytes = field(repr=False)
    may_prioritise: bool = False


class Identities(Protocol):
    """Authentication: the answer to who sent a request."""

    def identify(self, scope: Scope) -> Identity:
        """Raises AuthenticationError."""


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


class SingleTenant:
    """Without API keys everybody is the same trusted tenant."""

    def __init__(self, cluster_secret: bytes) -> None:
        self.identity = Identity(DEFAULT_TENANT, tenant_salt(cluster_secret, DEFAULT_TENANT), may_prioritise=True)

    def identify(self, scope: Scope) -> Identity:
        return self.identity
