"""Limits on the use of API keys, and on guessing them.

A minute's worth refills evenly, a day's at midnight (UTC). Prompt tokens are taken before the request is sent. Answer
tokens are taken after they were generated, so they may overdraw: the next request waits for the difference.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address, IPv6Network
from typing import Annotated, Final, NoReturn

import msgspec
from msgspec import Meta
from starlette.types import Scope

from cache.redis_index import Charge, KeyUse
from server.errors import OverloadedError
from server.rates import DAY_S, DayBucket, TokenBucket
from worker.common.sockets import address_of

MAX_SOURCES: Final = 10_000  # bounds the memory that guessers from many addresses take
_MINUTE_S: Final = 60.0
Clock = Callable[[], float]
_UTC_S: Final = time.time() - time.monotonic()
_LIMITS: Final = {
    "requests": ("requests_per_minute", "use {} requests a minute"),
    "tokens": ("tokens_per_minute", "use {} tokens a minute"),
    "streams": ("max_streams", "have {} requests open at a time"),
    "day": ("tokens_per_day", "use {} tokens a day (UTC)"),
}
LABEL: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}")
"""The names of tenants and keys."""
_Label = Annotated[str, Meta(pattern=rf"\A{LABEL.pattern}\Z")]
_Limit = Annotated[int, Meta(ge=1, le=10**12)]


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[tenants]]` table of the key file."""

    tenant: _Label
    models: frozenset[str] | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_streams: _Limit | None = None
    tokens_per_day: _Limit | None = None
    weight: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    may_prioritise: bool = False


class KeyEntry(TenantEntry, frozen=True, kw_only=True):
    """One `[[keys]]` table of the key file."""

    digest: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
    name: _Label | None = None
    trusted_front: bool = False


def utc_s() -> float:
    """Return the time by this machine's clock at the start, which is not set since."""
    return _UTC_S + time.monotonic()


class Allowance:
    """The part of one limit that is left: of the fleet's, and of what this gateway grants by itself."""

    __slots__ = ("fleet", "own", "share")

    def __init__(self, kind: str, limit: int, num_gateways: int) -> None:
        self.fleet = _bucket(kind, limit)
        """As Redis last counted."""
        self.own = _bucket(kind, limit)
        """Bounds it whatever Redis counts: N gateways never grant more than N times the limit."""
        self.share = _bucket(kind, limit / num_gateways)
        """Bounds it without Redis."""

    def bounds(self, *, is_shared: bool) -> tuple[TokenBucket, TokenBucket]:
        return self.own, self.fleet if is_shared else self.share

    def spend(self, now_s: float, amount: float, *, is_shared: bool) -> None:
        """Count what was used. What Redis counts empties the share at most."""
        self.own.add(now_s, -amount)
        self.fleet.add(now_s, -amount)
        self.share.add(now_s, -min(amount, max(0.0, self.share.level(now_s))) if is_shared else -amount)

    def carry(self, now_s: float, former: Allowance) -> None:
        """Count what was used of the former limit."""
        for bucket, old in ((self.fleet, former.fleet), (self.own, former.own), (self.share, former.share)):
            bucket.add(now_s, old.level(now_s) - old.capacity)


def _bucket(kind: str, capacity: float) -> TokenBucket:
    return DayBucket(capacity) if kind == "day" else TokenBucket(capacity / _MINUTE_S, capacity)


