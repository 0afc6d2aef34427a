"""The engine: one thread that runs commands, launches steps and delivers outputs.

    HTTP side: submit, abort --> mailbox --> [ schedule, launch -> collect, update ] --> outputs --> HTTP side
                                                     |
                                                     +--> reporter: events, load --> publisher --> Redis

The thread owns the scheduler and the KV pool, and waits only for the device. While the device computes, the engine does
everything that needs no token of that step: outputs, reports, commands, and the launch of the next decodes.
Aborted requests free their blocks when the step ends. On a CPU all of this happens between steps.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from cache.records import WorkerLoad, WorkerMember, in_new_epoch, new_epoch
from cache.types import Epoch
from worker.common.logs import about
from worker.contracts.engine import (
    SUSPECT_NOTICE_S,
    EngineDeadError,
    EngineOutput,
    EngineSinks,
    RefusedError,
    RequestKey,
    StepLog,
)
from worker.contracts.mailbox import Mailbox
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate, QueuePace
from worker.contracts.step import Runner, SamplerCache
from worker.contracts.validation import refusal
from worker.engine.grammar import GrammarCompiler
from worker.engine.inflight import InFlightSteps, OutputBuffer
from worker.engine.reporter import Reporter, debug_state
from worker.engine.watchdog import StepWatchdog, exit_on_hang
from worker.files.embedding import Pooling
from worker.kv_transfer.transfers import KVTransfers
from worker.scheduler.request import Constraint, ConstraintError, Request, failed_by
from worker.scheduler.scheduler import Scheduler
from worker.wire import Failed, GenerateRequest, TokenizerBundle, num_listed_ids

logger = logging.getLogger(__name__)

INTEGRITY_INTERVAL_S: Final = 10.0  # the check is linear in the pool, so it waits for idle time
POLL_INTERVAL_S: Final = 0.0005
"""How late the end of a prefill step may be noticed while commands are awaited."""
FETCH_POLL_S: Final = 0.05
"""Poll interval for slow fetches while idle."""
PROBE_AFTER_IDLE_S: Final = 10.0  # a device may have failed while no step ran
PROBE_TIMEOUT_S: Final = 5.0  # a step that takes longer is for `max_step_s` to judge
MAX_IDS_IN_STEP: Final = 4096
"""Ids of a request's lists that a step may read. Longer lists are read on another thread before queueing."""


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """The parts of a request that `prepare` has made for `submit`."""

    constraints: Mapping[int, Constraint] = field(default_factory=dict)
    sampler_cache: SamplerCache = field(default_factory=SamplerCache)


