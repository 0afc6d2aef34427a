"""A replay whose fleet changes: a scaler names its size, workers take time to start, and leave when they are done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import msgspec

from benchmarks.dev.simulation.engine import EngineModel, Job, SimulatedWorker
from benchmarks.dev.simulation.fleet import MODEL, Fleet, ReplaySettings
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.shared_engine import SharedWorker
from benchmarks.dev.simulation.traces import ROOT, TraceRequest, Workload
from benchmarks.report import percentile
from cache.allocators.hash import HashAllocator
from cache.records import Candidate, WorkerMember
from cache.types import WorkerId
from server.router.policies import make_policy
from server.router.workers_needed import INTERVAL_S, WorkersNeeded
from worker.contracts.exchange import OfferedChain
from worker.kv_transfer.mover import ROOM_SHARE, most_offered, share_out, unique_first

MINUTE_S: Final = 60.0
EVERY_S: Final = 15.0
"""How often the scaler looks, as KEDA and the autoscaler of Kubernetes do."""
START_S: Final = 30.0
"""From the decision until a new worker serves."""
_MEMORY_REQUESTS: Final = 50
"""Requests over which a worker takes the mean of its decodes."""


class Minute(NamedTuple):
    p90_s: float
    """The 90th percentile of queue and prefill."""
    num_workers: float
    """Pods: those that start and those that end their requests included."""
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True, eq=False)
class _MeasuredWorker(SharedWorker):
    """Reports the prefill rate that it measures: lower than without decodes, as at our workers."""

    mean_decoding: float = 0.0

    def submit(self, job: Job, now_s: float) -> None:
        assigned_s = self.assigned_s
        SharedWorker.submit(self, job, now_s)
        self.mean_decoding += (self.num_decoding - self.mean_decoding) / _MEMORY_REQUESTS
        added_s = (self.assigned_s - assigned_s) * self.model.slowdown_per_decode * self.mean_decoding
        job.estimate_s += added_s
        self.assigned_s += added_s

    def report(self, now_s: float) -> None:
        before = self.load
        SharedWorker.report(self, now_s)
        if self.load is not before:
            slowdown = 1.0 + self.model.slowdown_per_decode * self.mean_decoding
            rate = self.model.prefill_tokens_per_s / slowdown
            self.load = msgspec.structs.replace(self.load, prefill_tokens_per_s=rate)


class _Workers(Fleet):
    """Makes workers that measure their rate and can hand chains over."""

    def _new(self, member: WorkerMember, model: EngineModel, cache: HashAllocator) -> SimulatedWorker:
        cache.track_chains()
        return _MeasuredWorker(member, model, cache, self._settings.report_s)


class ElasticReplay(Replay):
    fleet_type = _Workers

    def __init__(
        self,
        workload: Workload,
        settings: ReplaySettings,
        objective_s: float,
        size: Callable[[float, int], int],
        *,
        hands_over: bool = True,
    ) -> None:
        """`size` returns the number of workers at a time, from the largest number that the gateways give."""
        super().__init__(workload, lambda: make_policy("headstart"), settings)
        self._size = size
        self._hands_over = hands_over
        self._leaving: set[WorkerId] = set()
        self._num_starting = 0
        self._worker_s: dict[int, float] = defaultdict(float)
        self._prefill_s: dict[int, float] = {}
        self.num_handed_blocks = 0
        self._needed = {gateway: WorkersNeeded(objective_s, lambda: self._now_s) for gateway in self._scorers}
        self._end_s = workload.sessions[-1].start_s
        self._at(0.0, self._scale)
        self._at(0.0, self._observe)

    def minutes(self) -> list[Minute]:
        """Return the finished replay, by the minute in which requests arrive."""
        answered: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
        for session in self._workload.sessions:
            number = session.requests[0].number
            answered[int(session.start_s // MINUTE_S)].append((self._ttft_s[number], *self._cached[number]))
        return [
            Minute(
                percentile((ttft_s for ttft_s, _, _ in each), 0.9),
                self._worker_s[minute] / MINUTE_S,
                sum(num_prompt for _, _, num_prompt in each),
                sum(num_cached for _, num_cached, _ in each),
            )
            for minute, each in sorted(answered.items())
        ]

    def prefills(self) -> list[tuple[float, float]]:
        """Return when each request came, and the seconds of its prefill next to the decodes that ran."""
        return [(each.start_s, self._prefill_s[each.requests[0].number]) for each in self._workload.sessions]

    # --- the fleet ----------------------------------------------------------------------------------------------

    def _staying(self) -> list[SimulatedWorker]:
        return [worker for worker in self._live if worker.member.worker_id not in self._leaving]

    def _observe(self) -> None:
        candidates = []
        for worker in self._staying():
            worker.report(self._now_s)
            candidates.append(Candidate(worker.member, worker.load, 0))
        for needed in self._needed.values():
            needed.observe(MODEL, candidates, 0.0)
        if self._now_s < self._end_s:
            self._at(self._now_s + INTERVAL_S, self._observe)

    def _scale(self) -> None:
        staying = self._staying()
        numbers = [needed.needed(MODEL) for needed in self._needed.values()]
        size = max(1, self._size(self._now_s, max((number for number in numbers if number), default=0)))
        num_more = size - len(staying) - self._num_starting
        for _ in range(num_more):
            self._num_starting += 1
            self._at(self._now_s + START_S, self._started)
        for worker in staying[::-1][: max(0, min(-num_more, len(staying) - 1))]:  # the highest ordinals
            self._leaving.add(worker.member.worker_id)
            self._leave_when_done(worker)
        self._worker_s[int(self._now_s // MINUTE_S)] += EVERY_S * (len(self._live) + self._num_starting)
        if self._now_s + EVERY_S < self._end_s:
            self._at(self._now_s + EVERY_S, self._scale)

    def _started(self) -> None:
        self._num_starting -= 1
        self._join()

    def _leave_when_done(self, worker: SimulatedWorker) -> None:
        if not any(job.placement.worker is worker.member for job in self._jobs):
            self._at(self._now_s, partial(self._leave, worker))

    def _leave(self, worker: SimulatedWorker) -> None:
        if worker.is_dead:
            return
        self._retire(worker)
        if self._hands_over:
            self._hand_over(worker.cache)

    def _hand_over(self, cache: HashAllocator) -> None:
        """Copy chains to the other workers as the product does. The time that it takes is left out: it is bounded."""
        peers = self._staying()
        chains = [OfferedChain.of(chain) for chain in cache.recent_chains(cache.num_blocks)]
        held = [any(peer.cache.block_of(chain.tip) is not None for peer in peers) for chain in chains]
        room = [int(ROOM_SHARE * peer.cache.num_free_blocks) for peer in peers]
        num_unused = sum(peer.cache.num_blocks - peer.cache.stats().num_cached_blocks for peer in peers)
        most = most_offered(cache.num_blocks, num_unused)
        for peer, offered in zip(peers, share_out(unique_first(chains, held, most), room), strict=True):
            for chain in offered[::-1]:  # the latest is evicted last
                if (blocks := peer.cache.reserve(ROOT, chain.block_hashes())) is not None:
                    blocks.fill(len(chain.block_hashes()))
                    blocks.free()
                    self.num_handed_blocks += len(chain.block_hashes())
            self._publish(peer)

    # --- the course of a request --------------------------------------------------------------------------------

    def _begun(self, worker: SimulatedWorker, job: Job) -> None:
        super()._begun(worker, job)
        self._prefill_s[job.request.number] = job.prefill_s

    def _close(self, job: Job) -> None:
        super()._close(job)
        if job.placement.worker.worker_id in self._leaving:
            self._leave_when_done(self._workers[job.placement.worker.worker_id])

    def _candidates(self, request: TraceRequest) -> list[Candidate]:
        return [each for each in super()._candidates(request) if each.member.worker_id not in self._leaving]
