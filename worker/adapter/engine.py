"""Another engine's server as this worker's engine: requests go out by its HTTP API, its cache events come in.

    HTTP side: submit, abort --> EngineRequests --> EngineApi --> frames --> HTTP side
    EventSubscriber --> EngineBlocks --> publisher --> Redis
    counts, tokens, events --> EngineHealth: whether it can serve

Everything runs on the worker's event loop. The engine owns its blocks; `EngineBlocks` mirrors its events. A reset of
its cache begins a new epoch. Another process of the engine ends this worker, whose start checks all facts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, ClassVar, Final

import msgspec

from cache.allocators.base import CacheStats
from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember, in_new_epoch, new_epoch
from cache.types import Epoch
from worker.adapter.api import EngineApi, EngineLoad, EngineLostError, EngineRefusedError, EventSource, failed_by
from worker.adapter.blocks import EngineBlocks
from worker.adapter.health import IS_LOST, EngineHealth, Sign, State, facts_of
from worker.adapter.kv_events import EventBatch
from worker.adapter.load import LoadAccount
from worker.adapter.requests import EngineRequests
from worker.adapter.subscriber import EventSubscriber
from worker.common.capabilities import GENERATING, adapter_names, adapters_in
from worker.contracts.engine import EngineDeadError, EngineSinks, RefusedError, RequestKey, StepLog
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import QueuePace
from worker.contracts.validation import refusal
from worker.wire import EngineCall, Failed, GenerateRequest, TokenizerBundle, pack, unpack

logger = logging.getLogger(__name__)

REPORT_S: Final = 0.005
"""The delay of a report. The start of a request, its blocks and its first token share one on a fast engine."""
WATCH_S: Final = 1.0
"""Interval between two counts. Another process is noticed within twice this time."""
ANSWER_S: Final = 1.5
"""An engine that takes longer to return its counts is slow: gateways prefer others."""
BYPASS_AFTER: Final = 3
"""Counts in a row with more requests than this adapter has sent, until it warns."""
WARN_AGAIN_S: Final = 60.0  # one line a minute, not one a report
MAX_PROBLEM_CHARS: Final = 200  # it is part of each state in Redis


# Why gateways do not call engines themselves: an adapter is 82 of the 274 us of a token (benchmarks/RESULTS.md). But
# it fences epochs, proves whose it is, bounds queues over all gateways, and runs suspects one at a time. Without it,
# engines listen beyond loopback, and gateways have 200 lines more.
@dataclass(eq=False)
class AdapterEngine:
    """`worker.contracts.engine.Engine` over an `EngineApi`. `start` and everything else belong to the event loop."""

    exchange: ClassVar = None
    """The engine moves its blocks itself."""
    _api: EngineApi
    _blocks: EngineBlocks
    source: InitVar[EventSource | None]
    """None for an engine without cache events, whose blocks stay unknown."""
    bundle: TokenizerBundle
    member: WorkerMember
    _health: EngineHealth
    _metrics: WorkerMetrics
    _sinks: EngineSinks = field(default_factory=EngineSinks)
    _claim: socket.socket | None = None
    """Closed at the end, so that another adapter may serve the engine."""
    load: WorkerLoad = field(default_factory=WorkerLoad, init=False)
    _account: LoadAccount = field(default_factory=LoadAccount, init=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _probe: asyncio.Task[None] | None = field(default=None, init=False)
    """The request for one token that shows whether the engine's core works."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _counts: EngineLoad | None = field(default=None, init=False)
    _num_bypassing: int = field(default=0, init=False)
    _warned_s: float = field(default=0.0, init=False)
    _draining: bool = field(default=False, init=False)
    _unreported: list[BlockEvent] = field(default_factory=list, init=False)
    _report_timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def __post_init__(self, source: EventSource | None) -> None:
        """Raises ValueError or OSError for a source that cannot be followed."""
        self.member = replace(self.member, ends=self._blocks.ends)
        self._subscriber = None if source is None else EventSubscriber(source, self.hear)
        calls = self._sinks.deliver, self.report, self.apply, self._wake.set, self.liveness
        self._requests = EngineRequests(self._api, self._blocks, self._account, self.member, self._metrics, *calls)

    @property
    def index_problem(self) -> str | None:
        """Return why the index is incomplete for this engine, or None."""
        if self._subscriber is None:
            return self.member.index_problem or "the engine publishes no cache events"
        if self._subscriber.is_silent and self._blocks.num_batches == 0 and self._requests.has_sent_block:
            return "no cache event has arrived from the engine: run `headstart doctor --engine-url`"
        return self._blocks.problem

    async def catch_up(self) -> None:
        """Apply the events that the engine still has, and wait for its first token. Before `start`.

        So no request meets the epochs of these events. Raises EngineLostError.
        """
        if self._subscriber is not None:
            await self._subscriber.catch_up()
        with contextlib.suppress(EngineRefusedError):
            await self._api.probe()
        self.apply(Sign.TOKEN)

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))
        if self._subscriber is not None:
            self._tasks.append(asyncio.create_task(self._subscriber.run(), name="events"))
        self.report(())

    async def supervise(self) -> None:
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        tasks = [*self._tasks, *([] if self._probe is None else [self._probe])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._requests.close()
        if self._subscriber is not None:
            self._subscriber.close()
        if self._report_timer is not None:
            self._report_timer.cancel()
        await self._api.close()
        if self._claim is not None:
            self._claim.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def refusal(self, request: GenerateRequest) -> Failed | None:
        if self._health.problem is not None:
            return Failed("not_ready", self._health.problem, retryable=True)
        pool_tokens = self.bundle.max_model_len  # the engine checks its pool, whose blocks may span devices
        return refusal(request, self.member, pool_tokens, self.bundle.vocab_size)

    async def render(self, call: bytes) -> bytes:
        asked = unpack(call, EngineCall)
        if asked.path not in self.member.capabilities:
            raise RefusedError(Failed("unsupported", f"{asked.path!r:.80}: no API of the engine", retryable=True))
        with _refusing():
            return pack(await self._api.render(asked))

    async def prepare(self, request: GenerateRequest) -> None:
        return None

    def submit(self, key: RequestKey, request: GenerateRequest, prepared: Any, steps: StepLog | None = None) -> None:
        self._requests.submit(key, request, steps)

    def abort(self, key: RequestKey, choice: int | None = None) -> None:
        if choice is None:  # all choices of a call are in one answer
            self._requests.abort(key)

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
            with _refusing():
                await self._api.reset()
            self._begin_epoch()
            return self.member.epoch

        return asyncio.run_coroutine_threadsafe(empty(), asyncio.get_running_loop())

    def debug_state(self) -> Future[dict[str, Any]]:
        health, tree = self._health, self._blocks.tree
        engine = {"kind": self._api.kind, "state": health.state, "problem": health.problem}
        done: Future[dict[str, Any]] = Future()
        done.set_result(
            {
                "engine": engine | {"index_problem": self.index_problem},
                "blocks": {"held": tree.num_held, "opaque": tree.num_opaque},
                "requests": self._requests.states(),
                "num_requests": len(self._requests.active),
            }
        )
        return done

    async def liveness(self) -> str | None:
        if self._health.state in IS_LOST:
            return self._health.problem
        try:
            return None if await self._api.is_healthy() else "the engine reports that it is not healthy"
        except EngineLostError as error:
            return str(error)

    @property
    def pace(self) -> QueuePace:
        return self._account.pace

    @property
    def not_ready_reason(self) -> str | None:
        return self._health.problem

    # --- the engine's health ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask the engine for its counts and models until cancelled, and for a token after a silence."""
        while True:
            self._wake.clear()
            is_probed = self._probe is not None and not self._probe.done()
            num_open = self._account.num_open_choices + is_probed
            try:
                async with asyncio.timeout(ANSWER_S):
                    counts, model = await self._api.load(), await self._api.model()
                is_paused = await self._api.is_paused()
                self._counts = counts
                facts = facts_of(counts, model)
                self._moved(self._health.answered(facts, counts, is_paused=is_paused, num_open=num_open))
                self._account.read(counts)
                if self._health.problem is None and not GENERATING.isdisjoint(self.member.capabilities):
                    self._warn_bypass(counts, num_open)
                self._take_loras(model.loras)
            except (EngineLostError, EngineRefusedError, TimeoutError) as error:
                why = str(error) or f"no answer within {ANSWER_S:g} s"
                is_closed = isinstance(error, EngineLostError) and error.gone
                self._moved(self._health.failed(why, is_closed=is_closed, num_open=num_open))
            self.report(())
            if not is_probed and self._health.asks_for_token():
                self._probe = asyncio.create_task(self._ask_for_token(), name="probe")
            with contextlib.suppress(TimeoutError):  # `wait_for` of Python 3.11 may lose a cancellation
                async with asyncio.timeout(WATCH_S):
                    await self._wake.wait()

    async def _ask_for_token(self) -> None:
        """Ask for one token, without a tenant's salt. An engine that is full has not shown anything."""
        with contextlib.suppress(EngineLostError, EngineRefusedError):
            await self._api.probe()
            self.apply(Sign.TOKEN)

    def apply(self, sign: Sign, why: str = "") -> None:
        """Apply a sign of the engine, and act on a new state."""
        self._moved(self._health.apply(sign, why))

    def _moved(self, has_changed: bool) -> None:
        """Do what the state asks for, if it has changed."""
        health = self._health
        if not has_changed:
            return
        self._metrics.engine_problem.set(health.problem is not None)
        if health.problem is None:
            logger.info("the engine generates tokens")
        else:
            level = logging.CRITICAL if health.state is State.REPLACED else logging.ERROR
            logger.log(level, "the engine is %s: %s", health.state, health.problem)
        if health.state is State.GONE:
            self._begin_epoch()  # whatever comes back, nothing is promised of it
        self._publish()
        if health.state in IS_LOST:
            self._requests.fail_all(Failed("worker_lost", health.why, retryable=True))
        if health.state is State.REPLACED:
            self._sinks.on_death(EngineDeadError(f"this worker was started for another engine: {health.why}"))

    def _take_loras(self, loras: Sequence[str]) -> None:
        known = adapters_in(self.member.capabilities)
        if list(loras) != known:
            logger.info("LoRA adapters of the engine: %s", ", ".join(loras) or "none")
            self._blocks.forget_adapters(set(known).difference(loras))
            others = [name for name in self.member.capabilities if name not in adapter_names(known)]
            self.member = replace(self.member, capabilities=(*others, *adapter_names(loras)))
            self._begin_epoch(self._blocks.visible_events())

    def _warn_bypass(self, counts: EngineLoad, num_open: int) -> None:
        """Warn about requests that bypass the gateway. One call of a model without text may be many at the engine."""
        num_bypassing = counts.num_running + counts.num_waiting - num_open
        self._num_bypassing = self._num_bypassing + 1 if num_bypassing > 0 else 0
        if self._num_bypassing >= BYPASS_AFTER and time.monotonic() - self._warned_s > WARN_AGAIN_S:
            self._warned_s = time.monotonic()
            logger.warning(
                "%d requests bypass the gateway: the fleet's load estimates are too low."
                " Send all traffic through the gateway",
                num_bypassing,
            )

    # --- reports ------------------------------------------------------------------------------------------------

    def report(self, events: Sequence[BlockEvent]) -> None:
        """Publish these events within `REPORT_S`, with the load at that time."""
        self._unreported += events
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(REPORT_S, self._publish)

    # --- cache --------------------------------------------------------------------------------------------------

    def hear(self, event: str, batch: EventBatch | None) -> None:
        """Take news of the subscriber."""
        self._metrics.index_events.labels(f"engine_{event}").inc()
        if event == "gap":
            logger.warning("cache events were lost: no block counts as held until events arrive for it")
            self.report(self._blocks.forget_held())
        elif event == "restart":
            self.apply(Sign.OTHER, "the engine's cache events have begun again")
        if batch is None:
            return
        self._health.progress()
        applied = self._blocks.apply(batch.events)
        blocks, member = self._blocks, self.member
        block_size = max(member.engine_block_size, blocks.engine_block_size)  # context parallelism spreads a block
        if has_new_rule := (blocks.ends, block_size) != (member.ends, member.engine_block_size):
            logger.info("a hit has whole blocks of %d tokens, ends: %s", block_size, blocks.ends or "any")
            self.member = replace(member, ends=blocks.ends, engine_block_size=block_size)
        if has_new_rule or applied.cleared:
            self._begin_epoch(self._blocks.visible_events())
        else:
            self.report(applied.events)

    def _begin_epoch(self, held: Sequence[BlockEvent] | None = None) -> None:
        """Begin a new epoch, in which the engine holds `held`, by default nothing."""
        if held is None:
            self._blocks.clear()
        self._unreported = []  # events of the old epoch
        self.member = in_new_epoch(self.member, new_epoch(), time.time_ns() // 1_000_000)
        self._account.begin_epoch()
        if self._sinks.publisher is not None:
            self._sinks.publisher.begin_epoch(self.member)
        self.report(held or ())

    def _publish(self) -> None:
        """Publish all unreported events and the load now."""
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        events, self._unreported = self._unreported, []
        is_away = self._draining or self._health.problem is not None
        load = self._account.current(self._counts, self.member.block_size, is_away, self._health.is_slow)
        self.load = load = msgspec.structs.replace(load, problem=(self._health.problem or "")[:MAX_PROBLEM_CHARS])
        stats = CacheStats(load.num_blocks, load.num_free_blocks, self._blocks.tree.num_held, 0, 0, 0)
        self._metrics.set_state(load, stats)
        self._metrics.queued_tokens.set(self._account.num_queued_tokens)
        if self._sinks.publisher is not None:
            self._sinks.publisher.offer(events, load)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise RefusedError for the engine's errors."""
    try:
        yield
    except EngineRefusedError as error:
        raise RefusedError(failed_by(error)) from error
    except EngineLostError as error:
        raise RefusedError(Failed("not_ready", str(error), retryable=True)) from error
