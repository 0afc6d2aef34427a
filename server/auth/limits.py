"""Limits on the use of API keys, and on guessing them, as token buckets.

A key's bucket holds a minute's worth and refills evenly. Prompt tokens are taken once they are counted, answer tokens
after they were generated: these may overdraw the bucket, and the next request waits for the difference.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from typing import Annotated, Final, NoReturn

import msgspec
from msgspec import Meta
from starlette.types import Scope

from server.errors import OverloadedError
from server.rates import DecayedSum, TokenBucket

MAX_SOURCES: Final = 10_000
MINUTE_S: Final = 60.0
DAY_S: Final = 86_400
MAX_LEVEL: Final = 1e15
DEMAND_S: Final = 5.0
_ROUNDED: Final = 0.9
"""Gateways without requests keep the rest of one."""
_STREAMS_RETRY_S: Final = 1.0
_MOVE_S: Final = 0.1
_RATES: Final = ("requests", "tokens")
_WORDS: Final = {
    "requests": "use {} requests a minute",
    "tokens": "use {} tokens a minute",
    "streams": "have {} requests open at a time",
    "day": "use {} tokens a day (UTC)",
}

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
    """A purse as other gateways read it. One that is not listed is untouched."""

    owned: _Level
    open: _Level
    demand: _Level
    """The amount that was asked for lately, granted or not."""


class Purse:
    """A gateway's part of one limit of a key. A rate refills up to its share of a minute's worth; a count does not."""

    __slots__ = ("_at_s", "_away", "_owned", "demand", "is_rate", "limit", "open", "share")

    def __init__(self, limit: float, *, is_rate: bool) -> None:
        self.limit = limit
        self.is_rate = is_rate
        self.share = 1.0
        self.open = 0
        """The amount in use that comes back: open requests."""
        self.demand = DecayedSum(DEMAND_S)
        self._away = 0.0
        """The amount that was given and may still be taken."""
        self._owned = limit
        self._at_s = 0.0

    @property
    def part(self) -> float:
        return self.share * self.limit

    def owned(self, now_s: float) -> float:
        """Return the amount that this gateway may grant, or has open; negative when overdrawn."""
        if not self.is_rate:
            return self._owned
        most, refill = self.part - self._away, (now_s - self._at_s) * self.limit / MINUTE_S
        if self._owned > most:  # runs off as the others' parts refill
            return max(most, self._owned - refill * (1.0 - self.share))
        return min(most, self._owned + refill * self.share)

    def left(self, now_s: float) -> float:
        return self.owned(now_s) - self.open

    def own(self, now_s: float, amount: float) -> None:
        self._owned, self._at_s = amount, now_s

    def add(self, now_s: float, amount: float) -> None:
        """Use an amount that is negative; take one from another gateway, a rate up to its part."""
        owned = self.owned(now_s)
        most = max(owned, self.part - self._away) if self.is_rate else math.inf
        self.own(now_s, min(owned + amount, most))

    def keep_room(self, now_s: float, away: float) -> None:
        self.own(now_s, self.owned(now_s))
        self._away = away

    def resize(self, now_s: float, limit: float, share: float) -> None:
        """Have another share or limit. What was used stays used; a share moves nothing."""
        owned = self.owned(now_s) + (0.0 if self.is_rate else self.share * (limit - self.limit))
        self.own(now_s, min(owned, self.share * limit) if limit < self.limit and self.is_rate else owned)
        self.limit, self.share = limit, share

    def take(self, now_s: float, amount: float) -> float:
        """Take `amount` of a rate and return 0.0, or take nothing and return the seconds until it can be taken.

        A full purse grants more than it holds, and a part of a limit less than one more. Both are then overdrawn.
        """
        owned, needed = self.owned(now_s), min(amount, self.part)
        self.demand.add(amount, now_s)
        if owned < needed and (self.share == 1.0 or amount - owned >= 1.0):
            return min((needed - owned) * MINUTE_S / self.part, DAY_S)
        self.add(now_s, -amount)
        return 0.0

    def use(self, now_s: float) -> PurseUse | None:
        """Return what to publish; None if untouched."""
        demand, owned = self.demand.at(now_s), self.owned(now_s)
        is_untouched = owned == self.part and (self.is_rate or (demand < 1.0 and not self.open))
        return None if is_untouched else PurseUse(owned, self.open, demand)


class KeyUsage:
    """A purse for each limit of a key: of the whole limit, until `FleetLimits` shares it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self.purses: dict[str, Purse] = {}
        self.share: float | None = None
        self._elsewhere: Callable[[str, Purse], float] = lambda name, purse: 0.0
        self._clock = clock

    def apply(self, key: KeyEntry) -> None:
        """Apply the limits of a reloaded key file; usage stays counted."""
        for name, limit in key.limits.items():
            if limit is None:
                self.purses.pop(name, None)
            elif name in self.purses:
                self.purses[name].resize(self._clock(), limit, self.purses[name].share)
            else:
                self._begin(name, limit)

    def _begin(self, name: str, limit: float) -> None:
        purse = self.purses[name] = Purse(limit, is_rate=name in _RATES)
        purse.open = self.num_open if name == "streams" else 0
        if self.share is not None:
            self._hold(purse, 1.0, self.share)

    def _hold(self, purse: Purse, was: float, share: float) -> None:
        now_s = self._clock()
        purse.own(now_s, purse.owned(now_s) - (was - share) * purse.limit)
        purse.resize(now_s, purse.limit, share)

    def hold(self, share: float, elsewhere: Callable[[str, Purse], float]) -> None:
        """Hold this share of each limit; what was used stays used. `elsewhere` returns what others have left of one."""
        for purse in self.purses.values():
            self._hold(purse, share if self.share is not None else 1.0, share)
        self.share, self._elsewhere = share, elsewhere

    def begin_day(self) -> None:
        if "day" in self.purses:
            self._begin("day", self.purses["day"].limit)

    def admit(self) -> None:
        """Open a request; the caller calls `close` at its end. Raises OverloadedError."""
        least = _ROUNDED if self.num_open else -math.inf  # at least one a gateway
        self._check("streams", least, _STREAMS_RETRY_S)
        self._check("day", _ROUNDED, DAY_S - time.time() % DAY_S)
        self.take("requests", 1)
        self._open(1)

    def _check(self, name: str, least: float, wait_s: float) -> None:
        """Raises OverloadedError where less is left of a count."""
        if (purse := self.purses.get(name)) is not None:
            purse.demand.add(1.0, self._clock())
            if purse.left(self._clock()) < least:
                self._refuse(name, purse, wait_s)

    def _refuse(self, name: str, purse: Purse, wait_s: float) -> NoReturn:
        if self._elsewhere(name, purse) > 0.0:  # what the others have is on its way
            wait_s = max(_MOVE_S, min(wait_s, MINUTE_S) * purse.share)
        message = f"This key may {_WORDS[name].format(purse.limit)}; try again in {math.ceil(wait_s)} s."
        headers = tuple(self.headers()) if name == "requests" else ()
        raise OverloadedError(message, retry_after_s=wait_s, headers=headers)

    def close(self) -> None:
        self._open(-1)

    def _open(self, number: int) -> None:
        self.num_open += number
        if (purse := self.purses.get("streams")) is not None:
            purse.open = self.num_open

    def take(self, name: str, amount: int) -> None:
        """Count a request, or the tokens of a prompt. Raises OverloadedError."""
        if (purse := self.purses.get(name)) is not None and (wait_s := purse.take(self._clock(), amount)):
            self._refuse(name, purse, wait_s)
        if name == "tokens":
            self._spend("day", amount)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact."""
        self._spend("tokens", num_tokens)
        self._spend("day", num_tokens)

    def _spend(self, name: str, num_tokens: int) -> None:
        if (purse := self.purses.get(name)) is not None:
            purse.demand.add(num_tokens, self._clock())
            purse.add(self._clock(), -num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit-* headers of an answer that begins now: what is left in the fleet."""
        headers = []
        for name in _RATES:
            if (purse := self.purses.get(name)) is not None:
                left = purse.left(self._clock()) + self._elsewhere(name, purse)
                reset_s = max(0.0, purse.limit - left) / purse.limit * MINUTE_S
                headers += [
                    (f"x-ratelimit-limit-{name}".encode(), b"%d" % purse.limit),
                    (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0, math.floor(left))),
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
