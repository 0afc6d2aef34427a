"""One sequence's hold on the pool of a `HashAllocator`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from cache.allocators.base import Allocation, Allocator
from cache.hashing import extend_chain
from cache.types import BlockHash, BlockId


class ChainAllocator(Allocator):
    """An allocator of hash-chained blocks, as a `HashAllocation` uses it."""

    __slots__ = ("_borrowed",)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._borrowed: set[BlockId] = set()
        """Blocks that came for one sequence, and that no other one has found (see `Allocation.borrow`)."""

    @abstractmethod
    def store(self, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        """Keep held and written blocks findable under these hashes, parents first."""

    @abstractmethod
    def note_links(self, root: BlockHash, hashes: Sequence[BlockHash], first: int, stop: int) -> None:
        """Record the places of blocks `first` to `stop` of a chain."""

    @abstractmethod
    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        """Evict a released table's borrowed blocks before all others, with those after them, which depend on them."""


class HashAllocation(Allocation):
    """One sequence's blocks. The first `_num_stored` are findable under the first of `_hashes`."""

    __slots__ = ("_chains", "_hashes", "_num_stored", "_root")

    def __init__(
        self, allocator: ChainAllocator, root: BlockHash, chain: list[BlockHash], block_ids: list[BlockId], num_hit: int
    ) -> None:
        """Take over the hold on `block_ids`."""
        super().__init__(allocator, block_ids, num_hit * allocator.block_size)
        self._root = root
        self._chains = allocator
        self._hashes = chain
        self._num_stored = num_hit

    def borrow(self, first: int, stop: int) -> None:
        refs = self._chains._refs
        self._chains._borrowed.update([block_id for block_id in self._block_ids[first:stop] if refs[block_id] == 1])

    def free(self, *, is_over: bool = False) -> None:
        super().free(is_over=is_over)
        borrowed = self._chains._borrowed
        if is_over and borrowed:
            self._chains.give_back(self._block_ids)
        elif borrowed and self._num_stored and self._block_ids[self._num_stored - 1] not in borrowed:
            borrowed.difference_update(self._block_ids)  # own blocks follow them, and stay

    def fork(self) -> Self:
        self._chains._borrowed.difference_update(self._block_ids)
        fork = super().fork()
        fork._hashes = self._hashes[: self._num_stored]  # uncomputed tokens may differ
        return fork

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        first = self._num_stored
        if num_full <= first:
            return
        extend_chain(self._hashes, self._root, token_ids, num_full, self._block_size)
        self._chains.note_links(self._root, self._hashes, first, num_full)
        self._chains.store(self._block_ids[first:num_full], self._hashes[first:num_full])
        self._num_stored = num_full

    @property
    def num_filled(self) -> int:
        """The number of leading blocks of the chain that are findable."""
        return self._num_stored

    def fill(self, num_filled: int) -> None:
        """Make the first `num_filled` blocks of a reserved chain findable: their KV is written."""
        self._num_computed = num_filled * self._block_size
        self._commit_blocks((), num_filled)
