"""The numbers that a worker smooths, of which older measurements fade.

PrefillRate    tokens prefilled in a second          StartInterval    from one start of a request to the next
TransferRate   tokens fetched in a second            StepCost         the time of a step over its rows
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

_HALF_LIFE_S: Final = 20.0
"""Seconds of prefill after which a measurement weighs half."""
_IDLE_HALF_LIFE_S: Final = 120.0
"""Seconds without prefill after which a measurement weighs half: its conditions may have changed."""
_TRANSFER_MEMORY_S: Final = 30.0  # after it the guess counts again: a slow place may have become fast
_GUESS_WEIGHT_S: Final = 0.01
"""The guess weighs as much as a fetch of this length: a short one mostly opens a connection."""
_HALF_LIFE_STARTS: Final = 32
"""Starts after which a measured interval weighs half."""
_QUEUE_HALF_LIFE_S: Final = 10.0
"""Seconds without a start from a queue after which the samples count half: the next queue has other requests."""
_MIN_SAMPLES: Final = 8.0
"""Steps with starts before an interval refuses a request: in fewer, one stall or one long prompt is most of it."""
_COST_FADE: Final = 0.98  # 34 steps halve a weight
_PRIOR_VARIANCE: Final = 4.0
"""The weight of the first guess of a row's cost, in squared rows."""
_MAX_CORRECTION: Final = 3.0
"""A fit may differ from the guess by this factor. A larger difference comes from other load on the machine."""


class PrefillRate:
    """Tokens per second over the recent steps that mostly prefilled.

    A step has a fixed part, worth `step_tokens`. Without it, a worker with mostly cached prompts would look slow,
    since its prefills are short.
    """

    def __init__(self, num_tokens: int = 0, duration_s: float = 0.0, step_tokens: float = 0.0) -> None:
        """Begin with a measurement, if there is one."""
        self.step_tokens = step_tokens
        self._num_tokens = num_tokens + step_tokens if num_tokens else 0.0
        self._duration_s = duration_s
        self._measured_s: float | None = None

    def add(self, num_tokens: int, duration_s: float, now_s: float) -> None:
        """Add the measurement of a step that ended at `now_s`."""
        idle_s = 0.0 if self._measured_s is None else max(0.0, now_s - duration_s - self._measured_s)
        self._measured_s = now_s
        fade = 0.5 ** (duration_s / _HALF_LIFE_S + idle_s / _IDLE_HALF_LIFE_S)
        self._num_tokens = fade * self._num_tokens + num_tokens + self.step_tokens
        self._duration_s = fade * self._duration_s + duration_s

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._duration_s if self._duration_s > 0.0 else 0.0

    def seconds(self, num_tokens: int) -> float:
        """Return the time that these tokens take; 0.0 before the first measurement."""
        return num_tokens * self._duration_s / self._num_tokens if self._num_tokens > 0.0 else 0.0


class TransferRate:
    """Tokens per second that come from one place. Loads on several threads may add.

    A slow measurement counts for 30 s: nothing is fetched from a slow place, so it would never be measured again.
    """

    def __init__(self, tokens_per_s: float) -> None:
        """Begin with a guess, which also counts after a slow measurement."""
        self._guess = tokens_per_s
        self._num_tokens = 0.0
        self._duration_s = 0.0
        self._measured_s = -math.inf

    def add(self, num_tokens: int, duration_s: float, now_s: float) -> None:
        """Add a fetch that ended at `now_s`. One without tokens was late, and replaces what was measured before."""
        fade = 0.5 if num_tokens else 0.0
        self._num_tokens = fade * self._num_tokens + num_tokens
        self._duration_s = fade * self._duration_s + duration_s
        self._measured_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        if self._num_tokens or not self._duration_s:
            num_tokens = _GUESS_WEIGHT_S * self._guess + self._num_tokens
            measured = num_tokens / (_GUESS_WEIGHT_S + self._duration_s)
        else:
            measured = 1.0 / self._duration_s
        return measured if now_s - self._measured_s < _TRANSFER_MEMORY_S else max(measured, self._guess)

    def seconds(self, num_tokens: int, now_s: float) -> float:
        """Return the time that these tokens take."""
        return num_tokens / self.tokens_per_s(now_s)


