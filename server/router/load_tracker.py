"""The load of each worker, as this gateway estimates it from its own requests and the worker's reports.

A request is queued from the decision to its first token, and active until it is closed. The work of other gateways
comes from the worker's report, and is reduced by the report's age. For its own requests the gateway's estimate is newer
than the report.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from cache.records import WorkerLoad, WorkerMember
from cache.types import Epoch, GatewayId, WorkerId
from server.rates import DecayedRatio, DecayedSum

_MAX_UNREPORTED_S = 2.0
"""After this time, unreported work of this gateway counts as assigned."""
_OTHERS_MEMORY_S = 60.0  # a gateway without requests there for this time does not compete for a worker
_MAX_REPORT_AGE_S = 1.0  # workers report at least once a second
_RATE_MEMORY_S = 300.0
"""After this time without a new measurement, a slow worker counts as unmeasured."""
_SEEN_WINDOW_S = 120.0
_MIN_SEEN_S = 2.0
"""Seconds of own prefills, decayed over the window, after which a gateway has seen a worker's rate."""
_MIN_PREFILL_S = 0.2  # shorter ones show steps and hops more than the rate
_MAX_FIXED_TOKENS = 1e6  # a forged report could otherwise make sums infinite
_MAX_ERROR = 1.5
"""The rate that a worker reports counts, unless the seen one is further away than by this factor."""
_HIT_RATE_WINDOW_S = 120.0  # half of it would follow single conversations; twice would show a purge late
_MAX_CHANGES = 1024  # between two reports, a second apart at most
_FORGET_S = 600.0
"""The estimate of an idle worker may be dropped after this time without a report."""
_MIN_ESTIMATES = 64  # with fewer, none is dropped
_MAX_COMPARED = 128
"""At most this many queued requests are examined; the rest is extrapolated."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request that this gateway has sent to a worker and that has not ended."""

    prefill_s: float
    """Estimated prefill time."""
    remaining_s: float
    """Estimated prefill time left, where prefills share each step."""
    num_blocks: int
    num_tokens: float = 0.0
    """Those that its prefill computes, and as many as the fixed part takes; 0.0 before it starts."""
    started_s: float | None = None
    first_token_s: float | None = None
    closed: bool = False


class AssignedWork:
    """Prefill seconds that all gateways together assigned to a worker, decayed over a window.

    The worker's counter includes every gateway. This gateway's own work counts at once.
    """

    def __init__(self, window_s: float) -> None:
        self._assigned = DecayedSum(window_s)
        self._unreported: deque[tuple[float, float]] = deque()
        self._unreported_s = 0.0
        self._presumed_s = 0.0
        """Own work moved to `_assigned` after 2 s unreported; subtracted from the next report."""
        self._counter_s: float | None = None

    def add(self, prefill_s: float, now_s: float) -> None:
        self._unreported.append((now_s, prefill_s))
        self._unreported_s += prefill_s

    def observe(self, counter_s: float, written_s: float) -> None:
        """Apply the worker's counter, written at `written_s`."""
        if self._counter_s is not None:
            self._assigned.add(max(0.0, counter_s - self._counter_s - self._presumed_s), written_s)
        self._counter_s = counter_s
        self._presumed_s = 0.0
        while self._unreported and self._unreported[0][0] <= written_s:
            self._unreported_s -= self._unreported.popleft()[1]

    def at(self, now_s: float) -> float:
        while self._unreported and self._unreported[0][0] < now_s - _MAX_UNREPORTED_S:
            assigned_s, prefill_s = self._unreported.popleft()
            self._unreported_s -= prefill_s
            self._presumed_s += prefill_s
            self._assigned.add(prefill_s, assigned_s)
        if not self._unreported:
            self._unreported_s = 0.0
        return self._assigned.at(now_s) + self._unreported_s