class EngineCore:
    """`worker.contracts.engine.Engine` over a scheduler and a runner in this process."""

    index_problem: Final = None
    not_ready_reason: Final = None
    """It serves as soon as it has started."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        rate: PrefillRate,
        bundle: TokenizerBundle,
        member: WorkerMember,
        metrics: WorkerMetrics,
        async_scheduling: bool = True,
        max_step_s: float = 120.0,
        transfers: KVTransfers | None = None,
        pooling: Pooling | None = None,
        sinks: EngineSinks | None = None,
    ) -> None:
        """`async_scheduling`: launch the next decodes before the tokens of a step are known.

        Without `transfers`, blocks stay in the pool. With `pooling`, the engine only makes embeddings.
        """
        sinks = sinks or EngineSinks()
        self.member = member
        self.bundle = bundle
        self.grammars = GrammarCompiler(bundle)
        self.watchdog = StepWatchdog()
        self._scheduler = scheduler
        self._runner = runner
        self._metrics = metrics
        self._async_scheduling = async_scheduling
        self._pooling = pooling
        self._max_step_s = max_step_s
        self.mailbox = Mailbox() if transfers is None else transfers.mailbox
        """Its calls run on the engine thread. They fail with EngineDeadError once the thread has ended."""
        self._outputs = OutputBuffer(metrics, sinks.deliver)
        self._transfers = transfers
        self.exchange = transfers if transfers is not None and transfers.layout else None
        self._reporter = Reporter(scheduler, rate, metrics, transfers, sinks.publisher)
        self._in_flight = InFlightSteps(scheduler, runner, self._reporter, metrics, self._outputs, self.watchdog)
        self._deliver = sinks.deliver
        self._on_death = sinks.on_death
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._only_fetches = False
        """All work waits for blocks that are being fetched."""
        self._stopping = False
        self._dead: BaseException | None = None
        self._checked_s = 0.0

    # --- from any thread ----------------------------------------------------------------------------------------

    @property
    def load(self) -> WorkerLoad:
        return self._reporter.load

    @property
    def pace(self) -> QueuePace:
        return self._reporter.pace

    def start(self) -> None:
        if self._transfers is not None:
            self._transfers.start()
        self._thread.start()

    async def supervise(self) -> None:
        await exit_on_hang(self.mailbox, self.watchdog, self._max_step_s)

    async def close(self) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the current step. Open requests get no further frames."""
        self._stopping = True
        self.mailbox.put(lambda: None)
        self._thread.join(timeout_s)
        if self._transfers is not None:
            self._transfers.close()

    def refusal(self, request: GenerateRequest) -> Failed | None:
        allocator = self._scheduler.allocator
        pool_tokens = (allocator.num_blocks - 1) * allocator.block_size
        max_total_tokens = self._scheduler.limits.max_batch_total_tokens
        return refusal(request, self.member, pool_tokens, self.bundle.vocab_size, max_total_tokens)

    async def render(self, call: bytes) -> bytes:
        raise RefusedError(Failed("unsupported", "this engine has no API of its own", retryable=True))

    async def prepare(self, request: GenerateRequest) -> PreparedParts:
        try:
            constraints = await self.grammars.constraints(request)
        except ConstraintError as error:
            raise RefusedError(failed_by(error)) from error
        if sum(num_listed_ids(request.sampling).values()) <= MAX_IDS_IN_STEP:
            return PreparedParts(constraints)
        value = await asyncio.to_thread(self._runner.prepare, request.sampling, request.prompt_ids)
        return PreparedParts(constraints, SamplerCache(value))

    def submit(
        self, key: RequestKey, request: GenerateRequest, prepared: PreparedParts, steps: StepLog | None = None
    ) -> None:
        arrival_s = time.monotonic()

        def queue() -> None:
            self._metrics.requests.inc()
            aging_s = self._scheduler.limits.aging_s
            try:
                made = Request(
                    key,
                    request,
                    arrival_s,
                    aging_s,
                    prepared.constraints,
                    self._pooling,
                    sampler_cache=prepared.sampler_cache,
                )
                outputs = self._scheduler.submit(made)
            except Exception as error:  # one request must not end the others
                extra = about(request.request_id, request.traceparent)
                logger.exception("request %s cannot be queued", request.request_id, extra=extra)
                outputs = [EngineOutput(key, failed_by(error))]
            else:
                self._reporter.assign(made)
                if steps is not None:
                    self._in_flight.step_logs[made] = steps
            self._outputs.put(outputs)

        def refuse(error: BaseException) -> None:
            self._deliver([EngineOutput(key, Failed("worker_lost", str(error), retryable=True))])

        self.mailbox.put(queue, refuse)

    def abort(self, key: RequestKey, choice: int | None = None) -> None:
        def end() -> None:
            request = self._scheduler.requests.get(key)
            if request is not None:
                self._outputs.put(self._scheduler.abort(request, choice, now_s=time.monotonic()))
                self._reporter.report()

        self.mailbox.put(end)

    def drain(self) -> None:
        self._reporter.draining = True
        self.mailbox.put(self._reporter.report)

    def fail_all(self, failed: Failed) -> Future[None]:
        def fail() -> None:
            for request in list(self._scheduler.requests.values()):
                self._outputs.put(self._scheduler.fail(request, failed))
            self._outputs.flush()
            self._reporter.report()

        return self.mailbox.call(fail)

    def purge(self) -> Future[Epoch]:
        def empty_pool() -> Epoch:
            self._scheduler.preempt_all()
            if self._transfers is not None:
                self._transfers.fetches.give_up_all()
            emptied = self._scheduler.allocator.reset()
            assert emptied, "the pool is held although every sequence was preempted"
            if self._transfers is not None:
                self._transfers.purge()
            self.member = in_new_epoch(self.member, new_epoch(), time.time_ns() // 1_000_000)
            self._reporter.begin_epoch(self.member)
            return self.member.epoch

        return self.mailbox.call(empty_pool, before=self._in_flight.process_all)

    def probe(self) -> Future[None]:
        """Compute one token now, ahead of the queue. The future fails when the device does."""
        return self.mailbox.call(self._in_flight.probe, before=self._in_flight.process_all)

    def debug_state(self) -> Future[dict[str, Any]]:
        return self.mailbox.call(lambda: debug_state(self._scheduler))

    async def liveness(self) -> str | None:
        if self._dead is not None:
            return f"the engine died: {self._dead}"
        if not self._thread.is_alive():
            return "the engine is not running"
        if self.watchdog.idle_s > PROBE_AFTER_IDLE_S:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await asyncio.wrap_future(self.probe())
            except TimeoutError:  # a slow step, or one that hangs: that ends the process after `max_step_s`
                logger.warning("a probe of the idle engine had no answer within %.0f s", PROBE_TIMEOUT_S)
            except Exception as error:
                return str(error)
        return None

    # --- on the engine thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._reporter.report()
            while not self._stopping:
                self._step()
            self._in_flight.process_all()
            self._outputs.flush()
            self.mailbox.close(EngineDeadError("the engine has stopped"))
        except BaseException as error:
            logger.critical("the engine died", exc_info=error)
            self._dead = error
            try:
                self._outputs.flush()
                self.mailbox.close(EngineDeadError(f"the engine died: {error}"))
            finally:
                self._on_death(error)

    @property
    def _has_work(self) -> bool:
        return len(self._in_flight) > 0 or self._scheduler.has_work

    def _step(self) -> None:
        """Go from the end of one step to the end of the next."""
        self._run_housekeeping(wait_s=self._max_wait_s())
        if self._runner.overlaps:
            if self._async_scheduling:
                self._in_flight.launch_async()
            while self._in_flight.prefill_runs:  # decode-only steps are too short to poll in
                self._run_housekeeping(wait_s=POLL_INTERVAL_S)
        self._in_flight.process_result()
        self.mailbox.run()  # commands that came while the device worked join the next step
        now_s = time.monotonic()
        self._outputs.put(self._scheduler.expire(now_s))
        if self._transfers is not None:
            self._transfers.fetches.poll(now_s)
        if self._scheduler.has_work and not self._in_flight:
            self._launch()
            if not self._runner.overlaps:
                self._in_flight.process_result()
        if not self._has_work:
            self._on_idle()

    def _max_wait_s(self) -> float | None:
        """Return how long to wait for a command; None: until one comes."""
        if self._transfers is None or not self._transfers.fetches.active or self._in_flight:
            return 0.0 if self._has_work else None
        return FETCH_POLL_S if self._only_fetches or not self._scheduler.has_work else 0.0

    def _run_housekeeping(self, *, wait_s: float | None) -> None:
        """Do the work that needs no token of the step in flight; wait up to `wait_s` for a command."""
        self._outputs.flush()
        self.mailbox.run(wait_s=wait_s)
        self._reporter.report_if_due()  # with what has just come: a step may take seconds

    def _launch(self) -> None:
        """Schedule a step and launch it."""
        begun_s = time.monotonic()
        plan = self._scheduler.schedule(begun_s)
        self._only_fetches = plan is None and self._transfers is not None and len(self._transfers.fetches.active) > 0
        if self._only_fetches:
            return
        if plan is None:
            raise EngineDeadError("work is left but nothing can be scheduled")
        self._outputs.put([EngineOutput(request.key, request.start()) for request in plan.started])
        has_suspect = any(request.wire.is_suspect for request in plan.started)
        if has_suspect or not self._runner.overlaps:
            self._outputs.flush()
        if has_suspect:
            time.sleep(SUSPECT_NOTICE_S)  # Started must reach the gateway before a step that may end the process
        self._in_flight.launch(plan, begun_s)

    def _on_idle(self) -> None:
        self._outputs.flush()
        self._reporter.report()
        now_s = time.monotonic()
        if now_s - self._checked_s > INTEGRITY_INTERVAL_S:
            self._checked_s = now_s
            self._scheduler.allocator.check_integrity()
            _return_free_pages()


def _return_free_pages() -> None:
    """Return freed pages to the system, in milliseconds; without glibc, do nothing.

    A burst leaves free pages all over the thread's heap, and glibc by itself returns only those at its end.
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
