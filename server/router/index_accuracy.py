"""Promised against found: does the index still tell the truth?

Every request that starts says how many prompt tokens were promised and how many the worker found. Over a window of
requests the index is *blind* when it promises what is not there, or stays silent about what is.

    kept   = sum(min(promised, found)) / sum(promised)     of what was promised, how much was there
    told   = sum(min(promised, found)) / sum(found)        of what was there, how much was promised
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForesightSettings:
    window: int = 200
    """Requests."""
    min_requests: int = 50
    min_tokens: int = 5_000
    """Promised, or found, within the window: below it there is nothing to judge."""
    blind_below: float = 0.4
    seeing_above: float = 0.6


class Foresight:
    def __init__(self, settings: ForesightSettings | None = None) -> None:
        self._settings = settings or ForesightSettings()
        self._recent: deque[tuple[int, int]] = deque()
        self._promised = 0
        self._found = 0
        self._common = 0
        self.blind = False
        self.reason = ""

    def add(self, promised: int, found: int) -> None:
        """One request whose worker has said what it found."""
        self._recent.append((promised, found))
        self._count(promised, found, 1)
        if len(self._recent) > self._settings.window:
            self._count(*self._recent.popleft(), -1)
        self._judge()

    def _count(self, promised: int, found: int, sign: int) -> None:
        self._promised += sign * promised
        self._found += sign * found
        self._common += sign * min(promised, found)

    @property
    def kept(self) -> float:
        return self._common / self._promised if self._promised else 1.0

    @property
    def told(self) -> float:
        return self._common / self._found if self._found else 1.0

    def _judge(self) -> None:
        settings = self._settings
        limit = settings.seeing_above if self.blind else settings.blind_below
        reasons = []
        if self._promised >= settings.min_tokens and self.kept < limit:
            reasons.append(f"only {self.kept:.0%} of the promised tokens were cached")
        if self._found >= settings.min_tokens and self.told < limit:
            reasons.append(f"only {self.told:.0%} of the cached tokens were promised")
        blind = bool(reasons) and len(self._recent) >= settings.min_requests
        self.reason = "; ".join(reasons) if blind else ""
        if blind and not self.blind:
            logger.error("the prefix index is blind over the last %d requests: %s", len(self._recent), self.reason)
        elif self.blind and not blind:
            logger.info("the prefix index sees again")
        self.blind = blind
