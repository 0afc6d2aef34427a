"""The requests at another engine: one task each, from the first frame to the last.

However a request ends, it gets one last frame, and is removed from the load account once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cache.events import BlockEvent
from cache.hashing import hash_chain
from cache.records import WorkerMember
from cache.types import BlockHash
from worker.adapter.api import EngineApi, EngineLostError, EnginePart, EngineRefusedError, failed_by
from worker.adapter.blocks import EngineBlocks
from worker.adapter.health import Sign
from worker.adapter.load import LoadAccount, Prefill
from worker.contracts.engine import SUSPECT_NOTICE_S, EngineOutput, RequestKey, StepLog
from worker.contracts.metrics import WorkerMetrics
from worker.wire import End, EngineText, Failed, Finished, Frame, GenerateRequest, Started, Tokens

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request at the engine."""

    key: RequestKey
    request: GenerateRequest
    steps: StepLog | None
    begun_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    is_started: bool = False
    is_over: bool = False
    """Its last frame was delivered."""
    prefill: Prefill | None = None
    """Its place in the account; None before it is sent."""
    num_cached: int | None = None
    """Prompt tokens that the engine found cached, as it reports at the end."""
    task: asyncio.Task[None] | None = None

    def end(self) -> End:
        """Return the last frame of a request that ends now: the seconds of each part. 0: there was none."""
        now_s = time.monotonic()
        started_s = None if self.prefill is None else self.prefill.started_s
        if (first_s := self.first_token_s) is None:
            return End((started_s or now_s) - self.begun_s, 0.0, 0.0, self.num_cached)
        started_s = started_s or self.begun_s  # its token came out of turn: the account has not started it
        return End(started_s - self.begun_s, first_s - started_s, now_s - first_s, self.num_cached)


