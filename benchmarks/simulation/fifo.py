"""The load of a simulated worker that runs prefills one by one, as in the figures of reference."""

from __future__ import annotations

from server.router.load_tracker import WorkerLoadEstimate


class FifoLoadEstimate(WorkerLoadEstimate):
    def queue(self, prefill_s: float, now_s: float) -> tuple[float, float]:
        own_s = self.queued_s
        for request in self._queue:
            if request.started_s is not None:
                own_s -= min(now_s - request.started_s, request.prefill_s)
                break
        return max(0.0, own_s) + self._others_left_s(own_s, now_s), 0.0
