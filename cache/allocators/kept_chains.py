"""Chains that wait in the pool for a pause to end: their blocks are evicted after all others.

Source: segmented LRU (Karedla et al., 1994): one-time use does not push out what is expected back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache.types import NULL_BLOCK, BlockId


@dataclass(frozen=True, slots=True, eq=False)
class KeptChain:
    """A conversation whose next request is expected before `until_s`."""

    num_blocks: int
    end: BlockId
    """Its last block."""
    tip: BlockId
    """The last block of its prompt: a request that finds it ends the pause."""
    until_s: float
    tenant: str


class KeptChains:
    """The tree of blocks that chains keep, and their order: the tenant that keeps most loses its oldest chain.

    Chains share the blocks of a common prefix, so memory is O(1) per kept block.
    """

    __slots__ = ("_by_tenant", "_by_tip", "_lengths", "_next_expiry_s", "_uses", "parents")

    def __init__(self) -> None:
        self.parents: dict[BlockId, BlockId] = {}
        """The block before each kept block; NULL_BLOCK before the first of a chain."""
        self._uses: Counter[BlockId] = Counter()
        """For each kept block, the kept blocks that follow it and the chains that end with it."""
        self._by_tip: dict[BlockId, KeptChain] = {}
        self._by_tenant: dict[str, dict[BlockId, KeptChain]] = {}
        """The oldest of each tenant first."""
        self._lengths: Counter[str] = Counter()
        """Blocks of each tenant's chains: one that two of them share counts twice."""
        self._next_expiry_s = math.inf

    def __iter__(self) -> Iterator[KeptChain]:
        return iter(self._by_tip.values())

    def ended_by(self, block_ids: Sequence[BlockId]) -> list[KeptChain]:
        """Return the chains whose pause a request ends that found these blocks."""
        tips = self._by_tip
        return [tips[block_id] for block_id in block_ids if block_id in tips]

    def expired(self, now_s: float) -> list[KeptChain]:
        """Return the chains to give up, at most once a second."""
        if now_s < self._next_expiry_s:
            return []
        left = [chain.until_s for chain in self if chain.until_s > now_s]
        self._next_expiry_s = max(now_s + 1.0, min(left, default=math.inf))
        return [chain for chain in self if chain.until_s <= now_s]

    def victim(self) -> KeptChain:
        """Return the chain to give up first."""
        tenant = max(self._lengths, key=self._lengths.__getitem__)
        return next(iter(self._by_tenant[tenant].values()))

    def own_blocks(self, chain: KeptChain) -> Iterator[BlockId]:
        """Yield the blocks that no other chain keeps, tail first."""
        block_id = chain.end
        while block_id != NULL_BLOCK and self._uses[block_id] == 1:
            yield block_id
            block_id = self.parents[block_id]

    def add(self, chain: KeptChain, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Keep the blocks of a chain with a new tip. Return those that no other chain keeps."""
        assert chain.tip not in self._by_tip, f"block {chain.tip} is the tip of two chains"
        parents = self.parents
        new = [block_id for block_id in block_ids if block_id not in parents]
        num_shared = len(block_ids) - len(new)  # a kept block's parent is kept
        parent = block_ids[num_shared - 1] if num_shared else NULL_BLOCK
        for block_id in new:
            parents[block_id] = parent
            self._uses[parent] += 1
            parent = block_id
        self._uses[chain.end] += 1
        self._by_tip[chain.tip] = self._by_tenant.setdefault(chain.tenant, {})[chain.tip] = chain
        self._lengths[chain.tenant] += chain.num_blocks
        self._next_expiry_s = min(self._next_expiry_s, chain.until_s)
        return new

    def remove(self, chain: KeptChain) -> list[BlockId]:
        """Give up a chain. Return its blocks that no other chain keeps, tail first."""
        del self._by_tip[chain.tip], self._by_tenant[chain.tenant][chain.tip]
        self._lengths[chain.tenant] -= chain.num_blocks
        if not self._by_tenant[chain.tenant]:
            del self._by_tenant[chain.tenant], self._lengths[chain.tenant]
        lost, parent = list(self.own_blocks(chain)), chain.end
        for block_id in lost:
            parent = self.parents.pop(block_id)
            del self._uses[block_id]
        self._uses[parent] -= 1
        return lost

    def check_integrity(self) -> None:
        """Assert that the tree is that of the chains. Linear."""
        assert +self._uses == Counter([*self.parents.values(), *(chain.end for chain in self)]), "uses of kept blocks"
        assert self._uses.keys() - {NULL_BLOCK} == self.parents.keys(), "kept blocks and their uses differ"
        by_tenant = [chain for chains in self._by_tenant.values() for chain in chains.values()]
        assert Counter(by_tenant) == Counter(self), "chains by tenant"
        assert all(self._by_tenant.values()), "a tenant without chains"
        lengths = {tenant: sum(c.num_blocks for c in chains.values()) for tenant, chains in self._by_tenant.items()}
        assert self._lengths == lengths, "blocks by tenant"
