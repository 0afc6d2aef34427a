"""Nothing is ever found again: an allocator without a prefix cache, and the one for models with a sliding window.

With a window, a sequence holds the blocks of one window however long it grows, and its tokens go round in them:

    window_size 6, block_size 2      block_table  [ 7 ][ 8 ][ 9 ]
    token  0  1  2  3  4  5  6  7    slot  14 15 16 17 18 19 14 15

The caller's `window_size` is at least the model's window and the longest chunk of one step together, else a step would
overwrite what its first tokens still attend to.
Source: TGI v3, SimpleAllocator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from cache.allocators.allocator_base import AllocatorBase
from cache.block_table import BlockTable, num_blocks_for
from cache.events import BlockEvent
from cache.free_list import FreeList
from cache.types import BlockHash, BlockId


class SimpleAllocator(AllocatorBase["SimpleAllocation"]):
    """`cache.allocators.base.Allocator` over a `FreeList`; `find` finds nothing and there are no events."""

    __slots__ = ("_pool", "_window_blocks")

    def __init__(self, num_blocks: int, block_size: int, window_size: int | None = None) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(block_size)
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size must be at least 1, or None for no window, got {window_size}")
        self._pool = FreeList(num_blocks)
        self._window_blocks = sys.maxsize if window_size is None else num_blocks_for(window_size, block_size)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._pool)

    def num_blocks_for(self, num_tokens: int) -> int:
        return min(super().num_blocks_for(num_tokens), self._window_blocks)

    def allocate(
        self,
        num_tokens: int,
        token_ids: Sequence[int],
        root: BlockHash,
        *,
        reuse: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> SimpleAllocation | None:
        taken = self._pool.take(self.num_blocks_for(num_tokens))
        if taken is None:
            return None
        if reuse:
            self._count_query(len(token_ids), 0)
        return SimpleAllocation(self, taken)

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        return 0

    def take_events(self) -> list[BlockEvent]:
        return []

    def held(self) -> Iterator[BlockHash]:
        return iter(())

    def check_integrity(self) -> None:
        self._pool.check_integrity([allocation.block_table for allocation in self._live])

    def _clear(self) -> None:
        """There is nothing to forget."""

    def _num_cached_blocks(self) -> int:
        return 0

    def _evictions(self) -> int:
        return 0

    def _lru_tail_age(self) -> int:
        return 0


class SimpleAllocation(BlockTable):
    """One sequence's blocks, at most those of one window."""

    __slots__ = ("_allocator",)

    def __init__(self, allocator: SimpleAllocator, block_ids: list[BlockId]) -> None:
        """Takes over the hold on `block_ids`."""
        super().__init__(allocator._pool, allocator._copies, allocator._block_size, block_ids, 0)
        self._allocator = allocator
        allocator._live.add(self)

    @property
    def capacity(self) -> int:
        return sys.maxsize if len(self._block_ids) == self._allocator._window_blocks else super().capacity

    def fork(self) -> SimpleAllocation:
        assert not self._is_free, "forked after it was freed"
        self._pool.share(self._block_ids)
        fork = SimpleAllocation(self._allocator, self._block_ids.copy())
        fork._num_computed = self._num_computed
        return fork

    def _num_blocks(self, num_tokens: int) -> int:
        return min(super()._num_blocks(num_tokens), self._allocator._window_blocks)

    def _written_next(self, num_tokens: int) -> Iterable[int]:
        num_in_window = self._num_blocks(num_tokens)
        first = self._num_computed // self._block_size
        stop = min(num_blocks_for(num_tokens, self._block_size), first + num_in_window)
        places = {block % num_in_window for block in range(first, stop)}
        return sorted(place for place in places if place < len(self._block_ids))

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        """Nothing becomes findable."""

    def _release_blocks(self) -> None:
        self._allocator._live.remove(self)
        self._pool.release(self._block_ids)
