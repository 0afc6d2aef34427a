"""Slows down whoever guesses keys: per source, a few wrong ones, then one now and then.

A source over its allowance is refused before its key is looked at, so that it learns nothing from the answer. Keys
that this source has used before go on working: behind one proxy sit many clients, and one of them shall not lock out
the rest.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from server.errors import OverloadedError

MAX_SOURCES: Final = 10_000
MAX_GOOD: Final = 10_000


@dataclass(frozen=True, slots=True)
class FailureAllowance:
    burst: float = 20.0
    per_s: float = 0.2


class FailedAuth:
    """Owned by the event loop. Bounded: the sources and keys unseen for longest are forgotten first."""

    def __init__(
        self, allowance: FailureAllowance | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowance = allowance or FailureAllowance()
        self._clock = clock
        self._blind = secrets.token_bytes(16)
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Source to its failures, less those forgiven, and when that was counted."""
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def check(self, scope: Scope, key: bytes) -> None:
        """Raises OverloadedError for a source over its allowance."""
        source = source_of(scope)
        if source not in self._failures:
            return
        excess = self._count(source) + 1.0 - self._allowance.burst
        if excess > 0.0 and self._pair(source, key) not in self._good:
            raise OverloadedError(
                "Too many requests without a valid API key.", retry_after_s=excess / self._allowance.per_s
            )

    def record(self, scope: Scope) -> None:
        """A wrong key came from there."""
        source = source_of(scope)
        self._failures[source] = (self._count(source) + 1.0, self._clock())
        self._failures.move_to_end(source)
        if len(self._failures) > MAX_SOURCES:
            self._failures.popitem(last=False)

    def succeeded(self, scope: Scope, key: bytes) -> None:
        pair = self._pair(source_of(scope), key)
        self._good[pair] = None
        self._good.move_to_end(pair)
        if len(self._good) > MAX_GOOD:
            self._good.popitem(last=False)

    def _count(self, source: str) -> float:
        count, at_s = self._failures.get(source, (0.0, 0.0))
        return max(0.0, count - (self._clock() - at_s) * self._allowance.per_s)

    def _pair(self, source: str, key: bytes) -> bytes:
        return hashlib.blake2b(source.encode() + b"\0" + key, key=self._blind, digest_size=16).digest()


def source_of(scope: Scope) -> str:
    """The client's address; of IPv6 the network, of which one client has 2^64 addresses."""
    client = scope.get("client")
    if client is None:
        return "unknown"
    host = str(client[0])
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
