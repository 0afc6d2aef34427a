"""Limits on the use of API keys, and on guessing them, as token buckets.

A key's bucket holds a minute's worth and refills evenly. Prompt tokens are taken before the request is sent. Answer
tokens are taken after they were generated, so they may overdraw the bucket: the next request waits for the difference.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections.abc import Callable
from typing import Annotated, Final, NoReturn

import msgspec
from msgspec import Meta
from starlette.types import Scope

from server.auth.fleet_limits import MINUTE_S, Allotment, FleetLimits
from server.errors import OverloadedError
from server.rates import TokenBucket

MAX_SOURCES: Final = 10_000  # bounds the memory that guessers from many addresses take
_DAY_S: Final = 86_400  # the unit of the limits of a day
_ALMOST_ONE: Final = 0.9
"""A request is admitted if this much of one is left here: idle gateways keep small parts of the limit."""
_MOVE_S: Final = 0.1  # the least advised wait while other gateways have some left: two exchanges
_LIMITS: Final = {
    "requests": ("requests_per_minute", "use {} requests a minute"),
    "tokens": ("tokens_per_minute", "use {} tokens a minute"),
    "streams": ("max_streams", "have {} requests open at a time"),
    "day": ("tokens_per_day", "use {} tokens a day (UTC)"),
}
LABEL: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}")
"""The names of tenants and keys."""
_Label = Annotated[str, Meta(pattern=f"^{LABEL.pattern}$")]
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

    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
    name: _Label | None = None
    trusted_front: bool = False


class KeyUsage:
    """An allotment for each limit of a key, or of a tenant that fronts name."""

    def __init__(self, fleet: FleetLimits | None = None, name: str = "") -> None:
        """`fleet`: None if this gateway is the only one."""
        self.num_open = 0
        self._fleet = fleet or FleetLimits()
        self._name = name
        self._allotments: dict[str, Allotment] = {}

    @property
    def has_limits(self) -> bool:
        return bool(self._allotments)

    def apply(self, key: TenantEntry | None) -> None:
        """Apply the limits of a reloaded key file, or of none: usage stays counted."""
        for kind, (field, _) in _LIMITS.items():
            limit, allotment = getattr(key, field, None), self._allotments.get(kind)
            if limit is not None and allotment is not None:
                allotment.resize(self._fleet.clock(), limit, allotment.share)
            elif limit is not None:
                self._allotments[kind] = allotment = Allotment(f"{self._name}/{kind}", limit, self._fleet.share)
                allotment.open = self.num_open if kind == "streams" else 0
                self._fleet.allotments[allotment.name] = allotment
            elif allotment is not None:
                del self._allotments[kind], self._fleet.allotments[allotment.name]

    def admit(self) -> None:
        """Open a request; the caller calls `close` at its end. Raises OverloadedError."""
        least = _ALMOST_ONE if self.num_open else -math.inf  # each gateway admits at least one
        self._check("streams", least)
        self._check("day", _ALMOST_ONE)
        self.take("requests", 1)
        self._open(1)

    def close(self) -> None:
        self._open(-1)

    def _open(self, number: int) -> None:
        self.num_open += number
        if (allotment := self._allotments.get("streams")) is not None:
            allotment.open = self.num_open

    def _check(self, kind: str, least: float) -> None:
        """Raise OverloadedError if less than `least` is left of a count."""
        if (allotment := self._allotments.get(kind)) is not None:
            allotment.demand.add(1.0, self._fleet.clock())
            if allotment.left(self._fleet.clock()) < least:
                self._refuse(kind, allotment, 1.0 if kind == "streams" else _DAY_S - time.time() % _DAY_S)

    def _refuse(self, kind: str, allotment: Allotment, wait_s: float) -> NoReturn:
        if self._fleet.elsewhere(allotment) > 0.0:  # other gateways have some left, and will give it
            wait_s = max(_MOVE_S, min(wait_s, MINUTE_S) * allotment.share)
        message = f"This key may {_LIMITS[kind][1].format(allotment.limit)}; try again in {math.ceil(wait_s)} s."
        raise OverloadedError(message, retry_after_s=min(wait_s, _DAY_S))

    def take(self, kind: str, amount: int) -> None:
        """Count a request, or the tokens of a prompt. Raises OverloadedError."""
        allotment = self._allotments.get(kind)
        if kind == "tokens":
            self._check("day", _ALMOST_ONE)  # again: others that were admitted before may have used it up
        if allotment is not None and (wait_s := allotment.take(self._fleet.clock(), amount)):
            self._refuse(kind, allotment, wait_s)
        if kind == "tokens":
            self._spend("day", amount)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact. Negative: those of prompts that did not run, for the day."""
        self._spend("tokens", max(0, num_tokens))
        self._spend("day", num_tokens)

    def _spend(self, kind: str, num_tokens: int) -> None:
        if (allotment := self._allotments.get(kind)) is not None:
            now_s = self._fleet.clock()
            allotment.demand.add(max(0, num_tokens), now_s)
            allotment.add(now_s, min(-num_tokens, allotment.limit - allotment.owned(now_s)))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit-* headers of an answer that begins now: what is left in the fleet."""
        headers = []
        for kind in ("requests", "tokens"):
            if (allotment := self._allotments.get(kind)) is not None:
                left = allotment.left(self._fleet.clock()) + self._fleet.elsewhere(allotment)
                reset_s = max(0.0, allotment.limit - left) / allotment.limit * MINUTE_S
                headers += [
                    (f"x-ratelimit-limit-{kind}".encode(), b"%d" % allotment.limit),
                    (f"x-ratelimit-remaining-{kind}".encode(), b"%d" % max(0, math.floor(left))),
                    (f"x-ratelimit-reset-{kind}".encode(), duration_text(reset_s).encode()),
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

    def __init__(self, burst: float = 20.0, per_s: float = 0.2, *, clock: Callable[[], float] = time.monotonic) -> None:
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
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:  # an IPv4 address, or none
        return host
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
