"""Limits on the use of API keys, and on guessing them, as token buckets.

A key's bucket holds a minute's worth and refills evenly. Prompt tokens are taken once they are counted, answer tokens
after they were generated: these may overdraw the bucket, and the next request waits for the difference.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.types import Scope

from server.errors import OverloadedError
from server.rates import DecayedSum, TokenBucket

MAX_SOURCES: Final = 10_000
_MINUTE_S: Final = 60.0
_DAY_S: Final = 86_400
MAX_LEVEL: Final = 1e15
GIFT_S: Final = 1.0
"""For this time another gateway may take what a gateway gives it."""
DEMAND_S: Final = 5.0
_ROUNDED: Final = 0.9
"""Gateways without requests keep the rest of a stream."""
_STREAMS_RETRY_S: Final = 1.0

_Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}$")]
_Limit = Annotated[int, Meta(ge=1, le=10**12)]
_Level = Annotated[float, Meta(ge=-MAX_LEVEL, le=MAX_LEVEL)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[keys]]` table of the key file."""

    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
    tenant: _Label
    name: _Label | None = None
    models: frozenset[str] | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_streams: _Limit | None = None
    tokens_per_day: _Limit | None = None
    weight: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    may_prioritise: bool = False

    @property
    def limits(self) -> dict[str, int | None]:
        return {
            "requests": self.requests_per_minute,
            "tokens": self.tokens_per_minute,
            "streams": self.max_streams,
            "day": self.tokens_per_day,
        }


class PurseUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A purse as other gateways read it. A rate that is not listed is full."""

    level: _Level
    demand: _Level
    """The amount that was asked for lately, granted or not."""
    owed: _Level = 0.0
    """The amount by which a count is below its gateway's share."""


class Purse:
    """A gateway's part of one limit of a key. A rate refills up to its part of a minute's worth; a count does not."""

    __slots__ = ("_at_s", "_level", "demand", "is_rate", "limit", "owed", "share")

    def __init__(self, *, is_rate: bool) -> None:
        self.is_rate = is_rate
        self.limit = 0.0
        self.share = 0.0
        self.owed = 0.0
        self.demand = DecayedSum(DEMAND_S)
        self._level = 0.0
        self._at_s = 0.0

    def capacity(self, share: float | None = None) -> float:
        """Return the most that a gateway of this share holds; gifts have room next to it."""
        share = self.share if share is None else share
        return share * self.limit * (1.0 if share == 1.0 or not self.is_rate else 1.0 - GIFT_S / _MINUTE_S)

    @property
    def per_s(self) -> float:
        return self.share * self.limit / _MINUTE_S

    def level(self, now_s: float) -> float:
        """Return what is left; negative when overdrawn."""
        if not self.is_rate:
            return self._level
        return min(self.capacity(), self._level + (now_s - self._at_s) * self.per_s)

    def add(self, now_s: float, amount: float) -> None:
        self._level, self._at_s = self.level(now_s) + amount, now_s

    def resize(self, now_s: float, limit: float, share: float, full: float = 1.0) -> None:
        """Hold this share of this limit. `full`: how full the part is that it gets from others."""
        level, more = self.level(now_s), (share - self.share) * limit
        gained = max(0.0, more) * full
        if not self.is_rate:
            level += self.share * (limit - self.limit)
            self.owed += more - gained
        self.limit, self.share = limit, share
        self._level, self._at_s = level + gained, now_s

    def take(self, now_s: float, amount: float) -> float:
        """Take `amount` and return 0.0, or take nothing and return the seconds until it can be taken.

        A full purse grants more than it holds, and is then overdrawn.
        """
        missing = min(amount, self.capacity()) - self.level(now_s)
        self.demand.add(amount, now_s)
        if missing > 0.0:
            return min(missing / self.per_s, _DAY_S) if self.per_s else _STREAMS_RETRY_S
        self.add(now_s, -amount)
        return 0.0

    def use(self, now_s: float) -> PurseUse | None:
        """Return what to publish; None for a rate that is full, or a count that no request has asked for."""
        demand, level = self.demand.at(now_s), self.level(now_s)
        if level >= self.capacity() if self.is_rate else not self.owed and demand < 1.0:
            return None
        return PurseUse(level, demand, self.owed)


