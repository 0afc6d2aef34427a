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

from cache.records import Count
from server.errors import OverloadedError
from server.rates import TokenBucket

MAX_SOURCES: Final = 10_000
_MINUTE_S: Final = 60.0
_DAY_S: Final = 86_400
MAX_LEVEL: Final = 1e15
_HUGE: Final = 100.0
"""No gateway grants this many times a limit."""
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
    def per_minute(self) -> dict[str, int | None]:
        return {"requests": self.requests_per_minute, "tokens": self.tokens_per_minute}


class KeyUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The use of one key by one gateway, as others read it."""

    requests: Count = 0
    tokens: Count = 0
    num_open: Count = 0
    spent: Count = 0
    """Tokens of the record's day."""
    requests_left: _Level = MAX_LEVEL
    """The level of the fleet's bucket, as this gateway has it."""
    tokens_left: _Level = MAX_LEVEL

    def amounts(self) -> tuple[int, int, int, int]:
        """Return what requests change."""
        return self.requests, self.tokens, self.num_open, self.spent


class KeyUsage:
    """The use of one key over the fleet, as this gateway has it: a bucket for each limit a minute, and counts.

    `FleetLimits` adds the use at other gateways. Without it, this gateway counts as the only one.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self._limits = KeyEntry(digest="", tenant="")
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._used = {"requests": 0, "tokens": 0}
        """By this gateway, since its start."""
        self._used_before = 0
        """Tokens used before the day."""
        self._others_spent = 0
        """Tokens of the day, elsewhere."""
        self._num_open_elsewhere = 0
        self._num_opened = 0
        """Requests opened since `_num_open_elsewhere` was last set."""
        self._num_known, self._num_gateways = 1, 1
        self._known_spent = 0
        """Tokens that this gateway had spent when all gateways were last known."""

    def apply(self, key: KeyEntry) -> None:
        """Apply the limits of a reloaded key file; usage stays counted."""
        self._limits = key
        for name, limit in key.per_minute.items():
            if limit is None:
                self._buckets.pop(name, None)
                continue
            capacity = limit * self._num_known / self._num_gateways
            bucket = self._buckets.setdefault(name, TokenBucket(capacity / _MINUTE_S, capacity))
            bucket.per_s, bucket.capacity = capacity / _MINUTE_S, capacity

    @property
    def num_used(self) -> int:
        """Requests and tokens that this gateway has granted."""
        return self._used["requests"] + self._used["tokens"]

    @property
    def _spent(self) -> int:
        """Tokens of the day, here."""
        return self._used["tokens"] - self._used_before

    def admit(self) -> None:
        """Open a request; the caller calls `close` at its end. Raises OverloadedError."""
        most, budget = self._limits.max_streams, self._limits.tokens_per_day
        if most is not None and not self._has_room(most):
            message = f"This key may have {most} requests open at a time."
            raise OverloadedError(message, retry_after_s=_STREAMS_RETRY_S)
        if budget is not None and self._spent_of_all() >= budget:
            wait_s = _DAY_S - time.time() % _DAY_S
            raise OverloadedError(f"This key may use {budget} tokens a day (UTC).", retry_after_s=wait_s)
        self.take("requests", 1)
        self.num_open += 1
        self._num_opened += 1

    def close(self) -> None:
        self.num_open -= 1

    def _has_room(self, most: int) -> bool:
        """Return whether another request may be open. Gateways divide what was left at the last read."""
        known = max(1, most * self._num_known // self._num_gateways)
        left = known - self.num_open - self._num_open_elsewhere
        if self._num_open_elsewhere == 0 or left <= 0:
            return left > 0
        return self._num_opened < max(1, (left + self._num_opened) // self._num_known)

    def _spent_of_all(self) -> int:
        """Return the tokens of the day; unknown gateways count as spending what this one spends."""
        unseen = (self._spent - self._known_spent) * (self._num_gateways - self._num_known)
        return self._spent + self._others_spent + unseen

    def take(self, name: str, amount: int) -> None:
        """Count a request, or the tokens of a prompt. Raises OverloadedError."""
        bucket = self._buckets.get(name)
        if bucket is not None and (wait_s := bucket.take(self._clock(), amount)):
            message = (
                f"This key may use {self._limits.per_minute[name]} {name} a minute; try again in {math.ceil(wait_s)} s."
            )
            headers = tuple(self.headers()) if name == "requests" else ()
            raise OverloadedError(message, retry_after_s=wait_s, headers=headers)
        self._used[name] += amount

    def add_tokens(self, num_tokens: int) -> None:
        """Count the answer's tokens, after the fact."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.add(self._clock(), -num_tokens)
        self._used["tokens"] += num_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit-* headers of an answer that begins now: what is left in the fleet."""
        headers = []
        for name, bucket in self._buckets.items():
            level = bucket.level(self._clock())
            reset_s = (bucket.capacity - level) / bucket.per_s
            headers += [
                (f"x-ratelimit-limit-{name}".encode(), b"%d" % (self._limits.per_minute[name] or 0)),
                (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0, math.floor(level))),
                (f"x-ratelimit-reset-{name}".encode(), duration_text(reset_s).encode()),
            ]
        return headers

    def use(self) -> KeyUse:
        """Return this gateway's part of the use, to publish."""
        now_s = self._clock()
        left = {name: bucket.level(now_s) for name, bucket in self._buckets.items()}
        levels = left.get("requests", MAX_LEVEL), left.get("tokens", MAX_LEVEL)
        return KeyUse(self._used["requests"], self._used["tokens"], self.num_open, self._spent, *levels)

    def may_grant(self, use: KeyUse, before: KeyUse, elapsed_s: float) -> bool:
        """Return whether another gateway can have granted this since `before`, `elapsed_s` ago."""
        key, times = self._limits, _HUGE * (1.0 + elapsed_s / _MINUTE_S)
        requests, tokens = use.requests - before.requests, use.tokens - before.tokens
        amounts = (
            (requests, key.requests_per_minute),
            (tokens, key.tokens_per_minute),
            (use.num_open, key.max_streams),
            (use.spent, key.tokens_per_day),
        )
        is_huge = any(limit is not None and amount > times * limit for amount, limit in amounts)
        return min(requests, tokens, use.tokens - use.spent) >= 0 and not is_huge

    def draw(self, use: KeyUse, before: KeyUse, *, to_zero: bool, joins: bool) -> None:
        """Take what another gateway has granted since `before`.

        `to_zero`: at most what is left. `joins`: have at most the levels of that gateway.
        """
        amounts = {"requests": use.requests - before.requests, "tokens": use.tokens - before.tokens}
        levels = {"requests": use.requests_left, "tokens": use.tokens_left}
        now_s = self._clock()
        for name, bucket in self._buckets.items():
            level = bucket.level(now_s)
            amount = min(amounts[name], max(0.0, level)) if to_zero else amounts[name]
            bucket.add(now_s, -max(amount, level - levels[name] if joins else 0.0))

    def share(self, num_known: int, num_gateways: int, num_open_elsewhere: int, others_spent: int) -> None:
        """Grant the part of `num_known` gateways of `num_gateways`. Those that are not known use the rest."""
        self._num_open_elsewhere, self._num_opened = num_open_elsewhere, 0
        self._others_spent = others_spent
        if num_known == num_gateways:
            self._known_spent = self._spent
        if (num_known, num_gateways) == (self._num_known, self._num_gateways):
            return
        falls = num_known * self._num_gateways < self._num_known * num_gateways
        self._num_known, self._num_gateways = num_known, num_gateways
        now_s = self._clock()
        for bucket in self._buckets.values():  # it has refilled at the old rate; a smaller share begins without a debt
            bucket.add(now_s, max(0.0, -bucket.level(now_s)) if falls else 0.0)
        self.apply(self._limits)

    def begin_day(self) -> None:
        self._used_before = self._used["tokens"]
        self._others_spent = self._known_spent = 0


def duration_text(seconds: float) -> str:
    """Format as OpenAI does: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class AuthThrottle:
    """Rate-limits wrong keys by source address.

    A key is looked up first, so a source over its allowance, which may be a proxy, refuses no valid key. Its wrong ones
    get 429. That slows no guesser who ignores it: the number of possible keys does. Bounded: the source whose wrong key
    is oldest is forgotten first. Owned by the event loop.
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
