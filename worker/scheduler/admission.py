"""The door between waiting and running, and the one before it: what can never be served is refused at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from cache.allocators.base import Allocator
from cache.types import BlockHash, BlockId
from worker.scheduler.budget import AdmissionGate, BatchLimits, PrefillBudget
from worker.scheduler.request import OrderedSequences, Request, TokenSequence

MAX_COMPARED: Final = 128
"""Requests before a new one that are looked at for a common prefix, the latest first."""


class Admitted(NamedTuple):
    """A sequence that joins the batch, the tokens of its first chunk, and what it has left behind for want of slots."""

    sequence: TokenSequence
    num_tokens: int
    rest: TokenSequence | None


class Slots(Protocol):
    """What an admission asks of who owns the queues."""

    def is_contested(self, sequence: TokenSequence) -> bool:
        """Whether a sequence of another tenant waits."""

    def note(self, sequence: TokenSequence, *, is_whole: bool) -> None:
        """The sequence waits no more; a part of it does, unless it `is_whole`."""

    def give_up(self, sequence: TokenSequence, num_choices: int) -> None:
        """Let the last choices of a running sequence wait; if that is all of them, it is preempted."""


class Admission:
    """Decides which of the waiting join the batch. Holds only TGI's counter."""

    def __init__(self, allocator: Allocator, limits: BatchLimits) -> None:
        self.gate = AdmissionGate(limits)
        self._allocator = allocator
        self._limits = limits

    def admit(
        self,
        waiting: Iterable[TokenSequence],
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
        self, newcomer: TokenSequence, num_choices: int, running: OrderedSequences, load: _Load, slots: Slots
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
        victims: list[tuple[TokenSequence, int]] = []
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

    def _has_to_wait(self, sequence: TokenSequence, prefilling: list[TokenSequence]) -> bool:
        if sequence.request.wire.is_suspect and any(other.request.wire.is_suspect for other in prefilling):
            return True  # one at a time, so that a death has one culprit
        if not sequence.reuse:  # the logprobs of a prompt are collected by one sequence at a time
            return any(other.request is sequence.request for other in prefilling)
        return self._limits.await_prefixes and self._is_computed_now(sequence, prefilling)

    def _is_computed_now(self, sequence: TokenSequence, prefilling: list[TokenSequence]) -> bool:
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
        stalled = sequence.waiting_for_prefix_of == (other, other.num_computed)
        sequence.waiting_for_prefix_of = (other, other.num_computed)
        if stalled:
            return False
        root = BlockHash(sequence.request.wire.root)
        return num_shared * size > self._allocator.find(sequence.token_ids, root, hashes=sequence.chain)

    def _allocate(self, sequence: TokenSequence, budget: PrefillBudget, load: _Load) -> int:
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

    def _num_cached(self, sequence: TokenSequence) -> int:
        if not sequence.reuse:
            return 0
        hashes = sequence.hashes(self._allocator.block_size)
        return self._allocator.find(sequence.token_ids, BlockHash(sequence.request.wire.root), hashes=hashes)

    def _num_blocks_short(self, sequence: TokenSequence, load: _Load) -> int:
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

    def add(self, sequence: TokenSequence) -> None:
        num_choices = len(sequence.choices)
        self.num_sequences += 1
        self.num_choices += num_choices
        self.num_held[sequence.request] = self.num_held.get(sequence.request, 0) + num_choices
        self.total_tokens += num_choices * sequence.request.total_tokens
        self.growth_blocks += num_growth_blocks(sequence, self._allocator)

    def room(self, sequence: TokenSequence, limits: BatchLimits) -> int:
        """How many of its choices may run now."""
        num_slots = limits.max_num_seqs - self.num_choices
        if limits.max_batch_total_tokens is None or self.num_sequences == 0:
            return num_slots
        num_tokens = limits.max_batch_total_tokens - self.total_tokens
        return min(num_slots, num_tokens // sequence.request.total_tokens)

    def num_tokens_short(self, sequence: TokenSequence, limits: BatchLimits) -> int:
        """By how much one of its choices is too large."""
        if limits.max_batch_total_tokens is None or self.num_sequences == 0:
            return 0
        return self.total_tokens + sequence.request.total_tokens - limits.max_batch_total_tokens


def _table(sequence: TokenSequence) -> Sequence[BlockId]:
    assert sequence.allocation is not None
    return sequence.allocation.block_table


def num_growth_blocks(sequence: TokenSequence, allocator: Allocator) -> int:
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
