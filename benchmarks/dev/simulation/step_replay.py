"""A replay whose workers run in steps of tokens (`step_engine`), and the times between tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.dev.simulation.engine import EngineModel, Job, SimulatedWorker
from benchmarks.dev.simulation.fleet import MODEL, ReplaySettings
from benchmarks.dev.simulation.outcomes import Outcome
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.step_engine import TICK_S, StepWorker
from benchmarks.dev.simulation.traces import Workload
from cache.allocators.hash import HashAllocator
from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from server.router.policies import Policy
from worker.scheduler.step_objective import StepObjective

MAX_TTFT_S: Final = 2.0
MAX_TOKEN_S: Final = 0.05
"""Most seconds to the first token and, in the mean, of each later one: a request within both is served well."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    outcome: Outcome
    itl_p50_s: float
    itl_p99_s: float
    within: float
    """Share of requests within 2 s to the first token and 50 ms a token."""


class StepReplay(Replay):
    """Without fetches and tiers, and not pooled."""

    def __init__(
        self,
        workload: Workload,
        make_policy: Callable[[], Policy],
        settings: ReplaySettings,
        max_step_s: float | None = None,
    ) -> None:
        self._max_step_s = max_step_s
        self._step_workers: list[StepWorker] = []
        self._versions: Counter[str] = Counter()
        """Plans of each worker's step ends; only the last one counts."""
        self._token_s: dict[int, float] = {}
        Replay.__init__(self, workload, make_policy, settings)

    def token_times(self) -> TokenTimes:
        """Run, once."""
        outcome = self.run()
        scored = self._arrivals[int(len(self._arrivals) * self._settings.warmup_share) :]
        times: Counter[int] = Counter()
        for worker in self._step_workers:
            times.update(worker.token_times)
        within = [self._ttft_s[n] <= MAX_TTFT_S and self._token_s[n] <= MAX_TOKEN_S for n in scored]
        return TokenTimes(outcome, quantile(times, 0.5), quantile(times, 0.99), sum(within) / len(within))

    def _make_worker(self) -> SimulatedWorker:
        settings, workload, number = self._settings, self._workload, len(self._step_workers)
        model = EngineModel(workload.prefill_tokens_per_s, workload.block_size)
        objective = None
        if self._max_step_s is not None:
            token_s = 1.0 / model.prefill_tokens_per_s
            objective = StepObjective(self._max_step_s, 16, token_s, model.decode_step_s / token_s)
        name, epoch = f"worker-{number:02}", Epoch(f"{number:016x}")
        member = WorkerMember(
            WorkerId(name), epoch, f"http://{name}", MODEL, "", "simulated", workload.block_size, 1 << 30, 1
        )
        pool = HashAllocator(int(workload.num_distinct_blocks * settings.cache_share) // settings.num_workers + 1, 1)
        worker = StepWorker(member, model, pool, settings.report_s, objective=objective)
        self._step_workers.append(worker)
        return worker

    def _begin(self, worker: SimulatedWorker) -> None:
        assert isinstance(worker, StepWorker)
        if worker.steps is None:
            for job in worker.admit(self._now_s):
                self._begun(worker, job)
            self._end_at(worker, worker.begin_step(self._now_s))
        else:
            self._end_at(worker, worker.interrupted(self._now_s))

    def _end_at(self, worker: StepWorker, end_s: float | None) -> None:
        if end_s is None:
            return
        self._versions[worker.member.worker_id] += 1
        self._at(end_s, partial(self._end_step, worker, self._versions[worker.member.worker_id]))

    def _end_step(self, worker: StepWorker, version: int) -> None:
        if version != self._versions[worker.member.worker_id]:
            return
        first, last = worker.end_step(self._now_s)
        self._publish(worker)
        for job in first:
            self._first_token(job)
        for job in last:
            ttft_s, num_later = self._ttft_s[job.request.number], job.request.num_output_tokens - 1
            decode_s = self._now_s - job.arrival_s - ttft_s
            self._token_s[job.request.number] = decode_s / num_later if num_later > 0 else 0.0
            self._decoded(worker, job)
        if worker.steps is None:
            self._begin(worker)

    def _first_token(self, job: Job) -> None:
        placement = job.placement
        self._scorers[job.gateway].first_token(placement)
        self._ttft_s[job.request.number] = self._now_s - job.arrival_s
        self._predicted[job.request.number] = placement.predicted_ttft_s / max(1e-9, self._now_s - placement.placed_s)


def quantile(times: Counter[int], share: float) -> float:
    """Return the time that this share of tokens stays within."""
    left = share * times.total()
    for tick in sorted(times):
        left -= times[tick]
        if left <= 0:
            return tick * TICK_S
    return 0.0
