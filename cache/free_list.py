"""A pool without a cache: the last block released is taken first.

Source: TGI v3, SimpleAllocator and RadixAllocator; their documented block ids come from this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.block_table import Pool, count_occurrences
from cache.types import BlockId


class FreeList(Pool):
    """Blocks are free, or held by as many tables as their ref count says."""

    __slots__ = ("_free", "_refs")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = [BlockId(block_id) for block_id in range(1, num_blocks)]
        self._refs = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[BlockId] | None:
        """Take the last `count` blocks of the list, in its order, or return None and change nothing."""
        rest = len(self._free) - count
        if rest < 0:
            return None
        taken = self._free[rest:]
        del self._free[rest:]
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is shared but not held"
            self._refs[block_id] += 1

    def is_shared(self, block_id: BlockId) -> bool:
        return self._refs[block_id] > 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is released but not held"
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                self._free.append(block_id)

    def clear(self) -> None:
        """Do nothing: no block is findable."""

    def check_integrity(self, tables: Sequence[Sequence[BlockId]], elsewhere: Sequence[BlockId] = ()) -> None:
        """Assert that every block is in one place: free, held by as many `tables` as it counts, or `elsewhere`.

        `tables` may name blocks that are elsewhere. Linear.
        """
        occurrences = count_occurrences(tables, self.num_blocks)
        for block_id in elsewhere:
            occurrences[block_id] = 0
        assert self._refs == occurrences, "ref counts differ from the occurrences in block tables"
        held = [BlockId(b) for b, refs in enumerate(self._refs) if refs]
        places = sorted([*self._free, *elsewhere, *held])
        assert places == list(range(1, self.num_blocks)), f"a block is lost or in two places: {places}"
