"""The cost of a request at each worker, in seconds. docs/routing.md has its terms.

    cost            = queue_s + eviction_s + decode_s + (1 + beta + num_displaced) * (prefill_s + fetch_cost_s)
                      + 0.03 * recent prefill seconds of the worker
    idle best match = (1 + beta) * (prefill_s + fetch_cost_s) + least_eviction_s

`beta` goes by the load of the workers of a similar rate.

`views` computes the terms of each worker, with its load (`load_tracker`) and the blocks of own requests
(`live_blocks`). The policy `headstart` adds jitter and affinity (`policies`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.types import GatewayId, WorkerId
from server.router.fetch_plan import FetchPlan, Peers, PeersByLayout, find_peers, plan_fetch
from server.router.live_blocks import LiveBlocks, Path
from server.router.load_tracker import LoadTracker, WorkerLoadEstimate
from server.router.types import RouteRequest

DEFAULT_PREFILL_TOKENS_PER_S: Final = 2000.0
"""For a fleet in which no worker has measured its rate. One without a rate counts with the fleet's median."""
TOO_SHORT: Final = "context too short"
SLOW: Final = "slow to answer"
BREAKER: Final = "breaker open"
MIN_TOKENS_PER_S: Final = 1e-3  # forged reports in Redis could otherwise make sums of seconds infinite
EQUAL_RATE: Final = 1.2
"""Equal workers measure rates up to this factor apart. In such a fleet all that are idle have the median rate."""
SIMILAR_RATE: Final = 1.5
"""An idle best match counts as fast as a worker whose measured rate is at most this many times higher."""


