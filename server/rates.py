"""Rates over time, pure and without a clock: a token bucket, and sums that decay."""

from __future__ import annotations

import math
from typing import Final

DAY_S: Final = 86_400.0


class TokenBucket:
    """A bucket that refills at `per_s`, above 0, up to `capacity` and starts full."""

    __slots__ = ("_level", "_per_s", "_updated_s", "capacity")

    def __init__(self, per_s: float, capacity: float) -> None:
        self.capacity = capacity
        self._per_s = per_s
        self._level = capacity
        self._updated_s = -math.inf

    def level(self, now_s: float) -> float:
        """Return the tokens left; negative when overdrawn."""
        return min(self.capacity, self._level + (now_s - self._updated_s) * self._per_s)

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """Return the seconds until `amount` can be taken. A full bucket grants more than its capacity."""
        return max(0.0, min(amount, self.capacity) - self.level(now_s)) / self._per_s

    def take(self, now_s: float, amount: float = 1.0) -> float:
        """Take `amount` and return 0.0, or take nothing and return the seconds until it can be taken."""
        wait_s = self.wait_s(now_s, amount)
        if not wait_s:
            self.add(now_s, -amount)
        return wait_s

    def add(self, now_s: float, amount: float) -> None:
        """Add tokens; a negative `amount` draws tokens that were already used."""
        self.set(now_s, self.level(now_s) + amount)

    def set(self, now_s: float, level: float) -> None:
        self._level, self._updated_s = min(self.capacity, level), now_s


class DayBucket(TokenBucket):
    """A bucket that is full again at midnight (UTC)."""

    __slots__ = ()

    def __init__(self, capacity: float) -> None:
        super().__init__(1.0, capacity)
        self._updated_s = 0.0

    def level(self, now_s: float) -> float:
        return self._level if now_s // DAY_S <= self._updated_s // DAY_S else self.capacity

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        return 0.0 if self.level(now_s) >= min(amount, self.capacity) else DAY_S - now_s % DAY_S


class DecayedSum:
    """A sum of amounts, each fading by 1/e per window."""

    __slots__ = ("_at_s", "_value", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._value = 0.0
        self._at_s = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Add `amount` at `now_s`, which may be before that of an earlier call."""
        if now_s >= self._at_s:
            self._value = self.at(now_s) + amount
            self._at_s = now_s
        else:
            self._value += amount * math.exp((now_s - self._at_s) / self._window_s)

    def at(self, now_s: float) -> float:
        """Return the sum as it has decayed by `now_s`."""
        return self._value * math.exp(min(0.0, self._at_s - now_s) / self._window_s) if self._value else 0.0


class DecayedRatio:
    """The ratio of two decayed sums."""

    __slots__ = ("_denominator", "_numerator")

    def __init__(self, window_s: float) -> None:
        self._numerator = DecayedSum(window_s)
        self._denominator = DecayedSum(window_s)

    def add(self, numerator: float, denominator: float, now_s: float) -> None:
        self._numerator.add(numerator, now_s)
        self._denominator.add(denominator, now_s)

    def at(self, now_s: float, min_denominator: float) -> float | None:
        """Return the ratio at `now_s`; None where the denominator has decayed below `min_denominator`."""
        denominator = self._denominator.at(now_s)
        return self._numerator.at(now_s) / denominator if denominator >= min_denominator else None
