"""The outputs of the engine thread on their way to the HTTP side."""

from __future__ import annotations

from collections.abc import Callable

from worker.contracts.engine import EngineOutput
from worker.contracts.metrics import WorkerMetrics


class OutputBuffer:
    """Outputs of the engine thread until it has time to deliver them, those of one step together."""

    def __init__(self, metrics: WorkerMetrics, deliver: Callable[[list[EngineOutput]], object]) -> None:
        """`deliver` returns at once."""
        self._metrics = metrics
        self._deliver = deliver
        self._outputs: list[EngineOutput] = []

    def put(self, outputs: list[EngineOutput]) -> None:
        self._outputs += outputs

    def flush(self) -> None:
        """Deliver what is buffered."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._metrics.count_outputs(outputs)
            self._deliver(outputs)