class KeyUsage:
    """A purse for each limit of a key. `FleetLimits` moves amounts between gateways."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self.num_asked = 0
        self.purses: dict[str, Purse] = {}
        self._elsewhere: Callable[[str], float | None] = lambda name: None
        """Returns what the other gateways have left of a limit."""
        self._limits = KeyEntry(digest="", tenant="")
        self._clock = clock
        self.fleet_share: float | None = None
        """None: the whole limit, until `FleetLimits` has seen the key."""

    def apply(self, key: KeyEntry) -> None:
        """Apply the limits of a reloaded key file; usage stays counted."""
        self._limits = key
        now_s = self._clock()
        for name, limit in key.limits.items():
            if limit is None:
                self.purses.pop(name, None)
                continue
            if name not in self.purses:
                self.purses[name] = Purse(is_rate=name in ("requests", "tokens"))
                self.purses[name].resize(now_s, limit, 1.0 if self.fleet_share is None else self.fleet_share)
            self.purses[name].resize(now_s, limit, self.purses[name].share)

    def share(
        self,
        key: str,
        share: float,
        full: Callable[[str, Purse], float],
        elsewhere: Callable[[str, Purse], float | None],
    ) -> None:
        """Hold this share of each limit, by the names `KEY/LIMIT`.

        `full`: how full the part is that comes from others. `elsewhere`: what others have left.
        """
        self._elsewhere = lambda name: elsewhere(f"{key}/{name}", self.purses[name])
        if self.fleet_share is None:
            self.fleet_share = 0.0
            self.purses.clear()
            self.apply(self._limits)
        self.fleet_share = share
        for name, purse in self.purses.items():
            purse.resize(self._clock(), purse.limit, share, full(f"{key}/{name}", purse))

    def admit(self) -> None:
        """Open a request; the caller calls `close` at its end. Raises OverloadedError."""
        self.num_asked += 1
        now_s = self._clock()
        streams, day = self.purses.get("streams"), self.purses.get("day")
        if streams is not None:
            streams.demand.add(1.0, now_s)
            if streams.level(now_s) < _ROUNDED and self.num_open:  # at least one a gateway
                message = f"This key may have {self._limits.max_streams} requests open at a time."
                raise OverloadedError(message, retry_after_s=_STREAMS_RETRY_S)
        if day is not None and day.level(now_s) <= 0.0:
            day.demand.add(1.0, now_s)
            message = f"This key may use {self._limits.tokens_per_day} tokens a day (UTC)."
            raise OverloadedError(message, retry_after_s=_DAY_S - time.time() % _DAY_S)
        self.take("requests", 1)
        self._open(1)

    def close(self) -> None:
        self._open(-1)

    def _open(self, number: int) -> None:
        self.num_open += number
        if (streams := self.purses.get("streams")) is not None:
            streams.add(self._clock(), -number)

    def take(self, name: str, amount: int) -> None:
        """Count a request, or the tokens of a prompt. Raises OverloadedError."""
        purse = self.purses.get(name)
        if purse is not None and (wait_s := purse.take(self._clock(), amount)):
            if self._elsewhere(name) is not None:  # what the others have is on its way
                wait_s = max(0.1, wait_s * purse.share)
            message = (
                f"This key may use {self._limits.limits[name]} {name} a minute; try again in {math.ceil(wait_s)} s."
            )
            headers = tuple(self.headers()) if name == "requests" else ()
            raise OverloadedError(message, retry_after_s=wait_s, headers=headers)
        if name == "tokens":
            self._spend(amount)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact."""
        now_s = self._clock()
        if (purse := self.purses.get("tokens")) is not None:
            purse.demand.add(num_tokens, now_s)
            purse.add(now_s, -num_tokens)
        self._spend(num_tokens)

    def _spend(self, num_tokens: int) -> None:
        self.num_asked += 1
        if (day := self.purses.get("day")) is not None:
            day.demand.add(num_tokens, self._clock())
            day.add(self._clock(), -num_tokens)
            day.owed += num_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit-* headers of an answer that begins now: what is left in the fleet."""
        headers, now_s = [], self._clock()
        for name in ("requests", "tokens"):
            if (purse := self.purses.get(name)) is None:
                continue
            limit, left = purse.limit, purse.level(now_s) + (self._elsewhere(name) or 0.0)
            reset_s = max(0.0, limit - left) / limit * _MINUTE_S
            headers += [
                (f"x-ratelimit-limit-{name}".encode(), b"%d" % limit),
                (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0, math.floor(left))),
                (f"x-ratelimit-reset-{name}".encode(), duration_text(reset_s).encode()),
            ]
        return headers

    def begin_day(self) -> None:
        if (day := self.purses.pop("day", None)) is not None:
            self.purses["day"] = Purse(is_rate=False)
            self.purses["day"].resize(self._clock(), day.limit, day.share)


def duration_text(seconds: float) -> str:
    """Format as OpenAI does: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class AuthThrottle:
    """Rate-limits wrong keys by source address.

    A key is looked up first: the source may be a proxy, so its allowance refuses no valid key. Its wrong
    ones get 429. That slows no guesser who ignores it: the number of possible keys does. Bounded: the source whose
    wrong key is oldest is forgotten first. Owned by the event loop.
    """

    def __init__(self, burst: float = 20.0, per_s: float = 0.2, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`burst` wrong keys, then `per_s`."""
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
