"""Another engine's server as this worker's engine: requests go out by its HTTP API, its cache events come in.

    HTTP side: submit, abort --> EngineRequests --> EngineApi --> frames --> HTTP side
    EventSubscriber --> EngineBlocks --> publisher --> Redis
    watch: the engine's counts, start time and models; in doubt, all that makes it this engine (`facts.py`)

Everything runs on the worker's event loop. The engine owns its blocks; `EngineBlocks` is a mirror of its events, and
whatever puts that in doubt (a restart, a reset, a lost connection) begins a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, TypeVar

from cache.allocators.base import CacheStats
from cache.events import BlockEvent, Stored
from cache.records import WorkerLoad, WorkerMember, in_new_epoch, new_epoch
from cache.types import Epoch
from worker.adapter.api import EngineApi, EngineLoad, EngineLostError, EngineRefusedError, EventSource
from worker.adapter.blocks import EngineBlocks
from worker.adapter.facts import EngineIdentity
from worker.adapter.kv_events import EventBatch
from worker.adapter.requests import EngineRequests
from worker.adapter.subscriber import EventSubscriber
from worker.contracts.engine import EngineDeadError, EngineSinks, RequestKey, StepLog
from worker.contracts.metrics import WorkerMetrics
from worker.validation import refusal
from worker.wire import Failed, GenerateRequest, TokenizerBundle, required_features

logger = logging.getLogger(__name__)

WATCH_S: Final = 1.0
"""How often the engine is asked for its counts: a restart is known within twice that."""
PROBE_S: Final = 1.5
"""An engine that takes longer to say its counts is slow: gateways prefer others."""
LIST_ADAPTERS_S: Final = 2.0
"""How often it is asked for its models, with their adapters."""
LOST_AFTER: Final = 3
"""Calls in a row that fail, without a token, before the engine is lost. One whose port is closed is lost at once."""
STRANGERS_AFTER: Final = 3
"""Counts in a row with more requests in the engine than this adapter has sent."""
WARN_AGAIN_S: Final = 60.0
REPORT_S: Final = 0.005
"""The delay of a report. The start of a request, its blocks and its first token share one on a fast engine."""
MAX_SILENT_S: Final = 120.0
"""An engine that has given no token of any request for so long hangs."""

T = TypeVar("T")


class AdapterEngine:
    """`worker.contracts.engine.Engine` over an `EngineApi`. `start` and everything else belong to the event loop."""

    def __init__(
        self,
        api: EngineApi,
        blocks: EngineBlocks,
        source: EventSource | None,
        bundle: TokenizerBundle,
        member: WorkerMember,
        metrics: WorkerMetrics,
        sinks: EngineSinks | None = None,
        *,
        events_exposed: bool = False,
        identity: EngineIdentity | None = None,
    ) -> None:
        """`source`: None for an engine without cache events, whose blocks stay unknown. Raises ValueError, OSError.

        `identity`: what `member` and `bundle` were made from; None: the engine is not asked again what it is.
        """
        sinks = sinks or EngineSinks()
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
        self._requests = EngineRequests(
            api, blocks, member.block_size, member.worker_id, metrics, self._report, self._confirm, sinks.deliver
        )
        self._counts = None if identity is None else identity.counts
        self._publisher = sinks.publisher
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._problem: str | None = None
        """Why the engine cannot serve, or None."""
        self._identity = identity
        self._num_doubts = 0
        self._is_sure = asyncio.Event()
        """The engine is the one of `identity`, as far as anything has shown."""
        self._is_sure.set()
        self._confirmed_s = -1.0
        """Connections made before this time lead to that engine."""
        self._counting = asyncio.Lock()
        self._wake = asyncio.Event()
        self._on_death = sinks.on_death
        self._is_slow = False
        """It has not answered the last question."""
        self._num_strange = 0
        self._warned_s = 0.0
        self._load = WorkerLoad()
        self._unreported: list[BlockEvent] = []
        self._report_timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> WorkerLoad:
        return self._load

    @property
    def index_problem(self) -> str | None:
        """Return why the index knows less than the engine holds, or None."""
        if self._subscriber is None:
            return "the engine publishes no cache events (--events none)"
        if self._subscriber.is_silent and self._subscriber.num_batches == 0 and self._requests.has_prompts:
            return "no cache event has come from the engine: see `headstart doctor --engine-url`"
        return self._blocks.problem

    @property
    def exchange(self) -> None:
        """The engine moves its blocks itself."""

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))
        if self._subscriber is not None:
            self._tasks.append(asyncio.create_task(self._subscriber.run(), name="events"))
        self._report()

    async def supervise(self) -> None:
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._requests.close()
        if self._subscriber is not None:
            self._subscriber.close()
        if self._report_timer is not None:
            self._report_timer.cancel()
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
        self._requests.submit(key, request, steps)

    def abort(self, key: RequestKey, choice: int | None = None) -> None:
        self._requests.abort(key, choice)

    def drain(self) -> None:
        self._draining = True
        self._publish()

    def fail_all(self, failed: Failed) -> Future[None]:
        self._requests.fail_all(failed)
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
                "requests": self._requests.states(),
                "num_requests": len(self._requests.active),
            }
        )
        return done

    async def liveness(self) -> str | None:
        if self._problem is not None:
            return self._problem
        if self._requests.active and time.monotonic() - self._requests.output_s > MAX_SILENT_S:
            return f"the engine has given no token for {MAX_SILENT_S:.0f} s"
        try:
            return None if await self._api.is_healthy() else "the engine says that it is not healthy"
        except EngineLostError as error:
            return str(error)

    # --- cache --------------------------------------------------------------------------------------------------

    def _on_batch(self, batch: EventBatch) -> None:
        applied = self._blocks.apply(batch.events)
        if applied.cleared:
            self._begin_epoch(self._blocks.visible_events())
        else:
            self._report(applied.events)

    def _on_gap(self) -> None:
        logger.warning("cache events are lost for good: the blocks are learnt again")
        self._report(self._blocks.forget_presence())

    def _on_restart(self) -> None:
        logger.warning("the engine has restarted: a new epoch begins")
        self._begin_epoch()
        if self._identity is not None:
            self._doubt("the engine has restarted")
            self._requests.fail_all(Failed("worker_lost", "the engine has restarted", retryable=True))

    def _begin_epoch(self, held: Sequence[Stored] | None = None) -> None:
        """Begin a new epoch, in which the engine holds `held`, by default nothing."""
        if held is None:
            self._blocks.clear()
        self._unreported = []  # these are of the epoch that ends
        self.member = in_new_epoch(self.member, new_epoch(), time.time_ns() // 1_000_000)
        self._requests.account.begin_epoch()
        if self._publisher is not None:
            self._publisher.begin_epoch(self.member)
        self._report(held or ())

    def _report(self, events: Sequence[BlockEvent] = ()) -> None:
        """Publish soon what the engine has stored and removed, with the load of then."""
        self._unreported += events
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(REPORT_S, self._publish)

    def _publish(self) -> None:
        """Publish it now."""
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        events, self._unreported = self._unreported, []
        is_away = self._draining or self._problem is not None
        account, block_size = self._requests.account, self.member.block_size
        load = self._load = account.current(self._counts, block_size, is_away, self._is_slow)
        stats = CacheStats(load.num_blocks, load.num_free_blocks, self._blocks.num_held_blocks, 0, 0, 0, 0)
        self._metrics.set_state(load, stats)
        if self._publisher is not None:
            self._publisher.offer(events, load)

    # --- watch --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask the engine for its counts, its models and, in doubt, what it is, for ever."""
        listed_s = 0.0
        num_failed, answered_s = 0, time.monotonic()
        while True:
            self._wake.clear()
            try:
                await self._probe()
                if time.monotonic() - listed_s >= LIST_ADAPTERS_S:
                    listed_s = time.monotonic()
                    await self._list_models()
                if not self._is_sure.is_set():
                    await self._settle()
                num_failed, answered_s = 0, time.monotonic()
                self._set_slow(False)
            except (EngineLostError, EngineRefusedError) as error:
                num_failed += 1
                self._set_slow(True)
                is_gone = isinstance(error, EngineLostError) and error.gone
                is_silent = not self._requests.active or self._requests.output_s < answered_s
                if is_gone or (num_failed >= LOST_AFTER and is_silent):
                    self._lose(str(error), is_gone)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), WATCH_S)

    async def _probe(self) -> None:
        """Count within a deadline. Raises EngineLostError, EngineRefusedError."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._count()
        except TimeoutError as error:
            raise EngineLostError(f"no answer within {PROBE_S:g} s") from error

    def _set_slow(self, is_slow: bool) -> None:
        if is_slow != self._is_slow:
            self._is_slow = is_slow
            self._publish()

    async def _count(self, needed_s: float = math.inf) -> None:
        """Ask the engine for its counts, unless it was confirmed after `needed_s`. Notice a restart."""
        async with self._counting:
            if self._confirmed_s >= needed_s:
                return
            begun_s = time.monotonic()
            counts = await self._api.load()
            before, self._counts = self._counts, counts
            if before is not None and _has_restarted(before, counts):
                self._on_restart()
                if self._subscriber is not None:
                    self._subscriber.resync()
            if self._is_sure.is_set():
                self._confirmed_s = begun_s
                self._recover()
        self._requests.account.seed_rate(counts)
        self._look_for_strangers(counts)
        self._report()

    async def _confirm(self) -> None:
        """Wait until the engine at the end of each connection so far is known to be the same. Raises EngineLostError.

        A process keeps its connections. So one that was made before a confirmed time needs no question.
        """
        if self._identity is None:
            return
        needed_s = self._api.connected_s
        while self._confirmed_s < needed_s or not self._is_sure.is_set():
            await self._is_sure.wait()
            if self._identity.counts.started_s != 0.0:
                await self._count(needed_s)
            else:  # counts do not tell its processes apart
                await self._settle(needed_s)

    def _doubt(self, why: str) -> None:
        """Give out no token of a new connection, and take no request, until the engine has said again what it is."""
        if self._identity is None:
            return
        self._num_doubts += 1
        self._problem = self._problem or f"{why}: it is asked what it is"
        if self._is_sure.is_set():
            self._is_sure.clear()
            self._wake.set()
        self._report()

    async def _settle(self, needed_s: float = math.inf) -> None:
        """Ask the engine what it is, unless it was confirmed after `needed_s`. Another one ends this worker."""
        assert self._identity is not None
        async with self._counting:
            if self._confirmed_s >= needed_s:
                return
            num_doubts, begun_s = self._num_doubts, time.monotonic()
            facts, counts = await self._identity.read(is_suspect=not self._is_sure.is_set())
            if changes := self._identity.facts.changes(facts):
                await self._end(changes)
            self._identity = replace(self._identity, counts=counts)
            if self._num_doubts == num_doubts and (self._counts is None or not _has_restarted(self._counts, counts)):
                self._confirmed_s = begun_s
                self._is_sure.set()
                self._recover()

    async def _end(self, changes: Sequence[str]) -> None:
        """Report the death of the engine that this worker was started for, and wait until it is closed."""
        self._problem = f"the engine is another one than this worker was started for: {'; '.join(changes)}"
        self._is_sure.clear()
        logger.critical("%s. This worker ends, to be started again for what is there", self._problem)
        self._publish()
        self._on_death(EngineDeadError(self._problem))
        await asyncio.get_running_loop().create_future()

    def _recover(self) -> None:
        if self._problem is not None:
            logger.warning("the engine answers again")
            self._problem = None
            self._report()

    def _look_for_strangers(self, counts: EngineLoad) -> None:
        """Say loudly that requests reach the engine by other ways: they are in no gateway's books."""
        num_strange = counts.num_running + counts.num_waiting - self._requests.account.num_open
        self._num_strange = self._num_strange + 1 if num_strange > 0 else 0
        if self._num_strange >= STRANGERS_AFTER and time.monotonic() - self._warned_s > WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            logger.warning(
                "%d requests in the engine did not come through this worker: the fleet's estimates are too low."
                " Send all traffic through the gateway",
                num_strange,
            )

    async def _list_models(self) -> None:
        model = await self._api.model()
        if self._identity is not None and replace(model, adapters=()) != self._identity.facts.model:
            self._doubt("the engine lists another model")
        elif model.adapters != self.member.adapters:
            logger.info("the engine serves the adapters %s", ", ".join(model.adapters) or "none")
            self.member = replace(self.member, adapters=model.adapters)
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
        self._doubt("the engine was lost")
        self._publish()


def _has_restarted(before: EngineLoad, now: EngineLoad) -> bool:
    """Say whether these are counts of two processes: another start, another pool, or totals that went back."""

    def process(counts: EngineLoad) -> tuple[float, int, int]:
        return counts.started_s, counts.num_blocks, counts.block_size

    return process(before) != process(now) or now.prefill_tokens < before.prefill_tokens


def _as_future(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `work` on this loop, and return its result as a concurrent future."""
    return asyncio.run_coroutine_threadsafe(work, asyncio.get_running_loop())
