"""The engine: one thread that takes commands, launches steps, and hands out frames.

    HTTP side: submit, abort, call --> inbox --> [ schedule, launch -> collect, update ] --> outbox --> HTTP side
                                                         |
                                                         +--> reporter: events, load --> Redis, in its own time

The thread waits for nobody but the device: both ways out are appends. On a device that computes beside it, all that
needs no token of the step in flight is done meanwhile: frames of the step before, reports, commands. Requests that come
are hashed and looked up, aborts are heard, and what they held is given back at the end of the step. Where all of the
next step but its tokens can be foreseen, it is launched behind the one that runs. A CPU is the step's own from launch
to collect, so there the same is done between steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

from cache.records import WorkerLoad, WorkerMember, in_new_epoch
from cache.types import Epoch
from worker.common.logs import about
from worker.engine.flights import FlightParts, Flights
from worker.engine.inbox import Inbox
from worker.engine.load_report import LoadReport
from worker.engine.metrics import WorkerMetrics
from worker.engine.outbox import Outbox
from worker.engine.pulse import Pulse
from worker.engine.recovery import EngineDeadError, Recovery
from worker.engine.reporter import Listener, Reporter
from worker.engine.step import Runner
from worker.engine.step_log import StepLog, StepLogs
from worker.memory import return_free_pages
from worker.scheduler.plan import EngineOutput
from worker.scheduler.request import Constraint, RequestKey, failed_by, new_request
from worker.scheduler.scheduler import Scheduler
from worker.wire import Failed, GenerateRequest, Started

logger = logging.getLogger(__name__)

SUSPECT_NOTICE_S: Final = 0.02
"""For Started to reach the gateway before the step that a suspect may not let us survive."""
INTEGRITY_INTERVAL_S: Final = 10.0
LISTEN_S: Final = 0.0005
"""How long the end of a step with prefills may go unseen while commands are awaited."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. `deliver` takes frames; `on_death` the reason, after which no frame comes for any open
    request. Both return at once. `launch_ahead`: let a device that overlaps go on before its tokens have been seen."""

    scheduler: Scheduler
    runner: Runner
    load_report: LoadReport
    metrics: WorkerMetrics
    member: WorkerMember
    deliver: Callable[[list[EngineOutput]], None]
    on_death: Callable[[BaseException], None]
    listener: Listener | None = None
    launch_ahead: bool = True


class Engine:
    """Its public methods may be called from any thread; everything else happens on its own."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._inbox = Inbox()
        self._step_logs = StepLogs()
        self._outbox = Outbox(parts.deliver, parts.metrics, self._step_logs)
        self._reporter = Reporter(parts.scheduler, parts.load_report, parts.metrics, parts.listener)
        self._pulse = Pulse()
        self._recovery = Recovery(parts.scheduler, parts.runner, self._outbox, self._step_logs, self._pulse)
        self._flights = Flights(
            FlightParts(
                parts.scheduler,
                parts.runner,
                parts.load_report,
                parts.metrics,
                self._outbox,
                self._step_logs,
                self._pulse,
                self._recovery,
            )
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._dead: BaseException | None = None
        self._checked_s = 0.0
        self.member = parts.member

    # --- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current step. Requests that are still there get no more frames."""
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout_s)

    def submit(
        self,
        key: RequestKey,
        wire: GenerateRequest,
        constraints: Mapping[int, Constraint],
        steps: StepLog | None = None,
    ) -> None:
        """Queue a request that `refusal` has let pass; `key` is new and ascending. `steps` hears of its steps.

        With the engine dead the request fails at once, and another worker may take it.
        """
        arrival_s = time.monotonic()
        if steps is not None:
            self._inbox.put(lambda: self._step_logs.open(key, steps))

        def refuse(error: BaseException) -> None:
            self._parts.deliver([EngineOutput(key, Failed("worker_lost", str(error), retryable=True))])

        self._inbox.put(lambda: self._submit(key, wire, arrival_s, constraints), refuse)

    def abort(self, key: RequestKey, choice: int | None = None) -> None:
        """End a request, or one choice of it, before the next step. Unknown keys are no error: it may have ended."""
        self._inbox.put(lambda: self._abort(key, choice))

    def drain(self) -> None:
        """Report from now on that no request should come."""
        self._reporter.draining = True
        self._inbox.put(self._reporter.report)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread, unless the future is cancelled before. A step may be in flight: its
        blocks are held, what it computes is not yet committed. As with all futures of this class, EngineDeadError is
        raised when that thread has ended, or ends before it comes to this."""
        return self._inbox.call(function)

    def purge(self, epoch: Epoch) -> Future[None]:
        """Forget the whole cache and begin `epoch`. Running requests compute their tokens again."""
        return self._inbox.call(lambda: self._purge(epoch), before=self._flights.land_all)

    def fail_all(self, failed: Failed) -> Future[None]:
        """End every request, as at the end of a drain's grace."""
        return self._inbox.call(lambda: self._fail_all(failed))

    def probe(self) -> Future[None]:
        """Allocate a block and compute one token in it now, past the queue. The future fails when the device does."""
        return self._inbox.call(self._recovery.probe, before=self._flights.land_all)

    def health(self, max_step_s: float) -> str | None:
        """What is wrong with the engine, or None."""
        if self._dead is not None:
            return f"the engine died: {self._dead}"
        if not self._thread.is_alive():
            return "the engine is not running"
        if (elapsed_s := self._pulse.running_s()) > max_step_s:
            return f"a step has been running for {elapsed_s:.0f} s"
        return None

    @property
    def scheduler(self) -> Scheduler:
        """To be read by functions given to `call` only."""
        return self._scheduler

    @property
    def load(self) -> WorkerLoad:
        """As reported last."""
        return self._reporter.load

    @property
    def step_started_s(self) -> float | None:
        """On the monotonic clock; None between steps."""
        return self._pulse.started_s

    @property
    def idle_s(self) -> float:
        """Seconds since the engine last proved that it computes; 0 within a step."""
        return self._pulse.idle_s

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._reporter.report()
            while not self._stopping:
                self._turn()
            self._flights.land_all()
            self._outbox.flush()
            self._inbox.close(EngineDeadError("the engine has stopped"))
        except BaseException as error:
            logger.critical("the engine died", exc_info=error)
            self._dead = error
            try:
                self._outbox.flush()
                self._inbox.close(EngineDeadError(f"the engine died: {error}"))
            finally:
                self._parts.on_death(error)

    def _turn(self) -> None:
        """From the end of one step to that of the next."""
        is_idle = not self._flights and not self._scheduler.has_work
        self._keep_house(wait_s=None if is_idle else 0.0)
        if self._runner.overlaps:
            if self._parts.launch_ahead:
                self._flights.launch_ahead()
            self._listen()
        self._flights.land()
        self._inbox.run()  # what came while the device was waited for joins the next step
        self._outbox.put(self._scheduler.expire(time.monotonic()))
        if self._scheduler.has_work and not self._flights:
            self._launch()
            if not self._runner.overlaps:
                self._flights.land()
        if not self._scheduler.has_work and not self._flights:
            self._become_idle()

    def _keep_house(self, *, wait_s: float | None) -> None:
        """All that needs no token of the step in flight. `wait_s` is for a command, if none is there."""
        self._outbox.flush()
        self._reporter.report_if_due()
        self._inbox.run(wait_s=wait_s)

    def _listen(self) -> None:
        """To commands, while a prefill runs. A step of decodes alone is over before it would be worth to be woken."""
        while self._flights.prefill_runs:
            self._keep_house(wait_s=LISTEN_S)

    def _launch(self) -> None:
        """Schedule a step and give it to the device."""
        begun_s = time.monotonic()
        plan = self._scheduler.schedule(begun_s)
        if plan is None:
            raise EngineDeadError("work is left but nothing can be scheduled")
        self._outbox.put([EngineOutput(request.key, Started(request.num_cached_tokens)) for request in plan.started])
        is_suspect = any(request.wire.is_suspect for request in plan.started)
        if is_suspect or not self._runner.overlaps:
            self._outbox.flush()
        if is_suspect:
            time.sleep(SUSPECT_NOTICE_S)
        self._flights.launch(plan, begun_s)

    def _become_idle(self) -> None:
        self._outbox.flush()
        self._reporter.report()
        now_s = time.monotonic()
        if now_s - self._checked_s > INTEGRITY_INTERVAL_S:
            self._checked_s = now_s
            self._scheduler.allocator.check_integrity()
            return_free_pages()

    # --- commands -----------------------------------------------------------------------------------------------

    def _submit(
        self, key: RequestKey, wire: GenerateRequest, arrival_s: float, constraints: Mapping[int, Constraint]
    ) -> None:
        aging_s = self._scheduler.limits.aging_s
        self._parts.metrics.requests.inc()
        try:
            request = new_request(wire, key, arrival_s=arrival_s, aging_s=aging_s, constraints=constraints)
            emissions = self._scheduler.submit(request)
        except Exception as error:  # whatever one request holds, the others go on
            logger.exception(
                "request %s cannot be taken", wire.request_id, extra=about(wire.request_id, wire.traceparent)
            )
            emissions = [EngineOutput(key, failed_by(error))]
        else:
            self._parts.load_report.assign(request)
        self._outbox.put(emissions)

    def _abort(self, key: RequestKey, choice: int | None) -> None:
        request = self._scheduler.requests.get(key)
        if request is not None:
            self._outbox.put(self._scheduler.abort(request, choice, now_s=time.monotonic()))
            self._reporter.report()

    def _purge(self, epoch: Epoch) -> None:
        """Nothing is in flight."""
        self._scheduler.preempt_all()
        emptied = self._scheduler.allocator.reset()
        assert emptied, "the pool is held although every sequence was preempted"
        self.member = in_new_epoch(self.member, epoch, time.time_ns() // 1_000_000)
        self._reporter.begin_epoch(self.member)

    def _fail_all(self, failed: Failed) -> None:
        for request in list(self._scheduler.requests.values()):
            self._outbox.put(self._scheduler.fail(request, failed))
        self._outbox.flush()
        self._reporter.report()
