"""Routing policies: rules that score the workers that can take a request. The lowest score wins.

CONTRIBUTING.md, "Where to add what", has the way to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import ClassVar, Final, TypeVar

import msgspec

from cache.records import Candidate
from server.router.cost import CostModel, WorkerView, idle_best_matches
from server.router.types import RouteRequest

_Worker = TypeVar("_Worker", WorkerView, Candidate)
AFFINITY: Final = 3.0
"""Without the index, the cost of another worker than the affinity key's, over the prompt's prefill at that one."""
_RENDEZVOUS_SEED: Final = b"3"
"""Part of the hash: every gateway must use the same."""


class FleetView(msgspec.Struct, frozen=True):
    """The fleet as one decision sees it."""

    cost: CostModel
    assigned_s: float
    """Prefill seconds assigned to a worker, decayed over a minute: the mean of the fleet."""
    draw: Callable[[], float]
    """Returns a random number in [0, 1); always 0.5 in a dry run."""
    common_tokens: int | None = None
    """The match that most of a large fleet has, of which only some workers are scored."""
    index_answered: bool = True


class Policy:
    """One routing rule. Each gateway has its own instance, which may keep state.

    The lowest score wins. `inf` loses to any finite score; if all are `inf`, one worker is drawn at random.
    """

    takes_short_list: ClassVar[bool] = False
    """In a large fleet only some workers are scored (`short_list`)."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        """Return one score per worker, in order; the lowest wins, ties are broken at random.

        `workers` is never empty; those that cannot take the request are left out.
        """
        raise NotImplementedError

    def on_dispatch(self, request: RouteRequest, worker: WorkerView) -> None:
        """Record that the request goes to `worker`."""


class Headstart(Policy):
    """The lowest cost in seconds (`server/router/cost.py`).

    An idle worker with the longest match pays only its prefill and what it evicts, without the load-spreading terms. So
    while it has room, no worker with a shorter match and a similar rate is cheaper.

    With several gateways, a random part of the report's age is added: recent work of the others is unknown, and all
    would choose the same idle worker. Without the index they prefer the affinity key's worker, as all find the same
    one. Where no other gateway sends, it has placed each turn itself, and needs no key.
    """

    takes_short_list = True

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        cost = fleet.cost
        betas = cost.betas(workers, fleet.assigned_s)
        costs_s = [
            cost_s + (worker.report_age_s * fleet.draw() if worker.report_age_s else 0.0)
            for cost_s, worker in zip(cost.costs_s(workers, betas), workers, strict=True)
        ]
        for at in idle_best_matches(workers, fleet.common_tokens):
            costs_s[at] = cost.idle_best_cost_s(workers[at], workers, betas)
        if request.affinity_key and not fleet.index_answered and any(worker.report_age_s for worker in workers):
            own = rendezvous_worker(request.affinity_key, workers)
            away_s = AFFINITY * own.prefill_s
            costs_s = [cost_s + away_s * (each is not own) for cost_s, each in zip(costs_s, workers, strict=True)]
        return costs_s


class LongestPrefix(Policy):
    """The longest cached prefix, ties to the lowest load. Workers herd once prompts share a system prompt."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        longest = max(worker.matched_tokens for worker in workers)
        return [worker.num_outstanding if worker.matched_tokens == longest else float("inf") for worker in workers]


class RoundRobin(Policy):
    """Each worker of a model in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        ids = [worker.member.worker_id for worker in workers]
        last = self._last.get(request.model, "")
        chosen = min((worker_id for worker_id in ids if worker_id > last), default=min(ids))
        return [0.0 if worker_id == chosen else 1.0 for worker_id in ids]

    def on_dispatch(self, request: RouteRequest, worker: WorkerView) -> None:
        self._last[request.model] = worker.member.worker_id


class LeastLoad(Policy):
    """The fewest outstanding requests."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        return [worker.num_outstanding for worker in workers]


class ConsistentHash(Policy):
    """Rendezvous hashing of the affinity key, else of the prompt's first two blocks."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        key = request.affinity_key.encode() if request.affinity_key else b"".join(request.hashes[:2])
        return rendezvous_weights(key or request.request_id.encode(), workers)


def rendezvous_weights(key: bytes, workers: Sequence[WorkerView | Candidate]) -> list[int]:
    """Return one weight per worker; the key's worker has the lowest.

    The key's worker changes only when it leaves or a worker with a lower weight joins.
    """
    key = blake2b(key, digest_size=32).digest()
    ids = [worker.member.worker_id.encode() for worker in workers]
    digests = [blake2b(each, digest_size=8, key=key, person=_RENDEZVOUS_SEED).digest() for each in ids]
    return [int.from_bytes(digest, "big") for digest in digests]


def rendezvous_worker(key: str, workers: Sequence[_Worker]) -> _Worker:
    """Return the key's worker."""
    weights = rendezvous_weights(key.encode(), workers)
    return workers[weights.index(min(weights))]


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
