"""Connects the HTTP API to the engine, from loading to draining. Owned by the event loop.

The engine delivers all outputs of a step together: the event loop wakes once a step, not once a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable

from worker.common.tracing import Tracing
from worker.contracts.engine import Engine, EngineDeadError, EngineOutput, EngineSinks, RefusedError, RequestKey
from worker.contracts.metrics import WorkerMetrics
from worker.http.streams import QueueAccounting, QueueLimits, Stream
from worker.http.tracing import StreamTrace
from worker.publishing.inbox import PublisherInbox
from worker.wire import GRAMMAR_KINDS, End, Failed, GenerateRequest, Started

logger = logging.getLogger(__name__)


class WorkerService:
    """Connects one engine to its streams. Before `start` it refuses everything but liveness."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        tracing: Tracing | None = None,
        queue_limits: QueueLimits | None = None,
        index_problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`index_problem` returns why the shared index lacks blocks of this worker, or None."""
        self.metrics = metrics
        self.queue = QueueAccounting(queue_limits or QueueLimits())
        """The open requests whose prefill has not begun."""
        self.draining = False
        self.index_problem = index_problem
        self.progress = "starting"
        """The progress that refusals name while the model loads. Any thread may set it."""
        self._tracing = tracing
        self._engine: Engine | None = None
        self._streams: dict[RequestKey, Stream] = {}
        self._keys = itertools.count()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def sinks(
        self, on_death: Callable[[], None] = lambda: None, publisher: PublisherInbox | None = None
    ) -> EngineSinks:
        """Return the sinks for an engine. When it dies, every stream fails; then `on_death` runs."""
        call_soon, loop_thread = asyncio.get_running_loop().call_soon_threadsafe, threading.get_ident()

        def die() -> None:
            self.draining = True
            lost = Failed("worker_lost", "the engine died", retryable=True)  # other workers take over
            self._dispatch([EngineOutput(key, lost) for key in self._streams])
            on_death()

        def deliver(outputs: list[EngineOutput]) -> None:
            if threading.get_ident() == loop_thread:
                self._dispatch(outputs)
            else:
                call_soon(self._dispatch, outputs)

        return EngineSinks(deliver, lambda error: call_soon(die), publisher)

    def start(self, engine: Engine) -> None:
        """Start the engine, which has the sinks of this service, and take requests."""
        self._engine = engine
        engine.start()
        if self.draining:  # asked for while it loaded
            engine.drain()

    @property
    def engine(self) -> Engine:
        """The engine. Raises RefusedError while the model loads."""
        if self._engine is None:
            raise RefusedError(Failed("not_ready", f"the worker is {self.progress}", retryable=True))
        return self._engine

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def submit(self, request: GenerateRequest) -> Stream:
        """Queue the request. The caller reads the stream and gives it back to `release`. Raises RefusedError."""
        engine = self.engine
        try:
            self._check(request)
            prepared = await engine.prepare(request)
            self._check(request, is_valid=True)  # by now, the queue may be full, the engine dead, or a drain begun
        except RefusedError as refused:
            self.metrics.refusals.labels(refused.failed.code).inc()
            raise
        stream = Stream(RequestKey(next(self._keys)), request)
        self._streams[stream.key] = stream
        self._is_empty.clear()
        self.queue.add(request)
        if self._tracing is not None:
            stream.trace = StreamTrace.begin(self._tracing, request)
        engine.submit(stream.key, request, prepared, None if stream.trace is None else stream.trace.steps)
        return stream

    def release(self, stream: Stream) -> None:
        """Close a stream whose reader has gone, and abort what the engine still computes for it."""
        if stream.key in self._streams:
            self._end(stream)
            self.engine.abort(stream.key)
        if stream.trace is not None:
            stream.trace.end(stream.last)

    def abort(self, request_id: str, choice: int | None) -> int:
        """Abort by the gateway's id; return the number of requests found.

        There are two if a gateway repeated a request before the worker noticed that the first connection is broken.
        """
        engine = self.engine
        keys = [key for key, stream in self._streams.items() if stream.request.request_id == request_id]
        for key in keys:
            engine.abort(key, choice)
        return len(keys)

    def drain(self) -> None:
        """Refuse new requests and report as draining. Open requests continue."""
        if self.draining:
            return
        self.draining = True
        if self._engine is not None:
            self._engine.drain()
            logger.info("draining: %d requests are open", self.num_open)

    async def finish_drain(self, grace_s: float) -> None:
        """Wait for the open requests, and fail those left after `grace_s`, so that other workers take over."""
        if self._engine is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                while self._streams:
                    await self._is_empty.wait()
        except TimeoutError:
            logger.warning("%d requests are given up after %.0f s", self.num_open, grace_s)
            with contextlib.suppress(EngineDeadError):  # its streams have failed already
                await asyncio.wrap_future(self._engine.fail_all(Failed("draining", "the worker stops", retryable=True)))
            await asyncio.sleep(0)

    async def liveness(self) -> str | None:
        """Return what is wrong, or None. A model that loads is fine."""
        return None if self._engine is None else await self._engine.liveness()

    async def readiness(self) -> str | None:
        """Return why no request should come, or None."""
        if self._engine is None:
            return self.progress
        return "draining" if self.draining else self._engine.not_ready_reason or await self._engine.liveness()

    def _check(self, request: GenerateRequest, *, is_valid: bool = False) -> None:
        """Raise RefusedError if this worker cannot serve the request, unless it is valid, or cannot take it now."""
        engine = self.engine
        epoch = engine.member.epoch
        failed: Failed | None
        if request.epoch not in ("", epoch):
            message = f"epoch: the request was routed to {request.epoch}, this is {epoch}"
            failed = Failed("wrong_epoch", message, retryable=True)
        elif self.draining:
            failed = Failed("draining", "the worker is draining", retryable=True)
        elif request.sampling.grammar is not None and request.sampling.grammar.kind not in GRAMMAR_KINDS:
            message = f"grammar: this version has no kind {request.sampling.grammar.kind!r:.80}"
            failed = Failed("unknown_grammar", message, retryable=True)
        else:
            failed = None if is_valid else engine.refusal(request)
        if failed is None and not any(choice.output_ids for choice in request.choices):
            # A resumed request has waited elsewhere already, and its client is reading.
            failed = self.queue.refusal(request, engine.pace)
        if failed is not None:
            raise RefusedError(failed)

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        """Hand each stream its part of a step's outputs."""
        touched = set[Stream]()
        for key, frame in outputs:
            stream = self._streams.get(key)
            if stream is None:  # its client has left
                continue
            stream.put(frame)
            touched.add(stream)
            match frame:
                case Started():
                    self._start(stream)
                case End() | Failed():
                    stream.last = frame
                    self._end(stream)
        for stream in touched:
            stream.flush()

    def _start(self, stream: Stream) -> None:
        if not stream.started:
            stream.started = True
            self.queue.remove(stream.request)

    def _end(self, stream: Stream) -> None:
        self._start(stream)
        stream.close()
        del self._streams[stream.key]
        if not self._streams:
            self._is_empty.set()
