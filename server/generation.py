"""One prompt's way through the fleet: place, send, read frames, and take the rest elsewhere when a worker fails.

    place --> send --> Started --> Tokens ... --> End
      ^         |                     |
      |         | refused: at once    | worker lost: with the tokens received, to a worker of the same numerics;
      +---------+ elsewhere           | without such a worker: from the start if the client has seen nothing,
      +-------------------------------+ else an explicit error

Source: docs/architecture.md, "Resume".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from cache.hashing import hash_chain
from cache.index import WorkerMember
from cache.types import BlockHash, GatewayId, WorkerId
from server.choice import Choice, ChoiceDelta
from server.detokenizer import TextRules
from server.errors import (
    ApiError,
    BodyTooLargeError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    WorkerLostError,
)
from server.metrics import GatewayMetrics
from server.models import ServedModel
from server.retry import RetryBudget
from server.router.placement import NoWorkerError, Placement, Router, RouteRequest
from server.tracing import attempt, stage
from server.watch import StallWatch
from server.worker_client import GenerateStream, StaleConnection, WorkerClient, WorkerLost, WorkerRefused
from worker.wire import (
    End,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    Started,
    TokenLogprobs,
    Tokens,
)

log = logging.getLogger(__name__)

MAX_LOSSES: Final = 3
"""A request that was on this many dying workers is suspected of killing them."""
MAX_REFUSALS: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """What every generation of this process shares."""

    gateway_id: GatewayId
    router: Router
    client: WorkerClient
    watch: StallWatch
    budget: RetryBudget
    metrics: GatewayMetrics
    report_failure: Callable[[WorkerId], None]
    """Tells the fleet that a worker could not be reached, or was lost."""


@dataclass(frozen=True, slots=True)
class ParamNames:
    """The request's fields that a worker's refusal may be about."""

    prompt: str
    grammar: str


@dataclass(frozen=True, slots=True, eq=False)
class GenerationSpec:
    """One prompt and how to answer it."""

    request_id: str
    model: ServedModel
    prompt_ids: Sequence[int]
    root: BlockHash
    seeds: tuple[int, ...]
    """One a choice."""
    sampling: SamplingParams
    rules: TextRules
    params: ParamNames
    first_index: int = 0
    """What the first choice is called in the answer; the deltas' `choice` counts from here."""
    priority: int = 0
    affinity_key: str | None = None
    end_of_thought_id: int | None = None
    """The token that ends the model's thoughts, when it has any and this is one token."""


