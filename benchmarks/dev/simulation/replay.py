"""Gateways in front of simulated workers, from the first arrival to the last answer.

Every gateway has its own scorer and load estimates, as in production. It sees the index `index_delay_s` late, and the
workers' reports as old as their grid of `report_s` makes them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.dev.simulation.engine import Job, SimulatedWorker
from benchmarks.dev.simulation.fleet import MODEL, Fleet, ReplaySettings
from benchmarks.dev.simulation.growth import Answered, Growth
from benchmarks.dev.simulation.memory_index import MemoryIndex
from benchmarks.dev.simulation.moving_engine import MovingWorker
from benchmarks.dev.simulation.outcomes import Observed, Outcome
from benchmarks.dev.simulation.redis_backend import RedisBackend
from benchmarks.dev.simulation.rivals import Rival
from benchmarks.dev.simulation.shared_engine import SharedWorker
from benchmarks.dev.simulation.traces import ROOT, Session, TraceRequest, Workload
from benchmarks.dev.simulation.variants import HOT
from cache.events import BlockEvent, Removed, Stored
from cache.records import Candidate
from cache.types import BlockHash, GatewayId, WorkerId
from server.router.copies import CopyPlanner
from server.router.placement import Decision, Scorer
from server.router.policies import Policy
from server.router.queue import RETRY_S, RequestQueue
from server.router.types import RouteRequest, short_key

DEATH_SHARE: Final = 0.4
JOIN_SHARE: Final = 0.6
MAX_COPIES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request at its gateway."""

    session: Session
    turn: int
    gateway: int
    arrived_s: float
    left_share: float = 1.0
    """The part of the answer to come: a request whose worker has died has some of it."""

    @property
    def request(self) -> TraceRequest:
        return self.session.requests[self.turn]


