"""Rates of a key: requests and tokens a minute as token buckets, and how many requests it may have open.

A bucket holds a minute's worth and refills evenly. Prompt tokens are taken when they are known; answer tokens when
they have been generated, by which a bucket may fall below zero: what is overdrawn is waited for by the next request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from server.auth.identity import Identity
from server.auth.limit_table import Bucket, LimitTable, Row
from server.errors import OverloadedError

_MINUTE_S: Final = 60.0
_STREAMS_RETRY_S: Final = 1.0

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True, eq=False)
class Lease:
    """One open request of a key with limits. Close it exactly once."""

    limits: RateLimits
    identity: Identity
    row: Row
    headers: Headers = field(default_factory=list)
    """x-ratelimit-*, for the answer."""

    def take_tokens(self, num_tokens: int) -> None:
        """For the prompt. Raises OverloadedError."""
        limit = self.identity.limits.tokens_per_minute
        if limit is not None:
            wait_s = self.limits.table.take(self.row, "tokens", limit / _MINUTE_S, limit, num_tokens)
            self._describe()
            if wait_s > 0.0:
                raise _over(f"{limit} tokens a minute", wait_s)

    def add_tokens(self, num_tokens: int) -> None:
        """Of the answer, after the fact."""
        limit = self.identity.limits.tokens_per_minute
        if limit is not None:
            self.limits.table.draw(self.row, "tokens", limit / _MINUTE_S, limit, num_tokens)

    def close(self) -> None:
        if self.identity.limits.max_streams is not None:
            self.limits.table.leave(self.row)

    def take_request(self) -> None:
        """Raises OverloadedError."""
        limits = self.identity.limits
        if limits.requests_per_minute is not None:
            limit = limits.requests_per_minute
            wait_s = self.limits.table.take(self.row, "requests", limit / _MINUTE_S, limit, 1)
            self._describe()
            if wait_s > 0.0:
                raise _over(f"{limit} requests a minute", wait_s, self.headers)
        else:
            self._describe()

    def _describe(self) -> None:
        limits = self.identity.limits
        self.headers.clear()
        rates: tuple[tuple[Bucket, int | None], ...] = (
            ("requests", limits.requests_per_minute),
            ("tokens", limits.tokens_per_minute),
        )
        for name, limit in rates:
            if limit is None:
                continue
            level = self.limits.table.level(self.row, name, limit / _MINUTE_S, limit)
            reset_s = (limit - level) * _MINUTE_S / limit
            self.headers += [
                (f"x-ratelimit-limit-{name}".encode(), b"%d" % limit),
                (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0, math.floor(level))),
                (f"x-ratelimit-reset-{name}".encode(), duration_text(reset_s).encode()),
            ]


class RateLimits:
    """The limits of every key, counted over all processes that share `table`."""

    def __init__(self, table: LimitTable) -> None:
        self.table = table

    def admit(self, identity: Identity) -> Lease | None:
        """A lease for one request, None where the key has no limits. Raises OverloadedError."""
        limits = identity.limits
        if limits.requests_per_minute is None and limits.tokens_per_minute is None and limits.max_streams is None:
            return None
        row = self.table.row(identity.key_digest)
        if limits.max_streams is not None and not self.table.enter(row, limits.max_streams):
            raise OverloadedError(
                f"This key may have {limits.max_streams} requests open at a time.", retry_after_s=_STREAMS_RETRY_S
            )
        lease = Lease(self, identity, row)
        try:
            lease.take_request()
        except OverloadedError:
            lease.close()
            raise
        return lease


def _over(what: str, wait_s: float, headers: Sequence[tuple[bytes, bytes]] = ()) -> OverloadedError:
    message = f"This key may use {what}; try again in {math.ceil(wait_s)} s."
    return OverloadedError(message, retry_after_s=wait_s, headers=tuple(headers))


def duration_text(seconds: float) -> str:
    """As OpenAI writes them: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
