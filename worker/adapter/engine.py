"""Another engine's server as this worker's engine: requests go out by its HTTP API, its cache events come in.

    HTTP side: submit, abort --> one task a request --> EngineApi --> frames --> HTTP side
    EventSubscriber --> EngineBlocks --> publisher --> Redis
    watch: the engine's counts, start time and adapters, once a second

Everything runs on the worker's event loop. The engine owns its blocks; `EngineBlocks` is a mirror of its events, and
whatever puts that in doubt (a restart, a reset, a lost connection) begins a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, TypeVar

from cache.allocators.base import CacheStats
from cache.events import BlockEvent, Stored
from cache.hashing import hash_chain
from cache.records import WorkerLoad, WorkerMember, in_new_epoch, new_epoch
from cache.types import BlockHash, Epoch
from worker.adapter.api import Chunk, EngineApi, EngineLoad, EngineLostError, EngineRefusedError, EventSource
from worker.adapter.blocks import EngineBlocks
from worker.adapter.kv_events import EventBatch
from worker.adapter.load import LoadAccount, Prefill
from worker.adapter.subscriber import EventSubscriber
from worker.engine.metrics import WorkerMetrics
from worker.engine.protocol import EngineOutput, EventPublisher, RequestKey, StepLog
from worker.validation import refusal
from worker.wire import (
    ChoiceState,
    End,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PromptLogprobs,
    Started,
    TokenizerBundle,
    Tokens,
    required_features,
)

logger = logging.getLogger(__name__)

WATCH_S: Final = 1.0
"""How often the engine is asked for its counts: a restart is known within twice that."""
LIST_ADAPTERS_S: Final = 5.0
SUSPECT_NOTICE_S: Final = 0.02
"""Time for Started to reach the gateway before a prefill that the engine may not survive."""
LOST_AFTER: Final = 3
"""Calls in a row that fail before the engine counts as lost. One whose port is closed is lost at once."""
STRANGERS_AFTER: Final = 3
"""Counts in a row with more requests in the engine than this adapter has sent."""
WARN_AGAIN_S: Final = 60.0
MAX_SILENT_S: Final = 120.0
"""An engine that has given no token of any request for so long hangs."""

T = TypeVar("T")


class _ActiveRequest:
    """One request at the engine: a task for all of it, and one for each choice."""

    __slots__ = (
        "aborted",
        "begun_s",
        "choices",
        "ended",
        "first_token_s",
        "is_over",
        "is_started",
        "key",
        "num_cached",
        "request",
        "steps",
        "task",
    )

    def __init__(self, key: RequestKey, request: GenerateRequest, steps: StepLog | None) -> None:
        self.key = key
        self.request = request
        self.steps = steps
        self.begun_s = time.monotonic()
        self.first_token_s: float | None = None
        self.is_started = False
        self.is_over = False
        """It has got its last frame."""
        self.num_cached: int | None = None
        """Prompt tokens that the engine has found cached, as it says at the end."""
        self.task: asyncio.Task[None] | None = None
        self.choices: dict[int, asyncio.Task[None]] = {}
        """The choices at the engine, by index."""
        self.aborted: set[int] = set()
        self.ended: set[int] = set()
        """Choices that have got their Finished."""


class AdapterEngine:
    """`worker.engine.protocol.Engine` over an `EngineApi`. `start` and everything else belong to the event loop."""

    def __init__(
        self,
        api: EngineApi,
        blocks: EngineBlocks,
        source: EventSource | None,
        bundle: TokenizerBundle,
        member: WorkerMember,
        metrics: WorkerMetrics,
        *,
        events_exposed: bool = False,
    ) -> None:
        """`source`: None for an engine without cache events, whose blocks stay unknown. Raises ValueError, OSError."""
        self.member = member
        self.bundle = bundle
        self._api = api
        self._blocks = blocks
        self._subscriber: EventSubscriber | None = None
        if source is not None:
            self._subscriber = EventSubscriber(
                source.endpoint,
                source.replay_endpoint,
                source.topic,
                exposed=events_exposed,
                on_batch=self._on_batch,
                on_gap=self._on_gap,
                on_restart=self._on_restart,
                count=lambda event: metrics.index_events.labels(f"engine_{event}").inc(),
            )
            self._subscriber.open()
        self._metrics = metrics
        self._account = LoadAccount()
        self._counts: EngineLoad | None = None
        self._active: dict[RequestKey, _ActiveRequest] = {}
        self._by_prefill: dict[Prefill, _ActiveRequest] = {}
        self._suspects = asyncio.Lock()
        self._deliver: Callable[[list[EngineOutput]], object] = lambda outputs: None
        self._listener: EventPublisher | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._problem: str | None = None
        """Why the engine cannot serve, or None."""
        self._num_strange = 0
        self._warned_s = 0.0
        self._output_s = time.monotonic()
        """When the engine last gave a token, or had nothing to do."""
        self._has_prompts = False
        """A prompt of at least one block of the engine has come."""
        self._load = WorkerLoad()

    @property
    def load(self) -> WorkerLoad:
        return self._load

    @property
    def index_problem(self) -> str | None:
        """Return why the index knows less than the engine holds, or None."""
        if self._subscriber is None:
            return "the engine publishes no cache events (--events none)"
        if self._subscriber.is_silent and self._subscriber.num_batches == 0 and self._has_prompts:
            return "no cache event has come from the engine: see `headstart doctor --engine-url`"
        return self._blocks.problem

    def start(
        self,
        deliver: Callable[[list[EngineOutput]], object],
        on_death: Callable[[BaseException], object],
        listener: EventPublisher | None = None,
    ) -> None:
        self._deliver, self._listener = deliver, listener
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))
        if self._subscriber is not None:
            self._tasks.append(asyncio.create_task(self._subscriber.run(), name="events"))
        self._report()

    async def supervise(self) -> None:
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        requests = [active.task for active in self._active.values() if active.task is not None]
        for task in (*self._tasks, *requests):
            task.cancel()
        await asyncio.gather(*self._tasks, *requests, return_exceptions=True)
        if self._subscriber is not None:
            self._subscriber.close()
        await self._api.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def refusal(self, request: GenerateRequest) -> Failed | None:
        if self._problem is not None:
            return Failed("not_ready", self._problem, retryable=True)
        if request.adapter and request.adapter not in self.member.adapters:
            return Failed("not_ready", f"adapter: {request.adapter!r:.200} is not loaded here", retryable=True)
        missing = [name for name in required_features(request) if name in self._api.unsupported]
        if missing:
            text = f"{', '.join(missing)}: {self._api.kind} cannot serve this"
            return Failed("unsupported", text, retryable=True)
        pool_tokens = self._load.num_blocks * self.member.block_size or self.bundle.max_model_len
        return refusal(request, self.bundle.max_model_len, pool_tokens, self.bundle.vocab_size)

    async def prepare(self, request: GenerateRequest) -> None:
        return None

    def submit(self, key: RequestKey, request: GenerateRequest, prepared: Any, steps: StepLog | None = None) -> None:
        active = self._active[key] = _ActiveRequest(key, request, steps)
        self._metrics.requests.inc()
        active.task = asyncio.get_running_loop().create_task(self._serve(active))
        active.task.add_done_callback(lambda _: self._active.pop(key, None))  # cancelled before its first step

    def abort(self, key: RequestKey, choice: int | None = None) -> None:
        active = self._active.get(key)
        if active is None:
            return
        if choice is None:
            assert active.task is not None
            unended = [state.index for state in active.request.choices if state.index not in active.ended]
            self._emit(active, *(Finished(index, "abort") for index in unended), End(0.0, 0.0, 0.0))
            active.task.cancel()
        elif choice not in active.ended:
            active.aborted.add(choice)
            if (task := active.choices.get(choice)) is not None:
                task.cancel()

    def drain(self) -> None:
        self._draining = True
        self._report()

    def fail_all(self, failed: Failed) -> Future[None]:
        for active in self._active.values():
            assert active.task is not None
            self._emit(active, failed)
            active.task.cancel()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def purge(self) -> Future[Epoch]:
        async def empty() -> Epoch:
            self._begin_epoch()
            await self._api.reset()
            if self._blocks.num_held_blocks:  # stored while the engine emptied its cache
                self._begin_epoch()
            return self.member.epoch

        return _as_future(empty())

    def debug_state(self) -> Future[dict[str, Any]]:
        done: Future[dict[str, Any]] = Future()
        done.set_result(
            {
                "engine": {"kind": self._api.kind, "problem": self._problem, "index_problem": self.index_problem},
                "blocks": {
                    "held": self._blocks.num_held_blocks,
                    "opaque": self._blocks.num_opaque,
                    "orphans": self._blocks.num_orphans,
                },
                "requests": [
                    {
                        "request_id": active.request.request_id,
                        "gateway_id": active.request.gateway_id,
                        "choices": sorted(active.choices),
                        "num_prompt_tokens": len(active.request.prompt_ids),
                        "is_started": active.is_started,
                    }
                    for active in self._active.values()
                ],
                "num_requests": len(self._active),
            }
        )
        return done

    async def liveness(self) -> str | None:
        if self._problem is not None:
            return self._problem
        if self._active and time.monotonic() - self._output_s > MAX_SILENT_S:
            return f"the engine has given no token for {MAX_SILENT_S:.0f} s"
        try:
            return None if await self._api.is_healthy() else "the engine says that it is not healthy"
        except EngineLostError as error:
            return str(error)

    async def _serve(self, active: _ActiveRequest) -> None:
        """Run one request to its end, and deliver its last frame."""
        last: End | Failed | None = None
        try:
            try:
                last = await self._run(active)
            except BaseExceptionGroup as group:  # of the tasks of its choices: the first failure is the cause
                raise group.exceptions[0] from None
        except EngineLostError as error:
            last = Failed("worker_lost", str(error), retryable=True)
        except EngineRefusedError as error:
            last = _failed(error)
        except TimeoutError:
            last = Failed("deadline", "it waited too long", retryable=False)
        except asyncio.CancelledError:
            pass  # it has got its last frame
        except Exception as error:  # one request must not end the others
            logger.exception("request %s failed", active.request.request_id)
            last = Failed("internal", f"{type(error).__name__}: {error}", retryable=True)
        finally:
            self._active.pop(active.key)
            if last is not None:
                self._emit(active, last)
            self._report()

    async def _run(self, active: _ActiveRequest) -> End:
        request = active.request
        num_cached = self._num_matched_tokens(request)
        suspects = self._suspects if request.is_suspect else contextlib.nullcontext()
        async with contextlib.AsyncExitStack() as until_first_token:
            deadline_s = None if request.deadline_s is None else max(0.0, request.deadline_s)
            await until_first_token.enter_async_context(asyncio.timeout(deadline_s))
            await until_first_token.enter_async_context(suspects)
            if request.is_suspect:
                self._start(active, num_cached)
                await asyncio.sleep(SUSPECT_NOTICE_S)
            self._has_prompts = self._has_prompts or len(request.prompt_ids) > self._blocks.engine_block_size
            prefill = self._account.send(request.gateway_id, len(request.prompt_ids) - num_cached)
            self._by_prefill[prefill] = active
            self._offer(self._blocks.expect(BlockHash(request.root), request.prompt_ids))
            try:
                if request.sampling.prompt_logprobs is not None:
                    positions = await self._api.prompt_logprobs(request)
                    self._start(active, num_cached)
                    self._emit(active, PromptLogprobs(positions))
                self._start_first()
                self._report()
                await self._run_choices(active, prefill, num_cached, until_first_token)
            finally:
                self._account.drop(prefill)
                self._by_prefill.pop(prefill, None)
                self._start_first()
        ended_s = time.monotonic()
        first_s = active.first_token_s or ended_s
        started_s = active.begun_s if prefill.started_s is None else prefill.started_s
        return End(
            max(0.0, started_s - active.begun_s), max(0.0, first_s - started_s), ended_s - first_s, active.num_cached
        )

    async def _run_choices(
        self, active: _ActiveRequest, prefill: Prefill, num_cached: int, until_first_token: contextlib.AsyncExitStack
    ) -> None:
        """Run the first choice up to its first token, then the others, which find its prompt cached."""
        request = active.request
        first_token = asyncio.Event()

        async def follow(choice: ChoiceState) -> None:
            async for chunk in self._chunks(active, choice):
                if not first_token.is_set():
                    self._start(active, num_cached)
                    self._account.first_token(prefill)
                    active.first_token_s = time.monotonic()
                    first_token.set()
                    self._start_first()
                self._emit_chunk(active, choice.index, chunk)

        async with asyncio.TaskGroup() as group:
            for number, choice in enumerate(request.choices):
                task = group.create_task(self._follow_choice(active, choice, follow))
                if number == 0:
                    await _either(first_token.wait(), task)
                    await until_first_token.aclose()

    async def _follow_choice(
        self, active: _ActiveRequest, choice: ChoiceState, follow: Callable[[ChoiceState], Awaitable[None]]
    ) -> None:
        """Run one choice; an aborted one ends with `abort`, and the others go on."""
        task = asyncio.current_task()
        assert task is not None
        assert active.task is not None
        active.choices[choice.index] = task
        self._account.num_open += 1
        try:
            if choice.index not in active.aborted:  # it may be, while it waited for the first one's token
                await follow(choice)
        except asyncio.CancelledError:
            if choice.index not in active.aborted or active.task.cancelling():
                raise
        finally:
            self._account.num_open -= 1
            del active.choices[choice.index]
        if choice.index in active.aborted:
            active.ended.add(choice.index)
            self._emit(active, Finished(choice.index, "abort"))

    async def _chunks(self, active: _ActiveRequest, choice: ChoiceState) -> Any:
        """Yield the chunks of one choice up to its reason. Raises EngineLostError without one."""
        reason = None
        request_id = f"{self.member.worker_id}-{active.key}-{choice.index}"
        stream = self._api.generate(active.request, choice, request_id)
        try:
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                async for chunk in stream:
                    self._output_s = time.monotonic()
                    if chunk.num_cached_tokens is not None and choice is active.request.choices[0]:
                        # Of a resumed choice, the output so far is a part of the engine's prompt.
                        active.num_cached = min(chunk.num_cached_tokens, len(active.request.prompt_ids))
                    if reason is None and (chunk.token_ids or chunk.reason is not None):
                        reason = chunk.reason
                        yield chunk
        except EngineLostError:
            if reason is None:  # else only the count of cached tokens is missing
                raise
        if reason is None:
            raise EngineLostError("the answer has no end")

    def _emit_chunk(self, active: _ActiveRequest, index: int, chunk: Chunk) -> None:
        frames: list[Frame] = []
        if chunk.token_ids:
            frames.append(Tokens(index, chunk.token_ids, chunk.logprobs))
        match chunk.reason:
            case None:
                pass
            case "stop":
                frames.append(Finished(index, "stop", chunk.stop_token_id))
                active.ended.add(index)
            case "length":
                frames.append(Finished(index, "length"))
                active.ended.add(index)
            case reason:
                raise EngineLostError(f"the engine ended the request: {reason}")
        self._emit(active, *frames)

    def _emit(self, active: _ActiveRequest, *frames: Frame) -> None:
        """Deliver frames of a request, none behind its last one."""
        if active.is_over:
            return
        active.is_over = any(isinstance(frame, (End, Failed)) for frame in frames)
        outputs = [EngineOutput(active.key, frame) for frame in frames]
        self._metrics.count_outputs(outputs)
        self._deliver(outputs)

    def _start(self, active: _ActiveRequest, num_cached: int) -> None:
        """Deliver Started, once."""
        if not active.is_started:
            active.is_started = True
            self._metrics.prompt_tokens.inc(len(active.request.prompt_ids))
            self._metrics.cached_tokens.inc(num_cached)
            self._metrics.queue_s.observe(time.monotonic() - active.begun_s)
            self._emit(active, Started(num_cached))

    def _start_first(self) -> None:
        """Start the request whose prefill the engine has reached."""
        prefill = self._account.started()
        if prefill is not None and (active := self._by_prefill.get(prefill)) is not None:
            self._start(active, len(active.request.prompt_ids) - prefill.num_tokens)

    def _num_matched_tokens(self, request: GenerateRequest) -> int:
        """Return the prompt tokens that the engine should find cached."""
        chain = hash_chain(BlockHash(request.root), request.prompt_ids, self.member.block_size)
        return self._blocks.num_matched_tokens(chain, len(request.prompt_ids))

    # --- cache --------------------------------------------------------------------------------------------------

    def _on_batch(self, batch: EventBatch) -> None:
        applied = self._blocks.apply(batch.events)
        if applied.cleared:
            self._begin_epoch(self._blocks.visible_events())
        else:
            self._offer(applied.events)

    def _on_gap(self) -> None:
        logger.warning("cache events are lost for good: the blocks are learnt again")
        self._offer(self._blocks.forget_presence())

    def _on_restart(self) -> None:
        logger.warning("the engine has restarted: a new epoch begins")
        self._begin_epoch()

    def _begin_epoch(self, held: Sequence[Stored] | None = None) -> None:
        """Begin a new epoch, in which the engine holds `held`, by default nothing."""
        if held is None:
            self._blocks.clear()
        self.member = in_new_epoch(self.member, new_epoch(), time.time_ns() // 1_000_000)
        self._account.begin_epoch()
        if self._listener is not None:
            self._listener.begin_epoch(self.member)
        self._offer(held or ())

    def _offer(self, events: Sequence[BlockEvent]) -> None:
        self._load = self._current_load()
        self._metrics.set_state(self._load, self._stats())
        if self._listener is not None:
            self._listener.offer(events, self._load)

    def _report(self) -> None:
        self._offer(())

    def _current_load(self) -> WorkerLoad:
        draining = self._draining or self._problem is not None
        return self._account.current(self._counts, self.member.block_size, draining)

    def _stats(self) -> CacheStats:
        load = self._load
        held = self._blocks.num_held_blocks
        return CacheStats(load.num_blocks, load.num_free_blocks, held, 0, 0, 0, 0)

    # --- watch --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask the engine for its counts and its adapters, for ever."""
        listed_s = 0.0
        num_failed = 0
        while True:
            try:
                await self._count()
                num_failed = 0
                if time.monotonic() - listed_s >= LIST_ADAPTERS_S:
                    listed_s = time.monotonic()
                    await self._list_adapters()
            except (EngineLostError, EngineRefusedError) as error:
                num_failed += 1
                is_gone = isinstance(error, EngineLostError) and error.gone
                if is_gone or num_failed >= LOST_AFTER:
                    self._lose(str(error), is_gone)
            await asyncio.sleep(WATCH_S)

    async def _count(self) -> None:
        counts = await self._api.load()
        before, self._counts = self._counts, counts
        if before is not None and counts.started_s != before.started_s:
            self._on_restart()
            if self._subscriber is not None:
                self._subscriber.resync()
        if self._problem is not None:
            logger.warning("the engine answers again")
            self._problem = None
        self._account.seed_rate(counts)
        self._look_for_strangers(counts)
        if not self._active:
            self._output_s = time.monotonic()
        self._report()

    def _look_for_strangers(self, counts: EngineLoad) -> None:
        """Say loudly that requests reach the engine by other ways: they are in no gateway's books."""
        num_strange = counts.num_running + counts.num_waiting - self._account.num_open
        self._num_strange = self._num_strange + 1 if num_strange > 0 else 0
        if self._num_strange >= STRANGERS_AFTER and time.monotonic() - self._warned_s > WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            logger.warning(
                "%d requests in the engine did not come through this worker: the fleet's estimates are too low."
                " Send all traffic through the gateway",
                num_strange,
            )

    async def _list_adapters(self) -> None:
        adapters = (await self._api.model()).adapters
        if adapters != self.member.adapters:
            logger.info("the engine serves the adapters %s", ", ".join(adapters) or "none")
            self.member = replace(self.member, adapters=adapters)
            self._begin_epoch(self._blocks.visible_events())

    def _lose(self, why: str, is_gone: bool) -> None:
        """Ask for no more requests. An engine that is gone comes back with another cache, so promise nothing of it."""
        if self._problem is None:
            logger.error("the engine does not answer: %s", why)
        if is_gone and self._counts is not None:
            self._counts = None
            self._begin_epoch()
            if self._subscriber is not None:
                self._subscriber.resync()
        self._problem = why
        self._report()


def _failed(error: EngineRefusedError) -> Failed:
    """Return what an error of the engine means to the gateway."""
    if error.status in (429, 503):
        return Failed("queue_full", error.message, retryable=True, retry_after_s=1.0)
    if error.status in (400, 413, 422):
        return Failed("invalid_request", error.message, retryable=False)
    return Failed("worker_lost", str(error), retryable=True)


async def _either(wait: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> None:
    """Wait for the first of both. Leaves `task` alone, and ends the wait."""
    waiting = asyncio.ensure_future(wait)
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _as_future(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `work` on this loop, and return its result as a concurrent future."""
    return asyncio.run_coroutine_threadsafe(work, asyncio.get_running_loop())
