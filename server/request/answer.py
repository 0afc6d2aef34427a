"""A whole request being answered: its generations side by side, what they gave so far, and the usage in tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from server.errors import ShuttingDownError
from server.http.stream import CancelOnDisconnect, ClientConnection
from server.request.choice import ChoiceDelta, StopReason, TokenEntry
from server.request.request import Generation

MAX_QUEUED_BATCHES: Final = 64
MAX_AT_ONCE: Final = 64
"""Prompts of one request that are at workers; the next begins when one has ended."""


@dataclass(slots=True, eq=False)
class CollectedChoice:
    """Everything that one choice gave."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: StopReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason


class Answer:
    """The generations of one request, one a prompt."""

    def __init__(self, generations: Sequence[Generation], deadline_s: float) -> None:
        """`deadline_s` is on the monotonic clock."""
        assert generations
        self.generations = generations
        self._deadline_s = deadline_s
        self._guard: CancelOnDisconnect | None = None

    def guard(self, client: ClientConnection) -> CancelOnDisconnect:
        """To be entered while the answer is made."""
        self._guard = CancelOnDisconnect(client, max(0.0, self._deadline_s - time.monotonic()))
        return self._guard

    def hurry(self) -> None:
        """The process stops: end with a ShuttingDownError."""
        if self._guard is not None:
            self._guard.end(ShuttingDownError)

    @property
    def first(self) -> Generation:
        return self.generations[0]

    def commit(self) -> None:
        """The client has seen something."""
        for generation in self.generations:
            generation.committed = True

    def deltas(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """All generations' deltas as they come. Close it to abort what runs. Raises ApiError."""
        return self.first.deltas() if len(self.generations) == 1 else self._merged()

    async def collect(self) -> list[CollectedChoice]:
        """Every choice in full, by index. Raises ApiError."""
        if len(self.generations) == 1:
            return await _collect(self.first)
        places = asyncio.Semaphore(MAX_AT_ONCE)

        async def collect(generation: Generation) -> list[CollectedChoice]:
            async with places:
                return await _collect(generation)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(collect(generation)) for generation in self.generations]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [choice for task in tasks for choice in task.result()]

    def usage(self) -> dict[str, object]:
        """A prompt is charged once, whatever the number of its choices."""
        prompt_tokens = sum(len(generation.spec.prompt_ids) for generation in self.generations)
        output_tokens = sum(generation.num_output_tokens for generation in self.generations)
        cached_tokens = sum(generation.num_cached_tokens or 0 for generation in self.generations)
        reasoning_tokens = sum(generation.num_reasoning_tokens for generation in self.generations)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Where the request went and what was reused there, as `usage` says it.

        A stream whose keep-alive comes before its prefill has only the index' promise, in whole blocks.
        """
        workers = dict.fromkeys(g.worker.worker_id for g in self.generations if g.worker is not None)
        if not workers:
            return []
        cached_tokens = sum(generation.num_reused_tokens for generation in self.generations)
        return [
            (b"x-headstart-worker", ",".join(workers).encode("latin-1", "replace")),
            (b"x-headstart-cached-tokens", b"%d" % cached_tokens),
        ]

    async def _merged(self) -> AsyncGenerator[list[ChoiceDelta]]:
        queue: asyncio.Queue[list[ChoiceDelta] | Exception | None] = asyncio.Queue(MAX_QUEUED_BATCHES)
        places = asyncio.Semaphore(MAX_AT_ONCE)
        pumps = [asyncio.create_task(_pump(generation, queue, places)) for generation in self.generations]
        try:
            num_open = len(pumps)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


class OpenAnswers:
    """The answers being written now, for those who look."""

    def __init__(self) -> None:
        self._answers: set[Answer] = set()

    def add(self, answer: Answer) -> None:
        self._answers.add(answer)

    def discard(self, answer: Answer) -> None:
        self._answers.discard(answer)

    def hurry(self) -> None:
        """The process stops: see `Answer.hurry`."""
        for answer in self._answers:
            answer.hurry()

    @property
    def num_output_tokens(self) -> int:
        return sum(generation.num_output_tokens for answer in self._answers for generation in answer.generations)


async def _pump(
    generation: Generation, queue: asyncio.Queue[list[ChoiceDelta] | Exception | None], places: asyncio.Semaphore
) -> None:
    try:
        async with places, aclosing(generation.deltas()) as batches:
            async for batch in batches:
                await queue.put(batch)
    except Exception as error:  # handed to the reader, which raises it
        await queue.put(error)
    else:
        await queue.put(None)


async def _collect(generation: Generation) -> list[CollectedChoice]:
    first = generation.spec.first_index
    num_restarts = 0
    choices = [CollectedChoice(first + index) for index in range(len(generation.choices))]
    async with aclosing(generation.deltas()) as batches:
        async for batch in batches:
            if generation.num_restarts != num_restarts:
                num_restarts = generation.num_restarts
                choices = [CollectedChoice(first + index) for index in range(len(generation.choices))]
            for delta in batch:
                choices[delta.choice - first].add(delta)
    return choices
