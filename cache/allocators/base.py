"""The contract of every allocator: it owns the pool of KV blocks and gives each sequence an `Allocation`.

"Does not fit" is a value, not an exception, and changes nothing. A broken invariant is an AssertionError.
Source of copy-on-write: Aphrodite / vLLM v0, CopyOnWriteTracker.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, Self

from cache.events import BlockEvent, Removed, Stored
from cache.types import NULL_BLOCK, BlockHash, BlockId


class BlockCopy(NamedTuple):
    """The engine must copy the KV of `source` to `destination`, in the order given, before the next forward."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start, and gauges. `num_free_blocks` includes evictable blocks that keep their hash."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    hit_tokens: int
    evictions: int
    next_victim_age: int
    """Allocations since the next victim was used (`radix` counts commits too); 0 while nothing needs to be evicted."""


class Allocator(ABC):
    """Owner of the pool of blocks 1 .. num_blocks - 1; the null block 0 is never handed out.

    The life of a block: free -> taken by allocate/extend -> written by a forward -> committed (findable, if full)
    -> released by free -> still findable while free -> evicted when taken again.

    Only `commit` makes a block findable, after the forward that wrote it has returned. A failed step never commits.
    """

    __slots__ = (
        *("_events", "_evictions", "_hit_tokens", "_live", "_owed_copies", "_refs"),
        *("block_size", "num_blocks"),
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        """The number of block tables that contain each block, if positive."""
        self._live: set[Allocation] = set()
        self._owed_copies: list[BlockCopy] = []
        self._events: list[Iterable[BlockEvent]] = []
        self._evictions = 0
        self._hit_tokens = 0

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take, evictable ones included."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence of `num_tokens` holds."""
        return -(-num_tokens // self.block_size)

    def allocate(
        self,
        num_tokens: int,
        token_ids: Sequence[int],
        root: BlockHash,
        *,
        reuse: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> Allocation | None:
        """Return room for `num_tokens` (>= 1) tokens of a sequence that begins with `token_ids`, or None.

        `root` (see `cache.hashing`) separates tenants, models and LoRA adapters. At least one token of `token_ids` is
        always left to compute. `reuse=False` reads nothing from the cache (prompt logprobs) but still writes.
        `hashes` is `hash_chain(root, token_ids, block_size)` if the caller has it: a waiting request is hashed once.
        The allocation holds more than `num_tokens` when more is found cached.
        """
        allocation = self._allocate(num_tokens, token_ids, root, reuse, hashes)
        if allocation is not None:
            self._hit_tokens += allocation.num_cached_tokens
        return allocation

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        """Return the tokens that `allocate` would find cached. Changes nothing, not even the order of eviction."""
        return 0

    def find_held(self, token_ids: Sequence[int], root: BlockHash, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the blocks that `find` counts are in a table. The others count as free blocks, too."""
        return 0

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order. Call it after every step."""
        runs, self._events = self._events, []
        return list(itertools.chain.from_iterable(runs))

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies that the engine owes since the last call, in order."""
        copies, self._owed_copies = self._owed_copies, []
        return copies

    def reset(self) -> bool:
        """Forget everything cached, and the events so far. False, and nothing changed, while any allocation lives."""
        if self._live:
            return False
        self._events.clear()
        self._forget_all()
        return True

    def stats(self) -> CacheStats:
        num_cached, age = self._cache_gauges()
        return CacheStats(self.num_blocks, self.num_free_blocks, num_cached, self._hit_tokens, self._evictions, age)

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert every invariant of the pool, in linear time; for tests and idle time."""

    # --- for subclasses and allocations -----------------------------------------------------------------------------

    @abstractmethod
    def _allocate(
        self, num_tokens: int, token_ids: Sequence[int], root: BlockHash, reuse: bool, chain: Sequence[BlockHash] | None
    ) -> Allocation | None: ...

    @abstractmethod
    def _take(self, count: int) -> list[BlockId] | None:
        """Hold `count` blocks that no other table holds, or return None and change nothing."""

    def _share(self, block_ids: Iterable[BlockId]) -> None:
        """Hold these blocks for one more table."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is shared but not held"
            self._refs[block_id] += 1

    @abstractmethod
    def _release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one table's hold on these blocks, given in token order."""

    @abstractmethod
    def _forget_all(self) -> None:
        """Make every block unfindable; none is held."""

    def _cache_gauges(self) -> tuple[int, int]:
        """Return `num_cached_blocks` and `next_victim_age` of the statistics."""
        return 0, 0

    def _note(self, kind: type[Stored] | type[Removed], hashes: list[BlockHash]) -> None:
        """Record an event for each hash: Stored with parents first, Removed with children first."""
        if hashes:
            self._events.append(map(kind, hashes))

    def _occurrences(self) -> list[int]:
        """Count the tables that contain each block: at most once in each, and the null block in none."""
        occurrences = [0] * self.num_blocks
        for table in (allocation.block_table for allocation in self._live):
            assert len(set(table)) == len(table), f"a block is twice in one table: {table}"
            for block_id in table:
                occurrences[block_id] += 1
        assert occurrences[NULL_BLOCK] == 0, "the null block was handed out"
        return occurrences


class Allocation:
    """One sequence's hold on the pool. Its owner frees it exactly once; a second `free` asserts.

    A friend of its allocator: it reads and changes the allocator's private fields, and no other class does.

        sequence tokens   |<------ num_cached_tokens ------>|<- computed by this sequence ->|<- room ->|
        block_table       [  7  ][ 12 ][  3  ][  9  ][  4  ][ 15 ][ 16 ][  2  ]
                           ^ shared: ref counted, never written          ^ own: written at slots()

    A fork shares every block of its sequence. A block is written only while one table holds it (copy-on-write):

        after fork   a: [ 7 ][ 12 ][ 3* ]      b: [ 7 ][ 12 ][ 3* ]       * holds 5 of 16 tokens, both tables hold it
        b.extend     a: [ 7 ][ 12 ][ 3* ]      b: [ 7 ][ 12 ][ 9* ]       copy 3 -> 9
        a.extend     a: [ 7 ][ 12 ][ 3* ]                                 3 is a's own: nothing to copy
    """

    __slots__ = ("_allocator", "_block_ids", "_block_size", "_is_free", "_num_computed", "num_cached_tokens")

    def __init__(self, allocator: Allocator, block_ids: list[BlockId], num_cached_tokens: int = 0) -> None:
        """Take over the hold on `block_ids`."""
        self._allocator = allocator
        self._block_size = allocator.block_size
        self._block_ids = block_ids
        self.num_cached_tokens = num_cached_tokens
        """Prompt tokens found cached at `allocate`: always fewer than the prompt has."""
        self._num_computed = num_cached_tokens
        self._is_free = False
        allocator._live.add(self)

    @property
    def block_table(self) -> Sequence[BlockId]:
        """Physical blocks in token order. It grows at its end; readers must not change it."""
        return self._block_ids

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held."""
        return len(self._block_ids) * self._block_size

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the pool positions (block id * block size + offset) of tokens start..stop-1, stop <= capacity."""
        assert 0 <= start <= stop <= self.capacity, f"slots {start}..{stop} of {self.capacity}"
        block_ids, size = self._block_ids, self._block_size
        if stop - start == 1:  # a decode
            return [block_ids[start // size % len(block_ids)] * size + start % size]
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
        block_ids, allocator, refs, size = self._block_ids, self._allocator, self._allocator._refs, self._block_size
        first = self._num_computed // size
        if first < len(block_ids) and num_tokens <= (first + 1) * size and refs[block_ids[first]] == 1:  # most decodes
            return True
        shared = [index for index in self._written_next(num_tokens) if refs[block_ids[index]] > 1]
        num_new = max(0, allocator.num_blocks_for(num_tokens) - len(block_ids))
        if not shared and not num_new:
            return True
        taken = allocator._take(len(shared) + num_new)
        if taken is None:
            return False
        for index, own in zip(shared, taken, strict=False):
            source, block_ids[index] = block_ids[index], own
            if index * size < self._num_computed:
                allocator._owed_copies.append(BlockCopy(source, own))
            allocator._release((source,))
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
        num_full, num_before = num_computed // self._block_size, self._num_computed // self._block_size
        self._num_computed = num_computed
        if num_full > num_before:
            self._commit_blocks(token_ids, num_full)

    def fork(self) -> Self:
        """Return another sequence with the same computed tokens, sharing every block. Never fails: it takes no block.

        Commit all computed tokens before. Afterwards both sequences call `extend` before they write.
        """
        assert not self._is_free, "forked after it was freed"
        self._allocator._share(self._block_ids)
        fork = copy(self)
        fork._block_ids = self._block_ids.copy()
        self._allocator._live.add(fork)
        return fork

    def free(self) -> None:
        """Release every block, tail first. Committed blocks stay findable until they are evicted."""
        assert not self._is_free, "freed twice"
        self._is_free = True
        self._allocator._live.remove(self)
        self._allocator._release(self._block_ids)

    def _written_next(self, num_tokens: int) -> Iterable[int]:
        """Return the indices in the block table of the tokens from the first uncomputed one up to `num_tokens`."""
        stop = min(self._allocator.num_blocks_for(num_tokens), len(self._block_ids))
        return range(self._num_computed // self._block_size, stop)

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        """Make the first `num_full` blocks findable, which are full and written, if the allocator finds any."""
