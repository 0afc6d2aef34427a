"""The blocks of the pool, read and written one by one while steps run.

Any thread may read findable blocks: no step writes a block before it was evicted, and a reader notices an eviction by
`HashAllocator.num_losses`. Any thread may write the blocks that were reserved for it: none of them is findable.
"""

from __future__ import annotations

from typing import Final, Protocol

from cache.allocators.hash import HashAllocator
from cache.types import BlockHash, BlockId

_MAX_TRIES: Final = 3  # a pool that evicts during each of them is too busy


class Copier(Protocol):
    """Copies one block between the pool and a payload: `worker.attention.block_copier`."""

    num_bytes: int
    """Size of one payload."""

    def new_payload(self) -> memoryview:
        """Return room for one payload, uninitialised; pinned on CUDA."""

    def read(self, block_id: BlockId, payload: memoryview) -> None: ...

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """Copy into the pool. Steps launched after the return see it."""


class PoolBlocks:
    """Reads and writes the blocks of one allocator's pool."""

    def __init__(self, allocator: HashAllocator, copier: Copier) -> None:
        self.allocator = allocator
        self._copier = copier
        self.num_bytes = copier.num_bytes
        """Size of one payload."""
        self.new_payload = copier.new_payload
        self.write = copier.write

    def read(self, block_hash: BlockHash, payload: memoryview) -> bool:
        """Copy a findable block into `payload`. False: it has been evicted."""
        allocator = self.allocator
        for _ in range(_MAX_TRIES):
            num_losses = allocator.num_losses
            block_id = allocator.block_of(block_hash)
            if block_id is None:
                return False
            self._copier.read(block_id, payload)
            if allocator.num_losses == num_losses:
                return True
        return False
