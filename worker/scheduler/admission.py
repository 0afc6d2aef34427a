"""Admission: moves sequences from the waiting queue to the running batch, and back when they are preempted.

`BatchUsage` counts what the running sequences use of the limits and of the pool, and what a waiting one lacks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cache.allocators.base import Allocator
from worker.scheduler.budget import BatchLimits, PrefillBudget
from worker.scheduler.plan import StepPlan
from worker.scheduler.prefix_wait import PrefixWait
from worker.scheduler.request import OrderedSequences, Request, TokenSequence


@dataclass(eq=False)
class BatchAdmission:
    """Decides which waiting sequences join the batch: in what order, and with how many tokens of the step."""

    _allocator: Allocator
    _limits: BatchLimits
    _waiting: OrderedSequences
    _running: OrderedSequences
    _prefix_wait: PrefixWait
    _num_steps_waited: int = field(default=1, init=False)
    """TGI's counter: decodes since the last prefill, from 1."""

    def admit(self, candidates: Iterable[TokenSequence], plan: StepPlan, budget: PrefillBudget) -> list[TokenSequence]:
        """Admit waiting sequences in the order given, and plan the first chunk of each.

        Stops at the first sequence that does not fit, to prevent starvation. Skips one that waits for a prefix, or
        whose tenant has its share. Admits as many of a sequence's choices as may run.
        """
        min_admitted, growth_reason = self._min_admitted(), self._growth_reason()
        if min_admitted is not None:  # a group that is refused only later evicts blocks for nothing
            num_running = 0 if self.must_yield() else sum(len(sequence.choices) for sequence in self._running)
            if min(len(self._waiting), self._limits.max_num_seqs - num_running) < min_admitted:
                return []
        admitted = self._admit_in_order(candidates, plan, budget)
        if min_admitted is not None and len(admitted) < min_admitted:
            for sequence in reversed(admitted):
                self.preempt(sequence)
                budget.give_back(plan.chunks.pop(sequence).num_tokens)
            return []
        if admitted:
            plan.batch_growth_reason = growth_reason
        return admitted

    def _admit_in_order(
        self, candidates: Iterable[TokenSequence], plan: StepPlan, budget: PrefillBudget
    ) -> list[TokenSequence]:
        admitted: list[TokenSequence] = []
        usage = BatchUsage(self._running, self._allocator, self._limits)
        prefilling = [sequence for sequence in self._running if sequence.is_prefilling]
        for sequence in candidates:
            num_choices = self._max_choices(sequence, usage)
            if num_choices <= 0 or self._prefix_wait.has_to_wait(sequence, prefilling):
                continue
            usage = self._make_way(sequence, num_choices, usage, plan, budget)
            num_fitting = usage.num_tokens_left // sequence.request.max_total_tokens
            num_choices = min(num_choices, usage.num_choices_left, num_fitting)
            if budget.left == 0 or num_choices <= 0 or usage.num_blocks_short(sequence) > 0:
                break
            if self._prefix_wait.starts_fetch(sequence):
                continue
            granted = self._allocate(sequence, budget, is_first=usage.num_sequences == 0)
            if granted == 0:
                break
            self._start(sequence, num_choices)
            usage.add(sequence)
            plan.add_tokens(sequence, granted)
            prefilling.append(sequence)
            admitted.append(sequence)
        return admitted

    def _allocate(self, sequence: TokenSequence, budget: PrefillBudget, *, is_first: bool) -> int:
        """Allocate blocks for the first chunk. Return the tokens granted, 0 if it does not fit."""
        num_cached = sequence.count_cached(self._allocator)
        cap = budget.oldest_share if is_first else budget.admission_share
        granted = budget.take(len(sequence.token_ids) - num_cached, cap)
        if granted == 0:
            return 0
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

    def _start(self, sequence: TokenSequence, num_choices: int) -> None:
        """Move the sequence to the batch with its first `num_choices`. The others stay in the queue."""
        self._waiting.remove(sequence)
        sequence.waiting_for_prefix_of = None  # it may have ended, and must not outlive its answer
        if num_choices < len(sequence.choices):
            self._waiting.add(sequence.split(num_choices))
        self._running.add(sequence)

    # --- tenants: while another one waits, a request keeps at most half of the choices ------------------------------

    def must_yield(self) -> bool:
        """Return whether a running request has more than its half."""
        num_choices: Counter[Request] = Counter()
        for sequence in self._running:
            num_choices[sequence.request] += len(sequence.choices)
        return self._largest(num_choices) is not None

    def _largest(self, num_choices: Mapping[Request, int]) -> Request | None:
        """Return the request with more than half of the choices, if another tenant waits."""
        half, tenants = self._limits.max_contested_choices, self._waiting.tenants
        large = (request for request, num_held in num_choices.items() if num_held > half)
        return next((request for request in large if any(tenant != request.wire.tenant for tenant in tenants)), None)

    def _max_choices(self, sequence: TokenSequence, usage: BatchUsage) -> int:
        """Return how many choices of a waiting sequence may be added: none by the tenant of a request that must yield.

        Sequences of other tenants after it make that request yield.
        """
        num_choices = len(sequence.choices)
        if len(self._waiting.tenants) <= 1:
            return num_choices
        largest = self._largest(usage.num_choices)
        if largest is not None and largest.wire.tenant == sequence.tenant:
            return 0
        return min(num_choices, self._limits.max_contested_choices - usage.num_choices[sequence.request])

    def _make_way(
        self, sequence: TokenSequence, num_choices: int, usage: BatchUsage, plan: StepPlan, budget: PrefillBudget
    ) -> BatchUsage:
        """Preempt the last choices beyond a request's half until the sequence fits. Return the usage after that."""
        while (largest := self._largest(usage.num_choices)) is not None:
            num_lacking = num_choices - usage.num_choices_left
            if num_lacking <= 0 and usage.has_room_for(sequence):
                break
            num_spare = usage.num_choices[largest] - self._limits.max_contested_choices
            victim = [each for each in self._running if each.request is largest][-1]
            num_yielded = min(len(victim.choices), num_spare, num_lacking if num_lacking > 0 else num_spare)
            self._yield_choices(victim, num_yielded, plan, budget)
            usage = BatchUsage(self._running, self._allocator, self._limits)
        return usage

    def _yield_choices(self, sequence: TokenSequence, num_choices: int, plan: StepPlan, budget: PrefillBudget) -> None:
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

    def preempt(self, sequence: TokenSequence) -> None:
        """Free a running sequence's blocks and return it to its position in the queue."""
        sequence.release()
        self._running.remove(sequence)
        self._waiting.add(sequence)

    # --- TGI's rule -------------------------------------------------------------------------------------------------

    def end_step(self, *, admitted: bool, decoded: bool) -> None:
        """Count a planned step for TGI's rule. Here, a step can be both a prefill and a decode."""
        self._num_steps_waited = (1 if admitted else self._num_steps_waited) + decoded

    def _min_admitted(self) -> int | None:
        """Return how many sequences must be admitted together. None: any number."""
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


