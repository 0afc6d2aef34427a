"""Chains that wait in the pool for a pause to end: their blocks are evicted after all others.

Source: segmented LRU (Karedla et al., 1994): one-time use does not push out what is expected back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache.types import BlockId


@dataclass(frozen=True, slots=True, eq=False)
class KeptChain:
    """The blocks of a conversation whose next request is expected before `until_s`."""

    block_ids: Sequence[BlockId]
    tip: BlockId
    """The last block of its prompt: a request that finds it ends the pause."""
    until_s: float
    tenant: str


class KeptChains:
    """Counts how many chains keep each block, and orders the chains: the tenant that keeps most loses its oldest."""

    __slots__ = ("_by_tenant", "_by_tip", "_lengths", "_next_expiry_s", "counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.counts = [0] * num_blocks
        """The number of chains that keep each block."""
        self.num_blocks = 0
        """Blocks that any chain keeps."""
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
        return [self._by_tip[block_id] for block_id in block_ids if block_id in self._by_tip]

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

    def add(self, chain: KeptChain) -> list[BlockId]:
        """Keep a chain with a new tip. Return its blocks that no other chain keeps."""
        assert chain.tip not in self._by_tip, f"block {chain.tip} is the tip of two chains"
        counts = self.counts
        new = [block_id for block_id in chain.block_ids if not counts[block_id]]
        for block_id in chain.block_ids:
            counts[block_id] += 1
        self.num_blocks += len(new)
        self._by_tip[chain.tip] = self._by_tenant.setdefault(chain.tenant, {})[chain.tip] = chain
        self._lengths[chain.tenant] += len(chain.block_ids)
        self._next_expiry_s = min(self._next_expiry_s, chain.until_s)
        return new

    def remove(self, chain: KeptChain) -> list[BlockId]:
        """Give up a chain. Return its blocks that no other chain keeps, tail first."""
        del self._by_tip[chain.tip], self._by_tenant[chain.tenant][chain.tip]
        self._lengths[chain.tenant] -= len(chain.block_ids)
        if not self._by_tenant[chain.tenant]:
            del self._by_tenant[chain.tenant], self._lengths[chain.tenant]
        counts = self.counts
        for block_id in chain.block_ids:
            counts[block_id] -= 1
        lost = [block_id for block_id in reversed(chain.block_ids) if not counts[block_id]]
        self.num_blocks -= len(lost)
        return lost

    def check_integrity(self) -> None:
        """Assert that the counts are those of the chains. Linear."""
        kept = Counter([block_id for chain in self for block_id in chain.block_ids])
        assert kept == {BlockId(b): count for b, count in enumerate(self.counts) if count}, "counts of kept blocks"
        assert self.num_blocks == len(kept), f"{self.num_blocks} blocks are counted as kept, {len(kept)} are"
        assert all(chain.tip in chain.block_ids for chain in self), "a tip outside its chain"
        by_tenant = [chain for chains in self._by_tenant.values() for chain in chains.values()]
        assert Counter(by_tenant) == Counter(self), "chains by tenant"
        lengths = {tenant: sum(len(c.block_ids) for c in chains.values()) for tenant, chains in self._by_tenant.items()}
        assert self._lengths == lengths, "blocks by tenant"
