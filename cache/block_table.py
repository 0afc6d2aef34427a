"""One sequence's hold on a pool of blocks: its block table, and copy-on-write.

Source: Aphrodite / vLLM v0, CopyOnWriteTracker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from cache.events import EventLog
from cache.types import NULL_BLOCK, BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The engine must copy the KV of `source` to `destination`, in the order given, before the next forward."""

    source: BlockId
    destination: BlockId


class Pool(ABC):
    """Blocks 1 .. num_blocks - 1 of the KV memory, which block tables hold; the null block 0 is never handed out."""

    __slots__ = ("copies", "events", "evictions", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.events = EventLog()
        self.evictions = 0
        self.copies: list[BlockCopy] = []
        """Copies that the engine has to make."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that `take` could give, evictable ones included."""

    @property
    def num_cached_blocks(self) -> int:
        """Distinct hashes that are findable."""
        return 0

    @property
    def lru_tail_age(self) -> int:
        return 0

    def held(self) -> Iterator[BlockHash]:
        """Return every findable hash, parents before children."""
        return iter(())

    @abstractmethod
    def take(self, count: int) -> list[BlockId] | None:
        """Hold `count` blocks that no other table holds, or return None and change nothing."""

    @abstractmethod
    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Hold these blocks for one more table."""

    @abstractmethod
    def is_shared(self, block_id: BlockId) -> bool:
        """Return whether more than one table holds the block."""

    @abstractmethod
    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one table's hold on these blocks, given in token order."""

    @abstractmethod
    def clear(self) -> None:
        """Make every block unfindable; none is held."""

    @abstractmethod
    def check_integrity(self, tables: Sequence[Sequence[BlockId]]) -> None:
        """Assert the pool's invariants; `tables` are all block tables. Linear."""


class Allocation(ABC):
    """One sequence's hold on the pool. Its owner frees it exactly once; a second `free` asserts.

        sequence tokens   |<------ num_cached_tokens ------>|<- computed by this sequence ->|<- room ->|
        block_table       [  7  ][ 12 ][  3  ][  9  ][  4  ][ 15 ][ 16 ][  2  ]
                           ^ shared: ref counted, never written          ^ own: written at slots()

    A fork shares every block of its sequence. A block is written only while one table holds it (copy-on-write):

        after fork   a: [ 7 ][ 12 ][ 3* ]      b: [ 7 ][ 12 ][ 3* ]       * holds 5 of 16 tokens, both tables hold it
        b.extend     a: [ 7 ][ 12 ][ 3* ]      b: [ 7 ][ 12 ][ 9* ]       copy 3 -> 9
        a.extend     a: [ 7 ][ 12 ][ 3* ]                                 3 is a's own: nothing to copy
    """

    __slots__ = ("_block_ids", "_block_size", "_is_free", "_live", "_num_cached_tokens", "_num_computed", "_pool")

    def __init__(
        self, pool: Pool, live: set[Allocation], block_size: int, block_ids: list[BlockId], num_cached_tokens: int
    ) -> None:
        """Take over the hold on `block_ids`. `live` has the allocator's allocations until they are freed."""
        self._pool = pool
        self._live = live
        self._block_size = block_size
        self._block_ids = block_ids
        self._num_cached_tokens = num_cached_tokens
        self._num_computed = num_cached_tokens
        self._is_free = False
        live.add(self)

    @property
    def block_table(self) -> Sequence[BlockId]:
        """Physical blocks in token order. It grows at its end; readers must not change it."""
        return self._block_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found cached at `allocate`: always fewer than the prompt has."""
        return self._num_cached_tokens

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held."""
        return len(self._block_ids) * self._block_size

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the pool positions (block id * block size + offset) of tokens start..stop-1, stop <= capacity."""
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
        """Make room for `num_tokens` tokens in total, and make the blocks that will be written this sequence's own.

        Call it before every step that writes, with the number of tokens that will be computed after it; after
        `allocate` it may be left out as long as nothing was forked. False: it does not fit and nothing has changed.
        A shared block that would be written is replaced by a copy (see `Allocator.take_copies`).
        """
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
                pool.copies.append(BlockCopy(source, own))
            pool.release((source,))
        block_ids.extend(taken[len(shared) :])
        return True

    def commit(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Make full blocks findable: the KV of token_ids[:num_computed] is written.

        `token_ids` are all tokens of the sequence so far, prompt and output; those committed earlier are unchanged.
        """
        assert not self._is_free, "committed after it was freed"
        assert self._num_computed <= num_computed <= min(len(token_ids), self.capacity), (
            f"{num_computed} tokens committed after {self._num_computed}, "
            f"of {len(token_ids)} in blocks for {self.capacity}"
        )
        self._num_computed = num_computed
        self._commit_blocks(token_ids, num_computed // self._block_size)

    def fork(self) -> Self:
        """Return another sequence with the same computed tokens, sharing every block. Never fails: it takes no block.

        Commit all computed tokens before. Afterwards both sequences call `extend` before they write.
        """
        assert not self._is_free, "forked after it was freed"
        self._pool.share(self._block_ids)
        fork = copy(self)
        fork._block_ids = self._block_ids.copy()
        self._live.add(fork)
        return fork

    def free(self) -> None:
        """Release every block, tail first. Committed blocks stay findable until they are evicted."""
        assert not self._is_free, "freed twice"
        self._is_free = True
        self._live.remove(self)
        self._pool.release(self._block_ids)

    def _num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks in a table for `num_tokens` tokens."""
        return num_blocks_for(num_tokens, self._block_size)

    def _written_next(self, num_tokens: int) -> Iterable[int]:
        """Return the places in the table of the tokens from the first uncomputed one up to `num_tokens`."""
        stop = min(num_blocks_for(num_tokens, self._block_size), len(self._block_ids))
        return range(self._num_computed // self._block_size, stop)

    @abstractmethod
    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        """Make the first `num_full` blocks findable: they are full and written."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def count_occurrences(tables: Iterable[Sequence[BlockId]], num_blocks: int) -> list[int]:
    """Return in how many tables each block stands; assert that none stands twice in one, and the null block in none."""
    occurrences = [0] * num_blocks
    for table in tables:
        assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
        for block_id in table:
            occurrences[block_id] += 1
    assert occurrences[NULL_BLOCK] == 0, "the null block was handed out"
    return occurrences
