"""What the HTTP side works with: one worker from the first moment, when its model loads, to its last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cache.records import WorkerState
from cache.types import Epoch
from worker.common.tracing import Tracing
from worker.engine.engine import Engine
from worker.engine.metrics import WorkerMetrics
from worker.engine.recovery import EngineDeadError
from worker.grammar import GrammarCompiler, GrammarError
from worker.http.streams import Stream, Streams
from worker.http.tracing import StreamTrace
from worker.scheduler.budget import BatchLimits
from worker.scheduler.validation import refusal
from worker.wire import Failed, GenerateRequest, TokenizerBundle, pack

logger = logging.getLogger(__name__)

PROBE_AFTER_IDLE_S: Final = 10.0
PROBE_TIMEOUT_S: Final = 5.0
STATUS_OF: Final = {
    "invalid_request": 400,
    "invalid_grammar": 400,
    "payload_too_large": 413,
    "wrong_epoch": 409,
    "queue_full": 429,
    "draining": 503,
    "not_ready": 503,
}


class Refusal(Exception):
    """The request gets no stream: `status` and one Failed frame."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed
        self.status = STATUS_OF.get(failed.code, 500)


@dataclass(frozen=True, slots=True)
class ServingParts:
    """What exists once the model is loaded."""

    engine: Engine
    streams: Streams
    limits: BatchLimits
    bundle: TokenizerBundle
    grammars: GrammarCompiler
    pool_tokens: int
    max_step_s: float


def new_epoch() -> Epoch:
    return Epoch(secrets.token_hex(8))


class WorkerService:
    """Owned by the event loop. Before `serve` everything but liveness is refused."""

    def __init__(self, metrics: WorkerMetrics, tracing: Tracing | None = None) -> None:
        self.metrics = metrics
        self._tracing = tracing
        self.progress = "starting"
        self.draining = False
        self.index_problem: Callable[[], str | None] = lambda: None
        """Why the shared index does not know what this worker holds."""
        self._parts: ServingParts | None = None
        self._bundle = b""

    def serve(self, parts: ServingParts) -> None:
        """The model is loaded: take requests."""
        self._bundle = pack(parts.bundle)
        self._parts = parts

    @property
    def parts(self) -> ServingParts:
        """Raises Refusal while the model loads."""
        if self._parts is None:
            raise Refusal(Failed("not_ready", f"the worker is {self.progress}", retryable=True))
        return self._parts

    @property
    def bundle(self) -> bytes:
        assert self.parts
        return self._bundle

    @property
    def state(self) -> WorkerState:
        engine = self.parts.engine
        return WorkerState(engine.member, engine.load)

    @property
    def num_open(self) -> int:
        return 0 if self._parts is None else len(self._parts.streams)

    async def submit(self, request: GenerateRequest) -> Stream:
        """Queue the request. The caller reads the stream and gives it back to `release`. Raises Refusal."""
        parts = self.parts
        self._check(parts, request)
        try:
            constraints = await parts.grammars.constraints(request)
        except GrammarError as error:
            raise self._refusal(Failed("invalid_grammar", str(error), retryable=False)) from error
        if request.sampling.grammar is not None:  # compiled meanwhile, while the engine may have died, or others come
            self._check(parts, request)
        stream = parts.streams.open(request)
        if self._tracing is not None:
            stream.trace = StreamTrace.begin(self._tracing, request)
        steps = None if stream.trace is None else stream.trace.steps
        parts.engine.submit(stream.key, request, constraints, steps)
        return stream

    def release(self, stream: Stream) -> None:
        """The reader has gone. What the engine still computes for it is aborted."""
        parts = self.parts
        if parts.streams.close(stream):
            parts.engine.abort(stream.key)
        if stream.trace is not None:
            stream.trace.end(stream.last)

    def abort(self, request_id: str, choice: int | None) -> int:
        """Abort by the client's name for it; the number of requests found."""
        parts = self.parts
        streams = parts.streams.by_request_id(request_id)
        for stream in streams:
            parts.engine.abort(stream.key, choice)
        return len(streams)

    def bury(self) -> None:
        """The engine is dead: tell every client that another worker has to go on."""
        self.draining = True
        self.parts.streams.fail_all(Failed("worker_lost", "the engine died", retryable=True))

    def drain(self) -> None:
        """Refuse new requests and say so in the registry. Open ones go on."""
        if self.draining:
            return
        self.draining = True
        if self._parts is not None:
            self._parts.engine.drain()
            logger.info("draining: %d requests are open", len(self._parts.streams))

    async def drained(self, grace_s: float) -> None:
        """Wait for the open requests; those left after `grace_s` are failed, for another worker to go on with."""
        if self._parts is None:
            return
        streams, engine = self._parts.streams, self._parts.engine
        try:
            async with asyncio.timeout(grace_s):
                await streams.wait_empty()
        except TimeoutError:
            logger.warning("%d requests are given up after %.0f s", len(streams), grace_s)
            with contextlib.suppress(EngineDeadError):  # then the streams have been told
                await asyncio.wrap_future(engine.fail_all(Failed("draining", "the worker stops", retryable=True)))
            await asyncio.sleep(0)

    async def purge(self) -> Epoch:
        """Forget the cache, under a new epoch. Raises EngineDeadError."""
        epoch = new_epoch()
        await asyncio.wrap_future(self.parts.engine.purge(epoch))
        return epoch

    async def liveness(self) -> str | None:
        """What is wrong, or None. Loading is fine; an engine long idle is asked for a token."""
        if self._parts is None:
            return None
        engine = self._parts.engine
        problem = engine.health(self._parts.max_step_s)
        if problem is None and engine.idle_s > PROBE_AFTER_IDLE_S:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await asyncio.wrap_future(engine.probe())
            except TimeoutError:  # a step that takes its time, or hangs, which `health` tells after `max_step_s`
                logger.warning("a probe of the idle engine had no answer within %.0f s", PROBE_TIMEOUT_S)
            except Exception as error:
                problem = str(error)
        return problem

    async def readiness(self) -> str | None:
        """Why no request should come, or None."""
        if self._parts is None:
            return self.progress
        return "draining" if self.draining else await self.liveness()

    def _check(self, parts: ServingParts, request: GenerateRequest) -> None:
        epoch = parts.engine.member.epoch
        if self.draining:
            raise self._refusal(Failed("draining", "the worker is draining", retryable=True))
        if request.epoch and request.epoch != epoch:
            message = f"epoch: the request was routed to {request.epoch}, this is {epoch}"
            raise self._refusal(Failed("wrong_epoch", message, retryable=True))
        vocab_size = parts.bundle.vocab_size
        if (failed := refusal(request, parts.limits, parts.pool_tokens, vocab_size)) is not None:
            raise self._refusal(failed)
        if any(choice.output_ids for choice in request.choices):
            return  # it has waited its turn elsewhere, and its client reads already
        interval_s = parts.engine.load.start_interval_s
        if (failed := parts.streams.waiting.refusal(request, interval_s)) is not None:
            raise self._refusal(failed)

    def _refusal(self, failed: Failed) -> Refusal:
        self.metrics.refusals.labels(failed.code).inc()
        return Refusal(failed)
