"""Prefixes are found in a radix trie: at token granularity with blocks of one token, by whole blocks otherwise.

A block belongs to the trie once it is committed and before to the tables it stands in. If, when a sequence commits,
another one has put the same tokens into the trie, the trie keeps the first blocks and the sequence its own, which go
free with it; what it computes after that is filed below the blocks of the other, and holds those from eviction.

    trie           [ 4 ][ 5 ][ 6 ]--[ 11 ][ 12 ]         block_table   [ 4 ][ 5 ][ 9 ][ 11 ][ 12 ][ 13 ]
                                                          9 repeats 6 and is its own, as is 13, not yet full

Source: TGI v3, RadixAllocator. Ours differs: blocks are findable after their commit, not after the sequence ends, and
an allocation that cannot fit evicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cache.allocators.allocator_base import AllocatorBase
from cache.allocators.radix_trie import Key, Match, RadixNode, RadixTrie
from cache.block_table import BlockTable, num_blocks_for
from cache.event_log import EventLog
from cache.events import BlockEvent
from cache.free_list import FreeList
from cache.hashing import hash_chain
from cache.types import BlockHash, BlockId


class RadixPool:
    """Blocks that are free, in tables, or in the trie. A `cache.block_table.Pool`."""

    __slots__ = ("events", "evictions", "free", "trie")

    def __init__(self, num_blocks: int) -> None:
        self.free = FreeList(num_blocks)
        self.trie = RadixTrie()
        self.events = EventLog()
        self.evictions = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self.free) + self.trie.num_evictable

    def take(self, count: int) -> list[BlockId] | None:
        if count > self.num_free_blocks:
            return None
        if count > len(self.free):
            evicted = self.trie.evict(count - len(self.free))
            self.evictions += len(evicted.block_ids)
            self.events.removed(evicted.hashes)
            self.free.put_back(evicted.block_ids)
        return self.free.take(count)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        self.free.share(filter(self.free.is_held, block_ids))

    def is_shared(self, block_id: BlockId) -> bool:
        return self.free.is_shared(block_id)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        self.free.release(list(filter(self.free.is_held, block_ids)))


class RadixAllocator(AllocatorBase["RadixAllocation"]):
    """`cache.allocators.base.Allocator` over a `RadixTrie`."""

    __slots__ = ("_pool",)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(block_size)
        self._pool = RadixPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.free.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

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
        match = self._match(token_ids, root) if reuse else Match(trie.root(root))
        num_new = max(0, num_blocks_for(num_tokens, self._block_size) - match.num_blocks)
        if num_new > pool.num_free_blocks - match.num_unheld:
            return None
        found = match.block_ids
        node = trie.hold(match)
        taken = pool.take(num_new)
        assert taken is not None, f"{num_new} blocks were there and are not"
        num_cached_tokens = len(found) * self._block_size
        if reuse:
            self._count_query(len(token_ids), num_cached_tokens)
        allocation = RadixAllocation(self, root, list(hashes or ()), [*found, *taken], num_cached_tokens, node)
        allocation.files_repeats = reuse
        return allocation

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        return self._match(token_ids, root).num_blocks * self._block_size

    def take_events(self) -> list[BlockEvent]:
        return self._pool.events.take()

    def held(self) -> Iterator[BlockHash]:
        return (block_hash for node in self._pool.trie.nodes() for block_hash in node.hashes)

    def check_integrity(self) -> None:
        trie = self._pool.trie
        trie.check_integrity([allocation.node for allocation in self._live])
        in_trie = [block_id for node in trie.nodes() for block_id in node.block_ids]
        self._pool.free.check_integrity([allocation.block_table for allocation in self._live], in_trie)
        held = {block_id for node in trie.nodes() if node.num_holders for block_id in node.block_ids}
        for allocation in self._live:
            shared = set(allocation.block_table) & set(in_trie)
            assert shared <= held, f"blocks {shared - held} of a live table could be evicted"

    def _match(self, token_ids: Sequence[int], root: BlockHash) -> Match:
        """At least one token is left to compute."""
        num_blocks = max(0, len(token_ids) - 1) // self._block_size
        return self._pool.trie.match(self._pool.trie.root(root), block_keys(token_ids, 0, num_blocks, self._block_size))

    def _clear(self) -> None:
        self._pool.free.put_back(self._pool.trie.evict(self._pool.trie.num_blocks).block_ids)
        self._pool.events.cleared()

    def _num_cached_blocks(self) -> int:
        return self._pool.trie.num_blocks

    def _evictions(self) -> int:
        return self._pool.evictions

    def _lru_tail_age(self) -> int:
        oldest = self._pool.trie.oldest_access()
        return 0 if oldest is None else self._pool.trie.time - oldest


class RadixAllocation(BlockTable):
    """One sequence's blocks. It holds `node`, below which what it commits next will be filed.

    Without `files_repeats` nothing is filed from the first block on that the trie has already: a sequence that reads
    nothing repeats every block of a cached prompt, and with a hold on the originals too it would need twice its room.
    """

    __slots__ = ("_allocator", "_hashes", "_num_filed", "_root", "_stopped_filing", "files_repeats", "node")

    _pool: RadixPool

    def __init__(
        self,
        allocator: RadixAllocator,
        root: BlockHash,
        hashes: list[BlockHash],
        block_ids: list[BlockId],
        num_cached_tokens: int,
        node: RadixNode,
    ) -> None:
        """Takes over the holds on `block_ids` and on `node`."""
        super().__init__(allocator._pool, allocator._copies, allocator._block_size, block_ids, num_cached_tokens)
        self._allocator = allocator
        self._root = root
        self._hashes = hashes
        self._num_filed = num_cached_tokens // allocator._block_size
        self.node = node
        self.files_repeats = True
        self._stopped_filing = False
        allocator._live.add(self)

    def fork(self) -> RadixAllocation:
        assert not self._is_free, "forked after it was freed"
        self._pool.share(self._block_ids)
        self._pool.trie.hold_below(self.node, None)
        hashes = self._hashes[: self._num_filed]  # what is not computed may become other tokens
        fork = RadixAllocation(
            self._allocator, self._root, hashes, self._block_ids.copy(), self._num_cached_tokens, self.node
        )
        fork._num_computed = self._num_computed
        fork._num_filed = self._num_filed
        fork.files_repeats = self.files_repeats
        fork._stopped_filing = self._stopped_filing
        return fork

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        first, size, trie = self._num_filed, self._block_size, self._pool.trie
        if num_full <= first or self._stopped_filing:
            return
        if len(self._hashes) < num_full:
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes += hash_chain(parent, token_ids[len(self._hashes) * size : num_full * size], size)
        keys = block_keys(token_ids, first, num_full, size)
        block_ids, hashes = self._block_ids[first:num_full], self._hashes[first:num_full]
        num_known = 0
        if not trie.grow(self.node, keys, block_ids, hashes):
            above = self.node
            if not self.files_repeats and trie.match(above, keys).num_blocks > 0:
                self._stopped_filing = True  # for good: a fork may share the blocks by the time the others are evicted
                return
            num_known, self.node = trie.insert(above, keys, block_ids, hashes)
            trie.hold_below(self.node, above)
        self._pool.free.hand_over(block_ids[num_known:])
        self._pool.events.stored(hashes[num_known:])
        self._num_filed = num_full

    def _release_blocks(self) -> None:
        self._allocator._live.remove(self)
        self._pool.trie.release(self.node)
        self._pool.release(self._block_ids)


def block_keys(token_ids: Sequence[int], start: int, stop: int, block_size: int) -> Sequence[Key]:
    """The keys of blocks start..stop-1: a token, or the tuple of a block's tokens."""
    if block_size == 1:
        return token_ids[start:stop]
    positions = range(start * block_size, stop * block_size, block_size)
    return [tuple(token_ids[position : position + block_size]) for position in positions]
