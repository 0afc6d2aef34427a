"""How many workers a model needs: the prefill work that it is offered, and its queue, at a target use of a worker.

    offered   prefill seconds that all gateways assign in a second, from the workers' own counters
    queue     what waits beyond the objective, worked off in a minute
    needed    the sum and SPREAD times its square root, and enough pools for the blocks of running requests

So 7 workers may be busy for 0.6 of their time, and 21 for 0.77: load varies less in a larger fleet. Every gateway sees
the whole fleet's work, so each has the same number.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final

from cache.records import Candidate
from cache.types import WorkerIncarnation
from server.rates import DecayedRatio
from server.router.router import Router

INTERVAL_S: Final = 5.0  # twelve numbers within `SETTLE_S`
WARM_UP_S: Final = 60.0  # for this time a gateway that has just started has no number
SETTLE_S: Final = 60.0  # a lower number counts after this time, a higher one at once
MAX_GROWTH: Final = 4  # at most that many times the workers there are: reports in Redis may be forged
SPREAD: Final = 1.2  # for minutes above the mean; one use for all sizes takes two workers more at 12 (RESULTS.md)
_WINDOW_S: Final = 120.0  # of the mean work: at half, it follows single prompts; at twice, workers are added late
_DRAIN_S: Final = 60.0  # in which the workers should clear a queue that exceeds the objective
_MAX_POOL_USE: Final = 0.9  # a fuller pool evicts prefixes, and preempts


class WorkersNeeded:
    """One gateway's estimates, by model. Owned by the event loop."""

    def __init__(self, objective_s: float, clock: Callable[[], float]) -> None:
        self.objective_s = objective_s
        self._clock = clock
        self._models = defaultdict[str, _Model](lambda: _Model(clock()))

    async def follow(self, router: Router) -> None:
        """Observe the router's fleet and what it holds, until cancelled."""
        while True:
            models = {worker.model for worker in router.fleet.workers()}
            for name in models:
                self.observe(name, router.fleet.candidates(name, None), sum(router.queue.prefills_s(name)))
            for name in self._models.keys() - models:
                del self._models[name]
            await asyncio.sleep(INTERVAL_S)

    def observe(self, model: str, candidates: Sequence[Candidate], held_s: float) -> None:
        """Apply the reports of a model's live workers, every `INTERVAL_S`; `held_s` of its prefills wait here."""
        known, now_s = self._models[model], self._clock()
        before_s, loads = known.assigned_s, [each.load for each in candidates]
        known.assigned_s = {(c.member.worker_id, c.member.epoch): c.load.assigned_prefill_s for c in candidates}
        work_s = sum(max(0.0, now - before_s.get(worker, now)) for worker, now in known.assigned_s.items())
        known.offered.add(work_s, now_s - known.last_s, now_s)
        known.last_s = now_s
        if not candidates:  # an outage: no number keeps the fleet as it is, a low one would shrink it
            known.recent.clear()
        if not candidates or now_s - known.begun_s < WARM_UP_S:
            return
        offered = known.offered.at(now_s, 1e-9) or 0.0
        queued_s = held_s + sum(sum(load.queued_prefill_s.values()) for load in loads)
        busy = offered + max(0.0, queued_s - offered * self.objective_s) / _DRAIN_S
        staying = [load for load in loads if not load.draining]
        used = sum(max(0.0, 1.0 - load.num_free_blocks / load.num_blocks) for load in staying if load.num_blocks)
        number = max(1, math.ceil(busy + SPREAD * math.sqrt(busy)), math.ceil(used / _MAX_POOL_USE))
        known.recent.append(min(number, MAX_GROWTH * max(1, len(staying))))

    def needed(self, model: str) -> int | None:
        """Return the workers that the model needs, at least 1; None while the gateway is new or no worker lives."""
        return max(self._models[model].recent, default=None) if model in self._models else None


class _Model:
    def __init__(self, now_s: float) -> None:
        self.begun_s = self.last_s = now_s
        self.assigned_s: dict[WorkerIncarnation, float] = {}
        self.offered = DecayedRatio(_WINDOW_S)
        self.recent = deque[int](maxlen=round(SETTLE_S / INTERVAL_S) + 1)
