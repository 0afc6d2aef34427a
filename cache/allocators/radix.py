"""A prefix cache in a radix trie. Its keys are tokens if a block holds one token, and whole blocks otherwise.

Source: TGI v3, RadixAllocator. TGI inserts blocks when their sequence ends; here they are findable once committed.
An allocation that cannot fit evicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from cache.allocators.base import Allocation
from cache.allocators.plain import FreeListAllocator
from cache.allocators.radix_trie import Key, Match, RadixNode, RadixTrie
from cache.events import Removed, Stored
from cache.hashing import extend_chain
from cache.types import BlockHash, BlockId


class RadixAllocator(FreeListAllocator):
    """A free list, and the trie that owns blocks once they are committed.

    Of two sequences with the same tokens, the trie keeps the blocks of the one that commits first. The other one takes
    them over when it commits, and frees its duplicates: no sequence holds more blocks than it has tokens for.
    The trie counts the holders of its blocks. Their reference counts are 0, so sharing and releasing skip them.

        trie           [ 4 ][ 5 ][ 6 ]                        block_table   [ 4 ][ 5 ][ 9 ][ 13 ]
        commit         [ 4 ][ 5 ][ 6 ]--[ 13 ]                              [ 4 ][ 5 ][ 6 ][ 13 ]       9 is free
    """

    __slots__ = ("trie",)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(num_blocks, block_size)
        self.trie = RadixTrie()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + self.trie.num_evictable

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        return len(self._match(token_ids, root).block_ids) * self.block_size

    def find_held(self, token_ids: Sequence[int], root: BlockHash, hashes: Sequence[BlockHash]) -> int:
        match = self._match(token_ids, root)
        return len(match.block_ids) - match.num_evictable

    def check_integrity(self) -> None:
        live = [allocation for allocation in self._live if isinstance(allocation, RadixAllocation)]
        self.trie.check_integrity([allocation.node for allocation in live])
        nodes = list(self.trie.nodes())
        in_trie = [block_id for node in nodes for block_id in node.block_ids]
        self._check_places(in_trie)
        held = {block_id for node in nodes if node.num_holders for block_id in node.block_ids}
        in_trie_set = set(in_trie)
        for allocation in live:
            path = [block_id for node in reversed(list(allocation.node.path())) for block_id in node.block_ids]
            assert list(allocation.block_table[: len(path)]) == path, "a table differs from the path that it holds"
            assert held.issuperset(path), "blocks of a live table could be evicted"
            assert in_trie_set.isdisjoint(allocation.block_table[len(path) :]), (
                "a table has blocks that it does not hold"
            )

    def _allocate(
        self, num_tokens: int, token_ids: Sequence[int], root: BlockHash, reuse: bool, chain: Sequence[BlockHash] | None
    ) -> RadixAllocation | None:
        match = self._match(token_ids if reuse else (), root)
        found = match.block_ids
        num_new = max(0, self.num_blocks_for(num_tokens) - len(found))
        if num_new > self.num_free_blocks - match.num_evictable:
            return None
        node = self.trie.hold(match)
        taken = self._take(num_new)
        assert taken is not None, f"{num_new} blocks were free before the match was held"
        return RadixAllocation(self, root, list(chain or ()), [*found, *taken], len(found), node)

    def _match(self, token_ids: Sequence[int], root: BlockHash) -> Match:
        """Match all tokens but the last, which must be computed."""
        num_blocks = max(0, len(token_ids) - 1) // self.block_size
        return self.trie.match(self.trie.root(root), block_keys(token_ids, 0, num_blocks, self.block_size))

    def _take(self, count: int) -> list[BlockId] | None:
        if count > self.num_free_blocks:
            return None
        if count > len(self._free):
            block_ids, hashes = self.trie.evict(count - len(self._free))
            self._evictions += len(block_ids)
            self._note(Removed, hashes)
            self._free.extend(block_ids)
        return super()._take(count)

    def _share(self, block_ids: Iterable[BlockId]) -> None:
        super()._share(block_id for block_id in block_ids if self._refs[block_id])

    def _release(self, block_ids: Iterable[BlockId]) -> None:
        super()._release([block_id for block_id in block_ids if self._refs[block_id]])

    def _store(self, block_ids: Sequence[BlockId], hashes: list[BlockHash]) -> None:
        """Record that the trie owns blocks of one table now, and counts their holders."""
        for block_id in block_ids:
            assert self._refs[block_id] == 1, f"block {block_id} stands in {self._refs[block_id]} tables, not in one"
            self._refs[block_id] = 0
        self._note(Stored, hashes)

    def _forget_all(self) -> None:
        self._free.extend(self.trie.evict(self.trie.num_blocks)[0])

    def _cache_gauges(self) -> tuple[int, int]:
        oldest = self.trie.oldest_access()
        return self.trie.num_blocks, 0 if oldest is None else self.trie.time - oldest


class RadixAllocation(Allocation):
    """One sequence's blocks. It holds `node`, whose path is the first part of its table.

    A commit may replace written blocks by others of equal content. A step in flight may still read the old blocks:
    they stay unchanged until a later step writes them.
    """

    __slots__ = ("_hashes", "_num_inserted", "_root", "node")

    _allocator: RadixAllocator

    def __init__(
        self,
        allocator: RadixAllocator,
        root: BlockHash,
        hashes: list[BlockHash],
        block_ids: list[BlockId],
        num_found: int,
        node: RadixNode,
    ) -> None:
        """Take over the holds on `node` and on `block_ids`; the first `num_found` are in the trie."""
        super().__init__(allocator, block_ids, num_found * allocator.block_size)
        self.node = node
        self._root = root
        self._hashes = hashes
        self._num_inserted = num_found

    def fork(self) -> Self:
        fork = super().fork()
        self._allocator.trie.hold_path(self.node)
        fork._hashes = self._hashes[: self._num_inserted]  # uncomputed tokens may differ
        return fork

    def free(self) -> None:
        super().free()
        self._allocator.trie.release(self.node)

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        first, size, trie = self._num_inserted, self._block_size, self._allocator.trie
        if num_full <= first:
            return
        extend_chain(self._hashes, self._root, token_ids, num_full, size)
        keys = block_keys(token_ids, first, num_full, size)
        block_ids, hashes = self._block_ids[first:num_full], self._hashes[first:num_full]
        above = self.node
        originals, self.node = trie.insert(above, keys, block_ids, hashes)
        trie.hold_path(self.node, above)
        num_known = len(originals)
        self._allocator._store(block_ids[num_known:], hashes[num_known:])
        self._block_ids[first : first + num_known] = originals
        self._allocator._release(block_ids[:num_known])
        self._num_inserted = num_full


def block_keys(token_ids: Sequence[int], start: int, stop: int, block_size: int) -> Sequence[Key]:
    """Return the keys of blocks start..stop-1: a token, or the tuple of a block's tokens."""
    if block_size == 1:
        return token_ids[start:stop]
    positions = range(start * block_size, stop * block_size, block_size)
    return [tuple(token_ids[position : position + block_size]) for position in positions]
