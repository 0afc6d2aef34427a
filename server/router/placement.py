"""One decision, without I/O: score the workers, choose one, and count the request there.

    candidates + load estimates + ledger -> WorkerViews -> policy -> lowest score -> Placement

A placement counts at once, so that later decisions of a burst see it. The routing benchmark runs this module in
simulated time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from cache.records import Candidate, WorkerMember
from cache.types import GatewayId, WorkerId
from server.rates import DecayedRatio
from server.router.cost import BREAKER, SLOW, CostModel, DecisionContext, WorkerView, num_outstanding, views
from server.router.ledger import Ledger
from server.router.live_blocks import PUBLISH_DELAY_S, LiveBlocks
from server.router.load_tracker import LoadTracker, TrackedRequest, WorkerLoadEstimate
from server.router.policies import FleetView, Policy, rendezvous_worker
from server.router.short_list import MAX_HOLDERS, SCORE_ALL, ShortList
from server.router.types import RouteRequest
from worker.wire import BlockSource

MIN_RELEASED_BLOCKS: Final = 1e-3  # with fewer, after decay, the mean residency is unknown
MIN_ENDED: Final = 4
"""Before this many requests have ended, their residency refuses nothing: one long answer proves little."""


class Decision(msgspec.Struct, frozen=True, eq=False):
    """The view and score of every worker that was considered for one request, and the workers with the lowest score."""

    request: RouteRequest
    workers: Sequence[WorkerView]
    best: Sequence[WorkerView]
    """Empty when every worker is guarded, or predicted to miss the request's budget."""
    num_candidates: int
    """Workers of the model in the fleet; `workers` may be a short list."""
    index_answered: bool = True
    """False: own recent placements were used instead."""

    @property
    def wait_s(self) -> float:
        """How long the request would wait at the chosen worker before its prefill; 0 without one."""
        return min([worker.wait_s for worker in self.best], default=0.0)


@dataclass(slots=True, eq=False)
class Placement:
    """One request at the worker chosen for it. The router updates it."""

    request: RouteRequest
    worker: WorkerMember
    promised_tokens: int
    """Prompt tokens predicted to be cached or fetched there."""
    source: BlockSource | None
    """The peer from which the worker may fetch blocks."""
    placed_s: float
    predicted_ttft_s: float
    prefill_tokens_per_s: float
    prefill_fixed_s: float
    estimate: WorkerLoadEstimate
    """The load of this incarnation of the worker."""
    active: TrackedRequest
    """Its entry there."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the worker found cached; None before its prefill."""
    queue_s: float | None = None
    """Its time in the worker's queue; None: unknown."""


class PlacementListener:
    """Follows each placement, by calls in this order. It subscribes where the gateway is put together."""

    def placed(self, placement: Placement, decision: Decision) -> None:
        """A request goes to a worker."""

    def started(self, placement: Placement) -> None:
        """The worker has found `num_cached_tokens`, and its prefill begins."""

    def corrected(self, placement: Placement) -> None:
        """The engine's own count has replaced the worker's guess of `num_cached_tokens`."""

    def first_token(self, placement: Placement) -> None:
        """The prefill has ended."""

    def closed(self, placement: Placement) -> None:
        """The request has ended, with or without an answer."""


