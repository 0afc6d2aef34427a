"""The free blocks in order of eviction, which is the order in which they were released.

Source: vLLM v1, FreeKVCacheBlockQueue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cache.types import NULL_BLOCK, BlockId


class FreeQueue:
    """Blocks 1 .. num_blocks - 1, at first in the order of their ids. The caller knows which blocks are in it.

    A doubly linked list threaded through two flat lists. Every operation takes a run of blocks, at O(1) for each.

        index   0 (sentinel)   1    2    3   ...          next[0] is evicted first, previous[0] last
        next    [   3        , 2 ,  0 ,  1 ]              0 -> 3 -> 1 -> 2 -> 0

    The null block 0 is never free, so its index is the sentinel of the ring.
    """

    __slots__ = ("_next", "_previous", "_size")

    def __init__(self, num_blocks: int) -> None:
        ids = [BlockId(block_id) for block_id in range(num_blocks)]
        self._next = [*ids[1:], NULL_BLOCK]
        self._previous = [ids[-1], *ids[:-1]]
        self._size = num_blocks - 1

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[BlockId]:
        """Yield blocks in order of eviction."""
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            yield block_id
            block_id = self._next[block_id]

    @property
    def first(self) -> BlockId:
        """The next victim; the null block when the queue is empty."""
        return self._next[NULL_BLOCK]

    def pop_first(self, count: int) -> list[BlockId]:
        """Take the next `count` victims; there must be as many."""
        assert 0 <= count <= self._size, f"{count} of {self._size} free blocks"
        next_ = self._next
        taken = []
        block_id = next_[NULL_BLOCK]
        for _ in range(count):
            taken.append(block_id)
            block_id = next_[block_id]
        next_[NULL_BLOCK] = block_id
        self._previous[block_id] = NULL_BLOCK
        self._size -= count
        return taken

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """Take these blocks, wherever they are.

        A chain is released tail first, so the queue often holds it backwards in one run: a, b, c as .. c b a ..
        Relink only the two ends of each run.
        """
        next_, previous = self._next, self._previous
        block_id = NULL_BLOCK  # no block is followed by a free block 0, so the first one always begins a run
        after = NULL_BLOCK
        for following in block_ids:
            if block_id and next_[following] == block_id:
                block_id = following
                continue
            if block_id:
                before = previous[block_id]
                next_[before] = after
                previous[after] = before
            block_id = following
            after = next_[following]
        if block_id:
            before = previous[block_id]
            next_[before] = after
            previous[after] = before
        self._size -= len(block_ids)

    def extend(self, block_ids: Iterable[BlockId]) -> None:
        """Put blocks at the end, in the order given: the first of them will be evicted first."""
        next_, previous = self._next, self._previous
        last = previous[NULL_BLOCK]
        count = 0
        for block_id in block_ids:
            next_[last] = block_id
            previous[block_id] = last
            last = block_id
            count += 1
        next_[last] = NULL_BLOCK
        previous[NULL_BLOCK] = last
        self._size += count

    def check_integrity(self) -> None:
        """Assert that both directions agree and that the size is the number of blocks linked. Linear."""
        count, last = 0, NULL_BLOCK
        for block_id in self:
            assert self._previous[block_id] == last, f"block {block_id} follows {self._previous[block_id]}, not {last}"
            last = block_id
            count += 1
            assert count <= self._size, f"more than {self._size} blocks are linked"
        assert self._previous[NULL_BLOCK] == last, f"the queue ends with {self._previous[NULL_BLOCK]}, not {last}"
        assert count == self._size, f"{count} blocks are linked, {self._size} counted"