@dataclass(eq=False)
class EngineRequests:
    """Sends requests to the engine and delivers their frames. Owned by the event loop."""

    _api: EngineApi
    _blocks: EngineBlocks
    _account: LoadAccount
    _member: WorkerMember
    """Its worker's id begins those of requests at the engine."""
    _metrics: WorkerMetrics
    _deliver: Callable[[list[EngineOutput]], object]
    _report: Callable[[Sequence[BlockEvent]], None]
    """Publishes events of blocks, with the load."""
    _apply: Callable[[Sign], None]
    """Takes a sign of the engine, such as a token."""
    _doubt: Callable[[], None]
    """Is called when the engine is lost, or lacks a LoRA adapter: its counts and models are to be read now."""
    _liveness: Callable[[], Awaitable[str | None]]
    """Returns why the engine is lost, or None. When vLLM's core has died, its server answers for a while."""
    active: dict[RequestKey, ActiveRequest] = field(default_factory=dict, init=False)
    has_sent_block: bool = field(default=False, init=False)
    """A prompt of more than one engine block was sent."""
    _suspects: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def submit(self, key: RequestKey, request: GenerateRequest, steps: StepLog | None) -> None:
        """Begin a request. `steps` receives its trace."""
        self._metrics.requests.inc()
        active = self.active[key] = ActiveRequest(key, request, steps)
        active.task = asyncio.get_running_loop().create_task(self._serve(active))
        active.task.add_done_callback(lambda _: self.active.pop(key))  # also if cancelled before its first step

    def abort(self, key: RequestKey) -> None:
        """End a request. Ignores unknown keys."""
        if (active := self.active.get(key)) is not None:
            self._end(active, *(Finished(each.index, "abort") for each in active.request.choices), active.end())

    def fail_all(self, failed: Failed) -> None:
        """End every request with this frame. One that a lost engine never had is refused."""
        refused = Failed("not_ready", failed.message, retryable=True) if failed.code == "worker_lost" else failed
        for active in list(self.active.values()):
            self._end(active, refused if active.prefill is None else failed)

    async def close(self) -> None:
        """End every request without a frame."""
        tasks = [active.task for active in self.active.values() if active.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def states(self) -> list[dict[str, Any]]:
        """Return the requests as JSON values."""
        return [
            {
                "request_id": active.request.request_id,
                "gateway_id": active.request.gateway_id,
                "choices": [choice.index for choice in active.request.choices],
                "num_prompt_tokens": len(active.request.prompt_ids),
                "is_started": active.is_started,
            }
            for active in self.active.values()
        ]

    def _end(self, active: ActiveRequest, *last: Frame) -> None:
        """Deliver the last frames, and leave the engine."""
        assert active.task is not None
        self._emit(active, *last)
        active.task.cancel()

    async def _serve(self, active: ActiveRequest) -> None:
        """Run one request to its end, and deliver its last frame."""
        last: End | Failed | None = None
        try:
            last = await self._run(active)
        except EngineLostError as error:
            # It has not killed an engine that never had it.
            last = Failed("not_ready" if error.unsent else "worker_lost", str(error), retryable=True)
            self._doubt()
        except EngineRefusedError as error:
            last = failed_by(error)
            if last.code == "engine_error" and await self._liveness() is not None:
                last = Failed("worker_lost", str(error), retryable=True)
            if last.code == "not_ready":
                self._doubt()
        except TimeoutError:
            last = Failed("deadline", "it waited too long", retryable=False)
        except asyncio.CancelledError:
            pass  # its last frame was delivered
        except Exception as error:  # one request must not end the others
            logger.exception("request %s failed", active.request.request_id)
            last = Failed("internal", f"{type(error).__name__}: {error}", retryable=True)
        finally:
            if last is not None:
                self._emit(active, last)
            self._report(())  # the load has changed

    async def _run(self, active: ActiveRequest) -> End:
        """Pass on what an API of the engine answers. Choices end only after the whole answer."""
        request, reasons = active.request, dict[int, str]()
        num_prompt_tokens = len(request.prompt_ids)
        hashes = hash_chain(BlockHash(request.root), request.prompt_ids, self._member.block_size, request.media)
        num_expected = self._blocks.num_matched_tokens(hashes, num_prompt_tokens)
        at_batch = self._blocks.num_batches
        deadline_s = None if request.deadline_s is None else max(0.0, request.deadline_s)

        def take(data: bytes, part: EnginePart) -> None:
            self._apply(Sign.TOKEN)
            if active.first_token_s is None:
                self._record_first_token(active, prefill, num_expected)
                if not deadline.expired():  # else the task is being cancelled
                    deadline.reschedule(None)
                until_first_token.close()
            if (num_cached := part.num_cached_tokens) is not None:
                # The engine's prompt of a resumed answer includes the output so far.
                active.num_cached = min(num_cached, num_prompt_tokens)
            for choice in part.choices:
                if choice.finish_reason == "length":
                    reasons[choice.index] = choice.finish_reason
            new = [Tokens(choice.index, choice.token_ids) for choice in part.choices if choice.token_ids]
            self._emit(active, *new, EngineText(data))

        async with asyncio.timeout(deadline_s) as deadline:
            with contextlib.ExitStack() as until_first_token:
                if request.is_suspect:
                    await self._suspects.acquire()
                    until_first_token.callback(self._suspects.release)
                    self._start(active, num_expected)
                    await asyncio.sleep(SUSPECT_NOTICE_S)
                self.has_sent_block = self.has_sent_block or num_prompt_tokens > self._blocks.engine_block_size
                is_seen = request.call is None or request.call.streams or request.call.pools
                start, num_tokens = partial(self._start, active, num_expected), num_prompt_tokens - num_expected
                prefill = active.prefill = self._account.send(request.gateway_id, num_tokens, start, is_seen=is_seen)
                if not is_seen:
                    asyncio.get_running_loop().call_later(self._account.seconds_left(), self._account.drop, prefill)
                self._account.num_open_choices += len(request.choices)
                try:
                    await self._api.generate(request, f"{self._member.worker_id}-{active.key}", take)
                    last = [Finished(each.index, reasons.get(each.index, "stop")) for each in request.choices]
                    self._emit(active, *last)
                    if active.num_cached is not None and active.num_cached < num_expected:
                        self._report(self._blocks.remove_missing(hashes, active.num_cached, at_batch))
                    self._report(self._blocks.record_prompt(num_prompt_tokens))
                finally:
                    self._account.num_open_choices -= len(request.choices)
                    num_cached = active.num_cached
                    self._account.end(prefill, None if num_cached is None else num_prompt_tokens - num_cached)
        return active.end()

    def _record_first_token(self, active: ActiveRequest, prefill: Prefill, num_expected: int) -> None:
        self._start(active, num_expected)
        self._account.first_token(prefill)
        if prefill.is_seen:  # else the whole answer is here
            active.first_token_s = time.monotonic()
            if active.steps is not None:
                active.steps.first_token_s = active.first_token_s

    def _emit(self, active: ActiveRequest, *frames: Frame) -> None:
        """Deliver frames of a request, but none after its last one."""
        if active.is_over:
            return
        active.is_over = isinstance(frames[-1], (End, Failed))
        outputs = [EngineOutput(active.key, frame) for frame in frames]
        self._metrics.count_outputs(outputs)
        self._deliver(outputs)

    def _start(self, active: ActiveRequest, num_expected: int) -> None:
        """Deliver Started, once. `num_expected`: the cached tokens by our index; the engine's own count comes later."""
        if not active.is_started:
            active.is_started = True
            if active.steps is not None:
                active.steps.begun_s, active.steps.num_cached_tokens = time.monotonic(), num_expected
            self._metrics.prompt_tokens.inc(len(active.request.prompt_ids))
            self._metrics.cached_tokens.inc(num_expected)
            queue_s = time.monotonic() - active.begun_s
            self._metrics.queue_s.observe(queue_s)
            self._emit(active, Started(num_expected, queue_s=queue_s))
