"""Free blocks without a memory: the last one given back is taken first. What is not free stands in k block tables.

Source: TGI v3, SimpleAllocator and RadixAllocator, whose documented block ids come from this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.types import NULL_BLOCK, BlockId


class FreeList:
    """Blocks 1 .. num_blocks - 1. A `cache.block_table.Pool`."""

    __slots__ = ("_free", "_refs")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        self._free = [BlockId(block_id) for block_id in range(1, num_blocks)]
        self._refs = [0] * num_blocks

    def __len__(self) -> int:
        return len(self._free)

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    def take(self, count: int) -> list[BlockId] | None:
        """The last `count` blocks of the list, in its order; each is held once. None: there are fewer."""
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
            assert self._refs[block_id] > 0, f"block {block_id} is shared but nobody holds it"
            self._refs[block_id] += 1

    def is_shared(self, block_id: BlockId) -> bool:
        return self._refs[block_id] > 1

    def is_held(self, block_id: BlockId) -> bool:
        return self._refs[block_id] > 0

    def release(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is released but nobody holds it"
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                self._free.append(block_id)

    def hand_over(self, block_ids: Iterable[BlockId]) -> None:
        """Blocks that one table holds get another owner, who brings them back with `put_back`."""
        for block_id in block_ids:
            assert self._refs[block_id] == 1, f"block {block_id} stands in {self._refs[block_id]} tables, not in one"
            self._refs[block_id] = 0

    def put_back(self, block_ids: Iterable[BlockId]) -> None:
        self._free.extend(block_ids)

    def check_integrity(self, tables: Iterable[Sequence[BlockId]], elsewhere: Sequence[BlockId] = ()) -> None:
        """Assert that every block is free, in `tables` as often as it is held, or `elsewhere`, and only one of these.

        `tables` may name blocks that are elsewhere. Linear.
        """
        occurrences = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block_id in table:
                occurrences[block_id] += 1
        assert occurrences[NULL_BLOCK] == 0, "the null block was handed out"
        for block_id in elsewhere:
            occurrences[block_id] = 0
        assert self._refs == occurrences, "ref counts differ from the occurrences in block tables"
        held = [BlockId(b) for b, refs in enumerate(self._refs) if refs]
        places = sorted([*self._free, *elsewhere, *held])
        assert places == list(range(1, self.num_blocks)), f"a block is lost or in two places: {places}"
