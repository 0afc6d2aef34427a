"""How many workers a model needs for an objective: 90 % of its requests get their first token within it.

    offered      prefill seconds that all gateways assign in a second, from the workers' own counters
    per fleet    times what a fleet of that size would still compute (`ReuseAges`): more workers hold more blocks
    wait         P(wait > t) = C(n, offered) exp(-2 t (n - offered) / dispersion), with Erlang's C
    needed       the smallest n with P(wait + prefill > objective) <= 0.1
    correction   what is offered counts for more after minutes that missed the objective

Every gateway sees the whole fleet's work, so each has the same number. Prefills are a sample of its own requests.
Source: Whitt, Approximations for the GI/G/m queue, Production and Operations Management 2 (1993).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Final

from cache.records import Candidate
from cache.types import Epoch, WorkerId
from server.rates import DecayedRatio
from server.router.placement import Placement
from server.router.reuse_ages import ReuseAges

INTERVAL_S: Final = 5.0
LATE_SHARE: Final = 0.1
WARM_UP_S: Final = 60.0
"""A gateway that has just started has no number."""
SETTLE_S: Final = 60.0
"""A lower number counts after this time, a higher one at once."""
MAX_GROWTH: Final = 4
"""The number is at most that many times the workers there are: reports in Redis may be forged."""
_WINDOW_S: Final = 120.0
_SLOW_WINDOW_S: Final = 360.0
_DISPERSION_WINDOW_S: Final = 900.0
_MEMORY_S: Final = 1800.0
_MINUTE_S: Final = 60.0
_RISE: Final = 1.0
"""A rise goes on while a worker starts: the part of it, above the mean of `_SLOW_WINDOW_S`, that is added."""
_FALL: Final = 0.5
"""The same of a fall, which the mean of `_WINDOW_S` shows late."""
_NUM_DEVIATIONS: Final = 1.28
"""The work of a minute is taken to be the mean plus that many standard deviations: nine of ten bring less."""
_SMALL_FLEET: Final = 2.5
"""Further standard deviations, over the number of busy workers: queues of small fleets last longer."""
_MIN_BURST: Final = 1.5
"""The measured dispersion is noisy: only above this ratio it replaces that of independent arrivals."""
_MIN_JUDGED: Final = 20
"""A minute with fewer first tokens is not judged."""
_RAISED: Final = 0.04
_LOWERED: Final = 0.002
_MAX_CORRECTION: Final = 1.5
_MAX_POOL_USE: Final = 0.9
_NUM_PREFILLS: Final = 512
_NUM_QUANTILES: Final = 64


class WorkersNeeded:
    """One gateway's estimates, by model. Owned by the event loop."""

    def __init__(self, objective_s: float, clock: Callable[[], float]) -> None:
        self.objective_s = objective_s
        self._clock = clock
        self._models = defaultdict[str, _Model](lambda: _Model(objective_s, clock()))

    def started(self, placement: Placement, num_cached_tokens: int) -> None:
        """Count a request whose prefill begins."""
        request, block_size = placement.request, placement.worker.block_size
        if request.numerics is not None:  # the rest of an answer
            return
        model = self._models[request.model]
        model.prefills_s.append(placement.active.prefill_s)
        model.ages.add(request.hashes, num_cached_tokens // block_size, block_size, self._clock())

    def first_token(self, placement: Placement, elapsed_s: float) -> None:
        """Count a request that had its first token `elapsed_s` after it came to the router."""
        if placement.request.numerics is not None:
            return
        model = self._models[placement.request.model]
        model.num_ended += 1
        model.num_late += elapsed_s > self.objective_s

    def observe(self, workers: Mapping[str, Sequence[Candidate]], held_s: Callable[[str], float]) -> None:
        """Apply the reports of each model's live workers, every `INTERVAL_S`.

        `held_s` returns the prefill seconds of a model that wait at this gateway.
        """
        for name, candidates in workers.items():
            self._models[name].observe(candidates, held_s(name), self._clock())
        for name in self._models.keys() - workers.keys():
            del self._models[name]

    def needed(self, model: str) -> int | None:
        """Return the workers that the model needs, at least 1; None while the gateway is new or no worker lives."""
        known = self._models.get(model)
        return None if known is None or not known.recent else max(number for _, number in known.recent)


class _Model:
    def __init__(self, objective_s: float, now_s: float) -> None:
        self.ages = ReuseAges()
        self.prefills_s: deque[float] = deque(maxlen=_NUM_PREFILLS)
        self.recent: deque[tuple[float, int]] = deque()
        """When each number was computed, within `SETTLE_S`."""
        self.num_ended = self.num_late = 0
        """Requests with a first token in this minute, and those above the objective."""
        self._minute_s = now_s
        """When the minute began."""
        self._correction = 1.0
        self._objective_s = objective_s
        self._begun_s = now_s
        self._counters: dict[WorkerId, tuple[Epoch, float]] = {}
        self._last: tuple[float, float] | None = None
        """When reports were applied, and the work since the time before."""
        self._offered = DecayedRatio(_WINDOW_S)
        self._slow = DecayedRatio(_SLOW_WINDOW_S)
        self._dispersion = DecayedRatio(_DISPERSION_WINDOW_S)

    def observe(self, candidates: Sequence[Candidate], held_s: float, now_s: float) -> None:
        work_s, counters = 0.0, dict[WorkerId, tuple[Epoch, float]]()
        for member, load in ((each.member, each.load) for each in candidates):
            epoch, before_s = self._counters.get(member.worker_id, ("", 0.0))
            counters[member.worker_id] = member.epoch, load.assigned_prefill_s
            work_s += max(0.0, load.assigned_prefill_s - before_s) if epoch == member.epoch else 0.0
        self._counters = counters
        if self._last is not None:
            self._count(work_s, self._last[1], now_s - self._last[0], now_s)
        self._last = now_s, work_s
        if now_s - self._minute_s >= _MINUTE_S:
            self._correct(now_s)
        if now_s - self._begun_s < WARM_UP_S:
            return
        if not candidates:  # an outage: no number keeps the fleet as it is, a low one would shrink it
            self.recent.clear()
            return
        staying = [each.load for each in candidates if not each.load.draining]
        queued_s = held_s + sum(sum(each.load.queued_prefill_s.values()) for each in candidates)
        used = sum(max(0.0, 1.0 - load.num_free_blocks / load.num_blocks) for load in staying if load.num_blocks)
        number = max(self._for_prefills(max(1, len(staying)), queued_s, now_s), math.ceil(used / _MAX_POOL_USE))
        self.recent.append((now_s, number))
        while self.recent[0][0] < now_s - SETTLE_S:
            self.recent.popleft()

    def _correct(self, now_s: float) -> None:
        """Judge the minute that ends."""
        if self.num_ended >= _MIN_JUDGED:
            is_late = self.num_late / self.num_ended > LATE_SHARE + self._impossible()
            change = _RAISED if is_late else -_LOWERED
            self._correction = min(_MAX_CORRECTION, max(1.0, self._correction + change))
        self.num_ended = self.num_late = 0
        self._minute_s = now_s

    def _impossible(self) -> float:
        """Return the share of prefills that miss the objective without any wait."""
        return sum(each >= self._objective_s for each in self.prefills_s) / max(1, len(self.prefills_s))

    def _count(self, work_s: float, before_s: float, elapsed_s: float, now_s: float) -> None:
        self._offered.add(work_s, elapsed_s, now_s)
        self._slow.add(work_s, elapsed_s, now_s)
        self._dispersion.add((work_s - before_s) ** 2 / 2, work_s, now_s)
        self.ages.fade(math.exp(-elapsed_s / _MEMORY_S))

    def _for_prefills(self, num_workers: int, queued_s: float, now_s: float) -> int:
        offered, slow = self._offered.at(now_s, 1e-9) or 0.0, self._slow.at(now_s, 1e-9) or 0.0
        ordered = sorted(self.prefills_s)
        if offered <= 0.0 or not ordered:
            return 1
        independent = sum(each * each for each in ordered) / sum(ordered)
        dispersion = max(independent, (self._dispersion.at(now_s, 1e-9) or 0.0) / _MIN_BURST)
        offered = max(offered / 2, offered + (offered - slow) * (_RISE if offered > slow else _FALL))
        offered *= self._correction
        deviation = math.sqrt(dispersion * offered / _MINUTE_S)
        offered += (_NUM_DEVIATIONS + _SMALL_FLEET / max(1.0, offered)) * deviation
        offered += max(0.0, queued_s - offered * self._objective_s) / _MINUTE_S  # works the queue off in a minute
        prefills_s = ordered[:: -(-len(ordered) // _NUM_QUANTILES)]
        # Prefills that miss the objective without any wait: workers do not help them. A part is left for the others.
        possible_s = [each for each in prefills_s if each < self._objective_s] or [0.0]
        impossible = min(0.95, self._impossible())
        limit = max(LATE_SHARE - impossible, LATE_SHARE / 4) / (1.0 - impossible)

        def suffices(number: int) -> bool:
            left = offered * self.ages.missed_ratio(number / num_workers)
            return late_share(number, left, dispersion, possible_s, self._objective_s) <= limit

        most = MAX_GROWTH * num_workers
        return min(most, bisect_left(range(most + 1), True, 1, key=suffices))


def late_share(
    num_workers: int, offered: float, dispersion: float, prefills_s: Sequence[float], objective_s: float
) -> float:
    """Return the share of requests with wait and prefill above the objective. `offered`: busy workers, on average."""
    if offered >= num_workers:
        return 1.0
    waiting = 0.0
    if offered > 0.0:
        blocked = 1.0
        for number in range(1, num_workers + 1):
            blocked = offered * blocked / (number + offered * blocked)
        waiting = blocked / (1.0 - offered / num_workers * (1.0 - blocked))
    slope = -2.0 * (num_workers - offered) / dispersion if waiting else 0.0
    return fmean(
        1.0 if each >= objective_s else waiting * math.exp(slope * (objective_s - each)) for each in prefills_s
    )
