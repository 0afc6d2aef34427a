"""One prompt's way through the fleet: place, send, read frames, and take the rest elsewhere when a worker fails.

    place --> send --> Started --> Tokens ... --> End
      ^         |                     |
      |         | refused: at once    | worker lost: with the tokens received, to a worker of the same numerics;
      +---------+ elsewhere           | without such a worker: from the start if the client has seen nothing,
      +-------------------------------+ else an explicit error

Source: docs/reliability.md, "How it works".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cache.records import WorkerMember
from cache.types import GatewayId, WorkerIncarnation
from server.errors import WorkerLostError
from server.metrics import GatewayMetrics
from server.request.choice import Choice, ChoiceDelta, GenerationSpec
from server.request.limits import PromptTokenLimiter, Reservation
from server.request.retry import AttemptHistory, RetryPolicy, Stage, WorkerFailed, backpressure_error, no_worker_error
from server.request_context import attempt, stage
from server.router.placement import Placement
from server.router.router import Router
from server.router.types import NoWorkerError
from server.text.retokenisation import RetokenisationCheck
from server.tracing import AttemptTrace
from server.workers.client import GenerateStream, WorkerClient, WorkerLost, WorkerRefused
from server.workers.watch import StallWatch
from worker.wire import (
    PROTOCOL_VERSION,
    End,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PromptLogprobs,
    Started,
    TokenLogprobs,
    Tokens,
    shared_protocol,
)

log = logging.getLogger(__name__)

WORKER_WAIT_S: Final = 0.25
"""Pause before the next search for a worker: a lost one may live, or a new one start."""

Deliver = Callable[[list[ChoiceDelta]], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RequestServices:
    """The parts that every generation of this process shares."""

    gateway_id: GatewayId
    router: Router
    client: WorkerClient
    watch: StallWatch
    metrics: GatewayMetrics
    retry: RetryPolicy
    limiter: PromptTokenLimiter
    retokenisation: RetokenisationCheck = field(default_factory=RetokenisationCheck)


class Generation:
    """All choices of one prompt. Call `run` once; cancel it to abort the choices that still run."""

    def __init__(self, spec: GenerationSpec, services: RequestServices, deadline_s: float | None = None) -> None:
        """`deadline_s`: when the client's time is over, on the monotonic clock."""
        self.spec = spec
        self._services = services
        self._deadline_s = deadline_s
        self.worker: WorkerMember | None = None
        """The worker that first took the request."""
        self.promised_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the first worker found in its cache."""
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self.committed = False
        """Set when the client has seen a part, which may not be taken back."""
        self.choices = [Choice(spec, index) for index in range(len(spec.seeds))]
        self._hashes = spec.prompt_hashes()
        self._history = AttemptHistory(spec)
        self._numerics: str | None = None
        """The numerics class of the last worker."""
        self._reservation: Reservation | None = None
        self._stopped_early = False
        """A stop string ended a choice here, so that the last choice may end before the worker's End frame."""
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def num_output_tokens(self) -> int:
        return sum([len(choice.output_ids) for choice in self.choices])

    @property
    def num_reused_tokens(self) -> int:
        """Cached prompt tokens: what the worker found or, until it has looked, whole blocks that were promised."""
        if self.num_cached_tokens is not None:
            return self.num_cached_tokens
        return self.promised_tokens - self.promised_tokens % self.spec.model.bundle.block_size

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens up to the one that ends the model's reasoning."""
        end = self.spec.end_of_thought_id
        if end is None:
            return 0
        return sum(c.output_ids.index(end) + 1 for c in self.choices if end in c.output_ids)

    @property
    def finished(self) -> bool:
        return None not in [choice.finish_reason for choice in self.choices]

    async def run(self, deliver: Deliver | None = None) -> None:
        """Generate every choice; `deliver` what is new as it arrives. Without it, `drain` once. Raises ApiError."""
        self._admit()
        try:
            while not self.finished:
                await self._attempt(await self._place(), deliver)
        finally:
            self._account()

    def drain(self) -> list[ChoiceDelta]:
        """Return what each choice gained since the last call."""
        return [delta for choice in self.choices if (delta := choice.drain()) is not None]

    def _admit(self) -> None:
        """Reserve room for the prompt. Raises ApiError for a poison request, or when no more prompts may wait."""
        spec, services = self.spec, self._services
        services.retry.admit(spec)
        self._reservation = services.limiter.reserve(spec.tenant, len(spec.prompt_ids))
        if (same := services.retokenisation.continued(self._hashes)) is not None:
            services.metrics.continued.inc("same" if same else "other")

    def _account(self) -> None:
        """Release the reservation, and remember the answer for the conversation's next turn."""
        assert self._reservation is not None
        self._reservation.release()
        spec = self.spec
        if len(self.choices) == 1 and self.finished:
            block_size = spec.model.bundle.block_size
            self._services.retokenisation.answered(
                spec.prompt_ids, self._hashes, self.choices[0].output_ids, block_size
            )

    async def _attempt(self, placement: Placement, deliver: Deliver | None) -> None:
        """Let one worker generate the unfinished choices. Raises ApiError when no other attempt may follow."""
        worker, ok = placement.worker, False
        self._history.stage = Stage.SENT
        try:
            with attempt(worker, placement.promised_tokens) as trace:
                carrier = {} if trace is None else trace.carrier()
                stream = self._services.client.generate(worker.url, self._wire_request(worker, carrier))
                with self._services.watch.watching(stream):
                    async with stream:
                        await self._read(stream, placement, trace, deliver)
            ok = True
        except (WorkerRefused, WorkerLost, WorkerFailed) as error:
            self._failed(worker, error)
        finally:
            placement.close()
        if not ok and deliver is not None and (deltas := self.drain()):
            await deliver(deltas)

    async def _read(
        self, stream: GenerateStream, placement: Placement, trace: AttemptTrace | None, deliver: Deliver | None
    ) -> None:
        self._history.stage = Stage.ACCEPTED
        while not (stream.completed or (self._stopped_early and self.finished)):
            for frame in await stream.read():
                if type(frame) is Tokens:
                    self._take(frame, placement, trace)
                else:
                    self._absorb(frame, stream, placement)
            if deliver is not None and (deltas := self.drain()):
                await deliver(deltas)

    def _take(self, frame: Tokens, placement: Placement, trace: AttemptTrace | None) -> None:
        if self._history.stage is not Stage.ANSWERED:
            self._first_token(placement, trace)
        choice = self._choice(frame.choice)
        if choice.finish_reason is None and choice.take(frame):
            self._stopped_here(choice, placement.worker)

    def _absorb(self, frame: Frame, stream: GenerateStream, placement: Placement) -> None:
        if isinstance(frame, Finished):
            choice = self._choice(frame.choice)
            if choice.done:
                return
            if frame.reason == "abort":
                raise WorkerFailed(Failed("aborted", "the worker gave the request up", retryable=True))
            choice.finish(frame)
        elif isinstance(frame, Started):
            self._history.stage = Stage.PREFILLING
            placement.prefill_started(frame.num_cached_tokens)
            if self.num_cached_tokens is None or not self.num_output_tokens:
                self.num_cached_tokens = frame.num_cached_tokens
                self._services.metrics.count_prompt(self.promised_tokens, frame.num_cached_tokens)
        elif isinstance(frame, PromptLogprobs):
            self.prompt_logprobs = frame.positions
        elif isinstance(frame, Failed):
            raise WorkerFailed(frame)
        else:
            assert isinstance(frame, End), frame
            stream.complete()
            if not self.finished:
                raise WorkerLost(f"{stream.url}: End before every choice was finished")

    def _first_token(self, placement: Placement, trace: AttemptTrace | None) -> None:
        assert self._reservation is not None
        self._history.answered()
        placement.first_token()
        self._reservation.release()
        if trace is not None:
            trace.first_token(self.num_cached_tokens)

    def _choice(self, index: int) -> Choice:
        if not 0 <= index < len(self.choices):
            raise WorkerLost(f"the worker speaks of choice {index}, there are {len(self.choices)}")
        return self.choices[index]

    def _stopped_here(self, choice: Choice, worker: WorkerMember) -> None:
        """Abort a choice that a stop string ended: the worker, which knows tokens only, still writes it."""
        self._stopped_early = True
        if not self.finished:  # else the connection is closed, which ends all
            task = asyncio.create_task(self._abort(worker, choice.index))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, worker: WorkerMember, choice: int) -> None:
        try:
            await self._services.client.abort(worker.url, self.spec.request_id, choice)
        except WorkerLost as error:
            log.info("%s: abort of choice %d failed: %s", self.spec.request_id, choice, error)

    def _failed(self, worker: WorkerMember, error: WorkerRefused | WorkerLost | WorkerFailed) -> None:
        """Record a failed attempt. Raises ApiError when no other may follow."""
        retry = self._services.retry
        match error:
            case WorkerRefused():
                retry.refused(self._history, worker, error)
            case WorkerFailed():
                retry.failed(self._history, worker, error)
            case WorkerLost() if not self.finished:
                retry.lost(self._history, worker, error)
        for choice in self.choices:
            if not choice.done:
                choice.finish_if_complete(self.spec.sampling.max_tokens)

    async def _place(self) -> Placement:
        """Return a worker for the next attempt, as soon as there is one. Raises ApiError."""
        spec, history, router = self.spec, self._history, self._services.router
        while True:
            resumed = self.num_output_tokens > 0
            full: Mapping[WorkerIncarnation, WorkerRefused] = {}
            if not (resumed or history.num_losses):
                full = self._services.retry.backpressure.refusals(spec.tenant)
            if full and all((each.worker_id, each.epoch) in full for each in router.fleet.workers(spec.model.name)):
                raise backpressure_error(full, spec)
            numerics = self._numerics if resumed else None
            request = spec.route_request(self._hashes, numerics, frozenset(history.excluded).union(full))
            try:
                with stage("route") as span:
                    placement = await router.place(request)
                    if span is not None:
                        span.set_attribute("headstart.worker", placement.worker.worker_id)
                        span.set_attribute("headstart.promised_tokens", placement.promised_tokens)
            except NoWorkerError as error:
                await self._wait_for_worker(error, resumed, full)
                continue
            if self.worker is None or not self.committed:
                self.worker = placement.worker
                self.promised_tokens = placement.promised_tokens
            if resumed:
                self._services.metrics.resumed.inc()
            self._numerics = placement.worker.numerics
            return placement

    async def _wait_for_worker(
        self, error: NoWorkerError, resumed: bool, full: Mapping[WorkerIncarnation, WorkerRefused]
    ) -> None:
        """Prepare another search for a worker. Raises ApiError when that cannot help."""
        history = self._history
        if full:
            raise backpressure_error(full, self.spec) from error
        if resumed and not self.committed:
            self._restart()
        elif history.readmit_lost() or (not error.contended and history.may_wait()):
            await asyncio.sleep(WORKER_WAIT_S)
        elif resumed:
            message = "The worker was lost and no other can continue its answer."
            raise WorkerLostError(message, retry_after_s=error.retry_after_s) from error
        else:
            raise no_worker_error(history, error) from error

    def _restart(self) -> None:
        """Start from the prompt on any worker: the client has seen nothing."""
        for choice in self.choices:
            choice.reset()
        self._services.metrics.restarted.inc()

    def _wire_request(self, worker: WorkerMember, carrier: Mapping[str, str]) -> GenerateRequest:
        spec = self.spec
        return GenerateRequest(
            request_id=spec.request_id,
            gateway_id=self._services.gateway_id,
            epoch=worker.epoch,
            root=spec.root,
            prompt_ids=spec.prompt_ids,
            choices=tuple([choice.state() for choice in self.choices if not choice.done]),
            sampling=spec.sampling,
            priority=spec.priority,
            tenant=spec.tenant,
            deadline_s=None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic()),
            is_suspect=self._history.is_poison_candidate,
            traceparent=carrier.get("traceparent", ""),
            tracestate=carrier.get("tracestate", ""),
            protocol=shared_protocol(worker) or PROTOCOL_VERSION,
        )
