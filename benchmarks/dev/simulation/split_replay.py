"""A replay in steps of tokens whose workers fetch blocks from each other, and whose first ones may only prefill.

split    the prompt and the first token at a worker of role "prefill"; then another decision, which names it as
         the source of the blocks; the time to the second token counts as one between tokens
fetch    holds the links of both workers, one transfer at a time, while the request waits and others run
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from benchmarks.dev.simulation.engine import EngineModel, Job, SimulatedWorker
from benchmarks.dev.simulation.fleet import MODEL, ReplaySettings
from benchmarks.dev.simulation.moving_engine import Link, transfer
from benchmarks.dev.simulation.step_engine import TICK_S, StepWorker
from benchmarks.dev.simulation.step_replay import StepFleet, StepReplay
from benchmarks.dev.simulation.traces import ROOT, Workload
from cache.allocators.hash import HashAllocator
from cache.records import WorkerMember
from server.router.fetch_plan import cheapest_plan
from server.router.types import RouteRequest


@dataclass(slots=True, eq=False)
class SplitWorker(StepWorker):
    peers: dict[str, SplitWorker] = field(default_factory=dict)
    """All workers, by URL."""
    link: Link = field(default_factory=Link)

    def num_reusable_tokens(self, job: Job) -> int:
        return self.num_fetched_tokens(job, StepWorker.num_reusable_tokens(self, job))

    def num_fetched_tokens(self, job: Job, num_pool_tokens: int) -> int:
        """Return the prompt tokens in the pool once the best plan has been carried out."""
        request, model, source = job.request, self.model, job.placement.source
        if source is None:
            return num_pool_tokens
        held = self.peers[source.url].cache.find(request.block_ids, ROOT, hashes=request.chain)
        end_tokens = min(min(source.num_blocks, held) * model.block_size, request.num_prompt_tokens - 1)
        rate, fetch_rate = model.prefill_tokens_per_s, model.fetch_tokens_per_s
        plan = cheapest_plan(request.num_prompt_tokens, num_pool_tokens, rate, (), end_tokens, fetch_rate)
        return num_pool_tokens if plan is None else plan.end_tokens

    def start(self, job: Job) -> None:
        """Begin the fetch of what the pool lacks, if there is a plan; else join the steps."""
        end_tokens = self.num_fetched_tokens(job, job.num_cached_tokens)
        if end_tokens == job.num_cached_tokens or job.placement.source is None:
            StepWorker.start(self, job)
            return
        seconds = (end_tokens - job.num_cached_tokens) / self.model.fetch_tokens_per_s
        job.loaded_s = transfer(job.started_s, seconds, self.link, self.peers[job.placement.source.url].link)
        job.num_cached_tokens = end_tokens

    def arrived(self, job: Job) -> None:
        """Join the steps: the blocks that have come are findable."""
        assert job.allocation is not None
        job.allocation.commit(job.request.block_ids, job.num_cached_tokens // self.model.block_size)
        StepWorker.start(self, job)


class SplitFleet(StepFleet):
    def __init__(self, workload: Workload, settings: ReplaySettings) -> None:
        StepFleet.__init__(self, workload, settings)
        self._splitting: dict[str, SplitWorker] = {}

    def _new(self, member: WorkerMember, model: EngineModel, cache: HashAllocator) -> SplitWorker:
        objective, peers = self._objective(model), self._splitting
        worker = peers[member.url] = SplitWorker(
            member, model, cache, self._settings.report_s, objective=objective, peers=peers
        )
        return worker


class SplitReplay(StepReplay):
    fleet_type = SplitFleet

    @property
    def num_splits(self) -> int:
        return self._gaps.total()

    def _admitted(self, worker: StepWorker, job: Job) -> None:
        assert isinstance(worker, SplitWorker)
        if job.loaded_s > self._now_s:
            self._at(job.loaded_s, partial(self._arrived, worker, job))
        else:
            self._begun(worker, job)

    def _arrived(self, worker: SplitWorker, job: Job) -> None:
        worker.arrived(job)
        self._begun(worker, job)
        self._begin(worker)

    def _begun(self, worker: SimulatedWorker, job: Job) -> None:
        found = self._cached.get(job.request.number)
        StepReplay._begun(self, worker, job)
        if job.is_rest and found is not None:
            self._cached[job.request.number] = found

    def _first_token(self, job: Job) -> None:
        if not job.is_rest:
            StepReplay._first_token(self, job)
            return
        self._scorers[job.gateway].first_token(job.placement)
        gap_s = self._now_s - job.arrival_s - self._ttft_s[job.request.number]
        self._gaps[round(gap_s / TICK_S)] += 1

    def _ended(self, worker: StepWorker, job: Job) -> None:
        if not job.placement.is_split:
            StepReplay._ended(self, worker, job)
            return
        worker.finish_decode(job, self._now_s)
        self._close(job)
        request, member = job.request, worker.member
        route = RouteRequest(
            str(request.number),
            MODEL,
            request.num_prompt_tokens,
            request.hashes,
            numerics=member.numerics,
            prefilled_at=(member.worker_id, member.epoch),
        )
        scorer = self._scorers[job.gateway]
        placement = scorer.place(scorer.decide(route, self._candidates(request)))
        rest = Job(request, job.gateway, job.arrival_s, placement, job.session, job.turn, is_rest=True)
        rest.observed = job.observed
        self._jobs[rest] = None
        target = self._workers[placement.worker.worker_id]
        target.submit(rest, self._now_s)
        self._begin(target)
