"""A request inside the engine: its choices, and the sequences that compute them.

Request --+-- RequestChoice 0 --+                       until the first token: one sequence computes the prompt for all
          +-- RequestChoice 1 --+-- TokenSequence
          +-- RequestChoice 2 ----- TokenSequence       after it, and when resumed with output: one sequence per choice
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NewType, Protocol

from cache.allocators.base import Allocation
from cache.hashing import hash_chain
from cache.types import BlockHash
from worker.engine.step import NoTokenLeft, SampledToken, SamplerCache
from worker.wire import Failed, Finished, FinishReason, GenerateRequest, PromptLogprobs, TokenLogprobs, Tokens

RequestKey = NewType("RequestKey", int)
"""Number of a request in this process, in order of arrival. The wire's request_id is the client's and may repeat."""


class ConstraintError(ValueError):
    """A grammar cannot go on. The text is for the client, whose request fails."""


def failed_by(error: Exception) -> Failed:
    """What the client hears of an error that its own request has caused."""
    if isinstance(error, ConstraintError):
        return Failed("invalid_grammar", str(error), retryable=False)
    if isinstance(error, NoTokenLeft):
        return Failed("invalid_request", str(error), retryable=False)
    return Failed("internal_error", "the request cannot be computed", retryable=False)


class Constraint(Protocol):
    """What a choice's grammar allows next. Owned by one choice. Its methods raise ConstraintError."""

    def allowed(self) -> object:
        """The bit mask for `SamplingRow.allowed`, valid until the next `advance`."""

    def advance(self, token_id: int) -> None:
        """`token_id` was drawn."""

    @property
    def finished(self) -> bool:
        """Nothing may follow."""


@dataclass(slots=True, eq=False)
class RequestChoice:
    """One of the answers to a prompt."""

    index: int
    seed: int
    output_ids: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    finished: FinishReason | None = None
    sampler_cache: SamplerCache = field(default_factory=SamplerCache)


