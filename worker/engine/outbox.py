"""The frames that the engine has for its clients, until it has time to hand them over: a step's at once."""

from __future__ import annotations

from collections.abc import Callable

from worker.engine.metrics import WorkerMetrics
from worker.engine.step_log import StepLogs
from worker.scheduler.plan import EngineOutput


class Outbox:
    """Used by the engine's thread. `deliver` returns at once."""

    __slots__ = ("_deliver", "_emissions", "_metrics", "_step_logs")

    def __init__(
        self, deliver: Callable[[list[EngineOutput]], None], metrics: WorkerMetrics, step_logs: StepLogs
    ) -> None:
        self._deliver = deliver
        self._metrics = metrics
        self._step_logs = step_logs
        self._emissions: list[EngineOutput] = []

    def put(self, emissions: list[EngineOutput]) -> None:
        self._emissions += emissions

    def flush(self) -> None:
        """Hand over what is there."""
        if not self._emissions:
            return
        emissions, self._emissions = self._emissions, []
        self._metrics.count_emissions(emissions)
        if self._step_logs:
            self._step_logs.close_ended(emissions)
        self._deliver(emissions)
