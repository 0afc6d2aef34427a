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
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.dev.simulation.engine import EngineModel, Job, SimulatedWorker
from benchmarks.dev.simulation.memory_index import MemoryIndex
from benchmarks.dev.simulation.moving_engine import MovingWorker
from benchmarks.dev.simulation.redis_backend import RedisBackend
from benchmarks.dev.simulation.shared_engine import SharedWorker
from benchmarks.dev.simulation.traces import ROOT, Session, TraceRequest, Workload
from cache.allocators.hash import HashAllocator
from cache.events import BlockEvent, Removed, Stored
from cache.records import Candidate, WorkerMember
from cache.types import BlockHash, Epoch, GatewayId, WorkerId
from server.router.cost import CostModel
from server.router.held_requests import RETRY_S, HeldRequests
from server.router.placement import Decision, Scorer
from server.router.policies import Policy
from server.router.types import RouteRequest

MODEL = "simulated"
POOLED = "pooled"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    num_workers: int
    cache_share: float
    """Blocks of the whole fleet over the distinct blocks of the workload."""
    num_gateways: int = 1
    index_delay_s: float = 0.1
    report_s: float = 0.05
    pooled: bool = False
    """One pool of the same total size, seen by every worker: the bound."""
    cost: CostModel = field(default_factory=CostModel)
    count_pending: bool = True
    """Blocks of requests just routed count as cached."""
    warmup_share: float = 0.1
    """Share of the first requests, which meet cold caches, to leave out."""
    seed: int = 0
    shared_engine: bool = False
    """Prefills share each step, as in our workers, instead of running one by one."""
    fetch: float = 0.0
    """Rate of blocks from a peer, over the prefill rate; 0.0: none come. Shared engine only, as the next two."""
    lower_tier: float = 0.0
    """Blocks of a tier below each worker's pool, over the pool's; 0.0: there is none."""
    load: float = 20.0
    """Rate of blocks from the tier, over the prefill rate."""
    hold_s: float = 0.0
    """`--hold-s` of the gateways."""
    redis: bool = False
    """The index is a real Redis instead of its model in memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    hit: float
    """Prompt tokens found cached over all prompt tokens."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    max_over_mean_busy: float
    predicted_over_actual_p50: float
    """The time from the decision to the first token, as predicted, over what it took: the median."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request at its gateway."""

    session: Session
    turn: int
    gateway: int
    arrived_s: float

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
        self._workers = self._make_workers()
        self._gateways = [
            self._make_gateway(GatewayId(f"gateway-{number}"), make_policy(), random.Random(rng.getrandbits(64)))
            for number in range(settings.num_gateways)
        ]
        self._scorers = dict(self._gateways)
        self._held = [HeldRequests[Arrival](settings.hold_s) for _ in self._gateways]
        self._ttft_s: dict[int, float] = {}
        self._predicted: dict[int, float] = {}
        self._cached: dict[int, tuple[int, int]] = {}
        self._arrivals: list[int] = []

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

    def _make_workers(self) -> list[SimulatedWorker]:
        settings, workload = self._settings, self._workload
        rate = workload.prefill_tokens_per_s
        tier_rates = (settings.load * rate,) if settings.lower_tier else ()
        moves = not settings.pooled and bool(settings.fetch or settings.lower_tier)
        model = EngineModel(rate, workload.block_size)
        if moves:
            model = replace(model, fetch_tokens_per_s=settings.fetch * rate, tier_tokens_per_s=tier_rates)
        num_blocks = int(workload.num_distinct_blocks * settings.cache_share)
        pool = HashAllocator(num_blocks + 1, 1)
        workers: list[SimulatedWorker] = []
        peers: dict[str, MovingWorker] = {}
        for number in range(settings.num_workers):
            member = WorkerMember(
                WorkerId(f"worker-{number:02}"),
                Epoch(f"{number:016x}"),
                f"http://worker-{number:02}",
                MODEL,
                "",
                "simulated",
                workload.block_size,
                1 << 30,
                1,
                prefill_order="shared" if settings.shared_engine else "fifo",
                layout="simulated" if moves else "",
                tiers=("disk",) if settings.lower_tier and moves else (),
            )
            share = num_blocks // settings.num_workers
            cache = pool if settings.pooled else HashAllocator(share + 1, 1)
            if moves:
                tier = HashAllocator(int(settings.lower_tier * share) + 1, 1) if settings.lower_tier else None
                worker: SimulatedWorker = MovingWorker(member, model, cache, settings.report_s, tier=tier, peers=peers)
            else:
                kind = SharedWorker if settings.shared_engine else SimulatedWorker
                worker = kind(member, model, cache, settings.report_s)
            if isinstance(worker, MovingWorker):
                peers[member.url] = worker
            self._index.register(member)
            self._tiers.register(member)
            workers.append(worker)
        return workers

    def run(self) -> Outcome:
        for session in self._workload.sessions:
            self._at(session.start_s, partial(self._arrive, session, 0))
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

    # --- the course of a request --------------------------------------------------------------------------------

    def _arrive(self, session: Session, turn: int) -> None:
        arrival = Arrival(session, turn, self._gateway_rng.choice(range(len(self._gateways))), self._now_s)
        self._arrivals.append(arrival.request.number)
        decision, held = self._decide(arrival), self._held[arrival.gateway]
        if held.add(arrival, decision.request, decision.wait_s, self._now_s) is None:
            self._place(arrival, decision)
        elif len(held) == 1:
            self._at(self._now_s + RETRY_S, partial(self._retry, held))

    def _retry(self, held: HeldRequests[Arrival]) -> None:
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
        route = RouteRequest(str(request.number), MODEL, request.num_prompt_tokens, request.hashes)
        return self._gateways[arrival.gateway][1].decide(route, self._candidates(request))

    def _place(self, arrival: Arrival, decision: Decision) -> None:
        gateway_id, scorer = self._gateways[arrival.gateway]
        placement = scorer.place(decision)
        worker = self._workers[int(placement.worker.worker_id.rpartition("-")[2])]
        job = Job(arrival.request, gateway_id, arrival.arrived_s, placement, arrival.session, arrival.turn)
        worker.submit(job, self._now_s)
        self._begin(worker)

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
            self._at(self._now_s + begun.prefill_s, lambda: self._prefilled(worker, worker.finish_prefill(self._now_s)))

    def _loaded(self, worker: SharedWorker, job: Job) -> None:
        worker.start(job, self._now_s)
        self._begun(worker, job)
        self._await_next(worker)

    def _begun(self, worker: SimulatedWorker, job: Job) -> None:
        self._publish(worker)
        self._scorers[job.gateway].started(job.placement, job.num_cached_tokens)
        self._cached[job.request.number] = (job.num_cached_tokens, job.request.num_prompt_tokens)

    def _await_next(self, worker: SharedWorker) -> None:
        """Plan the end of the next prefill; a change before then voids it."""
        version, end_s = worker.version, worker.next_end_s(self._now_s)

        def end() -> None:
            if worker.version == version:
                self._prefilled(worker, worker.finish_next(self._now_s))

        if end_s is not None:
            self._at(end_s, end)

    def _prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        self._publish(worker)
        self._scorers[job.gateway].first_token(job.placement)
        self._ttft_s[job.request.number] = self._now_s - job.arrival_s
        placement = job.placement
        self._predicted[job.request.number] = placement.predicted_ttft_s / (self._now_s - placement.placed_s)
        decode_s = worker.model.decode_s(job.request.num_output_tokens, worker.num_decoding)
        self._at(self._now_s + decode_s, lambda: self._decoded(worker, job))
        self._begin(worker)

    def _decoded(self, worker: SimulatedWorker, job: Job) -> None:
        worker.finish_decode(job, self._now_s)
        self._scorers[job.gateway].closed(job.placement)
        for stalled in self._workers if self._settings.pooled else (worker,):
            self._begin(stalled)
        if job.turn + 1 < len(job.session.requests):
            self._at(self._now_s + job.session.think_s[job.turn], lambda: self._arrive(job.session, job.turn + 1))

    # --- what gateways see --------------------------------------------------------------------------------------

    def _publish(self, worker: SimulatedWorker) -> None:
        due_s, worker_id = self._now_s + self._settings.index_delay_s, worker.member.worker_id
        if not self._settings.pooled and (events := worker.cache.take_events()):
            self._late.append((due_s, False, worker_id, events))
        if isinstance(worker, MovingWorker) and worker.tier is not None and (events := worker.tier.take_events()):
            self._late.append((due_s, True, worker_id, events))

    def _candidates(self, request: TraceRequest) -> list[Candidate]:
        if self._settings.pooled:
            matched = self._workers[0].cache.find(request.block_ids, ROOT, hashes=request.chain)
            matches = [matched] * len(self._workers)
        else:
            while self._late and self._late[0][0] <= self._now_s:
                _, in_tier, worker_id, events = self._late.popleft()
                (self._tiers if in_tier else self._index).publish(worker_id, *_changes(events))
            matches = [candidate.matched_blocks for candidate in self._index.match(request.hashes)]
        ends: list[tuple[int, ...]] = [()] * len(self._workers)
        if self._settings.lower_tier and not self._settings.pooled:
            in_tiers = [candidate.matched_blocks for candidate in self._tiers.match(request.hashes)]
            ends = [(max(pair),) for pair in zip(matches, in_tiers, strict=True)]
        candidates = []
        for worker, matched, end in zip(self._workers, matches, ends, strict=True):
            worker.report(self._now_s)
            candidates.append(Candidate(worker.member, worker.load, matched, self._now_s - worker.load_s, end))
        return candidates

    def _outcome(self) -> Outcome:
        assert len(self._ttft_s) == self._workload.num_requests, "a request was lost"
        scored = self._arrivals[int(len(self._arrivals) * self._settings.warmup_share) :]
        ttft_s = sorted(self._ttft_s[number] for number in scored)
        busy_s = [worker.busy_s for worker in self._workers]
        return Outcome(
            hit=sum(self._cached[n][0] for n in scored) / sum(self._cached[n][1] for n in scored),
            ttft_mean_s=sum(ttft_s) / len(ttft_s),
            ttft_p50_s=_quantile(ttft_s, 0.5),
            ttft_p90_s=_quantile(ttft_s, 0.9),
            ttft_p99_s=_quantile(ttft_s, 0.99),
            max_over_mean_busy=max(busy_s) / (sum(busy_s) / len(busy_s)),
            predicted_over_actual_p50=_quantile(sorted(self._predicted[number] for number in scored), 0.5),
        )


def _changes(events: Sequence[BlockEvent]) -> tuple[list[BlockHash], list[BlockHash]]:
    """Stored and removed, netted: the last word on each block counts."""
    last: dict[BlockHash, bool] = {}
    for event in events:
        assert isinstance(event, Stored | Removed), "nothing clears a simulated cache"
        last[event.block_hash] = isinstance(event, Stored)
    return [h for h, stored in last.items() if stored], [h for h, stored in last.items() if not stored]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
