"""Waiting for a prefix: a sequence stays in the queue while its prefix is computed for another, or fetched."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

from cache.allocators.base import Allocator
from cache.types import BlockHash
from worker.scheduler.request import Request, TokenSequence

MAX_COMPARED: Final = 128
"""Earlier requests that are compared with a new one for a common prefix, the latest first."""


class PrefixFetcher(Protocol):
    """Fetches blocks into the pool while their sequence waits. Used by the engine thread."""

    def start(self, sequence: TokenSequence, num_cached_blocks: int) -> bool:
        """Fetch what the pool lacks of the sequence's prefix, where that is faster than to compute it.

        Return whether the sequence waits for blocks now. Each sequence fetches once.
        """

    def count_fetchable(self, sequence: TokenSequence, num_cached_blocks: int) -> int:
        """Return the blocks beyond the cached ones that `start` would fetch."""

    def give_up_latest(self) -> bool:
        """End the latest fetch, to free its blocks. False: there is none."""


class PrefixWait:
    """Decides which sequences wait although they fit: for a prefix, or because another suspect runs."""

    def __init__(self, allocator: Allocator, await_prefixes: bool, fetcher: PrefixFetcher | None) -> None:
        self._allocator = allocator
        self._await_prefixes = await_prefixes
        self._fetcher = fetcher

    def has_to_wait(self, sequence: TokenSequence, prefilling: Sequence[TokenSequence]) -> bool:
        """Return whether the sequence waits for a fetch, or for one of the `prefilling` ones."""
        if sequence.is_fetching:
            return True
        if sequence.request.wire.is_suspect and any(other.request.wire.is_suspect for other in prefilling):
            return True  # one at a time, so that a crash has one suspect
        if not sequence.reuse:  # one sequence at a time collects the logprobs of a prompt
            return any(other.request is sequence.request for other in prefilling)
        return self._await_prefixes and self._is_computed_by(prefilling, sequence)

    def starts_fetch(self, sequence: TokenSequence) -> bool:
        """Start a fetch for a sequence that could be admitted. Return whether the sequence waits for it."""
        if self._fetcher is None:
            return False
        return self._fetcher.start(sequence, sequence.count_cached(self._allocator) // self._allocator.block_size)

    def count_uncached(self, request: Request, latest: Iterable[Request]) -> int:
        """Return the tokens to prefill: not cached, not fetched, and not being computed by one of the `latest`."""
        if not request.sequences:
            return 0
        sequence, size = request.sequences[0], self._allocator.block_size
        num_cached = sequence.count_cached(self._allocator)
        if self._await_prefixes:
            hashes = sequence.reusable_hashes(size)
            nearest = (other for other in islice(latest, MAX_COMPARED) if other.first_token_s is None)
            chains = (other.sequences[0].block_hashes for other in nearest if other.sequences)
            num_cached = max(num_cached, *(_num_shared_blocks(hashes, chain) * size for chain in chains), 0)
        if self._fetcher is not None:
            num_cached += self._fetcher.count_fetchable(sequence, num_cached // size) * size
        return len(sequence.token_ids) - num_cached

    def _is_computed_by(self, prefilling: Sequence[TokenSequence], sequence: TokenSequence) -> bool:
        """Return whether a prefill computes more of the sequence than is cached, and progressed since the last call."""
        if not prefilling:
            return False
        hashes = sequence.reusable_hashes(self._allocator.block_size)
        other = max(prefilling, key=lambda other: _num_shared_blocks(hashes, other.block_hashes))
        num_shared = _num_shared_blocks(hashes, other.block_hashes) * self._allocator.block_size
        if num_shared <= other.num_computed:
            return False
        is_stalled = sequence.waiting_for_prefix_of == (other, other.num_computed)
        sequence.waiting_for_prefix_of = (other, other.num_computed)
        return not is_stalled and num_shared > sequence.count_cached(self._allocator)


def _num_shared_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Return the length of the common prefix, by bisection: equal hashes mean equal blocks up to that index."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda index: one[index] != other[index])
