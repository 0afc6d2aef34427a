"""The time of an engine's prefill over its tokens: docs/architecture/worker.md#the-prefill-rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_HALF_LIFE_S: Final = 20.0
"""Seconds of prefill after which a measurement weighs half."""
_IDLE_HALF_LIFE_S: Final = 120.0
"""Seconds without prefill after which a measurement weighs half: its conditions may have changed."""
_JITTER_S: Final = 0.05
"""A prefill's time varies by a share of the time and this: shorter ones weigh alike."""
_MAX_SURPRISE: Final = 3.0
"""A prefill that takes this many times what was expected weighs as one of that time."""
_MIN_PREFILLS: Final = 3.5
_MIN_ERROR: Final = 0.005  # the least that is assumed, as few prefills may fit a line by chance
_MAX_ERROR: Final = 0.2
"""The standard error of a token's time, as a share of it, up to which it counts as known."""
_LONG_S: Final = 1.3
"""The time of a prefill that mostly goes by its tokens, whatever its fixed part."""


@dataclass(slots=True)
class Measured:
    """A measurement, as it stands in the sums."""

    duration_s: float
    age: float
    """The line's age when it was added, in half-lives."""
    point: tuple[float, ...]


class PrefillLine:
    """Seconds of a prefill as a line over its tokens: a fixed part, and a part for each token.

    A fit over recent prefills, in faded sums. Where their lengths are too similar to split both parts, the last
    `token_s` stays, and the fixed part is the rest of the mean.
    """

    def __init__(self, token_s: float = 0.0, fixed_s: float = 0.0) -> None:
        """Begin with a guess, if there is one."""
        self.token_s, self.fixed_s = token_s, fixed_s
        self.is_split = token_s > 0.0
        """Both parts are known. Until then the line only fits prefills of the mean length."""
        self.is_unsure = False
        """Tokens are less than a third of the mean time: the rate is less sure than the time of a prefill."""
        self._sums = [0.0] * 7
        self._age = 0.0
        self._engine_tokens = self._engine_s = 0.0
        self._measured_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """0.0: unknown."""
        return 1.0 / self.token_s if self.is_split and self.token_s else 0.0

    def seconds(self, num_tokens: float) -> float:
        """Return the time of a prefill of these tokens; 0.0 before the first measurement."""
        return self.fixed_s + num_tokens * self.token_s

    def bound(self, num_tokens: float, busy_s: float) -> None:
        """Take an engine's count of ended prefills: their tokens, and a time that is at least what they took."""
        fade = 0.5 ** (busy_s / _HALF_LIFE_S)
        self._engine_tokens = fade * self._engine_tokens + num_tokens
        self._engine_s = fade * self._engine_s + busy_s

    def add(self, num_tokens: float, duration_s: float, now_s: float) -> Measured:
        """Add a prefill that ended at `now_s`."""
        idle_s = 0.0 if self._measured_s is None else max(0.0, now_s - duration_s - self._measured_s)
        self._measured_s = now_s
        num_halvings = duration_s / _HALF_LIFE_S + idle_s / _IDLE_HALF_LIFE_S
        self._age += num_halvings
        measured = Measured(duration_s, self._age, self._point(num_tokens, duration_s))
        self._sums = [0.5**num_halvings * each + new for each, new in zip(self._sums, measured.point, strict=True)]
        self._fit()
        return measured

    def correct(self, measured: Measured, num_tokens: float) -> None:
        """Replace the tokens of a measurement: the engine has found another part of the prompt cached."""
        before, measured.point = measured.point, self._point(num_tokens, measured.duration_s)
        left = 0.5 ** (self._age - measured.age)
        changes = zip(self._sums, before, measured.point, strict=True)
        self._sums = [each + left * (new - old) for each, old, new in changes]
        self._fit()

    def _point(self, num_tokens: float, duration_s: float) -> tuple[float, ...]:
        # The weight goes by the expected time: by the measured one, short times would pull more than long ones.
        expected_s = self.seconds(num_tokens) or duration_s
        usual_s = min(max(expected_s, duration_s / _MAX_SURPRISE), duration_s * _MAX_SURPRISE)
        weight = (usual_s + _JITTER_S) ** -2
        x, y = weight * num_tokens, weight * duration_s
        return 1.0, weight, x, y, x * num_tokens, x * duration_s, y * duration_s

    def _fit(self) -> None:
        num, weights, xs, ys, xxs, xys, yys = self._sums
        mean_tokens, mean_s = xs / weights, ys / weights
        variance, covariance = xxs - xs * mean_tokens, xys - xs * mean_s
        whole_s = mean_s / max(1.0, mean_tokens)  # the time of a token if nothing were fixed
        slope, is_split = 0.0, False
        if variance > 0.0 and covariance > 0.0 and num > _MIN_PREFILLS:
            slope = covariance / variance
            unexplained = max(0.0, yys - ys * mean_s - slope * covariance) / (num - 2.0)
            is_split = math.sqrt(max(unexplained, _MIN_ERROR**2) / variance) < _MAX_ERROR * slope
        if is_split or not self.is_split:
            self.token_s = slope or whole_s
        self.is_split |= is_split or (mean_s > _LONG_S and num > 1.5)
        engine_s = self._engine_s / self._engine_tokens if self._engine_tokens else whole_s
        self.token_s = min(self.token_s, whole_s, engine_s)
        self.fixed_s = max(0.0, mean_s - self.token_s * mean_tokens)
        self.is_unsure = 2.0 * self.token_s * mean_tokens < self.fixed_s
