"""The oracle: the smallest fleet of each minute that meets the objective, found by simulation with the day known.

The simulation is one queue in front of all workers, with the prefills that the scaled fleet had. No router does better
with them: each request goes to the first worker that is free, wherever its blocks are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final

from benchmarks.dev.scale_load.elastic import MINUTE_S
from benchmarks.report import percentile

MET_SHARE: Final = 0.99
_MAX_ROUNDS: Final = 60
_NUM_TRIMS: Final = 9


def oracle(prefills: Sequence[tuple[float, float]], objective_s: float, least: int) -> list[int]:
    """Return the workers of each minute. The objective is met in 99 % of the minutes."""
    num_minutes = int(prefills[-1][0] // MINUTE_S) + 1
    work_s = [0.0] * num_minutes
    for start_s, prefill_s in prefills:
        work_s[int(start_s // MINUTE_S)] += prefill_s
    sizes = _raised([max(least, math.ceil(0.9 * each / MINUTE_S)) for each in work_s], prefills, objective_s)
    for turn in range(_NUM_TRIMS):  # every third minute, so that neighbours do not count on each other
        fewer = [max(least, size - (at % 3 == turn % 3)) for at, size in enumerate(sizes)]
        late = _late(fewer, prefills, objective_s)
        kept = [size if {at, at + 1} & late else less for at, (size, less) in enumerate(zip(sizes, fewer, strict=True))]
        sizes = _raised(kept, prefills, objective_s)
    return sizes


def _raised(sizes: list[int], prefills: Sequence[tuple[float, float]], objective_s: float) -> list[int]:
    for _ in range(_MAX_ROUNDS):
        late = _late(sizes, prefills, objective_s)
        if len(late) <= (1.0 - MET_SHARE) * len(sizes):
            break
        sizes = [size + (at in late) for at, size in enumerate(sizes)]
    return sizes


def _late(sizes: Sequence[int], prefills: Sequence[tuple[float, float]], objective_s: float) -> set[int]:
    """Return the minutes that miss the objective with these fleets."""
    free_s: list[float] = []
    now, waits_s = -1, [list[float]() for _ in sizes]
    for start_s, prefill_s in prefills:
        while now < int(start_s // MINUTE_S):
            now += 1
            while len(free_s) < sizes[now]:
                heapq.heappush(free_s, now * MINUTE_S)
            while len(free_s) > sizes[now]:
                heapq.heappop(free_s)
        end_s = max(start_s, free_s[0]) + prefill_s
        heapq.heapreplace(free_s, end_s)
        waits_s[now].append(end_s - start_s)
    return {at for at, each in enumerate(waits_s) if each and percentile(each, 0.9) > objective_s}
