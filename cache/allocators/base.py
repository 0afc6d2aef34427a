"""The contract of every allocator: it owns the pool of KV blocks and gives each sequence an `Allocation`.

"Does not fit" is a value, not an exception, and changes nothing. A broken invariant is an AssertionError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache.block_table import Allocation, BlockCopy, Pool, num_blocks_for
from cache.events import BlockEvent
from cache.types import BlockHash


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start, and gauges. `num_free_blocks` includes evictable blocks that keep their hash."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    query_tokens: int
    hit_tokens: int
    evictions: int
    lru_tail_age: int
    """How long the pool remembers: allocations, and for `radix` commits, since the next victim was used.
    0 while nothing needs to be evicted."""


class Allocator(ABC):
    """Owner of a pool of blocks 1 .. num_blocks - 1 (block 0 is the null block).

    The life of a block: free -> taken by allocate/extend -> written by a forward -> committed (findable, if full)
    -> released by free -> still findable while free -> evicted when taken again.

    Only `commit` makes a block findable, after the forward that wrote it has returned. A failed step never commits.
    """

    __slots__ = ("_block_size", "_hit_tokens", "_live", "_pool", "_query_tokens")

    def __init__(self, pool: Pool, block_size: int) -> None:
        """Raises ValueError."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._pool = pool
        self._block_size = block_size
        self._live: set[Allocation] = set()
        self._query_tokens = 0
        self._hit_tokens = 0

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take, evictable ones included."""
        return self._pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence of `num_tokens` holds."""
        return num_blocks_for(num_tokens, self._block_size)

    @abstractmethod
    def allocate(
        self,
        num_tokens: int,
        token_ids: Sequence[int],
        root: BlockHash,
        *,
        reuse: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> Allocation | None:
        """Return room for `num_tokens` (>= 1) tokens of a sequence that begins with `token_ids`, or None.

        `root` (see `cache.hashing`) keeps tenants, models and adapters apart. At least one token of `token_ids` is
        always left to compute. `reuse=False` reads nothing from the cache (prompt logprobs) but still writes.
        `hashes` is `hash_chain(root, token_ids, block_size)` if the caller has it: a waiting request is hashed once.
        The allocation holds more than `num_tokens` when more is found cached.
        """

    @abstractmethod
    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        """Return the tokens that `allocate` would find cached. Changes nothing, not even the order of eviction."""

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order. Call it after every step."""
        return self._pool.events.take()

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies that the engine owes since the last call, in order."""
        copies, self._pool.copies = self._pool.copies, []
        return copies

    def held(self) -> Iterator[BlockHash]:
        """Return every findable hash, parents before children."""
        return self._pool.held()

    def reset(self) -> bool:
        """Forget everything cached. False, and nothing changed, while any allocation lives."""
        if self._live:
            return False
        self._pool.clear()
        return True

    def stats(self) -> CacheStats:
        pool = self._pool
        return CacheStats(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            evictions=pool.evictions,
            lru_tail_age=pool.lru_tail_age,
        )

    def check_integrity(self) -> None:
        """Assert every invariant of the pool. Linear in its size: for tests and for idle time."""
        self._pool.check_integrity([allocation.block_table for allocation in self._live])

    def _count_query(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._query_tokens += num_tokens
        self._hit_tokens += num_cached_tokens
