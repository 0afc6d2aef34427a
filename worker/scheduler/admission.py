"""Admission: moves sequences from the waiting queue to the running batch, and back when they are preempted."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

from cache.allocators.base import Allocator
from cache.types import BlockHash, BlockId
from worker.scheduler.budget import BatchLimits, PrefillBudget
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import OrderedSequences, Request, TokenSequence

MAX_COMPARED: Final = 128
"""Earlier requests that are compared with a new one for a common prefix, the latest first."""


class PrefixLoader(Protocol):
    """Brings blocks into the pool from elsewhere while their sequence waits. Used by the engine thread."""

    @property
    def num_active(self) -> int:
        """Loads that have not ended."""

    def is_loading(self, sequence: TokenSequence) -> bool:
        """Tell whether the sequence waits for blocks."""

    def start(self, sequence: TokenSequence, num_cached_blocks: int) -> bool:
        """Load what the pool lacks of the sequence's prefix, where that is faster than to compute it.

        Return whether the sequence waits for blocks now. Each sequence loads once.
        """

    def count_loadable(self, sequence: TokenSequence, num_cached_blocks: int) -> int:
        """Return the blocks beyond the cached ones that `start` would load."""

    def give_up_latest(self) -> bool:
        """End the latest load, for its blocks. False: there is none."""


class BatchAdmission:
    """The admission policy: which waiting sequences join the batch, and which running choices yield to a tenant."""

    def __init__(
        self, allocator: Allocator, limits: BatchLimits, waiting: OrderedSequences, running: OrderedSequences
    ) -> None:
        self._allocator = allocator
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self.loader: PrefixLoader | None = None
        self._num_steps_waited = 1
        """TGI's counter: decodes since the last prefill, from 1."""

    def admit(self, candidates: Iterable[TokenSequence], plan: StepPlan, budget: PrefillBudget) -> list[TokenSequence]:
        """Admit waiting sequences in the order given, and plan the first chunk of each.

        Stops at the first that does not fit, so that a large request is not overtaken for ever. A sequence lets others
        pass while a running one computes its prefix, or its tenant holds too many slots. As many of its choices join as
        there are slots for. While another tenant waits, a request gets at most half of the slots, and one that holds
        more yields what lets the other in.
        """
        min_admitted, growth_reason = self._min_admitted(), self._growth_reason()
        if min_admitted is not None and len(self._waiting) < min_admitted:
            return []
        admitted: list[TokenSequence] = []
        load = _BatchLoad(self._running, self._allocator, self._limits)
        prefilling = [sequence for sequence in self._running if sequence.is_prefilling]
        num_waiting = Counter(sequence.tenant for sequence in self._waiting)
        for sequence in candidates:
            num_choices = len(sequence.choices)
            if len(num_waiting) > 1:
                num_choices = min(num_choices, self._limits.max_contested_slots - load.num_slots[sequence.request])
            if num_choices <= 0 or self._has_to_wait(sequence, prefilling):
                continue
            if victims := self._find_victims(sequence, num_choices, load):
                for victim, num_yielded in victims:
                    self._yield_slots(victim, num_yielded, plan, budget)
                    num_waiting[victim.tenant] += 1
                load = _BatchLoad(self._running, self._allocator, self._limits)
            num_fitting = load.num_tokens_left // sequence.request.max_total_tokens
            num_choices = min(num_choices, load.num_slots_left, num_fitting)
            if num_choices <= 0 and load.holder is not None and load.holder.wire.tenant == sequence.tenant:
                continue  # its own tenant has the slots: others behind it may take them
            if budget.left == 0 or num_choices <= 0:
                break
            if self._starts_load(sequence, load):
                continue
            granted = self._allocate(sequence, budget, load)
            if granted == 0:
                break
            self._waiting.remove(sequence)
            if num_choices < len(sequence.choices):
                self._waiting.add(sequence.split(num_choices))
            else:
                num_waiting -= Counter([sequence.tenant])
            self._running.add(sequence)
            load.add(sequence)
            plan.add_tokens(sequence, granted)
            prefilling.append(sequence)
            admitted.append(sequence)
        if min_admitted is not None and len(admitted) < min_admitted:
            for sequence in reversed(admitted):
                self.preempt(sequence)
                budget.give_back(plan.chunks.pop(sequence).num_tokens)
            return []
        if admitted:
            plan.batch_growth_reason = growth_reason
        return admitted

    def end_step(self, *, admitted: bool, decoded: bool) -> None:
        """Count a planned step for TGI's rule. One of ours can be both a prefill and a decode."""
        self._num_steps_waited = (1 if admitted else self._num_steps_waited) + decoded

    def preempt(self, sequence: TokenSequence) -> None:
        """Free a running sequence's blocks and return it to its position in the queue."""
        sequence.release()
        self._running.remove(sequence)
        self._waiting.add(sequence)

    def must_yield(self) -> bool:
        """Tell whether a request holds more than half of the slots while another tenant waits."""
        num_slots: Counter[Request] = Counter()
        for sequence in self._running:
            num_slots[sequence.request] += len(sequence.choices)
        ((holder, num_held),) = num_slots.most_common(1)
        tenant = holder.wire.tenant
        return num_held > self._limits.max_contested_slots and any(s.tenant != tenant for s in self._waiting)

    def count_uncached(self, request: Request, latest: Iterable[Request]) -> int:
        """Return the tokens that its prefill computes: neither cached nor being computed by one of the `latest`."""
        if not request.sequences:
            return 0
        sequence, size = request.sequences[0], self._allocator.block_size
        num_cached = self._num_cached(sequence)
        if sequence.reuse and self._limits.await_prefixes:
            hashes = sequence.hash_blocks(size)[: (len(sequence.token_ids) - 1) // size]
            nearest = (other for other in islice(latest, MAX_COMPARED) if other.first_token_s is None)
            chains = (other.sequences[0].block_hashes for other in nearest if other.sequences)
            num_cached = max(num_cached, *(_num_shared_blocks(hashes, chain) * size for chain in chains), 0)
        if self.loader is not None:
            num_cached += self.loader.count_loadable(sequence, num_cached // size) * size
        return len(sequence.token_ids) - num_cached

    # --- TGI's rule -------------------------------------------------------------------------------------------------

    def _min_admitted(self) -> int | None:
        """Return how many sequences must be admitted together, if any. None: any number."""
        ratio = self._limits.waiting_served_ratio
        if ratio is None or len(self._running) == 0 or self._num_steps_waited >= self._limits.max_waiting_tokens:
            return None
        return int(len(self._running) * ratio)

    def _growth_reason(self) -> str:
        """Return why the batch grows, in TGI's words."""
        if len(self._running) == 0:
            return "idle"
        if self._limits.waiting_served_ratio is None:
            return "chunking"
        return "backpressure" if self._min_admitted() is not None else "wait_exceeded"

    # --- slots of another tenant --------------------------------------------------------------------------------------

    def _find_victims(
        self, candidate: TokenSequence, num_choices: int, load: _BatchLoad
    ) -> list[tuple[TokenSequence, int]]:
        """Choose running choices of a request with more than half of the slots, so that the candidate fits instead.

        Returns its sequences, last first, and how many choices of each have to yield; empty if none can help.
        """
        holder = load.holder
        if holder is None or holder.wire.tenant == candidate.tenant:
            return []
        num_spare = load.num_slots[holder] - self._limits.max_contested_slots
        slots_short = num_choices - load.num_slots_left
        tokens_short = candidate.request.max_total_tokens - load.num_tokens_left
        blocks_short = self._num_blocks_short(candidate, load)
        num_users: Counter[BlockId] = Counter()
        if blocks_short > 0:
            num_users.update(block for sequence in self._running for block in _block_table(sequence))
        victims: list[tuple[TokenSequence, int]] = []
        for sequence in reversed(list(self._running)):
            if num_spare == 0 or max(slots_short, tokens_short, blocks_short) <= 0:
                break
            if sequence.request is not holder:
                continue
            num_yielded = min(len(sequence.choices), num_spare)
            if blocks_short <= 0 and tokens_short <= 0:
                num_yielded = min(num_yielded, slots_short)
            victims.append((sequence, num_yielded))
            num_spare -= num_yielded
            slots_short -= num_yielded
            tokens_short -= num_yielded * holder.max_total_tokens
            if num_yielded == len(sequence.choices) and blocks_short > 0:
                table = _block_table(sequence)
                num_users.subtract(table)
                blocks_short -= sum(num_users[block] == 0 for block in table)
        fits = tokens_short <= 0 and blocks_short <= 0 and slots_short < num_choices
        return victims if fits else []

    def _yield_slots(self, sequence: TokenSequence, num_choices: int, plan: StepPlan, budget: PrefillBudget) -> None:
        """Return a running sequence's last choices to the queue. The choices that stay keep the shared blocks."""
        plan.num_yielded += num_choices
        if num_choices < len(sequence.choices):
            self._waiting.add(sequence.split(len(sequence.choices) - num_choices))
            return
        self.preempt(sequence)
        if (chunk := plan.chunks.pop(sequence, None)) is not None:
            if chunk.is_prefill:
                budget.give_back(chunk.num_tokens)
            else:
                budget.drop_decode()

    # --- prefixes and blocks ------------------------------------------------------------------------------------------

    def _has_to_wait(self, sequence: TokenSequence, prefilling: list[TokenSequence]) -> bool:
        if self.loader is not None and self.loader.is_loading(sequence):
            return True
        if sequence.request.wire.is_suspect and any(other.request.wire.is_suspect for other in prefilling):
            return True  # one at a time, so that a crash has one suspect
        if not sequence.reuse:  # one sequence at a time collects the logprobs of a prompt
            return any(other.request is sequence.request for other in prefilling)
        return self._limits.await_prefixes and self._is_prefix_computed_by(prefilling, sequence)

    def _is_prefix_computed_by(self, prefilling: list[TokenSequence], sequence: TokenSequence) -> bool:
        """Tell whether a prefill computes more of the sequence than is cached, and progressed since the last look."""
        if not prefilling:
            return False
        size = self._allocator.block_size
        hashes = sequence.hash_blocks(size)[: (len(sequence.token_ids) - 1) // size]
        other = max(prefilling, key=lambda other: _num_shared_blocks(hashes, other.block_hashes))
        num_shared = _num_shared_blocks(hashes, other.block_hashes) * size
        if num_shared <= other.num_computed:
            return False
        is_stalled = sequence.waiting_for_prefix_of == (other, other.num_computed)
        sequence.waiting_for_prefix_of = (other, other.num_computed)
        return not is_stalled and num_shared > self._num_cached(sequence)

    def _starts_load(self, sequence: TokenSequence, load: _BatchLoad) -> bool:
        """Tell whether the sequence, which could be admitted, waits for blocks from elsewhere."""
        if self.loader is None or self._num_blocks_short(sequence, load) > 0:
            return False
        return self.loader.start(sequence, self._num_cached(sequence) // self._allocator.block_size)

    def _allocate(self, sequence: TokenSequence, budget: PrefillBudget, load: _BatchLoad) -> int:
        """Allocate blocks for the first chunk. Return the tokens granted, 0 if it does not fit."""
        if self._num_blocks_short(sequence, load) > 0:
            return 0
        num_cached = self._num_cached(sequence)
        cap = budget.admission_share if load.num_sequences > 0 else budget.oldest_share
        granted = budget.take(len(sequence.token_ids) - num_cached, cap)
        hashes = sequence.hash_blocks(self._allocator.block_size)
        allocation = self._allocator.allocate(
            num_cached + granted, sequence.token_ids, sequence.root, reuse=sequence.reuse, hashes=hashes
        )
        if allocation is None:
            budget.give_back(granted)
            return 0
        assert allocation.num_cached_tokens == num_cached, f"found {num_cached}, got {allocation.num_cached_tokens}"
        sequence.allocation = allocation
        sequence.num_computed = num_cached
        return granted

    def _num_cached(self, sequence: TokenSequence) -> int:
        if not sequence.reuse:
            return 0
        hashes = sequence.hash_blocks(self._allocator.block_size)
        return self._allocator.find(sequence.token_ids, sequence.root, hashes=hashes)

    def _num_blocks_short(self, sequence: TokenSequence, load: _BatchLoad) -> int:
        """Return the blocks that are missing for the sequence to be admitted."""
        if load.num_sequences == 0:
            return 0
        num_wanted = self._allocator.num_blocks_for(len(sequence.token_ids))
        num_wanted -= self._num_cached(sequence) // self._allocator.block_size
        watermark = int(self._limits.watermark * self._allocator.num_blocks)
        return watermark + num_wanted - (self._allocator.num_free_blocks - load.num_growth_blocks)


class _BatchLoad:
    """The resources of the running sequences, counted as of the end of their prefills."""

    def __init__(self, running: OrderedSequences, allocator: Allocator, limits: BatchLimits) -> None:
        self._allocator = allocator
        self._limits = limits
        self.num_sequences = 0
        self.num_choices = 0
        self.num_slots: Counter[Request] = Counter()
        self.num_growth_blocks = 0
        self._total_tokens = 0
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: TokenSequence) -> None:
        num_choices = len(sequence.choices)
        self.num_sequences += 1
        self.num_choices += num_choices
        self.num_slots[sequence.request] += num_choices
        self.num_growth_blocks += num_growth_blocks(sequence, self._allocator)
        self._total_tokens += num_choices * sequence.request.max_total_tokens

    @property
    def num_slots_left(self) -> int:
        return self._limits.max_num_seqs - self.num_choices

    @property
    def holder(self) -> Request | None:
        """The request that holds more slots than it may while another tenant waits."""
        max_slots = self._limits.max_contested_slots
        return next((request for request, num_held in self.num_slots.items() if num_held > max_slots), None)

    @property
    def num_tokens_left(self) -> int:
        """Tokens left of TGI's limit on all tokens."""
        limit = self._limits.max_batch_total_tokens
        return sys.maxsize if limit is None or self.num_sequences == 0 else limit - self._total_tokens


def num_growth_blocks(sequence: TokenSequence, allocator: Allocator) -> int:
    """Return the blocks that a running sequence still takes until the end of its prefill."""
    return max(0, allocator.num_blocks_for(len(sequence.token_ids)) - len(_block_table(sequence)))


def _block_table(sequence: TokenSequence) -> Sequence[BlockId]:
    assert sequence.allocation is not None
    return sequence.allocation.block_table


def _num_shared_blocks(one: list[BlockHash], other: list[BlockHash]) -> int:
    """Return the length of the common prefix, by bisection: equal hashes mean equal blocks up to there."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda index: one[index] != other[index])
