"""Of the prompt tokens that each worker got lately, the part that it found in its cache."""

from __future__ import annotations

from typing import Final

from cache.types import WorkerId
from server.rates import DecayedSum

WINDOW_S: Final = 120.0
MAX_WORKERS: Final = 10_000


class HitRates:
    """Two sums a worker, each fading by 1/e per window."""

    def __init__(self) -> None:
        self._sums: dict[WorkerId, tuple[DecayedSum, DecayedSum]] = {}

    def add(self, worker_id: WorkerId, num_prompt_tokens: int, num_cached_tokens: int, now_s: float) -> None:
        """One request whose worker has said what it found."""
        sums = self._sums.get(worker_id)
        if sums is None:
            if len(self._sums) >= MAX_WORKERS:
                self._sums.clear()
            sums = self._sums[worker_id] = (DecayedSum(WINDOW_S), DecayedSum(WINDOW_S))
        sums[0].add(num_prompt_tokens, now_s)
        sums[1].add(num_cached_tokens, now_s)

    def rate(self, worker_id: WorkerId, now_s: float) -> float | None:
        """0..1; None while nothing is known, or what is known has faded to less than a token."""
        sums = self._sums.get(worker_id)
        if sums is None or (num_prompt_tokens := sums[0].at(now_s)) < 1.0:
            return None
        return min(1.0, sums[1].at(now_s) / num_prompt_tokens)
