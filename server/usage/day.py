"""Sums of what this gateway has done in each minute of the last day: GET /history on the ops port."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from server.usage.account import CLIENT_LEFT, Account

MINUTES: Final = 24 * 60  # a day
COLUMNS: Final = (
    *("answered", "refused", "failed", "left"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "queue_s", "prefill_s", "prefill_saved_s"),
)


class DayHistory:
    """Sums by the minute in which requests ended. Minutes without a request have no row."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._minutes: deque[tuple[int, defaultdict[str, float]]] = deque(maxlen=MINUTES)

    def add(self, account: Account) -> None:
        minute = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, defaultdict(float)))
        sums = self._minutes[-1][1]
        sums[outcome(account)] += 1
        for name, amount in account.sums().items():
            sums[name] += amount

    def report(self) -> dict[str, Any]:
        """Return the rows of the last day, oldest first; `at` is the Unix time at which a minute began."""
        first = int(self._clock() // 60) - MINUTES
        rows = [
            (minute * 60, *(round(sums[name], 3) for name in COLUMNS))
            for minute, sums in self._minutes
            if minute > first
        ]
        return {"now": self._clock(), "columns": ("at", *COLUMNS), "rows": rows}


def outcome(account: Account) -> str:
    """Return the column that counts the request. Wrong requests count as answered: the gateway did its part."""
    if account.status in (0, CLIENT_LEFT):
        return "left"
    if account.status == 429:
        return "refused"
    return "failed" if account.status >= 500 or (account.status == 200 and not account.finished) else "answered"
