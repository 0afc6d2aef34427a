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
from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta
from starlette.types import Scope

from server.errors import OverloadedError
from server.rates import TokenBucket

MAX_SOURCES: Final = 10_000
MAX_GOOD_KEYS: Final = 10_000
_MINUTE_S: Final = 60.0
_STREAMS_RETRY_S: Final = 1.0

K = TypeVar("K")
V = TypeVar("V")


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


class KeyUsage:
    """The usage of one key: its open requests, and a bucket for each of its limits a minute."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self._max_open: int | None = None
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def apply(self, key: KeyEntry) -> None:
        """Apply the limits of a reloaded key file; usage stays counted."""
        self._max_open = key.max_streams
        for name, limit in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if limit is None:
                self._buckets.pop(name, None)
                continue
            bucket = self._buckets.setdefault(name, TokenBucket(limit / _MINUTE_S, limit))
            bucket.per_s, bucket.capacity = limit / _MINUTE_S, limit

    def admit(self) -> None:
        """Open a request; the caller decrements `num_open` at its end. Raises OverloadedError."""
        if self._max_open is not None and self.num_open >= self._max_open:
            message = f"This key may have {self._max_open} requests open at a time."
            raise OverloadedError(message, retry_after_s=_STREAMS_RETRY_S)
        self.take("requests", 1)
        self.num_open += 1

    def take(self, name: str, amount: int) -> None:
        """Count a request, or the tokens of a prompt. Raises OverloadedError."""
        bucket = self._buckets.get(name)
        if bucket is not None and (wait_s := bucket.take(self._clock(), amount)):
            message = f"This key may use {bucket.capacity} {name} a minute; try again in {math.ceil(wait_s)} s."
            headers = tuple(self.headers()) if name == "requests" else ()
            raise OverloadedError(message, retry_after_s=wait_s, headers=headers)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.add(self._clock(), -num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit-* headers of an answer that begins now."""
        headers = []
        for name, bucket in self._buckets.items():
            level = bucket.level(self._clock())
            reset_s = (bucket.capacity - level) / bucket.per_s
            headers += [
                (f"x-ratelimit-limit-{name}".encode(), b"%d" % bucket.capacity),
                (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0, math.floor(level))),
                (f"x-ratelimit-reset-{name}".encode(), duration_text(reset_s).encode()),
            ]
        return headers


def duration_text(seconds: float) -> str:
    """Format as OpenAI does: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class AuthThrottle:
    """Rate-limits failed key attempts by source address.

    A source over its allowance is refused before its key is checked, so the answer reveals nothing. Keys that this
    source has used before keep working: one client behind a proxy must not lock out the rest.
    Bounded: the sources and keys unseen for longest are forgotten first. Owned by the event loop.
    """

    def __init__(self, burst: float = 20.0, per_s: float = 0.2, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`burst` wrong keys, then `per_s`."""
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._blinding = secrets.token_bytes(16)
        self._allowances: dict[str, TokenBucket] = {}
        self._good: dict[bytes, None] = {}

    def check(self, source: str, key: bytes) -> None:
        """Raises OverloadedError for a source over its allowance."""
        allowance = self._allowances.get(source)
        missing = 0.0 if allowance is None else 1.0 - allowance.level(self._clock())
        if missing > 0.0 and self._pair(source, key) not in self._good:
            raise OverloadedError("Too many requests without a valid API key.", retry_after_s=missing / self._per_s)

    def failed(self, source: str) -> None:
        """Count a wrong key."""
        allowance = self._allowances.get(source) or TokenBucket(self._per_s, self._burst)
        allowance.add(self._clock(), -1.0)
        _renew(self._allowances, source, allowance, MAX_SOURCES)

    def succeeded(self, source: str, key: bytes) -> None:
        """Remember that this source has used this key."""
        _renew(self._good, self._pair(source, key), None, MAX_GOOD_KEYS)

    def _pair(self, source: str, key: bytes) -> bytes:
        return hashlib.blake2b(source.encode() + b"\0" + key, key=self._blinding, digest_size=16).digest()


def _renew(table: dict[K, V], key: K, value: V, most: int) -> None:
    """Make `key` the newest of the table; past `most`, drop the oldest."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]


def source_of(scope: Scope) -> str:
    """Return the client's address; for IPv6 its /64 network, all of which one client may have."""
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
