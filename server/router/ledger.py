"""Prompts of the past that this gateway tracks without the index. Nothing of it is written to Redis.

    recent    the worker that last computed each block: replaces the index while Redis does not answer
    hits      the prefixes that requests found cached: `server.ops.prefix_tree`

Both share one bound in bytes. The least recently used chain is forgotten first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cache.records import WorkerMember
from cache.types import BlockHash, WorkerIncarnation
from server.router.types import RouteRequest

MAX_BYTES: Final = 64 << 20  # half a million blocks
_BLOCK_BYTES: Final = 120
"""A hash, its entry in a table, and its place in a chain."""
_CHAIN_BYTES: Final = 600  # an estimate, like the next: only `MAX_BYTES` depends on it
_HIT_BYTES: Final = 100  # a worker and a count


@dataclass(slots=True, eq=False)
class Chain:
    """The blocks up to one block, which names it."""

    model: str
    block_size: int
    hashes: Sequence[BlockHash]
    last_s: float = 0.0
    computed_at: WorkerIncarnation | None = None
    num_hits: dict[WorkerIncarnation, int] = field(default_factory=dict)
    """Requests whose match ended here."""

    @property
    def num_bytes(self) -> int:
        return _CHAIN_BYTES + _BLOCK_BYTES * len(self.hashes) + _HIT_BYTES * len(self.num_hits)


class Ledger:
    """Owned by one gateway's scorer."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self.clock = clock
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.chains: dict[BlockHash, Chain] = {}
        """By the last block, the least recently used first."""
        self._recent: dict[BlockHash, Chain] = {}
        """The last chain computed with each block."""

    def computed(self, request: RouteRequest, member: WorkerMember) -> None:
        """Record that the worker holds the prompt's blocks."""
        if not request.hashes:
            return
        chain = self._use(request, member, len(request.hashes))
        chain.computed_at = member.worker_id, member.epoch
        self._recent.update(dict.fromkeys(chain.hashes, chain))
        self._forget()

    def found(self, request: RouteRequest, member: WorkerMember, num_cached_tokens: int) -> None:
        """Count one request and its cached tokens."""
        num_blocks = min(num_cached_tokens // member.block_size, len(request.hashes))
        if num_blocks <= 0:
            return
        chain, incarnation = self._use(request, member, num_blocks), (member.worker_id, member.epoch)
        if incarnation not in chain.num_hits:
            self.num_bytes += _HIT_BYTES
        chain.num_hits[incarnation] = chain.num_hits.get(incarnation, 0) + 1
        self._forget()

    def recent(self, hashes: Sequence[BlockHash]) -> dict[WorkerIncarnation, int]:
        """Return how many blocks of the prompt each worker has: up to the last one that no other computed after it.

        Earlier ones may have been computed elsewhere since, but a worker that has a block has all blocks before it.
        """
        matched: dict[WorkerIncarnation, int] = {}
        for position, block_hash in enumerate(hashes, 1):
            chain = self._recent.get(block_hash)
            if chain is None or chain.computed_at is None:
                break
            matched[chain.computed_at] = position
        return matched

    def _use(self, request: RouteRequest, member: WorkerMember, num_blocks: int) -> Chain:
        """Return the chain of the prompt's first blocks, as the most recently used one."""
        last = request.hashes[num_blocks - 1]
        chain = self.chains.pop(last, None)
        if chain is None:
            chain = Chain(request.model, member.block_size, request.hashes[:num_blocks])
            self.num_bytes += chain.num_bytes
        self.chains[last] = chain
        chain.last_s = self.clock()
        return chain

    def _forget(self) -> None:
        while self.num_bytes > self._max_bytes and len(self.chains) > 1:
            oldest = self.chains.pop(next(iter(self.chains)))
            self.num_bytes -= oldest.num_bytes
            for block_hash in oldest.hashes:
                if self._recent.get(block_hash) is oldest:
                    del self._recent[block_hash]
