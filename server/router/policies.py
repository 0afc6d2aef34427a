"""Routing policies: rules that score the workers which could take a request. The lowest score wins.

To add one: subclass `Policy` and enter it in POLICIES. `python tools/configuration.py` then writes its name to the
docs, `python -m tools.values` to the chart's schema. To compare it with `headstart bench route`, enter it in
COUNT_PENDING (benchmarks/dev/route_load/runs.py), so that replays count pending blocks as gateways do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from server.router.block_plan import BlockPlan
from server.router.types import RouteRequest, WorkerView

LIKE_RATES: Final = 1.5
"""A free home counts as quick as a worker whose measured rate is so much higher: equal devices differ by less."""
AFFINITY: Final = 0.1
"""Discount for the affinity key's worker, as a fraction of the full prompt's prefill time."""
_RENDEZVOUS_SEED: Final = b"3"
"""Part of the hash: every gateway must use the same."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The terms of the cost of sending a request to a worker, in seconds, and their constants.

    rho  = min(.98, prefill seconds assigned to the fleet, decayed over 60 s, / (60 N))
    beta = min(8, rho / (1 - rho))
    cost = queue_s + (1 + beta + num_displaced) * (prefill_s + load_cost_s)
           + 4 * kv_wait_s + 0.03 * recent prefill seconds of the worker     (both 0 at a free home: see `free_homes`)

    docs/routing.md says what each term is for.
    """

    request_s: float = 0.01
    """c0: the fixed part of a prefill."""
    window_s: float = 60.0
    max_rho: float = 0.98
    max_beta: float = 8.0
    recent_weight: float = 0.03
    """Spreads conversations before queues do. Conversations that gather on a worker evict each other from its cache,
    and moving one later costs more than each of its turns would wait."""

    kv_wait_weight: float = 4.0
    """0.0 ignores the fill of the pools."""
    copy_weight: float = 0.04
    """A fetched block costs at least this share of computing it: a copy evicts what other prompts come back for."""

    def prefill_s(self, num_tokens: int, tokens_per_s: float) -> float:
        """Return the prefill seconds of `num_tokens` uncached tokens."""
        return self.request_s + num_tokens / tokens_per_s

    def load_cost_s(self, plan: BlockPlan, tokens_per_s: float) -> float:
        """Return what loading and fetching costs at a worker that prefills `tokens_per_s`."""
        return max(plan.load_s, self.copy_weight * plan.fetched_tokens / tokens_per_s)

    def eviction_weight(self, tokens_per_s: float, fetch_tokens_per_s: float) -> float:
        """Return what getting an evicted block back costs, over computing it: a peer may have it."""
        return min(1.0, max(self.copy_weight, tokens_per_s / fetch_tokens_per_s)) if fetch_tokens_per_s else 1.0

    def beta(self, recent_s: float, num_workers: int) -> float:
        """Return the delay that one more second of work puts on later requests; uncapped, it diverges in overload.

        `recent_s`: prefill seconds assigned to the fleet, decayed over the window.
        """
        rho = min(self.max_rho, recent_s / (self.window_s * num_workers))
        return min(self.max_beta, rho / (1.0 - rho))

    def kv_wait_s(self, usage: float, num_slots: float, mean_residency_s: float, eviction_weight: float = 1.0) -> float:
        """Return the expected wait for blocks at a pool of which `usage` is held, this request's blocks included.

        The pool has slots for `num_slots` such requests. All are taken with a probability of about
        usage ** (sqrt(2 (num_slots + 1)) - 1); beyond usage = 1 the pool must turn over. Long before a request waits,
        a filling pool evicts what others come back for: `eviction_weight` says how much that counts.
        Source: Sakasegawa, An approximation formula Lq = a b^r / (1 - r), Ann. Inst. Statist. Math. 29 (1977).
        """
        usage = max(0.0, usage)
        bounded = min(1.0, usage)
        taken = math.pow(bounded, math.sqrt(2.0 * (max(1.0, num_slots) + 1.0)) - 1.0)
        return mean_residency_s * (taken * eviction_weight + usage - bounded)


class FleetView(msgspec.Struct, frozen=True):
    """The fleet as one decision sees it."""

    cost: CostModel
    recent_s: float
    """Prefill seconds assigned to the fleet, decayed over a minute."""
    num_workers: int
    draw: Callable[[], float]
    """Returns a random number in [0, 1); always 0.5 in a dry run."""


class Policy:
    """One routing rule. Each gateway has its own instance, which may keep state.

    The lowest score wins. `inf` loses to any finite score; if all are `inf`, one worker is drawn at random.
    """

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        """Return one score per worker, in order; the lowest wins, ties are broken at random.

        `workers` is never empty; those that cannot take the request are left out.
        """
        raise NotImplementedError

    def on_dispatch(self, request: RouteRequest, worker: WorkerView) -> None:
        """Record that the request goes to `worker`."""


class Headstart(Policy):
    """The lowest cost in seconds: see `CostModel`.

    With several gateways, a random part of the report's age is added: what others sent since is unknown, and all would
    take the same idle worker. An affinity key's own worker gets a small discount: any match or queue outweighs it.

    A free home is charged for the prefill alone: what spreads requests is for those without a prefix of their own. So
    no worker with a shorter match and a like rate costs less.
    """

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        beta = fleet.cost.beta(fleet.recent_s, fleet.num_workers)
        recent_weight, kv_wait_weight = fleet.cost.recent_weight, fleet.cost.kv_wait_weight
        costs_s = [
            worker.queue_s
            + kv_wait_weight * worker.kv_wait_s
            + (1.0 + (beta + worker.num_displaced)) * (worker.prefill_s + worker.load_cost_s)
            + recent_weight * worker.recent_s
            + (worker.report_age_s * fleet.draw() if worker.report_age_s else 0.0)
            for worker in workers
        ]
        homes = free_homes(workers)
        for at in homes:
            tokens_per_s = workers[at].prefill_tokens_per_s
            like = max([w.prefill_tokens_per_s for w in workers if w.prefill_tokens_per_s <= LIKE_RATES * tokens_per_s])
            costs_s[at] = (1.0 + beta) * (workers[at].prefill_s * tokens_per_s / like + workers[at].load_cost_s)
        if request.affinity_key and not homes:
            at = workers.index(rendezvous_worker(request.affinity_key, workers))
            costs_s[at] -= AFFINITY * request.num_prompt_tokens / workers[at].prefill_tokens_per_s
            # Keys spread by themselves, and every gateway must find the same worker, whatever it has sent lately.
            least_recent_s = min(worker.recent_s for worker in workers)
            costs_s[at] -= recent_weight * (workers[at].recent_s - least_recent_s)
        return costs_s


def free_homes(workers: Sequence[WorkerView]) -> list[int]:
    """Return where the request's longest match is, if most workers lack it, and it can start there at once.

    Nothing waits or prefills there, and its blocks fit next to those of the running requests.
    """
    matches = [worker.matched_tokens for worker in workers]
    longest = max(matches)
    if longest == sorted(matches)[(len(matches) - 1) // 2]:
        return []
    return [
        at
        for at, worker in enumerate(workers)
        if matches[at] == longest and not worker.queue_s and not worker.num_waiting and worker.kv_usage <= 1.0
    ]


class LongestPrefix(Policy):
    """The longest cached prefix, ties to the lowest load. Workers herd once prompts share a system prompt."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        longest = max(worker.matched_tokens for worker in workers)
        return [worker.num_outstanding if worker.matched_tokens == longest else float("inf") for worker in workers]


