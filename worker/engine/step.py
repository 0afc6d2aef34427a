"""The contract between the scheduler and the runner: what one step computes, and what comes out of it.

A step holds prefill chunks and decodes alike. Every sequence brings tokens to compute; the KV of each goes to its
slot, and its query attends to all earlier tokens of its sequence through the block table.

    tokens of a sequence   |<- computed: start ->|<- token_ids of this step ->|<- later ->|
    KV                      read via block_table   written to slots

A step is launched and then collected. What it reads and writes stays as it is in between. The next one may be launched
before: the tokens that it begins with are then known to the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NoReturn, Protocol, TypeVar

from cache.block_table import BlockCopy
from cache.types import BlockId
from worker.wire import SamplingParams, TokenLogprobs

T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True, eq=False)
class SamplerCache:
    """What a runner keeps of a request, or of a choice, for the draws to come. The scheduler does not look inside."""

    value: object | None = None


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One token to sample from a sequence's last logits. `position` is the index of the drawn token in the sequence.

    The result depends on (logits, params, seed, position, the token ids so far) and on nothing else.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    allowed: object | None = None
    """A bit mask over the vocabulary from the choice's grammar (int32 words), or None."""
    request_cache: SamplerCache = field(default_factory=SamplerCache)
    """The same for every draw of a request: params and prompt_ids are too."""
    choice_cache: SamplerCache = field(default_factory=SamplerCache)
    """The same for every draw of a choice, whose output_ids only grow."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[BlockId]
    slots: Sequence[int]
    sampling_rows: tuple[SamplingRow, ...] = ()
    """Empty for a chunk that stops before the end of what is known; several when choices fork from one prompt."""
    num_prompt_logprobs: int | None = None
    """k: also give the logprob, and the k best, of the token that follows each token of this step."""
    next_token_ids: Sequence[int] = ()
    """With num_prompt_logprobs: the token that follows each token of the step, as far as the prompt goes."""
    follows: int | None = None
    """A place in the step launched before, not yet collected: the one token of this step is the one drawn there, and
    what stands in token_ids is not it."""


@dataclass(frozen=True, slots=True)
class Step:
    sequences: Sequence[SequenceStep]
    copies: Sequence[BlockCopy] = ()
    """To be done first, in order."""

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One per sequence of the step, in its order; `sampled` matches `sampling_rows`."""

    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=())


class SamplingError(RuntimeError):
    """No token can be sampled from these `rows` of the logits."""

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NoTokenLeft(SamplingError):
    """The request's own limits forbid every token."""


class NonFiniteLogits(SamplingError):
    """The model's output is not a number."""


class Launch(Protocol[T_co]):
    """Work that a device has been given."""

    def is_done(self) -> bool:
        """Whether `collect` would return, or raise, at once. Never raises."""

    def collect(self) -> T_co:
        """Wait for the end of the work; its result, or what it raises. To be called once."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T_co]):
    """A launch that is over: `worker.engine.step.Launch`."""

    result: T_co

    def is_done(self) -> bool:
        return True

    def collect(self) -> T_co:
        return self.result


@dataclass(frozen=True, slots=True)
class Raised:
    """A launch that failed: `worker.engine.step.Launch`."""

    error: Exception

    def is_done(self) -> bool:
        return True

    def collect(self) -> NoReturn:
        raise self.error


class Runner(Protocol):
    """Runs steps on one device, one at a time, for one thread. A step that raises has written nothing that counts."""

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns before the step is done. Otherwise it lasts as long as the step."""

    def launch(self, step: Step) -> Launch[list[SequenceResult]]:
        """Start the step. The one before the last has been collected, and the last too unless this one follows it.
        Raises what can be told by now."""

    def run(self, step: Step) -> list[SequenceResult]:
        """Launch it and collect it."""
