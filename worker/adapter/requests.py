"""The requests at another engine: one task each, from the first frame to the last.

A request is sent to the engine as its choices. The first choice goes first; the others follow after its first token and
find the prompt cached. However a request ends, it gets one last frame, and is removed from the load account once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.events import BlockEvent
from cache.hashing import hash_chain
from cache.types import BlockHash
from worker.adapter.api import Chunk, EngineApi, EngineLostError, EngineRefusedError, failed_by
from worker.adapter.blocks import EngineBlocks
from worker.adapter.load import LoadAccount, Prefill
from worker.contracts.engine import SUSPECT_NOTICE_S, EngineOutput, RequestKey, StepLog
from worker.contracts.metrics import WorkerMetrics
from worker.wire import (
    ChoiceState,
    End,
    EngineText,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PromptLogprobs,
    Started,
    Tokens,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request at the engine: a task for all of it, and one for each choice."""

    key: RequestKey
    request: GenerateRequest
    steps: StepLog | None
    begun_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    is_started: bool = False
    is_over: bool = False
    """Its last frame was delivered."""
    num_cached: int | None = None
    """Prompt tokens that the engine found cached, as it reports at the end."""
    task: asyncio.Task[None] | None = None
    choices: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The choices at the engine, by index."""
    aborted: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Choices with a Finished, delivered or held."""
    held: list[Finished] = field(default_factory=list)
    """Those of choices that were aborted before Started, which comes first."""


