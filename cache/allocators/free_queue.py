"""The free blocks in order of eviction, which is the order in which they were released.

Source: vLLM v1, FreeKVCacheBlockQueue.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cache.types import NULL_BLOCK, BlockId


# Why no other order: to evict the blocks of an answer first was tried, and the next turn computed them again. Dynamo
# tried TinyLFU for a tier, and its threshold of 8 uses hid that tier. A block is of no use without its parents, so
# tails are released before heads.
class FreeQueue:
    """Blocks 1 .. num_blocks - 1, at first in the order of their ids. The caller tracks which blocks are in it.

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
        """Yield blocks in order of eviction; the first is the next victim."""
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            yield block_id
            block_id = self._next[block_id]

    def pop_first(self, count: int) -> list[BlockId]:
        """Take the next `count` victims; the queue must have that many."""
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
        """Take these blocks from any place in the queue.

        A chain is released tail first, so the queue often has it backwards in one run: a, b, c as .. c b a ..
        Only the two ends of each run are relinked.
        """
        next_, previous = self._next, self._previous
        ids = iter(block_ids)
        block_id = next(ids, NULL_BLOCK)
        while block_id:
            after = next_[block_id]
            for following in ids:
                if next_[following] != block_id:
                    break
                block_id = following
            else:
                following = NULL_BLOCK
            before = previous[block_id]
            next_[before] = after
            previous[after] = before
            block_id = following
        self._size -= len(block_ids)

    def extend(self, block_ids: Sequence[BlockId]) -> None:
        """Put blocks at the end, in the order given: the first of them will be evicted first."""
        next_, previous = self._next, self._previous
        last = previous[NULL_BLOCK]
        for block_id in block_ids:
            next_[last] = block_id
            previous[block_id] = last
            last = block_id
        next_[last] = NULL_BLOCK
        previous[NULL_BLOCK] = last
        self._size += len(block_ids)

    def check_integrity(self) -> None:
        """Assert that both directions agree and that the size is the number of blocks linked. Linear."""
        linked = [NULL_BLOCK, *itertools.islice(self, self._size + 1)]
        assert len(linked) == self._size + 1, f"{len(linked) - 1} or more blocks are linked, {self._size} counted"
        for last, block_id in zip(linked, [*linked[1:], NULL_BLOCK], strict=True):
            assert self._previous[block_id] == last, f"block {block_id} follows {self._previous[block_id]}, not {last}"
