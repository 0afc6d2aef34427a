"""The load of an engine as one `WorkerLoad`: the adapter's own account of its requests, and the engine's counts.

An engine does not report its queue. So the adapter keeps the requests without a first token in the order in which it
sent them: the engine prefills first come, first served. Prefills are measured from one first token to the next while
requests wait, else from when they are sent. An engine may compute several in one step: first tokens that come together
end one measurement of all their tokens.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cache.records import WorkerLoad
from cache.types import GatewayId
from worker.adapter.api import EngineLoad
from worker.adapter.prefill_line import Measured, PrefillLine
from worker.contracts.rates import QueuePace, StartInterval

_TOGETHER_S: Final = 0.002
_TOGETHER: Final = 0.05
"""First tokens within this share of the time of their prefills come from one step."""
_UNSEEN_S: Final = 10.0
"""After this time without a first token, the engine's totals measure prefills."""


@dataclass(slots=True)
class Step:
    """First tokens that came together: when the first and the last came, and the tokens of their prefills."""

    first_s: float
    last_s: float
    num_tokens: int
    measured: Measured | None = None


@dataclass(slots=True, eq=False)
class Prefill:
    """A request of which the engine has the prompt."""

    gateway_id: GatewayId
    num_tokens: int
    """Tokens to compute: the prompt without its cached prefix."""
    sent_s: float
    on_start: Callable[[], None]
    """Is called when the engine has reached it."""
    is_seen: bool = True
    """Its first token will be seen: the answer is a stream."""
    started_s: float | None = None
    """When its prefill began, by the adapter's estimate."""
    step: Step | None = None
    """The step that gave its first token, where that measures."""


class LoadAccount:
    """Counts this adapter's requests, from `send` to `first_token` or `drop`. Owned by the event loop."""

    def __init__(self) -> None:
        self.line = PrefillLine()
        self.starts = StartInterval()
        self.num_open_choices = 0
        """Choices at the engine."""
        self._prefills: dict[Prefill, None] = {}
        self._assigned_s = 0.0
        self._free_s = 0.0
        """When the engine last ended a prefill, or gave it up."""
        self._num_unseen = 0
        """Open answers without a first token to see: their prefills may run at any time."""
        self._since_s: float | None = None
        """When the prefills that are measured began; None: unknown."""
        self._step: Step | None = None
        """The last one, until it is measured."""
        self._totals: EngineLoad | None = None
        self._measured_s = -math.inf
        """When a first token last measured prefills."""

    def begin_epoch(self) -> None:
        """Reset the assigned seconds."""
        self._assigned_s = 0.0

    def read(self, engine: EngineLoad) -> None:
        """Take the engine's totals, which bound the rate. Without streams they measure it."""
        before, self._totals = self._totals, engine
        now_s = time.monotonic()
        if before is not None and (num_ended := engine.num_prefills - before.num_prefills) > 0:
            num_tokens, busy_s = engine.prefill_tokens - before.prefill_tokens, engine.prefill_s - before.prefill_s
            if num_tokens > 0 and busy_s > 0.0:
                self.line.bound(num_tokens, busy_s)
                if now_s - self._measured_s > _UNSEEN_S:
                    self.line.add(num_tokens / num_ended, busy_s / num_ended, now_s)

    def send(
        self, gateway_id: str, num_tokens: int, on_start: Callable[[], None] = lambda: None, *, is_seen: bool = True
    ) -> Prefill:
        """Count a request that is sent to the engine now."""
        now_s = time.monotonic()
        prefill = Prefill(GatewayId(gateway_id), num_tokens, now_s, on_start, is_seen)
        if not self._prefills:
            self._measure()
            self._since_s = None if self._num_unseen else now_s
        self._num_unseen += not is_seen
        self._prefills[prefill] = None
        self._assigned_s += self.line.seconds(num_tokens)
        self._start_first()
        return prefill

    def _start_first(self) -> None:
        """Start the first prefill in line, unless it was started before."""
        first = next(iter(self._prefills), None)
        if first is not None and first.started_s is None:
            first.started_s = max(first.sent_s, self._free_s)
            self.starts.record(1, len(self._prefills) - 1, time.monotonic())
            first.on_start()

    def first_token(self, prefill: Prefill) -> None:
        """End a prefill at its first token."""
        if prefill not in self._prefills:
            return
        del self._prefills[prefill]
        self._free_s = now_s = time.monotonic()
        self._start_first()
        if self._num_unseen or self._since_s is None:
            self._since_s, self._step = (None if self._num_unseen else now_s), None
            return
        if not self._is_together(now_s):
            self._measure()
        prefill.step = self._step = self._step or Step(now_s, now_s, 0)
        self._step.last_s = now_s
        self._step.num_tokens += prefill.num_tokens

    def _is_together(self, now_s: float) -> bool:
        """Return whether a first token now would belong to the last step."""
        if self._step is None or self._since_s is None:
            return False
        return now_s - self._step.first_s <= max(_TOGETHER_S, _TOGETHER * (self._step.first_s - self._since_s))

    def _measure(self) -> None:
        """Measure the last step, if it is not measured yet."""
        if self._step is not None and self._since_s is not None:
            step = self._step
            step.measured = self.line.add(step.num_tokens, max(1e-6, step.first_s - self._since_s), step.first_s)
            self._since_s = self._measured_s = step.last_s
        self._step = None

    def drop(self, prefill: Prefill) -> None:
        """Forget a prefill that has ended without a token."""
        if prefill in self._prefills:
            del self._prefills[prefill]
            if prefill.started_s is not None:
                self._free_s = time.monotonic()
                self._measure()
                self._since_s = None
            self._start_first()

    def end(self, prefill: Prefill, num_computed: int | None = None) -> None:
        """Forget a request whose answer is over. `num_computed`: the tokens of its prefill, where reported."""
        self.drop(prefill)
        self._num_unseen -= not prefill.is_seen
        step = prefill.step
        if step is not None and num_computed is not None and num_computed != prefill.num_tokens:
            step.num_tokens += num_computed - prefill.num_tokens
            if step.measured is not None:
                self.line.correct(step.measured, step.num_tokens)

    def seconds_left(self) -> float:
        """Return the time until the last prefill in line has probably ended."""
        first, *others = self._prefills
        now_s = time.monotonic()
        first_s = max(0.0, self.line.seconds(first.num_tokens) - (now_s - (first.started_s or now_s)))
        return first_s + sum(self.line.seconds(prefill.num_tokens) for prefill in others)

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
        if not self._is_together(time.monotonic()):
            self._measure()
        queued: dict[GatewayId, float] = defaultdict(float)
        for prefill in self._prefills:
            queued[prefill.gateway_id] += self.line.seconds(prefill.num_tokens)
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
            prefill_tokens_per_s=self.line.tokens_per_s,
            num_running=max(0, num_running),
            num_waiting=num_waiting,
            num_free_blocks=num_free,
            num_blocks=num_blocks,
            draining=draining,
            start_interval_s=self.starts.mean_s,
            is_slow=is_slow,
            prefill_fixed_s=self.line.fixed_s if self.line.is_split else 0.0,
            is_rate_unsure=self.line.is_unsure,
        )
