"""How good the index is: the cached tokens that it predicted against those that the workers found.

Over a window of requests, with `common` = sum(min(predicted, found)):

    precision = common / sum(predicted)    the share of predicted tokens that was cached
    recall    = common / sum(found)        the share of cached tokens that was predicted

The index is *blind* when either is low over enough requests and tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

from cache.types import WorkerId
from server.rates import DecayedSum

logger = logging.getLogger(__name__)

HIT_RATE_WINDOW_S: Final = 120.0
MAX_WORKERS: Final = 10_000


@dataclass(frozen=True, slots=True)
class AccuracySettings:
    num_requests: int = 200
    """The window."""
    min_requests: int = 50
    min_tokens: int = 5_000
    """Fewer predicted (or found) tokens within the window are too few to judge."""
    blind_below: float = 0.4
    seeing_above: float = 0.6


class IndexAccuracy:
    """Precision and recall over the last requests."""

    def __init__(self, settings: AccuracySettings | None = None) -> None:
        self._settings = settings or AccuracySettings()
        self._recent: deque[tuple[int, int]] = deque()
        self._num_predicted = 0
        self._num_found = 0
        self._num_common = 0
        self.blind = False
        self.reason = ""

    def add(self, predicted: int, found: int) -> None:
        """Count one request: the tokens that were predicted, and those that its worker found cached."""
        self._recent.append((predicted, found))
        self._count(predicted, found, 1)
        if len(self._recent) > self._settings.num_requests:
            self._count(*self._recent.popleft(), -1)
        self._judge()

    @property
    def precision(self) -> float:
        return self._num_common / self._num_predicted if self._num_predicted else 1.0

    @property
    def recall(self) -> float:
        return self._num_common / self._num_found if self._num_found else 1.0

    def _count(self, predicted: int, found: int, sign: int) -> None:
        self._num_predicted += sign * predicted
        self._num_found += sign * found
        self._num_common += sign * min(predicted, found)

    def _judge(self) -> None:
        settings = self._settings
        limit = settings.seeing_above if self.blind else settings.blind_below
        reasons = []
        if self._num_predicted >= settings.min_tokens and self.precision < limit:
            reasons.append(f"only {self.precision:.0%} of the predicted tokens were cached")
        if self._num_found >= settings.min_tokens and self.recall < limit:
            reasons.append(f"only {self.recall:.0%} of the cached tokens were predicted")
        blind = bool(reasons) and len(self._recent) >= settings.min_requests
        self.reason = "; ".join(reasons) if blind else ""
        if blind and not self.blind:
            logger.error("the prefix index is blind over the last %d requests: %s", len(self._recent), self.reason)
        elif self.blind and not blind:
            logger.info("the prefix index sees again")
        self.blind = blind


class HitRates:
    """The share of prompt tokens that each worker found cached, over two decaying sums a worker."""

    def __init__(self) -> None:
        self._sums: dict[WorkerId, tuple[DecayedSum, DecayedSum]] = {}

    def add(self, worker_id: WorkerId, num_prompt_tokens: int, num_cached_tokens: int, now_s: float) -> None:
        sums = self._sums.get(worker_id)
        if sums is None:
            if len(self._sums) >= MAX_WORKERS:
                self._sums.clear()
            sums = self._sums[worker_id] = (DecayedSum(HIT_RATE_WINDOW_S), DecayedSum(HIT_RATE_WINDOW_S))
        sums[0].add(num_prompt_tokens, now_s)
        sums[1].add(num_cached_tokens, now_s)

    def rate(self, worker_id: WorkerId, now_s: float) -> float | None:
        """Return 0..1, or None when no request, or less than a token after decay, says anything."""
        sums = self._sums.get(worker_id)
        if sums is None or (num_prompt_tokens := sums[0].at(now_s)) < 1.0:
            return None
        return min(1.0, sums[1].at(now_s) / num_prompt_tokens)