class KeyUsage:
    """The use of a key, or of a tenant that fronts name, against its limits. Owned by the event loop.

    Redis counts what the fleet uses, on its own clock. While it is away, or counts more than N gateways can have used,
    this gateway grants 1/N of each limit.
    """

    def __init__(
        self, counter: KeyUse | None = None, name: str = "", num_gateways: int = 1, clock: Clock = utc_s
    ) -> None:
        """`counter`: None without a Redis."""
        self.num_open = 0
        self._num_asked = 0
        """Requests that are being counted."""
        self._counter = counter
        self._name = name
        self._num_gateways = num_gateways
        self._clock = clock
        self._limits: dict[str, int] = {}
        self._allowances: dict[str, Allowance] = {}
        """By limit, but for that of open requests."""
        self._unreported = Counter[str]()
        """The tokens that were used and that Redis does not count yet."""
        self._is_shared = counter is not None
        """The last answer of Redis was believed."""

    @property
    def has_limits(self) -> bool:
        return bool(self._limits)

    def apply(self, key: TenantEntry) -> None:
        """Apply the limits of a reloaded key file: usage stays counted."""
        former, self._allowances = self._allowances, {}
        self._limits = {kind: limit for kind, (name, _) in _LIMITS.items() if (limit := getattr(key, name)) is not None}
        for kind in self._limits.keys() - {"streams"}:
            self._allowances[kind] = allowance = Allowance(kind, self._limits[kind], self._num_gateways)
            if kind in former:
                allowance.carry(self._clock(), former[kind])

    async def admit(self) -> None:
        """Open a request; the caller calls `close` at its end. Raises OverloadedError.

        It waits for Redis at most as long as a lookup.
        """
        self._num_asked += 1
        try:
            if self._is_shared:
                self._check("requests", 1)  # Redis would count the same
            has_room = await self._count()
        finally:
            self._num_asked -= 1
        if not has_room:
            self._refuse("streams", 1.0)
        self._check("day", 1)
        self._check("requests", 1)
        self.num_open += 1
        self._spend("requests", 1)

    async def _count(self) -> bool:
        """Count a request in Redis where all limits have room. Return whether one more may be open."""
        charges = self._charges({"requests": 1, "day": 1, "streams": 1}, {"requests": 1, "streams": 1})
        used = None if self._counter is None else await self._counter.count(self._name, charges)
        streams, most = self._limits.get("streams", math.inf), self._num_gateways
        self._is_shared = used is not None and all(
            0.0 <= each <= most * charge.limit for charge, each in zip(charges, used, strict=True)
        )
        if used is None or not self._is_shared:
            return self.num_open + 1 <= max(1.0, streams / most)
        for charge, each in zip(charges, used, strict=True):
            if (allowance := self._allowances.get(charge.kind)) is not None:
                allowance.fleet.set(self._clock(), charge.limit - each)
            elif each + 1 > charge.limit:
                return False
        return self.num_open + 1 <= streams

    def take_tokens(self, num_tokens: int) -> None:
        """Count the tokens of a prompt. Raises OverloadedError."""
        self._check("day", 1)  # again: others that were admitted before may have used it up
        self._check("tokens", num_tokens)
        self._spend("tokens", num_tokens)
        self._spend("day", num_tokens)
        self._report({}, {})

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact. Negative: those of prompts that did not run, for the day."""
        self._spend("tokens", max(0, num_tokens))
        self._spend("day", num_tokens)

    def close(self) -> None:
        self.num_open -= 1
        self._report({}, {"streams": -1})

    def renew_lease(self) -> None:
        """Report how many requests are open, unless some are being counted."""
        if self.num_open and not self._num_asked:
            self._report({"streams": -1}, {"streams": self.num_open})

    def _report(self, needed: Mapping[str, int], amounts: Mapping[str, int]) -> None:
        charges = self._charges(needed, {**self._unreported, **amounts})
        if self._counter is not None and any(charge.amount for charge in charges):
            self._counter.report(self._name, charges)
            self._unreported.clear()

    def _charges(self, needed: Mapping[str, int], amounts: Mapping[str, int]) -> list[Charge]:
        return [Charge(kind, limit, needed.get(kind, 0), amounts.get(kind, 0)) for kind, limit in self._limits.items()]

    def _check(self, kind: str, amount: int) -> None:
        if (allowance := self._allowances.get(kind)) is not None:
            bounds = allowance.bounds(is_shared=self._is_shared)
            if wait_s := max([bucket.wait_s(self._clock(), amount) for bucket in bounds]):
                self._refuse(kind, wait_s)

    def _refuse(self, kind: str, wait_s: float) -> NoReturn:
        message = f"This key may {_LIMITS[kind][1].format(self._limits[kind])}; try again in {math.ceil(wait_s)} s."
        raise OverloadedError(message, retry_after_s=min(wait_s, DAY_S))

    def _spend(self, kind: str, amount: int) -> None:
        if (allowance := self._allowances.get(kind)) is not None:
            allowance.spend(self._clock(), amount, is_shared=self._is_shared)
            if kind != "requests":  # these are counted when they are asked for
                self._unreported[kind] += amount

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit-* headers of an answer that begins now."""
        headers = []
        for kind in ("requests", "tokens"):
            if (allowance := self._allowances.get(kind)) is not None:
                limit, bounds = self._limits[kind], allowance.bounds(is_shared=self._is_shared)
                left = min([bucket.level(self._clock()) for bucket in bounds])
                headers += [
                    (f"x-ratelimit-limit-{kind}".encode(), b"%d" % limit),
                    (f"x-ratelimit-remaining-{kind}".encode(), b"%d" % max(0, math.floor(left))),
                    (f"x-ratelimit-reset-{kind}".encode(), duration_text((limit - left) / limit * _MINUTE_S).encode()),
                ]
        return headers


def duration_text(seconds: float) -> str:
    """Format as OpenAI does: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class AuthThrottle:
    """Rate-limits wrong keys by source address.

    A valid key is never refused: its source may be a proxy that others use. Above the allowance a wrong key gets 429.
    What stops a guesser is the number of possible keys. Keeps the latest `MAX_SOURCES`. Owned by the event loop.
    """

    def __init__(self, burst: float = 20.0, per_s: float = 0.2, *, clock: Clock = time.monotonic) -> None:
        """Allow `burst` wrong keys at once, then `per_s` a second."""
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._allowances: dict[str, TokenBucket] = {}

    def failed(self, source: str) -> None:
        """Count a wrong key. Raises OverloadedError for a source over its allowance."""
        allowance = self._allowances.pop(source, None) or TokenBucket(self._per_s, self._burst)
        self._allowances[source] = allowance
        if len(self._allowances) > MAX_SOURCES:
            del self._allowances[next(iter(self._allowances))]
        if wait_s := allowance.take(self._clock()):
            raise OverloadedError("Too many requests without a valid API key.", retry_after_s=wait_s)


def source_of(scope: Scope) -> str:
    """Return the client's address; for IPv6 its /64 network, all of which one client may have."""
    host = str((scope.get("client") or ("unknown",))[0])
    address = address_of(host)
    return str(IPv6Network((address, 64), strict=False)) if isinstance(address, IPv6Address) else str(address or host)
