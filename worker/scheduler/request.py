"""A request inside the engine: its choices, and the sequences through which they are computed.

Request --+-- Choice 0 --+                      before the first token: one sequence computes the prompt for all
          +-- Choice 1 --+-- Sequence
          +-- Choice 2 --- Sequence             afterwards, and when resumed with output: one sequence a choice
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import NewType, Protocol

from cache.allocators.base import Allocation
from cache.hashing import hash_chain
from cache.types import BlockHash
from worker.engine.step import Kept
from worker.wire import FinishReason, GenerateRequest, TokenLogprobs

RequestKey = NewType("RequestKey", int)
"""Number of a request in this process, in order of arrival. The wire's request_id is the client's and may repeat."""


class ConstraintError(ValueError):
    """A grammar cannot go on. The text is for the client, whose request fails."""


class Constraint(Protocol):
    """What a choice's grammar allows next. Owned by one choice. Its methods raise ConstraintError."""

    def allowed(self) -> object:
        """The bit mask for `Draw.allowed`, valid until the next `advance`."""

    def advance(self, token_id: int) -> None:
        """`token_id` was drawn."""

    @property
    def finished(self) -> bool:
        """Nothing may follow."""


@dataclass(slots=True, eq=False)
class Choice:
    """One of the answers to a prompt."""

    index: int
    seed: int
    output_ids: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    finished: FinishReason | None = None
    kept: Kept = field(default_factory=Kept)


@dataclass(slots=True, eq=False)
class Request:
    """A request from its arrival to its last frame."""

    key: RequestKey
    wire: GenerateRequest
    choices: list[Choice]
    arrival_s: float
    order_s: float
    """Place in every queue: the arrival, moved by the priority (see `worker.scheduler.queue`)."""
    sequences: list[Sequence] = field(default_factory=list)
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
    kept: Kept = field(default_factory=Kept)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.wire.sampling.stop_token_ids)

    @property
    def prompt_ids(self) -> SequenceABC[int]:
        return self.wire.prompt_ids

    @property
    def total_tokens(self) -> int:
        """The most tokens that one of its choices can come to."""
        return len(self.wire.prompt_ids) + self.wire.sampling.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens with one block table. Several choices only while they have no output and share the whole of it."""

    request: Request
    choices: list[Choice]
    token_ids: list[int]
    allocation: Allocation | None = None
    num_computed: int = 0
    awaited: tuple[Sequence, int] | None = None
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

    def fork(self) -> list[Sequence]:
        """One sequence a choice, all sharing the blocks of what is computed. The first is this one."""
        assert self.allocation is not None
        first, *rest = self.choices
        branches = [self]
        for choice in rest:
            branch = Sequence(self.request, [choice], self.token_ids.copy())
            branch.allocation = self.allocation.fork()
            branch.num_computed = self.num_computed
            branch.chain = self.chain.copy()
            branches.append(branch)
        self.choices = [first]
        self.request.sequences += branches[1:]
        return branches

    def split(self, num_choices: int) -> Sequence:
        """Keep the first `num_choices`; the others, in a sequence of their own without blocks, which is returned."""
        assert 0 < num_choices < len(self.choices)
        rest = Sequence(self.request, self.choices[num_choices:], self.token_ids.copy())
        rest.chain = self.chain.copy()
        del self.choices[num_choices:]
        self.request.sequences.append(rest)
        return rest

    def merge(self, rest: Sequence) -> None:
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
            Choice(state.index, state.seed, list(state.output_ids), constraints.get(state.index))
            for state in wire.choices
        ],
        arrival_s=arrival_s,
        order_s=arrival_s + wire.priority * aging_s,
        deadline_s=math.inf if wire.deadline_s is None else arrival_s + wire.deadline_s,
        prompt_logprobs=None if wire.sampling.prompt_logprobs is None else [],
    )


def split_into_sequences(request: Request, max_choices: int) -> list[Sequence]:
    """The sequences that a request begins with: one for the choices without output, in groups of at most
    `max_choices`, and one for each choice that is resumed."""
    unfinished = [choice for choice in request.choices if choice.finished is None]
    fresh = [choice for choice in unfinished if not choice.output_ids]
    groups = [fresh[start : start + max_choices] for start in range(0, len(fresh), max_choices)]
    groups += [[choice] for choice in unfinished if choice.output_ids]
    return [Sequence(request, group, [*request.prompt_ids, *group[0].output_ids]) for group in groups]
