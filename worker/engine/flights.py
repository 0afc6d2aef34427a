"""The steps that the device has been given and whose results have not been taken up: at most two, in order.

launch(n)   launch_ahead() -> n+1   land() -> n taken up   launch_ahead() -> n+2   land() -> n+1 taken up   ...
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from worker.engine.load_report import LoadReport
from worker.engine.metrics import WorkerMetrics
from worker.engine.outbox import Outbox
from worker.engine.pulse import Pulse
from worker.engine.recovery import Recovery
from worker.engine.step import Launch, Raised, Runner, SequenceResult
from worker.engine.step_log import StepLogs
from worker.scheduler.plan import StepPlan
from worker.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class FlightParts:
    """What a step touches on its way."""

    scheduler: Scheduler
    runner: Runner
    load_report: LoadReport
    metrics: WorkerMetrics
    outbox: Outbox
    step_logs: StepLogs
    pulse: Pulse
    recovery: Recovery


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    launch: Launch[list[SequenceResult]]
    started_s: float


class Flights:
    """Used by the engine's thread."""

    __slots__ = ("_flights", "_parts", "_returned_s")

    def __init__(self, parts: FlightParts) -> None:
        self._parts = parts
        self._flights: deque[_Flight] = deque()
        self._returned_s = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def prefill_runs(self) -> bool:
        """Whether the first step in flight prefills, and is not done."""
        first = self._flights[0] if self._flights else None
        return first is not None and first.plan.num_prefill_tokens > 0 and not first.launch.is_done()

    def launch(self, plan: StepPlan, begun_s: float) -> None:
        """With nothing in flight; scheduling the plan began at `begun_s`."""
        assert not self._flights, "the step is not the first"
        self._give(plan, begun_s, self._parts.pulse.begin_step())

    def launch_ahead(self) -> None:
        """The step behind the one that runs, if it can be foreseen and is not there yet."""
        begun_s = time.monotonic()
        if len(self._flights) == 1 and (plan := self._parts.scheduler.schedule_ahead()) is not None:
            self._give(plan, begun_s, time.monotonic())

    def land(self) -> None:
        """Wait for the first step in flight, if there is one, and take up its results. Raises EngineDeadError."""
        if not self._flights:
            return
        parts, flight = self._parts, self._flights.popleft()
        try:
            results = flight.launch.collect()
        except Exception as error:
            parts.metrics.step_failures.inc()
            self._discard()
            parts.recovery.run_one_by_one(flight.plan, error)
        else:
            self._take_up(flight, results)
        parts.pulse.end_step()
        if self._flights:
            parts.pulse.begin_step()

    def land_all(self) -> None:
        while self._flights:
            self.land()

    def _give(self, plan: StepPlan, begun_s: float, started_s: float) -> None:
        """To the device. What raises on the way is raised when it is collected."""
        parts = self._parts
        launch: Launch[list[SequenceResult]]
        try:
            launch = parts.runner.launch(plan.step())
        except Exception as error:
            launch = Raised(error)
        self._flights.append(_Flight(plan, launch, started_s))
        parts.metrics.count_started(plan.started)
        parts.metrics.count_plan(plan, started_s - begun_s)
        parts.load_report.starts.note(len(plan.started), len(parts.scheduler.waiting), begun_s)
        if parts.step_logs:
            parts.step_logs.begin(plan.started, begun_s)

    def _discard(self) -> None:
        """Wait for steps whose results are worth nothing, as the one that they follow has raised."""
        while self._flights:
            with suppress(Exception):
                self._flights.popleft().launch.collect()

    def _take_up(self, flight: _Flight, results: list[SequenceResult]) -> None:
        parts, plan, returned_s = self._parts, flight.plan, time.monotonic()
        started_s = max(flight.started_s, self._returned_s)  # it may have stood behind the one before
        interval_s, self._returned_s = returned_s - self._returned_s, returned_s
        if parts.step_logs:
            parts.step_logs.add(plan, started_s, returned_s)
        parts.outbox.put(parts.scheduler.update(plan, results, returned_s))
        parts.metrics.count_step(plan, returned_s - started_s, interval_s)
        parts.load_report.measure(plan, returned_s - started_s, returned_s)
        parts.metrics.host_s.labels("update").observe(time.monotonic() - returned_s)
