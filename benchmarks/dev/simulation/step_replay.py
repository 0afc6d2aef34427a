"""A replay whose workers run in steps of tokens (`step_engine`), and the times between tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.dev.simulation.engine import EngineModel, Job, SimulatedWorker
from benchmarks.dev.simulation.fleet import Fleet, ReplaySettings
from benchmarks.dev.simulation.outcomes import Outcome
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.step_engine import TICK_S, StepWorker
from benchmarks.dev.simulation.traces import Workload
from cache.allocators.hash import HashAllocator
from cache.records import WorkerMember
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


class StepFleet(Fleet):
    """Makes workers whose steps are bounded."""

    def _new(self, member: WorkerMember, model: EngineModel, cache: HashAllocator) -> StepWorker:
        settings, objective = self._settings, None
        if settings.max_step_s is not None:
            token_s = 1.0 / model.prefill_tokens_per_s
            objective = StepObjective(settings.max_step_s, 16, token_s, model.decode_step_s / token_s)
        return StepWorker(member, model, cache, settings.report_s, objective=objective)


class StepReplay(Replay):
    """Shared engine, without fetches and tiers, and not pooled."""

    fleet_type = StepFleet

    def __init__(self, workload: Workload, make_policy: Callable[[], Policy], settings: ReplaySettings) -> None:
        Replay.__init__(self, workload, make_policy, settings)
        self._token_s: dict[int, float] = {}

    def token_times(self) -> TokenTimes:
        """Run, once."""
        outcome = self.run()
        scored = self._arrivals[int(len(self._arrivals) * self._settings.warmup_share) :]
        times: Counter[int] = Counter()
        for worker in self._workers.values():
            assert isinstance(worker, StepWorker)
            times.update(worker.token_times)
        within = [self._ttft_s[n] <= MAX_TTFT_S and self._token_s[n] <= MAX_TOKEN_S for n in scored]
        return TokenTimes(outcome, quantile(times, 0.5), quantile(times, 0.99), sum(within) / len(within))

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
        worker.version += 1
        self._at(end_s, partial(self._end_step, worker, worker.version))

    def _end_step(self, worker: StepWorker, version: int) -> None:
        if version != worker.version:
            return
        first, last = worker.end_step(self._now_s)
        self._publish(worker)
        for job in first:
            self._first_token(job)
        for job in last:
            self._ended(worker, job)
        if worker.steps is None:
            self._begin(worker)

    def _ended(self, worker: StepWorker, job: Job) -> None:
        ttft_s, num_later = self._ttft_s[job.request.number], job.request.num_output_tokens - 1
        decode_s = self._now_s - job.arrival_s - ttft_s
        self._token_s[job.request.number] = decode_s / num_later if num_later > 0 else 0.0
        self._decoded(worker, job)


def quantile(times: Counter[int], share: float) -> float:
    """Return the time that this share of tokens stays within."""
    left = share * times.total()
    for tick in sorted(times):
        left -= times[tick]
        if left <= 0:
            return tick * TICK_S
    return 0.0
