"""One decision, without I/O: what each worker would cost, which one is chosen, and what the choice adds there.

    candidates + load estimates + pending prefixes -> WorkerViews -> policy -> the lowest score -> Placement

A placement counts from the decision on, so a burst sees its own picks. The routing benchmark drives this module in
simulated time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from cache.records import Candidate, WorkerMember
from cache.types import GatewayId, WorkerId
from server.rates import DecayedRatio
from server.router.block_plan import BlockPlan, Peers, PeersByLayout, cheapest_plan, find_peers
from server.router.load_tracker import FifoLoadEstimate, WorkerLoadEstimate
from server.router.pending_prefixes import PendingPrefixes
from server.router.policies import CostModel, FleetView, Policy, rendezvous_worker
from server.router.types import RouteRequest, WorkerView
from worker.wire import BlockSource

_MIN_TOKENS_PER_S: Final = 1e-3
"""Reports come from Redis, where anybody may have written them: lower rates make sums of seconds infinite."""
DEFAULT_PREFILL_TOKENS_PER_S: Final = 2000.0
"""For a fleet in which no worker has measured its rate."""
MIN_RELEASED_BLOCKS: Final = 1e-3
"""With fewer, after decay, the mean residency is unknown."""
PUBLISH_DELAY_S: Final = 0.3
"""From a worker's first token until the index is sure to know the prompt's blocks."""
PENDING_TTL_S: Final = 900.0
FORGET_S: Final = 600.0
"""The estimate of an idle worker may be dropped after so long without a report."""
MIN_ESTIMATES: Final = 64
"""With fewer, none is dropped."""
UNSUPPORTED: Final = "cannot serve a field of this request"
TOO_SHORT: Final = "context too short"
OTHER_TASK: Final = "makes text or embeddings alone, and the request asks for the other"
SLOW: Final = "slow to answer"
BREAKER: Final = "breaker open"


class Decision(msgspec.Struct, eq=False):
    """Every worker as it was seen and scored for one request, and those with the lowest score."""

    request: RouteRequest
    workers: Sequence[WorkerView]
    best: Sequence[WorkerView] = ()
    """Empty when every worker is guarded, or predicted to miss the request's budget."""

    @property
    def wait_s(self) -> float:
        """How long the request would wait at the chosen worker before its prefill; 0 without one."""
        return min([worker.wait_s for worker in self.best], default=0.0)


class PlacementObserver(Protocol):
    """Follows placements."""

    def prefill_started(self, placement: Placement, num_cached_tokens: int) -> None: ...

    def corrected(self, placement: Placement, num_cached_tokens: int) -> None: ...

    def first_token(self, placement: Placement) -> None: ...


