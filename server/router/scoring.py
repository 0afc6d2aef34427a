"""One routing decision, without I/O: what each worker would cost, and which one is chosen.

    candidates + load estimates + pending prefixes -> WorkerViews -> policy -> the least score -> Placement

A placement counts from the decision on, so a burst sees its own picks. The routing benchmark drives this module in
simulated time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Final

from cache.records import Candidate
from cache.types import GatewayId
from server.router.placement import Placement, PlacementTracker, RouteRequest, WorkerView
from server.router.policies import FleetView, Policy

_MIN_TOKENS_PER_S: Final = 1e-3
"""Reports come from Redis, where anybody may have written them: lower rates make sums of seconds infinite."""
DEFAULT_PREFILL_TOKENS_PER_S: Final = 2000.0
"""For a fleet in which no worker has measured its rate."""
MIN_RELEASED_BLOCKS: Final = 1e-3
"""With fewer, after decay, the mean residency is unknown."""
MAX_WAITING: Final = 1024
"""A worker with so many requests in its queue gets no more."""
QUEUE_FULL: Final = "queue full"


@dataclass(frozen=True, slots=True)
class Decision:
    """Every worker as it was seen and scored for one request, and those with the least score."""

    request: RouteRequest
    workers: Sequence[WorkerView]
    best: Sequence[WorkerView]
    """Empty when every worker is guarded."""


class Scorer:
    """Decides for one gateway."""

    def __init__(self, gateway_id: GatewayId, policy: Policy, tracker: PlacementTracker, rng: random.Random) -> None:
        self._gateway_id = gateway_id
        self._policy = policy
        self._tracker = tracker
        self._rng = rng

    def decide(
        self,
        request: RouteRequest,
        candidates: Sequence[Candidate],
        guards: Sequence[str | None],
        *,
        dry_run: bool = False,
    ) -> Decision:
        """Score every candidate without a guard. `dry_run` draws no random numbers."""
        now_s = self._tracker.clock()
        self._tracker.pending.expire(now_s)
        median_tokens_per_s = _median_rate(candidates)
        mean_residency_s = self._tracker.residency_s.at(now_s, MIN_RELEASED_BLOCKS) or 0.0
        workers, unguarded = [], []
        for candidate, guard in zip(candidates, guards, strict=True):
            worker = self._view(request, candidate, median_tokens_per_s, mean_residency_s, now_s)
            worker.guard = guard or (QUEUE_FULL if worker.num_waiting >= MAX_WAITING else None)
            workers.append(worker)
            if worker.guard is None:
                unguarded.append(worker)
        if not unguarded:
            return Decision(request, workers, ())
        recent_s = sum(worker.recent_s for worker in workers)
        draw = _mean_draw if dry_run else self._rng.random
        fleet = FleetView(self._tracker.cost, recent_s, len(workers), draw)
        scores = self._policy.scores(request, unguarded, fleet)
        for worker, score in zip(unguarded, scores, strict=True):
            worker.score = score
        least = min(scores)
        return Decision(request, workers, [worker for worker in unguarded if worker.score == least])

    def place(self, decision: Decision) -> Placement:
        """Send the request to one of the best workers, drawn at random."""
        best = decision.best
        chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        placement = Placement(self._tracker, decision.request, chosen)
        self._policy.placed(decision.request, chosen)
        return placement

    def _view(
        self,
        request: RouteRequest,
        candidate: Candidate,
        median_tokens_per_s: float,
        mean_residency_s: float,
        now_s: float,
    ) -> WorkerView:
        tracker, member, load = self._tracker, candidate.member, candidate.load
        cost = tracker.cost
        estimate = tracker.estimate(member)
        estimate.observe(load, now_s - candidate.load_age_s, self._gateway_id)
        block_size = member.block_size
        most_tokens = max(0, request.num_prompt_tokens - 1)
        pending_blocks = tracker.pending.match((member.worker_id, member.epoch), request.hashes)
        matched_tokens = min(max(candidate.matched_blocks, pending_blocks) * block_size, most_tokens)
        tokens_per_s = max(_MIN_TOKENS_PER_S, estimate.prefill_tokens_per_s(median_tokens_per_s, now_s))
        prefill_s = cost.prefill_s(request.num_prompt_tokens - matched_tokens, tokens_per_s)
        queue_s, num_displaced = estimate.queue(prefill_s, now_s)
        num_blocks = -(-request.num_prompt_tokens // block_size)
        num_held = load.num_blocks - load.num_free_blocks + estimate.num_arriving_blocks(now_s)
        kv_wait_s = 0.0
        if mean_residency_s and load.num_blocks:
            usage = (num_held + num_blocks - matched_tokens // block_size) / load.num_blocks
            kv_wait_s = cost.kv_wait_s(usage, load.num_blocks / max(1, num_blocks), mean_residency_s)
        return WorkerView(
            member=member,
            load=load,
            estimate=estimate,
            index_tokens=candidate.matched_blocks * block_size,
            pending_tokens=min(pending_blocks * block_size, most_tokens),
            matched_tokens=matched_tokens,
            prefill_tokens_per_s=tokens_per_s,
            prefill_s=prefill_s,
            queue_s=queue_s,
            num_displaced=num_displaced,
            kv_wait_s=kv_wait_s,
            recent_s=estimate.assigned.at(now_s),
            unseen_s=estimate.unseen_s(now_s),
        )


def _median_rate(candidates: Sequence[Candidate]) -> float:
    """Return the rate assumed of workers that have measured none: the median, so that a new one is not preferred."""
    rates = [c.load.prefill_tokens_per_s for c in candidates if c.load.prefill_tokens_per_s > 0.0]
    return median_high(rates) if rates else DEFAULT_PREFILL_TOKENS_PER_S


def _mean_draw() -> float:
    return 0.5
