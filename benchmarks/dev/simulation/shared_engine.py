"""The simulated worker with our scheduler's order: half of it to the oldest prefill, half to the shortest other.

`worker.scheduler` does this in chunks of a step, the simulation in continuous time: every request begins at once, but
for one whose prefix is being computed for another. Of several prefills the oldest has half of the worker, and the one
with the least left the other half. All else is as in `engine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.dev.simulation.engine import Job, SimulatedWorker
from benchmarks.dev.simulation.traces import ROOT
from cache.types import BlockHash


@dataclass(slots=True, eq=False)
class SharedWorker(SimulatedWorker):
    """The replay calls `admit` when something may begin, `next_end_s` after every change, and `finish_next` then."""

    running: list[Job] = field(default_factory=list)
    num_active: int = 0
    """Requests out of the queue and without a first token: their blocks arrive, or their prefills run."""
    computing: set[BlockHash] = field(default_factory=set)
    """Blocks of requests that run and have no first token."""
    advanced_s: float = 0.0
    version: int = 0
    """Another number after every change: what was planned before is void."""

    def admit(self, now_s: float) -> list[Job]:
        """Take from the queue what fits; the prefill of each begins at its `loaded_s`."""
        self.advance(now_s)
        admitted = []
        while self.queue and (job := self.take(now_s)) is not None:
            job.loaded_s = now_s
            self.fetch(job, now_s)
            admitted.append(job)
            self.num_active += 1
        return admitted

    def awaits_prefix(self, job: Job) -> bool:
        if not self.computing:
            return False
        request = job.request
        return request.chain[self.cache.find(request.block_ids, ROOT, hashes=request.chain)] in self.computing

    def fetch(self, job: Job, now_s: float) -> None:
        """Decide what an admitted request computes."""
        self.computing.update(job.request.hashes[job.num_cached_tokens // self.model.block_size :])

    def start(self, job: Job, now_s: float) -> None:
        """Begin the prefill of an admitted request."""
        self.advance(now_s)
        self.report(now_s)
        job.started_s = now_s
        num_tokens = job.request.num_prompt_tokens - job.num_cached_tokens
        job.prefill_s = job.left_s = self.model.prefill_s(num_tokens, self.num_decoding)
        self.busy_s += job.prefill_s
        self.running.append(job)
        self.version += 1

    def next_end_s(self, now_s: float) -> float | None:
        """When the next prefill ends if nothing comes between."""
        served = self._served()
        return now_s + min(job.left_s for job in served) * len(served) if served else None

    def finish_next(self, now_s: float) -> Job:
        """The prefill that ends now has its first token."""
        self.advance(now_s)
        job = min(self._served(), key=lambda job: job.left_s)
        self.running.remove(job)
        self.num_active -= 1
        self.version += 1
        self.serving = job
        self.computing.difference_update(job.request.hashes)
        return self.finish_prefill(now_s)

    def advance(self, now_s: float) -> None:
        served = self._served()
        for job in served:
            job.left_s = max(0.0, job.left_s - (now_s - self.advanced_s) / len(served))
        self.advanced_s = now_s

    def unfinished(self, now_s: float) -> list[tuple[Job, float]]:
        return [(job, job.left_s) for job in self.running]

    def _served(self) -> list[Job]:
        if len(self.running) < 2:
            return self.running
        return [self.running[0], min(self.running[1:], key=lambda job: job.left_s)]
