"""Hash-chained blocks, the default allocator: prefixes are found by the hash of their last block.

Full blocks only, prompt and output alike. Nothing is deduplicated, because a table never changes a block: two sequences
that compute the same prefix at the same time keep two copies. A full hit leaves the last block to compute, since at
least one token must be. So a prompt of exactly k blocks finds k - 1.
Source: vLLM v1, KVCacheManager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from cache.allocators.base import Allocator
from cache.block_pool import BlockPool, BlockStore
from cache.block_table import Allocation, num_blocks_for
from cache.hashing import extend_chain, hash_chain
from cache.types import BlockHash, BlockId


class HashAllocator(Allocator):
    """An `Allocator` over a `BlockPool`. Every operation is O(1) for each block it concerns."""

    __slots__ = ("_store",)

    _pool: BlockPool

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        pool = BlockPool(num_blocks)
        super().__init__(pool, block_size)
        self._store: BlockStore = pool
        """The place where prefixes are found. A tier below the pool would wrap the pool here."""

    def allocate(
        self,
        num_tokens: int,
        token_ids: Sequence[int],
        root: BlockHash,
        *,
        reuse: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> HashAllocation | None:
        if hashes is None:
            hashes = hash_chain(root, token_ids, self._block_size)
        found = self._find(token_ids, hashes) if reuse else []
        num_new = max(0, num_blocks_for(num_tokens, self._block_size) - len(found))
        block_ids = self._store.load(found, num_new)
        if block_ids is None:
            return None
        num_cached_tokens = len(found) * self._block_size
        if reuse:
            self._count_query(len(token_ids), num_cached_tokens)
        return HashAllocation(self, root, list(hashes), block_ids, num_cached_tokens)

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        if hashes is None:
            hashes = hash_chain(root, token_ids, self._block_size)
        return len(self._find(token_ids, hashes)) * self._block_size

    def _find(self, token_ids: Sequence[int], hashes: Sequence[BlockHash]) -> Sequence[BlockId]:
        assert len(hashes) == len(token_ids) // self._block_size, f"{len(hashes)} hashes of {len(token_ids)} tokens"
        leaves_none = len(hashes) * self._block_size == len(token_ids)
        return self._store.find(hashes[:-1] if leaves_none else hashes)


class HashAllocation(Allocation):
    """One sequence's blocks. The first `_num_stored` are findable under the first of `_hashes`."""

    __slots__ = ("_hashes", "_num_stored", "_root", "_store")

    def __init__(
        self,
        allocator: HashAllocator,
        root: BlockHash,
        hashes: list[BlockHash],
        block_ids: list[BlockId],
        num_cached_tokens: int,
    ) -> None:
        """Take over the hold on `block_ids`."""
        size = allocator._block_size
        super().__init__(allocator._pool, allocator._live, size, block_ids, num_cached_tokens)
        self._store = allocator._store
        self._root = root
        self._hashes = hashes
        self._num_stored = num_cached_tokens // size

    def fork(self) -> Self:
        fork = super().fork()
        fork._hashes = self._hashes[: self._num_stored]  # uncomputed tokens may differ
        return fork

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        first = self._num_stored
        if num_full <= first:
            return
        extend_chain(self._hashes, self._root, token_ids, num_full, self._block_size)
        self._store.store(self._block_ids[first:num_full], self._hashes[first:num_full])
        self._num_stored = num_full
