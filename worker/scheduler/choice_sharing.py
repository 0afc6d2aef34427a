"""How tenants share the running choices: while another tenant waits, a request keeps at most half of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from cache.types import BlockId
from worker.scheduler.batch_usage import BatchUsage, block_table
from worker.scheduler.budget import BatchLimits
from worker.scheduler.request import OrderedSequences, Request, TokenSequence


class ChoiceSharing:
    """Decides how many choices of a sequence may run, and which running choices yield to another tenant."""

    def __init__(self, limits: BatchLimits, waiting: OrderedSequences, running: OrderedSequences) -> None:
        self._max_contested = limits.max_contested_choices
        self._waiting = waiting
        self._running = running

    def max_choices(self, sequence: TokenSequence, usage: BatchUsage) -> int:
        """Return how many choices of a waiting sequence its request may add."""
        num_choices = len(sequence.choices)
        if len(self._waiting.tenants) <= 1:
            return num_choices
        return min(num_choices, self._max_contested - usage.num_choices[sequence.request])

    def must_yield(self) -> bool:
        """Return whether a request holds more than its share while another tenant waits."""
        num_choices: Counter[Request] = Counter()
        for sequence in self._running:
            num_choices[sequence.request] += len(sequence.choices)
        holder = self._find_holder(num_choices)
        return holder is not None and any(tenant != holder.wire.tenant for tenant in self._waiting.tenants)

    def is_held_by_own_tenant(self, sequence: TokenSequence, usage: BatchUsage) -> bool:
        """Return whether the sequence's own tenant holds more than its share."""
        holder = self._find_holder(usage.num_choices)
        return holder is not None and holder.wire.tenant == sequence.tenant

    def find_victims(
        self, candidate: TokenSequence, num_choices: int, usage: BatchUsage
    ) -> list[tuple[TokenSequence, int]]:
        """Choose running choices above a request's share that yield, so that the candidate fits.

        Returns its sequences, last first, and how many choices of each have to yield; empty if none can help.
        """
        holder = self._find_holder(usage.num_choices)
        if holder is None or holder.wire.tenant == candidate.tenant:
            return []
        num_spare = usage.num_choices[holder] - self._max_contested
        choices_short = num_choices - usage.num_choices_left
        tokens_short = candidate.request.max_total_tokens - usage.num_tokens_left
        blocks_short = usage.num_blocks_short(candidate)
        num_users: Counter[BlockId] = Counter()
        if blocks_short > 0:
            num_users.update(chain.from_iterable(map(block_table, self._running)))
        victims: list[tuple[TokenSequence, int]] = []
        for sequence in reversed([sequence for sequence in self._running if sequence.request is holder]):
            if num_spare == 0 or max(choices_short, tokens_short, blocks_short) <= 0:
                break
            num_yielded = min(len(sequence.choices), num_spare)
            if blocks_short <= 0 and tokens_short <= 0:
                num_yielded = min(num_yielded, choices_short)
            victims.append((sequence, num_yielded))
            num_spare -= num_yielded
            choices_short -= num_yielded
            tokens_short -= num_yielded * holder.max_total_tokens
            if num_yielded == len(sequence.choices) and blocks_short > 0:
                table = block_table(sequence)
                num_users.subtract(table)
                blocks_short -= sum(num_users[block] == 0 for block in table)
        fits = tokens_short <= 0 and blocks_short <= 0 and choices_short < num_choices
        return victims if fits else []

    def _find_holder(self, num_choices: Mapping[Request, int]) -> Request | None:
        """Return the request that holds more than its share. There is at most one."""
        return next((request for request, num_held in num_choices.items() if num_held > self._max_contested), None)
