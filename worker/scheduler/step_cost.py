"""The time of a step, fitted to the recent ones: least squares whose older points fade."""

from __future__ import annotations

from typing import Final

_COST_FADE: Final = 0.98
_PRIOR_VARIANCE: Final = 4.0
"""The weight of the first guess of a row's cost, in squared rows."""
_MAX_CORRECTION: Final = 3.0
"""A fit may differ from the guess by this factor. A larger difference comes from other load on the machine."""


class FadedLine:
    """A line through recent points, which begins with a guess of its slope and of one point."""

    def __init__(self, mean_x: float, mean_y: float, slope: float, fade: float, prior_variance: float) -> None:
        """Each new point multiplies the weight of the earlier ones by `fade`. The slope's guess weighs
        `prior_variance`, in squared units of x."""
        self.mean_x, self.mean_y = mean_x, mean_y
        self._slope, self._fade, self._prior_variance = slope, fade, prior_variance
        self._weight = self._variance = self._covariance = 0.0

    @property
    def slope(self) -> float:
        return (self._covariance + self._prior_variance * self._slope) / (self._variance + self._prior_variance)

    def at(self, x: float) -> float:
        return self.mean_y + self.slope * (x - self.mean_x)

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Add a point of a weight up to 1. The first one replaces the guess of a point."""
        fade = self._fade**weight
        self._weight = fade * self._weight + weight
        if self._weight == weight:
            self.mean_x, self.mean_y = x, y
            return
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += dx * weight / self._weight
        self.mean_y += dy * weight / self._weight
        self._variance = fade * self._variance + weight * dx * (x - self.mean_x)
        self._covariance = fade * self._covariance + weight * dx * (y - self.mean_y)


class StepCost:
    """Seconds of a step of decodes, as a line over its rows: a fixed part, and a part for each row."""

    def __init__(self, row_s: float = 0.0, fixed_rows: float = 0.0) -> None:
        """Begin with a guess: `row_s` for a row, and a fixed part equal to `fixed_rows` of them."""
        self._guess_s = row_s
        self._line = FadedLine(0.0, row_s * fixed_rows, row_s, _COST_FADE, _PRIOR_VARIANCE)

    @property
    def row_s(self) -> float:
        return min(max(self._line.slope, self._guess_s / _MAX_CORRECTION), self._guess_s * _MAX_CORRECTION)

    def measure(self, num_rows: int, duration_s: float) -> None:
        """Add the duration of a step."""
        self._line.add(num_rows, duration_s)

    def seconds(self, num_rows: int) -> float:
        line = self._line
        return max(line.mean_y + self.row_s * (num_rows - line.mean_x), self.row_s * num_rows)
