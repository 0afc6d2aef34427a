"""The plan of one step: which tokens of which sequences, as the scheduler decides and the runner computes."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import Struct

from cache.allocators.base import BlockCopy
from worker.contracts.step import Row, SampledToken, SamplingRow, SequenceStep, Step
from worker.scheduler.request import Request, RequestChoice, TokenSequence


class PlannedChunk(Struct, eq=False):
    """Tokens start..stop-1 of a sequence."""

    sequence: TokenSequence
    start: int
    stop: int
    is_prefill: bool
    follows: Row | None = None
    """For a chunk of an async plan: the row of the previous step that samples its token."""
    sampled_choices: tuple[RequestChoice, ...] = ()
    """The choices that get a token. Fixed when the step is made, as some may end while it runs."""
    draft_ids: Sequence[int] = ()
    """Guesses of the tokens after this chunk, for a decode whose sequence has room for them."""
    num_accepted: int = 0
    """Draft tokens that the step confirmed. Set when its results are processed."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        """Rows of the step: one, and one for each draft token."""
        return 1 + len(self.draft_ids)

    def count_right(self, tokens: Sequence[SampledToken]) -> int:
        """Return how many draft tokens equal the sampled `tokens`, up to the first that differs."""
        pairs = zip(self.draft_ids, tokens, strict=False)
        return next((n for n, (draft_id, token) in enumerate(pairs) if token.token_id != draft_id), len(self.draft_ids))

    def add_steps(self, steps: list[SequenceStep]) -> None:
        """Add the runner's view: the chunk, and a decode for each draft token.

        A chunk that reaches the sequence's end samples a token for every choice. Drafts that the grammar refuses
        are dropped.
        """
        steps.append(self._sequence_step())
        if not self.draft_ids:
            return
        (choice,), drafts = self.sampled_choices, self.draft_ids
        masks: Sequence[object] = [None] * (1 + len(drafts))
        if choice.constraint is not None:
            masks = choice.constraint.allowed_along(drafts)
            self.draft_ids = drafts = drafts[: len(masks) - 1]
        steps += (self._draft_step(choice, index, masks[index]) for index in range(1, self.num_rows))

    def _draft_step(self, choice: RequestChoice, index: int, allowed: object) -> SequenceStep:
        """Return the decode of draft token `index - 1`, which may be wrong."""
        blocks = self.sequence.blocks
        position = self.stop + index
        return SequenceStep(
            token_ids=self.draft_ids[index - 1 : index],
            start=position - 1,
            block_table=blocks.block_table,
            slots=blocks.slots(position - 1, position),
            sampling_rows=(self._sampling_row(choice, allowed, self.draft_ids[:index]),),
            is_draft=True,
        )

    def _sequence_step(self) -> SequenceStep:
        sequence, blocks = self.sequence, self.sequence.blocks
        at_end = self.stop >= len(sequence.token_ids) and sequence.sampling.max_tokens > 0
        self.sampled_choices = tuple(sequence.choices) if at_end else ()
        num_prompt_logprobs, next_token_ids = self._prompt_logprobs()
        is_async = self.stop > len(sequence.token_ids)
        rows = [
            self._sampling_row(choice, None if choice.constraint is None else choice.constraint.allowed())
            for choice in self.sampled_choices
        ]
        return SequenceStep(
            token_ids=(0,) if is_async else sequence.token_ids[self.start : self.stop],
            start=self.start,
            block_table=blocks.block_table,
            slots=blocks.slots(self.start, self.stop),
            sampling_rows=tuple(rows),
            num_prompt_logprobs=num_prompt_logprobs,
            next_token_ids=next_token_ids,
            follows=self.follows if is_async else None,
            hidden=sequence.hidden_at(self.stop),
        )

    def _prompt_logprobs(self) -> tuple[int | None, Sequence[int]]:
        request = self.sequence.request
        if request.prompt_logprobs is None or self.start >= len(request.prompt_ids) - 1:
            return None, ()
        return request.sampling.prompt_logprobs, request.prompt_ids[self.start + 1 : self.stop + 1]

    def _sampling_row(self, choice: RequestChoice, allowed: object, draft_ids: Sequence[int] = ()) -> SamplingRow:
        request = self.sequence.request
        return SamplingRow(
            params=request.sampling,
            seed=choice.seed,
            position=self.stop + len(draft_ids),
            prompt_ids=request.prompt_ids,
            output_ids=choice.output_ids,
            allowed=allowed,
            request_cache=request.sampler_cache,
            choice_cache=choice.sampler_cache,
            draft_ids=draft_ids,
        )

    def determines_next_step(self) -> bool:
        """Return whether the sequence's next step depends only on the one token that this step samples.

        So it has a single choice, whose sampling does not depend on earlier tokens.
        """
        request, sampling = self.sequence.request, self.sequence.sampling
        return (
            len(self.sampled_choices) == 1
            and not self.draft_ids
            and not sampling.reads_output
            and len(self.sampled_choices[0].output_ids) >= sampling.min_tokens
            and request.prompt_logprobs is None
            and not request.wire.is_suspect
        )


@dataclass(eq=False)
class StepPlan:
    """One step: a chunk for each of its sequences. Its counts are read when the plan is complete."""

    chunks: dict[TokenSequence, PlannedChunk] = field(default_factory=dict)
    copies: list[BlockCopy] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    """Requests that left the queue with this step."""
    batch_growth_reason: str | None = None
    """None: no sequence was admitted."""
    num_preempted: int = 0
    """Sequences preempted because blocks ran out."""
    num_yielded: int = 0
    """Running choices that yielded to another tenant."""

    @cached_property
    def num_tokens(self) -> int:
        return sum([chunk.stop - chunk.start for chunk in self.chunks.values()])

    @cached_property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.stop - chunk.start for chunk in self.chunks.values() if chunk.is_prefill])

    @cached_property
    def num_decodes(self) -> int:
        return len(self.chunks) - sum([chunk.is_prefill for chunk in self.chunks.values()])

    @property
    def num_decode_rows(self) -> int:
        """Decodes and their draft tokens."""
        return sum(chunk.num_rows for chunk in self.chunks.values() if not chunk.is_prefill)

    def add_tokens(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Plan `num_tokens` more tokens of the sequence."""
        chunk = self.chunks.get(sequence)
        if chunk is None:
            start = sequence.num_computed
            self.chunks[sequence] = PlannedChunk(sequence, start, start + num_tokens, sequence.is_prefilling)
        else:
            chunk.stop += num_tokens

    def step(self) -> Step:
        steps: list[SequenceStep] = []
        for chunk in self.chunks.values():
            chunk.add_steps(steps)
        return Step(steps, self.copies)

    def by_request(self) -> list[StepPlan]:
        """Return one plan per request, of the sequences that still hold blocks, without drafts."""
        parts: dict[Request, StepPlan] = {}
        for sequence, chunk in self.chunks.items():
            if sequence.allocation is not None:
                chunk.draft_ids = ()
                parts.setdefault(sequence.request, StepPlan()).chunks[sequence] = chunk
        return list(parts.values())


def plan_next_decode(running: StepPlan, finished: Set[TokenSequence]) -> StepPlan | None:
    """Plan one more token for each sequence of `running`, before its tokens are known. None: that may be wrong.

    Leaves out sequences that are `finished`, or that reach max_tokens. One that stops earlier wastes one step.
    """
    plan = StepPlan()
    row, next_row = 0, 0
    for sequence, chunk in running.chunks.items():
        row, next_row = next_row, next_row + chunk.num_rows
        if sequence in finished:
            continue
        if not chunk.determines_next_step():
            return None
        if len(chunk.sampled_choices[0].output_ids) + 1 < sequence.sampling.max_tokens:
            plan.chunks[sequence] = PlannedChunk(sequence, chunk.stop, chunk.stop + 1, False, follows=Row(row))
    return plan if plan.chunks else None
