"""Counters by tenant and key: a series for each of the heaviest, and one for all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from server.metrics import PLACES
from server.rates import DecayedSum
from server.usage.account import Account

MAX_SERIES: Final = 64
MAX_RANKED: Final = 8192
"""Keys whose weight is remembered; beyond it the one that came first is forgotten."""
OTHER: Final = "other"
_WINDOW_S: Final = 3600.0
_RANK_INTERVAL_S: Final = 1.0
_MARGIN: Final = 1.5
"""A key takes over a series when its weight is this many times that of the lightest."""
_SUMS: Final = ("requests", "prompt_tokens", "output_tokens", "queue_s", "prefill_s", "prefill_saved_s", "block_s")
_NAMES: Final = (*_SUMS, *PLACES)

Owner = tuple[str, str]
"""A tenant and a key."""


class UsageTotals(Collector):
    """The sums of all accounts since the start. Series that leave never come back with an older value.

    A key without a series counts as other. With one, it counts from zero: so the sum of all rates stays right.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[Owner, list[float]] = {}
        self._other = [0.0] * len(_NAMES)
        self._weights: dict[Owner, DecayedSum] = {}
        """Recent tokens, by which the heaviest are found."""
        self._ranked_s = -_RANK_INTERVAL_S

    def add(self, account: Account) -> None:
        owner = (account.tenant, account.key)
        row = self._row(owner, account.prompt_tokens + account.output_tokens)
        row[0] += 1.0
        row[1] += account.prompt_tokens
        row[2] += account.output_tokens
        row[3] += account.queue_s
        row[4] += account.prefill_s
        row[5] += account.prefill_saved_s
        row[6] += account.block_s
        for place, num_tokens in account.cached_tokens.items():
            row[_NAMES.index(place)] += num_tokens

    def _row(self, owner: Owner, num_tokens: int) -> list[float]:
        now_s = self._clock()
        weight = self._weights.get(owner)
        if weight is None:
            if len(self._weights) >= MAX_RANKED:
                del self._weights[next(iter(self._weights))]
            weight = self._weights[owner] = DecayedSum(_WINDOW_S)
        weight.add(num_tokens, now_s)
        row = self._rows.get(owner)
        if row is None and (len(self._rows) < MAX_SERIES or self._makes_room(weight, now_s)):
            row = self._rows[owner] = [0.0] * len(_NAMES)
        return self._other if row is None else row

    def _makes_room(self, weight: DecayedSum, now_s: float) -> bool:
        """End the series of the lightest key if `weight` is clearly above it."""
        if now_s - self._ranked_s < _RANK_INTERVAL_S:
            return False
        self._ranked_s = now_s
        weights = {owner: self._weights[owner].at(now_s) if owner in self._weights else 0.0 for owner in self._rows}
        lightest = min(weights, key=weights.__getitem__)
        if weight.at(now_s) <= _MARGIN * weights[lightest]:
            return False
        del self._rows[lightest]
        return True

    def by_tenant(self, limit: int) -> list[dict[str, Any]]:
        """Return the sums of the heaviest tenants, by tokens, since their series began."""
        sums: dict[str, list[float]] = {}
        for tenant, row in [*((tenant, row) for (tenant, _), row in self._rows.items()), (OTHER, self._other)]:
            sums[tenant] = [a + b for a, b in zip(sums.get(tenant, [0.0] * len(row)), row, strict=True)]
        heaviest = sorted(sums.items(), key=lambda item: -item[1][1] - item[1][2])[:limit]
        return [
            {"tenant": tenant, "cached_tokens": sum(row[len(_SUMS) :]), **dict(zip(_SUMS, row, strict=False))}
            for tenant, row in heaviest
            if row[0]
        ]

    def collect(self) -> Iterator[CounterMetricFamily]:
        labels = ("tenant", "key")
        requests = CounterMetricFamily(
            "headstart_usage_requests", "Requests that reached a model's route.", labels=labels
        )
        tokens = CounterMetricFamily("headstart_usage_tokens", "Tokens.", labels=(*labels, "kind"))
        cached = CounterMetricFamily(
            "headstart_usage_cached_tokens", "Cached prompt tokens.", labels=(*labels, "place")
        )
        seconds = CounterMetricFamily(
            "headstart_usage_seconds",
            "Seconds in queues, of prefills, and saved by the cache.",
            labels=(*labels, "kind"),
        )
        blocks = CounterMetricFamily("headstart_usage_block_seconds", "Blocks held x seconds.", labels=labels)
        for owner, row in [*self._rows.items(), ((OTHER, OTHER), self._other)]:
            requests.add_metric(owner, row[0])
            for kind, value in zip(("prompt", "output"), row[1:], strict=False):
                tokens.add_metric((*owner, kind), value)
            for kind, value in zip(("queue", "prefill", "saved"), row[3:], strict=False):
                seconds.add_metric((*owner, kind), value)
            blocks.add_metric(owner, row[6])
            for place, value in zip(PLACES, row[len(_SUMS) :], strict=True):
                cached.add_metric((*owner, place), value)
        yield from (requests, tokens, cached, seconds, blocks)