class Replay:
    """One run of one policy; `run` may be called once."""

    def __init__(self, workload: Workload, make_policy: Callable[[], Policy], settings: ReplaySettings) -> None:
        self._workload = workload
        self._settings = settings
        self._now_s = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._index = RedisBackend() if settings.redis else MemoryIndex(lambda: self._now_s, lease_s=float("inf"))
        self._tiers = MemoryIndex(lambda: self._now_s, lease_s=float("inf"))
        """The index of the tiers below the pools."""
        self._late: deque[tuple[float, bool, WorkerId, list[BlockEvent]]] = deque()
        rng = random.Random(settings.seed)
        self._gateway_rng = random.Random(rng.getrandbits(64))
        self._fleet = Fleet(workload, settings)
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        """All that there have been."""
        self._live: list[SimulatedWorker] = []
        """In the index's order."""
        self._jobs: dict[Job, None] = {}
        """Those that have not ended."""
        for _ in range(settings.num_workers):
            self._join()
        self._policies = [make_policy() for _ in range(settings.num_gateways)]
        self._gateways = [
            self._make_gateway(GatewayId(f"gateway-{number}"), policy, random.Random(rng.getrandbits(64)))
            for number, policy in enumerate(self._policies)
        ]
        self._scorers = dict(self._gateways)
        self._held = [RequestQueue[Arrival](settings.hold_s) for _ in self._gateways]
        self._ttft_s: dict[int, float] = {}
        self._predicted: dict[int, float] = {}
        self._cached: dict[int, tuple[int, int]] = {}
        self._arrivals: list[int] = []
        self._observed: list[Observed] = []
        self._answered: list[Answered] = []
        self._num_copies = 0
        self._joins_s: float | None = None
        self._copies = [CopyPlanner(lambda: self._now_s, MAX_COPIES) for _ in self._gateways]

    def _make_gateway(self, gateway_id: GatewayId, policy: Policy, rng: random.Random) -> tuple[GatewayId, Scorer]:
        settings = self._settings
        return gateway_id, Scorer(
            gateway_id,
            policy,
            lambda: self._now_s,
            rng,
            cost=settings.cost,
            count_pending=settings.count_pending,
            publish_delay_s=settings.index_delay_s + settings.report_s,
        )

    def run(self) -> Outcome:
        for session in self._workload.sessions:
            self._at(session.start_s, partial(self._arrive, session, 0))
        if self._settings.death_and_join:
            last_s = max(session.start_s for session in self._workload.sessions)
            self._at(DEATH_SHARE * last_s, self._die)
            self._at(JOIN_SHARE * last_s, self._join)
        if self._settings.join:
            self._at(JOIN_SHARE * max(session.start_s for session in self._workload.sessions), self._start_warm)
        agenda = self._agenda
        try:
            while agenda:
                self._now_s, _, action = heapq.heappop(agenda)
                action()
        finally:
            if isinstance(self._index, RedisBackend):
                self._index.close()
        return self._outcome()

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._order), action))

    # --- workers ------------------------------------------------------------------------------------------------

    def _start_warm(self) -> None:
        """Start a worker, which joins when its warm start has ended."""
        self._joins_s = self._now_s
        worker, settings = self._fleet.make_worker(), self._settings
        took_s = 0.0
        if settings.warm_start_s and isinstance(worker, MovingWorker):
            peers = [peer for peer in self._live if isinstance(peer, MovingWorker)]
            took_s = worker.warm_start(peers, settings.warm_start_s, self._now_s)
        self._at(self._now_s + took_s, partial(self._join, worker))

    def _join(self, started: SimulatedWorker | None = None) -> None:
        worker = started or self._fleet.make_worker()
        self._index.register(worker.member)
        self._tiers.register(worker.member)
        self._workers[worker.member.worker_id] = worker
        self._live.append(worker)
        if started is not None:
            self._publish(worker)

    def _retire(self, worker: SimulatedWorker) -> None:
        """Nothing that was planned there happens any more."""
        worker.is_dead = True
        self._live.remove(worker)
        assert isinstance(self._index, MemoryIndex), "no worker ends with a real Redis"
        self._index.retire(worker.member.worker_id)
        self._tiers.retire(worker.member.worker_id)

    def _die(self) -> None:
        """Lose the busiest worker. Gateways send its requests again, without the part of the answer that they have."""
        worker = max(
            self._live, key=lambda each: each.num_decoding + len(each.queue) + len(each.unfinished(self._now_s))
        )
        self._retire(worker)
        for job in [job for job in self._jobs if job.placement.worker is worker.member]:
            if job.allocation is not None:
                job.allocation.free()
            self._close(job)
            left_share = job.left_share
            if job.decode_s:
                left_share *= max(0.0, 1.0 - (self._now_s - job.decode_start_s) / job.decode_s)
            gateway = next(at for at, (gateway_id, _) in enumerate(self._gateways) if gateway_id == job.gateway)
            self._submit(Arrival(job.session, job.turn, gateway, job.arrival_s, left_share))
        if self._settings.pooled:
            for stalled in self._live:
                self._begin(stalled)

    # --- the course of a request --------------------------------------------------------------------------------

    def _arrive(self, session: Session, turn: int) -> None:
        arrival = Arrival(session, turn, self._gateway_rng.choice(range(len(self._gateways))), self._now_s)
        self._arrivals.append(arrival.request.number)
        self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        decision, held = self._decide(arrival), self._held[arrival.gateway]
        if not held.holds(decision.request, decision.wait_s):
            self._place(arrival, decision)
            return
        held.hold(arrival, decision.request, decision.wait_s, self._now_s)
        if len(held) == 1:
            self._at(self._now_s + RETRY_S, partial(self._retry, held))

    def _retry(self, held: RequestQueue[Arrival]) -> None:
        """Place the held requests that need not wait any more."""
        for each in held.due(self._now_s):
            decision = self._decide(each.item)
            if not held.stays(each, decision.wait_s, self._now_s):
                held.remove(each)
                self._place(each.item, decision)
        if held:
            self._at(self._now_s + RETRY_S, partial(self._retry, held))

    def _decide(self, arrival: Arrival) -> Decision:
        request = arrival.request
        key = short_key(arrival.session.key) if self._settings.keys and arrival.session.key else None
        number, num_tokens = str(request.number), request.num_prompt_tokens
        route = RouteRequest(number, MODEL, num_tokens, request.hashes, affinity_key=key, root=ROOT)
        scorer = self._gateways[arrival.gateway][1]
        candidates = self._candidates(request, scorer)
        return scorer.decide(route, candidates, index_answered=not self._settings.blind)

    def _place(self, arrival: Arrival, decision: Decision) -> None:
        gateway_id, scorer = self._gateways[arrival.gateway]
        placement = scorer.place(decision)
        worker = self._workers[placement.worker.worker_id]
        request = arrival.request
        job = Job(request, gateway_id, arrival.arrived_s, placement, arrival.session, arrival.turn, arrival.left_share)
        self._jobs[job] = None
        chosen = next(view for view in decision.workers if view.member is placement.worker)
        observed = job.observed = Observed.of(chosen, decision.workers, request.num_prompt_tokens)
        self._observed.append(observed)
        worker.submit(job, self._now_s)
        self._begin(worker)
        if self._settings.copies:
            self._copy(self._copies[arrival.gateway], decision)

    def _copy(self, planner: CopyPlanner, decision: Decision) -> None:
        """Copy the request's longest match to another worker, if that is due."""
        if (plan := planner.placed(decision)) is None:
            return
        target, source = self._workers[plan.target.worker_id], self._workers[plan.source.worker_id]
        assert isinstance(target, MovingWorker), "it fetches"
        assert isinstance(source, MovingWorker), "it gives"
        copy = None if source.is_dead else target.copy(plan.hashes, source, self._now_s)

        def end() -> None:
            if copy is not None and not target.is_dead:
                num_copied = 0 if source.is_dead else len(source.cache.find_blocks(plan.hashes))
                self._num_copies += num_copied == len(plan.hashes)
                copy[1].fill(max(num_copied, copy[1].num_filled))
                copy[1].free()
                self._publish(target)
                self._begin(target)
            planner.ended(plan)

        self._at(self._now_s if copy is None else copy[0], end)

    def _begin(self, worker: SimulatedWorker) -> None:
        if isinstance(worker, SharedWorker):
            for job in worker.admit(self._now_s):
                if job.loaded_s > self._now_s:
                    self._at(job.loaded_s, partial(self._loaded, worker, job))
                else:
                    worker.start(job, self._now_s)
                    self._begun(worker, job)
            self._await_next(worker)
        elif (begun := worker.begin(self._now_s)) is not None:
            self._begun(worker, begun)
            self._at(self._now_s + begun.prefill_s, partial(self._end_prefill, worker))

    def _end_prefill(self, worker: SimulatedWorker) -> None:
        if not worker.is_dead:
            self._prefilled(worker, worker.finish_prefill(self._now_s))

    def _loaded(self, worker: SharedWorker, job: Job) -> None:
        if worker.is_dead:
            return
        worker.start(job, self._now_s)
        self._begun(worker, job)
        self._await_next(worker)

    def _begun(self, worker: SimulatedWorker, job: Job) -> None:
        self._publish(worker)
        self._scorers[job.gateway].started(job.placement, job.num_cached_tokens)
        self._cached[job.request.number] = (job.num_cached_tokens, job.request.num_prompt_tokens)
        assert job.observed is not None
        job.observed.actual_wait_s = job.room_wait_s

    def _await_next(self, worker: SharedWorker) -> None:
        """Plan the end of the next prefill; a change before then voids it."""
        version, end_s = worker.version, worker.next_end_s(self._now_s)

        def end() -> None:
            if worker.version == version and not worker.is_dead:
                self._prefilled(worker, worker.finish_next(self._now_s))

        if end_s is not None:
            self._at(end_s, end)

    def _prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        self._publish(worker)
        self._first_token(job)
        num_left = job.left_share * job.request.num_output_tokens
        job.decode_start_s, job.decode_s = self._now_s, worker.model.decode_s(num_left, worker.num_decoding)
        self._at(self._now_s + job.decode_s, lambda: self._decoded(worker, job))
        self._begin(worker)

    def _first_token(self, job: Job) -> None:
        number, placement = job.request.number, job.placement
        self._scorers[job.gateway].first_token(placement)
        self._ttft_s.setdefault(number, self._now_s - job.arrival_s)
        self._answered.append(
            Answered(
                job.arrival_s,
                placement.worker.worker_id,
                job.request.num_prompt_tokens,
                job.num_cached_tokens,
                self._now_s - job.arrival_s,
                job.session.conversation == HOT,
            )
        )
        self._predicted[number] = placement.predicted_ttft_s / (self._now_s - placement.placed_s)

    def _decoded(self, worker: SimulatedWorker, job: Job) -> None:
        if worker.is_dead:
            return
        worker.finish_decode(job, self._now_s)
        self._close(job)
        if job.request.answer_ids:
            self._publish(worker)
        for stalled in self._live if self._settings.pooled else (worker,):
            self._begin(stalled)
        if job.turn + 1 < len(job.session.requests):
            self._at(self._now_s + job.session.think_s[job.turn], partial(self._arrive, job.session, job.turn + 1))
        else:
            for child in job.session.children:
                self._arrive(child, 0)

    def _close(self, job: Job) -> None:
        del self._jobs[job]
        self._scorers[job.gateway].closed(job.placement)
        for (gateway_id, _), policy in zip(self._gateways, self._policies, strict=True):
            if gateway_id == job.gateway and isinstance(policy, Rival):
                policy.on_close(job.placement.request, job.placement.worker.worker_id)

    # --- what gateways see --------------------------------------------------------------------------------------

    def _publish(self, worker: SimulatedWorker) -> None:
        due_s, worker_id = self._now_s + self._settings.index_delay_s, worker.member.worker_id
        if not self._settings.pooled and (events := worker.cache.take_events()):
            self._late.append((due_s, False, worker_id, events))
        if isinstance(worker, MovingWorker) and worker.tier is not None and (events := worker.tier.take_events()):
            self._late.append((due_s, True, worker_id, events))

    def _candidates(self, request: TraceRequest, scorer: Scorer) -> list[Candidate]:
        if self._settings.pooled:
            matched = self._live[0].cache.find(request.block_ids, ROOT, hashes=request.chain)
            matches = [matched] * len(self._live)
        else:
            while self._late and self._late[0][0] <= self._now_s:
                _, in_tier, worker_id, events = self._late.popleft()
                if not self._workers[worker_id].is_dead:
                    (self._tiers if in_tier else self._index).publish(worker_id, *_changes(events))
            matches = [candidate.matched_blocks for candidate in self._index.match(request.hashes)]
            if self._settings.blind:
                recent = scorer.ledger.recent(request.hashes)
                matches = [recent.get((each.member.worker_id, each.member.epoch), 0) for each in self._live]
        ends: list[tuple[int, ...]] = [()] * len(self._live)
        if self._settings.lower_tier and not self._settings.pooled:
            in_tiers = [candidate.matched_blocks for candidate in self._tiers.match(request.hashes)]
            ends = [(max(pair),) for pair in zip(matches, in_tiers, strict=True)]
        candidates = []
        for worker, matched, end in zip(self._live, matches, ends, strict=True):
            worker.report(self._now_s)
            candidates.append(Candidate(worker.member, worker.load, matched, self._now_s - worker.load_s, end))
        return candidates

    def _outcome(self) -> Outcome:
        assert len(self._ttft_s) == self._workload.num_requests, "a request was lost"
        scored = self._arrivals[int(len(self._arrivals) * self._settings.warmup_share) :]
        return Outcome.of(
            ttft_s=[self._ttft_s[number] for number in scored],
            num_cached_tokens=sum(self._cached[number][0] for number in scored),
            num_prompt_tokens=sum(self._cached[number][1] for number in scored),
            busy_s=[worker.busy_s for worker in self._workers.values()],
            predicted_over_actual=[self._predicted[number] for number in scored],
            observed=self._observed,
            growth=Growth.of(self._answered, self._num_copies, self._joins_s, self._live[-1].member.worker_id),
        )


def _changes(events: Sequence[BlockEvent]) -> tuple[list[BlockHash], list[BlockHash]]:
    """Stored and removed, netted: the last word on each block counts."""
    last: dict[BlockHash, bool] = {}
    for event in events:
        assert isinstance(event, Stored | Removed), "nothing clears a simulated cache"
        last[event.block_hash] = isinstance(event, Stored)
    return [h for h, stored in last.items() if stored], [h for h, stored in last.items() if not stored]
