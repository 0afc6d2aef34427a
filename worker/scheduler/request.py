"""A request inside the engine: its choices, and the sequences that compute them.

Request --+-- RequestChoice 0 --+                       until the first token: one sequence computes the prompt for all
          +-- RequestChoice 1 --+-- TokenSequence
          +-- RequestChoice 2 ----- TokenSequence       after it, and when resumed with output: one sequence per choice
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from operator import attrgetter
from typing import Literal, Protocol

import numpy as np

from cache.allocators.base import Allocation, Allocator
from cache.hashing import extend_chain
from cache.types import BlockHash
from worker.contracts.engine import RequestKey
from worker.contracts.step import NoTokenLeft, SampledToken, SamplerCache
from worker.files.embedding import Pooling
from worker.scheduler.drafter import Drafter
from worker.wire import (
    MAX_POSITIONS,
    Embedding,
    End,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    Started,
    TokenLogprobs,
)


class ConstraintError(ValueError):
    """A grammar cannot be used, or the output does not follow it. The client gets the text."""


class Constraint(Protocol):
    """The grammar state of one choice. Its methods raise ConstraintError."""

    def allowed(self) -> object:
        """Return the bit mask for `SamplingRow.allowed`, valid until the next `advance`."""

    def allowed_along(self, draft_ids: Sequence[int]) -> Sequence[object]:
        """Return `allowed` now and after each draft token, up to the first that the grammar refuses or ends with."""

    def advance(self, token_id: int) -> None:
        """Accept a sampled token."""

    @property
    def finished(self) -> bool:
        """Return whether the output is complete."""


@dataclass(slots=True, eq=False)
class RequestChoice:
    """One of the n completions of a prompt."""

    index: int
    seed: int
    output_ids: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    finished: FinishReason | None = None
    sampler_cache: SamplerCache = field(default_factory=SamplerCache)

    def append(self, token: SampledToken) -> None:
        """Add a token to the output and to the grammar, which may raise."""
        if self.constraint is not None:
            self.constraint.advance(token.token_id)
        self.output_ids.append(token.token_id)

    def finish(self, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        self.finished = reason
        return Finished(self.index, reason, stop_token_id)


@dataclass(slots=True, eq=False)
class Request:
    """A request from its arrival to its last frame."""

    key: RequestKey
    wire: GenerateRequest
    arrival_s: float
    aging_s: InitVar[float]
    constraints: InitVar[Mapping[int, Constraint]]
    """By choice index. Each has accepted the output of its choice, if that is resumed."""
    pooling: Pooling | None = None
    """How the prompt is embedded. None: text is generated."""
    choices: list[RequestChoice] = field(init=False)
    order_s: float = field(init=False)
    """Position in every queue: the arrival, shifted by the priority (see `OrderedSequences`)."""
    sequences: list[TokenSequence] = field(default_factory=list)
    """The unfinished ones, waiting or running."""
    num_cached_tokens: int = 0
    fetched_tokens: dict[str, int] | None = None
    """Cached tokens that were fetched for this request, by place."""
    num_uncached_tokens: int = 0
    """Prompt tokens to compute, estimated at arrival."""
    started_s: float | None = None
    first_token_s: float | None = None
    deadline_s: float = field(init=False)
    """The request fails if it has not started at this time."""
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False)
    """Entry i belongs to prompt token i + 1. None when not asked for, or already sent."""
    sampler_cache: SamplerCache = field(default_factory=SamplerCache)
    sampling: SamplingParams = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self, aging_s: float, constraints: Mapping[int, Constraint]) -> None:
        wire = self.wire
        self.sampling = wire.sampling
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        self.choices = [
            RequestChoice(choice.index, choice.seed, list(choice.output_ids), constraints.get(choice.index))
            for choice in wire.choices
        ]
        self.order_s = self.arrival_s + wire.priority * aging_s
        self.deadline_s = math.inf if wire.deadline_s is None else self.arrival_s + wire.deadline_s
        self.prompt_logprobs = None if self.sampling.prompt_logprobs is None else []

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.wire.prompt_ids

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of one choice, at most."""
        return len(self.wire.prompt_ids) + self.sampling.max_tokens

    def finish_reason(
        self, choice: RequestChoice, eos_token_ids: frozenset[int]
    ) -> tuple[FinishReason, int | None] | None:
        """Return why the choice ends after its last token, and the token that stopped it. None: it continues.

        `max_tokens` and `min_tokens` count all of the choice's output, a resumed part included.
        """
        num_output = len(choice.output_ids)
        if num_output and self.stops_at(choice.output_ids[-1], num_output, eos_token_ids):
            return "stop", choice.output_ids[-1]
        if num_output and choice.constraint is not None and choice.constraint.finished:
            return "stop", None
        return ("length", None) if num_output >= self.sampling.max_tokens else None

    def stops_at(self, token_id: int, num_output: int, eos_token_ids: frozenset[int]) -> bool:
        """Return whether a choice ends with this token, the last of `num_output`."""
        if num_output <= self.sampling.min_tokens:
            return False
        return token_id in self.stop_token_ids or (not self.sampling.ignore_eos and token_id in eos_token_ids)

    def start(self) -> Started:
        """Return the first frame, of a request whose prefill begins."""
        assert self.started_s is not None
        return Started(self.num_cached_tokens, self.fetched_tokens, self.started_s - self.arrival_s)

    def end(self, now_s: float) -> End:
        """Return the last frame: the seconds of waiting, of the prefill and of the decodes. 0: there was none."""
        started_s = now_s if self.started_s is None else self.started_s
        if self.first_token_s is None:
            return End(started_s - self.arrival_s, 0.0, 0.0)
        return End(started_s - self.arrival_s, self.first_token_s - started_s, now_s - self.first_token_s)

    def add_prompt_logprobs(self, found: Sequence[TokenLogprobs]) -> list[PromptLogprobs]:
        """Add those of a step, where asked for. Return the frames with all of them, once, when they are complete."""
        logprobs = self.prompt_logprobs
        assert logprobs is not None
        logprobs += found
        if len(logprobs) < len(self.prompt_ids) - 1:
            return []
        self.prompt_logprobs = None
        positions: tuple[TokenLogprobs | None, ...] = (None, *logprobs)
        starts = range(0, len(positions), MAX_POSITIONS)
        return [PromptLogprobs(positions[start : start + MAX_POSITIONS]) for start in starts]


