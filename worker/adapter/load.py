"""The load of an engine as one `WorkerLoad`: the adapter's own account of its requests, and the engine's counts.

An engine does not report its queue. So the adapter keeps the requests without a first token in the order in which it
sent them: the engine prefills first come, first served. The prefill rate is measured between two first tokens while
requests wait.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from cache.records import WorkerLoad
from cache.types import GatewayId
from worker.adapter.api import EngineLoad
from worker.contracts.engine import RequestKey
from worker.contracts.rates import PrefillRate, QueuePace, StartInterval

MIN_MEASURED_TOKENS: Final = 32
"""Shorter prefills would measure the overhead of a request."""


@dataclass(slots=True, eq=False)
class Prefill:
    """A request without a first token."""

    key: RequestKey
    gateway_id: GatewayId
    num_tokens: int
    """Tokens to compute: the prompt without its cached prefix."""
    sent_s: float
    started_s: float | None = None
    """When its prefill began, by the adapter's estimate."""


class LoadAccount:
    """Counts this adapter's requests, from `send` to `first_token` or `drop`. Owned by the event loop."""

    def __init__(self) -> None:
        self.rate = PrefillRate()
        self.starts = StartInterval()
        self.num_open_choices = 0
        """Choices at the engine."""
        self._prefills: dict[Prefill, None] = {}
        self._assigned_s = 0.0
        self._free_s = 0.0
        """When the engine last ended a prefill, or gave it up."""

    def begin_epoch(self) -> None:
        """Reset the assigned seconds."""
        self._assigned_s = 0.0

    def seed_rate(self, engine: EngineLoad) -> None:
        """Start with the rate of the engine's own totals, until one is measured."""
        if self.rate.tokens_per_s == 0.0 and engine.prefill_s > 0.0:
            self.rate = PrefillRate(int(engine.prefill_tokens), engine.prefill_s)

    def send(self, key: RequestKey, gateway_id: str, num_tokens: int) -> Prefill:
        """Count a request that is sent to the engine now."""
        prefill = Prefill(key, GatewayId(gateway_id), num_tokens, time.monotonic())
        self._prefills[prefill] = None
        self._assigned_s += self.rate.seconds(num_tokens)
        return prefill

    def start_first(self) -> Prefill | None:
        """Start the first prefill in line and return it; None if it was started before, or none waits."""
        first = next(iter(self._prefills), None)
        if first is None or first.started_s is not None:
            return None
        now_s = time.monotonic()
        first.started_s = max(first.sent_s, self._free_s)
        self.starts.record(1, len(self._prefills) - 1, now_s)
        return first

    def first_token(self, prefill: Prefill) -> None:
        """End a prefill, and measure the rate if it was the first in line: only that one was started."""
        if prefill not in self._prefills:
            return
        del self._prefills[prefill]
        now_s = time.monotonic()
        if prefill.started_s is not None and prefill.num_tokens >= MIN_MEASURED_TOKENS:
            self.rate.add(prefill.num_tokens, max(1e-6, now_s - prefill.started_s), now_s)
        self._free_s = now_s

    def drop(self, prefill: Prefill) -> None:
        """Forget a prefill that has ended without a token."""
        if prefill in self._prefills:
            del self._prefills[prefill]
            if prefill.started_s is not None:
                self._free_s = time.monotonic()

    def seconds_left(self) -> float:
        """Return the time until the last prefill in line has probably ended."""
        first, *others = self._prefills
        now_s = time.monotonic()
        first_s = max(0.0, self.rate.seconds(first.num_tokens) - (now_s - (first.started_s or now_s)))
        return first_s + sum(self.rate.seconds(prefill.num_tokens) for prefill in others)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute behind the first prefill in line."""
        return sum(prefill.num_tokens for prefill in list(self._prefills)[1:])

    @property
    def pace(self) -> QueuePace:
        """How fast the queue drains. The rate is that of single prefills, and an engine computes several at once."""
        return QueuePace(self.starts.sure_s(time.monotonic()))

    def current(self, engine: EngineLoad | None, block_size: int, draining: bool, is_slow: bool = False) -> WorkerLoad:
        """Return the load. `engine`: its counts as last read; `block_size`: this worker's."""
        queued: dict[GatewayId, float] = defaultdict(float)
        for prefill in self._prefills:
            queued[prefill.gateway_id] += self.rate.seconds(prefill.num_tokens)
        num_waiting = max(0, len(self._prefills) - 1)
        num_running = self.num_open_choices - num_waiting
        num_blocks = num_free = 0
        if engine is not None:
            num_running, num_waiting = max(num_running, engine.num_running), max(num_waiting, engine.num_waiting)
            num_blocks = engine.num_blocks * engine.block_size // block_size
            num_free = int(num_blocks * (1.0 - min(1.0, engine.usage)))
        return WorkerLoad(
            queued_prefill_s=dict(queued),
            assigned_prefill_s=self._assigned_s,
            prefill_tokens_per_s=self.rate.tokens_per_s,
            num_running=max(0, num_running),
            num_waiting=num_waiting,
            num_free_blocks=num_free,
            num_blocks=num_blocks,
            draining=draining,
            start_interval_s=self.starts.mean_s,
            is_slow=is_slow,
        )
