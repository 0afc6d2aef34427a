"""How often failed work may be sent again, so that trouble is not multiplied by retries."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MAX_BALANCE: Final = 100.0
PER_REQUEST: Final = 0.1
PER_SECOND: Final = 2.0


class RetryBudget:
    """A process's allowance of retries: a tenth of the requests, and two a second, at most 100 saved up.

    Source: the retry budgets of Finagle and Linkerd.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._balance = MAX_BALANCE
        self._updated_s = clock()

    def earn(self) -> None:
        """A request came in."""
        self._refill(PER_REQUEST)

    def spend(self) -> bool:
        """Whether one more retry is allowed now."""
        self._refill(0.0)
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def _refill(self, earned: float) -> None:
        now_s = self._clock()
        self._balance = min(MAX_BALANCE, self._balance + earned + (now_s - self._updated_s) * PER_SECOND)
        self._updated_s = now_s
