"""The router's request, its view of a worker, and its answer.

router.place(RouteRequest) -> Placement     counted at the worker from the decision on
placement.prefill_started(num_cached)       the worker took it from its queue
placement.first_token()                     its prefill is over
placement.close()                           it has ended, however: call it exactly once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cache.records import WorkerLoad, WorkerMember
from cache.types import BlockHash, WorkerId, WorkerIncarnation
from server.rates import DecayedRatio
from server.router.cost import CostModel
from server.router.load_tracker import WorkerLoadEstimate
from server.router.pending_prefixes import PendingPrefixes

PUBLISH_DELAY_S: Final = 0.3
"""From a worker's first token until the index is sure to know the prompt's blocks."""
PENDING_TTL_S: Final = 900.0


class NoWorkerError(Exception):
    """No worker can take this request now. Try again after `retry_after_s`; `contended`: 429 rather than 503."""

    def __init__(self, message: str, *, contended: bool, retry_after_s: float) -> None:
        super().__init__(message)
        self.contended = contended
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The parts of a request that decide where it goes."""

    request_id: str
    model: str
    num_prompt_tokens: int
    hashes: Sequence[BlockHash]
    """The prompt's full blocks. The last token is always computed, so a match never covers the whole prompt."""
    numerics: str | None = None
    """Only workers of this numerics class: the request resumes a stream."""
    excluded: frozenset[WorkerIncarnation] = frozenset()
    """Workers that have failed this request. One that has restarted since may have it."""
    affinity_key: str | None = None


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as one decision sees it, and what the request would cost there."""

    member: WorkerMember
    load: WorkerLoad
    """Its last report."""
    estimate: WorkerLoadEstimate
    index_tokens: int
    """Prompt tokens cached there, as the index says."""
    pending_tokens: int
    """Prompt tokens that requests on their way bring there."""
    matched_tokens: int
    """Prompt tokens that count as cached there, of full blocks."""
    prefill_tokens_per_s: float
    prefill_s: float
    """Prefill time of this request there."""
    queue_s: float
    """Delay of its first token by the prefills there."""
    num_displaced: float
    """Prefills there that it would delay."""
    kv_wait_s: float
    """Wait until its blocks fit into the pool there."""
    recent_s: float
    """Prefill seconds assigned to the worker, decayed over a minute."""
    unseen_s: float
    """Age of what is known of other gateways' requests there; 0 without other gateways."""
    guard: str | None = None
    """Why the worker cannot take the request."""
    score: float | None = None
    """The policy's; None for a guarded worker."""

    @property
    def num_outstanding(self) -> int:
        """Requests there that have not ended: a report may include this gateway's own."""
        return max(self.estimate.num_outstanding, self.load.num_running + self.load.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Requests there without a first token."""
        return max(self.estimate.num_queued, self.load.num_waiting)


class PlacementObserver(Protocol):
    """Follows placements."""

    def prefill_started(self, placement: Placement, num_cached_tokens: int) -> None: ...

    def first_token(self, placement: Placement) -> None: ...


class Placement:
    """One request at the worker chosen for it. Methods may be called in any state; each counts once."""

    def __init__(self, tracker: PlacementTracker, request: RouteRequest, view: WorkerView) -> None:
        member, now_s = view.member, tracker.clock()
        num_blocks = -(-request.num_prompt_tokens // member.block_size)
        num_new_blocks = num_blocks - view.matched_tokens // member.block_size
        self.request = request
        self.worker = member
        self.promised_tokens = view.matched_tokens
        """Prompt tokens that were believed to be cached there."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the worker found cached, once its prefill has started."""
        self._tracker = tracker
        self._estimate = view.estimate
        self._prefill_tokens_per_s = view.prefill_tokens_per_s
        self._active = view.estimate.add(view.prefill_s, num_blocks, now_s, num_new_blocks=num_new_blocks)
        self._pending = None
        if tracker.count_pending and request.hashes:
            self._pending = tracker.pending.add((member.worker_id, member.epoch), request.hashes, now_s)
        self._saw_token = False

    def prefill_started(self, num_cached_tokens: int) -> None:
        """Start the prefill: the worker took the request from its queue and found so many tokens cached."""
        if self.num_cached_tokens is not None:
            return
        self.num_cached_tokens = num_cached_tokens
        tracker = self._tracker
        num_uncached = max(0, self.request.num_prompt_tokens - num_cached_tokens)
        prefill_s = tracker.cost.prefill_s(num_uncached, self._prefill_tokens_per_s)
        now_s = tracker.clock()
        self._estimate.start(self._active, prefill_s, now_s)
        self._estimate.hit_rate.add(num_cached_tokens, self.request.num_prompt_tokens, now_s)
        if tracker.observer is not None:
            tracker.observer.prefill_started(self, num_cached_tokens)

    def first_token(self) -> None:
        """End the prefill: the worker holds the prompt's blocks and will publish them."""
        if self._saw_token:
            return
        self._saw_token = True
        tracker = self._tracker
        self._estimate.first_token(self._active)
        if self._pending is not None:
            tracker.pending.confirm(self._pending, tracker.clock())
        if tracker.observer is not None:
            tracker.observer.first_token(self)

    def close(self) -> None:
        """End the request. Without a first token its blocks stop counting as cached."""
        tracker = self._tracker
        if self._pending is not None and not self._saw_token:
            tracker.pending.remove(self._pending)
        active = self._active
        if self._estimate.close(active) and active.started_s is not None:
            now_s = tracker.clock()
            tracker.residency_s.add(active.num_blocks * (now_s - active.started_s), active.num_blocks, now_s)


class PlacementTracker:
    """Tracks what one gateway has placed: each worker's load, pending prefixes, and how long requests hold blocks."""

    def __init__(
        self,
        clock: Callable[[], float],
        observer: PlacementObserver | None = None,
        *,
        cost: CostModel | None = None,
        count_pending: bool = True,
        publish_delay_s: float = PUBLISH_DELAY_S,
    ) -> None:
        """`count_pending`: blocks of requests just routed count as cached."""
        self.clock = clock
        self.observer = observer
        self.cost = cost or CostModel()
        self.count_pending = count_pending
        self.pending = PendingPrefixes(publish_delay_s=publish_delay_s, ttl_s=PENDING_TTL_S)
        self._estimates: dict[WorkerId, WorkerLoadEstimate] = {}
        self.residency_s = DecayedRatio(self.cost.window_s)
        """How long requests that ended lately held a block."""

    def estimate(self, member: WorkerMember) -> WorkerLoadEstimate:
        """Return the estimate of this incarnation; requests sent to an earlier one keep theirs."""
        known = self._estimates.get(member.worker_id)
        if known is not None and known.epoch == member.epoch:
            return known
        estimate = self._estimates[member.worker_id] = WorkerLoadEstimate(member.epoch, self.cost.window_s)
        if known is not None:
            estimate.hit_rate = known.hit_rate
        return estimate

    def forget(self, worker_id: WorkerId) -> None:
        """Drop the estimate of a worker that is gone for good."""
        self._estimates.pop(worker_id, None)

    def num_outstanding(self) -> int:
        """Return the number of placed requests that have not ended, at the workers' present incarnations."""
        return sum(estimate.num_outstanding for estimate in self._estimates.values())

    def hit_rate(self, worker_id: WorkerId) -> float | None:
        """Return the share of recent prompt tokens that the worker found cached; None if unknown."""
        estimate = self._estimates.get(worker_id)
        return None if estimate is None else estimate.hit_rate.at(self.clock(), min_denominator=1.0)
