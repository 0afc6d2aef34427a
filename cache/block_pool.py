"""The pool of hashed blocks: which tables hold a block, its hash, and which block is evicted next.

Source: vLLM v1, BlockPool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from cache.block_table import Pool, count_occurrences
from cache.free_queue import FreeQueue
from cache.types import NULL_BLOCK, BlockHash, BlockId


class BlockStore(Protocol):
    """A place where an allocator finds blocks by hash: the pool, or the pool and a tier below it.

    A tier (host memory, disk, a peer) wraps the store above it. It finds blocks that continue the prefix there, loads
    them into the pool, and gets every block that is stored. A store is a hint: any doubt about a block is a miss.
    """

    def find(self, hashes: Sequence[BlockHash]) -> Sequence[BlockId]:
        """Return an id of each block of the longest findable prefix of a chain. Changes nothing."""

    def load(self, found: Sequence[BlockId], num_new: int) -> list[BlockId] | None:
        """Hold the blocks `found`, in the pool, and `num_new` others, for one table, which is returned.

        None, and no change: they do not fit.
        """

    def store(self, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        """Make held and written blocks of the pool findable, parents first."""


class BlockPool(Pool):
    """The first `BlockStore`: `find` gives blocks of its own, which `load` only has to hold.

        refs[b] == k > 0    b stands in k block tables                  hashes[b] is None   b is not findable
        refs[b] == -t <= 0  b is in the free queue since time t         otherwise           cached[hashes[b]] == b,
                                                                                            or b is in copies[hashes[b]]

    A block keeps its hash while it is free and loses it when it is taken again (lazy eviction). Blocks of equal content
    may coexist, since tables never change a block: `cached` names the first copy, `copies` the others.

    The findable hashes are prefix-closed. A block is stored after its parent, and every table that holds a block holds
    a copy of its parent. A table is released tail first, so a parent's last copy leaves the queue after its children.
    """

    __slots__ = ("_cached", "_clock", "_copies", "_free", "_hashes", "_refs")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = FreeQueue(num_blocks)
        self._refs = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, BlockId] = {}
        self._copies: dict[BlockHash, list[BlockId]] = {}
        self._clock = 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def lru_tail_age(self) -> int:
        free_since = -self._refs[self._free.first]  # 0 for a block never used, and for the null block when none is free
        return self._clock - free_since if free_since else 0

    def held(self) -> Iterator[BlockHash]:
        return iter(self._cached)  # parents first: a dict keeps its order, and a parent enters before its child

    def find(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        cached = self._cached
        if not hashes or hashes[0] not in cached:
            return []
        found = list(map(cached.get, hashes))  # looking up blocks after a miss costs less than a test per block
        num_found = len(found) if all(found) else found.index(None)  # all: block 0 is never findable
        return cast(list[BlockId], found[:num_found])

    def load(self, found: Sequence[BlockId], num_new: int) -> list[BlockId] | None:
        """See `BlockStore`. The blocks `found` leave the queue first, so a request never evicts its own prefix."""
        refs = self._refs
        unheld = [block_id for block_id in found if refs[block_id] <= 0]
        if len(unheld) + num_new > len(self._free):
            return None
        self._free.remove(unheld)
        if len(unheld) < len(found):
            for block_id in found:
                refs[block_id] = max(refs[block_id], 0) + 1
        else:
            for block_id in unheld:
                refs[block_id] = 1
        self._clock += 1
        return [*found, *self._evict(num_new)]

    def take(self, count: int) -> list[BlockId] | None:
        return self.load((), count)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        refs = self._refs
        for block_id in block_ids:
            assert refs[block_id] > 0, f"block {block_id} is shared but not held"
            refs[block_id] += 1

    def is_shared(self, block_id: BlockId) -> bool:
        return self._refs[block_id] > 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one table's hold on these blocks, given in token order: the tail is queued, hence evicted, first."""
        refs, free_since = self._refs, -self._clock
        freed = []
        for block_id in reversed(block_ids):
            num_refs = refs[block_id]
            if num_refs == 1:
                refs[block_id] = free_since
                freed.append(block_id)
            else:
                assert num_refs > 1, f"block {block_id} is released but not held"
                refs[block_id] = num_refs - 1
        self._free.extend(freed)

    def store(self, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        own_hashes, cached = self._hashes, self._cached
        stored = []
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if own_hashes[block_id] is not None:  # a block shared by a fork, stored by the other sequence
                assert own_hashes[block_id] == block_hash, f"block {block_id} is findable under another hash"
                continue
            assert self._refs[block_id] > 0, f"block {block_id} is stored but not held"
            own_hashes[block_id] = block_hash
            first_copy = cached.setdefault(block_hash, block_id)
            if first_copy == block_id:
                stored.append(block_hash)
            else:
                self._copies.setdefault(block_hash, []).append(block_id)
        self.events.stored(stored)

    def clear(self) -> None:
        assert len(self._free) == self.num_blocks - 1, "cleared while blocks are held"
        self._hashes = [None] * self.num_blocks
        self._cached = {}
        self._copies = {}
        self.events.cleared()

    def check_integrity(self, tables: Sequence[Sequence[BlockId]]) -> None:
        """Assert the invariants above; `tables` are all block tables. Linear."""
        self._free.check_integrity()
        occurrences = count_occurrences(tables, self.num_blocks)
        assert [max(refs, 0) for refs in self._refs] == occurrences, (
            "ref counts differ from the occurrences in block tables"
        )
        free = set(self._free)
        assert free == {b for b, refs in enumerate(self._refs) if refs <= 0 and b != NULL_BLOCK}, "free is not unheld"
        copies = {block_hash: [first, *self._copies.get(block_hash, ())] for block_hash, first in self._cached.items()}
        assert self._copies.keys() <= self._cached.keys(), "a copy without a first copy"
        assert all(self._copies.values()), "an empty list of copies"
        findable = {block_id: block_hash for block_hash, ids in copies.items() for block_id in ids}
        assert len(findable) == sum(map(len, copies.values())), "a block is findable under two hashes"
        hashed = {BlockId(b): block_hash for b, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert findable == hashed, "hashed and findable differ"

    def _evict(self, count: int) -> list[BlockId]:
        taken = self._free.pop_first(count)
        refs, hashes, cached, copies = self._refs, self._hashes, self._cached, self._copies
        removed = []
        for block_id in taken:
            refs[block_id] = 1
            block_hash = hashes[block_id]
            if block_hash is None:
                continue
            hashes[block_id] = None
            self.evictions += 1
            if block_hash in copies:
                self._forget_copy(block_id, block_hash)
            else:
                del cached[block_hash]
                removed.append(block_hash)
        self.events.removed(removed)
        return taken

    def _forget_copy(self, block_id: BlockId, block_hash: BlockHash) -> None:
        others = self._copies[block_hash]
        if self._cached[block_hash] == block_id:
            self._cached[block_hash] = others.pop(0)
        else:
            others.remove(block_id)
        if not others:
            del self._copies[block_hash]
