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
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

from cache.records import WorkerMember
from server.errors import InternalError, WorkerLostError
from server.request.backend import Backend
from server.request.choice import Choice, ChoiceDelta, merged
from server.request.failures import Failures, WorkerFailed
from server.request.losses import Stage
from server.request.spec import GenerationSpec, prompt_hashes, route_request
from server.request.waiting_room import Place
from server.request_context import attempt, stage
from server.router.placement import NoWorkerError, Placement
from server.tracing import AttemptTrace
from server.workers.client import GenerateStream, WorkerLost, WorkerRefused
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

SECOND_CHANCE_S: Final = 0.25
"""Before we look again for a worker, because there is none: one that was lost may live, or a new one start."""


class Generation:
    """Iterate `deltas` once; close the iterator, at whatever point, to abort what still runs."""

    def __init__(self, spec: GenerationSpec, backend: Backend, deadline_s: float | None = None) -> None:
        """`deadline_s`: on the monotonic clock, when whoever reads stops to."""
        self.spec = spec
        self._deadline_s = deadline_s
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
        pieces = spec.model.tokenizer.token_bytes
        self.choices = [
            Choice(index, seed, pieces, spec.rules, with_logprobs=with_logprobs)
            for index, seed in enumerate(spec.seeds)
        ]
        self._hashes = prompt_hashes(spec)
        self._numerics: str | None = None
        self._failures = Failures(spec, backend)
        self._stage = Stage.SENT
        self._waits = True
        """No token of this attempt has come."""
        self._stopped_early = False
        """A choice ended here, so that the last one's end is not followed by the worker's End at once."""
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.output_ids) for choice in self.choices)

    @property
    def num_reused_tokens(self) -> int:
        """Cached prompt tokens: what the worker found or, until it has looked, whole blocks that were promised."""
        if self.num_cached_tokens is not None:
            return self.num_cached_tokens
        return self.promised_tokens - self.promised_tokens % self.spec.model.bundle.block_size

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens up to the one that ends the model's thoughts."""
        end = self.spec.end_of_thought_id
        if end is None:
            return 0
        return sum(c.output_ids.index(end) + 1 for c in self.choices if end in c.output_ids)

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """What each choice gained, as it arrives. Raises ApiError."""
        place = self._enter()
        try:
            while not self._finished():
                placement = await self._choose()
                worker, ok = placement.worker, False
                try:
                    with (
                        attempt(worker, placement.promised_tokens) as trace,
                        self._backend.watch.watching(self._send_to(worker, trace)) as stream,
                    ):
                        async with stream:
                            self._stage = Stage.ACCEPTED
                            while not (stream.completed or (self._stopped_early and self._finished())):
                                self._absorb(await stream.read(), placement, stream)
                                if self._waits and self._stage is Stage.ANSWERED:
                                    self._first_token(placement, place, trace)
                                if batch := self._drain():
                                    yield batch
                    ok = True
                except (WorkerRefused, WorkerLost, WorkerFailed) as error:
                    self._failed(worker, error)
                finally:
                    placement.close()
                if not ok and (batch := self._drain()):
                    yield batch
        finally:
            place.leave()
            self._remember()

    def _enter(self) -> Place:
        """Raises ApiError for what shall not be tried, or cannot wait here."""
        spec, backend = self.spec, self._backend
        backend.budget.earn()
        if backend.quarantine.holds(spec.root, spec.prompt_ids, spec.sampling):
            raise InternalError("This request has failed a moment ago and is not tried again.")
        place = backend.waiting_room.enter(spec.tenant, len(spec.prompt_ids))
        if (same := backend.turns.continued(self._hashes)) is not None:
            backend.metrics.continued(same=same)
        return place

    def _remember(self) -> None:
        """For the next turn of this conversation, if there is one."""
        spec = self.spec
        if len(self.choices) == 1 and self._finished():
            output_ids, block_size = self.choices[0].output_ids, spec.model.bundle.block_size
            self._backend.turns.answered(spec.prompt_ids, self._hashes, output_ids, block_size)

    def _send_to(self, worker: WorkerMember, trace: AttemptTrace | None) -> GenerateStream:
        """To be entered: that sends it."""
        self._stage, self._waits = Stage.SENT, True
        carrier = {} if trace is None else trace.carrier()
        return self._backend.client.generate(worker.url, self._wire_request(worker, carrier))

    def _first_token(self, placement: Placement, place: Place, trace: AttemptTrace | None) -> None:
        self._waits = False
        placement.first_token()
        place.leave()
        if trace is not None:
            trace.first_token(self.num_cached_tokens)

    def _failed(self, worker: WorkerMember, error: WorkerRefused | WorkerLost | WorkerFailed) -> None:
        """Raises ApiError when no other attempt is made for what is not finished."""
        match error:
            case WorkerRefused():
                self._failures.refused(worker, error)
            case WorkerFailed():
                self._failures.failed(worker, error, self._stage)
            case WorkerLost() if not self._finished():
                self._failures.lost(worker, error, self._stage)
        for choice in self.choices:
            if not choice.done:
                choice.finish_if_complete(self.spec.sampling.max_tokens)

    def _finished(self) -> bool:
        return all(choice.done for choice in self.choices)

    def _has_output(self) -> bool:
        return any(choice.output_ids for choice in self.choices)

    async def _choose(self) -> Placement:
        """A worker for this attempt. Raises ApiError."""
        losses = self._failures.losses
        resumed = self._has_output()
        numerics = self._numerics if resumed else None
        full = {} if resumed or losses.num_losses else self._backend.full_queues.of(self.spec.tenant)
        if full and all(
            (worker.worker_id, worker.epoch) in full for worker in self._backend.router.workers(self.spec.model.name)
        ):
            raise self._failures.full(full)
        excluded = frozenset(losses.excluded).union(full)
        try:
            with stage("route") as span:
                placement = await self._backend.router.place(route_request(self.spec, self._hashes, numerics, excluded))
                if span is not None:
                    span.set_attribute("headstart.worker", placement.worker.worker_id)
                    span.set_attribute("headstart.promised_tokens", placement.promised_tokens)
        except NoWorkerError as error:
            if full:
                raise self._failures.full(full) from error
            if resumed and not self.committed:
                self._restart()
            elif losses.second_chance() or (not error.contended and losses.look_again()):
                await asyncio.sleep(SECOND_CHANCE_S)
            elif resumed:
                message = "The worker was lost and no other can continue its answer."
                raise WorkerLostError(message, retry_after_s=error.retry_after_s) from error
            else:
                raise self._failures.no_worker(error) from error
            return await self._choose()
        if self.worker is None or not self.committed:
            self.worker = placement.worker
            self.promised_tokens = placement.promised_tokens
        if resumed:
            self._backend.metrics.resumed.inc()
        self._numerics = placement.worker.numerics
        return placement

    def _restart(self) -> None:
        """Begin again, on any worker: the client has seen nothing."""
        for choice in self.choices:
            choice.reset()
        self.num_restarts += 1
        self._backend.metrics.restarted.inc()

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
            tenant=self.spec.tenant,
            deadline_s=None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic()),
            is_suspect=self._failures.losses.is_suspect,
            traceparent=carrier.get("traceparent", ""),
            tracestate=carrier.get("tracestate", ""),
            protocol=shared_protocol(worker) or PROTOCOL_VERSION,
        )

    def _absorb(self, frames: list[Frame], placement: Placement, stream: GenerateStream) -> None:
        for frame in frames if len(frames) == 1 else merged(frames):
            if type(frame) is Tokens:
                if self._stage is not Stage.ANSWERED:
                    self._stage = Stage.ANSWERED
                    self._failures.losses.cleared()
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
                self._stage = Stage.BEGUN
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
