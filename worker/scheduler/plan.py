"""The plan of one step: which tokens of which sequences, as the scheduler decided and the runner computes."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from cache.allocators.base import BlockCopy
from worker.engine.step import SamplingRow, SequenceStep, Step
from worker.scheduler.request import Request, RequestChoice, RequestKey, TokenSequence
from worker.wire import Frame


class EngineOutput(NamedTuple):
    """A frame for the client of a request."""

    key: RequestKey
    frame: Frame


@dataclass(slots=True, eq=False)
class PlannedChunk:
    """Tokens start..stop-1 of a sequence."""

    sequence: TokenSequence
    start: int
    stop: int
    is_prefill: bool
    follows: int | None = None
    """For a chunk planned ahead: the place in the plan before that draws its token, until that is known."""
    drawing: tuple[RequestChoice, ...] = ()
    """The choices that get a token, set with the step: some may end while it runs."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def sequence_step(self) -> SequenceStep:
        """All choices of the sequence draw when the chunk reaches its end, else none."""
        sequence = self.sequence
        assert sequence.allocation is not None
        at_end = self.stop >= len(sequence.token_ids) and sequence.request.wire.sampling.max_tokens > 0
        self.drawing = tuple(sequence.choices) if at_end else ()
        num_prompt_logprobs, next_token_ids = self._prompt_logprobs()
        is_ahead = self.stop > len(sequence.token_ids)
        return SequenceStep(
            token_ids=(0,) if is_ahead else sequence.token_ids[self.start : self.stop],
            start=self.start,
            block_table=sequence.allocation.block_table,
            slots=sequence.allocation.slots(self.start, self.stop),
            sampling_rows=tuple(_draw(sequence, choice, self.stop) for choice in self.drawing),
            num_prompt_logprobs=num_prompt_logprobs,
            next_token_ids=next_token_ids,
            follows=self.follows if is_ahead else None,
        )

    def _prompt_logprobs(self) -> tuple[int | None, Sequence[int]]:
        request = self.sequence.request
        if request.prompt_logprobs is None or self.start >= len(request.prompt_ids) - 1:
            return None, ()
        return request.wire.sampling.prompt_logprobs, request.prompt_ids[self.start + 1 : self.stop + 1]


def _draw(sequence: TokenSequence, choice: RequestChoice, position: int) -> SamplingRow:
    return SamplingRow(
        params=sequence.request.wire.sampling,
        seed=choice.seed,
        position=position,
        prompt_ids=sequence.request.prompt_ids,
        output_ids=choice.output_ids,
        allowed=None if choice.constraint is None else choice.constraint.allowed(),
        request_cache=sequence.request.sampler_cache,
        choice_cache=choice.sampler_cache,
    )


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step. `started` are the requests that left the queue with it, `growth` why the batch grew (None: it did
    not)."""

    chunks: dict[TokenSequence, PlannedChunk] = field(default_factory=dict)
    copies: list[BlockCopy] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    batch_growth_reason: str | None = None
    num_preempted: int = 0
    """Sequences that gave up their blocks because there were no more."""
    num_yielded: int = 0
    """Choices that gave up their slots to another tenant."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks.values())

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks.values() if chunk.is_prefill)

    @property
    def num_decodes(self) -> int:
        return sum(not chunk.is_prefill for chunk in self.chunks.values())

    def grow(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Give the sequence so many tokens more."""
        chunk = self.chunks.get(sequence)
        if chunk is None:
            start = sequence.num_computed
            self.chunks[sequence] = PlannedChunk(sequence, start, start + num_tokens, sequence.is_prefilling)
        else:
            chunk.stop += num_tokens

    def step(self) -> Step:
        return Step([chunk.sequence_step() for chunk in self.chunks.values()], self.copies)

    def by_request(self) -> list[StepPlan]:
        """The work that can still be done, in one plan a request."""
        parts: dict[Request, StepPlan] = {}
        for sequence, chunk in self.chunks.items():
            if sequence.allocation is not None:
                parts.setdefault(sequence.request, StepPlan()).chunks[sequence] = chunk
        return list(parts.values())


def plan_next_decode(running: StepPlan, ended: Set[TokenSequence]) -> StepPlan | None:
    """The sequences of the plan a token further each, less those that have ended and those that surely will.

    None: it may be another step. A token that ends its sequence cannot be foreseen: what follows it is dropped later.
    """
    plan = StepPlan()
    for place, (sequence, chunk) in enumerate(running.chunks.items()):
        if sequence in ended:
            continue
        if not _is_clear(chunk):
            return None
        if len(chunk.drawing[0].output_ids) + 1 < sequence.request.wire.sampling.max_tokens:
            plan.chunks[sequence] = PlannedChunk(sequence, chunk.stop, chunk.stop + 1, False, follows=place)
    return plan if plan.chunks else None


def _is_clear(chunk: PlannedChunk) -> bool:
    """Whether all of the sequence's next step is known but the token that this one draws: it has a single choice,
    whose draws take no account of which tokens were drawn before."""
    request, sampling = chunk.sequence.request, chunk.sequence.request.wire.sampling
    return (
        len(chunk.drawing) == 1
        and not sampling.reads_output
        and len(chunk.drawing[0].output_ids) >= sampling.min_tokens
        and request.prompt_logprobs is None
        and not request.wire.is_suspect
    )
