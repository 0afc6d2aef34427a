"""No prefix cache: the allocator with caching off, and for models with a sliding window.

Source: TGI v3, SimpleAllocator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from cache.allocators.base import Allocator
from cache.block_table import Allocation, num_blocks_for
from cache.free_list import FreeList
from cache.types import BlockHash, BlockId


class PlainAllocator(Allocator):
    """An `Allocator` over a `FreeList`; `find` finds nothing and there are no events.

    With a window, a sequence holds the blocks of one window however long it grows, and its tokens go round in them:

        window_size 6, block_size 2      block_table  [ 7 ][ 8 ][ 9 ]
        token  0  1  2  3  4  5  6  7    slot  14 15 16 17 18 19 14 15

    `window_size` must cover the model's window and the longest chunk of a step. A smaller one would let a step
    overwrite tokens that its first ones attend to.
    """

    __slots__ = ("_window_blocks",)

    def __init__(self, num_blocks: int, block_size: int, window_size: int | None = None) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(FreeList(num_blocks), block_size)
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size must be at least 1, or None for no window, got {window_size}")
        self._window_blocks = sys.maxsize if window_size is None else num_blocks_for(window_size, block_size)

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
    ) -> PlainAllocation | None:
        taken = self._pool.take(self.num_blocks_for(num_tokens))
        if taken is None:
            return None
        if reuse:
            self._count_query(len(token_ids), 0)
        return PlainAllocation(self, taken)

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        return 0


class PlainAllocation(Allocation):
    """One sequence's blocks, at most those of one window."""

    __slots__ = ("_window_blocks",)

    def __init__(self, allocator: PlainAllocator, block_ids: list[BlockId]) -> None:
        """Take over the hold on `block_ids`."""
        super().__init__(allocator._pool, allocator._live, allocator._block_size, block_ids, 0)
        self._window_blocks = allocator._window_blocks

    @property
    def capacity(self) -> int:
        return sys.maxsize if len(self._block_ids) == self._window_blocks else super().capacity

    def _num_blocks(self, num_tokens: int) -> int:
        return min(super()._num_blocks(num_tokens), self._window_blocks)

    def _written_next(self, num_tokens: int) -> Iterable[int]:
        num_in_window = self._num_blocks(num_tokens)
        first = self._num_computed // self._block_size
        stop = min(num_blocks_for(num_tokens, self._block_size), first + num_in_window)
        places = {block % num_in_window for block in range(first, stop)}
        return sorted(place for place in places if place < len(self._block_ids))

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        """Do nothing: no block becomes findable."""
