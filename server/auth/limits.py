"""Limits on the use of API keys, and on guessing them, as token buckets. Each gateway counts on its own.

A key's bucket holds a minute's worth and refills evenly. Prompt tokens are taken once they are counted, answer tokens
after they were generated: these may overdraw the bucket, and the next request waits for the difference.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.types import Scope

from server.auth.identity import NO_LIMITS, Identity, KeyLimits
from server.errors import OverloadedError
from server.rates import TokenBucket

MAX_KEYS: Final = 8192
"""Keys whose usage is kept; a key file holds fewer."""
MAX_SOURCES: Final = 10_000
MAX_GOOD_KEYS: Final = 10_000
_MINUTE_S: Final = 60.0
_STREAMS_RETRY_S: Final = 1.0


class _KeyUsage:
    """The usage of one key, under the limits that it has."""

    __slots__ = ("buckets", "limits", "num_open")

    def __init__(self) -> None:
        self.num_open = 0
        self.limits = NO_LIMITS
        self.buckets: dict[str, TokenBucket] = {}
        """By what they count: requests, tokens."""

    def apply(self, limits: KeyLimits) -> None:
        """Adopt the limits of a reloaded key file; what has been used stays used."""
        self.limits = limits
        for name, limit in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)):
            if limit is None:
                self.buckets.pop(name, None)
                continue
            bucket = self.buckets.setdefault(name, TokenBucket(limit / _MINUTE_S, limit))
            bucket.per_s, bucket.capacity = limit / _MINUTE_S, limit


class Lease:
    """One open request of a key with limits. Close it exactly once."""

    def __init__(self, usage: _KeyUsage, clock: Callable[[], float]) -> None:
        self._usage = usage
        self._clock = clock
        self.headers: list[tuple[bytes, bytes]] = []
        """The x-ratelimit-* headers of the answer."""

    def take(self, name: str, amount: int) -> None:
        """Count a request, or the tokens of a prompt. Raises OverloadedError."""
        bucket, wait_s = self._usage.buckets.get(name), 0.0
        if bucket is not None:
            wait_s = bucket.take(self._clock(), amount)
        self._describe()
        if bucket is not None and wait_s > 0.0:
            message = f"This key may use {bucket.capacity} {name} a minute; try again in {math.ceil(wait_s)} s."
            headers = tuple(self.headers) if name == "requests" else ()
            raise OverloadedError(message, retry_after_s=wait_s, headers=headers)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact."""
        if (bucket := self._usage.buckets.get("tokens")) is not None:
            bucket.add(self._clock(), -num_tokens)

    def close(self) -> None:
        self._usage.num_open -= 1

    def _describe(self) -> None:
        self.headers.clear()
        for name, bucket in self._usage.buckets.items():
            level = bucket.level(self._clock())
            reset_s = (bucket.capacity - level) / bucket.per_s
            self.headers += [
                (f"x-ratelimit-limit-{name}".encode(), b"%d" % bucket.capacity),
                (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0, math.floor(level))),
                (f"x-ratelimit-reset-{name}".encode(), duration_text(reset_s).encode()),
            ]


class RateLimits:
    """The usage of every key at this gateway. Owned by the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[bytes, _KeyUsage] = {}

    def admit(self, identity: Identity) -> Lease | None:
        """Return a lease for one request, or None for a key without limits. Raises OverloadedError."""
        limits = identity.limits
        if limits == NO_LIMITS:
            return None
        usage = self._usage.get(identity.key_digest)
        if usage is None:
            if len(self._usage) >= MAX_KEYS:
                self._usage = {key: held for key, held in self._usage.items() if held.num_open}
            usage = self._usage[identity.key_digest] = _KeyUsage()
        if usage.limits != limits:
            usage.apply(limits)
        if limits.max_streams is not None and usage.num_open >= limits.max_streams:
            raise OverloadedError(
                f"This key may have {limits.max_streams} requests open at a time.", retry_after_s=_STREAMS_RETRY_S
            )
        lease = Lease(usage, self._clock)
        lease.take("requests", 1)
        usage.num_open += 1
        return lease


def duration_text(seconds: float) -> str:
    """Format as OpenAI does: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class AuthThrottle:
    """Slows down whoever guesses keys: per source a few wrong ones, then one now and then.

    A source over its allowance is refused before its key is looked at, so that the answer tells it nothing. Keys that
    this source has used before go on working: one client behind a proxy must not lock out the rest.
    Bounded: the sources and keys unseen for longest are forgotten first. Owned by the event loop.
    """

    def __init__(self, burst: float = 20.0, per_s: float = 0.2, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`burst` wrong keys, then `per_s`."""
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._blinding = secrets.token_bytes(16)
        self._allowances: OrderedDict[str, TokenBucket] = OrderedDict()
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def check(self, scope: Scope, key: bytes) -> None:
        """Raises OverloadedError for a source over its allowance."""
        if not self._allowances:
            return
        source = source_of(scope)
        allowance = self._allowances.get(source)
        if allowance is None:
            return
        missing = 1.0 - allowance.level(self._clock())
        if missing > 0.0 and self._pair(source, key) not in self._good:
            raise OverloadedError("Too many requests without a valid API key.", retry_after_s=missing / self._per_s)

    def failed(self, scope: Scope) -> None:
        """Count a wrong key."""
        source, now_s = source_of(scope), self._clock()
        allowance = self._allowances.get(source)
        if allowance is None:
            allowance = self._allowances[source] = TokenBucket(self._per_s, self._burst)
        allowance.add(now_s, -1.0)
        self._allowances.move_to_end(source)
        if len(self._allowances) > MAX_SOURCES:
            self._allowances.popitem(last=False)

    def succeeded(self, scope: Scope, key: bytes) -> None:
        """Remember that this source has used this key."""
        pair = self._pair(source_of(scope), key)
        self._good[pair] = None
        self._good.move_to_end(pair)
        if len(self._good) > MAX_GOOD_KEYS:
            self._good.popitem(last=False)

    def _pair(self, source: str, key: bytes) -> bytes:
        return hashlib.blake2b(source.encode() + b"\0" + key, key=self._blinding, digest_size=16).digest()


def source_of(scope: Scope) -> str:
    """Return the client's address; for IPv6 the network, of which one client has 2^64 addresses."""
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
