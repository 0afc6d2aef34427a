"""Another engine's server as this worker's engine: requests go out by its HTTP API, its cache events come in.

    HTTP side: submit, abort --> EngineRequests --> EngineApi --> frames --> HTTP side
    EventSubscriber --> EngineBlocks --> publisher --> Redis
    EngineWatch: the engine's counts, process and models

Everything runs on the worker's event loop. The engine owns its blocks; `EngineBlocks` mirrors its events. Whatever
makes the mirror doubtful (a restart, a reset, a lost connection) begins a new epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

from cache.allocators.base import CacheStats
from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember, in_new_epoch, new_epoch
from cache.types import Epoch
from worker.adapter.api import EngineApi, EngineLostError, EngineRefusedError, EventSource, failed_by
from worker.adapter.blocks import EngineBlocks
from worker.adapter.facts import EngineIdentity
from worker.adapter.kv_events import EventBatch
from worker.adapter.load import LoadAccount
from worker.adapter.requests import EngineRequests
from worker.adapter.subscriber import EventSubscriber
from worker.adapter.watch import EngineWatch
from worker.common.features import required_features
from worker.contracts.engine import EngineDeadError, EngineSinks, RefusedError, RequestKey, StepLog
from worker.contracts.metrics import WorkerMetrics
from worker.validation import refusal
from worker.wire import EngineCall, Failed, GenerateRequest, Rendered, TokenizerBundle

logger = logging.getLogger(__name__)

REPORT_S: Final = 0.005
"""The delay of a report. The start of a request, its blocks and its first token share one on a fast engine."""
MAX_SILENT_S: Final = 120.0
"""An engine that has produced no token of any request for this time hangs."""


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

        `identity`: the facts behind `member` and `bundle`; None: they are never read again.
        """
        sinks = sinks or EngineSinks()
        self.member = replace(member, ends=blocks.ends)
        self.bundle = bundle
        self._api = api
        self._blocks = blocks
        self._subscriber: EventSubscriber | None = None
        if source is not None:
            self._subscriber = EventSubscriber(
                source,
                exposed=events_exposed,
                on_batch=self._on_batch,
                on_gap=self._on_gap,
                on_restart=self._on_restart,
                count=lambda event: metrics.index_events.labels(f"engine_{event}").inc(),
            )
            self._subscriber.open()
        self._metrics = metrics
        self._account = LoadAccount()
        self._watch = EngineWatch(
            api,
            identity,
            self._account,
            on_restart=self._on_other_process,
            on_gone=self._on_gone,
            on_loras=self._on_loras,
            on_change=self._report,
            on_replaced=self._on_replaced,
        )
        self._requests = EngineRequests(
            api,
            blocks,
            self._account,
            member.block_size,
            member.worker_id,
            metrics,
            self._report,
            self._watch.confirm,
            sinks.deliver,
        )
        self._fails_on_restart = identity is not None
        self._publisher = sinks.publisher
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._on_death = sinks.on_death
        self.load = WorkerLoad()
        self._unreported: list[BlockEvent] = []
        self._report_timer: asyncio.TimerHandle | None = None

    @property
    def index_problem(self) -> str | None:
        """Return why the index is incomplete for this engine, or None."""
        if self._subscriber is None:
            return self.member.index_problem or "the engine publishes no cache events"
        if self._subscriber.is_silent and self._subscriber.num_batches == 0 and self._requests.has_prompts:
            return "no cache event has arrived from the engine: run `headstart doctor --engine-url`"
        return self._blocks.problem

    @property
    def exchange(self) -> None:
        """The engine moves its blocks itself."""

    async def catch_up(self) -> None:
        """Apply the events that the engine still has. Before `start`, so that no request meets their old epochs."""
        if self._subscriber is not None:
            await self._subscriber.catch_up()

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._watch.run(self._requests.is_silent_since), name="watch"))
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
        if self._watch.problem is not None:
            return Failed("not_ready", self._watch.problem, retryable=True)
        if request.adapter and request.adapter not in self.member.adapters:
            return Failed("not_ready", f"LoRA adapter {request.adapter!r:.200} is not loaded here", retryable=True)
        missing = [name for name in required_features(request) if name in self._api.unsupported]
        if missing:
            text = f"{', '.join(missing)}: not supported by {self._api.kind}"
            return Failed("unsupported", text, retryable=True)
        pool_tokens = self.load.num_blocks * self.member.block_size or self.bundle.max_model_len
        bundle, apis = self.bundle, self.member.text_apis
        return refusal(request, bundle.max_model_len, pool_tokens, bundle.vocab_size, text_apis=apis)

    async def render(self, call: EngineCall) -> Rendered:
        if call.path not in self.member.text_apis:
            raise RefusedError(Failed("unsupported", f"{call.path!r:.80}: no API of the engine", retryable=True))
        try:
            return await self._api.render(call)
        except EngineRefusedError as error:
            raise RefusedError(failed_by(error, is_call=True)) from error
        except EngineLostError as error:
            raise RefusedError(Failed("not_ready", str(error), retryable=True)) from error

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
            if self._blocks.tree.num_held:  # stored during the reset
                self._begin_epoch()
            return self.member.epoch

        return asyncio.run_coroutine_threadsafe(empty(), asyncio.get_running_loop())

    def debug_state(self) -> Future[dict[str, Any]]:
        done: Future[dict[str, Any]] = Future()
        done.set_result(
            {
                "engine": {
                    "kind": self._api.kind,
                    "problem": self._watch.problem,
                    "index_problem": self.index_problem,
                },
                "blocks": {
                    "held": self._blocks.tree.num_held,
                    "opaque": self._blocks.tree.num_opaque,
                    "orphans": self._blocks.tree.num_orphans,
                },
                "requests": self._requests.states(),
                "num_requests": len(self._requests.active),
            }
        )
        return done

    async def liveness(self) -> str | None:
        if self._watch.problem is not None:
            return self._watch.problem
        if self._requests.expects_tokens and time.monotonic() - self._requests.output_s > MAX_SILENT_S:
            return f"the engine has produced no token for {MAX_SILENT_S:.0f} s"
        try:
            return None if await self._api.is_healthy() else "the engine reports that it is not healthy"
        except EngineLostError as error:
            return str(error)

    # --- cache --------------------------------------------------------------------------------------------------

    def _on_batch(self, batch: EventBatch) -> None:
        applied = self._blocks.apply(batch.events)
        if self._blocks.ends != self.member.ends:
            logger.info("the engine's model keeps windows or states of its KV: the index gets its ends")
            self.member = replace(self.member, ends=self._blocks.ends)
            self._begin_epoch(self._blocks.visible_events())
        elif applied.cleared:
            self._begin_epoch(self._blocks.visible_events())
        else:
            self._report(applied.events)

    def _on_gap(self) -> None:
        logger.warning("cache events were lost: no block counts as held until events arrive for it")
        self._report(self._blocks.forget_held())

    def _on_restart(self) -> None:
        logger.warning("the engine has restarted: a new epoch begins")
        self._begin_epoch()
        if self._fails_on_restart:
            self._watch.doubt("the engine has restarted")
            self._requests.fail_all(Failed("worker_lost", "the engine has restarted", retryable=True))

    def _on_other_process(self) -> None:
        self._on_restart()
        self._resync()

    def _on_gone(self) -> None:
        self._begin_epoch()
        self._resync()

    def _resync(self) -> None:
        if self._subscriber is not None:
            self._subscriber.resync()

    def _on_loras(self, loras: Sequence[str]) -> None:
        if tuple(loras) != self.member.adapters:
            logger.info("LoRA adapters of the engine: %s", ", ".join(loras) or "none")
            self._blocks.forget_adapters(set(self.member.adapters).difference(loras))
            self.member = replace(self.member, adapters=tuple(loras))
            self._begin_epoch(self._blocks.visible_events())

    def _on_replaced(self, error: EngineDeadError) -> None:
        self._publish()
        self._on_death(error)

    def _begin_epoch(self, held: Sequence[BlockEvent] | None = None) -> None:
        """Begin a new epoch, in which the engine holds `held`, by default nothing."""
        if held is None:
            self._blocks.clear()
        self._unreported = []  # events of the old epoch
        self.member = in_new_epoch(self.member, new_epoch(), time.time_ns() // 1_000_000)
        self._account.begin_epoch()
        if self._publisher is not None:
            self._publisher.begin_epoch(self.member)
        self._report(held or ())

    def _report(self, events: Sequence[BlockEvent] = ()) -> None:
        """Publish these events within `REPORT_S`, with the load at that time."""
        self._unreported += events
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(REPORT_S, self._publish)

    def _publish(self) -> None:
        """Publish all unreported events and the load now."""
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        events, self._unreported = self._unreported, []
        is_away = self._draining or self._watch.problem is not None
        load = self._account.current(self._watch.counts, self.member.block_size, is_away, self._watch.is_slow)
        self.load = load
        stats = CacheStats(load.num_blocks, load.num_free_blocks, self._blocks.tree.num_held, 0, 0, 0, 0)
        self._metrics.set_state(load, stats)
        if self._publisher is not None:
            self._publisher.offer(events, load)