class BatchUsage:
    """The resources of the running sequences, counted as of the end of their prefills."""

    def __init__(self, running: OrderedSequences, allocator: Allocator, limits: BatchLimits) -> None:
        self._allocator = allocator
        self._limits = limits
        self.num_sequences = 0
        self.num_choices: Counter[Request] = Counter()
        """Running choices of each request."""
        self._num_growth_blocks = 0
        self._total_tokens = 0
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: TokenSequence) -> None:
        num_choices = len(sequence.choices)
        self.num_sequences += 1
        self.num_choices[sequence.request] += num_choices
        self._num_growth_blocks += num_growth_blocks(sequence, self._allocator)
        self._total_tokens += num_choices * sequence.request.max_total_tokens

    @property
    def num_choices_left(self) -> int:
        return self._limits.max_num_seqs - self.num_choices.total()

    @property
    def num_tokens_left(self) -> int:
        """Tokens left of TGI's limit on all tokens."""
        limit = self._limits.max_batch_total_tokens
        return sys.maxsize if limit is None else limit - self._total_tokens

    def has_room_for(self, sequence: TokenSequence) -> bool:
        """Return whether one choice of the sequence fits into the pool, and into TGI's limit."""
        return self.num_tokens_left >= sequence.request.max_total_tokens and self.num_blocks_short(sequence) <= 0

    def num_blocks_short(self, sequence: TokenSequence) -> int:
        """Return the blocks that are missing for the sequence to be admitted."""
        if self.num_sequences == 0:
            return 0
        hashes = sequence.hash_blocks(self._allocator.block_size)
        num_held = self._allocator.find_held(sequence.token_ids, sequence.root, hashes) if sequence.reuse else 0
        num_wanted = self._allocator.num_blocks_for(len(sequence.token_ids)) - num_held
        watermark = int(self._limits.watermark * self._allocator.num_blocks)
        return watermark + num_wanted - (self._allocator.num_free_blocks - self._num_growth_blocks)


def num_growth_blocks(sequence: TokenSequence, allocator: Allocator) -> int:
    """Return the blocks that a running sequence still takes until the end of its prefill."""
    return max(0, allocator.num_blocks_for(len(sequence.token_ids)) - len(sequence.blocks.block_table))
