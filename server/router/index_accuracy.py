"""How accurate the prefix index is: the cached tokens that it predicted, compared with those that workers found."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Final

from server.router.placement import Placement, PlacementListener

logger = logging.getLogger(__name__)

BLIND_BELOW: Final = 0.4  # a lower precision or recall makes the index blind
SEEING_ABOVE: Final = 0.6  # the gap keeps an index near the limit from alternating


class IndexAccuracy(PlacementListener):
    """Precision and recall over a window of requests, with `common` = sum(min(predicted, found)):

        precision = common / sum(predicted)    the share of predicted tokens that was cached
        recall    = common / sum(found)        the share of cached tokens that was predicted

    The index is *blind* when either is low over enough requests and tokens.
    """

    def __init__(self, *, window: int = 200, min_requests: int = 50, min_tokens: int = 5_000) -> None:
        """The index is judged from `min_requests` requests and `min_tokens` predicted or found tokens on."""
        self._window = window
        self._min_requests = min_requests
        self._min_tokens = min_tokens
        self._recent: deque[tuple[int, int]] = deque()
        self._num_predicted = 0
        self._num_found = 0
        self._num_common = 0
        self.blind = False
        self.reason = ""

    def closed(self, placement: Placement) -> None:
        """Count it once, at its end: the engine's own count may replace the worker's guess until then."""
        if placement.num_cached_tokens is not None:
            self.add(placement.promised_tokens, placement.num_cached_tokens)

    def state(self, *, lookup_failed: bool) -> dict[str, Any]:
        """Return the index's health as JSON: blind if it is wrong or does not answer. Ratios are None until judged."""
        return {
            "blind": lookup_failed or self.blind,
            "reason": "the last lookup got no answer" if lookup_failed else self.reason,
            "precision": self.precision,
            "recall": self.recall,
            "num_requests": len(self._recent),
        }

    def add(self, predicted: int, found: int) -> None:
        """Count one request: the tokens that were predicted, and those that its worker found cached."""
        self._recent.append((predicted, found))
        self._count(predicted, found, 1)
        if len(self._recent) > self._window:
            self._count(*self._recent.popleft(), -1)
        self._judge()

    @property
    def precision(self) -> float | None:
        """None: nothing was predicted."""
        return self._num_common / self._num_predicted if self._num_predicted else None

    @property
    def recall(self) -> float | None:
        """None: nothing was found."""
        return self._num_common / self._num_found if self._num_found else None

    def _count(self, predicted: int, found: int, sign: int) -> None:
        self._num_predicted += sign * predicted
        self._num_found += sign * found
        self._num_common += sign * min(predicted, found)

    def _judge(self) -> None:
        limit = SEEING_ABOVE if self.blind else BLIND_BELOW
        reasons = []
        precision, recall = self.precision, self.recall
        if precision is not None and self._num_predicted >= self._min_tokens and precision < limit:
            reasons.append(f"only {precision:.0%} of the predicted tokens were cached")
        if recall is not None and self._num_found >= self._min_tokens and recall < limit:
            reasons.append(f"only {recall:.0%} of the cached tokens were predicted")
        blind = bool(reasons) and len(self._recent) >= self._min_requests
        self.reason = "; ".join(reasons) if blind else ""
        if blind and not self.blind:
            logger.error("the prefix index is blind over the last %d requests: %s", len(self._recent), self.reason)
        elif self.blind and not blind:
            logger.info("the prefix index sees again")
        self.blind = blind
