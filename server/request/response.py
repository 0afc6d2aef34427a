"""The answer to one request: the generations of all its prompts, their usage and headers."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

from server.metrics import GatewayMetrics
from server.request.choice import ChoiceDelta
from server.request.request import Deliver, Generation
from server.schema.grammar_schema import relaxed_header
from server.usage.account import Account

MAX_AT_ONCE: Final = 64
"""Prompts of one request that run at a time; the next starts when one has ended."""


class ResponseStream:
    """The generations of one request, one per prompt."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        assert generations
        self.generations = generations
        """Replaced when they are prepared again."""

    @property
    def num_output_tokens(self) -> int:
        return sum([generation.num_output_tokens for generation in self.generations])

    @property
    def num_cached_tokens(self) -> int:
        return sum([generation.num_cached_tokens or 0 for generation in self.generations])

    @property
    def model(self) -> str:
        return self.first.spec.model.name

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    @property
    def first(self) -> Generation:
        return self.generations[0]

    def commit(self) -> None:
        """Record that output has been sent to the client."""
        for generation in self.generations:
            generation.client_has_output = True

    async def run(self, deliver: Deliver | None = None) -> None:
        """Run every generation, and `deliver` the deltas of all as they arrive. Raises ApiError.

        Call `take_deltas` for the last part.
        """
        if len(self.generations) == 1:
            await self.first.run(deliver)
            return
        slots, turn = asyncio.Semaphore(MAX_AT_ONCE), asyncio.Lock()

        async def deliver_in_turn(deltas: list[ChoiceDelta]) -> None:
            assert deliver is not None
            async with turn:
                await deliver(deltas)

        async def run_one(generation: Generation) -> None:
            async with slots:
                await generation.run(None if deliver is None else deliver_in_turn)
            if deliver is not None and (deltas := generation.take_deltas()):
                await deliver_in_turn(deltas)

        try:
            async with asyncio.TaskGroup() as group:
                for generation in self.generations:
                    group.create_task(run_one(generation))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    def take_deltas(self) -> list[ChoiceDelta]:
        """Return the new output of each choice since the last call."""
        return [delta for generation in self.generations for delta in generation.take_deltas()]

    def usage(self) -> dict[str, object]:
        """Return OpenAI's `usage`. A prompt is charged once for all of its choices.

        The extra field `headstart` counts the cached tokens that were not in the worker's pool, by place.
        """
        prompt_tokens = sum([len(generation.spec.prompt_ids) for generation in self.generations])
        output_tokens = self.num_output_tokens
        reasoning_tokens = sum(map(_num_reasoning_tokens, self.generations))
        fetched = sum([Counter(generation.fetched_tokens) for generation in self.generations], Counter())
        split = {"pool": max(0, self.num_cached_tokens - fetched.total()), **fetched}
        places = {"headstart": split} if fetched else {}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens, "audio_tokens": 0} | places,
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }

    def close(self, account: Account, metrics: GatewayMetrics, elapsed_s: float, *, shows_output: bool) -> None:
        """Write the use of every prompt into the request's account, and count it."""
        account.finished = self.finished
        account.num_prompts = len(self.generations)
        for each in self.generations:
            spec, times = each.spec, each.times
            account.num_choices += len(each.choices)
            account.queue_s += times.queue_s
            account.wire_s += times.wire_s
            if not times.tokens_per_s:  # no prefill has begun
                continue
            num_tokens, num_output_tokens = each.num_prompt_tokens, each.num_output_tokens
            num_cached = min(num_tokens, each.num_cached_tokens or 0)
            account.prompt_tokens += num_tokens
            account.output_tokens += num_output_tokens
            account.prefill_s += times.fixed_s + (num_tokens - num_cached) / times.tokens_per_s
            account.prefill_saved_s += num_cached / times.tokens_per_s
            account.block_s += -(-(num_tokens + num_output_tokens) // spec.model.bundle.block_size) * times.held_s
            if num_cached:
                account.add_cached(num_cached, each.fetched_tokens)
        account.worker = self.worker_ids()
        if not shows_output:
            account.output_tokens = 0
        metrics.count_use(account.model, account.prompt_tokens, account.cached_tokens, account.output_tokens)
        if self.finished:
            sizes = [(each.num_prompt_tokens, each.num_output_tokens) for each in self.generations]
            reasons = [str(choice.finish_reason) for each in self.generations for choice in each.choices]
            metrics.count_answer(self.model, sizes, Counter(reasons), elapsed_s)

    def worker_ids(self) -> str:
        """Return the ids of the workers that served the prompts, without duplicates."""
        return ",".join(dict.fromkeys([g.worker.worker_id for g in self.generations if g.worker is not None]))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers for the workers, the cached tokens, and the schema parts that are not enforced.

        If a keep-alive precedes the prefill, the cached tokens are those that the index promised, in whole blocks.
        """
        worker_ids = self.worker_ids()
        if not worker_ids:
            return []
        cached_tokens = sum(generation.num_reused_tokens for generation in self.generations)
        headers = [
            (b"x-headstart-worker", worker_ids.encode("latin-1", "replace")),
            (b"x-headstart-cached-tokens", b"%d" % cached_tokens),
        ]
        if relaxed := self.first.spec.relaxed:
            headers.append(relaxed_header(relaxed))
        return headers


def _num_reasoning_tokens(generation: Generation) -> int:
    """Return the output tokens up to the one that ends the model's reasoning; all of an answer cut within it.

    An engine that writes the text counts them.
    """
    spec, num_tokens = generation.spec, 0
    if generation.answer is not None:
        return generation.answer.num_reasoning_tokens
    if spec.thoughts is None:
        return 0
    start, end = spec.thoughts
    for ids in [choice.output_ids for choice in generation.choices]:
        pieces = [spec.model.tokenizer.token_bytes[id_] for id_ in ids]
        text = b"".join(pieces)
        if spec.begins_in_thoughts or text.lstrip().startswith(start):
            end_at = text.find(end)
            size = len(text) if end_at < 0 else end_at + len(end)
            num_tokens += bisect.bisect_left(list(itertools.accumulate(map(len, pieces), initial=0)), size)
    return num_tokens