class Scorer:
    """Decides for one gateway. Owns its load estimates, its blocks, and the mean time blocks are held."""

    def __init__(
        self,
        gateway_id: GatewayId,
        policy: Policy,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        cost: CostModel | None = None,
        count_pending: bool = True,
        publish_delay_s: float = PUBLISH_DELAY_S,
    ) -> None:
        """`count_pending`: blocks of requests just routed count as cached."""
        self._clock = clock
        self._cost = cost or CostModel()
        self.ledger = Ledger(clock)
        self._live = LiveBlocks(clock, publish_delay_s, count_pending=count_pending)
        self.loads = LoadTracker(clock, self._cost.window_s)
        self._residency_s = DecayedRatio(self._cost.window_s)
        """How long recently ended requests held a block."""
        self._num_ended = 0  # requests in it
        self._return_share = DecayedRatio(self._cost.window_s)
        """The part of recent prompt tokens that some worker held already."""
        self._gateway_id = gateway_id
        self._policy = policy
        self._rng = rng
        new_list = partial(ShortList, self._cost.assigned_weight, self.loads.queued_s)
        self._short_lists = defaultdict[str, ShortList](new_list)
        """By model."""

    def decide(
        self,
        request: RouteRequest,
        candidates: Sequence[Candidate],
        broken: Container[WorkerId] = (),
        *,
        index_answered: bool = True,
        dry_run: bool = False,
    ) -> Decision:
        """Score every unguarded candidate; in a large fleet, those of a short list.

        If every candidate is guarded, score the slow ones, and without those the `broken` ones. `dry_run` scores all
        and draws no random numbers: the policy gets 0.5 each time.
        """
        if len(candidates) > SCORE_ALL and self._policy.takes_short_list and not dry_run:
            decision = self._decide_by_list(request, candidates, broken, index_answered)
            if decision is not None:
                return decision
        workers = self._views(request, candidates, broken)
        assigned_s = sum([worker.assigned_s for worker in workers]) / max(1, len(workers))
        draw = (lambda: 0.5) if dry_run else self._rng.random
        fleet = FleetView(self._cost, assigned_s, draw, index_answered=index_answered)
        return self._decision(request, workers, fleet, len(candidates))

    def _decide_by_list(
        self,
        request: RouteRequest,
        candidates: Sequence[Candidate],
        broken: Container[WorkerId],
        index_answered: bool,
    ) -> Decision | None:
        """Decide among the workers of the short list. None: the list does not suffice, and all must be scored."""
        short_list = self._short_lists[request.model]
        holders = self._live.holders(self._live.path(request.hashes), MAX_HOLDERS)
        listed = short_list.choose(request, candidates, holders, index_answered)
        workers = self._views(request, listed.candidates, broken)
        short_list.scored(workers)
        unguarded = {worker.member.worker_id for worker in workers if worker.guard is None}
        own = listed.affinity_worker
        if not unguarded or (request.hard_affinity and own is not None and own not in unguarded):
            return None
        common_tokens = listed.common_blocks * candidates[0].member.block_size
        assigned_s = short_list.assigned_s / len(candidates)
        fleet = FleetView(self._cost, assigned_s, self._rng.random, common_tokens, index_answered)
        decision = self._decision(request, workers, fleet, len(candidates))
        return decision if decision.best else None

    def _decision(
        self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView, num_candidates: int
    ) -> Decision:
        """Score the unguarded workers, and find those with the lowest score."""
        eligible = _eligible(workers)
        if not eligible:
            return Decision(request, workers, (), num_candidates, fleet.index_answered)
        scores = self._policy.scores(request, eligible, fleet)
        for worker, score in zip(eligible, scores, strict=True):
            worker.guard, worker.score = None, score  # a slow or broken one is in use after all
        best = _best(request, eligible, self._sure_ttft_s)
        return Decision(request, workers, best, num_candidates, fleet.index_answered)

    def place(self, decision: Decision) -> Placement:
        """Choose one of the best workers at random, and count the request there."""
        request, best, now_s = decision.request, decision.best, self._clock()
        chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        self._policy.on_dispatch(request, chosen)
        longest = max([worker.matched_tokens for worker in decision.workers])
        self._return_share.add(longest, request.num_prompt_tokens, now_s)
        member = chosen.member
        if (short_list := self._short_lists.get(request.model)) is not None:
            short_list.placed(member.worker_id, chosen.prefill_s)
        source = None
        if chosen.peers is not None:
            peer = self.choose_peer(chosen.peers.holders)
            source = BlockSource(peer.url, peer.epoch, chosen.peers.num_blocks)
        num_blocks = -(-request.num_prompt_tokens // member.block_size)
        num_new_blocks = num_blocks - chosen.num_live_blocks
        active = chosen.estimate.add(chosen.prefill_s, num_blocks, now_s, num_new_blocks=num_new_blocks)
        self._live.opened((member.worker_id, member.epoch), active, request.hashes)
        return Placement(
            request=request,
            worker=member,
            promised_tokens=chosen.cached_tokens,
            source=source,
            placed_s=now_s,
            predicted_ttft_s=chosen.predicted_ttft_s,
            prefill_tokens_per_s=chosen.prefill_tokens_per_s,
            prefill_fixed_s=chosen.prefill_fixed_s,
            estimate=chosen.estimate,
            active=active,
        )

    def started(self, placement: Placement, num_cached_tokens: int, queue_s: float | None = None) -> bool:
        """Record that the prefill begins, with `num_cached_tokens` found cached. Return False if it began before."""
        if placement.num_cached_tokens is not None:
            return False
        placement.num_cached_tokens, placement.queue_s = num_cached_tokens, queue_s
        self.ledger.found(placement.request, placement.worker, num_cached_tokens)
        num_prompt_tokens, now_s = placement.request.num_prompt_tokens, self._clock()
        num_uncached = max(0, num_prompt_tokens - num_cached_tokens)
        prefill_s = placement.prefill_fixed_s + num_uncached / placement.prefill_tokens_per_s
        placement.estimate.start(placement.active, prefill_s, num_uncached, now_s)
        placement.estimate.hit_rate.add(num_cached_tokens, num_prompt_tokens, now_s)
        return True

    def corrected(self, placement: Placement, num_cached_tokens: int) -> bool:
        """Replace a worker's guess of the cached tokens by its engine's count. Return False if nothing changes."""
        before = placement.num_cached_tokens
        if before is None or before == num_cached_tokens:
            return False
        placement.num_cached_tokens = num_cached_tokens
        started_s = placement.active.started_s or self._clock()  # the guess has faded since then
        placement.estimate.hit_rate.add(num_cached_tokens - before, 0, started_s)
        return True

    def first_token(self, placement: Placement) -> bool:
        """Record the end of the prefill: the worker holds the prompt's blocks. Return False if it had ended."""
        if not placement.estimate.first_token(placement.active, self._clock()):
            return False
        self.ledger.computed(placement.request, placement.worker)
        return True

    def closed(self, placement: Placement) -> bool:
        """Record the end of the request. Without a first token its blocks stop counting as cached.

        Return False if it had ended.
        """
        active, member, hashes = placement.active, placement.worker, placement.request.hashes
        if active.closed:
            return False
        now_s = self._clock()
        num_gone = self._live.closed((member.worker_id, member.epoch), active, hashes)
        placement.estimate.close(active, now_s, len(hashes) - num_gone)
        if active.started_s is not None:
            self._num_ended += 1
            self._residency_s.add(active.num_blocks * (now_s - active.started_s), active.num_blocks, now_s)
        return True

    def choose_peer(self, holders: Sequence[Candidate], *, dry_run: bool = False) -> WorkerMember:
        """Return the least loaded holder. Equal ones are drawn at random; a dry run takes the first."""
        loads = [num_outstanding(self.loads.of(each.member), each.load) for each in holders]
        least = min(loads)
        best = [each.member for each, load in zip(holders, loads, strict=True) if load == least]
        return best[0] if dry_run or len(best) == 1 else self._rng.choice(best)

    def _sure_ttft_s(self, worker: WorkerView) -> float:
        """Return the part of the predicted time to the first token that rests on measurements."""
        if worker.load.prefill_tokens_per_s == 0.0:
            return 0.0
        return worker.predicted_ttft_s - (worker.kv_wait_s if self._num_ended < MIN_ENDED else 0.0)

    def _views(
        self, request: RouteRequest, candidates: Sequence[Candidate], broken: Container[WorkerId]
    ) -> list[WorkerView]:
        now_s = self._clock()
        residency_s = self._residency_s.at(now_s, MIN_RELEASED_BLOCKS) or 0.0
        share = self._return_share.at(now_s, 1.0) or 0.0
        num_turns = self._cost.num_turns(share)
        returns = self._cost.return_odds(share), num_turns, self._cost.later_s(residency_s, num_turns)
        owned = self._cost, self.loads, self._live, self._live.path(request.hashes)
        context = DecisionContext(request, broken, *owned, self._gateway_id, residency_s, *returns, now_s)
        return views(candidates, context)


def _eligible(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Return the unguarded workers. Without one, fall back to the slow, then to the broken."""
    for guard in (None, SLOW, BREAKER):
        if eligible := [worker for worker in workers if worker.guard is guard]:
            return eligible
    return []


def _best(
    request: RouteRequest, workers: Sequence[WorkerView], sure_ttft_s: Callable[[WorkerView], float]
) -> Sequence[WorkerView]:
    """Return the workers with the lowest score, of those within the request's budget.

    With an affinity key: its worker among them, or among all within the budget if it is hard.
    """
    if request.ttft_budget_s is not None:
        workers = [worker for worker in workers if sure_ttft_s(worker) <= request.ttft_budget_s]
    if not (request.hard_affinity and request.affinity_key):
        lowest = min([worker.score for worker in workers if worker.score is not None], default=0.0)
        workers = [worker for worker in workers if worker.score == lowest]
    if request.affinity_key and len(workers) > 1:
        return [rendezvous_worker(request.affinity_key, workers)]
    return workers
