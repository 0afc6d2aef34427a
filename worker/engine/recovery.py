"""When a step has raised: whose fault it was, and whether the device is still there.

A step that raises has written nothing that counts. Its requests are run again one by one, and only those fail that fail
alone. When all do, the device is asked for one token; when it has none to give, the engine is dead and says so.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cache.types import HASH_BYTES, NULL_BLOCK, BlockHash
from worker.common.logs import about
from worker.engine.outbox import Outbox
from worker.engine.pulse import Pulse
from worker.engine.step import Runner, SamplingRow, SequenceStep, Step
from worker.engine.step_log import StepLogs
from worker.scheduler.plan import EngineOutput, StepPlan
from worker.scheduler.request import Request, failed_by
from worker.scheduler.scheduler import Scheduler
from worker.wire import Failed, SamplingParams

logger = logging.getLogger(__name__)

_NO_ROOT: Final = BlockHash(bytes(HASH_BYTES))


class EngineDeadError(RuntimeError):
    """The device computes nothing any more, or an invariant of the engine is broken."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Used by the engine's thread while nothing is in flight. Its steps are collected before it goes on."""

    scheduler: Scheduler
    runner: Runner
    outbox: Outbox
    step_logs: StepLogs
    pulse: Pulse

    def run_one_by_one(self, plan: StepPlan, error: Exception) -> None:
        """Each request of a failed step alone; those that fail again are to blame, unless the device is.

        Raises EngineDeadError.
        """
        logger.warning(
            "a step of %d requests raised; they are run one by one", len(plan.chunks), exc_info=_trace(error)
        )
        traceback.clear_frames(error.__traceback__)  # which hold the tensors that a device had no more room beside
        failed: list[tuple[Request, Exception]] = []
        any_returned = False
        for part in self.scheduler.retries(plan):
            request = next(iter(part.chunks)).request
            started_s = self.pulse.begin_step()
            try:
                results = self.runner.run(part.step())
            except Exception as cause:
                logger.error(
                    "request %s: its step raised twice: %s",
                    request.wire.request_id,
                    cause,
                    exc_info=_trace(cause),
                    extra=about(request.wire.request_id, request.wire.traceparent),
                )
                traceback.clear_frames(cause.__traceback__)
                failed.append((request, cause))
            else:
                any_returned = True
                self.step_logs.add(part, started_s, time.monotonic())
                self._deliver(self.scheduler.update(part, results, time.monotonic()))
        if not any_returned:
            self._probe_or_blame(request for request, _ in failed)
        for request, blamed in failed:
            self._deliver(self.scheduler.fail(request, failed_by(blamed)))

    def probe(self) -> None:
        """One token in a block of the pool, or in the null block, which is nobody's, when none is free.

        Raises EngineDeadError.
        """
        allocation = self.scheduler.allocator.allocate(1, (0,), _NO_ROOT, reuse=False)
        table, slots = ((NULL_BLOCK,), [0]) if allocation is None else (allocation.block_table, allocation.slots(0, 1))
        draw = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, 1, (0,), ())
        self.pulse.begin_step()  # a device that never answers is a step that hangs
        try:
            self.runner.run(Step([SequenceStep((0,), 0, table, slots, (draw,))]))
        except Exception as error:
            self.pulse.fail_step()
            raise EngineDeadError(f"the device does not compute: {error}") from error
        finally:
            if allocation is not None:
                allocation.free()
        self.pulse.end_step()

    def _probe_or_blame(self, suspects: Iterable[Request]) -> None:
        """The device may be broken for good, and then by the one request of the step whose prefill it was.

        Raises EngineDeadError; before that, the culprit is failed, lest another worker computes it.
        """
        try:
            self.probe()
        except EngineDeadError:
            newcomers = [request for request in suspects if request.first_token_s is None]
            if len(newcomers) == 1:
                failed = Failed("poisonous", "the request has broken the device", retryable=False)
                self._deliver(self.scheduler.fail(newcomers[0], failed))
            raise

    def _deliver(self, emissions: list[EngineOutput]) -> None:
        """At once: the next part may be the one that ends the process."""
        self.outbox.put(emissions)
        self.outbox.flush()


def _trace(error: Exception) -> Exception | None:
    """For the log: where it came from, unless a request's own fields are to blame."""
    return error if failed_by(error).code == "internal_error" else None