class Placement:
    """One request at the worker chosen for it. Methods may be called in any state; each counts once."""

    def __init__(self, scorer: Scorer, request: RouteRequest, view: WorkerView) -> None:
        member, now_s = view.member, scorer.clock()
        num_blocks = -(-request.num_prompt_tokens // member.block_size)
        num_new_blocks = num_blocks - view.matched_tokens // member.block_size
        self.request = request
        self.worker = member
        self.promised_tokens = view.cached_tokens
        """Prompt tokens that were believed to be cached there, or to be loaded or fetched."""
        self.placed_s = now_s
        self.predicted_ttft_s = view.predicted_ttft_s
        self.source: BlockSource | None = None
        """From where it may fetch blocks."""
        if view.peers is not None:
            peer = scorer.choose_peer(view.peers.holders)
            self.source = BlockSource(peer.url, peer.epoch, view.peers.num_blocks)
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the worker found cached, once its prefill has started."""
        self._scorer = scorer
        self._estimate = view.estimate
        self._prefill_tokens_per_s = view.prefill_tokens_per_s
        self._active = view.estimate.add(view.prefill_s, num_blocks, now_s, num_new_blocks=num_new_blocks)
        self._pending = 0
        if scorer.count_pending and request.hashes:
            self._pending = scorer.pending.add((member.worker_id, member.epoch), request.hashes, now_s)

    def prefill_started(self, num_cached_tokens: int) -> None:
        """Start the prefill: the worker took the request from its queue and found so many tokens cached."""
        if self.num_cached_tokens is not None:
            return
        self.num_cached_tokens = num_cached_tokens
        scorer, num_prompt_tokens = self._scorer, self.request.num_prompt_tokens
        now_s = scorer.clock()
        num_uncached = max(0, num_prompt_tokens - num_cached_tokens)
        self._estimate.start(self._active, scorer.cost.prefill_s(num_uncached, self._prefill_tokens_per_s), now_s)
        self._estimate.hit_rate.add(num_cached_tokens, num_prompt_tokens, now_s)
        if scorer.observer is not None:
            scorer.observer.prefill_started(self, num_cached_tokens)

    def correct(self, num_cached_tokens: int) -> None:
        """Take the engine's own count of the cached tokens, at which its worker could only guess."""
        scorer, before = self._scorer, self.num_cached_tokens
        if before is not None and before != num_cached_tokens:
            self.num_cached_tokens = num_cached_tokens
            self._estimate.hit_rate.add(num_cached_tokens - before, 0, scorer.clock())
            if scorer.observer is not None:
                scorer.observer.corrected(self, num_cached_tokens)

    def first_token(self) -> None:
        """End the prefill: the worker holds the prompt's blocks and will publish them."""
        scorer = self._scorer
        if not self._estimate.first_token(self._active):
            return
        if self._pending:
            scorer.pending.confirm(self._pending, scorer.clock())
        if scorer.observer is not None:
            scorer.observer.first_token(self)

    def close(self) -> None:
        """End the request. Without a first token its blocks stop counting as cached."""
        scorer, active = self._scorer, self._active
        if self._pending:
            scorer.pending.cancel(self._pending)
        if self._estimate.close(active) and active.started_s is not None:
            now_s = scorer.clock()
            scorer.residency_s.add(active.num_blocks * (now_s - active.started_s), active.num_blocks, now_s)


class Scorer:
    """Decides for one gateway, and tracks its placements: load, pending prefixes, and how long blocks are held."""

    def __init__(
        self,
        gateway_id: GatewayId,
        policy: Policy,
        clock: Callable[[], float],
        rng: random.Random,
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
        self.residency_s = DecayedRatio(self.cost.window_s)
        """How long requests that ended lately held a block."""
        self._gateway_id = gateway_id
        self._policy = policy
        self._rng = rng
        self._estimates: dict[WorkerId, WorkerLoadEstimate] = {}
        self._max_estimates = MIN_ESTIMATES

    def decide(
        self,
        request: RouteRequest,
        candidates: Sequence[Candidate],
        broken: Container[WorkerId] = (),
        *,
        dry_run: bool = False,
    ) -> Decision:
        """Score every candidate without a guard; if none is left, slow ones, and then those that are `broken`.

        `dry_run` draws no random numbers: the policy gets 0.5 each time.
        """
        now_s = self.clock()
        self.pending.expire(now_s)
        loads = [candidate.load for candidate in candidates]
        rates = sorted([load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s > 0.0])
        peers: PeersByLayout = {}
        if any([load.fetch_tokens_per_s for load in loads]):  # noqa: C419 - a generator takes twice the time
            peers = find_peers(candidates, broken, request.excluded)
        # A worker that has measured no rate gets the median, so that a new one is not preferred.
        median_tokens_per_s = rates[len(rates) // 2] if rates else DEFAULT_PREFILL_TOKENS_PER_S
        mean_residency_s = self.residency_s.at(now_s, MIN_RELEASED_BLOCKS) or 0.0
        most_tokens = max(0, request.num_prompt_tokens - 1)
        workers = [
            self._view(request, each, peers, most_tokens, median_tokens_per_s, mean_residency_s, now_s)
            for each in candidates
        ]
        for worker in workers:
            worker.guard = _guard(request, worker, broken)
        decision = Decision(request, workers)
        # Better a slow worker than none, and then one that failed a moment ago.
        scored: list[WorkerView] = []
        for guard in (None, SLOW, BREAKER):
            scored = scored or [worker for worker in workers if worker.guard is guard]
        if scored:
            recent_s = sum([worker.recent_s for worker in workers])
            draw = (lambda: 0.5) if dry_run else self._rng.random
            fleet = FleetView(self.cost, recent_s, len(workers), draw)
            scores = self._policy.scores(request, scored, fleet)
            for worker, score in zip(scored, scores, strict=True):
                worker.guard, worker.score = None, score
            if request.ttft_budget_s is not None:
                scored = [worker for worker in scored if worker.predicted_ttft_s <= request.ttft_budget_s]
            if request.hard_affinity and request.affinity_key and scored:
                decision.best = [rendezvous_worker(request.affinity_key, scored)]
                return decision
            lowest = min([worker.score for worker in scored if worker.score is not None], default=0.0)
            decision.best = [worker for worker in scored if worker.score == lowest]
        return decision

    def place(self, decision: Decision) -> Placement:
        """Send the request to one of the best workers, drawn at random."""
        best = decision.best
        chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        self._policy.on_dispatch(decision.request, chosen)
        return Placement(self, decision.request, chosen)

    def choose_peer(self, holders: Sequence[Candidate], *, dry_run: bool = False) -> WorkerMember:
        """Return the least loaded of equal peers; of several one drawn at random, or in a dry run the first."""
        loads = [
            max(self.estimate(each.member).num_outstanding, each.load.num_running + each.load.num_waiting)
            for each in holders
        ]
        least = min(loads)
        best = [each.member for each, load in zip(holders, loads, strict=True) if load == least]
        return best[0] if dry_run or len(best) == 1 else self._rng.choice(best)

    def estimate(self, member: WorkerMember) -> WorkerLoadEstimate:
        """Return the estimate of this incarnation; requests sent to an earlier one keep theirs."""
        known = self._estimates.get(member.worker_id)
        if known is not None and known.epoch == member.epoch:
            return known
        if len(self._estimates) >= self._max_estimates:
            before_s, estimates = self.clock() - FORGET_S, self._estimates.items()
            self._estimates = {name: e for name, e in estimates if e.num_outstanding or e.reported_s > before_s}
            self._max_estimates = max(MIN_ESTIMATES, 2 * len(self._estimates))
        kind = FifoLoadEstimate if member.prefill_order == "fifo" else WorkerLoadEstimate
        estimate = self._estimates[member.worker_id] = kind(member.epoch, self.cost.window_s)
        if known is not None:
            estimate.hit_rate = known.hit_rate
        return estimate

    def num_outstanding(self) -> int:
        """Return the number of placed requests that have not ended, at the workers' present incarnations."""
        return sum(estimate.num_outstanding for estimate in self._estimates.values())

    def hit_rate(self, worker_id: WorkerId) -> float | None:
        """Return the share of recent prompt tokens that the worker found cached; None if unknown."""
        estimate = self._estimates.get(worker_id)
        return None if estimate is None else estimate.hit_rate.at(self.clock(), min_denominator=1.0)

    def _view(
        self,
        request: RouteRequest,
        candidate: Candidate,
        peers: PeersByLayout,
        most_tokens: int,
        median_tokens_per_s: float,
        mean_residency_s: float,
        now_s: float,
    ) -> WorkerView:
        member, load = candidate.member, candidate.load
        estimate = self.estimate(member)
        estimate.observe(load, now_s - candidate.load_age_s, self._gateway_id)
        block_size = member.block_size
        pending_blocks = self.pending.match((member.worker_id, member.epoch), request.hashes)
        pending_tokens = min(pending_blocks * block_size, most_tokens) if pending_blocks else 0
        matched_tokens = min(max(candidate.matched_blocks, pending_blocks) * block_size, most_tokens)
        tokens_per_s = estimate.prefill_tokens_per_s(median_tokens_per_s, now_s)
        if tokens_per_s < _MIN_TOKENS_PER_S:
            tokens_per_s = _MIN_TOKENS_PER_S
        end_tokens, plan = matched_tokens, None
        if peers or candidate.tier_blocks:
            plan, holders = _plan(request, candidate, peers, most_tokens, matched_tokens, tokens_per_s)
            if plan is not None:
                end_tokens = plan.end_tokens
        prefill_s = self.cost.prefill_s(request.num_prompt_tokens - end_tokens, tokens_per_s)
        queue_s, num_displaced = estimate.queue(prefill_s, now_s)
        usage = kv_wait_s = 0.0
        if load.num_blocks:
            num_blocks = -(-request.num_prompt_tokens // block_size)
            num_held = load.num_blocks - load.num_free_blocks + estimate.num_arriving_blocks(now_s)
            usage = (num_held + num_blocks - matched_tokens // block_size) / load.num_blocks
        if mean_residency_s and load.num_blocks:
            weight = self.cost.eviction_weight(tokens_per_s, load.fetch_tokens_per_s) if member.layout else 1.0
            kv_wait_s = self.cost.kv_wait_s(usage, load.num_blocks / max(1, num_blocks), mean_residency_s, weight)
        view = WorkerView(
            member=member,
            load=load,
            estimate=estimate,
            index_tokens=candidate.matched_blocks * block_size,
            pending_tokens=pending_tokens,
            matched_tokens=matched_tokens,
            prefill_tokens_per_s=tokens_per_s,
            prefill_s=prefill_s,
            queue_s=queue_s,
            num_displaced=num_displaced,
            kv_usage=usage,
            kv_wait_s=kv_wait_s,
            recent_s=estimate.assigned.at(now_s),
            report_age_s=estimate.report_age_s(now_s),
        )
        if plan is not None:
            view.load_cost_s, view.plan, view.peers = self.cost.load_cost_s(plan, tokens_per_s), plan, holders
        return view


def _plan(
    request: RouteRequest,
    candidate: Candidate,
    peers: PeersByLayout,
    most_tokens: int,
    matched_tokens: int,
    tokens_per_s: float,
) -> tuple[BlockPlan | None, Peers | None]:
    """Return the worker's cheapest plan, and the peers from which it fetches."""
    member, load = candidate.member, candidate.load
    block_size = member.block_size
    tiers: Iterable[tuple[int, float]] = ()
    if candidate.tier_blocks:
        ends = [min(num_blocks * block_size, most_tokens) for num_blocks in candidate.tier_blocks]
        tiers = zip(ends, load.tier_tokens_per_s, strict=False)
    holders, peer_end_tokens = None, 0
    if peers and load.fetch_tokens_per_s and (holders := peers.get((member.model, member.layout))) is not None:
        peer_end_tokens = min(holders.num_blocks * block_size, most_tokens)
    plan = cheapest_plan(
        request.num_prompt_tokens, matched_tokens, tokens_per_s, tiers, peer_end_tokens, load.fetch_tokens_per_s
    )
    return plan, holders if plan is not None and plan.fetched_tokens else None


def _guard(request: RouteRequest, worker: WorkerView, broken: Container[WorkerId]) -> str | None:
    """Return why the worker cannot take the request, or None."""
    member = worker.member
    if (member.worker_id, member.epoch) in request.excluded:
        return "has failed this request"
    if request.numerics is not None and member.numerics != request.numerics:
        return "another numerics class"
    if (member.embedding_size > 0) != request.embeds:
        return OTHER_TASK
    if member.unsupported and not set(request.required).isdisjoint(member.unsupported):
        return UNSUPPORTED
    if request.adapter and request.adapter not in member.adapters:
        return "without this adapter"
    if max(request.num_prompt_tokens, request.num_context_tokens) > member.max_model_len:
        return TOO_SHORT
    if worker.load.draining:
        return "draining"
    if member.worker_id in broken:
        return BREAKER
    return SLOW if worker.load.is_slow else None
