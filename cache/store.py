"""The seam for blocks outside of block tables: a worker's pool, and whatever lies below it.

`HashAllocator` is the one store so far, with its blocks in the pool. Host memory, disk and peers come behind the same
protocol: any doubt about a block is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache.types import BlockHash, BlockId


class BlockStore(Protocol):
    """Blocks by their hashes, in the order of a chain. Owned by the engine thread."""

    def find_blocks(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks of the longest prefix of `hashes` that the store has."""

    def hold(self, found: Sequence[BlockId], num_new: int) -> list[BlockId] | None:
        """Load the blocks `found` and take `num_new` others, all held for one block table; None: they do not fit."""

    def store(self, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        """Keep held and written blocks findable under these hashes, parents first."""