class QueuePace(NamedTuple):
    """How fast an engine's queue drains, for the limits of the queue."""

    sure_interval_s: float = 0.0
    """`StartInterval.sure_s`."""
    prefill_s: float = 0.0
    """Time to prefill the uncached prompt tokens of those that wait."""


class StartInterval:
    """Mean time from one start of a request to the next, while others wait: how fast the queue drains.

    Only starts that leave others waiting count: the last ones of a queue began when they came, not when they could.
    """

    def __init__(self) -> None:
        self._num_started = 0.0
        self._duration_s = 0.0
        self._squares = (0.0, 0.0, 0.0)
        """Sums over the samples: starts * starts, starts * seconds, seconds * seconds."""
        self._num_samples = 0.0
        self._sampled_s = -math.inf
        self._backlog_s: float | None = None
        """When the last request started, or the queue formed, while requests wait."""

    def record(self, num_started: int, num_waiting: int, now_s: float) -> None:
        """Count the starts of one step's admission, and the requests that it left waiting."""
        if num_started and num_waiting and self._backlog_s is not None:
            self._add(num_started, now_s - self._backlog_s, now_s)
        if num_waiting == 0:
            self._backlog_s = None
        elif num_started or self._backlog_s is None:
            self._backlog_s = now_s

    def _add(self, num_started: int, duration_s: float, now_s: float) -> None:
        num_samples = 1.0 + self._num_samples_at(now_s - duration_s)
        self._num_samples, self._sampled_s = min(2.0 * _MIN_SAMPLES, num_samples), now_s
        fade = 0.5 ** (num_started / _HALF_LIFE_STARTS)
        self._num_started = fade * self._num_started + num_started
        self._duration_s = fade * self._duration_s + duration_s
        added = num_started * num_started, num_started * duration_s, duration_s * duration_s
        self._squares = tuple(fade * fade * each + more for each, more in zip(self._squares, added, strict=True))

    def _num_samples_at(self, now_s: float) -> float:
        return self._num_samples * math.exp2(min(0.0, self._sampled_s - now_s) / _QUEUE_HALF_LIFE_S)

    @property
    def mean_s(self) -> float:
        """0.0 before the first measurement."""
        return self._duration_s / self._num_started if self._num_started else 0.0

    def sure_s(self, now_s: float) -> float:
        """Return the mean less its standard error; 0.0 without a queue, or if too few samples speak for it."""
        if self._backlog_s is None or self._num_samples_at(now_s) < _MIN_SAMPLES:
            return 0.0
        mean_s, (starts, products, seconds) = self.mean_s, self._squares
        error_s = math.sqrt(max(0.0, seconds - 2.0 * mean_s * products + mean_s * mean_s * starts)) / self._num_started
        return max(0.0, mean_s - error_s)


class StepCost:
    """Seconds of a step of decodes, as a line over its rows: a fixed part, and a part for each row.

    The line goes through recent steps. It begins with a guess of its slope, and of one step.
    """

    def __init__(self, row_s: float = 0.0, fixed_rows: float = 0.0) -> None:
        """The first guess: `row_s` for each row, and a fixed cost of `fixed_rows * row_s`."""
        self._guess_s = row_s
        self._mean_rows, self._mean_s = 0.0, row_s * fixed_rows
        self._weight = self._variance = self._covariance = 0.0

    @property
    def row_s(self) -> float:
        slope = (self._covariance + _PRIOR_VARIANCE * self._guess_s) / (self._variance + _PRIOR_VARIANCE)
        return min(max(slope, self._guess_s / _MAX_CORRECTION), self._guess_s * _MAX_CORRECTION)

    def measure(self, num_rows: int, duration_s: float) -> None:
        """Add the duration of a step. The first one replaces the guess of a step."""
        self._weight = _COST_FADE * self._weight + 1.0
        rows, step_s = num_rows - self._mean_rows, duration_s - self._mean_s
        self._mean_rows += rows / self._weight
        self._mean_s += step_s / self._weight
        if self._weight > 1.0:
            self._variance = _COST_FADE * self._variance + rows * (num_rows - self._mean_rows)
            self._covariance = _COST_FADE * self._covariance + rows * (duration_s - self._mean_s)

    def seconds(self, num_rows: int) -> float:
        return max(self._mean_s + self.row_s * (num_rows - self._mean_rows), self.row_s * num_rows)
