"""How long something takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    p50_s: float
    p99_s: float


async def timed(operation: Callable[[], Awaitable[object]], count: int) -> list[float]:
    times_s = []
    for _ in range(count):
        started_s = time.perf_counter()
        await operation()
        times_s.append(time.perf_counter() - started_s)
    return times_s


def timing(times_s: Sequence[float]) -> Timing:
    ordered = sorted(times_s)
    return Timing(statistics.median(ordered), ordered[int(len(ordered) * 0.99)])