class WorkerFailed(Exception):
    """The worker ended the stream with Failed."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.code}: {failed.message}")
        self.failed = failed


class Generation:
    """Iterate `deltas` once; close the iterator, at whatever point, to abort what still runs."""

    def __init__(self, spec: GenerationSpec, backend: Backend) -> None:
        self.spec = spec
        self.worker: WorkerMember | None = None
        """The worker that took it first."""
        self.promised_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the first worker found in its cache."""
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self.committed = False
        """Set by the reader when the client has seen a part: from then on nothing may be taken back."""
        self.num_restarts = 0
        """A reader that has collected deltas drops them when this has grown; never after `committed`."""
        self._backend = backend
        with_logprobs = spec.sampling.logprobs is not None
        pieces = spec.model.tokenizer.pieces
        self.choices = [
            Choice(index, seed, pieces, spec.rules, with_logprobs=with_logprobs)
            for index, seed in enumerate(spec.seeds)
        ]
        self._hashes = prompt_hashes(spec)
        self._numerics: str | None = None
        self._excluded: set[WorkerId] = set()
        self._num_losses = 0
        self._num_refusals = 0
        self._last_refusal: WorkerRefused | None = None
        self._stopped_early = False
        """A choice ended here, so that the last one's end is not followed by the worker's End at once."""
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.output_ids) for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens up to the one that ends the model's thoughts."""
        end = self.spec.end_of_thought_id
        if end is None:
            return 0
        return sum(c.output_ids.index(end) + 1 for c in self.choices if end in c.output_ids)

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """What each choice gained, as it arrives. Raises ApiError."""
        self._backend.budget.earn()
        while not self._finished():
            placement = await self._place()
            ok = False
            try:
                async with aclosing(self._attempt(placement)) as batches:
                    async for batch in batches:
                        yield batch
                ok = True
            except WorkerRefused as error:
                self._refused(placement.worker, error)
            except WorkerLost as error:
                if self._finished():
                    return
                self._lost(placement.worker, error)
            except WorkerFailed as error:
                if not error.failed.retryable:
                    raise error_of(error.failed, self.spec.params) from error
                self._lost(placement.worker, error)
            finally:
                placement.close(ok=ok)
            if not ok:
                for choice in self.choices:
                    if not choice.done:
                        choice.finish_if_complete(self.spec.sampling.max_tokens)
                if batch := self._drain():
                    yield batch

    def _finished(self) -> bool:
        return all(choice.done for choice in self.choices)

    async def _place(self) -> Placement:
        """A worker for this attempt. Raises ApiError."""
        resumed = any(choice.output_ids for choice in self.choices)
        try:
            with stage("route") as span:
                placement = await self._backend.router.place(
                    route_request(
                        self.spec, self._hashes, self._numerics if resumed else None, frozenset(self._excluded)
                    )
                )
                if span is not None:
                    span.set_attribute("headstart.worker", placement.worker.worker_id)
                    span.set_attribute("headstart.promised_tokens", placement.promised_tokens)
        except NoWorkerError as error:
            if not resumed:
                raise self._no_worker(error) from error
            if self.committed:
                message = "The worker was lost and no other can continue its answer."
                raise WorkerLostError(message, retry_after_s=error.retry_after_s) from error
            for choice in self.choices:
                choice.reset()
            self.num_restarts += 1
            self._backend.metrics.restarted.inc()
            return await self._place()
        if self.worker is None or not self.committed:
            self.worker = placement.worker
            self.promised_tokens = placement.promised_tokens
        if resumed:
            self._backend.metrics.resumed.inc()
        self._numerics = placement.worker.numerics
        return placement

    def _no_worker(self, error: NoWorkerError) -> ApiError:
        """Workers that refused or died say more than the router, which was told to leave them out."""
        if self._num_losses:
            return WorkerLostError("The worker was lost before it could answer.", retry_after_s=error.retry_after_s)
        if self._last_refusal is not None:
            return error_of(self._last_refusal.failed, self.spec.params, self._last_refusal.status)
        if error.contended:
            return OverloadedError(str(error), code="queue_full", retry_after_s=error.retry_after_s)
        return UnavailableError(str(error), retry_after_s=error.retry_after_s)

    def _wire_request(self, worker: WorkerMember, carrier: Mapping[str, str]) -> GenerateRequest:
        return GenerateRequest(
            request_id=self.spec.request_id,
            gateway_id=self._backend.gateway_id,
            epoch=worker.epoch,
            root=self.spec.root,
            prompt_ids=self.spec.prompt_ids,
            choices=tuple(choice.state() for choice in self.choices if not choice.done),
            sampling=self.spec.sampling,
            priority=self.spec.priority,
            traceparent=carrier.get("traceparent", ""),
            tracestate=carrier.get("tracestate", ""),
        )

    async def _attempt(self, placement: Placement) -> AsyncGenerator[list[ChoiceDelta]]:
        worker, first_token = placement.worker, False
        with attempt(worker, placement.promised_tokens) as trace:
            carrier = {} if trace is None else trace.carrier()
            stream = self._backend.client.generate(worker.url, self._wire_request(worker, carrier))
            with self._backend.watch.watching(stream):  # from the start: a worker may hang before its headers
                async with stream:
                    while not (stream.completed or (self._stopped_early and self._finished())):
                        self._absorb(await stream.read(), placement, stream)
                        if not first_token and any(choice.output_ids for choice in self.choices):
                            first_token = True
                            placement.first_token()
                            if trace is not None:
                                trace.first_token(self.num_cached_tokens)
                        if batch := self._drain():
                            yield batch

    def _absorb(self, frames: list[Frame], placement: Placement, stream: GenerateStream) -> None:
        for frame in frames:
            if type(frame) is Tokens:
                choice = self._choice(frame.choice)
                if not choice.done and choice.take(frame):
                    self._stopped_here(choice, placement.worker)
            elif isinstance(frame, Finished):
                choice = self._choice(frame.choice)
                if choice.done:
                    continue
                if frame.reason == "abort":
                    raise WorkerFailed(Failed("aborted", "the worker gave the request up", retryable=True))
                choice.finish(frame)
            elif isinstance(frame, Started):
                placement.prefill_started(frame.num_cached_tokens)
                if self.num_cached_tokens is None or not self.num_output_tokens:
                    self.num_cached_tokens = frame.num_cached_tokens
                    self._backend.metrics.count_prompt(self.promised_tokens, frame.num_cached_tokens)
            elif isinstance(frame, PromptLogprobs):
                self.prompt_logprobs = frame.positions
            elif isinstance(frame, Failed):
                raise WorkerFailed(frame)
            else:
                assert isinstance(frame, End), frame
                stream.complete()
                if not self._finished():
                    raise WorkerLost(f"{stream.url}: End before every choice was finished")

    def _choice(self, index: int) -> Choice:
        if not 0 <= index < len(self.choices):
            raise WorkerLost(f"the worker speaks of choice {index}, there are {len(self.choices)}")
        return self.choices[index]

    def _drain(self) -> list[ChoiceDelta]:
        deltas = [delta for choice in self.choices if (delta := choice.drain()) is not None]
        if self.spec.first_index:
            for delta in deltas:
                delta.choice += self.spec.first_index
        return deltas

    def _stopped_here(self, choice: Choice, worker: WorkerMember) -> None:
        """A stop string ended a choice: the worker, which knows tokens only, still writes it."""
        self._stopped_early = True
        if not self._finished():  # else the connection is closed, which ends all
            task = asyncio.create_task(self._abort(worker, choice.index))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, worker: WorkerMember, choice: int) -> None:
        try:
            await self._backend.client.abort(worker.url, self.spec.request_id, choice)
        except WorkerLost as error:
            log.info("%s: abort of choice %d failed: %s", self.spec.request_id, choice, error)

    def _refused(self, worker: WorkerMember, error: WorkerRefused) -> None:
        """Nothing was begun. Raises ApiError when it shall not be tried again."""
        metrics = self._backend.metrics
        metrics.refused(error.status)
        self._num_refusals += 1
        self._last_refusal = error
        if error.status not in (409, 429, 502, 503, 504):
            raise error_of(error.failed, self.spec.params, error.status) from error
        if error.status != 409 or self._num_refusals > 1:
            self._excluded.add(worker.worker_id)
        if self._num_refusals > MAX_REFUSALS or not self._backend.budget.spend():
            raise error_of(error.failed, self.spec.params, error.status) from error
        log.info("%s: worker %s refused: %s", self.spec.request_id, worker.worker_id, error)

    def _lost(self, worker: WorkerMember, error: Exception) -> None:
        """The worker is gone, or gave up. Raises ApiError when the request shall not be tried again."""
        self._backend.metrics.lost.inc()
        log.warning("%s: worker %s lost: %s", self.spec.request_id, worker.worker_id, error)
        if isinstance(error, StaleConnection) and self._num_refusals == 0:
            self._num_refusals += 1
            return
        if isinstance(error, WorkerLost):
            self._backend.report_failure(worker.worker_id)
        self._num_losses += 1
        self._excluded.add(worker.worker_id)
        if self._num_losses >= MAX_LOSSES:
            raise InternalError("The request failed on several workers and is not tried again.") from error


