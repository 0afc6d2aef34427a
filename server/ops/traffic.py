"""Rates and quantiles of a gateway's last seconds, from its own metrics."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from server.metrics import GatewayMetrics

RATE_WINDOW_S: Final = 5.0
QUANTILE_WINDOW_S: Final = 60.0


Totals = dict[str, Any]
"""Counters at one moment, growing since the process began, as JSON."""


def read_totals(metrics: GatewayMetrics, num_decisions: int, num_streamed_tokens: int) -> Totals:
    """Return the totals of now. Metrics do not count the output of open requests yet: `num_streamed_tokens`."""
    return {
        "at_s": time.monotonic(),
        "num_decisions": num_decisions,
        "prompt_tokens": metrics.prompt_tokens.sum(),
        "cached_tokens": metrics.cached_tokens.sum(),
        "output_tokens": metrics.output_tokens.sum() + num_streamed_tokens,
        "in_flight": metrics.num_in_flight,
        "ttft_counts": metrics.ttft_s.cumulative(),  # one per bucket
    }


class Traffic:
    """Rates and quantiles of the last seconds, from totals added at a steady pace."""

    def __init__(self, ttft_bounds_s: Sequence[float]) -> None:
        self._bounds_s = ttft_bounds_s
        self._samples: deque[Totals] = deque()

    def add(self, totals: Totals) -> dict[str, Any]:
        """Return the numbers of now; None where nothing was measured."""
        samples, now_s = self._samples, totals["at_s"]
        samples.append(totals)
        while now_s - samples[0]["at_s"] > QUANTILE_WINDOW_S:
            samples.popleft()
        near = next(sample for sample in samples if now_s - sample["at_s"] <= RATE_WINDOW_S)
        far, elapsed_s = samples[0], now_s - near["at_s"]
        prompt_tokens, cached_tokens = (totals[name] - far[name] for name in ("prompt_tokens", "cached_tokens"))
        counts = [now - then for now, then in zip(totals["ttft_counts"], far["ttft_counts"], strict=True)]

        def rate(name: str) -> float | None:
            return max(0.0, totals[name] - near[name]) / elapsed_s if elapsed_s > 0.0 else None

        return {
            "window_s": now_s - far["at_s"],
            "in_flight": totals["in_flight"],
            "decisions_per_s": rate("num_decisions"),
            "output_tokens_per_s": rate("output_tokens"),
            "prompt_tokens_per_s": rate("prompt_tokens"),
            "prompt_tokens": prompt_tokens,
            "hit_rate": min(1.0, cached_tokens / prompt_tokens) if prompt_tokens else None,
            "ttft_p50_s": quantile(0.5, self._bounds_s, counts),
            "ttft_p95_s": quantile(0.95, self._bounds_s, counts),
        }


def quantile(q: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Interpolate within a bucket, as Prometheus does. `counts` are cumulative, the last bound is inf."""
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    index = bisect_left(counts, rank)
    lower, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    if bounds[index] == math.inf or counts[index] == below:
        return lower
    return lower + (bounds[index] - lower) * (rank - below) / (counts[index] - below)