class WorkerLoadEstimate:
    """The load of one worker incarnation."""

    def __init__(self, epoch: Epoch, window_s: float) -> None:
        self.epoch = epoch
        self.num_outstanding = 0
        """Own requests that have not ended."""
        self.queued_s = 0.0
        """Estimated prefill seconds of own requests without a first token."""
        self.assigned = AssignedWork(window_s)
        self.hit_rate = DecayedRatio(_HIT_RATE_WINDOW_S)
        """Cached prompt tokens to all prompt tokens."""
        self._queue: dict[TrackedRequest, None] = {}
        self._advanced_s = 0.0
        self.num_live_blocks = 0
        """Distinct blocks of own requests."""
        self._live_block_changes = deque[tuple[float, int]](maxlen=_MAX_CHANGES)
        """(time, `num_live_blocks`) after each change since the last report."""
        self._num_reported_live_blocks = 0
        """`num_live_blocks` when the last report was written."""
        self.reported_s = -math.inf
        """When the last report was written."""
        self._others_s = 0.0
        self._others_seen_s = -math.inf
        self._tokens_per_s = self._fixed_s = 0.0
        self._spans = DecayedRatio(_SEEN_WINDOW_S)
        """Tokens of own prefills to the seconds in which any ran, of ended spans."""
        self._seen_tokens_per_s, self._seen_s = 0.0, -math.inf
        """Their ratio, when the last of them ended."""
        self._num_running = self._num_in_span = 0
        """Own prefills that run, and those of the present span without a pause."""
        self._span_tokens = self._span_s = 0.0
        """Both of that span; infinite seconds if a prefill in it had no end."""
        self._measured_s = -math.inf
        """When the worker last reported another prefill rate than before."""

    @property
    def num_queued(self) -> int:
        """Own requests without a first token."""
        return len(self._queue)

    def add(self, prefill_s: float, num_blocks: int, now_s: float, *, num_new_blocks: int = 0) -> TrackedRequest:
        """Count a request that is sent now. No other live request has `num_new_blocks` of its blocks."""
        request = TrackedRequest(prefill_s, prefill_s, num_blocks)
        self._count_blocks(num_new_blocks, now_s)
        self._queue[request] = None
        self.queued_s += prefill_s
        self.num_outstanding += 1
        self.assigned.add(prefill_s, now_s)
        return request

    def start(self, request: TrackedRequest, prefill_s: float, num_tokens: int, now_s: float) -> None:
        """Begin its prefill, which computes `num_tokens` in `prefill_s`, now that the cached ones are known."""
        if request in self._queue and request.started_s is None:
            self._advance(now_s)
            self._num_running += 1
            request.num_tokens = num_tokens + min(_MAX_FIXED_TOKENS, self._fixed_s * self._tokens_per_s)
            self.queued_s += prefill_s - request.prefill_s
            request.prefill_s = request.remaining_s = prefill_s
            request.started_s = now_s

    def first_token(self, request: TrackedRequest, now_s: float) -> bool:
        """Remove it from the queue: its prefill is over. Return False if it was removed before."""
        if request not in self._queue:
            return False
        request.first_token_s = now_s
        self._advance(now_s)
        self._dequeue(request, now_s)
        return True

    def _dequeue(self, request: TrackedRequest, now_s: float) -> None:
        del self._queue[request]
        if request.started_s is not None:
            self._num_running -= 1
            self._num_in_span += 1
            self._span_tokens += request.num_tokens
            if not self._num_running:
                if _MIN_PREFILL_S * self._num_in_span <= self._span_s < math.inf:
                    self._spans.add(self._span_tokens, self._span_s, now_s)
                    if seen := self._spans.at(now_s, _MIN_SEEN_S):
                        self._seen_tokens_per_s, self._seen_s = seen, now_s
                self._num_in_span, self._span_tokens, self._span_s = 0, 0.0, 0.0
        self.queued_s = self.queued_s - request.prefill_s if self._queue else 0.0

    def close(self, request: TrackedRequest, now_s: float, num_shared_blocks: int = 0) -> None:
        """Forget it, once. Other live requests have `num_shared_blocks` of its blocks."""
        request.closed = True
        if request in self._queue:
            if request.started_s is not None:
                self._span_s = math.inf
            self._dequeue(request, now_s)
        self._count_blocks(num_shared_blocks - request.num_blocks, now_s)
        self.num_outstanding -= 1

    def observe(self, load: WorkerLoad, written_s: float, gateway_id: GatewayId) -> None:
        """Apply a report written at `written_s` of the local clock, unless it is as old as the last."""
        if written_s <= self.reported_s:
            return
        self.reported_s = written_s
        self._others_s = 0.0
        if queued_s := load.queued_prefill_s:
            self._others_s = sum([seconds for gateway, seconds in queued_s.items() if gateway != gateway_id])
        if self._others_s > 0.0:
            self._others_seen_s = written_s
        if load.prefill_tokens_per_s != self._tokens_per_s:
            self._tokens_per_s = load.prefill_tokens_per_s
            self._measured_s = written_s
        self._fixed_s = load.prefill_fixed_s
        self.assigned.observe(load.assigned_prefill_s, written_s)
        while self._live_block_changes and self._live_block_changes[0][0] <= written_s:
            self._num_reported_live_blocks = self._live_block_changes.popleft()[1]

    def num_used_blocks(self, load: WorkerLoad) -> int:
        """Return the blocks that are in use there: those of own requests, and what else the last report has."""
        num_reported = max(0, load.num_blocks - load.num_free_blocks)
        return self.num_live_blocks + max(0, num_reported - self._num_reported_live_blocks)

    def _count_blocks(self, num_more: int, now_s: float) -> None:
        self.num_live_blocks += num_more
        self._live_block_changes.append((now_s, self.num_live_blocks))

    def prefill_tokens_per_s(self, median: float, now_s: float) -> float:
        """Return the worker's prefill rate; `median` is the fleet's.

        A slow measurement counts less the older it is: a slow worker gets no requests while faster ones are idle, so
        it would never be measured again. One that own prefills contradict is wrong, where no other gateway sends.
        """
        rate, seen = self._tokens_per_s, self._seen_tokens_per_s
        is_sure = now_s - self._seen_s < _RATE_MEMORY_S and now_s - self._others_seen_s > _OTHERS_MEMORY_S
        if rate and is_sure and not rate / _MAX_ERROR < seen < rate * _MAX_ERROR:
            return seen
        return median + self._weight(now_s) * (rate - median) if 0.0 < rate < median else rate or median

    def prefill_fixed_s(self, median_s: float, now_s: float) -> float:
        """Return the fixed part of a prefill, likewise."""
        fixed_s = self._fixed_s
        return median_s + self._weight(now_s) * (fixed_s - median_s) if fixed_s > median_s else fixed_s or median_s

    def _weight(self, now_s: float) -> float:
        return max(0.0, 1.0 - (now_s - self._measured_s) / _RATE_MEMORY_S)

    def delay(self, prefill_s: float, now_s: float) -> tuple[float, float]:
        """Return how long the prefills here delay a new one of `prefill_s`, and how many it would displace.

        Each step goes half to the oldest prefill and half to the shortest. Only the sum of other gateways' work is
        known; it counts with the oldest.
        """
        if not self._queue and self._others_s <= 0.0:
            return 0.0, 0.0
        self._advance(now_s)
        left_s = [request.remaining_s for request in islice(self._queue, _MAX_COMPARED) if request.remaining_s > 0.0]
        scale = max(1.0, len(self._queue) / _MAX_COMPARED)
        oldest_s = (left_s[0] if left_s else 0.0) + self._others_left_s(sum(left_s), now_s)
        shorter_s = scale * sum(seconds for seconds in left_s[1:] if seconds < prefill_s)
        num_longer = scale * sum(seconds >= prefill_s for seconds in left_s[1:])
        num_displaced = num_longer + (0.5 if oldest_s > prefill_s else 0.0)
        return shorter_s + min(oldest_s, prefill_s + shorter_s), num_displaced

    def ready_s(self, request: TrackedRequest, now_s: float) -> float:
        """Return the seconds until an own request's blocks are computed: its prefill, and at most as long again."""
        if request not in self._queue:
            return 0.0
        self._advance(now_s)
        left_s = request.remaining_s
        others_s = sum([each.remaining_s for each in islice(self._queue, _MAX_COMPARED)]) - left_s
        return left_s + max(0.0, min(left_s, others_s))

    def report_age_s(self, now_s: float) -> float:
        """Return the age of the last report, at most 1 s; 0 if no other gateway sent work here in the last minute."""
        if now_s - self._others_seen_s > _OTHERS_MEMORY_S:
            return 0.0
        return min(_MAX_REPORT_AGE_S, max(0.0, now_s - self.reported_s))

    def _advance(self, now_s: float) -> None:
        """Subtract the time since the last call from the started prefills.

        Each span goes half to the oldest and half to the shortest, until one of them is done.
        """
        elapsed_s = now_s - self._advanced_s
        self._advanced_s = now_s
        if self._num_running:
            self._span_s += elapsed_s
        oldest = islice(self._queue, _MAX_COMPARED)
        running = [request for request in oldest if request.started_s is not None and request.remaining_s > 0.0]
        while elapsed_s > 0.0 and running:
            served = [running[0]]
            if len(running) > 1:
                served.append(min(running[1:], key=lambda request: request.remaining_s))
            step_s = min(elapsed_s, min(request.remaining_s for request in served) * len(served))
            for request in served:
                request.remaining_s -= step_s / len(served)
            elapsed_s -= step_s
            running = [request for request in running if request.remaining_s > 1e-9]

    def _others_left_s(self, own_s: float, now_s: float) -> float:
        """Return the rest of the other gateways' work. It shares the engine with `own_s` of this gateway's work."""
        others_s = self._others_s
        if others_s > 0.0:
            others_s -= (now_s - self.reported_s) * others_s / (others_s + own_s)
        return max(0.0, others_s)


