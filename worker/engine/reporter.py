"""What the engine tells of its pool and its load: as soon as its thread has time after the pool changed, or 50 ms
after it told last. A CPU has none within a step, nor a GPU within one of decodes alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember
from worker.engine.load_report import LoadReport
from worker.engine.metrics import WorkerMetrics
from worker.scheduler.scheduler import Scheduler

REPORT_INTERVAL_S: Final = 0.05


class Listener(Protocol):
    """Hears what the pool stored and dropped, and the load. Returns at once. Called by the engine's thread."""

    def offer(self, events: Sequence[BlockEvent], load: WorkerLoad) -> None: ...

    def begin_epoch(self, member: WorkerMember) -> None: ...


class Reporter:
    """Used by the engine's thread, but for what is said to be readable by any."""

    __slots__ = (
        "_listener",
        "_load_report",
        "_metrics",
        "_reported_s",
        "_scheduler",
        "draining",
        "load",
    )

    def __init__(
        self, scheduler: Scheduler, load_report: LoadReport, metrics: WorkerMetrics, listener: Listener | None
    ) -> None:
        self._scheduler = scheduler
        self._load_report = load_report
        self._metrics = metrics
        self._listener = listener
        self._reported_s = 0.0
        self.draining = False
        """Whether to tell that no request should come. Any thread may set it."""
        self.load = WorkerLoad()
        """As reported last. Frozen: any thread may read it."""

    def report(self) -> None:
        self._offer(self._scheduler.allocator.take_events())

    def report_if_due(self) -> None:
        events = self._scheduler.allocator.take_events()
        if events or time.monotonic() - self._reported_s >= REPORT_INTERVAL_S:
            self._offer(events)

    def begin_epoch(self, member: WorkerMember) -> None:
        """The pool is empty, whatever events it still had to tell of, and is `member`'s now."""
        self._scheduler.allocator.take_events()
        self._load_report.begin_epoch()
        if self._listener is not None:
            self._listener.begin_epoch(member)
        self.report()

    def _offer(self, events: Sequence[BlockEvent]) -> None:
        self._reported_s = time.monotonic()
        report, scheduler = self._load_report, self._scheduler
        self.load = report.report(scheduler, draining=self.draining)
        stats = scheduler.allocator.stats()
        self._metrics.set_state(scheduler, stats, report.rate.tokens_per_s)
        if self._listener is not None:
            self._listener.offer(events, self.load)
