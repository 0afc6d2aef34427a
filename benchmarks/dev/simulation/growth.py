"""Figures of a replay in which a prefix becomes hot, or a worker joins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchmarks.report import percentile
from cache.types import WorkerId

MINUTE_S: Final = 60.0
HIT_WINDOW_S: Final = 20.0
"""Hit rates are compared over this time."""
WARM_SHARE: Final = 0.9
"""A worker that joins is warm at this share of the others' hit rate."""


class Answered(NamedTuple):
    """A request that has its first token."""

    arrived_s: float
    worker_id: WorkerId
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float
    is_hot: bool


@dataclass(frozen=True, slots=True)
class Growth:
    num_copies: float = 0.0
    """Copies on purpose that have come."""
    hot_ttft_mean_s: float = math.nan
    """The requests with the hot prefix, as in the next one."""
    hot_ttft_p99_s: float = math.nan
    warm_s: float = math.nan
    """From the start of the worker that joins until it is warm."""
    others_ttft_p99_s: float = math.nan
    """At the other workers, in the minute from that start."""

    @classmethod
    def of(cls, answered: Sequence[Answered], num_copies: int, joins_s: float | None, joined: WorkerId) -> Growth:
        """`joins_s`: when the worker `joined` was started."""
        hot_s = [each.ttft_s for each in answered if each.is_hot]
        mean_s, p99_s = (sum(hot_s) / len(hot_s), percentile(hot_s, 0.99)) if hot_s else (math.nan, math.nan)
        if joins_s is None:
            return cls(num_copies, mean_s, p99_s)
        after = sorted((each for each in answered if each.arrived_s >= joins_s), key=lambda each: each.arrived_s)
        others_s = [e.ttft_s for e in after if e.worker_id != joined and e.arrived_s < joins_s + MINUTE_S]
        warm_s = _warm_s(after, joined)
        return cls(num_copies, mean_s, p99_s, warm_s - joins_s, percentile(others_s, 0.99))


def _warm_s(answered: Sequence[Answered], joined: WorkerId) -> float:
    """Return the first arrival at the worker from which on its hit rate is near enough to the others'."""
    for first in answered:
        if first.worker_id == joined:
            window = [each for each in answered if 0.0 <= each.arrived_s - first.arrived_s < HIT_WINDOW_S]
            others = _hit_rate([each for each in window if each.worker_id != joined])
            if _hit_rate([each for each in window if each.worker_id == joined]) >= WARM_SHARE * others:
                return first.arrived_s
    return math.inf


def _hit_rate(answered: Sequence[Answered]) -> float:
    num_tokens = sum(each.num_prompt_tokens for each in answered)
    return sum(each.num_cached_tokens for each in answered) / num_tokens if num_tokens else 0.0
