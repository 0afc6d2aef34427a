"""What the worker reports of its load: the prefill seconds that it owes, to whom, and how fast it pays.

Seconds are tokens over the measured prefill rate. A request counts from its arrival to its first token, with what is
left of it to compute, so the one in service shrinks with every chunk.
Source: docs/routing.md; the books of a gateway take `queued_prefill_s` less its own share.
"""

from __future__ import annotations

from collections import defaultdict

from cache.records import WorkerLoad
from cache.types import GatewayId
from worker.scheduler.admission import num_growth_blocks
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler

_MEMORY_S = 20.0
"""Seconds of prefilling after which a measurement weighs half."""
_IDLE_MEMORY_S = 120.0
"""Seconds without any after which it does: what has slowed the device may have ended."""
_MEMORY_STARTS = 32
"""Starts after which a measurement weighs half."""


class PrefillRate:
    """Tokens per second over the recent steps that mostly prefilled."""

    __slots__ = ("_duration_s", "_measured_s", "_num_tokens")

    def __init__(self, num_tokens: int = 0, duration_s: float = 0.0) -> None:
        """Begins with a measurement, if there is one."""
        self._num_tokens = float(num_tokens)
        self._duration_s = duration_s
        self._measured_s: float | None = None

    def add(self, num_tokens: int, duration_s: float, now_s: float) -> None:
        """A measurement that ended at `now_s`."""
        idle_s = 0.0 if self._measured_s is None else max(0.0, now_s - duration_s - self._measured_s)
        self._measured_s = now_s
        fade = 0.5 ** (duration_s / _MEMORY_S + idle_s / _IDLE_MEMORY_S)
        self._num_tokens = fade * self._num_tokens + num_tokens
        self._duration_s = fade * self._duration_s + duration_s

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._duration_s if self._duration_s > 0.0 else 0.0

    def seconds(self, num_tokens: int) -> float:
        """0.0 while nothing has been measured."""
        return num_tokens * self._duration_s / self._num_tokens if self._num_tokens > 0.0 else 0.0


class StartInterval:
    """Mean time between two starts while requests wait: how fast the queue drains, whatever the device does."""

    __slots__ = ("_backlog_s", "_duration_s", "_num_started")

    def __init__(self) -> None:
        self._num_started = 0.0
        self._duration_s = 0.0
        self._backlog_s: float | None = None
        """Since when requests have waited without one that started."""

    def note(self, num_started: int, num_waiting: int, now_s: float) -> None:
        """After a step's admission."""
        if num_started and self._backlog_s is not None:
            duration_s = now_s - self._backlog_s
            fade = 0.5 ** (num_started / _MEMORY_STARTS)
            self._num_started = fade * self._num_started + num_started
            self._duration_s = fade * self._duration_s + duration_s
        if num_waiting == 0:
            self._backlog_s = None
        elif num_started or self._backlog_s is None:
            self._backlog_s = now_s

    @property
    def mean_s(self) -> float:
        """0.0 while nothing has been measured."""
        return self._duration_s / self._num_started if self._num_started else 0.0


class LoadReport:
    """Keeps the counters of one epoch; used by the engine's thread."""

    __slots__ = ("_assigned_s", "rate", "starts")

    def __init__(self, rate: PrefillRate) -> None:
        self.rate = rate
        self.starts = StartInterval()
        self._assigned_s = 0.0

    def begin_epoch(self) -> None:
        self._assigned_s = 0.0

    def assign(self, request: Request) -> None:
        """The request was submitted."""
        self._assigned_s += self.rate.seconds(request.num_uncached_tokens)

    def measure(self, plan: StepPlan, duration_s: float, now_s: float) -> None:
        """The plan's step took `duration_s`, until `now_s`. Steps that mostly decode say nothing about prefilling."""
        num_tokens = plan.num_tokens
        if 2 * plan.num_prefill_tokens > num_tokens:
            self.rate.add(num_tokens, duration_s, now_s)

    def report(self, scheduler: Scheduler, *, draining: bool) -> WorkerLoad:
        queued: dict[GatewayId, float] = defaultdict(float)
        for request in scheduler.requests.values():
            if request.first_token_s is None:
                queued[GatewayId(request.wire.gateway_id)] += self.rate.seconds(_tokens_left(request))
        allocator = scheduler.allocator
        growth_blocks = sum(num_growth_blocks(sequence, allocator) for sequence in scheduler.running)
        return WorkerLoad(
            queued_prefill_s=dict(queued),
            assigned_prefill_s=self._assigned_s,
            prefill_tokens_per_s=self.rate.tokens_per_s,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=max(0, allocator.num_free_blocks - growth_blocks),
            num_blocks=allocator.num_blocks,
            draining=draining,
            start_interval_s=self.starts.mean_s,
        )


def _tokens_left(request: Request) -> int:
    """Of its first sequence, which the first token comes from; what is found cached does not count."""
    if request.started_s is None:
        return request.num_uncached_tokens
    return request.sequences[0].num_pending if request.sequences else 0