class EngineRequests:
    """Sends requests to the engine and delivers their frames. Owned by the event loop."""

    def __init__(
        self,
        api: EngineApi,
        blocks: EngineBlocks,
        account: LoadAccount,
        block_size: int,
        name: str,
        metrics: WorkerMetrics,
        report: Callable[[Sequence[BlockEvent]], None],
        confirm: Callable[[], Awaitable[None]],
        deliver: Callable[[list[EngineOutput]], object],
    ) -> None:
        """`name` begins the ids of requests at the engine. `report` publishes events of blocks with the load.

        `confirm` waits until the engine is known to be the same. It is called before the first token of each answer.
        """
        self.account = account
        self.active: dict[RequestKey, ActiveRequest] = {}
        self.output_s = time.monotonic()
        """When the engine last produced a token, or was idle."""
        self.has_prompts = False
        """A prompt of more than one engine block was sent."""
        self._api = api
        self._blocks = blocks
        self._block_size = block_size
        self._name = name
        self._metrics = metrics
        self._report = report
        self._confirm = confirm
        self._deliver = deliver
        self._suspects = asyncio.Lock()

    def submit(self, key: RequestKey, request: GenerateRequest, steps: StepLog | None) -> None:
        """Begin a request. `steps` receives its trace."""
        if not self.active:
            self.output_s = time.monotonic()
        self._metrics.requests.inc()
        active = self.active[key] = ActiveRequest(key, request, steps)
        active.task = asyncio.get_running_loop().create_task(self._serve(active))
        active.task.add_done_callback(lambda _: self.active.pop(key, None))  # cancelled before its first step

    def abort(self, key: RequestKey, choice: int | None) -> None:
        """End a request, or one choice of it. Ignores unknown keys."""
        active = self.active.get(key)
        if active is None:
            return
        if choice is None:
            unended = [state.index for state in active.request.choices if state.index not in active.ended]
            self._end(active, *(Finished(index, "abort") for index in unended), End(0.0, 0.0, 0.0))
        elif choice not in active.ended:
            active.aborted.add(choice)
            if (task := active.choices.get(choice)) is not None:
                task.cancel()

    @property
    def expects_tokens(self) -> bool:
        """Return whether a request will show its tokens as the engine produces them."""
        return any(each.request.call is None or each.request.call.streams for each in self.active.values())

    def is_silent_since(self, time_s: float) -> bool:
        """Return whether no request has got a token since a time, on the monotonic clock."""
        return not self.active or self.output_s < time_s

    def fail_all(self, failed: Failed) -> None:
        """End every request with this frame."""
        for active in self.active.values():
            self._end(active, failed)

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
                "choices": sorted(active.choices),
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
            try:
                last = await self._run(active)
            except BaseExceptionGroup as group:  # of the tasks of its choices: the first failure is the cause
                raise group.exceptions[0] from None
        except EngineLostError as error:
            last = Failed("worker_lost", str(error), retryable=True)
        except EngineRefusedError as error:
            last = failed_by(error, is_call=active.request.call is not None)
        except TimeoutError:
            last = Failed("deadline", "it waited too long", retryable=False)
        except asyncio.CancelledError:
            pass  # its last frame was delivered
        except Exception as error:  # one request must not end the others
            logger.exception("request %s failed", active.request.request_id)
            last = Failed("internal", f"{type(error).__name__}: {error}", retryable=True)
        finally:
            self.active.pop(active.key)
            if last is not None:
                self._emit(active, last)
            self._report(())

    async def _run(self, active: ActiveRequest) -> End:
        request = active.request
        hashes = hash_chain(BlockHash(request.root), request.prompt_ids, self._block_size, request.media)
        num_cached = self._blocks.num_matched_tokens(hashes, len(request.prompt_ids))
        promised_at = self._blocks.num_batches
        suspects = self._suspects if request.is_suspect else contextlib.nullcontext()
        async with contextlib.AsyncExitStack() as until_first_token:
            deadline_s = None if request.deadline_s is None else max(0.0, request.deadline_s)
            await until_first_token.enter_async_context(asyncio.timeout(deadline_s))
            await until_first_token.enter_async_context(suspects)
            if request.is_suspect:
                self._start(active, num_cached)
                await asyncio.sleep(SUSPECT_NOTICE_S)
            self.has_prompts = self.has_prompts or len(request.prompt_ids) > self._blocks.engine_block_size
            prefill = self.account.send(active.key, request.gateway_id, len(request.prompt_ids) - num_cached)
            try:
                if request.sampling.prompt_logprobs is not None:
                    positions = await self._api.prompt_logprobs(request)
                    await self._confirm()
                    self._start(active, num_cached)
                    self._emit(active, PromptLogprobs(positions))
                self._start_first()
                run = self._run_choices if request.call is None else self._run_call
                await run(active, prefill, num_cached, until_first_token)
                if request.sampling.prompt_logprobs is None:  # such a request matches no prefix
                    self._remove_missing(active, num_cached, promised_at)
                self._report(self._blocks.note_prompt(len(request.prompt_ids)))
            finally:
                self.account.drop(prefill)
                self._start_first()
        ended_s = time.monotonic()
        first_s = active.first_token_s or ended_s
        started_s = active.begun_s if prefill.started_s is None else prefill.started_s
        return End(
            max(0.0, started_s - active.begun_s), max(0.0, first_s - started_s), ended_s - first_s, active.num_cached
        )

    def _remove_missing(self, active: ActiveRequest, num_promised: int, promised_at: int) -> None:
        """Remove the blocks that the engine should have found but did not."""
        num_found, request = active.num_cached, active.request
        if num_found is not None and num_found < num_promised:
            root = BlockHash(request.root)
            self._report(self._blocks.remove_missing(root, request.prompt_ids, num_found, promised_at, request.media))

    async def _run_choices(
        self, active: ActiveRequest, prefill: Prefill, num_cached: int, until_first_token: contextlib.AsyncExitStack
    ) -> None:
        """Run the first choice up to its first token, then the others."""
        request = active.request
        first_token = asyncio.Event()

        async def follow(choice: ChoiceState) -> None:
            async for chunk in self._chunks(active, choice):
                if not first_token.is_set():
                    self._begin(active, prefill, num_cached)
                    first_token.set()
                if active.steps is not None:
                    active.steps.decode.num_steps += 1
                self._emit_chunk(active, choice.index, chunk)

        async with asyncio.TaskGroup() as group:
            for number, choice in enumerate(request.choices):
                task = group.create_task(self._follow_choice(active, choice, follow))
                if number == 0:
                    await _either(first_token.wait(), task)
                    await until_first_token.aclose()

    def _begin(self, active: ActiveRequest, prefill: Prefill, num_cached: int) -> None:
        """Record the first token of a request."""
        self._start(active, num_cached)
        self.account.first_token(prefill)
        active.first_token_s = time.monotonic()
        if active.steps is not None:
            active.steps.first_token_s = active.first_token_s
        self._start_first()

    async def _run_call(
        self, active: ActiveRequest, prefill: Prefill, num_cached: int, until_first_token: contextlib.AsyncExitStack
    ) -> None:
        """Pass on what an API of the engine answers. Choices end only after the whole answer."""
        request, reasons = active.request, dict[int, str]()
        if request.call is not None and not request.call.streams:
            self.account.drop_later(prefill)
        self.account.num_open += len(request.choices)
        try:
            stream = self._api.text(request, f"{self._name}-{active.key}")
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                async for part in stream:
                    if active.first_token_s is None:
                        await self._confirm()
                        self._begin(active, prefill, num_cached)
                        await until_first_token.aclose()
                    self.output_s = time.monotonic()
                    if part.num_cached_tokens is not None:
                        active.num_cached = min(part.num_cached_tokens, len(request.prompt_ids))
                    reasons |= {index: "length" for index, reason in part.reasons if reason == "length"}
                    tokens = [Tokens(index, token_ids) for index, token_ids in part.token_ids]
                    self._emit(active, *tokens, EngineText(part.data))
        finally:
            self.account.num_open -= len(request.choices)
        self._emit(active, *[Finished(each.index, reasons.get(each.index, "stop")) for each in request.choices])

    async def _follow_choice(
        self, active: ActiveRequest, choice: ChoiceState, follow: Callable[[ChoiceState], Awaitable[None]]
    ) -> None:
        """Run one choice. If it is aborted, it ends with `abort`; the others continue."""
        task = asyncio.current_task()
        assert task is not None
        assert active.task is not None
        active.choices[choice.index] = task
        self.account.num_open += 1
        try:
            if choice.index not in active.aborted:  # it may be aborted before it starts
                await follow(choice)
        except asyncio.CancelledError:
            if choice.index not in active.aborted or active.task.cancelling():
                raise
        finally:
            self.account.num_open -= 1
            del active.choices[choice.index]
        if choice.index in active.aborted:
            active.ended.add(choice.index)
            finished = Finished(choice.index, "abort")
            if active.is_started:
                self._emit(active, finished)
            else:
                active.held.append(finished)

    async def _chunks(self, active: ActiveRequest, choice: ChoiceState) -> AsyncIterator[Chunk]:
        """Yield the chunks of one choice up to its finish reason. Raises EngineLostError if none arrives."""
        reason, is_confirmed = None, False
        request_id = f"{self._name}-{active.key}-{choice.index}"
        stream = self._api.generate(active.request, choice, request_id)
        try:
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                async for chunk in stream:
                    if not is_confirmed:
                        await self._confirm()
                        is_confirmed = True
                    self.output_s = time.monotonic()
                    if chunk.num_cached_tokens is not None and choice is active.request.choices[0]:
                        # The engine's prompt of a resumed choice includes the output so far.
                        active.num_cached = min(chunk.num_cached_tokens, len(active.request.prompt_ids))
                    if reason is None and (chunk.token_ids or chunk.reason is not None):
                        reason = chunk.reason
                        yield chunk
        except EngineLostError:
            if reason is None:  # otherwise only the count of cached tokens is missing
                raise
        if reason is None:
            raise EngineLostError("the answer has no finish reason")

    def _emit_chunk(self, active: ActiveRequest, index: int, chunk: Chunk) -> None:
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

    def _emit(self, active: ActiveRequest, *frames: Frame) -> None:
        """Deliver frames of a request, but none after its last one."""
        if active.is_over:
            return
        active.is_over = any(isinstance(frame, (End, Failed)) for frame in frames)
        if active.is_over and not active.is_started:
            frames = (*active.held, *frames)
        outputs = [EngineOutput(active.key, frame) for frame in frames]
        self._metrics.count_outputs(outputs)
        self._deliver(outputs)

    def _start(self, active: ActiveRequest, num_cached: int) -> None:
        """Deliver Started, once."""
        if not active.is_started:
            active.is_started = True
            if active.steps is not None:
                active.steps.begun_s, active.steps.num_cached_tokens = time.monotonic(), num_cached
            self._metrics.prompt_tokens.inc(len(active.request.prompt_ids))
            self._metrics.cached_tokens.inc(num_cached)
            queue_s = time.monotonic() - active.begun_s
            self._metrics.queue_s.observe(queue_s)
            self._emit(active, Started(num_cached, queue_s=queue_s), *active.held)

    def _start_first(self) -> None:
        """Start the request whose prefill the engine has reached."""
        prefill = self.account.started()
        if prefill is not None and (active := self.active.get(prefill.key)) is not None:
            self._start(active, len(active.request.prompt_ids) - prefill.num_tokens)


async def _either(wait: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> None:
    """Wait until `wait` or `task` is done. Cancels the wait, never `task`."""
    waiting = asyncio.ensure_future(wait)
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
