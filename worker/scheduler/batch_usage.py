"""Counts what the running sequences use of limits and pool, and what a waiting sequence lacks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from cache.allocators.base import Allocator
from cache.types import BlockId
from worker.scheduler.budget import BatchLimits
from worker.scheduler.request import OrderedSequences, Request, TokenSequence


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
        return sys.maxsize if limit is None or self.num_sequences == 0 else limit - self._total_tokens

    def has_room_for(self, sequence: TokenSequence) -> bool:
        """Return whether one choice of the sequence fits into the pool, and into TGI's limit."""
        return self.num_tokens_left >= sequence.request.max_total_tokens and self.num_blocks_short(sequence) <= 0

    def num_blocks_short(self, sequence: TokenSequence) -> int:
        """Return the blocks that are missing for the sequence to be admitted."""
        if self.num_sequences == 0:
            return 0
        num_wanted = self._allocator.num_blocks_for(len(sequence.token_ids))
        num_wanted -= sequence.count_cached(self._allocator) // self._allocator.block_size
        watermark = int(self._limits.watermark * self._allocator.num_blocks)
        return watermark + num_wanted - (self._allocator.num_free_blocks - self._num_growth_blocks)


def num_growth_blocks(sequence: TokenSequence, allocator: Allocator) -> int:
    """Return the blocks that a running sequence still takes until the end of its prefill."""
    return max(0, allocator.num_blocks_for(len(sequence.token_ids)) - len(block_table(sequence)))


def block_table(sequence: TokenSequence) -> Sequence[BlockId]:
    """Return the blocks of a running sequence."""
    assert sequence.allocation is not None
    return sequence.allocation.block_table
