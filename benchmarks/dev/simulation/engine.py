"""The simulated worker: FIFO, one prefill at a time with decodes next to it, and the real allocator as its KV cache.

    prefill   (10 ms + uncached tokens / rate), 1 % slower per decoding request
    decode    output tokens x (12 ms + 0.25 ms x batch)

A prompt's blocks are looked up when its prefill begins, and findable when it ends. They are pinned until the decode has
ended, and evicted tail first. Generated tokens are not cached, but where the workload keeps answers: their blocks are
taken with the prompt's, and findable when the decode ends.
Source: the model of docs/routing.md, which the reference figures were made with.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from benchmarks.dev.simulation.outcomes import Observed
from benchmarks.dev.simulation.traces import ROOT, Session, TraceRequest
from cache.allocators.base import Allocation
from cache.allocators.hash import HashAllocator
from cache.records import WorkerLoad, WorkerMember
from cache.types import GatewayId
from server.router.placement import Placement
from worker.adapter.prefill_line import PrefillLine


@dataclass(frozen=True, slots=True)
class EngineModel:
    prefill_tokens_per_s: float
    block_size: int
    request_s: float = 0.01
    slowdown_per_decode: float = 0.01
    decode_step_s: float = 0.012
    decode_step_per_request_s: float = 0.00025
    fetch_tokens_per_s: float = 0.0
    """Blocks of a peer, over an idle link; 0.0: it fetches none."""
    tier_tokens_per_s: tuple[float, ...] = ()
    """Blocks of the tier below the pool, if there is one."""

    def prefill_s(self, num_tokens: int, num_decoding: int) -> float:
        alone_s = self.request_s + num_tokens / self.prefill_tokens_per_s
        return alone_s * (1.0 + self.slowdown_per_decode * num_decoding)

    def at_speed(self, speed: float) -> EngineModel:
        """Return a worker of `speed` times this one's."""
        return replace(
            self,
            prefill_tokens_per_s=speed * self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s / speed,
            decode_step_per_request_s=self.decode_step_per_request_s / speed,
        )

    def decode_s(self, num_tokens: float, batch: int) -> float:
        return num_tokens * (self.decode_step_s + self.decode_step_per_request_s * batch)


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through a worker."""

    request: TraceRequest
    gateway: GatewayId
    arrival_s: float
    placement: Placement
    session: Session
    turn: int
    left_share: float = 1.0
    """The part of the answer to come: a request whose worker has died has some of it."""
    estimate_s: float = 0.0
    allocation: Allocation | None = None
    num_cached_tokens: int = 0
    started_s: float = 0.0
    prefill_s: float = 0.0
    left_s: float = 0.0
    """Part of `prefill_s` that is left, at a worker that shares its time."""
    loaded_s: float = 0.0
    """When the blocks that it loads and fetches have arrived."""
    room_wait_s: float = 0.0
    """How long it has waited because the pool had no room, for it or for those before it."""
    decode_start_s: float = 0.0
    decode_s: float = 0.0
    observed: Observed | None = None


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """Time is the replay's: it calls `begin`, `finish_prefill` and `finish_decode` when they are due."""

    member: WorkerMember
    model: EngineModel
    cache: HashAllocator
    report_s: float
    """How often the load is reported."""
    passes: bool = False
    """Later requests pass one that does not fit. Our workers do not do this: a bound may."""
    queue: deque[Job] = field(default_factory=deque)
    serving: Job | None = None
    num_decoding: int = 0
    busy_s: float = 0.0
    assigned_s: float = 0.0
    load: WorkerLoad = field(default_factory=WorkerLoad)
    load_s: float = 0.0
    line: PrefillLine = field(default_factory=PrefillLine)
    """As its adapter measures it: slower next to decodes."""
    rate_error: float = 1.0
    """The prefill rate that it assumes, over the one that it measures."""
    rate_delay_s: float = 0.0
    """How late it reports its rate."""
    rates: deque[tuple[float, float, float]] = field(default_factory=deque)
    """(time, rate, fixed part) of the last `rate_delay_s`."""
    is_dead: bool = False
    """Nothing that was planned happens any more."""
    blocked_since_s: float | None = None
    """When the queue last began to wait for room; None while it does not."""
    blocked_s: float = 0.0
    """How long it has waited for room before."""

    def submit(self, job: Job, now_s: float) -> None:
        self.report(now_s)
        job.room_wait_s = -self.total_blocked_s(now_s)
        num_tokens = job.request.num_prompt_tokens - self.num_reusable_tokens(job)
        job.estimate_s = self.line.seconds(num_tokens) / self.rate_error
        self.assigned_s += job.estimate_s
        self.queue.append(job)

    def num_reusable_tokens(self, job: Job) -> int:
        """Return how many tokens it would not compute if it began now."""
        request = job.request
        return self.cache.find(request.block_ids, ROOT, hashes=request.chain) * self.model.block_size

    def begin(self, now_s: float) -> Job | None:
        """Take the next request into service if there is one and it fits; its prefill ends after `prefill_s`."""
        if self.serving is not None or not self.queue:
            return None
        job = self.take(now_s)
        if job is None:
            return None
        self.serving = job
        job.started_s = now_s
        job.prefill_s = self.model.prefill_s(job.request.num_prompt_tokens - job.num_cached_tokens, self.num_decoding)
        self.busy_s += job.prefill_s
        return job

    def take(self, now_s: float) -> Job | None:
        """Take the next request that fits from the queue, with its blocks; None: none fits."""
        lacks_room = False
        for at, job in enumerate(self.queue):
            if self.awaits_prefix(job):
                continue
            if self.allocate(job):
                self.report(now_s)
                job.room_wait_s += self.total_blocked_s(now_s)
                del self.queue[at]
                self._block(False, now_s)
                return job
            lacks_room = True
            if not self.passes:
                break
        self._block(lacks_room, now_s)
        return None

    def awaits_prefix(self, job: Job) -> bool:
        """Return whether the request waits until another one has computed its prefix."""
        return False

    def allocate(self, job: Job) -> bool:
        """Give a request its blocks, those cached first. False: they do not fit."""
        request, num_blocks = job.request, len(job.request.block_ids) + len(job.request.answer_ids)
        assert num_blocks < self.cache.num_blocks, "a prompt larger than the pool"
        job.allocation = self.cache.allocate(num_blocks, request.block_ids, ROOT, hashes=request.chain)
        if job.allocation is not None:
            job.num_cached_tokens = job.allocation.num_cached_tokens * self.model.block_size
        return job.allocation is not None

    def total_blocked_s(self, now_s: float) -> float:
        return self.blocked_s + (0.0 if self.blocked_since_s is None else now_s - self.blocked_since_s)

    def _block(self, waits: bool, now_s: float) -> None:
        if not waits:
            self.blocked_s, self.blocked_since_s = self.total_blocked_s(now_s), None
        elif self.blocked_since_s is None:
            self.blocked_since_s = now_s

    def finish_prefill(self, now_s: float) -> Job:
        """The first token is out; the decode ends after `decode_s` of the batch there is now."""
        self.report(now_s)
        job = self.serving
        assert job is not None
        assert job.allocation is not None
        self.serving = None
        self.line.add(job.request.num_prompt_tokens - job.num_cached_tokens, job.prefill_s, now_s)
        self.num_decoding += 1
        job.allocation.commit(job.request.block_ids, len(job.request.hashes))
        return job

    def finish_decode(self, job: Job, now_s: float) -> None:
        self.report(now_s)
        self.num_decoding -= 1
        assert job.allocation is not None
        if answer_ids := job.request.answer_ids:
            token_ids = [*job.request.block_ids, *answer_ids]
            job.allocation.commit(token_ids, len(token_ids))
        job.allocation.free()

    def unfinished(self, now_s: float) -> list[tuple[Job, float]]:
        """The prefills in service, and the seconds of each that are left."""
        job = self.serving
        return [] if job is None else [(job, max(0.0, job.prefill_s - (now_s - job.started_s)))]

    def report(self, now_s: float) -> None:
        """Bring the report up to date: the state has not changed since the last point of its grid of times."""
        at_s = now_s // self.report_s * self.report_s if self.report_s else now_s
        if at_s <= self.load_s:
            return
        queued: dict[GatewayId, float] = {}
        for job in self.queue:
            queued[job.gateway] = queued.get(job.gateway, 0.0) + job.estimate_s
        for job, left_s in self.unfinished(at_s):
            queued[job.gateway] = queued.get(job.gateway, 0.0) + left_s
        self.load_s = at_s
        self.rates.append((at_s, self.line.tokens_per_s, self.line.fixed_s if self.line.is_split else 0.0))
        while len(self.rates) > 1 and self.rates[1][0] <= at_s - self.rate_delay_s:
            self.rates.popleft()
        measured_s, tokens_per_s, fixed_s = self.rates[0]
        if measured_s > at_s - self.rate_delay_s:
            tokens_per_s = fixed_s = 0.0  # none is as old
        self.load = WorkerLoad(
            queued_prefill_s=queued,
            assigned_prefill_s=self.assigned_s,
            prefill_tokens_per_s=self.rate_error * tokens_per_s,
            prefill_fixed_s=fixed_s,
            num_running=self.num_decoding + len(self.unfinished(at_s)),
            num_waiting=len(self.queue),
            num_free_blocks=self.cache.num_free_blocks,
            num_blocks=self.cache.num_blocks,
            tier_tokens_per_s=self.model.tier_tokens_per_s,
            fetch_tokens_per_s=self.model.fetch_tokens_per_s,
        )
