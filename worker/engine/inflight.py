"""The steps in flight: launched on the device and not collected yet. At most two, in order.

    launch(n)   launch_async() -> n+1   process_result() of n   launch_async() -> n+2   process_result() of n+1   ...

A failed step commits nothing. Each of its requests is run again separately, and those that fail again are failed.
When all fail, a probe asks the device for one token; without an answer the engine is dead.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from cache.types import NULL_BLOCK
from worker.common.logs import about
from worker.contracts.engine import (
    MAX_RECORDED_STEPS,
    BatchLog,
    EngineDeadError,
    EngineOutput,
    StepKind,
    StepLog,
    StepRecord,
)
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.step import Launch, Runner, SamplingRow, SequenceStep, Step, StepResult, raised
from worker.engine.reporter import Reporter
from worker.engine.watchdog import StepWatchdog
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import Request, failed_by
from worker.scheduler.scheduler import Scheduler
from worker.wire import Failed, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    plan: StepPlan
    launch: Launch[StepResult]
    started_s: float


@dataclass(slots=True, eq=False)
class InFlightSteps:
    """Launches steps, processes their results and recovers from those that raise. Used by the engine thread."""

    scheduler: Scheduler
    runner: Runner
    reporter: Reporter
    metrics: WorkerMetrics
    outputs: OutputBuffer
    watchdog: StepWatchdog
    step_logs: dict[Request, StepLog] = field(default_factory=dict, init=False)
    """Where the steps of each traced request are written, until it ends."""
    _batch_log: BatchLog | None = field(default=None, init=False)
    """The batch of the last step, if that had traced requests."""
    _launched: deque[_LaunchedStep] = field(default_factory=deque, init=False)
    _returned_s: float = field(default=0.0, init=False)

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def prefill_runs(self) -> bool:
        """The first step in flight prefills and is not done."""
        first = self._launched[0] if self._launched else None
        return first is not None and first.plan.num_prefill_tokens > 0 and not first.launch.is_done()

    def launch(self, plan: StepPlan, begun_s: float) -> None:
        """Launch a step after the one in flight, if any; scheduling began at `begun_s`."""
        started_s = time.monotonic() if self._launched else self.watchdog.begin_step()
        launch: Launch[StepResult]
        try:
            launch = self.runner.launch(plan.step())
        except Exception as error:
            launch = raised(error)
        self._launched.append(_LaunchedStep(plan, launch, started_s))
        self._observe_start(plan, started_s - begun_s)
        self.reporter.starts.record(len(plan.started), len(self.scheduler.waiting), begun_s)

    def launch_async(self) -> None:
        """Launch a second step, if the scheduler can plan it without the tokens of the first."""
        begun_s = time.monotonic()
        if len(self._launched) == 1 and (plan := self.scheduler.schedule_async()) is not None:
            self.launch(plan, begun_s)

    def process_result(self) -> None:
        """Wait for the first step in flight, if any, and apply its results. Raises EngineDeadError."""
        if not self._launched:
            return
        step = self._launched.popleft()
        try:
            result = step.launch.collect()
        except Exception as error:
            self.metrics.step_failures.labels(_kind(step.plan)).inc()
            self._discard()
            self._run_one_by_one(step.plan, error)
        else:
            self._apply(step, result)
        self.watchdog.end_step()
        if self._launched:
            self.watchdog.begin_step()

    def process_all(self) -> None:
        """Empty the device's queue."""
        while self._launched:
            self.process_result()

    def probe(self) -> None:
        """Compute one token in the null block: another one may be cached. Raises EngineDeadError."""
        row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, 1, (0,), ())
        self.watchdog.begin_step()  # a device that never answers is a step that hangs
        try:
            self.runner.run(Step([SequenceStep((0,), 0, (NULL_BLOCK,), [0], (row,))]))
        except Exception as error:
            self.watchdog.end_step(failed=True)
            raise EngineDeadError(f"the device does not compute: {error}") from error
        self.watchdog.end_step()

    def _observe_start(self, plan: StepPlan, schedule_s: float) -> None:
        """Count a launched step, and the requests that begin in it. It took `schedule_s` to plan."""
        metrics, num_prefill_tokens, num_decodes = self.metrics, plan.num_prefill_tokens, plan.num_decodes
        for request in plan.started:
            assert request.started_s is not None
            metrics.queue_s.observe(request.started_s - request.arrival_s)
            metrics.prompt_tokens.inc(len(request.prompt_ids))
            metrics.cached_tokens.inc(request.num_cached_tokens)
            if (log := self.step_logs.get(request)) is not None:
                log.begun_s, log.num_cached_tokens = request.started_s, request.num_cached_tokens
        metrics.batch_size.observe(len(plan.chunks))
        if num_prefill_tokens:
            metrics.batch_tokens.labels("prefill").observe(num_prefill_tokens)
        if num_decodes:
            metrics.batch_tokens.labels("decode").observe(num_decodes)
        if plan.batch_growth_reason is not None:
            metrics.batch_growth.labels(plan.batch_growth_reason).inc()
            metrics.batch_growth_s.observe(schedule_s)
        if num_preempted := plan.num_preempted + plan.num_yielded:
            metrics.preemptions.inc(num_preempted)
        metrics.host_s.labels("schedule").observe(schedule_s)

    def _apply(self, step: _LaunchedStep, result: StepResult) -> None:
        plan, kind, returned_s = step.plan, _kind(step.plan), time.monotonic()
        started_s = max(step.started_s, self._returned_s)  # a step launched early begins when the one before returns
        interval_s, self._returned_s = returned_s - self._returned_s, returned_s
        self._log_step(plan, started_s, returned_s)
        self.outputs.put(self.scheduler.update(plan, result.sequences, returned_s))
        self.metrics.count_step(kind, returned_s - started_s, interval_s)
        if result.times is not None:
            self.metrics.count_parts(kind, *result.times)
        self.reporter.measure(plan, returned_s - started_s, returned_s)
        if (speculation := self.scheduler.speculation) is not None:
            speculation.measure(plan, returned_s - started_s)
            self.metrics.count_drafts([(len(c.draft_ids), c.num_accepted) for c in plan.chunks.values() if c.draft_ids])
        self.metrics.host_s.labels("update").observe(time.monotonic() - returned_s)

    def _log_step(self, plan: StepPlan, begun_s: float, ended_s: float) -> None:
        """Write a step that has returned, and is not applied yet, to the logs of its traced requests."""
        members = []
        for request, log in list(self.step_logs.items()):
            if request.key not in self.scheduler.requests:
                del self.step_logs[request]
                continue
            chunks = [plan.chunks[sequence] for sequence in request.sequences if sequence in plan.chunks]
            if not chunks:
                continue
            members.append(log)
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            record = StepRecord(begun_s, ended_s, num_tokens, len(plan.chunks), plan.num_tokens)
            (log.prefill if any(chunk.is_prefill for chunk in chunks) else log.decode).add(record)
            if log.first_token_s is None and any(chunk.stop == len(chunk.sequence.token_ids) for chunk in chunks):
                log.first_token_s = ended_s
        self._log_batch(plan, members, begun_s, ended_s)

    def _log_batch(self, plan: StepPlan, members: list[StepLog], begun_s: float, ended_s: float) -> None:
        """Add a step to the batch that it continues, or begin a batch."""
        if not members:
            self._batch_log = None
            return
        kind, num_sequences, batch = _kind(plan), len(plan.chunks), self._batch_log
        if batch is None or (batch.kind, batch.num_sequences, batch.members) != (kind, num_sequences, members):
            batch = self._batch_log = BatchLog(kind, num_sequences, members, begun_s)
            for log in members:
                if len(log.batches) < MAX_RECORDED_STEPS:
                    log.batches.append(batch)
        batch.ended_s = ended_s
        batch.num_steps += 1
        batch.num_tokens += plan.num_tokens

    def _discard(self) -> None:
        """Wait for the steps after a failed one, and drop their results: they follow tokens that it did not sample."""
        while self._launched:
            with suppress(Exception):
                self._launched.popleft().launch.collect()

    def _run_one_by_one(self, plan: StepPlan, error: Exception) -> None:
        """Run each request of a failed step separately, and fail those that raise again. Raises EngineDeadError."""
        message = "a step of %d sequences raised; its requests are run one by one"
        logger.warning(message, len(plan.chunks), exc_info=_logged_trace(error))
        traceback.clear_frames(error.__traceback__)  # they hold tensors, and the device may be out of memory
        failed: dict[Request, Exception] = {}
        any_returned = False
        for part in self.scheduler.retries(plan):
            request = next(iter(part.chunks)).request
            started_s = self.watchdog.begin_step()
            try:
                results = self.runner.run(part.step())
            except Exception as cause:
                request_id = request.wire.request_id
                message, extra = "request %s: its step raised twice: %s", about(request_id, request.wire.traceparent)
                logger.error(message, request_id, cause, exc_info=_logged_trace(cause), extra=extra)
                traceback.clear_frames(cause.__traceback__)
                failed[request] = cause
            else:
                any_returned = True
                returned_s = time.monotonic()
                self._log_step(part, started_s, returned_s)
                self._deliver(self.scheduler.update(part, results, returned_s))
        if not any_returned:
            self._probe_or_blame(failed)
        for request, blamed in failed.items():
            self._deliver(self.scheduler.fail(request, failed_by(blamed)))

    def _probe_or_blame(self, requests: Iterable[Request]) -> None:
        """Check that the device still works. Raises EngineDeadError.

        If one request is in prefill, it is to blame: it fails first, so that no other worker computes it.
        """
        try:
            self.probe()
        except EngineDeadError:
            prefilling = [request for request in requests if request.first_token_s is None]
            if len(prefilling) == 1:
                failed = Failed("poisonous", "the request has broken the device", retryable=False)
                self._deliver(self.scheduler.fail(prefilling[0], failed))
            raise

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Deliver at once: the next part may end the process."""
        self.outputs.put(outputs)
        self.outputs.flush()


def _kind(plan: StepPlan) -> StepKind:
    if not plan.num_prefill_tokens:
        return "decode"
    return "mixed" if plan.num_decodes else "prefill"


def _logged_trace(error: Exception) -> Exception | None:
    """Return the error if its traceback belongs in the log: None if the request's fields caused it."""
    return error if failed_by(error).code == "internal_error" else None


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
