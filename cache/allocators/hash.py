"""Hash-chained blocks, the default allocator: prefixes are found by the hash of their last block.

Full blocks only, prompt and output alike. Nothing is deduplicated: a table never changes a block it has, so two
sequences that compute the same prefix at the same time keep two copies of it. A full hit leaves the last block to
compute, since at least one token must be; a prompt of exactly k blocks finds k - 1.
Source: vLLM v1, KVCacheManager; `fork` and copy-on-write are Aphrodite's / vLLM v0's (see `cache.block_table`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cache.allocators.allocator_base import AllocatorBase
from cache.block_pool import BlockPool
from cache.block_table import BlockTable, num_blocks_for
from cache.events import BlockEvent
from cache.hashing import hash_chain
from cache.types import BlockHash, BlockId


class HashAllocator(AllocatorBase["HashAllocation"]):
    """`cache.allocators.base.Allocator` over a `BlockPool`. Every operation is O(1) for each block it concerns."""

    __slots__ = ("_pool",)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(block_size)
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

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
    ) -> HashAllocation | None:
        if hashes is None:
            hashes = hash_chain(root, token_ids, self._block_size)
        found = self._find(token_ids, hashes) if reuse else []
        taken = self._pool.acquire(found, max(0, num_blocks_for(num_tokens, self._block_size) - len(found)))
        if taken is None:
            return None
        num_cached_tokens = len(found) * self._block_size
        if reuse:
            self._count_query(len(token_ids), num_cached_tokens)
        return HashAllocation(self, root, list(hashes), [*found, *taken], num_cached_tokens)

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        if hashes is None:
            hashes = hash_chain(root, token_ids, self._block_size)
        return len(self._find(token_ids, hashes)) * self._block_size

    def take_events(self) -> list[BlockEvent]:
        return self._pool.events.take()

    def held(self) -> Iterator[BlockHash]:
        return self._pool.held()

    def check_integrity(self) -> None:
        self._pool.check_integrity([allocation.block_table for allocation in self._live])

    def _find(self, token_ids: Sequence[int], hashes: Sequence[BlockHash]) -> list[BlockId]:
        assert len(hashes) == len(token_ids) // self._block_size, f"{len(hashes)} hashes of {len(token_ids)} tokens"
        leaves_none = len(hashes) * self._block_size == len(token_ids)
        return self._pool.find(hashes[:-1] if leaves_none else hashes)

    def _clear(self) -> None:
        self._pool.clear()

    def _num_cached_blocks(self) -> int:
        return self._pool.num_cached_blocks

    def _evictions(self) -> int:
        return self._pool.evictions

    def _lru_tail_age(self) -> int:
        return self._pool.age_of_next


class HashAllocation(BlockTable):
    """One sequence's blocks, of which the first `_num_registered` are findable under the first of `_hashes`."""

    __slots__ = ("_allocator", "_hashes", "_num_registered", "_root")

    _pool: BlockPool

    def __init__(
        self,
        allocator: HashAllocator,
        root: BlockHash,
        hashes: list[BlockHash],
        block_ids: list[BlockId],
        num_cached_tokens: int,
    ) -> None:
        """Takes over the hold on `block_ids`."""
        super().__init__(allocator._pool, allocator._copies, allocator._block_size, block_ids, num_cached_tokens)
        self._allocator = allocator
        self._root = root
        self._hashes = hashes
        self._num_registered = num_cached_tokens // allocator._block_size
        allocator._live.add(self)

    def fork(self) -> HashAllocation:
        assert not self._is_free, "forked after it was freed"
        self._pool.share(self._block_ids)
        hashes = self._hashes[: self._num_registered]  # what is not computed may become other tokens
        fork = HashAllocation(self._allocator, self._root, hashes, self._block_ids.copy(), self._num_cached_tokens)
        fork._num_computed = self._num_computed
        fork._num_registered = self._num_registered
        return fork

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        first = self._num_registered
        if num_full <= first:
            return
        hashes, size = self._hashes, self._block_size
        if len(hashes) < num_full:
            parent = hashes[-1] if hashes else self._root
            hashes += hash_chain(parent, token_ids[len(hashes) * size : num_full * size], size)
        self._pool.register(self._block_ids[first:num_full], hashes[first:num_full])
        self._num_registered = num_full

    def _release_blocks(self) -> None:
        self._allocator._live.remove(self)
        self._pool.release(self._block_ids)