# Why prices are not constants: an eviction's weight of .1 or 1 is best at one price of copies, and loses at another.
# Why crowded has no one unit, such as the work seconds that a newcomer delays or evicts: it delays nothing of recent
# work and of answers that run. Without those terms long answers take 1.16 to 1.74 x (benchmarks/RESULTS.md).
@dataclass(frozen=True, slots=True)
class CostModel:
    """The constants of the cost, and its closed formulas."""

    request_s: float = 0.01
    """c0: the fixed part of a prefill, at a worker that has not measured it."""
    window_s: float = 60.0
    max_rho: float = 0.75
    """In a busier fleet later requests avoid a queue, so it delays fewer of them."""
    assigned_weight: float = 0.03
    """Spreads conversations before queues do: too many on one worker evict each other, and moving one later costs."""
    max_return_odds: float = 8.0
    least_end_share: float = 0.02  # a minute shows no more than some fifty turns of a conversation
    decode_weight: float = 0.01
    """Each request that runs slows prefills by about this share, as long as it holds its blocks."""
    max_decode_s: float = 20.0  # the part of that time that counts: later requests go where fewer run
    max_later_s: float = 3.0  # likewise of the time that all its turns hold blocks: long answers keep apart anyway
    room_weight: float = 0.2  # later turns are larger: a conversation leaves a filling pool while it is small
    copy_weight: float = 0.04
    """A fetched block costs at least this share of computing it: a copy evicts blocks that other prompts reuse."""

    def kv_wait_s(self, usage: float, mean_residency_s: float, num_running: int) -> float:
        """Return the wait until the pool has room. `usage` is the share held, this request's blocks included.

        Running requests release the whole pool once in `mean_residency_s`, each its part at once. So the overflow
        waits for half a release more, but not longer than until all are released.
        """
        overflow = usage - 1.0
        if overflow <= 0.0:
            return 0.0
        return mean_residency_s * max(overflow, min(1.0, overflow + 0.5 / max(1, num_running)))

    def decode_s(self, num_outstanding: int, mean_residency_s: float) -> float:
        """Return the delay by the requests at a worker while they generate, each for `mean_residency_s`."""
        return self.decode_weight * num_outstanding * min(self.max_decode_s, mean_residency_s)

    def return_odds(self, return_share: float) -> float:
        """Return how often an evicted prompt comes back, if each use is followed by another with `return_share`."""
        return min(self.max_return_odds, return_share / max(1e-9, 1.0 - return_share))

    def num_turns(self, return_share: float) -> float:
        """Return how often a conversation comes, this time and later, if a turn is followed by another likewise."""
        return 1.0 / max(self.least_end_share, 1.0 - return_share)

    def later_s(self, mean_residency_s: float, num_turns: float) -> float:
        """Return the part that counts of how much longer than this time a conversation holds blocks."""
        return max(0.0, min(self.max_later_s, num_turns * mean_residency_s) - mean_residency_s)

    def eviction_s(self, usage: float, num_slots: float, refill_s: float, return_odds: float) -> float:
        """Return the work to get back what a request evicts from a pool with slots for `num_slots` such requests.

        All slots are taken with a probability of about usage ** (sqrt(2 (num_slots + 1)) - 1). Then as many blocks of
        others are evicted. Each time they come back, getting them takes `refill_s` and evicts again.
        Source: Sakasegawa, An approximation formula Lq = a b^r / (1 - r), Ann. Inst. Statist. Math. 29 (1977).
        """
        taken = min(1.0, usage) ** (math.sqrt(2.0 * num_slots + 2.0) - 1.0) if usage > 0.0 else 0.0
        return taken * return_odds * refill_s

    def refill_weight(self, prefill_tokens_per_s: float, fetch_tokens_per_s: float) -> float:
        """Return the cost of getting an evicted block back, relative to computing it: a peer or a tier may have it."""
        if not fetch_tokens_per_s:
            return 1.0
        return min(1.0, max(self.copy_weight, prefill_tokens_per_s / fetch_tokens_per_s))

    def beta(self, assigned_s: float) -> float:
        """Return how much one more second of work delays later requests.

        `assigned_s`: prefill seconds assigned to a worker, decayed over the window.
        """
        rho = min(self.max_rho, assigned_s / self.window_s)
        return rho / (1.0 - rho)

    def betas(self, workers: Sequence[WorkerView], assigned_s: float) -> list[float]:
        """Return `beta` at each worker, by the mean work of the workers of a similar rate.

        `assigned_s`: the mean of the fleet, of which only some `workers` may be scored.
        """
        rates = [worker.prefill_tokens_per_s for worker in workers]
        if max(rates) <= SIMILAR_RATE * min(rates):
            return [self.beta(assigned_s)] * len(workers)
        scale = assigned_s * len(workers) / (sum([worker.assigned_s for worker in workers]) or 1.0)
        betas = [0.0] * len(workers)
        by_rate = sorted(range(len(workers)), key=rates.__getitem__)
        while by_rate:
            like = [at for at in by_rate if rates[at] <= SIMILAR_RATE * rates[by_rate[0]]]
            beta = self.beta(scale * sum([workers[at].assigned_s for at in like]) / len(like))
            for at in like:
                betas[at] = beta
            del by_rate[: len(like)]
        return betas

    def fetch_cost_s(self, plan: FetchPlan, tokens_per_s: float) -> float:
        """Return the cost of a plan at a worker that prefills `tokens_per_s`."""
        return max(plan.fetch_s, self.copy_weight * plan.peer_tokens / tokens_per_s)

    def costs_s(self, workers: Sequence[WorkerView], betas: Sequence[float]) -> list[float]:
        """Return the cost of the request at each worker."""
        return [
            worker.queue_s
            + worker.eviction_s
            + worker.decode_s
            + (1.0 + beta + worker.num_displaced) * (worker.prefill_s + worker.fetch_cost_s)
            + self.assigned_weight * worker.assigned_s
            for worker, beta in zip(workers, betas, strict=True)
        ]

    def idle_best_cost_s(self, best: WorkerView, workers: Sequence[WorkerView], betas: Sequence[float]) -> float:
        """Return the cost at an idle best match: what it evicts, and no more than others of a similar rate pay."""
        rate = best.prefill_tokens_per_s
        similar = [at for at, worker in enumerate(workers) if worker.prefill_tokens_per_s <= SIMILAR_RATE * rate]
        fastest = max([workers[at].prefill_tokens_per_s for at in similar])
        beta = min([betas[at] for at in similar])
        return (1.0 + beta) * (best.prefill_s * rate / fastest + best.fetch_cost_s) + best.least_eviction_s


