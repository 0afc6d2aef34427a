"""The engine: one thread that takes commands, schedules, runs the step, and hands out frames.

    HTTP side: submit, abort, call --> inbox --> [ schedule -> run -> update ] --> deliver(frames) --> HTTP side
                                                        |
                                                        +--> listener.offer(events, load) --> Redis, in its own time

The thread waits for nobody: both ways out are appends. A step that raises has changed nothing; its requests are run
again one by one, and only those fail that fail alone. When all do, the device is asked for one token; when it has none
to give, the engine is dead and says so.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from cache.events import BlockEvent
from cache.index import WorkerLoad, WorkerMember
from cache.types import HASH_BYTES, NULL_BLOCK, BlockHash, Epoch
from worker.access_times import AccessTimes
from worker.load_report import LoadReport
from worker.logs import about
from worker.memory import return_free_pages
from worker.metrics import WorkerMetrics
from worker.scheduler.plan import Emission, Plan
from worker.scheduler.request import Constraint, Request, RequestKey, new_request
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.update import failed_by
from worker.step import Draw, Runner, SequenceStep, Step
from worker.step_log import StepLog, StepLogs
from worker.wire import Failed, GenerateRequest, SamplingParams, Started

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 0.05
SUSPECT_NOTICE_S: Final = 0.02
"""For Started to reach the gateway before the step that a suspect may not let us survive."""
INTEGRITY_INTERVAL_S: Final = 10.0
_NO_ROOT: Final = BlockHash(bytes(HASH_BYTES))
T = TypeVar("T")


class EngineDeadError(RuntimeError):
    """The device computes nothing any more, or an invariant of the engine is broken."""


class Listener(Protocol):
    """Hears what the pool stored and dropped, and the load. Returns at once. Called by the engine's thread."""

    def offer(self, events: Sequence[BlockEvent], load: WorkerLoad) -> None: ...

    def begin_epoch(self, member: WorkerMember) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. `deliver` takes frames; `on_death` the reason, after which no frame comes for any open
    request. Both return at once."""

    scheduler: Scheduler
    runner: Runner
    load_report: LoadReport
    metrics: WorkerMetrics
    member: WorkerMember
    deliver: Callable[[list[Emission]], None]
    on_death: Callable[[BaseException], None]
    listener: Listener | None = None


class Engine:
    """Its public methods may be called from any thread; everything else happens on its own."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._step_logs = StepLogs()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._draining = False
        self._dead: BaseException | None = None
        self._last_progress_s = time.monotonic()
        self._reported_s = 0.0
        self._checked_s = 0.0
        self.step_started_s: float | None = None
        """On the monotonic clock; None between steps."""
        self.access_times = AccessTimes()
        """To be read by functions given to `call` only."""
        self.member = parts.member
        self.load = WorkerLoad()
        """As reported last. Frozen: any thread may read it."""

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
        """Queue a request that `refusal` has let pass; `key` is new and ascending. `steps` hears of its steps."""
        arrival_s = time.monotonic()
        if steps is not None:
            self._inbox.put(lambda: self._step_logs.open(key, steps))
        self._inbox.put(lambda: self._submit(key, wire, arrival_s, constraints))

    def abort(self, key: RequestKey, choice: int | None = None) -> None:
        """End a request, or one choice of it, before the next step. Unknown keys are no error: it may have ended."""
        self._inbox.put(lambda: self._abort(key, choice))

    def drain(self) -> None:
        """Report from now on that no request should come."""
        self._draining = True
        self._inbox.put(self._report)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps, unless the future is cancelled before."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def purge(self, epoch: Epoch) -> Future[None]:
        """Forget the whole cache and begin `epoch`. Running requests compute their tokens again."""
        return self.call(lambda: self._purge(epoch))

    def fail_all(self, failed: Failed) -> Future[None]:
        """End every request, as at the end of a drain's grace."""
        return self.call(lambda: self._fail_all(failed))

    def probe(self) -> Future[None]:
        """Allocate a block and compute one token in it now, past the queue. The future fails when the device does."""
        return self.call(self._probe)

    def health(self, max_step_s: float) -> str | None:
        """What is wrong with the engine, or None."""
        if self._dead is not None:
            return f"the engine died: {self._dead}"
        if not self._thread.is_alive():
            return "the engine is not running"
        started_s = self.step_started_s
        if started_s is not None and (elapsed_s := time.monotonic() - started_s) > max_step_s:
            return f"a step has been running for {elapsed_s:.0f} s"
        return None

    @property
    def scheduler(self) -> Scheduler:
        """To be read by functions given to `call` only."""
        return self._scheduler

    @property
    def idle_s(self) -> float:
        """Seconds since the engine last proved that it computes; 0 within a step."""
        return 0.0 if self.step_started_s is not None else time.monotonic() - self._last_progress_s

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._report()
            while not self._stopping:
                self._take_commands(wait=not self._scheduler.has_work)
                if self._scheduler.has_work:
                    self._step()
        except BaseException as error:
            logger.critical("the engine died", exc_info=error)
            self._dead = error
            self._parts.on_death(error)

    def _take_commands(self, *, wait: bool) -> None:
        try:
            command = self._inbox.get(block=wait)
            while True:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _submit(
        self, key: RequestKey, wire: GenerateRequest, arrival_s: float, constraints: Mapping[int, Constraint]
    ) -> None:
        aging_s = self._scheduler.limits.aging_s
        self._parts.metrics.requests.inc()
        try:
            request = new_request(wire, key, arrival_s=arrival_s, aging_s=aging_s, constraints=constraints)
            emissions = self._scheduler.submit(request)
        except Exception as error:  # whatever one request holds, the others go on
            logger.exception("request %s cannot be taken", wire.request_id, extra=about(wire))
            emissions = [Emission(key, failed_by(error))]
        else:
            self._parts.load_report.assign(request)
        self._deliver(emissions)

    def _abort(self, key: RequestKey, choice: int | None) -> None:
        request = self._scheduler.requests.get(key)
        if request is not None:
            self._deliver(self._scheduler.abort(request, choice, now_s=time.monotonic()))
            self._report()

    def _step(self) -> None:
        begun_s = time.monotonic()
        self._deliver(self._scheduler.expire(begun_s))
        plan = self._scheduler.schedule(begun_s)
        if plan is None and not self._scheduler.has_work:
            return
        if plan is None:
            raise EngineDeadError("work is left but nothing can be scheduled")
        metrics = self._parts.metrics
        metrics.count_started(plan.started)
        self._parts.load_report.starts.note(len(plan.started), len(self._scheduler.waiting), begun_s)
        self._deliver([Emission(request.key, Started(request.num_cached_tokens)) for request in plan.started])
        if any(request.wire.is_suspect for request in plan.started):
            time.sleep(SUSPECT_NOTICE_S)
        self.step_started_s = started_s = time.monotonic()
        if self._step_logs:
            self._step_logs.begin(plan.started, begun_s)
        metrics.count_plan(plan, started_s - begun_s)
        try:
            results = self._parts.runner.run(plan.step())
        except Exception as error:
            logger.warning(
                "a step of %d requests raised; they are run one by one", len(plan.chunks), exc_info=_trace(error)
            )
            metrics.step_failures.inc()
            self._run_one_by_one(plan)
        else:
            returned_s = time.monotonic()
            if self._step_logs:
                self._step_logs.add(plan, started_s, returned_s)
            self._deliver(self._scheduler.update(plan, results, returned_s))
            metrics.count_step(plan, returned_s - started_s, returned_s)
            self._parts.load_report.measure(plan, returned_s - started_s, returned_s)
            metrics.host_s.labels("update").observe(time.monotonic() - returned_s)
        self._last_progress_s = time.monotonic()
        self.step_started_s = None
        self._report_after_step()
        if not self._scheduler.has_work:
            self._become_idle()

    def _run_one_by_one(self, plan: Plan) -> None:
        """Each request of a failed step alone; those that fail again are to blame, unless the device is."""
        failed: list[tuple[Request, Exception]] = []
        any_returned = False
        for part in self._scheduler.retries(plan):
            request = next(iter(part.chunks)).request
            self.step_started_s = time.monotonic()
            try:
                results = self._parts.runner.run(part.step())
            except Exception as error:
                wire = request.wire
                logger.error(
                    "request %s: its step raised twice: %s",
                    wire.request_id,
                    error,
                    exc_info=_trace(error),
                    extra=about(wire),
                )
                failed.append((request, error))
            else:
                any_returned = True
                self._step_logs.add(part, self.step_started_s, time.monotonic())
                self._deliver(self._scheduler.update(part, results, time.monotonic()))
        if not any_returned:
            self._probe_or_blame(request for request, _ in failed)
        for request, cause in failed:
            self._deliver(self._scheduler.fail(request, failed_by(cause)))

    def _probe_or_blame(self, suspects: Iterable[Request]) -> None:
        """The device may be broken for good, and then by the one request of the step whose prefill it was.

        Raises EngineDeadError; before that, the culprit is failed, lest another worker computes it.
        """
        try:
            self._probe()
        except EngineDeadError:
            newcomers = [request for request in suspects if request.first_token_s is None]
            if len(newcomers) == 1:
                failed = Failed("poisonous", "the request has broken the device", retryable=False)
                self._deliver(self._scheduler.fail(newcomers[0], failed))
            raise

    def _probe(self) -> None:
        """One token in a block of the pool, or in the null block, which is nobody's, when none is free.

        Raises EngineDeadError.
        """
        allocation = self._scheduler.allocator.allocate(1, (0,), _NO_ROOT, reuse=False)
        table, slots = ((NULL_BLOCK,), [0]) if allocation is None else (allocation.block_table, allocation.slots(0, 1))
        draw = Draw(SamplingParams(max_tokens=1, temperature=0.0), 0, 1, (0,), ())
        try:
            self._parts.runner.run(Step([SequenceStep((0,), 0, table, slots, (draw,))]))
        except Exception as error:
            raise EngineDeadError(f"the device does not compute: {error}") from error
        finally:
            if allocation is not None:
                allocation.free()
        self._last_progress_s = time.monotonic()

    def _purge(self, epoch: Epoch) -> None:
        self._scheduler.preempt_all()
        emptied = self._scheduler.allocator.reset()
        assert emptied, "the pool is held although every sequence was preempted"
        self._scheduler.allocator.take_events()
        self.member = replace(self.member, epoch=epoch)
        self._parts.load_report.begin_epoch()
        if self._parts.listener is not None:
            self._parts.listener.begin_epoch(self.member)
        self._report()

    def _fail_all(self, failed: Failed) -> None:
        for request in list(self._scheduler.requests.values()):
            self._deliver(self._scheduler.fail(request, failed))
        self._report()

    def _become_idle(self) -> None:
        self._report()
        now_s = time.monotonic()
        if now_s - self._checked_s > INTEGRITY_INTERVAL_S:
            self._checked_s = now_s
            self._scheduler.allocator.check_integrity()
            return_free_pages()

    def _deliver(self, emissions: list[Emission]) -> None:
        if emissions:
            self._parts.metrics.count_emissions(emissions)
            if self._step_logs:
                self._step_logs.close_ended(emissions)
            self._parts.deliver(emissions)

    def _report_after_step(self) -> None:
        events = self._scheduler.allocator.take_events()
        if events or time.monotonic() - self._reported_s >= REPORT_INTERVAL_S:
            self._offer(events)

    def _report(self) -> None:
        self._offer(self._scheduler.allocator.take_events())

    def _offer(self, events: Sequence[BlockEvent]) -> None:
        """Hand the events, and the load of now, to whoever listens."""
        self._reported_s = time.monotonic()
        report, scheduler = self._parts.load_report, self._scheduler
        self.load = report.report(scheduler, draining=self._draining)
        stats = scheduler.allocator.stats()
        self.access_times.note(stats.num_accesses, self._reported_s)
        self._parts.metrics.set_state(scheduler, stats, report.rate.tokens_per_s)
        if self._parts.listener is not None:
            self._parts.listener.offer(events, self.load)


def _trace(error: Exception) -> Exception | None:
    """For the log: where it came from, unless a request's own fields are to blame."""
    return error if failed_by(error).code == "internal_error" else None
