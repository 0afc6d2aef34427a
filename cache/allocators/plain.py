"""No prefix cache: the allocator with caching off, and for models with a sliding window.

Source: TGI v3, SimpleAllocator and RadixAllocator; their documented block ids come from the order of the free list.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from cache.allocators.base import Allocation, Allocator
from cache.types import BlockHash, BlockId


class FreeListAllocator(Allocator):
    """Blocks are free, or held by as many tables as their ref count. The last one released is taken first."""

    __slots__ = ("_free",)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._free = [BlockId(block_id) for block_id in range(1, num_blocks)]

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def _take(self, count: int) -> list[BlockId] | None:
        """Take the last `count` blocks of the list, in its order."""
        rest = len(self._free) - count
        if rest < 0:
            return None
        taken = self._free[rest:]
        del self._free[rest:]
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def _release(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is released but not held"
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                self._free.append(block_id)

    def _check_places(self, elsewhere: Sequence[BlockId]) -> None:
        """Assert that every block is free, or held by as many tables as its ref count, or `elsewhere`."""
        occurrences = self._occurrences()
        for block_id in elsewhere:
            occurrences[block_id] = 0
        assert self._refs == occurrences, "ref counts differ from the occurrences in block tables"
        held = [BlockId(b) for b, refs in enumerate(self._refs) if refs]
        places = sorted([*self._free, *elsewhere, *held])
        assert places == list(range(1, self.num_blocks)), f"a block is lost or in two places: {places}"


class PlainAllocator(FreeListAllocator):
    """An `Allocator` that finds nothing and has no events.

    With a window, a sequence holds the blocks of one window at most. Its tokens are written round in them:

        window_size 6, block_size 2      block_table  [ 7 ][ 8 ][ 9 ]
        token  0  1  2  3  4  5  6  7    slot  14 15 16 17 18 19 14 15

    `window_size` must cover the model's window and the longest chunk of a step. With a smaller window, a step would
    overwrite tokens that its first tokens attend to.
    """

    __slots__ = ("_window_blocks",)

    def __init__(self, num_blocks: int, block_size: int, window_size: int | None = None) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(num_blocks, block_size)
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size must be at least 1, or None for no window, got {window_size}")
        self._window_blocks = sys.maxsize if window_size is None else -(-window_size // block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        return min(super().num_blocks_for(num_tokens), self._window_blocks)

    def check_integrity(self) -> None:
        self._check_places(())

    def _allocate(
        self, num_tokens: int, token_ids: Sequence[int], root: BlockHash, reuse: bool, chain: Sequence[BlockHash] | None
    ) -> PlainAllocation | None:
        taken = self._take(self.num_blocks_for(num_tokens))
        return None if taken is None else PlainAllocation(self, taken)

    def _forget_all(self) -> None:
        """Do nothing: no block is findable."""


class PlainAllocation(Allocation):
    """One sequence's blocks, at most those of one window."""

    __slots__ = ()

    _allocator: PlainAllocator

    @property
    def capacity(self) -> int:
        return sys.maxsize if len(self._block_ids) == self._allocator._window_blocks else super().capacity

    def _written_next(self, num_tokens: int) -> Iterable[int]:
        num_in_window = self._allocator.num_blocks_for(num_tokens)
        first = self._num_computed // self._block_size
        stop = min(-(-num_tokens // self._block_size), first + num_in_window)
        indices = {block % num_in_window for block in range(first, stop)}
        return sorted(index for index in indices if index < len(self._block_ids))