class WorkerView(msgspec.Struct, eq=False):
    """One worker as one decision sees it, and the terms of the cost there."""

    member: WorkerMember
    load: WorkerLoad
    """Its last report."""
    estimate: WorkerLoadEstimate
    index_tokens: int
    """Prompt tokens cached there according to the index."""
    pending_tokens: int
    """Prompt tokens that own requests have cached there, or will have."""
    matched_tokens: int
    """Prompt tokens of full blocks that count as cached there."""
    prefill_tokens_per_s: float
    prefill_fixed_s: float
    """The part of a prefill there that its tokens do not change."""
    prefill_s: float
    """Prefill time of this request there, without fetches."""
    queue_s: float
    """Delay of its first token by other prefills there."""
    num_displaced: float
    """Prefills there that it would delay. The oldest one and all work of other gateways together count as 0.5."""
    num_live_blocks: int
    """Blocks that own live requests hold there: this one takes no room for them."""
    kv_usage: float
    """Share of the pool that running requests and this one would hold; above 1 they do not fit."""
    kv_wait_s: float
    """Wait until its blocks fit into the pool there."""
    eviction_s: float
    """Work to get back the blocks that it evicts there, and its waits for room, this time and later."""
    least_eviction_s: float
    """The same if requests of other gateways hold the matched blocks, as the conversation's last turn may."""
    decode_s: float
    """Delay by the requests that run there."""
    assigned_s: float
    """Prefill seconds assigned to the worker, decayed over a minute."""
    report_age_s: float
    """Age of the last report, at most 1 s; 0 if no other gateway sends here."""
    fetch_cost_s: float = 0.0
    plan: FetchPlan | None = None
    """None: it fetches nothing."""
    peers: Peers | None = None
    """The plan fetches from one of the holders."""
    guard: str | None = None
    """Why the worker cannot take the request."""
    score: float | None = None
    """The policy's score; None for a guarded worker."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that it need not compute: in the pool or fetched."""
        return self.matched_tokens if self.plan is None else self.plan.end_tokens

    @property
    def fetched_tokens(self) -> dict[str, int]:
        """Prompt tokens that it would fetch, by place."""
        if self.plan is None:
            return {}
        places = dict(zip(self.member.tiers, self.plan.tier_tokens, strict=False)) | {"peer": self.plan.peer_tokens}
        return {place: num_tokens for place, num_tokens in places.items() if num_tokens}

    @property
    def fetch_s(self) -> float:
        """How long it fetches blocks before its prefill, while its engine computes for others."""
        return 0.0 if self.plan is None else self.plan.fetch_s

    @property
    def wait_s(self) -> float:
        """Predicted time from the decision to the prefill, without fetches."""
        return self.queue_s + self.kv_wait_s

    @property
    def predicted_ttft_s(self) -> float:
        """Predicted time from the decision to the first token."""
        return self.wait_s + self.fetch_s + self.prefill_s

    @property
    def num_outstanding(self) -> int:
        """Unfinished requests there."""
        return num_outstanding(self.estimate, self.load)

    @property
    def num_waiting(self) -> int:
        """Requests there without a first token."""
        return max(self.estimate.num_queued, self.load.num_waiting)


def num_outstanding(estimate: WorkerLoadEstimate, load: WorkerLoad) -> int:
    """Return the unfinished requests: the larger of own count and report, since the report may include ours."""
    return max(estimate.num_outstanding, load.num_running + load.num_waiting)


