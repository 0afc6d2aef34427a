"""Prefixes in a radix trie: by tokens with blocks of one token, by whole blocks otherwise.

Source: TGI v3, RadixAllocator. Ours differs: blocks are findable after their commit, not after the sequence ends, and
an allocation that cannot fit evicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from cache.allocators.base import Allocator
from cache.allocators.radix_trie import Key, Match, RadixNode, RadixTrie
from cache.block_table import Allocation, num_blocks_for
from cache.free_list import FreeList
from cache.hashing import extend_chain
from cache.types import BlockHash, BlockId


class RadixPool(FreeList):
    """A free list, and the trie that owns blocks once they are committed.

    If another sequence has inserted the same tokens first, the trie keeps the first blocks. A later sequence keeps its
    duplicates, which go free with it. Its next blocks are inserted below the first blocks, and hold those.

        trie           [ 4 ][ 5 ][ 6 ]--[ 11 ][ 12 ]         block_table   [ 4 ][ 5 ][ 9 ][ 11 ][ 12 ][ 13 ]
                                                              9 duplicates 6 and is its own, as is 13, not yet full
    """

    __slots__ = ("trie",)

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.trie = RadixTrie()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + self.trie.num_evictable

    @property
    def num_cached_blocks(self) -> int:
        return self.trie.num_blocks

    @property
    def lru_tail_age(self) -> int:
        oldest = self.trie.oldest_access()
        return 0 if oldest is None else self.trie.time - oldest

    def held(self) -> Iterator[BlockHash]:
        return (block_hash for node in self.trie.nodes() for block_hash in node.hashes)

    def take(self, count: int) -> list[BlockId] | None:
        if count > self.num_free_blocks:
            return None
        if count > len(self._free):
            evicted = self.trie.evict(count - len(self._free))
            self.evictions += len(evicted.block_ids)
            self.events.removed(evicted.hashes)
            self._free.extend(evicted.block_ids)
        return super().take(count)

    def share(self, block_ids: Iterable[BlockId]) -> None:
        super().share(filter(self._is_in_tables, block_ids))

    def release(self, block_ids: Iterable[BlockId]) -> None:
        super().release(list(filter(self._is_in_tables, block_ids)))

    def transfer(self, block_ids: Iterable[BlockId]) -> None:
        """Give blocks that one table holds to the trie."""
        for block_id in block_ids:
            assert self._refs[block_id] == 1, f"block {block_id} stands in {self._refs[block_id]} tables, not in one"
            self._refs[block_id] = 0

    def clear(self) -> None:
        self._free.extend(self.trie.evict(self.trie.num_blocks).block_ids)
        self.events.cleared()

    def _is_in_tables(self, block_id: BlockId) -> bool:
        return self._refs[block_id] > 0


class RadixAllocator(Allocator):
    """An `Allocator` over a `RadixTrie`."""

    __slots__ = ()

    _pool: RadixPool

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(RadixPool(num_blocks), block_size)

    def allocate(
        self,
        num_tokens: int,
        token_ids: Sequence[int],
        root: BlockHash,
        *,
        reuse: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> RadixAllocation | None:
        pool, trie = self._pool, self._pool.trie
        match = self._match(token_ids, root) if reuse else trie.match(trie.root(root), ())
        found = match.block_ids
        num_new = max(0, num_blocks_for(num_tokens, self._block_size) - len(found))
        if num_new > pool.num_free_blocks - match.num_evictable:
            return None
        node = trie.hold(match)
        taken = pool.take(num_new)
        assert taken is not None, f"{num_new} blocks were free before the match was held"
        if reuse:
            self._count_query(len(token_ids), len(found) * self._block_size)
        allocation = RadixAllocation(self, root, [*found, *taken], len(found), node)
        allocation.caches_duplicates = reuse
        allocation.hashes.extend(hashes or ())
        return allocation

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        return len(self._match(token_ids, root).block_ids) * self._block_size

    def check_integrity(self) -> None:
        trie, live = self._pool.trie, [table for table in self._live if isinstance(table, RadixAllocation)]
        trie.check_integrity([allocation.node for allocation in live])
        in_trie = [block_id for node in trie.nodes() for block_id in node.block_ids]
        self._pool.check_integrity([allocation.block_table for allocation in live], in_trie)
        held = {block_id for node in trie.nodes() if node.num_holders for block_id in node.block_ids}
        for allocation in live:
            shared = set(allocation.block_table) & set(in_trie)
            assert shared <= held, f"blocks {shared - held} of a live table could be evicted"

    def _match(self, token_ids: Sequence[int], root: BlockHash) -> Match:
        """Match all but the last token, which is left to compute."""
        num_blocks = max(0, len(token_ids) - 1) // self._block_size
        return self._pool.trie.match(self._pool.trie.root(root), block_keys(token_ids, 0, num_blocks, self._block_size))


class RadixAllocation(Allocation):
    """One sequence's blocks. It holds `node`, below which it inserts the blocks it commits next.

    Without `caches_duplicates` it inserts nothing from the first block on that the trie has already. A sequence that
    reads nothing duplicates every block of a cached prompt; with a hold on the originals it would need twice its room.
    """

    __slots__ = ("_has_stopped", "_num_inserted", "_root", "caches_duplicates", "hashes", "node")

    _pool: RadixPool

    def __init__(
        self, allocator: RadixAllocator, root: BlockHash, block_ids: list[BlockId], num_found: int, node: RadixNode
    ) -> None:
        """Take over the holds on `node` and on `block_ids`; the first `num_found` are in the trie."""
        size = allocator._block_size
        super().__init__(allocator._pool, allocator._live, size, block_ids, num_found * size)
        self._root = root
        self._num_inserted = num_found
        self._has_stopped = False
        self.hashes: list[BlockHash] = []
        self.node = node
        self.caches_duplicates = True

    def fork(self) -> Self:
        fork = super().fork()
        self._pool.trie.hold_below(self.node, None)
        fork.hashes = self.hashes[: self._num_inserted]  # uncomputed tokens may differ
        return fork

    def free(self) -> None:
        super().free()
        self._pool.trie.release(self.node)

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        first, size, trie = self._num_inserted, self._block_size, self._pool.trie
        if num_full <= first or self._has_stopped:
            return
        extend_chain(self.hashes, self._root, token_ids, num_full, size)
        keys = block_keys(token_ids, first, num_full, size)
        block_ids, hashes = self._block_ids[first:num_full], self.hashes[first:num_full]
        num_known = 0
        if not trie.grow(self.node, keys, block_ids, hashes):
            above = self.node
            if not self.caches_duplicates and trie.match(above, keys).block_ids:
                self._has_stopped = True  # for good: a fork may share the blocks when the others are evicted
                return
            num_known, self.node = trie.insert(above, keys, block_ids, hashes)
            trie.hold_below(self.node, above)
        self._pool.transfer(block_ids[num_known:])
        self._pool.events.stored(hashes[num_known:])
        self._num_inserted = num_full


def block_keys(token_ids: Sequence[int], start: int, stop: int, block_size: int) -> Sequence[Key]:
    """Return the keys of blocks start..stop-1: a token, or the tuple of a block's tokens."""
    if block_size == 1:
        return token_ids[start:stop]
    positions = range(start * block_size, stop * block_size, block_size)
    return [tuple(token_ids[position : position + block_size]) for position in positions]
