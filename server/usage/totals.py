"""Counters by tenant and key: a series for each of the heaviest, and one for all others."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from server.metrics import PLACES
from server.rates import DecayedSum
from server.usage.account import Account

MAX_SERIES: Final = 64  # bounds the series in Prometheus
MAX_RANKED: Final = 8192
"""Keys whose weight is remembered; beyond it the one that came first is forgotten."""
OTHER: Final = "other"
_WINDOW_S: Final = 3600.0  # the hour that ranks owners by use
_RANK_INTERVAL_S: Final = 1.0  # ranking sorts all owners
_MARGIN: Final = 1.5
"""A key takes over a series when its weight is this many times that of the lightest."""
_FAMILIES: Final[tuple[tuple[str, str, tuple[str, ...], dict[tuple[str, ...], str]], ...]] = (
    ("requests", "Requests that reached a model's route.", (), {(): "requests"}),
    ("tokens", "Tokens.", ("kind",), {("prompt",): "prompt_tokens", ("output",): "output_tokens"}),
    ("cached_tokens", "Cached prompt tokens.", ("place",), {(place,): place for place in PLACES}),
    (
        "seconds",
        "Seconds in queues, between gateway and worker, of prefills, and saved by the cache.",
        ("kind",),
        {("queue",): "queue_s", ("wire",): "wire_s", ("prefill",): "prefill_s", ("saved",): "prefill_saved_s"},
    ),
    ("block_seconds", "Blocks held x seconds.", (), {(): "block_s"}),
)
"""Name, text and further labels of each metric, and which sum has which values of these labels."""

Owner = tuple[str, str]
"""A tenant and a key."""


class UsageTotals(Collector):
    """The sums of all accounts since the start. Series that leave never come back with an older value.

    A key without a series counts as other. With one, it counts from zero: so the sum of all rates stays right.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[Owner, dict[str, float]] = {}
        self._other = defaultdict[str, float](float)
        self._weights: dict[Owner, DecayedSum] = {}
        """Recent tokens, by which the heaviest are found."""
        self._ranked_s = -_RANK_INTERVAL_S

    def add(self, account: Account) -> None:
        owner = (account.tenant, account.key)
        row = self._row(owner, account.prompt_tokens + account.output_tokens)
        for name, amount in account.sums().items():
            row[name] += amount

    def _row(self, owner: Owner, num_tokens: int) -> dict[str, float]:
        if owner == (OTHER, OTHER):
            return self._other  # which has these labels
        now_s = self._clock()
        weight = self._weights.get(owner)
        if weight is None:
            if len(self._weights) >= MAX_RANKED:
                del self._weights[next(iter(self._weights))]
            weight = self._weights[owner] = DecayedSum(_WINDOW_S)
        weight.add(num_tokens, now_s)
        row = self._rows.get(owner)
        if row is None and (len(self._rows) < MAX_SERIES or self._makes_room(weight, now_s)):
            row = self._rows[owner] = defaultdict(float)
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
        sums = defaultdict[str, Counter[str]](Counter)
        for (tenant, _), row in self._series():
            sums[tenant].update(row)
        heaviest = nlargest(limit, sums.items(), lambda item: item[1]["prompt_tokens"] + item[1]["output_tokens"])
        return [{"tenant": tenant, **row} for tenant, row in heaviest if row]

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, text, labels, sums in _FAMILIES:
            family = CounterMetricFamily(f"headstart_usage_{name}", text, labels=("tenant", "key", *labels))
            for owner, row in self._series():
                for values, amount in sums.items():
                    family.add_metric((*owner, *values), row.get(amount, 0.0))
            yield family

    def _series(self) -> Iterator[tuple[Owner, dict[str, float]]]:
        yield from self._rows.items()
        yield (OTHER, OTHER), self._other