class FetchProgress(Protocol):
    """Blocks of a prefix that are fetched into the pool."""

    @property
    def ended(self) -> bool:
        """Return whether nothing more will come."""

    def num_fetched_blocks(self, num_cached: int) -> dict[str, int]:
        """Return the blocks that came for the sequence and are among its first `num_cached`, by place."""


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Tokens with one block table. It has several choices only while none of them has output."""

    request: Request
    choices: list[RequestChoice]
    token_ids: list[int]
    allocation: Allocation | None = None
    """Its blocks; None while it waits."""
    num_computed: int = 0
    waiting_for_prefix_of: tuple[TokenSequence, int] | None = None
    """The sequence that computes a prefix of this one, and its `num_computed` at the last look."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    fetch: FetchProgress | None = None
    """The last fetch that it has waited for; None in the batch."""
    hidden: np.ndarray | None = None
    """For an embedding: the sum of the hidden states of the computed tokens, or the last one."""
    has_fetched: bool = False
    """Its own fetch has begun, or is not needed, since it last left the batch."""
    drafter: Drafter | None = None
    """Guesses its next tokens, with --speculate. Made at its first decode."""
    order: tuple[float, int, int] = field(init=False)
    """Sort key, total and constant: the first sequence in order is never preempted for another."""
    sampling: SamplingParams = field(init=False)
    tenant: str = field(init=False)

    def __post_init__(self) -> None:
        self.order = (self.request.order_s, self.request.key, self.choices[0].index)
        self.sampling = self.request.sampling
        self.tenant = self.request.wire.tenant

    @property
    def root(self) -> BlockHash:
        return BlockHash(self.request.wire.root)

    @property
    def blocks(self) -> Allocation:
        """The blocks of a running sequence."""
        assert self.allocation is not None, "a waiting sequence holds no blocks"
        return self.allocation

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not written."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        return len(self.token_ids) - self.num_computed > 1 or not self.choices[0].output_ids

    @property
    def is_fetching(self) -> bool:
        """Return whether it waits for blocks that are being fetched."""
        return self.fetch is not None and not self.fetch.ended

    @property
    def reuse(self) -> bool:
        """Return whether a cached prefix may be used: not if every token's logprobs or hidden state is needed."""
        pooling = self.request.pooling
        return self.request.prompt_logprobs is None and (pooling is None or pooling.kind == "last")

    def hash_blocks(self, block_size: int) -> list[BlockHash]:
        """Return the hashes of the full blocks of `token_ids`. Each block is hashed once."""
        extend_chain(self.block_hashes, self.root, self.token_ids, len(self.token_ids) // block_size, block_size)
        return self.block_hashes

    def reusable_hashes(self, block_size: int) -> list[BlockHash]:
        """Return the hashes of the blocks that a cached prefix may have: the last token is always computed."""
        return self.hash_blocks(block_size)[: (len(self.token_ids) - 1) // block_size] if self.reuse else []

    def count_cached(self, allocator: Allocator) -> int:
        """Return the tokens of its prefix that are in the pool, and that it may use."""
        if not self.reuse:
            return 0
        return allocator.find(self.token_ids, self.root, hashes=self.hash_blocks(allocator.block_size))

    def fork(self) -> list[TokenSequence]:
        """Return one sequence per choice, which share all computed blocks. The first is this one."""
        first, *rest = self.choices
        branches = [self]
        for choice in rest:
            branch = TokenSequence(self.request, [choice], self.token_ids.copy())
            branch.allocation = self.blocks.fork()
            branch.num_computed = self.num_computed
            branch.block_hashes = self.block_hashes.copy()
            branches.append(branch)
        self.choices = [first]
        self.request.sequences += branches[1:]
        return branches

    def split(self, num_choices: int) -> TokenSequence:
        """Keep the first `num_choices`. Return a sequence with the others, which holds no blocks."""
        assert 0 < num_choices < len(self.choices)
        rest = TokenSequence(self.request, self.choices[num_choices:], self.token_ids.copy())
        rest.block_hashes = self.block_hashes.copy()
        del self.choices[num_choices:]
        self.request.sequences.append(rest)
        return rest

    def hidden_at(self, stop: int) -> Literal["last", "sum"] | None:
        """Return the hidden states that a step up to the token `stop` has to return."""
        if (pooling := self.request.pooling) is None or (pooling.kind == "last" and stop < len(self.token_ids)):
            return None
        return "sum" if pooling.kind == "mean" else "last"

    def add_hidden(self, hidden: np.ndarray) -> None:
        """Add the hidden state (hidden_size,) that a step returned for its tokens."""
        self.hidden = hidden if self.hidden is None else np.add(self.hidden, hidden, dtype=np.float64)

    def embedding(self) -> Embedding | None:
        """Return the frame, when every token is computed. None: text is generated."""
        pooling, embed = self.request.pooling, self.request.wire.embed
        if pooling is None:
            return None
        assert embed is not None
        assert self.hidden is not None
        return Embedding(pooling.embedding(self.hidden, len(self.token_ids), embed.dimensions))

    def start_request(self, now_s: float, block_size: int) -> None:
        """Mark the request as started with this sequence, and how much of its prompt was cached."""
        self.request.started_s = now_s
        self.request.num_cached_tokens = min(self.num_computed, len(self.request.prompt_ids))
        self.request.fetched_tokens = self.fetched_tokens(self.num_computed // block_size, block_size)

    def fetched_tokens(self, num_cached_blocks: int, block_size: int) -> dict[str, int] | None:
        """Return the cached tokens that its own fetch brought, by place. None: there are none."""
        blocks = {} if self.fetch is None else self.fetch.num_fetched_blocks(num_cached_blocks)
        return {place: count * block_size for place, count in blocks.items()} or None

    def release(self) -> None:
        """Free the blocks. Tokens that do not stay cached are computed again."""
        if self.allocation is not None:
            self.allocation.free()
            if self.request.prompt_logprobs is not None:  # one sequence collects them, beginning with the first token
                self.request.prompt_logprobs.clear()
        self.allocation = None
        self.num_computed = 0
        self.hidden = None
        self.has_fetched = False


class OrderedSequences:
    """Sequences in order of arrival and priority: the waiting queue, and the running batch.

    A request's position is its arrival time plus `priority * aging_s`: priority 1 counts as an arrival `aging_s` later.
    The position is constant: nothing starves, and a preempted sequence returns to its old position.
    """

    def __init__(self) -> None:
        self._sequences: list[TokenSequence] = []
        self.tenants: Counter[str] = Counter()
        """Sequences of each tenant that has any."""

    def add(self, sequence: TokenSequence) -> None:
        self.tenants[sequence.tenant] += 1
        insort(self._sequences, sequence, key=_by_order)

    def remove(self, sequence: TokenSequence) -> None:
        position = bisect_left(self._sequences, sequence.order, key=_by_order)
        assert self._sequences[position] is sequence, f"no sequence at {sequence.order}"
        del self._sequences[position]
        self.tenants[sequence.tenant] -= 1
        if not self.tenants[sequence.tenant]:
            del self.tenants[sequence.tenant]

    @property
    def last(self) -> TokenSequence:
        return self._sequences[-1]

    def __iter__(self) -> Iterator[TokenSequence]:
        """Iterate over a copy: the loop may add and remove."""
        return iter(self._sequences.copy())

    def __len__(self) -> int:
        return len(self._sequences)


_by_order = attrgetter("order")


def split_into_sequences(request: Request, max_choices: int) -> list[TokenSequence]:
    """Return the first sequences of a request: one per `max_choices` fresh choices, and one per resumed choice."""
    unfinished = [choice for choice in request.choices if choice.finished is None]
    fresh = [choice for choice in unfinished if not choice.output_ids]
    groups = [fresh[start : start + max_choices] for start in range(0, len(fresh), max_choices)]
    groups += [[choice] for choice in unfinished if choice.output_ids]
    return [TokenSequence(request, group, [*request.prompt_ids, *group[0].output_ids]) for group in groups]


def failed_by(error: Exception) -> Failed:
    """Return the frame that reports to the client that its own request raised `error`."""
    if isinstance(error, ConstraintError):
        return Failed("invalid_grammar", str(error), retryable=False)
    if isinstance(error, NoTokenLeft):
        return Failed("invalid_request", str(error), retryable=False)
    return Failed("internal_error", "the request cannot be computed", retryable=False)
