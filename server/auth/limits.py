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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

Headers = list[tuple[bytes, bytes]]


class _KeyUsage:
    """What one key has used, under the limits that it has."""

    __slots__ = ("limits", "num_open", "requests", "tokens")

    def __init__(self) -> None:
        self.num_open = 0
        self.limits = NO_LIMITS
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None

    def apply(self, limits: KeyLimits) -> None:
        """Adopt the limits of a reloaded key file; what has been used stays used."""
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute)


def _resized(bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
    if per_minute is None:
        return None
    bucket = bucket or TokenBucket(per_minute / _MINUTE_S, per_minute)
    bucket.per_s, bucket.capacity = per_minute / _MINUTE_S, per_minute
    return bucket


@dataclass(slots=True, eq=False)
class Lease:
    """One open request of a key with limits. Close it exactly once."""

    usage: _KeyUsage
    clock: Callable[[], float]
    headers: Headers = field(default_factory=list)
    """The x-ratelimit-* headers of the answer."""

    def take_request(self) -> None:
        """Count the request. Raises OverloadedError."""
        bucket = self.usage.requests
        wait_s = 0.0 if bucket is None else bucket.take(self.clock())
        self._describe()
        if wait_s > 0.0:
            raise _over_limit(f"{self.usage.limits.requests_per_minute} requests a minute", wait_s, self.headers)

    def take_tokens(self, num_tokens: int) -> None:
        """Count the prompt's tokens. Raises OverloadedError."""
        if self.usage.tokens is not None:
            wait_s = self.usage.tokens.take(self.clock(), num_tokens)
            self._describe()
            if wait_s > 0.0:
                raise _over_limit(f"{self.usage.limits.tokens_per_minute} tokens a minute", wait_s)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact."""
        if self.usage.tokens is not None:
            self.usage.tokens.add(self.clock(), -num_tokens)

    def close(self) -> None:
        self.usage.num_open -= 1

    def _describe(self) -> None:
        self.headers.clear()
        now_s = self.clock()
        for name, bucket in (("requests", self.usage.requests), ("tokens", self.usage.tokens)):
            if bucket is not None:
                level = bucket.level(now_s)
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
        usage = self._usage_of(identity.key_digest)
        if usage.limits != limits:
            usage.apply(limits)
        if limits.max_streams is not None and usage.num_open >= limits.max_streams:
            raise OverloadedError(
                f"This key may have {limits.max_streams} requests open at a time.", retry_after_s=_STREAMS_RETRY_S
            )
        lease = Lease(usage, self._clock)
        lease.take_request()
        usage.num_open += 1
        return lease

    def _usage_of(self, digest: bytes) -> _KeyUsage:
        usage = self._usage.get(digest)
        if usage is None:
            if len(self._usage) >= MAX_KEYS:
                self._usage = {key: held for key, held in self._usage.items() if held.num_open}
            usage = self._usage[digest] = _KeyUsage()
        return usage


def _over_limit(limit: str, wait_s: float, headers: Sequence[tuple[bytes, bytes]] = ()) -> OverloadedError:
    message = f"This key may use {limit}; try again in {math.ceil(wait_s)} s."
    return OverloadedError(message, retry_after_s=wait_s, headers=tuple(headers))


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