@dataclass(slots=True, eq=False)
class Request:
    """A request from its arrival to its last frame."""

    key: RequestKey
    wire: GenerateRequest
    choices: list[RequestChoice]
    arrival_s: float
    order_s: float
    """Place in every queue: the arrival, moved by the priority (see `OrderedSequences`)."""
    sequences: list[TokenSequence] = field(default_factory=list)
    """Those that still compute something, waiting or running."""
    num_cached_tokens: int = 0
    num_uncached_tokens: int = 0
    """Prompt tokens that its prefill was estimated to compute when it arrived."""
    started_s: float | None = None
    first_token_s: float | None = None
    deadline_s: float = math.inf
    """When nobody wants the answer any more; after its start, ending it is the gateway's business."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Entry i belongs to prompt token i + 1. None when not asked for, or already sent."""
    sampler_cache: SamplerCache = field(default_factory=SamplerCache)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.wire.sampling.stop_token_ids)

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.wire.prompt_ids

    @property
    def total_tokens(self) -> int:
        """The most tokens that one of its choices can come to."""
        return len(self.wire.prompt_ids) + self.wire.sampling.max_tokens


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Tokens with one block table. Several choices only while they have no output and share the whole of it."""

    request: Request
    choices: list[RequestChoice]
    token_ids: list[int]
    allocation: Allocation | None = None
    num_computed: int = 0
    waiting_for_prefix_of: tuple[TokenSequence, int] | None = None
    """The sequence that computes a prefix of this one, and how far it was at the last look."""
    chain: list[BlockHash] = field(default_factory=list)
    order: tuple[float, int, int] = field(init=False)
    """Who comes first. Total and constant, so the first in order is never preempted by another."""

    def __post_init__(self) -> None:
        self.order = (self.request.order_s, self.request.key, self.choices[0].index)

    def hashes(self, block_size: int) -> list[BlockHash]:
        """The chain of the full blocks of `token_ids`; each block is hashed once, however long the sequence waits."""
        chain = self.chain
        parent = chain[-1] if chain else BlockHash(self.request.wire.root)
        chain += hash_chain(parent, self.token_ids[len(chain) * block_size :], block_size)
        return chain

    def fork(self) -> list[TokenSequence]:
        """One sequence a choice, all sharing the blocks of what is computed. The first is this one."""
        assert self.allocation is not None
        first, *rest = self.choices
        branches = [self]
        for choice in rest:
            branch = TokenSequence(self.request, [choice], self.token_ids.copy())
            branch.allocation = self.allocation.fork()
            branch.num_computed = self.num_computed
            branch.chain = self.chain.copy()
            branches.append(branch)
        self.choices = [first]
        self.request.sequences += branches[1:]
        return branches

    def split(self, num_choices: int) -> TokenSequence:
        """Keep the first `num_choices`; the others, in a sequence of their own without blocks, which is returned."""
        assert 0 < num_choices < len(self.choices)
        rest = TokenSequence(self.request, self.choices[num_choices:], self.token_ids.copy())
        rest.chain = self.chain.copy()
        del self.choices[num_choices:]
        self.request.sequences.append(rest)
        return rest

    def merge(self, rest: TokenSequence) -> None:
        """Undo `split`."""
        self.choices += rest.choices
        self.request.sequences.remove(rest)

    def release(self) -> None:
        """Give the blocks back: all is to be computed again, or nothing any more."""
        if self.allocation is not None:
            self.allocation.free()
            if self.request.prompt_logprobs is not None:  # collected by one sequence, so again from the start
                self.request.prompt_logprobs.clear()
        self.allocation = None
        self.num_computed = 0

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not written."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        return self.num_pending > 1 or not self.choices[0].output_ids

    @property
    def reuse(self) -> bool:
        """Whether a cached prefix serves: not while the logprobs of the prompt are still owed."""
        return self.request.prompt_logprobs is None


def new_request(
    wire: GenerateRequest, key: RequestKey, *, arrival_s: float, aging_s: float, constraints: Mapping[int, Constraint]
) -> Request:
    """`constraints` by choice index, already advanced over the output of a resumed choice."""
    return Request(
        key=key,
        wire=wire,
        choices=[
            RequestChoice(state.index, state.seed, list(state.output_ids), constraints.get(state.index))
            for state in wire.choices
        ],
        arrival_s=arrival_s,
        order_s=arrival_s + wire.priority * aging_s,
        deadline_s=math.inf if wire.deadline_s is None else arrival_s + wire.deadline_s,
        prompt_logprobs=None if wire.sampling.prompt_logprobs is None else [],
    )


def split_into_sequences(request: Request, max_choices: int) -> list[TokenSequence]:
    """The sequences that a request begins with: one for the choices without output, in groups of at most
    `max_choices`, and one for each choice that is resumed."""
    unfinished = [choice for choice in request.choices if choice.finished is None]
    fresh = [choice for choice in unfinished if not choice.output_ids]
    groups = [fresh[start : start + max_choices] for start in range(0, len(fresh), max_choices)]
    groups += [[choice] for choice in unfinished if choice.output_ids]
    return [TokenSequence(request, group, [*request.prompt_ids, *group[0].output_ids]) for group in groups]


_by_order = attrgetter("order")


class OrderedSequences:
    """Sequences kept in their order; used for the waiting and for the running ones."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[TokenSequence] = []

    def add(self, sequence: TokenSequence) -> None:
        insort(self._sequences, sequence, key=_by_order)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove `sequence`, which must be here and must not have changed its order."""
        position = bisect_left(self._sequences, sequence.order, key=_by_order)
        assert self._sequences[position] is sequence, f"no sequence at {sequence.order}"
        del self._sequences[position]

    @property
    def last(self) -> TokenSequence:
        return self._sequences[-1]

    def __iter__(self) -> Iterator[TokenSequence]:
        """Over a copy: the loop may add and remove."""
        return iter(self._sequences.copy())

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: TokenSequence) -> bool:
        position = bisect_left(self._sequences, sequence.order, key=_by_order)
        return position < len(self._sequences) and self._sequences[position] is sequence


def end_of(
    choice: RequestChoice, request: Request, eos_token_ids: frozenset[int]
) -> tuple[FinishReason, int | None] | None:
    """Why the choice ends after its last token, and the token that stopped it; None: it goes on.

    `max_tokens` and `min_tokens` count all of the choice's output, a resumed part included.
    """
    sampling = request.wire.sampling
    num_output = len(choice.output_ids)
    if num_output and num_output > sampling.min_tokens:
        token_id = choice.output_ids[-1]
        if token_id in request.stop_token_ids or (not sampling.ignore_eos and token_id in eos_token_ids):
            return "stop", token_id
    if num_output and choice.constraint is not None and choice.constraint.finished:
        return "stop", None
    return ("length", None) if num_output >= sampling.max_tokens else None


def append(choice: RequestChoice, drawn: SampledToken) -> Tokens:
    """Add the token to the choice (and to its grammar, which may raise) and say so."""
    if choice.constraint is not None:
        choice.constraint.advance(drawn.token_id)
    choice.output_ids.append(drawn.token_id)
    logprobs = None if drawn.logprobs is None else (drawn.logprobs,)
    return Tokens(choice.index, (drawn.token_id,), logprobs)


def finish(choice: RequestChoice, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
    choice.finished = reason
    return Finished(choice.index, reason, stop_token_id)


def take_prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """The frame with the prompt's logprobs, once, as soon as all are known."""
    known = request.prompt_logprobs
    if known is None or len(known) < len(request.prompt_ids) - 1:
        return None
    request.prompt_logprobs = None
    return PromptLogprobs((None, *known))
