"""Lists the blocks that a pool or a store holds, from its insides: the product never does."""

from __future__ import annotations

from cache.allocators.base import Allocator
from cache.allocators.hash import HashAllocator
from cache.allocators.radix import RadixAllocator
from cache.stores.base import BlockStore
from cache.types import BlockHash


def cached_hashes(holder: Allocator | BlockStore) -> list[BlockHash]:
    """Return every findable hash, parents before children."""
    match holder:
        case HashAllocator():
            return list(holder._cached)  # a dict keeps its order, and a parent enters before its child
        case RadixAllocator():
            return [block_hash for node in holder.trie.nodes() for block_hash in node.hashes]
        case BlockStore():
            with holder._lock:
                return list(holder._chains._blocks)
    return []
