"""Rates and quantiles of the last seconds, from what the gateway counts anyway."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram

RATE_WINDOW_S: Final = 5.0
QUANTILE_WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at one moment, growing since the process began."""

    at_s: float
    num_decisions: int
    prompt_tokens: float
    cached_tokens: float
    """Of `prompt_tokens` those that workers found cached."""
    output_tokens: float
    in_flight: float
    ttft_counts: tuple[float, ...]
    """Cumulative, one a bucket of `ttft_bounds_s`."""


class Traffic:
    """Feed it totals at a steady pace; it forgets those older than its windows."""

    def __init__(self, ttft_bounds_s: Sequence[float]) -> None:
        self._bounds_s = ttft_bounds_s
        self._samples: deque[Totals] = deque()

    def add(self, totals: Totals) -> dict[str, Any]:
        """What the numbers say now. None where nothing has happened that could be measured."""
        samples = self._samples
        samples.append(totals)
        while totals.at_s - samples[0].at_s > QUANTILE_WINDOW_S:
            samples.popleft()
        near = next(sample for sample in samples if totals.at_s - sample.at_s <= RATE_WINDOW_S)
        elapsed_s = totals.at_s - near.at_s
        far = samples[0]
        prompt_tokens = totals.prompt_tokens - far.prompt_tokens
        counts = [now - then for now, then in zip(totals.ttft_counts, far.ttft_counts, strict=True)]
        return {
            "window_s": totals.at_s - far.at_s,
            "in_flight": totals.in_flight,
            "decisions_per_s": _rate(totals.num_decisions - near.num_decisions, elapsed_s),
            "output_tokens_per_s": _rate(totals.output_tokens - near.output_tokens, elapsed_s),
            "prompt_tokens_per_s": _rate(totals.prompt_tokens - near.prompt_tokens, elapsed_s),
            "prompt_tokens": prompt_tokens,
            "hit_rate": min(1.0, (totals.cached_tokens - far.cached_tokens) / prompt_tokens) if prompt_tokens else None,
            "ttft_p50_s": quantile(0.5, self._bounds_s, counts),
            "ttft_p95_s": quantile(0.95, self._bounds_s, counts),
        }


def quantile(q: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """By linear interpolation within a bucket, as Prometheus has it. `counts` are cumulative, the last bound is inf."""
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    lower, below = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            if bound == float("inf") or count == below:
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def _rate(amount: float, elapsed_s: float) -> float | None:
    return max(0.0, amount) / elapsed_s if elapsed_s > 0.0 else None


def total(metric: Counter | Gauge) -> float:
    """The value of a metric without labels."""
    return float(next(iter(metric.collect())).samples[0].value)


def buckets(histogram: Histogram) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Upper bounds and cumulative counts of a histogram without labels."""
    samples = [s for s in next(iter(histogram.collect())).samples if s.name.endswith("_bucket")]
    return tuple(float(s.labels["le"]) for s in samples), tuple(s.value for s in samples)
