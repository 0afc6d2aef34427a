"""One prompt's way through the fleet: place, send, read frames, and resume on another worker when one fails.

    place --> send --> Started --> Tokens ... --> End
      ^
      +-- refused: at once, on another worker
      +-- worker lost before a token: from the prompt, on another worker
      +-- worker lost after a token: with the tokens received, on a worker of the same numerics class
      +-- no such worker, the client has no output: from the prompt, on any worker of the revision
      +-- no worker of the revision: prepared again for the one that serves now; a silent worker is waited for
    error: no such worker, the client has output

Source: docs/reliability.md, "How it works".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from cache.records import WorkerMember
from server.errors import InternalError, RevisionGoneError, WorkerLostError
from server.metrics import known_places
from server.request.choice import Choice, ChoiceDelta, GenerationSpec
from server.request.engine_answer import EngineAnswer
from server.request.hints import NO_HINTS, RoutingHints
from server.request.retry import AttemptHistory, Stage, WorkerFailed, soonest_error
from server.request.services import RETRIES_PER_REQUEST, RequestServices
from server.request_context import Trace, attempt_carrier, trace_attempt, trace_stage
from server.router.placement import Placement
from server.router.queue import PAUSE_S, Refusals
from server.router.types import NoWorkerError, RouteRequest
from server.usage.account import PromptTimes
from server.workers.client import GenerateStream
from server.workers.connection import WorkerLost, WorkerRefused
from worker.common.frames import PackedPositions
from worker.wire import (
    PROTOCOL_VERSION,
    Embedding,
    End,
    EngineText,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PromptLogprobs,
    Started,
    Tokens,
    shared_protocol,
)

log = logging.getLogger(__name__)

Deliver = Callable[[list[ChoiceDelta]], Awaitable[None]]


class Generation:
    """All choices of one prompt. Call `run` once; cancel it to abort the choices that still run."""

    def __init__(
        self,
        spec: GenerationSpec,
        services: RequestServices,
        deadline_s: float | None = None,
        hints: RoutingHints = NO_HINTS,
    ) -> None:
        """`deadline_s`: the end of the client's time, on the monotonic clock."""
        self.spec = spec
        self._services = services
        self._deadline_s = deadline_s
        self._ttft_budget_s = hints.ttft_budget_s
        self.worker: WorkerMember | None = None
        """The worker that first took the request."""
        self.promised_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the first worker found in its cache or fetched."""
        self._counted: Placement | None = None  # whose prefill has counted them: a resumed one has other tokens
        self.fetched_tokens: Mapping[str, int] = {}
        """Those of them that it fetched into its pool, by place."""
        self.times = PromptTimes()
        self.prompt_logprobs = PackedPositions()
        self.embedding = b""
        """float32, little-endian, where the spec asks for one."""
        self.client_has_output = False
        """Set once output has been sent to the client and cannot be retracted."""
        self.choices = [Choice(spec, index) for index in range(len(spec.seeds))]
        self.answer = None if spec.text_request is None else EngineAnswer(spec.text_request, spec.model.tokenizer)
        self.route = spec.route_request(hints)
        self._history = AttemptHistory(spec, services)
        self._numerics: str | None = None
        """The numerics class of the last worker."""
        self._num_waiting_tokens = 0
        """Prompt tokens that count as waiting for the first token."""
        self._stopped_early = False
        """The gateway ended a choice at a stop string, so it does not wait for the End frame."""
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids) or (0 if self.answer is None else self.answer.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        num_ids = sum([len(choice.output_ids) for choice in self.choices])
        return num_ids if self.answer is None else max(num_ids, self.answer.num_output_tokens)

    @property
    def num_reused_tokens(self) -> int:
        """Cached prompt tokens: those that the worker found or, before its prefill, the promised whole blocks."""
        if self.num_cached_tokens is not None:
            return self.num_cached_tokens
        return self.promised_tokens - self.promised_tokens % self.spec.model.bundle.block_size

    @property
    def finished(self) -> bool:
        return None not in [choice.finish_reason for choice in self.choices]

    async def run(self, deliver: Deliver | None = None) -> None:
        """Generate every choice, and `deliver` deltas as they arrive; `take_deltas` returns the last ones.

        Raises ApiError, also for a poison request or a full queue.
        """
        spec, services = self.spec, self._services
        services.budget.add(time.monotonic(), RETRIES_PER_REQUEST)
        if spec in services.poison:
            raise InternalError("This request has failed recently and is not tried again.")
        num_tokens = max(1, self.route.num_prompt_tokens)  # estimated where the engine makes the ids
        services.queue.enter(spec.tenant, num_tokens)
        self._num_waiting_tokens = num_tokens
        self.times.wait()
        try:
            while not self.finished:
                await self._attempt(await self._place(), deliver)
        finally:
            self.times.stop()
            self._release()

    def take_deltas(self) -> list[ChoiceDelta]:
        """Return the new output of each choice since the last call."""
        if self.answer is not None:
            return self.answer.take_deltas()
        return [delta for choice in self.choices if (delta := choice.take_delta()) is not None]

    async def _place(self) -> Placement:
        """Return a worker for the next attempt as soon as there is one. Raises ApiError."""
        while True:
            resumed = any(choice.output_ids for choice in self.choices)
            full = {} if resumed or self._history.num_losses else self._full_workers()
            request = self._next_route(full, resumed=resumed)
            try:
                with trace_stage("route") as trace:
                    placement = await self._services.router.place(request)
                    if trace is not None:
                        worker, promised = placement.worker.worker_id, placement.promised_tokens
                        trace.span.set_attributes({"headstart.worker": worker, "headstart.promised_tokens": promised})
            except NoWorkerError as error:
                await self._recover_without_worker(error, full, resumed=resumed)
                continue
            if self.worker is None or not self.client_has_output:
                self.worker, self.promised_tokens = placement.worker, placement.promised_tokens
            self._numerics = placement.worker.numerics
            return placement

    def _full_workers(self) -> Refusals:
        """Return the revision's workers that are full for the tenant. Raises ApiError if all are."""
        full, model = self._services.queue.full(self.spec.tenant), self.spec.model
        workers = self._services.fleet.workers(model.name) if full else ()
        own = [(each.worker_id, each.epoch) for each in workers if each.namespace == model.fingerprint]
        full = {each: full[each] for each in own if each in full}
        if full and len(full) == len(own):
            raise soonest_error(full.values(), self.spec)
        return full

    def _next_route(self, full: Refusals, *, resumed: bool) -> RouteRequest:
        """Return the request to the router for the next attempt, without `full` and excluded workers."""
        request, history = self.route, self._history
        if self._ttft_budget_s is not None and not (resumed or self.client_has_output or history.num_losses):
            request = replace(request, ttft_budget_s=self._ttft_budget_s)
        if full or self.worker is not None:
            excluded, all_full = history.excluded.union(full), history.full.union(full)
            num_tokens = max(request.num_context_tokens, history.least_context)
            is_retry = self.worker is not None
            request = replace(
                request, excluded=excluded, full=all_full, is_retry=is_retry, num_context_tokens=num_tokens
            )
        if resumed:
            longest = max(len(choice.output_ids) for choice in self.choices if not choice.done)
            num_tokens = max(request.num_context_tokens, len(self.spec.prompt_ids) + longest + 1)
            request = replace(request, numerics=self._numerics, num_context_tokens=num_tokens)
        return request

    async def _recover_without_worker(self, error: NoWorkerError, full: Refusals, *, resumed: bool) -> None:
        """Prepare another search for a worker. Raises ApiError if another search cannot help."""
        history = self._history
        if resumed and not self.client_has_output:  # start again from the prompt, on any worker
            for choice in self.choices:
                choice.reset()
        elif not resumed and not self._services.models.is_served(self.spec.model):
            raise RevisionGoneError from error
        elif error.is_silent or self._services.models.is_learning(self.spec.model.name):
            await asyncio.sleep(4 * PAUSE_S)  # as often as workers are polled
            history.readmit_full()
        elif not (full or error.longest_context) and (history.readmit_lost() or history.may_wait()):
            await asyncio.sleep(PAUSE_S)
        else:
            raise history.no_worker_error(error, full, resumed=resumed)

    async def _attempt(self, placement: Placement, deliver: Deliver | None) -> None:
        """Generate the unfinished choices at one worker. Raises ApiError if no other attempt may follow."""
        worker = placement.worker
        self._history.stage = Stage.SENT
        self.times.wait()
        try:
            with trace_attempt(worker, placement.promised_tokens) as trace:
                request = self._wire_request(placement, attempt_carrier(trace))
                stream = GenerateStream(self._services.client, worker.url, request)
                with self._services.watch.watching(stream):
                    async with stream:
                        await self._read(stream, placement, trace, deliver)
        except (WorkerRefused, WorkerLost, WorkerFailed) as error:
            if not (isinstance(error, WorkerLost) and self.finished):  # else only the End frame is missing
                self._record_failure(worker, error)
                if self.answer is not None:
                    self.answer.restart(self.choices, client_has_output=self.client_has_output)
        finally:
            self.times.wait()
            self._services.router.closed(placement)
        if deliver is not None and not self.finished and (deltas := self.take_deltas()):
            await deliver(deltas)

    def _record_failure(self, worker: WorkerMember, error: WorkerRefused | WorkerLost | WorkerFailed) -> None:
        """Finish the choices that have all their tokens, then record the failure. Raises ApiError."""
        for choice in self.choices:
            if not choice.done and self.spec.embed is None and self.answer is None:  # an engine has last events
                choice.finish_if_complete(self.spec.sampling.max_tokens)
        try:
            self._history.failed(worker, error)
        except WorkerLostError:
            if not self.finished:
                raise

    def _wire_request(self, placement: Placement, carrier: Mapping[str, str]) -> GenerateRequest:
        spec, worker = self.spec, placement.worker
        return GenerateRequest(
            request_id=spec.request_id,
            gateway_id=self._services.gateway_id,
            epoch=worker.epoch,
            root=spec.root,
            prompt_ids=spec.prompt_ids,
            choices=tuple([choice.state() for choice in self.choices if not choice.done]),
            sampling=spec.sampling_at(worker.max_model_len),
            priority=spec.priority,
            tenant=spec.tenant,
            weight=spec.weight,
            deadline_s=None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic()),
            is_suspect=self._history.num_suspicions > 0,
            traceparent=carrier.get("traceparent", ""),
            tracestate=carrier.get("tracestate", ""),
            adapter=spec.model.adapter,
            source=placement.source,
            embed=spec.embed,
            call=None if spec.text_request is None else spec.text_request.call,
            media=spec.media,
            protocol=shared_protocol(worker) or PROTOCOL_VERSION,
        )

    async def _read(
        self, stream: GenerateStream, placement: Placement, trace: Trace | None, deliver: Deliver | None
    ) -> None:
        history = self._history
        history.stage = Stage.ACCEPTED
        while not (stream.completed or (self._stopped_early and self.finished)):
            for frame in await stream.read():
                if isinstance(frame, EngineText) and self.answer is not None:
                    if history.stage is not Stage.ANSWERED:
                        self._first_token(placement, trace)
                    self.answer.take(frame.data, self.choices[0].output_ids)
                elif isinstance(frame, Embedding):
                    size = (self.spec.embed and self.spec.embed.dimensions) or placement.worker.embedding_size
                    if len(frame.vector) != 4 * size:
                        raise WorkerLost(f"{stream.url}: an embedding of {len(frame.vector)} bytes")
                    self.embedding = frame.vector
                    self._first_token(placement, trace)
                elif not isinstance(frame, Tokens):
                    self._handle_control_frame(frame, stream, placement)
                else:
                    choice = self._choice(frame.choice)
                    if history.stage is not Stage.ANSWERED:
                        self._first_token(placement, trace)
                    if choice.finish_reason is None and choice.take(frame):
                        self._stopped_here(choice, placement.worker)
            if deliver is not None and not stream.completed and (deltas := self.take_deltas()):
                await deliver(deltas)

    def _choice(self, index: int) -> Choice:
        """Raises WorkerLost."""
        if not 0 <= index < len(self.choices):
            raise WorkerLost(f"invalid choice index {index} from worker; expected < {len(self.choices)}")
        return self.choices[index]

    def _handle_control_frame(self, frame: Frame, stream: GenerateStream, placement: Placement) -> None:
        match frame:
            case Finished():
                choice = self._choice(frame.choice)
                if choice.finish_reason is None:
                    if frame.reason not in ("stop", "length"):
                        message = f"the worker ended the choice with {frame.reason!r:.80}"
                        raise WorkerFailed(Failed("aborted", message, retryable=True))
                    if self.spec.embed is not None and not self.embedding:
                        raise WorkerLost(f"{stream.url}: Finished without the embedding")
                    choice.finish("stop" if frame.reason == "stop" else "length", frame.stop_token_id)
            case Started():
                self._history.stage, metrics = Stage.PREFILLING, self._services.metrics
                if self._history.has_answer:  # of a worker that was lost
                    (metrics.resumed if any(choice.output_ids for choice in self.choices) else metrics.restarted).inc()
                metrics.planned_fetches.inc(by=placement.source is not None)
                self._services.router.started(placement, frame.num_cached_tokens, frame.queue_s)
                self.times.start(placement.prefill_tokens_per_s, placement.prefill_fixed_s, frame.queue_s)
                if self.num_cached_tokens is None or not self.num_output_tokens:
                    self.num_cached_tokens, self._counted = frame.num_cached_tokens, placement
                    self.fetched_tokens = known_places(frame.fetched_tokens or {})
                    metrics.count_promise(self.promised_tokens, frame.num_cached_tokens)
            case PromptLogprobs():
                self.prompt_logprobs.add(frame.positions)
            case Failed():
                raise WorkerFailed(frame)
            case End():
                stream.completed = True
                if (num_cached_tokens := frame.num_cached_tokens) is not None:  # an engine's own, after a guess
                    self._services.router.corrected(placement, num_cached_tokens)
                    if placement is self._counted and self.num_cached_tokens is not None:
                        self._services.metrics.correct_promise(self.num_cached_tokens, num_cached_tokens)
                        self.num_cached_tokens = num_cached_tokens
                if not self.finished:
                    raise WorkerLost(f"{stream.url}: End before every choice was finished")

    def _first_token(self, placement: Placement, trace: Trace | None) -> None:
        self._history.answered()
        self._services.router.first_token(placement)
        self._release()
        if trace is not None:
            trace.first_token(self.num_cached_tokens)

    def _release(self) -> None:
        if self._num_waiting_tokens:
            self._services.queue.leave(self.spec.tenant, self._num_waiting_tokens)
            self._num_waiting_tokens = 0

    def _stopped_here(self, choice: Choice, worker: WorkerMember) -> None:
        """Abort a choice that a stop string ended: workers see only tokens, so this one still generates."""
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