class DecisionContext(msgspec.Struct, frozen=True):
    """Inputs of one decision that are the same for every worker."""

    request: RouteRequest
    broken: Container[WorkerId]
    cost: CostModel
    loads: LoadTracker
    live: LiveBlocks
    path: Path
    """The prompt's, in `live`."""
    gateway_id: GatewayId
    mean_residency_s: float
    """How long recent requests held a block; 0.0 if unknown."""
    return_odds: float
    """How often an evicted prompt comes back; 0.0 if unknown."""
    num_turns: float
    """How often a conversation comes, this time and later; 1.0 if unknown."""
    later_s: float
    """The part that counts of how much longer than this time it holds blocks."""
    now_s: float


def views(candidates: Sequence[Candidate], context: DecisionContext) -> list[WorkerView]:
    """Compute the terms of the cost at each worker, and whether it can take the request."""
    request, now_s = context.request, context.now_s
    loads = [candidate.load for candidate in candidates]
    rates = sorted([load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s > 0.0])
    median_tokens_per_s = rates[len(rates) // 2] if rates else DEFAULT_PREFILL_TOKENS_PER_S
    fixed = sorted([load.prefill_fixed_s for load in loads if load.prefill_fixed_s > 0.0])
    median_fixed_s = fixed[len(fixed) // 2] if fixed else context.cost.request_s
    are_equal = bool(rates) and rates[-1] <= EQUAL_RATE * rates[0]
    peers: PeersByLayout = {}
    if any([load.fetch_tokens_per_s for load in loads]):  # noqa: C419 - a generator takes twice the time
        peers = find_peers(candidates, context.broken, request)
    found = []
    for candidate in candidates:
        estimate = context.loads.of(candidate.member)
        estimate.observe(candidate.load, now_s - candidate.load_age_s, context.gateway_id)
        if are_equal and not num_outstanding(estimate, candidate.load):
            tokens_per_s, fixed_s = median_tokens_per_s, median_fixed_s
        else:
            tokens_per_s = estimate.prefill_tokens_per_s(median_tokens_per_s, now_s)
            fixed_s = estimate.prefill_fixed_s(median_fixed_s, now_s)
        tokens_per_s = max(MIN_TOKENS_PER_S, tokens_per_s)
        found.append(_view(candidate, estimate, tokens_per_s, fixed_s, peers, context))
    return found


def _view(
    candidate: Candidate,
    estimate: WorkerLoadEstimate,
    tokens_per_s: float,
    fixed_s: float,
    all_peers: PeersByLayout,
    context: DecisionContext,
) -> WorkerView:
    member, request, cost, now_s = candidate.member, context.request, context.cost, context.now_s
    block_size, most_tokens = member.block_size, max(0, request.num_prompt_tokens - 1)  # the last one is computed
    own = context.live.own_blocks(member, context.path, estimate)
    matched_tokens = member.hit_tokens(min(max(candidate.matched_blocks, own.num_cached) * block_size, most_tokens))
    plan = peers = None
    if all_peers or candidate.tier_blocks:
        plan, peers = plan_fetch(candidate, matched_tokens, tokens_per_s, all_peers, request.num_prompt_tokens)
    cached_tokens = matched_tokens if plan is None else plan.end_tokens
    prefill_s = fixed_s + (request.num_prompt_tokens - cached_tokens) / tokens_per_s
    queue_s, num_displaced = estimate.delay(prefill_s, now_s)
    if own.num_cached > candidate.matched_blocks:  # its prefix is there when their prefill ends
        queue_s = max(queue_s, own.ready_s)
    kv_usage, kv_wait_s, eviction_s, least_eviction_s = _pool_terms(
        candidate, estimate, matched_tokens, own.num_live, tokens_per_s, context
    )
    return WorkerView(  # by position: keywords cost more than the arithmetic above
        member,
        candidate.load,
        estimate,
        member.hit_tokens(candidate.matched_blocks * block_size),
        min(own.num_cached * block_size, most_tokens) if own.num_cached else 0,
        matched_tokens,
        tokens_per_s,
        fixed_s,
        prefill_s,
        queue_s,
        num_displaced,
        own.num_live,
        kv_usage,
        kv_wait_s,
        eviction_s,
        least_eviction_s,
        cost.decode_s(num_outstanding(estimate, candidate.load), context.mean_residency_s + context.later_s),
        estimate.assigned.at(now_s),
        estimate.report_age_s(now_s),
        0.0 if plan is None else cost.fetch_cost_s(plan, tokens_per_s),
        plan,
        peers,
        guard_of(request, member, candidate.load, context.broken),
    )


def guard_of(
    request: RouteRequest, member: WorkerMember, load: WorkerLoad, broken: Container[WorkerId] = ()
) -> str | None:
    """Return why the worker cannot take the request, or None."""
    if (member.worker_id, member.epoch) in request.excluded:
        return "has failed this request"
    if request.numerics is not None and member.numerics != request.numerics:
        return "another numerics class"
    if not request.needs.issubset(member.capabilities):
        return f"does not serve {', '.join(sorted(request.needs.difference(member.capabilities)))}"
    if max(request.num_prompt_tokens, request.num_context_tokens) > member.max_model_len:
        return TOO_SHORT
    if load.draining:
        return "draining"
    if member.worker_id in broken:
        return BREAKER
    return SLOW if load.is_slow else None


def _pool_terms(
    candidate: Candidate,
    estimate: WorkerLoadEstimate,
    matched_tokens: int,
    num_live: int,
    tokens_per_s: float,
    context: DecisionContext,
) -> tuple[float, float, float, float]:
    """Return `kv_usage`, `kv_wait_s`, `eviction_s`, `least_eviction_s`: all 0.0 for a worker that reports no pool.

    Blocks that own live requests hold are not taken twice. Other matched ones are free in the report, and this request
    takes them. It evicts for its new blocks. One that waits for room waits again each time that it comes back.
    """
    member, load, cost, num_tokens = candidate.member, candidate.load, context.cost, context.request.num_prompt_tokens
    if not load.num_blocks:
        return 0.0, 0.0, 0.0, 0.0
    num_blocks = -(-num_tokens // member.block_size)
    num_used = estimate.num_used_blocks(load)
    num_new = num_blocks - num_live
    num_slots = load.num_blocks / num_blocks if load.num_blocks > num_blocks > 0 else 1.0
    token_s = 1.0 / tokens_per_s
    if member.layout:
        token_s *= cost.refill_weight(tokens_per_s, load.fetch_tokens_per_s)
    refill_s = max(0, num_tokens - matched_tokens) * token_s

    def evicted_and_wait_s(num_used: int) -> tuple[float, float]:
        usage = (num_used + num_new) / load.num_blocks
        wait_s = cost.kv_wait_s(usage, context.mean_residency_s, load.num_running)
        evicted_s = cost.eviction_s(usage, num_slots, refill_s, context.return_odds)
        evicted_s += cost.room_weight * context.later_s * num_used / load.num_blocks
        return evicted_s + context.num_turns * wait_s, wait_s

    eviction_s, wait_s = evicted_and_wait_s(num_used)
    least_s = eviction_s
    num_counted_twice = min(matched_tokens // member.block_size - num_live, num_used - estimate.num_live_blocks)
    if num_counted_twice > 0:
        least_s, _ = evicted_and_wait_s(num_used - num_counted_twice)
    return (num_used + num_new) / load.num_blocks, wait_s, eviction_s, least_s


def idle_best_matches(workers: Sequence[WorkerView], common_tokens: int | None = None) -> list[int]:
    """Return the positions of the workers with the longest match that could start at once; none if most have it.

    Nothing waits or prefills there. `common_tokens`: the match that most of the fleet has, where these workers are a
    part of it.
    """
    matches = [worker.matched_tokens for worker in workers]
    longest = max(matches)
    if longest <= (sorted(matches)[(len(matches) - 1) // 2] if common_tokens is None else common_tokens):
        return []
    return [
        at
        for at, worker in enumerate(workers)
        if matches[at] == longest and not worker.queue_s and not worker.num_waiting
    ]