def route_request(
    spec: GenerationSpec,
    hashes: Sequence[BlockHash],
    numerics: str | None = None,
    excluded: frozenset[WorkerId] = frozenset(),
) -> RouteRequest:
    return RouteRequest(
        request_id=spec.request_id,
        model=spec.model.name,
        num_prompt_tokens=len(spec.prompt_ids),
        hashes=hashes,
        numerics=numerics,
        excluded=excluded,
        affinity_key=spec.affinity_key,
    )


def prompt_hashes(spec: GenerationSpec) -> list[BlockHash]:
    return hash_chain(spec.root, spec.prompt_ids, spec.model.bundle.block_size)


def error_of(failed: Failed, params: ParamNames, status: int | None = None) -> ApiError:
    """What a worker's Failed means to the client."""
    match failed.code:
        case "context_length_exceeded":
            return ContextLengthError(failed.message, param=params.prompt)
        case "invalid_grammar":
            return InvalidRequestError(failed.message, param=params.grammar)
        case "queue_full" | "queue_timeout" | "no_room" | "overloaded":
            return OverloadedError(failed.message, code="queue_full", retry_after_s=1.0)
        case "draining" | "wrong_epoch" | "not_ready":
            return UnavailableError("The worker is not ready; try again.", retry_after_s=1.0)
        case "payload_too_large":
            return BodyTooLargeError("The request is too large for a worker.")
        case "deadline" | "timeout":
            return DeadlineError(failed.message)
    if status == 400 or failed.code.startswith("invalid"):
        return InvalidRequestError(failed.message)
    if status == 429:
        return OverloadedError(failed.message, code="queue_full", retry_after_s=1.0)
    if status in (502, 503, 504) or failed.retryable:
        return UnavailableError("The worker could not take the request; try again.", retry_after_s=1.0)
    log.error("a worker failed a request: %s: %s", failed.code, failed.message)
    return InternalError("The worker met an internal error.")
