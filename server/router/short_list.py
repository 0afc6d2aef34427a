"""Selects the workers to score for one request in a fleet of more than `SCORE_ALL`.

    holders        of more of the prompt than most, in the index or pending: the longest matches
    least loaded   by the report that every candidate carries, and this gateway's own queue there
    affinity       the worker of the request's affinity key, where it is hard or the index did not answer
    in turn        a few others, so that the estimate of each worker is renewed now and then

Scoring takes 4 us a worker, and this selection one pass over the matches. So a decision among 1,000 workers takes
hardly longer than one among 30.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from cache.records import Candidate, WorkerLoad
from cache.types import WorkerId, WorkerIncarnation
from server.router.cost import WorkerView
from server.router.policies import rendezvous_worker
from server.router.types import RouteRequest

SCORE_ALL: Final = 64
"""A fleet of at most this many workers is scored whole."""
MAX_HOLDERS: Final = 12  # with the next two and the affinity worker, some 30 are scored
NUM_LEAST_LOADED: Final = 8  # several gateways choose from them: fewer would send all to the same
NUM_IN_TURN: Final = 8  # renews the estimates of 1,000 workers within 125 decisions


class Listed(NamedTuple):
    """The candidates to score."""

    candidates: Sequence[Candidate]
    common_blocks: int
    """The median of the workers' matches, in their pools."""
    affinity_worker: WorkerId | None
    """The worker of the request's affinity key, where that counts."""


class ShortList:
    """Chooses among the workers of one model. `scored` and `placed` follow recent work."""

    def __init__(self, assigned_weight: float, queued_s: Callable[[WorkerId], float]) -> None:
        """`queued_s` returns the prefill seconds that this gateway has in the worker's queue."""
        self._assigned_weight = assigned_weight
        self._queued_s = queued_s
        self.assigned_s = 0.0
        """Prefill seconds assigned to all workers, by the last view of each."""
        self._assigned_s: dict[WorkerId, float] = {}
        self._queued: set[WorkerId] = set()
        """Workers that may have requests of this gateway in their queue."""
        self._loads: Sequence[WorkerLoad] = ()
        self._reported_s: dict[WorkerId, float] = {}
        """Queued seconds in these reports, of workers that take requests."""
        self._load_s: dict[WorkerId, tuple[float, WorkerId]] = {}
        self._changed: set[WorkerId] = set()
        self._order: list[WorkerId] = []
        """These workers by `_load_s`, as sorted last: the next sort takes one pass."""
        self._turn = 0

    def choose(
        self,
        request: RouteRequest,
        candidates: Sequence[Candidate],
        pending: Iterable[WorkerIncarnation],
        index_answered: bool,
    ) -> Listed:
        """Return the candidates to score. `pending`: workers that will hold most of the prompt."""
        by_id = {candidate.member.worker_id: candidate for candidate in candidates}
        if by_id.keys() != self._assigned_s.keys():
            self._begin(by_id)
        matches = [candidate.matched_blocks for candidate in candidates]
        tiers = [candidate.tier_blocks for candidate in candidates]
        ordered, half = sorted(matches), (len(matches) - 1) // 2
        common_blocks = ordered[half]
        if any(tiers):
            matches = [max(blocks, default=match) for blocks, match in zip(tiers, matches, strict=True)]
            ordered = sorted(matches)
        least = max(ordered[half] + 1, ordered[-MAX_HOLDERS])
        holders = [(match, candidate) for match, candidate in zip(matches, candidates, strict=True) if match >= least]
        if len(holders) > MAX_HOLDERS:
            holders = heapq.nlargest(MAX_HOLDERS, holders, key=_depth_and_load)
        chosen = {candidate.member.worker_id for _, candidate in holders}
        chosen.update(worker_id for worker_id, _ in pending if worker_id in by_id)
        chosen.update(self._least_loaded(by_id))
        affinity_worker = None
        if request.affinity_key and (request.hard_affinity or not index_answered):
            affinity_worker = rendezvous_worker(request.affinity_key, candidates).member.worker_id
            chosen.add(affinity_worker)
        begin, end = self._turn, self._turn + NUM_IN_TURN
        self._turn = end % len(candidates)
        turn = chain(candidates[begin:end], candidates[: max(0, end - len(candidates))])
        chosen.update([candidate.member.worker_id for candidate in turn])
        return Listed([by_id[worker_id] for worker_id in sorted(chosen)], common_blocks, affinity_worker)

    def scored(self, views: Sequence[WorkerView]) -> None:
        """Replace the assigned work of the scored workers by that of their views."""
        for view in views:
            if view.member.worker_id in self._assigned_s:
                self._assign(view.member.worker_id, view.assigned_s)

    def placed(self, worker_id: WorkerId, prefill_s: float) -> None:
        """Count a request there until the next view."""
        if worker_id in self._assigned_s:
            self._queued.add(worker_id)
            self._assign(worker_id, self._assigned_s[worker_id] + prefill_s)

    def _assign(self, worker_id: WorkerId, assigned_s: float) -> None:
        self.assigned_s += assigned_s - self._assigned_s[worker_id]
        self._assigned_s[worker_id] = assigned_s
        self._changed.add(worker_id)

    def _least_loaded(self, workers: Mapping[WorkerId, Candidate]) -> list[WorkerId]:
        """Return the workers with the least queued work: by their reports, or this gateway's own if that is more."""
        loads = [candidate.load for candidate in workers.values()]
        last, self._loads = self._loads, loads  # equal ones too: the next comparison then meets the same objects
        if loads != last:  # decisions within 50 ms share the reports
            self._reported_s = {
                worker_id: sum(load.queued_prefill_s.values())
                for worker_id, load in zip(workers, loads, strict=True)
                if not (load.draining or load.is_slow)
            }
            self._order = list(self._reported_s)
            self._changed.update(self._order)
        own_s = {worker_id: self._queued_s(worker_id) for worker_id in self._queued}
        for worker_id in (self._changed | self._queued) & self._reported_s.keys():
            queued_s = max(self._reported_s[worker_id], own_s.get(worker_id, 0.0))
            self._load_s[worker_id] = queued_s + self._assigned_weight * self._assigned_s[worker_id], worker_id
        self._queued, self._changed = {worker_id for worker_id in own_s if own_s[worker_id] > 0.0}, set()
        self._order.sort(key=self._load_s.__getitem__)
        return self._order[:NUM_LEAST_LOADED]

    def _begin(self, workers: Mapping[WorkerId, Candidate]) -> None:
        """Take this list of workers; new ones count as idle."""
        self._assigned_s = {worker_id: self._assigned_s.get(worker_id, 0.0) for worker_id in workers}
        self.assigned_s = sum(self._assigned_s.values())
        self._turn = 0
        self._loads, self._load_s = (), {}


def _depth_and_load(holder: tuple[int, Candidate]) -> tuple[int, int]:
    """Longer matches first; of equal ones, those with fewer requests."""
    return holder[0], -holder[1].load.num_running - holder[1].load.num_waiting
