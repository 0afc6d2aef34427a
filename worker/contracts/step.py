"""The contract between scheduler and runner: input and output of one step, which mixes prefill chunks and decodes.

    tokens of a sequence   |<- computed: start ->|<- token_ids of this step ->|<- later ->|
    KV                      read via block_table   written to slots

A step is launched, then collected; its inputs and outputs stay unchanged in between. The next step may be launched
before that, while its first tokens exist only on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NewType, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from cache.allocators.base import BlockCopy
from cache.types import BlockId
from worker.wire import SamplingParams, TokenLogprobs

T_co = TypeVar("T_co", covariant=True)
Row = NewType("Row", int)
"""An index into `Step.sequences`. Each draft token has its own row, so it is not an index into the plan."""


@dataclass(slots=True, eq=False)
class SamplerCache:
    """A runner's cache for a request, or a choice, across steps. Opaque to the scheduler."""

    value: object | None = None


class SamplingRow(Struct, frozen=True, gc=False):
    """One token to sample from a sequence's last logits, at index `position` of the sequence.

    The result is a function of (logits, params, seed, position, the token ids so far).
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    allowed: object | None = None
    """A bit mask over the vocabulary from the choice's grammar (int32 words), or None."""
    request_cache: SamplerCache = msgspec.field(default_factory=SamplerCache)
    """The same for every row of a request, like params and prompt_ids."""
    choice_cache: SamplerCache = msgspec.field(default_factory=SamplerCache)
    """The same for every row of a choice, whose output_ids only grow."""
    draft_ids: Sequence[int] = ()
    """Guesses of the tokens after `output_ids`: this row samples as if they were right."""

    @property
    def num_output(self) -> int:
        return len(self.output_ids) + len(self.draft_ids)

    def last_output_ids(self, count: int) -> tuple[int, ...]:
        """Return the last `count` (>= 1) tokens of output and draft, or all if there are fewer."""
        num_before = count - len(self.draft_ids)
        if num_before <= 0:
            return tuple(self.draft_ids[-count:])
        return (*self.output_ids[-num_before:], *self.draft_ids)


class SequenceStep(Struct, frozen=True, gc=False):
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[BlockId]
    slots: Sequence[int]
    sampling_rows: tuple[SamplingRow, ...] = ()
    """Empty for a chunk that stops before the last known token; several when choices fork from one prompt."""
    num_prompt_logprobs: int | None = None
    """k: also return the logprob, and the k best, of the token that follows each token of this step."""
    next_token_ids: Sequence[int] = ()
    """With num_prompt_logprobs: the prompt token that follows each token of the step."""
    follows: Row | None = None
    """The row of the step in flight that samples this sequence's one token: token_ids is a stand-in."""
    is_draft: bool = False
    """The one token is a guess of what the row before samples. If that is wrong, this row is void."""
    hidden: Literal["last", "sum"] | None = None
    """Also return the hidden state of its last token, or the sum of those of all tokens of this step."""


@dataclass(frozen=True, slots=True)
class Step:
    """The input of one forward over a batch."""

    sequences: Sequence[SequenceStep]
    copies: Sequence[BlockCopy] = ()
    """Done first, in order."""

    def followed_rows(self, before: Sequence[SequenceStep]) -> list[Row]:
        """Return the rows of the step `before` that sample this step's tokens; empty if it follows none.

        Asserts that each row is the same sequence, one token before.
        """
        rows = [sequence.follows for sequence in self.sequences if sequence.follows is not None]
        assert not rows or len(rows) == len(self.sequences), "only a part of the step follows another"
        for sequence, row in zip(self.sequences, rows, strict=False):
            followed = before[row]
            assert followed.block_table is sequence.block_table, f"row {row} is of another sequence"
            assert followed.start + len(followed.token_ids) == sequence.start, f"row {row} is not one token before"
            assert len(followed.sampling_rows) == 1, f"row {row} samples {len(followed.sampling_rows)} tokens"
        return rows

    def reached_rows(self, sampled: Callable[[Row], int]) -> list[Row]:
        """Return the valid rows: all but those after a draft token that differs from the `sampled` one."""
        reached: list[Row] = []
        is_reached = True
        for index, sequence in enumerate(self.sequences):
            is_right = not sequence.is_draft or sampled(Row(index - 1)) == sequence.token_ids[0]
            is_reached = is_right and (is_reached or not sequence.is_draft)
            if is_reached:
                reached.append(Row(index))
        return reached


class SampledToken(Struct, frozen=True, gc=False):
    """A token that the sampler has chosen."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class SequenceResult(Struct, frozen=True, gc=False):
    """The result for one sequence of the step; `sampled` matches `sampling_rows`."""

    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: np.ndarray | None = None
    """(hidden_size,) float64"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step."""

    sequences: list[SequenceResult]
    """One for each sequence of the step, in order."""
    times: Sequence[float] | None = None
    """Seconds on its device up to the logits, and after them, without those of other steps. None: not measured."""


class NoTokenLeft(RuntimeError):
    """A request's own limits forbid every token."""


class NonFinite(RuntimeError):
    """Keys, values, hidden states or logits of the step are not finite."""


@dataclass(frozen=True, slots=True)
class Launch(Generic[T_co]):
    """Work in a device's queue, or already done."""

    collect: Callable[[], T_co]
    """Wait for the work; return its result, or raise its exception. Call it once."""
    is_done: Callable[[], bool] = lambda: True
    """Return whether `collect` would end at once. Never raises."""


def raised(error: Exception) -> Launch[NoReturn]:
    """Return the launch of work that could not be queued."""

    def collect() -> NoReturn:
        raise error

    return Launch(collect)


class Runner(Protocol):
    """Runs steps on one device, for one thread. A step that raises commits nothing."""

    @property
    def overlaps(self) -> bool:
        """`launch` returns before the step is done; otherwise it lasts as long as the step."""

    def prepare(self, params: SamplingParams, prompt_ids: Sequence[int]) -> object:
        """Return the value of the request's `SamplerCache`, which is slow to make of long lists. Any thread."""

    def launch(self, step: Step) -> Launch[StepResult]:
        """Start the step, after all others are collected, or after all but the one that it follows. May raise."""

    def run(self, step: Step) -> list[SequenceResult]:
        """Launch the step, collect it, and return the results of its sequences."""