class RoundRobin(Policy):
    """Each worker in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._last = ""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        ids = [worker.member.worker_id for worker in workers]
        chosen = min((worker_id for worker_id in ids if worker_id > self._last), default=min(ids))
        return [0.0 if worker_id == chosen else 1.0 for worker_id in ids]

    def on_dispatch(self, request: RouteRequest, worker: WorkerView) -> None:
        self._last = worker.member.worker_id


class LeastLoad(Policy):
    """The fewest outstanding requests."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        return [worker.num_outstanding for worker in workers]


class ConsistentHash(Policy):
    """Rendezvous hashing of the affinity key, else of the prompt's first two blocks."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        key = request.affinity_key.encode() if request.affinity_key else b"".join(request.hashes[:2])
        return rendezvous_weights(key or request.request_id.encode(), workers)


def rendezvous_weights(key: bytes, workers: Sequence[WorkerView]) -> list[int]:
    """Return one weight per worker; the key's worker has the lowest.

    The key's worker changes only when it leaves or a worker with a lower weight joins.
    """
    key = blake2b(key, digest_size=32).digest()
    return [_weight(key, worker.member.worker_id.encode()) for worker in workers]


def rendezvous_worker(key: str, workers: Sequence[WorkerView]) -> WorkerView:
    """Return the key's own worker."""
    weights = rendezvous_weights(key.encode(), workers)
    return workers[weights.index(min(weights))]


def _weight(key: bytes, worker_id: bytes) -> int:
    return int.from_bytes(blake2b(worker_id, digest_size=8, key=key, person=_RENDEZVOUS_SEED).digest(), "big")


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "headstart": Headstart,
    "longest_prefix": LongestPrefix,
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "consistent_hash": ConsistentHash,
}


def make_policy(name: str) -> Policy:
    """Make a policy with its default constants. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"unknown routing policy {name!r}: use one of {', '.join(POLICIES)}")
    return POLICIES[name]()
