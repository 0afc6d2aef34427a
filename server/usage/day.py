"""Sums of what this gateway has done in each minute of the last day, by model: GET /history on the ops port."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct, field

from server.metrics import LATENCY_S
from server.usage.account import CLIENT_LEFT, Account

MINUTES: Final = 24 * 60  # a day
MAX_NAMED: Final = 256  # more pairs of code and tenant are counted by code
COLUMNS: Final = (
    *("answered", "wrong", "refused", "failed", "left"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "queue_s", "wire_s", "prefill_s", "prefill_saved_s"),
)


class _Row(Struct, eq=False):
    """One model in one minute."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    errors: Counter[str] = field(default_factory=Counter)
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_S) + 1))
    """Streams by the time to their first token: one number for each bound, and one for those above all."""


class DayHistory:
    """Sums by the minute in which requests ended. A minute without a request has no row."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._minutes: deque[tuple[int, defaultdict[str, _Row]]] = deque(maxlen=MINUTES)
        self.turned_away = Counter[tuple[str, str]]()
        """Requests since the start that were refused or failed: which of these, and the error's code and tenant."""
        self._reasons: dict[tuple[str, ...], tuple[int, float, str]] = {}
        """Requests without an answer by outcome, code, tenant, key and model: their number, and the last one."""

    def add(self, status: int, error: str, account: Account | None, sender: tuple[str, str], request_id: str) -> None:
        """Count a request that has ended. `account`: None for one that reached no route of a model."""
        minute = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, defaultdict(_Row)))
        row = self._minutes[-1][1]["" if account is None else account.model]
        result = outcome(status, finished=account is not None and account.finished)
        row.sums[result] += 1
        if error:
            row.errors[error] += 1
            who = result, error, *sender, "" if account is None else account.model
            number, *_ = self._reasons.pop(who, (0,))
            if len(self._reasons) >= MAX_NAMED:
                del self._reasons[next(iter(self._reasons))]  # the one that ended longest ago
            self._reasons[who] = number + 1, self._clock(), request_id
        if result in ("refused", "failed"):
            named = result, f"{error}, tenant {sender[0]}" if sender[0] else error
            is_known = named in self.turned_away or len(self.turned_away) < MAX_NAMED
            self.turned_away[named if is_known else (result, error)] += 1
        if account is None:
            return
        for name, amount in account.sums().items():
            row.sums[name] += amount
        if account.first_token_s is not None:
            row.first_tokens[bisect_left(LATENCY_S, account.first_token_s)] += 1

    def report(self) -> dict[str, Any]:
        """Return the rows of the last day, oldest first; `at` is the Unix time at which a minute began.

        It takes tens of milliseconds: run it in a thread. What is added while it runs may be missing.
        """
        first = int(self._clock() // 60) - MINUTES
        rows = [
            (minute * 60, model, *(round(row.sums.get(name, 0.0), 3) for name in COLUMNS), row.errors, row.first_tokens)
            for minute, models in list(self._minutes)
            if minute > first
            for model, row in list(models.items())
        ]
        columns = ("at", "model", *COLUMNS, "errors", "first_tokens")
        names = ("outcome", "reason", "tenant", "key", "model", "requests", "last_at", "last_id")
        reasons = [dict(zip(names, (*who, *last), strict=True)) for who, last in list(self._reasons.items())[::-1]]
        bounds = {"first_token_bounds_s": LATENCY_S}
        return {"now": self._clock(), "columns": columns, **bounds, "rows": rows, "reasons": reasons}


def outcome(status: int, *, finished: bool) -> str:
    """Return the column that counts a request."""
    if status in (0, CLIENT_LEFT):
        return "left"
    if status == 429:
        return "refused"
    if status < 400:
        return "answered" if finished else "failed"
    return "failed" if status >= 500 else "wrong"
