"""The reports of the engine thread: cache events, load and the state of its queues.

The load is queued prefill seconds per gateway, and the measured prefill rate. Seconds are tokens over that rate. A
request counts from its arrival to its first token, with the tokens that it still has to compute. Source:
docs/routing.md; a gateway subtracts its own share from `queued_prefill_s`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember
from cache.types import GatewayId
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate, QueuePace, StartInterval
from worker.kv_transfer.transfers import KVTransfers
from worker.publishing.inbox import PublisherInbox
from worker.scheduler.admission import num_growth_blocks
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import Request, TokenSequence
from worker.scheduler.scheduler import Scheduler

REPORT_INTERVAL_S: Final = 0.05  # as often as the publisher sends


@dataclass(eq=False)
class Reporter:
    """Reports cache events and load, on the engine thread. Its counters cover one epoch."""

    _scheduler: Scheduler
    rate: PrefillRate
    _metrics: WorkerMetrics
    _transfers: KVTransfers | None = None
    _publisher: PublisherInbox | None = None
    starts: StartInterval = field(default_factory=StartInterval, init=False)
    draining: bool = field(default=False, init=False)
    """Report as draining. Any thread may set it."""
    load: WorkerLoad = field(default_factory=WorkerLoad, init=False)
    """As last reported. Frozen: any thread may read it."""
    pace: QueuePace = field(default_factory=QueuePace, init=False)
    """As of the last report. Frozen, too."""
    _assigned_s: float = field(default=0.0, init=False)
    _reported_s: float = field(default=0.0, init=False)

    def assign(self, request: Request) -> None:
        """Count a submitted request."""
        self._assigned_s += self.rate.seconds(request.num_uncached_tokens)

    def measure(self, plan: StepPlan, duration_s: float, now_s: float) -> None:
        """Take the duration of a step that ended at `now_s`. Steps that mostly decode do not measure prefill."""
        if plan.num_prefill_tokens and 2 * plan.num_prefill_tokens > plan.num_tokens:
            self.rate.add(plan.num_tokens, duration_s, now_s)

    def report_if_due(self) -> None:
        """Report the load if the last report is REPORT_INTERVAL_S old, and the changes of the pool at once."""
        events = self._scheduler.allocator.take_events()
        if time.monotonic() - self._reported_s >= REPORT_INTERVAL_S:
            self._report(events)
        elif events:
            self._offer(events)

    def report(self) -> None:
        """Report events and load at once."""
        self._report(self._scheduler.allocator.take_events())

    def begin_epoch(self, member: WorkerMember) -> None:
        """Reset the assigned seconds, and report the emptied pool under the epoch of `member`."""
        self._assigned_s = 0.0
        if self._publisher is not None:
            self._publisher.begin_epoch(member)
        self.report()

    def _report(self, events: Sequence[BlockEvent]) -> None:
        self._reported_s = time.monotonic()
        self.load = self._current_load()
        self.pace = QueuePace(self.starts.sure_s(self._reported_s), self._waiting_prefill_s())
        self._metrics.set_state(self.load, self._scheduler.allocator.stats())
        self._metrics.running_max_tokens.set(
            sum(len(sequence.choices) * sequence.request.max_total_tokens for sequence in self._scheduler.running)
        )
        self._metrics.queued_tokens.set(sum(sequence.num_pending for sequence in self._scheduler.waiting))
        self._offer(events)

    def _offer(self, events: Sequence[BlockEvent]) -> None:
        if self._publisher is not None:
            self._publisher.offer(events, self.load)
        if self._transfers is not None:
            self._transfers.take(events)

    def _current_load(self) -> WorkerLoad:
        scheduler, allocator = self._scheduler, self._scheduler.allocator
        queued: dict[GatewayId, float] = defaultdict(float)
        for request in scheduler.requests.values():
            if request.first_token_s is None:
                queued[GatewayId(request.wire.gateway_id)] += self.rate.seconds(_num_tokens_left(request))
        growth_blocks = sum(num_growth_blocks(sequence, allocator) for sequence in scheduler.running)
        load = WorkerLoad(
            queued_prefill_s=dict(queued),
            assigned_prefill_s=self._assigned_s,
            prefill_tokens_per_s=self.rate.tokens_per_s,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=max(0, allocator.num_free_blocks - growth_blocks),
            num_blocks=allocator.num_blocks,
            draining=self.draining,
            start_interval_s=self.starts.mean_s,
            prefill_fixed_s=self.rate.seconds(1) * self.rate.step_tokens,
        )
        return load if self._transfers is None else self._transfers.with_rates(load)

    def _waiting_prefill_s(self) -> float:
        """Return the least time until all that wait have started: of a long prompt, only the first chunk counts."""
        most, requests = self._scheduler.limits.max_num_batched_tokens // 4, self._scheduler.requests.values()
        num_tokens = sum(min(most, request.num_uncached_tokens) for request in requests if request.started_s is None)
        return self.rate.seconds(num_tokens)


def _num_tokens_left(request: Request) -> int:
    """Count the uncached tokens left before the first token, which comes from the first sequence."""
    if request.started_s is None:
        return request.num_uncached_tokens
    return request.sequences[0].num_pending if request.sequences else 0


def debug_state(scheduler: Scheduler) -> dict[str, Any]:
    """Return the queues, block tables and pool counts as JSON values."""
    return {
        "pool": asdict(scheduler.allocator.stats()),
        "running": [_sequence_state(sequence) for sequence in scheduler.running],
        "waiting": [_sequence_state(sequence) for sequence in scheduler.waiting],
        "num_requests": len(scheduler.requests),
    }


def _sequence_state(sequence: TokenSequence) -> dict[str, Any]:
    request = sequence.request
    return {
        "request_id": request.wire.request_id,
        "gateway_id": request.wire.gateway_id,
        "choices": [choice.index for choice in sequence.choices],
        "num_prompt_tokens": len(request.prompt_ids),
        "num_tokens": len(sequence.token_ids),
        "num_computed": sequence.num_computed,
        "num_cached_tokens": request.num_cached_tokens,
        "block_table": [] if sequence.allocation is None else list(sequence.allocation.block_table),
        "priority": request.wire.priority,
    }
