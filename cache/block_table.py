"""What every allocator's allocation does alike: the block table of one sequence, its room, and copy-on-write.

A fork shares every block of its sequence. A block is written only while one table holds it: `extend` first replaces
the shared blocks that the next step writes, and notes a copy for one that is partly written already.

    after fork   a: [ 7 ][ 12 ][ 3* ]      b: [ 7 ][ 12 ][ 3* ]       * holds 5 of 16 tokens, both tables hold it
    b.extend     a: [ 7 ][ 12 ][ 3* ]      b: [ 7 ][ 12 ][ 9* ]       copy 3 -> 9
    a.extend     a: [ 7 ][ 12 ][ 3* ]                                 3 is a's own now: nothing to copy

Source: Aphrodite / vLLM v0, CopyOnWriteTracker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from cache.allocators.base import BlockCopy
from cache.types import BlockId


class Pool(Protocol):
    """What a block table asks of the blocks it is made of."""

    def take(self, count: int) -> list[BlockId] | None:
        """Hold `count` blocks that no other table holds, or None and nothing changed."""

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """One more table holds these blocks."""

    def is_shared(self, block_id: BlockId) -> bool:
        """Whether more than one table holds the block."""

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """One table less holds these blocks."""


class BlockTable(ABC):
    """The part of `cache.allocators.base.Allocation` that does not depend on how blocks are found again."""

    __slots__ = ("_block_ids", "_block_size", "_copies", "_is_free", "_num_cached_tokens", "_num_computed", "_pool")

    def __init__(
        self, pool: Pool, copies: list[BlockCopy], block_size: int, block_ids: list[BlockId], num_cached_tokens: int
    ) -> None:
        """`copies` is the list on which the allocator collects what the engine has to copy."""
        self._pool = pool
        self._copies = copies
        self._block_size = block_size
        self._block_ids = block_ids
        self._num_cached_tokens = num_cached_tokens
        self._num_computed = num_cached_tokens
        self._is_free = False

    @property
    def block_table(self) -> Sequence[BlockId]:
        return self._block_ids

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens

    @property
    def capacity(self) -> int:
        return len(self._block_ids) * self._block_size

    def slots(self, start: int, stop: int) -> list[int]:
        assert 0 <= start <= stop <= self.capacity, f"slots {start}..{stop} of {self.capacity}"
        block_ids, size = self._block_ids, self._block_size
        slots: list[int] = []
        while start < stop:
            block, offset = divmod(start, size)
            first = block_ids[block % len(block_ids)] * size + offset
            count = min(size - offset, stop - start)
            slots.extend(range(first, first + count))
            start += count
        return slots

    def extend(self, num_tokens: int) -> bool:
        assert not self._is_free, "extended after it was freed"
        block_ids, pool = self._block_ids, self._pool
        shared = [index for index in self._written_next(num_tokens) if pool.is_shared(block_ids[index])]
        num_new = max(0, self._num_blocks(num_tokens) - len(block_ids))
        if not shared and not num_new:
            return True
        taken = pool.take(len(shared) + num_new)
        if taken is None:
            return False
        for index, own in zip(shared, taken, strict=False):
            source, block_ids[index] = block_ids[index], own
            if index * self._block_size < self._num_computed:
                self._copies.append(BlockCopy(source, own))
            pool.release((source,))
        block_ids.extend(taken[len(shared) :])
        return True

    def commit(self, token_ids: Sequence[int], num_computed: int) -> None:
        assert not self._is_free, "committed after it was freed"
        assert self._num_computed <= num_computed <= min(len(token_ids), self.capacity), (
            f"{num_computed} tokens committed after {self._num_computed}, "
            f"of {len(token_ids)} in blocks for {self.capacity}"
        )
        self._num_computed = num_computed
        self._commit_blocks(token_ids, num_computed // self._block_size)

    def free(self) -> None:
        assert not self._is_free, "freed twice"
        self._is_free = True
        self._release_blocks()

    def _num_blocks(self, num_tokens: int) -> int:
        """Blocks that a table for `num_tokens` tokens has."""
        return num_blocks_for(num_tokens, self._block_size)

    def _written_next(self, num_tokens: int) -> Iterable[int]:
        """Places in the table that the tokens from the first one not computed up to `num_tokens` fall into."""
        stop = min(num_blocks_for(num_tokens, self._block_size), len(self._block_ids))
        return range(self._num_computed // self._block_size, stop)

    @abstractmethod
    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        """The first `num_full` blocks are full and written: make them findable."""

    @abstractmethod
    def _release_blocks(self) -> None:
        """Give every block back."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
