"""How often failed work may be sent again, so that trouble is not multiplied by retries."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from server.rates import TokenBucket

MAX_BALANCE: Final = 100.0
PER_REQUEST: Final = 0.1
PER_SECOND: Final = 2.0


class RetryBudget:
    """A process's allowance of retries: a tenth of the requests, and two a second, at most 100 saved up.

    Source: the retry budgets of Finagle and Linkerd.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = TokenBucket(PER_SECOND, MAX_BALANCE)

    def earn(self) -> None:
        """Count a request that came in."""
        self._bucket.add(self._clock(), PER_REQUEST)

    def spend(self) -> bool:
        """Return whether one more retry is allowed now, and count it."""
        return self._bucket.take(self._clock()) == 0.0
