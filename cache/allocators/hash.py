"""Hash-chained blocks, the default allocator: prefixes are found by the hash of their last block.

Full blocks only, prompt and output alike. Nothing is deduplicated, because a table never changes a block: two sequences
that compute the same prefix at the same time keep two copies. At least one token must be computed, so a full hit leaves
the last block: a prompt of exactly k blocks finds k - 1.
Source: vLLM v1, KVCacheManager and BlockPool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self, cast

from cache.allocators.base import Allocation, Allocator
from cache.allocators.free_queue import FreeQueue
from cache.events import Removed, Stored
from cache.hashing import extend_chain, hash_chain
from cache.types import NULL_BLOCK, BlockHash, BlockId, ChainLink


class HashAllocator(Allocator):
    """An `Allocator` with lazy eviction. Every operation is O(1) per block.

        refs[b] > 0     the number of block tables that contain b
        refs[b] <= 0    b is free, since time -refs[b]
        hashes[b]       None, or the hash under which b is findable: `cached[hash] == b`, or b is in `copies[hash]`

    A block keeps its hash while it is free and loses it when it is taken again. Blocks of equal content may coexist:
    `cached` names the first copy, `copies` the others.

    The findable hashes are prefix-closed. A block is stored after its parent, and every table that holds a block holds
    a copy of its parent. A table is released tail first, so a parent's last copy leaves the queue after its children.
    """

    __slots__ = ("_cached", "_clock", "_copies", "_free", "_hashes", "_links", "num_losses")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError."""
        super().__init__(num_blocks, block_size)
        self._free = FreeQueue(num_blocks)
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, BlockId] = {}
        self._copies: dict[BlockHash, list[BlockId]] = {}
        self._clock = 1
        self._links: list[ChainLink | None] = [None] * num_blocks
        """The positions of findable blocks in their chains, by id. Those of others are old."""
        self.num_losses = 0
        """Grows after blocks stop being findable and before they are reused.

        A thread reads this number, then `block_of`, then the block. If the number is unchanged, it read the right KV.
        """

    def link(self, block_hash: BlockHash) -> ChainLink | None:
        """Return the position of a findable block in its chain. Any thread may call it."""
        block_id = self._cached.get(block_hash)
        link = None if block_id is None else self._links[block_id]
        return link if link is not None and link.block_hash == block_hash else None  # it may have been evicted since

    def block_of(self, block_hash: BlockHash) -> BlockId | None:
        """Return a findable block. Any thread may call it (see `num_losses`)."""
        return self._cached.get(block_hash)

    def next_victims(self, count: int) -> list[BlockHash]:
        """Return the hashes of the findable blocks among the next `count` to be taken."""
        hashes = [self._hashes[block_id] for block_id in itertools.islice(self._free, count)]
        return [block_hash for block_hash in hashes if block_hash is not None]

    def recent_chains(self, max_blocks: int) -> list[list[ChainLink]]:
        """Return the chains that would be evicted last, the latest first, of `max_blocks` distinct blocks at most."""
        held = [self._hashes[block_id] for block_id, refs in enumerate(self._refs) if refs > 0]
        unheld = [self._hashes[block_id] for block_id in self._free]
        findable = map(self.link, self._cached)
        inner = {link.parent for link in findable if link is not None}
        seen: set[BlockHash] = set()
        chains = []
        for block_hash in (*held, *reversed(unheld)):
            if block_hash is None or block_hash in inner or block_hash in seen:
                continue
            link = self.link(block_hash)
            chain: list[ChainLink] = []
            while link is not None:
                chain.append(link)
                link = self.link(link.parent) if link.depth else None
            new = {link.block_hash for link in chain} - seen
            if len(seen) + len(new) <= max_blocks:  # a chain that is too long leaves the space to others
                seen |= new
                chains.append(chain[::-1])
        return chains

    def reserve(self, root: BlockHash, hashes: Sequence[BlockHash]) -> HashAllocation | None:
        """Hold the findable blocks of a chain, and free blocks for the rest. None: they do not fit, or one is copied.

        Threads fill the free blocks at once, even before an owed copy. `HashAllocation.fill` makes them findable.
        """
        found = self.find_blocks(hashes)
        is_copied = any(self._refs[each] <= 0 for copy in self._owed_copies for each in copy)
        block_ids = None if is_copied else self.hold(found, len(hashes) - len(found))
        return None if block_ids is None else HashAllocation(self, root, list(hashes), block_ids, len(found))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        hashes = hash_chain(root, token_ids, self.block_size) if hashes is None else hashes
        return len(self.find_blocks(self._reusable(token_ids, hashes))) * self.block_size

    def find_held(self, token_ids: Sequence[int], root: BlockHash, hashes: Sequence[BlockHash]) -> int:
        return sum(self._refs[block_id] > 0 for block_id in self.find_blocks(self._reusable(token_ids, hashes)))

    def check_integrity(self) -> None:
        self._free.check_integrity()
        assert [max(refs, 0) for refs in self._refs] == self._occurrences(), (
            "ref counts differ from the occurrences in block tables"
        )
        unheld = {b for b, refs in enumerate(self._refs) if refs <= 0 and b != NULL_BLOCK}
        assert set(self._free) == unheld, "the queue is not what is not held"
        others = self._copies
        copies = {block_hash: [first, *others.get(block_hash, ())] for block_hash, first in self._cached.items()}
        assert others.keys() <= self._cached.keys(), "a copy without a first copy"
        assert all(others.values()), "an empty list of copies"
        findable = {block_id: block_hash for block_hash, ids in copies.items() for block_id in ids}
        assert len(findable) == sum(map(len, copies.values())), "a block is findable under two hashes"
        hashed = {BlockId(b): block_hash for b, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert findable == hashed, "hashed and findable differ"
        assert None not in map(self.link, self._cached), "a findable block has no link"

    def _allocate(
        self, num_tokens: int, token_ids: Sequence[int], root: BlockHash, reuse: bool, chain: Sequence[BlockHash] | None
    ) -> HashAllocation | None:
        chain = hash_chain(root, token_ids, self.block_size) if chain is None else chain
        found = self.find_blocks(self._reusable(token_ids, chain)) if reuse else []
        block_ids = self.hold(found, max(0, self.num_blocks_for(num_tokens) - len(found)))
        return None if block_ids is None else HashAllocation(self, root, list(chain), block_ids, len(found))

    def _reusable(self, token_ids: Sequence[int], hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return the hashes of the full blocks, but leave at least one token to compute."""
        assert len(hashes) == len(token_ids) // self.block_size, f"{len(hashes)} hashes of {len(token_ids)} tokens"
        return hashes[:-1] if len(hashes) * self.block_size == len(token_ids) else hashes

    def find_blocks(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks of the longest cached prefix of `hashes`."""
        cached = self._cached
        if not hashes or hashes[0] not in cached:
            return []
        found = list(map(cached.get, hashes))  # looking up blocks after a miss costs less than a test per block
        num_found = len(found) if all(found) else found.index(None)  # all: block 0 is never findable
        return cast(list[BlockId], found[:num_found])

    def hold(self, found: Sequence[BlockId], num_new: int) -> list[BlockId] | None:
        """Hold the blocks `found` and take `num_new` others, for one block table; None: they do not fit."""
        # The blocks `found` leave the queue first, so a request never evicts its own prefix.
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

    def _take(self, count: int) -> list[BlockId] | None:
        return self.hold((), count)

    def _release(self, block_ids: Sequence[BlockId]) -> None:
        """Release blocks tail first, so that the tail is evicted first."""
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

    def store(self, block_ids: Sequence[BlockId], root: BlockHash, hashes: Sequence[BlockHash], first: int) -> None:
        """Keep held and written blocks findable, parents first: those of the chain from block `first` on."""
        own_hashes, cached = self._hashes, self._cached
        stored = []
        for depth, block_id in enumerate(block_ids, first):
            block_hash = hashes[depth]
            if own_hashes[block_id] is not None:  # a block shared by a fork, stored by the other sequence
                assert own_hashes[block_id] == block_hash, f"block {block_id} is findable under another hash"
                continue
            assert self._refs[block_id] > 0, f"block {block_id} is stored but not held"
            own_hashes[block_id] = block_hash
            self._links[block_id] = ChainLink(block_hash, hashes[depth - 1] if depth else root, depth)
            if block_hash in cached:
                self._copies.setdefault(block_hash, []).append(block_id)
                continue
            cached[block_hash] = block_id
            stored.append(block_hash)
        self._note(Stored, stored)

    def _evict(self, count: int) -> list[BlockId]:
        """Take the next victims. Record Removed for each hash without a block."""
        taken = self._free.pop_first(count)
        refs, hashes, cached, copies = self._refs, self._hashes, self._cached, self._copies
        removed = []
        for block_id in taken:
            refs[block_id] = 1
            block_hash = hashes[block_id]
            if block_hash is None:
                continue
            hashes[block_id] = None
            self._evictions += 1
            if block_hash in copies:
                self._forget_copy(block_id, block_hash)
            else:
                del cached[block_hash]
                removed.append(block_hash)
            self.num_losses += 1  # last: a thread that found the block before sees the change after its read
        self._note(Removed, removed)
        return taken

    def _forget_copy(self, block_id: BlockId, block_hash: BlockHash) -> None:
        copies = (self._cached[block_hash], *self._copies.pop(block_hash))
        self._cached[block_hash], *others = (each for each in copies if each != block_id)
        if others:
            self._copies[block_hash] = others

    def _forget_all(self) -> None:
        assert len(self._free) == self.num_blocks - 1, "cleared while blocks are held"
        self._hashes = [None] * self.num_blocks
        self._cached = {}
        self._copies = {}
        self.num_losses += 1

    def _cache_gauges(self) -> tuple[int, int]:
        victim = next(iter(self._free), NULL_BLOCK)
        free_since = -self._refs[victim]  # 0 for a block never used, and for the null block when none is free
        return len(self._cached), self._clock - free_since if free_since else 0


class HashAllocation(Allocation):
    """One sequence's blocks. The first `num_filled` are findable under the first of `_hashes`."""

    __slots__ = ("_hashes", "_root", "num_filled")

    _allocator: HashAllocator

    def __init__(
        self, allocator: HashAllocator, root: BlockHash, chain: list[BlockHash], block_ids: list[BlockId], num_hit: int
    ) -> None:
        """Take over the hold on `block_ids`."""
        super().__init__(allocator, block_ids, num_hit * allocator.block_size)
        self._root = root
        self._hashes = chain
        self.num_filled = num_hit

    def fork(self) -> Self:
        fork = super().fork()
        fork._hashes = self._hashes[: self.num_filled]  # uncomputed tokens may differ
        return fork

    def _commit_blocks(self, token_ids: Sequence[int], num_full: int) -> None:
        first = self.num_filled
        if num_full <= first:
            return
        extend_chain(self._hashes, self._root, token_ids, num_full, self._block_size)
        self._allocator.store(self._block_ids[first:num_full], self._root, self._hashes, first)
        self.num_filled = num_full

    def fill(self, num_filled: int) -> None:
        """Make the first `num_filled` blocks of a reserved chain findable: their KV is written."""
        self._num_computed = num_filled * self._block_size
        self._commit_blocks((), num_filled)
