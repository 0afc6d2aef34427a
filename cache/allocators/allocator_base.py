"""What every allocator does alike: its live allocations, the copies it owes, and its statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from cache.allocators.base import BlockCopy, CacheStats
from cache.block_table import BlockTable, num_blocks_for

Table = TypeVar("Table", bound=BlockTable)


class AllocatorBase(ABC, Generic[Table]):
    """The part of `cache.allocators.base.Allocator` that does not depend on how blocks are found again."""

    __slots__ = ("_block_size", "_copies", "_hit_tokens", "_live", "_query_tokens")

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._block_size = block_size
        self._copies: list[BlockCopy] = []
        self._live: set[Table] = set()
        self._query_tokens = 0
        self._hit_tokens = 0

    @property
    def block_size(self) -> int:
        return self._block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self._block_size)

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @property
    @abstractmethod
    def num_free_blocks(self) -> int: ...

    def take_copies(self) -> list[BlockCopy]:
        copies = self._copies.copy()
        self._copies.clear()  # every allocation notes its copies on this very list
        return copies

    def reset(self) -> bool:
        if self._live:
            return False
        self._clear()
        return True

    def stats(self) -> CacheStats:
        return CacheStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self._num_cached_blocks(),
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self._evictions(),
            lru_tail_age=self._lru_tail_age(),
        )

    def _count_query(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._query_tokens += num_tokens
        self._hit_tokens += num_cached_tokens

    @abstractmethod
    def _clear(self) -> None:
        """Forget everything cached; nothing is held."""

    @abstractmethod
    def _num_cached_blocks(self) -> int: ...

    @abstractmethod
    def _evictions(self) -> int: ...

    @abstractmethod
    def _lru_tail_age(self) -> int: ...