class FifoLoadEstimate(WorkerLoadEstimate):
    """The load of a worker that runs prefills one after the other, in the order of their arrival."""

    def ready_s(self, request: TrackedRequest, now_s: float) -> float:
        return 0.0  # a later request waits for it in any case

    def delay(self, prefill_s: float, now_s: float) -> tuple[float, float]:
        own_s = self.queued_s
        for request in self._queue:
            if request.started_s is not None:
                own_s -= min(now_s - request.started_s, request.prefill_s)
                break
        return max(0.0, own_s) + self._others_left_s(own_s, now_s), 0.0


class LoadTracker:
    """The estimates of all workers. Owned by one gateway's scorer."""

    def __init__(self, clock: Callable[[], float], window_s: float) -> None:
        self._clock = clock
        self._window_s = window_s
        self._estimates: dict[WorkerId, WorkerLoadEstimate] = {}
        self._max_estimates = _MIN_ESTIMATES

    def of(self, member: WorkerMember) -> WorkerLoadEstimate:
        """Return the estimate of this incarnation. Requests sent to an earlier one keep their own."""
        known = self._estimates.get(member.worker_id)
        if known is not None and known.epoch == member.epoch:
            return known
        if len(self._estimates) >= self._max_estimates:
            before_s, estimates = self._clock() - _FORGET_S, self._estimates.items()
            self._estimates = {name: e for name, e in estimates if e.num_outstanding or e.reported_s > before_s}
            self._max_estimates = max(_MIN_ESTIMATES, 2 * len(self._estimates))
        kind = FifoLoadEstimate if member.prefill_order == "fifo" else WorkerLoadEstimate
        estimate = self._estimates[member.worker_id] = kind(member.epoch, self._window_s)
        if known is not None:
            estimate.hit_rate = known.hit_rate
        return estimate

    def queued_s(self, worker_id: WorkerId) -> float:
        """Return the prefill seconds that this gateway has in the worker's queue."""
        estimate = self._estimates.get(worker_id)
        return 0.0 if estimate is None else estimate.queued_s

    def num_outstanding(self) -> int:
        """Return the number of placed requests that have not ended, at the workers' present incarnations."""
        return sum(estimate.num_outstanding for estimate in self._estimates.values())

    def hit_rate(self, worker_id: WorkerId) -> float | None:
        """Return the share of recent prompt tokens that the worker found cached; None if unknown."""
        estimate = self._estimates.get(worker_id)
        return None if estimate is None else estimate.hit_rate.at(self._clock(), min_denominator=1.0)
