"""The simulated worker in steps of tokens: every decode and some prefill in each, shared out by the worker's own code.

    step      12 ms + 0.25 ms a decode + prefill tokens / rate
    prefill   of at most 2,048 tokens a step, less where an objective bounds the step (`worker.scheduler`)

So a token waits for the prefill in its step, which the other engines here do not show. All else is as in `engine`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from benchmarks.dev.simulation.engine import Job, SimulatedWorker
from worker.scheduler.budget import BatchLimits, PrefillBudget
from worker.scheduler.step_objective import StepObjective

TICK_S: Final = 1e-4
"""Times between tokens are counted in steps of this."""


@dataclass(slots=True, eq=False)
class Running:
    """A request out of the queue."""

    job: Job
    num_pending: int
    """Prompt tokens to compute; 0: it decodes."""
    num_left: int
    """Output tokens after the first."""
    taken: int = 0
    """Prompt tokens in the step that runs."""

    @property
    def position(self) -> int:
        return self.job.request.num_prompt_tokens - self.num_pending


@dataclass(slots=True, eq=False)
class StepWorker(SimulatedWorker):
    """The replay calls `begin_step` when none runs, and `end_step` at the step's end."""

    limits: BatchLimits = field(default_factory=lambda: BatchLimits(max_num_seqs=512))
    objective: StepObjective | None = None
    running: list[Running] = field(default_factory=list)
    token_times: Counter[int] = field(default_factory=Counter)
    """Tokens by the time since the one before, in ticks."""
    steps: tuple[float, float, int] | None = None
    """When the steps that run began, how long each takes, and their number: above 1 only without a prefill."""
    version: int = 0
    """Another number after every plan of their end: only the last one counts."""

    def admit(self, now_s: float) -> list[Job]:
        """Take from the queue what fits into the pool."""
        admitted = []
        while self.queue and len(self.running) < self.limits.max_num_seqs and (job := self.take(now_s)) is not None:
            request = job.request
            job.num_cached_tokens = min(job.num_cached_tokens, request.num_prompt_tokens - 1)
            job.started_s = now_s
            self.start(job)
            admitted.append(job)
        return admitted

    def start(self, job: Job) -> None:
        """Add the request to the steps."""
        num_tokens = job.request.num_prompt_tokens - job.num_cached_tokens
        self.running.append(Running(job, num_tokens, max(0, job.request.num_output_tokens - 1)))

    def begin_step(self, now_s: float) -> float | None:
        """Plan a step, or the steps up to the next end of a decode; return when they end, or None without work."""
        prefills = [each for each in self.running if each.num_pending]
        decodes = [each for each in self.running if not each.num_pending]
        if not self.running:
            return None
        budget = PrefillBudget.for_step(
            self.limits, num_decodes=len(decodes), num_prefills=len(prefills), objective=self.objective
        )
        others = sorted(prefills[1:], key=lambda each: each.num_pending)
        for each in prefills[:1]:
            each.taken = budget.take(each.num_pending, each.position, budget.oldest_share if others else None)
        for each in (*others, *prefills[:1]):
            each.taken += budget.take(each.num_pending - each.taken, each.position + each.taken)
        num_tokens = sum(each.taken for each in prefills)
        model = self.model
        step_s = model.decode_step_s + model.decode_step_per_request_s * len(decodes)
        step_s += num_tokens / model.prefill_tokens_per_s
        self.busy_s += num_tokens / model.prefill_tokens_per_s
        num_steps = 1 if prefills else max(1, min(each.num_left for each in decodes))
        self.steps = now_s, step_s, num_steps
        return now_s + num_steps * step_s

    def interrupted(self, now_s: float) -> float | None:
        """End after the step that runs, so that a new request joins; return when. None: that is planned already."""
        if self.steps is None or self.steps[2] == 1:
            return None
        begun_s, step_s, num_steps = self.steps
        num_steps = min(num_steps, int((now_s - begun_s) / step_s) + 1)
        self.steps = begun_s, step_s, num_steps
        return begun_s + num_steps * step_s

    def end_step(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Return the requests whose first token came, and those whose last one did."""
        assert self.steps is not None
        (_, step_s, num_steps), self.steps = self.steps, None
        self.report(now_s)
        prefills = [range(each.position, each.position + each.taken) for each in self.running if each.taken]
        decodes = [each for each in self.running if not each.num_pending]
        if self.objective is not None:
            self.objective.measure(len(decodes), prefills, step_s)
        if decodes:
            self.token_times[round(step_s / TICK_S)] += num_steps * len(decodes)
        first, last = [], [each.job for each in decodes if each.num_left <= num_steps]
        for each in decodes:
            each.num_left -= num_steps
        for each in self.running:
            if each.taken:
                each.num_pending -= each.taken
                each.taken = 0
                if not each.num_pending:
                    self.num_decoding += 1
                    self._commit(each.job)
                    first.append(each.job)
                    last += [each.job] if each.num_left == 0 else []
        self.running = [each for each in self.running if each.num_pending or each.num_left > 0]
        return first, last

    def report(self, now_s: float) -> None:
        """As a worker with an objective reports: at its lower rate while decodes run."""
        before_s = self.load_s
        SimulatedWorker.report(self, now_s)
        num_decodes = sum(not each.num_pending for each in self.running)
        if self.load_s == before_s or self.objective is None or not num_decodes:
            return
        bounded = self.objective.prefill_tokens_per_s(num_decodes, self.limits.max_num_batched_tokens - num_decodes)
        slower = max(1.0, self.model.prefill_tokens_per_s / bounded)
        queued = {gateway: slower * seconds for gateway, seconds in self.load.queued_prefill_s.items()}
        self.load = replace(self.load, bounded_prefill_tokens_per_s=bounded, queued_prefill_s=queued)

    def unfinished(self, now_s: float) -> list[tuple[Job, float]]:
        rate = self.model.prefill_tokens_per_s
        return [(each.job, each.num_pending / rate) for each in self.running if each.num_pending]

    def _commit(self, job: Job) -> None:
        assert job.allocation is not None
        job.allocation.commit(job.request.block_ids, len(job.request.hashes))
