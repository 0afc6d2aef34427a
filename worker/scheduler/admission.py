"""The door between waiting and running, and the one before it: what can never be served is refused at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from itertools import islice
from typing import Final, NamedTuple, Protocol

from cache.allocators.base import Allocator
from cache.types import HASH_BYTES, BlockHash, BlockId
from worker.scheduler.bounds import are_outside, out_of_bounds
from worker.scheduler.budget import AdmissionGate, BatchLimits, PrefillBudget
from worker.scheduler.queue import OrderedSequences
from worker.scheduler.request import Request, Sequence
from worker.wire import Failed, GenerateRequest

MAX_COMPARED: Final = 128
"""Requests before a new one that are looked at for a common prefix, the latest first."""


class Admitted(NamedTuple):
    """A sequence that joins the batch, the tokens of its first chunk, and what it has left behind for want of slots."""

    sequence: Sequence
    num_tokens: int
    rest: Sequence | None


class Slots(Protocol):
    """What an admission asks of who owns the queues."""

    def is_contested(self, sequence: Sequence) -> bool:
        """Whether a sequence of another tenant waits."""

    def note(self, sequence: Sequence, *, is_whole: bool) -> None:
        """The sequence waits no more; a part of it does, unless it `is_whole`."""

    def give_up(self, sequence: Sequence, num_choices: int) -> None:
        """Let the last choices of a running sequence wait; if that is all of them, it is preempted."""


class Admission:
    """Decides which of the waiting join the batch. Holds only TGI's counter."""

    def __init__(self, allocator: Allocator, limits: BatchLimits) -> None:
        self.gate = AdmissionGate(limits)
        self._allocator = allocator
        self._limits = limits

    def admit(
        self,
        waiting: Iterable[Sequence],
        num_waiting: int,
        running: OrderedSequences,
        budget: PrefillBudget,
        slots: Slots,
    ) -> list[Admitted]:
        """Allocate for the sequences that join, in the order given, and grant each the tokens of its first chunk.

        The first that does not fit ends it, so that a large request is not overtaken for ever. A sequence whose prefix
        is being computed right now waits for that, and lets others pass: it will find the prefix cached. Of a sequence
        of several choices, as many join as there are slots for. While another tenant waits, no request gets more than
        half of the slots, and one that holds more gives up what lets the other in.
        """
        min_newcomers = self.gate.min_newcomers(len(running))
        if min_newcomers is not None and num_waiting < min_newcomers:
            return []
        admitted: list[Admitted] = []
        load = _Load.of(running, self._allocator)
        prefilling = [sequence for sequence in running if sequence.is_prefilling]
        for sequence in waiting:
            most = len(sequence.choices)
            if slots.is_contested(sequence):
                most = min(most, self._limits.max_contested_slots - load.num_held.get(sequence.request, 0))
                if most <= 0:
                    continue
            if self._has_to_wait(sequence, prefilling):
                continue
            if self._yield_slots(sequence, most, running, load, slots):
                load = _Load.of(running, self._allocator)
                for newcomer in admitted:
                    load.add(newcomer.sequence)
            most = min(most, load.room(sequence, self._limits))
            if budget.left == 0 or most <= 0:
                break
            granted = self._allocate(sequence, budget, load)
            if granted == 0:
                break
            rest = sequence.split(most) if most < len(sequence.choices) else None
            load.add(sequence)
            prefilling.append(sequence)
            admitted.append(Admitted(sequence, granted, rest))
            slots.note(sequence, is_whole=rest is None)
        if min_newcomers is not None and len(admitted) < min_newcomers:
            self._undo(admitted, budget)
            return []
        return admitted

    def _yield_slots(
        self, newcomer: Sequence, num_choices: int, running: OrderedSequences, load: _Load, slots: Slots
    ) -> bool:
        """If `num_choices` of the newcomer do not fit, and would if a request of another tenant did not hold more than
        half of the slots: let that one give up as many as it takes, from its end. False: nobody did."""
        most = self._limits.max_contested_slots
        holder = next((request for request, num_held in load.num_held.items() if num_held > most), None)
        if holder is None or holder.wire.tenant == newcomer.request.wire.tenant:
            return False
        num_spare = load.num_held[holder] - most
        num_slots = num_choices - (self._limits.max_num_seqs - load.num_choices)
        num_tokens = load.num_tokens_short(newcomer, self._limits)
        num_blocks = self._num_blocks_short(newcomer, load)
        if num_slots <= 0 and num_tokens <= 0 and num_blocks <= 0:
            return False
        held = Counter(block for sequence in running for block in _table(sequence)) if num_blocks > 0 else Counter()
        victims: list[tuple[Sequence, int]] = []
        for sequence in reversed(list(running)):
            if sequence.request is not holder:
                continue
            num_given = min(len(sequence.choices), num_spare)
            if num_blocks <= 0 and num_tokens <= 0:
                num_given = min(num_given, num_slots)
            victims.append((sequence, num_given))
            num_spare -= num_given
            num_slots -= num_given
            num_tokens -= num_given * holder.total_tokens
            if num_given == len(sequence.choices) and num_blocks > 0:
                held.subtract(_table(sequence))
                num_blocks -= sum(held[block] == 0 for block in _table(sequence))
            if num_spare == 0 or (num_slots <= 0 and num_tokens <= 0 and num_blocks <= 0):
                break
        if num_tokens > 0 or num_blocks > 0 or num_slots >= num_choices:
            return False  # it would not get in for all that
        for sequence, num_given in victims:
            slots.give_up(sequence, num_given)
        return True

    def count_uncached(self, request: Request, latest: Iterable[Request]) -> int:
        """Tokens that its prefill will compute: neither cached now nor computed by the `latest` before it."""
        if not request.sequences:
            return 0
        sequence, size = request.sequences[0], self._allocator.block_size
        if not sequence.reuse:
            return len(sequence.token_ids)
        hashes = sequence.hashes(size)
        cached = self._allocator.find(sequence.token_ids, BlockHash(request.wire.root), hashes=hashes)
        if self._limits.await_prefixes:
            near = islice(latest, MAX_COMPARED)
            ahead = (other.sequences[0].chain for other in near if other.first_token_s is None and other.sequences)
            shared = max((num_shared_blocks(hashes, chain) for chain in ahead), default=0)
            cached = max(cached, min(shared, (len(sequence.token_ids) - 1) // size) * size)
        return len(sequence.token_ids) - cached

    def _has_to_wait(self, sequence: Sequence, prefilling: list[Sequence]) -> bool:
        if sequence.request.wire.is_suspect and any(other.request.wire.is_suspect for other in prefilling):
            return True  # one at a time, so that a death has one culprit
        if not sequence.reuse:  # the logprobs of a prompt are collected by one sequence at a time
            return any(other.request is sequence.request for other in prefilling)
        return self._limits.await_prefixes and self._is_computed_now(sequence, prefilling)

    def _is_computed_now(self, sequence: Sequence, prefilling: list[Sequence]) -> bool:
        """Whether one of `prefilling` computes more of its prefix than is cached, and got on since the last look."""
        if not prefilling:
            return False
        size = self._allocator.block_size
        chain = sequence.hashes(size)[: (len(sequence.token_ids) - 1) // size]
        other, num_shared = max(
            ((other, num_shared_blocks(chain, other.chain)) for other in prefilling), key=lambda pair: pair[1]
        )
        if num_shared * size <= other.num_computed:
            return False
        stalled = sequence.awaited == (other, other.num_computed)
        sequence.awaited = (other, other.num_computed)
        if stalled:
            return False
        root = BlockHash(sequence.request.wire.root)
        return num_shared * size > self._allocator.find(sequence.token_ids, root, hashes=sequence.chain)

    def _allocate(self, sequence: Sequence, budget: PrefillBudget, load: _Load) -> int:
        """Room for the first chunk; the tokens granted, or 0: it does not fit now."""
        if self._num_blocks_short(sequence, load) > 0:
            return 0
        num_tokens = len(sequence.token_ids)
        root = BlockHash(sequence.request.wire.root)
        hashes = sequence.hashes(self._allocator.block_size)
        cached = self._num_cached(sequence)
        cap = budget.newcomer_share if load.num_sequences > 0 else budget.head_share
        granted = budget.take(num_tokens - cached, cap)
        allocation = self._allocator.allocate(
            cached + granted, sequence.token_ids, root, reuse=sequence.reuse, hashes=hashes
        )
        if allocation is None:
            budget.give_back(granted)
            return 0
        assert allocation.num_cached_tokens == cached, f"found {cached}, got {allocation.num_cached_tokens}"
        sequence.allocation = allocation
        sequence.num_computed = cached
        return granted

    def _num_cached(self, sequence: Sequence) -> int:
        if not sequence.reuse:
            return 0
        hashes = sequence.hashes(self._allocator.block_size)
        return self._allocator.find(sequence.token_ids, BlockHash(sequence.request.wire.root), hashes=hashes)

    def _num_blocks_short(self, sequence: Sequence, load: _Load) -> int:
        """Blocks that would have to be free for it to be admitted, beside those that are."""
        if load.num_sequences == 0:
            return 0
        wanted_blocks = self._allocator.num_blocks_for(len(sequence.token_ids))
        wanted_blocks -= self._num_cached(sequence) // self._allocator.block_size
        watermark = int(self._limits.watermark * self._allocator.num_blocks)
        return watermark + wanted_blocks - (self._allocator.num_free_blocks - load.growth_blocks)

    @staticmethod
    def _undo(admitted: list[Admitted], budget: PrefillBudget) -> None:
        for sequence, granted, rest in reversed(admitted):
            if rest is not None:
                sequence.merge(rest)
            assert sequence.allocation is not None
            sequence.allocation.free()
            sequence.allocation = None
            sequence.num_computed = 0
            budget.give_back(granted)


class _Load:
    """What the running sequences take, and will take once their prefills are whole."""

    __slots__ = ("_allocator", "growth_blocks", "num_choices", "num_held", "num_sequences", "total_tokens")

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.num_sequences = 0
        self.num_choices = 0
        self.num_held: dict[Request, int] = {}
        """Slots by request."""
        self.total_tokens = 0
        self.growth_blocks = 0

    @classmethod
    def of(cls, running: OrderedSequences, allocator: Allocator) -> _Load:
        load = cls(allocator)
        for sequence in running:
            load.add(sequence)
        return load

    def add(self, sequence: Sequence) -> None:
        num_choices = len(sequence.choices)
        self.num_sequences += 1
        self.num_choices += num_choices
        self.num_held[sequence.request] = self.num_held.get(sequence.request, 0) + num_choices
        self.total_tokens += num_choices * sequence.request.total_tokens
        self.growth_blocks += num_growth_blocks(sequence, self._allocator)

    def room(self, sequence: Sequence, limits: BatchLimits) -> int:
        """How many of its choices may run now."""
        num_slots = limits.max_num_seqs - self.num_choices
        if limits.max_batch_total_tokens is None or self.num_sequences == 0:
            return num_slots
        num_tokens = limits.max_batch_total_tokens - self.total_tokens
        return min(num_slots, num_tokens // sequence.request.total_tokens)

    def num_tokens_short(self, sequence: Sequence, limits: BatchLimits) -> int:
        """By how much one of its choices is too large."""
        if limits.max_batch_total_tokens is None or self.num_sequences == 0:
            return 0
        return self.total_tokens + sequence.request.total_tokens - limits.max_batch_total_tokens


def _table(sequence: Sequence) -> SequenceABC[BlockId]:
    assert sequence.allocation is not None
    return sequence.allocation.block_table


def num_growth_blocks(sequence: Sequence, allocator: Allocator) -> int:
    """Blocks that a running sequence will take until its prefill is whole."""
    assert sequence.allocation is not None
    return max(0, allocator.num_blocks_for(len(sequence.token_ids)) - len(sequence.allocation.block_table))


def num_shared_blocks(one: list[BlockHash], other: list[BlockHash]) -> int:
    """Length of the common prefix of two chains: equal hashes at a place mean that all before are equal too."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def refusal(request: GenerateRequest, limits: BatchLimits, pool_tokens: int, vocab_size: int) -> Failed | None:
    """Why no state of this worker could serve the request; None: it can be submitted.

    `pool_tokens`: tokens that fit into the whole KV pool.
    """
    return next((_invalid(problem) for problem in _problems(request, limits, pool_tokens, vocab_size)), None)


def _invalid(message: str) -> Failed:
    return Failed("invalid_request", message, retryable=False)


def _problems(request: GenerateRequest, limits: BatchLimits, pool_tokens: int, vocab_size: int) -> list[str]:
    sampling = request.sampling
    problems = list(out_of_bounds(request, vocab_size))
    if len(request.root) != HASH_BYTES:
        problems.append(f"root: {HASH_BYTES} bytes expected, got {len(request.root)}")
    if not request.prompt_ids:
        problems.append("prompt_ids: at least one token is needed")
    elif max(request.prompt_ids) >= vocab_size:
        problems.append(f"prompt_ids: {max(request.prompt_ids)} is outside the vocabulary of {vocab_size}")
    indices = [choice.index for choice in request.choices]
    if not indices or len(set(indices)) < len(indices):
        problems.append(f"choices: distinct indices expected, got {indices}")
    if any(are_outside(choice.output_ids, vocab_size) for choice in request.choices):
        problems.append(f"output_ids: a token is outside the vocabulary of {vocab_size}")
    if any(len(choice.output_ids) > sampling.max_tokens for choice in request.choices):
        problems.append(f"output_ids: a choice already has more than max_tokens ({sampling.max_tokens}) tokens")
    total_tokens = len(request.prompt_ids) + sampling.max_tokens
    for limit, name in (
        (limits.max_model_len, "the context"),
        (pool_tokens, "the KV pool"),
        (limits.max_batch_total_tokens, "max_batch_total_tokens"),
    ):
        if limit is not None and total_tokens > limit:
            problems.append(
                f"max_tokens: {len(request.prompt_ids)} prompt tokens and {sampling.max_tokens} output tokens exceed"
                f" {name} of {limit} tokens; shorten the prompt or lower max_tokens"
            )
    return problems
