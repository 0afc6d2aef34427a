"""When the pool's clock showed what: a pool counts accesses and knows no time."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

_MIN_STEP_S: Final = 1.0
_MAX_SAMPLES: Final = 8192


class AccessTimes:
    """Samples of (accesses, time), a second or more apart."""

    __slots__ = ("_accesses", "_times_s")

    def __init__(self) -> None:
        self._accesses: deque[int] = deque(maxlen=_MAX_SAMPLES)
        self._times_s: deque[float] = deque(maxlen=_MAX_SAMPLES)

    def note(self, num_accesses: int, now_s: float) -> None:
        """Cheap; may be called as often as one likes."""
        if self._accesses and (num_accesses == self._accesses[-1] or now_s - self._times_s[-1] < _MIN_STEP_S):
            return
        self._accesses.append(num_accesses)
        self._times_s.append(now_s)

    def age_s(self, access: int, now_s: float) -> float:
        """Seconds since the clock showed `access`, to about a second; at least so many where that is forgotten."""
        if not self._accesses:
            return 0.0
        return now_s - self._times_s[max(0, bisect_right(self._accesses, access) - 1)]

    def copy(self) -> AccessTimes:
        copy = AccessTimes()
        copy._accesses, copy._times_s = self._accesses.copy(), self._times_s.copy()
        return copy
